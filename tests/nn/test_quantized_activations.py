"""Layers whose input is quantized too, compared with a plain simulation: also after saving, with input transforms, and on a
GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit.formats import InputParts
from lowbit.nn import QuantLinear, convert
from lowbit.ops import quantize_activations
from lowbit.quantize import rtn
from tests.tiny import tiny_llama, with_channels

SCHEMES = [
    "w8a8",
    "w8a8_az",
    "w4a8_g128_az",
    "fp8",
    "fp8_dynamic",
    "fp8_block",
    "w4a8_g64",
    "w4a8_g64_z",
    "w6e3m2a8e4m3",
    "w8e4m3a8e5m2",
    "w8a8_ct",
    "w4a8_g128_az_ct",
    "w8e4m3a8e4m3_b128x128_ct",
    "w8e4m3a8e4m3_b128x128_hf",
    "w8e4m3a8e4m3_fb",
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def static_of(scheme, device="cpu"):
    """A static activation scale, and a zero where the scheme has zeros."""
    zero = torch.tensor([17], dtype=torch.int32, device=device) if "_az" in scheme else None
    return {"activation_scale": torch.tensor([0.01], device=device), "activation_zero": zero}


def simulated(x, q):
    """The product of the rounded input and the decoded weight in float64."""
    if q.input_transform.pre_quant_scale is not None:
        x = (x.float() * q.input_transform.pre_quant_scale).to(x.dtype)
    if q.input_transform.order is not None:
        x = x[..., q.input_transform.order.long()]
    group = 128 if "b128" in q.scheme.name else 0
    static, az = q.input_transform.activation_scale, q.scheme.activation_zero
    codes, scale, zero, _ = quantize_activations(
        x,
        q.scheme.activation,
        group=0 if static is not None else group,
        scale=static,
        symmetric=not az,
        zero=q.input_transform.activation_zero,
        rule=q.scheme.rule.value,
    )[:4]
    spread = scale.repeat_interleave(128, -1)[..., : x.shape[-1]] if scale.numel() > 1 and group else scale
    return ((codes.double() - (0 if zero is None else zero)) * spread.double()) @ q.dequantize_codes(torch.float64).T


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_rounded_inputs(name, static, dtype):
    q = rtn(random(48, 200), name).with_input(**(static_of(name) if static else {}))
    layer = QuantLinear.from_quant_tensor(q, nn.Parameter(random(48, seed=1)))
    x = random(2, 3, 200, seed=2).to(dtype)
    expected = simulated(x, q) + layer.bias.double()
    got = layer(x)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 10)
    state = layer.state_dict()
    assert ("activation_scale" in state) == static and layer.weight_nbytes == q.nbytes
    zero = static and "_az" in name
    assert ("activation_zero" in state) == zero
    other = QuantLinear(200, 48, name, bias=layer.bias, input_parts=InputParts(activation_scale=static, activation_zero=zero))
    other.load_state_dict(state)
    assert torch.equal(other(x), got)
    layer.half()
    assert layer.activation_scale is None or layer.activation_scale.dtype == torch.float32
    assert (layer.quant_tensor().input_transform.activation_scale is None) != static


def test_channels_are_ordered_and_scaled_before_rounding():
    q = with_channels(rtn(random(48, 96), "w4a8_g32"))
    x = random(5, 96, seed=3)
    torch.testing.assert_close(QuantLinear.from_quant_tensor(q)(x).double(), simulated(x, q), rtol=1e-5, atol=1e-4)


def test_a_scale_needs_a_scheme_with_activations():
    with pytest.raises(ValueError, match="goes with a scheme that quantizes activations"):
        rtn(random(8, 32), "w8a16").with_input(activation_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"is float32 \[1\]"):
        rtn(random(8, 32), "w8a8").with_input(activation_scale=torch.ones(8))
    with pytest.raises(ValueError, match="an activation zero goes with an activation scale and a scheme .*_az"):
        rtn(random(8, 32), "w8a8_az").with_input(activation_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"an activation zero is int32 \[1\]"):
        rtn(random(8, 32), "w8a8_az").with_input(activation_scale=torch.ones(1), activation_zero=torch.ones(1))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_is_converted_whole(name):
    model = tiny_llama(dtype=torch.float32).eval()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        plain = model(ids).logits
        plan = convert(model, name)
        assert len(plan.linears) == 14
        difference = model(ids).logits - plain
    assert (
        0
        < difference.norm()
        < {"w8a8": 0.02, "w8a8_az": 0.02, "w4a8_g64": 0.15, "w4a8_g64_z": 0.15}.get(name, 0.12) * plain.norm()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("m", [1, 5, 300])
def test_a_layer_on_a_gpu(name, static, m):
    q = rtn(random(96, 256).cuda(), name).with_input(**(static_of(name, "cuda") if static else {}))
    layer = QuantLinear.from_quant_tensor(q)
    x = random(m, 256, seed=2).cuda().half()
    expected = simulated(x, q)
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    for _ in range(2):
        torch.testing.assert_close(layer(x).double(), expected, rtol=5e-3, atol=5e-3 * float(expected.abs().mean()))
    assert all(torch.equal(value, saved[key]) for key, value in layer.state_dict().items())
    # For 8-bit floats, tensor cores add in fewer bits than float32 has.
    tolerance = 1e-5 if q.scheme.activation.name == "int8" else 5e-3
    wide = simulated(x.float(), q)
    torch.testing.assert_close(layer(x.float()).double(), wide, rtol=tolerance, atol=tolerance * 10 * float(wide.abs().mean()))
