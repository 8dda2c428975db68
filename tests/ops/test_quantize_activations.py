"""Activation quantization is compared with values by hand and with the formats' encoder, fused operators with float64."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.formats import encode, number_format, rotate_blocks
from lowbit.kernels.reference.activations import layer_norm_reference, rms_norm_reference, silu_mul_reference
from lowbit.ops import add_norm_quantize, layer_norm_quantize, quantize_activations, rms_norm_quantize, silu_mul_quantize
from lowbit.ops.quantize_activations import quantize_refusals

FORMATS = ["int8", "fp8_e4m3", "fp8_e5m2"]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_by_hand():
    x = torch.tensor([[127.0, -63.5, 0.5, 1.5], [0, 0, 0, 0], [-1, 0.25, 0, 1]])
    codes, scale, zero, total = quantize_activations(x, "int8")[:4]
    assert zero is None and total is None
    assert codes.tolist() == [[127, -64, 0, 2], [0, 0, 0, 0], [-127, 32, 0, 127]], "ties to even"
    assert scale.flatten().tolist() == [1.0, 2.0**-126, float(torch.tensor(1 / 127))]
    codes, scale, *_ = quantize_activations(x, "fp8_e4m3")
    assert codes[0].float().tolist() == [448, -224, 1.75, 5.5] and scale[0].item() == pytest.approx(127 / 448)
    codes, scale, zero, _ = quantize_activations(torch.tensor([[0.0, 2.55, 0.01, 1.0]]), "int8", symmetric=False)[:4]
    assert (codes.tolist(), zero.item()) == ([[-128, 127, -127, -28]], -128) and scale.item() == pytest.approx(0.01)
    codes, scale, *_ = quantize_activations(torch.tensor([[1.0, -300.0, 300.0, 0.75]]), "int8", scale=torch.tensor([0.5]))
    assert codes.tolist() == [[2, -128, 127, 2]] and scale.tolist() == [0.5], "saturates"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_against_the_encoder_of_the_format(name, dtype, group):
    x = random(3, 5, 200, dtype=dtype)
    x[0, 0] *= 1000
    codes, scale, *_ = quantize_activations(x, name, group=group)
    size = group or 200
    assert codes.shape == x.shape and scale.shape == (3, 5, math.ceil(200 / size))
    for part, values in enumerate(x.float().split(size, dim=-1)):
        largest = 127 if name == "int8" else number_format(name).max
        expected = values.abs().amax(-1, keepdim=True) / largest
        assert torch.equal(scale[..., part : part + 1], expected)
        wanted = encode(values * (1 / expected), number_format(name))
        got = codes[..., part * size : (part + 1) * size]
        assert torch.equal(got.view(torch.uint8) if name != "int8" else (got.short() + 128).byte(), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_half_a_step(name):
    x = random(7, 300)
    codes, scale, *_ = quantize_activations(x, name)
    error = (codes.float() * scale - x).abs()
    relative = {"int8": 0.0, "fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8}[name]
    smallest = {"int8": 0.5, "fp8_e4m3": 2**-10, "fp8_e5m2": 2**-17}[name]
    assert bool((error <= (relative * x.abs()).maximum(smallest * scale) * 1.00001).all())


def test_zero_points_halve_the_error_of_one_sided_inputs():
    x = random(4, 256).abs()
    codes, scale, zero, _ = quantize_activations(x, "int8", symmetric=False)[:4]
    assert bool((((codes - zero) * scale - x).abs() <= 0.501 * scale).all())
    assert bool((scale < 0.51 * quantize_activations(x, "int8").scale).all())


@pytest.mark.parametrize("name", FORMATS)
def test_fused_against_float64(name):
    """Scales agree to 1e-6; codes agree except at ties that float32 decides."""
    x, other, weight, bias = random(6, 320), random(6, 320, seed=1), random(320, seed=2), random(320, seed=3)
    x[2], eps = x[2] * 1e-3, 1e-5

    def rms(v):
        return v / (v.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    def layer(v):
        centered = v - v.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    calls = [
        (rms_norm_quantize(x, weight, eps, name), rms(x.double())),
        (rms_norm_quantize(x, weight, eps, name, residual=other), rms((x + other).double())),
        (layer_norm_quantize(x, weight, bias, eps, name), layer(x.double()) + bias.double()),
        (layer_norm_quantize(x, weight, None, eps, name, residual=other), layer((x + other).double())),
        (silu_mul_quantize(x, other, name), x.double() * x.double().sigmoid() * other.double()),
    ]
    for got, values in calls:
        largest = 127 if name == "int8" else number_format(name).max
        scale = values.abs().amax(-1, keepdim=True) / largest
        torch.testing.assert_close(got.scale.double(), scale, rtol=1e-6, atol=0)
        wanted = encode((values / scale).float(), number_format(name))
        codes = got.codes.view(torch.uint8) if name != "int8" else (got.codes.short() + 128).byte()
        assert float((codes != wanted).float().mean()) < 1e-3
    assert torch.equal(calls[1][0].sum, x + other) and calls[0][0].sum is None


def test_a_residual_is_rounded_before_the_norm():
    x, other = random(4, 64, dtype=torch.float16), random(4, 64, dtype=torch.float16, seed=1)
    weight = torch.ones(64, dtype=torch.float16)
    got = rms_norm_quantize(x, weight, 1e-6, "int8", residual=other)
    assert got.sum.dtype == torch.float16 and torch.equal(got.sum, x + other)
    again = rms_norm_quantize(got.sum, weight, 1e-6, "int8")
    assert torch.equal(got.codes, again.codes) and torch.equal(got.scale, again.scale)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_rotated_before_they_are_quantized(name):
    """A rotated x is rounded to its dtype before quantization; the rotated output of a fused norm or gate is not."""
    x, other, weight = random(4, 128, dtype=torch.float16), random(4, 128, dtype=torch.float16, seed=1), random(128, seed=2)
    pairs = [
        (quantize_activations(x, name, hadamard=64), rotate_blocks(x, 64)),
        (rms_norm_quantize(x, weight, 1e-6, name, hadamard=64), rotate_blocks(rms_norm_reference(x, weight, 1e-6), 64)),
        (layer_norm_quantize(x, weight, None, 1e-6, name, hadamard=64),
         rotate_blocks(layer_norm_reference(x, weight, None, 1e-6), 64)),
        (silu_mul_quantize(x, other, name, hadamard=16), rotate_blocks(silu_mul_reference(x, other), 16)),
    ]  # fmt: skip
    for made, values in pairs:
        apart = quantize_activations(values, name)
        assert torch.equal(made.codes.view(torch.uint8), apart.codes.view(torch.uint8)) and torch.equal(made.scale, apart.scale)
    torch.library.opcheck(torch.ops.lowbit.quantize_activations, (x, name), {"hadamard": 64})
    assert torch.equal(quantize_activations(x, name, hadamard=16, rule="ct").codes.float(),
                       quantize_activations(rotate_blocks(x, 16), name, rule="ct").codes.float())  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fmt": "fp8_e4m3", "group": 32},
        {"symmetric": False},
        {"hadamard": 16},
        {"fmt": "fp8_e4m3", "group": 32, "hadamard": 64},
        {"scale": torch.tensor([0.05])},
        {"scale": torch.tensor([0.05]), "symmetric": False, "zero": torch.tensor([-9], dtype=torch.int32)},
    ],
)
def test_a_residual_in_place(options):
    """As in a decode step: the sum replaces h in place; the other results equal those of `rms_norm_quantize`."""
    options = {"fmt": "int8"} | options
    h, delta = random(4, 64, dtype=torch.float16), random(4, 64, dtype=torch.float16, seed=1)
    weight = random(64, dtype=torch.float16, seed=2)
    wanted = rms_norm_quantize(h, weight, 1e-6, residual=delta, **options)
    mine = h.clone()
    got = add_norm_quantize(mine, delta, weight, 1e-6, **options)
    assert torch.equal(mine, wanted.sum) and got.sum is None
    assert torch.equal(got.codes.float(), wanted.codes.float()) and torch.equal(got.scale, wanted.scale)
    assert (got.zero is None) == (wanted.zero is None) and (got.zero is None or torch.equal(got.zero, wanted.zero))
    first, again = (add_norm_quantize(h, None, weight, 1e-6, **options), rms_norm_quantize(h, weight, 1e-6, **options))
    assert torch.equal(first.codes.float(), again.codes.float()) and torch.equal(first.scale, again.scale)
    compiled = torch.compile(
        lambda h, delta: add_norm_quantize(h, delta, weight, 1e-6, **options)[0].float(), fullgraph=True, backend="aot_eager"
    )
    mine = h.clone()
    assert torch.equal(compiled(mine, delta), wanted.codes.float()) and torch.equal(mine, wanted.sum), (
        "the mutation is declared"
    )


def test_shapes_and_compilation():
    for shape in ((8,), (0, 8), (2, 0, 8)):
        codes, scale, *_ = quantize_activations(torch.ones(shape), "int8")
        assert codes.shape == shape and scale.shape == (*shape[:-1], 1)
    compiled = torch.compile(
        lambda x, w: rms_norm_quantize(x, w, 1e-5, "int8", residual=x)[:4:3], fullgraph=True, backend="eager", dynamic=True
    )
    x, w = random(5, 72), random(72)
    for got, wanted in zip(compiled(x, w), rms_norm_quantize(x, w, 1e-5, "int8", residual=x)[:4:3], strict=True):
        assert torch.equal(got, wanted)
    meta = quantize_activations(torch.empty(3, 200, device="meta"), "int8", group=128)
    assert meta.codes.shape == (3, 200) and meta.scale.shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_activations(x, "int4"), "activations become int8, fp8_e4m3, fp8_e5m2, not int4"),
        (lambda x: quantize_activations(x.int(), "int8"), "x is fp16, bf16 or fp32"),
        (lambda x: quantize_activations(x, "int8", group=48), "a power of two of columns"),
        (lambda x: quantize_activations(x, "int8", scale=torch.ones(2)), "one float32 number"),
        (lambda x: quantize_activations(x, "int8", scale=torch.ones(1), group=32), "without groups"),
        (lambda x: quantize_activations(x, "int8", scale=torch.ones(1), symmetric=False), "a given zero go together"),
        (lambda x: quantize_activations(x, "int8", zero=torch.ones(1).int()), "a given zero go together"),
        (
            lambda x: quantize_activations(x, "int8", scale=torch.ones(1), symmetric=False, zero=torch.ones(1)),
            "a given zero is one int32 number",
        ),
        (lambda x: quantize_activations(x, "fp8_e4m3", symmetric=False), "zero points go with int8"),
        (lambda x: rms_norm_quantize(x, torch.ones(63), 1e-6, "int8"), r"weight is \[64\], got \(63,\)"),
        (lambda x: rms_norm_quantize(x, torch.ones(64), 1e-6, "int8", residual=x.half()), "goes with its like"),
        (lambda x: silu_mul_quantize(x, x[:1], "int8"), "goes with its like"),
        (lambda x: silu_mul_quantize(x, x, "int8", hadamard=32), "blocks of 16, 64, 256 that divide K, got 32 for K 64"),
        (lambda x: quantize_activations(x, "int8", hadamard=256), "that divide K, got 256 for K 64"),
        (lambda x: add_norm_quantize(x, x[:1], torch.ones(64), 1e-6, "int8"), "goes with its like"),
        (lambda x: add_norm_quantize(x, x, torch.ones(64), 1e-6, "int8", rule="ct"), "was rounded to x's type"),
    ],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(2, 64))


def test_refusals_of_the_kernel():
    assert quantize_refusals(number_format("int8"), torch.float16, 64, "cpu") == ("runs on NVIDIA GPUs, x is on cpu",)
