"""In which order a stage of parts/tile_stage.py is multiplied: mma.sync kernels, for each 16 k the tokens of a warp in chunks.

While a chunk is multiplied, x of one some chunks further on is read, some weights of the next step are decoded, and some
copies of a later stage start. ptxas moves no read of x past a copy: spread over a stage, they keep ldmatrix ahead of products.

    position    0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15      16 k after 16 k, a chunk each
    copies      --------------------------------           of the stage that is furthest ahead
    barrier                                             |  the next stage is there; x of it is read from here on
    decoded     of step 1  |  of step 2  |  of step 3   |  of step 0 of the next stage

Tested: tests/kernels/parts/test_stage_order.py, tests/kernels/sm80/test_wide_in_numpy.py
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.tile_stage import Copy

CHUNK = 32
"""Tokens of a warp that are multiplied at a time. On an H200, 2026-11-23, int4, M 1024, 8192 x 8192, by 8 x 1 warps of 128
tokens, 32 with 4 ahead were the best of three."""

AHEAD = 4
"""Chunks of x that are read ahead, in the registers of one step of 128 tokens."""

STEPS = 4
"""Matrix instructions along K in a stage."""


@dataclass(frozen=True)
class StageOrder:
    """The order for warps of `tokens` tokens and `strips` strips; `copies` is what each thread copies of a stage."""

    tokens: int
    strips: int
    copies: tuple[Copy, ...]

    @property
    def chunks(self) -> int:
        """Of a warp's tokens."""
        return max(self.tokens // CHUNK, 1)

    @property
    def positions(self) -> int:
        """Chunks of a stage."""
        return STEPS * self.chunks

    @property
    def ahead(self) -> int:
        """Chunks of x that are read before they are multiplied: a step at most, so that the barrier is within the last."""
        return min(AHEAD, self.chunks)

    def next_step(self, position: int) -> int:
        """The step behind that of a chunk, 0 of the next stage behind the last."""
        return (position // self.chunks + 1) % STEPS

    @property
    def copy_count(self) -> int:
        """Copies of a stage."""
        return len(self.copies)

    def copy(self, i: int) -> Copy:
        """The i-th of them; a kernel takes no tuple of constants."""
        return self.copies[i]

    def first_copy(self, position: int) -> int:
        """The first copy that starts with a chunk: all of them before the next stage is waited for, the last with the one
        before it, since ptxas puts three idle reads before each that stands alone."""
        room = self.positions - self.ahead
        return position * len(self.copies) // room if position < room - 1 else len(self.copies)

    def first_strip(self, position: int) -> int:
        """The first strip that is decoded for the next step with a chunk; of the next stage once it is there."""
        step, chunk = divmod(position, self.chunks)
        start = self.chunks - self.ahead if step == STEPS - 1 else 0
        return max(chunk - start, 0) * self.strips // (self.chunks - start)

    def end_strip(self, position: int) -> int:
        """The one after the last of them."""
        return self.strips if (position + 1) % self.chunks == 0 else self.first_strip(position + 1)
