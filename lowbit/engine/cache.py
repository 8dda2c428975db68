"""The KV cache: pages of 128 tokens in every layer, and the number of pages that fit into memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.engine.block_pool import pages_for
from lowbit.formats.kv import KV16, KVScheme
from lowbit.kernels.choose.attention import PAGE
from lowbit.pack.kv_pages import KVPages, page_bytes

SHARE = 0.9
"""Share of a GPU's free memory that pages take. What CUDA graphs will take is subtracted before. The rest is for activations
of decode steps and prompts."""

CPU_BYTES = 1 << 30
"""Default memory for pages on a CPU, which other programs share."""

CPU_SHARE = 0.5
"""Share of a CPU's available memory that keys and values may take if there are no pages and each sequence allocates its own."""


@dataclass(frozen=True)
class CacheSpec:
    """Layout of the cache. Each of `layers` layers has keys and values of `kv_heads` heads of `head_dim` elements, in the
    format `kv`. Keys and values in 16 bits have the model's `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv: KVScheme = KV16

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.layers * page_bytes(self.kv, self.kv_heads, self.head_dim, self.dtype)


class Cache:
    """Pages of keys and values of every layer, allocated once: CUDA graphs store their addresses."""

    def __init__(self, spec: CacheSpec, pages: int, device: torch.device) -> None:
        self.spec, self.pages = spec, pages
        made = (KVPages.make(spec.kv, pages, spec.kv_heads, spec.head_dim, spec.dtype, device) for _ in range(spec.layers))
        self.layers = tuple(made)

    def layer(self, i: int) -> KVPages:
        """Keys and values of layer i."""
        return self.layers[i]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.spec.page_bytes

    def __str__(self) -> str:
        size = f"{self.pages * PAGE:,} tokens in {self.nbytes / 2**30:.2f} GiB"
        kv = f", keys and values in {self.spec.kv}" if self.spec.kv.quantized else ""
        return f"{self.pages:,} pages of {PAGE} tokens, {size}{kv}"


@dataclass(frozen=True)
class CacheBudget:
    """Memory for keys and values; `source` describes the origin of the number, for messages."""

    bytes_: int
    source: str

    @classmethod
    def for_device(
        cls, device: torch.device, given: int | None, *, allocated: bool = True, graph_bytes: int = 0
    ) -> CacheBudget:  # fmt: skip
        """Returns the budget `given` (cache_bytes), or else a share of free memory. `allocated`: True if the whole cache is
        allocated at the start. `graph_bytes`: memory that the outputs of CUDA graphs will take.
        """
        if given is not None:
            return cls(given, "cache_bytes")
        if device.type == "cuda":
            free = max(0, torch.cuda.mem_get_info(device)[0] - graph_bytes)
            return cls(int(SHARE * free), f"{SHARE} of what the GPU had free, less {_size(graph_bytes)} for graphs")
        if allocated:
            return cls(CPU_BYTES, "what an engine takes on a CPU unless cache_bytes says more")
        return cls(int(CPU_SHARE * available_bytes()), f"{CPU_SHARE} of the memory that was available")

    def longest(self, page_bytes: int) -> int:
        """Returns the number of tokens of the longest sequence that fits, at least one page; `page_bytes`: bytes of a page in
        all layers.
        """
        return max(self._fitting(page_bytes) - 1, 1) * PAGE

    def pages(self, page_bytes: int, requests: int, most_tokens: int) -> int:
        """Returns the number of pages for `requests` requests of up to `most_tokens` tokens, limited by memory. Raises
        ValueError if not even one request fits.
        """
        needed = 1 + requests * pages_for(most_tokens)  # with the dummy page
        pages = min(needed, self._fitting(page_bytes))
        if pages < 1 + pages_for(most_tokens):
            need = (1 + pages_for(most_tokens)) * page_bytes
            raise ValueError(
                f"a request of {most_tokens:,} tokens takes {_size(need)} of keys and values, there are {_size(self.bytes_)} "
                f"({self.source}): ask for fewer tokens (max_length) or give more (cache_bytes={need}, --cache-gib of lowbit "
                "serve), or do without an engine (engine=False of a pipeline)"
            )
        return pages

    def refusal(self, page_bytes: int, tokens: int) -> str:
        """Returns a message that says why a sequence of `tokens` tokens does not fit, and what to do."""
        need = (1 + pages_for(tokens)) * page_bytes
        return (
            f"it takes {_size(need)} of keys and values, there are {_size(self.bytes_)} ({self.source}): shorten it, give more "
            f"(cache_bytes={need}), or do without an engine (engine=False of a pipeline)"
        )

    def _fitting(self, page_bytes: int) -> int:
        return self.bytes_ // max(page_bytes, 1)


def available_bytes() -> int:
    """Returns the bytes of memory available without swapping: Linux's MemAvailable, or the free pages on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 1 << 27 else f"{bytes_ / 2**20:.2f} MiB"
