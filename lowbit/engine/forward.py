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

from lowbit.engine.batching import Piece
from lowbit.engine.request import Request
from lowbit.engine.slots import Slots
from lowbit.kernels.choose.attention import PAGE
from lowbit.models.hf import give_back_freed_memory

TRIM_BYTES = 32 << 20
"""Bytes of freed caches after which freed memory is returned to the system, which takes 3 to 24 ms."""


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
        self._freed_bytes = 0
        self.page_bytes = PAGE * self._token_bytes()

    def keep(self, running: Sequence[Request]) -> None:
        """Frees the caches of other requests; a C library that keeps freed memory returns it to the system."""
        for slot in self._caches.keys() - {request.slot for request in running}:
            self._freed_bytes += _bytes(self._caches.pop(slot))
        if self.device.type == "cpu" and self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            give_back_freed_memory()

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Logits [B, V] after the next token of each slot that `rows` names; nobody's rows get zeros."""
        tokens = slots.tokens.tolist()
        made = {slot: self._forward([tokens[slot]], slot) for slot in set(rows.tolist()) if slot in self._caches}
        nothing = torch.zeros_like(next(iter(made.values())))
        return torch.cat([made.get(slot, nothing) for slot in rows.tolist()])

    def prompt(self, pieces: Sequence[Piece], slots: Slots) -> Tensor | None:
        """Logits [B, V] after the last piece of each text that has one among `pieces`; None if there is none."""
        ended = []
        for piece in pieces:
            slot = piece.request.row
            if piece.begin == 0:
                self._caches[slot] = DynamicCache(config=self.model.config)
            logits = self._forward(list(piece.tokens), slot)
            if piece.last:
                ended.append(logits)
        return torch.cat(ended) if ended else None

    def _forward(self, tokens: list[int], slot: int) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        out = self.model(input_ids=ids, **{self._cache_name: self._caches[slot]}, **self._options)
        logits: Tensor = out.logits[:, -1]
        return logits

    @torch.no_grad()
    def _token_bytes(self) -> int:
        """Bytes of keys and values of one token, measured: configurations describe them in many ways. State-space layers,
        whose state does not grow, have none."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.model(input_ids=ids, **{self._cache_name: cache}, **self._options)
        return _bytes(cache)


def _bytes(cache: DynamicCache) -> int:
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in held if tensor is not None)
