"""Models are quantized while Transformers loads them, saved, and loaded again by from_pretrained. All results are bit-equal to
quantizing the weights by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lowbit import LowbitConfig
from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import InputParts, parse_scheme
from lowbit.models.head import quantize_head
from lowbit.models.hf import LOADING_OVERHEAD_BYTES, place_empty_modules
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn import QuantEmbedding, QuantLinear
from lowbit.quantize import rtn
from tests.memory import linux, peak_bytes
from tests.tiny import tiny_llama, with_channels

SCHEMES = ["w8a16", "w6e3m2a16", "w4a16_g32_fz", "w3a16_g48_z"]
IDS = torch.arange(40)[None]


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def logits(model):
    with torch.inference_mode():
        return model(IDS.to(model.device)).logits


def simulated(path, scheme, embeddings=False):
    """The plain model with every weight replaced by its dequantized value."""
    model = load(path)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and (embeddings or module is not head):
            module.weight.data = rtn(module.weight.data, scheme).dequantize()
    if embeddings:
        table = model.get_input_embeddings()
        table.weight.data = rtn(load(path).get_input_embeddings().weight.data, scheme).dequantize()
    return model


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_load_save_reload(folder, scheme, tmp_path):
    model = load(folder, quantization_config=LowbitConfig(scheme))
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    assert type(model.lm_head) is torch.nn.Linear
    torch.testing.assert_close(logits(model), logits(simulated(folder, scheme)), rtol=1e-4, atol=1e-4)

    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert same_state(model, again)
    assert torch.equal(logits(again), logits(model))
    with CheckpointReader(tmp_path / "saved") as reader:
        reader.check()
        assert len(reader.manifest.layers) == 14

    quantize_checkpoint(folder, tmp_path / "streamed", scheme)
    assert same_state(load(tmp_path / "streamed"), model), "quantizing on disk and on load are the same"


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16_g32_fz"])
def test_embeddings_on_request_stay_tied(folder, scheme, tmp_path):
    model = load(folder, quantization_config=LowbitConfig(scheme, embeddings=True))
    tied = model.config.tie_word_embeddings
    assert isinstance(model.model.embed_tokens, QuantEmbedding) and isinstance(model.lm_head, QuantLinear)
    assert (model.lm_head.weight_packed is model.model.embed_tokens.weight_packed) == tied
    torch.testing.assert_close(logits(model), logits(simulated(folder, scheme, embeddings=True)), rtol=1e-4, atol=1e-4)

    model.save_pretrained(tmp_path / "saved")
    quantize_checkpoint(folder, tmp_path / "streamed", scheme, embeddings=True)
    for saved in ("saved", "streamed"):
        again = load(tmp_path / saved)
        assert same_state(again, model), saved
        assert (again.lm_head.weight_packed is again.model.embed_tokens.weight_packed) == tied
        assert torch.equal(logits(again), logits(model))
        with CheckpointReader(tmp_path / saved) as reader:
            assert any(n.startswith("lm_head.") for n in reader.names()) != tied, "a tied matrix is stored once"


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16_g32"])
def test_a_saved_model_with_quantized_embeddings_states_its_type(folder, scheme, tmp_path):
    options = {"quantization_config": LowbitConfig(scheme, embeddings=True), "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.save_pretrained(tmp_path / "saved")
    assert model.dtype == torch.bfloat16
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype == torch.bfloat16 and torch.equal(logits(again), logits(model))


def with_channels_in_every_layer(folder, target, scheme="w4a16_g32_z"):
    """Writes the quantized checkpoint with an order of channels, an input scale or both in every layer; returns the dequantized
    model.
    """
    quantize_checkpoint(folder, target / "plain", scheme)
    model, kinds = load(folder), [(True, None), (False, torch.float16), (True, torch.float32)]
    with CheckpointReader(target / "plain") as reader, CheckpointWriter(target / "channels") as writer:
        layers = {}
        for i, name in enumerate(reader.manifest.layers):
            layers[name] = with_channels(reader.layer(name), *kinds[i % 3], seed=i)
            model.get_submodule(name).weight.data = layers[name].dequantize()
            for suffix, tensor in layer_tensors(layers[name]).items():
                writer.add(f"{name}.{suffix}", tensor)
        for tensor in reader.names():
            if tensor.rpartition(".")[0] not in layers or tensor.endswith(".bias"):
                writer.add(tensor, reader.get(tensor))
        entries = {name: LayerEntry.of(q) for name, q in layers.items()}
        writer.finish(reader.config, replace(reader.manifest, layers=entries))
    return model


def test_order_and_pre_quant_scale_load_and_save(folder, tmp_path):
    simulation = with_channels_in_every_layer(folder, tmp_path)
    model = load(tmp_path / "channels")
    torch.testing.assert_close(logits(model), logits(simulation), rtol=1e-4, atol=1e-4)
    q_proj, k_proj, v_proj = (getattr(model.model.layers[0].self_attn, f"{x}_proj") for x in "qkv")
    assert {type(p) for p in (q_proj, k_proj, v_proj)} == {QuantLinear}
    found = {p.pre_quant_scale.dtype for p in (q_proj, k_proj, v_proj) if p.pre_quant_scale is not None}
    assert found == {torch.float16, torch.float32}, "in the types of the file, not of the model"

    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert same_state(again, model) and torch.equal(logits(again), logits(model))
    with CheckpointReader(tmp_path / "saved") as reader:
        reader.check()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    torch.testing.assert_close(logits(half).float(), logits(simulation), rtol=0.1, atol=0.05)


def test_orders_that_do_not_fit_are_refused_while_loading(folder, tmp_path):
    with_channels_in_every_layer(folder, tmp_path)
    path = tmp_path / "channels" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight_order"][0] = 10**6
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight_order: must contain each of 0 to 63"):
        load(tmp_path / "channels")


def test_an_embedding_with_an_order_is_refused_while_loading(folder):
    entry = LayerEntry((160, 64), parse_scheme("w4a16_g32"), InputParts(order=True))
    with pytest.raises(ValueError, match=r"model\.embed_tokens: an embedding multiplies no input, .* no channel order"):
        place_empty_modules(load(folder), Manifest(entry.scheme, {"model.embed_tokens": entry}), {})


def test_modules_to_not_convert(folder):
    model = load(folder, quantization_config=LowbitConfig("w8a16", modules_to_not_convert=["lm_head", "*.mlp.*"]))
    assert type(model.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert isinstance(model.model.layers[1].self_attn.o_proj, QuantLinear)
    kept = {row.name: row.reason for row in model.hf_quantizer.plan.kept}
    assert kept["model.layers.1.mlp.up_proj"] == "skipped by '*.mlp.*'"
    assert "on request" in kept["model.embed_tokens"]


def test_sharded_checkpoints(folder, tmp_path):
    model = load(folder, quantization_config=LowbitConfig("w4a16_g32_fz"))
    model.save_pretrained(tmp_path / "c", max_shard_size="30KB")
    assert (tmp_path / "c" / "model.safetensors.index.json").exists()
    assert same_state(load(tmp_path / "c"), model)


def test_other_types_of_activations(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=LowbitConfig("w8a16"))
    assert logits(model).dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.float32
    torch.testing.assert_close(logits(model).float(), logits(simulated(folder, "w8a16")), rtol=0.1, atol=0.05)


def test_compile_without_graph_breaks(folder):
    model = load(folder, quantization_config=LowbitConfig("w8a16"))
    compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="eager")
    x = torch.randn(1, 5, 64)
    assert torch.equal(compiled(x), model.model.layers[0].mlp(x))


def test_other_architectures_say_what_they_keep(tmp_path):
    """GPT-2's Conv1D is not an `nn.Linear`: loading works, and the report lists such layers as not quantized."""
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64)).save_pretrained(
        tmp_path / "gpt2"
    )
    model = load(tmp_path / "gpt2", quantization_config=LowbitConfig("w8a16"))
    plan = model.hf_quantizer.plan
    assert not plan.shapes
    assert any(row.kind == "Conv1D" and "only nn.Linear" in row.reason for row in plan.kept)
    with pytest.raises(ValueError, match=r"nothing in it can be quantized to w8a16.*3 more Conv1D like it.*only nn\.Linear"):
        quantize_checkpoint(tmp_path / "gpt2", tmp_path / "out", "w8a16")
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_is_not_quantized_again(folder, tmp_path):
    quantize_checkpoint(folder, tmp_path / "a", "w8a16")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(tmp_path / "a", tmp_path / "b", "w4a16_g32")


def test_damaged_checkpoints_are_refused_while_loading(folder, tmp_path):
    quantize_checkpoint(folder, tmp_path / "a", "w8a16")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["layers"]["model.layers.0.mlp.up_proj"]["shape"] = [64, 64]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.layers\.0\.mlp\.up_proj\.weight_packed"):
        load(tmp_path / "a")
    config["quantization_config"]["layers"] = {"model.nothing": {"shape": [4, 4]}}
    path.write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ValueError), match=r"model\.nothing"):
        load(tmp_path / "a")


def test_checksums_of_other_files_are_not_saved(folder, tmp_path):
    """`save_pretrained` writes other files, for which the checksums in config.json would be wrong."""
    quantize_checkpoint(folder, tmp_path / "a", "w8a16")
    stated = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert list(stated["files"]) == ["model.safetensors"]
    for target in ("b", "a"):
        load(tmp_path / "a").save_pretrained(tmp_path / target)
        written = json.loads((tmp_path / target / "config.json").read_text())["quantization_config"]
        assert not {"files", "sha256"} & set(written) and written["layers"] == stated["layers"]
        with CheckpointReader(tmp_path / target) as reader:
            assert reader.verify_files() == ()
            reader.check()
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))


def test_weights_that_cannot_be_quantized_name_the_layer(tmp_path):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "bad")
    with pytest.raises(ValueError, match=r"bad: model\.layers\.1\.mlp\.up_proj\.weight: 1 of 11264 weights are not finite"):
        quantize_checkpoint(tmp_path / "bad", tmp_path / "out", "w8a16")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"bad: model\.layers\.1\.mlp\.up_proj: 1 of 11264 weights are not finite"):
        load(tmp_path / "bad", quantization_config=LowbitConfig("w8a16"))


def test_config_round_trip_and_errors():
    config = LowbitConfig("wf6af16")
    assert config.scheme == "w6e3m2a16"
    assert LowbitConfig(**config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="unknown scheme"):
        LowbitConfig("int4")
    with pytest.raises(TypeError, match="bits"):
        LowbitConfig("w8a16", bits=4)


STREAM = "lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], 'w4a16_g64')"
LOAD = """
config = lowbit.LowbitConfig('w4a16_g64')
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16, quantization_config=config)
"""
IMPORTS = """
import lowbit.models.quantize_checkpoint, transformers.models.llama.modeling_llama
from lowbit.checkpoint import CheckpointReader
from transformers import AutoModelForCausalLM
"""


@linux
@pytest.mark.parametrize("how", [LOAD, STREAM], ids=["load", "stream"])
def test_peak_memory_is_packed_size_plus_one_layer_plus_a_constant(large, tmp_path, how):
    with CheckpointReader(large) as reader:
        weights = sum(info.end - info.begin for info in map(reader.info, reader.names())) // 2
    layer = 9216 * 2048 * 2
    peak = peak_bytes(IMPORTS, how, large, tmp_path / "out")
    packed = weights * 4.25 / 8
    print(f"peak {peak:,}, packed {packed:,.0f}, layer {layer:,}")
    assert peak < packed + layer + LOADING_OVERHEAD_BYTES


def test_a_scheme_for_head_and_embedding_is_that_of_quantize_head_and_is_saved(folder, tmp_path):
    """Head and embedding are quantized as their tensors are loaded, with the result of `quantize_head`, and the saved config
    states it.
    """
    model = load_causal(folder, scheme="w4a16_g16", head="w8a16", device="cpu", dtype=torch.float32)
    later = load_causal(folder, scheme="w4a16_g16", device="cpu", dtype=torch.float32)
    quantize_head(later, "w8a16")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = later(ids).logits
        assert torch.equal(model(ids).logits, expected)
        model.save_pretrained(tmp_path / "saved")
        again = load_causal(tmp_path / "saved", device="cpu", dtype=torch.float32)
        assert torch.equal(again(ids).logits, expected)
    for each in (model, again):
        ends = each.get_input_embeddings(), each.get_output_embeddings()
        assert [end.scheme_name for end in ends] == ["w8a16", "w8a16"]
