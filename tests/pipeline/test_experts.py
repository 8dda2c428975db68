"""Mixtures of experts from a quantized checkpoint: `pipeline`, `generate` of the command line and a server give the tokens of
Transformers' `generate` with the same layers."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import lowbit
from lowbit.cli.commands import app
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn import QuantExperts
from lowbit.pipeline import Pipeline
from tests.serve.running import NAME, running
from tests.tiny import tiny_tokenizer
from tests.tiny_experts import tiny_experts

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
"""Those with a decode program."""
PROMPTS = ["the light of", "of", "a much longer prompt than these"]
NEW = 8


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    source = tmp_path_factory.mktemp(request.param)
    model = tiny_experts(request.param, torch.float32)
    model.generation_config.eos_token_id = None
    model.save_pretrained(source / "source")
    tiny_tokenizer().save_pretrained(source / "source")
    quantize_checkpoint(source / "source", source / "quantized", "w4a16_g32")
    return source / "quantized"


@pytest.fixture(scope="module")
def expected(folder):
    """What Transformers' `generate` continues the prompts with, token by token through its own forward."""
    model, tokenizer = lowbit.load(str(folder), dtype=torch.float32), tiny_tokenizer()
    assert any(isinstance(module, QuantExperts) for module in model.modules())
    made = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        made.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert len(set(made)) == len(PROMPTS)
    return made


@pytest.fixture(scope="module")
def pipe(folder):
    """A pipeline whose calls the engine computes by the family's decode program."""
    made = lowbit.pipeline(str(folder), dtype=torch.float32, engine=True, max_concurrent=2, cache_bytes=1 << 22, head=None)
    assert isinstance(made, Pipeline)
    return made


def test_a_pipeline(pipe, expected):
    """Three prompts share two slots: the third starts while another is generated."""
    answers = pipe(PROMPTS, max_new_tokens=NEW, do_sample=False, ignore_eos=True)
    assert [answer.generated_text for answer in answers] == expected
    assert [answer.generated_length for answer in answers] == [NEW] * 3


def test_a_server(pipe, expected):
    with running(pipe, max_concurrent=2) as server, server.client() as client:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            asked = {"model": NAME, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json=asked).json()
            assert answer["choices"][0]["text"] == text and answer["usage"]["completion_tokens"] == NEW


def test_the_command_line(folder):
    """`lowbit generate` computes in bf16 on a CPU, as a pipeline does by default."""
    result = CliRunner().invoke(app, ["generate", str(folder), *PROMPTS, "--max-new-tokens", str(NEW), "--json", "-"])
    assert result.exit_code == 0, result.stderr
    answers = lowbit.pipeline(str(folder))(PROMPTS, max_new_tokens=NEW, do_sample=False)
    texts = [answer["generated_text"] for answer in json.loads(result.stdout)["responses"]]
    assert texts == [answer.generated_text for answer in answers] and len(set(texts)) == len(PROMPTS)
