"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for few tokens, any code width, mma.sync and cp.async: sm_80 and newer.

Reads   x fp16 or bf16, rows of 16-byte pieces; w in FragmentOrder, one stream per strip of 16 rows; scales in the same order
Grid    blocks of rows x blocks of tokens x splits of K; about one block of threads per SM, all in one wave
Warps   warps_n x warps_k: rows of warps own `strips` strips each, columns of warps share the steps of 128 k in turn
Ring    every warp fills and reads a ring of its own: no barrier in the main loop, all slots in flight (parts/ring.py)
Step    codes -> halves -> mma.sync, group scales in fp32 on the group's sum (parts/step.py)
Sum     the slices of K meet once, in shared memory, in a fixed order: same input, same bits. With splits > 1 the block that
        comes last adds the sums of all splits, again in order
Exact   decoding is exact; sums in fp32; one rounding at the store. Tested: tests/ops/test_fragment_gemm.py
Source  fragments: PTX ISA; the private ring and measurements: docs/log.md
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.mixed_gemm import GemmShape, RingTile
from lowbit.kernels.parts.gluon import Scalar, Tuple, aggregate, barrier, gl, gluon, half_type, ptx, source_digest
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.ring import Ring
from lowbit.kernels.parts.step import STEP_K, STEP_TILES, Step
from lowbit.pack.weight import WeightForm


@dataclass(frozen=True)
class RingGemm:
    """All that is fixed when the kernel is compiled. Of two equal ones, results are equal to the last bit.

    `overlap` starts the weight copies before the kernel before has finished (programmatic dependent launch, sm_90).
    """

    ring: Ring
    warps_n: int
    warps_k: int
    splits: int
    channel_scale: bool
    bias: bool
    overlap: bool
    digest: str = source_digest()

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def slices(self) -> int:
        """Slices of K over all blocks; slice i takes the steps i, i + slices, i + 2 slices, ..."""
        return self.warps_k * self.splits

    @property
    def block_strips(self) -> int:
        """Strips of 16 rows of a block."""
        return self.warps_n * self.ring.strips

    @property
    def accumulators(self) -> int:
        return self.ring.strips * self.ring.step.accumulators

    @property
    def shared_rows(self) -> int:
        """Shared memory in rows of one float32 per thread: the rings, and in their place at the end the accumulators."""
        return max(-(-self.ring.bytes * self.warps // (4 * self.threads)), self.accumulators)

    @property
    def outputs(self) -> int:
        """Elements of y that each thread finishes."""
        return -(-self.accumulators // self.warps_k)

    @property
    def start_of_ring(self) -> str:
        # The kernel has one allocation, so its offset is 0.
        return "{ .reg .b32 start; mov.u32 start, global_smem; add.u32 $0, start, $1; }"

    @property
    def store_sum(self) -> str:
        """One accumulator to shared memory: $1 byte, $2 value."""
        return "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 at, at, $1; st.shared.f32 [at], $2; mov.b32 $0, 0; }"

    @property
    def add_slices(self) -> str:
        """The sum of one accumulator over the slices of K, which lie 128 bytes apart: $1 byte of the first."""
        lines = [".reg .b32 at; .reg .f32 v;", "mov.u32 at, global_smem; add.u32 at, at, $1; ld.shared.f32 $0, [at];"]
        lines += [f"ld.shared.f32 v, [at+{128 * i}]; add.f32 $0, $0, v;" for i in range(1, self.warps_k)]
        return "{\n" + "\n".join(lines) + "\n}"


STEP = gl.constexpr(STEP_K)
TILES = gl.constexpr(STEP_TILES)


@aggregate
class Addresses:
    """A lane, and where in the ring of its warp its pieces of 16, 8 and 4 bytes, its scales, row pair and x lie."""

    lane: gl.tensor
    at16: gl.tensor
    at8: gl.tensor
    at4: gl.tensor
    at_scale: gl.tensor
    at_pair: gl.tensor
    at_x: gl.tensor


@aggregate
class Source:
    """Where in global memory the next step's codes, scales and x lie for this lane, from strip to strip and from 8 tokens to
    the next; which tokens exist; how many tiles of codes and how many k are left."""

    w: gl.tensor
    w_strip: Scalar
    scale: Scalar
    scale_strip: Scalar
    x: gl.tensor
    x_eight: Scalar
    x_size: Tuple
    tiles: gl.tensor
    ks: gl.tensor


@gluon.jit
def copy_step(ring, source, C: gl.constexpr, d: gl.constexpr, codes: gl.constexpr, tokens: gl.constexpr):
    """Starts the copies of step d, counted from where `source` stands: one strip's codes; x with the first strip."""
    R: gl.constexpr = C.ring
    EIGHTS: gl.constexpr = R.step.eights
    strip: gl.constexpr = d % R.strips
    ahead: gl.constexpr = d // R.strips * C.slices  # steps of K
    s = source
    if tokens and strip == 0:
        for eight in gl.static_range(EIGHTS):
            gl.inline_asm_elementwise(
                ptx(R.copy_x, d, eight), "=r,r,l,r,r",
                [ring.at_x, s.x + (eight * s.x_eight + ahead * STEP), s.x_size[eight], s.ks - ahead * STEP],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    if codes:
        gl.inline_asm_elementwise(
            ptx(R.copy_codes, d), "=r,r,r,l,l,r,r",
            [ring.at16, ring.at_scale, s.w + (strip * s.w_strip + ahead * (R.code_bytes // 4)),
             s.scale + (strip * s.scale_strip + ahead * (R.scale_bytes // 2)), ring.lane, s.tiles - ahead * TILES],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if tokens:
        gl.inline_asm_elementwise(
            "cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def advance(source, C: gl.constexpr):
    """`source` one iteration further along K."""
    s = source
    steps: gl.constexpr = C.ring.rounds * C.slices
    w = s.w + steps * (C.ring.code_bytes // 4)
    scale = s.scale + steps * (C.ring.scale_bytes // 2)
    return Source(
        w, s.w_strip, scale, s.scale_strip, s.x + steps * STEP, s.x_eight, s.x_size, s.tiles - steps * TILES,
        s.ks - steps * STEP,
    )  # fmt: skip


@gluon.jit
def read_step(ring, C: gl.constexpr, d: gl.constexpr, pending: gl.constexpr):
    """Waits for slot d and reads it: the lane's words of codes, then its scales."""
    return gl.inline_asm_elementwise(
        ptx(C.ring.read, d, pending), C.ring.read_constraints, [ring.at16, ring.at8, ring.at4, ring.at_pair],
        dtype=C.ring.read_types, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply(read, x, sums, acc, C: gl.constexpr, strip: gl.constexpr):
    """One step of one strip; the accumulators of the other strips pass through."""
    S: gl.constexpr = C.ring.step
    first: gl.constexpr = strip * S.accumulators
    end: gl.constexpr = first + S.accumulators
    new = gl.inline_asm_elementwise(
        S.asm, S.constraints, read[0 : S.words] + x + read[S.words :] + sums + acc[first:end],
        dtype=S.types, is_pure=True, pack=1,
    )  # fmt: skip
    return acc[0:first] + new + acc[end:]


@gluon.jit
def iteration(ring, source, read, acc, C: gl.constexpr, last: gl.constexpr):
    """All slots once. `read` is what was read of the slot to be used first; each freed slot is filled again at once."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.step
    DEPTH: gl.constexpr = R.depth
    x = ()
    sums = ()
    for d in gl.static_range(DEPTH):
        if d % R.strips == 0:
            x = gl.inline_asm_elementwise(
                ptx(R.read_x, d), R.x_constraints, [ring.at16], dtype=R.x_types, is_pure=False, pack=1
            )  # fmt: skip
            if S.sums > 0:
                sums = gl.inline_asm_elementwise(
                    S.sum_asm, S.sum_constraints, x, dtype=S.sum_types, is_pure=True, pack=1
                )  # fmt: skip
        following = read
        if not last:
            copy_step(ring, source, C, d + R.depth, True, True)
        if not last or d + 1 < R.depth:
            following = read_step(ring, C, d + 1, R.depth - 2 - d if last else R.depth - 1)
        acc = multiply(read, x, sums, acc, C, d % R.strips)
        read = following
    return read, acc


@gluon.jit
def sum_of_slices(shared, acc, lane, warp, C: gl.constexpr):
    """Adds what the warps of a block have for their slices of K. Thread by thread, C.outputs sums; see `store`."""
    ACCUMULATORS: gl.constexpr = C.accumulators
    OUTPUTS: gl.constexpr = C.outputs
    barrier()
    shared.index(0).store(acc[0])  # as below; it also keeps the allocation, which all the rest reaches by address, alive
    for i in gl.static_range(1, ACCUMULATORS):
        gl.inline_asm_elementwise(
            C.store_sum, "=r,r,f", [(i * C.threads + warp * 32 + lane) * 4, acc[i]], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
    barrier()
    sums = ()
    for i in gl.static_range(OUTPUTS):
        index = i * C.warps + warp
        element = gl.minimum(index // C.warps_n, C.accumulators - 1)
        at = (element * C.warps + index % C.warps_n * C.warps_k) * 128 + lane * 4
        sums = sums + (
            gl.inline_asm_elementwise(C.add_slices, "=&f,r", [at], dtype=gl.float32, is_pure=False, pack=1),
        )  # fmt: skip
    return sums


@gluon.jit
def store(y, sums, channel_scale, bias, factor, lane, warp, first_strip, first_token, M, N, C: gl.constexpr):
    """Scales, adds the bias and stores: lanes of a warp write 8 neighbouring rows of w for each of 4 tokens."""
    S: gl.constexpr = C.ring.step
    OUTPUTS: gl.constexpr = C.outputs
    for i in gl.static_range(OUTPUTS):
        index = i * C.warps + warp  # accumulator of the lane, then row of warps
        element = index // C.warps_n
        strip = first_strip + index % C.warps_n * C.ring.strips + element // S.accumulators
        row = strip * 16 + (lane >> 2) + 8 * ((element >> 1) & 1)
        token = first_token + (element % S.accumulators) // 4 * 8 + (lane & 3) * 2 + (element & 1)
        exists = (element < C.accumulators) & (row < N) & (token < M)
        total = sums[i] * factor
        if C.channel_scale:
            total *= gl.load(channel_scale + row, mask=exists, other=0.0)
        if C.bias:
            total += gl.load(bias + row, mask=exists, other=0.0).to(gl.float32)
        gl.store(y + token.to(gl.int64) * N + row, total.to(y.dtype.element_ty), mask=exists)


@gluon.jit
def meet(partial, arrived, sums, thread, C: gl.constexpr):
    """Leaves this block's sums to the last block of its rows and tokens; that block gets True and the sums of all splits.

    `arrived` counts the blocks that are through and is 0 again afterwards.
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


@gluon.jit(do_not_specialize=["M", "N", "K", "x_stride", "strips", "tiles", "scale_strip", "iterations"])
def ring_gemm(
    y, x, w, scale, channel_scale, bias, partial, arrived, M, N, K, x_stride, strips, tiles, scale_strip, iterations, factor,
    C: gl.constexpr,
):  # fmt: skip
    """One block: C.block_strips strips of w, C.ring.step.tokens tokens, its slices of K. An iteration uses every slot once."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.step
    DEPTH: gl.constexpr = R.depth
    EIGHTS: gl.constexpr = S.eights
    ACCUMULATORS: gl.constexpr = C.accumulators
    shared = gl.allocate_shared_memory(gl.float32, [C.shared_rows, C.threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, C.threads, gl.BlockedLayout([1], [32], [C.warps], [0]))
    lane = thread & 31
    warp = thread >> 5
    slice_k = gl.program_id(2) * C.warps_k + warp % C.warps_k
    # The last block may overlap the one before: both then store the same values.
    first_strip = gl.minimum(gl.program_id(0) * C.block_strips, strips - C.block_strips)
    first_token = gl.program_id(1) * S.tokens
    strip = first_strip + warp // C.warps_k * R.strips
    start = gl.inline_asm_elementwise(C.start_of_ring, "=&r,r", [warp * R.bytes], dtype=gl.int32, is_pure=True, pack=1)
    place, group = lane & 3, lane >> 2
    ring = Addresses(
        lane, start + lane * 16, start + lane * 8, start + lane * 4, start + lane * R.scale_copy,
        start + group * S.pair_bytes, start + (place * 8 + group) * 16,
    )  # fmt: skip

    w_strip = tiles * (32 * S.bits)
    w += strip.to(gl.int64) * w_strip + slice_k * (R.code_bytes // 4) + lane * 4
    if R.scale_copy > 0:
        scale += (
            strip.to(gl.int64) * scale_strip
            + slice_k * (R.scale_bytes // 2)
            + lane * (R.scale_copy // 2) % (R.scale_bytes // 2)
        )
    x_size = ()
    for eight in gl.static_range(EIGHTS):
        x_size = x_size + (gl.where(first_token + eight * 8 + group < M, 16, 0),)
    # Tokens that do not exist are not read; their addresses only have to be somewhere.
    x += (first_token + group).to(gl.int64) * x_stride + slice_k * STEP + place * 8
    source = Source(
        w, w_strip, scale, scale_strip, x, 8 * x_stride, x_size, tiles - slice_k * TILES, K - slice_k * STEP - place * 8
    )  # fmt: skip

    if C.overlap:
        for d in gl.static_range(DEPTH):
            copy_step(ring, source, C, d, True, False)
        gl.inline_asm_elementwise(
            "griddepcontrol.wait;\n griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        for d in gl.static_range(DEPTH):
            copy_step(ring, source, C, d, False, True)
    else:
        for d in gl.static_range(DEPTH):
            copy_step(ring, source, C, d, True, True)

    THREADS: gl.constexpr = C.threads
    zeros = gl.zeros((THREADS,), gl.float32, gl.BlockedLayout([1], [32], [C.warps], [0]))
    acc = ()
    for _ in gl.static_range(ACCUMULATORS):
        acc = acc + (zeros,)
    read = read_step(ring, C, 0, R.depth - 1)
    for _ in range(0, iterations - 1):
        read, acc = iteration(ring, source, read, acc, C, False)
        source = advance(source, C)
    read, acc = iteration(ring, source, read, acc, C, True)
    sums = sum_of_slices(shared, acc, lane, warp, C)
    if C.splits == 1:
        store(y, sums, channel_scale, bias, factor, lane, warp, first_strip, first_token, M, N, C)
    else:
        last, totals = meet(partial, arrived, sums, thread, C)
        if last:
            store(y, totals, channel_scale, bias, factor, lane, warp, first_strip, first_token, M, N, C)


class RingPlan:
    """All of a product that does not depend on the tensors' contents: made once for a shape, called many times."""

    def __init__(
        self, shape: GemmShape, tile: RingTile, form: WeightForm, dtype: torch.dtype, bias: bool, overlap: bool
    ) -> None:
        self.shape, self.tile = shape, tile
        self.config = _config(tile, form, half_type(dtype), shape.k, bias, overlap)
        self.grid = (-(-shape.strips // tile.block_strips), -(-shape.m // tile.tokens), tile.splits)
        self.launch = Launcher(ring_gemm, self.grid, self.config.warps, overlap=overlap)
        self.iterations = -(-shape.steps(STEP_K) // (self.config.slices * tile.rounds))
        self.factor = self.config.ring.step.conversion.scale_factor

    @property
    def workspace(self) -> tuple[int, int]:
        """Elements of the two workspaces, float32 sums and int32 counters (which are zero before and after)."""
        if self.tile.splits == 1:
            return 0, 0
        blocks = self.grid[0] * self.grid[1]
        return blocks * self.tile.splits * self.config.outputs * self.config.threads, blocks

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor,
    ) -> Tensor:  # fmt: skip
        """y [M, N] of x [M, K], whose rows start at multiples of 16 bytes; all tensors on the current device."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        self.launch(
            y, x, codes, channel_scale if scale is None else scale, channel_scale, bias, sums, arrived, m, n, k, x.stride(0),
            codes.shape[0], codes.shape[1], 0 if scale is None else scale.stride(0), self.iterations, self.factor, self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(tile: RingTile, form: WeightForm, dtype: HalfType, k: int, bias: bool, overlap: bool) -> RingGemm:
    step = Step(form.format, dtype, tile.tokens, form.group, form.zero, form.scale_dtype)
    whole = k % (STEP_K * tile.warps_k * tile.splits * tile.rounds) == 0
    ring = Ring(step, tile.strips, tile.rounds, not whole)
    return RingGemm(ring, tile.warps_n, tile.warps_k, tile.splits, form.channel_scale, bias, overlap)
