"""Multiple choice on a scripted model: scores by hand, and a batch against one choice at a time."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lowbit.eval import choose
from lowbit.eval.choice import Question, _encode, _log_likelihoods, read_questions
from tests.eval.scripted import Scripted
from tests.tiny import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def table(tokenizer, following):
    """Next-token probabilities [V, V]. `following` maps a character to {next character: probability}; all others get 1e-4."""
    ids = {c: tokenizer(c).input_ids[0] for pair in following for c in (pair, *following[pair])}
    rows = torch.full((98, 98), 1e-4)
    for character, after in following.items():
        for other, p in after.items():
            rows[ids[character], ids[other]] = p
    return rows / rows.sum(1, keepdim=True)


def test_sum_and_length_normalised_by_hand(tokenizer):
    model = Scripted(table(tokenizer, {" ": {"a": 0.5, "b": 0.3, "c": 0.2}, "a": {"a": 0.5, "b": 0.5}}))
    # ln(1/4) < ln(0.3) in total, but ln(1/4) / 2 > ln(0.3) per byte.
    questions = [Question("Q:", ("aa", "b"), 0), Question("Q:", ("aa", "b"), 1), Question("Q:", ("b", "aa", "aa"), 1)]
    result = choose(model, tokenizer, questions)
    assert (result.accuracy, result.accuracy_per_byte, result.questions) == (1 / 3, 2 / 3, 3)
    assert result.standard_error == pytest.approx(math.sqrt(2 / 27))
    assert result.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)


def test_the_choice_alone_is_scored(tokenizer):
    ids, start = _encode(tokenizer, "Q:", "ab")
    assert tokenizer.decode(ids[start:]) == " ab" and tokenizer.decode(ids[:start]) == "Q:"
    ids, start = _encode(tokenizer, "Q: ", "ab")
    assert tokenizer.decode(ids[start:]) == "ab"
    model = Scripted(table(tokenizer, {":": {" ": 0.9}, " ": {"a": 0.5}, "a": {"b": 0.25}}))
    p = model.table.exp()
    a, b, space, colon = (tokenizer(c).input_ids[0] for c in "ab :")
    expected = math.log(p[colon, space] * p[space, a] * p[a, b])
    assert _log_likelihoods(model, [_encode(tokenizer, "Q:", "ab")]) == [pytest.approx(expected, rel=1e-5)]


def test_a_token_that_spans_prompt_and_choice_is_scored():
    class Merging:
        def __call__(self, text):
            return type("Encoding", (), {"input_ids": {"ab": [1, 2], "ab c": [1, 9], "x": [3], "x c": [8]}[text]})

    assert _encode(Merging(), "ab", "c") == ([1, 9], 1)
    with pytest.raises(ValueError, match="leaves no token before the choice"):
        _encode(Merging(), "x", "c")


def test_a_padded_batch_equals_one_choice_at_a_time(tokenizer):
    model = tiny_llama(dtype=torch.float32).eval()
    candidates = [_encode(tokenizer, "The cat", text) for text in ("sat on the mat", "ran", "is a very long story indeed")]
    with torch.inference_mode():
        sums = _log_likelihoods(model, candidates)
        for value, (ids, start) in zip(sums, candidates, strict=True):
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = sum(float(logits[i - 1, ids[i]]) for i in range(start, len(ids)))
            assert value == pytest.approx(expected, rel=1e-5)


def test_errors(tokenizer):
    with pytest.raises(ValueError, match="at least one question"):
        choose(Scripted(torch.ones(98, 98)), tokenizer, [])
    with pytest.raises(ValueError, match="question 2 has 9 tokens, the model a context of 8"):
        choose(
            Scripted(torch.ones(98, 98), context=8), tokenizer, [Question("Q", ("a", "b"), 0), Question("Q", ("a", "b" * 7), 0)]
        )
    with pytest.raises(ValueError, match="logits are NaN"):
        choose(Scripted(torch.full((98, 98), torch.nan)), tokenizer, [Question("Q", ("a", "b"), 0)])


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "P", "choices": ["a", "b"], "answer": 1}, Question("P", ("a", "b"), 1)),
        ({"question": "P?", "choices": ["a", "b"], "answer": "a"}, Question("Question: P?\nAnswer:", ("a", "b"), 0)),
        ({"prompt": "P", "choices": ["a"], "answer": 0}, "at least two texts"),
        ({"prompt": "P", "choices": ["a", ""], "answer": 0}, "at least two texts"),
        ({"prompt": "P", "choices": ["a", "b"], "answer": 2}, "index from 0 to 1"),
        ({"prompt": "P", "choices": ["a", "b"], "answer": True}, "index from 0 to 1"),
        ({"prompt": "P", "choices": ["a", "a"], "answer": "a"}, "text of one choice"),
        ({"choices": ["a", "b"], "answer": 0}, "'question' must be a non-empty string"),
    ],
)
def test_files_of_questions(record, expected, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(record))
    if isinstance(expected, Question):
        assert read_questions(path) == [expected]
    else:
        with pytest.raises(ValueError, match=expected):
            read_questions(path)
