"""Launches decode steps in which a sequence has several rows: its last sampled token and guesses of the next ones.

On a GPU there is a CUDA graph for each size, as in decode_runner.py. At its end, right guesses are accepted (ops/accept.py).
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.engine.decode_runner import SIZES, DecodeRunner, DecodeStep
from lowbit.engine.graphs import Graphs
from lowbit.engine.model_program import ModelProgram
from lowbit.engine.slots import ALIGNED, Slots, on_device
from lowbit.engine.speculation import MOST_ROWS
from lowbit.ops.accept import accept
from lowbit.ops.sample import sample


class VerifyRow(NamedTuple):
    """A token that a step computes: the slot's last sampled token if `ahead` is 0, else guess number `ahead` of the tokens
    after it. The rows of a slot are adjacent."""

    slot: int
    token: int
    position: int
    ahead: int


@dataclass(frozen=True)
class VerifyStep(DecodeStep):
    """A step whose `rows` int32 [4, B] has the four fields of each `VerifyRow`. `settings`: the rows' sampling settings."""

    settings: Tensor | None = None


class VerifyRunner(DecodeRunner):
    """Runs steps of an engine of at most `most` requests with up to `drafts` guesses each."""

    def __init__(
        self, program: ModelProgram, slots: Slots, most: int, drafts: int, *, graphs: Graphs | None = None,
        invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(program, slots, min(MOST_ROWS, most * (1 + drafts)), graphs=graphs, invariant=invariant)
        self.sizes = tuple(size for size in self.sizes if size > SIZES[0])

    def inputs(self, rows: abc.Sequence[VerifyRow], size: int) -> Tensor:
        """Returns the device tensor int32 [4, size] of the fields of rows; each field starts at an L2 line."""
        filled = [*rows, *[VerifyRow(self.slots.dummy_slot, 0, 0, 0)] * (-(-size // ALIGNED) * ALIGNED - len(rows))]
        return on_device(list(zip(*filled, strict=True)), self.slots.device)[:, :size]

    def run(self, rows: Tensor, filters: bool | None, reach: int) -> VerifyStep:
        """Runs the step of `rows` int32 [4, B] without a graph."""
        slot, token, position, ahead = rows
        # The settings are written before all other kernels, so that they are certainly complete when sampling starts.
        settings = self.slots.sampling.of_rows(slot, ahead)
        logits = self.program.verify(slot, token, position, self.slots, reach)
        step = VerifyStep(rows, slot[:0], logits[:0, 0], logits, settings=settings)
        return step if filters is None else self.sample(step, filters)

    def sample(self, step: DecodeStep, filters: bool) -> VerifyStep:
        """Samples a token after each row, and advances each slot by the tokens that are accepted."""
        assert isinstance(step, VerifyStep)
        slots, (slot, token, position, ahead), logits = self.slots, step.rows, step.logits
        tokens = torch.empty(len(slot), dtype=torch.int32, device=logits.device)
        logprobs = torch.empty(len(slot), dtype=torch.float32, device=logits.device)
        sample(
            logits, slot, slots.sampling, slots.tokens, slots.positions, tokens, logprobs, any_filter=filters,
            settings_of_rows=step.settings,
        )  # fmt: skip
        accept(slot, token, position, ahead, tokens, slots.sampling, slots.tokens, slots.positions)
        return VerifyStep(step.rows, tokens, logprobs, logits, settings=step.settings)
