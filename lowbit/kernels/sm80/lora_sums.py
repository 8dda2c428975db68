"""t = a x of the LoRA adapter of each row, the launch before a product whose epilogue adds b t (parts/lora_epilogue.py): sm_80
and newer.

Reads   x fp16 or bf16 [M, K], rows of 16-byte vectors; a [adapters, parts, R, K] in x's type; adapter_of int32 [M], -1 for
        none; squares float32 [norm_parts, M] or None
Writes  t float32 [splits, M, parts, R], sums over splits of K, divided by the rows' RMS; not for rows without an adapter
Grid    splits x parts x groups of 16 ranks; adapters; blocks of 8 or 16 tokens. A block without a row of its adapter ends at
        once, but for the first, which waits for the previous kernel: a kernel that waits for this one relies on both
Warps   each takes chunks of 32 columns of its split, round-robin: three vectors of 16 bytes a lane are the operands of two
        mma.sync, whose columns of K are permuted alike. The sums of all warps are added in order, in shared memory
Overlap the first block, which may be the only one that starts early, prefetches the weights of all. The next kernel may start
        at once; adapter_of and the weights are loaded before the wait for the previous kernel
        (programmatic dependent launch, sm_90), so adapter_of must be older than that kernel
Exact   sums in float32, in an order that depends on K and on whether M is up to 8: no row's bits depend on other rows. Tested:
        tests/kernels/sm80/test_lora_sums.py
Source  LoRA: arXiv 2106.09685; groups of rows by adapter: Punica, arXiv 2310.18547; fragments: PTX ISA
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.gluon import asm, barrier, gl, gluon, half_type, run, source_digest
from lowbit.kernels.parts.k_block import mma
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.small_m_epilogue import STORE, across_groups, add_strided
from lowbit.kernels.parts.tile import Warps

WARPS = 16
CHUNK = 32
"""Columns of K that a warp multiplies at once: 8 a lane, 16 bytes."""

SMALL_TOKENS, TOKENS = 8, 16
"""Tokens of a block, for M up to the first number and for larger ones."""

MOST_CHUNKS, FEW_CHUNKS = 8, 4
"""Maximum number of chunks of a warp, whose weights, 8 words a lane and chunk, are in registers before the wait for the
previous kernel. With FEW_CHUNKS a block of 8 tokens has registers enough beside a block of the small-M kernel on an SM."""

REGISTERS = 64
"""Limit for each thread of a block of 8 tokens: 512 with so many and 256 of the small-M kernel, with up to 120, fit an SM."""

ENOUGH_SPLITS = 4
"""Number of splits of K from which on a block of 16 tokens takes more chunks instead: the product adds up all splits."""

PREFETCHED_ROWS = 64
"""Number of rows whose adapters the first block prefetches."""

PREFETCHED = gl.constexpr(PREFETCHED_ROWS)
ADD_WARPS = gl.constexpr(add_strided(WARPS, 128))


def splits_of(m: int, k: int) -> int:
    """Number of splits of K for M rows."""
    few, most = (-(-k // (WARPS * CHUNK * chunks)) for chunks in (FEW_CHUNKS, MOST_CHUNKS))
    return few if m <= SMALL_TOKENS else max(min(few, ENOUGH_SPLITS), most)


@dataclass(frozen=True)
class LoraSums(Warps):
    """The kernel's compile-time configuration. rank: a multiple of 16; norm_parts: rows of `squares`, 0: no norm."""

    dtype: HalfType
    parts: int
    rank: int
    adapters: int
    k: int
    tokens: int
    norm_parts: int
    overlap: bool
    digest: str = source_digest()

    chunk, waves = CHUNK, WARPS * CHUNK

    @property
    def warps(self) -> int:
        return WARPS

    @property
    def n8_tiles(self) -> int:
        return self.tokens // 8

    @property
    def elements(self) -> int:
        """Number of sums of a lane."""
        return 4 * self.n8_tiles

    @property
    def splits(self) -> int:
        """Number of splits of K."""
        return splits_of(self.tokens, self.k)

    @property
    def chunks(self) -> int:
        """Number of chunks of a warp."""
        return -(-self.k // (self.waves * self.splits))

    @property
    def groups(self) -> int:
        return self.rank // 16

    @property
    def prefetches(self) -> bool:
        """True if the first block prefetches the weights of all blocks, which may start late. Lanes take equal shares of an
        adapter, of whole 16-byte vectors."""
        return self.overlap and self.k % 16 == 0

    @property
    def prefetch(self) -> str:
        """PTX that prefetches a lane's share of an adapter, from $1 on, into L2 if $2 is not 0 in some lane of its warp."""
        return (
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; vote.sync.any.pred p, p, 0xffffffff;"
            f" @p cp.async.bulk.prefetch.L2.global [$1], {2 * self.share}; mov.b32 $0, 0; }}"
        )

    @property
    def share(self) -> int:
        """Number of elements of an adapter's weights that a lane prefetches."""
        return self.parts * self.rank * self.k // 32

    @property
    def load_weights(self) -> str:
        """PTX that loads four words at $4, zeros if $5 is 0."""
        return _loaded("ld.global.v4.b32")

    @property
    def load_x(self) -> str:
        """As `load_weights`, from the L2: the L1 may have what was there before the previous kernel."""
        return _loaded("ld.global.cg.v4.b32")

    @property
    def multiply(self) -> str:
        """PTX that adds a chunk's product to the sums $0 to $3. Inputs: words of row g of a, of row g + 8, of token g, sums."""
        low, high, x, sums = ([f"${4 * i + j}" for j in range(4)] for i in range(1, 5))
        out = ["$0", "$1", "$2", "$3"]
        first = mma(self.dtype, out, [low[0], high[0], low[1], high[1]], x[:2], sums)
        return f"{{ {first} {mma(self.dtype, out, [low[2], high[2], low[3], high[3]], x[2:], out)} }}"


def _loaded(instruction: str) -> str:
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    return f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {zeros} @p {instruction} {{$0, $1, $2, $3}}, [$4]; }}"


FOUR_WORDS, FOUR_FLOATS = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.float32,) * 4)
WORDS = gl.constexpr("=&r,=&r,=&r,=&r,l,r")
PRODUCT = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


@gluon.jit
def prefetch_weights(a, adapter_of, M, C: gl.constexpr):
    """Prefetches the weights of the adapters that rows have into L2; each warp takes every WARPS-th adapter."""
    ROUNDS: gl.constexpr = (C.adapters + C.warps - 1) // C.warps if C.prefetches else 0
    ROWS: gl.constexpr = PREFETCHED // 32
    thread = gl.arange(0, C.threads, C.threads_layout)
    lane, warp = thread & 31, thread >> 5
    for i in gl.static_range(ROUNDS):
        adapter = warp + i * C.warps
        some = lane * 0
        for j in gl.static_range(ROWS):
            row = lane + 32 * j
            some = some | (gl.load(adapter_of + row, mask=row < M, other=-1) == adapter).to(gl.int32)
        run(C.prefetch, "=r,l,r", [a + (adapter.to(gl.int64) * 32 + lane) * C.share, some])


@gluon.jit
def sum_of_squares(squares, lane, token, M, C: gl.constexpr):
    """Returns a lane's share of the sum of squares of its token: the lane groups take turns with the partial sums."""
    CHUNKS: gl.constexpr = (C.norm_parts + 7) // 8
    total = (lane * 0).to(gl.float32)
    for chunk in gl.static_range(CHUNKS):
        part = chunk * 8 + (lane >> 2)
        exists = (part < C.norm_parts) & (token < M)
        total += gl.load(squares + part * M + token, mask=exists, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def sums_of_block(shared, t, x, a, adapter_of, squares, M, x_stride, inverse_width, eps, factor, C: gl.constexpr):
    """Computes the sums of one block."""
    PARTS: gl.constexpr = C.parts
    SPLITS: gl.constexpr = C.splits
    CHUNKS: gl.constexpr = C.chunks
    N8_TILES: gl.constexpr = C.n8_tiles
    ELEMENTS: gl.constexpr = C.elements
    thread = gl.arange(0, C.threads, C.threads_layout)
    lane, warp = thread & 31, thread >> 5
    split, part = gl.program_id(0) % SPLITS, gl.program_id(0) // SPLITS % PARTS
    first_rank = gl.program_id(0) // (SPLITS * PARTS) * 16
    adapter, first_token = gl.program_id(1), gl.program_id(2) * C.tokens
    column = split * (C.waves * CHUNKS) + warp * C.chunk + (lane & 3) * 8
    of_a = (adapter * PARTS + part) * C.rank + first_rank + (lane >> 2)
    of_a = a + (of_a.to(gl.int64) * C.k + column)
    low, high = (), ()
    for c in gl.static_range(CHUNKS):
        needed = (column + c * C.waves < C.k).to(gl.int32)
        low = low + asm(C.load_weights, WORDS, [of_a + c * C.waves, needed], FOUR_WORDS)
        high = high + asm(C.load_weights, WORDS, [of_a + (c * C.waves + 8 * C.k), needed], FOUR_WORDS)
    # The sum that a thread finishes is that of its warp's number.
    element = gl.minimum(warp, ELEMENTS - 1)
    token = first_token + element // 4 * 8 + (lane & 3) * 2 + (element & 1)
    own = gl.load(adapter_of + token, mask=token < M, other=-1) == adapter
    of_x = ()
    xs = ()
    for n8_tile in gl.static_range(N8_TILES):
        other = first_token + n8_tile * 8 + (lane >> 2)
        xs = xs + ((gl.load(adapter_of + other, mask=other < M, other=-1) == adapter).to(gl.int32),)
        of_x = of_x + (x + (other.to(gl.int64) * x_stride + column),)
    if C.overlap:
        wait_for_previous_kernel()
    square = sum_of_squares(squares, lane, token, M, C)
    for n8_tile in gl.static_range(N8_TILES):
        values = ()
        for c in gl.static_range(CHUNKS):
            needed = xs[n8_tile] * (column + c * C.waves < C.k).to(gl.int32)
            values = values + asm(C.load_x, WORDS, [of_x[n8_tile] + c * C.waves, needed], FOUR_WORDS)
        loaded = square.to(gl.int32, bitcast=True)
        for c in gl.static_range(CHUNKS):
            loaded = loaded | values[4 * c]
        # Zeros that depend on all loads: else ptxas starts some of them only after the first products, a latency later.
        zero = (loaded & (M >> 31)).to(gl.float32, bitcast=True)
        acc = (zero, zero, zero, zero)
        for c in gl.static_range(CHUNKS):
            words = low[4 * c : 4 * c + 4] + high[4 * c : 4 * c + 4] + values[4 * c : 4 * c + 4]
            acc = asm(C.multiply, PRODUCT, words + acc, FOUR_FLOATS)
        if n8_tile == 0:
            shared.index(0).store(acc[0])  # also keeps the allocation alive, which PTX only uses by address
        for i in gl.static_range(4):
            run(STORE, "=r,r,f", [(n8_tile * 4 + i) * (4 * C.threads) + thread * 4, acc[i]])
    barrier()
    total = asm(ADD_WARPS, "=&f,r", [element * (4 * C.threads) + lane * 4], gl.float32)
    if C.norm_parts > 0:
        total *= gl.rsqrt(across_groups(square, C) * inverse_width + eps) / factor
    rank = first_rank + (lane >> 2) + 8 * ((element >> 1) & 1)
    to = t + (((split * M + token) * PARTS + part) * C.rank + rank)
    gl.store(to, total, mask=own & (warp < ELEMENTS))


@gluon.jit(do_not_specialize=["M", "x_stride"])
def lora_sums(t, x, a, adapter_of, squares, M, x_stride, inverse_width, eps, factor, C: gl.constexpr):
    """Lets the next kernel start; then blocks that have a row of their adapter compute its sums."""
    TOKENS: gl.constexpr = C.tokens
    shared = gl.allocate_shared_memory(gl.float32, [C.elements, C.threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if C.overlap:
        launch_next_kernel()
    some = gl.program_id(0) + gl.program_id(1) + gl.program_id(2) == 0
    if some:
        prefetch_weights(a, adapter_of, M, C)
    for i in gl.static_range(TOKENS):
        token = gl.program_id(2) * TOKENS + i
        some = some | (gl.load(adapter_of + token, mask=token < M, other=-1) == gl.program_id(1))
    if some:
        sums_of_block(shared, t, x, a, adapter_of, squares, M, x_stride, inverse_width, eps, factor, C)


class LoraSumsPlan:
    """Plan of a launch for one shape: created once, called many times."""

    def __init__(
        self, m: int, k: int, parts: int, rank: int, adapters: int, norm_parts: int, dtype: torch.dtype, machine: Machine
    ) -> None:  # fmt: skip
        tokens = SMALL_TOKENS if m <= SMALL_TOKENS else TOKENS
        self.m = m
        self.config = LoraSums(half_type(dtype), parts, rank, adapters, k, tokens, norm_parts, machine.arch.sm >= 90)
        c = self.config
        grid = c.splits * parts * c.groups, adapters, -(-m // tokens)
        registers = REGISTERS if tokens == SMALL_TOKENS else 0
        self.launch = Launcher(lora_sums, grid, WARPS, overlap=c.overlap, registers=registers)

    def __call__(
        self, x: Tensor, a: Tensor, adapter_of: Tensor, squares: Tensor | None, inverse_width: float, eps: float, factor: float
    ) -> Tensor:  # fmt: skip
        """Returns t [splits, M, parts, R]; all tensors on the current device."""
        c = self.config
        t = torch.empty((c.splits, self.m, c.parts, c.rank), dtype=torch.float32, device=x.device)
        self.launch(t, x, a, adapter_of, squares, self.m, x.stride(0), inverse_width, eps, factor, c)
        return t
