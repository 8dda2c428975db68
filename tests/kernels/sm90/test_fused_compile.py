"""The wgmma kernel with norm, gate and residual epilogues, compiled without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.fused_gemm import chain_candidates
from lowbit.kernels.choose.tiles import GemmShape, WgmmaTile
from lowbit.pack import WeightForm
from tests.kernels.calls import meta, mixed_call
from tests.kernels.sass import compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm90.large_m_gemm import WgmmaPlan
from tests.kernels.sm80.test_fused_compile import epilogue_of
from tests.kernels.sm90.test_compile import check_barriers, check_operands_in_flight, main_loop

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
H200 = typical_machine(90)


def plan_of(end, fmt, m, n, k, group, dtype, bias, parts):
    """The plan for `end` with the first feasible tile of the wgmma kernel. `end` is "residual", "residual of bf16" (the dtype
    of h, independent of x), "norm" or the name of a gate.
    """
    shape, half, form = GemmShape(m, n, k, number_format(fmt).bits), HALVES[dtype], WeightForm(fmt, group, "none", "fp16")
    end, _, other = end.partition(" of ")
    role = end if end in ("residual", "norm") else "gated"
    able = [row.tile for row in chain_candidates(role, shape, H200) if not row.reasons and isinstance(row.tile, WgmmaTile)]
    epilogue = epilogue_of(end, form, bias, parts, other or dtype)
    return WgmmaPlan(shape, able[0], form, half, epilogue, H200.sm_count)


def compiled(end, fmt="int4", m=64, n=4096, k=4096, group=128, dtype="fp16", bias=False, parts=32):
    plan = plan_of(end, fmt, m, n, k, group, dtype, bias, parts)
    x, codes, scale, channel, of_bias, sums, arrived = mixed_call(plan.shape, HALVES[dtype], group, torch.float16)
    product = x, codes, scale, None if group else channel, of_bias if bias else None, sums, arrived
    if end.startswith("residual"):
        h = meta((m, n), torch.bfloat16 if end.endswith("bf16") else HALVES[dtype])
        call = *product, meta((plan.squares_parts, m), torch.float32), h, meta((n,), torch.float32), 1.0
    else:
        call = *product, meta((parts, m), torch.float32), None, None, 1.0, 1.0 / k, 1e-5
    return plan, compile_plan(plan, call, 90, ("y", "scale", "partial"))


@pytest.mark.parametrize(
    ("end", "fmt", "m", "n", "k", "group", "dtype", "bias"),
    [
        ("norm", "int4", 16, 6144, 4096, 128, "fp16", False), ("residual", "int4", 64, 4096, 14336, 128, "bf16", True),
        ("silu", "int4", 64, 28672, 4096, 128, "fp16", False), ("gelu_tanh", "fp6_e3m2", 24, 9728, 896, 0, "bf16", True),
        ("residual", "fp6_e3m2", 16, 4096, 4096, 0, "fp16", False), ("norm", "int8", 64, 128256, 4096, 0, "fp16", False),
        ("residual", "int8", 32, 896, 4864, 0, "fp16", False), ("residual of bf16", "int4", 64, 4096, 4096, 128, "fp16", False),
    ],
)  # fmt: skip
def test_ends(end, fmt, m, n, k, group, dtype, bias):
    """The main loop is unchanged by the epilogue. The epilogue's shared memory is in the kernel's regions; an allocation by
    Triton would move the barriers.
    """
    plan, kernel = compiled(end, fmt, m, n, k, group, dtype, bias)
    assert kernel.stack_bytes <= 32
    assert not any("LDL" in line or "STL" in line for line in main_loop(kernel.lines)), "registers spilled"
    assert kernel.count("HGMMA") == 8 and kernel.count("WARPGROUP.DEPBAR") == 3
    check_operands_in_flight(kernel.lines)
    check_barriers(plan.config, kernel)
    assert kernel.shared_bytes - plan.config.regions.bytes < 256
    assert (kernel.count("UTMASTG") == 2) == end.startswith("residual"), "h and x"
    check_start(kernel.lines, "UTMALDG" if end.startswith("residual") else "LDG", 2 if group else 0)


def check_start(lines, of_end, scales):
    """Math warps load scales before the wait for the previous kernel, and the epilogue's inputs before the wait for x. So both
    loads overlap with a wait.
    """
    product = next(i for i, line in enumerate(lines) if "HGMMA" in line)
    role = lines[max(i for i in range(product) if "USETMAXREG" in lines[i]) : product]
    wait = next(i for i, line in enumerate(role) if "ACQBULK" in line)
    words = next(i for i, line in enumerate(role) if "LDS" in line)
    assert sum("LDG" in line for line in role[:wait]) >= scales
    assert any(of_end in line for line in role[wait:words])


def test_a_block_starts_at_once():
    """Before a block's first copy there is no division, no serial barrier initialisation and no cold descriptor. A block that
    replaces a finished one does this work while its SM is idle.
    """
    for end, fmt in (("silu", "int4"), ("residual", "fp6_e3m2")):
        plan, kernel = compiled(end, fmt, 64, 4096, 4096, 128 if fmt == "int4" else 0)
        role = kernel.lines[next(i for i, line in enumerate(kernel.lines) if "PREEXIT" in line) :]  # the loader warp
        first = next(i for i, line in enumerate(role) if "UTMALDG" in line)
        assert not any("MUFU.RCP" in line for line in role[:first]) and kernel.count("SYNCS.EXCH") <= 4
        descriptors = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", kernel.ptx)
        assert len(descriptors) == plan.config.dequantizer.planes + (3 if end == "residual" else 2)
        assert sorted(re.findall(r"prefetch\.param\.tensormap \[(\w+)\]", kernel.ptx)) == sorted(descriptors)


@pytest.mark.parametrize(
    ("fmt", "group", "tile", "gate"),
    [
        ("int4", 128, WgmmaTile(256, 2, 4, 1, 2), "silu"), ("int4", 128, WgmmaTile(128, 2, 8, 2, 2), "silu"),
        ("fp6_e3m2", 0, WgmmaTile(128, 2, 6, 1, 2), "gelu_tanh"), ("int8", 0, WgmmaTile(64, 4, 4, 1, 2), "silu"),
    ],
    ids=str,
)  # fmt: skip
def test_a_gate_behind_any_number_of_tokens(fmt, group, tile, gate):
    shape, form = GemmShape(1000, 28672, 4096, number_format(fmt).bits), WeightForm(fmt, group, "none", "fp16")
    plan = WgmmaPlan(shape, tile, form, torch.float16, Epilogue(form.channel_scale, False, gate=gate), H200.sm_count)
    x, codes, scale, channel, _, sums, arrived = mixed_call(shape, torch.float16, group, torch.float16)
    kernel = compile_plan(
        plan, (x, codes, scale, None if group else channel, None, sums, arrived), 90, ("y", "scale", "partial")
    )
    assert kernel.stack_bytes <= 32
    assert not any("LDL" in line or "STL" in line for line in main_loop(kernel.lines)), "registers spilled"
    assert kernel.count("HGMMA") == 8 and kernel.count("UTMASTG") == 1
    check_operands_in_flight(kernel.lines)
    check_barriers(plan.config, kernel)
    assert kernel.shared_bytes - plan.config.regions.bytes < 256 and plan.columns == 14336


def test_what_no_end_takes():
    shape, form = GemmShape(64, 4096, 4096, 4), WeightForm("int4", 128, "none", "fp16")
    norm, residual = Epilogue(False, False, 1), Epilogue(False, False, h_type="fp16")
    with pytest.raises(ValueError, match="a norm or residual needs all 64 tokens in one tile"):
        WgmmaPlan(shape, WgmmaTile(32, 2, 8, 1, 2), form, torch.float16, norm, 132)
    with pytest.raises(ValueError, match="waits for itself with less than 4 stages"):
        WgmmaPlan(shape, WgmmaTile(64, 2, 2, 1, 2), form, torch.float16, norm, 132)
    with pytest.raises(ValueError, match="each block has one tile"):
        WgmmaPlan(shape, WgmmaTile(64, 2, 8, 8, 2), form, torch.float16, residual, 132)


def test_arguments_arrive_under_their_names():
    """The plans pass 29 positional values; each must arrive in the kernel parameter of its name."""
    half, float32 = torch.float16, torch.float32
    x, h, gamma, bias = (meta(size, half) for size in ((20, 256), (20, 64), (64,), (64,)))
    weight, squares = (meta((4, 4, 128), torch.int32), meta((4, 2, 8, 2), half), None), meta((5, 20), float32)
    room = meta((1,), float32), meta((1,), torch.int32)
    for end in ("silu", "residual"):
        plan = plan_of(end, "int4", 20, 64, 256, 128, "fp16", True, 5)
        noted, names = [], [param.name for param in plan.launch.function.params]
        plan.launch = lambda *arguments, noted=noted: noted.append(arguments)
        if end == "silu":
            y = plan(x, *weight, bias, *room, squares, None, None, 0.25, 1 / 128, 1e-5)
            own = {"y": y, "squares": squares, "h_desc": None, "gamma": None, "inverse_width": 1 / 128, "eps": 1e-5}
            assert y.shape == (20, 32)
        else:
            following = plan(x, *weight, bias, *room, squares, h, gamma, 0.25)
            own = {"y": following, "squares": squares, "gamma": gamma, "inverse_width": None, "eps": None}
            assert following.shape == (20, 64) and plan.squares_parts == plan.tiles[1]
        given = dict(zip(names, noted[0], strict=True))
        own |= {"channel_scale": None, "bias": bias, "x_factor": 0.25, "partial": room[0], "arrived": room[1], "M": 20, "N": 64}
        own |= {"C": plan.config, "factor": plan.factor, "iterations": 2, "row_blocks": 4, "scale_stride": 16, "last_group": 1}
        assert all(given[name] is value or given[name] == value for name, value in own.items())
        stored = given["y_desc"]
        assert stored.shape == ([20, 32] if end == "silu" else [20, 64])
        assert (given["h_desc"] is None) == (end == "silu")
