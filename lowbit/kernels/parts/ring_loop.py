"""The main loop of the small-M kernels: a warp copies to its ring, reads from it and multiplies, one k block after the other.

The functions take the configuration C of a kernel, which is a `RingBlock` and has `slices`: slice i of K takes the k blocks i,
i + slices, i + 2 slices, ...
"""

from __future__ import annotations

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import Scalar, Tuple, aggregate, gl, gluon, ptx
from lowbit.kernels.parts.k_block import BLOCK_K, BLOCK_TILES
from lowbit.kernels.parts.ring import Ring
from lowbit.kernels.parts.tile import Warps


class RingBlock(Warps):
    """A block of warps_n x warps_k warps with a ring each, and the assignment of sums to threads in the epilogue
    (parts/small_m_epilogue.py)."""

    ring: Ring
    warps_n: int
    warps_k: int
    epilogue: Epilogue

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def row_blocks(self) -> int:
        """Number of m16 row blocks of a thread block."""
        return self.warps_n * self.ring.row_blocks

    @property
    def accumulators(self) -> int:
        return self.ring.row_blocks * self.ring.k_block.accumulators

    @property
    def outputs(self) -> int:
        """Number of outputs per thread: sums that it reduces and stores in the epilogue. A gate and its up belong to the same
        thread."""
        together = 1 if self.epilogue.gate == "none" else 2
        return together * -(-self.accumulators // (together * self.warps_k))

    @property
    def row_period(self) -> int:
        """Period of the order of rows among a thread's outputs, if that order is the same for all threads. It is the number of
        a row block's accumulators, or 2 (two tokens of one row). 0: there is no common order."""
        together = 1 if self.epilogue.gate == "none" else 2
        outputs, vectors_per_row_block = self.outputs, self.ring.k_block.accumulators
        if outputs % vectors_per_row_block == 0 or (
            vectors_per_row_block % outputs == 0 and (together == 2 or outputs % 4 == 0)
        ):
            return vectors_per_row_block
        return 2 if together == 1 and outputs % 2 == 0 else 0

    def first_of_row(self, i: int) -> int:
        """Index of a thread's first output, within the period of output i, that is in the same row as output i in all threads.
        Without a period it is i."""
        if self.row_period == 0:
            return i
        period = range(i // self.row_period * self.row_period, i + 1)

        def half(j: int) -> int:  # 0 for row g of a row block, 1 for row g + 8
            return j % 2 if self.epilogue.gate != "none" else j // 2 % 2

        return next(j for j in period if half(j) == half(i))


BLOCK = gl.constexpr(BLOCK_K)
TILES = gl.constexpr(BLOCK_TILES)

FENCE = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, 0;\n@p st.shared.b32 [$2], $1;\nmov.b32 $0, 0; }")
"""Register fence of $1: a store that is never executed, as no address $2 in shared memory is negative."""


@aggregate
class RingAddresses:
    """A lane, and its addresses in its warp's ring: destinations of weight copies, sources of weight reads, destination of x
    copies, source of x reads."""

    lane: gl.tensor
    copies: Tuple
    reads: Tuple
    at_x: gl.tensor
    at16: gl.tensor


@aggregate
class SliceAddresses:
    """A lane's addresses in global memory of the next k block's weights, scales and x, with strides between row blocks and n8
    tiles. `x_size`: bytes per copy of x, 0 for tokens that do not exist. `left`: number of tiles of codes left along K, for
    16-bit rows the number of columns. `rows`: number of rows left. `ks`: number of columns of x left.

    For 16-bit rows `w` has the addresses of both halves of a row block. `w_stride` and `w_quad` (four rows) are in bytes.
    """

    w: Tuple
    w_stride: Scalar
    w_quad: Scalar
    scale: Scalar
    scale_stride: Scalar
    x: gl.tensor
    x_eight: Scalar
    x_size: Tuple
    left: gl.tensor
    rows: gl.tensor
    ks: gl.tensor


@gluon.jit
def addresses_of(start, lane, C: gl.constexpr):
    """Returns a lane's addresses in the ring at byte `start`."""
    S: gl.constexpr = C.ring.k_block
    place, group = lane & 3, lane >> 2
    at16 = start + lane * 16
    if S.dense:
        vector, row = lane & 7, lane >> 3
        own = start + row * 128
        copies = (own + (vector ^ row) * 16, own + (vector ^ row ^ 4) * 16)
        own = start + (lane & 15) * 128
        vector = vector ^ (lane >> 4)
        reads = (own + vector * 16, own + (vector ^ 2) * 16, own + (vector ^ 4) * 16, own + (vector ^ 6) * 16)
    else:
        at8, at4, at_scale = start + lane * 8, start + lane * 4, start + lane * C.ring.scale_copy
        copies = (at16, at_scale)
        reads = (at16, at8, at4, start + group * S.pair_bytes)
    return RingAddresses(lane, copies, reads, start + (place * 8 + group) * 16, at16)


@gluon.jit
def copy_weights(ring, source, C: gl.constexpr, row_block: gl.constexpr, ahead: gl.constexpr, d: gl.constexpr):
    """Starts the copies of one row block's weights, `ahead` k blocks after `source`."""
    R: gl.constexpr = C.ring
    s = source
    if R.k_block.dense:
        gl.inline_asm_elementwise(
            ptx(R.copy_rows, d, C.slices), "=r,r,r,l,l,r,r,r,r",
            [ring.copies[0], ring.copies[1], s.w[0], s.w[1], s.w_stride, s.w_quad, s.left - ahead * BLOCK, s.rows],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            ptx(R.copy_codes, d), "=r,r,r,l,l,r,r",
            [ring.copies[0], ring.copies[1], s.w[0] + (row_block * s.w_stride + ahead * (R.code_bytes // 4)),
             s.scale + (row_block * s.scale_stride + ahead * (R.scale_bytes // 2)), ring.lane, s.left - ahead * TILES],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def copy_block(ring, source, C: gl.constexpr, d: gl.constexpr, codes: gl.constexpr, tokens: gl.constexpr):
    """Starts the copies of pair d, counted from `source`: one row block's weights and, with the first row block, x."""
    R: gl.constexpr = C.ring
    N8_TILES: gl.constexpr = R.k_block.n8_tiles
    row_block: gl.constexpr = d % R.row_blocks
    ahead: gl.constexpr = d // R.row_blocks * C.slices  # k blocks
    s = source
    if tokens and row_block == 0:
        for n8_tile in gl.static_range(N8_TILES):
            gl.inline_asm_elementwise(
                ptx(R.copy_x, d, n8_tile), "=r,r,l,r,r",
                [ring.at_x, s.x + (n8_tile * s.x_eight + ahead * BLOCK), s.x_size[n8_tile], s.ks - ahead * BLOCK],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    if codes:
        copy_weights(ring, s, C, row_block, ahead, d)
    if tokens:
        gl.inline_asm_elementwise(
            "cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def advance(source, C: gl.constexpr):
    """Advances `source` by one iteration along K."""
    s = source
    steps: gl.constexpr = C.ring.rounds * C.slices
    if C.ring.k_block.dense:
        w = (s.w[0] + steps * BLOCK, s.w[1] + steps * BLOCK)
        left = s.left - steps * BLOCK
    else:
        w = (s.w[0] + steps * (C.ring.code_bytes // 4),)
        left = s.left - steps * TILES
    scale = s.scale + steps * (C.ring.scale_bytes // 2)
    return SliceAddresses(
        w,
        s.w_stride,
        s.w_quad,
        scale,
        s.scale_stride,
        s.x + steps * BLOCK,
        s.x_eight,
        s.x_size,
        left,
        s.rows,
        s.ks - steps * BLOCK,
    )


@gluon.jit
def read_block(ring, C: gl.constexpr, d: gl.constexpr, pending: gl.constexpr):
    """Waits for the slot of pair d and reads it: the lane's words of codes, then its scales."""
    return gl.inline_asm_elementwise(
        ptx(C.ring.read, d, pending), C.ring.read_constraints, ring.reads,
        dtype=C.ring.read_types, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply(read, x, sums, acc, C: gl.constexpr, row_block: gl.constexpr):
    """Multiplies one k block of one row block; the accumulators of the other row blocks are unchanged."""
    S: gl.constexpr = C.ring.k_block
    first: gl.constexpr = row_block * S.accumulators
    end: gl.constexpr = first + S.accumulators
    new = gl.inline_asm_elementwise(
        S.asm, S.constraints, read[0 : S.words] + x + read[S.words :] + sums + acc[first:end],
        dtype=S.types, is_pure=True, pack=1,
    )  # fmt: skip
    return acc[0:first] + new + acc[end:]


@gluon.jit
def iteration(ring, source, read, acc, C: gl.constexpr, last: gl.constexpr):
    """Runs one main-loop iteration: all row blocks of `rounds` k blocks. `read` is the content of the first slot. Each slot is
    refilled as soon as it has been read."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.k_block
    TURN: gl.constexpr = R.iteration_blocks
    x = ()
    sums = ()
    finished = ()
    for d in gl.static_range(TURN):
        if d % R.row_blocks == 0:
            x = gl.inline_asm_elementwise(
                ptx(R.read_x, d), R.x_constraints, [ring.at16], dtype=R.x_types, is_pure=False, pack=1
            )  # fmt: skip
            if S.sums > 0:
                sums = gl.inline_asm_elementwise(
                    S.sum_asm, S.sum_constraints, x, dtype=S.sum_types, is_pure=True, pack=1
                )  # fmt: skip
        following = read
        if not last or d + R.depth < R.iteration_blocks:
            copy_block(ring, source, C, d + R.depth, True, True)
        if R.fenced and d >= 2:
            gl.inline_asm_elementwise(FENCE, "=r,f,r", [finished[d - 2], ring.at16], dtype=gl.int32, is_pure=False, pack=1)
        if not last or d + 1 < R.iteration_blocks:
            following = read_block(ring, C, d + 1, min(R.iteration_blocks - 2 - d, R.depth - 1) if last else R.depth - 1)
        acc = multiply(read, x, sums, acc, C, d % R.row_blocks)
        if R.fenced:
            finished = finished + (acc[d % R.row_blocks * S.accumulators],)
        read = following
    return read, acc


@gluon.jit
def rows_of(w, row_block, slice_k, lane, N, K, C: gl.constexpr):
    """Returns the addresses of a lane's vectors in both halves of its warp's first row block, the bytes between row blocks, and
    the number of rows left. In a gated GEMM one half is gate rows and the other up rows; in memory all up rows follow all gate
    rows."""
    row, k = lane >> 3, slice_k * BLOCK + (lane & 7) * 8
    if C.epilogue.gate == "none":
        first = row_block * 16 + row
        second = first + 8
        w_stride = 32 * K
    else:
        first = row_block * 8 + row
        second = first + N // 2
        w_stride = 16 * K
    return (w + (first.to(gl.int64) * K + k), w + (second.to(gl.int64) * K + k)), w_stride, N - first


@gluon.jit
def source_of(x, w, scale, row_block, slice_k, first_token, lane, M, N, K, x_stride, tiles, scale_stride, C: gl.constexpr):
    """Returns the SliceAddresses of a lane for the first k block of its slice of K."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.k_block
    N8_TILES: gl.constexpr = S.n8_tiles
    place, group = lane & 3, lane >> 2
    if S.dense:
        w, w_stride, rows = rows_of(w, row_block, slice_k, lane, N, K, C)
        w_quad = 8 * K
        left = K - slice_k * BLOCK - (lane & 7) * 8
    else:
        w_stride = tiles * (32 * S.bits)
        w = (w + (row_block.to(gl.int64) * w_stride + slice_k * (R.code_bytes // 4) + lane * 4),)
        w_quad = 0
        rows = lane
        left = tiles - slice_k * TILES
    if R.scale_copy > 0:
        scale += (
            row_block.to(gl.int64) * scale_stride
            + slice_k * (R.scale_bytes // 2)
            + lane * (R.scale_copy // 2) % (R.scale_bytes // 2)
        )
    x_size = ()
    for n8_tile in gl.static_range(N8_TILES):
        x_size = x_size + (gl.where(first_token + n8_tile * 8 + group < M, 16, 0),)
    # Tokens that do not exist are not read; their addresses may be anything.
    x += (first_token + group).to(gl.int64) * x_stride + slice_k * BLOCK + place * 8
    return SliceAddresses(
        w, w_stride, w_quad, scale, scale_stride, x, 8 * x_stride, x_size, left, rows, K - slice_k * BLOCK - place * 8
    )  # fmt: skip
