"""Stages of x and of packed weights in shared memory, filled by cp.async and read by every warp of a block: mma.sync kernels.

A stage is 64 k for each slice of K that warps of a block share. All threads copy what they all use, pieces of 16 bytes, and
meet once for each stage.

    x        4 blocks, one for each matrix instruction along K: [tokens / 8, slices, 8 tokens, 16 k], rows of 32 bytes whose two
             pieces change places with every 4 rows, so that ldmatrix meets no bank twice
    weights  slice by slice: codes as pack/fragment.py orders them, plane by plane: [strips, 32 lanes * words]; then scales and
             zeros of the groups of these 64 k (of 128 k, where groups are as long): [strips, groups, 8, 2 or 4] halves

PTX with addresses that threads bring along, one piece each; $0 is written and dropped where nothing is read. Pieces that do not
exist, of x and of slices and stages beyond the end, become zeros, and their addresses are not read.
Tested: tests/kernels/parts/test_tile_stage.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.dequantize import TILE_K, Dequantizer
from lowbit.kernels.parts.gluon import Tuple, aggregate, asm, gl, gluon, ptx, run

PIECE = 16
"""Bytes of a copy."""

X_ROW = 2 * TILE_K
"""Bytes of a token in a slice of a stage."""

X_PIECES = 32
"""Of them, those of a matrix instruction."""


@dataclass(frozen=True)
class StageCopy:
    """A piece that every thread copies: of x, of a plane of codes or of scales, the turn-th of them."""

    of: Literal["x", "codes", "scales"]
    index: int
    plane: int = 0


@dataclass(frozen=True)
class TileStage:
    """A stage of `tokens` tokens and `row_blocks` strips of 16 rows; `stages` of them, filled by `warps` warps, for `slices` slices
    of K. x of all stages begins at byte 0 of shared memory, their weights at `w_start`."""

    dequantizer: Dequantizer
    tokens: int
    row_blocks: int
    stages: int
    warps: int
    slices: int = 1

    def __post_init__(self) -> None:
        copied_tokens = 4 * self.warps  # tokens; of two turns the second begins 8 tokens on, or 16, ..., where rows lie alike
        if self.tokens % copied_tokens or (self.tokens > copied_tokens and copied_tokens % 8):
            raise ValueError(f"{self.warps} warps copy {copied_tokens} tokens at once, a tile of {self.tokens} is no multiple")

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
        return WORD_GROUPS[self.dequantizer.bits]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of a strip in a stage."""
        return 32 * self.dequantizer.scale_words

    @property
    def slice_bytes(self) -> int:
        """Bytes of weights of a slice of K in a stage."""
        return self.row_blocks * (128 * self.dequantizer.bits + self.scale_bytes)

    @property
    def w_bytes(self) -> int:
        """Bytes of weights in a stage."""
        return self.slices * self.slice_bytes

    @property
    def bytes(self) -> int:
        return self.stages * (self.x_bytes + self.w_bytes)

    def plane_at(self, plane: int) -> int:
        """Byte of a plane within the weights of a slice."""
        return self.row_blocks * 128 * sum(self.planes[:plane])

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
    def x_copies(self) -> int:
        """Pieces of x that a thread copies: of all slices, then of the token that is 4 for each warp further on."""
        return self.slices * self.tokens * 8 // self.threads

    def copy_x(self, index: int) -> str:
        """$1 slot's x + the place of the thread's first piece in it, $2 where that lies in memory, $3 bytes to the token of the
        next, below 2^31, $4 how many tokens exist from the first on, $5 how many k exist from the piece on."""
        further, own = divmod(index, self.slices)
        tokens, k = 4 * self.warps * further, TILE_K * own
        to = X_PIECES * (tokens * self.slices + 8 * own)
        return _block([
            f".reg .pred some, none; .reg .b64 from; setp.gt.s32 some, $5, {k};",
            f"mad.wide.s32 from, $3, {further}, $2;" if further else "mov.b64 from, $2;",
            f"setp.gt.and.s32 none, $4, {tokens}, some; not.pred none, none;",
            f"cp.async.cg.shared.global.L2::128B [$1+{to}], [from+{2 * k}], 16, none;",
        ])  # fmt: skip

    def pieces(self, plane: int) -> int:
        """Pieces of a strip's codes in a plane of a stage."""
        return 8 * self.planes[plane]

    @property
    def scale_pieces(self) -> int:
        return self.scale_bytes // PIECE

    @property
    def tile_words(self) -> int:
        """Words of codes from a tile of 64 k of a strip to the next."""
        return 32 * self.dequantizer.bits

    @property
    def group_shift(self) -> int:
        """Bits to shift a k by to its group: of a division the sign would be looked at."""
        return self.dequantizer.group.bit_length() - 1

    def code_copies(self, plane: int) -> int:
        """Pieces of a plane that a thread copies, of all slices in turn; with the last of a slice some threads have none."""
        return self.slices * -(-self.row_blocks * self.pieces(plane) // self.threads)

    @property
    def scale_copies(self) -> int:
        return self.slices * -(-self.row_blocks * self.scale_pieces // self.threads)

    @property
    def copies(self) -> tuple[StageCopy, ...]:
        """All that a thread copies of a stage."""
        codes = [
            StageCopy("codes", index, plane) for plane in range(len(self.planes)) for index in range(self.code_copies(plane))
        ]
        scales = [StageCopy("scales", index) for index in range(self.scale_copies)]
        return (*(StageCopy("x", index) for index in range(self.x_copies)), *codes, *scales)

    def copy_codes(self, index: int, plane: int) -> str:
        """$1 slot's weights + 16 thread, $2 the thread's first piece of the stage, $3 bytes from strip to strip, $4 thread, $5
        how many slices of the stage there are within K, at most 0 beyond the end."""
        start = 128 * sum(self.planes[:plane]) + index % self.slices * 4 * self.tile_words
        return self._copy(index, self.pieces(plane), self.plane_at(plane), start)

    def copy_scales(self, index: int) -> str:
        """The same for scales of the stage's groups."""
        of_group = 32 * self.dequantizer.group_words  # bytes
        start = index % self.slices * TILE_K // self.dequantizer.group * of_group
        return self._copy(index, self.scale_pieces, self.scales_at, start)

    def _copy(self, index: int, pieces_per_row_block: int, to: int, start: int) -> str:
        """Copies one of `pieces_per_row_block` pieces of each strip, which begin `start` bytes behind $2, to a slice's byte `to` and on."""
        further, own = divmod(index, self.slices)
        first = further * self.threads
        left, there = self.row_blocks * pieces_per_row_block - first, ""
        lines = [f".reg .pred there, none; .reg .b64 from; setp.le.s32 none, $5, {own};"]
        lines.append(f"mad.wide.s32 from, $3, {first // pieces_per_row_block}, $2;" if further else "mov.b64 from, $2;")
        if left < self.threads:
            lines.append(f"setp.lt.s32 there, $4, {left};")
            there = "@there "
        at = to + PIECE * first + own * self.slice_bytes
        lines.append(f"{there}cp.async.cg.shared.global.L2::128B [$1+{at}], [from+{start}], 16, none;")
        return _block(lines)

    # ---- reads, by the lanes of the warp that has a strip

    @property
    def read_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.dequantizer.bits + self.dequantizer.scale_words)

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * len(self.read_types) + ["r"] * 3)

    def read(self, row_block: int) -> str:
        """A lane's words of codes, then of scales, of the strip so many behind the warp's own. Inputs: the slice's weights in
        the slot, the warp's strip, the lane."""
        count = len(self.read_types)
        slot, own, lane = (f"${count + i}" for i in range(3))
        lines = [".reg .b32 at, here;", *self._read_codes(row_block, slot, own, lane)]
        out = self.dequantizer.bits
        if self.scale_bytes:
            words = self.dequantizer.group_words
            lines.append(f"mad.lo.s32 at, {own}, {self.scale_bytes}, {slot};")
            lines.append(f"shr.u32 here, {lane}, 2; mad.lo.s32 at, here, {4 * words}, at;")
            for group in range(self.dequantizer.groups):
                lines.append(_load(words, out, f"at+{self.scales_at + row_block * self.scale_bytes + 32 * words * group}"))
                out += words
        return "{\n" + "\n".join(lines) + "\n}"

    def _read_codes(self, row_block: int, slot: str, own: str, lane: str) -> list[str]:
        """Lines that read the words of codes, to $0 and on; `at` and `here` are free."""
        lines, out = [], 0
        for plane, words in enumerate(self.planes):
            vector = min(words, 4)
            lines.append(f"mad.lo.s32 at, {own}, {128 * words}, {slot}; mad.lo.s32 at, {lane}, {4 * vector}, at;")
            start = self.plane_at(plane) + row_block * 128 * words
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


# ---- copies on the device


@aggregate
class StageSource:
    """Where this thread's first pieces of x, codes (one for each plane) and scales lie, bytes from piece to piece or from strip
    to strip; how many tokens there are from the piece of x on; how many k from it on, and tiles of 64 k, to where the block
    ends."""

    x: gl.tensor
    x_step: gl.tensor
    tokens: gl.tensor
    ks: gl.tensor
    w: Tuple
    w_stride: gl.tensor
    scale: gl.tensor
    scale_stride: gl.tensor
    tiles: gl.tensor


@gluon.jit
def x_piece(thread):
    """(token, piece of its 8) that a thread copies first. A warp has 4 tokens, lanes 8 i to 8 i + 7 pieces 2 i and 2 i + 1 of
    each: whole rows of memory, and no bank of shared memory twice."""
    lane = thread % 32
    return thread // 32 * 4 + lane % 8 // 2, lane % 2 + lane // 8 * 2


@gluon.jit
def x_at(token, piece, S: gl.constexpr):
    """Byte of a piece of 8 k of a token within the x of a stage, of its first slice."""
    row = token + token // 8 * (8 * S.slices - 8)
    return piece // 2 * (S.slices * S.tokens * 32) + row * 32 + (piece % 2 ^ token // 4 % 2) * 16


@gluon.jit
def first_piece(base, first_row_block, thread, stride, pieces_per_row_block: gl.constexpr, elements: gl.constexpr):
    """Where a thread's first piece of `elements` lies, of `pieces_per_row_block` for each strip."""
    row_block = first_row_block + thread // pieces_per_row_block
    return base + row_block.to(gl.int64) * stride + thread % pieces_per_row_block * elements


@gluon.jit
def copy_piece(source, iteration, slot, i: gl.constexpr, C: gl.constexpr):
    """Starts copy i of a stage; what is beyond the end becomes zeros."""
    S: gl.constexpr = C.stage
    COPY: gl.constexpr = ptx(C.order.copy, i)
    thread = gl.arange(0, C.threads, C.threads_layout)
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32)
    tiles = source.tiles - iteration * C.warps_k
    w_at = start + S.w_start + slot * S.w_bytes + thread * 16
    if COPY.of == "x":
        token, piece = x_piece(thread)
        run(
            ptx(S.copy_x, COPY.index), "=r,r,l,r,r,r",
            [start + slot * S.x_bytes + x_at(token, piece, S), source.x + iteration * C.stage_k, source.x_step, source.tokens,
             source.ks - iteration * C.stage_k],
        )  # fmt: skip
    elif COPY.of == "codes":
        run(
            ptx(S.copy_codes, COPY.index, COPY.plane), "=r,r,l,r,r,r",
            [w_at, source.w[COPY.plane] + iteration * (S.tile_words * C.warps_k), source.w_stride, thread, tiles],
        )  # fmt: skip
    else:
        group = (iteration * C.stage_k >> S.group_shift) * (16 * C.dequantizer.group_words)
        run(
            ptx(S.copy_scales, COPY.index), "=r,r,l,r,r,r",
            [w_at, source.scale + group, source.scale_stride, thread, tiles],
        )  # fmt: skip


@gluon.jit
def commit():
    """Ends a group of copies, of none beyond the end."""
    run("cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [])
