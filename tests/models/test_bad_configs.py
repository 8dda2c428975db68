"""A damaged config.json, tokenizer or suite file is an error of one line that names the file and the field."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lowbit import quantize_checkpoint
from lowbit.checkpoint import CheckpointError
from lowbit.cli.commands import app
from lowbit.models.calibrate import Calibration
from lowbit.models.skeleton import tokenizer_of
from tests.tiny import save_tiny

IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("configs") / "plain")


@pytest.fixture(scope="module")
def checkpoint(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("configs") / "quantized"
    quantize_checkpoint(source, target, "w4a16_g32", embeddings=True)
    return target


def changed(folder, tmp_path, change):
    """A copy of the folder with another config.json."""
    target = tmp_path / "changed"
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config = change(config) or config
    (target / "config.json").write_text(json.dumps(config))
    return target


MODEL = {
    "a number as text": (lambda c: c.update(hidden_size="64"), r"config\.json: .*'hidden_size' expected int"),
    "another size": (
        lambda c: c.update(intermediate_size=100),
        r"down_proj\.weight is \[64, 176\], by config\.json .* \[64, 100\]",
    ),
    "vocabulary": (
        lambda c: c.update(vocab_size=150),
        r"embed_tokens\.weight is \[160, 64\], by config\.json it is \[150, 64\]",
    ),
    "rope type": (
        lambda c: c.update(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        r"config\.json: .*KeyError: 'spiral'.*rope_parameters\.rope_type is 'spiral'",
    ),
    "activation": (lambda c: c.update(hidden_act="sillu"), r"config\.json: .*hidden_act is 'sillu'"),
    "no list of architectures": (
        lambda c: c.update(architectures="LlamaForCausalLM"),
        r"json: (architectures is a list|.*'architectures' expected a list)",
    ),
    "unknown architecture": (
        lambda c: c.update(architectures=["LamaForCausalLM"]),
        r"config\.json: .*'LamaForCausalLM', which is no",
    ),
    "no model": (lambda c: c.update(architectures=["LlamaConfig"]), r"config\.json: .*'LlamaConfig', which is no model"),
    "of another type": (
        lambda c: c.update(architectures=["GPT2LMHeadModel"]),
        r"model_type 'llama' does not go with .*GPT2LMHead",
    ),
    "unknown model type": (lambda c: c.update(model_type="lama"), r"config\.json: .*model type `lama`"),
    "model type of a wrong type": (lambda c: c.update(model_type=["llama"]), r"config\.json: .*TypeError: unhashable"),
    "no model type": (
        lambda c: {k: v for k, v in c.items() if k not in ("model_type", "architectures")},
        r"config\.json: .*Unrecognized model",
    ),
    "negative layers": (lambda c: c.update(num_hidden_layers=-1), r"no place for model\.layers\.0\..* and \d+ more|layers"),
    "no layers": (lambda c: c.update(num_hidden_layers=0), r"no place for model\.layers|layers\.0"),
    "many layers": (lambda c: c.update(num_hidden_layers=3), r"no file has model\.layers\.2\..* and \d+ more"),
    "too many layers": (
        lambda c: c.update(num_hidden_layers=10**9),
        r"config\.json: num_hidden_layers is 1,000,000,000; .* 1,000",
    ),
    "no heads": (lambda c: c.update(num_key_value_heads=0), r"config\.json: .*num_key_value_heads is 0"),
    "negative heads": (lambda c: c.update(head_dim=-4), r"config\.json: .*head_dim is -4"),
    "no memory": (lambda c: c.update(vocab_size=10**13), r"by config\.json it is \[10000000000000, 64\]"),
    "beyond any integer": (lambda c: c.update(hidden_size=10**30), r"config\.json: .*hidden_size is 10{30}"),
    "dtype": (lambda c: c.update(dtype="float17"), r"config\.json: .*float17"),
    "a list": (lambda c: [c], r"config\.json: holds a list, expected a JSON object"),
}


@pytest.mark.parametrize("what", MODEL)
def test_what_a_model_is_made_of(source, checkpoint, tmp_path, what):
    change, message = MODEL[what]
    plain = changed(source, tmp_path, change)
    commands = (
        ["quantize", str(plain), str(tmp_path / "q")],
        ["generate", str(plain), "a"],
        ["eval", str(plain), "--windows", "1"],
        ["inspect", str(plain), "--check"],
        ["explain", str(plain), "--scheme", "w8a16"],
    )
    for command in commands:
        assert_one_line(command, message)
    quantized = changed(checkpoint, tmp_path / "of", change)
    for command in (["generate", str(quantized), "a"], ["convert", str(quantized), str(tmp_path / "d"), "--to", "dequantized"]):
        assert_one_line(command, r"config\.json|changed")
    assert not list(tmp_path.glob("[qd]*"))


QUANTIZATION = {
    "no scheme": (lambda q: q.pop("scheme"), r"config\.json: quantization_config .*scheme"),
    "null scheme": (lambda q: q.update(scheme=None), r"config\.json: .*needs a scheme's name, got None"),
    "unknown scheme": (lambda q: q.update(scheme="w4a17"), r"config\.json: .*got 17"),
    "tied of a wrong type": (lambda q: q.update(tied="lm_head"), r"config\.json: tied is a JSON object, got str"),
    "tied to a list": (lambda q: q.update(tied={"lm_head": ["a"]}), r"config\.json: .*'lm_head' is tied to \['a'\]"),
    "tied to nothing": (lambda q: q.update(tied={"lm_head": "a"}), r"config\.json: .*not among the layers"),
    "tied that is nothing": (lambda q: q.update(tied={"head": "model.embed_tokens"}), r"lists head: Llama\w+ has no such"),
    "layers of a wrong type": (lambda q: q.update(layers=[]), r"config\.json: layers is a JSON object, got list"),
    "no layers": (lambda q: q.pop("layers"), r"config\.json: layers is a JSON object|lists no layers"),
    "kept of a wrong type": (lambda q: q.update(modules_to_not_convert=3), r"config\.json: modules_to_not_convert is a list"),
    "unknown keys": (lambda q: q.update(bits=4), r"config\.json: quantization_config has unknown keys \['bits'\]"),
    "version": (lambda q: q.update(format_version="1"), r"config\.json: format_version is '1'"),
    "method": (lambda q: q.update(quant_method=None), r"quant_method"),
    "layer of another shape": (
        lambda q: q["layers"]["model.layers.0.mlp.up_proj"].update(shape=[64, 64]), r"up_proj\.weight_packed: .*\(64, 64\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", QUANTIZATION)
def test_what_quantization_config_states(checkpoint, tmp_path, what):
    change, message = QUANTIZATION[what]
    folder = changed(checkpoint, tmp_path, lambda config: change(config["quantization_config"]) and None)
    for command in (
        ["generate", str(folder), "a"],
        ["inspect", str(folder), "--check"],
        ["eval", str(folder), "--windows", "1"],
    ):
        assert_one_line(command, message)
    with pytest.raises(ValueError, match=message) as error:
        AutoModelForCausalLM.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_quantization_config_of_a_wrong_type(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda config: config.update(quantization_config=[]))
    assert_one_line(["generate", str(folder), "a"], r"quantization_config .*JSON object, got list")
    assert_one_line(["inspect", str(folder), "--check"], r"quantization_config .*JSON object, got list")


def test_a_method_whose_package_is_missing(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda config: config.update(quantization_config={"quant_method": "hqq"}))
    assert_one_line(["generate", str(folder), "a"], r"cannot load it here|hqq")


TOKENIZER = {
    "no JSON": ("tokenizer.json", b"{", r"tokenizer\.json\) cannot be read"),
    "deep JSON": ("tokenizer.json", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"tokenizer\.json\) cannot be read"),
    "of another tool": (
        "tokenizer.json",
        b'{"model": {"type": "Unknown"}, "added_tokens": []}',
        r"tokenizer \(tokenizer\.json\) cannot be read",
    ),
    "fields of wrong types": (
        "tokenizer.json",
        b'{"version": [], "model": 3}',
        r"tokenizer \(tokenizer\.json\) cannot be read",
    ),
    "configuration": ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: holds a list"),
    "class": ("tokenizer_config.json", b'{"tokenizer_class": 3}', r"tokenizer \(tokenizer\.json\) cannot be read"),
}


@pytest.mark.parametrize("what", TOKENIZER)
def test_tokenizers(source, tmp_path, what):
    name, data, message = TOKENIZER[what]
    folder = tmp_path / "c"
    shutil.copytree(source, folder)
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(folder)
    for command in (["generate", str(folder), "a"], ["eval", str(folder), "--windows", "1"]):
        assert_one_line(command, message)
    assert_one_line(["quantize", str(folder), str(tmp_path / "q"), "--method", "gptq", "--samples", "2"], message)


def test_a_tokenizer_of_another_model(source, tmp_path):
    """A tokenizer with more tokens than the embedding has rows would cause an index error or wrong text, so it is refused."""
    small = save_tiny(tmp_path / "c")
    config = json.loads((small / "config.json").read_text())
    from safetensors.torch import load_file, save_file

    tensors = load_file(small / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:50].clone()
    save_file(tensors, small / "model.safetensors", {"format": "pt"})
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    assert_one_line(["generate", str(small), "a"], r"tokenizer has 98 tokens, the model's embedding 50 rows \(vocab_size")


DEEP = "[" * 100_000 + "]" * 100_000


def test_very_deep_json(source, tmp_path):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "q.jsonl").write_text(f'{{"question": {DEEP}}}\n')
    assert_one_line(
        ["eval", str(source), "--suite", str(tmp_path / "suite"), "--out", str(tmp_path / "o")], r"q\.jsonl, line 1"
    )
    (tmp_path / "t.jsonl").write_text(f'{{"text": {DEEP}}}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl:1"):
        Calibration(2, 8, text=tmp_path / "t.jsonl").read()
    for name in ("config.json", "generation_config.json"):
        folder = tmp_path / name.split(".")[0]
        shutil.copytree(source, folder)
        (folder / name).write_text(f'{{"a": {DEEP}}}')
        assert_one_line(["generate", str(folder), "a"], name.replace(".", r"\."))


def test_a_generation_config_of_wrong_types(source, tmp_path):
    for number, value in enumerate(["[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}']):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        (folder / "generation_config.json").write_text(value)
        assert_one_line(["generate", str(folder), "a"], r"generation_config\.json")


def assert_one_line(command, message):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, (command, done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    lines = [line for line in done.stderr.strip().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and done.stderr.strip().endswith(lines[0]), done.stderr
    assert re.search(message, lines[0]), lines[0]
