"""Which kernels an engine is going to launch, found by going through steps and prompts without launching any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowbit.engine.batching import Round
from lowbit.engine.program import DecodeProgram
from lowbit.engine.prompts import Prompts
from lowbit.engine.slots import on_device
from lowbit.engine.steps import Steps, draw, filters

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel


@dataclass(frozen=True)
class Stage:
    """What a warm-up does next, and how far it is with all that is of this kind."""

    what: str
    done: int
    total: int


Part = tuple[str, int, bool, int]
"""A part of what an engine launches: "step" of some rows, with filters or without, for contexts of up to so many tokens;
"prompt" of so many tokens; "draw" behind so many prompts, with filters or without."""


class Rehearsal:
    """Goes through parts of what an engine launches without launching anything, each once, to find the kernels of it.

    `concurrent` requests of up to `longest` tokens. What kernels would read and write is nobody's.
    """

    def __init__(self, program: DecodeProgram, steps: Steps, prompts: Prompts, concurrent: int, longest: int) -> None:
        self.program, self.steps, self.prompts, self.concurrent, self.longest = program, steps, prompts, concurrent, longest
        self.count = 0
        """Rehearsals so far: it stands still once an engine is warm."""
        self._known: set[Part] = set()

    def everything(self) -> list[Part]:
        """All parts that an engine can ever launch."""
        return [
            *(("step", *variant) for variant in self.steps.variants()),
            *(("prompt", size, False, 0) for size in self.prompts.sizes),
            *(("draw", count, filters, 0) for count in range(1, self.concurrent + 1) for filters in (False, True)),
        ]

    def of_round(self, planned: Round) -> list[Part]:
        """The parts of a round, and of the step after it, as far as they are new."""
        parts: list[Part] = []
        last = [piece.request for piece in planned.pieces if piece.last]
        for requests in (planned.steps, [*planned.steps, *last] if last else []):
            if requests:
                computed = max(request.computed for request in requests)
                parts.append(("step", *self.steps.variant(len(requests), filters(requests), computed)))
        for pieces in self.prompts.parts(planned.pieces) if planned.pieces else ():
            tokens = sum(len(piece.tokens) for piece in pieces)
            parts.append(("prompt", self.prompts.size(tokens), False, 0))
        if last:
            parts.append(("draw", len(last), filters(last), 0))
        return [part for part in dict.fromkeys(parts) if part not in self._known]

    @torch.inference_mode()
    def kernels(self, parts: Sequence[Part]) -> list[RecordedKernel]:
        """The kernels of some parts, but for those that are compiled already."""
        from lowbit.kernels.parts.launch import recording

        self.count += 1
        self._known.update(parts)  # one that fails is not tried again
        with torch.cuda.device(self.program.device), recording() as wanted:
            for part in parts:
                self._run(*part)
        return wanted

    def _run(self, what: str, count: int, any_filter: bool, reach: int) -> None:
        slots = self.steps.slots
        if what == "prompt":
            self.prompts.rehearse(count, self.longest)
            return
        rows = on_device([slots.nobodys] * count, slots.device)
        if what == "step":
            self.steps.run(rows, any_filter, reach)
        else:
            h = torch.zeros(count, self.program.decoder.hidden, dtype=self.program.dtype, device=self.program.device)
            draw(self.program.logits(h, h), rows, slots, any_filter)
