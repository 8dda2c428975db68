"""Two 1 x 1 convolutions in one kernel: machine code without a GPU, and codes bit-equal to the layers' references on one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")


from lowbit.formats.conv import SecondProduct
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.conv import pair_refusals, pair_tile
from lowbit.kernels.reference.conv import conv_reference
from lowbit.kernels.sm90.conv_pair import PairConv, pair_conv
from lowbit.ops.conv_pair import pair_launcher, prepare_pair
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.test_compile import check_straight_line
from tests.kernels.sm90.test_conv import codes_of, layer

SHAPES = [(128, 512, 128, 0), (256, 1024, 256, 0), (128, 512, 128, 256)]
"""As in ResNet-50: channels of x, y, z and of the shortcut's input."""

PAIRS = [(storage, *shape) for storage in ("u4", "s8") for shape in SHAPES]


def layers(storage, channels, expanded, following, entry):
    product = None
    if entry:
        other = layer(entry, expanded, 1, 2, 0, storage, storage)
        product = SecondProduct(other.weight, 0.7 * other.s, storage, (2, 2))
    third = layer(channels, expanded, 1, 1, 0, storage, storage, None if entry else storage, second=product)
    return third, layer(expanded, following, 1, 1, 0, storage, storage)


@pytest.mark.parametrize(("storage", "channels", "expanded", "following", "entry"), PAIRS)
def test_machine_code(storage, channels, expanded, following, entry):
    config = PairConv(**vars(pair_tile(storage, channels, expanded, following, entry)))
    pointers = ["y", "z", "x", "added"]
    signature = dict.fromkeys(pointers, "*i32") | {"g": "fp32"}
    signature |= dict.fromkeys(("pixels", "tiles", "image", "width", "entry_image", "entry_width", "stride"), "i32")
    kernel = compile_kernel(
        pair_conv, signature | {"weight": "*i8"}, config, [*pointers, "weight"], config.warps, 90, maxnreg=128
    )  # fmt: skip
    assert kernel.stack_bytes <= (16 if entry else 0)
    chunks = 128 // config.chunk
    steps = (channels + entry) // 32 * chunks + expanded // 32
    assert kernel.count("IGMMA") == steps, "an iteration of y, a pass of z"
    assert kernel.count("WARPGROUP.DEPBAR") == chunks + expanded // 128, "a wait for each chunk and k block: not serialized"
    assert kernel.count("SHFL") == 0 and kernel.count("LDSM") == 0, "operand A is loaded as it is in memory"
    assert kernel.count("STG.E.128") == kernel.count("STG") == 4 * config.step_vectors
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    last = max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line)
    check_straight_line(lines[: last + 1])


def test_refusals():
    machine = typical_machine(90)

    def spec(*shape):
        third, last = layers_on_cpu(*shape)
        return third.spec, last.spec

    fits = spec("u4", 128, 512, 128, 0)
    assert not pair_refusals(*fits, (128, 28, 28), machine) and not pair_refusals(*fits, (1, 28, 28), None)
    assert "tiles leave more than a quarter" in pair_refusals(*fits, (1, 28, 28), machine)[0]
    assert "is for sm_90" in pair_refusals(*fits, (128, 28, 28), typical_machine(80))[0]
    assert "channels are 512" in pair_refusals(*spec("u4", 512, 2048, 512, 0), (128, 28, 28), machine)[0]
    assert "the shortcut is 512 channels" in pair_refusals(*spec("u4", 256, 1024, 256, 512), (128, 28, 28), machine)[0]
    for change, reason in (
        ({"relu": False}, "has no ReLU"),
        ({"stride": (2, 2)}, "supported: 1 x 1"),
        ({"y": "s8"}, "one storage"),
    ):
        wrong = dataclasses.replace(fits[0], **change)
        assert any(reason in each for each in pair_refusals(wrong, fits[1], (128, 28, 28), machine))


def layers_on_cpu(storage, channels, expanded, following, entry):
    from tests.pack.test_conv_pair import random_layers

    return random_layers(storage, channels, expanded, following, entry)


def test_on_the_cpu():
    third, last = layers_on_cpu("u4", 128, 256, 128, 256)
    pair = prepare_pair(third, last, (2, 3, 5), "cpu")
    layout = Nhwc64("u4")
    x, entry = torch.randint(0, 16, (2, 128, 3, 5)), torch.randint(0, 16, (2, 256, 6, 10))
    y, z = pair(layout.pack(x), layout.pack(entry))
    wanted = conv_reference(x, third, None, entry)
    assert torch.equal(layout.unpack(y, 256), wanted) and torch.equal(layout.unpack(z, 128), conv_reference(wanted, last))
    with pytest.raises(ValueError, match="does not make an output"):
        pair(layout.pack(x), layout.pack(entry)[:, :3].contiguous())


SIZES = [(3, 28, 28), (5, 9, 11), (1, 1, 1), (2, 14, 14), (7, 16, 12)]


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [2, 132])
@pytest.mark.parametrize(
    ("storage", "channels", "expanded", "following", "entry"), [*PAIRS, ("u4", 128, 512, 256, 0), ("s8", 256, 1024, 512, 0)]
)
def test_codes(storage, channels, expanded, following, entry, sms):
    torch.manual_seed(7)
    third, last = layers(storage, channels, expanded, following, entry)
    launch = pair_launcher(third, last, dataclasses.replace(typical_machine(90), sm_count=sms))
    layout = Nhwc64(storage)
    for n, height, width in SIZES:
        x = codes_of(storage, n, channels, height, width)
        added = (
            codes_of(storage, n, entry, 2 * height - 1, 2 * width) if entry else codes_of(storage, n, expanded, height, width)
        )
        shapes = [(n, height, width, layout.pixel_bytes(count)) for count in (expanded, following)]
        out = tuple(torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda") for shape in shapes)
        launch(layout.pack(x), layout.pack(added), out)
        y = conv_reference(x, third, None if entry else added, added if entry else None)
        z = conv_reference(y, last)
        assert torch.equal(layout.unpack(out[0], expanded), y), (n, height, width)
        assert torch.equal(layout.unpack(out[1], following), z), (n, height, width)
        assert y.unique().numel() > 4 and z.unique().numel() > 4
        again = tuple(torch.empty_like(each) for each in out)
        launch(layout.pack(x), layout.pack(added), again)
        assert torch.equal(again[0], out[0]) and torch.equal(again[1], out[1])
