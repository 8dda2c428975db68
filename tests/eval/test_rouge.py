"""ROUGE by hand, and prompts for summaries as documented."""

from __future__ import annotations

import json
import sys

import pytest

from lowbit.eval import rouge, summarize
from lowbit.eval.rouge import Document, read_documents
from tests.eval.scripted import ScriptedPipeline


def test_by_hand():
    pytest.importorskip("rouge_score", reason="needs the extra lowbit[eval]")
    result = rouge(["the cat sat", "one two"], ["the cat was here", "two one"])
    # 1-grams 2 of 3 and 2 of 4: 4/7; 2-grams 1 of 2 and 1 of 3: 2/5; longest common subsequence 2. Second pair: 1, 0, 1/2.
    assert result.values["rouge1"] == pytest.approx((4 / 7 + 1) / 2)
    assert result.values["rouge2"] == pytest.approx((2 / 5 + 0) / 2)
    assert result.values["rougeL"] == pytest.approx((4 / 7 + 1 / 2) / 2)
    assert result.standard_errors["rouge2"] == pytest.approx(1 / 5)
    assert rouge(["running dogs"], ["run dog"]).values["rouge2"] == 1  # words are stemmed before comparison
    assert [f.metric for f in result.figures()] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    with pytest.raises(ValueError, match="got 1 and 0"):
        rouge(["a"], [])


def test_summaries_are_asked_for_and_long_documents_cut():
    pytest.importorskip("rouge_score", reason="needs the extra lowbit[eval]")
    pipe = ScriptedPipeline([" the cat \n", "dogs"], context=100)
    result = summarize(pipe, [Document("A cat.", "the cat"), Document("b" * 300, "cats")], max_new_tokens=30)
    assert result.values["rouge1"] == 0.5 and (result.documents, result.cut) == (2, 1)
    (first, arguments), (second, _) = pipe.asked
    assert first == ["A cat.\n\nTL;DR:"] and arguments == {"do_sample": False, "max_new_tokens": 30}
    assert len(pipe.tokenizer(second[0]).input_ids) <= 70 and second[0].endswith("b\n\nTL;DR:")
    with pytest.raises(ValueError, match="leaves 2 tokens for document and prompt"):
        summarize(ScriptedPipeline([], context=4), [Document("abc", "d")], max_new_tokens=2)


def test_batches():
    pytest.importorskip("rouge_score", reason="needs the extra lowbit[eval]")
    pipe = ScriptedPipeline(["a", "x", "c"])
    result = summarize(pipe, [Document("A.", "a"), Document("B.", "b"), Document("C.", "c")], batch_size=2)
    assert result.values["rouge1"] == pytest.approx(2 / 3) and result.documents == 3
    assert [prompts for prompts, _ in pipe.asked] == [["A.\n\nTL;DR:", "B.\n\nTL;DR:"], ["C.\n\nTL;DR:"]]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[eval\]'"):
        rouge(["a"], ["b"])


def test_files_of_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"document": "d", "summary": "s"}) + "\n" + json.dumps({"document": "d"}))
    assert read_documents(path, 1) == [Document("d", "s")]
    with pytest.raises(ValueError, match="record 2: 'summary' must be a non-empty string"):
        read_documents(path)
