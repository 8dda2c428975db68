"""What LoRA adapters add to a product, in its epilogue: y += b t, of the adapter of each token.

t = a x comes from the launch before the product (sm80/lora_sums.py): float32 [splits, M, parts, R], divided by the RMS where
the product has a norm. Its splits are added in order and rounded to x's type, as PEFT rounds a x; b t is added in float32 after
the bias, before gate and residual. Tokens without an adapter add zeros.

Small M  a block adds the splits of its tokens up before the main loop, into shared memory. A thread multiplies them by the R
         numbers of b of each of its outputs, in order
Large M  warps multiply b [rows, R] by t of the tokens with mma.sync, adapter after adapter; its sums have the layout of wgmma's
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.half import HalfType
from lowbit.kernels.parts.gluon import Scalar, aggregate, gl, gluon, mma_v2, ptx, run


@dataclass(frozen=True)
class LoraTerms:
    """The adapters of a product, at compile time. widths: columns of each part, side by side; with `alternates` two parts
    alternate by 8 columns. rank: a multiple of 16. splits: sums of t that are added up. dtype: type of x and b."""

    widths: tuple[int, ...]
    alternates: bool
    adapters: int
    rank: int
    splits: int
    dtype: HalfType

    @property
    def parts(self) -> int:
        return len(self.widths)

    def begin(self, part: int) -> int:
        """First column of a part."""
        return sum(self.widths[:part])

    @property
    def load_b(self) -> str:
        """PTX that loads the R / 2 words of a row of b. Inputs: its address; 0 for zeros instead."""
        words = self.rank // 2
        lines = [f".reg .pred p; setp.ne.s32 p, ${words + 1}, 0;", *(f"mov.b32 ${i}, 0;" for i in range(words))]
        for i in range(0, words, 4):
            to = ", ".join(f"${i + j}" for j in range(4))
            lines.append(f"@p ld.global.v4.b32 {{{to}}}, [${words}+{4 * i}];")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def load_b_constraints(self) -> str:
        return ",".join(["=&r"] * (self.rank // 2) + ["l", "r"])

    @property
    def words_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (self.rank // 2)

    @property
    def dot(self) -> str:
        """PTX that multiplies the R float32 numbers of t at byte $1 of shared memory by R / 2 words of b, from $2 on."""
        lines = [".reg .b32 at; .reg .b16 h0, h1; .reg .f32 t0, t1, t2, t3, low, high;"]
        lines += ["mov.u32 at, global_smem; add.u32 at, at, $1; mov.b32 $0, 0;"]
        for i in range(self.rank // 2):
            word = f"${2 + i}"
            if i % 2 == 0:
                lines.append(f"ld.shared.v4.f32 {{t0, t1, t2, t3}}, [at+{8 * i}];")
            if self.dtype == "fp16":
                lines.append(f"mov.b32 {{h0, h1}}, {word}; cvt.f32.f16 low, h0; cvt.f32.f16 high, h1;")
            else:
                lines.append(f"shl.b32 low, {word}, 16; and.b32 high, {word}, 0xffff0000;")
            first = 2 * (i % 2)
            lines.append(f"fma.rn.f32 $0, low, t{first}, $0; fma.rn.f32 $0, high, t{first + 1}, $0;")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def dot_constraints(self) -> str:
        return ",".join(["=&f", "r", *["r"] * (self.rank // 2)])


@aggregate
class LoraArgs:
    """t float32 [splits, M, parts, R], b [adapters, N, R] in x's type, adapter_of int32 [M]; None without adapters."""

    t: Scalar
    b: Scalar
    adapter_of: Scalar


PREFETCH = gl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }")
"""PTX that prefetches a sector of 32 bytes into L2, if $2 is not 0."""


@gluon.jit
def prefetch_b(lora, adapter, channel, needed, N, C: gl.constexpr):
    """Prefetches rows of b into L2 where `needed` is not 0; else their loads in the epilogue would wait for memory."""
    RANK: gl.constexpr = C.epilogue.lora.rank
    row = lora.b + (adapter.to(gl.int64) * N + channel) * RANK
    for sector in gl.static_range(RANK // 16):
        run(PREFETCH, "=r,l,r", [row + sector * 16, needed])


@gluon.jit
def prefetch_tile(lora, first_row, first_token, N, M, C: gl.constexpr):
    """Prefetches the rows of b of a tile, for the adapters of its tokens."""
    ADAPTERS: gl.constexpr = C.epilogue.lora.adapters
    TOKENS: gl.constexpr = C.tokens
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [C.warps, 1], [16, 8]), 2)
    tokens = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    own = gl.load(lora.adapter_of + tokens, mask=tokens < M, other=-1)
    thread = gl.arange(0, C.threads, C.threads_layout)
    row = first_row + thread % C.rows
    needed = ((thread < C.rows) & (row < N)).to(gl.int32)
    for adapter in range(ADAPTERS):
        if gl.max((own == adapter).to(gl.int32), axis=0) > 0:
            prefetch_b(lora, adapter + thread * 0, row, needed, N, C)


@gluon.jit
def part_of(column, C: gl.constexpr):
    """Returns the part of a column."""
    L: gl.constexpr = C.epilogue.lora
    PARTS: gl.constexpr = L.parts
    if L.alternates:
        return column // 8 % 2
    else:
        part = column * 0
        for p in gl.static_range(1, PARTS):
            part += (column >= ptx(L.begin, p)).to(gl.int32)
        return part


@gluon.jit
def add_terms(sums, lora, first_row, first_token, N, M, C: gl.constexpr):
    """Adds b t of the adapters of all tokens to a tile of sums [rows, tokens]."""
    L: gl.constexpr = C.epilogue.lora
    PARTS: gl.constexpr = L.parts
    SPLITS: gl.constexpr = L.splits
    RANK: gl.constexpr = L.rank
    ADAPTERS: gl.constexpr = L.adapters
    TOKENS: gl.constexpr = C.tokens
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.warps, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, A))
    tokens = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, B))
    own = gl.load(lora.adapter_of + tokens, mask=tokens < M, other=-1)
    part = part_of(rows, C)
    total = gl.convert_layout(sums, LAYOUT, assert_trivial=True)
    for p in gl.static_range(PARTS):
        if L.alternates or ((first_row < ptx(L.begin, p + 1)) & (first_row + C.rows > ptx(L.begin, p))):
            for first_rank in gl.static_range(0, RANK, 16):
                rank = p * RANK + first_rank + gl.arange(0, 16, gl.SliceLayout(1, B))
                of_t = lora.t + (tokens[None, :] * (PARTS * RANK) + rank[:, None])
                inner = gl.zeros([16, TOKENS], gl.float32, B)
                for split in gl.static_range(SPLITS):
                    at = of_t + split * M * (PARTS * RANK)
                    inner += gl.load(at, mask=(own >= 0)[None, :], other=0.0, cache_modifier=".cg")
                halves = inner.to(lora.b.dtype.element_ty)
                for adapter in range(ADAPTERS):
                    mine = own == adapter
                    if gl.max(mine.to(gl.int32), axis=0) > 0:
                        of_b = lora.b + (adapter * N + rows).to(gl.int64)[:, None] * RANK
                        of_b += first_rank + gl.arange(0, 16, gl.SliceLayout(0, A))[None, :]
                        b = gl.load(of_b, mask=((part == p) & (rows < N))[:, None], other=0.0)
                        total = mma_v2(b, gl.where(mine[None, :], halves, 0.0), total)
    return gl.convert_layout(total, C.accumulator, assert_trivial=True)
