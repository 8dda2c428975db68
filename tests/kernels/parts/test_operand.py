"""Registers as operand A: the matrix that device code builds is the one that the instruction reads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.mma import wgmma_f16, wgmma_s8
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.operand import REGISTERS, join, operand_a, register_fence, split_words, words_layout, words_of
from lowbit.pack.fragment import word_places
from tests.kernels.parts.plain import GL, Array, check_operands, plain


def elements_of(text, constraints, inputs, dtype, is_pure, pack):
    """Element numbers of whole registers: register r holds elements r * pack to r * pack + pack - 1."""
    (whole,) = inputs
    assert whole.shape[1] == pack == constraints.count(",")
    return whole * pack + np.arange(pack)


@pytest.mark.parametrize(("atom", "bits"), [(wgmma_f16(64), 16), (wgmma_s8(64), 8)])
def test_the_matrix_is_what_the_instruction_reads(atom, bits):
    elements, warps = 32 // bits, 8
    dequantizer = SimpleNamespace(operand_type=SimpleNamespace(primitive_bitwidth=bits))
    config = SimpleNamespace(
        dequantizer=dequantizer, registers_layout=None, operand_layout=None, threads=256, warps=warps, rows=128
    )  # fmt: skip
    names = SimpleNamespace(**vars(GL), inline_asm_elementwise=elements_of)
    joined = plain(join, gl=GL)
    joined.__globals__["join"] = joined
    registers = tuple((np.arange(256) * REGISTERS + i).view(Array) for i in range(REGISTERS))
    made = plain(operand_a, gl=names, join=joined, OPERAND_REGISTERS=REGISTERS)(registers, config)
    held = np.arange(256 * REGISTERS * elements).reshape(2, 128, REGISTERS, elements)
    for group in range(2):
        steps = [atom.a.scatter(held[group][:, 4 * step : 4 * step + 4]) for step in range(4)]
        assert np.array_equal(made[64 * group : 64 * group + 64], np.concatenate(steps, axis=1))


@pytest.mark.parametrize("fmt", ["int2", "int3", "int4", "int5", "int6", "int7", "int8"])
def test_words_are_those_of_the_lane(fmt):
    """Loading and splitting the planes gives each thread the words that pack/fragment.py wrote for its lane."""
    bits = number_format(fmt).bits
    dequantizer = Dequantizer(fmt, "fp16", 0, "none", "fp16")
    config = SimpleNamespace(dequantizer=dequantizer, warps=4, threads=128, threads_layout=None)
    split = plain(split_words, gl=GL)
    split.__globals__["split_words"] = split
    of_plane = plain(words_of, gl=GL, split_words=split, ptx=lambda write, *numbers: write(*numbers))
    tile = np.arange(32 * bits) + 1000 * np.arange(4)[:, None]
    words = ()
    for p in range(dequantizer.planes):
        start = dequantizer.plane_start(p)
        words += of_plane(tile[:, start : start + 32 * dequantizer.plane_words(p)], config, p)
    places = word_places(bits).numpy()
    for thread in range(128):
        assert [int(word[thread]) for word in words] == [1000 * (thread // 32) + place for place in places[thread % 32]]


@pytest.mark.parametrize("words", [1, 2, 4, 8])
def test_every_word_has_one_thread(words):
    layout = words_layout(8, words)
    bases = np.array(layout.reg_bases + layout.lane_bases + layout.warp_bases)
    numbers = np.arange(2 ** len(bases))
    places = sum((numbers >> i & 1)[:, None] * base for i, base in enumerate(bases))
    assert len({tuple(place) for place in places}) == 8 * 32 * words and (places.max(0) == [7, 32 * words - 1]).all()


def test_registers_are_held():
    check_operands(register_fence(REGISTERS), "=r" + ",r" * (REGISTERS + 1))
    assert register_fence(REGISTERS).count("st.shared.v4.b32") == REGISTERS // 4
