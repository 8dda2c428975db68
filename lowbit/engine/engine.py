"""The engine: continuous batching of requests over one model. The host schedules one step ahead of the GPU.

    engine = Engine(model)
    sequence = engine.submit(Request(prompt, limit=100))
    for sampled in engine.stream(sequence): ...

`Engine.step` schedules and launches a step, and only then reads the tokens of the step before, so that the GPU is busy while
Python runs. A finished sequence therefore runs one extra step; its token is discarded. Any thread that waits for a sequence
runs steps for all sequences. `submit` and `cancel` do not block on a running step; they take effect in the next step.
failure.py describes which errors end a sequence, a step or the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import abc, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbit.engine.block_pool import BlockPool
from lowbit.engine.cache import CacheBudget
from lowbit.engine.check import program_for
from lowbit.engine.decode_runner import DecodeRunner, graph_bytes
from lowbit.engine.deprecated import sequence_of
from lowbit.engine.draft import DraftModel, weight_bytes
from lowbit.engine.failure import EngineFailed, StepFailed, StuckStep, log_failure, one_line
from lowbit.engine.kernels import use_kernels
from lowbit.engine.lockstep import LeadingRunner
from lowbit.engine.lora import Adapters
from lowbit.engine.mixed_runner import MixedRunner
from lowbit.engine.model_runner import InFlightStep, ModelRunner
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.program import DecodeProgram
from lowbit.engine.rank_processes import LeadingRanks
from lowbit.engine.request import Request, SampledToken
from lowbit.engine.scheduler import PrefillChunk, Scheduler, SchedulerOutput
from lowbit.engine.sequence import FinishReason, Sequence
from lowbit.engine.slots import Slots
from lowbit.engine.speculation import MOST_DRAFTS, Speculation, draft_step_cost
from lowbit.engine.step_budget import STEP_MS, StepBudget
from lowbit.engine.verify_runner import VerifyRunner
from lowbit.engine.warm_up import Stage, WarmUpRun
from lowbit.formats.kv import parse_kv
from lowbit.ops.ranks import Ranks
from lowbit.ops.sample import mask_words

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 1024
"""Maximum number of prompt tokens in a step. This fills the tensor cores, and delays the next token of other sequences by at
most tens of milliseconds.
"""


Pooling = Literal["last", "mean"]
"""How the hidden states of a text become its embedding."""


class Engine:
    """Generates sequences with a causal language model of Transformers.

    The decode program repacks the model's weights into its own layout, without a second copy.

    Args:
        max_concurrent: requests computed at once; others wait in a queue.
        max_length: maximum number of tokens of a request, prompt included. Default: the model's positions, or fewer if the
        cache
            cannot hold as many.
        cache_bytes: memory for keys and values (default: most of a GPU's free memory).
        kv: how keys and values are stored (`formats.kv.KV_GRAMMAR`): "16" (the model's dtype), "fp8", "int8", "int4", or one
            format for keys and another for values, such as "k8v4". Needs a decode program unless it is "16".
        chunk_tokens: maximum number of prompt tokens in a step, a multiple of the 128 tokens of a page.
        batch_invariant: results do not depend on the other requests of a step. The quantized layers of the model must be batch
            invariant too (`nn.linear.make_batch_invariant`).
        prefix_caching: prompts with a common prefix share its keys and values.
        forward: computes by the model's own forward, one sequence at a time, as for models without a decode program.
        async_scheduling: reads the tokens of a step after the next one is launched.
        persistent_step: True computes steps of 1, 2, 4 or 8 tokens in one launch wherever that is possible
            (engine/one_launch.py), False never. None (default): only where one launch was measured to be faster. sm_90 only;
            `report` says which steps are one launch, or why none is.
        stop_token_ids: tokens that `Sampling.min_new_tokens` suppresses (default: the model's end-of-text tokens).
        kernels: a kernels file of `lowbit compile`, so that nothing is compiled on a GPU. Default: the file of an installed
            package of kernels. It runs with this process's rights.
        speculate: maximum number of guessed tokens of a sequence that a step verifies, up to 7 (speculation.py); 0: none.
            The tokens are those of decoding without guesses if logits have the same bits in steps of all sizes, which
            `batch_invariant` ensures. Needs a decode program.
        draft: a small model with the same tokens on the same device, which guesses in place of the lookup in the sequences' own
            texts; needs `speculate`. Its cache has as many pages as the model's, and both share the memory for the cache.
        lora: folders of LoRA adapters as PEFT writes them, by the names under which requests ask for them (`Request.adapter`).
            Requests with different adapters and with none are computed together (lora.py). Needs a decode program.
        step_ms: milliseconds that a step on a GPU may take if it computes prompt tokens and decodes sequences at once. The step
            has as many prompt tokens as fit into this time, but at least 64 (step_budget.py). None: up to `chunk_tokens` in
            any time. The same applies on a CPU, and with `batch_invariant`, whose chunks must not depend on time.
        ranks: the group of processes that compute the model together (`rank_processes.start_ranks`); `model` is the part of
            this process. All results are those of the whole model. None: this process computes the whole model.
        progress: called with the progress of kernels that a step compiles, and once when all are compiled.

    Raises ValueError if the cache is too small for one request, and for a `kv`, a `speculate` or a `lora` that the model's
    program does not support. Raises CheckpointError for an adapter that does more than LoRA on linear layers
    (`models.adapter.read_adapter`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int = 64,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        kv: str = "16",
        chunk_tokens: int = CHUNK_TOKENS,
        batch_invariant: bool = False,
        prefix_caching: bool = True,
        forward: bool = False,
        async_scheduling: bool = True,
        persistent_step: bool | None = None,
        stop_token_ids: abc.Sequence[int] | None = None,
        kernels: str | Path | None = None,
        speculate: int = 0,
        draft: PreTrainedModel | None = None,
        lora: abc.Mapping[str, str | Path] | None = None,
        step_ms: float | None = STEP_MS,
        ranks: Ranks | None = None,
        progress: Callable[[Stage], object] | None = None,
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(f"an engine computes at least 1 request at once, got max_concurrent={max_concurrent}")
        if max_length is not None and max_length < 2:
            raise ValueError(f"a sequence has at least 2 tokens, one of them the prompt's, got max_length={max_length}")
        if not 0 <= speculate <= MOST_DRAFTS:
            raise ValueError(f"a step verifies up to {MOST_DRAFTS} guessed tokens of a sequence, got speculate={speculate}")
        if step_ms is not None and not step_ms > 0:
            raise ValueError(f"a step takes more than 0 ms, got step_ms={step_ms}: give None for no limit")
        if draft is not None and not speculate:
            raise ValueError("a draft model guesses tokens for speculation: set speculate, for example to 4")
        if model.device.type == "cuda":
            use_kernels(model.device, kernels)
        self.ranks = ranks if isinstance(ranks, LeadingRanks) else None
        """The ranks that this one leads, if the model is computed by several."""
        if ranks is not None:
            _refuse_with_ranks(forward=forward, persistent_step=persistent_step, draft=draft is not None, lora=bool(lora))
        if self.ranks is not None:
            self.ranks.make_engines(
                {
                    "max_concurrent": max_concurrent, "max_length": max_length, "cache_bytes": cache_bytes, "kv": kv,
                    "chunk_tokens": chunk_tokens, "batch_invariant": batch_invariant, "prefix_caching": prefix_caching,
                    "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids), "speculate": speculate,
                }
            )  # fmt: skip
        self._model, self.device, self.vocab = model, model.device, model.config.get_text_config().vocab_size
        self._positions = _positions(model)
        self.max_length = min(max_length or self._positions, self._positions)
        # The model keeps using the weights that the program joins to one matrix, and may be trained, which tensors made in
        # inference mode cannot be. So the joined weights are made in inference mode only if the model's own weights were.
        with torch.inference_mode(next(model.parameters()).is_inference()):
            self.program, self.difference = program_for(
                model, self.max_length, batch_invariant, forward, parse_kv(kv), persistent_step, ranks
            )
        if speculate and self.program.reasons:
            raise ValueError(
                "speculation verifies several tokens in a step of a decode program; this model would run through Transformers' "
                f"forward ({'; '.join(self.program.reasons)}): leave speculate at 0"
            )
        self.adapters = self._load_adapters(lora) if lora else None
        """LoRA adapters that requests may name; None without any."""
        paged = self.program.is_paged
        self._draft = None if draft is None else DraftModel(draft, self.vocab, self.max_length, self.device)
        # The budget of the cache comes after the programs, since it is a share of the memory that they leave free.
        drafting = 0 if self._draft is None else self._draft.vocab
        captured = graph_bytes(max_concurrent, speculate, self.vocab, drafting, self.program.dtype.itemsize) if paged else 0
        self._cache_budget = CacheBudget.for_device(self.device, cache_bytes, allocated=paged, graph_bytes=captured)
        if ranks is not None:  # all ranks have the same number of pages
            self._cache_budget = replace(self._cache_budget, bytes_=ranks.least(self._cache_budget.bytes_))
        self.page_bytes = self.program.page_bytes + (0 if self._draft is None else self._draft.program.page_bytes)
        """Bytes of a page's keys and values in all layers, including those of the draft model."""
        if max_length is None:
            self.max_length = min(self.max_length, self._cache_budget.longest(self.page_bytes))
        pages = self._cache_budget.pages(self.page_bytes, max_concurrent, self.max_length)
        self.program.allocate_cache(pages)
        self.scheduler = Scheduler(
            max_concurrent,
            BlockPool(pages),
            chunk_tokens,
            prefix_caching=prefix_caching and paged,
            invariant=batch_invariant,
        )
        stops = _eos_tokens(model) if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = [token for token in stops if 0 <= token < self.vocab]  # others cannot be sampled
        self.slots = Slots(max_concurrent, self.max_length, self.vocab, self.stop_token_ids, self.device, speculate)
        graphs = self.program.graphs()
        self.decode_runner = DecodeRunner(self.program, self.slots, max_concurrent, graphs=graphs, invariant=batch_invariant)
        most_tokens = min(chunk_tokens, max_concurrent * self.max_length)
        self.prefill_runner = PrefillRunner(self.program, self.slots, most_tokens, graphs=graphs)
        draft_cost = 0.0
        if self._draft is not None:
            self._draft.start(self.slots, max_concurrent, self.max_length, pages, chunk_tokens)
            draft_cost = draft_step_cost(self._draft.weight_bytes, weight_bytes(model))
        limited = step_ms if self.device.type == "cuda" and not batch_invariant else None
        self.step_budget = StepBudget(limited, chunk_tokens, self.device)
        """Prompt tokens of steps that also decode, and their counts."""
        self.mixed_runner = MixedRunner(
            self.program, self.slots, most_tokens, max_concurrent, graphs=graphs, invariant=batch_invariant
        )
        self.speculation: Speculation | None = None
        """Decides which guesses a step verifies, and counts them; None without speculation."""
        verify_runner = None
        if speculate:
            self.speculation = Speculation(speculate, self._draft, draft_cost, measured=self.device.type == "cuda")
            verify_runner = VerifyRunner(
                self.program, self.slots, max_concurrent, speculate, graphs=graphs, invariant=batch_invariant
            )
        runners = self.decode_runner, self.prefill_runner, verify_runner, self.mixed_runner
        warm_up_run = None
        if graphs is not None:
            warm_up_run = WarmUpRun(self.program, *runners, max_concurrent, self.max_length)
        parts = (self.slots, *runners, warm_up_run, self._draft, progress, bool(lora))
        self.runner = ModelRunner(*parts) if self.ranks is None else LeadingRunner(*parts, ranks=self.ranks)
        self._async_scheduling = async_scheduling
        self._in_flight: deque[InFlightStep] = deque()
        self._earlier = 0
        """Number of steps in flight that were launched before the step that is being launched."""
        self._lock = threading.Lock()
        """Held during a step; it guards the scheduler, the slots and the runners."""
        self._stepping_thread: int | None = None
        self._state_lock = threading.RLock()
        """Guards the state of sequences that other threads change during a step. Held only briefly. Reentrant: the garbage
        collector may close an abandoned stream, which cancels its sequence, while this thread holds the lock."""
        self._finished: deque[Sequence] = deque()
        """Finished sequences that may still have slots and pages."""
        self._gpu_error = ""

    def _load_adapters(self, folders: abc.Mapping[str, str | Path]) -> Adapters:
        """Loads LoRA adapters into the decode program. Raises ValueError if the model has no decode program."""
        program = self.program
        if not isinstance(program, DecodeProgram):
            raise ValueError(
                "LoRA adapters are computed by a decode program; this model would run through Transformers' forward "
                f"({'; '.join(program.reasons)}): merge the adapter into the model with PEFT, then quantize it"
            )
        adapters = Adapters.load(folders, self._model, program.layers, program.dtype, self.device)
        program.use_adapters(adapters)
        return adapters

    # ---- public methods

    def submit(self, request: Request) -> Sequence:
        """Queues a request without waiting for a running step, and returns its sequence. Raises ValueError for a request that
        can never run here or was submitted before, and EngineFailed after a GPU error."""
        self._check(request)
        with self._state_lock:
            if self._gpu_error:
                raise EngineFailed(f"the GPU of this engine failed, start another process: {self._gpu_error}")
            sequence = Sequence.start(request)
            sequence.adapter = -1 if self.adapters is None else self.adapters.index(request.adapter)
            self.scheduler.add(sequence)
        return sequence

    def _check(self, request: Request) -> None:
        """Raises ValueError for a request that can never run here."""
        if request.most_tokens > self.max_length:
            asked = f"this request has {len(request.prompt):,} tokens and asks for {request.limit:,} more"
            limit = self._limit(request.most_tokens)
            raise ValueError(f"a sequence has at most {self.max_length:,} tokens here, {asked}; {limit}")
        for what, tokens in (("prompt", request.prompt), ("logit_bias", [token for token, _ in request.sampling.bias])):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab:
                wrong = next(token for token in tokens if not 0 <= token < self.vocab)
                raise ValueError(f"tokens are from 0 to {self.vocab - 1}, this {what} has {wrong}")
        if request.adapter is not None:
            if self.adapters is None:
                raise ValueError(
                    f"this engine has no adapters, got adapter={request.adapter!r}: make it with lora={{name: folder}}"
                )
            self.adapters.index(request.adapter)
        if request.grammar is not None and request.grammar.words < mask_words(self.vocab):
            tokens_ = 32 * request.grammar.words
            raise ValueError(f"this grammar was compiled for at most {tokens_:,} tokens, the model has {self.vocab:,}")

    def _limit(self, tokens: int) -> str:
        """Returns a message that says why a sequence cannot have `tokens` tokens, and what to do."""
        if tokens > self._positions:
            return f"the model has {self._positions:,} positions: shorten the prompt or ask for fewer new tokens"
        if tokens > self._cache_budget.longest(self.page_bytes):
            return self._cache_budget.refusal(self.page_bytes, tokens)
        return "so says max_length of the engine: make one with more, or ask for fewer tokens"

    def cancel(self, sequence: Sequence | Request) -> None:
        """Finishes a sequence without waiting for a running step; does nothing if it has finished. Passing a request instead
        of its sequence is deprecated."""
        self._finish(sequence_of(sequence), FinishReason.CANCELLED)
        # If a step holds the lock, that step or the next one frees the sequence. The step may run in this same thread: during
        # a step the garbage collector may close an abandoned stream, which calls this method.
        if self._lock.acquire(blocking=False):
            try:
                self._free_finished()
            finally:
                self._lock.release()

    def stream(self, sequence: Sequence | Request) -> Generator[SampledToken, None, None]:
        """Yields the tokens of a sequence; closing the generator cancels it. Raises RequestFailed at the end if the sequence
        failed. Passing a request instead of its sequence is deprecated."""
        return self._stream(sequence_of(sequence))

    def _stream(self, sequence: Sequence) -> Generator[SampledToken, None, None]:
        read = 0
        try:
            while True:
                # `finish_reason` is read before the tokens, since another thread may append the last tokens in between.
                ended = sequence.finish_reason is not None
                while read < len(sequence.sampled):
                    yield sequence.sampled[read]
                    read += 1
                if ended:
                    break
                with contextlib.suppress(StepFailed):  # `check` raises if this sequence failed
                    self.step()
        finally:
            self.cancel(sequence)
        sequence.check()

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Submits requests, and returns their sequences when all have finished. Raises RequestFailed, after all have finished,
        if one of them failed. Any other error cancels the sequences that have not finished."""
        sequences: list[Sequence] = []
        try:
            for request in requests:
                sequences.append(self.submit(request))
            while any(sequence.finish_reason is None for sequence in sequences):
                with contextlib.suppress(StepFailed):  # `check` raises if one of these sequences failed
                    self.step()
        finally:
            for sequence in sequences:
                self.cancel(sequence)
        for sequence in sequences:
            sequence.check()
        return sequences

    @torch.inference_mode()
    def embed(self, tokens: abc.Sequence[int], pooling: Pooling = "last") -> Tensor:
        """Returns the embedding of a text, float32 [hidden] on the CPU. It is the hidden state after the last layer and norm,
        of the last token or averaged over all tokens ("mean"), scaled to length 1.

        The model's own forward computes it between two steps, one text at a time. Raises ValueError for no tokens, too many, or
        tokens that the model does not have, and if the model is computed by several ranks.
        """
        if self.ranks is not None:
            raise ValueError("embeddings are computed by the model's own forward, of which each rank has a part: use one GPU")
        if not 1 <= len(tokens) <= self._positions or not 0 <= min(tokens) <= max(tokens) < self.vocab:
            known = f"1 to {self._positions:,} tokens from 0 to {self.vocab - 1:,}"
            raise ValueError(f"an embedding is of {known}, got {len(tokens):,} tokens")
        with self._lock:
            ids = torch.tensor([list(tokens)], device=self.device)
            hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0].float()
            pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
            return torch.nn.functional.normalize(pooled, dim=0).cpu()

    @torch.inference_mode()
    def step(self) -> None:
        """Runs one step: launches the scheduled work, then reads the tokens of the step before.

        A sequence fails alone if its prompt or its `on_token` raises an error or its logits are NaN or infinite;
        `Sequence.error` says why. Raises StepFailed for other errors, after all sequences of the step have failed. If the GPU
        itself failed, `submit` raises from then on.
        """
        if self._stepping_thread == threading.get_ident():
            raise RuntimeError("this thread is running a step: on_token and progress cannot run another one")
        with self._lock:
            self._stepping_thread = threading.get_ident()
            try:
                self._step()
            finally:
                self._stepping_thread = None

    def compile(self) -> Iterator[Stage]:
        """Compiles every kernel that Triton's cache lacks, in several processes; yields the progress before each."""
        with self._lock:
            kernels = self.runner.all_kernels()
        yield from self.runner.compile(kernels)

    def warm_up(self, grammars: bool = False) -> Iterator[Stage]:
        """Compiles every kernel and captures every graph before the first request; yields the progress before each. `grammars`:
        captures the graphs of steps with grammars too. Without it they are captured when they are first used.
        """
        yield from self.compile()
        captures = self.runner.captures(grammars)
        for done, (what, capture) in enumerate(captures):
            yield Stage(what, done, len(captures))
            with self._lock, torch.inference_mode():
                capture()

    def report(self) -> list[str]:
        """Returns lines of text that describe how sequences are computed."""
        speculation = [] if self.speculation is None else [str(self.speculation)]
        return [*self.program.report(self.difference), *speculation]

    # ---- a step

    def _step(self) -> None:
        self._free_finished()
        self._earlier = len(self._in_flight)
        needed = self._needs_tokens()
        waited = needed and not any(step.drafts for step in self._in_flight)
        if needed:
            self._read_earlier()
            self._free_finished()
        scheduled = self._launch_next()
        if waited and scheduled.decoding and not scheduled.drafts and self.speculation is not None:
            self.speculation.waits += 1
            self._in_flight[-1].alone = False  # not launched while the step before was running, as plain steps are
        if not (scheduled and self._async_scheduling):
            self._earlier = len(self._in_flight)
        self._read_earlier()
        self._free_finished()

    def _needs_tokens(self) -> bool:
        """True if the tokens of the step in flight must be read before the next step is scheduled. They must if the next step
        is to verify guesses. They must also if the step in flight verifies guesses, since its number of tokens is not known."""
        if self.speculation is None:
            return False
        if any(step.drafts for step in self._in_flight):
            return True
        return bool(self.speculation.plan(self.scheduler.decoding, unread=True))

    def _launch_next(self) -> SchedulerOutput:
        """Schedules and launches a step. If that raises an error, the sequences of the step fail, and others continue."""
        scheduled = None
        try:
            filled = self.mixed_runner.steady_tokens(len(self.scheduler.decoding))
            scheduled = self.scheduler.schedule(self.step_budget.next(self.scheduler.waiting_tokens, filled))
            if self.speculation is not None and not self._in_flight:
                self.scheduler.add_drafts(scheduled, self.speculation.plan(scheduled.decoding))
            if scheduled:
                self._launch(scheduled)
            return scheduled
        except BaseException as error:
            self._fail_step(self.scheduler.abort_step(scheduled), error)
            raise

    def _launch(self, scheduled: SchedulerOutput) -> None:
        self.program.keep(self.scheduler.running)  # frees the program's memory for preempted sequences
        self.runner.prepare(scheduled)
        if self._draft is not None:
            self._draft.admit(scheduled)
        if not (scheduled.decoding and scheduled.chunks):
            self._launch_parts(scheduled)
            return
        with self.step_budget.timed(sum(len(chunk.tokens) for chunk in scheduled.chunks), self._captures):
            if scheduled.drafts or not self.mixed_runner.takes(scheduled.chunks, len(scheduled.decoding)):
                self._launch_parts(scheduled)
            else:
                self._launch_mixed(scheduled)

    def _captures(self) -> int:
        """Returns the number of graphs of steps and prompts that are captured."""
        runners = (self.decode_runner, self.prefill_runner, self.mixed_runner, self.runner.verify_runner)
        return sum(runner.captures for runner in runners if runner is not None)

    def _launch_parts(self, scheduled: SchedulerOutput) -> None:
        """Launches the decode step, then the prefill chunks."""
        if scheduled.decoding and self.speculation is None:
            self._in_flight.append(self._decode(scheduled))
        elif scheduled.decoding:
            self._decode_timed(scheduled)
        if scheduled.chunks and self.program.is_paged:
            self._prefill(scheduled.chunks, scheduled)
        else:
            self._prefill_one_by_one(scheduled)

    def _decode_timed(self, scheduled: SchedulerOutput) -> None:
        """Launches the decode step. Marks it as `alone` if nothing but decoding takes its time, so that the cost of guesses can
        be measured by it. A capture delays the earlier steps in flight too."""
        captured = self._captures()
        self._in_flight.append(self._decode(scheduled))
        self._in_flight[-1].alone = not scheduled.chunks and all(s.grammar is None for s in scheduled.decoding)
        if self._captures() != captured:
            for step in self._in_flight:
                step.alone = False

    def _launch_mixed(self, scheduled: SchedulerOutput) -> None:
        """Launches the decode step and the prefill chunks as one forward. If that raises an error, launches them separately, so
        that only faulty prompts fail."""
        slots = [sequence.running_slot for sequence in scheduled.decoding]
        try:
            decoded, prompted = self.runner.mixed(scheduled.chunks, slots)
        except Exception as error:  # noqa: BLE001 - failure.py: a prompt may raise anything, and ends its own sequence
            log_failure("computing a decode step with prompts", error)
            self._launch_parts(scheduled)
            return
        self._draft_prompts(scheduled.chunks)
        constrained = [sequence for sequence in scheduled.decoding if sequence.grammar is not None]
        if constrained:
            self._read_earlier()
        constrained += [chunk.sequence for chunk in scheduled.chunks if chunk.last and chunk.sequence.grammar is not None]
        if constrained:
            self._write_masks(constrained)
        self._in_flight.append(self.runner.sample(scheduled.decoding, decoded))
        if prompted is not None:
            last = [chunk.sequence for chunk in scheduled.chunks if chunk.last]
            self._in_flight.append(self.runner.sample(last, prompted))

    def _decode(self, scheduled: SchedulerOutput) -> InFlightStep:
        """Launches a decode step. If a sequence has a grammar, the tokens of earlier steps are read and masks are computed
        while the GPU computes the step's logits.
        """
        constrained = [sequence for sequence in scheduled.decoding if sequence.grammar is not None]
        guesses = self._guesses(scheduled) if scheduled.drafts else {}
        launched = self.runner.decode(scheduled, guesses, logits_only=bool(constrained))
        if constrained:
            self._read_earlier()
            self._write_masks(constrained, guesses)
            launched = self.runner.sample_step(launched)
        return self.runner.in_flight(launched.sequences, launched.step, launched.drafts)

    def _guesses(self, scheduled: SchedulerOutput) -> dict[Sequence, tuple[int, ...]]:
        """Returns the guesses that a scheduled step verifies."""
        assert self.speculation is not None
        try:
            return self.speculation.guess(scheduled.drafts)
        except Exception as error:  # noqa: BLE001 - a draft model may raise anything, and the step needs no guesses
            self._stop_guessing(error)
            scheduled.drafts.clear()
            return {}

    def _draft_prompts(self, chunks: abc.Sequence[PrefillChunk]) -> None:
        """Computes prefill chunks by the draft model too, if there is one."""
        if self._draft is not None:
            try:
                self._draft.prefill(chunks)
            except Exception as error:  # noqa: BLE001 - as in `_guesses`
                self._stop_guessing(error)

    def _stop_guessing(self, error: Exception) -> None:
        """Decodes without guesses from now on, so that an error of the draft model fails no sequence."""
        log_failure("guessing tokens, which ends for this engine", error)
        self._draft = None
        if self.speculation is not None:  # not set to None: it still counts the guesses of the step in flight
            self.speculation.stopped = True

    def _write_masks(
        self, constrained: abc.Sequence[Sequence], guesses: abc.Mapping[Sequence, tuple[int, ...]] | None = None
    ) -> None:
        """Writes the masks of the next tokens of sequences with grammars, and of the tokens after each of `guesses`. A sequence
        fails if its grammar became too costly."""
        # A finished sequence gets no mask: it runs one extra step, whose token is discarded.
        states = [sequence.grammar if sequence.finish_reason is None else None for sequence in constrained]
        self.runner.write_masks(constrained, states, guesses or {})
        for sequence, state in zip(constrained, states, strict=True):
            if state is not None and state.error:
                self._fail_grammar(sequence, state.error)

    def _fail_grammar(self, sequence: Sequence, why: str) -> None:
        sequence.grammar_failed = True
        self._finish(sequence, FinishReason.FAILED, f"its grammar cannot be followed any further: {why}")

    def _prefill(self, chunks: abc.Sequence[PrefillChunk], scheduled: SchedulerOutput) -> None:
        """Computes prefill chunks in one batch. If that raises an error, computes them one by one, so that only faulty ones
        fail.
        """
        try:
            logits = self.runner.prefill(chunks)
        except Exception as error:  # noqa: BLE001 - failure.py: a prompt may raise anything, and ends its own sequence
            line = log_failure("computing a prompt", error)
            if len(chunks) > 1:
                self._prefill_one_by_one(scheduled)
            else:
                self.scheduler.drop(chunks[0], scheduled)
                self._fail([chunks[0].sequence], line)
            return
        self._draft_prompts(chunks)
        if logits is not None:
            constrained = [chunk.sequence for chunk in chunks if chunk.last and chunk.sequence.grammar is not None]
            if constrained:
                self._write_masks(constrained)
            self._in_flight.append(self.runner.sample([chunk.sequence for chunk in chunks if chunk.last], logits))

    def _prefill_one_by_one(self, scheduled: SchedulerOutput) -> None:
        for chunk in scheduled.chunks:
            # A sequence without a slot was requeued, since an earlier chunk failed to fill a page that it shares.
            if chunk.sequence.slot is not None:
                self._prefill([chunk], scheduled)

    def _read_earlier(self) -> None:
        """Reads the tokens of the steps that were launched before the current one."""
        while self._earlier and self._in_flight:  # `_in_flight` is empty after a GPU error
            self._read(self._in_flight[0])
            self._in_flight.popleft()
            self._earlier -= 1

    def _read(self, step: InFlightStep) -> None:
        """Waits for the results of a step, and appends its tokens to their sequences."""
        try:
            step.wait()
        except StuckStep as error:  # fails the engine, since later launches would read what the stuck one left in GPU memory
            self._fail_for_good(log_failure("a decode step in one launch", error))
            raise StepFailed(f"a step failed, and with it this engine: {one_line(error)}") from error
        except RuntimeError as error:
            self._in_flight.clear()
            self._fail_step(self.scheduler.abort_step(None), error)
            raise
        if self.speculation is not None and not step.tokens_read:
            self.speculation.clock.read(len(step.sequences), sum(map(len, step.drafts)), time.perf_counter(), step.alone)
        if step.drafts and not step.tokens_read:
            self._count_accepted(step)
        for sequence, sampled in step.unread():
            if sequence.finish_reason is not None:
                continue  # finished or cancelled while this step ran
            if math.isnan(sampled.logprob):
                self._finish(sequence, FinishReason.FAILED, "the model's logits are NaN or infinite")
            else:
                self._append(sequence, sampled)

    def _count_accepted(self, step: InFlightStep) -> None:
        """Advances each sequence of a step with guesses by the number of its guesses that were right."""
        assert self.speculation is not None
        accepted = [count - 1 for count in step.accepted()]
        self.speculation.count(step.sequences, [len(guessed) for guessed in step.drafts], accepted)
        for sequence, count in zip(step.sequences, accepted, strict=True):
            if sequence.slot is not None:
                self.scheduler.accept(sequence, count)

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        """Appends a token to its sequence, and finishes the sequence if that was its last token."""
        request, stopped, grammar = sequence.request, False, sequence.grammar
        if grammar is not None and (why := grammar.accept(sampled.token)):
            self._fail_grammar(sequence, why)
            return
        sequence.sampled.append(sampled)
        if self.speculation is not None:
            self.speculation.follow(sequence)
        if request.on_token is not None:
            try:
                stopped = request.on_token(sampled)
            except Exception as error:  # noqa: BLE001 - failure.py: the caller's code may raise anything, and ends its sequence
                self._finish(sequence, FinishReason.FAILED, log_failure("a caller's on_token", error))
            except BaseException as error:  # an interrupt
                self._finish(sequence, FinishReason.FAILED, one_line(error))
                raise
        if sampled.token in request.stop_token_ids or stopped or (grammar is not None and grammar.is_complete):
            self._finish(sequence, FinishReason.STOP)
        elif len(sequence.sampled) == request.limit:
            self._finish(sequence, FinishReason.LENGTH)

    # ---- the end of sequences

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Finishes a sequence that has not finished; the thread that runs steps frees its slot and pages."""
        with self._state_lock:
            if sequence.finish_reason is not None:
                return
            sequence.error, sequence.finish_reason = error, reason
        if reason is FinishReason.FAILED:
            logger.warning(f"a request failed: {error}")
        self._finished.append(sequence)

    def _fail_step(self, sequences: abc.Sequence[Sequence], error: BaseException) -> None:
        """Marks the sequences of a step as failed. Raises StepFailed if there are any and the error is not an interrupt."""
        self._fail(sequences, one_line(error))
        if sequences and isinstance(error, Exception):
            logger.warning("a step failed", exc_info=error)
            count = f"{len(sequences)} request{'s' if len(sequences) > 1 else ''}"
            raise StepFailed(f"a step of {count} failed: {one_line(error)}") from error

    def _fail(self, sequences: abc.Sequence[Sequence], error: str) -> None:
        """Marks sequences as failed. If the GPU itself has failed, marks all sequences as failed and refuses new ones."""
        for sequence in sequences:
            self._finish(sequence, FinishReason.FAILED, error)
        try:
            if self.ranks is not None:
                self.ranks.check()  # before waiting for work that another rank may never finish
            _synchronize(self.device)
        except RuntimeError as gpu_error:  # failure.py: a CUDA error is permanent
            self._fail_for_good(log_failure("waiting for the GPU", gpu_error))

    def _fail_for_good(self, line: str) -> None:
        """Marks all sequences as failed, and refuses new ones from now on."""
        with self._state_lock:  # `submit` raises from now on; sequences queued before are in `everybody`
            self._gpu_error = line
            everybody = (*self.scheduler.running, *self.scheduler.waiting)
        for sequence in everybody:
            self._finish(sequence, FinishReason.FAILED, line)
        self._in_flight.clear()

    def _free_finished(self) -> None:
        """Frees the slots and pages of finished sequences, and the program's memory for them."""
        while self._finished:
            sequence = self._finished.popleft()
            self.scheduler.remove(sequence)
            sequence.lookup = None  # its index is large, and the caller keeps the sequence
        self.program.keep(self.scheduler.running)


def _refuse_with_ranks(*, forward: bool, persistent_step: bool | None, draft: bool, lora: bool) -> None:
    """Raises ValueError for options of an engine that tensor parallelism does not support."""
    asked = {
        "forward=True, the model's own forward": forward,
        "persistent_step, one launch for all layers": persistent_step,
        "a draft model (speculation from a sequence's own text is possible)": draft,
        "LoRA adapters": lora,
    }
    refused = [what for what, is_asked in asked.items() if is_asked]
    if refused:
        raise ValueError(f"tensor parallelism goes without {'; '.join(refused)}")


def _synchronize(device: torch.device) -> None:
    """Waits for a GPU; raises RuntimeError after a CUDA error."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _positions(model: PreTrainedModel) -> int:
    """Returns the maximum number of tokens of a sequence of the model."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)


def _eos_tokens(model: PreTrainedModel) -> list[int]:
    """Returns the model's end-of-text tokens."""
    config = model.generation_config
    given = config.eos_token_id if config is not None else None
    return [] if given is None else [given] if isinstance(given, int) else list(given)
