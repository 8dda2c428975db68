"""Runs a model's own forward, one sequence at a time, for families without a decode program.

It is much slower than a decode program on a GPU. Decode programs are checked against it.
"""

from __future__ import annotations

import inspect
from collections import abc
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lowbit.engine.cache import CacheSpec
from lowbit.engine.graphs import Graphs
from lowbit.engine.ragged import Ragged
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots
from lowbit.kernels.choose.attention import PAGE
from lowbit.models.hf import give_back_freed_memory

TRIM_BYTES = 32 << 20
"""Bytes of freed caches after which freed memory is returned to the system, which takes 3 to 24 ms."""


class ForwardProgram:
    """The model's own forward, with a cache for each slot; `reasons`: why the model has no decode program."""

    is_paged = False
    captures_prompts = False
    mixes = False
    cache_spec: CacheSpec | None = None
    status = None

    def __init__(self, model: PreTrainedModel, reasons: tuple[str, ...]) -> None:
        self.model, self.reasons = model.eval(), reasons
        self.device, self.dtype = model.device, model.dtype
        self._caches: dict[int, DynamicCache] = {}  # slot -> cache
        parameters = inspect.signature(model.forward).parameters
        takes_limit = "logits_to_keep" in parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # the name before Transformers 5.24
        self._options: dict[str, Any] = {"use_cache": True} | ({"logits_to_keep": 1} if takes_limit else {})
        self._freed_bytes = 0
        self.page_bytes = PAGE * self._token_bytes()

    def keep(self, running: abc.Sequence[Sequence]) -> None:
        """Frees the caches of all sequences but `running`, and makes glibc return the freed memory to the system."""
        for slot in self._caches.keys() - {sequence.slot for sequence in running}:
            self._freed_bytes += _bytes(self._caches.pop(slot))
        if self.device.type == "cpu" and self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            give_back_freed_memory()

    def allocate_cache(self, pages: int) -> None:
        """Does nothing: Transformers allocates the caches."""

    def graphs(self) -> Graphs | None:
        """None: a model's forward is not captured."""
        return None

    def report(self, difference: float) -> list[str]:
        """Returns a line with the reasons why there is no decode program."""
        return [f"through Transformers' forward, one text at a time: {'; '.join(self.reasons)}"]

    def ragged_logits(self, ragged: Ragged, slots: Slots) -> Tensor:
        """Not implemented: prompts are computed one by one."""
        raise NotImplementedError

    def mixed_logits(self, ragged: Ragged, rows: Tensor, slots: Slots, longest: int = 0) -> tuple[Tensor, Tensor]:
        """Not implemented: sequences are computed one by one."""
        raise NotImplementedError

    def mixed_prompt(
        self, chunks: abc.Sequence[PrefillChunk], rows: Tensor, slots: Slots, longest: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Not implemented: sequences are computed one by one."""
        raise NotImplementedError

    def blank_logits(self, count: int) -> Tensor:
        """Not implemented: without graphs there is no warm-up run."""
        raise NotImplementedError

    def step(self, rows: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Returns logits [B, V] after the next token of each slot in `rows`; zeros for slots without a cache."""
        tokens = slots.tokens.tolist()
        logits = {slot: self._forward([tokens[slot]], slot) for slot in set(rows.tolist()) if slot in self._caches}
        zeros = torch.zeros_like(next(iter(logits.values())))
        return torch.cat([logits.get(slot, zeros) for slot in rows.tolist()])

    def verify(self, rows: Tensor, tokens: Tensor, positions: Tensor, slots: Slots, longest: int = 0) -> Tensor:
        """Not implemented: an engine without a decode program has no speculation."""
        raise NotImplementedError

    def prompt(self, chunks: abc.Sequence[PrefillChunk], slots: Slots) -> Tensor | None:
        """Returns logits [B, V] after the chunks that are the last of their prompts; None if no chunk is."""
        last = []
        for chunk in chunks:
            slot = chunk.sequence.running_slot
            if chunk.begin == 0:
                self._caches[slot] = DynamicCache(config=self.model.config)
            logits = self._forward(list(chunk.tokens), slot)
            if chunk.last:
                last.append(logits)
        return torch.cat(last) if last else None

    def _forward(self, tokens: list[int], slot: int) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        out = self.model(input_ids=ids, **{self._cache_name: self._caches[slot]}, **self._options)
        logits: Tensor = out.logits[:, -1]
        return logits

    @torch.no_grad()
    def _token_bytes(self) -> int:
        """Returns the bytes of keys and values of one token. They are measured by computing a token, since configurations
        describe them in many ways. State-space layers add nothing, since their state does not grow.
        """
        cache = DynamicCache(config=self.model.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.model(input_ids=ids, **{self._cache_name: cache}, **self._options)
        return _bytes(cache)


def _bytes(cache: DynamicCache) -> int:
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in held if tensor is not None)
