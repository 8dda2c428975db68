"""Microseconds of rotating and quantizing apart, fused, and quantizing alone; torch's product beside the rotation's kernel."""
import math, statistics, sys
import torch
from lowbit.bench.protocol import capture, gaussian, l2_bytes, warm_up
from lowbit.formats import rotate_blocks
from lowbit.ops import quantize_activations, rms_norm_quantize, silu_mul_quantize
from lowbit.ops.channels import rotate_channels

print(torch.cuda.get_device_name(), torch.__version__, flush=True)
warm_up()
name = sys.argv[1] if len(sys.argv) > 1 else "int8"
CALLS = {
    "torch rotates": lambda x, o, w: rotate_blocks(x, 64),
    "rotate": lambda x, o, w: rotate_channels(x, 64),
    "(a) apart": lambda x, o, w: quantize_activations(rotate_channels(x, 64), name).codes,
    "(b) fused": lambda x, o, w: quantize_activations(x, name, hadamard=64).codes,
    "(c) quantize": lambda x, o, w: quantize_activations(x, name).codes,
    "norm": lambda x, o, w: rms_norm_quantize(x, w, 1e-5, name).codes,
    "norm fused": lambda x, o, w: rms_norm_quantize(x, w, 1e-5, name, hadamard=64).codes,
    "silu": lambda x, o, w: silu_mul_quantize(x, o, name).codes,
    "silu fused": lambda x, o, w: silu_mul_quantize(x, o, name, hadamard=64).codes,
}
BYTES = {"torch rotates": 4, "rotate": 4, "silu": 5, "silu fused": 5}
print(f"{'us a call (GB/s)':>14} " + " ".join(f"{n:>16}" for n in CALLS))
for k in (4096, 14336):
    for m in (1, 16, 64, 256, 4096):
        count = min(32, max(2, math.ceil(2 * l2_bytes() / (2 * m * k))))
        xs = [gaussian(m, k, seed=i, dtype=torch.bfloat16).cuda() for i in range(min(count, 4))]
        xs = [xs[i % len(xs)].clone() for i in range(count)]
        others, w = [x.clone() for x in xs], torch.rand(k, device="cuda").bfloat16()
        cells = []
        for n, call in CALLS.items():
            graph = capture([lambda x=x, o=o: call(x, o, w) for x, o in zip(xs, others)])
            us = statistics.median(graph.times_us(8))
            cells.append(f"{us:9.2f} ({m * k * BYTES.get(n, 3) / us / 1e3:4.0f})")
            del graph
        print(f"{m:6} x {k:5} " + " ".join(f"{c:>16}" for c in cells), flush=True)
        torch.cuda.empty_cache()
