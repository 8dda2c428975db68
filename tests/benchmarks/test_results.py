from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import ROW_KEYS, default_path, load, load_all
from lowbit.eval.results import versions


def test_rows_are_flat_and_complete(document, result_file):
    for row in document["rows"]:
        assert set(row) - {"tuned", "sm_clock_mhz", "power_w"} == ROW_KEYS, "older files lack the three"
        assert all(value is None or isinstance(value, (str, int, float)) for value in row.values())
    first, own, failed = (document["rows"][i] for i in (0, 2, 3))
    assert (first["impl"], first["format"]) == ("cublas", "fp16") and first["limit_us"] > own["limit_us"]
    # bytes: 1024 * 2048 / 2 of codes, 1024 * 16 * 2 of scales, 2 * (1024 + 2048) of x and y; at 4 TB/s
    assert own["limit_us"] == pytest.approx((1_048_576 + 32_768 + 6_144) / 4e6)
    assert own["compute_us"] == pytest.approx(2 * 1024 * 2048 / 8e8)
    assert own["cublas_fp16_us"] == 8.0 and failed["us"] is None and "no kernel" in failed["error"]
    assert document["rows"][4]["cublas_fp16_us"] is None
    assert document["complete"] and document["skipped"][0]["impl"] == "gemlite" and "NaN" in document["protocol"]
    assert [path.name for path in result_file.parent.iterdir()] == [result_file.name]


def test_default_path():
    day = datetime.date(2026, 11, 21)
    assert default_path("NVIDIA H200", day) == Path("benchmarks/results/h200/2026-11-21-gemm.json")
    assert default_path("NVIDIA GeForce RTX 4090", day).parent.name == "rtx-4090"


def test_versions_of_what_is_absent():
    found = versions(["surely-no-such-package"])
    assert found["torch"] and found["lowbit"] and found["surely-no-such-package"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=0), "not a result file of `python -m benchmarks gemm`"),
        (lambda d: d.pop("machine"), "holds no 'machine'"),
        (lambda d: d["rows"][1].pop("kernel"), "row 1 lacks kernel"),
        (lambda d: d["rows"][2].update(error="x"), "row 2 has both a time and an error"),
        (lambda d: d["rows"][2].update(us=None), "row 2 has neither a time and an error"),
        (lambda d: d.update(ceilings=None), "rows without ceilings"),
    ],
)
def test_damaged_files_are_refused(changed, change, message):
    with pytest.raises(ValueError, match=message):
        load(changed(change))


def test_not_json(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load(tmp_path / "x.json")


def test_the_commit_is_that_of_the_checkout_or_stated_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.commit() is None
    (tmp_path / "tracked").write_text("first")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert results.commit() == head
    (tmp_path / "tracked").write_text("changed")
    assert results.commit() == f"{head}-dirty"
    (tmp_path / ".commit").write_text("0123abc\n")
    assert results.commit() == "0123abc"


def test_several_files_are_one_run(result_file, tmp_path):
    """Rows of another model's file are added. A file of another commit, and a product in two files, are refused."""
    found = json.loads(result_file.read_text())

    def written(name, change):
        other = json.loads(result_file.read_text())
        change(other)
        (tmp_path / name).write_text(json.dumps(other))
        return tmp_path / name

    def wider(other):
        for row in other["rows"]:
            row["n"] *= 3

    both = load_all([result_file, written("wide.json", wider)])
    assert len(both["rows"]) == 2 * len(found["rows"]) and both["machine"] == found["machine"]
    assert load_all([result_file]) == load(result_file)
    with pytest.raises(ValueError, match="is in another file too"):
        load_all([result_file, written("same.json", lambda other: None)])
    with pytest.raises(ValueError, match="its commit is 0123, that of"):
        load_all([result_file, written("other.json", lambda other: other["machine"].update(commit="0123"))])
    with pytest.raises(ValueError, match="its versions are not those"):
        load_all([result_file, written("new.json", lambda other: other["versions"].update(torch="99"))])
