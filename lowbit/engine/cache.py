"""The memory of keys and values: pages of 128 tokens for every layer, and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.engine.pages import pages_for
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


def available_bytes(device: torch.device, given: int | None) -> int:
    """Memory for keys and values: what the caller gives, or a share of what is free on a GPU."""
    if given is not None:
        return given
    return CPU_BYTES if device.type != "cuda" else int(SHARE * torch.cuda.mem_get_info(device)[0])


def how_many_pages(spec: CacheSpec, device: torch.device, requests: int, most_tokens: int, memory_bytes: int | None) -> int:
    """Pages for `requests` requests of up to `most_tokens` tokens, as far as memory goes (`available_bytes`).

    Raises ValueError where not even one request fits.
    """
    memory_bytes = available_bytes(device, memory_bytes)
    wanted = 1 + requests * pages_for(most_tokens)  # one is nobody's
    found = min(wanted, spec.pages_in(memory_bytes))
    if found < 1 + pages_for(most_tokens):
        need = (1 + pages_for(most_tokens)) * spec.page_bytes
        raise ValueError(
            f"a request of {most_tokens:,} tokens takes {need / 2**30:.2f} GiB of keys and values, there are "
            f"{memory_bytes / 2**30:.2f} GiB for them: ask for fewer tokens (max_length) or give more (cache_bytes)"
        )
    return found
