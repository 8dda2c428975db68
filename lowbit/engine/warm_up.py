"""Finds the kernels that an engine will launch. A dry run of its steps and prompts records the launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowbit.engine.decode_runner import DecodeRunner, filters, sample_tokens
from lowbit.engine.mixed_runner import MixedRunner
from lowbit.engine.model_program import ModelProgram
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.scheduler import SchedulerOutput
from lowbit.engine.slots import on_device
from lowbit.engine.verify_runner import VerifyRunner

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel


def longest_of(scheduled: SchedulerOutput) -> int:
    """Returns an upper bound of the context lengths of a decode step, guesses included."""
    return max([sequence.computed_tokens + scheduled.drafts.get(sequence, 0) for sequence in scheduled.decoding])


@dataclass(frozen=True)
class Stage:
    """Progress of a warm-up. what: the next item. done, total: finished items of its kind, and all of them."""

    what: str
    done: int
    total: int


Part = tuple[str, int, bool | None, int]
"""A part of a step, (kind, count, filters, reach). "step": a decode step of `count` rows for contexts of up to `reach` tokens.
"verify": the same with guesses. "mixed": `count` prompt tokens and `reach` decoding sequences. "prompt": `count` prompt
tokens. "sample": sampling of `count` rows after prompts. filters: some request samples or has a grammar.
"""


class WarmUpRun:
    """Records the kernels of each part of a step. It runs the part once without launching them.

    The engine has up to `concurrent` requests of up to `longest` tokens. All rows of a run use the dummy slot.
    """

    def __init__(
        self, program: ModelProgram, steps: DecodeRunner, prompts: PrefillRunner, verified: VerifyRunner | None,
        mixed: MixedRunner | None, concurrent: int, longest: int,
    ) -> None:  # fmt: skip
        self.verify_runner, self.mixed_runner = verified, mixed
        self.program, self.decode_runner, self.prefill_runner, self.concurrent, self.longest = (
            program,
            steps,
            prompts,
            concurrent,
            longest,
        )
        self.count = 0
        """Number of runs; constant after the warm-up."""
        self._known: set[Part] = set()

    def all_parts(self) -> list[Part]:
        """Returns all parts that an engine can launch."""
        return [
            *(("step", *variant) for variant in self.decode_runner.variants()),
            *(("verify", *variant) for variant in (self.verify_runner.variants() if self.verify_runner else ())),
            *(("prompt", size, False, 0) for size in self.prefill_runner.sizes),
            *(
                ("mixed", shape.prompts.tokens, None, shape.rows)
                for shape in (self.mixed_runner.shapes if self.mixed_runner else ())
            ),
            *(("sample", count, filters, 0) for count in range(1, self.concurrent + 1) for filters in (False, True)),
        ]

    def parts_of(self, scheduled: SchedulerOutput) -> list[Part]:
        """Returns the parts of a step, and of the decode step after it, that were not recorded before."""
        parts: list[Part] = []
        last = [chunk.sequence for chunk in scheduled.chunks if chunk.last]
        for sequences in (scheduled.decoding, [*scheduled.decoding, *last] if last else []):
            if sequences:
                computed = max(sequence.computed_tokens for sequence in sequences)
                parts.append(("step", *self.decode_runner.variant(len(sequences), filters(sequences), computed)))
        if scheduled.drafts and self.verify_runner is not None:
            count = len(scheduled.decoding) + sum(scheduled.drafts.values())
            variant = self.verify_runner.variant(count, filters(scheduled.decoding), longest_of(scheduled))
            parts.append(("verify", *variant))
        for chunks in self.prefill_runner.parts(scheduled.chunks) if scheduled.chunks else ():
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            parts.append(("prompt", self.prefill_runner.size(tokens), False, 0))
        mixed = self.mixed_runner
        if mixed is not None and scheduled.decoding and scheduled.chunks and not scheduled.drafts:
            shape = mixed.shape(scheduled.chunks, len(scheduled.decoding))
            if shape is not None:
                parts.append(("mixed", shape.prompts.tokens, None, shape.rows))
                parts.append(("sample", len(scheduled.decoding), filters(scheduled.decoding), 0))
        if last:
            parts.append(("sample", len(last), filters(last), 0))
        return [part for part in dict.fromkeys(parts) if part not in self._known]

    @torch.inference_mode()
    def kernels(self, parts: Sequence[Part]) -> list[RecordedKernel]:
        """Returns the kernels of the given parts that are not compiled yet."""
        from lowbit.kernels.parts.launch import recording

        self.count += 1
        self._known.update(parts)  # before they run, so that a part that fails is not tried again
        with torch.cuda.device(self.program.device), recording() as wanted:
            for part in parts:
                self._run(*part)
        return wanted

    def _run(self, what: str, count: int, any_filter: bool | None, reach: int) -> None:
        slots = self.decode_runner.slots
        if what == "prompt":
            self.prefill_runner.dry_run(count, self.longest)
            return
        if what == "verify":
            assert self.verify_runner is not None
            self.verify_runner.run(self.verify_runner.inputs([], count), any_filter, reach)
            return
        if what == "mixed":
            assert self.mixed_runner is not None
            shape = next(s for s in self.mixed_runner.shapes if (s.prompts.tokens, s.rows) == (count, reach))
            self.mixed_runner.run(shape, *self.mixed_runner.inputs(shape))
            return
        rows = on_device([slots.dummy_slot] * count, slots.device)
        if what == "step":
            self.decode_runner.run(rows, any_filter, reach)
        else:
            sample_tokens(self.program.blank_logits(count), rows, slots, bool(any_filter))
