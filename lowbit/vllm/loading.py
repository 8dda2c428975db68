"""Collects the tensors of a layer's matrices as vLLM hands them out, and keeps this rank's part of each when it is whole."""

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
from lowbit.vllm.product import Piece

T = TypeVar("T")

_QKV = {"q": 0, "k": 1, "v": 2}

ACTIVATION_SCALE, RENAMED = "activation_scale", "input_scale"
"""What the calibrated scale of x is called in our files, and what some models make of that while they load them (Llama in
SGLang 0.5.23, Mistral 3 in vLLM 0.33)."""


@dataclass(frozen=True)
class Cut:
    """What a rank keeps of a layer: of its outputs (q, k and v: three) `parts` rows each, of `whole` in all, and of K input
    channels as many as ranks along K leave it. `fill` > 0: rows of nothing up to so many; `rows`: those of a vocabulary."""

    parts: tuple[int, ...]
    whole: tuple[int, ...]
    rank: int = 0
    ranks: int = 1
    ranks_along_k: int = 1
    rows: Range | None = None
    fill: int = 0

    def ranges(self, outputs: Sequence[int], n: int) -> list[Range]:
        """Rows that it keeps of a matrix of `n` rows that has these outputs one after the other."""
        expected = " + ".join(str(self.whole[i]) for i in outputs)
        if sum(self.whole[i] for i in outputs) != n:
            raise ValueError(f"vLLM's layer has {expected} output channels on all ranks together, the matrix {n}")
        if self.rows is not None:
            return [self.rows]
        ranges, begin = [], 0
        for i in outputs:
            own = part_range(self.whole[i], self.parts[i], self.rank, self.ranks)
            ranges.append((begin + own[0], begin + own[1]))
            begin += self.whole[i]
        return ranges

    def piece(self, name: str, whole: QuantTensor | Tensor, outputs: Sequence[int], k: int) -> Piece:
        """This rank's part of a matrix. Raises CheckpointError, naming it, for one that does not fit the layer of vLLM or
        cannot be split."""
        if whole.shape[1] != k:
            raise CheckpointError(
                f"{name}: has {whole.shape[1]} input channels, vLLM's layer {k}; config.json is of another model"
            )
        rank = self.rank if self.ranks_along_k > 1 else 0
        try:
            ranges = self.ranges(outputs, whole.shape[0])
            if isinstance(whole, QuantTensor):
                reasons = columns_refusals(whole, self.ranks_along_k)
                if reasons:
                    raise ValueError("; ".join(reasons))
                part, index = columns_of(rows_of(whole, ranges), rank, self.ranks_along_k)
                return Piece(filled_up(part, self.fill) if self.fill else part, index)
            begin, end = part_range(k, k // self.ranks_along_k, rank, self.ranks_along_k)
            rows = torch.cat([whole[first:last, begin:end] for first, last in ranges])
            return Piece(nn.functional.pad(rows, (0, 0, 0, self.fill - len(rows))) if self.fill else rows)
        except ValueError as error:
            raise CheckpointError(f"{name}: cannot be split for rank {self.rank} of {self.ranks}: {error}") from error


class Loading(Generic[T]):
    """The matrices of one layer of vLLM, `k` input channels each, on their way to `device`; of all pieces together `make` makes
    what the layer keeps, as soon as they are there: nobody waits for other layers with unpacked codes.

    vLLM says with each tensor of which output it is ("q", 0, (0, 1)), or nothing where it is of all of them.
    """

    def __init__(
        self, matrices: Sequence[Matrix], cut: Cut, k: int, dtype: torch.dtype, device: torch.device,
        make: Callable[[Sequence[Piece]], T],
    ) -> None:  # fmt: skip
        self.matrices, self.cut, self.k, self.dtype, self.device, self._make = tuple(matrices), cut, k, dtype, device, make
        self.outputs = _outputs(self.matrices, cut)
        self._tensors: list[dict[str, Tensor]] = [{} for _ in self.matrices]
        self._pieces: dict[int, Piece] = {}
        self._made: T | None = None
        self._is_done = False

    def take(self, suffix: str, tensor: Tensor, of: Any = None) -> None:
        """Takes one tensor; raises CheckpointError, naming it, when it came before or its matrix is not as it should be."""
        number = self._matrix_of(of)
        matrix, held = self.matrices[number], self._tensors[number]
        if suffix in matrix.unstated:
            raise CheckpointError(
                f"{matrix.name}.{suffix}: config.json does not state {matrix.unstated[suffix]} for {matrix.name}; take the "
                "config.json that came with these files, or quantize the model again"
            )
        if suffix in held or number in self._pieces or self._made is not None or self._is_done:
            raise CheckpointError(
                f"{matrix.name}.{suffix}: came twice; weights of a running engine are not loaded again: start another engine"
            )
        held[suffix] = tensor
        if matrix.is_whole(held):
            self._cut(number)

    def finish(self, *, random: bool = False) -> T:
        """What the layer keeps; `random`: without tensors, of random weights (vLLM's load format "dummy"). Raises
        CheckpointError, naming the tensors, when some are missing."""
        if random and self._made is None and not any(self._tensors) and not self._pieces:
            self._made = self._make([self._random(number) for number in range(len(self.matrices))])
        for number in range(len(self.matrices)):
            if self._made is None and number not in self._pieces:
                self._cut(number)
        made, self._made, self._is_done = self._made, None, True
        assert made is not None
        return made

    def _matrix_of(self, of: Any) -> int:
        wanted = tuple(range(len(self.cut.parts))) if of is None else of if isinstance(of, tuple) else (_QKV.get(of, of),)
        if wanted in self.outputs:
            return self.outputs.index(wanted)
        names = ", ".join(matrix.name for matrix in self.matrices)
        raise CheckpointError(
            f"vLLM loads output {of!r} of a layer that is made of {names}; this architecture is not supported"
        )

    def _cut(self, number: int) -> None:
        matrix, held = self.matrices[number], self._tensors[number]
        piece = self.cut.piece(matrix.name, matrix.read(held, self.device), self.outputs[number], self.k)
        held.clear()
        index = None if piece.index is None else piece.index.to(self.device)
        self._pieces[number] = Piece(piece.weight.to(self.device), index)
        if len(self._pieces) == len(self.matrices):
            self._made = self._make([self._pieces[i] for i in range(len(self.matrices))])
            self._pieces.clear()

    def _random(self, number: int) -> Piece:
        rows = self.cut.fill or sum(self.cut.parts[i] for i in self.outputs[number])
        shape, scheme = (rows, self.k // self.cut.ranks_along_k), self.matrices[number].scheme_of()
        weight = torch.randn(shape, dtype=self.dtype, device=self.device) / self.k**0.5
        return Piece(weight if scheme is None else rtn(weight, scheme))


def _outputs(matrices: Sequence[Matrix], cut: Cut) -> list[tuple[int, ...]]:
    """Which outputs of a layer each matrix holds: one each, all of them, or as many as its rows are."""
    count = len(cut.parts)
    if len(cut.whole) != count:  # MiniMax-M3's indexer beside q, k and v
        raise CheckpointError(
            f"{matrices[0].name}: vLLM's layer has {count} outputs, {len(cut.whole)} are known here; this architecture is not "
            "supported with quantized weights there: leave them in 16 bits"
        )
    if len(matrices) == count:
        return [(i,) for i in range(count)]
    if len(matrices) == 1:
        return [tuple(range(count))]
    found, next_one = [], 0
    for matrix in matrices:
        stated, begin, rows = matrix.stated_shape(), next_one, 0
        while stated is not None and next_one < count and rows < stated[0]:
            rows += cut.whole[next_one]
            next_one += 1
        if stated is None or rows != stated[0]:
            raise CheckpointError(f"{matrix.name}: its rows are not whole outputs of vLLM's layer, which has {list(cut.whole)}")
        found.append(tuple(range(begin, next_one)))
    return found


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """torch's own default type and device, where vLLM has set the model's: what is computed here names its types, but tables
    that it keeps for later are made of defaults. A default device is a function in Python before each of torch's, which
    takes longer than many of them; none is called here."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(dtype)


def expect(layer: nn.Module, loading: Loading[Any], random: bool = False) -> None:
    """Gives a layer of vLLM or SGLang a parameter without numbers for each tensor that its matrices may have, whose loader
    takes it; also for those that they must not have, which many models would leave out in silence where nothing has the name.
    `random`: none will come, weights are made up."""
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
            empty.output_dim = 0  # type: ignore[attr-defined]  # Falcon's loader rearranges rows of what states where they are
        layer.register_parameter(name, empty)


def _loader(loading: Loading[Any], suffix: str) -> Callable[..., None]:
    def load(parameter: nn.Parameter, tensor: Tensor, of: Any = None) -> None:
        with usual_defaults():
            loading.take(suffix, tensor, of)

    return load


def loaded(layer: nn.Module) -> Any:
    """What all tensors of a layer made. The empty parameters stay: LoRA asks them for the layer's device."""
    loading: Loading[Any] = layer.lowbit_loading  # type: ignore[assignment]
    made = loading.finish(random=bool(layer.lowbit_random))
    if loading.device.type == "cpu":
        # vLLM's attention uses AMX without asking the system for it, which torch's product of 16-bit matrices does for others:
        # without such products (int4, few tokens) it would end in an illegal instruction (seen with 0.32.0).
        torch.cpu._init_amx()
    del layer.lowbit_loading, layer.lowbit_random
    return made


def whole_outputs(layer: Any, parts: Sequence[int]) -> tuple[int, ...]:
    """Rows of each output of a layer of vLLM on all ranks together, each once."""
    if hasattr(layer, "total_num_kv_heads"):
        heads, keys, values = layer.total_num_heads, layer.total_num_kv_heads, getattr(layer, "v_head_size", layer.head_size)
        return (heads * layer.head_size, keys * layer.head_size, keys * values)
    return tuple(getattr(layer, "output_sizes", (layer.output_size,)))
