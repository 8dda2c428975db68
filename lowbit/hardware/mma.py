"""Tensor-core instructions as table rows: shapes, types, and which thread holds which element in which register.

A `Fragment` maps (thread, register, element within the register) to (row, column) by mixed-radix digits. The thread index is
split into digits, and each step of a digit moves a fixed distance along one axis. Register index and element index are split in
the same way. For example, the A operand of mma.sync m16n8k16:

    thread   = 4 x (2 columns) then 8 x (1 row)        lane 5 has the digits 1 and 1, so it begins at row 1, column 2
    register = 2 x (8 rows)    then 2 x (8 columns)    register 1 is 8 rows below register 0
    element  = 2 x (1 column)                          element 1 is one column to the right of element 0

Axes are those of the instruction, D[m, n] = A[m, k] B[k, n] + C[m, n]: A has rows m and columns k, B rows k and columns
n, C and D rows m and columns n. Kernels of this library compute y^T = w x^T, so w is A and x^T is B.

Every row is checked when it is built: a fragment must reach each element of its tile exactly once, and the three
fragments must agree with the shape. Source: PTX ISA, "Matrix Fragments for mma.*" and "Register Fragments" of
wgmma.mma_async; each row names its section.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Axis = Literal["row", "col"]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Digit:
    """One digit of a mixed-radix number: it has `size` values, and each step moves `step` along `axis`."""

    size: int
    axis: Axis
    step: int


def _distance(digits: tuple[Digit, ...], axis: Axis) -> Indices:
    """Returns the distance along `axis` for every value of the number with these `digits` (least significant first)."""
    total = np.zeros(1, dtype=np.int64)
    for digit in digits:
        move = digit.step * np.arange(digit.size) * (digit.axis == axis)
        total = (move[:, None] + total[None, :]).ravel()
    return total


def _count(digits: tuple[Digit, ...]) -> int:
    return math.prod(digit.size for digit in digits)


def merged(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
    """Returns the same mapping with fewer digits. Drops digits of size 1, and joins a digit with the previous one if it
    continues the steps of that one."""
    out: list[Digit] = []
    for digit in digits:
        if out and out[-1].axis == digit.axis and out[-1].size * out[-1].step == digit.step:
            out[-1] = Digit(out[-1].size * digit.size, digit.axis, out[-1].step)
        elif digit.size > 1:
            out.append(digit)
    return tuple(out)


@dataclass(frozen=True)
class Fragment:
    """The distribution of a tile of `rows` x `cols` elements over the registers of `threads` threads.

    Digits are least significant first. Raises ValueError unless every element of the tile is in exactly one register position.
    """

    rows: int
    cols: int
    thread: tuple[Digit, ...]
    register: tuple[Digit, ...]
    element: tuple[Digit, ...] = ()

    def __post_init__(self) -> None:
        row, col = self.coordinates()
        if row.max() >= self.rows or col.max() >= self.cols:
            raise ValueError(f"fragment reaches row {row.max()}, column {col.max()} outside its {self.rows} x {self.cols} tile")
        holders = np.bincount((row * self.cols + col).ravel(), minlength=self.rows * self.cols)
        wrong = np.flatnonzero(holders != 1)
        if wrong.size:
            where = divmod(int(wrong[0]), self.cols)
            raise ValueError(
                f"fragment is no bijection onto its {self.rows} x {self.cols} tile: element {where} has "
                f"{holders[wrong[0]]} places instead of 1 ({wrong.size} such elements)"
            )

    @property
    def threads(self) -> int:
        return _count(self.thread)

    @property
    def registers(self) -> int:
        """Number of 32-bit registers per thread."""
        return _count(self.register)

    @property
    def elements(self) -> int:
        """Number of elements per register, the first in the lowest bits."""
        return _count(self.element)

    def coordinates(self) -> tuple[Indices, Indices]:
        """Returns row and column of every (thread, register, element) as two read-only arrays [threads, registers,
        elements]."""
        return _coordinates(self)

    def tiled(self, rows: int, cols: int) -> Fragment:
        """Returns the fragment of a larger tile, in which this fragment is repeated. Further threads hold the repetitions along
        rows, further registers those along columns.

        Digits that continue each other are merged, so that fragments with equal mappings compare equal. Raises ValueError
        unless the tile is a whole number of fragments.
        """
        return Fragment(
            rows,
            cols,
            thread=merged((*self.thread, Digit(rows // self.rows, "row", self.rows))),
            register=merged((*self.register, Digit(cols // self.cols, "col", self.cols))),
            element=self.element,
        )

    def gather(self, tile: NDArray[Any]) -> NDArray[Any]:
        """Returns the elements of `tile` [rows, cols] in the order in which threads hold them: [threads, registers,
        elements]."""
        row, col = self.coordinates()
        return tile[row, col]

    def scatter(self, held: NDArray[Any]) -> NDArray[Any]:
        """Returns the tile [rows, cols] of the elements that threads hold, `held` [threads, registers, elements]."""
        row, col = self.coordinates()
        tile = np.empty((self.rows, self.cols), dtype=held.dtype)
        tile[row, col] = held
        return tile


@functools.cache
def _coordinates(fragment: Fragment) -> tuple[Indices, Indices]:
    def along(axis: Axis) -> Indices:
        thread = _distance(fragment.thread, axis)
        register = _distance(fragment.register, axis)
        element = _distance(fragment.element, axis)
        total: Indices = thread[:, None, None] + register[None, :, None] + element[None, None, :]
        total.setflags(write=False)
        return total

    return along("row"), along("col")


def a_fragment(m: int, k: int, bits: int) -> Fragment:
    """Returns the fragment of operand A [m, k] of `bits`-bit elements: one warp per 16 rows, for mma.sync and for wgmma."""
    packed = 32 // bits
    return Fragment(
        m,
        k,
        thread=(Digit(4, "col", packed), Digit(8, "row", 1), Digit(m // 16, "row", 16)),
        register=(Digit(2, "row", 8), Digit(k // (4 * packed), "col", 4 * packed)),
        element=(Digit(packed, "col", 1),),
    )


def b_fragment(k: int, bits: int) -> Fragment:
    """Returns the fragment of mma.sync's operand B [k, 8] of `bits`-bit elements: each group of 4 lanes holds one column."""
    packed = 32 // bits
    return Fragment(
        k,
        8,
        thread=(Digit(4, "row", packed), Digit(8, "col", 1)),
        register=(Digit(k // (4 * packed), "row", 4 * packed),),
        element=(Digit(packed, "row", 1),),
    )


def c_fragment(m: int, n: int) -> Fragment:
    """Returns the fragment of the accumulator [m, n] (C and D): 32-bit elements, one per register."""
    return Fragment(
        m,
        n,
        thread=(Digit(4, "col", 2), Digit(8, "row", 1), Digit(m // 16, "row", 16)),
        register=(Digit(2, "col", 1), Digit(2, "row", 8), Digit(n // 8, "col", 8)),
    )


@dataclass(frozen=True)
class MmaAtom:
    """One matrix instruction D[m, n] = A[m, k] B[k, n] + C[m, n] and its register fragments.

    `operands` are the PTX names of the possible types of A and B, all of `operand_bits` bits. `accumulator` is the type of C
    and D. `b` is None if B is read from shared memory. The instruction exists on SM versions from `min_sm` to `max_sm`, or on
    all newer ones if `max_sm` is None; wgmma exists on sm_90a only. Raises ValueError if fragments and shape disagree.
    """

    name: str
    instruction: str
    m: int
    n: int
    k: int
    operands: tuple[str, ...]
    operand_bits: int
    accumulator: str
    min_sm: int
    section: str
    a: Fragment
    b: Fragment | None
    c: Fragment
    max_sm: int | None = None

    def __post_init__(self) -> None:
        shapes = {"A": (self.a, (self.m, self.k)), "C": (self.c, (self.m, self.n))}
        if self.b is not None:
            shapes["B"] = (self.b, (self.k, self.n))
        for operand, (fragment, shape) in shapes.items():
            if (fragment.rows, fragment.cols) != shape:
                raise ValueError(
                    f"{self.name}: fragment {operand} is {fragment.rows} x {fragment.cols}, the instruction wants {shape}"
                )
            if fragment.threads != self.threads:
                raise ValueError(f"{self.name}: fragment {operand} has {fragment.threads} threads, A has {self.threads}")
            bits = 32 if operand == "C" else self.operand_bits
            if fragment.elements * bits != 32:
                raise ValueError(
                    f"{self.name}: {fragment.elements} elements of {bits} bits in a register of fragment {operand}"
                )

    @property
    def threads(self) -> int:
        """Number of threads that execute the instruction together: 32 (a warp) or 128 (a warpgroup)."""
        return self.a.threads

    def __str__(self) -> str:
        return self.name


def _mma_sync(k: int, operands: tuple[str, ...], bits: int, accumulator: str, min_sm: int, section: str) -> MmaAtom:
    return MmaAtom(
        f"mma.m16n8k{k}.{operands[0]}", f"mma.sync.aligned.m16n8k{k}.row.col", 16, 8, k, operands, bits, accumulator, min_sm,
        f"PTX ISA, Matrix Fragments for {section}", a_fragment(16, k, bits), b_fragment(k, bits), c_fragment(16, 8),
    )  # fmt: skip


MMA_M16N8K8_F16 = _mma_sync(8, ("f16",), 16, "f32", 75, "mma.m16n8k8")
MMA_M16N8K16_F16 = _mma_sync(16, ("f16", "bf16"), 16, "f32", 80, "mma.m16n8k16 with floating point type")
MMA_M16N8K32_S8 = _mma_sync(32, ("s8", "u8"), 8, "s32", 80, "mma.m16n8k32")
MMA_M16N8K32_FP8 = _mma_sync(32, ("e4m3", "e5m2"), 8, "f32", 89, "mma.m16n8k32")
# sm_90 has no int4 tensor cores: the compiler expands this instruction there, which is correct but slow.
MMA_M16N8K64_S4 = _mma_sync(64, ("s4", "u4"), 4, "s32", 80, "mma.m16n8k64")


@functools.cache
def _wgmma(n: int, k: int, operands: tuple[str, ...], bits: int, accumulator: str) -> MmaAtom:
    # Above 24, n must be a multiple of 16 for integers; for other types any multiple of 8 (PTX ISA, wgmma Matrix Shape).
    step = 16 if accumulator == "s32" and n > 24 else 8
    if not 8 <= n <= 256 or n % step:
        raise ValueError(f"wgmma with {operands[0]} operands has n = 8 to 256 in steps of {step}, got {n}")
    return MmaAtom(
        f"wgmma.m64n{n}k{k}.{operands[0]}", f"wgmma.mma_async.sync.aligned.m64n{n}k{k}", 64, n, k, operands, bits, accumulator,
        90, f"PTX ISA, Matrix Fragments for wgmma.mma_async.m64nNk{k}", a_fragment(64, k, bits), None, c_fragment(64, n), 90,
    )  # fmt: skip


def wgmma_f16(n: int) -> MmaAtom:
    """Returns wgmma m64nNk16 with f16 or bf16 operands, A in registers. n: 8, 16, 24, ..., 256, else ValueError."""
    return _wgmma(n, 16, ("f16", "bf16"), 16, "f32")


def wgmma_s8(n: int) -> MmaAtom:
    """Returns wgmma m64nNk32 with s8 or u8 operands, A in registers. n: 8, 16, 24, 32, 48, ..., 256, else ValueError."""
    return _wgmma(n, 32, ("s8", "u8"), 8, "s32")


def wgmma_fp8(n: int) -> MmaAtom:
    """Returns wgmma m64nNk32 with e4m3 or e5m2 operands, A in registers. n: 8, 16, 24, ..., 256, else ValueError."""
    return _wgmma(n, 32, ("e4m3", "e5m2"), 8, "f32")
