"""Requantization of accumulators: the PTX, run in NumPy, gives the codes of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit.formats.conv import ConvLayer, code_range, requantize
from lowbit.kernels.parts.requantize import LinkedRequantize, Requantize
from lowbit.kernels.reference.conv import conv_reference, fma
from lowbit.pack.conv_layout import GROUP, group_order
from tests.kernels.parts.plain import check_operands
from tests.kernels.parts.threads import bits_of, run

THREADS = 4096


def stored(y, codes):
    """The packed words of codes [THREADS, 8 channels]."""
    bits = 4 if y == "u4" else 8
    fields = codes.astype(np.int64) & ((1 << bits) - 1)
    each = 32 // bits
    return [(fields[:, i : i + each] << bits * np.arange(each)).sum(1).astype(np.uint32) for i in range(0, 8, each)]


@pytest.mark.parametrize(("y", "relu"), [("u4", True), ("s8", True), ("s8", False)])
@pytest.mark.parametrize("residual", [None, "u4", "s8"])
def test_codes_are_those_of_the_definition(y, residual, relu):
    torch.manual_seed(0)
    part = Requantize(y, residual, relu)
    check_operands(part.asm, part.constraints)
    scale = (0.004 if y == "u4" else 0.05) * (torch.rand(GROUP) + 0.5)
    s, b, g = requantize(scale, torch.randn(GROUP), 1.0, 1.0, y, 0.7 if residual else None)
    sums = torch.randint(-4000, 4000, (THREADS, GROUP), dtype=torch.int32)
    low, high = code_range(residual or "s8")
    added = torch.randint(low, high + 1, (THREADS, GROUP), dtype=torch.int32)
    order = list(group_order(y))  # order[i] is the channel in column i
    inputs = [sums[:, c].numpy().view(np.uint32) for c in order]
    inputs += [np.full(THREADS, bits_of(float(values[c])), dtype=np.uint32) for values in (s, b) for c in order]
    if residual:
        inputs += [*stored(residual, added.numpy()), np.full(THREADS, bits_of(g), dtype=np.uint32)]
    t = fma(sums, s, b)
    if residual:
        t = fma(added, torch.tensor(g), t)
    wanted = t.round().clamp(0, 255).int() >> 4 if y == "u4" else t.round().clamp(0 if relu else -128, 127).int()
    assert wanted.unique().numel() > 8
    for word, expected in zip(run(part.asm, inputs, part.words), stored(y, wanted.numpy()), strict=True):
        assert np.array_equal(word, expected)


def test_the_definition_is_the_reference():
    """On one channel, the formula of the test above equals `conv_reference`."""
    s, b, g = requantize(torch.tensor([0.01]), torch.tensor([0.3]), 1.0, 1.0, "u4", 0.7)
    layer = ConvLayer(torch.ones(1, 1, 1, 1, dtype=torch.int8), s, b, "s8", "u4", residual="s8", g=g)
    x, added = torch.arange(-128, 128).reshape(1, 1, 16, 16), torch.arange(-128, 128).flip(0).reshape(1, 1, 16, 16)
    wanted = fma(added, torch.tensor(g), fma(x, s, b)).round().clamp(0, 255).int() >> 4
    assert torch.equal(conv_reference(x, layer, added), wanted)


@pytest.mark.parametrize(("y", "stores", "words"), [("u4", True, 3), ("u4", False, 2), ("s8", True, 2)])
def test_linked_codes_are_bytes(y, stores, words):
    """Codes become operand A of a second product. For u4 they are bytes of 16 times the code, 4 columns per word; for s8 they
    are the stored words."""
    part = LinkedRequantize(y, None, True, stores)
    assert part.words == words
    check_operands(part.asm, part.constraints)
    sums = torch.randint(-4000, 4000, (THREADS, GROUP), dtype=torch.int32)
    s, b = torch.full((GROUP,), 0.06 if y == "u4" else 0.05), torch.full((GROUP,), 7.5)
    inputs = [sums[:, i].numpy().view(np.uint32) for i in range(GROUP)]
    inputs += [np.full(THREADS, bits_of(float(values[0])), dtype=np.uint32) for values in (s, b) for _ in range(GROUP)]
    made = run(part.asm, inputs, words)
    bytes_ = fma(sums, s, b).round().clamp(0, 255 if y == "u4" else 127).int().numpy()
    if y == "u4":
        bytes_ = bytes_ & 0xF0
    for word, columns in zip(made[words - 2 :], (bytes_[:, :4], bytes_[:, 4:]), strict=True):
        assert np.array_equal(word, (columns.astype(np.int64) << 8 * np.arange(4)).sum(1).astype(np.uint32))
