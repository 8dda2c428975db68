"""How ranks compute the same steps: rank 0 schedules, the others repeat what it launches, in the same order.

`ModelRunner` has a few methods for all operations on the device. Their arguments are plain data. Before rank 0 runs such a
method, its `LeadingRunner` sends the arguments to the other ranks, whose `Follower`s run the same method. All ranks have the
same pages, slots and graphs. They also sample the same tokens, since logits are gathered on all, so no token is sent between
processes. Only rank 0 records and compiles kernels; the others find them in Triton's cache.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.engine.decode_runner import DecodeStep
from lowbit.engine.model_runner import ModelRunner, Settings
from lowbit.engine.request import Request
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence

if TYPE_CHECKING:
    from lowbit.engine.engine import Engine
    from lowbit.engine.rank_processes import LeadingRanks

PlainChunk = tuple[int, int, tuple[int, ...], bool]
"""A prefill chunk as plain data: (slot, first position, tokens, True if it is the last chunk of its prompt)."""


class LeadingRunner(ModelRunner):
    """The runner of rank 0. If a method raises an error, all ranks fail, since the others would wait for an operation that rank
    0 did not launch."""

    def __init__(self, *arguments: Any, ranks: LeadingRanks) -> None:
        super().__init__(*arguments)
        self.ranks = ranks
        self.check = ranks.check
        self._logits: tuple[Tensor | None, ...] = ()

    def write(
        self, settings: abc.Sequence[Settings], pages: abc.Sequence[tuple[int, int, int]],
        positions: abc.Sequence[tuple[int, int]], adapters: abc.Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        with self.ranks.together("write", settings, pages, positions, adapters):
            super().write(settings, pages, positions, adapters)

    def launch_step(self, verify: bool, rows: abc.Sequence[Any], any_filter: bool | None, longest: int) -> DecodeStep:
        with self.ranks.together("launch_step", verify, rows, any_filter, longest):
            return super().launch_step(verify, rows, any_filter, longest)

    def sample_launched(self, verify: bool, step: DecodeStep, any_filter: bool) -> DecodeStep:
        with self.ranks.together("sample_launched", verify, any_filter):
            return super().sample_launched(verify, step, any_filter)

    def set_masks(self, slots: abc.Sequence[int], masks: Tensor, ahead: abc.Sequence[int]) -> None:
        with self.ranks.together("set_masks", slots, masks.numpy(), ahead):
            super().set_masks(slots, masks, ahead)

    def prefill(self, chunks: abc.Sequence[PrefillChunk]) -> Tensor | None:
        with self.ranks.together("prefill", _plain(chunks)):
            logits = super().prefill(chunks)
        self._logits = (logits,)
        return logits

    def mixed(self, chunks: abc.Sequence[PrefillChunk], rows: abc.Sequence[int]) -> tuple[Tensor, Tensor | None]:
        with self.ranks.together("mixed", _plain(chunks), rows):
            self._logits = logits = super().mixed(chunks, rows)
        return logits

    def sample_rows(self, slots: abc.Sequence[int], logits: Tensor, any_filter: bool) -> DecodeStep:
        which = next(i for i, made in enumerate(self._logits) if made is logits)
        with self.ranks.together("sample_rows", slots, which, any_filter):
            return super().sample_rows(slots, logits, any_filter)

    def captures(self, grammars: bool = False) -> list[tuple[str, Callable[[], object]]]:
        def told(i: int, capture: Callable[[], object]) -> Callable[[], object]:
            def run() -> object:
                with self.ranks.together("capture", grammars, i):
                    return capture()

            return run

        return [(what, told(i, capture)) for i, (what, capture) in enumerate(super().captures(grammars))]


class Follower:
    """Runs the commands of rank 0 on the engine of another rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, engine.runner
        self._step: DecodeStep | None = None
        self._logits: tuple[Tensor | None, ...] = ()
        self._commands: dict[str, Callable[..., object]] = {
            "write": self._runner.write, "launch_step": self._launch_step, "sample_launched": self._sample_launched,
            "set_masks": self._set_masks, "prefill": self._prefill, "mixed": self._mixed, "sample_rows": self._sample_rows,
            "capture": self._capture, "call": self._call,
        }  # fmt: skip

    def run(self, command: str, arguments: tuple[Any, ...]) -> None:
        """Runs a command of a `LeadingRunner`."""
        self._commands[command](*arguments)

    def _launch_step(self, verify: bool, rows: abc.Sequence[Any], any_filter: bool | None, longest: int) -> None:
        self._step = self._runner.launch_step(verify, rows, any_filter, longest)

    def _sample_launched(self, verify: bool, any_filter: bool) -> None:
        assert self._step is not None
        self._runner.sample_launched(verify, self._step, any_filter)

    def _set_masks(self, slots: abc.Sequence[int], masks: Any, ahead: abc.Sequence[int]) -> None:
        self._runner.set_masks(slots, torch.from_numpy(masks), ahead)

    def _prefill(self, chunks: abc.Sequence[PlainChunk]) -> None:
        self._logits = (self._runner.prefill(_chunks(chunks)),)

    def _mixed(self, chunks: abc.Sequence[PlainChunk], rows: abc.Sequence[int]) -> None:
        self._logits = self._runner.mixed(_chunks(chunks), rows)

    def _sample_rows(self, slots: abc.Sequence[int], which: int, any_filter: bool) -> None:
        logits = self._logits[which]
        assert logits is not None
        self._runner.sample_rows(slots, logits, any_filter)

    def _call(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        function(self._engine, *arguments)

    def _capture(self, grammars: bool, i: int) -> None:
        _, capture = self._runner.captures(grammars)[i]
        capture()


def _plain(chunks: abc.Sequence[PrefillChunk]) -> list[PlainChunk]:
    return [(chunk.sequence.running_slot, chunk.begin, chunk.tokens, chunk.last) for chunk in chunks]


def _chunks(chunks: abc.Sequence[PlainChunk]) -> list[PrefillChunk]:
    """Returns chunks of sequences that have nothing but a slot."""
    return [PrefillChunk(Sequence(Request([0], 1), slot=slot), begin, tokens, last) for slot, begin, tokens, last in chunks]
