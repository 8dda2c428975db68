"""max_pool(requantize(convolution(images, w))): a network's first convolution and its 3 x 3 pool of stride 2, fused: sm_90a.

Computes tiles of 64 channels x 56 pooled pixels of one row, going down the image. K runs over the rows of the window, 64 bytes
        each. A pooled row needs two new rows of the convolution, the upper and the lower one: two int8 products that share rows
        of the image
Reads   image rows once, by TMA. They are operand B without any conversion; weights are operand A, in registers (below)
Pool    of the sums, since requantization is monotonic (s >= 0). First down, where the lower row's sums are kept for the next
        tile; then across, where the odd column of the pixel to the left comes from the neighbouring lane
Writes  through shared memory, 16 bytes per thread, one barrier per tile
Exact   the same bits as sm90/conv.py and kernels/elementwise/pool.py one after the other
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import ConvSpec, output_size
from lowbit.kernels.choose.conv import UNIT
from lowbit.kernels.parts.conv_inputs import map_arrived
from lowbit.kernels.parts.conv_plan import ConvLauncher, ConvPlan, most_registers
from lowbit.kernels.parts.conv_tile import UNIT_WORDS
from lowbit.kernels.parts.gluon import barrier, fence_async_shared, gl, gluon, part, ptx, run, source_digest
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.prologue import launch_next_and_wait_for_previous
from lowbit.kernels.parts.requantize import Requantize
from lowbit.kernels.parts.tile import Warps
from lowbit.kernels.sm90.tensor_map import image_map
from lowbit.pack.conv_layout import GROUP, PackedConv
from lowbit.pack.nhwc64 import CHANNEL_BLOCK, Nhwc64, padded_channels, pixel_elements
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS, StemImages
from lowbit.pack.stem_fragment import STEP_BYTES

# A network's first convolution with weights as operand A and unchanged image rows as operand B, as PTX. Without a swizzle,
# wgmma reads operand B as 8 rows of 16 bytes at a time, from any address. Here the rows are consecutive packed pixels
# (pack/stem.py). A window row of four packed pixels is two k32 steps; each row of operand B begins one packed pixel after the
# previous row. So windows overlap in shared memory, nothing is copied twice, and no instruction loads them. Weights stay in
# registers. A thread has the sums of two neighbouring channels, for both convolution columns of pooled pixels 4 j + (lane mod
# 4). Barriers: parts/pipeline.py. Source: PTX ISA, wgmma, matrix descriptor and K-major layout without swizzle.

STEPS = PIXEL_BYTES * WINDOW_PIXELS // STEP_BYTES
"""Number of k32 steps of a row of a window."""

STEP_REGISTERS = 4
"""Number of registers of operand A of a k32 step."""

COLUMNS = 112
"""Number of convolution columns of a tile: two for each of 56 pooled pixels."""

ROW_BYTES = (COLUMNS + WINDOW_PIXELS - 1) * PIXEL_BYTES
"""Bytes of a row of a strip: the pixels under the windows of a tile."""


@dataclass(frozen=True)
class StemRows:
    """PTX for windows of `window` image rows. A strip has one row more; strips are `strip_bytes` apart in shared memory."""

    strips: StageBarriers
    window: int
    strip_bytes: int
    sums = COLUMNS // 2
    """Number of sums per thread of one row of the convolution."""

    @property
    def copy(self) -> str:
        """PTX that, if $1 is not 0, waits until strip $2 has been read (parity $3), then fills it with tensor map $4.

        The strip begins $5 words of 8 bytes into row $6 of image $7; there are zeros outside the image.
        """
        copy = (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [to], [$4, {$5, $6, $7}], [bar];"
        )
        return self.strips.fill((self.window + 1) * ROW_BYTES, self.strip_bytes, 0, copy)

    @property
    def weights(self) -> int:
        """Number of registers with weights per thread."""
        return STEP_REGISTERS * STEPS * self.window

    @property
    def load(self) -> str:
        """PTX that loads the weights of thread $n + 1 from address $n, 16 bytes per k32 step, where n = `weights`."""
        n = self.weights
        lines = [f".reg .b64 from; mad.wide.u32 from, ${n + 1}, 16, ${n};"]
        for i in range(0, n, STEP_REGISTERS):
            registers = ", ".join(f"${i + j}" for j in range(STEP_REGISTERS))
            lines.append(f"ld.global.nc.v4.b32 {{{registers}}}, [from+{i // STEP_REGISTERS * 128 * 16}];")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def load_constraints(self) -> str:
        return ",".join(["=&r"] * self.weights + ["l", "r"])

    @property
    def products(self) -> str:
        """PTX of the products of a strip. Outputs: sums of the upper row, then of the lower row. Inputs: the weights, the index
        of the strip.

        Descriptor fields: the address / 16, 16 bytes between the halves of a step, 128 between groups of 8 rows.
        """
        sums, inputs = self.sums, 2 * self.sums
        rows = ["{" + ", ".join(f"${i}" for i in range(first, first + sums)) + "}" for first in (0, sums)]
        lines = [
            ".reg .b64 d; .reg .b32 at, high, here; .reg .pred adds;",
            f"mov.u32 at, global_smem; mad.lo.u32 at, ${inputs + self.weights}, {self.strip_bytes}, at;",
            f"shr.u32 at, at, 4; or.b32 at, at, {(STEP_BYTES // 2 // 16) << 16};",
            f"mov.u32 high, {8 * PIXEL_BYTES // 16}; setp.eq.u32 adds, high, 0;",
            "wgmma.fence.sync.aligned;",
        ]
        for step in range(STEPS * self.window):
            first = inputs + STEP_REGISTERS * step
            a = "{" + ", ".join(f"${first + i}" for i in range(STEP_REGISTERS)) + "}"
            if step == 1:
                lines.append("setp.ne.u32 adds, high, 0;")
            for down, row in enumerate(rows):
                offset = (step // STEPS + down) * ROW_BYTES + step % STEPS * STEP_BYTES
                lines.append(f"add.u32 here, at, {offset // 16}; mov.b64 d, {{here, high}};")
                lines.append(f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k32.s32.s8.s8 {row}, {a}, d, adds;")
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def products_constraints(self) -> str:
        return ",".join(["=r"] * 2 * self.sums + ["r"] * (self.weights + 1))


ACROSS = """{ .reg .b32 p; shfl.sync.idx.b32 p, $3, $4, 0x1F, 0xFFFFFFFF; max.s32 p, p, $1; max.s32 $0, p, $2; }"""
"""PTX that returns the largest of $1, $2 and the $3 of lane $4."""


def put(words: int, places: range, place_bytes: int) -> str:
    """PTX that writes codes of up to four of a thread's pixels to shared memory, $1 bytes from its start on. Either one word
    ($2) has a byte of each pixel, or two words ($2, $3) have two bytes of each. `places` are the pixels' indices; consecutive
    indices are `place_bytes` apart."""
    lines = [".reg .b32 at, x; .reg .b16 half; mov.u32 at, global_smem; add.u32 at, at, $1;"]
    size = 8 * words
    for i, place in enumerate(places):
        word, bit = divmod(size * i, 32)
        lines.append(f"shr.u32 x, ${2 + word}, {bit}; cvt.u16.u32 half, x; st.shared.u{size} [at+{place * place_bytes}], half;")
    return "{ " + "\n".join(lines) + "\nmov.b32 $0, 0; }"


GET = """{ .reg .pred there; .reg .b32 at, a, b, c, d; setp.ne.s32 there, $1, 0; mov.u32 at, global_smem; add.u32 at, at, $2;
    @there ld.shared.v4.b32 {a, b, c, d}, [at]; @there st.global.v4.b32 [$3], {a, b, c, d}; mov.b32 $0, 0; }"""
"""PTX that, if $1 is not 0, copies 16 bytes of shared memory, $2 bytes from its start on, to address $3."""


TILE_PIXELS = COLUMNS // 2
"""Number of pooled pixels of a tile. Where a row has more of them, the first pixel of a tile is only computed because the next
one needs its odd column."""

BLOCKS = 2
"""Number of blocks that share an SM."""

STAGES = 4
"""Number of strips in flight."""


@dataclass(frozen=True)
class StemPool(Warps):
    """The kernel's compile-time configuration: storage of the output, rows of a window.

    `odd_height`, `odd_width`: the convolution has an odd number of rows or columns, so the last pooled row or column covers one
    less.
    """

    y: str
    relu: bool
    window: int
    odd_height: bool
    odd_width: bool
    digest: str = source_digest()

    warps = 4
    stages = STAGES
    tile_pixels = TILE_PIXELS
    places = TILE_PIXELS // 4
    across = ACROSS
    get = GET

    @property
    def strip_bytes(self) -> int:
        return -(-(self.window + 1) * ROW_BYTES // UNIT) * UNIT

    @property
    def pixel_bytes(self) -> int:
        return Nhwc64(self.y).pixel_bytes(CHANNEL_BLOCK)

    @property
    def chunks(self) -> int:
        """Number of 16-byte vectors in 64 channels of a pixel."""
        return self.pixel_bytes // 16

    @property
    def turns(self) -> int:
        """Number of vectors of a tile that a thread stores."""
        return -(-TILE_PIXELS * self.chunks // self.threads)

    @property
    def out_start(self) -> int:
        """Byte offset of the output codes in shared memory, a double buffer of tiles."""
        return STAGES * self.strip_bytes

    @property
    def out_bytes(self) -> int:
        return -(-TILE_PIXELS * self.pixel_bytes // UNIT) * UNIT

    @property
    def barrier_unit(self) -> int:
        return (self.out_start + 2 * self.out_bytes) // UNIT

    @property
    def strips(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, STAGES, self.warps)

    @property
    def rows(self) -> StemRows:
        """PTX of copies and products."""
        return StemRows(self.strips, self.window, self.strip_bytes)

    @property
    def half(self) -> int:
        """Number of sums per thread of one row of the convolution."""
        return self.rows.sums

    @property
    def sums(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * 2 * self.half

    @property
    def weights(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.rows.weights

    @property
    def weight_bytes(self) -> int:
        return 4 * self.threads * self.rows.weights

    @property
    def requantize(self) -> Requantize:
        return Requantize(self.y, None, self.relu)

    @property
    def words(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.requantize.words

    @property
    def groups(self) -> int:
        """Number of groups of four of a thread's pixels; the last group may repeat the last pixel."""
        return -(-self.places // 4)

    @property
    def channels(self) -> tuple[int, ...]:
        """For each of the 8 values that are requantized together, which of a thread's two channels it is. With 4-bit codes the
        output is one word, with one byte (two codes) per pixel. With 8-bit codes it is two words, with two bytes per pixel."""
        return (0, 0, 0, 0, 1, 1, 1, 1) if self.y == "u4" else (0, 1) * 4

    @property
    def picks(self) -> tuple[int, ...]:
        """Indices of a thread's values (by channel, then pixel) in the order in which they are requantized, 8 per group."""
        pixels = [i % 4 if self.y == "u4" else i // 2 for i in range(GROUP)]
        return tuple(
            self.places * self.channels[i] + min(4 * group + pixels[i], self.places - 1)
            for group in range(self.groups)
            for i in range(GROUP)
        )

    @property
    def put_constraints(self) -> str:
        return "=r,r" + ",r" * self.requantize.words

    def put(self, group: int) -> str:
        """Writes codes of a group of pixels to shared memory."""
        places = range(4 * group, min(4 * group + 4, self.places))
        return put(self.requantize.words, places, 4 * self.pixel_bytes)


@gluon.jit
def copy_strip(at, maps, word, pooled_height, before, thread, C: gl.constexpr):
    """Starts the copy of strip `at` and returns the next strip."""
    slot, parity, row, image, left = at
    nought = thread * 0
    run(
        C.rows.copy, "=r,r,r,r,l,r,r,r",
        [
            ((thread == 0) & (left > 0)).to(gl.int32), nought + slot, nought + parity, maps + nought, nought + word,
            nought + (2 * row - before), nought + image,
        ],
    )  # fmt: skip
    slot = gl.where(slot + 1 == C.stages, 0, slot + 1)
    parity = gl.where(slot == 0, parity ^ 1, parity)
    row = gl.where(row + 1 == pooled_height, 0, row + 1)
    image = gl.where(row == 0, image + 1, image)
    return slot, parity, row, image, left - 1


@gluon.jit
def tallest(sums, above, row, height, C: gl.constexpr):
    """Returns the maximum of three rows of sums, and the row that the tile below needs. `row` is the index of the pooled row in
    its image."""
    HALF: gl.constexpr = C.half
    upper = sums[0:HALF]
    lower = sums[HALF:]
    if C.odd_height:
        there = ()
        for i in gl.static_range(HALF):
            there = there + (gl.where(2 * row + 1 < height, lower[i], upper[i]),)
        lower = there
    tall = upper
    if row == 0:  # a branch: its body must not run otherwise
        two = ()
        for i in gl.static_range(HALF):
            two = two + (
                gl.inline_asm_elementwise("max.s32 $0, $1, $2;", "=r,r,r", [upper[i], lower[i]], gl.int32, False, 1),
            )  # fmt: skip
        tall = two
    else:
        three = ()
        for i in gl.static_range(HALF):
            three = three + (
                gl.inline_asm_elementwise(
                    "{ .reg .b32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }", "=r,r,r,r", [upper[i], lower[i], above[i]],
                    gl.int32, False, 1,
                ),
            )  # fmt: skip
        tall = three
    return tall, lower


@gluon.jit
def widest(tall, channel: gl.constexpr, lanes, columns_left, C: gl.constexpr):
    """Returns the maximum of three columns for each of a thread's pooled pixels, of one of its two channels.

    Pixel 4 j + q belongs to lane q. So the pixel to the left belongs to lane q - 1, or, for q = 0, it is pixel j - 1 of lane 3.
    `lanes`: the lane that has the left pixel, that lane for j = 0, and True if this is lane 3. `columns_left`: number of
    columns from the tile's first on.
    """
    PLACES: gl.constexpr = C.places
    source, first_source, is_last = lanes
    wide = ()
    before = tall[2 * channel]
    for j in gl.static_range(PLACES):
        even = tall[4 * j + 2 * channel]
        odd = tall[4 * j + 2 * channel + 1]
        if C.odd_width:
            odd = gl.where(columns_left > 8 * j + 1, odd, even)
        if j == 0:
            sent = odd
            lane = first_source
        else:
            sent = gl.where(is_last, before, odd)
            lane = source
        before = odd
        wide = wide + (gl.inline_asm_elementwise(C.across, "=&r,r,r,r,r", [even, odd, sent, lane], gl.int32, False, 1),)
    return wide


@gluon.jit
def put_codes(pooled, s, b, place, C: gl.constexpr):
    """Requantizes a thread's pooled sums, which are given channel by channel, and writes the codes to shared memory."""
    R: gl.constexpr = C.requantize
    CHANNELS: gl.constexpr = C.channels
    PICKS: gl.constexpr = C.picks
    GROUPS: gl.constexpr = C.groups
    for group in gl.static_range(GROUPS):
        values = ()
        scales = ()
        offsets = ()
        for i in gl.static_range(8):
            values = values + (pooled[PICKS[8 * group + i]],)
            scales = scales + (s[CHANNELS[i]],)
            offsets = offsets + (b[CHANNELS[i]],)
        words = gl.inline_asm_elementwise(R.asm, R.constraints, values + scales + offsets, dtype=C.words, is_pure=True, pack=1)
        if R.words == 1:
            words = (words[0],)
        run(ptx(C.put, group), C.put_constraints, (place,) + words)


@gluon.jit
def store_tile(y, side, tile, first_pixel, exists, beside, width, across, row_bytes, thread, C: gl.constexpr):
    """Copies the codes of a tile from shared memory to their pixels."""
    TURNS: gl.constexpr = C.turns
    for turn in gl.static_range(TURNS):
        vector = thread + turn * C.threads
        pixel = vector // C.chunks
        column = first_pixel + pixel
        there = (pixel < C.tile_pixels) & (column < width) & ((pixel > 0) | (beside == 0)) & exists
        at = (tile * width + column).to(gl.int64) * row_bytes + across * C.pixel_bytes + vector % C.chunks * 16
        run(C.get, "=r,r,r,l", [there.to(gl.int32), C.out_start + side * C.out_bytes + vector * 16, y + at])


@gluon.jit(do_not_specialize=[
    "row_bytes", "pooled_height", "pooled_width", "height", "width", "before", "tiles", "tiles_beside", "tiles_across"
])  # fmt: skip
def stem_pool(
    y, s, b, row_bytes, pooled_height, pooled_width, height, width, before, tiles, tiles_beside, tiles_across, maps, weight,
    C: gl.constexpr,
):  # fmt: skip
    """The kernel: one block computes consecutive pooled rows, all with the same columns and outputs, with several strips in
    flight."""
    STAGES: gl.constexpr = C.stages
    HALF: gl.constexpr = C.half
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.int32, [C.barrier_unit + 1, UNIT_WORDS], LINE)
    thread = gl.arange(0, C.threads, C.threads_layout)
    # Triton does not allocate memory that only PTX uses.
    part(shared, C.barrier_unit, C.barrier_unit + 1, gl.int32, [C.threads], LINE).store(thread)
    barrier()
    run(C.strips.init, "=r,r", [thread])
    fence_async_shared()
    barrier()
    across = gl.program_id(0) % tiles_across
    beside = gl.program_id(0) // tiles_across % tiles_beside
    chunk = gl.program_id(0) // tiles_across // tiles_beside
    chunks = gl.num_programs(0) // tiles_across // tiles_beside
    size = (tiles + chunks - 1) // chunks
    first = chunk * size
    end = gl.minimum(first + size, tiles)
    row = first % pooled_height
    start = gl.where(row > 0, first - 1, first)  # the tile above computes the uppermost row of sums that this tile needs
    row = gl.where(row > 0, row - 1, row)
    first_pixel = beside * (C.tile_pixels - 1)
    warp = thread // 32
    lane = thread % 32
    q = lane % 4
    channel = warp * 16 + lane // 4 * 2
    source = weight + across.to(gl.int64) * C.weight_bytes + thread * 0
    held = gl.inline_asm_elementwise(C.rows.load, C.rows.load_constraints, [source, thread], C.weights, True, 1)
    own = across * 64 + channel
    scales = (gl.load(s + own), gl.load(s + own + 1))
    offsets = (gl.load(b + own), gl.load(b + own + 1))
    lanes = (lane - q + (q + 3) % 4, gl.where(q > 0, lane - 1, lane), q == 3)
    columns_left = width - 2 * first_pixel - 2 * q
    place = C.out_start + q * C.pixel_bytes + channel * C.pixel_bytes // 64
    launch_next_and_wait_for_previous()
    map_arrived(maps, C)
    zero = row * 0
    at = (zero, zero + 1, row, first // pooled_height, gl.where(first < end, end - start, 0))
    for _filled in range(STAGES - 1):
        at = copy_strip(at, maps, first_pixel * 4, pooled_height, before, thread, C)
    above = ()
    for _i in gl.static_range(HALF):
        above = above + (thread * 0,)
    slot = zero
    phase = zero
    side = zero
    for tile in range(start, end):
        run(C.strips.wait, "=r,r,r,r", [thread * 0 + slot, thread * 0 + phase, thread * 0 + 1])
        at = copy_strip(at, maps, first_pixel * 4, pooled_height, before, thread, C)
        sums = gl.inline_asm_elementwise(
            C.rows.products, C.rows.products_constraints, held + (thread * 0 + slot,), dtype=C.sums, is_pure=False, pack=1
        )  # fmt: skip
        run(C.strips.give, "=r,r,r", [thread * 0 + slot, ((thread & 31) == 0).to(gl.int32)])
        tall, above = tallest(sums, above, row, height, C)
        pooled = widest(tall, 0, lanes, columns_left, C) + widest(tall, 1, lanes, columns_left, C)
        put_codes(pooled, scales, offsets, place + side * C.out_bytes, C)
        barrier()  # the tile before the previous one, which had the same buffer, is stored by now
        store_tile(y, side, tile, first_pixel, tile >= first, beside, pooled_width, across, row_bytes, thread, C)
        side = side ^ 1
        row = gl.where(row + 1 == pooled_height, 0, row + 1)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
        phase = gl.where(slot == 0, phase ^ 1, phase)


class PreparedStemPool(ConvPlan):
    """A stem followed by a max-pool of 3 x 3, stride 2 and padding 1, prepared for the kernel, on one GPU."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, images: StemImages, sm_count: int) -> None:
        super().__init__(spec, packed, images)
        self.stem, self.sm_count = images, sm_count
        odd = [size % 2 == 1 for size in images.output]
        self.config = StemPool(spec.y, spec.relu, images.window[0], odd[0], odd[1])
        self.map = functools.lru_cache(maxsize=None)(self._map)
        registers = most_registers(BLOCKS, self.config.threads)
        self.launch = ConvLauncher(stem_pool, maxnreg=registers, launch_pdl=True)

    def _map(self, n: int, address: int, device: torch.device) -> Tensor:
        rows, row_bytes = self.stem.rows, self.stem.columns * PIXEL_BYTES
        return image_map((n, rows, row_bytes), (self.config.window + 1, ROW_BYTES), address, device)

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, Hp, Wp, bytes]."""
        height, width = output_size(self.stem.output, (3, 3), (2, 2), (1, 1))
        return size[0], height, width, pixel_elements(self.spec.y, self.spec.outputs)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        out, packed, stem = self.output(x, out), self.packed, self.stem
        n, height, width, row_bytes = out.shape
        across = padded_channels(self.spec.outputs) // 64
        beside, down = max(1, -(-(width - 1) // (TILE_PIXELS - 1))), n * height
        chunks = max(1, min(down, self.sm_count * BLOCKS // (across * beside)))
        self.launch(
            0, (chunks * across * beside, 1, 1), self.config.warps,
            out, packed.s, packed.b, row_bytes, height, width, *stem.output, stem.before[0], down, beside, across,
            self.map(n, x.data_ptr(), x.device), packed.weight, self.config,
        )  # fmt: skip
        return out
