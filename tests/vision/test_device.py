"""Programs on a GPU have the reference's codes, bit for bit. On a CPU, the same wiring and memory plan are tested."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree

from lowbit import vision
from lowbit.vision.device import DeviceProgram, refusals
from lowbit.vision.program import Compute, Quantize, outputs_of
from tests.vision.nets import Fcn, Mixed, Plain, Shared, SsdLite, Sums, Yolo, mobilenet, regnet, resnet, seasoned

CASES = {
    "basic": (lambda: resnet(depths=(2, 1)), (3, 32, 32)),
    "bottleneck": (lambda: resnet("bottleneck", sizes=(128, 256), depths=(2, 1)), (3, 24, 24)),
    "blocks": (lambda: resnet("bottleneck", sizes=(256, 512), depths=(2, 1), embedding=64), (3, 24, 28)),
    "plain": (lambda: seasoned(Plain()), (3, 16, 16)),
    "shared": (Shared, (3, 9, 7)),
    "sums": (Sums, (3, 9, 7)),
    "mixed": (lambda: seasoned(Mixed()), (3, 16, 16)),
    "mobilenet-v2": (lambda: mobilenet(2), (3, 32, 32)),
    "mobilenet-v3": (lambda: mobilenet(3), (3, 32, 40)),
    "efficientnet": (lambda: mobilenet("efficient"), (3, 24, 24)),
    "regnet": (regnet, (3, 32, 32)),
    "ssd-lite": (lambda: seasoned(SsdLite()), (3, 32, 48)),
    "yolo": (lambda: seasoned(Yolo()), (3, 32, 48)),
    "yolo-relu": (lambda: seasoned(Yolo(torch.nn.ReLU)), (3, 32, 32)),
    "fcn": (lambda: seasoned(Fcn()), (3, 32, 40)),
    "fcn-aligned": (lambda: seasoned(Fcn(aligned=True)), (3, 24, 32)),
}


def check(case, scheme, fold, on):
    """Checks each value right after the launch that computes it (later launches may reuse its memory), and the final result."""
    make, shape = CASES[case]
    torch.manual_seed(11)
    images = torch.randn(5, *shape)
    program = vision.quantize(make(), images, scheme, fold_shortcuts=fold).program
    codes = {}
    wanted = program.run(images, on_value=lambda name, value: codes.update({name: value.clone()}))
    launched = DeviceProgram(program, 5, torch.device(on))
    launched.arena.fill_(0xA5)
    launched.feed(images.to(on))
    checked, exact = 0, True
    steps = dict(launched.steps)
    operations = launched.program.operations
    assert len(operations) - len(steps) == sum(name in codes for name, _ in launched.entries)
    # The max-pool is fused into the stem and means are computed as codes; each of two blocks has three convolutions.
    saved = {"basic": 2, "bottleneck": 2, "blocks": 2 + 4, "sums": 1, "mobilenet-v2": 1, "mobilenet-v3": 4, "efficientnet": 4}
    saved["regnet"] = 4
    assert len(program.operations) - len(operations) == saved.get(case, 0)
    for operation in operations:
        if operation.y in steps:
            steps[operation.y]()
        exact = exact and not isinstance(operation, Compute)  # fp16 here, float32 in the reference
        for name in outputs_of(operation):
            packed_as_stem = isinstance(operation, Quantize) and name in launched.stems
            if name in program.values and program.values[name].storage in ("u4", "s8") and not packed_as_stem:
                off = int((launched.codes(name).cpu() - codes[name]).abs().max())
                assert off == 0 if exact else off <= 4, name
                checked += 1
    assert checked >= {"mixed": 1, "shared": 2}.get(case, 4)
    launched.arena.fill_(0xA5)
    got = pytree.tree_map(torch.Tensor.cpu, launched.run(images.to(on)))
    if case in ("mixed", "shared"):  # fp16 operations between integer ones
        assert float((got - wanted).norm() / wanted.norm()) < 0.05
    else:
        same(got, wanted)
    same(launched.run(images.to(on)), got)


def same(got, wanted):
    """Asserts that results have the same structure, and the same bits wherever they are."""
    got, wanted = pytree.tree_flatten(got), pytree.tree_flatten(wanted)
    assert got[1] == wanted[1]
    for a, b in zip(got[0], wanted[0], strict=True):
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize(
    ("case", "scheme", "fold"),
    [
        ("basic", "w8a8", False), ("basic", "w8a4", True), ("bottleneck", "w4a4", False), ("plain", "w8a4", True),
        ("blocks", "w8a8", True), ("blocks", "w8a4", True),
        ("shared", "w8a8", True), ("sums", "w8a4", True), ("mixed", "w4a4", True),
        ("mobilenet-v2", "w8a4", True), ("mobilenet-v3", "w8a8", True), ("regnet", "w4a4", True),
        ("ssd-lite", "w8a4", True), ("yolo", "w8a8", True), ("yolo-relu", "w4a4", True), ("fcn", "w8a4", True),
        ("fcn-aligned", "w8a8", True),
    ],
)  # fmt: skip
def test_on_the_cpu(case, scheme, fold):
    check(case, scheme, fold, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "scheme", "fold"),
    [
        ("basic", "w8a8", False), ("basic", "w8a4", True), ("bottleneck", "w8a4", False), ("bottleneck", "w4a4", True),
        ("blocks", "w8a8", True), ("blocks", "w8a4", True), ("plain", "w8a4", True), ("shared", "w8a8", True),
        ("sums", "w8a8", True), ("sums", "w8a4", True),
        ("mixed", "w4a4", True), ("mobilenet-v2", "w8a4", True), ("mobilenet-v2", "w4a8", True), ("mobilenet-v3", "w8a8", True),
        ("efficientnet", "w8a8", True), ("regnet", "w8a8", True), ("regnet", "w4a4", True),
        ("ssd-lite", "w8a8", True), ("ssd-lite", "w8a4", True), ("yolo", "w8a8", True), ("yolo-relu", "w8a4", True),
        ("yolo-relu", "w4a4", True), ("fcn", "w8a4", True), ("fcn", "w8a8", True), ("fcn-aligned", "w8a8", True),
    ],
)  # fmt: skip
def test_on_the_gpu(case, scheme, fold):
    check(case, scheme, fold, "cuda")


def test_pixels_and_floats_go_to_the_same_place():
    """In Mixed only a convolution reads the images. Here a sum reads them too, as floats."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(x).relu() + x

    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    network = vision.quantize(Both(), pixels, "w8a8", pixels=vision.Pixels((0.4,), (0.3,)))
    launched = DeviceProgram(network.program, 4, torch.device("cpu"))
    assert len(launched.entries) == 2  # codes for the convolution, floats for the sum
    wanted = network(pixels)
    torch.testing.assert_close(launched.run(pixels), wanted, rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match=r"images are \[4, 3, 8, 8\] on cpu, got \[3, 3, 8, 8\]"):
        launched.run(pixels[:3])


def test_stems_are_found():
    for make, stems in ((CASES["basic"][0], 1), (CASES["shared"][0], 0)):  # 7 x 7 with stride 2; 3 x 3 with stride 1
        images = torch.randn(2, 3, 32, 32)
        program = vision.quantize(make(), images, "w8a4").program
        assert len(DeviceProgram(program, 2, torch.device("cpu")).stems) == stems


def test_devices_without_kernels_are_refused():
    network = vision.quantize(resnet(), torch.randn(2, 3, 32, 32), "w8a4")
    assert refusals(network.program, torch.device("cpu")) == ()
    with pytest.raises(
        ValueError, match=r"no kernels for this network on meta: resnet.*run on NVIDIA GPUs and on the CPU, not on meta"
    ):
        DeviceProgram(network.program, 2, torch.device("meta"))


@pytest.mark.gpu
def test_a_network_keeps_a_few_batch_sizes():
    images = torch.randn(9, 3, 32, 32)
    network = vision.quantize(resnet(), images, "w8a4")
    wanted = network(images)
    for batch in (9, 1, 2, 3, 4, 9):
        assert torch.equal(network(images[:batch].cuda()).cpu(), wanted[:batch])
    assert len(network._launched) == 4
    assert torch.equal(network.reference(images.cuda()).cpu(), wanted)
