"""A checkpoint has all tensors of its model, or an error names the missing ones. This is checked on disk, while loading, before
measuring, and by `inspect --check`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lowbit import LowbitConfig, convert_checkpoint, pipeline, quantize_checkpoint
from lowbit.checkpoint import CheckpointError
from lowbit.cli.commands import app
from lowbit.models.calibrate import Calibration
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.quantize import Gptq
from tests.tiny import save_tiny

EMBEDDING, NORM, PROJECTION = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj"


@pytest.fixture
def plain(tmp_path):
    return save_tiny(tmp_path / "plain", tied=False)


@pytest.fixture
def quantized(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "quantized", "w4a16_g32")
    return tmp_path / "quantized"


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    config.get("quantization_config", {}).pop("files", None)  # another test covers checksums
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def spoil(name, value, at=3):
    def change(tensors):
        tensors[name].view(-1)[at] = value

    return change


DAMAGE = {
    "no embedding": (lambda t: t.pop(EMBEDDING), r"no file has model\.embed_tokens\.weight, which LlamaForCausalLM needs"),
    "no norm": (lambda t: t.pop(NORM), r"no file has model\.norm\.weight"),
    "no head": (lambda t: t.pop("lm_head.weight"), r"no file has lm_head\.weight"),
    "no norms at all": (lambda t: [t.pop(n) for n in list(t) if "norm" in n], r"layernorm\.weight and 2 more, which"),
    "a norm of another size": (lambda t: t.update({NORM: torch.ones(65)}), r"model\.norm\.weight is \[65\], .* it is \[64\]"),
    "a tensor too many": (
        lambda t: t.update({"model.extra": torch.ones(2)}),
        r"LlamaForCausalLM has no place for model\.extra",
    ),
    "NaN": (spoil(NORM, torch.nan), r"model\.norm\.weight"),
    "infinity": (spoil(EMBEDDING, -torch.inf), r"model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_plain_checkpoints(plain, tmp_path, what):
    change, message = DAMAGE[what]
    edit(plain, change)
    refused(lambda: quantize_checkpoint(plain, tmp_path / "q", "w4a16_g32"), message)
    calibration = Calibration(4, 32)
    refused(lambda: quantize_checkpoint(plain, tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=calibration), message)
    assert not (tmp_path / "q").exists()
    refused(lambda: load_causal(plain), message)
    refused(lambda: pipeline(str(plain)), message)
    refused(lambda: pipeline(str(plain), quantization_mode="w8a16"), message)
    refused(lambda: AutoModelForCausalLM.from_pretrained(plain, quantization_config=LowbitConfig("w8a16")), message)
    assert_command_fails(["inspect", str(plain), "--check"], message)
    assert_command_fails(["eval", str(plain), "--windows", "1"], message)
    assert_command_fails(["generate", str(plain), "a"], message)


@pytest.mark.parametrize("what", DAMAGE)
def test_quantized_checkpoints(quantized, tmp_path, what):
    change, message = DAMAGE[what]
    edit_config(quantized, lambda config: None)
    edit(quantized, change)
    refused(lambda: AutoModelForCausalLM.from_pretrained(quantized), message)
    refused(lambda: load_causal(quantized), message)
    refused(lambda: convert_checkpoint(quantized, tmp_path / "d", "dequantized"), message)
    assert not (tmp_path / "d").exists()
    assert_command_fails(["inspect", str(quantized), "--check"], message)
    assert_command_fails(["eval", str(quantized), "--windows", "1"], message)
    assert_command_fails(["generate", str(quantized), "a"], message)


def test_a_quantized_layer_that_config_json_does_not_list(quantized, tmp_path):
    edit_config(quantized, lambda config: config["quantization_config"]["layers"].pop(PROJECTION))
    message = r"up_proj\.weight_packed: a quantized tensor of a layer that config\.json does not list"
    refused(lambda: AutoModelForCausalLM.from_pretrained(quantized), message)
    refused(lambda: convert_checkpoint(quantized, tmp_path / "d", "dequantized"), message)
    assert_command_fails(["inspect", str(quantized), "--check"], message)
    assert_command_fails(["eval", str(quantized), "--windows", "1"], message)


def test_scales_that_are_not_finite_are_refused_while_loading(quantized):
    edit_config(quantized, lambda config: None)
    edit(quantized, spoil(f"{PROJECTION}.weight_scale", torch.inf))
    refused(lambda: AutoModelForCausalLM.from_pretrained(quantized), r"up_proj\.weight_scale are not finite")


def test_without_its_quantization_config(quantized):
    edit_config(quantized, lambda config: config.pop("quantization_config"))
    refused(lambda: load_causal(quantized), r"weight_packed and 11 more: a quantized tensor of a layer .* does not list")


@pytest.mark.parametrize("stored", [EMBEDDING, "lm_head.weight"])
def test_one_of_tied_weights_is_enough(tmp_path, stored):
    folder = save_tiny(tmp_path / "tied", tied=True)
    edit(folder, lambda tensors: tensors.update({stored: tensors.pop(EMBEDDING)}))
    assert check_checkpoint(folder) == ()
    logits = load_causal(folder, device="cpu")(torch.arange(8)[None]).logits
    for embeddings in (False, True):
        target = tmp_path / str(embeddings)
        quantize_checkpoint(folder, target, "w8a16", embeddings=embeddings)
        assert check_checkpoint(target) == ()
        with torch.inference_mode():
            assert (
                float(
                    (load_causal(target, device="cpu", dtype=torch.float32)(torch.arange(8)[None]).logits - logits).abs().max()
                )
                < 0.05
            )
        config = LowbitConfig("w8a16", embeddings=embeddings)
        in_memory = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
        assert in_memory.state_dict().keys() == load_causal(target).state_dict().keys()
        with torch.inference_mode():
            assert torch.equal(
                *(m(torch.arange(8)[None]).logits for m in (in_memory, load_causal(target, device="cpu", dtype=torch.float32)))
            )
    edit(folder, lambda tensors: tensors.pop(stored))
    refused(lambda: load_causal(folder), r"no file has model\.embed_tokens\.weight, lm_head\.weight, which")


def test_tied_weights_that_differ_are_not_merged(tmp_path):
    folder = save_tiny(tmp_path / "tied", tied=True)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] * 2}))
    config = LowbitConfig("w8a16", embeddings=True)
    message = r"weight differ, config\.json says that they are tied"
    refused(lambda: quantize_checkpoint(folder, tmp_path / "q", "w8a16", embeddings=True), message)
    refused(lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=config), message)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    quantize_checkpoint(folder, tmp_path / "q", "w8a16", embeddings=True)
    in_memory = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    with torch.inference_mode():
        assert torch.equal(
            *(
                m(torch.arange(8)[None]).logits
                for m in (in_memory, load_causal(tmp_path / "q", device="cpu", dtype=torch.float32))
            )
        )


def test_buffers_of_older_releases_may_be_there(plain, tmp_path):
    inverse = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    edit(plain, lambda tensors: tensors.update(inverse))
    assert check_checkpoint(plain) == ()
    quantize_checkpoint(plain, tmp_path / "q", "w8a16")
    assert check_checkpoint(tmp_path / "q") == ()
    assert load_causal(tmp_path / "q") is not None


def test_a_sharded_checkpoint_is_whole(tmp_path):
    from tests.tiny import tiny_llama

    tiny_llama().save_pretrained(tmp_path / "s", max_shard_size="40KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 1
    assert check_checkpoint(tmp_path / "s") == ()
    assert load_causal(tmp_path / "s") is not None


def test_what_inspect_says_of_a_whole_one(quantized):
    done = CliRunner().invoke(app, ["inspect", str(quantized), "--check"])
    assert done.exit_code == 0 and "every tensor has the dtype and shape of config.json" in done.output


def test_checksums_are_compared_on_request(quantized, plain):
    with torch.inference_mode():
        expected = load_causal(quantized, device="cpu", verify=True)(torch.arange(8)[None]).logits
    edit(quantized, spoil(f"{PROJECTION}.weight_packed", 0, at=5))
    assert not torch.equal(load_causal(quantized, device="cpu")(torch.arange(8)[None]).logits, expected)
    refused(lambda: load_causal(quantized, verify=True), r"model\.safetensors: was changed after it was written")
    refused(lambda: pipeline(str(quantized), verify=True), r"model\.safetensors: was changed after it was written")
    assert_command_fails(["generate", str(quantized), "a", "--verify"], "was changed after it was written")
    assert_command_fails(["eval", str(quantized), "--verify", "--windows", "1"], "was changed after it was written")
    refused(lambda: load_causal(plain, verify=True), "states no checksums")


def refused(call, message):
    with pytest.raises(CheckpointError, match=message):
        call()


def assert_command_fails(arguments, message):
    """Asserts that the command prints one line on stderr and exits with 1."""
    import re

    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and re.search(message, line), line
