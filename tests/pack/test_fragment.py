"""Fragment order against explicit loops over the fragment formulas of the PTX ISA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.formats import code_values, float_format, int_format
from lowbit.formats.codec import _values
from lowbit.hardware.fields import WORD_GROUPS, field_order
from lowbit.hardware.mma import MMA_M16N8K8_F16, MMA_M16N8K16_F16, MMA_M16N8K32_S8, MMA_M16N8K64_S4, wgmma_f16, wgmma_s8
from lowbit.kernels.cpu.torch_int4 import _values_of_bytes
from lowbit.pack import FragmentOrder
from lowbit.pack.cpu import _column_order, block_rows
from lowbit.pack.fragment import _moves, word_places

from .test_layout import random_codes

F16_ORDER = FragmentOrder(MMA_M16N8K16_F16)


def f16_place(lane: int, register: int, element: int) -> tuple[int, int]:
    """Returns (row, k), within a 16 x 64 tile, of one element of a register 0..15 of a lane, for operand A of mma.m16n8k16."""
    step, a = divmod(register, 4)
    return lane // 4 + 8 * (a % 2), 16 * step + 8 * (a // 2) + 2 * (lane % 4) + element


def s8_place(lane: int, register: int, element: int) -> tuple[int, int]:
    """Returns (row, k), within a 16 x 64 tile, of one element of a register 0..7 of a lane, for operand A of mma.m16n8k32 with
    8-bit operands."""
    step, a = divmod(register, 4)
    return lane // 4 + 8 * (a % 2), 32 * step + 16 * (a // 2) + 4 * (lane % 4) + element


def word_at(plane: Tensor, tile: tuple[int, int], lane: int, word: int, bits: int) -> int:
    """Word 0..bits-1 of a lane. In each word group, the words are ordered by lane."""
    start = 0
    for words in WORD_GROUPS[bits]:
        if word < words:
            return int(plane[tile[0], tile[1], start + lane * words + word]) & 0xFFFFFFFF
        word, start = word - words, start + 32 * words
    raise AssertionError(word)


@pytest.mark.parametrize("fmt", [*(int_format(b) for b in range(2, 9)), float_format(3, 2), float_format(2, 2)], ids=str)
def test_places_of_f16_codes(fmt) -> None:
    bits = fmt.bits
    codes = random_codes(16, 128, bits, seed=bits)
    (plane,) = FragmentOrder(MMA_M16N8K16_F16, fmt).pack(codes, bits)
    fields = field_order(fmt)
    for tile_k in range(2):
        for lane in range(0, 32, 3):
            for register in range(16):
                run, inside = divmod(register, fields.registers)
                for element in range(2):
                    row, k = f16_place(lane, register, element)
                    got = 0
                    for bit, (word, at) in enumerate(fields.places[inside]):
                        whole = word_at(plane, (0, tile_k), lane, run * fields.words + word, bits)
                        got |= (whole >> (at + 16 * element) & 1) << bit
                    assert got == codes[row, 64 * tile_k + k]


@pytest.mark.parametrize("bits", [4, 8])
def test_places_of_s8_fields(bits: int) -> None:
    codes = random_codes(16, 64, bits)
    (plane,) = FragmentOrder(MMA_M16N8K32_S8).pack(codes, bits)
    for lane in range(32):
        for register in range(8):
            for element in range(4):
                word, slot = divmod(register, 8 // bits)
                row, k = s8_place(lane, register, element)
                got = word_at(plane, (0, 0), lane, word, bits) >> (8 * element + bits * slot) & ((1 << bits) - 1)
                assert got == codes[row, k]


def test_eight_bit_words_of_s8_operands_are_the_registers() -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[9, 4:8] = torch.tensor([0x11, 0x22, 0x33, 0x44])  # group 1, thread 1, row + 8: lane 5, register 1
    (plane,) = FragmentOrder(MMA_M16N8K32_S8).pack(codes, 8)
    assert word_at(plane, (0, 0), 5, 1, 8) == 0x44332211
    assert int(plane.count_nonzero()) == 1


def test_one_mask_picks_the_pair_of_one_register() -> None:
    """Lane 6 is thread 2 of group 1: k = 4, 5 of rows 1 and 9 are its registers a0 and a1."""
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[1, 4:6] = torch.tensor([1, 2])
    codes[9, 4:6] = torch.tensor([3, 4])
    (plane,) = F16_ORDER.pack(codes, 4)
    word = word_at(plane, (0, 0), 6, 0, 4)
    assert word & 0x000F000F == 0x00020001
    assert word & 0x00F000F0 == 0x00400030


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_same_fragments_same_bytes(bits: int) -> None:
    """mma.sync with k8 and k16 and wgmma have the same A fragment, so weights packed for one also serve the others."""
    codes = random_codes(100, 100, bits)
    for atom in (MMA_M16N8K8_F16, wgmma_f16(8), wgmma_f16(256)):
        other = FragmentOrder(atom)
        assert other == F16_ORDER
        assert all(torch.equal(a, b) for a, b in zip(other.pack(codes, bits), F16_ORDER.pack(codes, bits), strict=True))


def test_other_fragments_are_other_layouts() -> None:
    assert FragmentOrder(wgmma_s8(8)) == FragmentOrder(MMA_M16N8K32_S8)
    assert FragmentOrder(MMA_M16N8K32_S8) != F16_ORDER
    assert FragmentOrder(MMA_M16N8K16_F16, float_format(3, 2)) != F16_ORDER
    assert FragmentOrder(MMA_M16N8K16_F16, int_format(6)) == F16_ORDER


def test_padding_is_zero_codes() -> None:
    codes = torch.full((3, 5), 15, dtype=torch.uint8)
    (plane,) = F16_ORDER.pack(codes, 4)
    assert plane.shape == (1, 1, 128)
    whole = F16_ORDER.unpack((plane,), 4, (16, 64))
    assert torch.equal(whole[:3, :5], codes)
    assert int(whole.count_nonzero()) == codes.numel()


def test_impossible_orders_are_refused() -> None:
    assert FragmentOrder(MMA_M16N8K64_S4).refusals(4, (64, 64)) == ()
    with pytest.raises(ValueError, match=r"operands of mma\.m16n8k64\.s4 have 4 bits"):
        FragmentOrder(MMA_M16N8K64_S4).pack(random_codes(64, 64, 5), 5)
    with pytest.raises(ValueError, match=r"codes of fp6_e3m2 have 6 bits"):
        FragmentOrder(MMA_M16N8K16_F16, float_format(3, 2)).pack(random_codes(64, 64, 5), 5)


def test_tables_that_are_kept_do_not_follow_the_default_device() -> None:
    """Cached tables are real tensors even if first made under `torch.device("meta")`, where models are built. Otherwise they
    would stay on the meta device for the rest of the process.
    """
    for table in (word_places, _moves, _values, _values_of_bytes, _column_order, block_rows):
        table.cache_clear()
    codes = random_codes(32, 128, 4)
    with torch.device("meta"):
        planes = F16_ORDER.pack(codes, 4)
        values = code_values(int_format(4))
        column_order, of_bytes = _column_order(block_rows()), _values_of_bytes(torch.bfloat16)
    assert torch.equal(F16_ORDER.unpack(planes, 4, (32, 128)), codes) and values.tolist() == list(range(-8, 8))
    assert {each.device.type for each in (column_order, of_bytes, word_places(4))} == {"cpu"}
