"""The tensors of slots on the device start at multiples of 128 bytes, since kernels need aligned tensors, and never move."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine.block_pool import DUMMY_PAGE
from lowbit.engine.slots import Slots

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, 2, 5, 31, 32, 64])
def test_every_part_is_aligned(count):
    slots = Slots(count, 300, 50, (), CPU)
    for part in (slots.tokens, slots.positions, slots.tables):
        assert (part.data_ptr() - slots.tokens.data_ptr()) % 128 == 0 and part.is_contiguous()
    assert slots.tables.shape == (count + 1, 3) and len(slots.tokens) == len(slots.positions) == count + 1


def test_updates_change_only_their_entries():
    slots = Slots(3, 300, 50, (), CPU)
    slots.tokens.copy_(torch.arange(4))
    slots.update([(0, 2, 7), (2, 0, 9)], [(1, 44), (2, 5)])
    assert slots.tables.tolist() == [[0, 0, 7], [0, 0, 0], [9, 0, 0], [DUMMY_PAGE] * 3]
    assert slots.positions.tolist() == [0, 44, 5, 0] and slots.tokens.tolist() == [0, 1, 2, 3]
    slots.update([], [])
