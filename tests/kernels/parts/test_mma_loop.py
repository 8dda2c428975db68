"""The main loop of the large-M mma.sync kernel: registers hold the operand A that mma.sync reads, and stages come in order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.choose.tiles import GemmShape, MmaTile
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.mma_loop import dequantize_ahead, join, operand_of, products
from lowbit.kernels.sm80.large_m_gemm import MmaPlan
from lowbit.pack.weight import WeightForm
from tests.kernels.parts.plain import GL, Array, plain


def elements_of(text, constraints, inputs, dtype, is_pure, pack):
    """Element numbers of whole registers: register r holds elements r * pack to r * pack + pack - 1."""
    (whole,) = inputs
    return whole * pack + np.arange(pack)


@pytest.mark.parametrize(("warps_n", "row_blocks"), [(4, 4), (2, 2), (8, 1)])
@pytest.mark.parametrize("block_registers", [4, 8, 16])
def test_the_matrix_is_what_the_instruction_reads(warps_n, row_blocks, block_registers):
    lanes = 32 * warps_n
    dequantizer = SimpleNamespace(block_registers=block_registers, operand_type=None)
    config = SimpleNamespace(
        dequantizer=dequantizer,
        registers_layout=None,
        operand_layout=None,
        row_blocks=row_blocks,
        warps_n=warps_n,
        rows=16 * row_blocks * warps_n,
    )
    joined = plain(join, gl=GL)
    joined.__globals__["join"] = joined
    of = plain(operand_of, gl=SimpleNamespace(**vars(GL), inline_asm_elementwise=elements_of), join=joined, STEP_REGISTERS=4)
    count = row_blocks * block_registers
    registers = tuple((np.arange(lanes) * count + i).view(Array) for i in range(count))
    for step in range(block_registers // 4):
        made = of(registers, step, config)
        for row_block in range(row_blocks):
            for warp in range(warps_n):
                held = (np.arange(32)[:, None] + 32 * warp) * count + row_block * block_registers + 4 * step + np.arange(4)
                expected = MMA_M16N8K16_F16.a.scatter(2 * held[..., None] + np.arange(2))
                first = 16 * (row_block * warps_n + warp)
                assert np.array_equal(made[first : first + 16], expected)


class Stages:
    """A model of the stages in shared memory: tracks which iteration each holds. A copy lands when its group has been waited
    for.
    """

    def __init__(self, config):
        self.config, self.slots, self.group, self.groups = config, [None] * config.stages, [], []
        self.copied, self.read_since = {}, set()

    def copy_vector(self, source, iteration, slot, i, C):
        assert slot not in self.read_since, "warps may still read what would be overwritten"
        self.group.append((iteration, slot, i))

    def commit(self):
        self.groups.append(self.group)
        self.group = []

    def wait_for_stage(self, C):
        landed, self.groups = self.groups[: 1 - C.stages + 1 or None], self.groups[1 - C.stages + 1 :]
        for iteration, slot, i in (copy for group in landed for copy in group):
            self.copied.setdefault((iteration, slot), set()).add(i)
            self.slots[slot] = iteration
        self.read_since = set()

    def whole(self, slot):
        self.read_since.add(slot)
        assert self.copied[self.slots[slot], slot] == set(range(self.config.order.copy_count)), (
            "a stage is read before it is there"
        )
        return self.slots[slot]

    def read_x(self, x, block, C):
        slot, position = divmod(block, C.order.positions)
        return self.whole(slot), position

    def read_weights(self, reader, slot, C):
        return self.whole(slot), None

    def dequantize_row_block(self, words, ready, row_block, turn, C):
        return ((words, row_block, turn),)


@pytest.mark.parametrize("fmt", ["int3", "int4", "int8", "int2"])
@pytest.mark.parametrize(
    "tile",
    [
        MmaTile(128, 2, 8, 1, 4, 1), MmaTile(128, 4, 4, 2, 3, 1), MmaTile(64, 1, 4, 2, 6, 1), MmaTile(32, 2, 4, 2, 2, 1),
        MmaTile(256, 1, 8, 1, 3, 1), MmaTile(64, 2, 4, 1, 4, 1, warps_k=2),
    ],
    ids=str,
)  # fmt: skip
def test_each_product_has_its_x_and_its_weights(tile, fmt):
    """The main loop multiplies every k block once, with stages whose copies have landed, and never overwrites a stage being
    read.
    """
    form = WeightForm(fmt, 128, "none", "fp16", False, False)
    epilogue = Epilogue(form.channel_scale, False)
    config = MmaPlan(GemmShape(4096, 8192, 8192, number_format(fmt).bits), tile, form, torch.float16, epilogue).config
    stages, seen = Stages(config), []

    def multiply(sums, registers, b, position, C):
        step, chunk = divmod(position, C.order.chunks)
        (iteration,) = {each[0] for each in registers}
        assert [each[1:] for each in registers] == [(row_block, step // C.block_steps) for row_block in range(C.row_blocks)]
        assert b == (iteration, position)
        seen.append((iteration, step, chunk))
        return sums

    names = {"copy_vector", "commit", "wait_for_stage", "read_x", "read_weights", "dequantize_row_block"}
    device = {name: getattr(stages, name) for name in names}
    ahead = plain(
        dequantize_ahead, gl=GL, ptx=lambda write, *numbers: write(*numbers), dequantize_row_block=stages.dequantize_row_block
    )
    gl = SimpleNamespace(**vars(GL), zeros=lambda shape, kind, layout: 0, float32=None)
    loop = plain(
        products, gl=gl, ptx=lambda write, *numbers: write(*numbers), dequantize_ahead=ahead, multiply=multiply,
        run=lambda *_: None, barrier=lambda: None, together=lambda sums, count, C: sums,
        of_slices=lambda sums, C: sums, **device,
    )  # fmt: skip
    for begin, end in ((5, 16), (3, 4)):  # more iterations than stages, and fewer
        stages.__init__(config)
        seen.clear()
        loop(None, None, None, begin, end, config)
        assert seen == [
            (i, step, chunk) for i in range(begin, end) for step in range(4) for chunk in range(config.order.chunks)
        ]
