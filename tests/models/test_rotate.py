"""Rotated checkpoints. Before weights are quantized, the model computes the same. Models that cannot be rotated are refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.models.calibrate import Calibration
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.rotate import RotatedReader
from lowbit.quantize import Awq, Gptq, Learned, SmoothQuant
from tests.test_cli import run
from tests.tiny import eager_opt, save_tiny, tiny_llama, tiny_tokenizer

SIZES = dict(
    vocab_size=160, hidden_size=96, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256,
)  # fmt: skip
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=16, sliding_window=8)),
}
TOKENS = torch.arange(48).reshape(2, 24) * 7 % 160


def random(model, dtype=torch.float32):
    """Gives the model random norms other than ones, and biases other than zeros."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            middle = 0.0 if name.endswith("bias") else 1.0
            parameter.data.copy_(middle + 0.3 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return model.to(dtype).eval()


def saved(model, folder):
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def logits_of_rotated(folder, seed):
    """Logits in float64 of a model in Transformers with the rotated reader's tensors."""
    reader = RotatedReader(folder, seed)
    reader.check()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    state = {name: reader.get(name).double() for name in reader.names()}
    assert model.load_state_dict(state, strict=False) == ([], [])
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("family", ["llama", "llama bias", *FAMILIES])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_rotated_model_computes_the_same(family, seed, tmp_path):
    made = FAMILIES.get(family, lambda: tiny_llama(tied="bias" in family, bias="bias" in family))()
    saved(random(made), tmp_path / "m")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float64)(TOKENS).logits
    # The remaining difference is that rotated weights are rounded to float32.
    assert (logits_of_rotated(tmp_path / "m", seed) - expected).abs().max() <= 3e-6 * expected.abs().max()


def test_weights_are_rotated_and_norms_are_ones(tmp_path):
    saved(random(tiny_llama(tied=False)), tmp_path / "m")
    plain, rotated, other = CheckpointReader(tmp_path / "m"), RotatedReader(tmp_path / "m", 0), RotatedReader(tmp_path / "m", 1)
    assert plain.names() == rotated.names() and not rotated.untied
    for name in plain.names():
        if "norm" in name:
            assert torch.equal(rotated.get(name), torch.ones_like(plain.get(name)))
        else:
            assert not torch.allclose(rotated.get(name), plain.get(name), atol=0.1), name
            assert not torch.equal(rotated.get(name), other.get(name)), name
    for part in ("o_proj", "v_proj"):  # each layer rotates its heads by another matrix
        name = f"model.layers.{{}}.self_attn.{part}.weight"
        assert rotated.get(name.format(0)).shape == plain.get(name.format(0)).shape


def test_tied_weights_come_apart(tmp_path):
    saved(random(tiny_llama(tied=True)), tmp_path / "m")
    said = []
    plan = quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16", rotation=0, say=said.append)
    assert said[0] == f"embedding and LM head come apart when they are rotated: {160 * 64 * 4:,} bytes more"
    assert [row.name for row in plan.kept] == ["model.embed_tokens", "lm_head"]
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["rotation"] == 0
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == tensors["model.embed_tokens.weight"].dtype == torch.float32
    both = quantize_checkpoint(tmp_path / "m", tmp_path / "e", "w8a16", rotation=0, embeddings=True)
    assert not both.tied and {"lm_head", "model.embed_tokens"} <= set(both.shapes)
    # Without rotation they stay tied, and nothing is stated.
    quantize_checkpoint(tmp_path / "m", tmp_path / "plain", "w8a16")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and "rotation" not in config["quantization_config"]


def distance(folder, model):
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
        expected = model(TOKENS).logits
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("method", [None, Gptq(), Awq(), SmoothQuant(), Learned(iterations=3, batch=2)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_checkpoint_runs_as_any_other(method, tied, tmp_path):
    model = random(tiny_llama(tied=tied, bias=True))
    saved(model, tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("the light of the sun is bent by glass " * 20)
    quantize_checkpoint(
        tmp_path / "m", tmp_path / "q", "w8a16", method=method, calibration=Calibration(4, 24, 0, text), rotation=2
    )
    assert distance(tmp_path / "q", model) <= 0.02
    with CheckpointReader(tmp_path / "q") as reader:
        reader.check()
        assert reader.manifest is not None and reader.manifest.rotation == 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["rotation"] == 2


def test_outliers_of_channels_no_longer_decide(tmp_path):
    """A channel of the residual stream is 100 times larger than the others, but no more important. Rotation at least halves the
    error."""
    model = random(tiny_llama(tied=False))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 100
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "head.weight")
            ):
                parameter[:, 5] *= 0.01
    saved(model, tmp_path / "m")
    for name, rotation in (("plain", None), ("rotated", 0)):
        quantize_checkpoint(tmp_path / "m", tmp_path / name, "w8a8", rotation=rotation)
    assert distance(tmp_path / "rotated", model) <= 0.5 * distance(tmp_path / "plain", model)


REFUSED = {
    "opt": (eager_opt, "OPTForCausalLM has "),
    "gemma": (lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16)), "GemmaForCausalLM computes something else when"),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)), "post_feedforward_layernorm"),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**SIZES)), "has no layers.0.post_attention_layernorm.weight"),
    "phi3": (lambda: Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)), "gate_up_proj.weight"),
    "order": (lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "hidden_size": 92})), "no Hadamard matrix of order 92"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rotated_is_refused(name, tmp_path):
    make, message = REFUSED[name]
    saved(random(make()), tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16", rotation=0)
    assert not (tmp_path / "q").exists()


def changed(folder, **tensors):
    """Replaces tensors in a folder's file; None removes a tensor."""
    file = folder / "model.safetensors"
    held = {**load_file(file), **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file({name: value for name, value in held.items() if value is not None}, file, {"format": "pt"})


DAMAGED = {
    "no file has lm_head.weight": {"lm_head__weight": None},
    r"v_proj.weight is \[30, 64\], by config.json it is \[32, 64\]": {
        "model__layers__0__self_attn__v_proj__weight": torch.zeros(30, 64)
    },
    "layers.1.input_layernorm.weight: 1 of 64 numbers are not finite": {
        "model__layers__1__input_layernorm__weight": torch.tensor([float("inf"), *[1.0] * 63])
    },
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_files_are_refused_as_without_rotation(message, tmp_path):
    saved(random(tiny_llama(tied=False)), tmp_path / "m")
    changed(tmp_path / "m", **DAMAGED[message])
    for rotation in (None, 0):
        with pytest.raises(CheckpointError, match=message):
            quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16", rotation=rotation)


def test_frequencies_in_older_files_stay(tmp_path):
    model = random(tiny_llama(tied=False))
    saved(model, tmp_path / "m")
    changed(tmp_path / "m", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16", rotation=0)
    assert distance(tmp_path / "q", model) <= 0.02


def test_another_rotation_is_another_run(tmp_path):
    save_tiny(tmp_path / "m", tied=False)
    text = tmp_path / "text.txt"
    text.write_text("the light of the sun is bent by glass " * 20)
    arguments = dict(method=Gptq(), calibration=Calibration(2, 16, 0, text))

    def stopped(line):
        if line.startswith("calibrating"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w4a16_g16", rotation=0, say=stopped, **arguments)
    with pytest.raises(CheckpointError, match="another run"):
        quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w4a16_g16", rotation=1, **arguments)
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w4a16_g16", rotation=0, **arguments)


def test_the_command(tmp_path):
    save_tiny(tmp_path / "m")
    result = run("quantize", tmp_path / "m", tmp_path / "q", "--scheme", "w8a16", "--rotate", "--seed", "4")
    assert result.exit_code == 0 and "come apart when they are rotated" in result.stderr
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["rotation"] == 4
    assert "rotated (--rotate --seed 4)" in run("inspect", tmp_path / "q").stdout
    config = tmp_path / "q" / "config.json"
    config.write_text(config.read_text().replace('"rotation": 4', '"rotation": "x"'))
    assert "rotation must be a whole number" in run("inspect", tmp_path / "q").stderr
