"""Splits a text into windows, in the same way for all measurements over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel


def one_text(input_ids: Tensor, what: str) -> Tensor:
    """Returns the token ids [T] of a text, given as [T] or [1, T]. Raises ValueError for other shapes or dtypes, and for fewer
    than 2 tokens."""
    ids = input_ids[0] if input_ids.dim() == 2 and input_ids.shape[0] == 1 else input_ids
    if ids.dim() != 1 or ids.is_floating_point():
        raise ValueError(
            f"{what} takes the token ids of one text, [T] or [1, T], got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if len(ids) < 2:
        raise ValueError(f"{what} needs at least 2 tokens, got {len(ids)}")
    return ids


def plan_windows(length: int, window: int, stride: int | None, batch_size: int = 1) -> list[tuple[list[int], int, int]]:
    """Returns batches of windows. A batch has the starts of its windows, their length in tokens, and the number of tokens at
    the end of each window that are scored.

    A window scores the tokens that no earlier window scored. `stride` None means `window`. Raises ValueError for a window below
    2, a stride outside 1..window, or a batch size below 1.
    """
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"window is at least 2 and stride from 1 to window, got window {window} and stride {stride}")
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, got {batch_size}")
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


@contextmanager
def evaluating(*models: PreTrainedModel) -> Iterator[None]:
    """Sets the models to eval mode (no dropout) in the block and restores their modes afterwards."""
    training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, training, strict=True):
            model.train(mode)
