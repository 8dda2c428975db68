"""Launches the prefill chunks of a step. On a GPU, there is a CUDA graph for each padded number of tokens.

Without graphs, the 300 launches of any prompt take 15 to 20 ms in Python (Llama-3-8B's shape, H200, 2026-11-23). That is longer
than the GPU needs for 512 tokens. Sampling is not in the graph, since its settings differ between requests.
"""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from lowbit.engine.graphs import Graphs
from lowbit.engine.model_program import ModelProgram
from lowbit.engine.ragged import Ragged, RaggedShape, sizes
from lowbit.engine.request import Request
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE

MAX_SEQUENCES = 31
"""Maximum number of sequences in a graph; more are split over several launches. Unused sequences of a graph have idle attention
blocks, which cost 0.5 ms of the 25 ms for 1,024 tokens (Llama-3-8B's shape, H200, 2026-11-23).
"""

KEYS = 8192
"""Maximum number of keys of all sequences of a graph together. Each number of tokens has a second graph with only as many keys,
for prompts without earlier chunks.
"""


class PrefillRunner:
    """Computes prefill chunks, up to `most` tokens in a step. `graphs` captures them; None launches kernels one by one."""

    def __init__(self, program: ModelProgram, slots: Slots, most: int, *, graphs: Graphs | None = None) -> None:
        self.program, self.slots, self.sizes, self._graphs = program, slots, sizes(most), graphs
        self.sequences = min(MAX_SEQUENCES, slots.count)
        """Sequences in a graph."""
        self.graph_shapes: tuple[RaggedShape, ...] = ()
        """Shapes of all graphs. The largest come first, so that later captures reuse their memory."""
        if graphs is not None and program.captures_prompts:
            most_keys = min(KEYS, slots.count * slots.pages_per_slot * PAGE)  # of all sequences
            each = ((size, keys) for size in reversed(self.sizes) for keys in (max(most_keys, size), size))
            self.graph_shapes = tuple(RaggedShape(size, self.sequences, keys) for size, keys in dict.fromkeys(each))
        self.captures = 0
        """Number of captured graphs; constant after the warm-up."""
        self._captured: dict[RaggedShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._logits: Tensor | None = None

    def size(self, tokens: int) -> int:
        """Returns the padded number of tokens computed for `tokens` tokens."""
        return next(size for size in self.sizes if size >= tokens)

    def launch(self, chunks: abc.Sequence[PrefillChunk]) -> Tensor | None:
        """Returns logits [B, V] after the chunks that are the last of their prompts; None if no chunk is. They are valid until
        the next launch.
        """
        first, *others = self.parts(chunks)
        if not others:
            return self._launch(first)
        # The logits are cloned, since the next launch overwrites them.
        parts = [logits.clone() for part in (first, *others) if (logits := self._launch(part)) is not None]
        return torch.cat(parts) if parts else None

    def parts(self, chunks: abc.Sequence[PrefillChunk]) -> list[abc.Sequence[PrefillChunk]]:
        """Splits chunks into launches with at most the number of sequences of a graph."""
        most = self.sequences if self.graph_shapes else len(chunks)
        return [chunks[at : at + most] for at in range(0, len(chunks), most)]

    def _launch(self, chunks: abc.Sequence[PrefillChunk]) -> Tensor | None:
        shape = self._shape(chunks)
        if shape is None:
            return self.program.prompt(chunks, self.slots)
        graph, numbers = self.captured(shape)
        numbers.copy_(on_device(shape.numbers(chunks, self.slots.dummy_slot), self.slots.device))
        graph.replay()
        assert self._logits is not None
        count = sum(chunk.last for chunk in chunks)
        return self._logits[:count] if count else None

    def _shape(self, chunks: abc.Sequence[PrefillChunk]) -> RaggedShape | None:
        """Returns the smallest captured shape that fits the chunks; None if none does."""
        tokens, keys = sum(len(chunk.tokens) for chunk in chunks), sum(chunk.end for chunk in chunks)
        fit = [
            shape
            for shape in self.graph_shapes
            if len(chunks) <= shape.sequences and tokens <= shape.tokens and keys <= shape.keys
        ]
        return min(fit, key=lambda shape: (shape.tokens, shape.keys), default=None)

    def captured(self, shape: RaggedShape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Returns the graph of a shape and its input tensor; captures it at the first call."""
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._capture(shape)
            self.captures += 1
        return captured

    def _capture(self, shape: RaggedShape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        numbers = on_device(shape.numbers((), self.slots.dummy_slot), self.slots.device)

        def into_logits() -> None:
            logits = self.run(shape, numbers)
            if self._logits is None:  # allocated in the warm-up run before the capture, outside the graphs' memory pool
                self._logits = torch.empty_like(logits)
            self._logits.copy_(logits)

        assert self._graphs is not None
        graph, _ = self._graphs.capture(into_logits)
        return graph, numbers

    def run(self, shape: RaggedShape, numbers: Tensor) -> Tensor:
        """Returns logits [sequences, V] after the last tokens of the sequences described by `numbers`, without a graph."""
        return self.program.ragged_logits(Ragged(shape, numbers, self.slots), self.slots)

    def dry_run(self, size: int, longest: int) -> None:
        """Runs a prompt of `size` tokens, in sequences of up to `longest`, in the dummy slot."""
        if self.graph_shapes:
            shape = RaggedShape(size, self.sequences, size)
            self.run(shape, on_device(shape.numbers((), self.slots.dummy_slot), self.slots.device))
            return
        sequence = Sequence(Request([0], 1), slot=self.slots.dummy_slot)
        tokens = [(0,) * min(longest, size - begin) for begin in range(0, size, longest)]
        self.program.prompt([PrefillChunk(sequence, 0, each, False) for each in tokens], self.slots)
