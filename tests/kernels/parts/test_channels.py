"""x of few tokens in the order of the codes: what the PTX brings and gathers (the whole kernel: sm80/test_ring_in_numpy.py)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.channels import Channels, channels_refusals, tokens_held
from tests.kernels.parts.plain import check_operands
from tests.kernels.parts.threads import run

START, SLOT = 256, 1024


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ptx_names_its_operands(order, factor, dtype):
    made = Channels(dtype, 2, 256, order, factor, START)
    check_operands(made.gather(SLOT), made.gather_constraints)
    check_operands(made.ask, "=&r,=&r,=&r,=&r,l,r")
    assert ("[$2]" in made.bring) == factor and ("bf16" in made.bring) == (factor and dtype == "bf16")


@pytest.mark.parametrize("factor", [False, True])
def test_x_comes_whole_times_its_factors(factor):
    k, rows = 64, 2
    made = Channels("fp16", rows, k, True, factor, START)
    rng = np.random.default_rng(0)
    x, factors = rng.standard_normal((rows, k)).astype(np.float16), rng.random(k).astype(np.float32)
    memory = np.concatenate([x.reshape(-1).view(np.uint8), factors.view(np.uint8)])
    shared = np.full(START + made.bytes + 64, 255, dtype=np.uint8)
    thread = np.arange(32, dtype=np.uint32)
    assert made.turns(32) == 1
    row, column = thread // made.row_pieces, thread % made.row_pieces
    exists = (thread < rows * made.row_pieces).astype(np.uint32)
    given = [row * (2 * k) + column * 16, x.nbytes + column * 32, thread, exists]
    run(made.bring, [np.where(exists, one, 0).astype(np.uint32) for one in given], 1, shared, memory=memory)
    expected = (x.astype(np.float32) * factors).astype(np.float16) if factor else x
    assert np.array_equal(shared[START : START + made.bytes].view(np.float16).reshape(rows, k), expected)
    assert (shared[:START] == 255).all() and (shared[START + made.bytes :] == 255).all()


@pytest.mark.parametrize(("tokens", "left"), [(1, 128), (2, 128), (2, 40)])
@pytest.mark.parametrize("order", [False, True])
def test_a_slot_holds_what_ldmatrix_reads(tokens, left, order):
    """128 k of a token in four groups of four matrices of 8 tokens; zeros from where K ends, other tokens left alone."""
    k, rows = 256, 2
    made = Channels("fp16", rows, k, order, False, START)
    shared = np.full(8192, 255, dtype=np.uint8)
    x = np.arange(rows * k, dtype=np.uint16).reshape(rows, k)
    shared[START : START + made.bytes] = x.reshape(-1).view(np.uint8)
    lane = np.arange(32, dtype=np.uint32)
    channels = np.random.default_rng(1).permutation(k)[:128].astype(np.uint32) if order else np.arange(128, dtype=np.uint32)
    to = 4096 + lane // 8 * 512 + lane // 2 % 4 * 128 + lane % 2 * 8
    numbers = [channels[4 * lane + i] for i in range(4 if order else 1)]
    run(made.gather(SLOT), [to, left - 4 * lane, lane * 0 + tokens, *numbers], 1, shared)
    slot = shared[4096 + SLOT :][:2048].view(np.uint16).reshape(4, 4, 8, 8)  # groups, matrices, tokens, k
    for token in range(8):
        found = slot[:, :, token].reshape(-1)
        expected = np.where(np.arange(128) < left, x[token, channels], 0) if token < tokens else np.full(128, 0xFFFF)
        assert np.array_equal(found, expected)


def test_what_is_not_gathered_inside():
    assert [tokens_held(m) for m in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert channels_refusals(1, 28672) == () and channels_refusals(4, 8192) == ()
    assert "at most 4 tokens, got 5" in channels_refusals(5, 4096)[0]
    assert "pieces of 8, got 4100" in channels_refusals(1, 4100)[0]
    assert "65,536 bytes of x" in channels_refusals(3, 16384)[0]
