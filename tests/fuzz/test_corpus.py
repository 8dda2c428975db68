"""Cases found by the fuzzer, each of which once caused a traceback, a hang or wrong output, and a few new ones.

`make fuzz SECONDS=60` tries other cases; tests/serve/test_hostile.py has the requests.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import __main__ as fuzzer
from tests.fuzz import files, schedules, tokenizers

NAN, INF = float("nan"), float("inf")
ROWS = ("products", "GemmShape 5120 13824 4", 0)
LENGTH = ("model_max_length",)
CORPUS = [
    (files, ("tuned", files.TUNED, (((*ROWS, "m"), "64"),))),
    (files, ("tuned", files.TUNED, (((*ROWS, "m"), None),))),
    (files, ("tuned", files.TUNED, (((*ROWS, "us"), "[/b]\x1b[2J"),))),
    (files, ("tuned", files.TUNED, (((*ROWS, "tile"), []),))),
    (files, ("tuned", files.TUNED, (((*ROWS, "tile"), INF),))),
    (files, ("tuned", files.TUNED, (((*ROWS, "tile"), "wgmma 0 0 0 0 0"),))),
    (files, ("gguf", files.GGUF, ((0.08925641629283693, b"7", 0),))),  # a line break in a tensor name
    (files, ("gguf", files.GGUF, ((0.08828094220774424, b"\x06Z\xb2\x9b\xbf\xb5\x86x", 2), (0.0902, b"Q\x06\xf5", 1)))),
    (files, ("plain", "header", ((("model.norm.weight", "shape"), [0, 2**63]),))),
    (files, ("plain", files.CONFIG, ((("rms_norm_eps",), NAN),))),
    (files, ("plain", files.CONFIG, ((("max_position_embeddings",), 2**40),))),
    (tokenizers, ("words", "tokenizer_config.json", ((LENGTH, {}),))),
    (tokenizers, ("bpe", "tokenizer_config.json", ((LENGTH, "64"),))),
    (tokenizers, ("unigram", "tokenizer_config.json", ((LENGTH, [None]),))),
    (tokenizers, ("bpe", "tokenizer.json", ((("post_processor", "single", 0, "SpecialToken", "id"), ""),))),  # a Rust panic
    (tokenizers, ("bpe", "tokenizer.json", ((("model", "continuing_subword_prefix"), "Sequence"),))),  # another panic
    (tokenizers, ("wordpiece", "tokenizer.json", ((("model", "unk_token"), "BertPreTokenizer"),))),
    (tokenizers, ("words", "tokenizer.json", ((("model", "vocab", "a"), 10**9),))),
]


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_found_cases(number):
    target, case = CORPUS[number]
    target.check(case)


@pytest.mark.parametrize(("target", "count"), [(files, 60), (tokenizers, 100), (schedules, 20)])
def test_drawn_cases(target, count, monkeypatch):
    """Deterministic random cases, the same in every run; `make fuzz` tries others."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # failing sequences are expected

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(target.CASES)
    def cases(case):
        target.check(case)

    cases()


def test_the_fuzzer_runs(capsys, monkeypatch):
    """The fuzzer checks some cases of each target and prints their number."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    monkeypatch.setattr(fuzzer, "BATCH", 12)
    monkeypatch.setattr(fuzzer, "KEPT", None)
    fuzzer.main(0.01)
    lines = capsys.readouterr().out.split("\n")[:4]
    assert [line.split(":")[0] for line in lines] == ["files", "tokenizers", "schedules", "requests"]
    assert all(int(line.split()[1]) >= 1 for line in lines)
