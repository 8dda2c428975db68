import time, torch, lowbit
from lowbit.demo import cache_folder
folder = str(cache_folder() / "smollm2-135m-instruct")
for scheme in (None, "w4a16_g64"):
    for engine in (False, True):
        pipe = lowbit.pipeline(folder, quantization_mode=scheme, dtype=torch.float16, engine=engine, max_concurrent=16)
        for batch in (1, 16):
            prompts = ["Once upon a time, in a small village"] * batch
            n = 256 if engine else 64
            asked = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, ignore_eos=True) if engine else dict(max_new_tokens=n, min_new_tokens=n, do_sample=False)
            try:
                pipe(prompts, **asked)
            except Exception as e:
                asked.pop("min_new_tokens"); print(repr(e)[:200]); pipe(prompts, **asked)
            s = time.perf_counter(); r = pipe(prompts, **asked); took = time.perf_counter() - s
            t = sum(x.generated_length for x in r)
            print(scheme, "engine" if engine else "generate", "batch", batch, f"{t} tokens, {t/took:.0f} tokens/s", flush=True)
        pipe.destroy(); del pipe
