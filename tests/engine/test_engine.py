"""The engine on a CPU with tiny models. It generates Transformers' tokens, whatever other sequences it computes."""

from __future__ import annotations

import collections
import copy
import random
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from lowbit.engine import Engine, FinishReason, Request, Sampling
from lowbit.engine.decode_runner import DecodeStep
from lowbit.engine.product import Scaled
from lowbit.engine.program import DecodeProgram
from lowbit.formats import rotate_blocks
from lowbit.nn import QuantLinear, convert
from lowbit.ops import attention
from lowbit.quantize import rtn
from tests.tiny import eager_llama

VOCAB = 160


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def engine_of(model, **options):
    return Engine(model, **{"max_concurrent": 4, "chunk_tokens": 128, "cache_bytes": 1 << 24} | options)


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def expected(model, ids, count):
    """Greedy tokens of Transformers' generate."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def tokens(sequence):
    return [sampled.token for sampled in sequence.sampled]


LENGTHS = (1, 2, 77, 127, 128, 129, 200)


@pytest.mark.parametrize("ahead", [True, False])
def test_greedy_tokens_match_transformers(model, ahead):
    """Prompts have one token, end at page borders, or are longer than a chunk. There are more prompts than slots."""
    engine = engine_of(model, async_scheduling=ahead)
    sequences = engine.generate([Request(prompt(length), 20) for length in LENGTHS])
    assert isinstance(engine.program, DecodeProgram) and engine.difference < 1e-5
    for sequence in sequences:
        assert tokens(sequence) == expected(model, sequence.request.prompt, 20), len(sequence.request.prompt)
        assert sequence.finish_reason is FinishReason.LENGTH and len(set(tokens(sequence))) > 8, (
            "a model that repeats itself would hide errors"
        )
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


@pytest.mark.parametrize(("scheme", "hadamard"), [("w8a16", 0), ("w8a8", 0), ("w4a8_g64", 0), ("fp8_dynamic", 0), ("w8a8", 16)])
def test_quantized_models(scheme, hadamard):
    """With quantized models in float32, every token is the model's most likely one, up to rounding.

    Norms and gates that quantize x produce the layers' own codes, except for a few in a thousand that are next to a tie. A
    token passes if its logit is within 5 % of the largest. It also passes if the logits move by as much when the embeddings
    move by a last bit; one tie of e4m3 can move them by a tenth.
    """
    quantized = eager_llama()
    convert(quantized, scheme)
    for layer in filter(lambda module: hadamard and type(module) is QuantLinear, quantized.modules()):
        q = layer.quant_tensor()
        layer.set_weight(rtn(rotate_blocks(q.dequantize(), hadamard), scheme).with_input(hadamard=hadamard))
    engine = engine_of(quantized)
    assert isinstance(engine.program, DecodeProgram) and engine.difference < 1e-5
    assert isinstance(engine.program.layers[0].down, Scaled) == (scheme != "w8a16")
    for sequence in engine.generate([Request(prompt(length), 15) for length in (1, 30, 150)]):
        embedded = quantized.get_input_embeddings()(torch.tensor([[*sequence.request.prompt, *tokens(sequence)]])).detach()
        steps = torch.empty(8, *embedded.shape[1:]).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            both = torch.cat([embedded, embedded * (1 + steps * torch.finfo(torch.float32).eps)])
            logits, *others = (quantized(inputs_embeds=x[None]).logits[0, len(sequence.request.prompt) - 1 : -1] for x in both)
        chosen = logits.gather(1, torch.tensor(tokens(sequence))[:, None])[:, 0]
        moved = torch.stack([(other - logits).abs().amax(1) for other in others]).amax(0)
        assert (logits.amax(1) - chosen < moved.maximum(0.05 * logits.abs().amax(1))).all()
        assert (logits.argmax(1) == torch.tensor(tokens(sequence))).sum() >= 13


def test_preemption_does_not_change_the_tokens(model):
    """The cache has 4 pages for 3 sequences of 2 pages. The newest sequence is preempted, and its tokens do not change."""
    page = DecodeProgram.cache_spec.fget(engine_of(model).program).page_bytes
    engine = engine_of(model, cache_bytes=5 * page, max_length=256, prefix_caching=False)
    assert engine.scheduler.pages.count == 5
    sequences = engine.generate([Request(prompt(100, seed), 60) for seed in range(3)])
    assert [tokens(r) for r in sequences] == [expected(model, r.request.prompt, 60) for r in sequences]


def test_prefix_caching(model):
    engine = engine_of(model)
    common = prompt(200)
    first, second = engine.generate([Request([*common, 5], 4), Request([*common, 6, 7], 4)])
    assert second.cached_tokens == 128, "the first one's pages are known as soon as they are launched"
    for sequence in (first, second):
        assert tokens(sequence) == expected(model, sequence.request.prompt, 4)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.8, top_p=0.9, seed=3), Sampling(repetition_penalty=1.3)])
def test_sampling_does_not_depend_on_other_sequences(model, sampling):
    asked = dict(prompt=prompt(40), limit=25, sampling=sampling)
    (alone,) = engine_of(model).generate([Request(**asked)])
    others = [Request(prompt(30 + 20 * i, i + 1), 30, Sampling(temperature=1.0, seed=i)) for i in range(6)]
    among = engine_of(model).generate([*others[:3], Request(**asked), *others[3:]])[3]
    assert tokens(among) == tokens(alone)


def test_sampling_continues_after_preemption(model):
    """A preempted sequence continues with the random numbers and token counts that it would have had without preemption."""
    page = engine_of(model).program.cache_spec.page_bytes
    asked = [dict(prompt=prompt(100, i), limit=60, sampling=Sampling(1.0, seed=i, presence_penalty=1.0)) for i in range(3)]
    roomy = engine_of(model).generate([Request(**each) for each in asked])
    tight_engine = engine_of(model, cache_bytes=5 * page, max_length=256, prefix_caching=False)
    tight = tight_engine.generate([Request(**each) for each in asked])
    assert [tokens(r) for r in tight] == [tokens(r) for r in roomy]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_is_launched_for_its_longest_context(model, monkeypatch, invariant):
    """A step is launched for its longest context. A batch-invariant engine always launches it for the longest possible
    context."""
    monkeypatch.setattr("lowbit.engine.decode_runner.REACHES", (64, 192))
    engine = engine_of(model, max_length=256, batch_invariant=invariant)
    chosen, step = [], engine.program.step
    monkeypatch.setattr(engine.program, "step", lambda rows, slots, longest: (chosen.append(longest), step(rows, slots))[1])
    engine.generate([Request(prompt(60), 10), Request(prompt(20), 3)])
    engine.generate([Request(prompt(190), 5)])
    assert chosen == ([256] * 13 if invariant else [64] * 4 + [192] * 5 + [192] * 2 + [256] * 2)


def test_on_token_and_stop_tokens_finish_a_sequence(model):
    ids = prompt(20)
    sampled = expected(model, ids, 12)
    seen = []

    def on_token(token):
        seen.append(token.token)
        return len(seen) == 5

    engine = engine_of(model)
    watched, ended = engine.generate(
        [Request(ids, 12, on_token=on_token), Request(ids, 12, stop_token_ids=frozenset({sampled[3]}))]
    )
    assert tokens(watched) == seen == sampled[:5] and watched.finish_reason is FinishReason.STOP
    assert tokens(ended) == sampled[: sampled.index(sampled[3]) + 1] and ended.finish_reason is FinishReason.STOP


def test_logprobs(model):
    ids = prompt(20)
    (sequence,) = engine_of(model).generate([Request(ids, 3, top_logprobs=4)])
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *tokens(sequence)]])).logits[0, len(ids) - 1 : -1]
    for sampled, of_token in zip(sequence.sampled, logits.log_softmax(-1), strict=True):
        values, best = of_token.topk(4)
        assert [token for token, _ in sampled.top_logprobs] == best.tolist()
        torch.testing.assert_close(torch.tensor([v for _, v in sampled.top_logprobs]), values, rtol=1e-4, atol=1e-4)
        assert sampled.logprob == pytest.approx(of_token[sampled.token].item(), abs=1e-4)


def test_closing_a_stream_cancels_its_sequence(model):
    engine = engine_of(model)
    ids = prompt(30)
    sequence = engine.submit(Request(ids, 10))
    assert [sampled.token for sampled in engine.stream(sequence)] == expected(model, ids, 10)
    given_up = engine.submit(Request(ids, 50))
    stream = engine.stream(given_up)
    assert [next(stream).token for _ in range(3)] == expected(model, ids, 3)
    stream.close()
    assert given_up.finish_reason is FinishReason.CANCELLED and not engine.scheduler.running
    engine.cancel(sequence)
    assert sequence.finish_reason is FinishReason.LENGTH, "a finished sequence does not change"


def test_several_threads_generate_at_once(model):
    engine = engine_of(model)
    sequences = {}

    def generate(i):
        (sequences[i],) = engine.generate([Request(prompt(20 + i, i), 15)])

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [tokens(sequences[i]) for i in range(6)] == [expected(model, prompt(20 + i, i), 15) for i in range(6)]


def test_submit_does_not_block_on_a_running_step(model):
    """A thread that runs one step after another holds the lock most of the time. `submit` must not need that lock."""
    engine = engine_of(model)
    with engine._lock:
        thread = threading.Thread(target=engine.submit, args=(Request(prompt(5), 2),), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and len(engine.scheduler.waiting) == 1


def test_cancel_does_not_block_on_a_running_step(model):
    """A cancelled sequence finishes at once. The thread that runs the step frees its slot and pages later."""
    engine = engine_of(model)
    sequence, waiting = (engine.submit(Request(prompt(5), 20)) for _ in range(2))
    engine.step()
    with engine._lock:
        threads = [threading.Thread(target=engine.cancel, args=(each,), daemon=True) for each in (sequence, waiting)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert (
            not any(thread.is_alive() for thread in threads)
            and sequence.finish_reason is waiting.finish_reason is FinishReason.CANCELLED
        )
        assert engine.scheduler.running
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_a_sequence_cancelled_by_the_garbage_collector_during_a_step(model, monkeypatch):
    """A sequence is cancelled between scheduling and launching of a step. Other sequences are unchanged, and its pages are
    freed."""
    engine = engine_of(model)
    sequence, other = (engine.submit(Request(prompt(5 + i), 20)) for i in range(2))
    engine.step()
    plan = engine.scheduler.schedule

    def planned(budget):
        found = plan(budget)
        engine.cancel(sequence)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "schedule", planned)
        engine.step()
    while other.finish_reason is None:
        engine.step()
    assert sequence.finish_reason is FinishReason.CANCELLED and other.finish_reason is FinishReason.LENGTH, other.error
    alone = engine_of(model).generate([Request(prompt(6), 20)])[0]
    assert [sampled.token for sampled in other.sampled] == [sampled.token for sampled in alone.sampled]
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_on_token_cannot_run_a_step(model):
    engine = engine_of(model)
    other = engine.submit(Request(prompt(5), 4, on_token=lambda sampled: engine.step()))
    while other.finish_reason is None:
        engine.step()
    assert other.finish_reason is FinishReason.FAILED and "this thread is running a step" in other.error


@pytest.mark.parametrize("ahead", [True, False])
def test_threads_submit_and_cancel_while_another_runs_steps(model, ahead):
    """Threads submit and cancel while another thread runs steps, as in a server. Up to its cancellation, each sequence has the
    tokens that it has alone."""
    engine = engine_of(model, max_concurrent=3, cache_bytes=1 << 19, max_length=256, async_scheduling=ahead)
    asked = [(prompt(1 + 37 * i % 190, i % 3), 1 + 7 * i % 24, Sampling(0.9 * (i % 2), seed=i)) for i in range(12)]
    fresh = engine_of(model, max_concurrent=1, max_length=256, prefix_caching=False)
    alone = [tokens(fresh.generate([Request(*each)])[0]) for each in asked]
    stop, made, errors = threading.Event(), [[] for _ in range(4)], []

    def steps():
        while not stop.is_set():
            engine.step()

    def client(number):
        chance = random.Random(number)
        try:
            for _ in range(12):
                which = chance.randrange(len(asked))
                sequence = engine.submit(Request(*asked[which]))
                made[number].append((sequence, which))
                until = time.monotonic() + 60
                give_up = chance.choice([None, None, 0, 1, 5])
                while sequence.finish_reason is None and time.monotonic() < until:
                    if give_up is not None and len(sequence.sampled) >= give_up:
                        engine.cancel(sequence)
                        assert sequence.finish_reason is not None
                    time.sleep(0.0005)
        except BaseException as error:
            errors.append(error)
            raise

    worker = threading.Thread(target=steps)
    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in (worker, *clients):
        thread.start()
    for thread in clients:
        thread.join(100)
    stop.set()
    worker.join(60)
    assert not errors and not any(thread.is_alive() for thread in (worker, *clients))
    ended = [each for of_client in made for each in of_client]
    assert len(ended) == 48 and {sequence.finish_reason for sequence, _ in ended} == {
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
    }
    for sequence, which in ended:
        sampled = tokens(sequence)
        assert sampled == (alone[which] if sequence.finish_reason is FinishReason.LENGTH else alone[which][: len(sampled)])
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine._in_flight
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def fail(*args):
    raise RuntimeError("out of memory")


def test_a_failed_step_fails_its_sequences(model, monkeypatch):
    engine = engine_of(model)
    sequence = engine.submit(Request(prompt(9), 10))
    engine.step()

    with monkeypatch.context() as patch:
        patch.setattr(engine.program, "step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    assert sequence.finish_reason is FinishReason.FAILED and not engine.scheduler.running
    (after,) = engine.generate([Request(prompt(9), 10)])
    assert tokens(after) == expected(model, after.request.prompt, 10)


def test_pages_of_a_failed_step_are_not_reused(model, monkeypatch):
    """Pages enter the prefix cache when a step is scheduled. If the step fails, they were never written and must not be
    reused."""
    engine = engine_of(model)
    common = prompt(200)

    with monkeypatch.context() as patch:
        patch.setattr(engine.program, "prompt", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([Request(common, 5)])
    (after,) = engine.generate([Request(common, 5)])
    assert after.cached_tokens == 0 and tokens(after) == expected(model, common, 5)
    (again,) = engine.generate([Request(common, 5)])
    assert again.cached_tokens == 128 and tokens(again) == tokens(after)
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


@pytest.mark.parametrize("where", ["_add_chunks_of_running", "_add_chunk"])
def test_an_interrupt_while_a_step_is_scheduled(model, monkeypatch, where):
    """The interrupt is raised again, no unwritten page is reused, and later sequences are unchanged."""
    engine = engine_of(model)
    first = engine.submit(Request(prompt(200, 0), 20))
    for _ in range(3):
        engine.step()
    second = engine.submit(Request(prompt(200, 1), 20))
    inner = getattr(engine.scheduler, where)

    def interrupted(*args):
        inner(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert first.finish_reason is FinishReason.FAILED and not engine.scheduler.running
    for sequence in engine.generate([Request(prompt(200, seed), 20) for seed in range(2)]):
        assert tokens(sequence) == expected(model, sequence.request.prompt, 20)
    while second.finish_reason is None:
        engine.step()
    assert second.finish_reason is FinishReason.FAILED or tokens(second) == expected(model, second.request.prompt, 20)
    engine.step()
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_a_failed_step_fails_the_sequences_admitted_in_it(model, monkeypatch):
    """Sequences whose prompts did not fit into the failed step fail too, since neither their pages nor their sampling settings
    are on the device."""
    engine = engine_of(model)
    sequences = [engine.submit(Request(prompt(length, length), 5)) for length in (60, 100)]

    with monkeypatch.context() as patch:
        patch.setattr(engine.slots, "update", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    assert [sequence.finish_reason for sequence in sequences] == [FinishReason.FAILED, FinishReason.FAILED]
    assert not engine.scheduler.running and engine.scheduler.pages.available == engine.scheduler.pages.count - 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Request(prompt(200), 57),
            "at most 256 tokens here, this request has 200 tokens and asks for 57 more; the model has 256 positions: shorten "
            "the prompt or ask for fewer new tokens",
        ),
        (Request([3, VOCAB], 5), "tokens are from 0 to 159, this prompt has 160"),
        (Request([3], 5, Sampling(logit_bias={VOCAB: 1.0})), "tokens are from 0 to 159, this logit_bias has 160"),
    ],
)
def test_requests_that_can_never_run_are_refused(model, request_, message):
    with pytest.raises(ValueError, match=message):
        engine_of(model, max_length=256).submit(request_)


def test_the_error_for_a_long_request_says_what_limits_it(model):
    """The error names what limits the request: the cache, with the bytes that would suffice; the caller's max_length; or the
    model's positions."""
    page = engine_of(model).program.cache_spec.page_bytes
    said = (
        "at most 128 tokens here, this request has 120 tokens and asks for 9 more; it takes .* MiB of keys and values, there "
    )
    with pytest.raises(ValueError, match=said + rf"are .* MiB \(cache_bytes\): .*\(cache_bytes={3 * page}\).*engine=False"):
        engine_of(model, cache_bytes=2 * page).submit(Request(prompt(120), 9))
    assert engine_of(model, cache_bytes=3 * page).generate([Request(prompt(120), 9)])[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="at most 128 tokens here, .*; the model has 256 positions: shorten the prompt"):
        engine_of(model, cache_bytes=2 * page).submit(Request(prompt(120), 157))
    with pytest.raises(ValueError, match="at most 100 tokens here, .*; so says max_length of the engine: make one with more"):
        engine_of(model, max_length=100).submit(Request(prompt(96), 5))
    said = rf"MiB \(cache_bytes\): .*\(cache_bytes={2 * page}, --cache-gib of lowbit serve\), or do without .*engine=False"
    with pytest.raises(ValueError, match=said):
        engine_of(model, cache_bytes=page)


def test_a_request_is_submitted_once(model):
    engine = engine_of(model)
    request = Request([5, 6], 3)
    sequence = engine.submit(request)
    for _ in range(4):
        with pytest.raises(ValueError, match="this request was submitted before: create another one"):
            engine.submit(request)
        engine.step()
    assert sequence.finish_reason is FinishReason.LENGTH and not engine.scheduler.running and not engine.scheduler.waiting


def test_a_stream_yields_tokens_that_another_thread_appends(model):
    class Late(list):
        """A list that appends its last element just after its length was read."""

        asked = 0

        def __len__(self):
            count = super().__len__()
            self.asked += 1
            if self.asked == 3:  # the stream is now waiting for the third element
                self.append("last")
                sequence.finish_reason = FinishReason.LENGTH
            return count

    engine = engine_of(model)
    sequence = engine.submit(Request([5, 6], 3))
    sequence.sampled = Late(["first", "second"])
    assert list(engine.stream(sequence)) == ["first", "second", "last"]


def test_a_program_with_nan_logits_is_not_used(model, monkeypatch):
    monkeypatch.setattr(DecodeProgram, "_capped", lambda self, logits: logits * torch.nan)
    assert engine_of(model).report() == [
        "through Transformers' forward, one text at a time: the decode program of Llama differs from it by nan"
    ]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 64])
def test_operands_of_attention_are_aligned(model, monkeypatch, slots):
    """Tensors start at multiples of 16 bytes, as kernels require, for prompts of odd lengths and for any number of slots."""
    seen = []

    def looking(operator):
        def run(*args, **options):
            seen.extend(operator.__name__ for each in args if isinstance(each, torch.Tensor) and each.data_ptr() % 16)
            return operator(*args, **options)

        return run

    for operator in (attention.append_kv, attention.decode_attention):
        monkeypatch.setattr(f"lowbit.engine.program.{operator.__name__}", looking(operator))
    engine = engine_of(model, max_concurrent=slots)
    engine.generate([Request(prompt(length), 3) for length in (3, 33, 130)])
    assert not seen


def test_host_cost_of_a_large_step(model, monkeypatch):
    """A step makes 10 calls of Python functions for each sequence, and some tens for the step. Calls are counted because their
    number is the same on every machine."""
    engine = engine_of(model, max_concurrent=64, chunk_tokens=1024)
    tokens_, logprobs = torch.full((64,), 5, dtype=torch.int32), torch.full((64,), -1.0)
    step = DecodeStep(torch.empty(0), tokens_, logprobs, torch.randn(64, VOCAB))
    monkeypatch.setattr(engine.decode_runner, "launch", lambda rows, filters, longest: step)
    for _ in range(64):
        engine.submit(Request(prompt(3), 100, top_logprobs=2))
    for _ in range(4):
        engine.step()
    calls = collections.Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        for _ in range(10):
            engine.step()
    finally:
        sys.setprofile(None)
    assert all(len(sequence.sampled) == 13 for sequence in engine.scheduler.running) and len(engine.scheduler.running) == 64
    assert calls["call"] < 10 * (64 * 10 + 70), calls


def test_short_sequences(model):
    """A sequence may be shorter than the prompt with which a program is checked."""
    engine = engine_of(model, max_length=10)
    (sequence,) = engine.generate([Request(prompt(4), 6)])
    assert isinstance(engine.program, DecodeProgram) and tokens(sequence) == expected(model, sequence.request.prompt, 6)


def test_the_model_can_be_trained_saved_and_used_again(tmp_path):
    """After engines have taken over its weights, the model can still be trained and saved, and a second engine can use it."""
    own = eager_llama()
    ids = torch.tensor([prompt(20)])
    before = own(ids).logits.detach()
    for _ in range(2):
        (sequence,) = engine_of(own).generate([Request(prompt(20), 5)])
        assert tokens(sequence) == expected(own, prompt(20), 5)
    own.save_pretrained(tmp_path)
    for model in (own, copy.deepcopy(own), type(own).from_pretrained(tmp_path, dtype=torch.float32)):
        torch.testing.assert_close(model(ids).logits, before)
    own.requires_grad_(True)
    own(ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters())


def test_wrong_requests_and_engines(model):
    with pytest.raises(ValueError, match="at least 2 tokens, one of them the prompt's, got max_length=0"):
        Engine(model, max_length=0)
    with pytest.raises(ValueError, match="at least one token, got none"):
        Request([], 5)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        Request([1], 0)
    with pytest.raises(ValueError, match="up to 20, got 21"):
        Request([1], 1, top_logprobs=21)
    with pytest.raises(ValueError, match="at least 1 request at once, got max_concurrent=0"):
        Engine(model, max_concurrent=0)
    with pytest.raises(ValueError, match=r"a request of 256 tokens takes .* ask for fewer tokens \(max_length\) or give more"):
        Engine(model, cache_bytes=1000, max_length=256)


def test_an_unknown_family_runs_through_its_forward():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    engine = engine_of(model)
    assert engine.report()[0].startswith("through Transformers' forward, one text at a time: ")
    sequences = engine.generate([Request(prompt(length), 12) for length in (1, 50, 130, 200, 20)])
    assert [tokens(r) for r in sequences] == [expected(model, r.request.prompt, 12) for r in sequences]


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 180), st.integers(1, 20), st.booleans(), st.none() | st.integers(0, 8)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(ARRIVALS, st.integers(1, 3), st.booleans())
def test_any_order_of_arrivals(model, arrivals, slots, ahead):
    """For any order of arrivals, each sequence has the tokens that it has alone. Some sequences are cancelled on the way."""
    engine = engine_of(model, max_concurrent=slots, max_length=256, async_scheduling=ahead)
    coming = [
        (wait, cancel, Request(prompt(length, length % 2), limit, Sampling(0.9 * sampled, seed=length)))
        for wait, length, limit, sampled, cancel in arrivals
    ]
    sequences = {}
    for now in range(16):
        for number, (wait, cancel, request) in enumerate(coming):
            if wait == now:
                sequences[number] = engine.submit(request)
            if cancel is not None and wait + cancel == now:
                engine.cancel(sequences[number])
        engine.step()
    while any(sequence.finish_reason is None for sequence in sequences.values()):
        engine.step()
    fresh = engine_of(model, max_concurrent=1, max_length=256, prefix_caching=False)
    for sequence in sequences.values():
        asked = sequence.request
        (alone,) = fresh.generate([Request(asked.prompt, asked.limit, asked.sampling)])
        assert tokens(sequence) == tokens(alone)[: len(sequence.sampled)]
        assert sequence.finish_reason is FinishReason.CANCELLED or len(sequence.sampled) == sequence.request.limit
    engine.step()
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1
