"""Files may name tensors differently from the parameters of Transformers' model. Such models are quantized alike on disk and
while loading, and can be converted."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import lowbit
from lowbit import LowbitConfig, convert_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.models.calibrate import Calibration
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.models.names import TensorNames
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import skeleton
from lowbit.nn import QuantLinear
from lowbit.quantize import Gptq
from tests.tiny import save_tiny, tiny_llama, tiny_tokenizer

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"input_ids": torch.arange(24)[None]}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}


def vit():
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=32, patch_size=8))


def llava():
    text = LlamaConfig(**SMALL, vocab_size=160)
    sight = CLIPVisionConfig(**SMALL, image_size=32, patch_size=8, projection_dim=64)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=sight, image_token_index=159))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SMALL, vocab_size=160, num_key_value_heads=2, num_local_experts=4))


MODELS = {
    "vit": (vit, PIXELS, 12),  # here and below: the names in the files differ from the parameters' and are mapped
    "llama": (tiny_llama, TOKENS, 14),  # the names are the model's own
    "llava": (llava, TOKENS, 26),  # the names of each part of the model are mapped, and mapped back while saving
    "mixtral": (mixtral, TOKENS, 8),  # the names are changed, and experts are stacked
}


def saved(name, folder):
    torch.manual_seed(0)
    MODELS[name][0]().save_pretrained(folder)
    return folder


def load(folder, **options):
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    return cls.from_pretrained(folder, dtype=torch.float32, **options).eval()


def outputs(name, model):
    with torch.inference_mode():
        return model(**MODELS[name][1]).logits


@pytest.mark.parametrize("name", MODELS)
def test_on_disk_while_loading_and_saved_again_give_the_same_logits(name, tmp_path):
    _, _, layers = MODELS[name]
    source = saved(name, tmp_path / "plain")
    plan = quantize_checkpoint(source, tmp_path / "disk", "w8a16")
    in_memory = load(source, quantization_config=LowbitConfig("w8a16"))
    assert sum(isinstance(m, QuantLinear) for m in in_memory.modules()) == len(plan.shapes) >= layers
    expected = outputs(name, in_memory)
    assert torch.equal(outputs(name, load(tmp_path / "disk")), expected)
    in_memory.save_pretrained(tmp_path / "again")
    assert torch.equal(outputs(name, load(tmp_path / "again")), expected)
    assert not torch.equal(outputs(name, load(source)), expected)
    for folder in (tmp_path / "disk", tmp_path / "again", source):
        assert check_checkpoint(folder) == ()


def test_all_layers_of_a_vit_are_quantized(tmp_path):
    plan = quantize_checkpoint(saved("vit", tmp_path / "vit"), tmp_path / "q", "w8a16")
    assert len(plan.linears) == 13 and all(row.weights for row in plan.kept)
    with CheckpointReader(tmp_path / "q") as reader:
        assert "vit.layers.0.attention.q_proj.weight_packed" in reader.names()


def test_experts_that_files_lack_are_kept_with_the_reason(tmp_path):
    source = saved("mixtral", tmp_path / "m")
    plan = quantize_checkpoint(source, tmp_path / "q", "w8a16")
    assert sorted({name.rpartition(".")[2] for name in plan.linears}) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(plan.experts) == 4
    names = TensorNames(skeleton(source))
    with CheckpointReader(source) as reader:
        tensors = [name for name in reader.names() if "layers.0.block_sparse_moe.experts.3.w2" not in name]
    followed = names.followed(plan, tensors)
    assert {name.split(".")[2] for name in followed.experts} == {"1"}
    kept = [row for row in followed.kept if "experts" in row.name]
    assert len(kept) == 2 and all("MergeModulelist" in row.reason and row.weights for row in kept)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_quantized_keeps_its_name(name, tmp_path):
    """Servers expect the names of the source files: Mixtral's router is block_sparse_moe.gate there, mlp.gate in
    Transformers.
    """
    source = saved(name, tmp_path / "plain")
    plan = quantize_checkpoint(source, tmp_path / "q", "w8a16")
    with CheckpointReader(source) as before, CheckpointReader(tmp_path / "q") as after:
        names, found = TensorNames(skeleton(source)), set(after.names())
        own = {tensor: names.parameter(tensor) or tensor for tensor in before.names()}
        quantized = {tensor for tensor in own if own[tensor].rpartition(".")[0] in plan.shapes}
        quantized |= {tensor for tensor in own if ".experts." in tensor}  # Transformers stacks the experts
        assert {tensor for tensor in own if tensor not in quantized} <= found
        assert {own[tensor] for tensor in quantized if not tensor.endswith(".weight")} <= found
        weights = {tensor for tensor in quantized if tensor.endswith(".weight")}
        assert len(found) == len(own) - len(weights) + 2 * len(plan.layers)  # codes and scales of each layer


def test_the_gate_of_a_shared_expert_stays_in_16_bits(tmp_path):
    config = Qwen2MoeConfig(
        **SMALL, vocab_size=160, num_key_value_heads=2, num_experts=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "plain")
    plan = quantize_checkpoint(tmp_path / "plain", tmp_path / "q", "w8a16")
    assert {name.rpartition("mlp.")[2] for name in plan.shapes if "mlp" in name} == {
        "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"
    }  # fmt: skip
    in_memory = load(tmp_path / "plain", quantization_config=LowbitConfig("w8a16"))
    assert torch.equal(outputs("mixtral", load(tmp_path / "q")), outputs("mixtral", in_memory))


class TestFusedFiles:
    """Files in which one tensor holds several layers' weights, which Transformers splits by a registered mapping."""

    @pytest.fixture
    def source(self, tmp_path, monkeypatch):
        from transformers import conversion_mapping
        from transformers.core_model_loading import Chunk, WeightConverter

        folder = save_tiny(tmp_path / "fused")
        file = folder / "model.safetensors"
        tensors = {name: t.float() for name, t in load_file(file).items()}  # Transformers 5.17 does not cast what it splits
        for i in range(2):
            parts = [tensors.pop(f"model.layers.{i}.mlp.{part}_proj.weight") for part in ("gate", "up")]
            tensors[f"model.layers.{i}.mlp.gate_up.weight"] = torch.cat(parts)
        save_file(tensors, file, {"format": "pt"})
        stored = conversion_mapping.get_checkpoint_conversion_mapping

        def mapping(kind):
            if kind != "llama":
                return stored(kind)
            return [WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])]

        monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", mapping)
        return folder

    def test_split_layers_stay_and_say_why(self, source, tmp_path):
        plan = quantize_checkpoint(source, tmp_path / "q", "w8a16")
        assert len(plan.linears) == 10
        split = [row for row in plan.kept if row.name.endswith(("gate_proj", "up_proj"))]
        assert [row.weights for row in split] == [176 * 64] * 4
        assert "makes its weight of model.layers.0.mlp.gate_up.weight" in split[0].reason and "Chunk" in split[0].reason
        assert check_checkpoint(tmp_path / "q") == ()
        in_memory = load(source, quantization_config=LowbitConfig("w8a16"))
        assert torch.equal(outputs("llama", load(tmp_path / "q")), outputs("llama", in_memory))

    def test_split_on_the_way_from_another_tools_files(self, source, tmp_path):
        """Quantized layers of another tool's files are taken over unchanged. The fused tensor is split as Transformers splits
        it."""
        quantize_checkpoint(source, tmp_path / "q", "w4a16_g16")
        convert_checkpoint(tmp_path / "q", tmp_path / "gptq", "gptq")
        direct = lowbit.load(tmp_path / "gptq", device="cpu", dtype=torch.float32)
        assert sum(isinstance(m, QuantLinear) for m in direct.modules()) == 10
        assert torch.equal(outputs("llama", direct), outputs("llama", load(tmp_path / "q")))

    def test_half_of_a_merged_tensor_is_missed(self, source, tmp_path):
        file = source / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.0.mlp.gate_up.weight"
        save_file(tensors | {name: tensors[name][:300].clone()}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"made of .*gate_up\.weight, which hold 19,200 numbers, .* it is 22,528"):
            quantize_checkpoint(source, tmp_path / "q", "w8a16")

    def test_calibration_says_what_it_cannot_read(self, source, tmp_path):
        with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.0.mlp.gate_proj.weight'.* not split or merged"):
            quantize_checkpoint(source, tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=Calibration(4, 32))


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """Files whose tensors have the names of the base model, although config.json states the model with the head. GPT-2 was
    published so."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("names") / "gpt2"
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=160, n_positions=64))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({n.removeprefix("transformer."): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    return folder


def test_files_of_a_base_model(headless, tmp_path):
    """Embedding and tied head are quantized, and stored under the names in the model with the head."""
    plan = quantize_checkpoint(headless, tmp_path / "q", "w8a16", embeddings=True)
    assert set(plan.shapes) == {"transformer.wte", "transformer.wpe"} and plan.tied == {"lm_head": "transformer.wte"}
    in_memory = load(headless, quantization_config=LowbitConfig("w8a16", embeddings=True))
    assert torch.equal(outputs("llama", load(tmp_path / "q")), outputs("llama", in_memory))
    assert check_checkpoint(tmp_path / "q") == () == check_checkpoint(headless)


def test_a_base_model_of_llama_with_calibration(tmp_path):
    save_tiny(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    whole = quantize_checkpoint(tmp_path / "plain", tmp_path / "a", "w4a16_g32", method=Gptq(), calibration=Calibration(4, 32))
    save_file({n.removeprefix("model."): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    base = quantize_checkpoint(tmp_path / "plain", tmp_path / "b", "w4a16_g32", method=Gptq(), calibration=Calibration(4, 32))
    assert whole.shapes == base.shapes
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_converting_from_and_to_mapped_names(tmp_path):
    """A checkpoint whose quantized layers have the old names becomes one with the model's own."""
    source = saved("vit", tmp_path / "plain")
    quantize_checkpoint(source, tmp_path / "own", "w4a16_g32", skip=["classifier"])
    convert_checkpoint(tmp_path / "own", tmp_path / "gptq", "gptq")
    file = tmp_path / "gptq" / "model.safetensors"
    names = TensorNames(skeleton(source))
    with CheckpointReader(source) as reader:
        old = {names.parameter(t).rpartition(".")[0]: t.rpartition(".")[0] for t in reader.names()}
    parts = {n: n.rpartition(".") for n in load_file(file)}
    renamed = {f"{old.get(parts[n][0])}.{parts[n][2]}" if parts[n][0] in old else n: t for n, t in load_file(file).items()}
    assert "vit.encoder.layer.0.attention.attention.query.qweight" in renamed
    save_file(renamed, file, {"format": "pt"})
    report = convert_checkpoint(tmp_path / "gptq", tmp_path / "back")
    assert "vit.layers.0.attention.q_proj" in report.layers
    assert torch.equal(outputs("vit", load(tmp_path / "back")), outputs("vit", load(tmp_path / "own")))
    direct = lowbit.load(tmp_path / "gptq", device="cpu", dtype=torch.float32)
    assert torch.equal(outputs("vit", direct), outputs("vit", load(tmp_path / "own")))


class TestNoCausalHead:
    @pytest.mark.parametrize("cls", [BertForMaskedLM, BertLMHeadModel])
    def test_is_refused_wherever_the_next_token_is_asked_for(self, cls, tmp_path):
        cls(BertConfig(**SMALL, vocab_size=160)).save_pretrained(tmp_path / "bert")
        tiny_tokenizer().save_pretrained(tmp_path / "bert")
        with pytest.raises(CheckpointError, match=cls.__name__):
            load_causal(tmp_path / "bert")
        with pytest.raises(CheckpointError, match=cls.__name__):
            quantize_checkpoint(tmp_path / "bert", tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=Calibration(4, 32))
        assert len(quantize_checkpoint(tmp_path / "bert", tmp_path / "q", "w8a16").linears) >= 12

    def test_a_decoder_of_that_family_is_one(self, tmp_path):
        model = BertLMHeadModel(BertConfig(**SMALL, vocab_size=160, is_decoder=True))
        model.save_pretrained(tmp_path / "bert")
        assert torch.equal(outputs("llama", load_causal(tmp_path / "bert", device="cpu")), outputs("llama", model.eval()))
