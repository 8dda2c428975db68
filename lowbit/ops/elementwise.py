"""The torch operators of a language model's step beside products and attention: embedding, norms with the residual, gates.

One launch each on NVIDIA GPUs (kernels/elementwise/norm.py, gate.py), plain torch (kernels/reference/elementwise.py) on a CPU.
They serve a captured step of a few rows and prompts of thousands alike, and a row's result depends on nothing but the row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from lowbit.ops.operands import Described, check_one_device, described, on_meta
from lowbit.quantize import rtn

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.gate import GatePlan
    from lowbit.kernels.elementwise.norm import EmbedPlan, NormPlan

torch.library.define(
    "lowbit::embed_rows",
    "(Tensor tokens, Tensor? rows, Tensor table, Tensor? row_scale, ScalarType dtype, float scale, Tensor? gamma=None,"
    " float eps=0.0, float offset=0.0, float factor=1.0, str end='', Tensor? bias=None, Tensor? positions=None,"
    " Tensor? position_table=None) -> Tensor[]",
)
torch.library.define(
    "lowbit::add_norm",
    "(Tensor(a!) h, Tensor? delta, Tensor gamma, float eps, float offset=0.0, Tensor? post_gamma=None, Tensor? bias=None)"
    " -> Tensor",
)
torch.library.define(
    "lowbit::add_norm_squares",
    "(Tensor(a!) h, Tensor? delta, Tensor gamma, float offset=0.0, float factor=1.0) -> (Tensor, Tensor)",
)
torch.library.define("lowbit::gate", "(Tensor gate, Tensor? up, str function, bool alternate=False, bool gated=True) -> Tensor")

ENDS = ("", "norm", "squares")
"""What follows an embedding or a sum in the same launch, as kernels/elementwise/norm.py counts it."""
MOST_COLUMNS = 16384
"""Widest row that the kernels' registers hold."""
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """An embedding of 8 bits: value = (codes - 128) * scale of its row. codes uint8 [V, H], scale float32 or 16 bits [V]: the
    packed weight and the scales of a `w8a16` weight as they are. Raises ValueError for anything else."""

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
        """The table of a `w8a16` weight [V, H]; raises ValueError for any other scheme, or one with an input transform or a
        low-rank correction."""
        if str(q.scheme) != "w8a16" or q.input_transform.parts or q.low_rank is not None:
            raise ValueError(f"an embedding table is made of a plain w8a16 weight, got {q.scheme}")
        return cls(q.codes.contiguous(), q.scale[:, 0].contiguous())


def quantize_embedding(weight: Tensor) -> EmbeddingTable:
    """`weight` [V, H] in 8 bits, rounded to nearest with one symmetric scale a row: `rtn` to w8a16."""
    return EmbeddingTable.from_quant_tensor(rtn(weight, "w8a16"))


def embed_rows(
    tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, dtype: torch.dtype, *, scale: float = 1.0
) -> Tensor:
    """h [B, H] of `dtype`: the embedding of token tokens[rows[b]], or tokens[b] without `rows`; both int32 [..].

    `table` is [V, H] of `dtype`, or an EmbeddingTable, whose values are rounded to `dtype`. They are multiplied by `scale`,
    which is rounded to `dtype` first, as Gemma does by sqrt(H). Tokens are not checked: one outside the table is not defined.
    Raises ValueError for tensors that do not fit together.
    """
    made: Tensor = torch.ops.lowbit.embed_rows(tokens, rows, *_parts(table), dtype, scale)[0]
    return made


def embed_norm(
    tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, gamma: Tensor, eps: float, dtype: torch.dtype,
    *, scale: float = 1.0, offset: float = 0.0, bias: Tensor | None = None, positions: Tensor | None = None,
    position_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(h, x): `embed_rows`, and of that the `add_norm` without delta, in one launch.

    With a `position_table` [P, H] of `dtype`, its row positions[rows[b]] (positions[b] without `rows`; int32 [..]) is added to
    h first. Positions are not checked either.
    """
    parts = _parts(table)
    h, x = torch.ops.lowbit.embed_rows(
        tokens, rows, *parts, dtype, scale, gamma, eps, offset, 1.0, "norm", bias, positions, position_table
    )
    return h, x


def embed_norm_squares(
    tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, gamma: Tensor, dtype: torch.dtype, *,
    scale: float = 1.0, offset: float = 0.0, factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(h, x, squares): `embed_rows`, and of that the `add_norm_squares` without delta, in one launch."""
    parts = _parts(table)
    h, x, squares = torch.ops.lowbit.embed_rows(tokens, rows, *parts, dtype, scale, gamma, 0.0, offset, factor, "squares")
    return h, x, squares


def add_norm(
    h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, *, offset: float = 0.0, post_gamma: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [B, H] = h / sqrt(mean(h^2) + eps) * (offset + gamma), after h += delta in place; h and delta contiguous, gammas [H].

    With `post_gamma`, delta's norm by it is added instead (Gemma 2 and 3). Everything is computed in float32; the sum is
    rounded to h's type first. With offset 0 the normalised value is rounded to h's type, then its product with gamma
    (Llama, Mistral, Qwen, Phi-3); with another, 1 for Gemma, the product alone is. With a `bias` [H] it is LayerNorm (OPT):
    x = (h - mean) / sqrt(variance + eps) * gamma + bias, rounded once; it has no offset and no post_gamma. Raises ValueError
    for tensors that do not fit together.
    """
    made: Tensor = torch.ops.lowbit.add_norm(h, delta, gamma, eps, offset, post_gamma, bias)
    return made


def add_norm_squares(
    h: Tensor, delta: Tensor | None, gamma: Tensor, *, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(x [B, H], squares float32 [1, B]) after h += delta in place: x = h * (offset + gamma) * factor, rounded once, and the
    sum of squares of h. What multiplies x divides at its end by factor * sqrt(squares / H + eps); a `factor`, a power of two,
    keeps x in the range of fp16."""
    x, squares = torch.ops.lowbit.add_norm_squares(h, delta, gamma, offset, factor)
    return x, squares


def gate(gate_up: Tensor, function: str, *, alternate: bool = False) -> Tensor:
    """y [B, I] = f(gate) * up of gate_up [B, 2 I], the columns of gate first; f is "silu", "gelu_tanh" or "relu".

    With `alternate`, 8 columns of gate come first, then those 8 of up, and so on: what a weight of `pack.gated` makes.
    f is computed in float32 and rounded to the type of gate before the product, as Transformers' MLPs do. Any row stride.
    Raises ValueError for anything else.
    """
    made: Tensor = torch.ops.lowbit.gate(gate_up, None, function, alternate)
    return made


def gate2(gate: Tensor, up: Tensor, function: str) -> Tensor:
    """`gate` of two tensors [B, I], each with any row stride."""
    made: Tensor = torch.ops.lowbit.gate(gate, up, function)
    return made


def activate(x: Tensor, function: str) -> Tensor:
    """y [B, I] = f(x) of an MLP without a gate; otherwise as `gate`."""
    made: Tensor = torch.ops.lowbit.gate(x, None, function, False, False)
    return made


def _parts(table: Tensor | EmbeddingTable) -> tuple[Tensor, Tensor | None]:
    return (table.codes, table.scale) if isinstance(table, EmbeddingTable) else (table, None)


def _check_row(who: str, dtype: torch.dtype, width: int, on: torch.device) -> None:
    """Raises ValueError for rows that no kernel takes; a CPU takes any width, and float32 too."""
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
    """Plans know shapes, not strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{who}: {name} is contiguous, got strides {tensor.stride()} of {tuple(tensor.shape)}")


def _check_together(who: str, tensors: tuple[Described | None, ...]) -> torch.device:
    """The device of all tensors; raises ValueError if there are several."""
    devices = {t[2] for t in tensors if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{who}: all tensors must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def _launched(on: torch.device, plan: Any, *arguments: Any) -> Any:
    """What a plan makes, on the GPU where its tensors are."""
    if on.index == torch.cuda.current_device():
        return plan(*arguments)
    with torch.cuda.device(on):
        return plan(*arguments)


def _check_embed(
    on: torch.device, dtype: torch.dtype, offset: float, end: str, tokens: Tensor, rows: Tensor | None, table: Tensor,
    row_scale: Tensor | None, gamma: Tensor | None, bias: Tensor | None, positions: Tensor | None,
    position_table: Tensor | None,
) -> None:  # fmt: skip
    for name, ids in (("tokens", tokens), ("rows", rows), ("positions", positions)):
        if ids is not None and (ids.dim() != 1 or ids.dtype != torch.int32):
            raise ValueError(f"embed_rows: {name} are int32 [..], got {ids.dtype} {tuple(ids.shape)}")
    if table.dim() != 2 or not table.shape[1]:
        raise ValueError(f"embed_rows: the table is [V, H], got {tuple(table.shape)}")
    _check_row("embed_rows", dtype, table.shape[1], on)
    if row_scale is None and table.dtype != dtype:
        raise ValueError(f"embed_rows: the table is {dtype} like the rows, or an EmbeddingTable, got {table.dtype}")
    _check_gamma("embed_rows", table.shape[1], offset, gamma=gamma, bias=bias)
    if bias is not None and end != "norm":
        raise ValueError("embed_rows: a bias belongs to a norm, and none is asked for")
    if (positions is None) != (position_table is None) or (
        position_table is not None
        and (position_table.dim() != 2 or position_table.shape[1] != table.shape[1] or position_table.dtype != dtype)
    ):
        raise ValueError(
            f"embed_rows: positions have a table of {dtype} [P, {table.shape[1]}] like the rows, got "
            f"{None if position_table is None else (position_table.dtype, tuple(position_table.shape))}"
        )


@functools.lru_cache(maxsize=4096)
def _embed_plan(dtype: torch.dtype, scaled: bool, end: str, offset: float, *tensors: Described | None) -> EmbedPlan:
    """The plan of a call; raises ValueError when the tensors do not fit together."""
    from lowbit.kernels.elementwise.norm import EmbedPlan, NormRequest

    tokens, rows, table, *others = (None if t is None else on_meta(t) for t in tensors)
    assert tokens is not None and table is not None
    on = _check_together("embed_rows", tensors)
    _check_embed(on, dtype, offset, end, tokens, rows, table, *others)
    m = (tokens if rows is None else rows).shape[0]
    return EmbedPlan(m, table.shape[1], NormRequest(ENDS.index(end), offset), scaled, machine_of(on))


@functools.lru_cache(maxsize=256)
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype, device="cpu"))


@torch.library.impl("lowbit::embed_rows", "CUDA")
def _embed_on_gpu(
    tokens: Tensor, rows: Tensor | None, table: Tensor, row_scale: Tensor | None, dtype: torch.dtype, scale: float,
    gamma: Tensor | None = None, eps: float = 0.0, offset: float = 0.0, factor: float = 1.0, end: str = "",
    bias: Tensor | None = None, positions: Tensor | None = None, position_table: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    _check_contiguous("embed_rows", tokens=tokens, rows=rows, table=table, row_scale=row_scale, gamma=gamma)
    _check_contiguous("embed_rows", bias=bias, positions=positions, position_table=position_table)
    others = tuple(described(t) for t in (tokens, rows, table, row_scale, gamma, bias, positions, position_table))
    plan = _embed_plan(dtype, scale != 1.0, end, offset, *others)
    given = (tokens, rows, table, row_scale, positions, position_table, gamma, bias)
    made = _launched(table.device, plan, *given, dtype, _rounded(scale, dtype), eps, factor)
    return [each for each in made if each is not None]


@torch.library.impl("lowbit::embed_rows", "CPU")
def _embed_on_cpu(
    tokens: Tensor, rows: Tensor | None, table: Tensor, row_scale: Tensor | None, dtype: torch.dtype, scale: float,
    gamma: Tensor | None = None, eps: float = 0.0, offset: float = 0.0, factor: float = 1.0, end: str = "",
    bias: Tensor | None = None, positions: Tensor | None = None, position_table: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    check_one_device("embed_rows", tokens, rows, table, row_scale, gamma, bias, positions, position_table)
    _check_embed(table.device, dtype, offset, end, tokens, rows, table, row_scale, gamma, bias, positions, position_table)
    h = embed_rows_reference(tokens, rows, table, row_scale, dtype, scale, positions, position_table)
    if end == "squares" and gamma is not None:
        return [h, *scaled_reference(h, gamma, offset, factor)]
    return [h] if gamma is None else [h, norm_reference(h, gamma, eps, offset, bias)]


@torch.library.register_fake("lowbit::embed_rows")
def _embed_fake(
    tokens: Tensor, rows: Tensor | None, table: Tensor, row_scale: Tensor | None, dtype: torch.dtype, scale: float,
    gamma: Tensor | None = None, eps: float = 0.0, offset: float = 0.0, factor: float = 1.0, end: str = "",
    bias: Tensor | None = None, positions: Tensor | None = None, position_table: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    h = table.new_empty(((tokens if rows is None else rows).shape[0], table.shape[1]), dtype=dtype)
    made = [h, torch.empty_like(h), h.new_empty((1, h.shape[0]), dtype=torch.float32)]
    return made[: ENDS.index(end) + 1]


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
def _norm_plan(end: str, offset: float, *tensors: Described | None) -> NormPlan:
    """The plan of a call; raises ValueError when the tensors do not fit together."""
    from lowbit.kernels.elementwise.norm import NormPlan, NormRequest

    h, delta, gamma, *others = (None if t is None else on_meta(t) for t in tensors)
    assert h is not None and gamma is not None
    on = _check_together("add_norm", tensors)
    _check_norm(on, offset, h, delta, gamma, *others)
    return NormPlan(h.shape[0], h.shape[1], NormRequest(ENDS.index(end), offset), machine_of(on))


def _norm_on_gpu(
    end: str, h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, offset: float, post_gamma: Tensor | None = None,
    bias: Tensor | None = None, factor: float = 1.0,
) -> Any:  # fmt: skip
    _check_contiguous("add_norm", h=h, delta=delta, gamma=gamma, post_gamma=post_gamma, bias=bias)
    plan = _norm_plan(end, offset, *(described(t) for t in (h, delta, gamma, post_gamma, bias)))
    return _launched(h.device, plan, h, delta, gamma, bias, post_gamma, eps, factor)


def _add_on_cpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, offset: float, post_gamma: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    _check_contiguous("add_norm", h=h, delta=delta)
    check_one_device("add_norm", h, delta, gamma, post_gamma, bias)
    _check_norm(h.device, offset, h, delta, gamma, post_gamma, bias)
    add_reference(h, delta, eps, offset, post_gamma)


@torch.library.impl("lowbit::add_norm", "CUDA")
def _add_norm_on_gpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, offset: float = 0.0, post_gamma: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x: Tensor = _norm_on_gpu("norm", h, delta, gamma, eps, offset, post_gamma, bias)[0]
    return x


@torch.library.impl("lowbit::add_norm", "CPU")
def _add_norm_on_cpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, offset: float = 0.0, post_gamma: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _add_on_cpu(h, delta, gamma, eps, offset, post_gamma, bias)
    return norm_reference(h, gamma, eps, offset, bias)


@torch.library.register_fake("lowbit::add_norm")
def _add_norm_fake(
    h: Tensor, delta: Tensor | None, gamma: Tensor, eps: float, offset: float = 0.0, post_gamma: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(h)


@torch.library.impl("lowbit::add_norm_squares", "CUDA")
def _add_norm_squares_on_gpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    x, squares = _norm_on_gpu("squares", h, delta, gamma, 0.0, offset, factor=factor)
    return x, squares


@torch.library.impl("lowbit::add_norm_squares", "CPU")
def _add_norm_squares_on_cpu(
    h: Tensor, delta: Tensor | None, gamma: Tensor, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    _add_on_cpu(h, delta, gamma, 0.0, offset)
    return scaled_reference(h, gamma, offset, factor)


@torch.library.register_fake("lowbit::add_norm_squares")
def _add_norm_squares_fake(
    h: Tensor, delta: Tensor | None, gamma: Tensor, offset: float = 0.0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), h.new_empty((1, h.shape[0]), dtype=torch.float32)


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
def _gate_plan(pieces: bool, function: str, alternate: bool, gated: bool, *tensors: Described | None) -> GatePlan:
    """The plan of a call; raises ValueError when the tensors do not fit together."""
    from lowbit.kernels.elementwise.gate import GatePlan

    gate, up = (None if t is None else on_meta(t) for t in tensors)
    assert gate is not None
    on = _check_together("gate", tensors)
    _check_gate(on, gate, up, function, alternate, gated)
    width = gate.shape[1] // 2 if gated and up is None else gate.shape[1]
    return GatePlan(gate.shape[0], width, function, pieces, machine_of(on), alternate)


@torch.library.impl("lowbit::gate", "CUDA")
def _gate_on_gpu(gate: Tensor, up: Tensor | None, function: str, alternate: bool = False, gated: bool = True) -> Tensor:
    if gate.stride(-1) != 1 or (up is not None and up.stride(-1) != 1):
        raise ValueError("gate: the columns of a row follow each other in memory; call .contiguous() on gate and up")
    halves = gated and up is None
    width = gate.shape[-1] // 2 if halves else gate.shape[-1]
    pieces = width % 8 == 0 and all(t is None or (t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0) for t in (gate, up))
    plan = _gate_plan(pieces, function, alternate, gated, described(gate), described(up))
    second = gate[:, 8 if alternate else width :] if halves else up
    made: Tensor = _launched(gate.device, plan, gate, second)
    return made


@torch.library.impl("lowbit::gate", "CPU")
def _gate_on_cpu(gate: Tensor, up: Tensor | None, function: str, alternate: bool = False, gated: bool = True) -> Tensor:
    check_one_device("gate", gate, up)
    _check_gate(gate.device, gate, up, function, alternate, gated)
    if alternate:
        gate, up = (part.flatten(1) for part in gate.unflatten(1, (-1, 2, 8)).unbind(2))
    elif gated and up is None:
        gate, up = gate.chunk(2, dim=-1)
    return gate_reference(gate, up, function)


@torch.library.register_fake("lowbit::gate")
def _gate_fake(gate: Tensor, up: Tensor | None, function: str, alternate: bool = False, gated: bool = True) -> Tensor:
    return gate.new_empty((gate.shape[0], gate.shape[1] // 2 if gated and up is None else gate.shape[1]))
