"""Images of codes are resized. The reference is compared with torch in float64, the kernels with the reference; without a GPU
they run in Triton's interpreter. Also tests the machine code, and wrong tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from lowbit.formats.conv import ResizeSpec, code_range
from lowbit.kernels.reference.conv import resize_reference
from lowbit.ops.code_arrange import resize_codes
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

pytest.importorskip("triton", reason="the kernels are Triton's")
from lowbit.kernels.elementwise.resize import BLOCK, resize, resize_kernel

CASES = (
    ((3, 5), ResizeSpec("nearest", (6, 5))), ((3, 5), ResizeSpec("nearest", (9, 20))),
    ((3, 5), ResizeSpec("bilinear", (6, 10))), ((4, 3), ResizeSpec("bilinear", (9, 7))),
    ((8, 6), ResizeSpec("bilinear", (3, 2))),
    ((3, 5), ResizeSpec("bilinear", (7, 9), True)), ((2, 4), ResizeSpec("bilinear", (1, 8), True)),
    ((1, 1), ResizeSpec("bilinear", (4, 3))),
)  # fmt: skip


def codes_of(storage, *shape, on="cpu"):
    low, high = code_range(storage)
    return torch.randint(low, high + 1, shape, dtype=torch.int32, device=on)


@pytest.mark.parametrize("storage", ["s8", "u4"])
@pytest.mark.parametrize(
    ("size", "spec"), CASES, ids=[f"{size}-{spec.mode}-{spec.size}-{spec.aligned}" for size, spec in CASES]
)
def test_the_reference_rounds_what_torch_interpolates(size, spec, storage):
    torch.manual_seed(0)
    codes = codes_of(storage, 3, 7, *size)
    aligned = None if spec.mode == "nearest" else spec.aligned
    exact = functional.interpolate(codes.double(), spec.size, mode=spec.mode, align_corners=aligned)
    got = resize_reference(codes, spec, storage)
    assert got.dtype == torch.int32 and float((got - exact).abs().max()) <= 0.5 + 1e-9
    assert torch.equal(resize_reference(torch.full_like(codes, 9), spec, storage), torch.full_like(got, 9))


def check(on="cpu"):
    torch.manual_seed(1)
    for size, spec in CASES:
        for storage, channels in (("s8", 70), ("u4", 64)):
            codes = codes_of(storage, 2, channels, *size, on=on)
            wanted = resize_reference(codes, spec, storage)
            out = torch.full(Nhwc64(storage).shape(tuple(wanted.shape)), 0xA5, dtype=torch.uint8, device=on)
            resize(Nhwc64(storage).pack(codes), spec, storage, out)
            assert torch.equal(out, Nhwc64(storage).pack(wanted)), (size, spec, storage)


def test_the_codes_in_tritons_interpreter():
    interpreted(check)


@pytest.mark.gpu
def test_the_codes_on_a_gpu():
    check("cuda")


def test_what_has_no_integer_form_is_refused():
    x = torch.zeros(2, 3, 4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"repeated a whole number of times, not from \(3, 4\) to \(7, 8\)"):
        resize_codes(x, ResizeSpec("nearest", (7, 8)), "s8", x.new_zeros(2, 7, 8, 64))
    with pytest.raises(ValueError, match=r"bilinear weights of \(3, 4\) to \(997, 499\) are in 1 / "):
        resize_codes(x, ResizeSpec("bilinear", (997, 499)), "s8", x.new_zeros(2, 997, 499, 64))
    with pytest.raises(ValueError, match=r"the output is contiguous uint8 \[2, 6, 8, 64\] on cpu, got torch.uint8"):
        resize_codes(x, ResizeSpec("nearest", (6, 8)), "s8", x.new_zeros(2, 6, 4, 64))
    assert ResizeSpec("bicubic", (6, 8)).refusals((3, 4)) == ("images are resized by nearest or bilinear, not by bicubic",)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("four", [False, True])
def test_codes_move_16_bytes_at_a_time(four, capability):
    numbers = ("height", "width", "out_height", "out_width", "row_step", "row_shift", "row_whole", "step", "shift", "whole")
    signature = {"y": "*i32", "x": "*i32", **dict.fromkeys(numbers, "i32"), "s": "fp32", "b": "fp32", "total": "i32"}
    for nearest, loads in ((True, 1), (False, 4)):
        constants = dict(VECTORS=6, NEAREST=nearest, FOUR=four, BLOCK=BLOCK)
        kernel = compile_triton(resize_kernel, signature, constants, ("y", "x"), 4, capability)
        assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") == loads and kernel.count("STG.E.128") == 1
        assert kernel.registers <= 128
