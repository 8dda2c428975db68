"""A draft model: a small model that guesses the next tokens of sequences, in one decode step for each token.

It has slots and a cache of its own, and the page tables of the engine. So page i of its cache has the keys and values of the
same tokens as page i of the engine's cache. Prompts are computed by both models. Guesses are greedy. Steps without guesses
sample tokens whose keys and values the draft model lacks. It computes them when it next guesses tokens of that sequence, or of
a later one with the same cached pages.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from lowbit.engine.check import program_of
from lowbit.engine.decode_runner import DecodeRunner
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.scheduler import PrefillChunk, SchedulerOutput
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots
from lowbit.engine.speculation import MOST_ROWS
from lowbit.engine.warm_up import WarmUpRun
from lowbit.kernels.choose.attention import PAGE


def weight_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class DraftModel:
    """Guesses tokens of an engine's sequences, of at most `longest` tokens from a vocabulary of `vocab`.

    Raises ValueError for a model without a decode program, on another device than `device`, or with too few positions.
    """

    def __init__(self, model: PreTrainedModel, vocab: int, longest: int, device: torch.device) -> None:
        config = model.config.get_text_config()
        positions = int(getattr(config, "max_position_embeddings", 0) or longest)
        if model.device != device:
            raise ValueError(f"a draft model is on the device of the model, {device}; this one is on {model.device}")
        if positions < longest:
            raise ValueError(
                f"the draft model has {positions:,} positions, sequences have up to {longest:,}: make the engine with "
                f"max_length={positions}, or take another draft model"
            )
        with torch.inference_mode(next(model.parameters()).is_inference()):
            self.program, _ = program_of(model, longest, batch_invariant=False)
        if self.program.reasons:
            raise ValueError(f"a draft model needs a decode program, this one has none: {'; '.join(self.program.reasons)}")
        self.vocab, self._own_vocab = vocab, config.vocab_size
        self.weight_bytes = weight_bytes(model)

    def start(self, slots: Slots, most: int, longest: int, pages: int, chunk_tokens: int) -> None:
        """Allocates the cache, `pages` pages, and the slots, which share the page tables of `slots`."""
        self.chunk_tokens = chunk_tokens
        self.program.allocate_cache(pages)
        self._complete: set[int] = set()
        """Pages with keys and values of all their tokens."""
        self.slots = Slots(most, longest, self._own_vocab, (), slots.device)
        self.slots.tables = slots.tables
        graphs = self.program.graphs()
        self.decode_runner = DecodeRunner(self.program, self.slots, min(most, MOST_ROWS), graphs=graphs)  # a step with guesses
        self.prefill_runner = PrefillRunner(self.program, self.slots, min(chunk_tokens, most * longest), graphs=graphs)
        self.warm_up_run: WarmUpRun | None = None
        """Finds the kernels of the draft model; None without CUDA graphs."""
        if graphs is not None:
            self.warm_up_run = WarmUpRun(self.program, self.decode_runner, self.prefill_runner, None, None, most, longest)

    def captures(self) -> list[tuple[str, Callable[[], object]]]:
        """Returns (description, function that captures it) for each graph of the draft model: greedy steps and prompts."""
        if not self.decode_runner.graphs:
            return []
        steps = [variant for variant in self.decode_runner.variants() if variant[1] is False]
        return [
            *((f"draft step of {v[0]}, up to {v[2]:,} tokens", lambda v=v: self.decode_runner.captured(v)) for v in steps),
            *(
                (f"draft prompts of {s.tokens:,} tokens that see {s.keys:,}", lambda s=s: self.prefill_runner.captured(s))
                for s in self.prefill_runner.graph_shapes
            ),
        ]  # fmt: skip

    def admit(self, scheduled: SchedulerOutput) -> None:
        """Sets how many first tokens of each admitted sequence are computed already, in pages that it shares with earlier
        sequences. Call it in each step before `prefill`."""
        begins = {chunk.sequence: chunk.begin for chunk in scheduled.chunks}
        shared = {sequence.running_slot: begins.get(sequence, 0) // PAGE for sequence in scheduled.admitted}
        self._complete -= {page for slot, index, page in scheduled.new_pages if index >= shared.get(slot, 0)}
        for sequence in scheduled.admitted:
            pages = sequence.pages[: shared[sequence.running_slot]]
            known = next((i for i, page in enumerate(pages) if page not in self._complete), len(pages))
            sequence.drafted_tokens = known * PAGE

    def prefill(self, chunks: abc.Sequence[PrefillChunk]) -> None:
        """Computes keys and values of prefill chunks, whose sequences must have slots and pages. A chunk is skipped if the
        draft model lacks keys and values of tokens before it; `guess` computes both later."""
        chunks = [chunk for chunk in chunks if chunk.sequence.drafted_tokens >= chunk.begin]
        if not chunks:
            return
        self.prefill_runner.launch([replace(chunk, tokens=tuple(map(self._own, chunk.tokens))) for chunk in chunks])
        for chunk in chunks:
            chunk.sequence.drafted_tokens = chunk.end
            self._complete.update(chunk.sequence.pages[chunk.begin // PAGE : chunk.end // PAGE])

    def guess(self, counts: abc.Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Returns `counts[sequence]` greedy guesses of each sequence. The sequences must be scheduled with pages for all
        guesses, their sampled tokens must have been read, and the tables on the device must be written.

        Runs one step for each guess of a sequence, and one more, which computes the keys and values of the last guess. They are
        needed if that guess is right.
        """
        sequences = sorted(counts, key=lambda sequence: -counts[sequence])
        self._catch_up(sequences)
        slots = [sequence.running_slot for sequence in sequences]
        last = [self._own(sequence.sampled[-1].token) for sequence in sequences]
        self.slots.start(slots, last, [sequence.computed_tokens - 1 for sequence in sequences])
        launched = []
        for done in range(counts[sequences[0]] + 1):
            active = [sequence for sequence in sequences if counts[sequence] >= done]  # the first in order of `counts`
            longest = max(sequence.computed_tokens for sequence in active) + done
            step = self.decode_runner.launch(slots[: len(active)], False, longest)
            launched.append(step.tokens[: len(active)].clone())  # the next step of a graph overwrites them
        for sequence in sequences:
            sequence.drafted_tokens = sequence.computed_tokens + counts[sequence]
        tokens = iter(torch.cat(launched).tolist())
        rows = [[next(tokens) for _ in step] for step in launched]
        return {
            sequence: tuple(self._known(rows[i][number]) for i in range(counts[sequence]))
            for number, sequence in enumerate(sequences)
        }

    def _own(self, token: int) -> int:
        """Returns a token of the draft model's vocabulary: 0 for one that only the engine has."""
        return token if token < self._own_vocab else 0

    def _known(self, token: int) -> int:
        """Returns a token of the engine's vocabulary: 0 for one that only the draft model has."""
        return token if token < self.vocab else 0

    def _catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        """Computes keys and values that the draft model lacks, of all tokens before the last one. Steps without guesses left
        them out."""
        for sequence in sequences:
            tokens, end = sequence.tokens, sequence.computed_tokens - 1
            while sequence.drafted_tokens < end:
                begin = sequence.drafted_tokens
                chunk = tuple(tokens[begin : min(end, begin + self.chunk_tokens)])
                self.prefill([PrefillChunk(sequence, begin, chunk, False)])
            self._complete.update(sequence.pages[: end // PAGE])
