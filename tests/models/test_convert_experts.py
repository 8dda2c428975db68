"""Whole checkpoints with experts. They are read into Transformers' model, or dequantized into files that Transformers loads."""

from __future__ import annotations

import json
import operator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from typer.testing import CliRunner

import lowbit
from lowbit.checkpoint import CheckpointError, ForeignReader
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.gptq import Gptq
from lowbit.checkpoint.mxfp4 import GROUP
from lowbit.cli.commands import app
from lowbit.formats import PerBlock
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.expert_names import expert_modules
from lowbit.models.layer_importer import LayerImporter
from lowbit.models.load import check_checkpoint
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.source import resolve
from lowbit.nn.experts import QuantExperts
from lowbit.quantize import rtn
from tests.models.mixtures import tiny_mixture
from tests.tiny import tiny_tokenizer

IDS = torch.tensor([[5, 17, 60, 9, 33, 2, 80, 41]])


def quantized(folder, model, quantization, write):
    """Writes the files of a model whose experts and attention are quantized. `write` returns the tensors of one weight by
    suffix."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and ("_proj" in layer or layer.rpartition(".")[2] in ("w1", "w2", "w3")):
            tensors |= {f"{layer}.{suffix}": t.contiguous() for suffix, t in write(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


TOOLS = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False},
        lambda w: Gptq(4, 16, symmetric=True).write(rtn(w, "w4a16_g16")),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        lambda w: Fp8(PerBlock(16, 16), "weight_scale_inv").write(rtn(w, "w8e4m3a16_b16x16")),
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "glm4_moe"])
def test_experts_one_by_one(tool, name, tmp_path):
    """The experts that an importer gives for the model's module equal the parameters of the dequantized model, as Transformers
    loads it."""
    folder = quantized(tmp_path / "theirs", tiny_mixture(name), *TOOLS[tool])
    importer = LayerImporter(resolve(folder).open_quantized(), "lowbit")
    importer.require_complete()
    convert_checkpoint(folder, tmp_path / "plain", "dequantized")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    modules = expert_modules(model)
    assert len(importer.reader.experts) == len(modules)
    for layer in importer.reader.experts:
        assert importer.judge_experts(layer), importer.refusals()
        module = modules[importer.expert_module(layer).name]
        gate_up, down = importer.expert_layer(layer).dequantize()
        for parameter, own in ((module.first, gate_up), (module.down, down)):
            assert torch.equal(model.get_parameter(parameter), own), parameter
    check_loaded(folder, tmp_path / "ours", model)


@torch.no_grad()
def check_loaded(source, target, plain):
    """Checks that a checkpoint loads directly and after conversion to lowbit's files, with the same experts. Their weights must
    be those of `plain`."""
    report = convert_checkpoint(source, target)
    direct, files = (lowbit.load(folder, device="cpu", dtype=torch.float32) for folder in (source, target))
    assert not check_checkpoint(target) and not check_checkpoint(source)
    for name, module in expert_modules(plain).items():
        experts = files.get_submodule(name)
        assert isinstance(experts, QuantExperts) and isinstance(direct.get_submodule(name), QuantExperts)
        for parameter in (module.first, module.down):
            part = parameter.rpartition(".")[2]
            q = experts.packed()[part].expert_tensor()
            assert report.layers[parameter] == q.scheme.name
            dense = q.dequantize().transpose(1, 2) if module.transposed else q.dequantize()
            assert torch.equal(dense.to(plain.dtype), plain.get_parameter(parameter)), parameter
            same = direct.get_submodule(name).packed()[part].expert_tensor()
            assert torch.equal(same.packed, q.packed) and torch.equal(same.scale, q.scale)
            if module.biased:
                assert torch.equal(files.get_parameter(f"{parameter}_bias"), plain.get_parameter(f"{parameter}_bias").float())
    assert torch.equal(direct(IDS).logits, files(IDS).logits)
    assert torch.allclose(files(IDS).logits, plain.float()(IDS).logits, atol=2e-3)


def mxfp4(folder):
    """Writes gpt-oss as its own files: 16 bits, except for the experts, which have random MXFP4 blocks. Returns the tensors."""
    model = tiny_mixture("gpt_oss", torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, module in expert_modules(model).items():
        for parameter in (module.first, module.down):
            experts, k, n = tensors.pop(parameter).shape
            blocks = torch.randint(0, 256, (experts, n, k // GROUP, 16), generator=g, dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, n, k // GROUP), generator=g, dtype=torch.uint8)
            tensors |= {f"{parameter}_blocks": blocks, f"{parameter}_scales": scales}
        assert f"{name}.gate_up_proj_bias" in tensors
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@torch.no_grad()
def test_gpt_oss(tmp_path):
    """gpt-oss is dequantized into files that Transformers loads. The weights equal, bit for bit, those that Transformers
    dequantizes itself."""
    tensors = mxfp4(tmp_path / "theirs")
    assert not check_checkpoint(tmp_path / "theirs")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "plain", "dequantized")
    assert report.source == "mxfp4" and set(report.layers.values()) == {"bfloat16"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    for module in expert_modules(model).values():
        for parameter in (module.first, module.down):
            theirs = convert_moe_packed_tensors(tensors[f"{parameter}_blocks"], tensors[f"{parameter}_scales"])
            assert torch.equal(model.get_parameter(parameter), theirs), parameter
            assert torch.equal(model.get_parameter(f"{parameter}_bias"), tensors[f"{parameter}_bias"])
    direct = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")  # without a GPU, Transformers dequantizes
    assert torch.equal(direct(IDS).logits, model(IDS).logits)
    check_loaded(tmp_path / "theirs", tmp_path / "ours", model)
    message = "compressed-tensors files hold experts one by one, this architecture's are stacked"
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "ours", tmp_path / "other", "compressed-tensors")


def test_files_of_another_model_are_refused(tmp_path):
    mxfp4(tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    message = r"the files have experts of \[4, 64, 64\], by config.json .*gate_up_proj is \[8, 64, 64\]"
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "c", tmp_path / "d", "dequantized")
    (tmp_path / "c" / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    )
    with pytest.raises(CheckpointError, match=r"no place for .*layers\.1"):
        convert_checkpoint(tmp_path / "c", tmp_path / "d", "dequantized")


def test_biases_that_the_model_does_not_have(tmp_path):
    """AutoGPTQ writes a bias of zeros for every layer, which is left out. Biases with other values are refused."""
    folder = quantized(tmp_path / "c", tiny_mixture("qwen3_moe"), *TOOLS["gptq"])
    tensors = load_file(folder / "model.safetensors")
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight") and ".experts." in name]
    for value, message in ((0.0, ""), (1.0, "have no biases, and these are not 0")):
        biases = {f"{name}.bias": torch.full((tensors[f"{name}.scales"].shape[1],), value) for name in layers}
        save_file(tensors | biases, folder / "model.safetensors")
        importer = LayerImporter(resolve(folder).open_quantized(), "lowbit")
        layer = next(iter(importer.reader.experts))
        if message:
            with pytest.raises(CheckpointError, match=message):
                importer.expert_layer(layer)
        else:
            experts = importer.expert_layer(layer)
            assert experts.gate_up_bias is None and experts.down_bias is None
            assert "biases are left out" in importer.notes()[-1]


GGUF = {"mixtral": ("llama", "LLAMA"), "qwen2_moe": ("qwen2moe", "QWEN2MOE"), "qwen3_moe": ("qwen3moe", "QWEN3MOE")}
KINDS = {"gate_exps": "Q4_0", "up_exps": "Q4_0", "down_exps": "MXFP4", "attn_q": "Q8_0", "attn_v": "Q5_0", "token_embd": "Q8_0"}


def write_gguf(path, name):
    """Writes a GGUF file of a tiny mixture as llama.cpp's converter lays it out. Returns the values of its tensors by
    Transformers' names."""
    gguf = pytest.importorskip("gguf")
    model = tiny_mixture(name)
    config, (architecture, _) = model.config, GGUF[name]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256), writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers), writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads), writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16), writer.add_layer_norm_rms_eps(config.rms_norm_eps), writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size), writer.add_expert_count(4), writer.add_expert_used_count(2)
    writer.add_tokenizer_model("llama" if name == "mixtral" else "gpt2")
    if name == "mixtral":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))][: config.vocab_size]
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[6] * (len(tokens) - 3)])
    else:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        tokens = [*list(bytes_to_unicode().values())[: config.vocab_size - 2], '!"', "<|endoftext|>"]
        writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
        writer.add_token_types([*[1] * (len(tokens) - 1), 3])
        writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1), writer.add_eos_token_id(2)
    values = {}

    def add(new, data, key):
        kind = next((kind for part, kind in KINDS.items() if part in new), "Q4_0")
        kind = gguf.GGMLQuantizationType["F32" if "ffn_gate_inp" in new or data.ndim == 1 else kind]
        packed = gguf.quants.quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(new, packed, raw_dtype=kind)
        values[key] = torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(np.float32))

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[GGUF[name][1]], config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        number = key.split(".")[2] if ".layers." in key else ""
        if key.endswith("experts.gate_up_proj"):
            gate, up = np.split(data, 2, axis=1)
            add(f"blk.{number}.ffn_gate_exps.weight", gate, "gate"), add(f"blk.{number}.ffn_up_exps.weight", up, "up")
            values[key] = torch.cat([values.pop("gate"), values.pop("up")], dim=1)
        elif key.endswith("experts.down_proj"):
            add(f"blk.{number}.ffn_down_exps.weight", data, key)
        elif key.endswith("shared_expert_gate.weight"):
            add(f"blk.{number}.ffn_gate_inp_shexp.weight", data[0], key)
            values[key] = values[key][None]
        elif key.endswith("mlp.gate.weight"):
            add(f"blk.{number}.ffn_gate_inp.weight", data, key)
        else:
            new = names.get_name(key.rpartition(".")[0]) + "." + key.rpartition(".")[2]
            heads = {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2]) if name == "mixtral" else None
            rows = np.arange(data.shape[0])
            if heads:
                rows = rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            add(new, data[rows], key)
            values[key] = values[key][np.argsort(rows)]
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return values


@torch.no_grad()
@pytest.mark.parametrize("name", GGUF)
def test_gguf(name, tmp_path):
    """Every tensor is where Transformers' model has it, with the weights of the blocks."""
    values = write_gguf(tmp_path / "m.gguf", name)
    report = convert_checkpoint(tmp_path / "m.gguf", tmp_path / "plain", "dequantized")
    dtype = torch.bfloat16 if "bfloat16" in report.layers.values() else torch.float16
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype)
    assert model.config.model_type == name
    assert set(model.state_dict()) == set(values)
    for key, value in model.state_dict().items():
        assert torch.equal(value.float(), values[key].to(dtype).float()), key
    loaded = lowbit.load(tmp_path / "m.gguf", device="cpu", dtype=torch.float32)
    experts = next(module for module in loaded.modules() if isinstance(module, QuantExperts))
    assert experts.packed()["down_proj"].scheme_name == "w4e2m1a16_g32"
    assert torch.allclose(loaded(IDS).logits, model.float()(IDS).logits, atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("to", ["gptq", "compressed-tensors", "awq"])
def test_ours_become_theirs(to, tmp_path):
    """lowbit's stacked experts are written as single experts, under the names of the architecture. Reading them back gives the
    same experts."""
    for name in ("mixtral", "qwen3_moe"):
        model = tiny_mixture(name)
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        ours, theirs = tmp_path / f"{name}-ours", tmp_path / f"{name}-theirs"
        quantize_checkpoint(tmp_path / name, ours, "w4a16_g16")
        convert_checkpoint(ours, theirs, to)
        names = {n.removesuffix(".weight") for n in load_file(tmp_path / name / "model.safetensors") if ".experts." in n}
        with ForeignReader(theirs) as reader:
            assert {n for n in reader.entries if ".experts." in n} == names
        one, two = (lowbit.load(folder, device="cpu", dtype=torch.float32) for folder in (ours, theirs))
        assert torch.allclose(one(IDS).logits, two(IDS).logits, atol=1e-5)


def test_a_gguf_layer_that_lacks_a_stack(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    data = gguf.quants.quantize(np.zeros((4, 32, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.ffn_up_exps.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_exps\.weight: missing"):
        resolve(tmp_path / "m.gguf").open_quantized()


def test_foreign_reader_lists_both(tmp_path):
    folder = quantized(tmp_path / "c", tiny_mixture("mixtral"), *TOOLS["gptq"])
    with ForeignReader(folder) as reader:
        assert list(reader.experts) == [f"model.layers.{i}.block_sparse_moe.experts" for i in range(2)]
        assert "model.layers.1.block_sparse_moe.experts.3.w2" in reader.entries


def test_inspect_lists_experts(tmp_path):
    """`lowbit inspect` lists experts as they are loaded. The bytes are those of lowbit's own files, biases included."""
    mxfp4(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    contents = []
    for folder in ("theirs", "ours"):
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / folder), "--check", "--json", str(tmp_path / "rows.json")])
        assert result.exit_code == 0, result.output
        contents.append(json.loads((tmp_path / "rows.json").read_text()))
    theirs, ours = contents
    assert theirs["tool"] == "mxfp4" and [row["experts"] for row in theirs["layers"]] == [4] * 4
    key = operator.itemgetter("layer")
    assert sorted(theirs["layers"], key=key) == sorted(ours["layers"], key=key)
    assert theirs["other_bytes"] == ours["other_bytes"]


@torch.no_grad()
def test_experts_in_16_bits_beside_quantized_attention(tmp_path):
    """Files whose tool left all experts in 16 bits load as before."""
    config, write = TOOLS["gptq"]
    for name in ("mixtral", "gpt_oss"):
        model = tiny_mixture(name)
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        tensors = {}
        for key, tensor in load_file(tmp_path / name / "model.safetensors").items():
            layer = key.removesuffix(".weight")
            parts = {f".{k}": t for k, t in write(tensor).items()} if layer.endswith(("q_proj", "o_proj")) else {"": tensor}
            tensors |= {(layer if suffix else key) + suffix: t.contiguous() for suffix, t in parts.items()}
        save_file(tensors, tmp_path / name / "model.safetensors")
        stated = json.loads((tmp_path / name / "config.json").read_text()) | {"quantization_config": config}
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
        loaded = lowbit.load(tmp_path / name, device="cpu", dtype=torch.float32)
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}-ours")
        ours = lowbit.load(tmp_path / f"{name}-ours", device="cpu", dtype=torch.float32)
        assert not any(isinstance(module, QuantExperts) for module in loaded.modules())
        for module in expert_modules(model).values():
            assert torch.equal(loaded.get_parameter(module.first), model.get_parameter(module.first))
        assert torch.equal(loaded(IDS).logits, ours(IDS).logits)
