"""Decode steps and prefill chunks in one forward, on a CPU: the tokens of steps that compute them apart; the budget of prompt
tokens."""

from __future__ import annotations

import random

import pytest
import torch

from lowbit.engine import Engine, FinishReason, Grammar, GrammarCompiler, Request, Sampling
from lowbit.engine.mixed_runner import TILE, MixedRunner, prompt_tokens
from lowbit.engine.prefill_runner import KEYS
from lowbit.engine.program import DecodeProgram
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.step_budget import LEAST_TOKENS, StepBudget
from lowbit.nn.linear import make_batch_invariant
from tests.engine.test_engine import engine_of, expected, prompt, tokens
from tests.tiny import eager_llama, eager_opt, json_tokenizer


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def arriving(engine, requests, every=2):
    """The sequences of requests that come one by one, every few steps; and the prompt tokens and decoding sequences of each
    forward that had both."""
    waiting, sequences, mixed = list(requests), [], []
    launch = engine.mixed_runner.launch

    def noted(chunks, rows):
        mixed.append((sum(len(chunk.tokens) for chunk in chunks), len(rows)))
        return launch(chunks, rows)

    engine.mixed_runner.launch = noted
    steps = 0
    while waiting or any(s.finish_reason is None for s in sequences):
        if waiting and steps % every == 0:
            sequences.append(engine.submit(waiting.pop(0)))
        engine.step()
        steps += 1
    return sequences, mixed


SETTINGS = [Sampling(), Sampling(temperature=0.8, seed=3, repetition_penalty=1.2), Sampling(temperature=0.7, top_k=30, seed=4)]


def some_requests(count=8, limit=30):
    return [Request(prompt(7 + 43 * i % 170, i), limit, SETTINGS[i % 3], top_logprobs=i % 2) for i in range(count)]


@pytest.mark.parametrize("budget", [None, 64, 30])
@pytest.mark.parametrize("ahead", [True, False])
def test_tokens_are_those_of_each_alone(model, budget, ahead):
    """With any budget, which splits chunks inside of pages."""
    engine = engine_of(model, async_scheduling=ahead)
    if budget is not None:
        engine.step_budget._tokens = float(budget)
    sequences, mixed = arriving(engine, some_requests())
    alone = engine_of(model, max_concurrent=1)
    for got, request in zip(sequences, some_requests(), strict=True):
        (wanted,) = alone.generate([request])
        assert tokens(got) == tokens(wanted) and got.finish_reason is FinishReason.LENGTH
        if request.sampling.greedy:
            assert tokens(got) == expected(model, request.prompt, 30)
    assert len(mixed) >= 6 and {rows for _, rows in mixed} >= {1, 2, 3}
    assert budget is None or max(count for count, _ in mixed) == budget
    assert engine.step_budget.steps == len(mixed) and engine.step_budget.prompt_tokens == sum(count for count, _ in mixed)
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_batch_invariant_sequences_have_the_same_bits():
    """In a forward with prompts, in a step of its own, and alone."""
    model = eager_llama()
    make_batch_invariant(model, model.dtype)
    mixed_engine, apart = (engine_of(model, batch_invariant=True) for _ in range(2))
    apart.mixed_runner.takes = lambda chunks, rows: False
    found, mixed = arriving(mixed_engine, some_requests())
    others, none = arriving(apart, some_requests())
    assert mixed and not none
    assert [s.sampled for s in found] == [s.sampled for s in others]
    (alone,) = engine_of(model, batch_invariant=True).generate(some_requests()[3:4])
    assert alone.sampled == found[3].sampled


@pytest.mark.parametrize("kv", ["16", "int4"])
def test_a_model_with_learned_positions(kv):
    model = eager_opt()
    found, mixed = arriving(engine_of(model, kv=kv), some_requests(5))
    alone = engine_of(model, max_concurrent=1, kv=kv)
    assert mixed and [tokens(s) for s in found] == [tokens(alone.generate([request])[0]) for request in some_requests(5)]


def test_a_forward_that_fails_is_launched_in_parts(model, monkeypatch):
    """Then only the faulty prompt fails, and decoding sequences keep their tokens."""
    prompts, program = DecodeProgram.prompt, "lowbit.engine.program.DecodeProgram"

    def fails(self, chunks, *options):
        raise ArithmeticError("one forward is too much")

    def faulty(self, chunks, slots):
        if any(chunk.sequence.request.prompt[0] == 99 for chunk in chunks):
            raise ArithmeticError("this prompt")
        return prompts(self, chunks, slots)

    monkeypatch.setattr(f"{program}.mixed_prompt", fails)
    monkeypatch.setattr(f"{program}.prompt", faulty)
    requests = [*some_requests(3), Request([99, *prompt(9)], 10), *some_requests(4)[3:]]
    found, mixed = arriving(engine_of(model), requests)
    alone = engine_of(model, max_concurrent=1)
    for got, request in zip(found, [*some_requests(3), None, *some_requests(4)[3:]], strict=True):
        if request is None:
            assert got.finish_reason is FinishReason.FAILED and "this prompt" in got.error
        else:
            assert tokens(got) == tokens(alone.generate([request])[0])
    assert mixed


def test_grammars(model):
    """Grammars hold for a decoding sequence and for a prompt's first token that are sampled in one forward."""
    pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")
    tokenizer = json_tokenizer()
    grammar = GrammarCompiler(tokenizer, 160, [tokenizer.eos_token_id]).compile(Grammar.regex("(ab|cd|xyz){9}[0-9]{9}"))
    asked = lambda: [Request(prompt(9 + i, i), 60, grammar=grammar if i % 2 else None) for i in range(5)]  # noqa: E731
    found, mixed = arriving(engine_of(model), asked())
    alone = engine_of(model, max_concurrent=1)
    assert len(mixed) >= 3 and [tokens(s) for s in found] == [tokens(alone.generate([request])[0]) for request in asked()]


def test_beside_guesses_and_a_draft_model(model, monkeypatch):
    """Steps with guesses are launched apart from prompts; the draft model computes the prompts of mixed steps too."""
    monkeypatch.setattr("lowbit.engine.engine.draft_step_cost", lambda draft_bytes, model_bytes: 2.0)
    engine = engine_of(model, speculate=3, draft=eager_llama())
    chosen, takes = random.Random(0), engine.speculation.plan
    engine.speculation.plan = lambda sequences, **more: takes(sequences, **more) if chosen.random() < 0.6 else {}
    found, mixed = arriving(engine, some_requests())
    alone = engine_of(model, max_concurrent=1)
    assert [tokens(s) for s in found] == [tokens(alone.generate([request])[0]) for request in some_requests()]
    greedy = engine.speculation
    assert mixed and greedy.steps > 0 and greedy.accepted > greedy.drafted / 3


def test_what_is_not_mixed(model, monkeypatch):
    """Soft caps, models through their own forward, and chunks that no graph fits."""
    assert not Engine(model, forward=True, cache_bytes=1 << 24).mixed_runner.takes([], 1)
    engine = engine_of(model)
    assert engine.mixed_runner.takes([], 1)
    with monkeypatch.context() as patched:
        patched.setattr(DecodeProgram, "softcaps", property(lambda self: True))
        assert not engine.mixed_runner.takes([], 1)
        found, mixed = arriving(engine, some_requests(3))
        assert not mixed and all(s.finish_reason is FinishReason.LENGTH for s in found)
    runner = MixedRunner(engine.program, engine.slots, 1024, 40, graphs=object(), invariant=False)
    chunk = lambda begin, count: PrefillChunk(Sequence(Request([1], 1)), begin, (0,) * count, False)  # noqa: E731
    assert {shape.rows for shape in runner.shapes} == {16, 48} and runner.shapes[0].prompts.tokens == 464
    assert len(runner.shapes) == 10 and all(shape.prompts.keys <= KEYS for shape in runner.shapes)
    found = runner.shape([chunk(0, 30), chunk(100, 20)], 17)
    assert (found.prompts.tokens, found.rows) == (80, 48)
    assert runner.shape([chunk(0, 30)], 3).rows == 16
    assert (
        not runner.takes([chunk(0, 497)], 3) and not runner.takes([chunk(9000, 5)], 3) and not runner.takes([chunk(0, 5)], 49)
    )


def test_forwards_are_whole_tiles(model):
    """Rows and prompt tokens of a graph together; as many tokens as a budget gives fill one."""
    for rows in (16, 32, 48, 64, 96, 128, 192, 256):
        for most in (128, 256, 512):
            sizes = prompt_tokens(rows, most)
            assert sizes == tuple(sorted(sizes)) and sizes[0] > 0 and sizes[-1] >= min(most, 512 + 1 - TILE)
            assert all((rows + size) % TILE == 0 for size in sizes[1:]) and (rows + sizes[0]) % (TILE // 2) == 0
    program, slots = engine_of(model).program, engine_of(model).slots
    runner = MixedRunner(program, slots, 1024, 32, graphs=object(), invariant=False)
    assert runner.steady_tokens(20) == (224, 352, 480) and runner.steady_tokens(3) == (240, 368, 496)
    assert MixedRunner(program, slots, 1024, 32, graphs=None, invariant=False).steady_tokens(3) == ()
    assert MixedRunner(program, slots, 1024, 256, graphs=object(), invariant=False).steady_tokens(20) == (256, 384, 512)


# ---- the budget


class Steps:
    """Steps that take a fixed time and some for each token, with noise."""

    def __init__(self, fixed_ms, token_ms):
        self.fixed_ms, self.token_ms, self.source = fixed_ms, token_ms, random.Random(0)

    def run(self, budget, steps, share=1.0):
        taken = []
        for _ in range(steps):
            count = int(budget.tokens * share)
            taken.append((self.fixed_ms + self.token_ms * count) * self.source.uniform(0.97, 1.03))
            budget.observe(count, taken[-1])
        return taken


def test_steps_take_the_stated_time():
    """Whatever a token takes; on a model so slow that even the smallest step takes longer, the smallest is kept."""
    for fixed_ms, token_ms in ((2, 0.02), (5, 0.025), (10, 0.1), (1, 0.001), (14, 0.02)):
        budget = StepBudget(15.0, 1024, torch.device("cpu"))
        taken = Steps(fixed_ms, token_ms).run(budget, 60)[30:]
        least = fixed_ms + token_ms * LEAST_TOKENS
        assert max(taken) < max(15.0 * 1.02, least * 1.04), (fixed_ms, token_ms)
        assert budget.tokens in (LEAST_TOKENS, 1024) or sum(taken) / len(taken) > 15.0 * 0.75
    slow = StepBudget(15.0, 1024, torch.device("cpu"))
    Steps(40, 0.5).run(slow, 20)
    assert slow.tokens == LEAST_TOKENS


def test_small_steps_do_not_raise_the_budget():
    budget = StepBudget(15.0, 1024, torch.device("cpu"))
    Steps(5, 0.025).run(budget, 40, share=0.1)
    assert budget.tokens == 256
    Steps(50, 0.025).run(budget, 40, share=0.1)
    assert budget.tokens == LEAST_TOKENS, "but they lower it"


def test_prompts_are_spread_over_steps():
    """A stream of prompts of 512 tokens, one in every fourth step: steps have nearly equal numbers of its tokens."""
    budget, waiting, taken = StepBudget(15.0, 1024, torch.device("cpu")), 0, []
    for step in range(80):
        waiting += 512 * (step % 4 == 0)
        taken.append(min(waiting, budget.next(waiting)))
        waiting -= taken[-1]
    assert sum(taken[40:]) == 512 * 10 and max(taken[40:]) <= 192 and min(taken[40:]) >= 64
    assert budget.next(10**6) == budget.tokens, "many prompts take what the stated time permits"


def test_prompts_fill_tiles():
    """One prompt is divided equally over the steps that it takes; many fill whole steps, larger ones if they are more."""
    budget, filled = StepBudget(15.0, 1024, torch.device("cpu")), (224, 352, 480)
    assert budget.next(512, filled) == 171 and budget.next(341, filled) == 171 and budget.next(170, filled) == 170
    assert budget.next(1000, filled) == 224 and budget.next(0, filled) == 224
    assert budget.next(10_000, filled) == 224, "352 are more than the budget"
    while budget.tokens < 480:
        budget.observe(budget.tokens, 8.0)
    assert [budget.next(count, filled) for count in (1000, 1500, 10_000)] == [224, 352, 480]
    slow = StepBudget(15.0, 1024, torch.device("cpu"))
    Steps(40, 0.5).run(slow, 20)
    assert slow.next(512, filled) == LEAST_TOKENS, "a tile takes too long"


def test_without_a_limit():
    budget = StepBudget(None, 1024, torch.device("cpu"))
    with budget.timed(100):
        pass
    assert budget.next(10) == budget.tokens == 1024 and (budget.steps, budget.prompt_tokens) == (1, 100)
    timed = StepBudget(1e6, 1024, torch.device("cpu"))
    with timed.timed(200):
        pass
    assert timed.tokens == 320, "a fast step raises it by a quarter"
    captures = iter([3, 4])
    with timed.timed(320, lambda: next(captures)):
        pass
    assert timed.tokens == 320, "a step that captured a graph is not measured"


def test_a_limit_of_no_time_is_refused(model):
    with pytest.raises(ValueError, match="a step takes more than 0 ms, got step_ms=0: give None for no limit"):
        engine_of(model, step_ms=0)
