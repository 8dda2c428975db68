"""The table of kernels. One row runs, and every other row gives reasons against itself. The printed kernel is the launched
one."""

from __future__ import annotations

import importlib
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowbit.formats import LowRank, parse_scheme
from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.nn import QuantLinear, convert, make_batch_invariant
from lowbit.ops import (
    KERNELS,
    Problem,
    UnsupportedProblem,
    choose,
    gemm,
    pack_for,
    problem_on,
    quantize_activations,
    rows,
    why_slow,
)
from lowbit.ops.table import describe, instead, warn_slow
from lowbit.pack import OperandWeight
from lowbit.pack.gemm_weight import RowWeight
from lowbit.quantize import rtn

ROOT = Path(__file__).parents[2]
SIXTEEN = ["w4a16_g128", "w3a16_g64", "w6e3m2a16", "w8a16", "w4a16_g32_fz", "w4a16_g128_z", "w8e4m3a16_b128x128"]
EIGHT = ["w8a8", "w8a8_t", "fp8", "fp8_block", "w8e4m3a8e5m2", "w4a8", "w4a8_g128", "w6a8", "w4a8e4m3_g128", "w6e3m2a8e4m3"]
MS = [1, 8, 16, 17, 64, 256, 1024, 4096]
SHAPES = [(8192, 8192), (8192, 28672), (1000, 576), (64, 128), (152064, 896)]


def on_h200(scheme, m=1, shape=(4096, 4096), **options) -> Problem:
    return Problem(parse_scheme(scheme), m, *shape, torch.float16, typical_machine(90), **options)


def test_every_row_names_a_file_and_names_are_one():
    assert all((ROOT / "lowbit" / kernel.file).is_file() for kernel in KERNELS)
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.product)
@pytest.mark.parametrize("scheme", SIXTEEN + EIGHT)
def test_one_row_takes_a_problem_and_the_rest_say_why_not(scheme, machine):
    for m in MS:
        for shape in SHAPES[:3]:
            problem = replace(on_h200(scheme, m, shape), machine=machine)
            taken = [kernel for kernel, reasons in rows(problem) if not reasons]
            assert taken[0] == choose(problem) and all(kernel.is_slow for kernel in taken[1:])
            fp8_too_old = (
                parse_scheme(scheme).activation and "e" in str(parse_scheme(scheme).activation.name) and machine.arch.sm < 89
            )
            assert taken[0].is_slow == bool(fp8_too_old)
            assert bool(why_slow(problem)) == taken[0].is_slow


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("scheme", SIXTEEN + EIGHT)
def test_there_is_a_tile_for_everything(scheme, invariant):
    for m in MS:
        for shape in SHAPES:
            problem = on_h200(scheme, m, shape, batch_invariant=invariant)
            tile, *_ = choose(problem).tile(problem)
            assert "tokens" in tile and describe(problem) == f"{choose(problem).name}, {tile.partition(': ')[0]}"
            older = replace(problem, machine=typical_machine(89))
            assert choose(older).name in ("mma_gemm", "ring_gemm", "plain_scaled_gemm")


def test_sums_of_batch_invariant_tiles_do_not_depend_on_m():
    """For any m, K has the same number of parts, either by split-K or within one block. Small-M tiles divide K over the same
    number of warps. Integer sums are exact, so their number of splits may change."""
    for m in MS:
        assert re.search("wgmma.*(K split 4|4 parts of K in turn)", describe(on_h200("w4a16_g128", m, batch_invariant=True)))
        assert "K split 1" in describe(on_h200("fp8", m, batch_invariant=True))
        older = replace(on_h200("w4a16_g128", m, batch_invariant=True), machine=typical_machine(80))
        assert "x 8 warps" in describe(older) and "K split 1" in describe(older)
    assert any("K split 1" not in describe(on_h200("w8a8", m, (2048, 8192), batch_invariant=True)) for m in MS)


def test_why_the_other_kernel_is_not_it():
    said = {kernel.name: "; ".join(reasons) for kernel, reasons in rows(on_h200("w4a16_g128", 16))}
    assert said["ring_gemm"] == "" and "would take" in said["wgmma_gemm"] and "the other kernel" in said["wgmma_gemm"]
    assert said["scaled_gemm"] == "multiplies 8-bit activations, the scheme has 16 bits"
    assert said["torch_int4"] == "runs on a CPU, x is on a GPU"
    said = {kernel.name: "; ".join(reasons) for kernel, reasons in rows(on_h200("w4a16_g128", 64))}
    assert said["wgmma_gemm"] == "" and said["ring_gemm"] == "is not for M 64"
    assert said["mma_gemm"] == "is for GPUs without wgmma, H200 has it"
    older = replace(on_h200("w4a16_g128", 64), machine=typical_machine(80))
    said = {kernel.name: "; ".join(reasons) for kernel, reasons in rows(older)}
    assert said["mma_gemm"] == "" and "would take" in said["ring_gemm"] and "needs the wgmma" in said["wgmma_gemm"]
    unknown = replace(on_h200("w4a16_g128"), machine=None, excluded=("is for sm_80; T4 is sm_75",))
    assert why_slow(unknown) == ("wgmma_gemm: is for sm_80; T4 is sm_75",)


@pytest.mark.parametrize(
    ("scheme", "words", "better"),
    [
        ("w4a8_g64", "groups of multiples of 128, not w4a8_g64", "w4a8_g128"),
        ("w4a16_g40", "groups of the kernels are multiples of 16, got 40", "w4a16_g128"),
        ("w4a8_g128_z", "takes weights without zero points", "w4a8_g128"),
        ("w8a8_g128", "per tensor, per channel or in blocks of 128 x 128", "w8a8"),
    ],
)
def test_slow_layers_say_why_and_what_to_do(scheme, words, better):
    problem = on_h200(scheme)
    assert choose(problem).is_slow and words in "; ".join(why_slow(problem))
    assert str(instead(problem)) == better and not why_slow(replace(problem, scheme=instead(problem)))


def test_a_slow_layer_is_told_in_the_report_and_warned_of_once():
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 64))
    lines = convert(model, "w4a8_g64").lines()
    assert any("decode their weights at every call" in line and "w4a8_g128" in line for line in lines), lines
    assert not any("every call" in line for line in convert(torch.nn.Sequential(torch.nn.Linear(256, 64)), "w4a8_g128").lines())
    warn_slow.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_slow("w4a8_g64", ("take groups of multiples of 128",))
    assert len(seen) == 1 and "several times slower" in str(seen[0].message)


def test_nothing_for_it_lists_everybody():
    with pytest.raises(
        UnsupportedProblem, match=r"(?s)no kernel for w8a8 M 1 .* on a CPU, batch-invariant:.*scaled_torch_int8: sums"
    ):
        choose(Problem(parse_scheme("w8a8"), 1, 64, 64, torch.float16, batch_invariant=True))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", [*SIXTEEN, *EIGHT, "w4a8_g64", "w4a16_g40"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_call_for_every_form(scheme, dtype, device):
    q = rtn(torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).to(device), scheme)
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    w = pack_for(q, dtype)
    form = choose(problem_on(device, q.scheme, 1, q.shape, dtype, scale_dtype=q.scale.dtype)).form
    assert isinstance(w, RowWeight) == (form == "rows") and w.nbytes > 0
    y = gemm(x, w, bias)
    expected = x.double() @ q.dequantize(torch.float64).T + bias.double()
    assert y.shape == (2, 3, 96) and y.dtype == dtype
    limit = 0.06 if q.scheme.activation is not None and "e" in q.scheme.activation.name else 0.02
    assert (y.double() - expected).norm() < limit * expected.norm()
    rowwise = gemm(x, RowWeight.pack(q), bias)
    assert (y.double() - rowwise.double()).norm() < 0.01 * expected.norm()
    if hasattr(w, "unpack"):
        assert torch.equal(w.unpack().codes, q.codes)


def test_what_does_not_fit_a_product_is_refused():
    q = rtn(torch.randn(32, 64), "w4a16_g32")
    with pytest.raises(ValueError, match="x in 16 or 32 bits"):
        gemm(torch.ones(1, 64), pack_for(q, torch.float32), function="silu")
    with pytest.raises(ValueError, match="and no fast_accum"):
        gemm(torch.ones(1, 64), pack_for(q, torch.float32), fast_accum=True)
    with pytest.raises(UnsupportedProblem, match="no product that is batch-invariant"):
        gemm(torch.ones(1, 64), pack_for(q, torch.float32), batch_invariant=True)
    with pytest.raises(UnsupportedProblem, match="batch_invariant"):
        pack_for(q, torch.float32, batch_invariant=True)
    layer = QuantLinear.from_quant_tensor(q)
    layer(torch.ones(1, 64))
    layer.batch_invariant = True
    with pytest.raises(UnsupportedProblem, match="batch.invariant"):
        layer(torch.ones(1, 64))
    eight = rtn(torch.randn(32, 64), "w8a8")
    made = quantize_activations(torch.randn(3, 64), "int8", symmetric=False)
    held = pack_for(eight, torch.float32)
    if not isinstance(held, RowWeight):
        with pytest.raises(ValueError, match="holds no sums for zeros of x"):
            gemm(made, held)
        with pytest.raises(ValueError, match=r"takes x \[\.\., 64\]"):
            gemm(torch.ones(3, 32), held)
    with pytest.raises(ValueError, match="activation scale is no part of the product"):
        pack_for(eight.with_input(activation_scale=torch.ones(1)))


def test_fast_sums():
    """fast_accum changes nothing for kernels that gain nothing from it, and is refused together with batch_invariant."""
    q = rtn(torch.randn(32, 256), "fp8_dynamic")
    x, w = torch.randn(3, 256), pack_for(q, torch.float32)
    assert torch.equal(gemm(x, w, fast_accum=True), gemm(x, w))
    made, meta = quantize_activations(x, "fp8_e4m3"), OperandWeight.pack(q)
    given = [
        t if t is None else t.to("meta")
        for t in (made.codes, made.scale, meta.codes, meta.scale, meta.channel_scale, meta.sums)
    ]
    both = {"batch_invariant": True, "fast_accum": True}
    with pytest.raises(ValueError, match="batch_invariant or fast_accum, not both"):
        torch.ops.lowbit.byte_gemm(*given, None, "fp8_dynamic", 32, torch.bfloat16, **both)


def test_what_is_not_batch_invariant_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    convert(model, "w8a16")
    q = model[0].quant_tensor()
    model[0] = QuantLinear.from_quant_tensor(replace(q, low_rank=LowRank(torch.ones(32, 2).half(), torch.ones(2, 64).half())))
    with pytest.raises(UnsupportedProblem, match="0: its low-rank correction is two products of torch"):
        make_batch_invariant(model, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SIXTEEN + EIGHT)
def test_the_row_is_what_is_launched(scheme, monkeypatch):
    seen = []
    for name in ("fragment_gemm", "byte_gemm"):
        module = importlib.import_module(f"lowbit.ops.{name}")
        made = module._plan
        monkeypatch.setattr(module, "_plan", lambda *a, made=made: seen.append(made(*a)) or seen[-1])
    q = rtn(torch.randn(1024, 2048, device="cuda"), scheme)
    w = pack_for(q, torch.float16)
    kinds = {
        "WgmmaPlan": "wgmma_gemm", "RingPlan": "ring_gemm", "ScaledPlan": "scaled_gemm", "NarrowPlan": "narrow_scaled_gemm",
        "PlainPlan": "plain_scaled_gemm", "MmaPlan": "mma_gemm",
    }  # fmt: skip
    for m in MS:
        seen.clear()
        gemm(torch.randn(m, 2048, device="cuda", dtype=torch.float16), w)
        problem = problem_on("cuda", q.scheme, m, q.shape, torch.float16, scale_dtype=q.scale.dtype)
        (plan,) = seen
        assert kinds[type(plan).__name__] == choose(problem).name
        assert not hasattr(plan, "tile") or str(plan.tile) in describe(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SIXTEEN + EIGHT)
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024), (1000, 1184)])
def test_a_row_has_the_same_bits_in_every_batch(scheme, shape):
    n, k = shape
    if scheme == "fp8_block" or "b128" in scheme:
        k = k // 128 * 128
    q = rtn(torch.randn(n, k, device="cuda"), scheme)
    layer = QuantLinear.from_quant_tensor(q)
    layer.batch_invariant = True
    x = torch.randn(2100, k, device="cuda", dtype=torch.float16)
    whole = layer(x)
    for m in (1, 3, 8, 9, 16, 17, 40, 64, 100, 128, 200, 256, 500, 1024, 2048):
        assert torch.equal(layer(x[:m]), whole[:m]), m
        assert torch.equal(layer(x[-m:]), whole[-m:]), m


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w4a16_g32_fz", "w8a16"])
def test_rows_of_the_ring_kernel_have_the_same_bits_in_every_batch(scheme):
    """Runs the small-M tiles that GPUs without wgmma choose for batch invariance at every m."""
    from lowbit.kernels.choose.gemm import choose as choose_tile
    from lowbit.kernels.choose.tiles import GemmShape
    from lowbit.ops.fragment_gemm import plan_for
    from lowbit.ops.workspace import workspace
    from lowbit.pack import FragmentWeight

    n, k, older = 1024, 4096, typical_machine(80)
    q = rtn(torch.randn(n, k, device="cuda"), scheme)
    w = FragmentWeight.pack(q)
    x = torch.randn(300, k, device="cuda", dtype=torch.float16)

    def product(rows):
        shape = GemmShape(len(rows), n, k, q.scheme.weight.bits)
        plan = plan_for(choose_tile(shape, older, True), shape, w.form, torch.float16, False, older)
        return plan(rows, w.codes, w.scale, w.channel_scale, None, *workspace(x.device, *plan.workspace))

    whole = product(x)
    for m in (1, 5, 8, 9, 16, 17, 64, 200):
        assert torch.equal(product(x[:m].clone()), whole[:m]), m


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.product)
@pytest.mark.parametrize("scheme", SIXTEEN[:3] + EIGHT[:2])
def test_one_row_takes_a_layer_of_experts(scheme, machine):
    """Exactly one kernel for experts takes a layer of experts, and no kernel for experts takes a single matrix."""
    for m in MS:
        problem = replace(on_h200(scheme, m, (1536, 2048)), machine=machine, experts=128, top_k=8)
        kernel = choose(problem)
        assert kernel.experts and "8 of 128 experts" in str(problem)
        if parse_scheme(scheme).activation is not None:
            assert kernel.name == "expert_scaled_gemm"
            assert choose(replace(problem, batch_invariant=True)) == kernel
        else:
            many = "expert_wgmma_gemm" if machine.arch.sm == 90 else "expert_mma_gemm"
            # formats with more bits take large tiles from fewer rows on
            few = 256 if parse_scheme(scheme).weight.bits <= 4 else 64
            assert kernel.name in (("expert_ring_gemm",) if m <= few else (many, "expert_mma_gemm"))
            assert describe(problem).startswith(f"{kernel.name}, ")
            others = [reasons for other, reasons in rows(problem) if other.concerns(problem) and not other.is_slow]
            assert sum(not reasons for reasons in others) == 1
        assert not choose(replace(problem, experts=0, top_k=1)).experts
    on_cpu = replace(problem, machine=None)
    assert choose(on_cpu).name.endswith("experts_one_by_one")
