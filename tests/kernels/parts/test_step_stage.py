"""Row blocks, places of the ring and addresses of vectors, as the table of a decode step in one launch has them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.kernels.choose.decode_step import PRODUCT_NAMES, StepTable
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.decode_step_case import alike, small_table
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.step_stage import RingPlace, later_place, own_row_blocks


@dataclass(frozen=True)
class Stages:
    table: StepTable
    product: str = "qkv"


@gluon.jit
def row_blocks(out, C: gl.constexpr):
    """out int32 [blocks, 2]: the first row block of a block and the one after its last."""
    PRODUCT: gl.constexpr = C.product
    first, end = own_row_blocks(PRODUCT, C)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    at = out + 2 * gl.program_id(0) + lane * 0
    gl.store(at, first + lane * 0)
    gl.store(at + 1, end + lane * 0)


@gluon.jit
def places(out, slots, phases, steps, C: gl.constexpr):
    """out int32 [2, 32]: the slot and the phase `steps` after a place."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    place = later_place(RingPlace(gl.load(slots + lane), gl.load(phases + lane)), gl.load(steps + lane), C)
    gl.store(out + lane, place.slot)
    gl.store(out + 32 + lane, place.phase)


@pytest.mark.parametrize("product", PRODUCT_NAMES)
def test_row_blocks_are_those_of_the_table(product):
    table = small_table(blocks=3, hidden=320, vocab=1000, schemes=alike("w4a16_g128", "w8a16"))
    kernel = compile_kernel(row_blocks, {"out": "*i32"}, Stages(table, product), ["out"], 1, 90)
    out = torch.full((3, 2), -1, dtype=torch.int32)
    execute(kernel.ptx, kernel.shared_bytes, (out,), 3, 32)
    assert [range(first, end) for first, end in out.tolist()] == [table.own_row_blocks(product, block) for block in range(3)]


def test_places_go_round_the_ring():
    table = small_table()
    size = table.ring_slots
    generator = torch.Generator().manual_seed(0)
    slots, phases, steps = (torch.randint(most, (32,), generator=generator).int() for most in (size, 2, size))
    names = {"out": "*i32", "slots": "*i32", "phases": "*i32", "steps": "*i32"}
    kernel = compile_kernel(places, names, Stages(table), list(names), 1, 90)
    out = torch.full((2, 32), -1, dtype=torch.int32)
    execute(kernel.ptx, kernel.shared_bytes, (out, slots, phases, steps), 1, 32)
    turns = slots + steps
    assert torch.equal(out[0], turns % size) and torch.equal(out[1], phases ^ (turns >= size).int())
