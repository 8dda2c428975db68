"""The torch operators `lowbit::norm_gemm` and `lowbit::residual_gemm`: products of a decode step, fused with norms, gate and
residual.

A decoder layer is four of these products and one attention kernel, between qkv and o. They support up to 64 tokens. The engine
uses them for up to 64 tokens on GPUs with wgmma (sm_90), else for up to 8:

    qkv      norm_gemm(x, qkv, squares)                    y = x . w^T / rms + bias
    o        residual_gemm(attention, o, h, gamma)         h += y; x = h * gamma * factor; squares of h
    gate-up  norm_gemm(x, gate_up, squares, gated="silu")  y = silu(gate) * up
    down     residual_gemm(y, down, h, gamma of the next layer)

x is h * gamma; the next product divides its sums by the RMS. Unlike a normalised x, it is not bounded. So in fp16 it is
multiplied by `factor`, a power of two, by which the next product also divides (`factor_of`). The kernel that writes squares
[parts, M] chooses `parts`. The operators are opaque to torch.compile, like `lowbit::fragment_gemm`.

The small-M kernel also supports weights that are not quantized, in the layout of `nn.Linear`, for up to 16 tokens. The
operators' argument `codes` is then the matrix itself, `scheme` is "dense", and all gate rows precede all up rows instead of
alternating.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit.formats import QuantTensor
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.fused_gemm import CHAIN_TOKENS, MOST_PARTS, choose_chain, parts_of
from lowbit.kernels.choose.tiles import DENSE_BITS, RING_TOKENS, GemmShape, RingTile, Role
from lowbit.kernels.reference.fused_gemm import norm_gemm_reference, residual_gemm_reference
from lowbit.kernels.reference.lora import lora_terms_reference, part_of_columns
from lowbit.ops.fragment_gemm import aligned_rows, check_bias, check_product, is_of_tokens, plan_for
from lowbit.ops.lora import LEAST_RANK, MOST_EPILOGUE_RANK, LoraSums
from lowbit.ops.operands import TensorSpec, check_weight_places, meta_tensors, scheme_of, spec_of
from lowbit.ops.register import register
from lowbit.ops.workspace import workspace
from lowbit.pack import DENSE_FORM, DenseWeight, FragmentWeight, WeightForm, weight_form
from lowbit.pack.gated import alternate
from lowbit.pack.gemm_weight import GemmWeight

Gated = Literal["none", "silu", "gelu_tanh"]

DENSE = "dense"
"""The value of `scheme` for a weight that is not quantized."""

Weight = FragmentWeight | DenseWeight


def chain_refusals(w: GemmWeight | DenseWeight, m: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the reasons why no kernel multiplies m tokens of `dtype` by `w` with norm, gate or residual in its epilogue;
    empty if one does.
    """
    if isinstance(w, DenseWeight):
        return _dense_refusals(w, m, dtype)
    reasons = []
    if not isinstance(w, FragmentWeight):
        reasons.append(f"takes weights in fragment order (FragmentWeight), not {type(w).__name__}")
    if w.scheme.activation is not None:
        reasons.append(f"takes activations of 16 bits; {w.scheme} quantizes them to {w.scheme.activation.name}")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"takes x in fp16 or bf16, not {dtype}")
    if not 1 <= m <= CHAIN_TOKENS:
        reasons.append(f"takes 1 to {CHAIN_TOKENS} tokens, not {m}")
    return tuple(reasons)


def _dense_refusals(w: DenseWeight, m: int, dtype: torch.dtype) -> tuple[str, ...]:
    reasons = []
    if dtype not in (torch.float16, torch.bfloat16) or w.values.dtype != dtype:
        reasons.append(f"takes x and weights of 16 bits in fp16 or bf16, one type for both, not {dtype} and {w.values.dtype}")
    # Under torch.compile tensors have no addresses. The operator checks the alignment of weights again at its launch.
    aligned = torch.compiler.is_compiling() or w.values.data_ptr() % 16 == 0
    if w.shape[1] % 8 or not w.values.is_contiguous() or not aligned:
        reasons.append(f"takes weights of 16 bits whose rows start at multiples of 16 bytes, not {w.shape[1]} wide")
    if not 1 <= m <= RING_TOKENS:
        reasons.append(f"takes weights of 16 bits for 1 to {RING_TOKENS} tokens, not {m}")
    return tuple(reasons)


def factor_of(gamma: Tensor, dtype: torch.dtype) -> float:
    """Returns the largest power of two for which h * gamma * factor is finite in `dtype` if h is.

    The largest |gamma| [N] times the factor is between 1/2 and 1. In bf16, which has float32's range, it is 1.0. The cost: fp16
    rounds numbers below 2^-14 to multiples of 2^-24. This is no larger than the usual rounding error if the root mean square of
    h * gamma * factor is 2^-13 or more.
    """
    largest = float(gamma.abs().max())
    if dtype != torch.float16 or largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest)
    return 2.0 ** -(exponent - (mantissa == 0.5))


def norm_gemm(
    x: Tensor, w: Weight, squares: Tensor, bias: Tensor | None = None, *, width: int, eps: float,
    gated: Gated = "none", factor: float = 1.0, batch_invariant: bool = False, lora: LoraSums | None = None,
) -> Tensor:  # fmt: skip
    """Returns y [M, N] = x [M, K] . dequant(w)[N, K]^T / (rms * factor) + bias [N], in x's dtype, fp16 or bf16, M <= 64.

    x is h * gamma * factor. rms = sqrt(sum of `squares` float32 [parts, M] / width + eps) is the RMS of the rows of h, which
    have `width` elements. With `gated`, y [M, N / 2] = act(gate) * up; w is a result of `pack.gated.pack_gated` (16-bit
    weights: all gate rows, then all up rows), and bias has the same order; it may also be [M, N], one for each row of x, with
    no division by the RMS. M <= 16 for 16-bit weights. With `batch_invariant`, a row of y has the same bits for every M. `lora`
    are adapters whose sums are divided by the RMS; b t is added with the bias, whose order its columns have. Raises ValueError
    for tensors that do not fit together.
    """
    _check_weight("norm_gemm", w, x)
    codes, scale, channel, scheme, subnormal = _as_passed(w)
    return torch.ops.lowbit.norm_gemm(
        x, codes, scale, channel, squares, bias, scheme, w.shape[0], width, eps, factor, gated, batch_invariant, subnormal,
        *(() if lora is None else lora.passed),
    )  # fmt: skip


def residual_gemm(
    x: Tensor, w: Weight, h: Tensor, gamma: Tensor, bias: Tensor | None = None, *, factor: float = 1.0,
    batch_invariant: bool = False, lora: LoraSums | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes h [M, N] += x [M, K] . dequant(w)[N, K]^T + bias [N] in place; returns (x of the next norm [M, N], squares
    float32 [parts, M]).

    h is rounded to its type, fp16 or bf16. From the rounded h come the returned x = h * gamma [N] * factor, in the type of x,
    and `squares`, the sums of squares over parts of its rows; summed over parts they are the rows' sums of squares. M,
    `batch_invariant` and `lora` as in `norm_gemm`. Raises ValueError for tensors that do not fit together.
    """
    _check_weight("residual_gemm", w, x)
    codes, scale, channel, scheme, subnormal = _as_passed(w)
    return torch.ops.lowbit.residual_gemm(
        x, codes, scale, channel, h, gamma, bias, scheme, factor, batch_invariant, subnormal,
        *(() if lora is None else lora.passed),
    )  # fmt: skip


def _as_passed(w: Weight) -> tuple[Tensor, Tensor | None, Tensor | None, str, bool]:
    """Returns a weight as arguments of the operators: codes, scales of groups, scales of channels, name of the scheme, True for
    subnormal codes."""
    if isinstance(w, DenseWeight):
        return w.values, None, None, DENSE, False
    return w.codes, w.scale, w.channel_scale, w.scheme.name, w.subnormal


def _check_weight(operator: str, w: Weight, x: Tensor) -> None:
    fits = x.dim() == 2 and 1 <= x.shape[0] <= CHAIN_TOKENS
    if isinstance(w, DenseWeight):
        fits = fits and not _dense_refusals(w, x.shape[0], x.dtype)
    if not fits:
        found = chain_refusals(w, x.shape[0], x.dtype) or (f"x is [M, K], got {tuple(x.shape)}",)
        raise ValueError(f"{operator} {'; '.join(found)}")


def _check_product(
    operator: str, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
    scheme: str, n: int, subnormal: bool,
) -> None:  # fmt: skip
    """As `check_product`, but also for 16-bit weights."""
    if scheme != DENSE:
        return check_product(operator, x, codes, scale, channel_scale, bias, scheme_of(scheme), n, subnormal)
    expected = (n, x.shape[-1])
    if x.dtype not in (torch.float16, torch.bfloat16) or codes.dtype != x.dtype or tuple(codes.shape) != expected:
        raise ValueError(
            f"{operator}: a weight of 16 bits is {list(expected)} in the type of x, fp16 or bf16; got x {x.dtype} "
            f"{tuple(x.shape)} and {codes.dtype} {tuple(codes.shape)}"
        )
    check_bias(operator, bias, x.shape[0], n)


def _shape(scheme: str, m: int, n: int, k: int) -> GemmShape:
    return GemmShape(m, n, k, DENSE_BITS if scheme == DENSE else scheme_of(scheme).weight.bits)


def _form(scheme: str, scale: Tensor | None, channel_scale: Tensor | None, subnormal: bool) -> WeightForm:
    if scheme == DENSE:
        return DENSE_FORM
    return weight_form(scheme_of(scheme), None if scale is None else scale.dtype, channel_scale is not None, subnormal)


class NormGemmArguments(NamedTuple):
    """The arguments of `lowbit::norm_gemm`."""

    x: Tensor
    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    squares: Tensor
    bias: Tensor | None
    scheme: str
    n: int
    width: int
    eps: float
    factor: float
    gated: Gated
    batch_invariant: bool = False
    subnormal: bool = False
    t: Tensor | None = None
    b: Tensor | None = None
    adapter_of: Tensor | None = None
    widths: list[int] | tuple[int, ...] = ()
    alternates: bool = False

    @property
    def weight(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes, scales of groups and scales of channels."""
        return self.codes, self.scale, self.channel_scale


class ResidualGemmArguments(NamedTuple):
    """The arguments of `lowbit::residual_gemm`."""

    x: Tensor
    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    h: Tensor
    gamma: Tensor
    bias: Tensor | None
    scheme: str
    factor: float
    batch_invariant: bool = False
    subnormal: bool = False
    t: Tensor | None = None
    b: Tensor | None = None
    adapter_of: Tensor | None = None
    widths: list[int] | tuple[int, ...] = ()
    alternates: bool = False

    @property
    def weight(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes, scales of groups and scales of channels."""
        return self.codes, self.scale, self.channel_scale


def _check_lora(operator: str, a: NormGemmArguments | ResidualGemmArguments, n: int) -> None:
    """Raises ValueError unless the adapters' tensors fit a product of N columns."""
    if a.t is None:
        return
    m, t, b, adapter_of = a.x.shape[0], a.t, a.b, a.adapter_of
    rank = t.shape[-1]
    fits = b is not None and b.shape[1:] == (n, rank) and sum(a.widths) == n and b.dtype == a.x.dtype
    fits = fits and t.dim() == 4 and t.shape[1:3] == (m, len(a.widths)) and t.dtype == torch.float32
    fits = fits and adapter_of is not None and tuple(adapter_of.shape) == (m,) and adapter_of.dtype == torch.int32
    if not fits or rank % LEAST_RANK or rank > MOST_EPILOGUE_RANK:
        given = [None if each is None else (each.dtype, tuple(each.shape)) for each in (t, b, adapter_of)]
        raise ValueError(
            f"{operator}: adapters of {n} columns in parts {list(a.widths)} are t float32 [splits, {m}, {len(a.widths)}, R], "
            f"b {a.x.dtype} [adapters, {n}, R] and adapter_of int32 [{m}], R {LEAST_RANK} to {MOST_EPILOGUE_RANK}; got {given}"
        )


def _terms(a: NormGemmArguments | ResidualGemmArguments) -> Any:
    """Returns the compile-time part of the adapters; None without any."""
    if a.t is None or a.b is None:
        return None
    from lowbit.kernels.parts.lora_epilogue import LoraTerms

    half: Any = "fp16" if a.x.dtype == torch.float16 else "bf16"
    return LoraTerms(tuple(a.widths), a.alternates, a.b.shape[0], a.b.shape[2], a.t.shape[0], half)


def _bias_with_terms(a: NormGemmArguments | ResidualGemmArguments) -> Tensor | None:
    """Returns the bias, with what adapters add to each token."""
    if a.t is None or a.b is None or a.adapter_of is None:
        return a.bias
    part_of = part_of_columns(tuple(a.widths), a.alternates)
    terms = lora_terms_reference(a.t, a.b, a.adapter_of, part_of)
    return terms if a.bias is None else terms + a.bias.double()


def _check_norm(a: NormGemmArguments) -> None:
    """Raises ValueError unless the tensors are operands of one product with the norm in its epilogue."""
    _check_product("norm_gemm", a.x, *a.weight, a.bias, a.scheme, a.n, a.subnormal)
    _check_lora("norm_gemm", a, a.n)
    m, squares, gated = a.x.shape[0], a.squares, a.gated
    if squares.dim() != 2 or squares.shape[1] != m or squares.dtype != torch.float32 or not 1 <= squares.shape[0] <= MOST_PARTS:
        raise ValueError(
            f"norm_gemm: squares are float32 [parts, {m}], 1 to {MOST_PARTS} parts, got {squares.dtype} {tuple(squares.shape)}"
        )
    if gated not in ("none", "silu", "gelu_tanh") or (gated != "none" and a.n % 16):
        raise ValueError(
            f"norm_gemm: gated is none, or silu or gelu_tanh with row blocks of 8 gates and 8 ups; got {gated}, N {a.n}"
        )


def _check_residual(a: ResidualGemmArguments) -> None:
    """Raises ValueError unless the tensors are operands of one product with the residual in its epilogue."""
    x, h, gamma = a.x, a.h, a.gamma
    if h.dim() != 2 or h.shape[0] != x.shape[0] or h.dtype not in (torch.float16, torch.bfloat16) or not h.is_contiguous():
        raise ValueError(
            f"residual_gemm: h is fp16 or bf16 [{x.shape[0]}, N], contiguous; got {h.dtype} {tuple(h.shape)}, "
            f"strides {tuple(h.stride())}"
        )
    _check_product("residual_gemm", x, *a.weight, a.bias, a.scheme, h.shape[1], a.subnormal)
    _check_lora("residual_gemm", a, h.shape[1])
    if tuple(gamma.shape) != (h.shape[1],) or not gamma.is_floating_point():
        raise ValueError(f"residual_gemm: gamma is floating-point [{h.shape[1]}], got {gamma.dtype} {tuple(gamma.shape)}")


# ---- on a GPU


def _norm_gemm(a: NormGemmArguments) -> Tensor:
    x, squares = aligned_rows(a.x), a.squares.contiguous()
    others = tuple(spec_of(t) for t in (*a.weight, squares, a.bias))
    lora = _lora_specs(a)
    plan = _norm_plan(
        a.scheme, x.shape[0], a.n, x.shape[1], x.dtype, x.device, others, a.gated, a.batch_invariant, a.subnormal, *lora
    )
    space = workspace(x.device, *plan.workspace)
    bias = a.bias.contiguous() if a.bias is not None and is_of_tokens(a.bias) else a.bias
    adapters = (a.t, a.b, a.adapter_of)
    return plan(x, *a.weight, bias, *space, squares, None, None, a.factor, 1.0 / a.width, a.eps, *adapters)


def _lora_specs(a: NormGemmArguments | ResidualGemmArguments) -> tuple[tuple[TensorSpec | None, ...], tuple[int, ...], bool]:
    """Returns the properties of the adapters on which a plan depends."""
    return tuple(map(spec_of, (a.t, a.b, a.adapter_of))), tuple(a.widths), a.alternates


def _residual_gemm(a: ResidualGemmArguments) -> tuple[Tensor, Tensor]:
    x, gamma = aligned_rows(a.x), a.gamma.contiguous()
    others = tuple(spec_of(t) for t in (*a.weight, a.h, gamma, a.bias))
    if not a.h.is_contiguous():
        _check_residual(a)
    lora = _lora_specs(a)
    plan = _residual_plan(a.scheme, x.shape[0], x.shape[1], x.dtype, x.device, others, a.batch_invariant, a.subnormal, *lora)
    squares = torch.empty((plan.squares_parts, x.shape[0]), dtype=torch.float32, device=x.device)
    bias = a.bias.contiguous() if a.bias is not None and is_of_tokens(a.bias) else a.bias
    space, adapters = workspace(x.device, *plan.workspace), (a.t, a.b, a.adapter_of)
    return plan(x, *a.weight, bias, *space, squares, a.h, gamma, a.factor, None, None, *adapters), squares


@functools.lru_cache(maxsize=4096)
def _norm_plan(
    scheme: str, m: int, n: int, k: int, dtype: torch.dtype, on: torch.device, others: tuple[TensorSpec | None, ...],
    gated: Gated, batch_invariant: bool, subnormal: bool, adapters: tuple[TensorSpec | None, ...], widths: tuple[int, ...],
    alternates: bool,
) -> Any:  # fmt: skip
    """Returns the plan of a product with the norm in its epilogue. Raises ValueError if the tensors do not fit together."""
    codes, scale, channel_scale, squares, bias = meta_tensors(others)
    x, weight = torch.empty((m, k), dtype=dtype, device="meta"), (codes, scale, channel_scale)
    lora = (*meta_tensors(adapters), widths, alternates)
    given = NormGemmArguments(x, *weight, squares, bias, scheme, n, k, 0.0, 1.0, gated, batch_invariant, subnormal, *lora)
    _check_norm(given)
    check_weight_places("norm_gemm", on, (*others[:3], adapters[1], *others[3:], *adapters), 4, "FragmentWeight.pack")
    machine, shape, form = machine_of(on), _shape(scheme, m, n, k), _form(scheme, scale, channel_scale, subnormal)
    role: Role = "norm" if gated == "none" else "gated"
    tile = choose_chain(role, shape, machine, batch_invariant)
    end = {"norm_parts": squares.shape[0], "gate": gated, "bias_of_tokens": is_of_tokens(bias), "lora": _terms(given)}
    return plan_for(tile, shape, form, dtype, bias is not None, machine, **end)


@functools.lru_cache(maxsize=4096)
def _residual_plan(
    scheme: str, m: int, k: int, dtype: torch.dtype, on: torch.device, others: tuple[TensorSpec | None, ...],
    batch_invariant: bool, subnormal: bool, adapters: tuple[TensorSpec | None, ...], widths: tuple[int, ...], alternates: bool,
) -> Any:  # fmt: skip
    """Returns the plan of a product with the residual in its epilogue. Raises ValueError if the tensors do not fit together."""
    codes, scale, channel_scale, h, gamma, bias = meta_tensors(others)
    x, weight = torch.empty((m, k), dtype=dtype, device="meta"), (codes, scale, channel_scale)
    lora = (*meta_tensors(adapters), widths, alternates)
    given = ResidualGemmArguments(x, *weight, h, gamma, bias, scheme, 1.0, batch_invariant, subnormal, *lora)
    _check_residual(given)
    check_weight_places("residual_gemm", on, (*others[:3], adapters[1], *others[3:], *adapters), 4, "FragmentWeight.pack")
    machine, shape, form = machine_of(on), _shape(scheme, m, h.shape[1], k), _form(scheme, scale, channel_scale, subnormal)
    tile = choose_chain("residual", shape, machine, batch_invariant)
    if not isinstance(tile, RingTile) and not others[3][3]:  # type: ignore[index]
        raise ValueError("residual_gemm: h must start at a multiple of 16 bytes; clone() it")
    h_type = "fp16" if h.dtype == torch.float16 else "bf16"
    end = {"h_type": h_type, "bias_of_tokens": is_of_tokens(bias), "lora": _terms(given)}
    return plan_for(tile, shape, form, dtype, bias is not None, machine, **end)


# ---- on a CPU, and for tensors without data


def _unpacked(
    codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, scheme: str, shape: tuple[int, int], subnormal: bool
) -> QuantTensor | DenseWeight:
    if scheme == DENSE:
        return DenseWeight(codes)
    return FragmentWeight(codes, scale, channel_scale, scheme_of(scheme), shape, subnormal).unpack()


def _norm_gemm_cpu(a: NormGemmArguments) -> Tensor:
    _check_norm(a)
    w, bias = _unpacked(*a.weight, a.scheme, (a.n, a.x.shape[1]), a.subnormal), _bias_with_terms(a)
    if isinstance(w, DenseWeight) and a.gated != "none":
        w = DenseWeight(alternate(*a.codes.chunk(2)))
        bias = None if bias is None else alternate(*bias.movedim(-1, 0).chunk(2)).movedim(0, -1)  # [N] or [M, N]
    y = norm_gemm_reference(a.x, w, a.squares, bias, width=a.width, eps=a.eps, gated=a.gated, x_factor=a.factor)
    return y.to(a.x.dtype)


def _residual_gemm_cpu(a: ResidualGemmArguments) -> tuple[Tensor, Tensor]:
    _check_residual(a)
    w = _unpacked(*a.weight, a.scheme, (a.h.shape[1], a.x.shape[1]), a.subnormal)
    added, following, squares = residual_gemm_reference(a.x, w, a.h, a.gamma, _bias_with_terms(a), x_factor=a.factor)
    a.h.copy_(added)
    return following, squares


def _norm_fake(a: NormGemmArguments) -> Tensor:
    _check_norm(a)
    return a.x.new_empty((a.x.shape[0], a.n if a.gated == "none" else a.n // 2))


def _residual_fake(a: ResidualGemmArguments) -> tuple[Tensor, Tensor]:
    _check_residual(a)
    parts = 1
    if a.x.device.type == "cuda":
        m, n, k = int(a.x.shape[0]), int(a.h.shape[1]), int(a.x.shape[1])  # the choice of a tile needs numbers, not symbols
        shape = _shape(a.scheme, m, n, k)
        tile = choose_chain("residual", shape, machine_of(a.x.device), a.batch_invariant)
        parts = parts_of(tile, shape)
    return torch.empty_like(a.h, dtype=a.x.dtype), a.x.new_empty((parts, a.x.shape[0]), dtype=torch.float32)


register(
    "norm_gemm(Tensor x, Tensor codes, Tensor? scale, Tensor? channel_scale, Tensor squares, Tensor? bias, str scheme,"
    " SymInt n, int width, float eps, float factor, str gated, bool batch_invariant=False, bool subnormal=False,"
    " Tensor? t=None, Tensor? b=None, Tensor? adapter_of=None, int[] widths=[], bool alternates=False) -> Tensor",
    cuda=_norm_gemm,
    cpu=_norm_gemm_cpu,
    fake=_norm_fake,
    arguments=NormGemmArguments,
)
register(
    "residual_gemm(Tensor x, Tensor codes, Tensor? scale, Tensor? channel_scale, Tensor(a!) h, Tensor gamma, Tensor? bias,"
    " str scheme, float factor, bool batch_invariant=False, bool subnormal=False, Tensor? t=None, Tensor? b=None,"
    " Tensor? adapter_of=None, int[] widths=[], bool alternates=False) -> (Tensor, Tensor)",
    cuda=_residual_gemm,
    cpu=_residual_gemm_cpu,
    fake=_residual_fake,
    arguments=ResidualGemmArguments,
)
