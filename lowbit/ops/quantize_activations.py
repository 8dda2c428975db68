"""The torch operator `lowbit::quantize_activations`: quantizes 16-bit activations, alone or fused with the preceding norm or
gate.

On NVIDIA GPUs it is one pass over memory (kernels/elementwise/quantize_rows.py), elsewhere plain torch (kernels/reference/).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.formats import ActivationRule, FloatFormat, NumberFormat, check_block, number_format
from lowbit.hardware.machine import machine_of, machine_refusals
from lowbit.kernels.cpu.torch_int8 import quantize_rows
from lowbit.kernels.reference.activations import (
    CODE_DTYPES,
    layer_norm_reference,
    quantize_activations_reference,
    rms_norm_reference,
    silu_mul_reference,
)
from lowbit.ops.channels import rotate_channels
from lowbit.ops.operands import TensorSpec, device_of, meta_tensors, spec_of, triton_refusals
from lowbit.ops.register import register

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.quantize_rows import QuantizePlan, QuantizeRequest

BEFORE = ("", "rms_norm", "layer_norm", "silu")
MOST_COLUMNS = 65536
"""Maximum number of columns of a row, which the kernel holds in registers."""
CODE_VECTOR = 16
"""On a GPU rows of codes start at multiples of this number of bytes."""
RULES = {
    ActivationRule.OWN.value: tuple(CODE_DTYPES),
    ActivationRule.COMPRESSED_TENSORS.value: ("int8", "fp8_e4m3"),
    ActivationRule.FINEGRAINED_FP8.value: ("fp8_e4m3",),
    ActivationRule.FBGEMM.value: ("fp8_e4m3",),
}
"""Rules of quantization and the formats that each supports."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_format = functools.lru_cache(maxsize=None)(number_format)


class Activations(NamedTuple):
    """x [.., K], quantized: x = (codes - zero) * scale.

    codes: int8, float8_e4m3fn or float8_e5m2 [.., K]. scale: float32 [.., 1], [.., groups] or the given [1]. zero: int32 [..,
    1], the given [1] or None. sum: x + residual if a residual was added, else None. dtype: the type of x before quantization,
    and of y in products. An `Activations` object replaces x between the operation that computes it, such as a norm, and the
    layers that read it.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    sum: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        """The shape of x."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device


def quantize_activations(
    x: Tensor, fmt: str | NumberFormat, *, group: int = 0, scale: Tensor | None = None, symmetric: bool = True,
    zero: Tensor | None = None, rule: str = "", hadamard: int = 0,
) -> Activations:  # fmt: skip
    """Quantizes x [.., K] (fp16, bf16 or fp32) to codes of `fmt`: int8, fp8_e4m3 or fp8_e5m2.

    There is one scale per token, max|x| / the largest value of the format, or one per token and `group` columns (a power of
    two). A given `scale` float32 [1] is used for all tokens instead; larger values saturate. If not `symmetric`, which requires
    int8, the scale covers max - min and there are zero points (with a given scale: the given `zero` int32 [1]). Rounds to
    nearest, ties to even. Rows of zeros have the scale 2^-126. Rows with an infinity or a NaN have a scale that is not finite,
    so their products are not finite either. `rule` is the value of a `formats.ActivationRule`: "" for the rule above, or
    another tool's rule. With `hadamard`, x is first rotated in blocks of that many channels and rounded to its type
    (`formats.rotate_blocks`). Raises ValueError for arguments that do not fit together.
    """
    return _quantize(x, fmt, group, scale, symmetric, zero, rule, hadamard)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, fmt: str | NumberFormat, *, residual: Tensor | None = None, group: int = 0,
    scale: Tensor | None = None, symmetric: bool = True, zero: Tensor | None = None, rule: str = "", hadamard: int = 0,
) -> Activations:  # fmt: skip
    """Returns `quantize_activations` of x / sqrt(mean(x^2) + eps) * weight [K]. This value is computed in float32 and not
    rounded before it is rotated or quantized. Only this library's own rule supports that; any other raises ValueError.

    With a `residual` [.., K], x is first replaced by x + residual in x's type, which is also returned as `sum`.
    """
    return _quantize(x, fmt, group, scale, symmetric, zero, rule, hadamard, "rms_norm", residual, weight, None, eps)


def add_norm_quantize(
    h: Tensor, delta: Tensor | None, weight: Tensor, eps: float, fmt: str | NumberFormat, *, group: int = 0,
    scale: Tensor | None = None, symmetric: bool = True, zero: Tensor | None = None, rule: str = "", hadamard: int = 0,
) -> Activations:  # fmt: skip
    """Adds delta to the contiguous h [.., K] in place, then returns `rms_norm_quantize` of h. Both are one launch."""
    if delta is None:
        return rms_norm_quantize(
            h, weight, eps, fmt, group=group, scale=scale, symmetric=symmetric, zero=zero, rule=rule, hadamard=hadamard
        )
    name = fmt if isinstance(fmt, str) else fmt.name
    if rule:  # `_check` raises, since fused steps support no other rule
        _check(QuantizeArguments(h, name, group, scale, symmetric, "rms_norm", delta, weight, None, eps, zero, rule))
    codes, found, zeros = torch.ops.lowbit.add_norm_quantize(
        h, delta, weight, eps, name, group, scale, symmetric, zero, hadamard
    )
    zero = zeros if zeros.numel() and zero is None else zero
    return Activations(codes, found if scale is None else scale, zero, dtype=h.dtype)


def layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, fmt: str | NumberFormat, *, residual: Tensor | None = None,
    group: int = 0, scale: Tensor | None = None, symmetric: bool = True, zero: Tensor | None = None, rule: str = "",
    hadamard: int = 0,
) -> Activations:  # fmt: skip
    """Returns `quantize_activations` of (x - mean) / sqrt(variance + eps) * weight + bias. All else is as in
    `rms_norm_quantize`."""
    return _quantize(x, fmt, group, scale, symmetric, zero, rule, hadamard, "layer_norm", residual, weight, bias, eps)


def silu_mul_quantize(
    gate: Tensor, up: Tensor, fmt: str | NumberFormat, *, group: int = 0, scale: Tensor | None = None,
    symmetric: bool = True, zero: Tensor | None = None, rule: str = "", hadamard: int = 0,
) -> Activations:  # fmt: skip
    """Returns `quantize_activations` of silu(gate) * up. This value is computed in float32 and not rounded before it is
    quantized."""
    return _quantize(gate, fmt, group, scale, symmetric, zero, rule, hadamard, "silu", up)


def quantize_refusals(fmt: NumberFormat, dtype: torch.dtype, k: int, device: torch.device | str) -> tuple[str, ...]:
    """Returns the reasons why the kernel cannot quantize activations of `dtype` with `k` columns on `device`; empty if it can.
    Plain torch quantizes what the kernel cannot."""
    device = torch.device(device)
    if device.type != "cuda":
        return (f"runs on NVIDIA GPUs, x is on {device.type}",)
    reasons = [f"the kernel {reason}" for reason in machine_refusals(device)]
    # For sm_89, Triton 3.6 converts to 8-bit floats in two steps, the first of which truncates.
    if not reasons and isinstance(fmt, FloatFormat) and torch.cuda.get_device_capability(device) < (9, 0):
        reasons.append(f"needs sm_90 for {fmt.name}, {torch.cuda.get_device_name(device)} is older")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"takes fp16 and bf16, not {str(dtype).removeprefix('torch.')}")
    if k > MOST_COLUMNS:
        reasons.append(f"holds rows of at most {MOST_COLUMNS} columns, K is {k}")
    return (*reasons, *triton_refusals())


def _quantize(
    x: Tensor, fmt: str | NumberFormat, group: int, scale: Tensor | None, symmetric: bool, zero: Tensor | None,
    rule: str, hadamard: int,
    before: str = "", beside: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0,
) -> Activations:  # fmt: skip
    name = fmt if isinstance(fmt, str) else fmt.name
    made = torch.ops.lowbit.quantize_activations(
        x, name, group, scale, symmetric, before, beside, weight, bias, eps, zero, rule, hadamard
    )
    zero = made[2] if scale is None and not symmetric else zero
    total = made[-1] if before.endswith("norm") and beside is not None else None
    if scale is not None and rule == ActivationRule.COMPRESSED_TENSORS.value and x.dtype != torch.float32:
        scale = scale.to(x.dtype).float()  # the rule rounds the scale before the division
    return Activations(made[0], made[1] if scale is None else scale, zero, total, x.dtype)


class QuantizeArguments(NamedTuple):
    """The arguments of `lowbit::quantize_activations`. `before` is the function whose result is quantized. `beside` is its
    second operand: the residual of a norm, or up in silu(gate) * up."""

    x: Tensor
    format: str
    group: int = 0
    scale: Tensor | None = None
    symmetric: bool = True
    before: str = ""
    beside: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    zero: Tensor | None = None
    rule: str = ""
    hadamard: int = 0


def _check(a: QuantizeArguments) -> NumberFormat:
    """Returns the format. Raises ValueError unless the arguments fit together."""
    x, fmt, group, scale, symmetric, before, beside, weight, bias, _, zero, rule, hadamard = a
    who = "quantize_activations"
    if fmt not in CODE_DTYPES:
        raise ValueError(f"{who}: activations become {', '.join(CODE_DTYPES)}, not {fmt}")
    if x.dtype not in _DTYPES or x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{who}: x is fp16, bf16 or fp32 [.., K], got {x.dtype} {tuple(x.shape)}")
    if group < 0 or group & (group - 1):
        raise ValueError(f"{who}: a group has a power of two of columns, or 0 for all of them, got {group}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or group):
        raise ValueError(
            f"{who}: a given scale is one float32 number for all of x, without groups, got {scale.dtype} {tuple(scale.shape)}"
        )
    if (zero is not None) != (scale is not None and not symmetric):
        raise ValueError(f"{who}: a given scale of asymmetric activations and a given zero go together")
    if zero is not None and (zero.numel() != 1 or zero.dtype != torch.int32):
        raise ValueError(f"{who}: a given zero is one int32 number for all of x, got {zero.dtype} {tuple(zero.shape)}")
    if not symmetric and (fmt != "int8" or group):
        raise ValueError(f"{who}: zero points go with int8 and one scale per token, not with {fmt} in groups of {group}")
    if before not in BEFORE:
        raise ValueError(f"{who}: fused are {', '.join(BEFORE[1:])}, not {before!r}")
    if (before == "silu") > (beside is not None) or (before == "" and beside is not None):
        raise ValueError(f"{who}: {'silu needs' if before else 'nothing is'} a second tensor")
    if beside is not None and (beside.shape != x.shape or beside.dtype != x.dtype):
        raise ValueError(f"{who}: {x.dtype} {tuple(x.shape)} goes with its like, got {beside.dtype} {tuple(beside.shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and tuple(vector.shape) != x.shape[-1:]:
            raise ValueError(f"{who}: {name} is [{x.shape[-1]}], got {tuple(vector.shape)}")
    if (weight is None) == before.endswith("norm"):
        raise ValueError(f"{who}: {before or 'x alone'} {'needs a' if weight is None else 'has no'} weight")
    if rule not in RULES:
        raise ValueError(f"{who}: rules are {', '.join(map(repr, RULES))}, not {rule!r}")
    if fmt not in RULES[rule]:
        raise ValueError(f"{who}: the rule {rule!r} makes {' and '.join(RULES[rule])}, not {fmt}")
    if rule and before:
        raise ValueError(
            f"{who}: the rule {rule!r} quantizes what was rounded to x's type, which is not so when fused with {before}; "
            "quantize what that step returns"
        )
    if hadamard:
        check_block(hadamard, x.shape[-1])
    return _format(fmt)


def _plain(a: QuantizeArguments) -> list[Tensor]:
    parsed, values, total = _check(a), a.x, None
    if a.before == "silu":
        assert a.beside is not None
        values = silu_mul_reference(a.x, a.beside)
    else:
        if a.beside is not None:
            values = total = (a.x.float() + a.beside.float()).to(a.x.dtype)
        if a.before == "rms_norm" and a.weight is not None:
            values = rms_norm_reference(values, a.weight, a.eps)
        elif a.weight is not None:
            values = layer_norm_reference(values, a.weight, a.bias, a.eps)
    if a.hadamard:
        values = rotate_channels(values, a.hadamard)
    if a.format == "int8" and a.symmetric and a.scale is None and not (a.group or a.rule) and a.x.numel():
        codes, x_scale = quantize_rows(values)
        return [codes, x_scale] if total is None else [codes, x_scale, total]
    rule = ActivationRule(a.rule)
    codes, *found = quantize_activations_reference(values, parsed, a.group, a.scale, a.symmetric, a.zero, rule)
    return [t for t in (codes, *(found if a.scale is None else ()), total) if t is not None]


def _on_gpu(a: QuantizeArguments, total: Tensor | None = None) -> list[Tensor]:
    """Runs the kernel. `total`: a tensor to which x + residual is written, which may be x itself; by default a new one is
    allocated."""
    x = a.x
    rows = _rows(x)
    beside_rows = None if a.beside is None else _rows(a.beside)
    others = tuple(spec_of(t) for t in (a.beside, a.weight, a.bias, a.scale, a.zero, total))
    strides = rows.stride(0), None if beside_rows is None else beside_rows.stride(0)
    aligned = rows.data_ptr() % 16 == 0 and all(stride is None or stride % 8 == 0 for stride in strides)
    plan = _plan(a.format, x.shape, x.dtype, x.device, a.group, a.symmetric, a.before, others, aligned, a.rule, a.hadamard)
    if plan is None:
        made = _plain(a)
        return made if total is None else [*made[:-1], total.copy_(made[-1])]
    made = plan(rows, beside_rows, a.weight, a.bias, a.scale, a.eps, a.zero, total)
    return made if x.dim() == 2 else [t.reshape(*x.shape[:-1], t.shape[-1]) for t in made]


def _rows(x: Tensor) -> Tensor:
    """Returns x as a matrix without gaps within rows."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def _plan(
    fmt: str, shape: torch.Size, dtype: torch.dtype, on: torch.device, group: int, symmetric: bool, before: str,
    others: tuple[TensorSpec | None, ...], aligned: bool, rule: str, hadamard: int,
) -> QuantizePlan | None:  # fmt: skip
    """Returns the plan of a call, None if the kernel does not support it. Raises ValueError if the tensors do not fit
    together."""
    beside, weight, bias, scale, zero = meta_tensors(others[:-1])
    x = torch.empty(shape, dtype=dtype, device="meta")
    parsed = _check(QuantizeArguments(x, fmt, group, scale, symmetric, before, beside, weight, bias, 0.0, zero, rule, hadamard))
    device_of("quantize_activations", others, on)
    k = shape[-1]
    if quantize_refusals(parsed, dtype, k, on):
        return None
    from lowbit.kernels.elementwise.quantize_rows import QuantizePlan, QuantizeRequest

    residual = before != "silu" and beside is not None
    request: QuantizeRequest = QuantizeRequest(
        before, parsed, group, scale is not None, symmetric, residual, ActivationRule(rule), hadamard
    )
    vectors = aligned and k % 8 == 0 and all(t is None or t[3] for t in others)
    return QuantizePlan(shape[:-1].numel(), k, request, vectors, machine_of(on))


def _fake(a: QuantizeArguments) -> list[Tensor]:
    _check(a)
    x, k = a.x, a.x.shape[-1]
    groups = -(-k // a.group) if a.group else 1
    filled = -(-k // CODE_VECTOR) * CODE_VECTOR if x.device.type == "cuda" else k
    made = [x.new_empty((*x.shape[:-1], filled), dtype=CODE_DTYPES[a.format])[..., :k]]
    if a.scale is None:
        made.append(x.new_empty((*x.shape[:-1], groups), dtype=torch.float32))
    if a.scale is None and not a.symmetric:
        made.append(x.new_empty((*x.shape[:-1], groups), dtype=torch.int32))
    if a.before != "silu" and a.beside is not None:
        made.append(torch.empty_like(x))
    return made


register(
    "quantize_activations(Tensor x, str format, SymInt group=0, Tensor? scale=None, bool symmetric=True, str before='',"
    " Tensor? beside=None, Tensor? weight=None, Tensor? bias=None, float eps=0.0, Tensor? zero=None, str rule='',"
    " SymInt hadamard=0) -> Tensor[]",
    cuda=_on_gpu,
    cpu=_plain,
    fake=_fake,
    arguments=QuantizeArguments,
)


class AddNormQuantizeArguments(NamedTuple):
    """The arguments of `lowbit::add_norm_quantize`."""

    h: Tensor
    delta: Tensor
    weight: Tensor
    eps: float
    format: str
    group: int = 0
    scale: Tensor | None = None
    symmetric: bool = True
    zero: Tensor | None = None
    hadamard: int = 0

    def without_addition(self) -> QuantizeArguments:
        """Returns the arguments with which `lowbit::quantize_activations` computes the same, but returns the sum and does not
        write it to h."""
        return QuantizeArguments(
            self.h, self.format, self.group, self.scale, self.symmetric, "rms_norm", self.delta, self.weight, None, self.eps,
            self.zero, "", self.hadamard,
        )  # fmt: skip


def _three(made: list[Tensor], h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, scale and zero. A scale or zero that was given, or is not needed, is replaced by an empty tensor, because
    an operator that writes to an argument must return a fixed number of tensors."""
    codes, scale, zero = (*made, *(h.new_empty(0) for _ in range(3 - len(made))))
    return codes, scale, zero


def _add_norm_plain(a: AddNormQuantizeArguments) -> tuple[Tensor, Tensor, Tensor]:
    *made, total = _plain(a.without_addition())
    a.h.copy_(total)
    return _three(made, a.h)


def _add_norm_on_gpu(a: AddNormQuantizeArguments) -> tuple[Tensor, Tensor, Tensor]:
    if not a.h.is_contiguous():
        raise ValueError(f"add_norm_quantize: h is contiguous, got strides {a.h.stride()} of {tuple(a.h.shape)}")
    *made, _ = _on_gpu(a.without_addition(), a.h)
    return _three(made, a.h)


def _add_norm_fake(a: AddNormQuantizeArguments) -> tuple[Tensor, Tensor, Tensor]:
    *made, _ = _fake(a.without_addition())
    return _three(made, a.h)


register(
    "add_norm_quantize(Tensor(a!) h, Tensor delta, Tensor weight, float eps, str format, SymInt group=0, Tensor? scale=None,"
    " bool symmetric=True, Tensor? zero=None, SymInt hadamard=0) -> (Tensor, Tensor, Tensor)",
    cuda=_add_norm_on_gpu,
    cpu=_add_norm_plain,
    fake=_add_norm_fake,
    arguments=AddNormQuantizeArguments,
)
