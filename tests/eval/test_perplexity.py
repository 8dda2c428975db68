"""Perplexity against a token-by-token computation, the counts of tokens, and the bundled text."""

from __future__ import annotations

import hashlib
import math
import sys

import pytest
import torch

from lowbit.eval import perplexity, sample_text
from lowbit.eval.text import SHA256
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama(dtype=torch.float32).eval()


def by_hand(model, ids, window, stride):
    """Perplexity with each token scored once, in the first window that contains it and a preceding token."""
    total, count, scored = 0.0, 0, set()
    for start in range(0, len(ids), stride):
        piece = ids[start : start + window]
        logits = torch.log_softmax(model(piece[None]).logits[0].double(), dim=-1)
        for i in range(1, len(piece)):
            if start + i not in scored:
                scored.add(start + i)
                total -= float(logits[i - 1, piece[i]])
                count += 1
    return math.exp(total / count), count


@pytest.mark.parametrize(
    ("length", "window", "stride"),
    [(64, 16, 16), (70, 16, 16), (65, 16, 16), (50, 16, 4), (50, 16, 5), (9, 16, 16), (33, 16, 1), (17, 16, 16)],
)
def test_equals_a_computation_by_hand(model, length, window, stride):
    ids = torch.randint(0, 160, (length,), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        expected, count = by_hand(model, ids, window, stride)
    result = perplexity(model, ids, window=window, stride=stride)
    assert result.tokens == count
    assert math.isclose(result.perplexity, expected, rel_tol=1e-5)
    assert math.isclose(result.perplexity, math.exp(result.nll))
    batched = perplexity(model, ids, window=window, stride=stride, batch_size=3)
    assert (batched.tokens, batched.windows) == (result.tokens, result.windows)
    assert math.isclose(batched.nll, result.nll, rel_tol=1e-6)


def test_counts_are_what_the_docstring_says(model):
    ids = torch.zeros(8 * 32, dtype=torch.long)
    assert perplexity(model, ids[None], window=32).tokens == 8 * 31
    assert perplexity(model, ids, window=32, stride=16).tokens == 8 * 32 - 1


def test_large_vocabularies_are_scored_in_pieces(model, monkeypatch):
    ids = torch.randint(0, 160, (64,), generator=torch.Generator().manual_seed(0))
    whole = perplexity(model, ids, window=32)
    monkeypatch.setattr(sys.modules["lowbit.eval.perplexity"], "_LOGITS_AT_ONCE", 160 * 3)
    assert math.isclose(perplexity(model, ids, window=32).nll, whole.nll, rel_tol=1e-6)


def test_no_progress_bar_without_a_terminal(model, capsys):
    perplexity(model, torch.zeros(8, dtype=torch.long), window=4, progress=True)
    assert capsys.readouterr().err == ""


def test_training_mode_is_restored(model):
    model.train()
    perplexity(model, torch.zeros(8, dtype=torch.long), window=4)
    assert model.training
    model.eval()


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(1, dtype=torch.long), {}, "at least 2 tokens, got 1"),
        (torch.zeros(2, 8, dtype=torch.long), {}, "one text"),
        (torch.tensor(3), {}, "one text"),
        (torch.zeros(1, 2, 8, dtype=torch.long), {}, "one text"),
        (torch.zeros(8), {}, "one text"),
        (torch.zeros(8, dtype=torch.long), {"batch_size": 0}, "batch_size is at least 1"),
        (torch.zeros(8, dtype=torch.long), {"window": 1}, "window is at least 2"),
        (torch.zeros(8, dtype=torch.long), {"window": 4, "stride": 5}, "stride from 1 to window"),
    ],
)
def test_bad_arguments(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(model, ids, **options)


def test_the_text_is_what_it_says():
    text = sample_text()
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert "By the Rays of Light I understand its least Parts" in text
    assert len(text) > 99_000 and "Gutenberg" not in text
