"""Runs scheduled work on the device: writes page tables and sampling settings, launches decode steps and prefill chunks, and
copies the sampled tokens to the host.

The engine handles errors. The only ones caught here are those of compiling kernels before their launch.
"""

from __future__ import annotations

import functools
import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.engine.decode_runner import DecodeRunner, DecodeStep, filters, sample_tokens
from lowbit.engine.failure import StuckStep, log_failure
from lowbit.engine.grammar import GrammarState, masks_of
from lowbit.engine.mixed_runner import MixedRunner
from lowbit.engine.one_launch import OneLaunch
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.request import SampledToken
from lowbit.engine.scheduler import PrefillChunk, SchedulerOutput
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots, on_device
from lowbit.engine.verify_runner import VerifyRow, VerifyRunner
from lowbit.engine.warm_up import Stage, WarmUpRun, longest_of
from lowbit.hardware.machine import machine_of
from lowbit.kernels.reference.sampling import accepted
from lowbit.ops.sample import Sampling, top_logprobs

if TYPE_CHECKING:
    from lowbit.engine.draft import DraftModel
    from lowbit.kernels.parts.launch import RecordedKernel


KINDS = {False: "", True: " with filters", None: " for grammars"}
"""How the progress of a warm-up names the values of `filters` of captured steps (`decode_runner.Variant`)."""


POLL_S = 5e-5
"""Seconds between two queries whether a step has ended, if it may never end. The pause delays nothing, since the host is one
step ahead of the GPU."""


@dataclass
class InFlightStep:
    """Launched work that samples a token for each of `sequences`. It has host copies of the results, which are complete once
    the event `done` has passed, and the number of tokens that were read so far. drafts: guessed tokens of each sequence that
    the step verifies; empty for a step without guesses. With guesses, a sequence has one row more than guesses. status: a copy
    of `ModelProgram.status`. check: raises an error if the results will never arrive; None if they always do. alone: True for a
    decode step without prompts and grammars, which take time of their own, if no graph was captured meanwhile.
    """

    sequences: list[Sequence]
    tokens: Tensor
    logprobs: Tensor
    top_logprobs: tuple[Tensor, Tensor] | None
    done: torch.cuda.Event | None
    drafts: list[tuple[int, ...]] = field(default_factory=list)
    status: Tensor | None = None
    check: Callable[[], object] | None = None
    alone: bool = False
    tokens_read: int = 0

    def wait(self) -> None:
        """Waits until the results are on the host. Raises RuntimeError after a CUDA error, StuckStep after a step that gave up,
        and what `check` raises."""
        if self.check is not None:
            while self.done is not None and not self.done.query():  # the event never passes if another rank has failed
                self.check()
                time.sleep(POLL_S)  # lets other threads of Python run
            self.check()
        if self.done is not None:
            self.done.synchronize()
        if self.status is not None and (status := int(self.status)):
            raise StuckStep(OneLaunch.failure(status))

    def accepted(self) -> list[int]:
        """Returns how many tokens of each sequence a step with guesses has sampled: one, and one more for each right guess. The
        results must be on the host."""
        counts, tokens, row = [], self.tokens.tolist(), 0
        for guessed in self.drafts:
            rows = 1 + len(guessed)
            counts.append(accepted([-1, *guessed], tokens[row : row + rows]))
            row += rows
        return counts

    def _sampled(self) -> list[tuple[Sequence, int]]:
        """Returns the sequence and the row of each sampled token."""
        if not self.drafts:
            return list(zip(self.sequences, range(len(self.sequences)), strict=True))
        sampled, first = list[tuple[Sequence, int]](), 0
        for sequence, guessed, count in zip(self.sequences, self.drafts, self.accepted(), strict=True):
            sampled += [(sequence, first + i) for i in range(count)]
            first += 1 + len(guessed)
        return sampled

    def unread(self) -> Iterator[tuple[Sequence, SampledToken]]:
        """Yields the sampled tokens in order, each once, even if a caller abandons the iteration and starts another."""
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        top = None if self.top_logprobs is None else [part.tolist() for part in self.top_logprobs]
        sampled = self._sampled()
        while self.tokens_read < len(sampled):
            sequence, row = sampled[self.tokens_read]
            self.tokens_read += 1  # before the yield, so that an interrupt cannot repeat a token
            most = sequence.request.top_logprobs
            pairs: tuple[tuple[int, float], ...] = ()
            if top is not None and most:
                values, ids = top[0][row][:most], top[1][row][:most]
                pairs = tuple(zip(ids, values, strict=True))
            yield sequence, SampledToken(tokens[row], logprobs[row], pairs)


@dataclass(frozen=True)
class LaunchedDecode:
    """A launched decode step. verify: True if it verifies guesses, and was launched by the `VerifyRunner`."""

    sequences: list[Sequence]
    drafts: list[tuple[int, ...]]
    verify: bool
    step: DecodeStep


Settings = tuple[int, Sampling, abc.Sequence[int], list[int], bool]
"""Arguments of `SamplingState.set`."""


def verify_rows(sequences: abc.Sequence[Sequence], drafts: abc.Sequence[tuple[int, ...]]) -> list[VerifyRow]:
    """Returns the rows of a step with guesses: the last token of each scheduled sequence, followed by its guesses. A sequence
    that has no token yet was cancelled meanwhile; its row has token 0 and its result is ignored."""
    return [
        VerifyRow(sequence.running_slot, token, sequence.computed_tokens - 1 + i, i)
        for sequence, guessed in zip(sequences, drafts, strict=True)
        for i, token in enumerate((sequence.sampled[-1].token if sequence.sampled else 0, *guessed))
    ]


class ModelRunner:
    """Launches the work of an engine; `progress` is called with the progress of kernels that are compiled."""

    def __init__(
        self,
        slots: Slots,
        decode_runner: DecodeRunner,
        prefill_runner: PrefillRunner,
        verify_runner: VerifyRunner | None,
        mixed_runner: MixedRunner,
        warm_up_run: WarmUpRun | None,
        draft: DraftModel | None,
        progress: Callable[[Stage], object] | None,
        adapted: bool = False,
    ) -> None:
        self.slots, self.decode_runner, self.prefill_runner = slots, decode_runner, prefill_runner
        self.mixed_runner, self.verify_runner = mixed_runner, verify_runner
        """Runs steps with guesses; None without speculation."""
        self.warm_up_run = warm_up_run
        """Finds the kernels of a step before it is launched; None without CUDA graphs."""
        self.check: Callable[[], object] | None = None
        """The field `check` of each `InFlightStep`."""
        self._draft = draft
        self.adapted = adapted
        """True if sequences may have adapters."""
        self._progress = progress or (lambda stage: None)

    def prepare(self, scheduled: SchedulerOutput) -> None:
        """Compiles kernels that the step needs, and writes its page tables, positions and sampling settings."""
        self._compile_kernels_of(scheduled)
        settings: list[Settings] = []
        for sequence in scheduled.admitted:
            tokens, request = [sampled.token for sampled in sequence.sampled], sequence.request
            settings.append((sequence.running_slot, request.sampling, request.prompt, tokens, sequence.grammar is not None))
        positions = [(chunk.sequence.running_slot, chunk.end - 1) for chunk in scheduled.chunks if chunk.last]
        adapters = [(sequence.running_slot, sequence.adapter) for sequence in scheduled.admitted] if self.adapted else []
        self.write(settings, scheduled.new_pages, positions, adapters)

    def decode(
        self, scheduled: SchedulerOutput, guesses: abc.Mapping[Sequence, tuple[int, ...]], logits_only: bool = False
    ) -> LaunchedDecode:
        """Launches a decode step, with `guesses` if there are any. It samples tokens unless `logits_only` is True. In that case
        `sample_step` must be called before anything else is launched.
        """
        sequences, drafts = scheduled.decoding, []
        rows: list[Any] = [sequence.running_slot for sequence in sequences]
        if guesses:
            drafts = [guesses.get(sequence, ()) for sequence in sequences]
            rows = verify_rows(sequences, drafts)
        verify, any_filter = bool(guesses), None if logits_only else filters(sequences)
        step = self.launch_step(verify, rows, any_filter, longest_of(scheduled))
        return LaunchedDecode(sequences, drafts, verify, step)

    def sample_step(self, launched: LaunchedDecode) -> LaunchedDecode:
        """Samples the tokens of a step that was launched up to its logits."""
        step = self.sample_launched(launched.verify, launched.step, filters(launched.sequences))
        return replace(launched, step=step)

    def write_masks(
        self, sequences: abc.Sequence[Sequence], states: abc.Sequence[GrammarState | None],
        guesses: abc.Mapping[Sequence, tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Computes the masks of sequences by the states of their grammars, and copies them to their slots. A state of None
        allows all tokens. guesses: forced tokens that the step verifies; the position after each of them gets a mask too."""
        words = self.slots.sampling.masks.shape[1]
        pairs = list(zip(sequences, states, strict=True))
        jumps = [(each, state) for each, state in pairs if state is not None and guesses.get(each)]
        others = [pair for pair in pairs if pair not in jumps]
        slots, ahead = [sequence.running_slot for sequence, _ in others], [0] * len(others)
        parts = [masks_of([state for _, state in others], words, pinned=self.slots.device.type == "cuda")]
        for sequence, state in jumps:
            masks = state.masks_ahead(guesses[sequence])[:, :words]
            slots += [sequence.running_slot] * len(masks)
            ahead += range(len(masks))
            parts.append(masks)
        self.set_masks(slots, torch.cat(parts) if jumps else parts[0], ahead)

    def sample(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> InFlightStep:
        """Samples a token of each sequence from its logits [B, V]."""
        step = self.sample_rows([sequence.running_slot for sequence in sequences], logits, filters(sequences))
        return self.in_flight(sequences, step)

    def in_flight(
        self, sequences: abc.Sequence[Sequence], step: DecodeStep, drafts: abc.Sequence[tuple[int, ...]] = ()
    ) -> InFlightStep:
        """Starts the copies of a step's results to the host."""
        most = max([sequence.request.top_logprobs for sequence in sequences])
        top = None
        if most:
            values, ids = top_logprobs(step.logits[: len(sequences) + sum(map(len, drafts))], most)
            top = _to_host(values), _to_host(ids)
        tokens, logprobs = _to_host(step.tokens), _to_host(step.logprobs)
        of_program = self.decode_runner.program.status
        status = None if of_program is None else _to_host(of_program)
        done = None
        if self.slots.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.slots.device))
        return InFlightStep(list(sequences), tokens, logprobs, top, done, list(drafts), status, self.check)

    # ---- operations on the device. Their arguments are plain data, since lockstep.py sends them to other ranks

    def write(
        self, settings: abc.Sequence[Settings], pages: abc.Sequence[tuple[int, int, int]],
        positions: abc.Sequence[tuple[int, int]], adapters: abc.Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Writes the sampling settings of slots, and page-table entries, positions and adapters as `Slots.update`."""
        for each in settings:
            self.slots.sampling.set(*each)
        self.slots.update(pages, positions, adapters)

    def launch_step(self, verify: bool, rows: abc.Sequence[Any], any_filter: bool | None, longest: int) -> DecodeStep:
        """Launches a step by `DecodeRunner.launch`: `rows` are slots, or with `verify` rows of a `VerifyRunner`."""
        return self._runner(verify).launch(rows, any_filter, longest)

    def sample_launched(self, verify: bool, step: DecodeStep, any_filter: bool) -> DecodeStep:
        """Samples the tokens of a launched step that computed logits only."""
        return self._runner(verify).sample(step, any_filter)

    def set_masks(self, slots: abc.Sequence[int], masks: Tensor, ahead: abc.Sequence[int]) -> None:
        """Writes masks int32 [len(slots), words] of the host to slots. Mask i is for the token of slots[i] that follows
        ahead[i] guesses."""
        self.slots.sampling.set_masks(slots, masks, ahead)

    def prefill(self, chunks: abc.Sequence[PrefillChunk]) -> Tensor | None:
        """Launches prefill chunks by `PrefillRunner.launch`."""
        return self.prefill_runner.launch(chunks)

    def mixed(self, chunks: abc.Sequence[PrefillChunk], rows: abc.Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Launches prefill chunks together with a decode step of the slots `rows`, by `MixedRunner.launch`."""
        return self.mixed_runner.launch(chunks, rows)

    def sample_rows(self, slots: abc.Sequence[int], logits: Tensor, any_filter: bool) -> DecodeStep:
        """Samples a token of each slot from logits [B, V] of `prefill` or `mixed`."""
        return sample_tokens(logits, on_device(list(slots), self.slots.device), self.slots, any_filter)

    def _runner(self, verify: bool) -> DecodeRunner:
        if not verify:
            return self.decode_runner
        assert self.verify_runner is not None
        return self.verify_runner

    # ---- compiling and capturing

    def _compile_kernels_of(self, scheduled: SchedulerOutput) -> None:
        """Compiles the kernels of a step in parallel before they are launched. The launches would compile them one by one."""
        parts = self.warm_up_run.parts_of(scheduled) if self.warm_up_run is not None else []
        if self.warm_up_run is None or not parts:
            return
        try:
            kernels = self.warm_up_run.kernels(parts)
            for stage in self.compile(kernels):
                self._progress(stage)
            if kernels:
                self._progress(Stage("kernels", len(kernels), len(kernels)))
        except Exception as error:  # noqa: BLE001 - the launch raises it again, where it fails only the sequences at fault
            log_failure("compiling kernels", error)

    @property
    def warm_up_runs(self) -> list[WarmUpRun]:
        """The warm-up runs of the engine and of its draft model."""
        runs = [self.warm_up_run, None if self._draft is None else self._draft.warm_up_run]
        return [run for run in runs if run is not None]

    def all_kernels(self) -> list[RecordedKernel]:
        """Returns every kernel that the engine can launch and that is not compiled; an empty list without CUDA graphs."""
        found = [kernel for run in self.warm_up_runs for kernel in run.kernels(run.all_parts())]
        return [kernel for i, kernel in enumerate(found) if kernel not in found[:i]]

    def compile(self, kernels: abc.Sequence[RecordedKernel]) -> Iterator[Stage]:
        """Compiles kernels in several processes; yields the progress before each."""
        if kernels:
            from lowbit.kernels.parts.compile import compiled

            for done in compiled(kernels, machine_of(self.slots.device).arch.sm):
                yield Stage("kernels", done, len(kernels))

    def captures(self, grammars: bool = False) -> list[tuple[str, Callable[[], object]]]:
        """Returns (description, function that captures it) for each graph. `grammars`: includes the graphs of steps with
        grammars."""
        kinds = [("step", self.decode_runner), *([("verified step", self.verify_runner)] if self.verify_runner else [])]
        steps = [
            (
                f"{what} of {size}{KINDS[filtered]}, up to {reach:,} tokens",
                functools.partial(runner.captured, (size, filtered, reach)),
            )
            for what, runner in kinds
            for size, filtered, reach in (runner.variants(grammars) if runner.graphs else ())
        ]
        prompts = [
            (
                f"prompts of {shape.tokens:,} tokens that see {shape.keys:,}",
                functools.partial(self.prefill_runner.captured, shape),
            )
            for shape in self.prefill_runner.graph_shapes
        ]
        mixed = [
            (
                f"step of {shape.rows} with prompts of {shape.prompts.tokens:,} tokens",
                functools.partial(self.mixed_runner.captured, shape),
            )
            for shape in self.mixed_runner.shapes
        ]
        return [*steps, *prompts, *mixed, *(() if self._draft is None else self._draft.captures())]


def _to_host(values: Tensor) -> Tensor:
    """Returns a copy in host memory, complete once the stream has reached this point."""
    if values.device.type != "cuda":
        return values.clone()
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
