"""Fragment order against explicit loops over the fragment formulas of the PTX ISA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.hardware.mma import MMA_M16N8K8_F16, MMA_M16N8K16_F16, MMA_M16N8K32_S8, MMA_M16N8K64_S4, wgmma_f16, wgmma_s8
from lowbit.pack import FragmentOrder, plane_widths, split_planes

from .test_layout import random_codes

F16_ORDER = FragmentOrder(MMA_M16N8K16_F16)


def f16_place(thread: int, register: int, element: int) -> tuple[int, int]:
    """Row and k within a 64 x 64 tile of one element of register 0..15 of a thread: mma.m16n8k16, A operand."""
    warp, lane = divmod(thread, 32)
    step, a = divmod(register, 4)
    return 16 * warp + lane // 4 + 8 * (a % 2), 16 * step + 8 * (a // 2) + 2 * (lane % 4) + element


def s8_place(thread: int, register: int, element: int) -> tuple[int, int]:
    """The same for registers 0..7 of mma.m16n8k32 with 8-bit operands."""
    warp, lane = divmod(thread, 32)
    step, a = divmod(register, 4)
    return 16 * warp + lane // 4 + 8 * (a % 2), 32 * step + 16 * (a // 2) + 4 * (lane % 4) + element


def field(plane: Tensor, tile: tuple[int, int], thread: int, word: int, shift: int, width: int) -> int:
    """A bit field of word 0..width-1 of a thread in a plane of `width` bits."""
    vector, index = divmod(word, 4)
    return (int(plane[tile[0], tile[1], vector, thread, index]) >> shift) & ((1 << width) - 1)


@pytest.mark.parametrize("bits", range(2, 9))
def test_places_of_f16_fields(bits: int) -> None:
    codes = random_codes(64, 128, bits, seed=bits)
    planes = F16_ORDER.pack(codes, bits)
    for width, plane, expected in zip(plane_widths(bits), planes, split_planes(codes, bits), strict=True):
        per_word = 16 // width  # registers of two halves
        for tile_k in range(2):
            for thread in range(0, 128, 7):
                for register in range(16):
                    for element in range(2):
                        word, slot = divmod(register, per_word)
                        row, k = f16_place(thread, register, element)
                        got = field(plane, (0, tile_k), thread, word, 16 * element + width * slot, width)
                        assert got == expected[row, 64 * tile_k + k]


@pytest.mark.parametrize("bits", [4, 8])
def test_places_of_s8_fields(bits: int) -> None:
    codes = random_codes(64, 64, bits)
    (plane,) = FragmentOrder(MMA_M16N8K32_S8).pack(codes, bits)
    for thread in range(128):
        for register in range(8):
            for element in range(4):
                word, slot = divmod(register, 8 // bits)
                row, k = s8_place(thread, register, element)
                assert field(plane, (0, 0), thread, word, 8 * element + bits * slot, bits) == codes[row, k]


def test_eight_bit_words_of_s8_operands_are_the_registers() -> None:
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[9, 4:8] = torch.tensor([0x11, 0x22, 0x33, 0x44])  # group 1, place 1, row + 8: lane 5, register 1
    (plane,) = FragmentOrder(MMA_M16N8K32_S8).pack(codes, 8)
    assert plane[0, 0, 0, 5].tolist() == [0, 0x44332211, 0, 0]
    assert int(plane.count_nonzero()) == 1


def test_one_mask_picks_the_pair_of_one_register() -> None:
    """Lane 6 = group 1, place 2: k = 4, 5 of rows 1 and 9 are its registers a0 and a1."""
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[1, 4:6] = torch.tensor([1, 2])
    codes[9, 4:6] = torch.tensor([3, 4])
    (plane,) = F16_ORDER.pack(codes, 4)
    word = int(plane[0, 0, 0, 6, 0])
    assert word & 0x000F000F == 0x00020001
    assert word & 0x00F000F0 == 0x00400030


def test_k_run_gives_a_thread_neighbouring_k() -> None:
    """With k_run = 8, place t of a group owns k = 8t .. 8t + 7 of each 32: registers count through them in pairs."""
    codes = random_codes(64, 64, 4)
    (plane,) = FragmentOrder(MMA_M16N8K16_F16, k_run=8).pack(codes, 4)
    for thread in range(128):
        row = 16 * (thread // 32) + thread % 32 // 4
        for step in range(4):
            for a in range(4):
                for element in range(2):
                    k = 32 * (step // 2) + 8 * (thread % 4) + 4 * (step % 2) + 2 * (a // 2) + element
                    assert field(plane, (0, 0), thread, step, 16 * element + 4 * a, 4) == codes[row + 8 * (a % 2), k]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_same_fragments_same_bytes(bits: int) -> None:
    """mma.sync k8 and k16 and wgmma hold A alike, so weights packed for one serve the other."""
    codes = random_codes(100, 100, bits)
    for atom in (MMA_M16N8K8_F16, wgmma_f16(8), wgmma_f16(256)):
        other = FragmentOrder(atom)
        assert other == F16_ORDER
        assert all(torch.equal(a, b) for a, b in zip(other.pack(codes, bits), F16_ORDER.pack(codes, bits), strict=True))


def test_other_fragments_are_other_layouts() -> None:
    assert FragmentOrder(wgmma_s8(8)) == FragmentOrder(MMA_M16N8K32_S8)
    assert FragmentOrder(MMA_M16N8K32_S8) != F16_ORDER
    assert FragmentOrder(MMA_M16N8K16_F16, k_run=8) != F16_ORDER
    assert FragmentOrder(MMA_M16N8K16_F16, k_run=2) == F16_ORDER


def test_padding_is_zero_codes() -> None:
    codes = torch.full((3, 5), 15, dtype=torch.uint8)
    (plane,) = F16_ORDER.pack(codes, 4)
    assert plane.shape == (1, 1, 1, 128, 4)
    whole = F16_ORDER.unpack((plane,), 4, (64, 64))
    assert torch.equal(whole[:3, :5], codes)
    assert int(whole.count_nonzero()) == codes.numel()


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"k_run of mma.m16n8k16.f16 is 0 or one of \(2, 4, 8, 16\), got 6"):
        FragmentOrder(MMA_M16N8K16_F16, k_run=6)
    assert FragmentOrder(MMA_M16N8K64_S4).refusals(4, (64, 64)) == ()
    with pytest.raises(ValueError, match=r"operands of mma\.m16n8k64\.s4 have 4 bits"):
        FragmentOrder(MMA_M16N8K64_S4).pack(random_codes(64, 64, 5), 5)
