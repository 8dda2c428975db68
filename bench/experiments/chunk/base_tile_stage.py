# ruff: noqa
"""Stages of x and of packed weights in shared memory, filled by cp.async and read by every warp of a block: mma.sync kernels.

A stage is 64 k for each slice of K that warps of a block share. All threads copy what they all use, pieces of 16 bytes, and
meet once for each stage.

    x        4 blocks, one for each matrix instruction along K: [tokens / 8, slices, 8 tokens, 16 k], rows of 32 bytes whose two
             pieces change places with every 4 rows, so that ldmatrix meets no bank twice
    weights  slice by slice: codes as pack/fragment.py orders them, plane by plane: [strips, 32 lanes * words]; then scales and
             zeros of the groups of these 64 k (of 128 k, where groups are as long): [strips, groups, 8, 2 or 4] halves

PTX with addresses that threads bring along; $0 is written and dropped where nothing is read. Pieces of x that do not exist are
zeros, and weights of slices beyond K; those of a stage beyond the end are not copied.
Tested: tests/kernels/parts/test_tile_stage.py
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.decode import TILE_K, Decode
from lowbit.kernels.parts.gluon import gl

PIECE = 16
"""Bytes of a copy."""

X_ROW = 2 * TILE_K
"""Bytes of a token in a slice of a stage."""

X_PIECES = 32
"""Of them, those of a matrix instruction."""


@dataclass(frozen=True)
class TileStage:
    """A stage of `tokens` tokens and `strips` strips of 16 rows; `stages` of them, filled by `warps` warps, for `slices` slices
    of K. x of all stages begins at byte 0 of shared memory, their weights at `w_start`."""

    decode: Decode
    tokens: int
    strips: int
    stages: int
    warps: int
    slices: int = 1

    def __post_init__(self) -> None:
        of_turn = 4 * self.warps  # tokens; of two turns the second begins 8 tokens on, or 16, ..., where rows lie alike
        if self.tokens % of_turn or (self.tokens > of_turn and of_turn % 8):
            raise ValueError(f"{self.warps} warps copy {of_turn} tokens at once, a tile of {self.tokens} is no multiple")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a stage."""
        return self.slices * self.tokens * X_ROW

    @property
    def w_start(self) -> int:
        return self.stages * self.x_bytes

    @property
    def planes(self) -> tuple[int, ...]:
        """Words of a lane in each plane of codes."""
        return WORD_GROUPS[self.decode.bits]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of a strip in a stage."""
        return 32 * self.decode.scale_words

    @property
    def slice_bytes(self) -> int:
        """Bytes of weights of a slice of K in a stage."""
        return self.strips * (128 * self.decode.bits + self.scale_bytes)

    @property
    def w_bytes(self) -> int:
        """Bytes of weights in a stage."""
        return self.slices * self.slice_bytes

    @property
    def bytes(self) -> int:
        return self.stages * (self.x_bytes + self.w_bytes)

    def plane_at(self, plane: int) -> int:
        """Byte of a plane within the weights of a slice."""
        return self.strips * 128 * sum(self.planes[:plane])

    @property
    def scales_at(self) -> int:
        """Byte of the scales within the weights of a slice."""
        return self.plane_at(len(self.planes))

    @property
    def x_layout(self) -> gl.SwizzledSharedLayout:
        """[rows, 16 k] of x."""
        return gl.SwizzledSharedLayout(8, 4, 2, [1, 0])

    # ---- copies

    @property
    def x_turns(self) -> int:
        """Pieces of x of a slice that a thread copies; from one to the next the token moves by 4 for each warp."""
        return self.tokens * 8 // self.threads

    @property
    def copy_x(self) -> str:
        """$1 slot's x + the place of the thread's first piece in it, $2 where that lies in memory, $3 bytes to the token of the
        next, $4 how many tokens exist from the first on, $5 how many k exist from the piece on."""
        lines = [".reg .pred some, none; .reg .b64 from;"]
        for own in range(self.slices):
            k = TILE_K * own
            lines.append(f"setp.gt.s32 some, $5, {k}; mov.b64 from, $2;")
            for turn in range(self.x_turns):
                if turn:
                    lines.append("add.s64 from, from, $3;")
                tokens = 4 * self.warps * turn
                to = X_PIECES * (tokens * self.slices + 8 * own)
                lines.append(f"setp.gt.and.s32 none, $4, {tokens}, some; not.pred none, none;")
                lines.append(f"cp.async.cg.shared.global.L2::128B [$1+{to}], [from+{2 * k}], 16, none;")
        return _block(lines)

    def pieces(self, plane: int) -> int:
        """Pieces of a strip's codes in a plane of a stage."""
        return 8 * self.planes[plane]

    @property
    def scale_pieces(self) -> int:
        return self.scale_bytes // PIECE

    @property
    def tile_words(self) -> int:
        """Words of codes from a tile of 64 k of a strip to the next."""
        return 32 * self.decode.bits

    def copy_codes(self, plane: int) -> str:
        """$1 slot's weights + 16 thread, $2 the thread's first piece of the stage, $3 bytes from strip to strip, $4 thread, $5
        how many slices of the stage there are within K."""
        start = 128 * sum(self.planes[:plane])
        return self._copy(
            self.pieces(plane), self.plane_at(plane), [start + 4 * self.tile_words * i for i in range(self.slices)]
        )

    @property
    def copy_scales(self) -> str:
        """The same for scales of the stage's groups."""
        of_group = 32 * self.decode.group_words  # bytes
        return self._copy(
            self.scale_pieces, self.scales_at, [TILE_K * i // self.decode.group * of_group for i in range(self.slices)]
        )

    def _copy(self, of_strip: int, to: int, starts: list[int]) -> str:
        """Copies `of_strip` pieces of each strip, which begin so many bytes behind $2 for a slice, to byte `to` of it and on.
        A later slice, beyond K where an earlier one is not, becomes zeros."""
        lines = [".reg .pred there, all, none; .reg .b64 from, skip;", "setp.ne.s32 all, $5, 0;"]
        count = self.strips * of_strip
        for own, start in enumerate(starts):
            lines.append("mov.b64 from, $2;" + (f" setp.le.s32 none, $5, {own};" if own else ""))
            for first in range(0, count, self.threads):
                if first:
                    lines.append(f"mul.wide.s32 skip, $3, {self.threads // of_strip}; add.s64 from, from, skip;")
                there = "all"
                if count - first < self.threads:
                    lines.append(f"setp.lt.and.s32 there, $4, {count - first}, all;")
                    there = "there"
                at = to + PIECE * first + own * self.slice_bytes
                copy = f"cp.async.cg.shared.global.L2::128B [$1+{at}], [from+{start}], 16{', none' if own else ''};"
                lines.append(f"@{there} {copy}")
        return _block(lines)

    # ---- reads, by the lanes of the warp that has a strip

    @property
    def read_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.decode.bits + self.decode.scale_words)

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * len(self.read_types) + ["r"] * 3)

    def read(self, strip: int) -> str:
        """A lane's words of codes, then of scales, of the strip so many behind the warp's own. Inputs: the slice's weights in
        the slot, the warp's strip, the lane."""
        count = len(self.read_types)
        slot, own, lane = (f"${count + i}" for i in range(3))
        lines = [".reg .b32 at, here;", *self._read_codes(strip, slot, own, lane)]
        out = self.decode.bits
        if self.scale_bytes:
            words = self.decode.group_words
            lines.append(f"mad.lo.s32 at, {own}, {self.scale_bytes}, {slot};")
            lines.append(f"shr.u32 here, {lane}, 2; mad.lo.s32 at, here, {4 * words}, at;")
            for group in range(self.decode.groups):
                lines.append(_load(words, out, f"at+{self.scales_at + strip * self.scale_bytes + 32 * words * group}"))
                out += words
        return "{\n" + "\n".join(lines) + "\n}"

    def _read_codes(self, strip: int, slot: str, own: str, lane: str) -> list[str]:
        """Lines that read the words of codes, to $0 and on; `at` and `here` are free."""
        lines, out = [], 0
        for plane, words in enumerate(self.planes):
            vector = min(words, 4)
            lines.append(f"mad.lo.s32 at, {own}, {128 * words}, {slot}; mad.lo.s32 at, {lane}, {4 * vector}, at;")
            start = self.plane_at(plane) + strip * 128 * words
            for first in range(0, words, vector):
                lines.append(_load(vector, out, f"at+{start + 32 * 4 * first}"))
                out += vector
        return lines


def _block(lines: list[str]) -> str:
    return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"


def _load(words: int, out: int, at: str) -> str:
    if words == 1:
        return f"ld.shared.b32 ${out}, [{at}];"
    registers = ", ".join(f"${out + i}" for i in range(words))
    return f"ld.shared.v{words}.b32 {{{registers}}}, [{at}];"
