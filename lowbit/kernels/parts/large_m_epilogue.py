"""The epilogue of the large-M GEMM: scales and bias, then parts/epilogue.py, on the sums of a whole tile.

The sums of squares that a norm needs are added up in two steps. Before the main loop all threads together compute 16 sums per
token; the epilogue reduces these through shared memory. TMA loads h during the main loop and stores h and x of the next norm.

The functions take the configuration C of a kernel, which has `epilogue`, `rows`, `tokens`, `warps`, `threads`,
`threads_layout`, `accumulator`, `store_by_tma` and the layouts of `SquaresLayouts`. With a norm all tokens are in one token
tile; with a residual a block also computes only one tile.
"""

from __future__ import annotations

from lowbit.kernels.parts.epilogue import gate_times_up
from lowbit.kernels.parts.gluon import (
    Descriptor,
    Scalar,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    run,
    tma_load,
    tma_store,
)
from lowbit.kernels.parts.lora_epilogue import LoraArgs, add_terms, prefetch_tile
from lowbit.kernels.parts.prologue import wait_for_previous_kernel
from lowbit.kernels.parts.scaled_epilogue import put
from lowbit.kernels.parts.tile import Warpgroups

SUMS = 16
"""Number of sums of squares per token that are reduced through shared memory."""

SQUARES = gl.constexpr(SUMS)


class SquaresLayouts(Warpgroups):
    """Layouts in which a tile's squares are added up."""

    tokens: int

    @property
    def of_parts(self) -> gl.BlockedLayout:
        """[SUMS, tokens] for loads: neighbouring lanes read neighbouring tokens."""
        lanes = min(32, self.tokens)
        warps = min(self.warps, self.tokens // lanes)
        return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [self.warps // warps, warps], [1, 0])

    @property
    def of_columns(self) -> gl.DistributedLinearLayout:
        """[SUMS, tokens] with the columns of `accumulator`, equal in every warp; each of 8 lanes has two of a token's sums."""
        register = [[0, 1], [8, 0], *([0, 1 << i] for i in range(3, self.tokens.bit_length() - 1))]
        lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout(register, lane, [[0, 0]] * (self.warps.bit_length() - 1), [], [SUMS, self.tokens])

    @property
    def of_tokens(self) -> gl.BlockedLayout:
        """[row blocks, tokens] with all values of a token in one thread."""
        return gl.BlockedLayout([self.warps, 1], [1, 32], [1, self.warps], [1, 0])


@aggregate
class LargeMEpilogueArgs:
    """Float32 scales and biases of channels (or None), and a factor for all sums."""

    channel_scale: Scalar
    bias: Scalar
    factor: Scalar


@aggregate
class ResidualStream:
    """Inputs and outputs of norm and residual: `squares` [parts, M] float32, read by the norm or written for the next one; h
    with its tile in shared memory and the barrier of its copy; gamma of the next norm; `sums` [SUMS, tokens] in shared
    memory. `lora`: the adapters' terms."""

    squares: Scalar
    inverse_width: Scalar
    eps: Scalar
    x_factor: Scalar
    gamma: Scalar
    h: Descriptor | gl.constexpr
    h_tile: gl.shared_memory_descriptor
    h_there: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    lora: LoraArgs


@gluon.jit
def prefetch_rows(epilogue_args, stream, first_row, first_token, N, M, C: gl.constexpr):
    """Prefetches scales, biases, gamma and adapters of a tile's rows into L2 during the main loop; else the epilogue would load
    from memory."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    row = gl.minimum(first_row + thread * 8 % C.rows, N - 1)  # memory sectors have 32 bytes
    if C.epilogue.channel_scale:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [epilogue_args.channel_scale + row])
    if C.epilogue.bias and not C.epilogue.bias_of_tokens:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [epilogue_args.bias + row])
    if C.epilogue.residual:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [stream.gamma + row])
    if C.epilogue.lora is not None:
        prefetch_tile(stream.lora, first_row, first_token, N, M, C)


@gluon.jit
def load_epilogue_inputs(stream, first_row, first_token, M, C: gl.constexpr):
    """Loads what the epilogue needs of previous kernels, before the main loop."""
    if C.epilogue.norm_parts > 0:
        wait_for_previous_kernel()
        load_squares(stream, first_token, M, C)
    if C.epilogue.bias_of_tokens or C.epilogue.lora is not None:
        wait_for_previous_kernel()
    if C.epilogue.residual:
        wait_for_previous_kernel()
        mbarrier.expect(stream.h_there, 2 * C.rows * C.tokens)
        tma_load(stream.h, [first_token, first_row], stream.h_there, stream.h_tile)


@gluon.jit
def wait_for_h(stream, C: gl.constexpr):
    """Waits for the copy of h. Blocks whose tile another split finishes wait too, since a copy must not outlive its block."""
    if C.epilogue.residual:
        mbarrier.wait(stream.h_there, 0)


@gluon.jit
def load_squares(stream, first_token, M, C: gl.constexpr):
    """Adds a token's partial sums: sum j in shared memory is the sum of all partial sums i with i % SUMS = j. A barrier in the
    main loop makes them visible before the epilogue."""
    TOKENS: gl.constexpr = C.tokens
    LAYOUT: gl.constexpr = C.of_parts
    CHUNKS: gl.constexpr = (C.epilogue.norm_parts + SQUARES - 1) // SQUARES
    part = gl.arange(0, SQUARES, gl.SliceLayout(1, LAYOUT))[:, None]
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))[None, :]
    total = gl.zeros((SQUARES, TOKENS), gl.float32, LAYOUT)
    for chunk in gl.static_range(CHUNKS):
        exists = (part + chunk * SQUARES < C.epilogue.norm_parts) & (token < M)
        total += gl.load(stream.squares + (part + chunk * SQUARES) * M + token, mask=exists, other=0.0)
    stream.sums.store(total)


@gluon.jit
def rms_factors(stream, C: gl.constexpr):
    """Returns 1 / (rms * x_factor) of the tokens of a tile."""
    total = gl.sum(stream.sums.load(C.of_columns), axis=0)
    factors = gl.rsqrt(total * stream.inverse_width + stream.eps) * (1.0 / stream.x_factor)
    return gl.convert_layout(factors, gl.SliceLayout(0, C.accumulator), assert_trivial=True)


@gluon.jit
def gated(sums, C: gl.constexpr):
    """Returns act(gate) * up [rows / 2, tokens]. Rows g and g + 8 of a row block are in the same lane."""
    pairs = gl.reshape(sums, [C.rows // 16, 2, 8, C.tokens])
    gate, up = gl.split(gl.permute(pairs, [0, 2, 3, 1]))
    return gl.reshape(gate_times_up(gate, up, C), [C.rows // 2, C.tokens])


@gluon.jit
def add_bias(sums, bias, rows, N, first_token, M, C: gl.constexpr):
    """Adds the bias of channels [N], or that of tokens [M, N], to a tile of sums."""
    if C.epilogue.bias_of_tokens:
        tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, C.accumulator))
        at = bias + tokens.to(gl.int64)[None, :] * N + rows[:, None]
        exists = (rows < N)[:, None] & (tokens < M)[None, :]
        sums = sums + gl.load(at, mask=exists, other=0.0).to(gl.float32)
    elif C.epilogue.bias:
        sums = sums + gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    return sums


@gluon.jit
def finished_tile(sums, epilogue_args, first_row, N, C: gl.constexpr, first_token=0, M=0):
    """Applies scales, bias and gate to a tile of sums; returns it with its first channel of y. first_token and M: for a bias
    of tokens."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    if C.epilogue.channel_scale:
        scale = gl.load(epilogue_args.channel_scale + rows, mask=rows < N, other=0.0).to(gl.float32)
        sums = sums * (scale * epilogue_args.factor)[:, None]  # the factor is a power of two
    else:
        sums = sums * epilogue_args.factor
    sums = add_bias(sums, epilogue_args.bias, rows, N, first_token, M, C)
    if C.epilogue.gate != "none":
        sums = gated(sums, C)
        first_row = first_row // 2
    return sums, first_row


@gluon.jit
def store_squares(stream, values, row_tile, first_token, M, C: gl.constexpr):
    """Stores a tile's sum of squares for each token. It is reduced within row blocks by a warp, then through shared memory."""
    ROW_BLOCKS: gl.constexpr = C.rows // 16
    LAYOUT: gl.constexpr = C.of_tokens
    row_block_sums = gl.sum(gl.reshape(values * values, [ROW_BLOCKS, 16, C.tokens]), axis=1)
    stream.sums.slice(0, ROW_BLOCKS).store(row_block_sums)
    barrier()
    total = gl.sum(stream.sums.slice(0, ROW_BLOCKS).load(LAYOUT), axis=0)
    token = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, LAYOUT))
    gl.store(stream.squares + row_tile * M + token, total, mask=token < M)


@gluon.jit
def add_to_residual(out, sums, stream, row_tile, first_row, first_token, C: gl.constexpr):
    """Computes h += y, x = h * gamma * x_factor, and the tile's sums of squares of h. Rows that do not exist are not stored."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    exists = rows < out.N
    gamma = gl.load(stream.gamma + rows, mask=exists, other=0.0).to(gl.float32) * stream.x_factor
    h = stream.h_tile.permute([1, 0])
    kept = (sums + h.load(C.accumulator).to(gl.float32)).to(stream.h_tile.dtype)
    h.store(kept)
    values = gl.where(exists[:, None], kept.to(gl.float32), 0.0)
    out.tile.permute([1, 0]).store((values * gamma[:, None]).to(C.y))
    fence_async_shared()
    store_squares(stream, values, row_tile, first_token, out.M, C)  # contains a barrier, after which both tiles are complete
    tma_store(stream.h, [first_token, first_row], stream.h_tile)
    tma_store(out.descriptor, [first_token, first_row], out.tile)


@gluon.jit
def apply_epilogue(out, sums, epilogue_args, stream, row_tile, first_row, first_token, C: gl.constexpr):
    """Applies C.epilogue to a tile of sums, rounds once and stores y: through shared memory by TMA, or element by element."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    if C.epilogue.channel_scale:
        scale = gl.load(epilogue_args.channel_scale + rows, mask=rows < out.N, other=0.0).to(gl.float32)
        sums = sums * (scale * epilogue_args.factor)[:, None]  # the factor is a power of two
    else:
        sums = sums * epilogue_args.factor
    if C.epilogue.norm_parts > 0:
        sums = sums * rms_factors(stream, C)[None, :]
    sums = add_bias(sums, epilogue_args.bias, rows, out.N, first_token, out.M, C)
    if C.epilogue.lora is not None:
        sums = add_terms(sums, stream.lora, first_row, first_token, out.N, out.M, C)
    if C.epilogue.residual:
        add_to_residual(out, sums, stream, row_tile, first_row, first_token, C)
    elif C.epilogue.gate != "none":
        put(out, gated(sums, C).to(C.y), first_token, first_row // 2, False)
    elif C.store_by_tma:
        put(out, sums.to(C.y), first_token, first_row, False)
    else:
        tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, C.accumulator))
        at = out.pointer + tokens.to(gl.int64)[None, :] * out.N + rows[:, None]
        gl.store(at, sums.to(C.y), mask=(rows < out.N)[:, None] & (tokens < out.M)[None, :])
