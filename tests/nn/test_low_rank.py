"""Low-rank corrections in a layer. They are added to the product, and kept when layers are saved and tied. Code that would not
add them is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowbit.formats import LowRank
from lowbit.nn import QuantEmbedding, QuantLinear
from lowbit.pack import FragmentWeight
from lowbit.quantize import lorc, rtn
from tests.tiny import with_channels

EPS = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def corrected(n=48, k=128, rank=5, name="w3a16_g32", channels=False):
    w = random(n, k)
    q = rtn(w, name)
    q = with_channels(q) if channels else q
    return w, replace(q, low_rank=lorc(w, q, rank))


@pytest.mark.parametrize("channels", [False, True], ids=["plain", "order and input scale"])
@pytest.mark.parametrize("name", ["w3a16_g32", "w4a16_g32_fz", "w6e3m2a16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (7,), ()])
def test_the_layer_adds_the_correction(name, dtype, channels, shape):
    w, q = corrected(name=name, channels=channels)
    layer = QuantLinear.from_quant_tensor(q, nn.Parameter(random(48, seed=1).to(dtype)))
    x = random(*shape, 128, seed=2).to(dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*shape, 48)
    expected = nn.functional.linear(x.double(), q.dequantize(torch.float64), layer.bias.double())
    plain = replace(q, low_rank=None)
    without = nn.functional.linear(x.double(), plain.dequantize(torch.float64), layer.bias.double())
    error = (QuantLinear.from_quant_tensor(plain, layer.bias)(x).double() - without).abs().max()
    # Beside the layer's own error, three values are rounded once each: the product, x down^T, and the sum.
    assert (y.double() - expected).abs().max() < 1.5 * error + 2 * EPS[dtype] * expected.abs().max()
    if not channels:
        whole = nn.functional.linear(x.double(), w.double(), layer.bias.double())
        assert (expected - whole).norm() < 0.95 * (without - whole).norm()


def test_it_counts_and_survives_saving():
    _, q = corrected()
    layer = QuantLinear.from_quant_tensor(q)
    assert q.nbytes == replace(q, low_rank=None).nbytes + 2 * 5 * (48 + 128) and layer.weight_nbytes == q.nbytes
    state = layer.state_dict()
    assert sorted(state) == ["weight_down", "weight_packed", "weight_scale", "weight_up"]
    other = QuantLinear(128, 48, "w3a16_g32", low_rank=5)
    other.load_state_dict(state)
    assert torch.equal(other(random(2, 128)), layer(random(2, 128)))
    back = layer.bfloat16().quant_tensor()
    assert back.low_rank.up.dtype == torch.float16 and torch.equal(back.dequantize(), q.dequantize())
    with pytest.raises(RuntimeError, match="weight_up"):
        QuantLinear(128, 48, "w3a16_g32").load_state_dict(state)
    layer.set_weight(replace(q, low_rank=None))
    assert not layer.has_correction and sorted(layer.state_dict()) == ["weight_packed", "weight_scale"]


def test_where_nothing_would_add_it():
    _, q = corrected()
    with pytest.raises(ValueError, match="low-rank correction is no part of the product"):
        FragmentWeight.pack(q)
    with pytest.raises(ValueError, match="multiplies no input, so its weights have no low-rank correction"):
        QuantEmbedding.from_quant_tensor(q, torch.float32)
    with pytest.raises(ValueError, match=r"a low-rank correction is \[N, r\] and \[r, K\], got \(48, 5\) and \(5, 100\)"):
        replace(q, low_rank=LowRank(q.low_rank.up, q.low_rank.down[:, :100]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, torch sees none")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [False, True], ids=["plain", "order and input scale"])
def test_beside_the_tensor_core_kernels(dtype, channels):
    """The result is the kernels' product plus the correction; layers are saved and restored without loss, and compile with
    fullgraph.
    """
    _, q = corrected(256, 512, 16, "w4a16_g64", channels)
    layer = QuantLinear.from_quant_tensor(q.to("cuda"))
    x = random(33, 512, seed=3).to("cuda", dtype)
    y = layer(x)
    assert layer.is_prepared
    expected = x.double() @ q.to("cuda").dequantize(torch.float64).T
    plain = replace(q, low_rank=None)
    error = QuantLinear.from_quant_tensor(plain.to("cuda"))(x).double() - x.double() @ plain.to("cuda").dequantize().double().T
    assert (y.double() - expected).abs().max() < 1.5 * error.abs().max() + 2 * EPS[dtype] * expected.abs().max()
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), y)
    back = layer.quant_tensor()
    assert torch.equal(back.codes.cpu(), q.codes) and torch.equal(back.low_rank.up.cpu(), q.low_rank.up)
    assert sorted(layer.state_dict())[:2] == (
        ["pre_quant_scale", "weight_down"] if channels else ["weight_down", "weight_packed"]
    )
