"""TensorRT-LLM's checkpoints: ModelOpt's files are read as ModelOpt simulates them and written back byte by byte."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lowbit import convert_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import parse_scheme
from lowbit.models.tensorrt_llm import WEIGHTS
from lowbit.quantize import lorc, rtn
from tests.checkpoint.foreign import DATA
from tests.tiny import tiny_llama, with_channels

MODELOPT = DATA / "tensorrt-llm-modelopt"
LAYER = "model.layers.0"


def test_modelopt_files_compute_what_modelopt_simulates(tmp_path):
    report = convert_checkpoint(MODELOPT, tmp_path / "c")
    assert report.source == "tensorrt-llm" and set(report.layers.values()) == {"w4a16_g128"} and len(report.layers) == 7
    assert report.notes == ["config.json states no rotary_base; 10000 is taken"]
    expected = json.loads((MODELOPT / "expected.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([expected["ids"]])).logits[0]
    truth = torch.tensor(expected["logits"])
    # ModelOpt simulates in fp16, with scales and factors as rounded for the files. An exchanged layer or factor is off by 0.3
    # or more.
    assert (logits - truth).norm() < 0.01 * truth.norm()


def test_weights_by_hand(tmp_path):
    """Decodes byte by byte. A byte has two rows, the even row in its low bits. Codes are signed, a scale is for 128 columns,
    and x is first multiplied by the factors."""
    tensors = load_file(MODELOPT / WEIGHTS)
    base = "transformer.layers.0.attention.qkv"
    weight, scale, factor = (tensors[f"{base}.{s}"] for s in ("weight", "weights_scaling_factor", "prequant_scaling_factor"))
    convert_checkpoint(MODELOPT, tmp_path / "c")
    with CheckpointReader(tmp_path / "c") as reader:
        q, k, v = (reader.layer(f"{LAYER}.self_attn.{name}_proj") for name in "qkv")
    assert [x.shape for x in (q, k, v)] == [(128, 128), (64, 128), (64, 128)]
    for row, column in ((0, 0), (1, 5), (127, 127), (128, 3), (191, 64), (192, 0), (255, 100)):
        byte = int(weight[row // 2, column]) & 255
        nibble = byte >> 4 if row % 2 else byte & 15
        value = (nibble - 16 if nibble > 7 else nibble) * float(scale[row, 0]) * float(factor[column])
        part, at = (q, row) if row < 128 else (k, row - 128) if row < 192 else (v, row - 192)
        assert abs(float(part.dequantize(torch.float64)[at, column]) - value) < 1e-7
    with CheckpointReader(tmp_path / "c") as reader:
        gate = reader.layer(f"{LAYER}.mlp.gate_proj")
    assert torch.equal(gate.scale, tensors["transformer.layers.0.mlp.fc.weights_scaling_factor"]), "fc goes through silu"


def test_there_and_back_gives_the_same_bytes(tmp_path):
    convert_checkpoint(MODELOPT, tmp_path / "c")
    convert_checkpoint(tmp_path / "c", tmp_path / "d", "tensorrt-llm")
    before, after = load_file(MODELOPT / WEIGHTS), load_file(tmp_path / "d" / WEIGHTS)
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    stated, ours = (json.loads((path / "config.json").read_text()) for path in (MODELOPT, tmp_path / "d"))
    same = (
        "architecture", "dtype", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size",
        "norm_epsilon", "vocab_size", "max_position_embeddings", "hidden_act", "head_size", "intermediate_size",
        "position_embedding_type", "mapping", "quantization",
    )  # fmt: skip
    assert {name: stated[name] for name in same} == {name: ours[name] for name in same} and ours["rotary_base"] == 10000.0
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", WEIGHTS]


def checkpoint(folder, scheme="w4a16_g64", change=lambda name, q: q, skip=(), tied=True, **config):
    """A tiny lowbit checkpoint of hidden size 64 with the decoder quantized."""
    model = tiny_llama(tied=tied)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    entries = {}
    with CheckpointWriter(folder) as writer:
        for name, tensor in model.state_dict().items():
            layer = name.removesuffix(".weight")
            if "mlp" in name:  # 176 become 192, a multiple of a group
                tensor = torch.nn.functional.pad(tensor, (0, 16, 0, 0) if "down" in name else (0, 0, 0, 16))
            if "proj" not in name or layer.endswith(tuple(skip) or "-"):
                if not (tied and layer == "lm_head"):
                    writer.add(name, tensor)
                continue
            q = change(layer, rtn(tensor, scheme))
            entries[layer] = LayerEntry.of(q)
            for suffix, part in layer_tensors(q).items():
                writer.add(f"{layer}.{suffix}", part)
        stated = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "intermediate_size": 192, **config}
        writer.finish(stated, Manifest(parse_scheme(scheme), entries, ("lm_head",)))
    return folder


def test_written_layers_without_factors(tmp_path):
    """Layers without factors get ones, a tied head is written in full, and reading the files restores the checkpoint."""
    source = checkpoint(tmp_path / "c", change=lambda name, q: with_channels(q, False, torch.float16) if "down" in name else q)
    convert_checkpoint(source, tmp_path / "d", "tensorrt-llm")
    tensors = load_file(tmp_path / "d" / WEIGHTS)
    assert bool((tensors["transformer.layers.0.mlp.fc.prequant_scaling_factor"] == 1).all())
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.vocab_embedding.weight"])
    convert_checkpoint(tmp_path / "d", tmp_path / "e")
    with CheckpointReader(source) as before, CheckpointReader(tmp_path / "e") as after:
        for name in before.manifest.layers:
            a, b = before.layer(name), after.layer(name)
            assert (
                (a.input_transform.pre_quant_scale is None)
                == (b.input_transform.pre_quant_scale is None)
                == ("down" not in name)
            )
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


def swap_factor(name, q):
    return with_channels(q, False, seed=1 if "k_proj" in name else 0) if "self_attn" in name else q


REFUSED = {
    "zeros": (dict(scheme="w4a16_g64_z"), r"stores \(8 - zero\) \* scale in 16 bits"),
    "channels": (dict(scheme="w4a16_pc"), "let TensorRT-LLM make them of the 16-bit model"),
    "8 bits": (dict(scheme="w8a16_g64"), "hold 4-bit integers in groups"),
    "groups": (dict(scheme="w4a16_g32"), "takes groups of 64 and 128, these are of 32"),
    "order": (dict(change=lambda name, q: with_channels(q, True, None)), "no channel order"),
    "low rank": (dict(change=lambda name, q: replace(q, low_rank=lorc(q.dequantize() + 1, q, 1))),
                 "no low-rank correction"),
    "factors": (dict(change=swap_factor), "q, k and v are one layer in TensorRT-LLM, and have different scales"),
    "kept": (dict(skip=("down_proj",)), "mlp.down_proj.weight: has no place .* quantized as a whole"),
    "model": (dict(model_type="mistral", architectures=["MistralForCausalLM"]), "models of the type 'mistral' are not written"),
    "biases": (dict(mlp_bias=True), "Llama models with biases"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_said(what, tmp_path):
    options, message = REFUSED[what]
    checkpoint(tmp_path / "c", **options)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "c", tmp_path / "d", "tensorrt-llm")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def edited(tmp_path, config=lambda c: None, tensors=lambda t: None):
    shutil.copytree(MODELOPT, tmp_path / "c")
    stated = json.loads((tmp_path / "c" / "config.json").read_text())
    config(stated)
    (tmp_path / "c" / "config.json").write_text(json.dumps(stated))
    values = load_file(tmp_path / "c" / WEIGHTS)
    tensors(values)
    save_file(values, tmp_path / "c" / WEIGHTS)
    return tmp_path / "c"


QKV, FC = "transformer.layers.0.attention.qkv", "transformer.layers.0.mlp.fc"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            lambda c: c["quantization"].update(quant_algo="W8A16"),
            None,
            "order of one generation of GPUs, which the files do not name",
        ),
        (lambda c: c["quantization"].update(quant_algo=None), None, "quant_algo None"),
        (lambda c: c["quantization"].update(has_zero_point=True), None, "weights in plain order have no zero points"),
        (lambda c: c["quantization"].update(group_size="big"), None, "group_size is a positive number, got 'big'"),
        (lambda c: c["mapping"].update(world_size=2), None, "split over 2 ranks"),
        (lambda c: c.update(architecture="GPTForCausalLM"), None, "read are checkpoints of LlamaForCausalLM, Mistral"),
        (lambda c: c.update(hidden_size=0), None, "hidden_size is a positive number, got 0"),
        (None, lambda t: t.update({f"{FC}.weight": t[f"{FC}.weight"].float()}), f"{FC}.weight: a matrix of int8"),
        (None, lambda t: t.pop(f"{FC}.weights_scaling_factor"), f"{FC}.weights_scaling_factor: missing"),
        (None, lambda t: t.update({f"{QKV}.weight": t[f"{QKV}.weight"][:-1].clone()}), f"{QKV}.*"),
        (
            None,
            lambda t: t[f"{FC}.weights_scaling_factor"].fill_(float("nan")),
            f"{FC}.weights_scaling_factor: some scales are not finite",
        ),
        (
            None,
            lambda t: t.update({"transformer.extra": t["transformer.ln_f.weight"].clone()}),
            "transformer.extra: has no counter",
        ),
    ],
)
def test_what_cannot_be_read_is_said(config, tensors, message, tmp_path):
    folder = edited(tmp_path, config or (lambda c: None), tensors or (lambda t: None))
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(folder, tmp_path / "d")
    assert not (tmp_path / "d").exists()
