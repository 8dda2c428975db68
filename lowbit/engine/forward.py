"""A model as Transformers computes it, one text at a time: for families that no decode program knows.

Slower by far than a program on a GPU, and the truth that programs are checked against.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots


class ForwardProgram:
    """The model's own forward with a cache for each text; `reasons` says why there is no decode program."""

    computes_together = False

    def __init__(self, model: PreTrainedModel, reasons: tuple[str, ...]) -> None:
        self.model, self.reasons = model.eval(), reasons
        self.device, self.dtype = model.device, model.dtype
        self._caches: dict[int, DynamicCache] = {}  # of slots
        parameters = inspect.signature(model.forward).parameters
        takes_limit = "logits_to_keep" in parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # its name before Transformers 5.24
        self._options: dict[str, Any] = {"use_cache": True} | ({"logits_to_keep": 1} if takes_limit else {})

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Logits [B, V] after the next token of each slot that `rows` names; nobody's rows get zeros."""
        tokens = slots.tokens.tolist()
        made = {slot: self._forward([tokens[slot]], slot) for slot in set(rows.tolist()) if slot in self._caches}
        nothing = torch.zeros_like(next(iter(made.values())))
        return torch.cat([made.get(slot, nothing) for slot in rows.tolist()])

    def prompt(self, chunks: Sequence[PrefillChunk], slots: Slots) -> Tensor | None:
        """Logits [B, V] after the last chunk of each text that has one among `chunks`; None if there is none."""
        ended = []
        for chunk in chunks:
            slot = chunk.request.row
            if chunk.begin == 0:
                self._caches[slot] = DynamicCache(config=self.model.config)
            logits = self._forward(list(chunk.tokens), slot)
            if chunk.last:
                ended.append(logits)
        return torch.cat(ended) if ended else None

    def _forward(self, tokens: list[int], slot: int) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        out = self.model(input_ids=ids, **{self._cache_name: self._caches[slot]}, **self._options)
        logits: Tensor = out.logits[:, -1]
        return logits
