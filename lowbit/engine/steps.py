"""Launches a step of any number of requests: on a GPU as one CUDA graph for each size, with drawing and feedback inside.

A graph holds addresses, so all that a step reads and writes is where it was when the graph was captured: the slots, the cache,
the weights, and the rows and results here. Sizes between two graphs are filled up with rows that are nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit.engine.batching import Piece
from lowbit.engine.slots import Slots, on_device
from lowbit.ops.sample import sample

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which there are graphs, up to the first that holds all requests of an engine."""


class Program(Protocol):
    """What computes logits: `DecodeProgram`, or a model's own forward."""

    reasons: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype

    def step(self, rows: Tensor, slots: Slots) -> Tensor:
        """Logits [B, V] after the next token of each slot of `rows`."""

    def prompt(self, pieces: Sequence[Piece], slots: Slots) -> Tensor | None:
        """Logits [B, V] after each last piece."""


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
    """The steps of an engine of at most `most` requests."""

    def __init__(self, program: Program, slots: Slots, most: int, *, graphs: bool) -> None:
        self.program, self.slots, self.graphs = program, slots, graphs
        enough = next((size for size in SIZES if size >= most), most)
        self.sizes = (*(size for size in SIZES if size < enough), enough)
        self.captures = 0
        """Graphs captured so far: it stands still once an engine is warm."""
        self._captured: dict[tuple[int, bool], Step] = {}
        self._pool: Any = None

    def variants(self) -> list[tuple[int, bool]]:
        """Every size, with and without what only some requests ask of drawing; the largest first, whose memory serves all."""
        return [(size, filters) for size in reversed(self.sizes) for filters in (False, True)]

    def launch(self, rows: Sequence[int], filters: bool) -> Step:
        """One step of the slots `rows`; `filters`: some request asks for more than its likeliest token."""
        if not self.graphs:
            return self._run(on_device(list(rows), self.slots.device), filters)
        size = next(size for size in self.sizes if size >= len(rows))
        step = self.captured(size, filters)
        assert step.graph is not None
        filled = [*rows, *[self.slots.nobodys] * (size - len(rows))]
        step.rows.copy_(on_device(filled, self.slots.device))
        step.graph.replay()
        return step

    def captured(self, size: int, filters: bool) -> Step:
        """The graph of a size, captured at the first call."""
        found = self._captured.get((size, filters))
        if found is None:
            found = self._captured[size, filters] = self._capture(size, filters)
            self.captures += 1
        return found

    def _capture(self, size: int, filters: bool) -> Step:
        with torch.cuda.device(self.slots.device):  # streams are of the current one
            rows = torch.full((size,), self.slots.nobodys, dtype=torch.int32, device=self.slots.device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles kernels and makes plans, which a capture may not
                self._run(rows, filters)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                step = self._run(rows, filters)
        self._pool = graph.pool()
        return Step(rows, step.tokens, step.logprobs, step.logits, graph)

    def _run(self, rows: Tensor, filters: bool) -> Step:
        logits = self.program.step(rows, self.slots)
        return draw(logits, rows, self.slots, filters)


def draw(logits: Tensor, rows: Tensor, slots: Slots, filters: bool) -> Step:
    """Draws a token for each row, which becomes the next one of its slot, one position on."""
    tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    sample(logits, rows, slots.sampling, slots.tokens, slots.positions, tokens, logprobs, any_filter=filters)
    return Step(rows, tokens, logprobs, logits)
