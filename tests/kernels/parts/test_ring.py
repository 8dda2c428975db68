"""A warp's ring buffer: its copies fill each slot exactly, and each step reads the right slot."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.parts.ring import Ring
from tests.kernels.parts.plain import check_operands, operands
from tests.kernels.parts.threads import run


def ring(fmt, tokens=16, group=128, zero="none", row_blocks=2, rounds=3, tail=False):
    return Ring(KBlock(fmt, "fp16", tokens, group, zero, "fp16"), row_blocks, rounds, tail)


def copied(text, base, lane_bytes, lanes=32):
    """Offsets of all bytes that the copies relative to operand `base` write, over all lanes."""
    found = []
    for low, to, size in re.findall(rf"(@low )?cp\.async\.\S+ \[\${base}\+(\d+)\], \[\$\d+(?:\+\d+)?\], (\d+)", text):
        for lane in range(16 if low else lanes):
            found += range(int(to) + lane_bytes * lane, int(to) + lane_bytes * lane + int(size))
    return sorted(found)


@pytest.mark.parametrize("fmt", ["int2", "int3", "int4", "int5", "int6", "int7", "int8"])
@pytest.mark.parametrize(("group", "zero"), [(0, "none"), (128, "none"), (16, "float")])
def test_copies_fill_a_slot(fmt, group, zero):
    made = ring(fmt, group=group, zero=zero)
    for d in range(2 * made.depth):
        start = made.slot(d)
        assert start == d % made.depth * made.slot_bytes
        assert copied(made.copy_codes(d), 1, 16) == list(range(start, start + made.code_bytes))
        scales = copied(made.copy_codes(d), 2, made.scale_copy)
        assert scales == list(range(start + made.code_bytes, start + made.slot_bytes))
    assert made.slot_bytes >= made.code_bytes + made.scale_bytes


@pytest.mark.parametrize("tokens", [8, 16])
def test_copies_fill_a_slot_of_x(tokens):
    made = ring("int4", tokens)
    for d in range(made.depth):
        places = sorted(place for n8_tile in range(made.k_block.n8_tiles) for place in copied(made.copy_x(d, n8_tile), 1, 16))
        assert places == list(range(made.x_slot(d), made.x_slot(d) + made.x_bytes))
    assert made.x_slot(made.depth - 1) + made.x_bytes == made.bytes, "the slots of x come last"
    assert made.x_slot(0) == made.depth * made.slot_bytes


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("tokens", [8, 16])
def test_places_of_x_are_copied_to_or_cleared_once(tokens, tail):
    """For any number of tokens, copies write each byte of existing tokens once. Bytes of absent tokens are set to zero, either
    once by `clear_x` or by every copy."""
    made, lane = ring("int4", tokens, tail=tail), np.arange(32)
    assert made.skips_absent_tokens == (tokens == 8)
    for m in range(tokens + 1):
        shared = np.full(made.bytes, 1, dtype=np.uint8)
        copied_to = np.zeros(made.bytes, dtype=int)
        for n8_tile in range(made.k_block.n8_tiles):
            exists = 16 * (8 * n8_tile + lane // 4 < m)
            if made.skips_absent_tokens:
                run(made.clear_x(n8_tile), [16 * (8 * (lane % 4) + lane // 4), exists], 1, shared)
            for d in range(0, made.depth, made.row_blocks):
                text = made.copy_x(d, n8_tile)
                only = "@token " if made.skips_absent_tokens else ""
                found = re.findall(
                    rf"^{only}cp\.async\.ca\.shared\.global \[\$1\+(\d+)\], \[\$2\+(\d+)\], 16(, size)?;", text, re.MULTILINE
                )
                assert len(found) == text.count("cp.async") and "setp.ne.s32 token, $3, 0; mov.b32 size, $3;" in text
                assert all(bool(size) == (tail or not made.skips_absent_tokens) for _, _, size in found)
                assert text.count("selp.b32 size, $3, 0, some;") == tail * len(found), "no bytes of tokens that do not exist"
                for to, _, _ in found:
                    for one in lane:
                        first = int(to) + 16 * (8 * (one % 4) + one // 4)
                        if exists[one]:
                            copied_to[first : first + 16] += 1
                        elif not made.skips_absent_tokens:
                            shared[first : first + 16] = 0
        x = slice(made.x_slot(0), made.bytes)
        assert (shared[: x.start] == 1).all(), "no codes, no scales"
        assert ((copied_to[x] == 1) == (shared[x] == 1)).all() and copied_to.max(initial=0) <= 1
        assert (shared[x] == 0).mean() == (tokens - m) / tokens


@pytest.mark.parametrize(("row_blocks", "rounds", "slots"), [(4, 1, 2), (6, 1, 3), (3, 2, 1), (2, 4, 4), (7, 4, 4)])
def test_fewer_slots_than_steps(row_blocks, rounds, slots):
    """A slot is refilled only after it was read. An x slot is refilled only after the first step of a k block has read it."""
    made = Ring(KBlock("int8", "fp16", 8, 0, "none", "fp16"), row_blocks, rounds, False, slots)
    assert made.depth == slots and made.iteration_blocks == row_blocks * rounds
    held, x_held, read_x = {}, {}, -1
    for d in range(made.depth):
        held[made.slot(d)] = d
        if d % row_blocks == 0:
            x_held[made.x_slot(d)] = d // row_blocks
    for d in range(4 * made.iteration_blocks):
        if d % row_blocks == 0:
            assert x_held[made.x_slot(d % made.iteration_blocks)] == d // row_blocks
            read_x = d // row_blocks
        assert held[made.slot(d % made.iteration_blocks)] == d, "what is read in an iteration is what was copied for it"
        following = d + made.depth
        held[made.slot(following)] = following
        if following % row_blocks == 0:
            assert x_held.get(made.x_slot(following), -1) <= read_x
            x_held[made.x_slot(following)] = following // row_blocks
    with pytest.raises(ValueError, match="5 slots do not divide 2 k blocks of 3 row blocks"):
        Ring(KBlock("int8", "fp16", 8, 0, "none", "fp16"), 3, 2, False, 5)


@pytest.mark.parametrize("tail", [False, True])
def test_ptx_names_its_operands(tail):
    for fmt in ("int3", "int4", "int7"):
        made = ring(fmt, tail=tail, zero="integer")
        results = len(made.read_types)
        named = operands(made.read(1, 2))
        assert set(range(results)) <= named <= set(range(results + 4)), "planes of 4, 2 and 1 words have addresses of their own"
        assert made.read_constraints.split(",").count("r") == 4
        check_operands(made.read_x(1), made.x_constraints)
        assert operands(made.copy_codes(1)) == set(range(7 if tail else 6)), "what is left counts only with a tail"
