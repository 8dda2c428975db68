"""Numbers in config.json, GGUF metadata or weights with which a model would compute nonsense. They give an error of one line,
never text with exit status 0."""

from __future__ import annotations

import json
import re
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import lowbit
from lowbit.checkpoint import CheckpointError
from lowbit.engine import RequestFailed
from lowbit.pipeline import Pipeline
from tests.models.test_bad_configs import assert_one_line
from tests.models.test_convert_checkpoint import GGUF_CONFIG, write_gguf
from tests.tiny import eager_llama, save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("numbers") / "plain", tied=False)


NAN, INF = float("nan"), float("inf")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FIELDS = [
    ({"rms_norm_eps": NAN}, "rms_norm_eps is nan, it has to be a number"),
    ({"rms_norm_eps": INF}, "rms_norm_eps is inf, it has to be from 0 to 1"),
    ({"rms_norm_eps": -1.0}, r"rms_norm_eps is -1\.0, it has to be from 0 to 1"),
    ({"rms_norm_eps": 1e30}, r"rms_norm_eps is 1e\+30, it has to be from 0 to 1"),
    ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776, it has to be at most 134,217,728 tokens"),
    ({"rope_parameters": ROPE | {"rope_theta": NAN}}, r"rope_parameters\.rope_theta is nan, it has to be a number"),
    ({"rope_parameters": ROPE | {"rope_theta": 0.0}}, r"rope_parameters\.rope_theta is 0\.0, it has to be a number above 0"),
    ({"rope_parameters": ROPE | {"rope_theta": INF}}, r"rope_parameters\.rope_theta is inf, it has to be a number above 0"),
    ({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 0.0}}, r"rope_parameters\.factor is 0\.0|factor"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=str)
def test_config_json(source, tmp_path, fields, message):
    folder = shutil.copytree(source, tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    for command in (["generate", str(folder), "a"], ["quantize", str(folder), str(tmp_path / "q")]):
        assert_one_line(command, rf"config\.json: .*{message}")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_logits_that_are_no_numbers(value):
    """Loaded weights are finite but give NaN or infinite logits: `generate` and streams end with an error."""
    model = eager_llama()
    with torch.no_grad():
        model.lm_head.weight[:, :] = value
    pipe = Pipeline(model, tiny_tokenizer())
    for sample in (False, True):
        with pytest.raises(RequestFailed, match="logits are NaN or infinite"):
            pipe("a", max_new_tokens=3, do_sample=sample)
    with pytest.raises(RequestFailed, match="logits are NaN or infinite"):
        list(pipe.stream("a", max_new_tokens=3, do_sample=False))


def test_weights_that_overflow_are_one_line(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((64,), 3e38, dtype=torch.float32)
    tensors["lm_head.weight"] = torch.full((160, 64), 3e38, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert_one_line(["generate", str(folder), "a"], "logits are NaN or infinite")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(file, LlamaForCausalLM(GGUF_CONFIG))
    return file


def number(key, kind, code, value):
    """Bytes of a metadata key and its value in a GGUF file."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack(f"<I{code}", kind, value)


METADATA = {
    "no heads": (("attention.head_count", 4, 0), r"llama\.attention\.head_count is a whole number from 1, got 0"),
    "no KV heads": (("attention.head_count_kv", 2, 0), r"llama\.attention\.head_count_kv is a whole number from 1, got 0"),
    "no blocks": (("block_count", 2, 0), r"llama\.block_count is a whole number from 1, got 0"),
    "no channels": (("embedding_length", 64, 0), r"llama\.embedding_length is a whole number from 1, got 0"),
    "many channels": (("embedding_length", 64, 2**32 - 1), r"llama\.embedding_length is a whole number from 1, got 4294967295"),
    "heads that do not divide": (("attention.head_count", 4, 3), r"m\.gguf"),
    "many blocks": (("block_count", 2, 2**31 - 1), r"m\.gguf.*num_hidden_layers is 2,147,483,647"),
    "many positions": (("context_length", 256, 2**31 - 1), r"m\.gguf.*max_position_embeddings is 2147483647"),
}


@pytest.mark.parametrize("what", METADATA)
def test_gguf_numbers(gguf, tmp_path, what):
    (key, old, new), message = METADATA[what]
    changed = replaced(gguf, tmp_path, number(f"llama.{key}", 4, "I", old), number(f"llama.{key}", 4, "I", new))
    assert_one_line(["generate", str(changed), "a"], message)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
@pytest.mark.parametrize(("key", "old"), [("attention.layer_norm_rms_epsilon", 1e-6), ("rope.freq_base", 1e4)])
def test_gguf_fractions(gguf, tmp_path, key, old, value):
    changed = replaced(gguf, tmp_path, number(f"llama.{key}", 6, "f", old), number(f"llama.{key}", 6, "f", value))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: llama\.{re.escape(key)} is a number above 0 .*, got {value}"):
        lowbit.load(changed)


def test_gguf_heads_of_each_layer(gguf, tmp_path):
    key = "llama.attention.head_count"
    head = struct.pack("<Q", len(key)) + key.encode()
    array = head + struct.pack("<IIQII", 9, 4, 2, 4, 4)
    changed = replaced(gguf, tmp_path, number(key, 4, "I", 4), array)
    assert_one_line(["generate", str(changed), "a"], r"llama\.attention\.head_count is an array of 2 values")
    assert_one_line(["inspect", str(changed)], r"llama\.attention\.head_count is an array of 2 values")


def test_gguf_without_heads(gguf, tmp_path):
    key = "llama.attention.head_count"
    changed = replaced(gguf, tmp_path, number(key, 4, "I", 4), number(key.replace("head_count", "no_count__"[:10]), 4, "I", 4))
    assert_one_line(["inspect", str(changed)], r"llama\.attention\.head_count is missing")


def replaced(file, tmp_path, old, new):
    """A copy of a GGUF file with other metadata, its tensors aligned anew."""
    data = file.read_bytes()
    assert data.count(old) == 1
    header = header_bytes(data)
    body = data[-(-header // 32) * 32 :]
    changed = data[:header].replace(old, new)
    target = tmp_path / "m.gguf"
    target.write_bytes(changed + bytes(-len(changed) % 32) + body)
    return target


def header_bytes(data):
    """Length of the header, which ends after the last tensor's offset."""
    tensors = struct.unpack_from("<Q", data, 8)[0]
    last = max(data.rindex(name) + len(name) for name in (b"output_norm.weight", b"blk.1.ffn_norm.weight") if name in data)
    assert tensors
    found = last
    while True:  # dimensions, their extents, a type and an offset, then the next name
        dimensions = struct.unpack_from("<I", data, found)[0]
        found += 4 + 8 * dimensions + 12
        length = struct.unpack_from("<Q", data, found)[0]
        if not 0 < length < 64:
            return found
        found += 8 + length
