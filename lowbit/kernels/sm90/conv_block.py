"""A bottleneck block of 64 channels from its 3 x 3 convolution to the next block's first, in one kernel: sm_90a.

Computes middle = conv3x3(x), y = conv1x1(middle) + residual (or + conv1x1(entry), the shortcut), z = conv1x1(y), requantized
Reads   x by TMA in strips (below); residual or entry codes from global memory, at the beginning of a tile; all weights and
        constants once per thread block, into shared memory
Links   codes stay in registers between products: the output codes of a thread are its operand A of the next product. The
        weights of that product are packed in the matching order of K (pack/conv_block.py). y is computed `chunk` outputs at a
        time
Writes  y, 16 bytes per thread, and z, 8 or 16 bytes per thread
Values  one register of each thread: every tensor here is [threads] (parts/thread_product.py)
Roles   none; grid as in sm90/conv_strip.py. Warpgroups of an SM are not synchronised: one multiplies while others requantize
Exact   the same bits as the three or four layers one after the other (formats/conv.py)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import ConvSpec
from lowbit.kernels.choose.conv import MOST_ROWS, STRIPS, UNIT, WARPGROUPS, BlockTile, block_tile
from lowbit.kernels.parts.conv_inputs import map_arrived
from lowbit.kernels.parts.conv_plan import ConvLauncher
from lowbit.kernels.parts.conv_tile import UNIT_WORDS
from lowbit.kernels.parts.gluon import asm, barrier, fence_async_shared, gl, gluon, run, source_digest
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.prologue import launch_next_and_wait_for_previous
from lowbit.kernels.parts.requantize import LinkedRequantize, Requantize
from lowbit.kernels.parts.strip_ring import StripPlaces
from lowbit.kernels.parts.thread_codes import codes_of, columns, load_rows, scaled, store_rows, table
from lowbit.kernels.parts.thread_product import (
    ThreadProduct,
    fence_registers,
    start,
    thread_words,
    wait,
)
from lowbit.kernels.parts.tile import Warpgroups
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_block import CHANNELS

ZERO_BYTES = 64
"""Bytes of a row of zeros, aligned to its size. It is as long as a row of a strip, so that swizzled addresses stay within
it."""


@dataclass(frozen=True)
class StripTaps(StripPlaces):
    """StripPlaces in which each strip is filled by `boxes` TMA copies."""

    boxes: int = 1
    lane_place = "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 $0, $1, at; and.b32 at, $2, 3; mad.lo.u32 $0, at, 16, $0; }"
    """PTX that returns in $0 the address $1 bytes into shared memory, plus 16 times the index of thread $2 among the four
    threads of a row."""

    @property
    def copy_strip(self) -> str:
        """PTX like StripRing.copy_strip, with `boxes` copies of rows / boxes rows each."""
        rows = self.rows // self.boxes
        copy = (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [to], [$4, {column, row}], [bar];\n"
        )
        turn = f"add.u32 to, to, {rows * self.row_bytes}; add.s32 row, row, {rows};\n"
        copies = "{ .reg .b32 column, row; mov.u32 column, 0; mov.b32 row, $5;\n" + turn.join([copy] * self.boxes) + "}"
        return self.strips.fill(self.copied_bytes, self.strip_bytes, self.x_start, copies)


UNIT_BYTES = gl.constexpr(UNIT)

EARLY_UNITS = gl.constexpr(2)
"""Number of units of residual codes that are loaded at the beginning of a tile; the others follow as registers become free."""

UPPER = gl.constexpr(-0x0F0F0F10)
"""Mask of the upper half of each byte."""


REGISTERS = 65536 // (128 * WARPGROUPS)


@dataclass(frozen=True)
class BlockConv(BlockTile, Warpgroups):
    """The kernel's compile-time configuration: a tile and values derived from it."""

    digest: str = source_digest()

    @property
    def boxes(self) -> int:
        return -(-self.rows // MOST_ROWS)

    @property
    def planes(self) -> int:
        """Number of codes per byte."""
        return 8 // self.bits

    @property
    def strip(self) -> StripTaps:
        """Copies and reads of strips."""
        strips, weights = StageBarriers(self.tail, STRIPS, self.warps), StageBarriers(self.tail + 16 * STRIPS, 1, self.warps)
        return StripTaps(
            strips, weights, self.tail + 2 * ZERO_BYTES, 0, self.starts[0], self.rows, self.row_bytes,
            self.starts[5] - self.starts[0], self.bits, self.boxes,
        )  # fmt: skip

    @property
    def second(self) -> ThreadProduct:
        """The 3 x 3 convolution; a weight tile is one plane of a tap."""
        return ThreadProduct(CHANNELS, self.row_bytes, self.bits == 4, self.starts[0])

    @property
    def third(self) -> ThreadProduct:
        return ThreadProduct(self.chunk, CHANNELS, self.bits == 4, self.starts[1])

    @property
    def entry(self) -> ThreadProduct:
        return ThreadProduct(self.chunk, CHANNELS, self.bits == 4, self.starts[2])

    @property
    def next(self) -> ThreadProduct:
        """64 outputs of the next block's first convolution."""
        return ThreadProduct(CHANNELS, self.chunk, self.bits == 4, self.starts[3])

    @property
    def middle_codes(self) -> Requantize:
        return LinkedRequantize(self.storage, None, True, False)

    @property
    def y_codes(self) -> Requantize:
        return LinkedRequantize(self.storage, None if self.shortcut else self.storage, True)

    @property
    def z_codes(self) -> Requantize:
        return Requantize(self.storage, None, True)

    @property
    def chunks(self) -> int:
        return self.expanded // self.chunk

    @property
    def group_words(self) -> int:
        """Number of words with the codes of 8 columns."""
        return self.bits // 4

    @property
    def unit_groups(self) -> int:
        """Number of column groups (8 columns) in a unit. A unit is the 4 words of a pixel that a thread loads or stores at
        once."""
        return 4 // self.group_words

    @property
    def units(self) -> int:
        """Number of units in a pixel of y."""
        return self.expanded // (32 * self.unit_groups)

    @property
    def parts(self) -> int:
        """Number of chunks of y in a unit."""
        return self.chunks // self.units

    @property
    def halves(self) -> int:
        """Number of 64-output chunks of z."""
        return self.following // CHANNELS

    @property
    def z_words(self) -> int:
        """Number of words of a pixel of z that a thread stores at once."""
        return min(4, 2 * self.halves * self.group_words)


@gluon.jit
def copy_strip(maps, exists, strip, parity, first_row, thread, C: gl.constexpr):
    """Starts the copies of a strip."""
    nought = thread * 0
    issues = ((thread == 0) & exists).to(gl.int32)
    places = (issues, nought + strip, nought + parity, maps + nought, nought + first_row)
    run(C.strip.copy_strip, "=r,r,r,r,l,r", places)


@gluon.jit
def load_taps(down: gl.constexpr, center, zeros, place, C: gl.constexpr):
    """Loads the packed codes of the three taps of one row of the window. `center` is the place of this thread's pixel in its
    strip."""
    row, column, height, width = place
    ROW_BYTES: gl.constexpr = C.row_bytes
    line = center + (down - 1) * ROW_BYTES * width
    exists = row >= 0
    if down == 0:
        exists = row > 0
    if down == 2:
        exists = row + 1 < height
    taps = ()
    for beside in gl.static_range(3):
        inside = exists
        if beside == 0:
            inside = exists & (column > 0)
        if beside == 2:
            inside = exists & (column + 1 < width)
        where = (line + (beside - 1) * ROW_BYTES, zeros, inside.to(gl.int32))
        taps = taps + (asm(C.strip.tap, C.strip.tap_constraints, where, thread_words(C.strip.loaded)),)
    return taps


@gluon.jit
def decoded(words, C: gl.constexpr):
    """Unpacks registers of codes to operand A. 4-bit codes become bytes of 16 times the code: 4 registers of even channels,
    then 4 of odd channels.

    The shift to the left is done by a multiplication, since the pipeline for conversions and logic is busy.
    """
    if C.bits == 8:
        return words
    else:
        even = ()
        odd = ()
        for i in gl.static_range(4):
            even = even + ((words[i] * 16) & UPPER,)
            odd = odd + (words[i] & UPPER,)
        return even + odd


@gluon.jit
def second_convolution(base, center, zeros, place, at, turn, C: gl.constexpr):
    """Returns middle as operand A. A row of taps is loaded while the previous one is multiplied."""
    P: gl.constexpr = C.second
    R: gl.constexpr = C.middle_codes
    PLANES: gl.constexpr = C.planes
    sums = ()
    taps = load_taps(0, center, zeros, place, C)
    for down in gl.static_range(3):
        held = ()
        for beside in gl.static_range(3):
            registers = decoded(taps[beside], C)
            sums = start(sums, registers, base, (3 * down + beside) * PLANES, 2, down + beside > 0, P)
            held = held + registers
        if down < 2:
            taps = load_taps(down + 1, center, zeros, place, C)
        if down < 2:
            sums = wait(sums, 0, 32)
            fence_registers(held, turn, 24)
    s = table(at, 0)
    b = table(at, 2)
    sums = wait(sums, 0, 32)
    fence_registers(held, turn, 24)
    operand = ()
    for group in gl.static_range(2):
        own_s, own_b = s, b
        if group == 0:
            s = table(at, 1)
            b = table(at, 3)
        upper = codes_of(columns(sums, group, 0), own_s, own_b, (), 0.0, R)
        lower = codes_of(columns(sums, group, 1), own_s, own_b, (), 0.0, R)
        operand = operand + (upper[0], lower[0], upper[1], lower[1])
    return operand


@gluon.jit
def start_chunk(chunk: gl.constexpr, middle, entry, base, C: gl.constexpr):
    """Starts the products of a chunk of y; returns the sums of the third convolution and those of the shortcut."""
    P: gl.constexpr = C.third
    E: gl.constexpr = C.entry
    first = start((), middle, base, chunk, 2, False, P)
    second = ()
    if C.shortcut:
        second = start((), entry, base, chunk, 2, False, E)
    return first, second


@gluon.jit
def finish_chunk(chunk: gl.constexpr, later: gl.constexpr, residual, sums, at, g, C: gl.constexpr):
    """Requantizes a chunk of y while `later` products run. Returns the words of both rows to be stored, and operand A of the
    next convolution."""
    R: gl.constexpr = C.y_codes
    FIRST: gl.constexpr = (2 * 64 + 2 * C.following) // 32
    GROUPS: gl.constexpr = C.chunk // 32
    ALL: gl.constexpr = C.expanded // 32
    WORDS: gl.constexpr = C.group_words
    SUMS: gl.constexpr = C.chunk // 2
    first, second = sums
    s = table(at, FIRST + chunk * GROUPS)
    b = table(at, FIRST + ALL + chunk * GROUPS)
    if C.shortcut:
        both = wait(first + second, later, 2 * SUMS)
        first = both[0:SUMS]
        second = both[SUMS:]
    else:
        first = wait(first, later, SUMS)
    LOW: gl.constexpr = R.words - 2
    words = ((), ())
    operand = ()
    for group in gl.static_range(GROUPS):
        own_s, own_b = s, b
        if group + 1 < GROUPS:
            s = table(at, FIRST + chunk * GROUPS + group + 1)
            b = table(at, FIRST + ALL + chunk * GROUPS + group + 1)
        upper = ()
        lower = ()
        if C.shortcut:
            s2 = table(at, FIRST + 2 * ALL + chunk * GROUPS + group)
            upper = scaled(columns(first, group, 0), own_s, own_b)
            lower = scaled(columns(first, group, 1), own_s, own_b)
            upper = codes_of(columns(second, group, 0), s2, upper, (), g, R)
            lower = codes_of(columns(second, group, 1), s2, lower, (), g, R)
        else:
            codes = residual[0][group * WORDS : group * WORDS + WORDS]
            upper = codes_of(columns(first, group, 0), own_s, own_b, codes, g, R)
            codes = residual[1][group * WORDS : group * WORDS + WORDS]
            lower = codes_of(columns(first, group, 1), own_s, own_b, codes, g, R)
        words = (words[0] + upper[0:WORDS], words[1] + lower[0:WORDS])
        operand = operand + (upper[LOW], lower[LOW], upper[LOW + 1], lower[LOW + 1])
    return words, operand


@gluon.jit
def third_convolution(y, added, exists, residuals, middle, entry, base, at, g, turn, C: gl.constexpr):
    """Computes y from middle's codes: stores it, and returns it as operand A."""
    PARTS: gl.constexpr = C.parts
    CHUNKS: gl.constexpr = C.chunks
    LATER: gl.constexpr = 1 + C.shortcut
    WORDS: gl.constexpr = C.chunk // 32 * C.group_words
    ROW_BYTES: gl.constexpr = C.expanded * C.bits // 8
    UNITS: gl.constexpr = C.units
    operand = ()
    sums = start_chunk(0, middle, entry, base, C)
    for unit in gl.static_range(UNITS):
        words = ((), ())
        if not C.shortcut and unit + EARLY_UNITS < UNITS:
            residuals = residuals + (load_rows(added, exists, 64 * (unit + EARLY_UNITS), 4, ROW_BYTES),)
        for i in gl.static_range(PARTS):
            residual = ()
            if not C.shortcut:
                upper, lower = residuals[unit]
                residual = (upper[i * WORDS : i * WORDS + WORDS], lower[i * WORDS : i * WORDS + WORDS])
            if C.ahead and unit * PARTS + i + 1 < CHUNKS:
                later = start_chunk(unit * PARTS + i + 1, middle, entry, base, C)
                found, registers = finish_chunk(unit * PARTS + i, LATER, residual, sums, at, g, C)
                sums = later
            else:
                found, registers = finish_chunk(unit * PARTS + i, 0, residual, sums, at, g, C)
                if unit * PARTS + i + 1 < CHUNKS:
                    sums = start_chunk(unit * PARTS + i + 1, middle, entry, base, C)
            operand = operand + registers
            words = (words[0] + found[0], words[1] + found[1])
        store_rows(y, words, exists, 64 * unit, 4, ROW_BYTES)
    fence_registers(middle, turn, 8)
    if C.shortcut:
        fence_registers(entry, turn, 8)
    return operand


@gluon.jit
def next_convolution(z, exists, operand, base, at, turn, C: gl.constexpr):
    """Computes z from y's codes, 64 outputs at a time. The first 64 outputs are requantized while the second 64 are
    multiplied."""
    N: gl.constexpr = C.next
    R: gl.constexpr = C.z_codes
    HALVES: gl.constexpr = C.halves
    CHUNKS: gl.constexpr = C.chunks
    HELD: gl.constexpr = C.chunk // 8
    ALL: gl.constexpr = C.expanded // 8
    ROW_BYTES: gl.constexpr = C.following * C.bits // 8
    WORDS: gl.constexpr = C.z_words
    under_way = ()
    for half in gl.static_range(HALVES):
        sums = ()
        for chunk in gl.static_range(CHUNKS):
            registers = operand[HELD * chunk : HELD * chunk + HELD]
            sums = start(sums, registers, base, chunk * HALVES + half, C.chunk // 32, chunk > 0, N)
        under_way = under_way + (sums,)
    words = ((), ())
    for half in gl.static_range(HALVES):
        s = table(at, 4 + 2 * half)
        b = table(at, 4 + 2 * HALVES + 2 * half)
        sums = wait(under_way[half], (HALVES - 1 - half) * CHUNKS, 32)
        if half == HALVES - 1:
            fence_registers(operand, turn, ALL)
        for group in gl.static_range(2):
            own_s, own_b = s, b
            if group == 0:
                s = table(at, 5 + 2 * half)
                b = table(at, 5 + 2 * HALVES + 2 * half)
            upper = codes_of(columns(sums, group, 0), own_s, own_b, (), 0.0, R)
            words = (words[0] + upper, words[1] + codes_of(columns(sums, group, 1), own_s, own_b, (), 0.0, R))
    UNITS: gl.constexpr = HALVES * 2 * C.group_words // WORDS
    for unit in gl.static_range(UNITS):
        rows = (words[0][WORDS * unit : WORDS * unit + WORDS], words[1][WORDS * unit : WORDS * unit + WORDS])
        store_rows(z, rows, exists, 16 * WORDS * unit, WORDS, ROW_BYTES)


@gluon.jit(do_not_specialize=["pixels", "height", "width", "tiles", "step"])
def block_conv(
    y, z, added, g, pixels, height, width, tiles, step, maps, weight, C: gl.constexpr
):  # fmt: skip
    """The kernel: one thread block computes several tiles of pixels; the next strip is copied while one is multiplied.

    `added`: codes of the residual or, with a shortcut, the input of the block (entry). `weight`: all weights and constants.
    `step`: distance in pixels from one tile of a block to the next, columns + 65536 * rows.
    """
    PIXELS: gl.constexpr = C.pixels
    STARTS: gl.constexpr = C.starts
    Y_WORDS: gl.constexpr = C.expanded * C.bits // 32
    Z_WORDS: gl.constexpr = C.following * C.bits // 32
    X_WORDS: gl.constexpr = C.row_bytes // 4
    LAYOUT: gl.constexpr = C.threads_layout
    TAIL: gl.constexpr = C.tail // UNIT_BYTES
    shared = gl.allocate_shared_memory(gl.int32, [TAIL + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, C.threads, LAYOUT)
    shared.index(TAIL).store(gl.full([UNIT_WORDS], 0, gl.int32, LAYOUT))  # zeros for taps outside the image
    barrier()
    run(C.strip.weights.init, "=r,r", [thread])
    run(C.strip.strips.init, "=r,r", [thread])
    fence_async_shared()
    barrier()
    first_tile = gl.program_id(0)
    stride = gl.num_programs(0)
    zero = tiles * 0
    run(C.strip.copy_weights, "=r,r,l", [(thread == 0).to(gl.int32), weight + (thread * 0).to(gl.int64)])  # packed earlier
    map_arrived(maps, C)
    own_row = (thread >> 5) * 16 + (thread & 15)  # the row whose address this thread passes to ldmatrix
    pixel = first_tile * PIXELS + own_row
    place = (pixel // width % height << 16) + pixel % width
    place = asm("mov.b32 $0, $1;", "=r,r", (place,), gl.int32)  # before the wait
    launch_next_and_wait_for_previous()
    reach = width + 1
    copy_strip(maps, first_tile < tiles, zero, zero + 1, first_tile * PIXELS - reach, thread, C)
    run(C.strip.weights.wait, "=r,r,r,r", [thread * 0, thread * 0, thread * 0 + 1])
    center0 = asm(C.strip.place, "=&r,r,r", (own_row + reach, thread), gl.int32)
    at = asm(C.strip.lane_place, "=&r,r,r", (thread * 0 + STARTS[4], thread), gl.int32)
    zeros = at + (C.strip.zeros - STARTS[4])
    base = asm(C.third.base, "=&r,r", (thread,), gl.int32)
    g = gl.full([C.threads], g, gl.float32, LAYOUT)
    turn = thread * 0
    for tile in range(first_tile, tiles, stride):
        # asm hides these values from the compiler, which would else carry one register through the loop for each use.
        here = asm("mov.b32 $0, $1;", "=r,r", (thread * 0 + tile,), gl.int32)
        strip = turn & 1
        run(C.strip.strips.wait, "=r,r,r,r", [strip, turn >> 1 & 1, thread * 0 + 1])
        turn = asm("add.s32 $0, $1, 1;", "=r,r", (turn,), gl.int32)
        copy_strip(maps, here + stride < tiles, turn & 1, turn >> 1 & 1 ^ 1, (here + stride) * PIXELS - reach, thread, C)
        lane = thread & 3
        pixel = here * PIXELS + (thread >> 5) * 16 + (thread >> 2) % 8  # the first pixel whose sums this thread has
        exists = ((pixel < pixels).to(gl.int32), (pixel + 8 < pixels).to(gl.int32))
        where = added + (pixel * Y_WORDS + lane * 4)
        residuals = ()
        entry = ()
        if C.shortcut:
            X: gl.constexpr = X_WORDS // 4
            upper, lower = load_rows(added + (pixel * X_WORDS + lane * X), exists, 0, X, 4 * X_WORDS)
            entry = (upper, lower)
        else:
            for unit in gl.static_range(EARLY_UNITS):
                residuals = residuals + (load_rows(where, exists, 64 * unit, 4, 4 * Y_WORDS),)
        own = (place >> 16, place & 0xFFFF, height, width)
        middle = second_convolution(base, center0 + strip * C.strip_bytes, zeros, own, at, turn, C)
        run(C.strip.strips.give, "=r,r,r", [strip, ((thread & 31) == 0).to(gl.int32)])
        place += step
        place += gl.where((place & 0xFFFF) >= width, 0x10000 - width, 0)
        place -= gl.where(place >= height << 16, height << 16, 0)
        if C.shortcut:
            entry = entry_operand(entry, C)
        operand = third_convolution(
            y + (pixel * Y_WORDS + lane * 4), where, exists, residuals, middle, entry, base, at, g, turn, C
        )  # fmt: skip
        next_convolution(z + (pixel * Z_WORDS + lane * C.z_words), exists, operand, base, at, turn, C)


@gluon.jit
def entry_operand(words, C: gl.constexpr):
    """Returns operand A of the shortcut's product from packed words; pack/conv_block.py defines the order."""
    upper, lower = words
    registers = ()
    if C.bits == 8:
        for i in gl.static_range(4):
            registers = registers + (upper[i], lower[i])
    else:
        for i in gl.static_range(2):
            registers = registers + (
                (upper[i] * 16) & UPPER, (lower[i] * 16) & UPPER, upper[i] & UPPER, lower[i] & UPPER,
            )  # fmt: skip
    return registers


class PreparedBlock:
    """The second and third convolution of a bottleneck block and the first one of the next block, prepared for the kernel.

    `packed` is the result of pack/conv_block.py, `g` the residual's factor.
    """

    def __init__(self, third: ConvSpec, following: ConvSpec, packed: Tensor, g: float, sm_count: int) -> None:
        self.third, self.following, self.packed, self.g, self.sm_count = third, following, packed, g, sm_count
        self.map = functools.lru_cache(maxsize=None)(row_map)
        self.config = functools.lru_cache(maxsize=None)(self._config)
        self.launch = ConvLauncher(block_conv, maxnreg=REGISTERS, launch_pdl=True)

    def _config(self, width: int) -> BlockConv:
        """The configuration for images of this width."""
        tile = block_tile(self.third.x, width, self.following.outputs, self.third.second is not None)
        return BlockConv(**vars(tile))

    def __call__(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes (y, z) of packed x [N, H, W, bytes]; `added` is the residual, or the input of the shortcut."""
        n, height, width, row_bytes = x.shape
        pixels, config = n * height * width, self.config(width)
        tiles = -(-pixels // config.pixels)
        blocks = min(tiles, self.sm_count * config.blocks)
        line, column_step = divmod(blocks * config.pixels, width)
        y, z, codes = (tensor.view(-1).view(torch.int32) for tensor in (*out, added))
        self.launch(
            width, (blocks, 1, 1), config.warps, y, z, codes, self.g, pixels, height, width, tiles,
            (line % height << 16) + column_step,
            self.map(pixels, row_bytes, config.rows // config.boxes, row_bytes, x.data_ptr(), x.device), self.packed, config,
        )  # fmt: skip
        return out
