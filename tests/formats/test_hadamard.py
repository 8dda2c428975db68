"""Hadamard rotation of blocks of channels against the matrix in float64, and weights for a rotated x."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.checkpoint import gptq
from lowbit.formats import BLOCKS, LowRank, rotate_blocks
from lowbit.formats.split import columns_of, columns_refusals, rows_of, stack_refusals
from lowbit.ops import pack_for
from lowbit.ops.elementwise import EmbeddingTable
from lowbit.pack import FragmentWeight
from lowbit.pack.gated import gated_refusals
from lowbit.pack.gemm_weight import RowWeight
from lowbit.quantize import rtn
from tests.tiny import with_channels


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(k, block):
    """The rotation matrix [K, K] in float64, from the definition: element (i, j) of a block is (-1)^popcount(i & j) /
    sqrt(block).
    """
    common = [[bin(i & j).count("1") for j in range(block)] for i in range(block)]
    one = (-1.0) ** torch.tensor(common, dtype=torch.float64) / block**0.5
    return torch.block_diag(*[one] * (k // block))


@pytest.mark.parametrize("block", BLOCKS)
def test_against_the_matrix(block):
    k = 3 * block
    exact, h = random(5, k).double(), matrix(k, block)
    torch.testing.assert_close(rotate_blocks(exact, block), exact @ h, rtol=0, atol=1e-14)
    torch.testing.assert_close(h @ h, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-14)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = random(2, 5, k).to(dtype)
        y, right, size = rotate_blocks(x, block), x.double() @ h, x.double().abs() @ h.abs()
        assert y.dtype == dtype and y.shape == x.shape
        sums = block * 2.0**-24 * size  # bound of the float32 sums; then one rounding
        assert bool(((y.double() - right).abs() <= sums + torch.finfo(dtype).eps / 2 * (right.abs() + sums)).all())
        whole = torch.randint(-4, 5, (5, k), generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(rotate_blocks(rotate_blocks(whole, block), block), whole), "sums of small whole numbers are exact"


def test_what_is_refused():
    for block, k in ((64, 96), (32, 64), (0, 64), (4, 64)):
        with pytest.raises(ValueError, match=f"blocks of 16, 64, 256 that divide K, got {block} for K {k}"):
            rotate_blocks(torch.zeros(2, k), block)
    with pytest.raises(ValueError, match="that divide K, got 64 for K 96"):
        rtn(random(8, 96), "w8a16").with_input(hadamard=64)


def test_a_matrix_made_in_inference_mode_takes_gradients():
    with torch.inference_mode():
        rotate_blocks(torch.ones(1, 256, dtype=torch.float64), 256)
    x = torch.ones(1, 256, dtype=torch.float64, requires_grad=True)
    rotate_blocks(x, 256).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(1, 256, dtype=torch.float64) @ matrix(256, 256))


def test_dequantized_weights_meet_x_as_it_comes():
    q = with_channels(rtn(random(24, 128), "w4a16_g32"))
    q = replace(q.with_input(hadamard=64), low_rank=LowRank(random(24, 4), random(4, 128)))
    x = random(7, 128, seed=1).double()
    y = rotate_blocks(x, 64) @ q.with_input(hadamard=0).dequantize(torch.float64).T
    torch.testing.assert_close(x @ q.dequantize(torch.float64).T, y, rtol=0, atol=1e-12)
    assert torch.equal(q.dequantize_codes(), q.with_input(hadamard=0).dequantize_codes())
    assert q.to("cpu").input_transform.hadamard == 64 and q.nbytes == q.with_input(hadamard=0).nbytes


def test_parts_of_ranks_add_up_to_the_whole():
    q = rtn(random(32, 256), "w4a16_g64").with_input(hadamard=64)
    x, y = random(3, 256).double(), 0
    for rank in range(2):
        part, index = columns_of(q, rank, 2)
        assert index is None and part.input_transform.hadamard == 64
        y = y + x[:, 128 * rank : 128 * rank + 128] @ part.dequantize(torch.float64).T
    torch.testing.assert_close(y, x @ q.dequantize(torch.float64).T, rtol=0, atol=1e-12)
    assert torch.equal(rows_of(q, [(8, 24)]).dequantize(), q.dequantize()[8:24])
    assert columns_refusals(q, 8)[0].startswith("inputs that are rotated in blocks of 64 channels are split between blocks")
    assert columns_refusals(with_channels(q, True, None), 2) and not columns_refusals(with_channels(q, True, None), 1)
    assert stack_refusals(q, q.with_input(hadamard=0)) == ("rotations of the input differ",) and not stack_refusals(q, q)


def test_whoever_does_not_rotate_x_refuses():
    q = rtn(random(64, 128), "w4a16_g64").with_input(hadamard=64)
    for pack in (pack_for, FragmentWeight.pack, RowWeight.pack):
        with pytest.raises(ValueError, match="rotation of the input is no part of the product"):
            pack(q)
    assert gated_refusals(q, q) == ("x is the norm's own output: no rotation of the input",)
    assert gptq.refusals(q) == ("GPTQ files have no rotation of the input",)
    with pytest.raises(ValueError, match="plain w8a16"):
        EmbeddingTable.from_quant_tensor(rtn(random(64, 128), "w8a16").with_input(hadamard=64))
