"""The interface of what computes logits: a `DecodeProgram`, or a `ForwardProgram` around a model's own forward."""

from __future__ import annotations

from collections import abc
from typing import Protocol

import torch
from torch import Tensor

from lowbit.engine.cache import CacheSpec
from lowbit.engine.graphs import Graphs
from lowbit.engine.ragged import Ragged
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots


class ModelProgram(Protocol):
    """Computes the logits of decode steps and prompts, and owns their keys and values."""

    reasons: tuple[str, ...]
    """Why a model has no decode program; empty for a decode program."""
    is_paged: bool
    """True if keys and values are in pages that `allocate_cache` makes. Chunks of several sequences are then one batch, chunks
    can be computed again, and prefixes cached."""
    device: torch.device
    dtype: torch.dtype

    @property
    def cache_spec(self) -> CacheSpec | None:
        """Layout of the pages; None if the program stores keys and values itself."""

    def allocate_cache(self, pages: int) -> None:
        """Allocates the pages of a paged program."""

    def graphs(self) -> Graphs | None:
        """Where steps and prompts are captured as CUDA graphs; None if they are launched one by one."""

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Logits [B, V] after the next token of the slots `rows`; `longest`: upper limit of their contexts, 0 for any."""

    def prompt(self, chunks: abc.Sequence[PrefillChunk], slots: Slots) -> Tensor | None:
        """Logits [B, V] after those chunks that are the last of their prompt; None if none is."""

    @property
    def captures_prompts(self) -> bool:
        """True if `ragged_logits` computes prompts, so that they can be captured."""

    def ragged_logits(self, ragged: Ragged, slots: Slots) -> Tensor:
        """Logits [sequences, V] after the last tokens of a ragged batch."""

    def blank_logits(self, count: int) -> Tensor:
        """Logits [count, V] of zeros through final norm and head, for a warm-up run."""

    def report(self, difference: float) -> list[str]:
        """How sequences are computed, as lines of text; `difference` of logits from the model's own forward."""

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values of a page of tokens, in all layers."""

    def keep(self, running: abc.Sequence[Sequence]) -> None:
        """Frees keys and values that the program itself holds for other sequences."""
