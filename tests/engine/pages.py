"""Pages whose contents must not be read before they are written."""

from __future__ import annotations

import torch


def fill_unwritten(cache):
    """Fills the pages of a cache with NaN. Packed pages get scales of NaN, and ones as codes."""
    for pages in cache.layers:
        for part in pages.tensors:
            if part is not None:
                part.fill_(torch.nan if part.is_floating_point() else 255)


def zero(cache):
    """Fills the pages of a cache with zeros."""
    for pages in cache.layers:
        for part in pages.tensors:
            if part is not None:
                part.zero_()
