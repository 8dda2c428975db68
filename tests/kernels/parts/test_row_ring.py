"""The ring for rows of 16-bit weights: its PTX copies and reads, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.parts.ring import RowRing
from tests.kernels.parts.plain import check_operands, operands
from tests.kernels.parts.threads import run

ROWS = KBlock("dense", "fp16", 8, 0, "none", "fp16")


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("tail", [False, True])
def test_rows_go_where_fragments_are_read(tail, ragged):
    """After the copies and ldmatrix, registers hold operand A of m16n8k16 (PTX ISA). Copies fill the whole slot, with zeros for
    absent rows and columns. The eight lanes of one access have no bank conflicts.
    """
    made = RowRing(ROWS, 2, 2, tail, 0, ragged)
    k_exists, rows_exist, k = (
        (104, 27, 300) if tail and ragged else (104, 99, 300) if tail else (999, 27 if ragged else 99, 300)
    )
    matrix = np.arange(40 * k, dtype=np.int64).astype(np.uint16).reshape(40, k)
    memory, lane = matrix.view(np.uint8).reshape(-1), np.arange(32)
    row, piece = lane >> 3, lane & 7
    for d in range(made.depth):
        shared = np.full(made.bytes, 255, dtype=np.uint8)
        to = row * 128 + (piece ^ row) * 16
        source = 2 * (row * k + 8 * piece)
        inputs = [to, to ^ 64, source, source + 16 * k, 32 * k, 8 * k, k_exists - 8 * piece - 128 * (d // 2), rows_exist - row]
        run(made.copy_rows(d, 1), [np.broadcast_to(one, 32).astype(np.uint32) for one in inputs], 1, shared, memory=memory)
        start = made.slot(d)
        assert (shared[:start] == 255).all() and (shared[start + made.slot_bytes : made.bytes] == 255).all()
        own = (lane & 15) * 128
        reads = [own + ((piece ^ (lane >> 4)) ^ 2 * pair) * 16 for pair in range(4)]
        words = np.stack(run(made.read(d, 0), [one.astype(np.uint32) for one in reads], made.k_block.words, shared))
        row_block, first = d % 2, 128 * (d // 2)
        whole = np.zeros((16, 128), dtype=np.uint16)
        part = matrix[16 * row_block : min(16 * row_block + 16, rows_exist), first : min(first + 128, k_exists, k)]
        whole[: part.shape[0], : part.shape[1]] = part
        for i in range(8):
            for j in range(4):
                rows = lane // 4 + 8 * (j % 2)
                ks = 16 * i + 8 * (j // 2) + 2 * (lane % 4)
                found = words[4 * i + j].astype(np.uint32)
                assert (found & 0xFFFF == whole[rows, ks]).all() and (found >> 16 == whole[rows, ks + 1]).all()
        banks = [
            {int(at) // 16 % 8 for at in one[n8_tile : n8_tile + 8]} for one in (to, *reads) for n8_tile in range(0, 32, 8)
        ]
        assert all(len(n8_tile) == 8 for n8_tile in banks)


def test_rows_name_their_operands():
    for tail, ragged in ((False, False), (True, False), (False, True), (True, True)):
        made = RowRing(ROWS, 3, 1, tail, 0, ragged)
        assert operands(made.copy_rows(1, 8)) == {*range(7), *([7] if tail else []), *([8] if ragged else [])}
        check_operands(made.read(1, 2), made.read_constraints)
