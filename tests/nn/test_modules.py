from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit.formats import InputParts, parse_scheme
from lowbit.nn import PackedWeight, QuantEmbedding, QuantLinear, convert, plan_conversion
from lowbit.nn.convert import empty_like
from lowbit.quantize import rtn
from tests.tiny import with_channels

SCHEMES = ["w8a16", "w4a16_g64", "w6e3m2a16", "w5e2m2a16", "w4a16_g32_fz", "w3a16_g48_z"]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_equals_the_dequantized_layer(name, dtype):
    q = rtn(random(48, 96), name)
    bias = nn.Parameter(random(48, seed=1).to(dtype))
    layer = QuantLinear.from_quant_tensor(q, bias)
    assert layer.weight_nbytes == q.nbytes
    x = random(2, 3, 96, seed=2).to(dtype)
    expected = nn.functional.linear(x.double(), q.dequantize(torch.float64), bias.double())
    torch.testing.assert_close(
        layer(x).double(), expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=0.1 if dtype != torch.float32 else 1e-4
    )
    back = layer.quant_tensor()
    assert torch.equal(back.codes, q.codes) and torch.equal(back.dequantize(), q.dequantize())
    layer.restore()
    assert layer.weight_nbytes == q.nbytes


@pytest.mark.parametrize("name", SCHEMES)
def test_embedding_equals_the_dequantized_rows(name):
    q = rtn(random(50, 96), name)
    ids = torch.tensor([[0, 49, 7], [7, 7, 3]])
    rows = QuantEmbedding.from_quant_tensor(q, torch.float32)(ids)
    assert torch.equal(rows, q.dequantize()[ids])


def test_scales_keep_their_type_when_the_model_changes_its():
    layer = QuantLinear.from_quant_tensor(rtn(random(8, 32), "w8a16"), nn.Parameter(random(8)))
    before = layer.weight_scale.clone()
    layer.half()
    assert layer.weight_scale.dtype == torch.float32 and torch.equal(layer.weight_scale, before)
    assert layer.bias.dtype == torch.float16
    embedding = QuantEmbedding.from_quant_tensor(rtn(random(8, 32), "w8a16"), torch.float32).to(torch.bfloat16)
    assert embedding(torch.tensor([1])).dtype == torch.bfloat16
    assert embedding.weight_scale.dtype == torch.float32


def test_state_dict_round_trip_and_names():
    q = rtn(random(8, 32), "w4a16_g32_fz")
    layer = QuantLinear.from_quant_tensor(q)
    state = layer.state_dict()
    assert sorted(state) == ["weight_packed", "weight_scale", "weight_zero"]
    other = QuantLinear(32, 8, "w4a16_g32_fz")
    other.load_state_dict(state)
    assert torch.equal(other(random(2, 32)), layer(random(2, 32)))
    assert not any(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize("name", ["w4a16_g32", "w4a16_g32_z", "w4a16_g32_fz"])
@pytest.mark.parametrize(("held", "loaded"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_scales_are_loaded_in_their_own_type(name, held, loaded):
    """Scales of bf16 weights are bf16, as are scales too small for fp16."""
    tiny = 2.0**-20 if loaded == torch.bfloat16 else 1.0
    layer = QuantLinear.from_quant_tensor(rtn(random(8, 32).to(held), name))
    expected = rtn((random(8, 32, seed=1) * tiny).to(loaded), name)
    assert layer.weight_scale.dtype != expected.scale.dtype or name.endswith("fz")
    layer.load_state_dict(QuantLinear.from_quant_tensor(expected).state_dict())
    assert torch.equal(layer.quant_tensor().dequantize(), expected.dequantize())
    made = QuantLinear(32, 8, name)
    made.load_state_dict(layer.state_dict())
    assert torch.equal(made.quant_tensor().dequantize(), expected.dequantize())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.up = nn.Linear(64, 96)
        self.conv = nn.Conv1d(64, 64, 3)
        self.down = nn.Linear(96, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 40, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.lm_head(self.norm(x + self.down(self.up(x).relu())))


def test_convert_reports_what_it_leaves_and_why():
    model = Tied()
    plan = convert(model, "w8a16")
    assert list(plan.linears) == ["up", "down"]
    assert isinstance(model.up, QuantLinear) and type(model.lm_head) is nn.Linear
    reasons = {row.name: row.reason for row in plan.kept}
    assert set(reasons) == {"embed", "conv", "lm_head"}
    assert "on request" in reasons["embed"] and "Conv1d holds 3-dimensional" in reasons["conv"]
    assert reasons["lm_head"] == "skipped by 'lm_head'"
    text = "\n".join(plan.lines())
    assert "converted to w8a16: 2 modules, 12,288 weights" in text and "kept: conv (Conv1d" in text
    refused = convert(nn.Sequential(*(nn.Linear(64, 8) for _ in range(3))), "w8a4")
    assert len(refused.kept) == 3 and "kept: 0 (and 2 more Linear like it, 1,536 weights): no kernel" in refused.lines()[1]
    assert len(refused.lines()) == 2


@pytest.mark.parametrize("name", ["w8a16", "w6e3m2a16", "w4a16_g32_z"])
def test_converted_model_equals_the_simulated_one(name):
    """A plain model in which each weight is replaced by its dequantized value gives the same outputs."""
    torch.manual_seed(0)
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    for layer in (plain.up, plain.down):
        layer.weight.data = rtn(layer.weight.data, name).dequantize()
    convert(model, name)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-5, atol=1e-5)


def test_tied_embedding_and_head_share_one_packed_matrix():
    torch.manual_seed(0)
    model = Tied()
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    plan = convert(model, "w8a16", embeddings=True)
    assert plan.embeddings == {"embed": (40, 64)} and plan.tied == {"lm_head": "embed"}
    assert model.lm_head.weight_packed is model.embed.weight_packed
    shared = rtn(plain.embed.weight.data, "w8a16").dequantize()
    for layer in (plain.up, plain.down):
        layer.weight.data = rtn(layer.weight.data, "w8a16").dequantize()
    plain.embed.weight.data.copy_(shared)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-5, atol=1e-5)
    model.to("meta")
    assert model.lm_head.weight_packed.device.type == "meta"


def test_skip_patterns():
    plan = plan_conversion(Tied(), "w8a16", skip=("u*", "lm_head"))
    assert list(plan.linears) == ["down"]


def test_schemes_without_a_kernel_are_kept_with_the_reason():
    for scheme, reason in (
        ("w4a4", "no kernel: scaled_blocked multiplies activations of int8, fp8_e4m3, fp8_e5m2, the scheme has int4"),
        ("w8a8_b64x32", "no kernel: scaled_blocked takes blocks of 128 columns together with quantized activations, not {}"),
    ):
        plan = plan_conversion(Tied(), scheme)
        assert not plan.linears and [row.reason for row in plan.kept if row.name == "up"] == [reason.format(scheme)]


def test_subclasses_are_not_silently_changed():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 8

    model = nn.Sequential(Scaled(10, 64), nn.Linear(64, 64))
    plan = convert(model, "w8a16", embeddings=True)
    assert type(model[0]) is Scaled and "Scaled holds 2-dimensional" in plan.kept[0].reason


def test_bad_weights_name_the_layer():
    model = Tied()
    model.down.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="down: 1 of 6144 weights are not finite"):
        convert(model, "w8a16")


def test_wrong_weights_are_refused():
    layer = QuantLinear(64, 32, "w8a16")
    with pytest.raises(ValueError, match=r"holds w8a16 \(32, 64\), got w8a16 \(64, 32\)"):
        layer.set_weight(rtn(random(64, 32), "w8a16"))
    assert isinstance(layer, PackedWeight) and layer.scheme == parse_scheme("w8a16")


@pytest.mark.parametrize(("order", "pre_quant_scale"), [(True, None), (False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("name", ["w4a16_g64", "w3a16_g48_z", "w8a16"])
def test_order_and_pre_quant_scale(name, order, pre_quant_scale):
    q = with_channels(rtn(random(48, 96), name), order, pre_quant_scale)
    layer = QuantLinear.from_quant_tensor(q)
    x = random(5, 96, seed=2)
    torch.testing.assert_close(layer(x).double(), x.double() @ q.dequantize(torch.float64).T, rtol=1e-5, atol=1e-4)
    assert torch.equal(layer.quant_tensor().dequantize(), q.dequantize())
    assert layer.weight_nbytes == q.nbytes

    state = layer.state_dict()
    assert ("weight_order" in state) == order and ("pre_quant_scale" in state) == (pre_quant_scale is not None)
    other = QuantLinear(96, 48, name, input_parts=InputParts(order=order, pre_quant_scale=pre_quant_scale is not None))
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))
    with pytest.raises(RuntimeError, match="weight_order" if order else "pre_quant_scale"):
        QuantLinear(96, 48, name).load_state_dict(state)

    layer.half()
    assert layer.quant_tensor().input_transform.order is None or layer.quant_tensor().input_transform.order.dtype == torch.int32
    assert (
        layer.quant_tensor().input_transform.pre_quant_scale is None
        or layer.quant_tensor().input_transform.pre_quant_scale.dtype == pre_quant_scale
    )
    follower = QuantLinear(96, 48, name)
    follower.share_weight(layer)
    assert torch.equal(follower(x.half()), layer(x.half())) and follower.weight_order is layer.weight_order
    plain = rtn(random(48, 96), name)
    layer.set_weight(plain)
    assert layer.weight_order is None and layer.pre_quant_scale is None and layer.weight_nbytes == plain.nbytes


def test_an_embedding_has_no_order():
    q = rtn(random(50, 96), "w4a16_g32")
    with pytest.raises(
        ValueError, match="an embedding multiplies no input, so its weights have no scale of the input.*, no channel order"
    ):
        QuantEmbedding.from_quant_tensor(with_channels(q), torch.float32)
    embedding = QuantEmbedding.from_quant_tensor(q, torch.float32)
    with pytest.raises(ValueError, match="so its weights have no scale of the input's channels"):
        embedding.share_weight(QuantLinear.from_quant_tensor(with_channels(q, order=False)))
    assert torch.equal(embedding(torch.arange(50)), q.dequantize()), "untouched"
    with pytest.raises(ValueError, match="so its weights have no channel order"):
        empty_like(nn.Embedding(50, 96), q.scheme, input_parts=InputParts(order=True))
