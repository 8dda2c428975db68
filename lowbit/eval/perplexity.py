"""Perplexity of a causal language model, with the exact number of scored tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbit.eval.figure import Figure, mean_of_windows
from lowbit.eval.windows import evaluating, one_text, plan_windows
from lowbit.progress import Progress

# Number of logits that are converted to float32 at a time. All logits of 1024 tokens would take 200 MB for a vocabulary of
# 50,000, and 1 GB for one of 250,000.
_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Perplexity:
    """perplexity is exp(nll). nll: mean negative log-likelihood in nats over `tokens` predicted tokens in `windows` windows.

    standard_error is that of the perplexity. By the delta method it is the perplexity times the standard error of nll
    (`lowbit.eval.figure.mean_of_windows`). It is None for a single window.
    """

    perplexity: float
    nll: float
    tokens: int
    windows: int
    standard_error: float | None

    def figures(self) -> list[Figure]:
        """Returns the figures for tables and plots."""
        return [Figure("perplexity", self.perplexity, self.standard_error, self.tokens, "tokens", "lower")]


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    progress: bool = False,
) -> Perplexity:
    """Returns the perplexity of `model` on token ids [T] or [1, T], in windows of `window` tokens that start `stride` apart.

    A window scores the tokens that no earlier window scored, each given all earlier tokens of the window. The first token of
    the text is not scored. With `stride` equal to `window` (the default), neither is the first token of the other windows: 8
    full windows of 1024 score 8 x 1023 tokens. The last window may be shorter. `batch_size` windows run in one batch.
    Log-probabilities are computed in float32 and summed in float64. progress: show a progress bar.

    Raises ValueError for fewer than 2 tokens, a window below 2, a stride outside 1..window, a batch size below 1, or token ids
    of several texts.
    """
    ids = one_text(input_ids, "perplexity")
    batches = plan_windows(len(ids), window, stride, batch_size)
    sums: list[float] = []
    counts: list[int] = []
    with (
        evaluating(model),
        Progress(total=sum(len(starts) for starts, _, _ in batches), desc="perplexity", unit="windows", shown=progress) as bar,
    ):
        for starts, length, count in batches:
            sums += _nll(model, torch.stack([ids[start : start + length] for start in starts]), count)
            counts += [count] * len(starts)
            bar.update(len(starts))
    mean, error = mean_of_windows(sums, counts)
    value = math.exp(mean)
    return Perplexity(value, mean, sum(counts), len(counts), None if error is None else value * error)


def _nll(model: PreTrainedModel, ids: Tensor, count: int) -> list[float]:
    """Returns the summed negative log-likelihood, in nats, of the last `count` tokens of each window of ids [B, T]."""
    ids = ids.to(model.device)
    logits = model(ids, use_cache=False, logits_to_keep=count + 1).logits[:, -count - 1 : -1]
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    sums = []
    for window, targets in zip(logits, ids[:, -count:], strict=True):
        total = 0.0
        for piece, target in zip(window.split(rows), targets.split(rows), strict=True):
            loss = torch.nn.functional.cross_entropy(piece.float(), target, reduction="none")
            total += float(loss.double().sum())
        sums.append(total)
    return sums
