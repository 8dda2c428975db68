"""Files of a model may name code, hub kernels, pickles or files elsewhere. Nothing of it is run, loaded, unpickled or read."""

from __future__ import annotations

import ast
import builtins
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import modeling_flash_attention_utils, modeling_utils
from transformers.integrations import hub_kernels
from typer.testing import CliRunner

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.cli.commands import app
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.load import load
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import skeleton, tokenizer_of
from tests.tiny import save_tiny, tiny_llama

ROOT = Path(__file__).parents[2]
NAMED = {
    "AutoConfig": "code.Config",
    "AutoModelForCausalLM": "code.Model",
    "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("untrusted") / "tiny")


@pytest.fixture
def model(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], input="y\ny\ny\n", env={"COLUMNS": "200"})


class TestCodeOfAModel:
    @pytest.fixture
    def ran(self, model, tmp_path, monkeypatch):
        """A file that the code in the model's folder would write if it ran; every prompt for trust is answered with yes."""
        (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        monkeypatch.setattr(builtins, "input", lambda *prompt: "y")
        return tmp_path / "ran"

    @pytest.mark.parametrize(
        "command", [("generate", "hi"), ("eval",), ("quantize", "out"), ("serve", "--port", "0"), ("inspect", "--check")]
    )
    def test_of_a_config(self, model, tmp_path, ran, command):
        change(model / "config.json", auto_map=NAMED, model_type="theirs")
        name, *rest = command
        result = run(name, model, *(tmp_path / word if word == "out" else word for word in rest))
        assert result.exit_code == 1 and not ran.exists()
        (line,) = result.stderr.splitlines()[-1:]
        assert "config.json: auto_map names code" in line and "code.Config" in line and "lowbit runs no code" in line
        assert "trust_remote_code" not in result.output

    def test_of_a_tokenizer(self, model, ran):
        change(model / "tokenizer_config.json", auto_map=NAMED, tokenizer_class="Theirs")
        change(model / "config.json", model_type="theirs")
        with pytest.raises(CheckpointError, match=r"auto_map names code .*code\.Tokenizer.* lowbit runs no code"):
            tokenizer_of(model)
        assert not ran.exists()

    def test_a_model_that_transformers_has_is_read_without_its_code(self, model, ran):
        change(model / "config.json", auto_map=NAMED)
        change(model / "tokenizer_config.json", auto_map=NAMED)
        assert type(load(model, device="cpu")).__name__ == "LlamaForCausalLM"
        assert tokenizer_of(model)("hi").input_ids
        assert not ran.exists()

    def test_every_call_of_ours_says_so(self):
        """Every call in lowbit that loads a model forbids code from its folder. GenerationConfig has no such argument and needs
        none."""
        silent = []
        for file in (f for folder in ("lowbit", "study") for f in sorted((ROOT / folder).rglob("*.py"))):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                called = ast.unparse(node.func)
                if not called.endswith(".from_pretrained") and not re.fullmatch(r"Auto\w+\.from_config", called):
                    continue
                if called.startswith("GenerationConfig"):
                    continue
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if given.get("trust_remote_code") != "False":
                    silent.append(f"{file.relative_to(ROOT)}:{node.lineno}")
        assert not silent


class TestKernelsOfAHub:
    FIELDS = (
        {"attn_implementation": "owner/kernel:forward"},
        {"_attn_implementation": "owner/kernel@main:forward"},
        {"_attn_implementation": {"": "owner/kernel"}},
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "paged|flash_attention_3"},
        {"experts_implementation": "sonicmoe"},
        {"_experts_implementation": "owner/kernel"},
    )

    @pytest.fixture
    def asked(self, monkeypatch):
        """Names of the kernels that Transformers would load from the hub if the package `kernels` were installed."""
        names = []

        def note(name, *arguments, **options):
            names.append(name)
            raise ImportError(f"a kernel was asked for: {name}")

        for place, name in (
            (hub_kernels, "get_kernel"), (hub_kernels, "lazy_load_kernel"), (hub_kernels, "load_and_register_attn_kernel"),
            (modeling_utils, "lazy_import_flash_attention"), (modeling_flash_attention_utils, "lazy_import_flash_attention"),
        ):  # fmt: skip
            monkeypatch.setattr(place, name, note)
        monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *a, **k: True)
        return names

    @pytest.mark.parametrize("fields", FIELDS, ids=str)
    def test_are_not_loaded_because_a_file_names_them(self, model, asked, caplog, fields):
        change(model / "config.json", **fields)
        assert skeleton(model).config._attn_implementation == "sdpa"
        loaded = load(model, device="cpu")
        assert loaded(torch.arange(5)[None]).logits.isfinite().all()
        assert loaded.config._attn_implementation == "sdpa" and not asked
        (key, value), *_ = fields.items()
        assert f"{key.lstrip('_')} is {value if isinstance(value, str) else value['']!r}" in caplog.text

    def test_in_a_part_of_a_config(self, tmp_path, asked):
        from transformers import Gemma3Config

        parts = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
        config = Gemma3Config(
            text_config=parts, vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        )
        config.save_pretrained(tmp_path)
        stated = json.loads((tmp_path / "config.json").read_text())
        stated["text_config"]["_attn_implementation"] = "owner/kernel"
        (tmp_path / "config.json").write_text(json.dumps(stated | {"architectures": ["Gemma3ForConditionalGeneration"]}))
        assert skeleton(tmp_path).config.get_text_config()._attn_implementation == "sdpa"
        assert not asked

    def test_eager_attention_is_kept(self, model, asked):
        change(model / "config.json", attn_implementation="eager")
        assert load(model, device="cpu").config._attn_implementation == "eager"


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


class TestPickles:
    @pytest.fixture
    def opened(self, monkeypatch):
        """Fails the test where something is unpickled."""

        def refuse(*arguments, **options):
            raise AssertionError("a pickle was opened")

        monkeypatch.setattr(torch, "load", refuse)
        monkeypatch.setattr(pickle, "load", refuse)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
    @pytest.mark.parametrize(
        "command", [("generate", "hi"), ("eval",), ("quantize", "out"), ("inspect",), ("serve", "--port", "0")]
    )
    def test_are_refused_with_the_remedy(self, model, tmp_path, opened, name, command):
        (model / "model.safetensors").unlink()
        torch.save(tiny_llama().state_dict(), model / name)
        if "-of-" in name:
            names = dict.fromkeys(tiny_llama().state_dict(), name)
            (model / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        result = run(command[0], model, *(tmp_path / word if word == "out" else word for word in command[1:]))
        assert result.exit_code == 1
        assert f"{name}, a pickle" in result.stderr and "safetensors" in result.stderr

    def test_that_config_json_names(self, model, opened):
        torch.save(tiny_llama().state_dict(), model / "adapter_model.bin")
        change(model / "config.json", transformers_weights="adapter_model.bin")
        with pytest.raises(CheckpointError, match=r"config\.json: transformers_weights is 'adapter_model\.bin'.*safetensors"):
            load(model, device="cpu")

    def test_of_an_adapter_beside_a_model(self, model, opened):
        torch.save({}, model / "adapter_model.bin")
        (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x", "peft_type": "LORA"}))
        with pytest.raises(CheckpointError, match=r"adapter_model\.bin, a pickle.*safetensors"):
            load(model, device="cpu")


class TestLinks:
    @pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "generation_config.json", "config.json"])
    def test_that_leave_the_folder_are_not_followed(self, model, tmp_path, name):
        secret = tmp_path / "secret"
        secret.write_text((model / name).read_text() if (model / name).exists() else "top secret")
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(secret)
        expected = rf"{name}: a link to .*secret, outside .*model; .*copy"
        with pytest.raises(CheckpointError, match=expected):
            quantize_checkpoint(model, tmp_path / "q", "w8a16")
        with pytest.raises(CheckpointError, match=expected):
            load(model, device="cpu")
        with pytest.raises(CheckpointError, match=expected):
            tokenizer_of(model)
        assert not (tmp_path / "q").exists()

    def test_convert(self, model, tmp_path):
        quantize_checkpoint(model, tmp_path / "q", "w8a16")
        (tmp_path / "secret").write_text("top secret")
        (tmp_path / "q" / "chat_template.jinja").symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja: a link to .*secret, outside"):
            convert_checkpoint(tmp_path / "q", tmp_path / "c", "compressed-tensors")
        assert not (tmp_path / "c").exists()

    def test_of_weights(self, model, tmp_path):
        (model / "model.safetensors").rename(tmp_path / "weights")
        (model / "model.safetensors").symlink_to(tmp_path / "weights")
        with pytest.raises(CheckpointError, match=r"model\.safetensors: a link to .*weights, outside"):
            CheckpointReader(model)

    def test_to_a_folder(self, model, tmp_path):
        (tmp_path / "templates").mkdir()
        (model / "additional_chat_templates").symlink_to(tmp_path / "templates")
        with pytest.raises(CheckpointError, match=r"additional_chat_templates: a link to"):
            tokenizer_of(model)

    def test_in_a_folder_of_templates(self, model, tmp_path):
        (tmp_path / "secret").write_text("top secret")
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tools.jinja").symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointError, match=r"tools\.jinja: a link to .*secret, outside"):
            tokenizer_of(model)

    def test_beside_a_gguf_file(self, tmp_path):
        (tmp_path / "secret").write_text("{}")
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "m.gguf").write_bytes(b"GGUF")
        (tmp_path / "m" / "tokenizer_config.json").symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: a link to"):
            tokenizer_of(tmp_path / "m" / "m.gguf")

    def test_inside_the_folder(self, model):
        (model / "weights").mkdir()
        (model / "model.safetensors").rename(model / "weights" / "w")
        (model / "model.safetensors").symlink_to("weights/w")
        assert load(model, device="cpu").dtype

    @pytest.mark.parametrize("linked", [False, True])
    def test_of_the_hubs_cache(self, model, tmp_path, linked):
        """Links in the hub's cache (snapshots/REVISION/FILE -> ../../blobs/HASH) are followed, also where the cache is itself a
        link.
        """
        cache = tmp_path / "cache" / "models--owner--name"
        snapshot = cache / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir()
        for number, file in enumerate(sorted(model.iterdir())):
            file.rename(cache / "blobs" / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        if linked:
            (tmp_path / "link").symlink_to(snapshot)
        quantize_checkpoint(tmp_path / "link" if linked else snapshot, tmp_path / "q", "w8a16")
        assert (tmp_path / "q" / "tokenizer.json").is_file() and not (tmp_path / "q" / "tokenizer.json").is_symlink()
        assert tokenizer_of(snapshot)("hi").input_ids

    def test_of_a_store_that_is_a_link_itself(self, model, tmp_path):
        snapshot = tmp_path / "x" / "snapshots" / "0"
        shutil.copytree(model, snapshot)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "secret").write_text("top secret")
        (tmp_path / "x" / "blobs").symlink_to(tmp_path / "elsewhere")
        (snapshot / "chat_template.jinja").symlink_to("../../blobs/secret")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja: a link to"):
            tokenizer_of(snapshot)
