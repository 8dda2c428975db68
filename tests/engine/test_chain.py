"""Chains: decode steps of a few tokens in five launches a layer. On a CPU, with the operators' references, their logits are the
model's."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from lowbit.engine.cache import Cache
from lowbit.engine.chain import Chain
from lowbit.engine.product import Dense, Packed, Scaled, product
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.engine.slots import Slots, on_device
from lowbit.models.head import quantize_head
from lowbit.nn import QuantLinear, convert
from lowbit.nn.fused import AlternatingMLP
from lowbit.ops import chain_refusals
from lowbit.quantize.rtn import rtn
from tests.engine.pages import fill_unwritten
from tests.tiny import eager_llama, tiny_llama

VOCAB, TOKENS = 160, 12


def packed(model, scheme, skip=None):
    """A model whose layers have the weights of a GPU; layers whose names match `skip` are left as they are."""
    if skip is None:
        convert(model, scheme)
    else:
        kept = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and skip(name)}
        convert(model, scheme)
        for name, module in kept.items():
            model.set_submodule(name, module)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module._pack_for_gpu()
            module._drop_form_on_disk()
    return model


def dequantized(model, dtype=torch.float64):
    """The model with the same weights in plain layers."""
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, QuantLinear):
            layer = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            layer.weight.data = module.quant_tensor().dequantize(torch.float32)
            if module.bias is not None:
                layer.bias.data = module.bias.data
            plain.set_submodule(name, layer)
    return plain.to(dtype)


def near_reference(program, reference, ids, dtype):
    """Compares the logits [T, B, vocab] of a program, step by step, with those of a model; they differ by rounding only."""
    with torch.inference_mode():
        expected = reference(ids).logits.transpose(0, 1).float()
    found = stepped(program, ids).float()
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < (0.01 if dtype == torch.float16 else 0.06), error
    return found, expected


def random_ids(count):
    return torch.randint(3, VOCAB, (count, TOKENS), generator=torch.Generator().manual_seed(count))


@torch.inference_mode()
def stepped(program, ids, vocab=VOCAB):
    """Logits [tokens, sequences, V] of a program that computes the sequences token by token."""
    count = len(ids)
    program.cache = Cache(program.cache_spec, 1 + count, program.device)
    fill_unwritten(program.cache)
    slots = Slots(count, 128, vocab, (), program.device)
    slots.update([(slot, 0, 1 + slot) for slot in range(count)], [])
    logits = []
    for position in range(ids.shape[1]):
        slots.update([], [(slot, position) for slot in range(count)])
        slots.tokens[:count] = ids[:, position].int()
        logits.append(program.step(on_device(list(range(count)), program.device), slots))
    return torch.stack(logits)


def program_of(model):
    decoder = recognise(model)
    assert not isinstance(decoder, tuple), decoder
    return DecodeProgram(decoder, model.dtype, torch.device("cpu"), batch_invariant=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scheme", ["w4a16_g32", "w6e3m2a16", "w8a16"])
@pytest.mark.parametrize("ends", [False, True], ids=["", "w8 ends"])
def test_the_logits_of_the_model(dtype, scheme, ends):
    model = packed(eager_llama(dtype), scheme)
    if ends:
        assert quantize_head(model) == ["model.embed_tokens", "lm_head"]
        model.lm_head._pack_for_gpu()
    reference = dequantized(model, torch.float32)
    program = program_of(model)
    assert isinstance(program.chain, Chain)
    found, expected = near_reference(program, reference, random_ids(program.chain.most), dtype)
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_no_overflow_in_fp16():
    """Norm weights of 300 and a residual stream of 20,000: h * gamma alone would be 6,000,000."""
    model = eager_llama(torch.float16)
    model.model.embed_tokens.weight.data *= 20_000 / model.model.embed_tokens.weight.abs().max()
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data.fill_(300)
    for layer in model.model.layers:  # activations after a norm are small
        for part in (
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
        ):
            part.weight.data /= 300
    model = packed(model, "w8a16")
    ids = random_ids(3)
    with torch.inference_mode():
        expected = dequantized(model, torch.float32)(ids).logits.transpose(0, 1)
    found = stepped(program_of(model), ids).float()
    assert found.isfinite().all() and (found - expected).norm() / expected.norm() < 0.02


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Lets weights of 16 bits use the chain on a CPU too, with the operators' references."""
    monkeypatch.setattr("lowbit.engine.chain._refusals", lambda product, m, dtype: chain_refusals(product.weight, m, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("parts", ["all", "attention", "mlp", "head"])
def test_16_bit_layers_use_the_chain(as_on_a_gpu, dtype, parts):
    """A model that is not quantized, and a model with some layers left in 16 bits."""
    model = eager_llama(dtype)
    if parts != "all":
        names = {"attention": r"self_attn", "mlp": r"mlp", "head": r"lm_head"}
        packed(model, "w8a16", skip=lambda name: re.search(names[parts], name) or "lm_head" in name)
    reference = dequantized(model, torch.float32)
    weights = [model.model.layers[0].self_attn.q_proj, model.model.layers[1].mlp.up_proj]
    before = [layer.weight.clone() if isinstance(layer, nn.Linear) else None for layer in weights]
    program = program_of(model)
    assert isinstance(program.chain, Chain)
    layer = program.layers[0]
    dense = {name for name in ("qkv", "o", "gate_up", "down") if isinstance(getattr(layer, name), Dense)}
    expected_dense = {
        "all": {"qkv", "o", "gate_up", "down"},
        "attention": {"qkv", "o"},
        "mlp": {"gate_up", "down"},
        "head": set(),
    }
    assert dense == expected_dense[parts] and isinstance(program.head, Dense)
    near_reference(program, reference, random_ids(program.chain.most), dtype)
    for layer, weight in zip(weights, before, strict=True):
        assert weight is None or torch.equal(layer.weight, weight), "the model has its weights, as parts of the joined ones"
    if "qkv" in dense:
        joined = program.layers[0].qkv.weight.values
        assert weights[0].weight.data_ptr() == joined.data_ptr()
    if parts == "all":
        assert {"lm_head.weight", "model.layers.0.mlp.gate_proj.weight"} <= set(model.state_dict()), "it can be saved"


def test_reasons_why_16_bit_weights_use_torch():
    layer = [nn.Linear(60, 64, bias=False).half(), nn.Linear(64, 24, bias=False).half()]
    narrow, half = (product([one], False) for one in layer)
    assert chain_refusals(narrow.weight, 1, torch.float16) == (
        "takes weights of 16 bits whose rows start at multiples of 16 bytes, not 60 wide",
    )
    assert chain_refusals(half.weight, 17, torch.bfloat16) == (
        "takes x and weights of 16 bits in fp16 or bf16, one type for both, not torch.bfloat16 and torch.float16",
        "takes weights of 16 bits for 1 to 16 tokens, not 17",
    )


def test_weights_are_stored_once_and_the_model_still_works():
    model = packed(eager_llama(torch.float16), "w4a16_g32")
    before = {name: m.quant_tensor() for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    program = program_of(model)
    attention = model.model.layers[0].self_attn
    qkv = program.layers[0].qkv
    assert isinstance(qkv, Packed) and qkv.weight.shape == (64 + 32 + 32, 64)
    assert attention.q_proj.kernel_codes.data_ptr() == qkv.weight.codes.data_ptr()
    assert attention.k_proj.kernel_codes.untyped_storage().data_ptr() == qkv.weight.codes.untyped_storage().data_ptr()
    joined = qkv.weight.unpack()
    parts = [before[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(joined.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(joined.scale, torch.cat([part.scale for part in parts]).to(joined.scale.dtype))
    for name, part in zip("qkv", parts, strict=True):
        assert torch.equal(attention.get_submodule(f"{name}_proj").quant_tensor().codes, part.codes)
    mlp = model.model.layers[1].mlp
    assert isinstance(mlp, AlternatingMLP)
    assert mlp.kernel_codes is program.layers[1].gate_up.weight.codes
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp: an engine has packed the weights of its gate and up"):
        model.state_dict()


def test_scales_of_two_dtypes_are_not_concatenated():
    """Weights below 5e-4 have bf16 scales on disk (docs/internals/numerics.md). Concatenated with fp16 scales they would become
    float32."""
    layers = [QuantLinear.from_quant_tensor(rtn(size * torch.randn(32, 128), "w4a16_g64")) for size in (1.0, 1e-4)]
    for layer in layers:
        layer._pack_for_gpu()
    assert [layer.kernel_scale.dtype for layer in layers] == [torch.float16, torch.bfloat16]
    assert len({layer.kernel_channel_scale.dtype for layer in layers}) == 1
    assert not isinstance(product(layers, False), Packed)
    assert [layer.kernel_scale.dtype for layer in layers] == [torch.float16, torch.bfloat16]


def test_joined_gate_and_up_keep_the_dtype_of_their_scales():
    """Casting a module does not change it: it selects how codes are multiplied, if scales are per channel."""
    gate, up = (QuantLinear.from_quant_tensor(rtn(torch.randn(32, 128), "w4a16_g64")) for _ in range(2))
    mlp = AlternatingMLP([gate, up], nn.Linear(32, 128), "silu")
    before = mlp.weight()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        after = mlp.to(dtype).weight()
        assert torch.equal(after.scale, before.scale) and torch.equal(after.channel_scale, before.channel_scale)
        assert (after.scale.dtype, after.channel_scale.dtype) == (torch.float16, torch.bfloat16)
        assert mlp.down_proj.weight.dtype == dtype
    assert mlp.to("meta").weight().channel_scale.device.type == "meta"


@pytest.mark.parametrize("scheme", ["w4a16_g64", "w8a16", "w6e3m2a16_g64"])
def test_gate_and_up_of_one_layer(scheme):
    """A layer with the rows of gate, then those of up has the alternating weight and bias of two layers."""
    rows, bias = torch.randn(64, 128), torch.randn(64)
    given = ((rows, bias), *zip(rows.chunk(2), bias.chunk(2), strict=True))
    parts = [QuantLinear.from_quant_tensor(rtn(w, scheme), nn.Parameter(b)) for w, b in given]
    for layer in parts:
        layer._pack_for_gpu()
    one, two = (AlternatingMLP(layers, nn.Linear(32, 128), "silu") for layers in (parts[:1], parts[1:]))
    assert one.joined and not two.joined and parts[0].kernel_codes is None
    found, expected = one.weight().tensors(), two.weight().tensors()
    assert found.keys() == expected.keys() and torch.equal(one.bias, two.bias)
    for name, tensor in expected.items():
        assert tensor is found[name] is None or torch.equal(found[name], tensor), name
    narrow = QuantLinear.from_quant_tensor(rtn(rows[:24], scheme))
    assert AlternatingMLP.refusals([narrow]) == ("rows of gate and up, 24, alternate by 8",)


def test_a_second_program_of_a_model():
    """The first program has joined gate and up into one weight."""
    model = packed(eager_llama(torch.float16), "w4a16_g32")
    first = program_of(model)
    second = program_of(model)
    assert second.decoder.activation == "silu" and isinstance(second.chain, Chain)
    assert second.layers[0].gate_up.weight.codes is first.layers[0].gate_up.weight.codes
    assert torch.equal(stepped(first, random_ids(3)), stepped(second, random_ids(3)))


@pytest.mark.parametrize("invariant", [False, True])
def test_the_models_own_mlp_stays_batch_invariant(monkeypatch, invariant):
    model = packed(eager_llama(torch.float16), "w4a16_g32")
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.batch_invariant = invariant
    program_of(model)
    asked = []

    def product_of(x, weight, bias, gated, *, batch_invariant=False):
        asked.append(batch_invariant)
        return (x @ weight.unpack().dequantize(torch.float16).T)[:, ::2]

    monkeypatch.setattr("lowbit.nn.fused.gated_gemm", product_of)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Identity()
    mlp(torch.randn(3, 64).half())
    assert asked == [invariant]


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_16_bit_weights_do_not_depend_on_the_batch(bias):
    torch.manual_seed(0)
    joined = product([nn.Linear(256, n, bias=bias) for n in (64, 24)], True)
    x = torch.randn(150, 256)
    with torch.no_grad():
        y = joined(x)
        assert y.shape == (150, 88)
        for count in (1, 2, 7, 64, 65):
            assert torch.equal(joined(x[:count]), y[:count]), count


def test_layers_of_different_formats_are_not_joined():
    """q, k and v of different bits, or with rows that are not whole m16 blocks, stay separate weights."""
    torch.manual_seed(0)
    linears = [nn.Linear(64, n, bias=False) for n in (32, 24, 16)]
    model = nn.ModuleDict({str(i): layer for i, layer in enumerate(linears)}).half()
    packed(model, "w4a16_g32")
    layers = list(model.values())
    assert isinstance(product(layers[:2], False), Packed), "the last one may end within a row block"
    assert not isinstance(product(layers, False), Packed)
    other = packed(nn.ModuleDict({"0": nn.Linear(64, 32, bias=False)}).half(), "w8a16")["0"]
    assert not isinstance(product([layers[0], other], False), Packed)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8_g128", "fp8_dynamic", "fp8_block"])
def test_weights_for_8_bit_activations_are_joined(scheme):
    torch.manual_seed(0)
    layers = list(packed(nn.ModuleDict({str(n): nn.Linear(256, n) for n in (128, 384)}).half(), scheme).values())
    before = [layer.quant_tensor() for layer in layers]
    joined = product(layers, False)
    assert isinstance(joined, Scaled) and joined.weight is not None
    found = joined.weight.unpack()
    assert torch.equal(found.codes, torch.cat([q.codes for q in before]))
    expected = torch.cat([q.dequantize(torch.float32) for q in before])
    assert torch.equal(found.dequantize(torch.float32), expected)
    assert torch.equal(joined.bias, torch.cat([layer.bias for layer in layers]))
    assert torch.equal(joined.weight.sums, torch.cat([layer.kernel_sums for layer in layers]))
    assert layers[1].kernel_codes.untyped_storage().data_ptr() == joined.weight.codes.untyped_storage().data_ptr()
    assert torch.equal(layers[1].quant_tensor().codes, before[1].codes)


def test_biases_of_some_layers():
    model = packed(nn.ModuleDict({"a": nn.Linear(64, 16), "b": nn.Linear(64, 16, bias=False)}).half(), "w8a16")
    joined = product(list(model.values()), False)
    assert isinstance(joined, Packed) and joined.bias is not None
    assert torch.equal(joined.bias, torch.cat([model["a"].bias, torch.zeros(16, dtype=torch.float16)]))


def test_reasons_why_there_is_no_chain():
    program = program_of(tiny_llama(dtype=torch.float32))
    assert program.chain == ("weights of 16 bits are torch's to multiply on a CPU",)
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    program = program_of(packed(Gemma2ForCausalLM(config).half().eval(), "w8a16"))
    assert program.chain == ("norms after attention and MLP stand between the products",)
