"""Some damaged tokenizer files load and fail later, or make the tokenizers package panic. The error is one line that names the
file."""

from __future__ import annotations

import json
import os

import pytest

from lowbit.checkpoint import CheckpointError
from lowbit.models import skeleton
from lowbit.models.skeleton import tokenizer_of
from lowbit.pipeline import Pipeline
from tests.fuzz.changes import changed
from tests.fuzz.tokenizers import documents
from tests.models.test_bad_configs import assert_one_line
from tests.tiny import eager_llama, save_tiny, tiny_tokenizer

SPECIAL = ("post_processor", "single", 0, "SpecialToken", "id")
PREFIX = ("model", "continuing_subword_prefix")
PANICS = {"a special token": ("bpe", SPECIAL, ""), "a prefix": ("bpe", PREFIX, "Sequence")}


def folder_of(tmp_path, kind, name, *changes):
    """A tiny model with a changed tokenizer."""
    folder = save_tiny(tmp_path / "c")
    for each, document in documents(kind).items():
        (folder / each).write_text(json.dumps(changed(document, changes) if each == name else document))
    return folder


@pytest.mark.parametrize("what", PANICS)
def test_panics(tmp_path, what, capfd):
    """When Rust panics, it prints lines directly to the file descriptor of stderr: none of them may reach the user."""
    kind, path, value = PANICS[what]
    folder = folder_of(tmp_path, kind, "tokenizer.json", (path, value))
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=r"c: its tokenizer \(tokenizer\.json\) cannot be read \(PanicException: "):
        tokenizer_of(folder)
    assert capfd.readouterr().err == ""
    assert_one_line(["generate", str(folder), "a"], "PanicException")


def test_other_lines_on_stderr_are_kept(capfd):
    with skeleton._without_panics():
        os.write(2, b"a warning\n")
    with pytest.raises(ValueError, match="x"), skeleton._without_panics():
        os.write(2, b"another\n")
        raise ValueError("x")
    assert capfd.readouterr().err == "a warning\nanother\n"


@pytest.mark.parametrize("value", ["64", [1], {}, True, float("nan")])
def test_a_length_that_is_no_number(tmp_path, value):
    folder = folder_of(tmp_path, "words", "tokenizer_config.json", (("model_max_length",), value))
    assert_one_line(["generate", str(folder), "a"], r"tokenizer_config\.json: model_max_length is a number of tokens, got ")


def test_an_unknown_token_that_is_missing(tmp_path):
    folder = folder_of(tmp_path, "wordpiece", "tokenizer.json", (("model", "unk_token"), "none"))
    assert_one_line(["generate", str(folder), "a"], r"its tokenizer \(tokenizer\.json\) cannot be read \(.*Missing \[UNK\]")


def test_a_number_beyond_the_embedding(tmp_path):
    folder = folder_of(tmp_path, "words", "tokenizer.json", (("model", "vocab", "a"), 10**9))
    assert_one_line(["generate", str(folder), "a"], "tokenizer has 1,000,000,001 tokens, the model's embedding 160 rows")


def test_an_added_token_beyond_the_embedding():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(100)])
    pipe = Pipeline(eager_llama(), tokenizer)
    assert pipe("a", max_new_tokens=1)
    with pytest.raises(ValueError, match="tokens are from 0 to 159, the prompts have 197: the tokenizer is another model's"):
        pipe("<99>", max_new_tokens=1)
