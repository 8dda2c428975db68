"""The epilogue of the small-M GEMM: reduction of K slices and splits, then parts/epilogue.py, thread by thread.

Every warp adds up the sums of squares that a norm needs, without an exchange. A thread has both the sum of a gate and the sum
of its up. Inputs of the epilogue are loaded before the main loop; or they are prefetched into L2 before it and loaded after it.
"""

from __future__ import annotations

from lowbit.kernels.parts.epilogue import gate_times_up
from lowbit.kernels.parts.gluon import Scalar, Tuple, aggregate, asm, barrier, gl, gluon, ptx, run
from lowbit.kernels.parts.lora_epilogue import part_of, prefetch_b

ADD_GROUPS = gl.constexpr(
    "{ .reg .f32 other; mov.f32 $0, $1;\n"
    + "\n".join(f"shfl.sync.bfly.b32 other, $0, {d}, 0x1f, 0xffffffff; add.f32 $0, $0, other;" for d in (4, 8, 16))
    + "\n}"
)
"""PTX that sums $1 over the 8 lane groups; every lane gets the sum."""

STORE = gl.constexpr("{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $1; st.shared.f32 [at], $2; mov.b32 $0, 0; }")
"""PTX that stores the float32 $2 at byte $1 of shared memory."""

STORE_IF = gl.constexpr(
    "{ .reg .b32 at; .reg .pred p; setp.ne.s32 p, $3, 0; mov.u32 at, global_smem; add.u32 at, at, $1;"
    " @p st.shared.f32 [at], $2; mov.b32 $0, 0; }"
)
"""PTX that stores the float32 $2 at byte $1 of shared memory, if $3 is not 0."""


@gluon.constexpr_function
def add_strided(count, stride):
    """PTX that adds `count` float32 numbers of shared memory in order. They are `stride` bytes apart; $1 is the first one's
    byte offset."""
    lines = [".reg .b32 at; .reg .f32 v;", "mov.u32 at, global_smem; add.u32 at, at, $1; ld.shared.f32 $0, [at];"]
    lines += [f"ld.shared.f32 v, [at+{stride * i}]; add.f32 $0, $0, v;" for i in range(1, count)]
    return "{\n" + "\n".join(lines) + "\n}"


@aggregate
class ThreadCoordinates:
    """A thread's lane and warp, the block's first row block and token, and the first row that no other block stores."""

    lane: gl.tensor
    warp: gl.tensor
    first_row_block: Scalar
    first_token: Scalar
    own_row: Scalar
    M: Scalar
    N: Scalar


@aggregate
class SmallMEpilogueArgs:
    """`factor`: of all sums. `channel_scale` and `bias`: tuples with one value for each output of a thread (`load_rows`,
    `load_tokens`), unless there are none. `rms`: `rms_factors` of tokens 2t and 2t + 1 of each n8 tile, or (). `lora`: what
    adapters add to each output (`lora_terms`), or ()."""

    factor: Scalar
    channel_scale: Scalar | Tuple  # an unused pointer where there are none
    rms: Tuple
    bias: Scalar | Tuple
    lora: Tuple


@aggregate
class ResidualArgs:
    """h [M, N]; the next norm's gamma, one value for each output of a thread; sums of squares, one for each block of rows. With
    C.h_early, `old` is h before the addition."""

    h: Scalar
    gamma: Scalar | Tuple
    squares: Scalar
    x_factor: Scalar
    old: Tuple


@gluon.jit
def element_of(i: gl.constexpr, warp, C: gl.constexpr):
    """Returns (index of the lane's accumulator, row of warps) for a thread's i-th output. Even i are gates, odd i ups, if there
    is a gate.

    If C.row_period > 0 a thread's outputs are neighbouring accumulators; they are then in few rows and need few scales and
    biases (`RingGemm.first_of_row`). Otherwise neighbouring accumulators belong to neighbouring warps.
    """
    PAIRS: gl.constexpr = C.ring.k_block.accumulators // 2
    TOGETHER: gl.constexpr = 1 if C.epilogue.gate == "none" else 2
    if C.row_period > 0:
        index = warp // C.warps_n * (C.outputs // TOGETHER) + i // TOGETHER
    else:
        index = (i // TOGETHER * C.warps + warp) // C.warps_n
    element = index
    if TOGETHER == 2:
        element = index // PAIRS * (2 * PAIRS) + index % PAIRS // 2 * 4 + (index & 1) + i % 2 * 2
    return element, warp % C.warps_n


@gluon.jit
def output_of(element, row_of_warps, at, C: gl.constexpr):
    """Returns the row of w and the token of an accumulator, and True where both exist."""
    S: gl.constexpr = C.ring.k_block
    row_block = at.first_row_block + row_of_warps * C.ring.row_blocks + element // S.accumulators
    row = row_block * 16 + (at.lane >> 2) + 8 * ((element >> 1) & 1)
    token = at.first_token + (element % S.accumulators) // 4 * 8 + (at.lane & 3) * 2 + (element & 1)
    exists = (element < C.accumulators) & (row < at.N) & (token < at.M)
    return row, token, exists


@gluon.jit
def reduce_slices(shared, acc, lane, warp, C: gl.constexpr):
    """Reduces the K slices of a block's warps through shared memory; returns C.outputs sums per thread, assigned by
    `element_of`."""
    ACCUMULATORS: gl.constexpr = C.accumulators
    OUTPUTS: gl.constexpr = C.outputs
    barrier()
    shared.index(0).store(acc[0])  # same as STORE below, but also keeps the allocation alive, which PTX only uses by address
    for i in gl.static_range(1, ACCUMULATORS):
        run(STORE, "=r,r,f", [(i * C.threads + warp * 32 + lane) * 4, acc[i]])
    barrier()
    sums = ()
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, warp, C)
        element = gl.minimum(element, C.accumulators - 1)
        at = (element * C.warps + row_of_warps * C.warps_k) * 128 + lane * 4
        sums = sums + (asm(add_strided(C.warps_k, 128), "=&f,r", [at], gl.float32),)
    return sums


@gluon.jit
def reduce_splits(partial, arrived, sums, thread, C: gl.constexpr):
    """Split-K reduction by the last of the blocks that share rows and tokens. Returns (True, sums over all splits) in that
    block.

    `arrived` counts the blocks that have stored their sums; it is 0 before and after the launch.
    """
    OUTPUTS: gl.constexpr = C.outputs
    SPLITS: gl.constexpr = C.splits
    block = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    first = partial + block * (SPLITS * OUTPUTS * C.threads) + thread
    for i in gl.static_range(OUTPUTS):
        gl.store(first + (gl.program_id(2) * OUTPUTS + i) * C.threads, sums[i])
    barrier()
    last = gl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1
    totals = sums
    if last:
        gl.store(arrived + block, 0)
        totals = ()
        for i in gl.static_range(OUTPUTS):
            total = gl.load(first + i * C.threads)
            for split in gl.static_range(1, SPLITS):
                total += gl.load(first + (split * OUTPUTS + i) * C.threads)
            totals = totals + (total,)
    return last, totals


@gluon.jit
def across_groups(value, C: gl.constexpr):
    """Returns the sum of a value over the 8 lane groups, in every lane."""
    return asm(ADD_GROUPS, "=&f,f", [value], gl.float32)


@gluon.jit
def rms_factors(squares, at, inverse_width, eps, x_factor, C: gl.constexpr):
    """Returns 1 / (rms * x_factor) of tokens 2t and 2t + 1 of each n8 tile; t is the lane's index within its group."""
    N8_TILES: gl.constexpr = C.ring.k_block.n8_tiles
    CHUNKS: gl.constexpr = (C.epilogue.norm_parts + 7) // 8
    factors = ()
    inverse = 1.0 / x_factor
    for i in gl.static_range(2 * N8_TILES):
        token = at.first_token + i // 2 * 8 + (at.lane & 3) * 2 + i % 2
        total = (at.lane * 0).to(gl.float32)
        for chunk in gl.static_range(CHUNKS):
            part = chunk * 8 + (at.lane >> 2)
            exists = (part < C.epilogue.norm_parts) & (token < at.M)
            total += gl.load(squares + part * at.M + token, mask=exists, other=0.0)
        factors = factors + (gl.rsqrt(across_groups(total, C) * inverse_width + eps) * inverse,)
    return factors


@gluon.jit
def rms_of(factors, element, C: gl.constexpr):
    """Returns the factor from `rms_factors` for the token of an accumulator."""
    COUNT: gl.constexpr = 2 * C.ring.k_block.n8_tiles
    which = element % (2 * COUNT) // 4 * 2 + (element & 1)
    chosen = factors[0]
    for i in gl.static_range(1, COUNT):
        chosen = gl.where(which == i, factors[i], chosen)
    return chosen


@gluon.jit
def channel_of(row, at, C: gl.constexpr):
    """Returns the channel of a row of the tile. It is the row, except for gated 16-bit weights, which have all gates before all
    ups."""
    if C.ring.k_block.dense and C.epilogue.gate != "none":
        return row // 16 * 8 + row % 8 + row // 8 % 2 * (at.N // 2)
    else:
        return row


@gluon.jit
def scaled_sum(total, epilogue_args, i: gl.constexpr, element, C: gl.constexpr):
    """Returns a thread's i-th output after scales, norm and bias."""
    total *= epilogue_args.factor
    if C.epilogue.channel_scale:
        total *= epilogue_args.channel_scale[i]
    if C.epilogue.norm_parts > 0:
        total *= rms_of(epilogue_args.rms, element, C)
    if C.epilogue.bias:
        total += epilogue_args.bias[i].to(gl.float32)
    if C.epilogue.lora is not None:
        total += epilogue_args.lora[i]
    return total


@gluon.jit
def store(y, sums, epilogue_args, at, C: gl.constexpr):
    """Stores y: lanes of a warp write 8 neighbouring rows of w for each of 4 tokens."""
    OUTPUTS: gl.constexpr = C.outputs
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        total = scaled_sum(sums[i], epilogue_args, i, element, C)
        gl.store(y + token.to(gl.int64) * at.N + row, total.to(y.dtype.element_ty), mask=exists)


@gluon.jit
def store_gated(y, sums, epilogue_args, at, C: gl.constexpr):
    """Stores y [M, N / 2] = act(gate) * up; rows 16 s + g (gate) and 16 s + 8 + g (up) of w give column 8 s + g of y."""
    PAIRS: gl.constexpr = C.outputs // 2
    for i in gl.static_range(PAIRS):
        element, row_of_warps = element_of(2 * i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        gate = scaled_sum(sums[2 * i], epilogue_args, 2 * i, element, C)
        up = scaled_sum(sums[2 * i + 1], epilogue_args, 2 * i + 1, element, C)
        to = token.to(gl.int64) * (at.N // 2) + row // 16 * 8 + row % 16
        gl.store(y + to, gate_times_up(gate, up, C).to(y.dtype.element_ty), mask=exists)


@gluon.jit
def load_row(channels, values, i: gl.constexpr, at, C: gl.constexpr):
    """Returns the value of `channels` [N] for the row of a thread's i-th output. It is taken from `values` if an earlier output
    has the same row, else loaded."""
    first: gl.constexpr = ptx(C.first_of_row, i)
    if first < i:
        return values[first]
    else:
        element, row_of_warps = element_of(i, at.warp, C)
        row, _token, _exists = output_of(element, row_of_warps, at, C)
        return gl.load(channels + channel_of(row, at, C), mask=(element < C.accumulators) & (row < at.N), other=0.0)


@gluon.jit
def load_rows(channels, at, C: gl.constexpr):
    """Loads the values of `channels` [N] for all outputs of a thread; called before the main loop, so that the loads overlap
    with it."""
    OUTPUTS: gl.constexpr = C.outputs
    values = ()
    for i in gl.static_range(OUTPUTS):
        values = values + (load_row(channels, values, i, at, C),)
    return values


@gluon.jit
def load_tokens(values, at, C: gl.constexpr):
    """Loads the elements of `values` [M, N] for all outputs of a thread."""
    OUTPUTS: gl.constexpr = C.outputs
    loaded = ()
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        loaded = loaded + (gl.load(values + token.to(gl.int64) * at.N + channel_of(row, at, C), mask=exists, other=0.0),)
    return loaded


@gluon.jit
def stage_sums(lora, thread, at, C: gl.constexpr):
    """Adds up the splits of t of a block's tokens and stores them, rounded, in shared memory; zeros for tokens without an
    adapter."""
    L: gl.constexpr = C.epilogue.lora
    SPLITS: gl.constexpr = L.splits
    OF_TOKEN: gl.constexpr = L.parts * L.rank
    COUNT: gl.constexpr = C.ring.k_block.tokens * OF_TOKEN
    ROUNDS: gl.constexpr = (COUNT + C.threads - 1) // C.threads
    for i in gl.static_range(ROUNDS):
        place = thread + i * C.threads
        token = at.first_token + place // OF_TOKEN
        exists = (place < COUNT) & (token < at.M)
        exists = exists & (gl.load(lora.adapter_of + token, mask=exists, other=-1) >= 0)
        total = (thread * 0).to(gl.float32)
        for split in gl.static_range(SPLITS):
            there = lora.t + ((split * at.M + token) * OF_TOKEN + place % OF_TOKEN)
            total += gl.load(there, mask=exists, other=0.0, cache_modifier=".cg")
        total = total.to(lora.b.dtype.element_ty).to(gl.float32)
        run(STORE_IF, "=r,r,f,r", [C.lora_offset + place * 4, total, (place < COUNT).to(gl.int32)])


@gluon.jit
def term_of(lora, adapter, channel, token, exists, at, C: gl.constexpr):
    """Returns what an adapter, -1 for none, adds to one output of each thread: of column `channel` for `token`."""
    L: gl.constexpr = C.epilogue.lora
    b = lora.b + (gl.maximum(adapter, 0).to(gl.int64) * at.N + channel) * L.rank
    words = asm(L.load_b, L.load_b_constraints, [b, (adapter >= 0).to(gl.int32)], L.words_types)
    place = (gl.where(exists, token, at.first_token) - at.first_token) * L.parts + part_of(gl.where(exists, channel, 0), C)
    return asm(L.dot, L.dot_constraints, (C.lora_offset + place * (4 * L.rank),) + words, gl.float32)


@gluon.jit
def prefetch_terms(lora, at, C: gl.constexpr):
    """Prefetches the rows of b of a thread's outputs into L2. adapter_of is older than the previous kernel."""
    OUTPUTS: gl.constexpr = C.outputs
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        adapter = gl.load(lora.adapter_of + token, mask=exists, other=-1)
        prefetch_b(lora, gl.maximum(adapter, 0), channel_of(row, at, C), (adapter >= 0).to(gl.int32), at.N, C)


@gluon.jit
def load_adapters(lora, at, C: gl.constexpr):
    """Returns the adapter of each output of a thread, -1 for none."""
    OUTPUTS: gl.constexpr = C.outputs
    adapters = ()
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        _row, token, exists = output_of(element, row_of_warps, at, C)
        adapters = adapters + (gl.load(lora.adapter_of + token, mask=exists, other=-1),)
    return adapters


@gluon.jit
def lora_terms(lora, at, C: gl.constexpr):
    """Returns what adapters add to each output of a thread."""
    OUTPUTS: gl.constexpr = C.outputs
    adapters = load_adapters(lora, at, C)
    terms = ()
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        terms = terms + (term_of(lora, adapters[i], channel_of(row, at, C), token, exists, at, C),)
    return terms


@gluon.jit
def prefetch_rows(channel_scale, bias, gamma, thread, at, C: gl.constexpr):
    """Prefetches scales, biases and gamma of a block's rows into L2, because loads from memory after the main loop would expose
    its latency."""
    row = channel_of(gl.minimum(at.first_row_block * 16 + thread, at.N - 1), at, C)
    if C.epilogue.channel_scale:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [channel_scale + row])
    if C.epilogue.bias and not C.epilogue.bias_of_tokens:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [bias + row])
    if C.epilogue.residual:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [gamma + row])


@gluon.jit
def load_h(h, at, C: gl.constexpr):
    """Loads h [M, N] for those outputs of a thread that this block stores."""
    OUTPUTS: gl.constexpr = C.outputs
    values = ()
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        exists = exists & (row >= at.own_row)
        values = values + (gl.load(h + token.to(gl.int64) * at.N + row, mask=exists, other=0.0),)
    return values


@gluon.jit
def add_to_residual(x, sums, epilogue_args, residual, at, C: gl.constexpr):
    """Computes h += y, x = h * gamma * x_factor, and the block's sums of squares of h. Rows that two blocks compute are counted
    by the first.

    A warp reduces the squares of 8 rows. Then the sums of all groups of 8 rows of the block are reduced in shared memory,
    behind the accumulators.
    """
    S: gl.constexpr = C.ring.k_block
    OUTPUTS: gl.constexpr = C.outputs
    BASE: gl.constexpr = 4 * C.accumulators * C.threads
    old = residual.old
    if not C.h_early:
        old = load_h(residual.h, at, C)
    for i in gl.static_range(OUTPUTS):
        element, row_of_warps = element_of(i, at.warp, C)
        row, token, exists = output_of(element, row_of_warps, at, C)
        exists = exists & (row >= at.own_row)
        total = scaled_sum(sums[i], epilogue_args, i, element, C) + old[i].to(gl.float32)
        kept = total.to(residual.h.dtype.element_ty)
        to = token.to(gl.int64) * at.N + row
        gl.store(residual.h + to, kept, mask=exists)
        total = gl.where(exists, kept.to(gl.float32), 0.0)
        gamma = residual.gamma[i].to(gl.float32)
        scaled = total * (gamma * residual.x_factor)
        gl.store(x + to, scaled.to(x.dtype.element_ty), mask=exists)
        square = across_groups(total * total, C)
        octet = (row - at.first_row_block * 16) // 8
        slot = BASE + (octet * S.tokens + token - at.first_token) * 4
        some = ((at.lane < 4) & (element < C.accumulators)).to(gl.int32)
        run(STORE_IF, "=r,r,f,r", [slot, square, some])
    barrier()
    slot = at.warp * 32 + at.lane
    own = gl.minimum(slot, S.tokens - 1)
    total = asm(add_strided(2 * C.row_blocks, 4 * S.tokens), "=&f,r", [BASE + own * 4], gl.float32)
    token = at.first_token + slot
    gl.store(residual.squares + gl.program_id(0) * at.M + token, total, mask=(slot < S.tokens) & (token < at.M))


@gluon.jit
def apply_epilogue(y, sums, epilogue_args, residual, at, C: gl.constexpr):
    """Applies C.epilogue to the sums and stores the result."""
    if C.epilogue.residual:
        add_to_residual(y, sums, epilogue_args, residual, at, C)
    elif C.epilogue.gate != "none":
        store_gated(y, sums, epilogue_args, at, C)
    else:
        store(y, sums, epilogue_args, at, C)
