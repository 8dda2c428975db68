"""Layers on a CPU have weights in the form of torch's products. Weights are packed once and restored bit for bit. Pickles never
have this form."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowbit.formats import parse_scheme
from lowbit.kernels.cpu.torch_int8 import sums_are_exact
from lowbit.nn import QuantEmbedding, QuantLinear, convert
from lowbit.nn.decoding import allow_decoding
from lowbit.nn.row_linear import RowLinear
from lowbit.pack.cpu import VECTOR_CPUS
from lowbit.quantize import rtn
from lowbit.quantize.learned import LearnedRounding
from tests.tiny import with_channels

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in VECTOR_CPUS, reason="torch's int4 and int8 products need AVX2 or AVX-512"
)

FORMS = {
    "w4a16_g32": "int4", "w3a16_g64_z": "int4", "w4a16_g64_fz": "int4", "w8a16": "int8", "w6e3m2a16": "decoded",
}  # fmt: skip
if sums_are_exact():
    FORMS["w8a8"] = "int8"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(name, n=96, k=192, bias=False) -> QuantLinear:
    made = QuantLinear.from_quant_tensor(rtn(random(n, k), name), nn.Parameter(random(n, seed=1)) if bias else None)
    made.decode_bytes = 4
    return made


def held_bytes(module):
    return sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_the_first_call_packs_and_everything_else_brings_the_form_on_disk_back(name, form):
    plain = layer(name)
    saved = {key: value.clone() for key, value in plain.state_dict().items()}
    x = random(3, 192, seed=2).bfloat16()
    y = plain(x)
    assert plain.cpu_weight.form == form
    assert (plain.weight_packed.numel() == 0) == (form != "decoded"), "instead of the form on disk, not beside it"
    if form != "decoded":
        assert plain.weight_nbytes <= (1.25 if name[1] != "3" else 1.45) * held_bytes(layer(name)), "int3 becomes int4"
    for use in (
        lambda m: m.state_dict(), lambda m: m.to(torch.float64), lambda m: m.to(torch.bfloat16), lambda m: m.quant_tensor(),
        lambda m: m.restore(),
    ):  # fmt: skip
        module = layer(name)
        module(x)
        use(module)
        state = module.state_dict()
        assert state.keys() == saved.keys() and all(torch.equal(state[key], saved[key]) for key in saved)
        assert torch.equal(module(x), y)


@pytest.mark.parametrize("name", FORMS)
def test_copies_and_pickles_hold_the_form_on_disk(name):
    """The order of weights in torch's int4 product depends on the CPU: if a pickle held it, another CPU would read it
    wrongly.
    """
    module = layer(name, bias=True)
    x = random(2, 192, seed=2).bfloat16()
    y = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert other.cpu_weight is None and other.weight_packed.numel() > 0
        assert torch.equal(other.weight_packed, layer(name).weight_packed) and torch.equal(other(x), y)
    assert module.cpu_weight is not None, "the original stays as it was"


def test_another_type_of_x_changes_the_form_once():
    module = layer("w4a16_g32")
    x = random(2, 192, seed=2)
    module(x.bfloat16())
    assert module.cpu_weight.form == "int4"
    exact = x.double() @ module.quant_tensor().dequantize(torch.float64).T
    torch.testing.assert_close(module(x).double(), exact, rtol=1e-5, atol=1e-4)
    assert module.cpu_weight.form == "decoded" and module.cpu_weight.dtype == torch.float32
    module.decode_bytes = 0
    module.restore()
    torch.testing.assert_close(module(x).double(), exact, rtol=1e-5, atol=1e-4)
    assert module.cpu_weight is None


@pytest.mark.parametrize("name", ["w4a16_g32", "w8a16", "w6e3m2a16"])
def test_order_pre_quant_scale_and_bias(name):
    q = with_channels(rtn(random(96, 192), name))
    module = QuantLinear.from_quant_tensor(q, nn.Parameter(random(96, seed=1)))
    module.decode_bytes = 2
    x = random(5, 192, seed=2).bfloat16()
    expected = x.double() @ q.dequantize(torch.float64).T + module.bias.double()
    size = x.double().abs() @ q.dequantize(torch.float64).abs().T + 1
    assert bool(((module(x).double() - expected).abs() <= 3 * 2**-7 * size).all()) and module.cpu_weight is not None


def test_tied_weights_keep_both_forms():
    module = layer("w4a16_g32")
    embedding = QuantEmbedding(96, 192, "w4a16_g32", torch.bfloat16)
    embedding.share_weight(module)
    module(random(1, 192).bfloat16())
    assert module.cpu_weight is not None and embedding.weight_packed is module.weight_packed
    assert torch.equal(embedding(torch.arange(96)), module.quant_tensor().dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", ["w4a16_g32", "w8a16", "w6e3m2a16", "w8a8"])
def test_compiles(name):
    model = nn.Sequential(layer(name, bias=True), nn.ReLU(), layer(name, 192, 96)).eval()
    with torch.no_grad():
        for m in (1, 50):
            x = random(m, 192, seed=m).bfloat16()
            y = model(x)
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["w4a16_g32", "w8a16"])
def test_gradients_of_x_in_float32_are_the_same_compiled(name):
    model = nn.Sequential(nn.Linear(192, 96))
    convert(model, name)
    gradients = []
    for m in (3, 50):
        x = random(m, 192, seed=m).requires_grad_()
        for called in (model, torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")):
            gradients.append(torch.autograd.grad(called(x).square().sum(), x)[0])
        assert model[0].cpu_weight is not None and model[0].cpu_weight.form == "decoded"
        torch.testing.assert_close(*gradients[-2:])


def test_layers_are_decoded_once_only_where_all_of_them_fit():
    model = nn.Sequential(nn.Linear(192, 96, bias=False), nn.Linear(96, 64, bias=False)).bfloat16()
    convert(model, "w6e3m2a16")
    weights = 192 * 96 + 96 * 64
    held = sum(p.nbytes for p in model.parameters())
    lines = allow_decoding(model, torch.bfloat16, memory_bytes=2 * (held + 2 * weights))
    assert lines == ["layers of w6e3m2a16 on this CPU (2): decoded once to bfloat16, beside their form on disk"]
    model(random(1, 192).bfloat16())
    assert [m.cpu_weight.form for m in model] == ["decoded", "decoded"]
    lines = allow_decoding(model, torch.bfloat16, memory_bytes=2 * (held + 2 * weights) - 2)
    assert lines == [
        "layers of w6e3m2a16 on this CPU (2): decoded at every call, several times slower than without quantization"
    ]
    model(random(1, 192).bfloat16())
    assert [m.cpu_weight for m in model] == [None, None]
    fast = nn.Sequential(nn.Linear(192, 96)).bfloat16()
    convert(fast, "w4a16_g32")
    assert allow_decoding(fast, torch.bfloat16, 0) == ["layers of w4a16_g32 on this CPU (1): torch's int4 product, packed once"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row_of_a_16_bit_layer(dtype, bias):
    linear = nn.Linear(192, 80, bias=bias).to(dtype)
    rows = RowLinear.of(linear)
    assert rows.weight is linear.weight and rows.bias is linear.bias and rows.state_dict().keys() == linear.state_dict().keys()
    with torch.no_grad():
        for shape in ((192,), (1, 1, 192), (1, 192), (3, 192), (2, 3, 192)):
            x = random(*shape).to(dtype)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(rows(x), linear(x), rtol=tolerance, atol=tolerance)
    x = random(1, 192).to(dtype).requires_grad_()
    rows(x).sum().backward()
    assert x.grad is not None


def test_a_16_bit_layer_that_leaves_the_cpu_is_one_of_torch():
    """On other devices it becomes `nn.Linear`, the class that code for whole models, such as `quantize_head`, looks for."""
    model = nn.Sequential(RowLinear.of(nn.Linear(192, 80).bfloat16()), nn.ReLU())
    assert type(model.half()[0]) is RowLinear and type(copy.deepcopy(model)[0]) is RowLinear
    before = model[0].state_dict().keys()
    moved = model.to("meta")[0]
    assert type(moved) is nn.Linear and moved.state_dict().keys() == before and moved.out_features == 80


@pytest.mark.parametrize(
    ("scheme", "dtype"), [("w4a16_g32", torch.bfloat16), ("w8a16", torch.bfloat16), ("w6e3m2a16", torch.float32)]
)
def test_weights_that_are_loaded_after_a_call_count(scheme, dtype):
    one, other = (QuantLinear.from_quant_tensor(rtn(torch.randn(32, 64), scheme)) for _ in range(2))
    for layer in (one, other):
        layer.decode_bytes = 4
    x = torch.randn(3, 64, dtype=dtype)
    expected, before = other(x), one(x)
    assert one.is_prepared
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), expected) and not torch.equal(before, expected)


def test_what_a_call_without_gradients_made_serves_one_with_them():
    layer = QuantLinear.from_quant_tensor(rtn(torch.randn(32, 64), "w6e3m2a16"))
    layer.decode_bytes = 4
    with torch.inference_mode():
        layer(torch.randn(1, 64))
    layer(torch.randn(1, 64, requires_grad=True)).sum().backward()


def test_offloaded_layers_keep_the_form_on_disk():
    layer = QuantLinear.from_quant_tensor(rtn(torch.randn(32, 64), "w4a16_g32"))
    layer._hf_hook = SimpleNamespace(offload=True)
    assert "offloaded" in layer.prepare()[0] and not layer.is_prepared


SIGNED = ["w2a16_g32", "w3a16_g64", "w4a16_g64", "w4a16_g128", "w6a16", "w8a16", "w4a16_b16x64", "w8a8", "w4a8_g128"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scheme", SIGNED)
def test_scales_may_be_negative(scheme, device):
    """Learned rounding and auto-round give the largest weight of a group the lowest code, so its scale has the weight's sign
    reversed.
    """
    q = LearnedRounding(random(256, 256), parse_scheme(scheme)).quantized()
    assert (q.scale < 0).any() and (q.scale > 0).any()
    x = random(64, 256, seed=2).to(torch.float32 if device == "cpu" else torch.float16)
    layer = QuantLinear.from_quant_tensor(q).to(device)
    expected = x.double() @ q.dequantize(torch.float64).T
    for rows in (1, 64):
        with torch.inference_mode():
            y = layer(x[:rows].to(device)).double().cpu()
        assert (y - expected[:rows]).norm() < 0.02 * expected[:rows].norm()
