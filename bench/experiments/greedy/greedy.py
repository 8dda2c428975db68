import sys, time, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, AutoTokenizer
from lowbit.engine import Engine, Request
from lowbit.engine.program import DecodeProgram
PROMPTS = ["Write a Python function that returns the n-th Fibonacci number.", "Explain why the sky is blue.", "def quicksort(values):", "List five facts about the Moon.",
  "Once upon a time, in a small village,", "What is the capital of France, and what is it known for?", "Write a haiku about rain.", "Translate to German: The weather is nice today.",
  "SELECT name FROM users WHERE", "The theory of relativity states that"]
def load(which):
    if which == "smollm2":
        from lowbit.demo import cache_folder
        f = str(cache_folder() / "smollm2-135m-instruct")
        return AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(f)
    from transformers import GgufConfig
    m = AutoModelForCausalLM.from_pretrained("/tmp/qwen", gguf_file="qwen.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)).eval()
    return m, AutoTokenizer.from_pretrained("/tmp/qwen", gguf_file="qwen.gguf")
for which in sys.argv[1:]:
    t = time.time(); model, tok = load(which); print(which, f"loaded in {time.time()-t:.0f} s", flush=True)
    ids = [tok(p)["input_ids"] for p in PROMPTS]
    engine = Engine(model, max_concurrent=10, max_length=512, cache_bytes=1 << 30, ends=())if False else Engine(model, max_concurrent=10, max_length=512, cache_bytes=1 << 30)
    print(type(engine.program).__name__, engine.report(), flush=True)
    t = time.time(); done = list(engine.generate([Request(p, 200) for p in ids])); print(f"generated in {time.time()-t:.0f} s", flush=True)
    total = wrong = 0; margins = []
    for r in done:
        drawn = [d.token for d in r.drawn] if hasattr(r, "drawn") else list(r.tokens)
        with torch.inference_mode():
            logits = model(torch.tensor([[*r.prompt, *drawn]])).logits[0, len(r.prompt) - 1 : -1]
        top = logits.topk(2, dim=1)
        miss = top.indices[:, 0] != torch.tensor(drawn)
        margins += [(float(a - b)) for (a, b), m in zip(top.values.tolist(), miss.tolist()) if m]
        total += len(drawn); wrong += int(miss.sum())
    print(f"{which}: {len(done)} prompts, {total} tokens, {wrong} are not Transformers' likeliest; top two apart there by {margins}", flush=True)
    print(repr(tok.decode([d.token for d in done[1].drawn] if hasattr(done[1], 'drawn') else done[1].tokens)[:200]))
