"""Layers whose weights were converted to the order of the tensor-core kernels, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit.nn import QuantLinear
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.packed import KERNEL_TENSORS
from lowbit.pack import FragmentWeight
from lowbit.quantize import rtn
from tests.tiny import with_channels

SCHEMES = [
    "w4a16_g128", "w6e3m2a16", "w3a16_g64", "w4a16_g32_fz", "w4a16_g128_z", "w8a16", "w4a16_z", "w4a16_g128 with channels",
]  # fmt: skip


def layer(scheme, device="cpu") -> QuantLinear:
    scheme, *channels = scheme.split(" with ")
    weight = torch.randn(96, 200, generator=torch.Generator().manual_seed(0)).to(device)
    q = rtn(weight, scheme)
    return QuantLinear.from_quant_tensor(with_channels(q) if channels else q)


def pack(module: QuantLinear) -> FragmentWeight:
    return FragmentWeight.pack(module.quant_tensor().without_input())


def as_if_prepared(module: QuantLinear) -> QuantLinear:
    """Converts a layer on a CPU as `prepare` does on a GPU."""
    packed = FragmentWeight.pack(module.quant_tensor().without_input())
    module.set_gpu_weight(packed)
    module.weight_packed = nn.Parameter(module.weight_packed.new_empty(0), requires_grad=False)
    return module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saving_casting_and_calling_leave_the_kernels_form_where_it_is(scheme):
    """A captured graph may read the kernel tensors, so they must stay the same objects."""
    plain = layer(scheme)
    x = torch.randn(3, 200)
    for use in (lambda m: m.state_dict(), lambda m: m.to(torch.float64), lambda m: m(x), copy.deepcopy):
        module = as_if_prepared(copy.deepcopy(plain))
        held = {name: getattr(module, name) for name in KERNEL_TENSORS}
        before = {name: None if t is None else t.clone() for name, t in held.items()}
        beside = module.kernel_weight().nbytes + module.input_transform.nbytes
        assert module.is_prepared and module.weight_nbytes == beside
        assert torch.equal(module.quant_tensor().codes, plain.quant_tensor().codes)
        use(module)
        assert all(getattr(module, name) is t for name, t in held.items())
        assert all(t is None or torch.equal(t, before[name]) for name, t in held.items())
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())
        assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_loaded_fills_the_kernels_form_where_it_is(scheme):
    module, other = as_if_prepared(layer(scheme)), layer(scheme)
    weight = rtn(torch.randn(96, 200), other.scheme)
    other.set_weight(with_channels(weight, seed=3) if "channels" in scheme else weight)
    held = {name: getattr(module, name) for name in KERNEL_TENSORS}
    module.load_state_dict(other.state_dict())
    assert all(getattr(module, name) is t for name, t in held.items())
    assert module.weight_packed.numel() == 0, "one form at a time"
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())
    x = torch.randn(3, 200)
    assert torch.equal(module(x), other(x))


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_loaded_weights_whose_form_has_other_tensors_take_no_graphs_memory(factor):
    """Only scales outside fp16's normal range have a power of two for each row. So the kernel tensors of the two layers
    differ."""
    weight = torch.randn(96, 200).half()
    small, large = sorted((1.0, factor))
    first, second = (QuantLinear.from_quant_tensor(rtn(weight * f, "w4a16_g128")) for f in (small, large))
    if factor > 1:
        first, second = second, first
    module = as_if_prepared(first)
    held = {name: getattr(module, name) for name in KERNEL_TENSORS}
    before = {name: None if t is None else t.clone() for name, t in held.items()}
    expected = second.state_dict()
    if (held["kernel_channel_scale"] is None) != (pack(second).channel_scale is None):
        with pytest.warns(UserWarning, match="captured again"):
            module.load_state_dict(expected, assign=True)
        assert all(t is None or torch.equal(t, before[name]) for name, t in held.items()), "a graph reads the old ones whole"
    else:
        module.load_state_dict(expected, assign=True)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_types_of_x_that_kernels_do_not_take():
    module = QuantLinear.from_quant_tensor(rtn(torch.randn(96, 256), "w6e5m0a16"))
    assert module.kernel_dtypes == (torch.bfloat16,)
    module = as_if_prepared(layer("w8a16"))
    assert module.prepare(torch.float16) == () and module.prepare(torch.float32) != ()


def test_what_hooks_refused_is_asked_again():
    module = layer("w8a16").bfloat16()
    module._hf_hook = type("Hook", (), {"offload": True})()
    assert module.prepare(torch.bfloat16) != ()
    del module._hf_hook
    first, again = module.prepare(torch.bfloat16), module.prepare(torch.bfloat16)
    assert first == again and not any("offloaded" in reason for reason in first)


def test_another_device_brings_the_form_on_disk_back():
    module = as_if_prepared(layer("w4a16_g128"))
    module.to("meta")
    assert not module.is_prepared and module.weight_packed.shape == (96, 100)


def test_reasons_are_given_at_every_call():
    module = layer("w4a16_g128")
    reasons = module.prepare(torch.float16)
    assert reasons == module.prepare(torch.float16) and not module.is_prepared
    assert "torch_int4: takes groups that are multiples of 32 and divide K, not w4a16_g128 with K 200" in reasons
    assert reasons[-1] == "decoded_once: would take 2 bytes for each weight, which was not allowed"


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_on_a_gpu_uses_the_kernels(scheme):
    module = layer(scheme, "cuda")
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).to("cuda", torch.float16)
    weight = module.quant_tensor().dequantize(torch.float64)
    expected = weight @ x.double().T
    # Scales of input channels are multiplied into the activations, which rounds each activation once more to float16.
    rounding = 2**-11 * (weight.abs() @ x.double().abs().T) if "channels" in scheme else torch.zeros_like(expected)
    error = (module(x).double() - expected.T).abs()
    assert (error <= 1e-2 + 1e-2 * expected.T.abs() + rounding.T).all()
    assert module.is_prepared and module.weight_packed.numel() == 0
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    assert torch.allclose(module(x.float()).double(), expected.T, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_scales_that_the_kernels_cannot_take_are_refused_not_an_error():
    """Groups are no multiple of 16: `prepare` returns the reason, and the plain path computes the product."""
    module = layer("w4a16_g40", "cuda")
    told = {reason.split(": ", 1)[1] for reason in module.prepare(torch.float16)}
    assert "groups of the kernels are multiples of 16, got 40 (w4a16_g40)" in told
    x = torch.randn(5, 200, device="cuda", dtype=torch.float16)
    expected = x.double() @ module.quant_tensor().dequantize(torch.float64).T
    assert torch.allclose(module(x).double(), expected, rtol=1e-2, atol=1e-2) and not module.is_prepared


@pytest.mark.gpu
def test_tied_weights_keep_both_forms():
    module = layer("w8a16", "cuda")
    embedding = QuantEmbedding(96, 200, "w8a16", torch.float16, device="cuda")
    embedding.share_weight(module)
    module(torch.randn(2, 200, device="cuda", dtype=torch.float16))
    assert module.is_prepared and embedding.weight_packed.numel() > 0 and embedding.weight_packed is module.weight_packed
