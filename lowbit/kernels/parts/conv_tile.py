"""Configuration of the convolution kernels of sm_90: a tile of pixels x outputs, its shared memory, its layouts."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import ACTIVATIONS
from lowbit.kernels.choose.conv import UNIT
from lowbit.kernels.parts.gluon import gl, source_digest
from lowbit.kernels.parts.operand import register_fence
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.requantize import Requantize
from lowbit.kernels.parts.tile import Warpgroups
from lowbit.kernels.parts.window_ring import WindowRing
from lowbit.pack.conv_layout import GROUP, unit_channels
from lowbit.pack.conv_weight import planes

UNIT_WORDS = gl.constexpr(UNIT // 4)
"""Number of 32-bit words in a unit of shared memory."""


@dataclass(frozen=True)
class WgmmaConv(Warpgroups):
    """The kernel's compile-time configuration.

    A tile is 64 * warpgroups pixels x `outputs` channels; a k block is `step_bytes` of packed channels of one tap. `second` is
    the storage of the second product's input, or None. `resident` is the number of weight tiles (one k block, one plane) that
    stay in shared memory while a block runs, 0 where they are copied for every tile.
    """

    x: str
    y: str
    residual: str | None
    relu: bool
    warpgroups: int
    outputs: int
    step_bytes: int
    stages: int
    second: str | None = None
    resident: int = 0
    digest: str = source_digest()

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    @property
    def planes(self) -> int:
        """Number of weight planes in a k block of the first product."""
        return planes(self.x)

    @property
    def second_planes(self) -> int:
        return planes(self.second) if self.second else 0

    @property
    def most_planes(self) -> int:
        return max(self.planes, self.second_planes)

    @property
    def x_bytes(self) -> int:
        return self.pixels * self.step_bytes

    @property
    def w_tile_bytes(self) -> int:
        """Bytes of the weights of one k block and one plane."""
        return self.outputs * self.step_bytes

    @property
    def w_bytes(self) -> int:
        return self.most_planes * self.w_tile_bytes

    @property
    def w_tiles(self) -> int:
        """Number of weight tiles in shared memory."""
        return self.resident or self.stages * self.most_planes

    @property
    def w_unit(self) -> int:
        return self.stages * self.x_bytes // UNIT

    @property
    def barrier_unit(self) -> int:
        return self.w_unit + self.w_tiles * self.w_tile_bytes // UNIT

    @property
    def shared_bytes(self) -> int:
        return (self.barrier_unit + 1) * UNIT

    @property
    def barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, self.stages, self.warps)

    @property
    def ring(self) -> WindowRing:
        return WindowRing(
            self.barriers, 0, UNIT * self.w_unit, self.pixels, self.step_bytes, self.w_bytes, self.resident > 0
        )  # fmt: skip

    @property
    def keeps_constants(self) -> bool:
        """True if a thread keeps s and b of its outputs in registers; else it loads them for every tile."""
        return self.outputs == 64 and self.second is None

    @property
    def weights(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit + 16 * self.stages, 1, self.warps)

    @property
    def requantize(self) -> Requantize:
        return Requantize(self.y, self.residual, self.relu)

    @property
    def register_fence(self) -> str:
        """Register fence for a stage (parts/operand.py)."""
        return register_fence(2 * self.ring.registers)

    @property
    def decoded(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (2 * self.ring.registers)

    @property
    def stores_codes(self) -> bool:
        return self.y in ACTIVATIONS

    @property
    def words(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.requantize.words

    @property
    def instruction(self) -> int:
        """Number of columns of one wgmma; with 256 and int8 Triton 3.6 crashes."""
        return min(self.outputs, 128)

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, self.instruction, 32])

    @property
    def operand(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.accumulator, 4)

    @property
    def operand_tile(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout(swizzle_byte_width=self.step_bytes, element_bitwidth=8, rank=2)

    @property
    def quads_layout(self) -> gl.BlockedLayout:
        """[threads, 4]: four elements per thread."""
        return gl.BlockedLayout([1, 4], [32, 1], [self.warps, 1], [1, 0])

    @property
    def units(self) -> int:
        """Number of vectors in which a thread stores a pixel's outputs, one instruction each."""
        return self.outputs // unit_channels(self.y, self.outputs)

    @property
    def groups(self) -> int:
        """Number of groups of 8 columns that a thread has in a unit."""
        return unit_channels(self.y, self.outputs) // (4 * GROUP)

    def words_layout(self, words: int) -> gl.DistributedLinearLayout:
        """Layout [pixels, units, 4 lanes, words] with the pixels and channels of each thread's accumulator; `words` neighbours
        are one register vector."""
        register = [[0, 0, 0, 1 << i] for i in range(words.bit_length() - 1)]
        register += [[8, 0, 0, 0]] + [[0, 1 << i, 0, 0] for i in range(self.units.bit_length() - 1)]
        lane = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
        warp = [[16 << i, 0, 0, 0] for i in range(self.warps.bit_length() - 1)]
        return gl.DistributedLinearLayout(register, lane, warp, [], [self.pixels, self.units, 4, words])

    @property
    def constants_layout(self) -> gl.DistributedLinearLayout:
        """Layout [outputs / 16, 4 lanes, 4]: a thread's constants, 4 in one register vector."""
        register = [[0, 0, 1], [0, 0, 2]] + [[1 << i, 0, 0] for i in range((self.outputs // 16).bit_length() - 1)]
        warp = [[0, 0, 0] for _ in range(self.warps.bit_length() - 1)]
        lane = [[0, 1, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
        return gl.DistributedLinearLayout(register, lane, warp, [], [self.outputs // 16, 4, 4])

    @property
    def out_words(self) -> int:
        """Number of output words that a thread has in a unit."""
        return self.groups * self.requantize.words

    @property
    def residual_words(self) -> int:
        return self.groups * self.requantize.residual_words
