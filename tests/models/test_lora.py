"""LoRA by PEFT on a quantized model. Adapters train as over plain layers with the dequantized weights, and are merged, saved
and loaded."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import LowbitConfig, QuantLinear
from lowbit.checkpoint import CheckpointReader
from lowbit.formats import parse_scheme
from lowbit.models.lora import LoraQuantLinear
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn.convert import dequantized
from tests.tiny import save_tiny

IDS = torch.randint(3, 100, (4, 24), generator=torch.Generator().manual_seed(0))
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    quantize_checkpoint(save_tiny(root / "plain", bias=True), root / "q", "w4a16_g32")
    return root / "q"


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def adapted(model, **options):
    """The model with adapters whose reproducible weights change its results."""
    config = lowbit.support_lora(LoraConfig(**{**LORA, **options}), model)
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w6e3m2a16", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_layer_are_those_of_its_dequantized_weights(scheme, dtype):
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48).to(dtype)
    layer = torch.nn.Sequential(copy.deepcopy(plain))
    lowbit.convert(layer, scheme)
    (layer,) = layer
    assert isinstance(layer, QuantLinear)
    reference = dequantized(layer, dtype)
    reference.bias = torch.nn.Parameter(reference.bias.detach().clone())
    x, other = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_() for _ in range(2))
    weights = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    (layer(x) * weights).sum().backward()
    (reference(other) * weights).sum().backward()
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(x.grad, other.grad, **tolerance)
    torch.testing.assert_close(layer.bias.grad, reference.bias.grad, **tolerance)
    assert all(p.grad is None for name, p in layer.named_parameters() if name != "bias")


def test_adapters_have_the_gradients_of_those_over_dequantized_weights(folder):
    quantized = adapted(load(folder))
    plain = load(folder).dequantize()
    torch.manual_seed(1)
    plain = get_peft_model(plain, LoraConfig(**LORA))
    plain.load_state_dict({k: v for k, v in quantized.state_dict().items() if "lora" in k}, strict=False)
    for model in (quantized, plain):
        model(IDS, labels=IDS).loss.backward()
    found, expected = (
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (quantized, plain)
    )
    assert found.keys() == expected.keys() and len(found) == 12
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains(folder, dtype, checkpointing):
    model = load(folder, dtype)
    model.model.embed_tokens.weight.data *= 20  # the embedding is tied to the head; without this the logits would hardly differ
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model = adapted(model)
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items() if "lora" not in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    losses = []
    for _ in range(20):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    after = model.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_peft_warns_of_nothing(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapted(load(folder))


def test_all_linear_is_every_layer_but_the_head(folder):
    model = adapted(load(folder), target_modules="all-linear")
    found = [name for name, module in model.named_modules() if isinstance(module, LoraQuantLinear)]
    assert len(found) == 14 and not any("lm_head" in name for name in found)


def test_merging_keeps_16_bits_and_unmerging_restores(folder):
    model = adapted(load(folder))
    expected = logits(model)
    with model.disable_adapter():
        without = logits(model)
    assert not torch.allclose(expected, without, atol=1e-3)
    quantized = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    model.merge_adapter(safe_merge=True)
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    assert type(layer) is torch.nn.Linear and layer.weight.dtype == torch.float32
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), without, rtol=0, atol=0)
    model.merge_adapter()
    model.unmerge_adapter()
    assert model.base_model.model.model.layers[0].mlp.down_proj.base_layer is quantized
    assert torch.equal(logits(model), expected)


def test_biases_of_adapters_are_merged(folder):
    model = adapted(load(folder, torch.bfloat16), lora_bias=True, target_modules=["q_proj", "v_proj"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert merged.model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16
    torch.testing.assert_close(logits(merged), expected, rtol=5e-2, atol=5e-2)


def test_a_merged_model_is_saved_and_loaded(folder, tmp_path):
    model = adapted(load(folder))
    expected = logits(model)
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert type(merged.model.layers[0].self_attn.k_proj) is QuantLinear
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    with CheckpointReader(tmp_path / "merged") as reader:
        reader.check()
        assert len(reader.manifest.layers) == 14 - 6
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))


def test_a_merged_model_is_quantized_again_on_request(folder, tmp_path):
    merged = adapted(load(folder)).merge_and_unload()
    lowbit.convert(merged, "w8a16")
    merged.save_pretrained(tmp_path / "again")
    with CheckpointReader(tmp_path / "again") as reader:
        schemes = [entry.scheme for entry in reader.manifest.layers.values()]
    assert (schemes.count(parse_scheme("w8a16")), schemes.count(parse_scheme("w4a16_g32"))) == (6, 8)
    assert torch.equal(logits(load(tmp_path / "again")), logits(merged))


def test_merging_every_layer_leaves_a_plain_model(folder, tmp_path):
    merged = adapted(load(folder), target_modules="all-linear").merge_and_unload()
    merged.save_pretrained(tmp_path / "plain")
    again = load(tmp_path / "plain")
    assert getattr(again.config, "quantization_config", None) is None
    assert not (tmp_path / "plain" / "README.md").exists()
    assert torch.equal(logits(again), logits(merged))


def test_unloading_without_merging(folder):
    expected = logits(load(folder))
    assert torch.equal(logits(adapted(load(folder)).unload()), expected)


def test_adapters_are_saved_and_loaded(folder, tmp_path):
    model = adapted(load(folder))
    model.save_pretrained(tmp_path / "adapter")
    fresh = load(folder)
    config = lowbit.support_lora(LoraConfig.from_pretrained(tmp_path / "adapter"), fresh)
    again = PeftModel.from_pretrained(fresh, tmp_path / "adapter", config=config)
    assert torch.equal(logits(again), logits(model))


def test_peft_prepares_it_for_training(folder):
    model = prepare_model_for_kbit_training(load(folder, torch.bfloat16))
    model = adapted(model)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"), (dict(use_dora=True), "unsupported variant")],
)
def test_what_cannot_be_done_is_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        adapted(load(folder), **options)


def test_8_bit_activations_are_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "plain", quantization_config=LowbitConfig("w8a8"))
    with pytest.raises(ValueError, match=r"16-bit activations, such as w4a16_g64, not w8a8"):
        adapted(model)
    assert not model.hf_quantizer.is_trainable
