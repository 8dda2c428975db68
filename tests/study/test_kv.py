"""The study of keys and values in few bits on a tiny model: figures, hidden keys, continuations, resuming, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot
from typer.testing import CliRunner

from lowbit.eval import divergence, perplexity
from lowbit.eval.kv import stored_kv
from lowbit.eval.results import read_json
from lowbit.formats.kv import parse_kv
from lowbit.models.load import load_causal
from study import kv as study
from study.kv import BLOCKS, CASES, RESULT, Settings, divergences, keys_table, measure, quality_table
from study.run import halves
from tests.tiny import eager_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = {
    "fox": "\n\n".join(f"the {i}th quick brown fox jumps over {i} dogs" for i in range(40)),
    "topics": "\n\n".join(f"light of colour {i} is bent by glass {i * i}" for i in range(40)),
}
SETTINGS = Settings(contexts=(128, 192, 4096), limit=4096, keys=2, prompt=16, new=8, samples=4, length=24)
SMALL = Settings(contexts=(128, 192), limit=384, keys=2, prompt=16, new=8, samples=4, length=24)
FORMATS = ("fp8", "int4", "int4-plain", "k8v4")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    eager_llama(torch.float16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("results") / "tiny.json"


@pytest.fixture(scope="module")
def document(model, output):
    result = measure(model, TEXTS, output, SMALL, FORMATS, ["16 bits", "w4a16_g rtn"])
    assert json.loads(output.read_text()) == json.loads(json.dumps(result)) and result["complete"]
    return result


def row_of(document, **wanted):
    (row,) = [row for row in document["rows"] if all(row[key] == value for key, value in wanted.items())]
    return row


def test_rows(document):
    rows = [(row["weights"], row["kv"], row["context"]) for row in document["rows"]]
    expected = [(c, kv) for c in (128, 192) for kv in ("16", *FORMATS)] + [(None, kv) for kv in FORMATS]
    assert rows == [(weights, kv, c) for weights in ("16 bits", "w4a16_g16 rtn") for c, kv in expected]
    bits = {row["kv"]: row["bits"] for row in document["rows"]}
    assert bits == {"16": 16, "fp8": 9, "int4": 5, "int4-plain": 5, "k8v4": 7}  # heads of 16 elements share a scale


def test_figures_are_those_of_the_evaluation(model, document):
    """Divergence from the same weights with 16 bits, perplexity of the format."""
    one, two = (load_causal(model, dtype=torch.float32).eval() for _ in range(2))
    ids = tiny_tokenizer()(halves(TEXTS["fox"])[1], return_tensors="pt").input_ids[0, :384]
    wide = row_of(document, weights="16 bits", kv="16", context=128)["figures"]["fox"]
    losses = [perplexity(one, window, window=128).nll for window in ids.view(3, 128)]
    assert wide["perplexity"][0] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    with stored_kv(one, parse_kv("int4")):
        kls = [divergence(one, two, window, window=128) for window in ids.view(3, 128)]
    cells = row_of(document, weights="16 bits", kv="int4", context=128)["figures"]["fox"]
    assert cells["KL mean"][0] == pytest.approx(sum(kl.mean for kl in kls) / 3, rel=1e-3) and cells["KL mean"][2] == 3 * 127
    assert cells["same top-1"][0] == pytest.approx(sum(kl.top1 for kl in kls) / 3)
    assert cells["perplexity"][0] == pytest.approx(wide["perplexity"][0] * math.exp(cells["nll difference"][0]))


def test_quantized_weights_are_their_own_reference(document):
    """Of 16 bits, what the weights lose; of a format, what it adds."""
    plain = row_of(document, weights="16 bits", kv="16", context=128)["figures"]["fox"]
    assert "KL mean" not in plain
    own = row_of(document, weights="w4a16_g16 rtn", kv="16", context=128)["figures"]["fox"]
    assert own["KL mean"][0] > 0.01 and own["perplexity"] != plain["perplexity"]
    assert row_of(document, weights="w4a16_g16 rtn", kv="fp8", context=128)["figures"]["fox"]["KL mean"][0] > 0


def test_hidden_keys(model):
    source = study._Source(model, TEXTS, SMALL, "cpu", False)
    tokenizer, seen = tiny_tokenizer(), set()
    for depth in (0.0, 0.4, 1.0):
        for number in range(2):
            ids, count = source.hidden_key(192, depth, number)
            text = tokenizer.decode(ids)
            key = text[-5:]
            assert len(ids) == 192 and count == 6 and text.endswith(f"The pass key is {key}") and key.isdigit()
            needle, question = (
                tokenizer(piece, add_special_tokens=False).input_ids
                for piece in (
                    f"\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n",
                    "\n\nWhat is the pass key? The pass key is",
                )
            )
            at = round(depth * (192 - len(needle) - len(question) - count))
            assert text.count(key) == 3 and ids[at : at + len(needle)].tolist() == needle
            assert ids[-count - len(question) : -count].tolist() == question
            seen.add(key)
    assert len(seen) == 6
    with pytest.raises(ValueError, match="a hidden key with its question takes .* tokens, a context of 100 is shorter"):
        source.hidden_key(100, 0.5, 0)


def test_keys_are_found_by_a_model_that_copies(model, monkeypatch):
    """With logits that state the true tokens all are found; with others none."""
    source = study._Source(model, TEXTS, SMALL, "cpu", False)

    for wrong, share in ((0, 1.0), (1, 0.0)):
        monkeypatch.setattr(study, "_logits", lambda model, ids, count, wrong=wrong: one_hot(ids[-count:] + wrong, 160).float())
        found = source._keys(source.model, 192, ["int4"])
        assert set(found) == {"16", "int4"} and len(found["int4"]) == study.DEPTHS
        assert all(cell[0] == share for cell in found["int4"].values())


def test_continuations(document):
    greedy = {row["kv"]: row["greedy"] for row in document["rows"] if row["context"] is None and row["weights"] == "16 bits"}
    assert set(greedy) == set(FORMATS) and all(0 <= value <= 1 for value in greedy.values())
    assert greedy["fp8"] > 0.4


def test_a_run_is_resumed(model, output, document, monkeypatch):
    """Rows in the file are kept; other settings are refused."""
    cut = {**document, "complete": False, "rows": [row for row in document["rows"] if row["context"] != 192]}
    output.write_text(json.dumps(cut))
    measured = []
    rows = study._Source.rows

    def noted(self, model, weights, context, cases):
        measured.append((weights, context))
        return rows(self, model, weights, context, cases)

    monkeypatch.setattr(study._Source, "rows", noted)
    again = measure(model, TEXTS, output, SMALL, FORMATS, ["16 bits", "w4a16_g rtn"])
    assert measured == [("16 bits", 192), ("w4a16_g16 rtn", 192)] and again["complete"]
    one = {"weights": "16 bits", "kv": "int4", "context": 192}
    assert row_of(again, **one)["figures"] == json.loads(json.dumps(row_of(document, **one)["figures"]))
    with pytest.raises(ValueError, match=r"was measured otherwise \(kv differ\)"):
        measure(model, TEXTS, output, SMALL, ("fp8",))


def test_contexts_beyond_the_positions_are_left_out(model):
    texts = {name: "\n\n".join([text] * 6) for name, text in TEXTS.items()}
    assert study._Source(model, texts, SETTINGS, "cpu", False).contexts == [128, 192]
    with pytest.raises(ValueError, match="fox: its second half has .* tokens, --limit asks for 4,096"):
        study._Source(model, TEXTS, SETTINGS, "cpu", False)
    with pytest.raises(ValueError, match="contexts are from 2 to the 100 tokens of --limit"):
        Settings(contexts=(128,), limit=100)


def test_tables(document):
    lines = quality_table(document).splitlines()
    assert lines[2] == "| weights | keys and values | bits | KL, 128 | KL, 192 | same top-1 % | perplexity | 8 greedy, % |"
    assert len(lines) == 4 + 2 * (1 + len(FORMATS))
    (line,) = [line for line in lines if line.startswith("| 16 bits | int4 |")]
    row = row_of(document, weights="16 bits", kv="int4", context=192)
    mean = sum(cells["KL mean"][0] for cells in row["figures"].values()) / 2
    assert "| 5.00 | " in line and f"| {mean:.5f} |" in line
    assert keys_table(document).splitlines()[2] == "| weights | keys and values | 128 | 192 |"
    (model,) = divergences([document])["models"]
    assert model["model"] == "tiny" and model["parameters"] == sum(p.numel() for p in eager_llama().parameters())
    assert model["context"] == 192 and [row["kv"] for row in model["rows"]] == ["fp8", "int4", "k8v4"]
    assert model["rows"][1]["kl"] == pytest.approx(mean, rel=1e-2)
    smaller = {**document, "parameters": 10, "request": {**document["request"], "model": "z"}}
    assert [each["model"] for each in divergences([document, smaller])["models"]] == ["z", "tiny"]


def test_the_command(model, tmp_path):
    data, page, results, table = (tmp_path / name for name in ("data", "page.md", "results", "kv.json"))
    data.mkdir()
    for name, text in TEXTS.items():
        (data / f"{name}.txt").write_text(text)
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in BLOCKS))
    options = ["--contexts", "128", "--limit", "128", "--keys", "0", "--new", "0", "--weights", "16 bits", "--kv", "int8, k8v4"]
    folders = ["--data", str(data), "--results", str(results), "--page", str(page), "--table", str(table)]
    result = CliRunner().invoke(study.app, [str(model), *options, *folders])
    assert result.exit_code == 0, result.output
    assert (
        "| 16 bits | int8 | 9.00 |" in page.read_text()
        and json.loads(table.read_text())["models"][0]["rows"][0]["kv"] == "int8"
    )
    for wrong, message in ((["--kv", "int3"], "got 'int3'"), (["--contexts", "a"], "whole numbers, comma-separated")):
        refused = CliRunner().invoke(study.app, [str(model), *folders, *wrong])
        assert refused.exit_code == 1 and message in " ".join(refused.output.split())


def test_the_cases_are_formats():
    assert [str(parse_kv(case)) for case in CASES if not case.startswith("k")] == [c for c in CASES if not c.startswith("k")]
    assert set(study.FORMATS) <= set(CASES)


def test_kept_results_are_in_the_page_and_the_package():
    """The tables of the page and what `lowbit recommend` reads are those of the result files."""
    documents = [read_json(path, RESULT) for path in sorted((ROOT / study.RESULTS).glob("*.json"))]
    assert documents and json.loads((ROOT / study.TABLE).read_text()) == json.loads(json.dumps(divergences(documents)))
    page = (ROOT / study.PAGE).read_text()
    for name, of in BLOCKS.items():
        assert f"<!-- {name} -->\n" + "\n\n".join(filter(None, map(of, documents))) + f"\n<!-- /{name} -->" in page


def test_the_summary_has_the_figures_of_the_files():
    formats = ("fp8", "int8", "int8-rotated", "k8v4", "int4")
    page = (ROOT / "docs" / "kv.md").read_text()
    for name in ("smollm2-135m-instruct", "Qwen2.5-Coder-0.5B-Instruct"):
        rows = read_json(ROOT / study.RESULTS / f"{name}.json", RESULT)["rows"]
        found = {row["kv"]: row["figures"] for row in rows if (row["weights"], row["context"]) == ("16 bits", 512)}
        means = [sum(of["KL mean"][0] for of in found[kv].values()) / len(found[kv]) for kv in formats]
        cells = [*(f"{mean:.4f}" for mean in means[:-1]), f"{means[-1]:.3f}"]
        assert f"| {' | '.join(cells)} |" in page
