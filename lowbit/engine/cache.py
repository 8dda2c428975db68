"""The memory of keys and values: pages of 128 tokens for every layer, and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.engine.block_pool import pages_for
from lowbit.kernels.choose.attention import PAGE

SHARE = 0.9
"""Of a GPU's free memory that pages take: what torch's allocator holds for the step and the prompts comes out of the rest."""

CPU_BYTES = 1 << 30
"""What pages take on a CPU unless the caller says: the memory of a laptop belongs to others too."""


@dataclass(frozen=True)
class CacheSpec:
    """What the cache holds of a token: keys and values of `kv_heads` heads in each layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return 2 * self.layers * self.kv_heads * PAGE * self.head_dim * self.dtype.itemsize

    def pages_in(self, bytes_: int) -> int:
        """Pages in so many bytes."""
        return bytes_ // self.page_bytes


class Cache:
    """Keys and values [layers, pages, kv_heads, 128, head_dim]: allocated once, at addresses that do not change."""

    def __init__(self, spec: CacheSpec, pages: int, device: torch.device) -> None:
        self.spec, self.pages = spec, pages
        shape = (spec.layers, pages, spec.kv_heads, PAGE, spec.head_dim)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=device)
        self.values = torch.empty_like(self.keys)

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer i."""
        return self.keys[i], self.values[i]

    def __str__(self) -> str:
        size = self.keys.nbytes + self.values.nbytes
        return f"{self.pages:,} pages of {PAGE} tokens, {self.pages * PAGE:,} tokens in {size / 2**30:.2f} GiB"


@dataclass(frozen=True)
class CacheBudget:
    """Memory for keys and values, and where that number comes from."""

    bytes_: int
    source: str

    @classmethod
    def for_device(cls, device: torch.device, given: int | None) -> CacheBudget:
        """What the caller gives (cache_bytes), or a share of what is free on a GPU."""
        if given is not None:
            return cls(given, "cache_bytes")
        if device.type != "cuda":
            return cls(CPU_BYTES, "what an engine takes on a CPU unless cache_bytes says more")
        return cls(int(SHARE * torch.cuda.mem_get_info(device)[0]), f"{SHARE} of what the GPU had free")

    def longest(self, spec: CacheSpec) -> int:
        """Tokens of the longest text that it holds, a page at least."""
        return max(spec.pages_in(self.bytes_) - 1, 1) * PAGE

    def pages(self, spec: CacheSpec, requests: int, most_tokens: int) -> int:
        """Pages for `requests` requests of up to `most_tokens` tokens, as far as memory goes; raises ValueError where not even
        one request fits."""
        wanted = 1 + requests * pages_for(most_tokens)  # one is nobody's
        found = min(wanted, spec.pages_in(self.bytes_))
        if found < 1 + pages_for(most_tokens):
            need = (1 + pages_for(most_tokens)) * spec.page_bytes
            raise ValueError(
                f"a request of {most_tokens:,} tokens takes {_size(need)} of keys and values, there are {_size(self.bytes_)} "
                f"({self.source}): ask for fewer tokens (max_length) or give more (cache_bytes={need}), or do without an "
                "engine (engine=False of a pipeline)"
            )
        return found

    def refusal(self, spec: CacheSpec, tokens: int) -> str:
        """Why a text of so many tokens does not fit, and what to do."""
        need = (1 + pages_for(tokens)) * spec.page_bytes
        return (
            f"it takes {_size(need)} of keys and values, there are {_size(self.bytes_)} ({self.source}): shorten it, give more "
            f"(cache_bytes={need}), or do without an engine (engine=False of a pipeline)"
        )


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 1 << 27 else f"{bytes_ / 2**20:.2f} MiB"
