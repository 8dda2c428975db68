"""Which request holds which page of the KV cache, and which pages of prompts are kept to be shared.

A page holds keys and values of 128 tokens in every layer. A page whose tokens are all known is published under what it holds
and what came before it; a later prompt that begins alike takes it over instead of computing it. Published pages are never
written again, so there is nothing to copy. Pages that nobody holds stay published until somebody needs their memory, those
released first going first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lowbit.kernels.choose.attention import PAGE

DUMMY_PAGE = 0
"""The page of rows that pad a step: never handed out."""


class BlockPool:
    """`count` pages, numbered from 0; page `DUMMY_PAGE` is never handed out."""

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError(f"a cache has at least 2 pages of {PAGE} tokens, got {count}")
        self.count = count
        self._free = list(range(count - 1, DUMMY_PAGE, -1))
        self._holders = [0] * count
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}  # of published pages: the one before, and the tokens
        self._published: dict[tuple[int, tuple[int, ...]], int] = {}
        self._numbers = [0] * count  # a page's number as "the one before": anew at each publication
        self._last_number = 0
        self._kept: OrderedDict[int, None] = OrderedDict()  # published and held by nobody, oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._kept)

    def allocate(self) -> int | None:
        """A page for the caller alone; None when all are held."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            del self._published[self._names.pop(page)]
        else:
            return None
        self._holders[page] = 1
        return page

    def match_prefix(self, tokens: Sequence[int], most: int) -> list[int]:
        """Published pages, at most `most`, that hold the beginning of `tokens`; the caller holds them too now."""
        pages: list[int] = []
        number = 0
        for begin in range(0, min(most * PAGE, len(tokens) - PAGE + 1), PAGE):
            page = self._published.get((number, tuple(tokens[begin : begin + PAGE])))
            if page is None:
                break
            pages.append(page)
            number = self._numbers[page]
        for page in pages:
            self._holders[page] += 1
            self._kept.pop(page, None)
        return pages

    def cache_prefix(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Lets others share `pages`, which hold `tokens` from the first on, as far as pages are full; those published already
        stay so. The caller holds them and writes no more to those that are full."""
        number = 0
        for i, page in enumerate(pages[: len(tokens) // PAGE]):
            if page in self._names:
                number = self._numbers[page]
                continue
            name = (number, tuple(tokens[i * PAGE : (i + 1) * PAGE]))
            other = self._published.get(name)
            if other is None:
                self._last_number += 1
                self._published[name], self._names[page], self._numbers[page] = page, name, self._last_number
                other = page
            number = self._numbers[other]

    def uncache(self, pages: Sequence[int]) -> None:
        """Takes back that `pages` were published, which the caller holds: what they were to hold was not written."""
        for page in pages:
            if page in self._names:
                del self._published[self._names.pop(page)]

    def free(self, pages: Sequence[int]) -> None:
        """Gives up the pages of a request, given from the first on; the last ones are the first to be reused."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._names:
                self._kept[page] = None
            else:
                self._free.append(page)


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)
