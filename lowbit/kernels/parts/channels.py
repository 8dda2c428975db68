"""Channels of x in the order of the codes, or times a factor each, for few tokens: inside the ring kernel, not by one more.

All of x lies in shared memory behind the rings, as it came and times its factors. Where a warp would copy 128 k of x to a slot
of its ring, it gathers them from there: each lane 4 neighbouring k of a token, whose order it has asked for one step before.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.half import HalfType
from lowbit.kernels.parts.gluon import Scalar, Tuple, aggregate, gl, gluon, ptx, run
from lowbit.kernels.parts.step import STEP_K

MOST_TOKENS = 4
"""A step of a warp gathers 128 elements of each, about 10 instructions a token beside some hundred for each strip of codes."""

MOST_BYTES = 65_536
"""Of x in shared memory, which takes room from rings of other blocks."""

PIECE_BYTES = 16
"""Of x, as it is loaded."""


def channels_refusals(m: int, k: int) -> tuple[str, ...]:
    """Why x [m, k] is not gathered inside the product; empty if it is."""
    reasons = []
    if m > MOST_TOKENS:
        reasons.append(f"is for at most {MOST_TOKENS} tokens, got {m}")
    if k % 8:
        reasons.append(f"takes K in pieces of 8, got {k}")
    if 2 * tokens_held(m) * k > MOST_BYTES:
        reasons.append(f"holds {MOST_BYTES:,} bytes of x, got {2 * m * k:,}")
    return tuple(reasons)


def tokens_held(m: int) -> int:
    """Tokens that a kernel for m of them holds."""
    return 1 << (m - 1).bit_length()


@dataclass(frozen=True)
class Channels:
    """x of up to `rows` tokens with K `k`, from byte `start` of shared memory on; `order`, `factor`: what it is given."""

    dtype: HalfType
    rows: int
    k: int
    order: bool
    factor: bool
    start: int

    @property
    def bytes(self) -> int:
        """Of x."""
        return 2 * self.rows * self.k

    @property
    def row_pieces(self) -> int:
        """Pieces of a token."""
        return self.k // 8

    def turns(self, threads: int) -> int:
        """Pieces that a thread brings."""
        return -(-self.rows * self.row_pieces // threads)

    @property
    def bring(self) -> str:
        """Piece $3 of x from $1, times 8 factors from $2, to shared memory; nothing if $4 is 0."""
        load = "@p ld.global.v4.b32 {w0, w1, w2, w3}, [$1];"
        lines = [".reg .pred p; .reg .b32 w<4>, at; setp.ne.s32 p, $4, 0; mov.u32 at, global_smem; mad.lo.u32 at, $3, 16, at;"]
        lines.append(load)
        if self.factor:
            lines.append(".reg .f32 f<8>; .reg .b32 x<2>; .reg .b16 h<2>;")
            lines += ["@p ld.global.nc.v4.f32 {f0, f1, f2, f3}, [$2];", "@p ld.global.nc.v4.f32 {f4, f5, f6, f7}, [$2+16];"]
            kind = "f16" if self.dtype == "fp16" else "bf16"
            for i in range(4):
                if self.dtype == "fp16":
                    lines.append(f"mov.b32 {{h0, h1}}, w{i}; cvt.f32.f16 x0, h0; cvt.f32.f16 x1, h1;")
                else:
                    lines.append(f"shl.b32 x0, w{i}, 16; and.b32 x1, w{i}, 0xffff0000;")
                lines.append(f"mul.rn.f32 x0, x0, f{2 * i}; mul.rn.f32 x1, x1, f{2 * i + 1};")
                lines.append(f"cvt.rn.{kind}.f32 h0, x0; cvt.rn.{kind}.f32 h1, x1; mov.b32 w{i}, {{h0, h1}};")
        lines.append(f"@p st.shared.v4.b32 [at+{self.start}], {{w0, w1, w2, w3}};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    ask = (
        "{ .reg .pred p; setp.gt.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;\n"
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    """Four numbers of channels from $4 on, where $5 is more than 0."""

    def gather(self, slot: int) -> str:
        """4 k of each of $3 tokens to a slot of x at byte `slot` of the ring, $1 being where the first one's go; zeros where $2
        is not more than 0, as there is no such k. $4 to $7 are their channels, or $4 is the first of them."""
        lines = [".reg .pred there, token; .reg .b32 at, a<4>, w<2>; .reg .b16 h<4>; setp.gt.s32 there, $2, 0;"]
        lines.append("mov.u32 at, global_smem;")
        count = 4 if self.order else 1
        lines += [f"mad.lo.u32 a{i}, ${4 + i}, 2, at;" for i in range(count)]
        for row in range(self.rows):
            source = self.start + 2 * self.k * row
            lines.append(f"setp.gt.s32 token, $3, {row};")
            if self.order:
                lines += [f"mov.b16 h{i}, 0; @there ld.shared.b16 h{i}, [a{i}+{source}];" for i in range(4)]
                lines.append("mov.b32 w0, {h0, h1}; mov.b32 w1, {h2, h3};")
            else:
                lines.append(f"mov.b32 w0, 0; mov.b32 w1, 0; @there ld.shared.v2.b32 {{w0, w1}}, [a0+{source}];")
            lines.append(f"@token st.shared.v2.b32 [$1+{slot + 16 * row}], {{w0, w1}};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    @property
    def gather_constraints(self) -> str:
        return ",".join(["=r", *["r"] * (7 if self.order else 4)])


STEP = gl.constexpr(STEP_K)


@aggregate
class Gathered:
    """Where a lane's 4 k go in a slot of x, how many tokens there are, which channels come next; `order`, the k at which an
    iteration begins, and how many are left from there on."""

    to: gl.tensor
    tokens: Scalar
    next: Tuple
    order: Scalar
    k: gl.tensor
    left: gl.tensor


@gluon.jit
def ask(gathered, ahead: gl.constexpr, C: gl.constexpr):
    """The channels of the step that is `ahead` k on."""
    g = gathered
    if C.channels.order:
        return gl.inline_asm_elementwise(
            C.channels.ask, "=&r,=&r,=&r,=&r,l,r", [g.order + (g.k + ahead), g.left - ahead],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return (g.k + ahead,)


@gluon.jit
def begin_channels(order, start, slice_k, lane, M, K, C: gl.constexpr):
    """What a warp whose ring is at byte `start` gathers first; `order` is read, x is not."""
    to = start + lane // 8 * 512 + lane // 2 % 4 * 128 + lane % 2 * 8
    k = slice_k * STEP + lane * 4
    gathered = Gathered(to, M, (), order, k, K - k)
    return Gathered(to, M, ask(gathered, 0, C), order, k, K - k)


@gluon.jit
def bring_x(x, factor, thread, first_token, M, x_stride, C: gl.constexpr):
    """All of x to shared memory; to be followed by a barrier of the block."""
    PIECES: gl.constexpr = C.channels.row_pieces
    TURNS: gl.constexpr = ptx(C.channels.turns, C.threads)
    for turn in gl.static_range(TURNS):
        piece = thread + turn * C.threads
        row, column = piece // PIECES, piece % PIECES
        exists = (piece < PIECES * (M - first_token)) & (row < C.channels.rows)
        source = (x + ((first_token + row).to(gl.int64) * x_stride + column * 8)).to(gl.int64)
        factors = source
        if C.channels.factor:
            factors = (factor + column * 8).to(gl.int64)
        run(C.channels.bring, "=r,l,l,r,r", [source, factors, piece, exists.to(gl.int32)])


@gluon.jit
def gather(gathered, d: gl.constexpr, ahead: gl.constexpr, following: gl.constexpr, C: gl.constexpr):
    """The x of step d of the ring, which is `ahead` k on; asks for the channels of the step that is `following` k on."""
    g = gathered
    SLOT: gl.constexpr = ptx(C.ring.x_slot, d)
    given = (g.to, g.left - ahead, g.to * 0 + g.tokens) + g.next
    run(ptx(C.channels.gather, SLOT), C.channels.gather_constraints, given)
    return Gathered(g.to, g.tokens, ask(g, following, C), g.order, g.k, g.left)


@gluon.jit
def advance_channels(gathered, by: gl.constexpr):
    """`by` k further on."""
    g = gathered
    return Gathered(g.to, g.tokens, g.next, g.order, g.k + by, g.left - by)
