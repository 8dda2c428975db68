"""Layers that rotate their input. The result is bit-equal to that of a layer without rotation on the rotated input."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from lowbit.engine.product import Scaled, product
from lowbit.formats import InputParts, LowRank, rotate_blocks
from lowbit.kernels.reference.activations import rms_norm_reference, silu_mul_reference
from lowbit.nn import QuantEmbedding, QuantLinear
from lowbit.nn.convert import empty_like
from lowbit.nn.fused import GatedMLP, QuantizingNorm, quantize_alike
from lowbit.nn.linear import make_batch_invariant
from lowbit.ops.channels import rotate_channels
from lowbit.quantize import rtn
from tests.tiny import with_channels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCHEMES = ("w8a16", "w4a16_g64", "w4a16_g64_fz", "w6e3m2a16", "w8a8", "w8a8_az", "w8e4m3a8e4m3", "w4a8_g128")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(name, kind="plain", block=64):
    q = rtn(random(96, 256), name)
    if kind == "channels":
        q = with_channels(q)
    if kind == "low rank":
        q = replace(q, low_rank=LowRank(random(96, 4, seed=2).half(), random(4, 256, seed=3).half()))
    return q.with_input(hadamard=block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "channels", "low rank"])
@pytest.mark.parametrize("name", SCHEMES)
def test_equals_the_layer_without_on_rotated_inputs(name, kind, device):
    q, bias = weight(name, kind).to(device), torch.nn.Parameter(random(96, seed=4).to(device))
    for dtype in (torch.float32, torch.bfloat16):
        x = random(3, 5, 256, seed=1).to(device, dtype)
        own = torch.nn.Parameter(bias.detach().to(dtype))
        layer, without = (QuantLinear.from_quant_tensor(w, own) for w in (q, q.with_input(hadamard=0)))
        with torch.inference_mode():
            assert torch.equal(layer(x), without(rotate_channels(x, 64)))
            exact = x.double() @ q.dequantize(torch.float64).T + own.double()
            assert (layer(x).double() - exact).norm() <= 0.05 * exact.norm(), "and is near the product with what it means"
        held = layer.quant_tensor()  # the weights are prepared after the first call
        assert held.input_transform.hadamard == 64 and torch.equal(held.codes, q.codes) and copy.deepcopy(layer).hadamard == 64


def test_outliers_in_single_channels_cost_less():
    """With rotation, one large channel no longer sets the range for all others of its token."""
    x, w = random(16, 256), random(64, 256, seed=1)
    x[:, 5] *= 300
    errors = []
    for q in (rtn(w, "w8a8"), rtn(rotate_blocks(w, 64), "w8a8").with_input(hadamard=64)):
        y = QuantLinear.from_quant_tensor(q)(x)
        errors.append(float((y - x @ q.dequantize().T).norm()))
    assert errors[1] < 0.3 * errors[0]


def test_the_operator_for_compilers():
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(torch.ops.lowbit.rotate_channels, (random(3, 2, 128).to(dtype), 64))
    assert torch.equal(rotate_channels(random(4, 64), 16), rotate_blocks(random(4, 64), 16))


def test_one_rotation_for_all_that_read_an_input():
    """Norms and gates rotate and quantize their float32 result once for all layers that read it."""
    gate, up, down = (
        QuantLinear.from_quant_tensor(rtn(random(256, 256, seed=i), "w8a8").with_input(hadamard=64)) for i in range(3)
    )
    plain = QuantLinear.from_quant_tensor(rtn(random(256, 256), "w8a8"))
    assert quantize_alike([gate, up]) and not quantize_alike([gate, plain])
    x, norm = random(5, 256), torch.nn.RMSNorm(256, eps=1e-6)
    norm.weight.data = random(256, seed=5)
    made = QuantizingNorm(norm, 1e-6, gate)(x)
    # x is float32, so that nothing is rounded between norm and rotation
    apart = gate.quantize_input(rms_norm_reference(x, norm.weight, 1e-6))
    assert torch.equal(made.codes, apart.codes) and torch.equal(made.scale, apart.scale)
    assert not torch.equal(made.codes, plain.quantize_input(norm(x)).codes)
    assert torch.equal(gate(made), gate(apart)) and torch.equal(up(made), up(apart))
    inner = silu_mul_reference(gate(x), up(x))
    assert torch.equal(GatedMLP(gate, up, down)(x), down(inner))
    assert torch.equal(GatedMLP(gate, up, down)(gate.quantize_input(x)), down(inner))
    joined = product([gate, up], batch_invariant=False)
    assert isinstance(joined, Scaled) and joined.is_fused
    assert torch.equal(joined(x), torch.cat((gate(x), up(x)), dim=-1))


def test_what_is_refused():
    with pytest.raises(ValueError, match="blocks of 16, 64, 256 that divide K, got 64 for K 96"):
        QuantLinear(96, 8, "w8a16", input_parts=InputParts(hadamard=64))
    with pytest.raises(ValueError, match="so its weights have no rotation of the input"):
        QuantEmbedding.from_quant_tensor(weight("w8a16"), torch.float32)
    with pytest.raises(ValueError, match="its weights have no rotation"):
        empty_like(torch.nn.Embedding(8, 64), "w8a16", input_parts=InputParts(hadamard=64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w8a16", "w4a16_g64", "w8a8"])
def test_the_same_bits_in_every_batch(name):
    layer = QuantLinear.from_quant_tensor(weight(name).to("cuda"))
    make_batch_invariant(torch.nn.Sequential(layer), torch.bfloat16)
    x = random(300, 256).to("cuda", torch.bfloat16)
    with torch.inference_mode():
        alone = torch.cat([layer(x[i : i + 1]) for i in range(0, 300, 50)])
        assert torch.equal(layer(x)[::50], alone) and torch.equal(layer(x[:100])[::50], alone[:2])


def test_a_layer_shows_it_and_ties_it():
    layer = QuantLinear.from_quant_tensor(weight("w8a16"))
    assert "hadamard=64" in repr(layer) and "hadamard" not in repr(QuantLinear.from_quant_tensor(weight("w8a16", block=0)))
    other = QuantLinear(256, 96, "w8a16")
    other.share_weight(layer)
    assert torch.equal(other(x := random(2, 256)), layer(x))
