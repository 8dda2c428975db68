"""Attention of a decode step over pages: against float64, in Triton's interpreter without a GPU; its machine code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.attention import DecodeTile
from tests.kernels.attention import compare, make_case, shape
from tests.kernels.calls import meta
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")

from lowbit.kernels.sm80.paged_attention import PagedAttentionPlan

gpu = pytest.mark.gpu

RAGGED = [0, 1, 15, 127, 128, 129, 300, 1000]
"""Tokens before the new one."""


def run(case, tile, machine):
    """out of a plan, called twice for the same bits; its counters are zero again, what it allocates is poisoned."""
    plan = PagedAttentionPlan(len(case.rows), case.shape, tile, machine)
    sums, counters = plan.workspace
    arrived = torch.zeros(max(counters, 1), dtype=torch.int32, device=case.k.device)
    before, found = case.copy(), []
    for _ in range(2):
        case.k.copy_(before.k), case.v.copy_(before.v)
        partial = torch.full((max(sums, 1),), torch.nan, device=case.k.device)
        found.append(plan(*case.arguments, partial, arrived))
        assert not arrived.any()
    assert torch.equal(*found)
    return found[0]


def check(shape, contexts, tile, dtype=torch.float16, device="cpu", **options):
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    case = make_case(shape, contexts, dtype, device, **options)
    given = case.copy()
    compare(case, given, run(case, tile, machine), len(contexts))


FEATURES = {
    "plain": (shape(), {}),
    "one head each": (shape(2, 2), {}),
    "groups of 3": (shape(6, 2), {}),
    "groups of 16": (shape(16, 1), {}),
    "half turns": (shape(rotary_dim=32), {}),
    "a quarter of 80 turns": (shape(head_dim=80, rotary_dim=20), {}),
    "no turn": (shape(rotary_dim=0), {}),
    "96": (shape(head_dim=96), {}),
    "128": (shape(4, 1, 128), {}),
    "256": (shape(4, 1, 256), {}),
    "soft cap": (shape(softcap=5.0, scale=0.3), {}),
    "window": (shape(window=200), {}),
    "window of a page": (shape(window=128), {}),
    "window of itself": (shape(window=1), {}),
    "norms": (shape(norm_eps=1e-6), {"norms": torch.float32}),
    "norms of Gemma, soft cap, window": (
        shape(head_dim=96, norm_eps=1e-6, norm_offset=1.0, softcap=3.0, window=130), {"norms": torch.bfloat16},
    ),
    "shared pages and padding": (shape(), {"shared": True, "padding": 3}),
}  # fmt: skip


def tile_for(shape, splits, warps=1, chunk=64):
    block = min(128, 2048 * warps // shape.lanes)
    return DecodeTile(splits, max(chunk, block), block, warps)


def warps_for(shape):
    """Warps that can: 16 tokens at a time by several would be multiplied by each."""
    return [warps for warps in (1, 2, 4) if 2048 * warps // shape.lanes >= (16 if warps == 1 else 32)]


def check_features():
    for given, options in FEATURES.values():
        check(given, RAGGED[::-1], tile_for(given, 4, warps_for(given)[0]), **options)


def check_tiles():
    given = shape()
    for splits, chunk, block in ((1, 64, 64), (2, 64, 16), (16, 64, 32), (8, 128, 128), (64, 64, 16)):
        check(given, [1000, 64, 65, 300], DecodeTile(splits, chunk, block, 1))
    check(given, RAGGED, DecodeTile(16, 64, 32, 1))


def rows_alone(device, dtype):
    """Row by row the bits of a batch, whatever the other rows hold."""
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    tile = tile_for(shape(), 8)
    case = make_case(shape(), [300, 1000, 0, 77], dtype, device, padding=1)
    given = case.copy()
    together = run(case, tile, machine)
    for row in range(4):
        assert torch.equal(run(given.copy([row]), tile, machine)[0], together[row])


def interpreted(call):
    """Runs one of this file's functions in Triton's interpreter."""
    code = f"import torch; from tests.kernels.sm80.test_paged_attention import *; {call}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("call", ["check_features()", "check_tiles()", "rows_alone('cpu', torch.float16)"])
def test_the_arithmetic_in_tritons_interpreter(call):
    interpreted(call)
