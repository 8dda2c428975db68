import os, sys, time
os.environ["EXTRA"] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "extra.py")
sys.path.insert(0, os.environ["SM80"])
sys.argv = ["bench", "none"]
import torch
import bench
bench.SCALED = {}; bench.RATES = []; bench.DENSE = [(128, 256, 32, 8, 4), (128, 128, 32, 4, 4)]
bench.make()
if __name__ == "__main__":
    torch.set_grad_enabled(False)
    t = time.time(); some = bench.wanted()
    if not torch.cuda.is_available():
        print(len(some), "kernels"); raise SystemExit
    for done in bench.compile_all(some, 90): pass
    print(f"{done} kernels compiled, {time.time() - t:.0f} s", flush=True)
    bench.CHECK_END = time.time() + 22
    bench.part(bench.check); print(f"{time.time() - t:.0f} s", flush=True)
    bench.part(bench.measure); print(f"{time.time() - t:.0f} s", flush=True)
