"""Weights of int4 in groups of 128 without wgmma: our mma.sync and ring kernels beside vLLM's Marlin, one process; us."""
import statistics, sys
from dataclasses import replace
from functools import partial
import torch
import vllm._custom_ops as ops
from vllm.scalar_type import scalar_types
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new, marlin_permute_scales, marlin_make_empty_g_idx
from lowbit.bench.protocol import Graph, Memory, copies_needed, gaussian, l2_bytes, times_in_turn, warm_up
from lowbit.bench import choice
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.mixed_gemm import GemmShape, choose
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight, weight_form
from lowbit.quantize import rtn
from lowbit.engine.warm_up import compiled
from lowbit.kernels.parts.launch import recording

here = machine_of("cuda")
older = replace(here, arch=typical_machine(80).arch)
scheme = parse_scheme("w4a16_g128")
MS = (1, 16, 64, 256, 512, 1024, 4096)
SHAPES = ((8192, 8192), (4096, 4096), (28672, 4096))
with recording() as wanted:  # compiled first, by several processes
    small = FragmentWeight.pack(rtn(torch.randn(16, 128, device="cuda") * 0.02, scheme))
    form = weight_form(scheme, small.scale.dtype, None if small.channel_scale is None else small.channel_scale.dtype)
    for n, k in SHAPES:
        for m in MS:
            for machine in (older, here):
                shape = GemmShape(m, n, k, 4)
                plan = plan_for(choose(shape, machine), shape, form, torch.float16, False, machine)
                x = torch.empty(m, k, device="cuda", dtype=torch.float16)
                codes = torch.empty(n // 16, k // 64 * 128, device="cuda", dtype=torch.int32)
                plan(x, codes, torch.empty(n // 16, k, device="cuda", dtype=small.scale.dtype), torch.empty(n, device="cuda", dtype=small.channel_scale.dtype), None, *workspace(x.device, *plan.workspace))
for _ in compiled(wanted, 90):
    pass
print(len(wanted), "kernels", flush=True)
warm_up()
for n, k in SHAPES:
    q = rtn(gaussian(n, k, seed=1) / k**0.5, scheme)
    w = FragmentWeight.pack(q)
    copies = [w, *(w.clone() for _ in range(copies_needed(w.nbytes, l2_bytes()) - 1))]
    # GPTQ's words: eight k of one channel in an int32 [K / 8, N]
    codes = q.codes.T.reshape(k // 8, 8, n).to(torch.int32)
    words = torch.zeros(k // 8, n, dtype=torch.int32, device="cuda")
    for i in range(8): words |= codes[:, i] << (4 * i)
    none = marlin_make_empty_g_idx(torch.device("cuda"))
    packed = ops.gptq_marlin_repack(words, none, k, n, 4)
    scales = marlin_permute_scales(q.scale.half().T.contiguous(), k, n, 128)
    rivals = [packed, *(packed.clone() for _ in range(len(copies) - 1))]
    room = marlin_make_workspace_new(torch.device("cuda"))
    zp = torch.empty(0, dtype=torch.int, device="cuda")
    def marlin(x, p, reduce):
        return ops.marlin_gemm(x, None, p, None, scales, None, None, zp, none, none, room, scalar_types.uint4b8, size_m=x.shape[0], size_n=n, size_k=k, is_k_full=True, use_atomic_add=False, use_fp32_reduce=reduce, is_zp_float=False)
    form = weight_form(scheme, w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype)
    for m in MS:
        x = gaussian(m, k, seed=2, dtype=torch.float16)
        reference = x[:64].double() @ q.dequantize(torch.float32).double().T
        calls = {}
        for name, machine in (("without wgmma", older), ("here", here)):
            shape = GemmShape(m, n, k, 4)
            tile = choose(shape, machine)
            plan = plan_for(tile, shape, form, torch.float16, False, machine)
            work = workspace(x.device, *plan.workspace)
            calls[f"{name} [{tile}]"] = lambda i, plan=plan, work=work, x=x: plan(x, copies[i].codes, copies[i].scale, copies[i].channel_scale, None, *work)
        calls["Marlin"] = lambda i, x=x: marlin(x, rivals[i], True)
        calls["Marlin, sums of halves"] = lambda i, x=x: marlin(x, rivals[i], False)
        errors = {}
        for name, call in calls.items():
            y = call(0); errors[name] = float((y[:64].double() - reference).norm() / reference.norm())
        us = max(w.nbytes / 4e6, 2.0 * m * n * k / 4e8) + 2
        count = choice.launches(us, len(copies))
        memory = Memory()
        graphs = {name: Graph([partial(call, i % len(copies)) for i in range(count)], memory) for name, call in calls.items()}
        times = times_in_turn([*graphs.values()], 9, 2)
        found = {name: statistics.median(t) for name, t in zip(graphs, times, strict=True)}
        print(f"{n} x {k} M {m}: " + ", ".join(f"{name} {us:.2f}" for name, us in found.items()) + f"; worst error {max(errors.values()):.1e}", flush=True)
        del graphs, memory
