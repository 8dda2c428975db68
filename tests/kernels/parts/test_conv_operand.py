"""Registers of codes as operand A of an int8 wgmma: the matrix that device code builds is the one that the instruction
reads.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.hardware.mma import wgmma_s8
from lowbit.kernels.parts import conv_operand
from lowbit.kernels.parts.conv_tile import WgmmaConv
from tests.kernels.parts.plain import GL, Array, plain


def bytes_of(text, constraints, inputs, dtype, is_pure, pack):
    """Element numbers of whole registers: register r holds elements r * pack to r * pack + pack - 1."""
    (whole,) = inputs
    return whole * pack + np.arange(pack)


@pytest.mark.parametrize(("warpgroups", "count"), [(1, 4), (2, 8), (1, 16)])
def test_the_matrix_is_what_the_instruction_reads(warpgroups, count):
    tile = WgmmaConv("s8", "s8", None, True, warpgroups, 64, 8 * count, 3)
    names = SimpleNamespace(**vars(GL), inline_asm_elementwise=bytes_of, int8=None)
    join = plain(conv_operand.join_quads, gl=names)
    join.__globals__["join_quads"] = join
    registers = tuple((np.arange(tile.threads) * count + i).view(Array) for i in range(count))
    made = plain(conv_operand.operand_a, gl=names, join_quads=join)(registers, count, tile)
    held = np.arange(tile.threads * count * 4).reshape(warpgroups, 128, count, 4)
    atom = wgmma_s8(64)
    for group in range(warpgroups):
        steps = [atom.a.scatter(held[group][:, 4 * step : 4 * step + 4]) for step in range(count // 4)]
        assert np.array_equal(made[64 * group : 64 * group + 64], np.concatenate(steps, axis=1))


class Ring:
    """The weights' stages in shared memory; a stage is represented by its index."""

    def index(self, piece):
        return SimpleNamespace(permute=lambda order: piece)


@pytest.mark.parametrize(("planes", "wanted"), [(1, [(5, False)]), (2, [(10, False), (11, True)])])
def test_a_tap_of_4_bit_codes_is_two_products(planes, wanted):
    """One product of even channels with one plane of weights, then one of odd channels with the next plane. The first
    overwrites the accumulator.
    """
    started = []

    def mma(a, w, acc, use_acc=True, is_async=False):
        started.append((w, use_acc))
        return acc + 1

    names = {"warpgroup_mma": mma, "operand_a": lambda registers, count, C: registers}
    C = SimpleNamespace(planes=planes, strip=SimpleNamespace(loaded=4))
    assert plain(conv_operand.multiply_tap, gl=GL, **names)(0, False, Ring(), 5, tuple(range(4 * planes)), C) == planes
    assert started == wanted
