"""The large-M mma.sync kernel, one kind of tile at a time, on a GPU. GPUs with wgmma never choose it, so tests call it
directly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.tiles import GemmShape, MmaTile
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops.fragment_gemm import aligned_rows, plan_for
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight
from tests.ops.test_fragment_gemm import OF_BF16, SCHEMES, quantized, quantized_bf16, relative_error
from tests.ops.test_gated_gemm import gated_by

pytestmark = pytest.mark.gpu

A100 = typical_machine(80)
LARGE, SMALL = MmaTile(128, 2, 8, 1, 3, 1), MmaTile(64, 2, 4, 2, 4, 2)
SLICED = [MmaTile(64, 2, 4, 1, 4, 1, warps_k=2), MmaTile(32, 2, 2, 1, 3, 2, warps_k=4)]
"""Tiles whose warps divide K (sliced-K)."""
SHARED = [
    MmaTile(128, 4, 4, 2, 3, 1), MmaTile(64, 4, 4, 2, 2, 3), MmaTile(32, 2, 4, 2, 6, 2), MmaTile(64, 1, 4, 2, 5, 1), *SLICED,
]  # fmt: skip
"""Tiles whose warps have 4 row blocks or 1, and the sliced-K tiles."""


def product(tile, x, w, bias=None, gate="none"):
    """y computed with `tile`, in memory that held NaN."""
    n, k = w.shape
    shape = GemmShape(len(x), n, k, w.scheme.weight.bits)
    plan = plan_for(tile, shape, w.form, x.dtype, bias is not None, A100, gate=gate)
    torch.full((len(x), plan.columns), float("nan"), dtype=x.dtype, device="cuda")  # poisons memory to be reused
    return plan(aligned_rows(x), w.codes, w.scale, w.channel_scale, bias, *workspace(x.device, *plan.workspace))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), [(300, 520, 2048), (77, 1000, 576), (129, 523, 1096), (40, 344, 203)])
def test_against_float64(scheme, dtype, m, n, k):
    """Rows, tokens and K end within a tile. N or K may be no multiple of 8."""
    q = quantized(scheme, n, k)
    w, x = FragmentWeight.pack(q), torch.randn(m, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    reference = mixed_gemm_reference(x, q, bias)
    plain = torch.nn.functional.linear(x, q.dequantize(dtype), bias)
    tiles = [LARGE, SMALL] if w.scheme.weight.bits in (3, 5, 7) else [LARGE, SMALL, *SHARED]
    for tile in tiles:
        y = product(tile, x, w, bias)
        assert relative_error(y, reference) <= 1.5 * relative_error(plain, reference) + 1e-5, tile
        assert torch.equal(y, product(tile, x, w, bias)), "same input, same bits"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_hot_activations_return_the_weights(scheme, dtype):
    q = quantized(scheme, 272, 704)
    columns = torch.randperm(704, device="cuda")[:100]
    x = torch.nn.functional.one_hot(columns, 704).to(dtype)
    expected = q.dequantize(torch.float32)[:, columns].T.to(dtype)
    for tile in (LARGE, SMALL):
        assert torch.equal(product(tile, x, FragmentWeight.pack(q)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", OF_BF16)
def test_scales_in_bf16(scheme, dtype):
    q = quantized_bf16(scheme, 272, 704)
    columns = torch.randperm(704, device="cuda")[:100]
    x = torch.nn.functional.one_hot(columns, 704).to(dtype)
    expected = q.dequantize(torch.float32)[:, columns].T.to(dtype)
    for tile in (LARGE, SMALL):
        assert torch.equal(product(tile, x, FragmentWeight.pack(q)), expected)


@pytest.mark.parametrize("tile", [LARGE, SMALL, *SHARED], ids=str)
def test_splits_in_turn_have_the_same_bits(tile):
    """Serial split-K adds partial sums in a fixed order. There are so many tiles that blocks really wait for each other."""
    q = quantized("w4a16_g128", 4096, 4096)
    w, x = FragmentWeight.pack(q), torch.randn(500, 4096, device="cuda", dtype=torch.float16)
    reference = mixed_gemm_reference(x, q)
    for splits in (2, 3, 8):
        at_once = product(replace(tile, splits=splits), x, w)
        assert relative_error(at_once, reference) <= 5e-4
        for _ in range(3):
            assert torch.equal(product(replace(tile, splits=splits, in_turn=True), x, w), at_once)


def test_tiles_that_do_not_split_k_have_the_same_bits():
    """Without split-K, every tile sums K in order, 16 at a time, so a row's bits do not depend on the batch."""
    q = quantized("w4a16_g128", 1024, 2048)
    w, x = FragmentWeight.pack(q), torch.randn(300, 2048, device="cuda", dtype=torch.float16)
    whole = product(LARGE, x, w)
    for tile in (
        *(tile for tile in SHARED if tile.warps_k == 1),
        SMALL,
        replace(LARGE, token_group=8),
        replace(LARGE, stages=2),
    ):
        for m in (1, 17, 64, 300):
            assert torch.equal(product(replace(tile, splits=1), x[:m], w), whole[:m]), (tile, m)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tile", [LARGE, SMALL, *SHARED], ids=str)
def test_gated(tile, gate):
    for n, k, m in ((1024, 512, 100), (2832, 1096, 300)):
        w = FragmentWeight.pack(q := quantized("w4a16_g128", n, k))
        x, bias = (torch.randn(*size, device="cuda", dtype=torch.float16) for size in ((m, k), (n,)))
        wide = mixed_gemm_reference(x, q) + bias.double()
        expected, honest = gated_by(wide, gate), gated_by(wide.half().double(), gate).half()
        y = product(tile, x, w, bias, gate)
        assert y.shape == (m, n // 2) and relative_error(y, expected) <= 2 * relative_error(honest, expected) + 2e-4


def test_in_graphs_behind_a_kernel_that_writes_x():
    w = FragmentWeight.pack(quantized("w4a16_g128", 1024, 1024))
    x = torch.randn(200, 1024, device="cuda", dtype=torch.float16)
    expected = x
    for _ in range(6):
        expected = product(SMALL, expected * 0.5, w)
        torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        product(SMALL, x, w)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = x
            for _ in range(6):
                y = product(SMALL, y * 0.5, w)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.isfinite(y).all() and torch.equal(y, expected)
