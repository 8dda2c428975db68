"""Keys and values in few bits from Python and from the commands: calls, streams, refusals."""

from __future__ import annotations

import json

import pytest

import lowbit
from lowbit.pipeline import Pipeline
from tests.test_cli import run
from tests.tiny import eager_llama, save_tiny, tiny_tokenizer

GREEDY = dict(max_new_tokens=12, do_sample=False, ignore_eos=True)
PROMPTS = ["The quick brown", "fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("kv") / "tiny")


@pytest.mark.parametrize("kv", ["fp8", "int8", "int4", "k8v4"])
def test_calls_use_the_engine(kv):
    """Calls use the engine on a CPU too, where they otherwise use Transformers' `generate`. Streams give the same text."""
    pipe = Pipeline(eager_llama(), tiny_tokenizer(), kv=kv, cache_bytes=1 << 22, max_concurrent=2)
    answers = pipe(PROMPTS, **GREEDY)
    assert f"keys and values in {pipe.engine.program.cache_spec.kv}" in "\n".join(pipe.engine.report())
    assert [answer.generated_length for answer in answers] == [12, 12]
    stream = pipe.stream(PROMPTS[0], **GREEDY)
    assert "".join(stream) == answers[0].generated_text


def test_sixteen_bits_leave_the_choice_to_the_device(folder):
    pipe = lowbit.pipeline(str(folder), kv="16")
    assert not pipe._uses_engine
    assert lowbit.pipeline(str(folder), kv="int8", cache_bytes=1 << 22)._uses_engine


def test_what_transformers_would_generate_is_refused(folder):
    model, tokenizer = eager_llama(), tiny_tokenizer()
    with pytest.raises(ValueError, match=r"keys and values in int4 are the engine's; .*\(engine=False .*\): leave kv at '16'"):
        Pipeline(model, tokenizer, kv="int4", engine=False)
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match=r"in fp8 are the engine's; .*no_repeat_ngram_size"):
        Pipeline(model, tokenizer, kv="fp8")
    with pytest.raises(ValueError, match="formats of keys and values are 16 .* got 'int6'"):
        lowbit.pipeline(str(folder / "nothing"), kv="int6")


def test_generate(folder):
    asked = ("generate", folder, *PROMPTS, "--max-new-tokens", "6", "--json", "-")
    found = run(*asked, "--kv", "int8")
    assert found.exit_code == 0, found.stderr
    responses = json.loads(found.stdout)["responses"]
    assert [response["prompt"] for response in responses] == PROMPTS


def test_bench(folder, tmp_path):
    options = ("--schemes", "none", "--prompt-tokens", "5", "--max-new-tokens", "3", "--repeats", "1")
    result = run("bench", folder, *options, "--kv", "int4", "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["kv"] == "int4" and found["rows"][0]["token_ms"] > 0


def test_eval(folder, tmp_path):
    """The model is its own reference, with 16-bit keys and values. Its figures in 16 and in 4 bits differ by what the format
    loses."""
    options = ("--window", "64", "--windows", "2", "--json", tmp_path / "out.json")
    result = run("eval", folder, "--reference", folder, "--kv", "int4", *options)
    assert result.exit_code == 0 and "KV int4" in result.stdout, result.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["kv"] for row in rows] == ["16", "int4"] and rows[0]["nll"] != rows[1]["nll"]
    assert rows[0]["nll"] == pytest.approx(rows[1]["nll"], rel=0.05)


def test_a_suite_compares_with_sixteen_bits(folder, tmp_path):
    figures = {}
    for kv in ("16", "int8", "int4"):
        out = tmp_path / kv
        options = ("--suite", "text", "--out", out, "--window", "64", "--windows", "2")
        result = run("eval", folder, "--reference", folder, "--kv", kv, *options)
        assert result.exit_code == 0, result.stderr
        document = json.loads((out / "results.json").read_text())
        labels = [model["label"] for model in document["models"]]
        assert document["request"]["settings"]["kv"] == kv and labels[1].endswith(f", KV {kv}") == (kv != "16")
        figures[kv] = {figure["metric"]: figure["value"] for figure in document["models"][1]["figures"]}
    assert figures["16"]["KL mean"] == 0 < figures["int8"]["KL mean"] < figures["int4"]["KL mean"]


def test_a_card_states_only_what_the_weights_lose(folder, tmp_path):
    target = tmp_path / "q"
    assert run("quantize", folder, target, "--scheme", "w8a16").exit_code == 0
    card, options = target / "README.md", ("--suite", "text", "--out", tmp_path / "out", "--window", "64", "--windows", "1")
    before = card.read_text()
    assert run("eval", target, "--reference", folder, "--kv", "int4", *options).exit_code == 0 and card.read_text() == before
    assert run("eval", target, "--reference", folder, *options).exit_code == 0 and card.read_text() != before
