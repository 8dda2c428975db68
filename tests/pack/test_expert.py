"""The experts of a layer packed as one weight: each expert has the same bits as its matrix packed alone."""

from __future__ import annotations

import pytest
import torch

from lowbit.pack import ExpertWeight, FragmentWeight, pack_gated
from lowbit.quantize import rtn

SCHEMES = [
    "w2a16_g64", "w3a16", "w4a16_g128", "w4a16_g48", "w5a16_g32", "w6a16_g128", "w7a16_g64", "w8a16", "w6e3m2a16",
    "w6e2m3a16_g64", "w5e2m2a16", "w4e2m1a16_g32", "w8e4m3a16_b128x128", "w8e5m2a16_t", "w4a16_g16_z", "w4a16_g32_fz",
    "w8a16_z", "w4a16_t_z",
]  # fmt: skip


def experts_of(scheme, n=40, k=200, count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [rtn(torch.randn(n, k, generator=generator) * 0.05 * (e + 1), scheme) for e in range(count)]


def same(one, other):
    """Whether two packed weights have equal bits."""
    tensors = other.tensors()
    return one.tensors().keys() == tensors.keys() and all(
        torch.equal(t.view(torch.uint8), tensors[name].view(torch.uint8)) for name, t in one.tensors().items()
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_expert_has_the_bits_of_its_matrix_alone(scheme):
    matrices = experts_of(scheme)
    w = ExpertWeight.pack(matrices)
    assert w.experts == 3 and w.shape == (40, 200) and w.codes.shape[:3] == (3, 3, 4)
    for e, (q, back) in enumerate(zip(matrices, w.unpack(), strict=True)):
        alone = FragmentWeight.pack(q)
        assert same(w.expert(e), alone) and w.expert(e).form == w.form == alone.form
        assert torch.equal(back.codes, q.codes) and torch.equal(back.scale, q.scale.to(back.scale.dtype))
        assert back.zero is None or torch.equal(back.zero, q.zero.to(back.zero.dtype))
    assert w.nbytes == sum(w.expert(e).nbytes for e in range(3))
    assert w.expert(1).codes.untyped_storage().data_ptr() == w.codes.untyped_storage().data_ptr(), "a view"


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w4a16_g32_z", "w6e3m2a16", "w8e4m3a16_b128x128", "w8e5m2a16_t"])
def test_gate_and_up_of_each_expert_alternate(scheme):
    gates, ups = experts_of(scheme), experts_of(scheme, seed=1)
    w = ExpertWeight.pack_gated(gates, ups)
    assert w.shape == (80, 200)
    assert all(same(w.expert(e), pack_gated(*pair)) for e, pair in enumerate(zip(gates, ups, strict=True)))


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w4a16_g64_fz", "w8a16", "w4a16_z"])
def test_split_and_concat_along_n_are_inverses(scheme):
    parts = [ExpertWeight.pack(experts_of(scheme, rows, seed=rows)) for rows in (32, 48, 24)]
    whole = ExpertWeight.concat(parts)
    assert whole.shape == (104, 200) and whole.experts == 3
    assert all(map(same, whole.split([32, 48, 24]), parts))
    for e in range(3):
        assert same(whole.expert(e), FragmentWeight.concat([part.expert(e) for part in parts]))
    with pytest.raises(ValueError, match="one number of experts, got 3 and 2"):
        ExpertWeight.concat([parts[0], ExpertWeight.pack(experts_of(scheme, 16, count=2))])


@pytest.mark.parametrize("scheme", ["w4a16_g64", "w4e2m1a16_g32", "w4a16_g64_z"])
def test_scales_that_one_expert_cannot_store_as_the_others_do(scheme):
    """One expert's scales are out of range for subnormal codes, or for fp16. Then the scales of all experts are stored as
    "divided" ones."""
    matrices = experts_of(scheme, 32, 256)
    matrices[1].scale[:, 0] *= 2.0**-12
    matrices[2].scale.mul_(2.0**10)
    w = ExpertWeight.pack(matrices)
    assert not w.subnormal and w.form.scaled_twice
    for q, back in zip(matrices, w.unpack(), strict=True):
        # Scales are exact down to 2^-13 of the row's largest scale; smaller ones are within 2^-24 of the largest.
        most = q.scale.float().amax(1, keepdim=True)
        assert (back.scale - q.scale.float()).abs().le(most * 2.0**-24).all()
        assert torch.equal(back.codes, q.codes)


def test_what_cannot_be_packed_says_why():
    matrices = experts_of("w4a16_g128")
    with pytest.raises(ValueError, match="at least one expert, got none"):
        ExpertWeight.pack([])
    with pytest.raises(ValueError, match=r"one scheme, shape and type of scales, got w4a16_g128 \[40, 200\] .* and w8a16"):
        ExpertWeight.pack([*matrices, *experts_of("w8a16", count=1)])
    with pytest.raises(ValueError, match=r"\[40, 200\] .* and w4a16_g128 \[24, 200\]"):
        ExpertWeight.pack([*matrices, *experts_of("w4a16_g128", 24, count=1)])
    with pytest.raises(ValueError, match="a gate and an up, got 3 and 2"):
        ExpertWeight.pack_gated(matrices, matrices[:2])
    narrow = experts_of("w4a16_g128", 44)
    with pytest.raises(ValueError, match="44 rows are no multiple of 8"):
        ExpertWeight.pack_gated(narrow, narrow)
