"""Stages of x and of packed weights in shared memory, filled by cp.async and read by every warp of a block: sm_80 large-M GEMM.

A stage holds 64 columns of K for each slice of K that the block's warps share. All threads copy for all warps, 16 bytes at a
time, and synchronise once per stage.

    x        4 blocks, one for each matrix instruction along K: [tokens / 8, slices, 8 tokens, 16 columns], rows of 32 bytes.
             In every other 4 rows the two vectors of a row are swapped, so that ldmatrix has no bank conflicts
    weights  slice by slice: codes as in pack/fragment.py, plane by plane: [row blocks, 32 lanes * words]; then scales and
             zeros of the groups that overlap these 64 columns: [row blocks, groups, 8, 2 or 4] halves

Threads pass addresses to the PTX, one 16-byte vector each; $0 is a dummy output where nothing is read. Vectors that do not
exist (missing tokens of x, slices and stages beyond K) become zeros, and their addresses are not read. Tested:
tests/kernels/parts/test_tile_stage.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.dequantize import TILE_K, Dequantizer
from lowbit.kernels.parts.gluon import Tuple, aggregate, asm, gl, gluon, ptx, run

VECTOR = 16
"""Bytes that a thread copies at a time."""

X_ROW = 2 * TILE_K
"""Bytes of x of one token in a slice of a stage."""

X_VECTORS = 32
"""Bytes of x of one token for one matrix instruction."""


@dataclass(frozen=True)
class StageCopy:
    """One copy of a stage, in which each thread copies a 16-byte vector of x, of a plane of codes or of scales. `index` counts
    the copies of the same kind."""

    of: Literal["x", "codes", "scales"]
    index: int
    plane: int = 0


@dataclass(frozen=True)
class TileStage:
    """`stages` stages of `tokens` tokens and `row_blocks` m16 row blocks for each of `slices` slices of K, filled by `warps`
    warps. x of all stages begins at byte 0 of shared memory, the weights of all stages at `w_start`."""

    dequantizer: Dequantizer
    tokens: int
    row_blocks: int
    stages: int
    warps: int
    slices: int = 1
    x_layout = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])

    def __post_init__(self) -> None:
        copied_tokens = 4 * self.warps  # the next copy's tokens are a multiple of 8 later and have the same swizzle
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
        """Number of words per lane in each plane of codes."""
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
        """Byte offset of a plane within the weights of a slice."""
        return self.row_blocks * 128 * sum(self.planes[:plane])

    @property
    def scales_at(self) -> int:
        """Byte offset of the scales within the weights of a slice."""
        return self.plane_at(len(self.planes))

    # ---- copies

    @property
    def x_copies(self) -> int:
        """Number of vectors of x that a thread copies per stage: one for each slice of a token, then for the token 4 * warps
        later, and so on."""
        return self.slices * self.tokens * 8 // self.threads

    def copy_x(self, index: int) -> str:
        """PTX that copies x. $1 destination of the thread's first vector in the stage, $2 source of that vector, $3 bytes to
        the thread's next token (below 2^31), $4 number of tokens from the thread's first token on, $5 number of columns of K
        from its vector on."""
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
        """Number of vectors of a row block's codes in a plane of a stage."""
        return 8 * self.planes[plane]

    @property
    def scale_vectors(self) -> int:
        return self.scale_bytes // VECTOR

    @property
    def tile_words(self) -> int:
        """Number of words with the codes of a row block in 64 columns of K."""
        return 32 * self.dequantizer.bits

    @property
    def group_shift(self) -> int:
        """log2 of the group size. Kernels shift instead of dividing, since a division also handles negative numbers."""
        return self.dequantizer.group.bit_length() - 1

    def code_copies(self, plane: int) -> int:
        """Number of copies of a plane per stage, over all slices. In the last copy of a slice some threads may have no
        vector."""
        return self.slices * -(-self.row_blocks * self.vectors(plane) // self.threads)

    @property
    def scale_copies(self) -> int:
        return self.slices * -(-self.row_blocks * self.scale_vectors // self.threads)

    @property
    def copies(self) -> tuple[StageCopy, ...]:
        """All copies of a stage, in order."""
        codes = [
            StageCopy("codes", index, plane) for plane in range(len(self.planes)) for index in range(self.code_copies(plane))
        ]
        scales = [StageCopy("scales", index) for index in range(self.scale_copies)]
        return (*(StageCopy("x", index) for index in range(self.x_copies)), *codes, *scales)

    def copy_codes(self, index: int, plane: int) -> str:
        """PTX that copies codes. $1 weights of the stage in shared memory + 16 thread, $2 source of the thread's first vector,
        $3 bytes between row blocks, $4 thread, $5 number of slices of the stage that begin within K (0 or less: none)."""
        start = 128 * sum(self.planes[:plane]) + index % self.slices * 4 * self.tile_words
        return self._copy(index, self.vectors(plane), self.plane_at(plane), start)

    def copy_scales(self, index: int) -> str:
        """PTX that copies scales of the stage's groups; operands as in `copy_codes`."""
        of_group = 32 * self.dequantizer.group_words  # bytes
        start = index % self.slices * TILE_K // self.dequantizer.group * of_group
        return self._copy(index, self.scale_vectors, self.scales_at, start)

    def _copy(self, index: int, vectors_per_row_block: int, to: int, start: int) -> str:
        """PTX of copy `index` of codes or scales, which have `vectors_per_row_block` vectors per row block: from `start` bytes
        after $2 to byte `to` of a slice's weights."""
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

    # ---- reads, by the lanes of the warp that multiplies a row block

    @property
    def read_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.dequantizer.bits + self.dequantizer.scale_words)

    @property
    def read_constraints(self) -> str:
        return ",".join(["=&r"] * len(self.read_types) + ["r"] * 3)

    def read(self, row_block: int) -> str:
        """PTX that reads a lane's words of codes, then of scales, for the row block that is `row_block` after the warp's first.
        Inputs: address of the slice's weights in the stage, the warp's first row block, the lane."""
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
        """Lines of PTX that read the words of codes into $0, $1, ...; `at` and `here` are temporary registers."""
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
    """Addresses of this thread's first vectors of x, codes (one per plane) and scales, with their strides in bytes. Also the
    numbers of tokens and of columns of K from its vector of x on, and the number of tiles (64 columns of K) up to the end of
    the block's range.

    With C.gathered, `x` has the address of every token that the thread copies, and `x_step` is 0.
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
    """Returns (token, index of one of its 8 vectors) that a thread copies first. A warp copies 4 tokens; lanes 8 i to 8 i + 7
    copy vectors 2 i and 2 i + 1 of each token. So it reads whole rows of memory and has no bank conflicts."""
    lane = thread % 32
    return thread // 32 * 4 + lane % 8 // 2, lane % 2 + lane // 8 * 2


@gluon.jit
def x_at(token, vector, S: gl.constexpr):
    """Returns the byte offset of a vector (8 columns of K) of a token, in the first slice of a stage's x."""
    row = token + token // 8 * (8 * S.slices - 8)
    return vector // 2 * (S.slices * S.tokens * 32) + row * 32 + (vector % 2 ^ token // 4 % 2) * 16


@gluon.jit
def first_vector(base, first_row_block, thread, stride, vectors_per_row_block: gl.constexpr, elements: gl.constexpr):
    """Address of a thread's first vector of `elements`, with `vectors_per_row_block` vectors per row block."""
    row_block = first_row_block + thread // vectors_per_row_block
    return base + row_block.to(gl.int64) * stride + thread % vectors_per_row_block * elements


@gluon.jit
def copy_vector(source, iteration, slot, i: gl.constexpr, C: gl.constexpr):
    """Starts copy i of a stage; vectors that do not exist become zeros."""
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
    """Commits a group of copies."""
    run("cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [])
