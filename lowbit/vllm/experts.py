"""The experts of one layer of vLLM: collects their tensors while vLLM loads the files, and keeps this rank's part.

16-bit files and files of other tools have a tensor `experts.<e>.<matrix>.<suffix>` for each matrix of expert e. vLLM's models
load it into the parameter `w13_<suffix>` (gate and up, "w1" and "w3") or `w2_<suffix>` (down). lowbit's files have one tensor
for all experts, `experts.gate_up_proj.<suffix>` [E, ..]. `StreamNames` renames it to the name of the first expert's matrix, so
that vLLM loads the whole tensor into the same parameter.

Tensor parallelism: each rank has a range of the channels between the two products, so it has rows of gate and up and columns of
down. Expert parallelism: each rank has some of the experts whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError, LayerEntry, expected_tensors
from lowbit.checkpoint.experts import GroupedExperts
from lowbit.checkpoint.foreign import ForeignLayer, ForeignSchema, checked_entry
from lowbit.checkpoint.schema import expert_tensor, unstated_tensors
from lowbit.formats import ExpertTensor, QuantTensor, Scheme
from lowbit.formats.split import columns_of, part_range, rows_of
from lowbit.methods import Search
from lowbit.nn.experts import PackedExperts, QuantExperts
from lowbit.ops.table import why_slow
from lowbit.quantize import rtn
from lowbit.quantize.rtn import scale_dtype
from lowbit.vllm.loading import torch_defaults
from lowbit.vllm.matrices import PLAIN

Role = Literal["gate_up", "down"]
FIRST, SECOND = "gate_up_proj", "down_proj"
"""Names of the two matrices in lowbit's files."""

PARAMETERS: Mapping[Role, str] = {"gate_up": "w13_", "down": "w2_"}
"""The prefix of vLLM's names of the parameters of each matrix."""

_BIAS = "bias"
_RANK = 4
"""Number of dimensions to which a tensor of all experts is extended while vLLM passes it on. vLLM would split a tensor of three
dimensions along its first one."""


@dataclass(frozen=True)
class ExpertSpec:
    """A rank's part of the experts of a layer.

    count: number of experts on all ranks. local: indices of this rank's experts, in order. hidden: channels of x. intermediate:
    channels between the two products, of which each of `ranks` ranks has an equal part.
    """

    count: int
    hidden: int
    intermediate: int
    local: tuple[int, ...]
    rank: int = 0
    ranks: int = 1

    def shape(self, role: Role) -> tuple[int, int]:
        """Returns [N, K] of one expert's whole matrix."""
        return (2 * self.intermediate, self.hidden) if role == "gate_up" else (self.hidden, self.intermediate)

    def part(self, role: Role) -> tuple[int, int]:
        """Returns [N, K] of this rank's part of one expert's matrix."""
        own = self.intermediate // self.ranks
        return (2 * own, self.hidden) if role == "gate_up" else (self.hidden, own)

    def part_of(self, name: str, role: Role, q: QuantTensor) -> QuantTensor:
        """Returns this rank's part of one expert's matrix. Raises CheckpointError if it cannot be split."""
        if self.ranks == 1:
            return q
        try:
            begin, end = part_range(self.intermediate, self.intermediate // self.ranks, self.rank, self.ranks)
            if role == "gate_up":
                return rows_of(q, [(begin, end), (self.intermediate + begin, self.intermediate + end)])
            own, index = columns_of(q, self.rank, self.ranks)
            if index is not None:
                raise ValueError(
                    "its columns are in an order of their own (act-order), which is not split for experts; quantize with "
                    "--static-groups or without act-order, or use expert parallelism (--enable-expert-parallel)"
                )
            return own
        except ValueError as error:
            raise CheckpointError(f"{name}: cannot be split for rank {self.rank} of {self.ranks}: {error}") from error

    def part_of_all(self, name: str, role: Role, q: ExpertTensor) -> ExpertTensor:
        """Returns this rank's part of the matrices of all experts."""
        if self.ranks > 1:
            return self.stacked(name, role, (q.expert(e) for e in self.local))
        if self.local == tuple(range(self.count)):
            return q
        at = torch.tensor(self.local, device=q.packed.device)
        return replace(q, packed=q.packed[at], scale=q.scale[at], zero=None if q.zero is None else q.zero[at])

    def stacked(self, name: str, role: Role, matrices: Iterable[QuantTensor]) -> ExpertTensor:
        """Returns the parts of the whole matrices of this rank's experts as one tensor."""
        try:
            return ExpertTensor.stack((self.part_of(name, role, q) for q in matrices), len(self.local))
        except CheckpointError:  # raised by `part_of`, which names the matrix already
            raise
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error


@dataclass(frozen=True)
class ExpertSource(ABC):
    """The experts of a layer, described before their tensors are loaded. name: vLLM's name of the layer."""

    name: str

    @abstractmethod
    def loader(self, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> ExpertLoader:
        """Returns the object that collects the tensors of a rank."""


@dataclass(frozen=True)
class StackedExperts(ExpertSource):
    """Experts of a lowbit checkpoint. in_files: name of the layer in its files. gate_up, down: entries of config.json."""

    in_files: str
    gate_up: LayerEntry
    down: LayerEntry

    def loader(self, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> ExpertLoader:
        return _StackedLoader(self, spec, dtype, device)

    def matrix(self, role: Role) -> tuple[str, LayerEntry]:
        """Returns name and entry of a matrix."""
        return (f"{self.in_files}.{FIRST}", self.gate_up) if role == "gate_up" else (f"{self.in_files}.{SECOND}", self.down)


@dataclass(frozen=True)
class RoundedExperts(ExpertSource):
    """16-bit experts that are quantized while loading, one expert at a time."""

    scheme: Scheme
    search: Search = "max"

    def loader(self, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> ExpertLoader:
        return _RoundedLoader(self, spec, dtype, device)


@dataclass(frozen=True)
class ForeignExperts(ExpertSource):
    """Experts of another tool's checkpoint, whose files hold each matrix of each expert like a linear layer."""

    schema: ForeignSchema

    def loader(self, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> ExpertLoader:
        return _ForeignLoader(self, spec, dtype, device)


class ExpertLoader(ABC):
    """Collects the tensors of the experts of one layer for one rank; `finish` returns the experts."""

    source: ExpertSource

    def __init__(self, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.slots = {e: slot for slot, e in enumerate(spec.local)}
        self._made: dict[Role, ExpertTensor] = {}
        self._is_done = False

    @abstractmethod
    def suffixes(self, role: Role) -> Mapping[str, torch.dtype]:
        """Returns suffix -> usual dtype of each tensor that vLLM may load for a matrix. Tensors that the matrix must not have
        are included, since loading them must raise an error."""

    @abstractmethod
    def take(self, suffix: str, tensor: Tensor, shard: str, expert: int) -> bool:
        """Adds a tensor of the matrix `shard` ("w1", "w3" or "w2") of an expert. Returns False for an expert of another rank.

        Raises CheckpointError, naming the tensor, if it is a duplicate or invalid.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Builds the weights that are not built yet. Raises CheckpointError with the names of missing tensors."""

    @abstractmethod
    def _is_empty(self) -> bool:
        """Returns True if no tensor was taken."""

    def _scheme(self, role: Role) -> Scheme | None:
        """Returns the scheme if it is known without tensors."""
        return None

    def finish(self, *, random: bool = False) -> dict[Role, ExpertTensor]:
        """Returns the weights of this rank. With `random`, they are random if no tensor was taken (vLLM's load format
        "dummy")."""
        if random and not self._made and self._is_empty():
            self._made = {role: self._random(role) for role in PARAMETERS}
        else:
            self._finish()
        made, self._made, self._is_done = self._made, {}, True
        return made

    def _random(self, role: Role) -> ExpertTensor:
        n, k = self.spec.part(role)
        scheme = self._scheme(role)
        if scheme is None:
            raise CheckpointError(f"{self.source.name}: only the files show how experts of this checkpoint are quantized")
        weights = (torch.randn(n, k, dtype=self.dtype, device=self.device) / k**0.5 for _ in self.spec.local)
        return ExpertTensor.stack((rtn(weight, scheme) for weight in weights), len(self.spec.local))

    def _refuse_again(self, name: str) -> CheckpointError:
        return CheckpointError(f"{name}: loaded twice; a running engine cannot load its weights again: start another engine")


class _StackedLoader(ExpertLoader):
    def __init__(self, source: StackedExperts, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.source: StackedExperts = source
        self._tensors: dict[Role, dict[str, Tensor]] = {"gate_up": {}, "down": {}}
        for role in PARAMETERS:
            name, entry = source.matrix(role)
            if (entry.experts, *entry.shape) != (spec.count, *spec.shape(role)):
                raise CheckpointError(
                    f"{name}: has {entry.experts} experts {list(entry.shape)}, vLLM's layer {spec.count} experts "
                    f"{list(spec.shape(role))}; config.json belongs to another model"
                )

    def suffixes(self, role: Role) -> Mapping[str, torch.dtype]:
        name, entry = self.source.matrix(role)
        own = scale_dtype(entry.scheme)
        types = dict.fromkeys(_own_names(name, unstated_tensors(name, entry)), torch.uint8)
        expected = _own_names(name, expected_tensors(name, entry))
        return types | {suffix: own if own in kinds else kinds[0] for suffix, (_, kinds) in expected.items()}

    def take(self, suffix: str, tensor: Tensor, shard: str, expert: int) -> bool:
        role = _role(shard)
        (name, entry), tensors = self.source.matrix(role), self._tensors[role]
        missing = _own_names(name, unstated_tensors(name, entry))
        if suffix in missing:
            raise CheckpointError(
                f"{name}.{suffix}: config.json does not state {missing[suffix]} for {name}; use the config.json that belongs "
                "to these files, or quantize the model again"
            )
        if suffix in tensors or role in self._made or self._is_done:
            raise self._refuse_again(f"{name}.{suffix}")
        expected = _own_names(name, expected_tensors(name, entry))
        shape, kinds = expected[suffix]
        while tensor.dim() > len(shape) and tensor.shape[0] == 1:  # added by `StreamNames`
            tensor = tensor[0]
        if tuple(tensor.shape) != shape or tensor.dtype not in kinds:
            raise CheckpointError(
                f"{name}.{suffix}: config.json states {' or '.join(map(str, kinds))} {shape}, the file has {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        tensors[suffix] = tensor
        if len(tensors) == len(expected):
            self._make(role)
        return True

    def _make(self, role: Role) -> None:
        (name, entry), tensors = self.source.matrix(role), self._tensors[role]
        whole = expert_tensor({suffix: tensor.to(self.device) for suffix, tensor in tensors.items()}, entry)
        tensors.clear()
        self._made[role] = self.spec.part_of_all(name, role, whole)

    def _finish(self) -> None:
        lacking = []
        for role in PARAMETERS:
            name, entry = self.source.matrix(role)
            if role not in self._made:
                lacking += [
                    each for each in expected_tensors(name, entry) if each.rpartition(".")[2] not in self._tensors[role]
                ]
        if lacking:
            raise _missing(lacking)

    def _is_empty(self) -> bool:
        return not any(self._tensors.values())

    def _scheme(self, role: Role) -> Scheme | None:
        return self.source.matrix(role)[1].scheme


class _SingleLoader(ExpertLoader):
    """Experts whose files hold each matrix of each expert."""

    shards: ClassVar[tuple[str, ...]] = ("w1", "w3", "w2")

    def __init__(self, source: ExpertSource, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.source = source
        self._tensors: dict[tuple[int, str], dict[str, Tensor]] = {}

    def take(self, suffix: str, tensor: Tensor, shard: str, expert: int) -> bool:
        slot = self.slots.get(expert)
        if slot is None:
            return False
        name = f"{self.source.name}.{expert}.{shard}"
        if suffix == _BIAS:
            if bool(tensor.any()):
                raise CheckpointError(f"{name}.{_BIAS}: vLLM's model has no biases of experts, this one is not zero")
            return True
        tensors = self._tensors.setdefault((slot, shard), {})
        if suffix in tensors or self._is_taken(slot, shard):
            raise self._refuse_again(f"{name}.{suffix}")
        tensors[suffix] = tensor
        self._took(slot, shard)
        return True

    def _is_taken(self, slot: int, shard: str) -> bool:
        """Returns True if the matrix was built already."""
        return self._is_done

    def _took(self, slot: int, shard: str) -> None:
        """Called after each tensor that was taken."""

    def _is_empty(self) -> bool:
        return not self._tensors


class _RoundedLoader(_SingleLoader):
    source: RoundedExperts

    def __init__(self, source: RoundedExperts, spec: ExpertSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(source, spec, dtype, device)
        self._rounded: dict[Role, dict[int, QuantTensor]] = {"gate_up": {}, "down": {}}

    def suffixes(self, role: Role) -> Mapping[str, torch.dtype]:
        return {PLAIN: self.dtype}

    def _is_taken(self, slot: int, shard: str) -> bool:
        role = _role(shard)
        return self._is_done or role in self._made or slot in self._rounded[role]

    def _took(self, slot: int, shard: str) -> None:
        """Rounds a matrix as soon as it is complete. Gate and up are rounded as one matrix, as by `lowbit quantize`."""
        role = _role(shard)
        shards = ("w2",) if role == "down" else ("w1", "w3")
        if any((slot, each) not in self._tensors for each in shards):
            return
        name = f"{self.source.name}.{self.spec.local[slot]}.{shard}.{PLAIN}"
        parts = [self._tensors[slot, each].pop(PLAIN) for each in shards]
        weight = torch.cat([part.to(self.device, self.dtype) for part in parts])
        if tuple(weight.shape) != self.spec.shape(role):
            raise CheckpointError(f"{name}: has the shape {list(weight.shape)}, vLLM's layer {list(self.spec.shape(role))}")
        try:
            q = rtn(weight, self.source.scheme, search=self.source.search)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        rounded = self._rounded[role]
        rounded[slot] = self.spec.part_of(name, role, q)
        if len(rounded) == len(self.spec.local):
            self._made[role] = ExpertTensor.stack(
                (rounded.pop(each) for each in range(len(self.spec.local))), len(self.spec.local)
            )

    def _finish(self) -> None:
        lacking = [
            f"{self.source.name}.{e}.{shard}.{PLAIN}"
            for slot, e in enumerate(self.spec.local)
            for shard in self.shards
            if not self._is_taken(slot, shard) and (slot, shard) not in self._tensors
        ]
        if lacking:
            raise _missing(lacking)

    def _scheme(self, role: Role) -> Scheme | None:
        return self.source.scheme


class _ForeignLoader(_SingleLoader):
    source: ForeignExperts

    def suffixes(self, role: Role) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.source.schema.suffixes, torch.int32) | {PLAIN: self.dtype, _BIAS: self.dtype}

    def _finish(self) -> None:
        """Reads all experts together, since only all of them show which single scheme they can have
        (`checkpoint.experts`)."""
        schema, name, local = self.source.schema, "experts", self.spec.local
        layers: dict[str, ForeignLayer] = {}
        plain = []
        where = f"{self.source.name} of the checkpoint's files"
        if local != tuple(range(self.spec.count)):
            where += f" (experts {', '.join(map(str, local))}, numbered from 0 here)"
        for (slot, shard), tensors in self._tensors.items():
            own = f"{name}.{slot}.{shard}"
            if any(marker in tensors for marker in schema.markers):
                layers[own] = ForeignLayer(own, {s: t.to(self.device) for s, t in tensors.items()}, where)
            elif PLAIN in tensors:
                plain.append(f"{own}.{PLAIN}")
        if plain and not layers:
            raise CheckpointError(
                f"{where}: its experts are in 16 bits, which lowbit does not compute for another tool's checkpoint; serve it "
                "without --quantization lowbit"
            )
        grouped = GroupedExperts({own: checked_entry(schema, layer) for own, layer in layers.items()}, plain, where)
        found = grouped.experts.get(name)
        if found is None or found.experts != len(local):
            raise _missing([f"{self.source.name}.{e}.w1" for e in local[0 if found is None else found.experts :]])
        read = grouped.read(name, lambda own: schema.read(layers[own]), lambda own: self._tensors_of(own))
        self._tensors.clear()
        for role, matrices in (("gate_up", read.gate_up), ("down", read.down)):
            if matrices[0].shape != self.spec.shape(role):  # type: ignore[arg-type]
                raise CheckpointError(
                    f"{where}: {role} has the shape {list(matrices[0].shape)}, vLLM's layer {list(self.spec.shape(role))}"  # type: ignore[arg-type]
                )
            self._made[role] = self.spec.stacked(self.source.name, role, matrices)  # type: ignore[index, arg-type]

    def _tensors_of(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.source.name}: experts with biases are not supported ({name})")


def _role(shard: str) -> Role:
    """Returns the matrix to which a shard ("w1", "w3" or "w2") of vLLM belongs."""
    return "down" if shard == "w2" else "gate_up"


def _own_names(name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of the matrix `name` by suffix."""
    return {full.removeprefix(f"{name}."): value for full, value in tensors.items()}


def _missing(names: Sequence[str]) -> CheckpointError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return CheckpointError(
        f"the checkpoint's files lack {', '.join(names[:4])}{more}; copy the folder again, or quantize the model again"
    )


def register_expert_parameters(layer: nn.Module, loading: ExpertLoader, random: bool = False) -> None:
    """Registers an empty parameter for each possible tensor of the experts; its weight_loader adds the tensor to `loading`."""
    layer.lowbit_loading, layer.lowbit_random = loading, random  # type: ignore[assignment]
    for role, begin in PARAMETERS.items():
        for suffix, kind in loading.suffixes(role).items():
            empty = nn.Parameter(torch.empty(0, dtype=kind), requires_grad=False)
            empty.weight_loader = _loader(loading, suffix)  # type: ignore[attr-defined]
            layer.register_parameter(f"{begin}{suffix}", empty)


def _loader(loading: ExpertLoader, suffix: str) -> Callable[..., bool | None]:
    def load(
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        with torch_defaults():
            is_own = loading.take(suffix, loaded_weight, shard_id, expert_id)
        return is_own if return_success else None

    load.supports_moe_loading = True  # type: ignore[attr-defined]  # some of vLLM's models ask for it
    return load


def loaded_experts(layer: nn.Module) -> dict[Role, ExpertTensor]:
    """Returns the weights built from all tensors of a layer."""
    loading: ExpertLoader = layer.lowbit_loading  # type: ignore[assignment]
    made = loading.finish(random=bool(layer.lowbit_random))
    del layer.lowbit_loading, layer.lowbit_random
    return made


class _Interface(nn.Module):
    """The parts of Transformers' experts module that `QuantExperts` reads: shapes of the weights, and the activation."""

    is_transposed = False

    def __init__(self, experts: int, shapes: Mapping[str, tuple[int, int]], activation: str) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty((experts, *shape), device="meta"), requires_grad=False))
        self.activation = activation

    def _apply_gate(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return (nn.functional.silu(gate) if self.activation == "silu" else nn.functional.gelu(gate, approximate="tanh")) * up


ACTIVATIONS = ("silu", "gelu_tanh")
"""The supported activation functions, by vLLM's names."""


class LocalExperts(nn.Module):
    """This rank's experts. They compute y [T, H] from x [T, H], the indices of experts [T, top_k] among those of all ranks, and
    the router's weights.

    expert_map: int [E], the index of each expert on this rank, or -1 if another rank has it; None if this rank has all experts.
    An expert of another rank adds nothing.
    """

    numbers: Tensor | None

    def __init__(self, weights: Mapping[Role, ExpertTensor], activation: str, expert_map: Tensor | None = None) -> None:
        super().__init__()
        gate_up, down = weights["gate_up"], weights["down"]
        interface = _Interface(gate_up.experts, {FIRST: gate_up.shape, SECOND: down.shape}, activation)
        packed = {FIRST: PackedExperts.from_expert_tensor(gate_up), SECOND: PackedExperts.from_expert_tensor(down)}
        self.experts = QuantExperts(interface, packed)
        if expert_map is not None:
            device = gate_up.packed.device  # index -1, a slot without an expert, reads the last element
            expert_map = torch.cat([expert_map.to(device), expert_map.new_full((1,), -1, device=device)])
        self.register_buffer("numbers", expert_map, persistent=False)

    def prepare(self, name: str, dtype: torch.dtype, *, batch_invariant: bool = False) -> None:
        """Packs the weights for the device's kernels, for x of `dtype`.

        Raises ValueError, naming the layer, if no kernel supports it on a GPU. So CUDA graphs capture every layer that loads.
        """
        if batch_invariant:
            reasons = self.experts.batch_invariant_refusals(dtype)
            if reasons:
                raise ValueError(f"{name}: {'; '.join(reasons)}; serve it without VLLM_BATCH_INVARIANT")
            self.experts.batch_invariant = True
        for part in self.experts.packed().values():
            part.decode_bytes = dtype.itemsize
            on_gpu = part.weight_scale.device.type == "cuda"
            reasons = why_slow(part.problem(dtype)) if on_gpu else ()
            if reasons:
                raise ValueError(
                    f"{name}: no kernel for experts of {part.scheme} {part.shape}, this rank's part, on this GPU: "
                    f"{'; '.join(reasons)}; quantize to another scheme, use fewer ranks (--tensor-parallel-size), or "
                    "--enable-expert-parallel"
                )
            part.forms_for(dtype)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if self.numbers is not None:
            experts = self.numbers[experts.long()]
        y: Tensor = self.experts(x, experts, weights)
        return y


class StreamNames:
    """The names under which vLLM's model loads the stacked experts of lowbit's files.

    layers: pairs of the source of a layer and the names of the matrices gate and down in vLLM's model, such as ("w1", "w2").
    Modules with the same parent as the experts, such as the router, are renamed too if vLLM's model has another name for the
    parent (Mixtral: mlp -> block_sparse_moe).
    """

    def __init__(self, layers: Iterable[tuple[ExpertSource, tuple[str, str]]]) -> None:
        self.matrices: dict[str, str] = {}
        self.parents: dict[str, str] = {}
        for source, (gate, down) in layers:
            if not isinstance(source, StackedExperts):
                continue
            parent, _, own = source.in_files.rpartition(".")
            above, _, last = parent.rpartition(".")
            wanted = source.name.rpartition(".")[0].rpartition(".")[2]
            if last != wanted:
                self.parents[f"{parent}."] = f"{above}.{wanted}."
            new = f"{above}.{wanted}.{own}.0"
            self.matrices |= {f"{source.in_files}.{FIRST}": f"{new}.{gate}", f"{source.in_files}.{SECOND}": f"{new}.{down}"}

    def __bool__(self) -> bool:
        return bool(self.matrices)

    def renamed(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Returns the name and the shape of a tensor that vLLM's model expects: (name, tensor)."""
        matrix, _, suffix = name.rpartition(".")
        if matrix in self.matrices:
            return f"{self.matrices[matrix]}.{suffix}", tensor[(None,) * (_RANK - tensor.dim())]
        for old, new in self.parents.items():
            if name.startswith(old):
                return new + name.removeprefix(old), tensor
        return name, tensor
