"""Convolutions of many channels: warpgroups that share the weights of a k block, and one loader warp: sm_90a.

Computes the same as sm90/conv.py, for channels and outputs that are multiples of 128. In sm90/conv.py each small block copies
        its weights separately, for which L2 bandwidth is too low to keep the tensor cores busy. Here 16 KB of weights serve 192
        pixels. For same-size convolutions pixels are copied once for all taps (strips), else tap by tap. Layers with few pixels
        use tiles of 64 pixels, which gain from the deep ring and from unpacking ahead
Reads   x by TMA in strips (parts/strip_ring.py) or in im2col mode (parts/window_ring.py), as operand A by ldmatrix; w in the
        tiles of pack/conv_weight.py by bulk copies; residual codes from global memory
Roles   one warp loads; 1 or 3 warpgroups of 64 pixels multiply and store, not synchronised with each other: one requantizes
        while others multiply. Roles are branches of one function, since Triton would compile each partition separately
Ring    one of weights, `stages` stages of 128 channels of a tap, and one of x; both continue from tile to tile
Grid    persistent. Exact as sm90/conv.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, ConvSpec
from lowbit.kernels.choose.conv import TAIL_UNITS, UNIT, ConvTile, deep_stages, steps_of
from lowbit.kernels.parts.conv_epilogue import as_float, by_columns, codes_at, places_of_constants, store_codes
from lowbit.kernels.parts.conv_inputs import Product
from lowbit.kernels.parts.conv_operand import multiply_tap
from lowbit.kernels.parts.conv_plan import ConvLauncher, TiledConvPlan
from lowbit.kernels.parts.conv_tile import UNIT_WORDS, WgmmaConv
from lowbit.kernels.parts.gluon import barrier, fence_async_shared, gl, gluon, part, ptx, run, wait_alone
from lowbit.kernels.parts.operand import register_fence
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.strip_ring import StripRing
from lowbit.kernels.parts.warp_roles import LOADER_REGISTERS, following, map_arrived, own_thread, own_warpgroup, registers_of
from lowbit.kernels.parts.window_ring import WindowRing
from lowbit.kernels.sm90.tensor_map import NO_OPERAND, WindowOperand, row_map
from lowbit.pack.conv_layout import PackedConv

# A ring of stages of weights, copied by one thread, and the constants that are copied with the first stage, as PTX.
#
# Barriers: parts/pipeline.py.


@dataclass(frozen=True)
class WeightRing:
    """PTX for stages of `stage_bytes` from byte `start` of shared memory on, and for constants: tables of `table_bytes` from
    byte `constants_start` on."""

    barriers: StageBarriers
    start: int
    stage_bytes: int
    constants_start: int
    tables: int
    table_bytes: int

    @property
    def copy(self) -> str:
        """PTX that waits until stage $1 has been read (parity $2), then fills it from address $3."""
        bars = self.barriers
        return f"""{{ .reg .pred done; .reg .b32 at, bar, to;
            mov.u32 at, global_smem; mad.lo.u32 bar, $1, 8, at; mad.lo.u32 to, $1, {self.stage_bytes}, at;
            WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{bars.start + 8 * bars.stages}], $2; @!done bra WAIT;
            add.u32 bar, bar, {bars.start}; add.u32 to, to, {self.start};
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {self.stage_bytes};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$3], {self.stage_bytes}, [bar];
            mov.b32 $0, 0; }}"""

    @property
    def copy_constants(self) -> str:
        """PTX that copies the tables at $1, $2 and, if there are three, $3 to shared memory. They arrive on the barrier of the
        first weight stage."""
        copies = [
            f"add.u32 to, at, {self.constants_start + i * self.table_bytes}; "
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [${1 + i}], {self.table_bytes}, [bar];"
            for i in range(self.tables)
        ]
        lines = [
            f"{{ .reg .b32 at, bar, to; mov.u32 at, global_smem; add.u32 bar, at, {self.barriers.start};",
            f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {self.tables * self.table_bytes};",
            *copies,
            "mov.b32 $0, 0; }",
        ]
        return "\n".join(lines)


UNIT_BYTES = gl.constexpr(UNIT)

FIRST_WEIGHTS = gl.constexpr(2)
"""Number of k blocks whose weights are loaded before the previous kernel has finished."""


@dataclass(frozen=True)
class DeepConv(WgmmaConv):
    """Configuration like WgmmaConv, except that the last warpgroup loads instead of multiplying.

    A stage of x has `rows` rows: with `strips` the rows for all taps of a `kernel` x `kernel` window; else the rows for one
    tap, and `kernel` is 1. With `resident` weights are copied once per block; `stages` is then the number of k blocks of a
    tile. `odd`: the first product has an odd number of k blocks. `ordered`: warpgroups start the products of their tiles one
    after the other, so that one requantizes while others multiply; their rings must hold all k blocks of a tile.
    """

    rows: int = 0
    kernel: int = 1
    strips: bool = False
    x_stages: int = 2
    residual_stages: int = 0
    odd: bool = False
    ordered: bool = False

    @property
    def multipliers(self) -> int:
        return self.warpgroups - 1

    @property
    def readers(self) -> int:
        """Number of warps that release stages."""
        return 4 * self.multipliers

    @property
    def registers(self) -> int:
        """Number of registers of a math thread."""
        return 128 + (128 - LOADER_REGISTERS.value) // self.multipliers

    @property
    def tile_pixels(self) -> int:
        """Number of pixels of a tile; `pixels` also counts 64 for the loader's warpgroup."""
        return 64 * self.multipliers

    @property
    def x_bytes(self) -> int:
        return self.rows * self.step_bytes

    @property
    def w_unit(self) -> int:
        """Start of the weights in shared memory, in units of UNIT bytes."""
        return self.x_stages * self.x_bytes // UNIT

    @property
    def residual_unit(self) -> int:
        return self.w_unit + self.w_tiles * self.w_tile_bytes // UNIT

    @property
    def residual_row_bytes(self) -> int:
        return self.outputs * CODES[self.residual].bits // 8 if self.residual else 0

    @property
    def residual_tile_words(self) -> int:
        return self.tile_pixels * self.residual_row_bytes // 4

    @property
    def barrier_unit(self) -> int:
        return self.residual_unit + self.residual_stages * 4 * self.residual_tile_words // UNIT

    @property
    def w_barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, self.stages, self.readers)

    @property
    def x_barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit + 16 * self.stages, self.x_stages, self.readers)

    @property
    def residual_barriers(self) -> StageBarriers:
        start = UNIT * self.barrier_unit + 16 * (self.stages + self.x_stages)
        return StageBarriers(start, self.residual_stages, self.readers)

    @property
    def residual_ring(self) -> StripRing:
        return StripRing(
            self.residual_barriers, self.w_barriers, 0, UNIT * self.residual_unit, 0, self.tile_pixels,
            self.residual_row_bytes, 0, 8,
        )  # fmt: skip

    @property
    def make_barriers(self) -> str:
        """PTX that initialises all barriers; $1 is the thread. Each warp initialises some, since a single thread would need 40
        cycles for each."""
        rings = (self.w_barriers, self.x_barriers, self.residual_barriers)
        total = 2 * sum(ring.stages for ring in rings)
        lines = [
            ".reg .pred some, empty; .reg .b32 at, count, index, lane; and.b32 lane, $1, 31; shr.u32 index, $1, 5;",
            "mov.u32 at, global_smem; mad.lo.u32 at, index, 8, at;",
        ]
        for done in range(0, total, self.warps):
            lines.append(f"setp.eq.u32 some, lane, 0; setp.lt.and.u32 some, index, {total}, some; mov.b32 count, 1;")
            for ring in rings:
                first = (ring.start - self.w_barriers.start) // 8 + ring.stages
                lines.append(f"setp.ge.u32 empty, index, {first}; setp.lt.and.u32 empty, index, {first + ring.stages}, empty;")
                lines.append(f"selp.b32 count, {self.readers}, count, empty;")
            lines.append(f"@some mbarrier.init.shared::cta.b64 [at+{self.w_barriers.start + 8 * done}], count;")
            lines.append(f"add.u32 index, index, {self.warps};")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    @property
    def strip(self) -> StripRing:
        """PTX that copies strips (the inputs that neighbouring taps share) to shared memory, and PTX that reads x from a strip
        or, without strips, from the copy of a single tap."""
        zeros = UNIT * self.barrier_unit + 16 * (self.stages + self.x_stages + self.residual_stages)
        return StripRing(
            self.x_barriers, self.w_barriers, zeros, 0, UNIT * self.w_unit, self.rows, self.step_bytes, self.w_bytes,
            CODES[self.x].bits,
        )  # fmt: skip

    @property
    def window(self) -> WindowRing:
        return WindowRing(self.x_barriers, 0, 0, self.rows, self.step_bytes, 0, True)

    @property
    def weight_ring(self) -> WeightRing:
        start, count = UNIT * self.w_unit, 2 if self.second is None else 3
        return WeightRing(self.w_barriers, start, self.w_bytes, self.constants_start, count, 4 * self.outputs)

    @property
    def shared_units(self) -> int:
        return self.barrier_unit + TAIL_UNITS

    @property
    def shared_bytes(self) -> int:
        return self.shared_units * UNIT

    @property
    def constants_start(self) -> int:
        """Byte offset in shared memory of s, b and s2 of the tile's outputs."""
        return UNIT * self.barrier_unit + UNIT // 2

    def read_four(self, start: int) -> str:
        """PTX that loads four words, from word $4 on, of an array at byte `start` of shared memory."""
        return (
            "{ .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 at, $4, 4, at;\n"
            f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [at+{start}]; }}"
        )

    @property
    def take_turn(self) -> str:
        """PTX that waits until the previous warpgroup has started its products, if $2 is not 0; $1 is the own warpgroup."""
        return "{ .reg .pred p; .reg .b32 n; setp.ne.s32 p, $2, 0; add.u32 n, $1, 1; @p bar.sync n, 256; mov.b32 $0, 0; }"

    @property
    def pass_turn(self) -> str:
        """PTX that lets the next warpgroup start its products; $1 is the own warpgroup."""
        last = self.multipliers - 1
        return (
            f"{{ .reg .pred p; .reg .b32 n; setp.eq.u32 p, $1, {last}; add.u32 n, $1, 2; selp.b32 n, 1, n, p; "
            "bar.arrive n, 256; mov.b32 $0, 0; }"
        )

    @property
    def first_turn(self) -> str:
        """PTX that lets the first warpgroup start, in the last one; $1 is the own warpgroup."""
        last = self.multipliers - 1
        return f"{{ .reg .pred p; setp.eq.u32 p, $1, {last}; @p bar.arrive 1, 256; mov.b32 $0, 0; }}"

    @property
    def register_fence(self) -> str:
        return register_fence(self.strip.registers)

    @property
    def operands(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.strip.registers


@gluon.jit
def copy_tile(at, product, across, tile, size, first, KERNEL: gl.constexpr, STRIPS: gl.constexpr, C: gl.constexpr):
    """Copies the operands of one product of a tile: x for each block of channels (without strips, for each tap too), and
    weights for each block and tap."""
    x_stage, x_parity, w_stage, w_parity, ahead = at
    height, width = size
    blocks = product.blocks
    taps_across = product.taps_across
    taps = taps_across * product.taps_down
    w_tiles = product.weight + (across * blocks * taps).to(gl.int64) * C.w_bytes
    pixel = tile * C.tile_pixels
    line = pixel // width
    column = pixel % width * product.stride_across + product.first_across
    row = line % height * product.stride_down + product.first_down
    image = line // height
    reach = KERNEL // 2 * (width + 1)
    one = blocks * 0 + 1
    for block in range(blocks):
        first_byte = block * C.step_bytes
        for tap in range(taps):
            if STRIPS:
                if tap == 0:
                    run(C.strip.copy_strip, "=r,r,r,r,l,r,r", [one, x_stage, x_parity, product.maps, pixel - reach, first_byte])
                    x_stage, x_parity = following(x_stage, x_parity, C.x_stages, 1)
            else:
                run(C.window.copy, "=r,r,r,r,l,r,r,r,r,r,r,l,r", [
                    one, x_stage, x_parity, product.maps, first_byte, column, row, image, tap % taps_across, tap // taps_across,
                    product.weight, one,
                ])  # fmt: skip
                x_stage, x_parity = following(x_stage, x_parity, C.x_stages, 1)
            if first & (ahead == 0):
                run(C.weight_ring.copy, "=r,r,r,l", [w_stage, w_parity, w_tiles])
            w_tiles += C.w_bytes
            w_stage, w_parity = following(w_stage, w_parity, C.stages, 1)
            ahead = gl.maximum(ahead - 1, 0)
    return x_stage, x_parity, w_stage, w_parity, ahead


@gluon.jit
def copy_first(product, per_output, across, C: gl.constexpr):
    """Copies constants, and weights of the first FIRST_WEIGHTS k blocks. More of them would delay the first x.

    These copies do not wait for the previous kernel. A separate thread issues them, so that they do not delay the loader
    thread, which waits.
    """
    s, b, s2 = per_output
    if C.second is not None:
        run(C.weight_ring.copy_constants, "=r,l,l,l", [s + across * C.outputs, b + across * C.outputs, s2 + across * C.outputs])
    else:
        run(C.weight_ring.copy_constants, "=r,l,l", [s + across * C.outputs, b + across * C.outputs])
    steps = product.blocks * product.taps_across * product.taps_down
    w_tiles = product.weight + (across * steps).to(gl.int64) * C.w_bytes
    for i in range(gl.minimum(steps, FIRST_WEIGHTS)):
        run(C.weight_ring.copy, "=r,r,r,l", [i, steps * 0 + 1, w_tiles])
        w_tiles += C.w_bytes


@gluon.jit
def produce(one, two, residual_maps, across, tiles, size, C: gl.constexpr):
    """The loader thread. It first waits for the previous kernel, which wrote x."""
    first_tile, stride, tiles_down = tiles
    wait_for_previous_kernel()
    zero = across * 0
    one_of = zero + 1
    at = (zero, one_of, zero, one_of, gl.minimum(one.blocks * one.taps_across * one.taps_down, FIRST_WEIGHTS))
    r_stage = zero
    r_parity = one_of
    for tile in range(first_tile, tiles_down, stride):
        if C.residual is not None:
            first_byte = across * C.residual_row_bytes
            run(C.residual_ring.copy_strip, "=r,r,r,r,l,r,r", [
                one_of, r_stage, r_parity, residual_maps, tile * C.tile_pixels, first_byte
            ])  # fmt: skip
            r_stage, r_parity = following(r_stage, r_parity, C.residual_stages, 1)
        fresh = tile >= 0
        if C.resident:
            fresh = tile == first_tile
        at = copy_tile(at, one, across, tile, size, fresh, C.kernel, C.strips, C)
        if C.second is not None:
            at = copy_tile(at, two, across, tile, size, fresh, 1, False, C)


@gluon.jit
def begin_step(acc, adds, at, tap, w_ring, place, first, KERNEL: gl.constexpr, C: gl.constexpr):
    """Reads x of a k block, releases its stage and starts its products. Returns the sums, the registers to be fenced, and the
    next stages. `first`: it is the first one of a tile."""
    x_stage, x_phase, w_stage, w_phase = at
    beside, down = tap
    row, column, height, width, own_row, thread = place
    nought = thread * 0
    HALF: gl.constexpr = KERNEL // 2
    one = w_stage * 0 + 1
    last = one
    if KERNEL > 1:
        run(C.x_barriers.wait, "=r,r,r,r", [x_stage, x_phase, (beside + down == 0).to(gl.int32)])
        h = row + (down - HALF)
        w = column + (beside - HALF)
        inside = ((h >= 0) & (h < height) & (w >= 0) & (w < width)).to(gl.int32)
        from_row = own_row + (down * width + beside)
        beside += 1
        down = gl.where(beside == KERNEL, down + 1, down)
        beside = gl.where(beside == KERNEL, 0, beside)
        last = (down == KERNEL).to(gl.int32)
        down = gl.where(down == KERNEL, 0, down)
    else:
        run(C.x_barriers.wait, "=r,r,r,r", [x_stage, x_phase, one])
        inside = nought + 1
        from_row = own_row
    registers = gl.inline_asm_elementwise(
        C.strip.read, C.strip.read_constraints, [nought + x_stage, from_row, inside, thread],
        dtype=C.operands, is_pure=False, pack=1,
    )  # fmt: skip
    run(C.w_barriers.wait, "=r,r,r,r", [w_stage, w_phase, one])
    if C.ordered:
        run(C.take_turn, "=r,r,r", [own_warpgroup(), first.to(gl.int32)])
    acc = multiply_tap(acc, adds, w_ring, w_stage, registers, C)
    run(C.x_barriers.give, "=r,r,r", [nought + x_stage, ((thread & 31) == 0).to(gl.int32) * last])
    x_stage, x_phase = following(x_stage, x_phase, C.x_stages, last)
    if C.resident:
        w_stage = gl.where(w_stage + 1 == C.stages, 0, w_stage + 1)
    else:
        w_stage, w_phase = following(w_stage, w_phase, C.stages, 1)
    return acc, registers, (x_stage, x_phase, w_stage, w_phase), (beside, down)


@gluon.jit
def end_step(registers, w_stage, exists, thread, C: gl.constexpr):
    """Fences the registers of a k block whose products are complete, and releases its weights."""
    REGISTERS: gl.constexpr = C.strip.registers
    nought = thread * 0
    run(C.register_fence, "=r" + ",r" * (REGISTERS + 1), registers + (nought + w_stage,))
    if not C.resident:
        run(C.w_barriers.give, "=r,r,r", [nought + w_stage, (((thread & 31) == 0) & exists).to(gl.int32)])


@gluon.jit
def multiply_tile(acc, at, w_ring, steps, place, KERNEL: gl.constexpr, C: gl.constexpr):
    """Computes the sums of one product of a tile; returns them and the next stages. `place` is this thread's row of a stage.

    In a layer with one product, a k block is unpacked while the previous one is multiplied. If warpgroups first waited for
    their products, all would unpack at the same time, and the tensor cores would idle. An iteration has two k blocks, so that
    consecutive k blocks have separate registers.
    """
    REGISTERS: gl.constexpr = C.strip.registers
    thread = place[5]
    tap = (steps * 0, steps * 0)
    if C.second is not None:
        for step in range(steps):
            here = at[2]
            acc, held, at, tap = begin_step(acc, step > 0, at, tap, w_ring, place, step == 0, KERNEL, C)
            acc = wait_alone(acc, 0)
            end_step(held, here, steps > 0, thread, C)
    else:
        FIRST: gl.constexpr = 0 if C.odd else 1
        before = at[2]
        odd = ()
        if C.odd:
            acc, odd, at, tap = begin_step(acc, steps < 0, at, tap, w_ring, place, steps > 0, KERNEL, C)
            acc = wait_alone(acc, C.planes)
        else:
            for _register in gl.static_range(REGISTERS):
                odd = odd + (thread * 0,)
        for turn in range(steps // 2):
            here = at[2]
            acc, even, at, tap = begin_step(acc, turn >= FIRST, at, tap, w_ring, place, turn < FIRST, KERNEL, C)
            acc = wait_alone(acc, C.planes)
            end_step(odd, before, turn >= FIRST, thread, C)
            before = at[2]
            acc, odd, at, tap = begin_step(acc, steps > 0, at, tap, w_ring, place, steps < 0, KERNEL, C)
            acc = wait_alone(acc, C.planes)
            end_step(even, here, steps > 0, thread, C)
        if C.ordered:
            run(C.pass_turn, "=r,r", [own_warpgroup()])
        acc = wait_alone(acc, 0)
        end_step(odd, before, steps > 0, thread, C)
    return acc, at


@gluon.jit
def constants_here(WHICH: gl.constexpr, C: gl.constexpr):
    """Loads one of s, b and s2 of the tile's outputs from shared memory."""
    START: gl.constexpr = C.constants_start + 4 * C.outputs * WHICH
    places = places_of_constants(C)
    found = gl.inline_asm_elementwise(
        ptx(C.read_four, START), "=f,=f,=f,=f,r,r,r,r", [places], dtype=gl.float32, is_pure=False, pack=4
    )  # fmt: skip
    return by_columns(found, C)


@gluon.jit
def residual_here(stage, C: gl.constexpr):
    """Loads the words of residual codes of a tile from shared memory, in the order of `load_residual`."""
    at, _ = codes_at(stage * C.residual_tile_words, 0, 0, 0, C.units, 4, C)
    return gl.inline_asm_elementwise(
        ptx(C.read_four, UNIT_BYTES * C.residual_unit), "=r,=r,=r,=r,r,r,r,r", [at], dtype=gl.int32, is_pure=False, pack=4
    )  # fmt: skip


@gluon.jit
def consume(out, pixels, across, tiles, steps, steps2, size, w_ring, C: gl.constexpr):
    """The math warpgroups, which multiply and store. They wait for x but not for the previous kernel, since the loader did
    before it loaded x."""
    y, g, row_units = out
    first_tile, stride, tiles_down = tiles
    height, width = size
    ROWS: gl.constexpr = C.pixels
    OUTPUTS: gl.constexpr = C.outputs
    SUMS: gl.constexpr = C.accumulator
    thread = gl.arange(0, C.threads, C.threads_layout)
    own_row = (thread >> 5) * 16 + (thread & 15)
    zero = across * 0
    at = (zero, zero, zero, zero)
    r_stage = zero
    r_phase = zero
    acc = gl.zeros((ROWS, OUTPUTS), gl.int32, SUMS)
    unit = across * C.units
    if C.ordered:
        run(C.first_turn, "=r,r", [own_warpgroup()])
    for tile in range(first_tile, tiles_down, stride):
        first_pixel = tile * C.tile_pixels
        place = (own_row, own_row, height, width, own_row, thread)
        if C.kernel > 1:
            pixel = first_pixel + own_row
            place = (pixel // width % height, pixel % width, height, width, own_row, thread)
        acc, at = multiply_tile(acc, at, w_ring, steps, place, C.kernel, C)
        if C.second is not None:
            sums = as_float(acc, constants_here(0, C), constants_here(1, C), C)
            acc, at = multiply_tile(acc, at, w_ring, steps2, place, 1, C)
            store_codes(y, (), acc, constants_here(2, C), sums, g, first_pixel, unit, pixels, row_units, C)
        else:
            codes = ()
            if C.residual is not None:
                run(C.residual_barriers.wait, "=r,r,r,r", [r_stage, r_phase, zero + 1])
                codes = residual_here(r_stage, C)
            scale, offset = constants_here(0, C), constants_here(1, C)
            store_codes(y, codes, acc, scale, offset, g, first_pixel, unit, pixels, row_units, C)
            if C.residual is not None:
                run(C.residual_barriers.give, "=r,r,r", [thread * 0 + r_stage, ((thread & 31) == 0).to(gl.int32)])
                r_stage, r_phase = following(r_stage, r_phase, C.residual_stages, 1)


@gluon.jit
def deep_barriers(C: gl.constexpr):
    """Initialises the barriers and the zeros."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.make_barriers, "=r,r", [thread])
    run(C.strip.clear, "=r,r", [thread])
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=[
    "pixels", "row_units", "out_height", "out_width", "tiles_across", "tiles_down",
    "steps", "blocks", "taps_across", "taps_down", "stride_down", "stride_across", "first_down", "first_across",
    "steps2", "blocks2", "taps_across2", "taps_down2", "stride_down2", "stride_across2", "first_down2", "first_across2",
])  # fmt: skip
def deep_conv(
    y, residual, s, b, g, s2, pixels, row_units, out_height, out_width, tiles_across, tiles_down,
    maps, weight, steps, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across,
    maps2, weight2, steps2, blocks2, taps_across2, taps_down2, stride_down2, stride_across2, first_down2, first_across2,
    C: gl.constexpr,
):  # fmt: skip
    """The kernel: one block computes several tiles of pixels, all for the same outputs."""
    shared = gl.allocate_shared_memory(
        gl.int32, [C.shared_units, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    w_ring = part(
        shared, C.w_unit, C.barrier_unit, gl.int8, [C.stages * C.planes, C.outputs, C.step_bytes], C.operand_tile
    )  # fmt: skip
    thread = own_thread()
    if thread == C.threads - 128:  # while other threads initialise the barriers
        map_arrived(maps)
        if C.second is not None:
            map_arrived(maps2)
        if C.residual is not None:
            map_arrived(residual)
    deep_barriers(C)
    across = gl.program_id(0) % tiles_across
    tiles = (gl.program_id(0) // tiles_across, gl.num_programs(0) // tiles_across, tiles_down)
    size = (out_height, out_width)
    group = own_warpgroup()
    launch_next_kernel()
    if group == C.warpgroups - 1:
        run(registers_of(LOADER_REGISTERS), "=r", [])
        one = Product(maps, weight, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across)
        if thread == C.threads - 128:
            two = Product(
                maps2, weight2, blocks2, taps_across2, taps_down2, stride_down2, stride_across2, first_down2, first_across2
            )  # fmt: skip
            produce(one, two, residual, across, tiles, size, C)
        if thread == C.threads - 96:
            copy_first(one, (s, b, s2), across, C)
    else:
        run(registers_of(C.registers), "=r", [])
        consume((y, g, row_units), pixels, across, tiles, steps, steps2, size, w_ring, C)


class PreparedDeep(TiledConvPlan):
    """A layer prepared for the kernel, on one GPU, with a tile of 128 outputs."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, tile: ConvTile, sm_count: int) -> None:
        super().__init__(spec, packed, tile, sm_count)
        self.first = WindowOperand(spec, packed.weight, tile.pixels, tile.step_bytes)
        self.second: WindowOperand | None = None
        if spec.second is not None and packed.weight2 is not None:
            self.second = WindowOperand(spec.second, packed.weight2, tile.pixels, tile.step_bytes)
        self.map = functools.lru_cache(maxsize=None)(row_map)
        self.config = functools.lru_cache(maxsize=None)(functools.partial(deep_config, spec, tile))
        self.launch = ConvLauncher(deep_conv, maxnreg=128, launch_pdl=True)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        out, packed, config = self.output(x, out), self.packed, self.config(x.shape[2])
        n, height, width, pixel_bytes = out.shape
        pixels = n * height * width
        down, stride = self.rows_of_tiles(pixels)
        operand, other = self.first.arguments(x), NO_OPERAND
        if self.second is not None and second is not None:
            other = self.second.arguments(second)
        if config.strips:
            rows = x.shape[0] * x.shape[1] * x.shape[2]
            operand = (self.map(rows, x.shape[3], config.rows, config.step_bytes, x.data_ptr(), x.device), *operand[1:])
        residual_map = None
        if residual is not None:
            residual_map = self.map(
                pixels, pixel_bytes, self.tile.pixels, config.residual_row_bytes, residual.data_ptr(), x.device, False
            )  # fmt: skip
        self.launch(
            x.shape[2], (stride * self.across, 1, 1), config.warps,
            out.view(torch.int32), residual_map, packed.s, packed.b, packed.g, packed.s2, pixels, self.units, height, width,
            self.across, down, *operand, *other, config,
        )  # fmt: skip
        return out


def deep_config(spec: ConvSpec, tile: ConvTile, width: int, ordered: bool = False) -> DeepConv:
    """Returns the configuration for a layer, with a tile, for images of this width. With `ordered` warpgroups take turns where
    their rings hold all of a tile."""
    memory = deep_stages(spec, tile, width)
    steps = steps_of(spec, tile.step_bytes)
    x_steps = steps // spec.taps if memory.strips else steps
    fits = steps <= memory.stages and x_steps <= memory.x_stages
    return DeepConv(
        spec.x, spec.y, spec.residual, spec.relu, tile.warpgroups + 1, tile.outputs, tile.step_bytes, memory.stages,
        None if spec.second is None else spec.second.x, memory.resident, rows=memory.rows, kernel=memory.kernel,
        strips=memory.strips, x_stages=memory.x_stages, residual_stages=memory.residual_stages,
        odd=steps % 2 == 1, ordered=ordered and fits and tile.warpgroups > 1 and spec.second is None,
    )  # fmt: skip
