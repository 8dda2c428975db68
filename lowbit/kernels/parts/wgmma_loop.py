"""The main loop of the wgmma kernels for 16-bit x: weights of a stage are dequantized into registers while the previous stage
is multiplied.

The functions take the configuration C of a kernel, which is a `WgmmaBlock`, and the kernel's arguments p: stages of codes
`p.w`, stages of x `p.x`, and `p.scales`, of which only `last_group` is used.
"""

from __future__ import annotations

import torch

from lowbit.kernels.parts.dequantize import Dequantizer, dequantize
from lowbit.kernels.parts.gluon import barrier, gl, gluon, run, warpgroup_mma, warpgroup_mma_wait
from lowbit.kernels.parts.operand import (
    empty_registers,
    operand_a,
    read_words,
    registers_layout,
    release_stage,
    words_layout,
)
from lowbit.kernels.parts.pipeline import advance, previous
from lowbit.kernels.parts.promote import zero_sums
from lowbit.kernels.parts.tile import WarpgroupTile

STAGE_K = 64
"""Number of columns of K in a stage."""

PREFETCHED = gl.constexpr(6)
"""Number of iterations between the prefetch of scales into L2 and their load. They take longer than a load from memory."""


class WgmmaBlock(WarpgroupTile):
    """A tile of `tokens` tokens by 64 * warpgroups rows of w, which `dequantizer` dequantizes to operand A in registers."""

    dequantizer: Dequantizer
    tokens: int

    stage_tiles = 1
    """Number of FragmentOrder tiles along K in a stage."""
    iteration_stages = 2
    """Number of stages in a main-loop iteration."""

    @property
    def columns(self) -> int:
        return self.tokens

    @property
    def stage_bytes(self) -> int:
        return self.rows * 8 * self.dequantizer.bits + self.tokens * 128

    @property
    def x_type(self) -> torch.dtype:
        return torch.float16 if self.dequantizer.dtype == "fp16" else torch.bfloat16

    @property
    def x_block(self) -> tuple[int, int]:
        """[tokens, columns of K] of one TMA copy of x."""
        return self.tokens, STAGE_K

    @property
    def x_shared_layout(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout.get_default_for([*self.x_block], self.dequantizer.operand_type)

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4 * self.warpgroups, 1], [16, self.tokens, 16])

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.accumulator, 2)

    @property
    def registers_layout(self) -> gl.BlockedLayout:
        return registers_layout(self.warps, 2)

    def words_layout(self, plane: int) -> gl.DistributedLinearLayout:
        """Layout in which the words of a plane of a tile are loaded."""
        return words_layout(self.warps, self.dequantizer.plane_words(plane))


@gluon.jit
def load_scales(scale, iteration, last, C: gl.constexpr):
    """Loads scale and zero words of this thread's row pair for one iteration; `scale` points to its row block.

    Beyond the `last` group, where K has ended and x is zero, that group is loaded again.
    """
    WORDS: gl.constexpr = C.dequantizer.pair_words
    words = ()
    for i in gl.static_range(WORDS):
        group = gl.minimum(iteration * (WORDS // C.dequantizer.group_words) + i // C.dequantizer.group_words, last)
        words = words + (gl.load(scale + group * (8 * C.dequantizer.group_words) + i % C.dequantizer.group_words),)
    if WORDS > 0:
        ahead = gl.minimum((iteration + PREFETCHED) * (WORDS // C.dequantizer.group_words), last)
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [scale + ahead * (8 * C.dequantizer.group_words)])
    return words


@gluon.jit
def start(registers, x, acc, stage, C: gl.constexpr):
    """Starts the products of a stage and waits for those of the previous stage."""
    acc = warpgroup_mma(operand_a(registers, C), x.index(stage).permute([1, 0]), acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def multiply(p, scale, ahead, words, stage, phase, begin, end, more, C: gl.constexpr):
    """Computes the sums of one tile, two stages per iteration. While one stage is multiplied, the next is dequantized into a
    second set of registers.

    `ahead` are the scales of the first two iterations (`first_scales`), `words` the words of the first stage. Returns the sums,
    the words of the next tile's first stage (valid only if `more`, that is if there is a next tile), and the next stage and
    phase.
    """
    last_group = p.scales.last_group
    acc = zero_sums(gl.float32, C)
    odd = empty_registers(C)
    scales = ahead[0 : C.dequantizer.pair_words]
    next_scales = ahead[C.dequantizer.pair_words :]
    barrier()  # between stores of the previous tile and loads of this one; without it Triton inserts one in the loop
    for iteration in range(begin, end):
        before = previous(stage, C)
        even = dequantize(words, scales, False, C)
        words = read_words(p.w, stage + 1, phase, True, C)
        acc = start(even, p.x, acc, stage, C)
        release_stage(odd, before, iteration > begin, C)

        odd = dequantize(words, scales, True, C)
        following, phase = advance(stage, phase, 2, C)
        words = read_words(p.w, following, phase, (iteration + 1 < end) | more, C)
        scales = next_scales
        next_scales = load_scales(scale, iteration + 2, last_group, C)
        acc = start(odd, p.x, acc, stage + 1, C)
        release_stage(even, stage, True, C)
        stage = following
    acc = warpgroup_mma_wait(0, deps=[acc])
    release_stage(odd, previous(stage, C), begin < end, C)
    return acc, words, stage, phase
