"""A quantized matrix [N, K] in one of the three forms that torch's CPU products read.

    form     codes                                          scale
    int4     uint8 [N, K/2], the order of torch's int4      bf16 [K/group, N, 2]: s and z of w = (code4 - 8) * s + z
             product, which depends on the CPU
    int8     int8 [N, K], two's complement                  bf16 [N]; float32 where x is quantized too
    decoded  x's type [N, K], each weight rounded once      none

int4 holds integers of 2, 3 and 4 bits (code4 is the code, shifted so that the middle of the range is 8), int8 those of 5 to 8
bits. Both forms only rearrange the codes; `CpuWeight.unpack_codes` returns the codes bit for bit. Decoded weights have no
codes; a layer also keeps the form on disk. `_column_order` determines the order of int4 from torch; this form is never saved.

Torch's products of bf16 x need scales in bf16, whose rounding error is at most 2^-8 of their value. Rounding each weight to
bf16 has an error of the same size (docs/internals/numerics.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.formats import IntFormat, PerChannel, PerTensor, QuantTensor, Scheme, ZeroPoint
from lowbit.pack.form import PackedMatrix

CpuForm = Literal["int4", "int8", "decoded"]

GROUPS = (256, 128, 64, 32)
"""Group sizes that torch's int4 product supports."""

INT4_ROWS = 16
"""N must be a multiple of this for torch's int4 product."""

INT8_K_STEP = 16
"""Torch 2.13's int8 product processes K in steps of 16 without a tail. Other K (1, 8, 17, 24, 72) gave wrong results or a
crash."""

WEIGHTS_AT_ONCE = 1 << 22
"""Number of weights that are rearranged into torch's order at a time; each takes 4 bytes."""

VECTOR_CPUS = ("AVX2", "AVX512")
"""Values of `torch.backends.cpu.get_cpu_capability` for which torch has fast int4 and int8 products."""


@dataclass(frozen=True, eq=False)
class CpuWeight(PackedMatrix):
    """The tensors described in the module, for a matrix of `shape` (N, K); `group`: group size of int4, else 0. `sums`: sums of
    the rows of int8 codes, int32 [N], if x has zero points."""

    NAMES = ("codes", "scale", "sums")

    form: CpuForm
    codes: Tensor
    scale: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    group: int = 0
    sums: Tensor | None = None
    dtype: torch.dtype = field(init=False)
    """The type of x if x is not quantized. A field, not a property, since every call of a layer reads it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.codes.dtype if self.form == "decoded" else torch.bfloat16)

    def row_axes(self) -> dict[str, tuple[int, int]]:
        return {name: (1 if name == "scale" and self.form == "int4" else 0, 1) for name in self.tensors()}

    @property
    def row_multiple(self) -> int:
        """Number of rows of a block of torch's int4 product; 1 for other forms."""
        return block_rows() if self.form == "int4" else 1

    def _kind(self) -> dict[str, Any]:
        return {**super()._kind(), "form": self.form, "group": self.group}

    def unpack_codes(self) -> Tensor:
        """Returns the codes uint8 [N, K] that `pack_int4` or `pack_int8` rearranged, bit for bit; decoded weights have none."""
        if self.form == "int8":
            return (self.codes.to(torch.int16) + _offset(self.scheme)).to(torch.uint8)
        if self.form == "decoded":
            raise ValueError("decoded weights have no codes; unpack the form on disk")
        n, k = self.shape
        codes = torch.empty((n, k), dtype=torch.uint8)
        for start, end in _row_ranges(self.shape):
            order, pairs = int4_columns(self.codes, start, end)
            columns = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(-1, k, len(order))
            codes[start:end].view(-1, len(order), k)[:, order] = columns.transpose(-1, -2)
        return codes - _shift(self.scheme)


def int4_refusals(scheme: Scheme, shape: tuple[int, int]) -> tuple[str, ...]:
    """Returns the reasons why a matrix cannot be packed for torch's int4 product; empty if it can."""
    reasons = []
    if not isinstance(scheme.weight, IntFormat) or scheme.weight.bits > 4:
        reasons.append(f"takes integers of 2 to 4 bits, not {scheme.weight.name}")
    if not int4_group(scheme, shape):
        reasons.append(f"takes groups that are multiples of {GROUPS[-1]} and divide K, not {scheme} with K {shape[1]}")
    if shape[0] % INT4_ROWS:
        reasons.append(f"takes N of multiples of {INT4_ROWS}, N is {shape[0]}")
    return (*reasons, *_cpu_refusals())


def int8_refusals(scheme: Scheme, shape: tuple[int, int]) -> tuple[str, ...]:
    """Returns the reasons why a matrix cannot be packed for torch's int8 products; empty if it can."""
    reasons = []
    signed = isinstance(scheme.weight, IntFormat) and scheme.weight.signed
    if not signed or scheme.weight.bits < 5 or not isinstance(scheme.granularity, (PerChannel, PerTensor)):
        reasons.append(f"takes integers of 5 to 8 bits with one scale per channel or tensor, not {scheme}")
    if shape[1] % INT8_K_STEP:
        reasons.append(f"reads beyond its operands unless K is a multiple of {INT8_K_STEP}, K is {shape[1]}")
    return (*reasons, *_cpu_refusals())


def _cpu_refusals() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    return () if capability in VECTOR_CPUS else (f"is fast with AVX2 or AVX-512 only, torch reports {capability} here",)


def int4_group(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Returns the largest group size of torch's int4 product that divides both the scheme's group size and K; 0 if there is
    none."""
    k = scheme.granularity.block(shape)[1]
    fits = (g for g in GROUPS if shape[1] % g == 0 and (k >= shape[1] or k % g == 0))
    return next(fits, 0) if shape[1] else 0


def pack_int4(q: QuantTensor) -> CpuWeight:
    """Returns `q` in the form of torch's int4 product, without its low-rank correction and input transform.

    Raises ValueError with every reason if `q` has no such form, or if torch's order is not one that `CpuWeight.unpack_codes`
    can undo.
    """
    reasons = int4_refusals(q.scheme, q.shape)
    if reasons:
        raise ValueError(f"torch's int4 product {'; '.join(reasons)}")
    group = int4_group(q.scheme, q.shape)
    shift = _shift(q.scheme)
    packed = torch.empty((q.shape[0], q.shape[1] // 2), dtype=torch.uint8)
    for start, end in _row_ranges(q.shape):
        packed[start:end] = _pack_with_torch(q.codes[start:end].to(torch.int32) + shift)
    exact = _of_groups(q.scale, q, group)
    s = exact.to(torch.bfloat16).float()
    if q.zero is None:
        z = torch.zeros_like(s)
    elif q.scheme.zero is ZeroPoint.INTEGER:
        z = (8 - shift - _of_groups(q.zero, q, group)) * s  # uses the rounded scale, so that a weight of 0 stays about 0
    else:
        z = _of_groups(q.zero, q, group) + (8 - shift) * exact
    scale = torch.stack((s.T, z.T), dim=-1).to(torch.bfloat16).contiguous()
    weight = CpuWeight("int4", packed, scale, q.scheme, q.shape, group)
    if not torch.equal(weight.unpack_codes(), q.codes):
        raise ValueError(f"torch {torch.__version__} orders the weights of its int4 product in an unknown way")
    return weight


def pack_int8(q: QuantTensor) -> CpuWeight:
    """Returns `q` in the form of torch's int8 products, without its low-rank correction and input transform.

    Raises ValueError with every reason if `q` has no such form.
    """
    reasons = int8_refusals(q.scheme, q.shape)
    if reasons:
        raise ValueError(f"torch's int8 product {'; '.join(reasons)}")
    codes = (q.codes.to(torch.int16) - _offset(q.scheme)).to(torch.int8)
    dtype = torch.bfloat16 if q.scheme.activation is None else torch.float32
    scale = q.scale.to(dtype).expand(q.shape[0], 1)[:, 0].contiguous()
    sums = codes.sum(1, dtype=torch.int32) if q.scheme.activation_zero else None
    return CpuWeight("int8", codes, scale, q.scheme, q.shape, sums=sums)


def int4_columns(codes: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Returns (order int64 [R], bytes uint8 [B, K, R / 2]) for the rows [start, end) of an int4 form, which are B blocks of R
    rows. Nibble r of a column belongs to row order[r] of its block; the low nibble of a byte comes first."""
    k = 2 * codes.shape[1]
    block = min(block_rows(), end - start)
    return _column_order(block), codes.view(-1)[start * k // 2 : end * k // 2].view(-1, k, block // 2)


def row_blocks(n: int, blocks: int) -> list[tuple[int, int]]:
    """Returns ranges [start, end) of rows of an int4 form of N rows: at most `blocks` whole blocks each, then the remaining
    rows."""
    step = block_rows() * blocks
    whole = n - n % block_rows()
    ranges = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    return ranges if whole == n else [*ranges, (whole, n)]


def _row_ranges(shape: tuple[int, int]) -> list[tuple[int, int]]:
    return row_blocks(shape[0], max(1, WEIGHTS_AT_ONCE // (block_rows() * max(shape[1], 1))))


@functools.cache
def block_rows() -> int:
    """Returns the number of rows of w in a block of torch's int4 product: 64 with AVX-512, 32 with AVX2."""
    rows = 128
    order = _nibbles(torch.tensor([[0, 1]], dtype=torch.int32, device="cpu").expand(rows, 2).contiguous())
    return int(order.argmax())  # all rows of column 0 of a block come first


@functools.cache
def _column_order(rows: int) -> Tensor:
    """Returns the row of each entry of a column, within a block of `rows` rows. Found by packing the row numbers."""
    number = torch.arange(rows, dtype=torch.int32, device="cpu")[:, None].expand(rows, 2)
    low, high = (_nibbles(part.contiguous())[:rows] for part in (number & 15, number >> 4))
    return (low + 16 * high).long()


def _nibbles(codes: Tensor) -> Tensor:
    """Returns codes int32 [N, K] in the order of torch's int4 product."""
    packed = _pack_with_torch(codes).view(-1)
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(-1)


def _pack_with_torch(codes: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed


def _offset(scheme: Scheme) -> int:
    assert isinstance(scheme.weight, IntFormat)
    return scheme.weight.offset


def _shift(scheme: Scheme) -> int:
    """Returns the difference code4 - code, which shifts the middle of the codes to 8."""
    return 8 - (1 << (scheme.weight.bits - 1))


def _of_groups(values: Tensor, q: QuantTensor, group: int) -> Tensor:
    """Returns scales or zeros, float32 [N, K / group]."""
    n, k = q.scheme.granularity.block(q.shape)
    values = values.float()
    rows = values.repeat_interleave(n, dim=0)[: q.shape[0]] if n > 1 else values
    return rows.repeat_interleave(-(-min(k, q.shape[1]) // group), dim=1)[:, : q.shape[1] // group]
