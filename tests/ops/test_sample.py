"""The meaning of sampling settings. Kept tokens and distributions equal those of Transformers' logits processors, and samples
follow these distributions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as processors

from lowbit.kernels.reference import sampling
from lowbit.ops.sample import Sampling, SamplingState, sample, top_logprobs

VOCAB, ENDS = 300, (0, 2)
PROMPT, ANSWER = (5, 7, 7, 9), (9, 11, 11, 11, 2, 40)


def state_with(*requests, answer=()):
    """A sampling state with a slot for each request, after the tokens `answer`, and the dummy slot."""
    state = SamplingState.make(len(requests) + 1, VOCAB, ENDS, "cpu")
    for slot, request in enumerate(requests):
        state.set(slot, request, PROMPT)
        for token in answer:
            state.counts[slot, token] += 1
        state.generated[slot] = len(answer)
    return state


def drawn(logits, rows, state, any_filter=True):
    """(tokens, log-probabilities) of one call of `sample`."""
    feed = torch.zeros(2, len(state.settings), dtype=torch.int32)
    tokens, logprobs = torch.zeros(len(rows), dtype=torch.int32), torch.zeros(len(rows))
    sample(logits, torch.tensor(rows, dtype=torch.int32), state, feed[0], feed[1], tokens, logprobs, any_filter=any_filter)
    return tokens, logprobs


def of_transformers(logits, s, answer):
    """Returns the scores [V] after Transformers' processors for the same settings. For settings that Transformers lacks,
    OpenAI's formula is used."""
    ids, scores = torch.tensor([[*PROMPT, *answer]]), logits.float()[None].clone()
    if s.min_new_tokens:
        scores = processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), s.min_new_tokens, list(ENDS))(ids, scores)
    if s.repetition_penalty != 1:
        scores = processors.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, scores)
    count = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=VOCAB)
    scores = scores - s.frequency_penalty * count - s.presence_penalty * (count > 0)
    if s.bias:
        scores = processors.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in s.bias])(ids, scores)
    warpers = []
    if s.temperature != 1:
        warpers.append(processors.TemperatureLogitsWarper(float(s.temperature)))
    if s.top_k:
        warpers.append(processors.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        warpers.append(processors.TopPLogitsWarper(s.top_p))
    if s.min_p:
        warpers.append(processors.MinPLogitsWarper(s.min_p))
    uncut = (scores / s.temperature)[0]
    for warper in warpers:
        scores = warper(ids, scores)
    return scores[0], uncut


def of_reference(logits, s, answer):
    """The int64 masses [V] from which the reference samples."""
    state = state_with(s, answer=answer)
    x = sampling.adjusted(
        sampling.cleaned(logits), state.settings[0], state.counts[0], state.bias[0], state.masks[0], state.ends
    )
    return sampling.kept(x, s.temperature, s.top_k, s.top_p, s.min_p)


def assert_same_distribution(logits, s, answer):
    """Asserts equal distributions over equal tokens, except next to a threshold. Kept tokens may differ if their logits are
    within 1e-4 of the smallest kept one, or with top-p (Transformers rounds its sums), if together they have less than 1e-5 of
    the mass.
    """
    scores, uncut = of_transformers(logits, s, answer)
    mass = of_reference(logits, s, answer)
    kept, wanted = mass > 0, scores.isfinite()
    apart = (kept != wanted) & (uncut > uncut.max() - 27)  # tokens at or below 2^-40 of the largest, about e^-27, have mass 0
    border = uncut[wanted].min()
    near_border = (uncut - border).abs() < 1e-4
    share = float(uncut[apart & ~near_border].sub(uncut.max()).exp().sum())
    assert share < (1e-5 if s.top_p < 1 else 1e-12), (s, apart.nonzero(), uncut[apart], border)
    both = kept & wanted
    of_mass, of_scores = mass[both].double() / mass[both].sum(), uncut[both].double().softmax(0)
    assert float((of_mass - of_scores).abs().max()) < 3e-5, s


def random_logits(seed=0, spread=3.0):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=2.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.8, top_k=40),
    Sampling(temperature=1.0, top_k=VOCAB + 5),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.5, top_p=0.1),
    Sampling(temperature=1.0, top_k=20, top_p=0.5),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, top_k=60, top_p=0.95, min_p=0.02),
    Sampling(temperature=1.0, repetition_penalty=1.4),
    Sampling(temperature=1.0, repetition_penalty=0.6),
    Sampling(temperature=1.0, presence_penalty=1.5),
    Sampling(temperature=1.0, frequency_penalty=-0.7),
    Sampling(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=1.0, logit_bias={7: 5.0, 8: -100.0}),
    Sampling(temperature=1.0, logit_bias=((7, 5.0),), top_k=3),
    Sampling(temperature=1.0, min_new_tokens=len(ANSWER) + 1),
    Sampling(temperature=1.0, min_new_tokens=len(ANSWER)),
    Sampling(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
        logit_bias={11: 3.0}, min_new_tokens=20,
    ),
]  # fmt: skip


@pytest.mark.parametrize("s", CASES, ids=str)
def test_each_setting_keeps_what_transformers_keeps(s):
    for seed in range(5):
        assert_same_distribution(random_logits(seed), s, ANSWER)


@settings(max_examples=150)
@given(
    st.integers(0, 1 << 20), st.sampled_from([0.5, 3.0, 12.0]), st.floats(0.05, 20), st.sampled_from([0, 1, 2, 17, 150, 1000]),
    st.floats(0.01, 1), st.sampled_from([0.0, 0.001, 0.3, 0.99]), st.floats(0.3, 3), st.floats(-2, 2), st.floats(-2, 2),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=4), st.integers(0, 12),
    st.lists(st.integers(0, VOCAB - 1), max_size=10),
)  # fmt: skip
def test_any_settings_keep_what_transformers_keeps(
    seed, spread, temperature, top_k, top_p, min_p, repetition, presence, frequency, bias, minimum, answer
):
    s = Sampling(temperature, top_k, top_p, min_p, repetition, presence, frequency, 0, bias, minimum)
    assert_same_distribution(random_logits(seed, spread), s, answer)


def test_equals_at_a_threshold_are_all_kept():
    logits = torch.tensor([3.0, 1.0, 2.0, 1.0, 0.0, 1.0] + [-5.0] * 294)
    kept = [of_reference(logits, s, ()).nonzero().flatten().tolist() for s in (
        Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, top_p=0.88), Sampling(temperature=1.0, top_p=0.6),
    )]  # fmt: skip
    assert kept == [[0, 1, 2, 3, 5], [0, 1, 2, 3, 5], [0, 2]]


def test_the_random_numbers_are_philox():
    """Philox4x32-10 has known answers for inputs of all zeros and of all ones (Random123, kat_vectors). The first two words of
    each are compared."""
    assert sampling.philox(0, 0) == 0xE169C58D_6627E8D5
    ones = sampling.philox((1 << 64) - 1, (1 << 32) - 1)
    assert ones == sampling.philox(-1, -1)
    numbers = {sampling.philox(seed, counter) for seed in range(50) for counter in range(50)}
    assert len(numbers) == 2500
    assert abs(sum(numbers) / 2500 / 2**64 - 0.5) < 4 * math.sqrt(1 / 12 / 2500)


def test_masses_are_powers_of_two_and_fall():
    keys = torch.arange(sampling.KEYS + 1)
    mass = sampling.masses(keys)
    exact = torch.exp2(40 - keys.double() / 2**15)
    assert mass[0] == 1 << 40 and mass[-1] == 0 and (mass.diff() <= 0).all()
    assert ((mass - exact).abs() <= exact * 1e-7 + 1).all()
    first = keys < 15 << 15
    assert (mass[first].diff() < 0).all(), "no two keys of much mass have the same"


@pytest.mark.parametrize(
    "s",
    [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=30, top_p=0.95), Sampling(temperature=1.4, min_p=0.02)],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(s):
    """Chi-square test over 20,000 samples of one request; tokens expected fewer than ten times form one class."""
    draws, logits = 20000, random_logits(3, 1.5)
    mass = of_reference(logits, s, ())
    running, total = mass.cumsum(0), int(mass.sum())
    targets = torch.tensor([sampling.philox(12345, i) * total >> 64 for i in range(draws)])
    counts = torch.bincount((running[None] <= targets[:, None]).sum(1), minlength=VOCAB)
    assert not counts[mass == 0].any()
    expected = of_transformers(logits, s, ())[0].softmax(0) * draws
    many = expected >= 10
    chi = ((counts - expected)[many].square() / expected[many]).sum()
    rest = expected[~many].sum()
    chi += (counts[~many].sum() - rest).square() / rest if rest > 5 else 0
    freedom = int(many.sum()) - 1 + int(rest > 5)
    assert abs(float(chi) - freedom) < 4 * math.sqrt(2 * freedom), (float(chi), freedom)
    # The operator samples exactly the tokens of these targets.
    state = state_with(replace(s, seed=12345))
    for i in range(20):
        token = int(drawn(logits[None], [0], state)[0])
        assert token == int((running <= targets[i]).sum()), i


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch():
    requests = [Sampling(temperature=1.0, seed=i % 3, top_k=10 * i, repetition_penalty=1.0 + i / 10) for i in range(6)]
    logits = torch.stack([random_logits(i) for i in range(6)])
    together, answers = state_with(*requests), []
    for step in range(12):
        order = list(range(6)) if step % 2 else list(range(5, -1, -1))
        tokens, logprobs = drawn(logits[order].roll(step, 1), [*order], together)
        answers.append((tokens[torch.tensor(order).argsort()], logprobs[torch.tensor(order).argsort()]))
    for slot, request in enumerate(requests):
        alone = state_with(request)
        for step in range(12):
            token, logprob = drawn(logits[slot : slot + 1].roll(step, 1), [0], alone)
            assert token[0] == answers[step][0][slot] and logprob[0] == answers[step][1][slot]
    assert len({tuple(int(tokens[slot]) for tokens, _ in answers) for slot in range(6)}) == 6


def test_what_a_call_writes():
    greedy, penalized = Sampling(), Sampling(temperature=1.0, presence_penalty=1.0, top_k=5)
    state = state_with(greedy, penalized)
    before = state.settings.clone()
    logits = torch.stack([random_logits(i) for i in range(4)]).to(torch.bfloat16)
    tokens, positions = torch.full((3,), -1, dtype=torch.int32), torch.tensor([10, 20, 0], dtype=torch.int32)
    out, logprobs = torch.full((4,), -1, dtype=torch.int32), torch.full((4,), math.nan)
    sample(logits, torch.tensor([1, 0, 2, 2], dtype=torch.int32), state, tokens, positions, out, logprobs)
    assert tokens.tolist() == [int(out[1]), int(out[0]), -1] and positions.tolist() == [11, 21, 0]
    assert state.generated.tolist() == [1, 1, 0]
    torch.testing.assert_close(logprobs, logits.float().log_softmax(1).gather(1, out.long()[:, None])[:, 0])
    assert out[1:].tolist() == logits[1:].argmax(1).tolist()
    assert int(state.counts[1, out[0]]) & 0xFFFF == 1 and not state.counts[0].any(), "counted only where penalties read it"
    assert torch.equal(state.settings[2], before[2]), "the last slot is a dummy"


@pytest.mark.parametrize(
    "s", [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=0.8, top_k=9, seed=1)], ids=str
)
def test_logits_that_are_no_numbers_have_no_log_probability(s):
    """Rows with NaN or infinite logits get a valid token and the log-probability NaN, by which the host recognises them. Other
    rows do not change by a bit.
    """
    logits = torch.stack([random_logits(i) for i in range(6)])
    alone = [drawn(logits[i : i + 1], [0], state_with(s)) for i in (0, 5)]
    logits[1, 7], logits[2, 7], logits[3], logits[4, 7] = math.nan, math.inf, -math.inf, -math.inf
    tokens, logprobs = drawn(logits, list(range(6)), state_with(*[s] * 6))
    assert logprobs.isnan().tolist() == [False, True, True, True, False, False]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    for i, (token, logprob) in zip((0, 5), alone, strict=True):
        assert tokens[i] == token[0] and logprobs[i] == logprob[0]


def test_a_slot_is_given_to_a_new_request():
    old = Sampling(temperature=1.0, repetition_penalty=2.0, logit_bias={3: 9.0}, seed=4, min_new_tokens=3)
    state = state_with(old, answer=ANSWER)
    state.set(
        0,
        Sampling(temperature=0.5, frequency_penalty=1.0, logit_bias={4: -1.0}, top_p=0.5, min_p=0.25, seed=(1 << 64) - 1),
        [8, 8],
    )
    assert state.counts[0].nonzero().flatten().tolist() == [8] and state.bias[0].nonzero().flatten().tolist() == [4]
    scalars = [float(getattr(state, name)[0]) for name in ("temperature", "top_p", "min_p", "repetition", "frequency")]
    assert scalars == [0.5, 0.5, 0.25, 1.0, 1.0]
    assert [int(getattr(state, name)[0]) for name in ("generated", "minimum", "top_k", "seed")] == [0, 0, 0, -1]
    assert Sampling().greedy and Sampling(top_k=3, top_p=0.1).greedy
    assert not Sampling(presence_penalty=0.1).greedy and not Sampling(temperature=1.0).greedy


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1}, "temperature is 0 or 0.001 to 1000, got -1"),
        ({"temperature": 1e-9}, "temperature is"),
        ({"temperature": math.nan}, "temperature is"),
        ({"top_k": -1}, "top_k is 0"),
        ({"top_p": 0}, "top_p is more than 0"),
        ({"top_p": 1.1}, "top_p is"),
        ({"min_p": 2}, "min_p is 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is"),
        ({"presence_penalty": math.inf}, "presence_penalty is finite"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is finite"),
        ({"seed": 1 << 64}, "seed is a 64-bit number"),
        ({"logit_bias": {3: math.inf}}, "logit_bias is"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias is"),
        ({"min_new_tokens": -2}, "min_new_tokens is"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**wrong)


def test_what_does_not_fit_together_is_refused():
    state = state_with(Sampling())
    with pytest.raises(ValueError, match=r"slots are 0 to 0 \(the last one is a dummy\), got 1"):
        state.set(1, Sampling(), ())
    with pytest.raises(ValueError, match="tokens are 0 to 299, the prompt has 3 to 300"):
        state.set(0, Sampling(presence_penalty=1.0), (3, 300))
    with pytest.raises(ValueError, match="logit_bias has 300"):
        state.set(0, Sampling(logit_bias={300: 1.0}), ())
    with pytest.raises(ValueError, match="2 or more"):
        SamplingState.make(1, VOCAB, ENDS, "cpu")
    with pytest.raises(ValueError, match=r"ends \[300\] below 300"):
        SamplingState.make(4, VOCAB, [300], "cpu")
    with pytest.raises(ValueError, match=r"counts is contiguous int32 \(2, 299\)"):
        drawn(torch.zeros(1, 299), [0], state)
    with pytest.raises(ValueError, match="logits are fp16, bf16 or fp32"):
        drawn(torch.zeros(1, VOCAB, dtype=torch.float64), [0], state)
    with pytest.raises(ValueError, match=r"out_tokens is contiguous int32 \(2,\)"):
        feed = torch.zeros(2, 2, dtype=torch.int32)
        sample(torch.zeros(2, VOCAB), feed[0], state, feed[0], feed[1], feed[0, :1], torch.zeros(2))


def test_the_operator_keeps_its_promises_to_torch():
    """The schema, the mutated arguments and the fake implementation are right; torch.compile relies on them."""
    state, feed = state_with(Sampling(temperature=1.0, top_k=5)), torch.zeros(3, 2, dtype=torch.int32)
    arguments = (
        random_logits()[None].repeat(2, 1), torch.tensor([0, 1], dtype=torch.int32), state.settings, state.counts, state.bias,
        state.masks, state.ends, feed[0], feed[1], feed[2], torch.zeros(2), True,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.lowbit.sample, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_top_logprobs(dtype):
    logits = torch.stack([random_logits(i) for i in range(3)]).to(dtype)
    values, ids = top_logprobs(logits, 5)
    wanted = logits.float().log_softmax(1)
    assert values.dtype == torch.float32 and ids.dtype == torch.int32 and values.shape == ids.shape == (3, 5)
    torch.testing.assert_close(values, wanted.gather(1, ids.long()))
    torch.testing.assert_close(values, wanted.sort(1, descending=True).values[:, :5])


@pytest.mark.gpu
def test_giving_a_slot_waits_for_nothing():
    """`SamplingState.set` does not synchronise with the GPU, and its result equals that on a CPU."""
    s = Sampling(temperature=0.5, repetition_penalty=1.5, logit_bias={4: -1.0, 250: 2.0}, top_p=0.5, seed=9, min_new_tokens=2)
    state, on_cpu = SamplingState.make(3, VOCAB, ENDS, "cuda"), SamplingState.make(3, VOCAB, ENDS, "cpu")
    state.set(0, s, PROMPT)  # allocates pinned memory, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.set(1, s, PROMPT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu.set(0, s, PROMPT)
    on_cpu.set(1, s, PROMPT)
    for name in ("settings", "counts", "bias"):
        assert torch.equal(getattr(state, name).cpu(), getattr(on_cpu, name))
