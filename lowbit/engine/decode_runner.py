"""Launches decode steps of any number of requests. On a GPU, a CUDA graph for each size launches the step with its sampling.

A graph stores addresses. So all tensors that a step reads or writes keep their addresses: slots, cache, weights, and the rows
and results of each `DecodeStep`. A step whose size has no graph is padded with rows of the dummy slot.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.engine.graphs import Graphs
from lowbit.engine.model_program import ModelProgram
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots, on_device
from lowbit.engine.speculation import MOST_ROWS
from lowbit.kernels.choose.attention import PAGE
from lowbit.ops.sample import sample

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows of the captured steps, up to the first one that fits all requests of an engine."""

REACHES = (2048, 8192)
"""Context lengths of the captured steps, in addition to that of a full page table. Attention is launched with the blocks that
this length needs. Idle blocks would cost 16 us per layer with 64 rows of 1,024 tokens and a full length of 131,072 (modelled,
kernels/choose/attention.py).
"""


def reach_of(context: int) -> int:
    """Returns the context length of the captured steps that compute a context of `context` tokens, unless the page table is
    shorter."""
    return next((reach for reach in REACHES if reach >= context), context)


Variant = tuple[int, bool | None, int]
"""(rows, filters, longest context). filters: True if some request samples or has a grammar, False if all are greedy; None for a
step that computes logits only.
"""


@dataclass(frozen=True)
class DecodeStep:
    """A step's rows with their sampled tokens, log-probabilities and logits. `graph` replays the step; it is None without
    graphs. A step that computes logits only has no tokens and no log-probabilities.
    """

    rows: Tensor
    tokens: Tensor
    logprobs: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph | None = None


def sizes_for(most: int) -> tuple[int, ...]:
    """Returns the numbers of rows of the captured steps of up to `most` rows."""
    enough = next((size for size in SIZES if size >= most), most)
    return (*(size for size in SIZES if size < enough), enough)


def graph_bytes(most: int, drafts: int, vocab: int, draft_vocab: int, itemsize: int) -> int:
    """Returns an upper bound of the bytes that the logits of captured steps take. Each graph has logits of its own.

    Steps have up to `most` rows and logits [rows, vocab] of `itemsize` bytes. Steps with guesses are included if `drafts` > 0,
    and steps of a draft model, with logits [rows, draft_vocab], if `draft_vocab` > 0. Steps with grammars are included. Not
    included are prompts, whose graphs share their logits, and activations, whose memory all graphs share.
    """
    rows = sum(sizes_for(most))
    verified = sum(sizes_for(min(MOST_ROWS, most * (1 + drafts)))) if drafts else 0
    drafting = sum(sizes_for(min(most, MOST_ROWS))) if draft_vocab else 0
    reaches, filters = 1 + len(REACHES), 3
    return reaches * itemsize * (filters * (rows + verified) * vocab + drafting * draft_vocab)


class DecodeRunner:
    """Runs the decode steps of an engine of at most `most` requests.

    graphs: captures the steps; None launches kernels one by one. invariant: all steps use one context length, so that results
    do not depend on the lengths of other sequences.
    """

    def __init__(
        self, program: ModelProgram, slots: Slots, most: int, *, graphs: Graphs | None = None, invariant: bool = False
    ) -> None:
        self.program, self.slots, self.graphs = program, slots, graphs
        self.sizes = sizes_for(most)
        longest = PAGE * slots.pages_per_slot
        self.reaches = (longest,) if invariant else (*(reach for reach in REACHES if reach < longest), longest)
        self.captures = 0
        """Number of captured graphs; constant after the warm-up."""
        self._captured: dict[Variant, DecodeStep] = {}

    def variants(self, grammars: bool = False) -> list[Variant]:
        """Returns all variants. The largest come first, so that later captures reuse their memory. `grammars`: includes the
        variants of steps with grammars.
        """
        return [
            (size, filters, reach)
            for size in reversed(self.sizes)
            for filters in (False, True, *([None] if grammars else []))
            for reach in reversed(self.reaches)
        ]

    def variant(self, count: int, filters: bool | None, longest: int) -> Variant:
        """Returns the variant for a step of `count` rows."""
        size = next(size for size in self.sizes if size >= count)
        return size, filters, next(reach for reach in self.reaches if reach >= longest)

    def launch(self, rows: abc.Sequence[Any], filters: bool | None, longest: int) -> DecodeStep:
        """Launches a step of the slots `rows`. `filters`: True if some request samples or has a grammar; None computes only
        logits. `longest`: an upper bound of the context lengths. The next launch overwrites the results.
        """
        size, _, reach = variant = self.variant(len(rows), filters, longest)
        if not self.graphs:
            return self.run(self.inputs(rows, len(rows)), filters, reach)
        step = self.captured(variant)
        assert step.graph is not None
        step.rows.copy_(self.inputs(rows, size))
        step.graph.replay()
        return step

    def inputs(self, rows: abc.Sequence[Any], size: int) -> Tensor:
        """Returns the device tensor of a step of the slots `rows`, padded to `size` rows."""
        return on_device([*rows, *[self.slots.dummy_slot] * (size - len(rows))], self.slots.device)

    def captured(self, variant: Variant) -> DecodeStep:
        """Returns the captured step of a variant; captures it at the first call."""
        step = self._captured.get(variant)
        if step is None:
            step = self._captured[variant] = self._capture(*variant)
            self.captures += 1
        return step

    def _capture(self, size: int, filters: bool | None, reach: int) -> DecodeStep:
        assert self.graphs is not None
        rows = self.inputs([], size)
        graph, step = self.graphs.capture(lambda: self.run(rows, filters, reach))
        return replace(step, graph=graph)

    def run(self, rows: Tensor, filters: bool | None, reach: int) -> DecodeStep:
        """Runs the step of the slots `rows` int32 [B] without a graph."""
        logits = self.program.step(rows, self.slots, reach)
        step = DecodeStep(rows, rows[:0], logits[:0, 0], logits)
        return step if filters is None else self.sample(step, filters)

    def sample(self, step: DecodeStep, filters: bool) -> DecodeStep:
        """Samples the tokens of a step that computed logits only."""
        return sample_tokens(step.logits, step.rows, self.slots, filters)


def filters(sequences: abc.Iterable[Sequence]) -> bool:
    """True if some sequence samples, that is, is not greedy, or has a grammar."""
    return not all(sequence.request.sampling.greedy and sequence.grammar is None for sequence in sequences)


def sample_tokens(logits: Tensor, rows: Tensor, slots: Slots, filters: bool) -> DecodeStep:
    """Samples a token for each row, stores it as the next input of its slot, and advances the slot's position."""
    tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    sample(logits, rows, slots.sampling, slots.tokens, slots.positions, tokens, logprobs, any_filter=filters)
    return DecodeStep(rows, tokens, logprobs, logits)
