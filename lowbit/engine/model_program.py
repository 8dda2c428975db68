"""The interface of the classes that compute logits: `DecodeProgram`, and `ForwardProgram` around a model's own forward."""

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
    """Reasons why the model has no decode program; empty for a decode program."""
    is_paged: bool
    """True if keys and values are in pages made by `allocate_cache`. Then chunks of several sequences can be one batch, chunks
    can be computed again, and prefixes can be cached.
    """
    device: torch.device
    dtype: torch.dtype

    @property
    def status(self) -> Tensor | None:
        """int32 [1] on the device; not 0 after a step whose results are wrong (`OneLaunch.failure`). None if a failing step
        always raises an error."""

    @property
    def cache_spec(self) -> CacheSpec | None:
        """Layout of the pages; None if the program stores keys and values itself."""

    def allocate_cache(self, pages: int) -> None:
        """Allocates the pages of a paged program."""

    def graphs(self) -> Graphs | None:
        """Returns the object that captures steps and prompts as CUDA graphs; None if kernels are launched one by one."""

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Returns logits [B, V] after the next token of each of the slots `rows`. `longest`: an upper bound of the context
        lengths; 0 if none is known.
        """

    def verify(self, rows: Tensor, tokens: Tensor, positions: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Returns logits [B, V] after each of the tokens int32 [B]. Token i is at positions[i] of the slot rows[i]. Several
        consecutive tokens may be of one slot."""

    def prompt(self, chunks: abc.Sequence[PrefillChunk], slots: Slots) -> Tensor | None:
        """Returns logits [B, V] after the chunks that are the last of their prompts; None if no chunk is."""

    @property
    def captures_prompts(self) -> bool:
        """True if `ragged_logits` computes prompts, so that they can be captured."""

    @property
    def mixes(self) -> bool:
        """True if `mixed_logits` and `mixed_prompt` compute decoding sequences and prompts in one forward."""

    def mixed_logits(self, ragged: Ragged, rows: Tensor, slots: Slots, longest: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the logits [B, V] that `step` returns for `rows`, and the logits [sequences, V] that `ragged_logits`
        returns."""

    def mixed_prompt(
        self, chunks: abc.Sequence[PrefillChunk], rows: Tensor, slots: Slots, longest: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits [B, V] that `step` returns for `rows`, and the logits that `prompt` returns for `chunks`."""

    def ragged_logits(self, ragged: Ragged, slots: Slots) -> Tensor:
        """Returns logits [sequences, V] after the last tokens of a ragged batch."""

    def blank_logits(self, count: int) -> Tensor:
        """Returns logits [count, V] of a zero residual stream through final norm and LM head, for a warm-up run."""

    def report(self, difference: float) -> list[str]:
        """Returns lines of text that describe how sequences are computed. `difference`: relative difference of the logits from
        those of the model's own forward.
        """

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values of a page of tokens, in all layers."""

    def keep(self, running: abc.Sequence[Sequence]) -> None:
        """Frees keys and values that the program itself holds for other sequences."""
