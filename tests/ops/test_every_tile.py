"""Every tile that is chosen for a real layer, run on that layer, with all rows of y against float64."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.gemm import candidates, choose
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, WgmmaTile
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import fragment_gemm
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight
from lowbit.quantize import rtn

LAYERS = [
    # N, K: Llama-3-8B, Llama-2-13B, Llama-3-70B, and a small one
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (5120, 13824), (27648, 5120), (8192, 8192), (8192, 28672),
    (28672, 8192), (2048, 2048),
]  # fmt: skip
H200 = typical_machine(90)
OLDER = [typical_machine(80), typical_machine(89)]
"""GPUs without wgmma: one with much and one with little shared memory."""
TOKENS = [1, 5, 8, 13, 16, 24, 32, 48, 64, 100, 128, 200, 256, 512, 1024]
SCHEMES = ["w4a16_g128", "w4a16_g128_z", "w4a16_g64_fz", "w4a16_pc", "w3a16_g128", "w6e3m2a16", "w8a16", "w8e4m3a16_b128x128"]


def new_tiles(scheme, invariant=False, machine=H200, kind=object):
    """(n, k, token counts) of the layers at which a tile is chosen for the first time; only tiles of class `kind`."""
    seen, found = set(), []
    for n, k in LAYERS:
        ms = []
        for m in TOKENS:
            tile = choose(GemmShape(m, n, k, parse_scheme(scheme).weight.bits), machine, invariant)
            if tile not in seen and isinstance(tile, kind):
                seen.add(tile)
                ms.append(m)
        if ms:
            found.append((n, k, ms))
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_are_many(scheme):
    """Ensures that the test below covers enough tiles."""
    assert sum(len(ms) for _, _, ms in new_tiles(scheme)) >= 12
    assert {(n, k) for n, k, _ in new_tiles(scheme)} >= {(4096, 4096), (28672, 4096)}


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tile(scheme, dtype, invariant):
    """Runs every tile with a bias."""
    for place, (n, k, ms) in enumerate(new_tiles(scheme, invariant)):
        generator = torch.Generator("cuda").manual_seed(place)
        q = rtn(torch.randn(n, k, device="cuda", generator=generator) * 0.05, scheme)
        w, bias = FragmentWeight.pack(q), torch.randn(n, device="cuda", dtype=dtype, generator=generator)
        plain_w = q.dequantize(dtype)
        for m in ms:
            x = torch.randn(m, k, device="cuda", dtype=dtype, generator=generator)
            torch.full((m, n), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
            y = fragment_gemm(x, w, bias, batch_invariant=invariant).double()
            reference = mixed_gemm_reference(x, q, bias)
            plain = torch.nn.functional.linear(x, plain_w, bias).double()
            of_rows = (y - reference).norm(dim=1) / reference.norm(dim=1)
            honest = (plain - reference).norm(dim=1) / reference.norm(dim=1)
            # The error of a single row varies more than that of all rows.
            assert float(of_rows.max()) <= 2 * float(honest.max()) + 1e-5, (n, k, m)
            assert float(of_rows.mean()) <= 1.5 * float(honest.mean()) + 1e-5, (n, k, m)
        del q, w, plain_w
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a16"])
def test_shares_of_the_last_wave(scheme, dtype):
    """Stream-K with fewer tiles than a wave, several waves, a partial last tile of tokens, and K that ends within an
    iteration.
    """
    machine = machine_of("cuda")
    for place, (m, n, k) in enumerate([(256, 3080, 2048), (700, 5120, 1000), (517, 6144, 1024), (1280, 4616, 640)]):
        generator = torch.Generator("cuda").manual_seed(place)
        q = rtn(torch.randn(n, k, device="cuda", generator=generator) * 0.05, scheme)
        w, bias = FragmentWeight.pack(q), torch.randn(n, device="cuda", dtype=dtype, generator=generator)
        x = torch.randn(m, k, device="cuda", dtype=dtype, generator=generator)
        reference, shape = mixed_gemm_reference(x, q, bias), GemmShape(m, n, k, q.scheme.weight.bits)
        plain = torch.nn.functional.linear(x, q.dequantize(dtype), bias).double()
        honest = float(((plain - reference).norm(dim=1) / reference.norm(dim=1)).max())
        tiles = [row.tile for row in candidates(shape, machine) if not row.reasons]
        for tile in (t for t in tiles if isinstance(t, WgmmaTile) and t.splits == 0):
            plan = plan_for(tile, shape, w.form, dtype, True, machine)
            sums, arrived = workspace(x.device, *plan.workspace)
            torch.full((m, n), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
            y = plan(x, w.codes, w.scale, w.channel_scale, bias, sums.fill_(float("nan")), arrived)
            of_rows = (y.double() - reference).norm(dim=1) / reference.norm(dim=1)
            assert float(of_rows.max()) <= 2 * honest + 1e-5, (tile, shape)
            assert torch.equal(y, plan(x, w.codes, w.scale, w.channel_scale, bias, sums, arrived)), "same input, same bits"
            assert not arrived.any(), (tile, shape)


@pytest.mark.parametrize("machine", OLDER, ids=lambda machine: machine.product)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_are_many_without_wgmma(scheme, machine):
    assert sum(len(ms) for _, _, ms in new_tiles(scheme, machine=machine, kind=MmaTile)) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("machine", OLDER, ids=lambda machine: machine.product)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tile_without_wgmma(scheme, dtype, machine):
    """GPUs without wgmma use tiles of the large-M mma.sync kernel. A full and a partial tile are checked, and equal bits in a
    second run."""
    for place, (n, k, ms) in enumerate(new_tiles(scheme, machine=machine, kind=MmaTile)):
        generator = torch.Generator("cuda").manual_seed(place)
        q = rtn(torch.randn(n, k, device="cuda", generator=generator) * 0.05, scheme)
        w, bias = FragmentWeight.pack(q), torch.randn(n, device="cuda", dtype=dtype, generator=generator)
        plain_w = q.dequantize(dtype)
        for m in ms:
            shape = GemmShape(m, n, k, q.scheme.weight.bits)
            plan = plan_for(choose(shape, machine), shape, w.form, dtype, True, machine)
            x = torch.randn(m, k, device="cuda", dtype=dtype, generator=generator)
            torch.full((m, n), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
            call = x, w.codes, w.scale, w.channel_scale, bias, *workspace(x.device, *plan.workspace)
            made = plan(*call)
            reference = mixed_gemm_reference(x, q, bias)
            plain = torch.nn.functional.linear(x, plain_w, bias).double()
            of_rows = (made.double() - reference).norm(dim=1) / reference.norm(dim=1)
            honest = (plain - reference).norm(dim=1) / reference.norm(dim=1)
            assert float(of_rows.max()) <= 2 * float(honest.max()) + 1e-5, (n, k, m)
            assert float(of_rows.mean()) <= 1.5 * float(honest.mean()) + 1e-5, (n, k, m)
            assert torch.equal(made, plan(*call)), "same input, same bits"
        del q, w, plain_w
        torch.cuda.empty_cache()
