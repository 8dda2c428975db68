"""Launches a decode step and prefill chunks as one forward, which reads the weights once; on a GPU as CUDA graphs, up to the
logits. Sampling follows the graph, as after prompts.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.engine.decode_runner import SIZES
from lowbit.engine.graphs import Graphs
from lowbit.engine.model_program import ModelProgram
from lowbit.engine.prefill_runner import KEYS, MAX_SEQUENCES
from lowbit.engine.ragged import Ragged, RaggedShape
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE

MOST_TOKENS = 512
"""Maximum number of prompt tokens of a graph. More fill the tensor cores for so long that a decode step of its own costs little
beside them."""

TILE = 128
"""Rows of a forward are multiples of this number, as those of the products' tiles are: 129 rows take as long as 256, and 96
rows an eighth longer than 128 (55,296 columns in int4: 134 and 119 us, benchmarks/results/h200/2026-11-23-choice.json)."""

STEADY_TILES = 2
"""Tiles of the forwards that a stream of prompts gets. A prompt token beside 32 sequences takes 25 us in forwards of one tile,
22 of two, 23 of three and 21 of four (Llama-3-8B's shape in int4, modelled for an H200); of the last three, two tiles make the
shortest steps."""

FEW_ROWS = 16
"""Rows of the graphs for few sequences; the others have rows for all."""

REACH = 8192
"""Context length for which attention of the decoding sequences is launched; longer ones are computed correctly, more slowly."""


@dataclass(frozen=True)
class MixedShape:
    """Sizes of a graph: of its prefill chunks, and number of decoding sequences."""

    prompts: RaggedShape
    rows: int


def prompt_tokens(rows: int, most: int) -> tuple[int, ...]:
    """Returns the numbers of prompt tokens of the graphs for `rows` decoding sequences, ascending: half a tile together, then
    whole tiles, up to the first with `most` prompt tokens or the last with at most MOST_TOKENS."""
    tokens = [total - rows for total in (TILE // 2, *range(TILE, rows + MOST_TOKENS + 1, TILE)) if total > rows]
    enough = next((i for i, size in enumerate(tokens) if size >= most), len(tokens))
    return tuple(tokens[: enough + 1])


class MixedRunner:
    """Computes up to `most` prompt tokens beside up to `most_rows` decoding sequences. `graphs` captures the forwards; None
    launches kernels one by one. invariant: one context length for all steps, as in decode_runner.py."""

    def __init__(
        self, program: ModelProgram, slots: Slots, most: int, most_rows: int, *, graphs: Graphs | None, invariant: bool
    ) -> None:
        self.program, self.slots, self._graphs = program, slots, graphs
        longest = PAGE * slots.pages_per_slot
        self.reach = longest if invariant else min(REACH, longest)
        self.shapes: tuple[MixedShape, ...] = ()
        """Shapes of all graphs, the largest first: later captures reuse its memory."""
        if graphs is not None and program.captures_prompts:
            sequences, keys = min(MAX_SEQUENCES, slots.count), min(KEYS, slots.count * longest)
            enough = next((size for size in SIZES if size >= most_rows), most_rows)
            of_rows = dict.fromkeys((enough, min(FEW_ROWS, enough)))
            self.shapes = tuple(
                MixedShape(RaggedShape(size, sequences, max(keys, size)), rows)
                for rows in of_rows
                for size in reversed(prompt_tokens(rows, min(most, MOST_TOKENS)))
            )
        self.captures = 0
        """Number of captured graphs; constant after the warm-up."""
        self._captured: dict[MixedShape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._logits: dict[int, tuple[Tensor, Tensor]] = {}

    def takes(self, chunks: abc.Sequence[PrefillChunk], rows: int) -> bool:
        """True if `launch` computes chunks beside `rows` decoding sequences."""
        return self.program.mixes and (self._graphs is None or self.shape(chunks, rows) is not None)

    def steady_tokens(self, rows: int) -> tuple[int, ...]:
        """Returns the numbers of prompt tokens, ascending, that fill the tiles of a forward beside `rows` decoding sequences,
        from STEADY_TILES tiles on; none without graphs."""
        enough = min((shape.rows for shape in self.shapes if shape.rows >= rows), default=0)
        steady = (STEADY_TILES + enough // TILE) * TILE - enough
        return tuple(sorted(s.prompts.tokens for s in self.shapes if s.rows == enough and s.prompts.tokens >= steady))

    def shape(self, chunks: abc.Sequence[PrefillChunk], rows: int) -> MixedShape | None:
        """Returns the smallest captured shape that fits; None if none does."""
        tokens, keys = sum(len(chunk.tokens) for chunk in chunks), sum(chunk.end for chunk in chunks)
        fit = [
            shape
            for shape in self.shapes
            if len(chunks) <= shape.prompts.sequences and tokens <= shape.prompts.tokens and keys <= shape.prompts.keys
            and rows <= shape.rows
        ]  # fmt: skip
        return min(fit, key=lambda shape: (shape.rows, shape.prompts.tokens), default=None)

    def launch(self, chunks: abc.Sequence[PrefillChunk], rows: abc.Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B, V] after the next tokens of the slots `rows`, and logits [L, V] after the chunks that are the last
        of their prompts, None without such; valid until the next launch."""
        last = sum(chunk.last for chunk in chunks)
        shape = self.shape(chunks, len(rows))
        if shape is None:
            return self.program.mixed_prompt(chunks, on_device(list(rows), self.slots.device), self.slots, self.reach)
        graph, numbers, of_rows = self.captured(shape)
        numbers.copy_(on_device(shape.prompts.numbers(chunks, self.slots.dummy_slot), self.slots.device))
        of_rows.copy_(on_device([*rows, *[self.slots.dummy_slot] * (shape.rows - len(rows))], self.slots.device))
        graph.replay()
        decoded, prompted = self._logits[shape.rows]
        return decoded[: len(rows)], prompted[:last] if last else None

    def captured(self, shape: MixedShape) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Returns the graph of a shape and its input tensors; captures it at the first call."""
        found = self._captured.get(shape)
        if found is None:
            found = self._captured[shape] = self._capture(shape)
            self.captures += 1
        return found

    def _capture(self, shape: MixedShape) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        numbers, rows = self.inputs(shape)

        def into_logits() -> None:
            logits = self.run(shape, numbers, rows)
            if shape.rows not in self._logits:  # allocated in the run before the capture, outside the graphs' memory pool
                self._logits[shape.rows] = (torch.empty_like(logits[0]), torch.empty_like(logits[1]))
            for kept, made in zip(self._logits[shape.rows], logits, strict=True):
                kept.copy_(made)

        assert self._graphs is not None
        graph, _ = self._graphs.capture(into_logits)
        return graph, numbers, rows

    def inputs(self, shape: MixedShape) -> tuple[Tensor, Tensor]:
        """Returns the inputs of a shape without chunks and sequences."""
        dummy = self.slots.dummy_slot
        return tuple(on_device(x, self.slots.device) for x in (shape.prompts.numbers((), dummy), [dummy] * shape.rows))  # type: ignore[return-value]

    def run(self, shape: MixedShape, numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the forward of a shape without a graph."""
        return self.program.mixed_logits(Ragged(shape.prompts, numbers, self.slots), rows, self.slots, self.reach)
