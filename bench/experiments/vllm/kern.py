"""Kernels of vLLM's steps by time, ours beside Machete."""
import random, sys, os, time
import torch
from lowbit.bench.vllm import Request, answered, started
if __name__ == "__main__":
    impl = sys.argv[1]
    request = Request("Llama-3-8B", (256,), 512, 128, layers=8)
    t = time.time(); llm = started(impl, request); print(impl, "started", round(time.time() - t), flush=True)
    engine, rng = llm.llm_engine, random.Random(0)
    vocab = engine.model_config.get_vocab_size()
    while not os.path.exists("/tmp/turn." + impl.replace(":", "_")): time.sleep(0.2)
    ask = lambda name, output: answered(engine, name, [[rng.randrange(vocab) for _ in range(512)] for _ in range(256)], output)
    ask("warm", 4)
    for r in range(2):
        a = ask(f"t{r}", 64); steps = sorted(a.steps)
        print(f"whole {a.whole:.3f} first {a.first:.3f} step {1e3 * steps[len(steps) // 2]:.3f} ms", flush=True)
    from torch.profiler import ProfilerActivity, profile
    for output in (1, 17):
        with profile(activities=[ProfilerActivity.CUDA]) as p: ask(f"p{output}", output)
        rows = sorted(p.key_averages(), key=lambda r: -r.self_device_time_total)
        total = sum(r.self_device_time_total for r in rows)
        print(f"{impl} output {output}: {total / 1e3:.2f} ms of kernels", flush=True)
        for r in rows[:16]: print(f"  {r.self_device_time_total / 1e3:9.3f} ms {r.count:6d} x {r.self_device_time_total / r.count:9.1f} us  {r.key[:110]}", flush=True)
