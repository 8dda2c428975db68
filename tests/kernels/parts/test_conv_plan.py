"""Host code of the convolution kernels: compilation, launch, allocation of the output and the grid."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats.conv import ConvLayer
from lowbit.kernels.choose.conv import ConvTile
from lowbit.kernels.parts.conv_plan import ConvLauncher, PlainLauncher, TiledConvPlan, most_registers
from lowbit.kernels.parts.launch import recording
from lowbit.pack.conv_weight import WgmmaTiles


class Kernel:
    """A Triton kernel stand-in that records launches."""

    def __init__(self, noted, compiled=False):
        self.noted, self.compiled = noted, compiled

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.noted.append((self.compiled, grid, arguments, options))
            return Kernel(self.noted, compiled=True)

        return launch


def test_a_width_is_compiled_once():
    noted = []
    launch = ConvLauncher(Kernel(noted), maxnreg=128)
    for width, blocks in ((56, 3), (28, 2), (56, 5)):
        launch(width, (blocks, 1, 1), 4, "x", f"configuration for {width}")
    options = {"num_warps": 4, "maxnreg": 128}
    assert noted == [
        (False, (3, 1, 1), ("x", "configuration for 56"), options),
        (False, (2, 1, 1), ("x", "configuration for 28"), options),
        (True, (5, 1, 1), ("x", "configuration for 56"), {}),
    ]


def test_kernels_are_recorded_instead_of_launched():
    """One kernel for each width of images, and one for each launcher that leaves the choice to Triton."""
    from lowbit.kernels.sm80.depthwise import depthwise_kernel

    convolutions, plain = ConvLauncher(depthwise_kernel, maxnreg=128), PlainLauncher(depthwise_kernel, num_warps=4)
    arguments = (*(torch.zeros(16) for _ in range(5)), *range(len(depthwise_kernel.params) - 5))
    with recording() as kernels:
        for width in (56, 28, 56):
            convolutions(width, (3, 1, 1), 8, *arguments)
        plain(7, *arguments)
        plain(8, *arguments)
    assert [each.options for each in kernels] == [{"num_warps": 8, "maxnreg": 128}, {"num_warps": 4}]
    assert {(each.module, each.name) for each in kernels} == {("lowbit.kernels.sm80.depthwise", "depthwise_kernel")}
    assert not convolutions.kernels


@pytest.mark.parametrize(("blocks", "threads", "registers"), [(1, 128, 255), (2, 256, 128), (3, 128, 168), (4, 128, 128)])
def test_registers_of_blocks_that_share_an_sm(blocks, threads, registers):
    assert most_registers(blocks, threads) == registers
    assert blocks * threads * registers <= 65536


def plan_of(y, outputs, sms=132):
    weight = torch.ones(outputs, 64, 3, 3, dtype=torch.int8)
    layer = ConvLayer(weight, torch.ones(outputs), torch.zeros(outputs), "u4", y, (2, 2), (1, 1))
    tile = ConvTile(2, 64, 32, 4, 2)
    return TiledConvPlan(layer.spec, WgmmaTiles("u4", y, tile.outputs, tile.step_bytes).pack_layer(layer), tile, sms)


def test_memory_of_the_output():
    x = torch.zeros(3, 9, 11, 32, dtype=torch.uint8)
    codes, values = plan_of("u4", 100).output(x, None), plan_of("f16", 100).output(x, None)
    assert (codes.shape, codes.dtype) == ((3, 5, 6, 64), torch.uint8)
    assert (values.shape, values.dtype) == ((3, 5, 6, 100), torch.float16)
    assert plan_of("u4", 100).output(x, codes) is codes


@pytest.mark.parametrize(("pixels", "expected"), [(1, (1, 1)), (128 * 200, (200, 132)), (128 * 200 + 1, (201, 132))])
def test_blocks_go_through_rows_of_tiles(pixels, expected):
    plan = plan_of("u4", 100)
    assert (plan.across, plan.rows_of_tiles(pixels)) == (2, expected)
    assert plan_of("u4", 100, sms=1).rows_of_tiles(pixels)[1] == 1
