"""Collects the tensors of a layer's matrices while vLLM loads the files, and keeps this rank's shard of each matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError
from lowbit.formats import QuantTensor
from lowbit.formats.split import Range, columns_of, columns_refusals, filled_up, part_range, rows_of
from lowbit.quantize import rtn
from lowbit.vllm.matrices import PLAIN, Matrix
from lowbit.vllm.product import Shard

T = TypeVar("T")

_QKV = {"q": 0, "k": 1, "v": 2}

ACTIVATION_SCALE, RENAMED = "activation_scale", "input_scale"
"""Name of the static activation scale in lowbit's files, and the name to which some models rename it while loading (Llama in
SGLang 0.5.23, Mistral 3 in vLLM 0.33)."""


@dataclass(frozen=True)
class ShardSpec:
    """A rank's shard of a layer. The layer has one or several outputs; q, k and v are three. parts: this rank's rows of each
    output. whole: rows of each output on all ranks. ranks_along_k: number of ranks among which the input channels are split.
    rows: the rank's range of a vocabulary. fill: number of rows after padding with zeros; 0 without padding."""

    parts: tuple[int, ...]
    whole: tuple[int, ...]
    rank: int = 0
    ranks: int = 1
    ranks_along_k: int = 1
    rows: Range | None = None
    fill: int = 0

    def ranges(self, outputs: Sequence[int], n: int) -> list[Range]:
        """Returns the ranges of rows of this rank in a matrix of `n` rows that stacks these outputs."""
        expected = " + ".join(str(self.whole[i]) for i in outputs)
        if sum(self.whole[i] for i in outputs) != n:
            raise ValueError(f"vLLM's layer has {expected} output channels on all ranks together, the matrix has {n}")
        if self.rows is not None:
            return [self.rows]
        ranges, begin = [], 0
        for i in outputs:
            own = part_range(self.whole[i], self.parts[i], self.rank, self.ranks)
            ranges.append((begin + own[0], begin + own[1]))
            begin += self.whole[i]
        return ranges

    def shard(self, name: str, whole: QuantTensor | Tensor, outputs: Sequence[int], k: int) -> Shard:
        """Returns this rank's shard of a matrix. Raises CheckpointError if it does not fit vLLM's layer or cannot be split."""
        if whole.shape[1] != k:
            raise CheckpointError(
                f"{name}: has {whole.shape[1]} input channels, vLLM's layer {k}; config.json belongs to another model"
            )
        rank = self.rank if self.ranks_along_k > 1 else 0
        try:
            ranges = self.ranges(outputs, whole.shape[0])
            if isinstance(whole, QuantTensor):
                reasons = columns_refusals(whole, self.ranks_along_k)
                if reasons:
                    raise ValueError("; ".join(reasons))
                part, index = columns_of(rows_of(whole, ranges), rank, self.ranks_along_k)
                return Shard(filled_up(part, self.fill) if self.fill else part, index)
            begin, end = part_range(k, k // self.ranks_along_k, rank, self.ranks_along_k)
            rows = torch.cat([whole[first:last, begin:end] for first, last in ranges])
            return Shard(nn.functional.pad(rows, (0, 0, 0, self.fill - len(rows))) if self.fill else rows)
        except ValueError as error:
            raise CheckpointError(f"{name}: cannot be split for rank {self.rank} of {self.ranks}: {error}") from error


class LayerLoader(Generic[T]):
    """Loads the matrices of one layer of vLLM, with `k` input channels each, onto `device`.

    As soon as all shards are complete, `make` builds the layer's module from them, so that few unpacked codes are in memory at
    a time. With each tensor vLLM states the output to which it belongs, such as "q", 0 or (0, 1), or None for all outputs.
    """

    def __init__(
        self, matrices: Sequence[Matrix], spec: ShardSpec, k: int, dtype: torch.dtype, device: torch.device,
        make: Callable[[Sequence[Shard]], T],
    ) -> None:  # fmt: skip
        self.matrices, self.spec, self.k, self.dtype, self.device, self._make = tuple(matrices), spec, k, dtype, device, make
        self.outputs = _outputs(self.matrices, spec)
        self._tensors: list[dict[str, Tensor]] = [{} for _ in self.matrices]
        self._shards: dict[int, Shard] = {}
        self._result: T | None = None
        self._is_done = False

    def take(self, suffix: str, tensor: Tensor, of: Any = None) -> None:
        """Adds one tensor. Raises CheckpointError, naming the tensor, if it is a duplicate or its matrix is invalid."""
        number = self._matrix_of(of)
        matrix, tensors = self.matrices[number], self._tensors[number]
        if suffix in matrix.unstated:
            raise CheckpointError(
                f"{matrix.name}.{suffix}: config.json does not state {matrix.unstated[suffix]} for {matrix.name}; use the "
                "config.json that belongs to these files, or quantize the model again"
            )
        if suffix in tensors or number in self._shards or self._result is not None or self._is_done:
            raise CheckpointError(
                f"{matrix.name}.{suffix}: loaded twice; a running engine cannot load its weights again: start another engine"
            )
        tensors[suffix] = tensor
        if matrix.is_whole(tensors):
            self._read_shard(number)

    def finish(self, *, random: bool = False) -> T:
        """Returns the layer's module. `random`: if no tensor was loaded, uses random weights (vLLM's load format "dummy").

        Raises CheckpointError with the names of missing tensors.
        """
        if random and self._result is None and not any(self._tensors) and not self._shards:
            self._result = self._make([self._random(number) for number in range(len(self.matrices))])
        for number in range(len(self.matrices)):
            if self._result is None and number not in self._shards:
                self._read_shard(number)
        result, self._result, self._is_done = self._result, None, True
        assert result is not None
        return result

    def _matrix_of(self, of: Any) -> int:
        outputs = tuple(range(len(self.spec.parts))) if of is None else of if isinstance(of, tuple) else (_QKV.get(of, of),)
        if outputs in self.outputs:
            return self.outputs.index(outputs)
        names = ", ".join(matrix.name for matrix in self.matrices)
        raise CheckpointError(
            f"vLLM loads output {of!r} of a layer that consists of {names}; this architecture is not supported"
        )

    def _read_shard(self, number: int) -> None:
        matrix, tensors = self.matrices[number], self._tensors[number]
        shard = self.spec.shard(matrix.name, matrix.read(tensors, self.device), self.outputs[number], self.k)
        tensors.clear()
        index = None if shard.index is None else shard.index.to(self.device)
        self._shards[number] = Shard(shard.weight.to(self.device), index)
        if len(self._shards) == len(self.matrices):
            self._result = self._make([self._shards[i] for i in range(len(self.matrices))])
            self._shards.clear()

    def _random(self, number: int) -> Shard:
        rows = self.spec.fill or sum(self.spec.parts[i] for i in self.outputs[number])
        shape, scheme = (rows, self.k // self.spec.ranks_along_k), self.matrices[number].scheme_of()
        weight = torch.randn(shape, dtype=self.dtype, device=self.device) / self.k**0.5
        return Shard(weight if scheme is None else rtn(weight, scheme))


def _outputs(matrices: Sequence[Matrix], spec: ShardSpec) -> list[tuple[int, ...]]:
    """Returns the indices of the layer's outputs that each matrix contains. If there are as many matrices as outputs, each has
    one. A single matrix has all. Otherwise each has as many outputs as its rows fill."""
    count = len(spec.parts)
    if len(spec.whole) != count:  # MiniMax-M3 has an indexer in addition to q, k and v
        raise CheckpointError(
            f"{matrices[0].name}: vLLM's layer has {count} outputs, lowbit supports {len(spec.whole)}; leave this layer in "
            "16 bits"
        )
    if len(matrices) == count:
        return [(i,) for i in range(count)]
    if len(matrices) == 1:
        return [tuple(range(count))]
    found, next_one = [], 0
    for matrix in matrices:
        stated, begin, rows = matrix.stated_shape(), next_one, 0
        while stated is not None and next_one < count and rows < stated[0]:
            rows += spec.whole[next_one]
            next_one += 1
        if stated is None or rows != stated[0]:
            raise CheckpointError(f"{matrix.name}: its rows do not fill whole outputs of vLLM's layer, {list(spec.whole)}")
        found.append(tuple(range(begin, next_one)))
    return found


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Restores torch's default dtype and device in the block. vLLM sets those of the model while it builds and loads it.

    Tables that lowbit caches must have torch's default dtype. With a default device, torch calls a Python function before each
    operation, which is slow.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(dtype)


def register_parameters(layer: nn.Module, loading: LayerLoader[Any], random: bool = False) -> None:
    """Registers an empty parameter for each possible tensor of the layer; its weight_loader adds the tensor to `loading`.

    Tensors that the matrices must not have are registered too, so that loading them raises an error: many models silently skip
    names without a parameter. `random`: True if no tensor will be loaded; `loaded` then uses random weights.
    """
    layer.lowbit_loading, layer.lowbit_random = loading, random  # type: ignore[assignment]
    types = {suffix: torch.uint8 for matrix in loading.matrices for suffix in matrix.unstated}
    types |= {suffix: kind for matrix in loading.matrices for suffix, kind in matrix.suffixes.items()}
    suffixes = {suffix: suffix for suffix in types}
    if ACTIVATION_SCALE in types:
        suffixes.setdefault(RENAMED, ACTIVATION_SCALE)
    for name, suffix in suffixes.items():
        empty = nn.Parameter(torch.empty(0, dtype=types[suffix]), requires_grad=False)
        empty.weight_loader = _loader(loading, suffix)  # type: ignore[attr-defined]
        if suffix == PLAIN:
            empty.output_dim = 0  # type: ignore[attr-defined]  # Falcon's loader reorders rows along output_dim
        layer.register_parameter(name, empty)


def _loader(loading: LayerLoader[Any], suffix: str) -> Callable[..., None]:
    def load(parameter: nn.Parameter, tensor: Tensor, of: Any = None) -> None:
        with torch_defaults():
            loading.take(suffix, tensor, of)

    return load


def loaded(layer: nn.Module) -> Any:
    """Returns the module built from all tensors of a layer. The empty parameters stay, since LoRA reads the device from
    them."""
    loading: LayerLoader[Any] = layer.lowbit_loading  # type: ignore[assignment]
    result = loading.finish(random=bool(layer.lowbit_random))
    if loading.device.type == "cpu":
        # vLLM's attention uses AMX without requesting it from the system. torch's 16-bit matrix product requests it, but int4
        # models may not call that product and then crash with an illegal instruction (vLLM 0.32.0).
        torch.cpu._init_amx()
    del layer.lowbit_loading, layer.lowbit_random
    return result


def whole_outputs(layer: Any, parts: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of rows of each output of a vLLM layer on all ranks together; replicas of KV heads are not counted."""
    if hasattr(layer, "total_num_kv_heads"):
        heads, keys, values = layer.total_num_heads, layer.total_num_kv_heads, getattr(layer, "v_head_size", layer.head_size)
        return (heads * layer.head_size, keys * layer.head_size, keys * values)
    return tuple(getattr(layer, "output_sizes", (layer.output_size,)))
