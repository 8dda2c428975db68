"""Speculation from Python and from the commands: calls, streams, refusals."""

from __future__ import annotations

import json

import pytest
import torch

import lowbit
from lowbit.nn import QuantLinear
from lowbit.pipeline import Pipeline
from tests.test_cli import run
from tests.tiny import eager_llama, save_tiny, tiny_llama, tiny_tokenizer

GREEDY = dict(max_new_tokens=60, do_sample=False, ignore_eos=True)
PROMPTS = ["The quick brown", "fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("speculation") / "tiny")


def test_calls_use_the_engine():
    """Calls use the engine on a CPU too. If the model repeats itself, texts are those of plain decoding, in fewer steps.
    Streams give the same texts."""
    model, tokenizer = tiny_llama(tied=False, dtype=torch.float32), tiny_tokenizer()
    options = {"cache_bytes": 1 << 24, "max_concurrent": 2}
    plain = Pipeline(model, tokenizer, engine=True, **options)(PROMPTS, **GREEDY)
    pipe = Pipeline(model, tokenizer, speculate=5, **options)
    assert "steps verify up to 5 guessed tokens of a sequence, from its own text" in pipe.engine.report()
    assert [answer.generated_text for answer in pipe(PROMPTS, **GREEDY)] == [answer.generated_text for answer in plain]
    assert pipe.engine.speculation.accepted > 20
    assert "".join(pipe.stream(PROMPTS[0], **GREEDY)) == plain[0].generated_text
    sampled = dict(max_new_tokens=30, do_sample=True, seed=7, ignore_eos=True)
    texts = [Pipeline(model, tokenizer, engine=True, **more, **options)(PROMPTS, **sampled) for more in ({}, {"speculate": 5})]
    assert texts[0] == texts[1]


def test_without_it_the_device_decides(folder):
    assert not lowbit.pipeline(str(folder))._uses_engine
    assert lowbit.pipeline(str(folder), speculate=2, cache_bytes=1 << 22)._uses_engine


def test_what_transformers_would_generate_is_refused():
    model, tokenizer = eager_llama(), tiny_tokenizer()
    with pytest.raises(ValueError, match=r"speculation is the engine's; .*\(engine=False .*\): leave speculate at 0"):
        Pipeline(model, tokenizer, speculate=3, engine=False)
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match=r"speculation is the engine's; .*no_repeat_ngram_size"):
        Pipeline(model, tokenizer, speculate=3)


def test_a_draft_model(folder, tmp_path):
    """The draft model must have the tokens of the model. It guesses 4 tokens in a step, unless `speculate` states another
    number."""
    drafted = lowbit.pipeline(str(folder), draft=str(folder), cache_bytes=1 << 24, max_concurrent=2)
    plain = lowbit.pipeline(str(folder), engine=True, cache_bytes=1 << 24, max_concurrent=2)
    assert drafted(PROMPTS, **GREEDY) == plain(PROMPTS, **GREEDY)
    assert "steps verify up to 4 guessed tokens of a sequence, by a draft model" in drafted.engine.report()
    drafted.destroy()
    quantized = lowbit.pipeline(str(folder), draft=str(folder), scheme="w8a16", cache_bytes=1 << 24)
    layers = [module for module in quantized._options["draft"].modules() if isinstance(module, QuantLinear)]
    assert layers and all(layer.scheme.name == "w8a16" for layer in layers)
    other = save_tiny(tmp_path / "other")
    vocab = json.loads((other / "tokenizer.json").read_text())
    tokens = vocab["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(ValueError, match=r"other: a draft model has the tokens of the model; 2 of \d+ differ"):
        lowbit.pipeline(str(folder), draft=str(other))


def test_generate(folder):
    asked = ("generate", folder, *PROMPTS, "--max-new-tokens", "6", "--json", "-")
    found = run(*asked, "--speculate", "4")
    assert found.exit_code == 0, found.stderr
    assert [response["prompt"] for response in json.loads(found.stdout)["responses"]] == PROMPTS
    assert run(*asked, "--speculate", "8").exit_code == 2
    drafted = run(*asked, "--draft", folder)
    assert drafted.exit_code == 0 and json.loads(drafted.stdout) == json.loads(found.stdout), drafted.stderr
