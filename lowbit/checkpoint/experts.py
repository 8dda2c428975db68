"""Mixtures of experts in checkpoints: reads the quantized matrices of an expert layer, for all names and shapes that files use.

Expert e of a layer computes  down_e (act(gate_e x) * (up_e x))  for x [K]; gate_e and up_e are [I, K], down_e is [K, I]. Files
hold the experts in one of two ways:

    one by one   <layer>.<e>.<matrix>.<suffix>, each matrix like a linear layer: `GroupedExperts` groups the layers of a reader.
                 Matrices are gate_proj, up_proj and down_proj, or w1, w3 and w2 (Mixtral), or gate_up_proj and down_proj
    stacked      one tensor [E, ..] for gate and up, one for down: `ExpertSchema`, a class per tool

Both give an `ExpertTensors`: a `QuantTensor` per expert for gate and up together, and one for down.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import ForeignEntry, ForeignLayer
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import (
    IntFormat,
    PerBlock,
    PerChannel,
    PerTensor,
    QuantTensor,
    Scheme,
    ZeroPoint,
    uint_format,
)
from lowbit.formats.split import by_channel, stack_refusals, stacked

MAX_EXPERTS = 4096
SPELLINGS: Mapping[str, str] = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
    "gate_up_proj": "gate_up",
}  # fmt: skip
"""Name of one expert's matrix in the files -> its role."""

_MEMBER = re.compile(r"(?P<layer>(?:.+\.)?experts)\.(?P<expert>\d{1,5})\.(?P<matrix>\w+)")
_ACTIVATIONS = "activations of experts stay in 16 bits: their scale is static, and each expert has its own"


@dataclass(frozen=True)
class ExpertEntry:
    """One expert layer, as the headers of its tensors describe it.

    experts: E. gate_up: shape (2 I, K) and scheme of one expert's gate and up, or the refusal; (I, K) for experts without a
    gate (`gated` is False). down: (K, I). 8-bit activations of a scheme become 16-bit ones in `ExpertTensors` if the files have
    static scales for them. biased: the experts have biases. layers: names of the quantized layers of which the experts consist,
    expert by expert. biases: names of the tensors with their biases. Both are empty for stacked experts.
    """

    experts: int
    gate_up: ForeignEntry
    down: ForeignEntry
    gated: bool = True
    biased: bool = False
    layers: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()

    @property
    def refusals(self) -> tuple[str, ...]:
        """The reasons why `ExpertTensors` cannot hold the layer; empty if it can."""
        return tuple(dict.fromkeys(each.refusal for each in (self.gate_up, self.down) if each.scheme is None))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on settings of the file that the schemes ignore."""
        return tuple(dict.fromkeys((*self.gate_up.notes, *self.down.notes)))


@dataclass(frozen=True, eq=False)
class ExpertTensors:
    """The quantized experts of one layer. gate_up and down have one matrix per expert; the matrices of each have one scheme.

    gate_up: [2 I, K], first the rows of the gate, then those of up; [I, K] for experts without a gate. down: [K, I].
    gate_up_bias [E, 2 I] (rows in the same order) and down_bias [E, K] as in the files, or None. notes: lines on settings of
    the files that are ignored. Raises ValueError if there is no expert, and for matrices that differ in shape or scheme.
    """

    gate_up: tuple[QuantTensor, ...]
    down: tuple[QuantTensor, ...]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.gate_up or len(self.gate_up) != len(self.down):
            raise ValueError(f"every expert has two matrices, got {len(self.gate_up)} and {len(self.down)}")
        for what, matrices in (("gate and up", self.gate_up), ("down", self.down)):
            kinds = {(q.scheme, q.shape, q.scale.dtype) for q in matrices}
            if len(kinds) != 1:
                raise ValueError(f"{what} of all experts have one scheme, shape and type of scales, got {_listed(kinds)}")

    @property
    def experts(self) -> int:
        """E."""
        return len(self.down)

    def alternating(self) -> ExpertTensors:
        """Returns the same experts with alternating rows of gate and up, the gate's first, as gpt-oss stores them.

        Raises ValueError if rows share scales in blocks.
        """
        if isinstance(self.gate_up[0].scheme.granularity, PerBlock):
            raise ValueError(f"rows of {self.gate_up[0].scheme} share scales in blocks and keep their order")
        rows = alternating(torch.arange(self.gate_up[0].shape[0], device=self.gate_up[0].codes.device)[None])[0]
        bias = None if self.gate_up_bias is None else alternating(self.gate_up_bias)
        return replace(self, gate_up=tuple(_rows(q, rows) for q in self.gate_up), gate_up_bias=bias)

    def gate_first(self) -> ExpertTensors:
        """Returns the same experts with all rows of the gate before those of up; the inverse of `alternating`."""
        rows = gate_first(torch.arange(self.gate_up[0].shape[0], device=self.gate_up[0].codes.device)[None])[0]
        bias = None if self.gate_up_bias is None else gate_first(self.gate_up_bias)
        return replace(self, gate_up=tuple(_rows(q, rows) for q in self.gate_up), gate_up_bias=bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Returns the weights gate_up [E, 2 I, K] and down [E, K, I] in `dtype`."""
        gate_up, down = (torch.stack([q.dequantize(dtype) for q in each]) for each in (self.gate_up, self.down))
        return gate_up, down


class ExpertSchema(ABC):
    """The layout of stacked experts in one tool's files. A layer's tensors are `<layer>.<suffix>`."""

    suffixes: ClassVar[tuple[str, ...]]
    """All tensors that an expert layer can have."""
    markers: ClassVar[tuple[str, ...]]
    """Suffixes that only a quantized expert layer has."""

    @abstractmethod
    def entry(self, layer: ForeignLayer) -> ExpertEntry:
        """Returns the entry of a layer. Raises CheckpointError for invalid names, dtypes or shapes."""

    @abstractmethod
    def read(self, layer: ForeignLayer) -> ExpertTensors:
        """Returns the experts of a loaded layer. Raises CheckpointError for invalid values."""

    def layers_of(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Returns layer -> suffix -> tensor name for every layer with one of the markers."""
        layers: dict[str, dict[str, str]] = {}
        for name in names:
            layer, _, suffix = name.rpartition(".")
            if suffix in self.suffixes:
                layers.setdefault(layer, {})[suffix] = name
        return {layer: parts for layer, parts in layers.items() if any(marker in parts for marker in self.markers)}


@dataclass
class _Members:
    """The matrices of one expert layer that files hold one by one: role -> expert -> layer, and the same for biases."""

    layers: dict[str, dict[int, str]] = field(default_factory=dict)
    biases: dict[str, dict[int, str]] = field(default_factory=dict)
    plain: dict[str, dict[int, str]] = field(default_factory=dict)


class GroupedExperts:
    """Expert layers of a reader whose files hold the experts one by one.

    entries: the reader's quantized layers. plain: the names of its other tensors. where: path for messages. `experts` has the
    expert layers by name, such as model.layers.0.mlp.experts. Raises CheckpointError for experts that lack a matrix.
    """

    def __init__(self, entries: Mapping[str, ForeignEntry], plain: Iterable[str], where: Path | str) -> None:
        self._where = where
        self._members: dict[str, _Members] = {}
        for name in entries:
            self._add(name, "layers", name)
        for name in plain:
            module, _, suffix = name.rpartition(".")
            if suffix in ("weight", "bias"):
                self._add(module, "plain" if suffix == "weight" else "biases", name)
        self._members = {name: members for name, members in self._members.items() if members.layers}
        self.experts = {name: self._entry(name, members, entries) for name, members in self._members.items()}

    def read(self, name: str, layer: Callable[[str], QuantTensor], get: Callable[[str], Tensor]) -> ExpertTensors:
        """Returns the experts of one layer. `layer` returns a quantized layer, `get` a plain tensor by name.

        An act-order permutation is undone if the scales do not depend on it. The one of `down` is applied to the rows of gate
        and up instead. Raises CheckpointError with `ExpertEntry.refusals`, and for values that `ExpertTensors` cannot hold.
        """
        members, entry = self._members[name], self.experts[name]
        if entry.refusals:
            raise CheckpointError(f"{self._where}: {name}: {'; '.join(entry.refusals)}")
        notes: dict[str, None] = {}
        gate_up, down = [], []
        try:
            for e in range(entry.experts):
                parts = [_in_order(layer(members.layers[role][e]), notes) for role in _first_roles(members.layers)]
                second = _in_order(layer(members.layers["down"][e]), notes)
                parts, second = _without_order_of_down(parts, second)
                gate_up.append(joined(one_scheme(parts)))
                down.append(second)
            first, last = one_scheme(gate_up), one_scheme(down)
            _require_shared_input(first)
            return ExpertTensors(
                tuple(first), tuple(last), self._bias(members, entry.experts, _first_roles(members.layers), get),
                self._bias(members, entry.experts, ("down",), get), tuple(notes),
            )  # fmt: skip
        except ValueError as error:
            raise CheckpointError(f"{self._where}: {name}: {error}") from error

    def _add(self, module: str, kind: Literal["layers", "biases", "plain"], name: str) -> None:
        """Records the layer or tensor `name` if `module` is one matrix of an expert; ignores other modules."""
        match = _MEMBER.fullmatch(module)
        if match is not None and match["matrix"] in SPELLINGS and int(match["expert"]) < MAX_EXPERTS:
            table = getattr(self._members.setdefault(match["layer"], _Members()), kind)
            table.setdefault(SPELLINGS[match["matrix"]], {})[int(match["expert"])] = name

    def _entry(self, name: str, members: _Members, entries: Mapping[str, ForeignEntry]) -> ExpertEntry:
        roles = (*_first_roles(members.layers | members.plain), "down")
        count = 1 + max(e for table in (members.layers, members.plain) for own in table.values() for e in own)
        for role in roles:
            own = {*members.layers.get(role, {}), *members.plain.get(role, {})}
            if missing := [e for e in range(count) if e not in own]:
                raise CheckpointError(
                    f"{self._where}: {name}: {count} experts, but no file has the {role} matrix of {_some(missing)}; files "
                    "are missing, or their names are not those of one tool"
                )
        plain = sorted({e for role in roles for e in members.plain.get(role, {})})
        first = [[entries[members.layers[role][e]] for role in roles[:-1]] for e in range(count) if e not in plain]
        down = [entries[members.layers["down"][e]] for e in range(count) if e not in plain]
        refusal = f"{_some(plain)} of {count} are not quantized, and experts of one layer have one scheme" if plain else ""
        layers = tuple(members.layers[role][e] for e in range(count) for role in roles if e in members.layers.get(role, {}))
        biases = tuple(name for own in members.biases.values() for name in own.values())
        return ExpertEntry(
            count, _common([joined_entry(each) for each in first], refusal), _common(down, refusal),
            gated=roles[0] != "up", biased=bool(biases), layers=layers, biases=biases,
        )  # fmt: skip

    def _bias(self, members: _Members, count: int, roles: Sequence[str], get: Callable[[str], Tensor]) -> Tensor | None:
        """Returns the biases [E, N] of the matrices `roles` concatenated; None if there are none."""
        if not any(role in members.biases for role in roles):
            return None
        for role in roles:
            if missing := [e for e in range(count) if e not in members.biases.get(role, {})]:
                raise ValueError(f"some experts have a bias of {role}, {_some(missing)} have none")
        rows = [torch.cat([get(members.biases[role][e]) for role in roles]) for e in range(count)]
        if len({(tuple(row.shape), row.dtype) for row in rows}) != 1:
            raise ValueError(f"biases of {' and '.join(roles)} differ in shape or dtype between experts")
        return torch.stack(rows)


def gate_first(rows: Tensor) -> Tensor:
    """Returns [E, 2 I, ..] with all rows of the gate before those of up, given alternating rows."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def alternating(rows: Tensor) -> Tensor:
    """Returns [E, 2 I, ..] with alternating rows of gate and up, the gate's first; the inverse of `gate_first`."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def one_scheme(matrices: Sequence[QuantTensor]) -> list[QuantTensor]:
    """Returns the same matrices under one scheme, with the same weights.

    If some matrices have zero points and others have none, the others get the middle of the range as zero points. Raises
    ValueError for schemes that differ in anything else.
    """
    schemes = {q.scheme for q in matrices}
    if len(schemes) == 1:
        return list(matrices)
    with_zeros = [scheme for scheme in schemes if scheme.zero is ZeroPoint.INTEGER]
    if len(schemes) == 2 and len(with_zeros) == 1:
        (other,) = schemes - set(with_zeros)
        if isinstance(other.weight, IntFormat) and with_zeros[0] == _with_zeros(other):
            return [q if q.scheme == with_zeros[0] else _middle_as_zero(q) for q in matrices]
    raise ValueError(f"the schemes of its matrices differ: {_listed(schemes)}")


def _with_zeros(scheme: Scheme) -> Scheme | None:
    if scheme.zero is not ZeroPoint.NONE or not isinstance(scheme.weight, IntFormat):
        return None
    return replace(scheme, weight=uint_format(scheme.weight.bits), zero=ZeroPoint.INTEGER)


def _middle_as_zero(q: QuantTensor) -> QuantTensor:
    """Returns a matrix of signed integers as one of unsigned integers with zero points; the codes are the same."""
    scheme = _with_zeros(q.scheme)
    assert scheme is not None and isinstance(q.scheme.weight, IntFormat)
    return replace(q, zero=torch.full_like(q.scale, q.scheme.weight.offset, dtype=torch.uint8), scheme=scheme)


def _in_order(q: QuantTensor, notes: dict[str, None]) -> QuantTensor:
    """Returns a matrix without a static activation scale, and without an order if its scales do not depend on one."""
    transform = q.input_transform
    if transform.activation_scale is not None:
        notes[_ACTIVATIONS] = None
        transform = replace(transform, activation_scale=None, activation_zero=None)
        q = replace(q, scheme=q.scheme.weight_only, input_transform=transform)
    if transform.order is None or not isinstance(q.scheme.granularity, (PerChannel, PerTensor)):
        return q
    codes = torch.empty_like(q.codes).index_copy_(1, transform.order.long(), q.codes)
    return replace(q.with_input(order=None), codes=codes)


def _without_order_of_down(first: list[QuantTensor], down: QuantTensor) -> tuple[list[QuantTensor], QuantTensor]:
    """Returns one expert without the channel order of `down`: the rows of gate and up are permuted instead, which is exact.

    Raises ValueError if that is impossible, because rows share scales or gate and up are one matrix.
    """
    order = down.input_transform.order
    if order is None:
        return first, down
    rows = order.long()
    if any(isinstance(q.scheme.granularity, PerBlock) or q.shape[0] != len(rows) for q in first):
        raise ValueError("down has a channel order (act-order), which the rows of its gate and up cannot take")
    return [_rows(q, rows) for q in first], down.with_input(order=None)


def _rows(q: QuantTensor, rows: Tensor) -> QuantTensor:
    q = by_channel(q)
    return replace(q, codes=q.codes[rows], scale=q.scale[rows], zero=None if q.zero is None else q.zero[rows])


def _require_shared_input(matrices: Sequence[QuantTensor]) -> None:
    """Raises ValueError if experts, which read one x, have an order of channels or different input transforms."""
    if any(q.input_transform.order is not None for q in matrices):
        raise ValueError(
            "its experts read x in channel orders of their own (act-order); quantize again without act-order, or take "
            "--to dequantized"
        )
    for q in matrices[1:]:
        if differences := matrices[0].input_transform.differences(q.input_transform):
            raise ValueError(f"its experts transform x differently: {', '.join(differences)}; take --to dequantized")


def joined(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Returns gate and up of one expert as one matrix. Raises ValueError with the reasons if no scheme holds both."""
    for first, second in pairwise(parts):
        if reasons := stack_refusals(first, second):
            raise ValueError(f"gate and up of an expert are multiplied as one matrix, but {'; '.join(reasons)}")
    return stacked(parts)


def joined_entry(parts: Sequence[ForeignEntry]) -> ForeignEntry:
    """Returns the entry of gate and up of one expert as one matrix."""
    (first, *others), notes = parts, tuple(note for each in parts for note in each.notes)
    shape = (sum(each.shape[0] for each in parts), first.shape[1])
    refusal, scheme = next((each.refusal for each in parts if each.scheme is None), ""), first.scheme
    if scheme is None:
        return ForeignEntry(shape, None, refusal, notes)
    if any(each.shape[1] != shape[1] for each in others):
        refusal = "gate and up have different input channels"
    elif any(each.scheme != scheme for each in others):
        refusal = f"schemes of gate and up differ: {_listed(each.scheme for each in parts)}"
    elif others and isinstance(scheme.granularity, PerBlock) and first.shape[0] % scheme.granularity.n:
        refusal = f"the gate's {first.shape[0]} rows end within a block of {scheme.granularity.n}"
    elif others and isinstance(scheme.granularity, PerTensor):
        scheme = replace(scheme, granularity=PerChannel())
    return ForeignEntry(shape, None if refusal else scheme, refusal, notes)


def _common(entries: Sequence[ForeignEntry], refusal: str) -> ForeignEntry:
    """Returns one entry for the same matrix of all experts."""
    first, notes = entries[0], tuple(dict.fromkeys(note for each in entries for note in each.notes))
    refusal = refusal or next((each.refusal for each in entries if each.scheme is None), "")
    if not refusal and any(each.shape != first.shape for each in entries):
        refusal = f"its experts have different shapes: {_listed(each.shape for each in entries)}"
    if not refusal and any(each.scheme != first.scheme for each in entries):
        refusal = f"its experts have different schemes: {_listed(each.scheme for each in entries)}"
    return ForeignEntry(first.shape, None if refusal else first.scheme, refusal, notes)


def _first_roles(table: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the roles of the matrices that read x, in the order of their rows."""
    if "gate_up" in table:
        return ("gate_up",)
    return ("gate", "up") if "gate" in table else ("up",)


def _some(experts: Sequence[int]) -> str:
    more = f" and {len(experts) - 3} more" if len(experts) > 3 else ""
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, experts[:3]))}{more}"


def _listed(values: Iterable[object]) -> str:
    texts = sorted({str(value) for value in values})
    return ", ".join(texts[:4]) + (", .." if len(texts) > 4 else "")
