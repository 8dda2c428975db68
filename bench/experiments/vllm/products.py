"""us of products of Llama-3-8B's layer, int4 in groups of 128, bf16: chosen tile, the next candidates, vLLM's Machete, cuBLAS."""
import statistics
import torch
from lowbit.bench.protocol import Graph, Memory, gaussian, times_in_turn, warm_up
from lowbit.engine.warm_up import compiled
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.mixed_gemm import GemmShape, candidates
from lowbit.kernels.parts.launch import recording
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight, weight_form
from lowbit.quantize import rtn
from vllm import _custom_ops as ops
from vllm.scalar_type import scalar_types
B = torch.bfloat16
here, scheme = machine_of("cuda"), parse_scheme("w4a16_g128")
SHAPES, MS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (64, 256, 512, 2048, 8192)
weights, theirs = {}, {}
for n, k in SHAPES:
    q = rtn((gaussian(n, k, seed=1) / k**0.5).to(B), scheme)
    copies = max(1, min(8, -(-150_000_000 // (n * k // 2))))
    one = FragmentWeight.pack(q)
    weights[n, k] = [(one.codes.clone(), one.scale.clone(), None if one.channel_scale is None else one.channel_scale.clone()) for _ in range(copies)]
    c = q.codes.to(torch.int32).reshape(n, k // 8, 8)
    words = sum(c[..., i] << (4 * i) for i in range(8)).to(torch.int32).t().contiguous()  # [K/8, N]
    packed = ops.machete_prepack_B(words.t().contiguous().t(), a_type=B, b_type=scalar_types.uint4b8, group_scales_type=B)
    theirs[n, k] = [(packed.clone(), q.scale.to(B).t().contiguous()) for _ in range(copies)]
def plans(n, k, m):
    one, shape = weights[n, k][0], GemmShape(m, n, k, 4)
    form = weight_form(scheme, one[1].dtype, None if one[2] is None else one[2].dtype)
    rows = [row for row in candidates(shape, here) if not row.reasons][:4]
    return {("* " if i == 0 else "") + str(row.tile): plan_for(row.tile, shape, form, B, False, here) for i, row in enumerate(rows)}
with recording() as wanted:
    for n, k in SHAPES:
        for m in MS:
            x = torch.empty(m, k, device="cuda", dtype=B)
            for plan in plans(n, k, m).values():
                plan(x, *weights[n, k][0], None, *workspace(x.device, *plan.workspace))
for _ in compiled(wanted, 90): pass
print(len(wanted), "kernels", flush=True)
warm_up()
for n, k in SHAPES:
    dense = torch.randn(n, k, device="cuda", dtype=B) * 0.02
    for m in MS:
        x = gaussian(m, k, seed=2, dtype=B)
        calls = {}
        for name, plan in plans(n, k, m).items():
            work = workspace(x.device, *plan.workspace)
            calls[name] = [lambda plan=plan, work=work, w=w: plan(x, *w, None, *work) for w in weights[n, k]]
        calls["Machete"] = [lambda w=w: ops.machete_mm(a=x, b_q=w[0], b_type=scalar_types.uint4b8, b_group_scales=w[1], b_group_size=128) for w in theirs[n, k]]
        calls["cuBLAS"] = [lambda: x @ dense.T]
        ys = {name: call[0]() for name, call in calls.items()}
        first = next(iter(ys.values())).double()
        off = ((ys["Machete"].double() - first).norm() / first.norm()).item()
        memory = Memory()
        repeats = 4 if m > 1024 else 8
        graphs = {name: Graph((call * 8)[:max(repeats, len(call))], memory) for name, call in calls.items()}
        times = times_in_turn([*graphs.values()], 7, 1)
        us = {name: statistics.median(t) for name, t in zip(graphs, times, strict=True)}
        chosen = next(iter(us.values()))
        print(f"{n} x {k} M {m}: Machete/ours {us['Machete'] / chosen:.3f} off {off:.4f}: " + ", ".join(f"{name} {t:.1f}" for name, t in us.items()), flush=True)
        del graphs, memory
