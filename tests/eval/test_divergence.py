"""KL divergence by hand on three tokens, and its relations to perplexity on a tiny Llama."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from lowbit import convert
from lowbit.eval import divergence, perplexity
from lowbit.eval.divergence import compare
from tests.eval.scripted import Scripted
from tests.tiny import tiny_llama

P = [[1 / 2, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 3 / 4], [1 / 3, 1 / 3, 1 / 3]]
Q = [[1 / 4, 1 / 2, 1 / 4], [1 / 4, 1 / 4, 1 / 2], [1 / 3, 1 / 3, 1 / 3]]
# Sums of p ln(p / q), one for each row.
KL = [math.log(2) / 4, 0.75 * math.log(1.5) - 0.25 * math.log(2), 0.0]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 160, (100,), generator=torch.Generator().manual_seed(1))


def test_by_hand_on_three_tokens():
    ids = torch.tensor([0, 0, 1, 2, 1, 0])  # the last token predicts nothing
    expected = [KL[token] for token in (0, 0, 1, 2, 1)]
    result = divergence(Scripted(Q), Scripted(P), ids, window=6)
    assert result.mean == pytest.approx(sum(expected) / 5, rel=1e-6)
    assert result.median == pytest.approx(np.median(expected), rel=1e-6)
    assert result.percentile99 == pytest.approx(np.percentile(expected, 99), rel=1e-6)
    assert result.top1 == 3 / 5  # after token 0 the most likely tokens differ, otherwise they agree
    log_ratios = [math.log(P[a][b] / Q[a][b]) for a, b in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)]
    assert result.nll_difference == pytest.approx(sum(log_ratios) / 5, rel=1e-6)
    assert (result.tokens, result.windows, result.mean_standard_error) == (5, 1, None)


def test_the_direction_is_from_the_reference():
    ids = torch.tensor([1, 1])
    assert divergence(Scripted(Q), Scripted(P), ids).mean == pytest.approx(KL[1], rel=1e-6)
    other_way = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert divergence(Scripted(P), Scripted(Q), ids).mean == pytest.approx(other_way, rel=1e-6)


def test_what_is_ruled_out():
    never = [[0.5, 0.5, 0.0]] * 3
    ids = torch.tensor([0, 1, 0])
    assert divergence(Scripted([[0.25, 0.25, 0.5]] * 3), Scripted(never), ids).mean == pytest.approx(math.log(2), rel=1e-6)
    infinite = divergence(Scripted(never), Scripted([[0.25, 0.25, 0.5]] * 3), ids)
    assert infinite.mean == infinite.median == infinite.percentile99 == math.inf


def test_nan_is_an_error():
    logits = torch.zeros(2, 3)
    for bad in (torch.full((2, 3), torch.nan), torch.full((2, 3), torch.inf)):
        for pair in ((logits, bad), (bad, logits)):
            with pytest.raises(ValueError, match="NaN"):
                compare(*pair, torch.zeros(2, dtype=torch.long))


def test_zero_for_the_same_model_and_not_after_quantizing(ids):
    reference, model = tiny_llama(dtype=torch.float32), tiny_llama(dtype=torch.float32)
    same = divergence(model, reference, ids, window=32)
    assert (same.mean, same.median, same.percentile99, same.top1, same.nll_difference) == (0, 0, 0, 1, 0)
    means = []
    for scheme in ("w8a16", "w4a16_g32", "w2a16_g32"):
        model = tiny_llama(dtype=torch.float32)
        convert(model.model.layers, scheme)
        result = divergence(model, reference, ids, window=32)
        assert 0 < result.median < result.percentile99 and result.mean_standard_error > 0
        means.append(result.mean)
    assert means == sorted(means) and means[0] > 0


@pytest.mark.parametrize(("window", "stride"), [(32, None), (32, 8), (100, None)])
def test_the_same_tokens_as_perplexity(ids, window, stride):
    reference, model = tiny_llama(dtype=torch.float32), tiny_llama(dtype=torch.float32)
    convert(model.model.layers, "w4a16_g32")
    result = divergence(model, reference, ids, window=window, stride=stride)
    one, two = (perplexity(m, ids, window=window, stride=stride) for m in (model, reference))
    assert (result.tokens, result.windows) == (one.tokens, one.windows)
    assert result.nll_difference == pytest.approx(one.nll - two.nll, abs=1e-6)


def test_large_vocabularies_are_compared_in_pieces(ids, monkeypatch):
    reference, model = tiny_llama(dtype=torch.float32), tiny_llama(dtype=torch.float32)
    convert(model.model.layers, "w4a16_g32")
    whole = divergence(model, reference, ids, window=32)
    monkeypatch.setattr(sys.modules["lowbit.eval.divergence"], "_LOGITS_AT_ONCE", 160 * 3)
    assert divergence(model, reference, ids, window=32) == whole


def test_modes_are_restored_and_other_vocabularies_refused(ids):
    model = tiny_llama(dtype=torch.float32).train()
    divergence(model, tiny_llama(dtype=torch.float32).eval(), ids[:8])
    assert model.training
    with pytest.raises(ValueError, match="vocabulary of 3 tokens, the model one of 4"):
        divergence(Scripted([[0.25] * 4] * 4), Scripted(P), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        divergence(model, model, ids[:1])
