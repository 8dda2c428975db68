"""The torch operators of a language model's step besides products and attention: embedding, norms with residual, gates.

Each is one launch on NVIDIA GPUs (kernels/elementwise/norm.py, gate.py) and plain torch on a CPU
(kernels/reference/elementwise.py). They are used for captured steps of a few rows and for prompts of thousands of tokens. The
result of a row depends on that row alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit.formats import QuantTensor
from lowbit.hardware.machine import machine_of
from lowbit.kernels.reference.elementwise import (
    GATES,
    add_reference,
    embed_rows_reference,
    gate_reference,
    norm_reference,
    scaled_reference,
)
from lowbit.ops.operands import TensorSpec, check_one_device, device_of, meta_tensors, spec_of
from lowbit.ops.register import register

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.gate import GatePlan
    from lowbit.kernels.elementwise.norm import EmbedPlan, NormPlan

ENDS = ("", "norm", "squares")
"""What is computed after an embedding or a sum in the same launch. Kernels get the index in this tuple as NORM
(kernels/elementwise/norm.py)."""
MOST_COLUMNS = 16384
"""Maximum number of columns of a row, which the kernels hold in registers."""
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """An 8-bit embedding: value = (code - 128) * scale of the row. codes uint8 [V, H] and scale [V] (float32 or 16 bits) are
    the codes and the scales of a `w8a16` weight as they are stored. Raises ValueError for other shapes or types."""

    codes: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8 or not self.codes.is_contiguous():
            raise ValueError(
                f"an embedding table has contiguous codes uint8 [V, H], got {self.codes.dtype} {tuple(self.codes.shape)}"
            )
        if self.scale.shape != self.codes.shape[:1] or self.scale.dtype not in _FLOATS:
            raise ValueError(
                f"an embedding table of {self.codes.shape[0]} rows has one floating scale each, "
                f"got {self.scale.dtype} {tuple(self.scale.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    @classmethod
    def from_quant_tensor(cls, q: QuantTensor) -> EmbeddingTable:
        """Returns the table of a `w8a16` weight [V, H]; raises ValueError for any other scheme, or for a weight with an input
        transform or a low-rank correction."""
        if str(q.scheme) != "w8a16" or q.input_transform.parts or q.low_rank is not None:
            raise ValueError(f"an embedding table is made of a plain w8a16 weight, got {q.scheme}")
        return cls(q.codes.contiguous(), q.scale[:, 0].contiguous())


def embed_rows(
    tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, dtype: torch.dtype, *, scale: float = 1.0
) -> Tensor:
    """Returns h [B, H] of `dtype`. Row b is the embedding of token tokens[rows[b]], or of tokens[b] without `rows`. Both are
    int32 and have one dimension.

    `table` is [V, H] of `dtype`, or an EmbeddingTable, whose values are rounded to `dtype`. They are multiplied by `scale`,
    which is first rounded to `dtype` (Gemma's scale is sqrt(H)). Tokens are not checked; the result for tokens outside the
    table is undefined. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.embed_rows(tokens, rows, *_parts(table), dtype, scale)[0]


def embed_norm(
    tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, gamma: Tensor, eps: float, dtype: torch.dtype,
    *, scale: float = 1.0, offset: float = 0.0, bias: Tensor | None = None, positions: Tensor | None = None,
    position_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (h, x) in one launch: the result h of `embed_rows`, and the result x of `add_norm` for h without delta.

    With a `position_table` [P, H] of `dtype`, a row of it is first added to each row of h. It is row positions[rows[b]], or
    positions[b] without `rows`. Positions are int32 and not checked.
    """
    h, x = torch.ops.lowbit.embed_rows(
        tokens, rows, *_parts(table), dtype, scale, gamma, eps, offset, 1.0, "norm", bias, positions, position_table
    )
    return h, x


def embed_norm_squares(
    tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, gamma: Tensor, dtype: torch.dtype, *,
    scale: float = 1.0, offset: float = 0.0, factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (h, x, squares) in one launch: the result h of `embed_rows`, and the results x and squares of `add_norm_squares`
    for h without delta."""
    made = torch.ops.lowbit.embed_rows(tokens, rows, *_parts(table), dtype, scale, gamma, 0.0, offset, factor, "squares")
    return tuple(made)


def add_norm(
    h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, *, offset: float = 0.0, post_gamma: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Adds delta to h in place, then returns x [B, H] = h / sqrt(mean(h^2) + eps) * (offset + gamma). h and delta are
    contiguous, gammas [H].

    With `post_gamma`, the RMS norm of delta with that gamma is added instead of delta (Gemma 2 and 3). Everything is computed
    in float32; the sum is rounded to h's type before the norm. With offset 0 the normalised value is rounded to h's type, then
    its product with gamma is rounded again (Llama, Mistral, Qwen, Phi-3). With another offset (Gemma: 1) only the product is
    rounded. With a `bias` [H] it is LayerNorm (OPT): x = (h - mean) / sqrt(variance + eps) * gamma + bias, rounded once; it has
    no offset and no post_gamma. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.add_norm(h, delta, gamma, eps, offset, post_gamma, bias)


def add_norm_squares(
    h: Tensor, delta: Tensor | None, gamma: Tensor, *, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Adds delta to h in place, then returns (x [B, H], squares float32 [1, B]): x = h * (offset + gamma) * factor, rounded
    once, and the sums of squares of h. The product that follows divides its result by factor * sqrt(squares / H + eps).
    `factor`, a power of two, keeps x in the range of fp16."""
    return torch.ops.lowbit.add_norm_squares(h, delta, gamma, offset, factor)


def gate(gate_up: Tensor, function: str, *, alternate: bool = False) -> Tensor:
    """Returns y [B, I] = f(gate) * up for gate_up [B, 2 I], with the columns of gate first; f is "silu", "gelu_tanh" or "relu".

    With `alternate`, columns alternate between 8 of gate and 8 of up, as in products with weights of `pack.gated`. f is
    computed in float32 and rounded to the type of gate before the product, as in Transformers' MLPs. Any row stride is
    supported. Raises ValueError for anything else.
    """
    return torch.ops.lowbit.gate(gate_up, None, function, alternate)


def gate2(gate: Tensor, up: Tensor, function: str) -> Tensor:
    """Returns the same as `gate`, for gate and up as two tensors [B, I], each with any row stride."""
    return torch.ops.lowbit.gate(gate, up, function)


def activate(x: Tensor, function: str) -> Tensor:
    """Returns y [B, I] = f(x), for an MLP without a gate. Functions, types and strides are those of `gate`."""
    return torch.ops.lowbit.gate(x, None, function, False, False)


def _parts(table: Tensor | EmbeddingTable) -> tuple[Tensor, Tensor | None]:
    return (table.codes, table.scale) if isinstance(table, EmbeddingTable) else (table, None)


def _check_row(who: str, dtype: torch.dtype, width: int, on: torch.device) -> None:
    """Raises ValueError for rows that no kernel supports. A CPU supports any width, and also float32."""
    kinds = _HALVES if on.type == "cuda" else _FLOATS
    if dtype not in kinds:
        raise ValueError(f"{who}: rows are {', '.join(str(kind) for kind in kinds)} on {on.type}, got {dtype}")
    if on.type == "cuda" and width > MOST_COLUMNS:
        raise ValueError(f"{who}: rows have at most {MOST_COLUMNS} columns, got {width}")


def _check_gamma(who: str, width: int, offset: float, **gammas: Tensor | None) -> None:
    for name, gamma in gammas.items():
        if gamma is not None and (tuple(gamma.shape) != (width,) or gamma.dtype not in _FLOATS):
            raise ValueError(f"{who}: {name} is floating [{width}], got {gamma.dtype} {tuple(gamma.shape)}")
    if gammas.get("bias") is not None and (offset or gammas.get("post_gamma") is not None):
        raise ValueError(f"{who}: LayerNorm, which has a bias, has neither an offset nor post_gamma")


def _check_contiguous(who: str, **tensors: Tensor | None) -> None:
    """Raises ValueError for tensors with gaps, since plans depend on shapes, not on strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{who}: {name} is contiguous, got strides {tensor.stride()} of {tuple(tensor.shape)}")


class EmbedArguments(NamedTuple):
    """The arguments of `lowbit::embed_rows`."""

    tokens: Tensor
    rows: Tensor | None
    table: Tensor
    row_scale: Tensor | None
    dtype: torch.dtype
    scale: float
    gamma: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    factor: float = 1.0
    end: str = ""
    bias: Tensor | None = None
    positions: Tensor | None = None
    position_table: Tensor | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors by name."""
        names = ("tokens", "rows", "table", "row_scale", "gamma", "bias", "positions", "position_table")
        return {name: getattr(self, name) for name in names}


def _check_embed(on: torch.device, a: EmbedArguments) -> None:
    for name, ids in (("tokens", a.tokens), ("rows", a.rows), ("positions", a.positions)):
        if ids is not None and (ids.dim() != 1 or ids.dtype != torch.int32):
            raise ValueError(f"embed_rows: {name} are int32 [..], got {ids.dtype} {tuple(ids.shape)}")
    if a.table.dim() != 2 or not a.table.shape[1]:
        raise ValueError(f"embed_rows: the table is [V, H], got {tuple(a.table.shape)}")
    width = a.table.shape[1]
    _check_row("embed_rows", a.dtype, width, on)
    if a.row_scale is None and a.table.dtype != a.dtype:
        raise ValueError(f"embed_rows: the table is {a.dtype} like the rows, or an EmbeddingTable, got {a.table.dtype}")
    _check_gamma("embed_rows", width, a.offset, gamma=a.gamma, bias=a.bias)
    if a.bias is not None and a.end != "norm":
        raise ValueError("embed_rows: a bias belongs to a norm, and the call has none")
    places = a.position_table
    if (a.positions is None) != (places is None) or (
        places is not None and (places.dim() != 2 or places.shape[1] != width or places.dtype != a.dtype)
    ):
        raise ValueError(
            f"embed_rows: positions have a table of {a.dtype} [P, {width}] like the rows, got "
            f"{None if places is None else (places.dtype, tuple(places.shape))}"
        )


@functools.lru_cache(maxsize=4096)
def _embed_plan(dtype: torch.dtype, scaled: bool, end: str, offset: float, *tensors: TensorSpec | None) -> EmbedPlan:
    """Returns the plan of a call. Raises ValueError if the tensors do not fit together."""
    from lowbit.kernels.elementwise.norm import EmbedPlan, NormRequest

    tokens, rows, table, row_scale, gamma, *others = meta_tensors(tensors)
    on = device_of("embed_rows", tensors)
    _check_embed(on, EmbedArguments(tokens, rows, table, row_scale, dtype, 1.0, gamma, 0.0, offset, 1.0, end, *others))
    m = (tokens if rows is None else rows).shape[0]
    return EmbedPlan(m, table.shape[1], NormRequest(ENDS.index(end), offset), scaled, machine_of(on))


@functools.lru_cache(maxsize=256)
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype, device="cpu"))


def _embed_on_gpu(a: EmbedArguments) -> list[Tensor]:
    tensors = a.tensors()
    _check_contiguous("embed_rows", **tensors)
    plan = _embed_plan(a.dtype, a.scale != 1.0, a.end, a.offset, *(spec_of(t) for t in tensors.values()))
    given = (a.tokens, a.rows, a.table, a.row_scale, a.positions, a.position_table, a.gamma, a.bias)
    made = plan(*given, a.dtype, _rounded(a.scale, a.dtype), a.eps, a.factor)
    return [each for each in made if each is not None]


def _embed_on_cpu(a: EmbedArguments) -> list[Tensor]:
    check_one_device("embed_rows", *a.tensors().values())
    _check_embed(a.table.device, a)
    h = embed_rows_reference(*a[:6], a.positions, a.position_table)
    if a.end == "squares" and a.gamma is not None:
        return [h, *scaled_reference(h, a.gamma, a.offset, a.factor)]
    return [h] if a.gamma is None else [h, norm_reference(h, a.gamma, a.eps, a.offset, a.bias)]


def _embed_fake(a: EmbedArguments) -> list[Tensor]:
    h = a.table.new_empty(((a.tokens if a.rows is None else a.rows).shape[0], a.table.shape[1]), dtype=a.dtype)
    made = [h, torch.empty_like(h), h.new_empty((1, h.shape[0]), dtype=torch.float32)]
    return made[: ENDS.index(a.end) + 1]


register(
    "embed_rows(Tensor tokens, Tensor? rows, Tensor table, Tensor? row_scale, ScalarType dtype, float scale,"
    " Tensor? gamma=None, float eps=0.0, float offset=0.0, float factor=1.0, str end='', Tensor? bias=None,"
    " Tensor? positions=None, Tensor? position_table=None) -> Tensor[]",
    cuda=_embed_on_gpu,
    cpu=_embed_on_cpu,
    fake=_embed_fake,
    arguments=EmbedArguments,
)


def _check_norm(
    on: torch.device, offset: float, h: Tensor, delta: Tensor | None, gamma: Tensor, post_gamma: Tensor | None,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    if h.dim() != 2 or not h.shape[1]:
        raise ValueError(f"add_norm: h is [B, H], got {tuple(h.shape)}")
    _check_row("add_norm", h.dtype, h.shape[1], on)
    if delta is not None and (delta.shape != h.shape or delta.dtype != h.dtype):
        raise ValueError(f"add_norm: delta is {h.dtype} {tuple(h.shape)} like h, got {delta.dtype} {tuple(delta.shape)}")
    if post_gamma is not None and delta is None:
        raise ValueError("add_norm: post_gamma normalises delta, and there is none")
    _check_gamma("add_norm", h.shape[1], offset, gamma=gamma, post_gamma=post_gamma, bias=bias)


@functools.lru_cache(maxsize=4096)
def _norm_plan(end: str, offset: float, *tensors: TensorSpec | None) -> NormPlan:
    """Returns the plan of a call. Raises ValueError if the tensors do not fit together."""
    from lowbit.kernels.elementwise.norm import NormPlan, NormRequest

    h, *others = meta_tensors(tensors)
    on = device_of("add_norm", tensors)
    _check_norm(on, offset, h, *others)
    return NormPlan(h.shape[0], h.shape[1], NormRequest(ENDS.index(end), offset), machine_of(on))


class AddNormArguments(NamedTuple):
    """The arguments of `lowbit::add_norm`."""

    h: Tensor
    delta: Tensor | None
    gamma: Tensor
    eps: float
    offset: float = 0.0
    post_gamma: Tensor | None = None
    bias: Tensor | None = None


def _norm_on_gpu(end: str, a: AddNormArguments, factor: float = 1.0) -> Any:
    _check_contiguous("add_norm", h=a.h, delta=a.delta, gamma=a.gamma, post_gamma=a.post_gamma, bias=a.bias)
    plan = _norm_plan(end, a.offset, *(spec_of(t) for t in (a.h, a.delta, a.gamma, a.post_gamma, a.bias)))
    return plan(a.h, a.delta, a.gamma, a.bias, a.post_gamma, a.eps, factor)


def _add_on_cpu(a: AddNormArguments) -> None:
    _check_contiguous("add_norm", h=a.h, delta=a.delta)
    check_one_device("add_norm", a.h, a.delta, a.gamma, a.post_gamma, a.bias)
    _check_norm(a.h.device, a.offset, a.h, a.delta, a.gamma, a.post_gamma, a.bias)
    add_reference(a.h, a.delta, a.eps, a.offset, a.post_gamma)


def _add_norm_on_cpu(a: AddNormArguments) -> Tensor:
    _add_on_cpu(a)
    return norm_reference(a.h, a.gamma, a.eps, a.offset, a.bias)


register(
    "add_norm(Tensor(a!) h, Tensor? delta, Tensor gamma, float eps, float offset=0.0, Tensor? post_gamma=None,"
    " Tensor? bias=None) -> Tensor",
    cuda=lambda a: _norm_on_gpu("norm", a)[0],
    cpu=_add_norm_on_cpu,
    fake=lambda a: torch.empty_like(a.h),
    arguments=AddNormArguments,
)


def _add_norm_squares_on_gpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _norm_on_gpu("squares", AddNormArguments(h, delta, gamma, 0.0, offset), factor)


def _add_norm_squares_on_cpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    _add_on_cpu(AddNormArguments(h, delta, gamma, 0.0, offset))
    return scaled_reference(h, gamma, offset, factor)


def _add_norm_squares_fake(h: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), h.new_empty((1, h.shape[0]), dtype=torch.float32)


register(
    "add_norm_squares(Tensor(a!) h, Tensor? delta, Tensor gamma, float offset=0.0, float factor=1.0) -> (Tensor, Tensor)",
    cuda=_add_norm_squares_on_gpu,
    cpu=_add_norm_squares_on_cpu,
    fake=_add_norm_squares_fake,
)


def _check_gate(on: torch.device, gate: Tensor, up: Tensor | None, function: str, alternate: bool, gated: bool) -> None:
    if function not in GATES:
        raise ValueError(f"gate: functions are {', '.join(GATES)}, not {function!r}")
    halves = gated and up is None
    if gate.dim() != 2 or not gate.shape[1] or (halves and gate.shape[1] % (16 if alternate else 2)):
        expected = "gate_up is [B, 2 I]" + ", I a multiple of 8" * alternate if halves else "gate is [B, I]"
        raise ValueError(f"gate: {expected}, got {tuple(gate.shape)}")
    _check_row("gate", gate.dtype, 1, on)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ValueError(f"gate: up is {gate.dtype} {tuple(gate.shape)} like gate, got {up.dtype} {tuple(up.shape)}")


@functools.lru_cache(maxsize=4096)
def _gate_plan(vectors: bool, function: str, alternate: bool, gated: bool, *tensors: TensorSpec | None) -> GatePlan:
    """Returns the plan of a call. Raises ValueError if the tensors do not fit together."""
    from lowbit.kernels.elementwise.gate import GatePlan

    gate, up = meta_tensors(tensors)
    on = device_of("gate", tensors)
    _check_gate(on, gate, up, function, alternate, gated)
    width = gate.shape[1] // 2 if gated and up is None else gate.shape[1]
    return GatePlan(gate.shape[0], width, function, vectors, machine_of(on), alternate)


def _gate_on_gpu(gate: Tensor, up: Tensor | None, function: str, alternate: bool = False, gated: bool = True) -> Tensor:
    if gate.stride(-1) != 1 or (up is not None and up.stride(-1) != 1):
        raise ValueError("gate: the columns of a row follow each other in memory; call .contiguous() on gate and up")
    halves = gated and up is None
    width = gate.shape[-1] // 2 if halves else gate.shape[-1]
    vectors = width % 8 == 0 and all(t is None or (t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0) for t in (gate, up))
    plan = _gate_plan(vectors, function, alternate, gated, spec_of(gate), spec_of(up))
    second = gate[:, 8 if alternate else width :] if halves else up
    return plan(gate, second)


def _gate_on_cpu(gate: Tensor, up: Tensor | None, function: str, alternate: bool = False, gated: bool = True) -> Tensor:
    check_one_device("gate", gate, up)
    _check_gate(gate.device, gate, up, function, alternate, gated)
    if alternate:
        gate, up = (part.flatten(1) for part in gate.unflatten(1, (-1, 2, 8)).unbind(2))
    elif gated and up is None:
        gate, up = gate.chunk(2, dim=-1)
    return gate_reference(gate, up, function)


def _gate_fake(gate: Tensor, up: Tensor | None, function: str, alternate: bool = False, gated: bool = True) -> Tensor:
    return gate.new_empty((gate.shape[0], gate.shape[1] // 2 if gated and up is None else gate.shape[1]))


register(
    "gate(Tensor gate, Tensor? up, str function, bool alternate=False, bool gated=True) -> Tensor",
    cuda=_gate_on_gpu,
    cpu=_gate_on_cpu,
    fake=_gate_fake,
)
