"""Perplexity of a causal language model, with the exact number of tokens it was measured on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

# Logits turned to float32 at once: 1024 tokens of a vocabulary of 50,000 are 200 MB, of 250,000 tokens 1 GB.
_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Perplexity:
    """perplexity = exp(nll); nll: mean negative log-likelihood in nats over `tokens` predicted tokens in `windows`."""

    perplexity: float
    nll: float
    tokens: int
    windows: int


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel, input_ids: Tensor, *, window: int = 1024, stride: int | None = None, progress: bool = False
) -> Perplexity:
    """Perplexity of `model` on token ids [T] or [1, T], read in windows of `window` tokens that start `stride` apart.

    A window scores the tokens that no earlier window has scored, each from all tokens before it in its window. The first
    token of the text has nothing before it and is not scored; with `stride` equal to `window` (the default) neither is
    the first one of every other window, so 8 full windows of 1024 score 8 x 1023 tokens. The last window may be shorter.
    Log-probabilities are computed in float32 and summed in float64. Raises ValueError for fewer than 2 tokens, a window
    below 2, a stride outside 1..window, or token ids that are not those of one text.
    """
    ids = input_ids.reshape(-1) if input_ids.dim() == 1 or input_ids.shape[0] == 1 else None
    if ids is None:
        raise ValueError(f"perplexity takes the token ids of one text, [T] or [1, T], got {tuple(input_ids.shape)}")
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"window is at least 2 and stride from 1 to window, got window {window} and stride {stride}")
    if len(ids) < 2:
        raise ValueError(f"perplexity needs at least 2 tokens, got {len(ids)}")

    total, tokens, windows, scored = 0.0, 0, 0, 1
    starts = [start for start in range(0, len(ids) - 1, stride) if start == 0 or start - stride + window < len(ids)]
    training = model.training
    model.eval()
    try:
        for start in tqdm(starts, desc="perplexity", unit="window", disable=not progress, leave=False):
            end = min(start + window, len(ids))
            first = max(scored, start + 1)  # the first token of a window cannot be predicted within it
            if first >= end:
                continue
            total += _nll(model, ids[start:end], end - first)
            tokens, windows, scored = tokens + end - first, windows + 1, end
    finally:
        model.train(training)
    mean = total / tokens
    return Perplexity(math.exp(mean), mean, tokens, windows)


def _nll(model: PreTrainedModel, ids: Tensor, count: int) -> float:
    """Summed negative log-likelihood of the last `count` tokens of one window, in nats."""
    ids = ids.to(model.device)
    logits = model(ids[None], use_cache=False, logits_to_keep=count + 1).logits[0, -count - 1 : -1]
    targets = ids[-count:]
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    total = 0.0
    for piece, target in zip(logits.split(rows), targets.split(rows), strict=True):
        loss = torch.nn.functional.cross_entropy(piece.float(), target, reduction="none")
        total += float(loss.double().sum())
    return total
