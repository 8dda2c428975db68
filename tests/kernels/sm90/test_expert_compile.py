"""The wgmma expert kernel compiled for sm_90a, and checks of its machine code."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.experts import ExpertShape, choose, tile_rows_for, wgmma_tiles
from lowbit.kernels.reference.route import RouterRule
from lowbit.pack import WeightForm
from tests.kernels.calls import expert_call
from tests.kernels.parts.test_compile import ROOT, run
from tests.kernels.sass import batches, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm90.expert_large_m_gemm import ExpertWgmmaPlan
from tests.kernels.sm90.test_compile import HALVES, check_barriers, check_operands_in_flight, main_loop

CASES = [
    ("int4", "bf16", 128, 128, "none", "silu"), ("int3", "fp16", 64, 64, "none", "none"),
    ("uint4", "bf16", 128, 32, "integer", "clamped_swiglu"), ("fp6_e3m2", "bf16", 64, 0, "none", "silu"),
    ("int8", "fp16", 128, 0, "none", "none"), ("fp4_e2m1", "bf16", 64, 32, "none", "clamped_swiglu"),
]  # fmt: skip


LOADER_REGISTERS = 24
"""Registers per loader thread; setmaxnreg gives the rest to the math warps."""


def loader_registers(lines: list[str]) -> list[int]:
    """The register numbers in the loader's code: the lines around the TMA copies, between two setmaxnreg instructions."""
    copies = [i for i, line in enumerate(lines) if "UTMALDG" in line]
    changes = [i for i, line in enumerate(lines) if "USETMAXREG" in line]
    begin, end = max(i for i in changes if i < copies[0]), min(i for i in changes if i > copies[-1])
    return [int(number) for line in lines[begin:end] for number in re.findall(r"\bR(\d+)\b", line)]


def compiled(fmt, dtype, rows, group, zero, gate, weighted=None):
    number, gated = number_format(fmt), gate != "none"
    shape = ExpertShape(1024, 8, 128, 1536, 2048, number.bits, rows, per_slot=not gated)
    subnormal = fmt in ("int3", "int4") and group > 0
    form = WeightForm(fmt, group, zero, "fp16", subnormal, subnormal)
    epilogue = Epilogue(form.channel_scale, gated, gate=gate)
    (tile,) = wgmma_tiles(shape)
    plan = ExpertWgmmaPlan(
        shape, tile, form, HALVES[dtype], epilogue, typical_machine(90), weighted=not gated if weighted is None else weighted
    )
    aligned = ("y", "scale", "channel_scale", "bias", "tiles", "tile_count", "order", "weights")
    return plan.config, compile_plan(plan, expert_call(shape, HALVES[dtype], form), 90, aligned)


@pytest.mark.parametrize("cases", batches(CASES, 3))
def test_main_loop(cases):
    for config, kernel in [compiled(*case) for case in cases]:
        assert kernel.stack_bytes <= 32
        loop = main_loop(kernel.lines)
        assert not any("LDL" in line or "STL" in line for line in loop), "registers spilled"
        products = [line for line in kernel.lines if "HGMMA" in line]
        assert len(products) == 8 and all(re.search(r"HGMMA\S* R\d+, R\d+, gdesc", line) for line in products)
        assert kernel.count("WARPGROUP.DEPBAR") == 3, "a wait for each stage and one at the end: not serialized"
        check_operands_in_flight(kernel.lines)
        check_barriers(config, kernel)
        assert kernel.count("STG.E.128") > 0 and kernel.count("STG.E.U16") == 0, "8 channels at a time"
        assert kernel.count("ACQBULK") == 2, "both roles wait for the kernel before"
        assert max(loader_registers(kernel.lines)) < LOADER_REGISTERS
        assert kernel.shared_bytes <= typical_machine(90).arch.shared_per_block_bytes


def test_a_gated_result_is_multiplied_by_router_weights():
    _, kernel = compiled("fp4_e2m1", "bf16", 64, 32, "none", "silu", weighted=True)
    assert kernel.stack_bytes <= 32


def test_too_few_stages_are_refused():
    shape = ExpertShape(1024, 8, 128, 1536, 2048, 4, 64)
    (tile,) = wgmma_tiles(shape)
    form = WeightForm("int4", 128, "none", "fp16", True, True)
    given = (form, torch.float16, Epilogue(True, False), typical_machine(90))
    with pytest.raises(ValueError, match="waits for itself with less than 4 stages"):
        ExpertWgmmaPlan(shape, type(tile)(64, 2, 2, 1, 1), *given)
    with pytest.raises(ValueError, match="a tile has 64 rows of x, all of K"):
        ExpertWgmmaPlan(shape, type(tile)(128, 2, 4, 1, 1), *given)


def recorded_layer(tokens):
    """Records the kernels of a layer of experts for this number of tokens: router, both products, sum."""
    from lowbit.kernels.elementwise.route import RoutePlan
    from lowbit.kernels.elementwise.sum_slots import SumSlotsPlan
    from lowbit.kernels.parts.launch import recording
    from lowbit.ops.expert_gemm import plan_for

    machine, form, top_k, count = typical_machine(90), WeightForm("int4", 128, "none", "fp16", True, True), 8, 128
    rows = tile_rows_for(tokens, top_k, count, 4)
    with recording() as kernels:
        route = RoutePlan(tokens, count, RouterRule(top_k), False, rows, machine)
        route(torch.empty(tokens, count), None, *(torch.empty(size) for size in route.workspace))
        for n, k, gate in ((1536, 2048, "silu"), (2048, 768, "none")):
            down = gate == "none"
            shape = ExpertShape(tokens, top_k, count, n, k, 4, rows, per_slot=down)
            tile = choose(shape, machine)
            plan = plan_for(tile, shape, form, torch.bfloat16, False, machine, gate=gate, weighted=down, early=down)
            x, codes, scale, channel, _, *rest = expert_call(shape, torch.bfloat16, form)
            plan(x, codes, scale, channel, None, *rest[:-1], rest[-1] if down else None)
        SumSlotsPlan(tokens, top_k, 2048, True, machine)(torch.empty(tokens * top_k, 2048, dtype=torch.bfloat16), None)
    return kernels


def compiled_ahead():
    """Compiles all kernels of a layer, from what a warm-up records of them. Runs in its own process, without a GPU."""
    from lowbit.kernels.parts.compile import compile_one
    from lowbit.kernels.parts.gluon import without_gpu

    few, many = recorded_layer(4), recorded_layer(1024)
    names = [[each.name for each in kernels] for kernels in (few, many)]
    assert names[0].count("expert_ring_gemm") == 2 and names[1].count("expert_wgmma_gemm") == 2, names
    assert all("sum_rows" in each for each in names), names
    assert recorded_layer(4) == few, "the same every time"
    without_gpu(90)
    for each in [*few, *many]:
        compile_one(pickle.loads(pickle.dumps(each)))


def test_a_warm_up_compiles_all_kernels_of_a_layer_ahead(tmp_path):
    run("from tests.kernels.sm90.test_expert_compile import compiled_ahead\ncompiled_ahead()", ROOT, tmp_path)
