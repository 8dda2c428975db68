"""The main loop of the wgmma kernels run as Python: every stage is read, multiplied once and released in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import pipeline, wgmma_loop
from tests.kernels.parts.plain import GL, plain


class Stages:
    """Records the operations on stages: read (words), started (products), released."""

    def __init__(self):
        self.events = []

    def read_words(self, w, stage, phase, there, C):
        if there:
            self.events.append(("read", stage, phase))
        return ("words", stage, phase) if there else None

    def dequantize(self, words, scales, second, C):
        assert words is not None, "words of no stage are dequantized"
        return words[1:], scales, second

    def start(self, registers, x, acc, stage, C):
        assert registers[0][0] == stage, "x of another stage"
        self.events.append(("start", *registers[0], registers[1], registers[2]))
        return acc

    def release_stage(self, registers, stage, exists, C):
        if exists:
            self.events.append(("release", stage))


@pytest.mark.parametrize("stages", [4, 6])
@pytest.mark.parametrize("more", [False, True])
def test_stages_in_order(stages, more):
    config, seen, iterations = SimpleNamespace(stages=stages), Stages(), 5
    config.dequantizer = SimpleNamespace(pair_words=1)
    gl = SimpleNamespace(**vars(GL), float32=None)
    multiply = plain(
        wgmma_loop.multiply, gl=gl, barrier=lambda: None, empty_registers=lambda C: "none", read_words=seen.read_words,
        dequantize=seen.dequantize, start=seen.start, zero_sums=lambda kind, C: 0, release_stage=seen.release_stage,
        advance=plain(pipeline.advance, gl=gl), previous=plain(pipeline.previous, gl=gl),
        load_scales=lambda scale, iteration, last, C: (iteration,), warpgroup_mma_wait=lambda count, deps: deps[0],
    )  # fmt: skip
    p = SimpleNamespace(w=None, x=None, scales=SimpleNamespace(last_group=99))
    words = seen.read_words(None, 0, 0, True, config)
    _, words, stage, phase = multiply(p, None, (0, 1), words, 0, 0, 0, iterations, more, config)
    place = [(i % stages, i // stages % 2) for i in range(2 * iterations + 1)]
    assert (stage, phase) == place[-1] and (words is not None) == more
    assert [e[1:] for e in seen.events if e[0] == "read"] == place[: 2 * iterations + more]
    started = [e[1:] for e in seen.events if e[0] == "start"]
    assert started == [(*place[i], (i // 2,), i % 2 == 1) for i in range(2 * iterations)], "scales of their iteration"
    released = [e[1] for e in seen.events if e[0] == "release"]
    assert released == [at for at, _ in place[: 2 * iterations]], "each stage once, in order"
    starts, releases = ([j for j, e in enumerate(seen.events) if e[0] == name] for name in ("start", "release"))
    assert all(releases[i] > starts[i + 1] for i in range(2 * iterations - 1)), "once the products after it have started"
