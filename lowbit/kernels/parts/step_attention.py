"""The attention of a decode step in one launch, as a stage of its blocks (kernels/sm90/decode_step.py).

A task is a split of a row and kv head; split_attention.py has what a warp computes. Splits are exchanged as polled words, and
all blocks of a kv head combine a share of its outputs each.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, barrier, gl, gluon
from lowbit.kernels.parts.head_rows import exchanged
from lowbit.kernels.parts.polled import poll, publish, publish_both, publish_pair
from lowbit.kernels.parts.split_attention import (
    NOTHING,
    TILE_TOKENS,
    SplitTask,
    add_tile,
    angles_row,
    append,
    attend_nothing,
    chosen,
    load_keys,
    load_query,
    load_values,
    merge_warps,
    nothing_to_shared,
    of_row,
    prefetch_values,
    store_query,
    sums_to_shared,
    tile_scores,
    touch_angles,
    turn_head,
)
from lowbit.kernels.parts.step_stage import field, same_thread, status_of, vector, warp_number

TILE = TILE_TOKENS


@aggregate
class AttentionVectors:
    """Addresses of a layer's pages, and its cosines, sines, gammas of norms of heads, and sinks; its window in tokens."""

    k: Scalar
    v: Scalar
    cos_sin: Scalar
    q_gamma: Scalar
    k_gamma: Scalar
    sinks: Scalar
    window: Scalar


@gluon.jit
def task_of(args, task, window, C: gl.constexpr):
    """Returns the SplitTask of a number; `window` in tokens."""
    T: gl.constexpr = C.table
    A: gl.constexpr = C.shape
    row = task // (A.kv_heads * T.splits)
    slot = gl.load(args.rows + row)
    position = gl.load(args.positions + slot)
    first = position * 0
    if C.windows:
        first = gl.maximum(position + 1 - window, 0)
    table = args.tables + slot.to(gl.int64) * args.table_stride
    return SplitTask(row, task // T.splits % A.kv_heads, task % T.splits, position, first, table)


@gluon.jit
def active_splits(task, C: gl.constexpr):
    """Returns the number of splits with work, the tokens of each, and the first token of the first; see `StepTable.active`."""
    SHARE: gl.constexpr = C.table.share_tokens
    start = task.first // SHARE * SHARE
    shares = (task.position - start + (SHARE - 1)) // SHARE
    active = gl.where(shares <= 2, 1, gl.minimum(shares, C.table.splits))
    each = gl.maximum((shares + active - 1) // active, 1)
    return gl.maximum((shares + each - 1) // each, 1), each * SHARE, start


@gluon.jit
def attention_vectors(args, layer, C: gl.constexpr):
    """Returns the AttentionVectors of a layer."""
    q_gamma = layer * 0
    k_gamma = layer * 0
    if C.head_norms:
        q_gamma = field(args, layer, "q_gamma", C)
        k_gamma = field(args, layer, "k_gamma", C)
    sinks = None
    if C.sinks:
        sinks = field(args, layer, "sinks", C).to(gl.pointer_type(gl.float32), bitcast=True)
    window = layer * 0
    if C.windows:
        window = field(args, layer, "window", C).to(gl.int32)
    k, v, cos_sin = field(args, layer, "k", C), field(args, layer, "v", C), field(args, layer, "cos_sin", C)
    return AttentionVectors(k, v, cos_sin, q_gamma, k_gamma, sinks, window)


@gluon.jit
def attend(args, at, layer, vectors, number, task, active, tokens, start, parity, C: gl.constexpr):
    """Computes one split, of `tokens` tokens: appends the new token in split 0, and stores the split's sums, or the output if
    it is the only one. A warp has every tile_warps-th tile; in split 0 the last warp's first tile is the new token."""
    WARPS: gl.constexpr = C.table.tile_warps
    begin = start + task.split * tokens
    end = gl.minimum(begin + tokens, task.position)
    warp = warp_number()  # warps without a tile leave the issue slots to the others
    first = begin + TILE * warp
    if (warp == WARPS - 1) & (task.split == 0):
        first = task.position
    if (warp < WARPS) & ((first < end) | (first == task.position)):
        attend_tiles(args, at, layer, vectors, task, first, begin, end, parity, C)
    else:
        nothing_to_shared(at, C)
    barrier()
    store_split(args, at, layer, number, task, active, C)
    barrier()


@gluon.jit
def attend_tiles(args, at, layer, vectors, task, tile, begin, end, parity, C: gl.constexpr):
    """Computes a warp's tiles, of which the first begins at token `tile`, and stores their sums in shared memory. Sums of
    products are not stored in the buffer `parity` meanwhile, so q is."""
    T: gl.constexpr = C.table
    A: gl.constexpr = C.shape
    WARPS: gl.constexpr = T.tile_warps
    KEYS: gl.constexpr = C.key_vectors
    VALUES: gl.constexpr = C.value_vectors
    has_new = (task.split == 0).to(gl.int32)
    own = (at.warp == WARPS - 1) & (task.split == 0)
    tile = at.warp * 0 + tile
    k = load_keys(vectors.k, task, at, tile, end, C)
    prefetch_values(vectors.v, task, at, tile, end, C)
    angles = angles_row(vectors.cos_sin, task.position, C)
    touch_angles(angles, at, C)
    qkv = vector(args, layer, "qkv", C) + task.row * (A.features * 2)
    group, pair = at.lane >> 2, at.lane & 3
    # Registers are few: v is loaded late. Lanes have q of a head, those of the first row without a head have k.
    is_q = group < A.group
    head = gl.where(is_q, task.kv_head * A.group + group, A.heads + task.kv_head)
    addresses = ()
    for j in gl.static_range(KEYS):
        addresses = addresses + (qkv + head * (A.head_dim * 2) + pair * 16 + 64 * j,)
    for j in gl.static_range(VALUES):
        of_v = (A.heads + A.kv_heads + task.kv_head) * (A.head_dim * 2)
        addresses = addresses + (qkv + of_v + group * 16 + 128 * j,)
    COUNT: gl.constexpr = KEYS + VALUES
    words = poll(addresses, at.lane * 0 + 1, args.status, status_of(layer, "q, k and v", C), COUNT, 4, C)
    new_v = words[4 * KEYS : 4 * COUNT]
    q = turn_head(words[0 : 4 * KEYS], gl.where(is_q, vectors.q_gamma, vectors.k_gamma), angles, at, C)
    if A.group == 8:  # k is in no lane yet, and registers are few while it is turned
        store_query(q, at, T.sums_start + parity * T.sums_bytes, C)
    if task.split == 0:
        if A.group < 8:
            new_k = of_row(q, A.group, at, 4 * KEYS)
        else:
            of_k = qkv + (A.heads + task.kv_head) * (A.head_dim * 2) + pair * 16
            of_keys = ()
            for j in gl.static_range(KEYS):
                of_keys = of_keys + (of_k + 64 * j,)
            keys = poll(of_keys, at.lane * 0 + 1, args.status, status_of(layer, "q, k and v", C), KEYS, 4, C)
            new_k = turn_head(keys, vectors.k_gamma + pair * 0, angles, at, C)
        append(vectors.k, vectors.v, task, at, new_k, new_v, own, C)
        k = chosen(own, new_k, k, 4 * KEYS)
    place = T.sums_start + parity * T.sums_bytes
    if A.group == 8:
        q = load_query(at, place, C)
    else:
        store_query(q, at, place, C)
    first, second = tile_scores(q, k, task, at, tile, gl.where(own, task.position + 1, end), C)
    v = load_values(vectors.v, task, at, tile, end, C)
    v = chosen(own, new_v, v, 4 * VALUES) + v[4 * VALUES : 8 * VALUES]
    top, total, sums = attend_nothing(vectors.sinks, task, at, own, C)
    top, total, sums = add_tile(first, second, v, top, total, sums, at, C)
    for later in range(begin + TILE * (WARPS - has_new), end, TILE * WARPS):
        tile = later + TILE * at.warp
        prefetch_values(vectors.v, task, at, tile, end, C)
        k = load_keys(vectors.k, task, at, tile, end, C)
        first, second = tile_scores(load_query(at, place, C), k, task, at, tile, end, C)
        v = load_values(vectors.v, task, at, tile, end, C)
        top, total, sums = add_tile(first, second, v, top, total, sums, at, C)
    sums_to_shared(at, top, total, sums, C)


@gluon.jit
def store_split(args, at, layer, number, task, active, C: gl.constexpr):
    """Merges the warps; stores the split's sums, maxima and totals, or the output if no other split has work."""
    A: gl.constexpr = C.shape
    OUTPUTS: gl.constexpr = A.group * A.head_dim
    TURNS: gl.constexpr = (OUTPUTS + C.threads - 1) // C.threads
    alone = active == 1
    parts = vector(args, layer, "parts", C) + number * (OUTPUTS * 4)
    tops = vector(args, layer, "tops", C) + number * (A.group * 8)
    out = vector(args, layer, "attended", C) + (task.row * A.heads + task.kv_head * A.group) * (A.head_dim * 2)
    for i in gl.static_range(TURNS):
        output = at.index + i * C.threads
        exists = output < OUTPUTS
        output = gl.minimum(output, OUTPUTS - 1)
        head, element = output // A.head_dim, output % A.head_dim
        top, total, sum_ = merge_warps(at, head, element, C)
        publish_pair(out + (output & -2) * 2, sum_ / total, (exists & alone).to(gl.int32), C)
        one = (exists & (active > 1)).to(gl.int32)
        publish(parts + output * 4, sum_, one, C)
        first = (exists & (active > 1) & (element == 0)).to(gl.int32)
        publish(tops + head * 8, top, first, C)
        publish(tops + head * 8 + 4, total, first, C)


@gluon.jit
def combine(args, at, layer, number, task, active, C: gl.constexpr):
    """Combines the splits of a row and kv head for a share of its outputs, which all splits divide among them."""
    A: gl.constexpr = C.shape
    LANES: gl.constexpr = C.combine_lanes
    STEPS: gl.constexpr = LANES.bit_length() - 1
    AT_ONCE: gl.constexpr = C.threads // LANES
    WORDS: gl.constexpr = A.group * A.head_dim // 2
    share = (WORDS + active - 1) // active
    first = task.split * share
    end = gl.minimum(first + share, WORDS)
    split = at.index % LANES
    there = split < active
    of_split = number - task.split + gl.minimum(split, active - 1)
    out = vector(args, layer, "attended", C) + (task.row * A.heads + task.kv_head * A.group) * (A.head_dim * 2)
    parts, tops = vector(args, layer, "parts", C), vector(args, layer, "tops", C)
    for begin in range(first, end, AT_ONCE):
        word = begin + at.index // LANES
        exists = (word < end) & (split == 0)
        word = gl.minimum(word, WORDS - 1)
        head = word // (A.head_dim // 2)
        addresses = (parts + (of_split * WORDS + word) * 8, tops + (of_split * A.group + head) * 8)
        words = poll(addresses, at.lane * 0 + 1, args.status, status_of(layer, "splits of attention", C), 2, 2, C)
        own_top = gl.where(there, words[2].to(gl.float32, bitcast=True), NOTHING)
        top = own_top
        for step in gl.static_range(STEPS):
            top = gl.maximum(top, exchanged(top, 1 << step))
        fade = gl.where(there, gl.exp2(own_top - top), 0.0)
        low = words[0].to(gl.float32, bitcast=True) * fade
        high = words[1].to(gl.float32, bitcast=True) * fade
        total = words[3].to(gl.float32, bitcast=True) * fade
        for step in gl.static_range(STEPS):
            low += exchanged(low, 1 << step)
            high += exchanged(high, 1 << step)
            total += exchanged(total, 1 << step)
        publish_both(out + word * 4, low / total, high / total, exists.to(gl.int32), C)


@gluon.jit
def attention(args, at, layer, vectors, parity, C: gl.constexpr):
    """Attention of this block's tasks: first all splits, then their combination, so that no block waits for itself."""
    T: gl.constexpr = C.table
    at = same_thread(at, C)
    for number in range(gl.program_id(0), T.attention_tasks, T.blocks):
        task = task_of(args, number, vectors.window, C)
        active, tokens, start = active_splits(task, C)
        if task.split < active:
            attend(args, at, layer, vectors, number, task, active, tokens, start, parity, C)
    for number in range(gl.program_id(0), T.attention_tasks, T.blocks):
        task = task_of(args, number, vectors.window, C)
        active, _, _ = active_splits(task, C)
        if (task.split < active) & (active > 1):
            combine(args, at, layer, number, task, active, C)
