"""The report of a network's kernels, which needs no GPU: the rows used at launch, with the reason and the alternatives."""

from __future__ import annotations

import pytest
import torch

from lowbit import vision
from lowbit.hardware.machine import typical_machine
from lowbit.vision.kernels import kernel_rows
from tests.vision.nets import mobilenet, regnet, resnet

H200, A100 = typical_machine(90), typical_machine(80)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = resnet("bottleneck", sizes=(256, 512), depths=(2, 1), embedding=64)
    return vision.quantize(model, torch.randn(2, 3, 24, 24), "w4a4")


def test_every_launch_on_an_h200(network):
    rows = network.kernels(3, H200)
    kernels = [row.kernel for row in rows]
    assert kernels[:4] == ["elementwise/relayout", "sm90/stem_pool", "sm90/conv", "sm90/conv_block"]
    assert kernels.count("sm90/conv_block") == 2 and kernels[-1] == "sm90/conv" and "elementwise/pool" in kernels
    deep = next(row for row in rows if row.kernel == "sm90/conv_deep")
    assert "x 128 outputs" in deep.tile and deep.turns and any(other.startswith("sm90/conv ") for other in deep.others)
    assert any("not 64" in other for row in rows for other in row.others), "why the others cannot"


def test_on_an_a100(network):
    rows = network.kernels(3, A100)
    assert {row.kernel for row in rows} == {"elementwise/relayout", "elementwise/pool", "sm80/conv"}
    assert any("INT4 tensor cores" in row.why for row in rows)
    assert sum(row.kernel == "sm80/conv" for row in rows) == len(network.program.layers)


def test_the_report_names_them(network):
    lines = network.lines(3, H200)
    assert any(line.startswith("on H200, batch 3: sm90/conv_block ") and "codes stay in registers" in line for line in lines)
    if not torch.cuda.is_available():
        (line,) = network.lines()[1:]
        assert line.startswith("on the CPU: reference/conv: no GPU") and line.endswith("more)")


def test_parts_in_floating_point_run_by_torch():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.dilated = torch.nn.Conv2d(3, 64, 3), torch.nn.Conv2d(64, 64, 3, dilation=2)

        def forward(self, x):
            return self.dilated(self.conv(x).relu()).mean((2, 3))

    gated = vision.quantize(Gated(), torch.randn(2, 3, 12, 12), "w8a8")
    rows = {row.name: row for row in kernel_rows(gated.program, 1, H200)}
    assert rows["dilated"].kernel == "torch" and "dilation" in rows["dilated"].why
    assert rows["conv"].kernel == "sm90/conv"


@pytest.mark.parametrize("machine", [80, 90])
def test_groups_and_gates_have_kernels(machine):
    images = torch.randn(2, 3, 32, 32)
    rows = kernel_rows(vision.quantize(mobilenet(3), images, "w8a8").program, 4, typical_machine(machine))
    assert {"sm80/depthwise", "elementwise/code_table"} <= {row.kernel for row in rows}
    (row, *_) = [row for row in rows if row.kernel == "sm80/depthwise"]
    assert row.why == "no sum over channels: 4 x 2 pixels of 8 channels per thread" and "sm80/grouped_conv" in row.others[0]
    rows = kernel_rows(vision.quantize(regnet(), images, "w4a4").program, 4, typical_machine(machine))
    assert [row.why for row in rows if row.kernel == "sm80/grouped_conv"][2] == (
        "64 outputs read 128 channels, with zeros between groups"
    )
