"""The memory of keys and values: pages of 128 tokens for every layer, and how many of them fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.engine.pages import pages_for
from lowbit.kernels.choose.attention import PAGE

SHARE = 0.9
"""Of a GPU's free memory that pages take: what torch's allocator holds for the step and the prompts comes out of the rest."""

CPU_BYTES = 1 << 30
"""What pages take on a CPU unless the caller says: the memory of a laptop belongs to others too."""

CPU_SHARE = 0.5
"""Of a CPU's available memory, what keys and values may grow to where each sequence allocates its own."""


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
class Room:
    """Memory for keys and values, and where that number comes from."""

    bytes_: int
    source: str

    @classmethod
    def on(cls, device: torch.device, given: int | None, *, allocated: bool = True) -> Room:
        """`given` (cache_bytes), or a share of what is free. `allocated`: the cache is allocated as a whole, at the start."""
        if given is not None:
            return cls(given, "cache_bytes")
        if device.type == "cuda":
            return cls(int(SHARE * torch.cuda.mem_get_info(device)[0]), f"{SHARE} of what the GPU had free")
        if allocated:
            return cls(CPU_BYTES, "what an engine takes on a CPU unless cache_bytes says more")
        return cls(int(CPU_SHARE * available_bytes()), f"{CPU_SHARE} of the memory that was available")

    def longest(self, page_bytes: int) -> int:
        """Tokens of the longest sequence that fits, at least a page; `page_bytes`: bytes of a page in all layers."""
        return max(self._fitting(page_bytes) - 1, 1) * PAGE

    def pages(self, page_bytes: int, requests: int, most_tokens: int) -> int:
        """Pages for `requests` requests of up to `most_tokens` tokens, as far as memory goes; raises ValueError where not even
        one request fits."""
        wanted = 1 + requests * pages_for(most_tokens)  # one is nobody's
        found = min(wanted, self._fitting(page_bytes))
        if found < 1 + pages_for(most_tokens):
            need = (1 + pages_for(most_tokens)) * page_bytes
            raise ValueError(
                f"a request of {most_tokens:,} tokens takes {_size(need)} of keys and values, there are {_size(self.bytes_)} "
                f"({self.source}): ask for fewer tokens (max_length) or give more (cache_bytes={need}, --cache-gib of lowbit "
                "serve), or do without an engine (engine=False of a pipeline)"
            )
        return found

    def refusal(self, page_bytes: int, tokens: int) -> str:
        """Why a sequence of so many tokens does not fit, and what to do."""
        need = (1 + pages_for(tokens)) * page_bytes
        return (
            f"it takes {_size(need)} of keys and values, there are {_size(self.bytes_)} ({self.source}): shorten it, give more "
            f"(cache_bytes={need}), or do without an engine (engine=False of a pipeline)"
        )

    def _fitting(self, page_bytes: int) -> int:
        return self.bytes_ // max(page_bytes, 1)


def available_bytes() -> int:
    """Bytes of memory that this machine can give without swapping: MemAvailable of Linux, elsewhere the free pages."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 1 << 27 else f"{bytes_ / 2**20:.2f} MiB"
