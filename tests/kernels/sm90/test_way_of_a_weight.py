"""The last steps of docs/internals/walkthrough.md in machine code: from a lane's word in shared memory to operand A of
wgmma.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from tests.kernels.sm90.test_compile import compiled

R = r"R(\d+)(?:\.reuse)?"
STEPS = (
    rf"LOP3\.LUT {R}, R%s(?:\.reuse)?, 0xf000f, RZ, 0xc0",  # word & 0x000f000f: two codes as subnormal halves
    rf"HFMA2\S* {R}, R%s(?:\.reuse)?, {R}, {R}",  # code * scale - offset * scale, rounded once
    rf"HGMMA\S* {R}, R%s, gdesc",  # operand A; x is found by its descriptor
)
MOVED = rf"MOV\S* {R}, (?:RZ, RZ, )?R%s(?:\.reuse)?$"


def way(lines: list[str], value: str) -> list[str]:
    """The instructions, in order, that process the lowest codes of the word in register `value`."""
    taken: list[str] = []
    for line in lines:
        step = re.search(STEPS[len(taken)] % value, line)
        if step:
            taken.append(line)
            if len(taken) == len(STEPS):
                return taken
        if step or (step := re.search(MOVED % value, line)):  # ptxas may move the word to another register in between
            value = step[1]
    return taken


def test_a_word_becomes_operand_a():
    _, kernel = compiled("int4", "fp16", 1024, group=64, subnormal=True)
    first = next(i for i, line in enumerate(kernel.lines) if "HGMMA" in line)
    begin, end = max((begin, end) for begin, end in kernel.loops if begin < first < end)
    loop = kernel.lines[begin : end + 1]
    loads = [(i, load[1]) for i, line in enumerate(loop) if (load := re.match(rf"LDS\.128 {R}", line))]
    assert len(loads) == 2, "four words of a lane for each of the two stages of a turn"
    for at, word in loads:
        taken = way((loop * 2)[at + 1 :], word)
        assert len(taken) == len(STEPS), taken
