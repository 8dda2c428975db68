"""Launches a step of any number of requests: on a GPU as one CUDA graph for each size, with drawing and feedback inside.

A graph holds addresses, so all that a step reads and writes is where it was when the graph was captured: the slots, the cache,
the weights, and the rows and results here. Sizes between two graphs are filled up with rows that are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowbit.engine.batching import Piece
from lowbit.engine.graphs import Graphs
from lowbit.engine.request import Request
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE
from lowbit.ops.sample import sample

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which there are graphs, up to the first that holds all requests of an engine."""

REACHES = (2048, 8192)
"""Longest contexts for which there are graphs, beside that of all tables: attention is launched in as many blocks as its
longest context may keep busy, and those without work cost 16 us a layer at 64 rows of 1,024 tokens where 131,072 are possible
(modelled, kernels/choose/attention.py)."""

Variant = tuple[int, bool, int]
"""Rows, whether some request asks for more than its likeliest token, and the longest context."""


class Program(Protocol):
    """What computes logits: `DecodeProgram`, or a model's own forward."""

    reasons: tuple[str, ...]
    computes_together: bool
    """Whether pieces of several texts are computed at once, and may be computed again."""
    device: torch.device
    dtype: torch.dtype

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Logits [B, V] after the next token of each slot of `rows`, chosen for contexts of up to `longest` tokens (0: any)."""

    def prompt(self, pieces: Sequence[Piece], slots: Slots) -> Tensor | None:
        """Logits [B, V] after each last piece."""

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values of a page of tokens, in all layers."""

    def keep(self, running: Sequence[Request]) -> None:
        """Frees keys and values that the program itself holds for other requests."""


@dataclass(frozen=True)
class Step:
    """A step of some size: which rows, what they drew, with what logarithm of probability, and from which logits.

    `graph` launches it again; None where it runs as it was written.
    """

    rows: Tensor
    tokens: Tensor
    logprobs: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph | None = None


class Steps:
    """The steps of an engine of at most `most` requests; `graphs`: where they are captured, None without them; `invariant`: a
    step does not depend on how long others' texts are."""

    def __init__(
        self, program: Program, slots: Slots, most: int, *, graphs: Graphs | None = None, invariant: bool = False
    ) -> None:
        self.program, self.slots, self.graphs = program, slots, graphs
        enough = next((size for size in SIZES if size >= most), most)
        self.sizes = (*(size for size in SIZES if size < enough), enough)
        longest = PAGE * slots.places
        self.reaches = (longest,) if invariant else (*(reach for reach in REACHES if reach < longest), longest)
        self.captures = 0
        """Graphs captured so far: it stands still once an engine is warm."""
        self._captured: dict[Variant, Step] = {}

    def variants(self) -> list[Variant]:
        """Every size, with and without what only some requests ask of drawing, for every reach; the largest first, whose memory
        serves all."""
        return [
            (size, filters, reach)
            for size in reversed(self.sizes)
            for filters in (False, True)
            for reach in reversed(self.reaches)
        ]

    def variant(self, count: int, filters: bool, longest: int) -> Variant:
        """That of a step of `count` rows."""
        size = next(size for size in self.sizes if size >= count)
        return size, filters, next(reach for reach in self.reaches if reach >= longest)

    def launch(self, rows: Sequence[int], filters: bool, longest: int) -> Step:
        """One step of the slots `rows`, whose contexts have up to `longest` tokens; `filters`: some request asks for more than
        its likeliest token."""
        size, _, reach = variant = self.variant(len(rows), filters, longest)
        if not self.graphs:
            return self.run(on_device(list(rows), self.slots.device), filters, reach)
        step = self.captured(variant)
        assert step.graph is not None
        filled = [*rows, *[self.slots.nobodys] * (size - len(rows))]
        step.rows.copy_(on_device(filled, self.slots.device))
        step.graph.replay()
        return step

    def captured(self, variant: Variant) -> Step:
        """The graph of a variant, captured at the first call."""
        found = self._captured.get(variant)
        if found is None:
            found = self._captured[variant] = self._capture(*variant)
            self.captures += 1
        return found

    def _capture(self, size: int, filters: bool, reach: int) -> Step:
        assert self.graphs is not None
        rows = torch.full((size,), self.slots.nobodys, dtype=torch.int32, device=self.slots.device)
        graph, step = self.graphs.capture(lambda: self.run(rows, filters, reach))
        return Step(rows, step.tokens, step.logprobs, step.logits, graph)

    def run(self, rows: Tensor, filters: bool, reach: int) -> Step:
        """The step of the slots `rows` int32 [B] as it is written, launch by launch."""
        logits = self.program.step(rows, self.slots, reach)
        return draw(logits, rows, self.slots, filters)


def filters(requests: Iterable[Request]) -> bool:
    """Whether some request asks for more than its likeliest token."""
    return not all(request.sampling.greedy for request in requests)


def draw(logits: Tensor, rows: Tensor, slots: Slots, filters: bool) -> Step:
    """Draws a token for each row, which becomes the next one of its slot, one position on."""
    tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    sample(logits, rows, slots.sampling, slots.tokens, slots.positions, tokens, logprobs, any_filter=filters)
    return Step(rows, tokens, logprobs, logits)
