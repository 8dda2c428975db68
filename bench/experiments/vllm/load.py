"""Seconds that vLLM's loader takes for one GPTQ folder of Llama-3-8B's shape: by vLLM's own kernel, by ours with a cold and with a warm cache."""
import json, os, subprocess, sys, threading, queue, time
from pathlib import Path
FOLDER = Path(os.environ.get("LOAD_FOLDER", "/tmp/gptq8b"))
SMALL = "SMALL" in os.environ
H, F, L, V, HEADS, KV = (256, 512, 2, 1024, 4, 2) if SMALL else (4096, 14336, 32, 128256, 32, 8)

def make():
    import torch
    from safetensors.torch import save_file
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    FOLDER.mkdir(parents=True, exist_ok=True)
    D = H // HEADS
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=H, intermediate_size=F, num_hidden_layers=L, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=D, vocab_size=V, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, torch_dtype="bfloat16", hidden_act="silu",
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        quantization_config=dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True, lm_head=False))
    (FOLDER / "config.json").write_text(json.dumps(config))
    bf = torch.bfloat16
    def linear(name, n, k):
        return {name + ".qweight": torch.randint(-2**31, 2**31 - 1, (k // 8, n), dtype=torch.int32, device=dev), name + ".qzeros": torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32, device=dev),
                name + ".scales": (torch.rand(k // 128, n, device=dev) * 2e-3 + 1e-3).to(bf), name + ".g_idx": torch.arange(k, dtype=torch.int32, device=dev) // 128}
    shards, index = [], {}
    first = {"model.embed_tokens.weight": torch.randn(V, H, device=dev, dtype=bf) * 0.02, "lm_head.weight": torch.randn(V, H, device=dev, dtype=bf) * 0.02, "model.norm.weight": torch.ones(H, dtype=bf)}
    def write(number, tensors):
        name = f"model-{number:05d}.safetensors"
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, FOLDER / name, metadata={"format": "pt"})
        index.update({k: name for k in tensors})
    write(0, first); del first
    step = max(1, L // 4)
    for s in range(0, L, step):
        part = {}
        for i in range(s, s + step):
            p = f"model.layers.{i}."
            part |= linear(p + "self_attn.q_proj", H, H) | linear(p + "self_attn.k_proj", KV * D, H) | linear(p + "self_attn.v_proj", KV * D, H) | linear(p + "self_attn.o_proj", H, H)
            part |= linear(p + "mlp.gate_proj", F, H) | linear(p + "mlp.up_proj", F, H) | linear(p + "mlp.down_proj", H, F)
            part |= {p + "input_layernorm.weight": torch.ones(H, dtype=bf), p + "post_attention_layernorm.weight": torch.ones(H, dtype=bf)}
        write(1 + s // step, part)
    (FOLDER / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": index}))
    print("bytes", sum(f.stat().st_size for f in FOLDER.iterdir()), flush=True)

def child(quantization):
    from vllm import LLM
    import vllm.v1.worker.gpu_worker  # noqa
    print("READY", flush=True); sys.stdin.readline()
    import faulthandler
    import signal
    faulthandler.register(signal.SIGUSR1, file=open(f"{os.environ['STACKS']}.{quantization}.{os.environ['WHICH']}.txt", "w"), all_threads=False)
    print("GO", flush=True)
    options = dict(quantization=quantization) if quantization != "own" else {}
    LLM(str(FOLDER), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=640, max_num_seqs=256, max_num_batched_tokens=8192, kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.05,
        cudagraph_capture_sizes=[1, 16, 64, 256], enable_prefix_caching=False, seed=0, **options)
    print("STARTED", flush=True)

def main():
    s = time.time(); make(); print(f"written in {time.time() - s:.0f} s", flush=True)
    runs = [("vLLM's own", "own", "a"), ("ours, cold cache", "lowbit", "b"), ("ours, warm cache, with stacks", "lowbit", "b")]
    made = []
    quantization_of = {name: q for name, q, _ in runs}
    for name, quantization, cache in runs:
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRITON_CACHE_DIR": f"/tmp/load-cache-{cache}", "VLLM_CACHE_ROOT": "/tmp/load-vllm", "WHICH": str(len(made))}
        p = subprocess.Popen([sys.executable, __file__, quantization], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True)
        lines = queue.SimpleQueue()
        def read(p=p, lines=lines):
            for line in p.stdout: lines.put(line)
            lines.put("")
        threading.Thread(target=read, daemon=True).start()
        made.append((name, p, lines))
    tails = {}
    for name, p, lines in made:
        tail = tails[name] = []
        while (line := lines.get()) and "READY" not in line: tail.append(line)
    for name, p, lines in made:
        if p.poll() is not None: print(name, "ended:", *tails[name][-12:]); continue
        s = time.time(); p.stdin.write("\n"); p.stdin.flush(); tail = tails[name]
        while (line := lines.get()) and "GO" not in line: pass
        def poke(p=p):
            while p.poll() is None and time.time() - s < 60:
                time.sleep(0.4); os.kill(p.pid, 10)
        if "stacks" in name: threading.Thread(target=poke, daemon=True).start()
        while line := lines.get():
            tail.append(line)
            if "oading weights took" in line: print("  ", line.strip()[-60:], flush=True)
            if "Model loading took" in line: print(f"{name}: {line.strip()[-60:]}; {time.time() - s:.1f} s since LLM()", flush=True); break
            if "STARTED" in line: break
        else:
            print(name, "ended:", *[t[:300] for t in tail[-25:]])
        os.killpg(p.pid, 9); p.wait()
        time.sleep(0.5)

if __name__ == "__main__":
    child(sys.argv[1]) if len(sys.argv) > 1 else main()
