"""Reading LoRA adapters. PEFT's own files are read; damaged and unsupported ones are refused, with their name."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.checkpoint import CheckpointError
from lowbit.models.adapter import read_adapter
from tests.adapters import ALL, linears, write_adapter
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama(tied=False, dtype=torch.float32)


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def changed(folder, **fields):
    (folder / "adapter_config.json").write_text(json.dumps(config_of(folder) | fields))
    return folder


@pytest.mark.parametrize("rslora", [False, True])
def test_files_of_peft(model, tmp_path, rslora):
    """All fields that PEFT writes are known, and the matrices give its own change of the weights."""
    peft = pytest.importorskip("peft", reason="PEFT writes these files")
    pattern = {"model.layers.0.self_attn.q_proj": 8}
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", use_rslora=rslora, rank_pattern=pattern,
        alpha_pattern={"mlp.down_proj": 3.0}, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(tiny_llama(tied=False, dtype=torch.float32), config)
    adapted.save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path)
    assert set(adapter.layers) == set(linears(model)) and adapter.rank == 8
    for path, layer in adapter.layers.items():
        delta = adapted.base_model.model.get_submodule(path).get_delta_weight("default")
        assert torch.allclose(layer.b @ layer.a, delta, atol=1e-6), path


def test_scaling(model, tmp_path):
    folder = write_adapter(tmp_path, model, ("o_proj",), rank=4, lora_alpha=6, dtype=torch.bfloat16)
    stored = load_file(str(folder / "adapter_model.safetensors"))[
        "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    ]
    for rslora, factor in ((False, 1.5), (True, 3.0)):
        layer = read_adapter(changed(folder, use_rslora=rslora)).layers["model.layers.1.self_attn.o_proj"]
        assert torch.equal(layer.b, stored.float() * factor) and layer.a.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"), ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"), ({"peft_type": None}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"), ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"), ({"something_new": 7}, "something_new=7"),
        ({"r": 0}, "r is 0"), ({"r": True}, "r is True"), ({"lora_alpha": None}, "lora_alpha is None"),
        ({"rank_pattern": [1]}, "rank_pattern"), ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern['q_proj'] is '3'"),
        ({"alpha_pattern": {"(": 3}}, "no regular expression"), ({"target_modules": None}, "target_modules is None"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens'"),
        ({"r": 8}, "has rank 4, adapter_config.json says 8"), ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_no_lora_is_refused_by_name(model, tmp_path, fields, named):
    folder = changed(write_adapter(tmp_path, model, ALL), **fields)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder)
    assert named in str(caught.value) and "adapter_" in str(caught.value)


def test_damaged_files(model, tmp_path):
    folder = write_adapter(tmp_path / "a", model, ("q_proj",))
    path = folder / "adapter_model.safetensors"
    good = load_file(str(path))
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    cases = {
        "expected base_model.model": {**good, "model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)},
        "an embedding's": {**good, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 64)},
        "belong together": {name: tensor for name, tensor in good.items() if name != first},
        "lora_A is [r, K]": good | {first: torch.zeros(3, 64)},
        "NaN or infinities": good | {first: torch.full((4, 64), torch.nan)},
        "int32": good | {first: torch.zeros(4, 64, dtype=torch.int32)},
        "no tensors": {},
    }
    for message, tensors in cases.items():
        save_file(tensors, str(path))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_adapter(folder)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapter(folder)
    path.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle"):
        read_adapter(folder)
    with pytest.raises(CheckpointError, match="adapter is a folder"):
        read_adapter(tmp_path)
