"""Every fragment against the formulas of the PTX ISA, copied here independently of the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lowbit.hardware.mma import (
    MMA_M16N8K8_F16,
    MMA_M16N8K16_F16,
    MMA_M16N8K32_FP8,
    MMA_M16N8K32_S8,
    MMA_M16N8K64_S4,
    Digit,
    Fragment,
    MmaAtom,
    merged,
    wgmma_f16,
    wgmma_fp8,
    wgmma_s8,
)

# (groupID, threadID_in_group, i) -> (row, col) of element i, for A and B of each mma.sync shape.
Formula = Callable[[int, int, int], tuple[int, int]]


def a_k8(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


def b_k8(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 2 + i, g


def a_k16(g: int, t: int, i: int) -> tuple[int, int]:
    row = g if 0 <= i < 2 or 4 <= i < 6 else g + 8
    return row, t * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_k16(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 2 + (i & 1) + (8 if i >= 2 else 0), g


def a_k32(g: int, t: int, i: int) -> tuple[int, int]:
    row = g if 0 <= i < 4 or 8 <= i < 12 else g + 8
    return row, t * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_k32(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 4 + (i & 3) + (16 if i >= 4 else 0), g


def a_k64(g: int, t: int, i: int) -> tuple[int, int]:
    row = g if 0 <= i < 8 or 16 <= i < 24 else g + 8
    return row, t * 8 + (i & 7) + (32 if i >= 16 else 0)


def b_k64(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 8 + (i & 7) + (32 if i >= 8 else 0), g


def c_any(g: int, t: int, i: int) -> tuple[int, int]:
    """Returns (row, col) of accumulator element i, for all shapes. i continues through the blocks of 8 columns."""
    return (g if i % 4 < 2 else g + 8), t * 2 + (i & 1) + 8 * (i // 4)


MMA_SYNC: list[tuple[MmaAtom, Formula, Formula]] = [
    (MMA_M16N8K8_F16, a_k8, b_k8),
    (MMA_M16N8K16_F16, a_k16, b_k16),
    (MMA_M16N8K32_S8, a_k32, b_k32),
    (MMA_M16N8K32_FP8, a_k32, b_k32),
    (MMA_M16N8K64_S4, a_k64, b_k64),
]
WGMMA: list[tuple[MmaAtom, Formula]] = [
    (wgmma_f16(8), a_k16),
    (wgmma_f16(24), a_k16),
    (wgmma_f16(256), a_k16),
    (wgmma_s8(64), a_k32),
    (wgmma_fp8(200), a_k32),
]


def assert_formula(fragment: Fragment, formula: Formula) -> None:
    row, col = fragment.coordinates()
    assert row.shape == col.shape == (fragment.threads, fragment.registers, fragment.elements)
    for thread in range(fragment.threads):
        warp, lane = divmod(thread, 32)
        for i in range(fragment.registers * fragment.elements):
            want_row, want_col = formula(lane >> 2, lane % 4, i)
            register, element = divmod(i, fragment.elements)
            assert (row[thread, register, element], col[thread, register, element]) == (16 * warp + want_row, want_col)


@pytest.mark.parametrize(("atom", "a", "b"), MMA_SYNC, ids=lambda value: getattr(value, "__name__", None) or str(value))
def test_mma_sync_fragments(atom: MmaAtom, a: Formula, b: Formula) -> None:
    assert atom.threads == 32
    assert_formula(atom.a, a)
    assert atom.b is not None
    assert_formula(atom.b, b)
    assert_formula(atom.c, c_any)


@pytest.mark.parametrize(("atom", "a"), WGMMA, ids=lambda value: getattr(value, "__name__", None) or str(value))
def test_wgmma_fragments(atom: MmaAtom, a: Formula) -> None:
    assert atom.threads == 128
    assert atom.b is None
    assert (atom.min_sm, atom.max_sm) == (90, 90)
    assert_formula(atom.a, a)
    assert_formula(atom.c, c_any)
    assert atom.c.registers == atom.n // 2


@pytest.mark.parametrize(("wgmma", "mma"), [(wgmma_f16(64), MMA_M16N8K16_F16), (wgmma_s8(64), MMA_M16N8K32_S8)], ids=str)
def test_wgmma_a_is_four_warps_of_mma_sync_a(wgmma: MmaAtom, mma: MmaAtom) -> None:
    row, col = wgmma.a.coordinates()
    warp_row, warp_col = mma.a.coordinates()
    for warp in range(4):
        lanes = slice(32 * warp, 32 * warp + 32)
        np.testing.assert_array_equal(row[lanes], 16 * warp + warp_row)
        np.testing.assert_array_equal(col[lanes], warp_col)
    assert mma.a.tiled(64, 64) == wgmma.a.tiled(64, 64)


def test_gather_and_scatter_are_inverse() -> None:
    fragment = MMA_M16N8K16_F16.a
    tile = np.arange(16 * 16).reshape(16, 16)
    held = fragment.gather(tile)
    assert held.shape == (32, 4, 2)
    assert held[5, 1].tolist() == [9 * 16 + 2, 9 * 16 + 3]  # lane 5: group 1, thread 1; register 1 is 8 rows down
    np.testing.assert_array_equal(fragment.scatter(held), tile)


def test_coordinates_are_read_only() -> None:
    row, _ = MMA_M16N8K16_F16.a.coordinates()
    with pytest.raises(ValueError, match="read-only"):
        row[0, 0, 0] = 1


def test_fragment_that_is_no_bijection_is_refused() -> None:
    """Rows g and g + 4 instead of g and g + 8: rows 4 to 11 are held twice, rows 12 to 15 never."""
    with pytest.raises(ValueError, match=re.escape("no bijection onto its 16 x 8 tile: element (4, 0) has 2 places")):
        Fragment(
            16,
            8,
            thread=(Digit(4, "col", 2), Digit(8, "row", 1)),
            register=(Digit(2, "row", 4),),
            element=(Digit(2, "col", 1),),
        )


def test_fragment_that_leaves_its_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="reaches row 15, column 7 outside its 8 x 8 tile"):
        Fragment(8, 8, thread=(Digit(8, "row", 1),), register=(Digit(2, "row", 8), Digit(8, "col", 1)))


def test_atom_whose_fragment_has_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("fragment A is 16 x 8, the instruction wants (16, 16)")):
        replace(MMA_M16N8K16_F16, a=MMA_M16N8K8_F16.a)


def test_atom_whose_registers_are_not_full_is_refused() -> None:
    with pytest.raises(ValueError, match="2 elements of 8 bits in a register of fragment A"):
        replace(MMA_M16N8K16_F16, operand_bits=8)


@pytest.mark.parametrize("n", [0, 12, 264])
def test_wgmma_with_an_impossible_n_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="n = 8 to 256"):
        wgmma_f16(n)


def test_integer_wgmma_has_fewer_n() -> None:
    assert wgmma_s8(24).n == 24
    with pytest.raises(ValueError, match=re.escape("n = 8 to 256 in steps of 16, got 40")):
        wgmma_s8(40)
    assert wgmma_fp8(40).n == 40


def test_merged_digits_are_the_same_number() -> None:
    assert merged((Digit(2, "row", 8), Digit(2, "col", 8), Digit(1, "row", 4), Digit(4, "col", 16))) == (
        Digit(2, "row", 8),
        Digit(8, "col", 8),
    )
