"""Stages of x and of packed weights in shared memory, filled by cp.async and read by every warp of a block: sm_80 large-M GEMM.

A stage is 64 k for each slice of K that the block's warps share. All threads copy what all warps use, 16 bytes at a time, and
synchronise once per stage.

    x        4 blocks, one for each matrix instruction along K: [tokens / 8, slices, 8 tokens, 16 k], rows of 32 bytes whose two
             vectors swap places every 4 rows, so that ldmatrix has no bank conflicts
    weights  slice by slice: codes as in pack/fragment.py, plane by plane: [row blocks, 32 lanes * words]; then scales and
             zeros of the groups of these 64 k (of 128 k, where groups are as long): [row blocks, groups, 8, 2 or 4] halves

Threads pass addresses to the PTX, one 16-byte vector each; $0 is a dummy output where nothing is read. Vectors that do not
exist, of x and of slices and stages beyond K, become zeros, and their addresses are not read. Tested:
tests/kernels/parts/test_tile_stage.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.dequantize import TILE_K, Dequantizer
from lowbit.kernels.parts.gluon import Tuple, aggregate, asm, gl, gluon, ptx, run

VECTOR = 16
"""Bytes of a copy."""

X_ROW = 2 * TILE_K
"""Bytes of a token in a slice of a stage."""

X_VECTORS = 32
"""Bytes of it for one matrix instruction."""


@dataclass(frozen=True)
class StageCopy:
    """A 16-byte vector that every thread copies, of x, of a plane of codes or of scales; `index` counts them."""

    of: Literal["x", "codes", "scales"]
    index: int
    plane: int = 0


@dataclass(frozen=True)
class TileStage:
    """A stage of `tokens` tokens and `row_blocks` m16 row blocks, `stages` of them, filled by `warps` warps, for `slices`
    slices of K. x of all stages begins at byte 0 of shared memory, their weights at `w_start`."""

    dequantizer: Dequantizer
    tokens: int
    row_blocks: int
    stages: int
    warps: int
    slices: int = 1
    x_layout = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])

    def __post_init__(self) -> None:
        copied_tokens = 4 * self.warps  # at once; the next copy begins a multiple of 8 later: the same swizzle
        if self.tokens % copied_tokens or (self.tokens > copied_tokens and copied_tokens % 8):
            raise ValueError(f"{self.warps} warps copy {copied_tokens} tokens at once, a tile of {self.tokens} is no multiple")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def x_bytes(self) -> int:
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
        """Bytes of scales of a row block in a stage."""
        return 32 * self.dequantizer.scale_words

    @property
    def slice_bytes(self) -> int:
        """Bytes of weights of a slice of K in a stage."""
        return self.row_blocks * (128 * self.dequantizer.bits + self.scale_bytes)

    @property
    def w_bytes(self) -> int:
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

    # ---- copies

    @property
    def x_copies(self) -> int:
        """Vectors of x that a thread copies: of all slices, then of the token 4 * warps later."""
        return self.slices * self.tokens * 8 // self.threads

    def copy_x(self, index: int) -> str:
        """Copies x. $1 slot's x + the place of the thread's first vector in it, $2 its source, $3 bytes to the token of the
        next vector, below 2^31, $4 how many tokens exist from the first on, $5 how many k exist from the vector on."""
        further, own = divmod(index, self.slices)
        tokens, k = 4 * self.warps * further, TILE_K * own
        to = X_VECTORS * (tokens * self.slices + 8 * own)
        return _block([
            f".reg .pred some, none; .reg .b64 from; setp.gt.s32 some, $5, {k};",
            f"mad.wide.s32 from, $3, {further}, $2;" if further else "mov.b64 from, $2;",
            f"setp.gt.and.s32 none, $4, {tokens}, some; not.pred none, none;",
            f"cp.async.cg.shared.global.L2::128B [$1+{to}], [from+{2 * k}], 16, none;",
        ])  # fmt: skip

    def vectors(self, plane: int) -> int:
        """Vectors of a row block's codes in a plane of a stage."""
        return 8 * self.planes[plane]

    @property
    def scale_vectors(self) -> int:
        return self.scale_bytes // VECTOR

    @property
    def tile_words(self) -> int:
        """Words of codes of a tile of 64 k of a row block."""
        return 32 * self.dequantizer.bits

    @property
    def group_shift(self) -> int:
        """log2 of the group size: a division would also handle negative k."""
        return self.dequantizer.group.bit_length() - 1

    def code_copies(self, plane: int) -> int:
        """Vectors of a plane that a thread copies, over all slices; in the last of a slice some threads copy none."""
        return self.slices * -(-self.row_blocks * self.vectors(plane) // self.threads)

    @property
    def scale_copies(self) -> int:
        return self.slices * -(-self.row_blocks * self.scale_vectors // self.threads)

    @property
    def copies(self) -> tuple[StageCopy, ...]:
        """All that a thread copies of a stage."""
        codes = [
            StageCopy("codes", index, plane) for plane in range(len(self.planes)) for index in range(self.code_copies(plane))
        ]
        scales = [StageCopy("scales", index) for index in range(self.scale_copies)]
        return (*(StageCopy("x", index) for index in range(self.x_copies)), *codes, *scales)

    def copy_codes(self, index: int, plane: int) -> str:
        """Copies codes. $1 slot's weights + 16 thread, $2 the thread's first vector of the stage, $3 bytes between row blocks,
        $4 thread, $5 how many slices of the stage are within K, at most 0 beyond it."""
        start = 128 * sum(self.planes[:plane]) + index % self.slices * 4 * self.tile_words
        return self._copy(index, self.vectors(plane), self.plane_at(plane), start)

    def copy_scales(self, index: int) -> str:
        """Copies scales of the stage's groups, with the operands of `copy_codes`."""
        of_group = 32 * self.dequantizer.group_words  # bytes
        start = index % self.slices * TILE_K // self.dequantizer.group * of_group
        return self._copy(index, self.scale_vectors, self.scales_at, start)

    def _copy(self, index: int, vectors_per_row_block: int, to: int, start: int) -> str:
        """Copies one of `vectors_per_row_block` vectors of each row block, from `start` bytes after $2 to byte `to` of a
        slice."""
        further, own = divmod(index, self.slices)
        first = further * self.threads
        left, there = self.row_blocks * vectors_per_row_block - first, ""
        lines = [f".reg .pred there, none; .reg .b64 from; setp.le.s32 none, $5, {own};"]
        lines.append(f"mad.wide.s32 from, $3, {first // vectors_per_row_block}, $2;" if further else "mov.b64 from, $2;")
        if left < self.threads:
            lines.append(f"setp.lt.s32 there, $4, {left};")
            there = "@there "
        at = to + VECTOR * first + own * self.slice_bytes
        lines.append(f"{there}cp.async.cg.shared.global.L2::128B [$1+{at}], [from+{start}], 16, none;")
        return _block(lines)

    # ---- reads, by the lanes of the warp that has a row block

    @property
    def read_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.dequantizer.bits + self.dequantizer.scale_words)

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * len(self.read_types) + ["r"] * 3)

    def read(self, row_block: int) -> str:
        """Reads a lane's words of codes, then of scales, of the row block `row_block` after the warp's first. Inputs: the
        slice's weights in the slot, the warp's first row block, the lane."""
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
        """Lines that read the words of codes to $0 and on; `at` and `here` are temporaries."""
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
    """Addresses of this thread's first vectors of x, codes (one per plane) and scales, with their strides in bytes; number of
    tokens from its vector of x on, of k from it on, and of tiles of 64 k, up to the end of the block's range.

    Where C.gathered, `x` has the address of every token that the thread copies, and `x_step` is 0.
    """

    x: gl.tensor | Tuple
    x_step: gl.tensor
    tokens: gl.tensor
    ks: gl.tensor
    w: Tuple
    w_stride: gl.tensor
    scale: gl.tensor
    scale_stride: gl.tensor
    tiles: gl.tensor


@gluon.jit
def x_vector(thread):
    """Returns (token, vector of its 8) that a thread copies first. A warp has 4 tokens, lanes 8 i to 8 i + 7 vectors 2 i and 2
    i + 1 of each: whole rows of memory, no bank conflicts."""
    lane = thread % 32
    return thread // 32 * 4 + lane % 8 // 2, lane % 2 + lane // 8 * 2


@gluon.jit
def x_at(token, vector, S: gl.constexpr):
    """Byte offset of the vector of 8 k of a token within the x of a stage, of its first slice."""
    row = token + token // 8 * (8 * S.slices - 8)
    return vector // 2 * (S.slices * S.tokens * 32) + row * 32 + (vector % 2 ^ token // 4 % 2) * 16


@gluon.jit
def first_vector(base, first_row_block, thread, stride, vectors_per_row_block: gl.constexpr, elements: gl.constexpr):
    """Address of a thread's first vector of `elements`, with `vectors_per_row_block` vectors per row block."""
    row_block = first_row_block + thread // vectors_per_row_block
    return base + row_block.to(gl.int64) * stride + thread % vectors_per_row_block * elements


@gluon.jit
def copy_vector(source, iteration, slot, i: gl.constexpr, C: gl.constexpr):
    """Starts copy i of a stage; what does not exist becomes zeros."""
    S: gl.constexpr = C.stage
    COPY: gl.constexpr = ptx(C.order.copy, i)
    thread = gl.arange(0, C.threads, C.threads_layout)
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32)
    tiles = source.tiles - iteration * C.warps_k
    w_at = start + S.w_start + slot * S.w_bytes + thread * 16
    if COPY.of == "x":
        token, vector = x_vector(thread)
        x = source.x
        if C.gathered:
            x = source.x[COPY.index // S.slices]
        run(
            ptx(S.copy_x, COPY.index), "=r,r,l,r,r,r",
            [start + slot * S.x_bytes + x_at(token, vector, S), x + iteration * C.stage_k, source.x_step, source.tokens,
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
    """Commits a group of copies, an empty one beyond K."""
    run("cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [])
