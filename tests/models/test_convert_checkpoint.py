"""Conversion of whole checkpoints. Values equal those that the writing tools compute, and chains of conversions restore the
first checkpoint."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM

from lowbit.checkpoint import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    ForeignReader,
    LayerEntry,
    Manifest,
    layer_tensors,
)
from lowbit.formats import parse_scheme
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.gguf import GgufLayerReader
from lowbit.nn.packed import PackedWeight
from lowbit.quantize import rtn
from tests.checkpoint.foreign import DATA, same, sha
from tests.tiny import save_tiny, tiny_llama

IDS = torch.tensor([[5, 17, 60, 9, 33, 2, 80, 41]])


def expected(name):
    return json.loads((DATA / name / "expected.json").read_text())


def test_exceptions_of_single_layers_are_kept(tmp_path):
    report = convert_checkpoint(DATA / "auto-round-mixed", tmp_path / "c")
    assert report.layers.pop("model.layers.0.mlp.up_proj") == "w8a16_g16"
    assert "model.layers.0.self_attn.k_proj" not in report.layers and set(report.layers.values()) == {"w4a16_g32"}
    stated = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert stated["modules_to_not_convert"] == ["model.layers.0.self_attn.k_proj", "lm_head"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("auto-round-w5-asym", "w5a16_g32_z"),
        ("awq-auto-round", "w4a16_g32_z"),
        ("awq-auto-round-sym", "w4a16_g32"),
        ("gptq-auto-round-w4", "w4a16_g32"),
        ("gptq-gptqmodel-w3-act-order", "w3a16_g32"),
        ("compressed-tensors-w6-channel", "w6a16"),
        ("compressed-tensors-fp8-block", "w8e4m3a16_b32x32"),
        ("compressed-tensors-mxfp4", "w4e2m1a16_g32"),
        ("compressed-tensors-nvfp4", "w4e2m1a16_g16"),
        ("modelopt-int4-awq", "w4a16_g32"),
        ("modelopt-nvfp4", "w4e2m1a16_g16"),
        ("torchao-int8-dynamic", "w8a16"),
        ("torchao-int4-asym", "w4a16_g32_z"),
    ],
)
def test_transformers_runs_what_was_converted(tmp_path, name, scheme):
    report = convert_checkpoint(DATA / name, tmp_path / "c")
    assert set(report.layers) == set(expected(name)) and set(report.layers.values()) == {scheme}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    packed = {n: m.quant_tensor() for n, m in model.named_modules() if isinstance(m, PackedWeight)}
    assert {n: sha(q.dequantize()) for n, q in packed.items()} == expected(name)
    with CheckpointReader(tmp_path / "c") as reader:
        reader.check()

    # The same model with the tool's weights as plain matrices.
    config = AutoConfig.from_pretrained(tmp_path / "c")
    del config.quantization_config
    dense = LlamaForCausalLM(config)
    tensors = {k: v.float() for k, v in load_file(DATA / name / "model.safetensors").items()}
    with ForeignReader(DATA / name) as reader:
        state = {f"{n}.weight": reader.dequantize(n, torch.float32) for n in reader.entries}
        state |= {n: tensors[n] for n in reader.plain}
    dense.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    logits = dense(IDS).logits
    assert torch.allclose(model(IDS).logits, logits, atol=1e-5 * float(logits.abs().max()))


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("awq-auto-round", "awq"),
        ("gptq-auto-round-w4", "gptq"),
        ("gptq-gptqmodel-w4-act-order-v2", "gptq"),
        ("compressed-tensors-w4", "compressed-tensors"),
        ("compressed-tensors-w3-asym", "compressed-tensors"),
        ("compressed-tensors-w6-channel", "compressed-tensors"),
        ("compressed-tensors-mxfp4", "compressed-tensors"),
    ],
)
def test_there_and_back_gives_the_same_bytes(tmp_path, name, tool):
    convert_checkpoint(DATA / name, tmp_path / "lowbit")
    convert_checkpoint(tmp_path / "lowbit", tmp_path / "back", tool)
    before, after = (load_file(folder / "model.safetensors") for folder in (DATA / name, tmp_path / "back"))
    assert set(before) == {n for n in after if n in before or not n.endswith("g_idx")}
    assert all(same(after[n], tensor) for n, tensor in before.items())
    with ForeignReader(tmp_path / "back") as reader:
        assert {n: sha(reader.dequantize(n, torch.float32)) for n in reader.entries} == expected(name)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == tool and config["hidden_size"] == 64


@pytest.mark.parametrize("target", ["gptq", "compressed-tensors"])
def test_awq_becomes_other_files_with_the_same_weights(tmp_path, target):
    convert_checkpoint(DATA / "awq-auto-round", tmp_path / "c", target)
    with ForeignReader(tmp_path / "c") as reader, ForeignReader(DATA / "awq-auto-round") as source:
        assert {n: sha(reader.dequantize(n, torch.float32)) for n in reader.entries} == expected("awq-auto-round")
        assert reader.plain == source.plain and all(same(reader.get(n), source.get(n)) for n in source.plain)
        config = reader.files.config["quantization_config"]
    if target == "gptq":  # zeros of 0 are ambiguous in version 1
        assert config["checkpoint_format"] == "gptq_v2" and config["sym"] is False and config["desc_act"] is False
    else:
        assert config["ignore"] == ["lm_head"] and config["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_dequantized_weights_are_plain(tmp_path):
    report = convert_checkpoint(DATA / "bitsandbytes-nf4-nested", tmp_path / "c", "dequantized")
    assert set(report.layers.values()) == {"float16"}
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    digests = expected("bitsandbytes-nf4-nested")
    assert {n: sha(tensors[f"{n}.weight"]) for n in digests} == digests
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "c")(IDS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        (
            "bitsandbytes-nf4-nested",
            "lowbit",
            r"_proj and 6 more: the 16 values of bitsandbytes' NF4.*Nothing was written$",
        ),
        ("modelopt-nvfp4", "compressed-tensors", r"power-of-two scales \(MX\), not w4e2m1a16_g16.*--to lowbit can hold"),
        ("gptq-gptqmodel-w4-act-order-v2", "awq", r"and 6 more: AWQ files have no channel order.*--to lowbit can hold"),
        (
            "gptq-gptqmodel-w4-act-order-v2",
            "compressed-tensors",
            r"and 6 more: compressed-tensors files as written here have no channel order",
        ),
        ("compressed-tensors-fp8", "gptq", r"GPTQ files hold integers, not fp8_e4m3.*--to dequantized"),
        ("compressed-tensors-w6-channel", "gptq", r"codes of 2, 3, 4, 8 bits, not int6"),
    ],
)
def test_what_the_target_cannot_hold_is_said_and_nothing_stays(tmp_path, name, target, message):
    with pytest.raises(CheckpointError, match=message) as error:
        convert_checkpoint(DATA / name, tmp_path / "c", target)
    assert str(DATA / name) in str(error.value)
    assert list(tmp_path.iterdir()) == []


def edited(name, tmp_path, change, tensors=None):
    """A copy of a folder with other settings for activations in its config and more tensors."""
    folder = tmp_path / "edited"
    shutil.copytree(DATA / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        save_file(held | tensors(held), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_activations_that_no_kernel_takes_stay_in_16_bits(tmp_path):
    source = edited("compressed-tensors-fp8", tmp_path, {"num_bits": 4})
    report = convert_checkpoint(source, tmp_path / "c")
    assert any("activations stay in 16 bits, the files asked for fp4_e2m1" in line for line in report.lines())
    assert set(report.layers.values()) == {"w8e4m3a16_t"}
    report = convert_checkpoint(DATA / "compressed-tensors-fp8", tmp_path / "d", "compressed-tensors")
    config = json.loads((tmp_path / "d" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["input_activations"]["type"] == "float" and group["input_activations"]["dynamic"] is True
    assert report.notes == []


@pytest.mark.parametrize("static", [False, True])
def test_activations_in_8_bits_run_as_the_files_ask(tmp_path, static):
    """Compares with a model of decoded weights whose layers' inputs are rounded by hand to torch's float8."""
    source, given = DATA / "compressed-tensors-fp8", {}
    if static:
        source = edited(
            "compressed-tensors-fp8", tmp_path, {"dynamic": False, "strategy": "tensor"},
            lambda held: {n.replace("weight_scale", "input_scale"): torch.tensor([0.0078125 + 0.001 * i]).bfloat16()
                          for i, n in enumerate(sorted(held)) if n.endswith("weight_scale")},
        )  # fmt: skip
        given = {n.removesuffix(".input_scale"): t.float() for n, t in load_file(source / "model.safetensors").items()
                 if n.endswith("input_scale")}  # fmt: skip
        assert len(given) == 7
    report = convert_checkpoint(source, tmp_path / "own")
    assert report.notes == [] and set(report.layers.values()) == {"w8e4m3a8e4m3_t_ct"}
    convert_checkpoint(source, tmp_path / "plain", "dequantized")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)

    def by_hand(name):
        def hook(module, args):
            scale = given[name] if static else args[0].abs().amax(-1, keepdim=True) / 448
            return ((args[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

        return hook

    for name in report.layers:
        plain.get_submodule(name).register_forward_pre_hook(by_hand(name))
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    expected = plain(IDS).logits
    assert (own(IDS).logits - expected).norm() < 2e-2 * expected.norm()
    if static:
        assert all(torch.equal(own.get_submodule(name).activation_scale, scale) for name, scale in given.items())
        convert_checkpoint(tmp_path / "own", tmp_path / "back", "compressed-tensors")
        back, first = load_file(tmp_path / "back" / "model.safetensors"), load_file(source / "model.safetensors")
        assert back.keys() == first.keys() and all(torch.equal(back[n].float(), t.float()) for n, t in first.items())
        config = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
        asked = config["config_groups"]["group_0"]["input_activations"]
        assert (asked["dynamic"], asked["strategy"], asked["num_bits"]) == (False, "tensor", 8)


@pytest.mark.parametrize("static", [False, True])
def test_asymmetric_activations_run_as_the_files_ask(tmp_path, static):
    """Compares with compressed-tensors' definition: q = clamp(round(x / scale + zero point)), x = (q - zero point) * scale."""
    name, change, tensors, given = "compressed-tensors-w8a8-asym", {"symmetric": False}, None, {}
    if static:
        change |= {"dynamic": False, "strategy": "tensor"}

        def tensors(held):
            layers = [n.removesuffix("weight_scale") for n in sorted(held) if n.endswith("weight_scale")]
            made = {f"{n}input_scale": torch.tensor([0.03 + 0.001 * i]) for i, n in enumerate(layers)}
            return made | {f"{n}input_zero_point": torch.tensor([i - 4], dtype=torch.int8) for i, n in enumerate(layers)}

    source = edited(name, tmp_path, change, tensors)
    if static:
        held = load_file(source / "model.safetensors")
        given = {n.removesuffix(".input_scale"): (held[n], held[n.replace("scale", "zero_point")].float()) for n in held
                 if n.endswith("input_scale")}  # fmt: skip
    report = convert_checkpoint(source, tmp_path / "own")
    assert report.notes == [] and set(report.layers.values()) == {"w8a8_z_az_ct"}
    convert_checkpoint(source, tmp_path / "plain", "dequantized")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)

    def by_hand(name):
        def hook(module, args):
            if static:
                scale, zero = given[name]
            else:
                low, high = (f(args[0], -1, keepdim=True).clamp(*c) for f, c in ((torch.amin, (None, 0)), (torch.amax, (0,))))
                scale = (high - low) / 255
                zero = (-128 - low / scale).round()
            return (((args[0] / scale + zero).round().clamp(-128, 127) - zero) * scale,)

        return hook

    for layer in report.layers:
        plain.get_submodule(layer).register_forward_pre_hook(by_hand(layer))
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    expected = plain(IDS).logits
    assert (own(IDS).logits - expected).norm() < 5e-3 * expected.norm()
    convert_checkpoint(tmp_path / "own", tmp_path / "back", "compressed-tensors")
    back, first = load_file(tmp_path / "back" / "model.safetensors"), load_file(source / "model.safetensors")
    assert back.keys() == first.keys() and all(torch.equal(back[n].float(), t.float()) for n, t in first.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    asked = config["config_groups"]["group_0"]["input_activations"]
    assert (asked["symmetric"], asked["dynamic"]) == (False, not static)


def test_existing_folders_and_unknown_targets(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="not empty"):
        convert_checkpoint(DATA / "awq-auto-round", tmp_path / "c")
    assert (tmp_path / "c" / "mine").exists()
    with pytest.raises(CheckpointError, match="no part of a checkpoint: mine"):
        convert_checkpoint(DATA / "awq-auto-round", tmp_path / "c", overwrite=True)
    (tmp_path / "c" / "mine").unlink()
    said = []
    for to in ("dequantized", "lowbit"):
        convert_checkpoint(DATA / "awq-auto-round", tmp_path / "c", to, overwrite=True, say=said.append)
    assert len(said) == 1 and "c, an unquantized checkpoint, 0." in said[0]
    with pytest.raises(CheckpointError, match="is a lowbit checkpoint already"):
        convert_checkpoint(tmp_path / "c", tmp_path / "d")
    with pytest.raises(CheckpointError, match="converted to lowbit, gptq.*not to 'onnx'"):
        convert_checkpoint(DATA / "awq-auto-round", tmp_path / "d", "onnx")
    save_tiny(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="is not quantized"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "d")
    with pytest.raises(CheckpointError, match="no such folder"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "d")


def test_what_the_model_has_no_place_for(tmp_path):
    """Zero biases and scales of the KV cache are dropped with a note; a layer that the model does not have is refused."""
    shutil.copytree(DATA / "awq-auto-round", tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    tensors = load_file(file)
    attention = "model.layers.0.self_attn"
    extra = {f"{attention}.q_proj.bias": torch.zeros(64).half(), f"{attention}.k_scale": torch.ones(1)}
    save_file(tensors | extra, file)
    report = convert_checkpoint(tmp_path / "c", tmp_path / "d")
    assert [note.split(":")[0] for note in report.notes] == [f"{attention}.k_scale", f"{attention}.q_proj.bias"]
    with CheckpointReader(tmp_path / "d") as reader:
        assert not set(extra) & set(reader.names())
    renamed = {n.replace("q_proj", "query"): t for n, t in tensors.items()}
    save_file(renamed, file)
    missing = r"no file has .*q_proj\.weight, which Llama.* needs; Llama.* has no place for .*query\.weight"
    with pytest.raises(CheckpointError, match=missing):
        convert_checkpoint(tmp_path / "c", tmp_path / "e")


def lowbit_checkpoint(folder, schemes):
    """Writes a tiny model whose layers have the schemes given by the ends of their names."""
    model = tiny_llama(tied=False)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    entries = {}
    with CheckpointWriter(folder) as writer:
        for name, tensor in model.state_dict().items():
            layer = name.removesuffix(".weight")
            if layer not in linears:
                writer.add(name, tensor)
                continue
            scheme = next((s for end, s in schemes.items() if layer.endswith(end)), schemes[""])
            q = rtn(tensor, scheme)
            entries[layer] = LayerEntry.of(q)
            for suffix, part in layer_tensors(q).items():
                writer.add(f"{layer}.{suffix}", part)
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        writer.finish(config, Manifest(parse_scheme(schemes[""]), entries, ("lm_head",)))


@pytest.mark.parametrize("target", ["gptq", "compressed-tensors"])
def test_layers_of_several_schemes(tmp_path, target):
    lowbit_checkpoint(tmp_path / "c", {"q_proj": "w8a16_g32", "": "w4a16_g16"})
    report = convert_checkpoint(tmp_path / "c", tmp_path / "d", target)
    assert set(report.layers.values()) == {"w8a16_g32", "w4a16_g16"}
    with CheckpointReader(tmp_path / "c") as before, ForeignReader(tmp_path / "d") as after:
        for name in before.manifest.layers:
            assert torch.equal(before.layer(name).dequantize(), after.layer(name).dequantize()), name
        config = after.files.config["quantization_config"]
    if target == "gptq":
        key = r"+:^model\.layers\.0\.self_attn\.q_proj$"
        assert config["bits"] == 4 and config["dynamic"][key] == {"bits": 8, "group_size": 32}
    else:
        assert len(config["config_groups"]) == 2
        assert "model.layers.0.self_attn.q_proj" in config["config_groups"]["group_0"]["targets"]


def test_awq_files_have_groups_of_one_size(tmp_path):
    lowbit_checkpoint(tmp_path / "c", {"q_proj": "w4a16_g32", "": "w4a16_g16"})
    with pytest.raises(CheckpointError, match=r"k_proj and 11 more: AWQ files have groups of one size, here 16 and before 32"):
        convert_checkpoint(tmp_path / "c", tmp_path / "d", "awq")


GGUF_CONFIG = LlamaConfig(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=True, max_position_embeddings=256,
)  # fmt: skip


def write_gguf(path, model, plain=False):
    """Writes a GGUF file of a tiny Llama with the package gguf, as llama.cpp's converter lays it out. With `plain`, weights are
    in 16 bits."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))][: config.vocab_size]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kinds = {"q_proj": "Q5_0", "k_proj": "Q8_0", "embed_tokens": "Q8_0", "up_proj": "Q4_1", "down_proj": "Q5_1"}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        data = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        kind = gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], "Q4_0") if data.ndim == 2 else "F32"]
        kind = gguf.GGMLQuantizationType.F16 if plain and data.ndim == 2 else kind
        new = names.get_name(name.removesuffix(".weight")) + ".weight"
        writer.add_tensor(new, gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_gguf_becomes_a_model_that_transformers_agrees_with(tmp_path):
    """Embedding and LM head share quantized rows; q and k rows are where Transformers' own reader puts them."""
    model = LlamaForCausalLM(GGUF_CONFIG)
    write_gguf(tmp_path / "m.gguf", model)
    report = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "c")
    assert report.source == "gguf" and set(report.layers.values()) == {
        "w4a16_g32", "w5a16_g32", "w8a16_g32", "w4a16_g32_fz", "w5a16_g32_fz",
    }  # fmt: skip
    with CheckpointReader(tmp_path / "c") as reader:
        reader.check()
        assert reader.manifest.tied == {"lm_head": "model.embed_tokens"}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    for name, module in ours.named_modules():
        if isinstance(module, PackedWeight):
            assert torch.equal(module.quant_tensor().dequantize(), theirs.get_submodule(name).weight), name
    logits = theirs(IDS).logits
    assert torch.allclose(ours(IDS).logits, logits, atol=1e-5 * float(logits.abs().max()))
    with pytest.raises(CheckpointError, match="zero points in GPTQ files are integers"):
        convert_checkpoint(tmp_path / "m.gguf", tmp_path / "d", "gptq")


def test_plain_weights_have_the_type_that_rounds_least(tmp_path):
    """GGUF files state no 16-bit type. Plain weights become fp16 where that rounds less, and bf16 where fp16 would overflow.
    The choice and its error are reported."""
    model = LlamaForCausalLM(GGUF_CONFIG)
    write_gguf(tmp_path / "m.gguf", model)
    report = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "c", "dequantized")
    assert set(report.layers.values()) == {"float16"}
    said = next(line for line in report.lines() if "no type of weights is stated; float16 is taken" in line)
    made = load_file(tmp_path / "c" / "model.safetensors")
    exact = GgufLayerReader(tmp_path / "m.gguf")
    errors = []
    for name in exact.entries:
        weight = exact.dequantize(name, torch.float32)
        errors.append(float((made[f"{name}.weight"].float() - weight).abs().max() / weight.abs().max()))
    assert max(errors) <= 2**-11 and any(f"by {max(errors):.1e} of a layer's largest" in line for line in report.lines())
    assert f"{max(errors):.1e}" in said and "bfloat16: " in said
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "float16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "c").dtype == torch.float16

    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 1e6
    write_gguf(tmp_path / "m.gguf", model)
    report = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "d", "dequantized")
    assert set(report.layers.values()) == {"bfloat16"}
    assert any("bfloat16 is taken" in line and "(float16: inf)" in line for line in report.lines())


def test_plain_weights_beyond_the_stated_type_are_refused(tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(DATA / "compressed-tensors-w6-channel", folder)
    held = load_file(folder / "model.safetensors")
    held = {n: t.float() * (1e7 if n.endswith("up_proj.weight_scale") else 1) if "scale" in n else t for n, t in held.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"up_proj: weights up to .* are beyond float16, the type that config\.json states"
    ):
        convert_checkpoint(folder, tmp_path / "d", "dequantized")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("name", ["awq-auto-round", "bitsandbytes-nf4-nested", "tensorrt-llm-modelopt"])
def test_no_source_without_a_type_is_guessed(tmp_path, name):
    shutil.copytree(DATA / name, tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config.pop("dtype", None), config.pop("torch_dtype", None)
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(tmp_path / "c", tmp_path / "d", "dequantized")
    assert set(report.layers.values()) == {"float16"}
    assert any(line.startswith("no type of weights is stated; float16 is taken") for line in report.lines())
