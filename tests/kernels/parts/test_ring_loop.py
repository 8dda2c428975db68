"""The main loop of the small-M kernels run as Python: which pairs of row block and k block are copied and multiplied."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import ring_loop
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.parts.ring import Ring
from lowbit.kernels.parts.ring_loop import RingBlock
from tests.kernels.parts.plain import GL, plain


class Block(RingBlock):
    def __init__(self, ring, warps_n, warps_k, gate="none"):
        self.ring, self.warps_n, self.warps_k, self.epilogue = ring, warps_n, warps_k, Epilogue(False, False, gate=gate)
        self.slices = warps_k


class Slots:
    """A model of a ring: the (row block, k block) that each slot holds. A slot may be refilled only after it was read."""

    def __init__(self, config, slice_k):
        self.ring, self.slices, self.slice_k = config.ring, config.slices, slice_k
        self.held, self.free, self.waited = {}, set(range(config.ring.depth)), 0

    def copy_block(self, ring, source, C, d, codes, tokens):
        slot = d % self.ring.depth
        assert slot in self.free, "a slot is overwritten before it was read"
        self.free.remove(slot)
        self.held[slot] = d % self.ring.row_blocks, source + d // self.ring.row_blocks * self.slices

    def read_block(self, ring, C, d, pending):
        assert pending <= self.ring.depth - 1
        self.free.add(d % self.ring.depth)
        return self.held[d % self.ring.depth]


def device(slots, seen):
    def multiply(read, x, sums, acc, C, row_block):
        seen.append((read, row_block))
        return acc

    no_sums = SimpleNamespace(**vars(GL), inline_asm_elementwise=lambda *given, **named: ())
    return plain(
        ring_loop.iteration, gl=no_sums, ptx=lambda write, *numbers: None, copy_block=slots.copy_block,
        read_block=slots.read_block, multiply=multiply,
    )  # fmt: skip


@pytest.mark.parametrize(("row_blocks", "rounds", "slots"), [(1, 4, 0), (3, 2, 0), (4, 1, 2), (4, 1, 4), (2, 2, 2)])
def test_each_pair_is_multiplied_once_in_order(row_blocks, rounds, slots):
    ring = Ring(KBlock("int4", "fp16", 8, 128, "none", "fp16"), row_blocks, rounds, True, slots)
    config, iterations = Block(ring, 1, 2), 3
    for slice_k in range(2):
        held, seen = Slots(config, slice_k), []
        iteration, source = device(held, seen), slice_k
        for d in range(ring.depth):
            held.copy_block(None, source, config, d, True, True)
        read = held.read_block(None, config, 0, ring.depth - 1)
        for i in range(iterations):
            read, _ = iteration(SimpleNamespace(at16=None), source, read, (), config, i == iterations - 1)
            source += rounds * config.slices
        k_blocks = range(slice_k, slice_k + iterations * rounds * 2, 2)
        assert seen == [((row_block, k), row_block) for k in k_blocks for row_block in range(row_blocks)]


@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize(("tokens", "row_blocks"), [(8, 1), (8, 3), (16, 2), (16, 5)])
@pytest.mark.parametrize(("warps_n", "warps_k"), [(1, 8), (2, 4), (8, 1)])
def test_threads_finish_all_sums(warps_n, warps_k, tokens, row_blocks, gate):
    """The warps of a row divide its outputs among them. The same thread finishes a gate and its up."""
    config = Block(Ring(KBlock("int4", "fp16", tokens, 128, "none", "fp16"), row_blocks, 1, False), warps_n, warps_k, gate)
    together = 1 if gate == "none" else 2
    assert config.outputs % together == 0 and config.outputs * warps_k >= config.accumulators
    assert config.accumulators == row_blocks * tokens // 2 and config.row_blocks == warps_n * row_blocks
    firsts = [config.first_of_row(i) for i in range(config.outputs)]
    assert all(first <= i and firsts[first] == first for i, first in enumerate(firsts))
    assert config.threads == 32 * warps_n * warps_k
