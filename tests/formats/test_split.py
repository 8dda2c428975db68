"""The parts of a weight for tensor-parallel ranks. Together they are the whole weight, and their products add up to its
product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.formats import LowRank, QuantTensor, parse_scheme, scale_shape
from lowbit.formats.split import columns_of, columns_refusals, filled_up, part_range, rows_of, stack_refusals, stacked
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn

RANKS = (1, 2, 3, 4, 8)
WEIGHTS_ONLY = (
    "w2a16_g64", "w3a16_g128", "w4a16_g128", "w4a16_pc", "w5a16_g32", "w6a16_g96", "w7a16", "w8a16_g128", "w4a16_t",
    "w4a16_g128_z", "w3a16_g32_z", "w8a16_pc_z", "w4a16_g32_fz", "w2a16_pc_fz", "w5a16_g64_fz", "w4e2m1a16_g16", "w5e2m2a16",
    "w6e3m2a16", "w6e2m3a16_g128", "w8e4m3a16_b128x128", "w8e5m2a16_t", "w4a16_b32x64", "w4a16_b32x64_z",
)  # fmt: skip
QUANTIZED_X = (
    "w8a8", "w8a8_az", "w8a8_t", "w4a8_g128", "w8e4m3a8e4m3", "w8e4m3a8e4m3_t", "w8e4m3a8e4m3_b128x128", "w6e3m2a8e4m3",
    "w8a8_ct", "w4a8_pc",
)  # fmt: skip


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(name, shape=(96, 768), *, order=False, factors=False, low_rank=0, static=False):
    """A quantized matrix with varying scales and the requested extras: order, pre_quant_scale, low rank, static scale."""
    scheme = parse_scheme(name)
    w = random(*shape) * (1 + torch.arange(shape[1]) % 7) * (1 + torch.arange(shape[0]) % 5)[:, None]
    q, (n, k) = rtn(w, scheme), shape
    held = {}
    if order:
        held["order"] = torch.randperm(k, generator=torch.Generator().manual_seed(1)).int()
    if factors:
        held["pre_quant_scale"] = random(k, seed=2).abs() + 0.5
    correction = None
    if low_rank:
        correction = LowRank(random(n, low_rank, seed=3).half(), random(low_rank, k, seed=4).half())
    if static:
        held["activation_scale"] = torch.tensor([0.05])
        held |= {"activation_zero": torch.tensor([3], dtype=torch.int32)} if scheme.activation_zero else {}
    return replace(q.with_input(**held), low_rank=correction)


def weights(q: QuantTensor, index=None, channels=0):
    """The exact float64 weights in the order of x's channels."""
    dense = q.dequantize(torch.float64)
    return dense if index is None else torch.zeros(len(dense), channels, dtype=torch.float64).index_add_(1, index, dense)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", WEIGHTS_ONLY + QUANTIZED_X)
def test_parts_of_rows_are_rows_of_the_whole(name, ranks):
    q = matrix(name, low_rank=3, order=True, factors=True)
    held = [rows_of(q, [part_range(96, 96 // ranks, rank, ranks)]) for rank in range(ranks)]
    assert torch.equal(torch.cat([weights(part) for part in held]), weights(q))
    assert len({part.scheme for part in held}) == 1 or "_b" in name  # with blocks, the last rank may have a partial one


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [(32, 768), (32, 576), (16, 1848)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS_ONLY + QUANTIZED_X)
def test_parts_of_columns_are_columns_of_the_whole(name, shape, ranks):
    """A rank's columns may end within a group: 576 is no multiple of 128, and 1848 / 8 is 231."""
    q, k = matrix(name, shape, low_rank=3, factors=True), shape[1]
    held = [columns_of(q, rank, ranks) for rank in range(ranks)]
    assert all(index is None for _, index in held)
    assert torch.equal(torch.cat([weights(part) for part, _ in held], dim=1), weights(q))
    assert all(part.shape == (shape[0], k // ranks) for part, _ in held) and len({part.scheme for part, _ in held}) == 1


@pytest.mark.parametrize(
    ("k", "ranks", "group"), [(14784, 1, 128), (29568, 2, 64), (14784, 4, 16), (14336, 8, 128), (576, 2, 32)]
)
def test_groups_that_ranks_cut_become_their_common_divisor(k, ranks, group):
    part, _ = columns_of(matrix("w4a16_g128", (16, k)), ranks - 1, ranks)
    assert part.scheme == parse_scheme(f"w4a16_g{group}")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "name", ["w4a16_g128", "w3a16_g64_z", "w6e3m2a16", "w6e3m2a16_g32", "w8a16_t", "w4a16_pc_z", "w4a16_g48"]
)
def test_columns_in_another_order_meet_their_channels(name, ranks):
    q = matrix(name, (32, 768), order=True, factors=True, low_rank=3)
    assert columns_refusals(q, ranks) == ()
    for rank in range(ranks):
        part, index = columns_of(q, rank, ranks)
        begin, end = rank * 768 // ranks, (rank + 1) * 768 // ranks
        assert torch.equal(weights(part, index, end - begin), weights(q)[:, begin:end])


def test_an_order_within_each_rank_needs_no_filling():
    q = matrix("w4a16_g64", (32, 512))
    q = q.with_input(order=torch.cat([random(128, seed=i).argsort() + 128 * i for i in range(4)]).int())
    for rank in range(4):
        part, index = columns_of(q, rank, 4)
        assert index is None and part.scheme == q.scheme
        assert torch.equal(weights(part), weights(q)[:, 128 * rank : 128 * (rank + 1)])


@pytest.mark.parametrize("order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_products_of_parts_add_up_to_the_product_of_the_whole(name, ranks, order):
    q, x = matrix(name, (48, 768), order=order, factors=True), random(5, 768, seed=9)
    if columns_refusals(q, ranks):
        pytest.skip("; ".join(columns_refusals(q, ranks)))
    whole, total = QuantLinear.from_quant_tensor(q)(x), torch.zeros(5, 48)
    for rank in range(ranks):
        own = x[:, rank * 768 // ranks : (rank + 1) * 768 // ranks]
        part, index = columns_of(q, rank, ranks)
        total += QuantLinear.from_quant_tensor(part)(own if index is None else own[:, index])
    assert torch.allclose(total, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    rows = [rows_of(q, [part_range(48, 48 // ranks, rank, ranks)]) for rank in range(ranks)]
    y = torch.cat([QuantLinear.from_quant_tensor(part)(x) for part in rows], dim=1)
    assert torch.allclose(y, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize("static", [False, True], ids=["scale of each token", "calibrated scale"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", QUANTIZED_X)
def test_products_with_quantized_x_err_no_more_in_parts(name, ranks, static):
    """A static scale is the same for all ranks. A dynamic scale is computed from the rank's part of a token: the codes differ
    from those of the whole token, but are no coarser.
    """
    if static and "b128x128" in name:
        pytest.skip("blocks of weights go with scales of x in blocks, found at each call")
    if 768 // ranks % 128 and "b128x128" in name:
        pytest.skip("blocks that ranks cut are smaller than those of x: refused by every kernel")
    q, x = matrix(name, (48, 768), static=static), random(5, 768, seed=9)
    exact, total = x.double() @ weights(q).T, torch.zeros(5, 48)
    for rank in range(ranks):
        own = x[:, rank * 768 // ranks : (rank + 1) * 768 // ranks]
        total += QuantLinear.from_quant_tensor(columns_of(q, rank, ranks)[0])(own)
    whole = QuantLinear.from_quant_tensor(q)(x)
    if static:
        assert torch.allclose(total, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    assert (total - exact).norm() <= 1.1 * (whole - exact).norm() + 1e-5 * exact.norm()


@pytest.mark.parametrize(
    ("total", "part", "ranks", "begins"),
    [
        (64, 16, 4, [0, 16, 32, 48]),
        (32, 16, 8, [0, 0, 0, 0, 16, 16, 16, 16]),  # 2 kv heads for 8 ranks
        (16, 16, 3, [0, 0, 0]),
        (96, 32, 3, [0, 32, 64]),
    ],
)
def test_parts_for_fewer_heads_than_ranks(total, part, ranks, begins):
    assert [part_range(total, part, rank, ranks)[0] for rank in range(ranks)] == begins


@pytest.mark.parametrize(("total", "part", "ranks"), [(64, 24, 4), (48, 16, 4), (64, 16, 2), (64, 0, 1)])
def test_sizes_that_do_not_go_together_are_refused(total, part, ranks):
    with pytest.raises(ValueError, match=f"{total} channels cannot be split into parts of {part} for {ranks} ranks"):
        part_range(total, part, 0, ranks)


@pytest.mark.parametrize("name", WEIGHTS_ONLY + QUANTIZED_X)
def test_rows_of_several_ranges(name):
    """q, k and v are one matrix on disk, so each rank takes three ranges of rows."""
    q = matrix(name)
    ranges = [(0, 24), (48, 60), (72, 84)]
    assert torch.equal(weights(rows_of(q, ranges)), torch.cat([weights(q)[a:b] for a, b in ranges]))


@pytest.mark.parametrize("name", WEIGHTS_ONLY + QUANTIZED_X)
def test_matrices_that_read_one_x_become_one(name):
    parts = [matrix(name, (64, 256)), replace(matrix(name, (128, 256)), codes=matrix(name, (128, 256)).codes.flip(0))]
    if stack_refusals(*parts):
        assert "b128x128" in name and stack_refusals(*parts) == ("the first ends within a block",)
        return
    assert torch.equal(weights(stacked(parts)), torch.cat([weights(q) for q in parts]))


def test_matrices_that_do_not_fit_stay_apart():
    q = matrix("w4a16_g64", (32, 256))
    assert stack_refusals(q, matrix("w3a16_g64", (32, 256))) == ("schemes differ, w4a16_g64 and w3a16_g64",)
    assert stack_refusals(q, matrix("w4a16_g64", (32, 256), order=True)) == ("order differs",)
    assert stack_refusals(q, matrix("w4a16_g64", (32, 256), factors=True)) == ("pre_quant_scale differs",)
    assert stack_refusals(q, matrix("w4a16_g64", (32, 256), low_rank=2)) == ("low-rank corrections are of one matrix each",)
    assert stack_refusals(q, replace(q, scale=q.scale.float())) == ("input channels or types of scales differ",)
    one = matrix("w8a8_t", (32, 256), static=True)
    assert stack_refusals(one, one.with_input(activation_scale=torch.tensor([0.5]))) == ("activation_scale differs",)


@pytest.mark.parametrize("name", WEIGHTS_ONLY + QUANTIZED_X)
def test_rows_of_nothing_at_the_end(name):
    q = matrix(name, (88, 256), low_rank=3)
    more = filled_up(q, 128)
    assert more.shape == (128, 256) and tuple(more.scale.shape) == scale_shape(more.scheme.granularity, more.shape)
    assert torch.equal(weights(more)[:88], weights(q)) and not weights(more)[88:].any()


def test_what_cannot_be_split_is_said():
    assert columns_refusals(matrix("w4a16_g128", (16, 768)), 5) == ("768 input channels are no multiple of 5 ranks",)
    floating = matrix("w4a16_g32_fz", (16, 768), order=True)
    assert "no code for the weight 0" in columns_refusals(floating, 2)[0]
    q = matrix("w4a16_g32_z", (16, 768), order=True)
    assert columns_refusals(q, 2) == () and "no code stands for" in columns_refusals(replace(q, zero=q.zero + 16), 2)[0]
    assert "blocks whose columns are in another order" in columns_refusals(matrix("w4a16_b32x64", (32, 768), order=True), 2)[0]
    with pytest.raises(ValueError, match="no code for the weight 0"):
        columns_of(floating, 0, 2)
