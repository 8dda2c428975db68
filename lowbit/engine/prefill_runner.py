"""Launches the prompts of a round: on a GPU as one CUDA graph for each number of tokens, filled up with nobody's.

Without graphs 300 launches of Python take 15 to 20 ms for any prompt (Llama-3-8B's shape, H200, 2026-11-23), more than 512
tokens need on the GPU. Tokens are sampled behind the graph, since how is for each request to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.engine.graphs import Graphs
from lowbit.engine.program import DecodeProgram
from lowbit.engine.ragged import Ragged, RaggedShape, sizes
from lowbit.engine.request import Request
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE

if TYPE_CHECKING:
    from lowbit.engine.decode_runner import ModelProgram

MAX_SEQUENCES = 31
"""Texts of a graph at most, more come one graph after the other. Blocks of attention without a text cost 0.5 ms in all for
1,024 tokens beside those of one text (of 25; Llama-3-8B's shape, H200, 2026-11-23)."""

KEYS = 8192
"""Tokens up to their own that the sequences of a graph may see; there is another for sequences that all begin in this round."""


class PrefillRunner:
    """The prompts of an engine whose rounds have up to `most` tokens of them; `graphs`: where they are captured, or None."""

    def __init__(self, program: ModelProgram, slots: Slots, most: int, *, graphs: Graphs | None = None) -> None:
        self.program, self.slots, self.sizes, self._graphs = program, slots, sizes(most), graphs
        self.sequences = min(MAX_SEQUENCES, slots.count)
        """Texts of a graph."""
        self.graph_shapes: tuple[RaggedShape, ...] = ()
        """All for which there are graphs, the largest first, whose memory serves all."""
        if graphs is not None and isinstance(program, DecodeProgram) and not program.softcaps:
            most_keys = min(KEYS, slots.count * slots.pages_per_slot * PAGE)  # of all sequences there may be
            each = ((size, keys) for size in reversed(self.sizes) for keys in (max(most_keys, size), size))
            self.graph_shapes = tuple(RaggedShape(size, self.sequences, keys) for size, keys in dict.fromkeys(each))
        self.captures = 0
        """Graphs captured so far: it stands still once an engine is warm."""
        self._captured: dict[RaggedShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._logits: Tensor | None = None

    def size(self, tokens: int) -> int:
        """How many tokens are computed for so many."""
        return next(size for size in self.sizes if size >= tokens)

    def launch(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        """Logits [B, V] after each last chunk of a text, until the next launch; None if there is none."""
        first, *others = self.parts(chunks)
        if not others:
            return self._launch(first)
        made = [logits.clone() for part in (first, *others) if (logits := self._launch(part)) is not None]  # before the next
        return torch.cat(made) if made else None

    def parts(self, chunks: Sequence[PrefillChunk]) -> list[Sequence[PrefillChunk]]:
        """What of some chunks is computed at once: as many as a graph has sequences."""
        most = self.sequences if self.graph_shapes else len(chunks)
        return [chunks[at : at + most] for at in range(0, len(chunks), most)]

    def _launch(self, chunks: Sequence[PrefillChunk]) -> Tensor | None:
        shape = self._shape(chunks)
        if shape is None:
            return self.program.prompt(chunks, self.slots)
        graph, numbers = self.captured(shape)
        numbers.copy_(on_device(shape.numbers(chunks, self.slots.dummy_slot), self.slots.device))
        graph.replay()
        assert self._logits is not None
        count = sum(chunk.last for chunk in chunks)
        return self._logits[:count] if count else None

    def _shape(self, chunks: Sequence[PrefillChunk]) -> RaggedShape | None:
        """The smallest of those with graphs that some chunks fit into; None if they fit into none."""
        tokens, keys = sum(len(chunk.tokens) for chunk in chunks), sum(chunk.end for chunk in chunks)
        fit = [
            shape
            for shape in self.graph_shapes
            if len(chunks) <= shape.sequences and tokens <= shape.tokens and keys <= shape.keys
        ]
        return min(fit, key=lambda shape: (shape.tokens, shape.keys), default=None)

    def captured(self, shape: RaggedShape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a shape and the numbers that it reads, captured at the first call."""
        found = self._captured.get(shape)
        if found is None:
            found = self._captured[shape] = self._capture(shape)
            self.captures += 1
        return found

    def _capture(self, shape: RaggedShape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        numbers = on_device(shape.numbers((), self.slots.dummy_slot), self.slots.device)

        def into_logits() -> None:
            made = self.run(shape, numbers)
            if self._logits is None:  # at the first run, which is not captured: no memory of graphs
                self._logits = torch.empty_like(made)
            self._logits.copy_(made)

        assert self._graphs is not None
        graph, _ = self._graphs.capture(into_logits)
        return graph, numbers

    def run(self, shape: RaggedShape, numbers: Tensor) -> Tensor:
        """Logits [sequences, V] after the last tokens of the sequences that some numbers describe, launch by launch."""
        assert isinstance(self.program, DecodeProgram)
        ragged = Ragged(shape, numbers, self.slots)
        h, delta = self.program.prefill(ragged, self.slots)
        return self.program.logits(h[ragged.last], delta[ragged.last])

    def dry_run(self, size: int, longest: int) -> None:
        """Goes through a prompt of so many tokens in sequences of up to `longest`, which are nobody's."""
        if self.graph_shapes:
            shape = RaggedShape(size, self.sequences, size)
            self.run(shape, on_device(shape.numbers((), self.slots.dummy_slot), self.slots.device))
            return
        request = Request([0], 1)
        request.slot = self.slots.dummy_slot
        tokens = [(0,) * min(longest, size - begin) for begin in range(0, size, longest)]
        self.program.prompt([PrefillChunk(request, 0, each, False) for each in tokens], self.slots)
