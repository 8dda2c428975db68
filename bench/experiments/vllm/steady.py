"""us a layer of Llama-3-8B's four products (int4 in groups of 128, bf16), replayed for two seconds: ours, Machete, cuBLAS; clock and power."""
import statistics, subprocess, time
import torch
from lowbit.bench.protocol import gaussian, warm_up
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from vllm import _custom_ops as ops
from vllm.scalar_type import scalar_types
B = torch.bfloat16
SHAPES, LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 6
ours, theirs, dense = [], [], []
for i in range(LAYERS):
    for n, k in SHAPES:
        w = (gaussian(n, k, seed=i) / k**0.5).to(B)
        q = rtn(w, "w4a16_g128")
        layer = QuantLinear.from_quant_tensor(q); layer.prepare(B); ours.append(layer)
        c = q.codes.to(torch.int32).reshape(n, k // 8, 8)
        words = sum(c[..., j] << (4 * j) for j in range(8)).to(torch.int32).t().contiguous()
        theirs.append((ops.machete_prepack_B(words.t().contiguous().t(), a_type=B, b_type=scalar_types.uint4b8, group_scales_type=B), q.scale.to(B).t().contiguous()))
        dense.append(w)
def capture(run):
    with torch.inference_mode():
        run(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): run()
    return g
warm_up()
for m in (256, 8192):
    xs = {k: gaussian(m, k, seed=2, dtype=B) for k in (4096, 14336)}
    def mine():
        for layer in ours: layer.multiply(xs[layer.in_features], None)
    def machete():
        for (w, s), (n, k) in zip(theirs, SHAPES * LAYERS): ops.machete_mm(a=xs[k], b_q=w, b_type=scalar_types.uint4b8, b_group_scales=s, b_group_size=128)
    def cublas():
        for w in dense: xs[w.shape[1]] @ w.T
    for name, run in (("ours", mine), ("Machete", machete), ("cuBLAS", cublas), ("ours", mine), ("Machete", machete)):
        g = capture(run)
        time.sleep(0.5)
        watch = subprocess.Popen(["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant,temperature.gpu", "--format=csv,noheader,nounits", "-lms", "200"], stdout=subprocess.PIPE, text=True)
        times, begin = [], time.time()
        while time.time() - begin < 2.0:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
            for mark in marks[:-1]: mark.record(); g.replay()
            marks[-1].record(); torch.cuda.synchronize()
            times += [a.elapsed_time(b) * 1e3 / LAYERS for a, b in zip(marks, marks[1:])]
        watch.terminate(); said = [line.strip() for line in watch.stdout.read().splitlines()]
        print(f"M {m} {name}: first {statistics.median(times[:5]):.1f}, all {statistics.median(times):.1f}, last {statistics.median(times[-20:]):.1f} us a layer; MHz, W, C: {' | '.join(said[1::2])}", flush=True)
        del g
