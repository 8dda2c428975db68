"""LoRA adapters from Python and from the command: calls, streams, refusals."""

from __future__ import annotations

import json

import pytest

import lowbit
from lowbit.pipeline import Pipeline
from tests.adapters import merged, write_adapter
from tests.test_cli import run
from tests.tiny import eager_llama, save_tiny, tiny_llama, tiny_tokenizer

GREEDY = dict(max_new_tokens=20, do_sample=False, ignore_eos=True)
PROMPTS = ["The quick brown", "fox"]
OPTIONS = {"cache_bytes": 1 << 24, "max_concurrent": 2}


def test_calls_and_streams(tmp_path):
    """Calls with adapters use the engine on a CPU too. Answers are those of the model with the adapter merged."""
    model = eager_llama()
    folder = write_adapter(tmp_path, model)
    expected = Pipeline(merged(model, folder), tiny_tokenizer(), engine=True, **OPTIONS)(PROMPTS, **GREEDY)
    plain = Pipeline(eager_llama(), tiny_tokenizer(), engine=True, **OPTIONS)(PROMPTS, **GREEDY)
    pipe = Pipeline(model, tiny_tokenizer(), lora={"style": folder}, **OPTIONS)
    assert pipe(PROMPTS, adapter="style", **GREEDY) == expected and pipe(PROMPTS, **GREEDY) == plain != expected
    assert "".join(pipe.stream(PROMPTS[0], adapter="style", **GREEDY)) == expected[0].generated_text


def test_refusals(tmp_path):
    model, tokenizer = eager_llama(), tiny_tokenizer()
    folder = write_adapter(tmp_path, model)
    with pytest.raises(ValueError, match=r"computed by the engine; .*\(engine=False .*\): merge the adapter"):
        Pipeline(model, tokenizer, lora={"style": folder}, engine=False)
    with pytest.raises(ValueError, match="no adapter 'style': give lora"):
        Pipeline(model, tokenizer)(PROMPTS, adapter="style")
    pipe = Pipeline(model, tokenizer, lora={"style": folder}, **OPTIONS)
    with pytest.raises(ValueError, match="no adapter 'other': known are 'style'"):
        pipe.stream(PROMPTS[0], adapter="other")
    with pytest.raises(ValueError, match="adapter is the name of an adapter, got 3"):
        pipe(PROMPTS, adapter=3)


@pytest.mark.parametrize("scheme", [None, "w8a16"])
def test_a_folder_and_the_command(tmp_path, scheme):
    folder = save_tiny(tmp_path / "tiny", tied=False)
    for i, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, tiny_llama(), seed=i, size=4.0)
    adapters = {name: str(tmp_path / name) for name in ("one", "two")}
    pipe = lowbit.pipeline(str(folder), lora=adapters, scheme=scheme, **OPTIONS)
    texts = {
        name: [answer.generated_text for answer in pipe(PROMPTS, adapter=name, max_new_tokens=12, do_sample=False)]
        for name in (None, "one", "two")
    }
    assert len({tuple(each) for each in texts.values()}) == 3
    asked = ["generate", folder, *PROMPTS, "--max-new-tokens", "12", "--json", "-"]
    asked += [] if scheme is None else ["--scheme", scheme]
    both = [part for name, path in adapters.items() for part in ("--lora", f"{name}={path}")]
    for more, name in ((both[:2], "one"), ([*both, "--adapter", "two"], "two")):
        found = run(*asked, *more)
        assert found.exit_code == 0, found.stderr
        assert [response["generated_text"] for response in json.loads(found.stdout)["responses"]] == texts[name]
