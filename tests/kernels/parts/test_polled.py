"""Words exchanged by polling: values arrive whatever the order of blocks, and a wait without an end is reported."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.kernels.sass import compile_kernel
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.polled import EMPTY, Polled, poll, publish, publish_both, publish_pair


@dataclass(frozen=True)
class Exchange(Polled):
    dtype: str = "fp16"
    limit: int = 2000
    writes: bool = True


@gluon.jit
def exchange(words, out, status, C: gl.constexpr):
    """Block 0 writes 32 float32, 16 pairs of lanes and 32 pairs of values; block 1 polls them and stores what it gets."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    value = (lane + 1).to(gl.float32) * 0.8125
    base = words.to(gl.int64)
    if gl.program_id(0) == 0:
        if C.writes:
            publish(base + lane * 4, value, lane * 0 + 1, C)
            publish_pair(base + 128 + lane // 2 * 4, value, lane * 0 + 1, C)
            publish_both(base + 192 + lane * 4, value, -value, (lane < 30).to(gl.int32), C)
    else:
        first = poll((base + lane * 4, base + 128 + lane // 2 * 4), lane * 0 + 1, status, 7, 2, 1, C)
        second = poll((base + 192 + gl.minimum(lane, 14) * 8,), lane * 0 + 1, status, 8, 1, 2, C)
        none = poll((base + 192 + 31 * 4,), lane * 0, status, 9, 1, 1, C)
        gl.store(out + lane, first[0])
        gl.store(out + 32 + lane, first[1])
        gl.store(out + 64 + lane, second[0])
        gl.store(out + 96 + lane, second[1])
        gl.store(out + 128 + lane, none[0])


def run(seed, **options):
    C = Exchange(**options)
    kernel = compile_kernel(
        exchange, {"words": "*i32", "out": "*i32", "status": "*i32"}, C, ["words", "out", "status"], 1, 90
    )  # fmt: skip
    words = torch.full((128,), EMPTY, dtype=torch.int32)
    out, status = torch.full((160,), 5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    execute(kernel.ptx, max(kernel.shared_bytes, 16), (words, out, status), 2, 32, seed, longest=40)
    return out.view(5, 32), status.item()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_words_arrive(seed, dtype):
    out, status = run(seed, dtype=dtype)
    value, half = torch.arange(1, 33) * 0.8125, torch.float16 if dtype == "fp16" else torch.bfloat16
    assert status == 0 and torch.equal(out[0].view(torch.float32), value)
    assert torch.equal(out[1][::2].contiguous().view(half), value.to(half))
    both = torch.stack([value, -value], 1).to(half).flatten().view(torch.int32)
    index = torch.arange(32).clamp(max=14) * 2
    assert torch.equal(out[2], both[index]) and torch.equal(out[3], both[index + 1])
    assert not out[4].any()


def test_a_wait_without_an_end():
    """The status has the code of the first wait; the second one ends at once."""
    out, status = run(0, writes=False, limit=600)
    assert status == 7 and (out[0] == EMPTY).all()
