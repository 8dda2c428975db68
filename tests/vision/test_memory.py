"""The memory plan: values with overlapping lifetimes do not overlap in memory. tests/vision/test_device.py runs programs in
it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import vision
from lowbit.vision.fusion import fused
from lowbit.vision.memory import ALIGNMENT_BYTES, plan_memory, stems, stored_bytes
from lowbit.vision.program import FusedBottleneck, Value, outputs_of
from tests.vision.nets import resnet


@pytest.fixture(scope="module", params=[True, False], ids=["folded", "residual"])
def program(request):
    torch.manual_seed(0)
    model = resnet("bottleneck", sizes=(128, 256), depths=(2, 2))
    return vision.quantize(model, torch.randn(4, 3, 32, 32), "w8a4", fold_shortcuts=request.param).program


def test_bytes_of_stored_values():
    # 56 channels are padded to 64: 32 bytes per pixel in 4 bits, 64 in 8 bits; 2048 channels take 1024 and 2048 bytes.
    assert stored_bytes(Value("u4", (56, 8, 8)), 4) == 4 * 64 * 32
    assert stored_bytes(Value("s8", (56, 8, 8)), 4) == 4 * 64 * 64
    assert stored_bytes(Value("u4", (2048, 7, 7)), 1) == 49 * ALIGNMENT_BYTES
    assert stored_bytes(Value("f32", (10,)), 3) == ALIGNMENT_BYTES
    assert stored_bytes(Value("u4", (65, 1, 1)), 32) == 32 * 64


@pytest.fixture(scope="module")
def bottlenecks():
    """The program of two bottleneck blocks of 64 channels and one of 128."""
    torch.manual_seed(0)
    model = resnet("bottleneck", sizes=(256, 512), depths=(2, 1), embedding=64)
    return vision.quantize(model, torch.randn(2, 3, 24, 24), "w8a4").program


def test_values_of_blocks_are_apart(bottlenecks):
    whole = fused(bottlenecks, 3, None)
    check_allocations(whole, 3)
    plan = plan_memory(whole, 3)
    for op in whole.operations:
        if isinstance(op, FusedBottleneck):
            allocations = [plan.allocations[name] for name in (*op.inputs, op.also, op.y)]
            assert all(p.overlaps(q) for p in allocations for q in allocations)


@pytest.mark.parametrize("batch", [1, 7, 128])
def test_values_that_live_together_are_apart(program, batch):
    plan = check_allocations(program, batch)
    assert plan.peak_bytes <= plan.nbytes < plan.values_bytes


def check_allocations(program, batch):
    plan = plan_memory(program, batch)
    assert set(plan.allocations) == {name for op in program.operations for name in outputs_of(op)}
    for i, (a, p) in enumerate(plan.allocations.items()):
        assert p.offset % ALIGNMENT_BYTES == 0 and (a in stems(program) or p.nbytes == stored_bytes(program.values[a], batch))
        for b, q in list(plan.allocations.items())[i + 1 :]:
            together = {op.y for op in program.operations if {a, b} <= {*outputs_of(op), *op.inputs}}
            apart = p.offset + p.nbytes <= q.offset or q.offset + q.nbytes <= p.offset
            assert apart or not p.overlaps(q)
            assert p.overlaps(q) or not together  # an operation's inputs and outputs are alive while it runs
    return plan


def test_a_chain_needs_two_places():
    torch.manual_seed(0)
    chain = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 1), nn.ReLU())])
    program = vision.quantize(chain, torch.randn(2, 64, 8, 8), "w8a8").program
    plan = plan_memory(program, 16)
    image = 16 * 64 * 64  # as 8-bit codes; the float32 result has four times the bytes
    assert plan.nbytes == plan.peak_bytes == image + 4 * image
    assert plan.values_bytes == 6 * image + 4 * image


def test_images_of_a_stem_are_packed_by_four_pixels(program):
    """32 x 32 pixels of 3 channels take 16 rows of packed pixels (16 bytes each) plus padding, not 64 channels per pixel."""
    (name,) = stems(program)
    allocation = plan_memory(program, 8).allocations[name]
    assert 8 * 16 * 16 * 16 < allocation.nbytes < 8 * 16 * 20 * 16 < stored_bytes(program.values[name], 8) // 4


def test_a_batch_has_images(program):
    with pytest.raises(ValueError, match="at least 1 image"):
        plan_memory(program, 0)
