"""Launches decode steps in which rows are several tokens of a sequence: the last sampled one and guesses of the next ones.

On a GPU each size is a CUDA graph, as in decode_runner.py, which ends with the acceptance of the right guesses (ops/accept.py).
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
    """A token that a step computes: the slot's last sampled token (`ahead` 0), or the guess number `ahead` of the tokens after
    it. Rows of a slot stand side by side."""

    slot: int
    token: int
    position: int
    ahead: int


@dataclass(frozen=True)
class VerifyStep(DecodeStep):
    """A step whose `rows` int32 [4, ..] are the fields of its rows; `settings`: their sampling settings."""

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
        # First of all, since no kernel that may still run when sampling starts may write them.
        settings = self.slots.sampling.of_rows(slot, ahead)
        logits = self.program.verify(slot, token, position, self.slots, reach)
        step = VerifyStep(rows, slot[:0], logits[:0, 0], logits, settings=settings)
        return step if filters is None else self.sample(step, filters)

    def sample(self, step: DecodeStep, filters: bool) -> VerifyStep:
        """Samples a token after each row, and advances the slots by those that continue their sequences."""
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
