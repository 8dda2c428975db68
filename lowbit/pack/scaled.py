"""A quantized matrix in the form of the kernels for 8-bit activations.

    codes           int8, float8_e4m3fn or float8_e5m2 [N, K']   8 bits: row-major operands as they are (int8: the code less its
                                                                 offset), K' is K padded to a multiple of 16 with zeros
                    int32 [N/16, K/64, 32 * bits]                fewer: pack.fragment, for operands of 8 bits
    scale           fp16 or bf16 [ceil(K / 128), N']             groups of 128 along K, N' is N padded to a multiple of 16
                    float32 [ceil(N / 128), ceil(K / 128)]       blocks of 128 x 128
    channel_scale   float32 [N]                                  one per output channel or tensor
    sums            float32 [N]                                  sums of the rows of decoded codes, times `scale` if there is
                                                                 one; a zero point of x is multiplied by them

There is either `scale` or `channel_scale`. Scales of groups of a multiple of 128 are repeated for groups of 128.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import IntFormat, PerBlock, PerChannel, PerGroup, PerTensor, QuantTensor, Scheme, ZeroPoint, decode, spread
from lowbit.hardware.byte_conversions import ByteOperand, byte_conversion
from lowbit.hardware.mma import MMA_M16N8K32_S8
from lowbit.pack.form import PackedMatrix
from lowbit.pack.fragment import CODES_AT_ONCE, ROW_BLOCK, FragmentOrder

GROUP = 128
"""Number of columns of w that share a scale if a row has several scales."""

ROW_BYTES = 16
"""Rows of operands start at multiples of this number of bytes."""

_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def scaled_refusals(scheme: Scheme, scale_dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Returns the reasons why the kernels for 8-bit activations do not support weights of a scheme with scales of a type; empty
    if they do."""
    if scheme.activation is None or scheme.activation.name not in _DTYPES:
        return (f"multiplies int8, e4m3 or e5m2 activations, not those of {scheme}",)
    reasons = []
    integer = isinstance(scheme.activation, IntFormat)
    if scheme.zero is not ZeroPoint.NONE:
        reasons.append(f"takes weights without zero points, not {scheme}")
    elif scheme.weight.bits == 8:
        same = isinstance(scheme.weight, IntFormat) == integer
        if scheme.weight.name not in _DTYPES or not same:
            reasons.append(f"multiplies 8-bit operands of one kind, not {scheme.weight.name} by {scheme.activation.name}")
    else:
        try:
            byte_conversion(scheme.weight, _operand(scheme))
        except ValueError as error:
            reasons.append(str(error))
    match scheme.granularity:
        case PerChannel() | PerTensor():
            pass
        case PerGroup(size) if size % GROUP == 0 and scheme.weight.bits < 8:
            if scale_dtype not in (None, torch.float16, torch.bfloat16):
                reasons.append(f"takes scales of groups in fp16 or bf16, {scheme} has them in {scale_dtype} here")
        case PerBlock(128, 128) if scheme.weight.bits == 8:
            pass
        case _:
            what = "in blocks of 128 x 128" if scheme.weight.bits == 8 else f"in groups of multiples of {GROUP}"
            reasons.append(f"takes scales per tensor, per channel or {what}, not {scheme}")
    return tuple(reasons)


def _operand(scheme: Scheme) -> ByteOperand:
    return "s8" if isinstance(scheme.activation, IntFormat) else "e4m3"


@dataclass(frozen=True, eq=False)
class OperandWeight(PackedMatrix):
    """The tensors described in the module docstring, for a matrix of `shape` (N, K) under `scheme`."""

    NAMES = ("codes", "scale", "channel_scale", "sums")

    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    sums: Tensor
    scheme: Scheme
    shape: tuple[int, int]

    @classmethod
    def pack(cls, q: QuantTensor) -> OperandWeight:
        """Returns the kernels' form of `q`, on its device.

        Raises ValueError with every reason if `q` has no such form, if scales are not finite, or if `q` has an input transform
        or a low-rank correction (`QuantTensor.require_product`).
        """
        q.require_product()
        reasons = scaled_refusals(q.scheme, q.scale.dtype)
        if reasons:
            raise ValueError(f"the kernel for 8-bit activations {'; '.join(reasons)}")
        if not bool(torch.isfinite(q.scale).all()):
            raise ValueError(f"{q.scheme} {q.shape}: scales must be finite, some are not")
        n, k = q.shape
        scale = channel = None
        if isinstance(q.scheme.granularity, PerGroup):
            size = q.scheme.granularity.size
            groups = q.scale.repeat_interleave(size // GROUP, dim=1)[:, : -(-k // GROUP)]
            scale = torch.nn.functional.pad(groups.T, (0, -n % ROW_BLOCK)).contiguous()
        elif isinstance(q.scheme.granularity, PerBlock):
            scale = q.scale.float().contiguous()
        else:
            channel = q.scale.float().expand(n, 1).reshape(-1).contiguous()
        return cls(_pack_codes(q), scale, channel, _sums(q, scaled=scale is not None), q.scheme, q.shape)

    def unpack(self) -> QuantTensor:
        """Returns the matrix that `pack` packed. Scales other than those of groups are float32."""
        n = self.shape[0]
        scheme = self.scheme
        if self.channel_scale is not None:
            scale = self.channel_scale[: 1 if isinstance(scheme.granularity, PerTensor) else n, None].clone()
        else:
            assert self.scale is not None
            scale = self.scale
            if isinstance(scheme.granularity, PerGroup):
                scale = scale[:: scheme.granularity.size // GROUP, :n].T.contiguous()
        return QuantTensor(self.unpack_codes(), scale, None, scheme)

    def unpack_codes(self) -> Tensor:
        """Returns the codes uint8 [N, K]."""
        fmt, k = self.scheme.weight, self.shape[1]
        if fmt.bits == 8:
            codes = self.codes.view(torch.uint8)[:, :k]
            return codes ^ 128 if isinstance(fmt, IntFormat) else codes.contiguous()
        codes = _order(self.scheme).unpack((self.codes,), fmt.bits, self.shape)
        stored = byte_conversion(fmt, _operand(self.scheme)).stored
        if not stored:
            return codes
        code_of = torch.empty(len(stored), dtype=torch.uint8)
        code_of[list(stored)] = torch.arange(len(stored), dtype=torch.uint8)
        return code_of.to(codes.device)[codes.int()]

    def row_axes(self) -> dict[str, tuple[int, int]]:
        granularity, row_block = self.scheme.granularity, 1 if self.scheme.weight.bits == 8 else ROW_BLOCK
        scale = (0, granularity.n) if isinstance(granularity, PerBlock) else (1, 1)
        axes = {"codes": (0, row_block), "scale": scale, "channel_scale": (0, 1), "sums": (0, 1)}
        return {name: axes[name] for name in self.tensors()}


def _sums(q: QuantTensor, scaled: bool) -> Tensor:
    """Returns the sums of the rows of a matrix, float32 [N], with or without scales. Computed some blocks of rows at a time."""
    granularity = q.scheme.granularity
    block = granularity.n if isinstance(granularity, PerBlock) else 1
    step = max(1, CODES_AT_ONCE // (4 * block * max(1, q.shape[1])))  # in float32, twice if multiplied by scales
    sums = []
    scales = q.scale.split(step) if scaled else itertools.repeat(None)
    for codes, scale in zip(q.codes.split(step * block), scales, strict=False):
        values = decode(codes, q.scheme.weight)
        if scale is not None:
            values = values * spread(scale.float(), granularity, (codes.shape[0], codes.shape[1]))
        sums.append(values.sum(1, dtype=torch.float64).float())
    return torch.cat(sums)


def _order(scheme: Scheme) -> FragmentOrder:
    return FragmentOrder(MMA_M16N8K32_S8, scheme.weight)


def _pack_codes(q: QuantTensor) -> Tensor:
    n, k = q.shape
    fmt = q.scheme.weight
    if fmt.bits == 8:
        rows = q.codes.new_zeros((n, -(-k // ROW_BYTES) * ROW_BYTES))
        rows[:, :k] = q.codes ^ 128 if isinstance(fmt, IntFormat) else q.codes
        return rows.view(_DTYPES[fmt.name])
    stored = byte_conversion(fmt, _operand(q.scheme)).stored
    codes = q.codes
    if stored:
        table = torch.tensor(stored, dtype=torch.uint8, device=codes.device)
        step = max(1, CODES_AT_ONCE // max(1, k))
        codes = torch.cat([table[part.int()] for part in codes.split(step)])
    (packed,) = _order(q.scheme).pack(codes, fmt.bits)
    return packed
