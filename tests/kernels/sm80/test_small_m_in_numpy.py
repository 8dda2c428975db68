"""The whole small-M kernel with every epilogue, run in NumPy on packed weights and compared with the reference.

Runs the kernel's device code and PTX thread by thread; models in tests/hardware/emulate.py replace only dequantization and
mma.sync. Outputs of previous kernels hold NaN until the kernel has waited for them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit.hardware.arch import arch_for
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.choose.tiles import DENSE_BITS, GemmShape, RingTile
from lowbit.kernels.reference.fused_gemm import norm_gemm_reference, residual_gemm_reference
from lowbit.kernels.reference.lora import lora_terms_reference, part_of_columns
from lowbit.pack import DENSE_FORM, DenseWeight, FragmentWeight
from lowbit.pack.gated import alternate
from lowbit.quantize import rtn
from tests.hardware.emulate import mma

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import epilogue as epilogue_part
from lowbit.kernels.parts import lora_epilogue, ring_loop, small_m_epilogue
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.lora_epilogue import LoraTerms
from lowbit.kernels.sm80 import small_m_gemm
from lowbit.kernels.sm80.small_m_gemm import RingPlan
from tests.kernels.parts.blocks import Block, Memory, lanes

TILES = [
    RingTile(8, 2, 2, 1, 2, 1), RingTile(8, 3, 1, 2, 1, 2), RingTile(16, 1, 2, 1, 4, 1), RingTile(16, 2, 1, 1, 2, 3),
]  # fmt: skip


def multiply(read, x, sums, acc, C, row_block):
    """Replaces the device function of this name, for scales without zeros."""
    k_block, warps = C.ring.k_block, [slice(first, first + 32) for first in range(0, C.threads, 32)]
    per_group = 8 // max(k_block.groups, 1)
    found = [np.array(one) for one in acc]
    for warp in warps:
        words = [np.asarray(one[warp]).view(np.uint32) for one in read]
        a = words
        if not k_block.dense:
            c, a = k_block.conversion, []
            for first in range(0, k_block.words, c.fields.words):
                a += c.program.run(words[first : first + c.fields.words])
        a = np.stack(a, axis=1)
        tokens = np.stack([np.asarray(one[warp]).view(np.uint32) for one in x], axis=1)
        for n8_tile in range(k_block.n8_tiles):
            for group in range(max(k_block.groups, 1)):
                part = np.zeros((32, 4))
                for i in range(group * per_group, (group + 1) * per_group):
                    b = tokens[:, 16 * n8_tile + 2 * i : 16 * n8_tile + 2 * i + 2]
                    part = mma(MMA_M16N8K16_F16, "f16", a[:, 4 * i : 4 * i + 4], b, part)
                if k_block.groups:
                    scales = words[k_block.words + group].view(np.float16).reshape(-1, 2)
                    part *= np.repeat(scales.astype(np.float64), 2, axis=1)
                for i in range(4):
                    found[k_block.accumulators * row_block + 4 * n8_tile + i][warp] += part[:, i]
    return tuple(lanes(one.astype(np.float32)) for one in found)


def launch(plan, late, call, *outputs):
    """Runs a plan's launch and returns its result. The tensors `late` are outputs of previous kernels. The kernel also writes
    `outputs`.
    """
    noted = []
    plan.launch = lambda *arguments: noted.append(arguments)
    made = plan(*call)
    names = [param.name for param in small_m_gemm.ring_gemm.params]
    given = dict(zip(names, noted[0], strict=True))
    for tensor in (made, *outputs):
        tensor.fill_(float("nan"))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    # NumPy has no bf16. The kernel's bf16 inputs are powers of two, which are exact in float32.
    tensors = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
    places, end = {}, 4096
    for name, tensor in tensors.items():
        places[name], end = end, (end + tensor.nbytes + 511) // 256 * 256
    everything = np.full(end, 255, dtype=np.uint8)  # NaN around all tensors
    for name, tensor in tensors.items():
        at = places[name]
        flat = np.ascontiguousarray(tensor.numpy()).reshape(-1)
        everything[at : at + tensor.nbytes] = flat.view(np.uint8)
        given[name] = Memory(everything[at : at + tensor.nbytes].view(flat.dtype), at)
    hidden = [
        slice(places[name], places[name] + tensors[name].nbytes) for name in tensors if any(tensors[name] is t for t in late)
    ]
    for split in range(plan.grid[2]):
        for i in range(plan.grid[0]):
            held = [everything[place].copy() for place in hidden]
            for place in hidden:
                everything[place] = 255

            def after_wait(held=held):
                for place, values in zip(hidden, held, strict=True):
                    everything[place] = values

            block = Block(
                plan.config, plan.grid, (i, 0, split), epilogue_part, lora_epilogue, small_m_epilogue, ring_loop, small_m_gemm,
                memory=everything, after_wait=after_wait, multiply=multiply,
            )  # fmt: skip
            block.device["ring_gemm"](*given.values())
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(given[name].values).view(tensor.shape))
    return made


def close(y, reference, tolerance=2e-3):
    return float((y.double() - reference.double()).norm() / reference.double().norm()) < tolerance


def made(scheme, n, k, m):
    generator = torch.Generator().manual_seed(n + m)
    q = rtn(torch.randn(n, k, generator=generator) * k**-0.5, scheme)
    w = FragmentWeight.pack(q)
    x, bias = torch.randn(m, k, generator=generator).half(), torch.randn(n, generator=generator).half()
    return q, (w.codes, w.scale, w.channel_scale), w.form, x, bias


def room(plan):
    sums, counters = plan.workspace
    return torch.full((max(sums, 1),), float("nan")), torch.zeros(max(counters, 1), dtype=torch.int32)


SCHEMES = [("w4a16_g128", 512), ("w6e3m2a16", 400), ("w5a16_g64", 648)]
CASES = [[(*SCHEMES[i], TILES[j]) for j in range(4) for i in range(3) if (i + j) % 2 == end] for end in range(2)]
"""Every scheme with every tile. An epilogue does not depend on codes, so each of two epilogues runs with half of the pairs."""


@pytest.mark.parametrize(("scheme", "k", "tile"), CASES[0], ids=str)
def test_norm_and_gate(scheme, k, tile):
    for m, gate, n in ((1, "none", 88), (tile.tokens - 2, "silu", 112), (tile.tokens, "gelu_tanh", 96)):
        q, weight, form, x, bias = made(scheme, n, k, m)
        squares = k * (torch.rand(9, m) + 0.5)
        epilogue = Epilogue(form.channel_scale, True, 9, gate)
        plan = RingPlan(GemmShape(m, n, k, q.scheme.weight.bits), tile, form, torch.float16, epilogue, arch_for(90))
        y = launch(plan, (x, squares), (x, *weight, bias, *room(plan), squares, None, None, 0.5, 1 / k, 1e-3))
        assert close(y, norm_gemm_reference(x, q, squares, bias, width=k, eps=1e-3, gated=gate, x_factor=0.5))


@pytest.mark.parametrize(("scheme", "k", "tile"), CASES[1], ids=str)
def test_residual(scheme, k, tile):
    for m, n in ((1, 96), (tile.tokens - 3, 120), (tile.tokens, 160)):
        q, weight, form, x, bias = made(scheme, n, k, m)
        h, gamma = torch.randn(m, n).half(), torch.rand(n) + 0.5
        added, following, _ = residual_gemm_reference(x, q, h, gamma, bias, x_factor=0.5)
        epilogue = Epilogue(form.channel_scale, True, h_type="fp16")
        plan = RingPlan(GemmShape(m, n, k, q.scheme.weight.bits), tile, form, torch.float16, epilogue, arch_for(90))
        squares = torch.empty(plan.squares_parts, m)
        got = launch(plan, (x, h), (x, *weight, bias, *room(plan), squares, h, gamma, 0.5), squares)
        assert close(h, added) and close(got, following)
        assert torch.allclose(squares.sum(0), h.float().square().sum(1), rtol=1e-5)


@pytest.mark.parametrize(("tile", "sm"), [(tile, 80 + 10 * (i % 2)) for i, tile in enumerate(TILES)], ids=str)
def test_neither(tile, sm):
    q, weight, form, x, bias = made("w4a16_g128", 104, 648, tile.tokens - 1)
    plan = RingPlan(GemmShape(len(x), 104, 648, 4), tile, form, torch.float16, Epilogue(form.channel_scale, True), arch_for(sm))
    y = launch(plan, (x,) if sm == 90 else (), (x, *weight, bias, *room(plan)))
    assert close(y, x.double() @ q.dequantize(torch.float64).T + bias.double())


# ---- adapters of rows in the epilogue


def adapted(x, widths, alternates, rank, splits, adapters=2):
    """((t, b, adapter_of), what they add to each token, LoraTerms) for rows of several adapters and of none."""
    m, n, generator = len(x), sum(widths), torch.Generator().manual_seed(rank)
    t = torch.randn(splits, m, len(widths), rank, generator=generator)
    b = torch.randn(adapters, n, rank, generator=generator).half()
    adapter_of = (torch.arange(m, dtype=torch.int32) + 1) % (adapters + 1) - 1
    t[:, adapter_of < 0] = float("nan")  # as the launch before leaves them
    added = lora_terms_reference(t, b, adapter_of, part_of_columns(widths, alternates))
    return (t, b, adapter_of), added, LoraTerms(widths, alternates, adapters, rank, splits, "fp16")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_adapters(tile):
    k = 512
    for m, gate, widths, rank in ((1, "none", (48, 24, 16), 16), (tile.tokens - 2, "silu", (56, 56), 32)):
        n, alternates = sum(widths), gate != "none"
        q, weight, form, x, bias = made("w4a16_g128", n, k, m)
        lora, added, terms = adapted(x, widths, alternates, rank, 3)
        squares = k * (torch.rand(9, m) + 0.5)
        epilogue = Epilogue(form.channel_scale, True, 9, gate, lora=terms)
        plan = RingPlan(GemmShape(m, n, k, 4), tile, form, torch.float16, epilogue, arch_for(90))
        call = x, *weight, bias, *room(plan), squares, None, None, 0.5, 1 / k, 1e-3, *lora
        y = launch(plan, (x, squares, lora[0]), call)
        expected = norm_gemm_reference(x, q, squares, bias + added, width=k, eps=1e-3, gated=gate, x_factor=0.5)
        assert close(y, expected)
    m, n = tile.tokens, 120
    q, weight, form, x, _ = made("w4a16_g128", n, k, m)
    lora, added, terms = adapted(x, (n,), False, 16, 1)
    h, gamma = torch.randn(m, n).half(), torch.rand(n) + 0.5
    expected, following, _ = residual_gemm_reference(x, q, h, gamma, added, x_factor=0.5)
    epilogue = Epilogue(form.channel_scale, False, h_type="fp16", lora=terms)
    plan = RingPlan(GemmShape(m, n, k, 4), tile, form, torch.float16, epilogue, arch_for(90))
    squares = torch.empty(plan.squares_parts, m)
    call = x, *weight, None, *room(plan), squares, h, gamma, 0.5, None, None, *lora
    got = launch(plan, (x, h, lora[0]), call, squares)
    assert close(h, expected) and close(got, following)
    assert torch.allclose(squares.sum(0), h.float().square().sum(1), rtol=1e-5)


# ---- 16-bit weights as nn.Linear holds them

ROWS = [
    RingTile(8, 2, 2, 1, 2, 1), RingTile(8, 4, 1, 2, 1, 1, 0, 2), RingTile(16, 3, 2, 1, 2, 3, 0, 2),
    RingTile(16, 1, 2, 1, 4, 1), RingTile(8, 3, 1, 1, 4, 1, 0, 1),
]  # fmt: skip
"""Rings with more slots and with fewer slots than a K of 128 needs, down to one slot; split-K; two rows of warps."""


def rows(n, k, m):
    """(weight, x, bias); with a gate, the first half of the weight's rows is gate, the second up."""
    generator = torch.Generator().manual_seed(n + m)
    values = (torch.randn(n, k, generator=generator) * k**-0.5).half()
    return values, torch.randn(m, k, generator=generator).half(), torch.randn(n, generator=generator).half()


def paired(t):
    """The rows of gate and up interleaved as in row blocks."""
    return alternate(*t.chunk(2))


@pytest.mark.parametrize(
    # K takes whole passes over the ring, less than one pass, or a partial last pass. Two of these run for each tile.
    ("tile", "k"), [(tile, k) for i, tile in enumerate(ROWS) for k in np.roll([384, 520, 1024], i)[:2].tolist()], ids=str
)  # fmt: skip
def test_rows_with_norm_and_gate(tile, k):
    for m, gate, n in ((1, "none", 131), (tile.tokens - 2, "silu", 176), (tile.tokens, "none", 160)):
        values, x, bias = rows(n, k, m)
        squares = k * (torch.rand(9, m) + 0.5)
        epilogue = Epilogue(False, True, 9, gate)
        plan = RingPlan(GemmShape(m, n, k, DENSE_BITS), tile, DENSE_FORM, torch.float16, epilogue, arch_for(90))
        y = launch(plan, (x, squares), (x, values, None, None, bias, *room(plan), squares, None, None, 0.5, 1 / k, 1e-3))
        w, b = (values, bias) if gate == "none" else (paired(values), paired(bias))
        assert close(y, norm_gemm_reference(x, DenseWeight(w), squares, b, width=k, eps=1e-3, gated=gate, x_factor=0.5))


@pytest.mark.parametrize("tile", ROWS, ids=str)
def test_rows_with_adapters(tile):
    """All gate rows precede all up rows, and so do the adapters' columns."""
    m, n, k = tile.tokens - 1, 176, 384
    values, x, bias = rows(n, k, m)
    squares = k * (torch.rand(9, m) + 0.5)
    lora, added, terms = adapted(x, (n // 2, n // 2), False, 16, 2)
    epilogue = Epilogue(False, True, 9, "silu", lora=terms)
    plan = RingPlan(GemmShape(m, n, k, DENSE_BITS), tile, DENSE_FORM, torch.float16, epilogue, arch_for(90))
    call = x, values, None, None, bias, *room(plan), squares, None, None, 0.5, 1 / k, 1e-3, *lora
    y = launch(plan, (x, squares, lora[0]), call)
    paired_bias = torch.stack([paired(one) for one in bias + added])
    reference = DenseWeight(paired(values))
    assert close(y, norm_gemm_reference(x, reference, squares, paired_bias, width=k, eps=1e-3, gated="silu", x_factor=0.5))


@pytest.mark.parametrize(("tile", "k"), [(tile, (512, 648)[i % 2]) for i, tile in enumerate(ROWS)], ids=str)
def test_rows_with_the_residual(tile, k):
    for m, n in ((1, 144), (tile.tokens - 3, 130)):
        values, x, bias = rows(n, k, m)
        h, gamma = torch.randn(m, n).half(), torch.rand(n) + 0.5
        added, following, _ = residual_gemm_reference(x, DenseWeight(values), h, gamma, bias, x_factor=0.5)
        epilogue = Epilogue(False, True, h_type="fp16")
        plan = RingPlan(GemmShape(m, n, k, DENSE_BITS), tile, DENSE_FORM, torch.float16, epilogue, arch_for(90))
        squares = torch.empty(plan.squares_parts, m)
        got = launch(plan, (x, h), (x, values, None, None, bias, *room(plan), squares, h, gamma, 0.5), squares)
        assert close(h, added) and close(got, following)
        assert torch.allclose(squares.sum(0), h.float().square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("tile", ROWS, ids=str)
def test_rows_alone(tile):
    values, x, bias = rows(147, 648, tile.tokens - 1)
    plan = RingPlan(
        GemmShape(len(x), 147, 648, DENSE_BITS), tile, DENSE_FORM, torch.float16, Epilogue(False, True), arch_for(80)
    )
    y = launch(plan, (), (x, values, None, None, bias, *room(plan)))
    assert close(y, x.double() @ values.double().T + bias.double())
