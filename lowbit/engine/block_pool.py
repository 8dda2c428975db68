"""The pages of the KV cache: free, used by requests, or kept as cached prefixes.

A page holds keys and values of 128 tokens in every layer. The cache key of a full page consists of its tokens and the page
before it; the first page of a sequence has the adapter in place of a page before it. A later prompt with the same prefix reuses
the pages. Cached pages are never written again, so they can be shared without a copy. If memory is needed, cached pages without
a user are evicted, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lowbit.kernels.choose.attention import PAGE

DUMMY_PAGE = 0
"""The page that padding rows use. It is never allocated."""


class BlockPool:
    """Manages `count` pages, numbered from 0; page `DUMMY_PAGE` is never allocated."""

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError(f"a cache has at least 2 pages of {PAGE} tokens, got {count}")
        self.count = count
        self._free = list(range(count - 1, DUMMY_PAGE, -1))
        self._users = [0] * count
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # cached page -> (number of the previous page, tokens)
        self._cached: dict[tuple[int, tuple[int, ...]], int] = {}
        self._numbers = [0] * count  # a page gets a new number each time it is cached
        self._last_number = 0
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached pages without a user, least recently used first

    @property
    def available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int | None:
        """Allocates a page and returns it. If no page is free, evicts a cached one; returns None if all pages are in use."""
        if self._free:
            page = self._free.pop()
        elif self._evictable:
            page, _ = self._evictable.popitem(last=False)
            del self._cached[self._keys.pop(page)]
        else:
            return None
        self._users[page] = 1
        return page

    def match_prefix(self, tokens: Sequence[int], most: int, adapter: int = -1) -> list[int]:
        """Returns the pages of the longest prefix of `tokens` that is cached for `adapter` (-1: no adapter), at most `most`
        pages. The caller becomes a user of these pages.
        """
        pages: list[int] = []
        number = _root(adapter)
        for begin in range(0, min(most * PAGE, len(tokens) - PAGE + 1), PAGE):
            page = self._cached.get((number, tuple(tokens[begin : begin + PAGE])))
            if page is None:
                break
            pages.append(page)
            number = self._numbers[page]
        for page in pages:
            self._users[page] += 1
            self._evictable.pop(page, None)
        return pages

    def cache_prefix(self, pages: Sequence[int], tokens: Sequence[int], adapter: int = -1) -> None:
        """Caches those of `pages` that are full. The pages hold `tokens` from the first token on, computed with `adapter` (-1:
        no adapter). The caller must be a user of the pages and must not write to full pages again.
        """
        number = _root(adapter)
        for i, page in enumerate(pages[: len(tokens) // PAGE]):
            if page in self._keys:
                number = self._numbers[page]
                continue
            key = (number, tuple(tokens[i * PAGE : (i + 1) * PAGE]))
            other = self._cached.get(key)
            if other is None:
                self._last_number += 1
                self._cached[key], self._keys[page], self._numbers[page] = page, key, self._last_number
                other = page
            number = self._numbers[other]

    def uncache(self, pages: Sequence[int]) -> None:
        """Removes `pages`, whose contents were not written, from the prefix cache. The caller must be a user of the pages."""
        for page in pages:
            if page in self._keys:
                del self._cached[self._keys.pop(page)]

    def free(self, pages: Sequence[int]) -> None:
        """Frees the pages of a request, given in order of tokens. They are released from the last to the first, so that later
        pages are evicted first: a prefix can be reused without the pages after it."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._keys:
                self._evictable[page] = None
            else:
                self._free.append(page)


def _root(adapter: int) -> int:
    """Returns the number that the first page's key has in place of the number of a previous page. It is 0 without an adapter,
    else negative; numbers of pages are positive."""
    return -1 - adapter


def pages_for(tokens: int) -> int:
    """Returns the number of pages for `tokens` tokens."""
    return -(-tokens // PAGE)
