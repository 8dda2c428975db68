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
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    progress: bool = False,
) -> Perplexity:
    """Perplexity of `model` on token ids [T] or [1, T], read in windows of `window` tokens that start `stride` apart.

    A window scores the tokens that no earlier window has scored, each from all tokens before it in its window. The first
    token of the text has nothing before it and is not scored; with `stride` equal to `window` (the default) neither is
    the first one of every other window, so 8 full windows of 1024 score 8 x 1023 tokens. The last window may be shorter.
    `batch_size` windows run at once, their logits are held together. Log-probabilities are computed in float32 and summed
    in float64. The progress bar shows on terminals only. Raises ValueError for fewer than 2 tokens, a window below 2, a
    stride outside 1..window, a batch size below 1, or token ids that are not those of one text.
    """
    ids = input_ids[0] if input_ids.dim() == 2 and input_ids.shape[0] == 1 else input_ids
    if ids.dim() != 1 or ids.is_floating_point():
        raise ValueError(
            f"perplexity takes the token ids of one text, [T] or [1, T], got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"window is at least 2 and stride from 1 to window, got window {window} and stride {stride}")
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, got {batch_size}")
    if len(ids) < 2:
        raise ValueError(f"perplexity needs at least 2 tokens, got {len(ids)}")

    batches = _batches(len(ids), window, stride, batch_size)
    total, tokens, windows = 0.0, 0, 0
    training = model.training
    model.eval()
    try:
        with tqdm(total=sum(len(starts) for starts, _, _ in batches), desc="perplexity", unit="window", leave=False,
                  disable=None if progress else True) as bar:  # fmt: skip
            for starts, length, count in batches:
                total += _nll(model, torch.stack([ids[start : start + length] for start in starts]), count)
                tokens, windows = tokens + count * len(starts), windows + len(starts)
                bar.update(len(starts))
    finally:
        model.train(training)
    mean = total / tokens
    return Perplexity(math.exp(mean), mean, tokens, windows)


def _batches(length: int, window: int, stride: int, batch_size: int) -> list[tuple[list[int], int, int]]:
    """Starts of the windows that run together, their length in tokens, and how many last tokens of each are scored."""
    batches: list[tuple[list[int], int, int]] = []
    scored = 1
    for start in range(0, length - 1, stride):
        if scored >= length:
            break
        end = min(start + window, length)
        count = end - max(scored, start + 1)  # the first token of a window cannot be predicted within it
        scored = end
        if batches and batches[-1][1:] == (end - start, count) and len(batches[-1][0]) < batch_size:
            batches[-1][0].append(start)
        else:
            batches.append(([start], end - start, count))
    return batches


def _nll(model: PreTrainedModel, ids: Tensor, count: int) -> float:
    """Summed negative log-likelihood of the last `count` tokens of windows [B, T], in nats."""
    ids = ids.to(model.device)
    logits = model(ids, use_cache=False, logits_to_keep=count + 1).logits[:, -count - 1 : -1]
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    total = 0.0
    for window, targets in zip(logits, ids[:, -count:], strict=True):
        for piece, target in zip(window.split(rows), targets.split(rows), strict=True):
            loss = torch.nn.functional.cross_entropy(piece.float(), target, reduction="none")
            total += float(loss.double().sum())
    return total
