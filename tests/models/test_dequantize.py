"""`model.dequantize()` of Transformers, and models of which Accelerate offloads layers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowbit import LowbitConfig
from lowbit.checkpoint import CheckpointReader
from lowbit.models.fuse import fuse_quantization
from lowbit.models.head import quantize_head
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn.fused import GatedMLP, QuantizingNorm
from lowbit.nn.packed import PackedWeight
from lowbit.ops.table import UnsupportedProblem
from tests.tiny import save_tiny

IDS = torch.arange(40)[None]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("plain") / "plain", tied=request.param, bias=True)


def load(folder, scheme=None, dtype=torch.float32, **options):
    config = {} if scheme is None else {"quantization_config": LowbitConfig(scheme, **options)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **config)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def is_plain(model):
    return not any(isinstance(module, PackedWeight) for module in model.modules())


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_model_with_plain_weights(folder, embeddings, dtype, tmp_path):
    model = load(folder, "w4a16_g32", dtype, embeddings=embeddings)
    expected = logits(model)
    plain = model.dequantize()
    assert plain is model and is_plain(model) and not getattr(model, "is_quantized", False)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(logits(model), expected, **tolerance)
    assert {p.dtype for p in model.parameters()} == {dtype}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == load(folder).config.tie_word_embeddings == model.config.tie_word_embeddings

    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert torch.equal(logits(load(tmp_path / "saved", dtype=dtype)), logits(model))


def test_to_another_type(folder):
    model = load(folder, "w4a16_g32", torch.bfloat16).dequantize(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.config.dtype == torch.float32
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert logits(model).dtype == torch.float32


def test_a_head_that_came_apart_stays_apart(folder, tmp_path):
    """A head whose weight differs from the embedding's stays untied when the model is dequantized, saved and loaded."""
    model = load(folder, "w4a16_g32")
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_fused_layers_come_apart(folder):
    model = load(folder, "w8a8")
    expected = logits(model)
    assert fuse_quantization(model)
    model.dequantize()
    assert is_plain(model) and not any(isinstance(m, (GatedMLP, QuantizingNorm)) for m in model.modules())
    torch.testing.assert_close(logits(model), expected, rtol=0.1, atol=0.1)
    assert not model._forward_pre_hooks


def test_what_was_quantized_after_loading_is_saved(folder, tmp_path):
    model = load(folder, "w4a16_g32")
    quantize_head(model)
    model.save_pretrained(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        layers = reader.manifest.layers
    assert len(layers) == 14 + (1 if model.config.tie_word_embeddings else 2)
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    root = tmp_path_factory.mktemp("offload")
    quantize_checkpoint(save_tiny(root / "plain"), root / "q", "w4a16_g32")
    return root / "q"


PLACES = {
    "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


def test_layers_on_disk(quantized, tmp_path):
    options = dict(dtype=torch.float32, device_map=PLACES, offload_folder=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(quantized, **options)
    assert model.model.layers[0].mlp.up_proj.weight_packed.is_meta
    for _ in range(2):
        assert torch.equal(logits(model), logits(load(quantized)))
    with pytest.raises(UnsupportedProblem, match=r"layers\.0\.self_attn\.q_proj: Accelerate has offloaded the weights"):
        model.dequantize()


def test_quantizing_on_load_with_layers_on_disk_is_refused(quantized, tmp_path):
    options = dict(dtype=torch.float32, device_map=PLACES, offload_folder=tmp_path)
    with pytest.raises(ValueError, match=r"write a quantized folder first \(lowbit quantize\)"):
        AutoModelForCausalLM.from_pretrained(
            quantized.parent / "plain", quantization_config=LowbitConfig("w4a16_g32"), **options
        )
