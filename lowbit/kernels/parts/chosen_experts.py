"""The experts of a token in the warps of a persistent kernel: rows of a router, the choice, segments of weights.

A router's rows are divided among all blocks: a warp multiplies 128 columns of a row, 4 in a lane. The choice takes one warp,
which has logit l + 32 i in lane l. Each lane sorts its logits; then a turn is two reductions of the lanes' first ones: the
largest key, then the lowest expert with that key. So the experts of a token are distinct and exist, whatever the logits are.

A slot of down's weights has k blocks of a few chosen experts one after another. Each of these segments is contiguous in memory,
and a lane of the loader copies one.

Source  kernels/elementwise/route.py has the same choice, for many tokens
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import asm, gl, gluon, run
from lowbit.kernels.parts.head_rows import exchanged

NEVER = gl.constexpr(-(1 << 31))
"""Key of an expert that must not be chosen; it is below the key of -inf."""


class ChosenExperts:
    """The PTX of the choice, for a kernel's configuration to inherit. `normalize`: weights are a softmax over the chosen
    experts, not over all."""

    normalize: bool

    @property
    def logits_of_lane(self) -> int:
        """Number of logits in each lane."""
        raise NotImplementedError

    load_four = "ld.global.v2.b32 {$0, $1}, [$2];"
    """PTX that loads 4 halves in 2 words."""

    read_four = "ld.shared.v2.b32 {$0, $1}, [$2];"
    four_types = (gl.int32,) * 2
    read_word = "ld.shared.b32 $0, [$1];"
    store_word = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }"
    largest = "redux.sync.max.s32 $0, $1, 0xffffffff;"
    from_first = "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"
    smallest = "redux.sync.min.s32 $0, $1, 0xffffffff;"

    arrive = (
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; bar.warp.sync 0xffffffff;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }"
    )
    """PTX by which lane 0 ($2) arrives at barrier $1 for its warp, whose stores before that are visible to those who wait."""

    def fill_segments(self, with_scales: bool) -> str:
        """PTX that fills a slot with segments, one of each lane: $1 lane, $2 barrier, $3 place of codes, $4 their source, $5
        their bytes, $6 bytes of all lanes; with scales $7 place, $8 source, $9 bytes."""
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        lines = [".reg .pred p; setp.eq.s32 p, $1, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], $6;"]
        lines += ["bar.warp.sync 0xffffffff;", f"setp.ne.s32 p, $5, 0; @p {copy} [$3], [$4], $5, [$2];"]
        if with_scales:
            lines.append(f"@p {copy} [$7], [$8], $9, [$2];")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"


@gluon.jit
def four_of_router(address, C: gl.constexpr):
    """Returns 4 columns of a router's row, in 2 words."""
    return asm(C.load_four, "=r,=r,l", [address], C.four_types)


@gluon.jit
def product_of_four(w, place, C: gl.constexpr):
    """Returns the product of 4 columns of a row and those of x at an address in shared memory, float32."""
    v = asm(C.unpack, C.unpack_constraints, w + asm(C.read_four, "=r,=r,r", [place], C.four_types), C.unpack_types)
    return v[0] * v[4] + v[1] * v[5] + v[2] * v[6] + v[3] * v[7]


@gluon.jit
def read_word(place, C: gl.constexpr):
    """Returns a word of shared memory."""
    return asm(C.read_word, "=r,r", [place], gl.int32)


@gluon.jit
def key_of(bits):
    """Returns the int32 key of the bits of a float32, in the same order; NaN counts as -inf, and 0 equals -0."""
    x = bits.to(gl.float32, bitcast=True)
    bits = gl.where(x == 0.0, 0.0, gl.where(x == x, x, float("-inf"))).to(gl.int32, bitcast=True)
    return gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@gluon.jit
def sorted_keys(words, lane, experts: gl.constexpr, C: gl.constexpr):
    """Returns (keys, experts) of a lane's logits, whose bits are `words`: the largest key first, of equal ones the first
    expert."""
    COUNT: gl.constexpr = C.logits_of_lane
    keys = ()
    numbers = ()
    for i in gl.static_range(COUNT):
        keys = keys + (gl.where(lane + 32 * i < experts, key_of(words[i]), NEVER),)
        numbers = numbers + (lane + 32 * i,)
    for turn in gl.static_range(COUNT - 1):
        for i in gl.static_range(COUNT - 1 - turn):
            later: gl.tensor = keys[i + 1] > keys[i]
            both = (gl.where(later, keys[i + 1], keys[i]), gl.where(later, keys[i], keys[i + 1]))
            of_both = (gl.where(later, numbers[i + 1], numbers[i]), gl.where(later, numbers[i], numbers[i + 1]))
            keys = keys[0:i] + both + keys[i + 2 : COUNT]
            numbers = numbers[0:i] + of_both + numbers[i + 2 : COUNT]
    return keys, numbers


@gluon.jit
def choose(words, lane, experts: gl.constexpr, top_k: gl.constexpr, C: gl.constexpr):
    """Returns (expert, key) of the choice with a lane's number, of logits whose bits are `words`; lanes from top_k on have
    those of the first."""
    COUNT: gl.constexpr = C.logits_of_lane
    keys, numbers = sorted_keys(words, lane, experts, C)
    own = lane * 0
    own_key = lane * 0
    for turn in gl.static_range(top_k):
        best = asm(C.largest, "=r,r", [keys[0]], gl.int32)
        expert = asm(C.smallest, "=r,r", [gl.where(keys[0] == best, numbers[0], experts - 1)], gl.int32)
        this = (lane == turn) | (turn == 0)
        own, own_key = gl.where(this, expert, own), gl.where(this, best, own_key)
        taken = numbers[0] == expert
        left = ()
        of_left = ()
        for i in gl.static_range(COUNT - 1):
            left = left + (gl.where(taken, keys[i + 1], keys[i]),)
            of_left = of_left + (gl.where(taken, numbers[i + 1], numbers[i]),)
        keys = left + (gl.where(taken, NEVER, keys[COUNT - 1]),)
        numbers = of_left + (numbers[COUNT - 1],)
    return own, own_key


@gluon.jit
def warp_sum(x):
    """Returns the sum of a warp's lanes, which has the same bits in all of them."""
    for step in gl.static_range(5):
        x += exchanged(x, 1 << step)
    return x


@gluon.jit
def weights_of(words, own_key, root, lane, experts: gl.constexpr, top_k: gl.constexpr, C: gl.constexpr):
    """Returns a lane's router weight, float32: the softmax of logits times `root` over all experts, or with C.normalize over
    the chosen ones. `own_key` as returned by `choose`."""
    TURNS: gl.constexpr = C.logits_of_lane
    logit = (own_key ^ ((own_key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True) * root
    top = asm(C.from_first, "=r,r", [logit], gl.float32)
    own = gl.exp(logit - top)
    if C.normalize:
        total = warp_sum(gl.where(lane < top_k, own, 0.0))
    else:
        total = lane.to(gl.float32) * 0.0
        for i in gl.static_range(TURNS):
            power = gl.exp(words[i].to(gl.float32, bitcast=True) * root - top)
            total += gl.where(lane + 32 * i < experts, power, 0.0)
        total = warp_sum(total)
    return own / total


@gluon.jit
def store_choice(place, lane, value, top_k: gl.constexpr, C: gl.constexpr):
    """Stores a word of each choice, int32 or float32, in shared memory."""
    exists = (lane < top_k).to(gl.int32)
    run(C.store_word, "=r,r,r,r", [place + 4 * lane, value.to(gl.int32, bitcast=True), exists])
