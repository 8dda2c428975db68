"""`lowbit eval --json` reports before any work that its file cannot be written."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lowbit.cli.commands import app


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Fails the test where a model is opened."""

    def refuse(*arguments, **options):
        raise AssertionError("a model was opened")

    monkeypatch.setattr("lowbit.eval.suite.to_measure", refuse)
    monkeypatch.setattr("lowbit.models.load.verify_checkpoint", refuse)


def empty_model(folder):
    """A folder with an empty config.json and no weights."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def run(*arguments):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "400"})
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("suite", [[], ["--suite", "text", "--out", "{}/out"]], ids=["perplexity", "suite"])
@pytest.mark.parametrize("name", ["/proc/result.json", "/proc/new/result.json", "{}/" + "n" * 254])
def test_where_nothing_can_be_written(tmp_path, name, suite):
    empty_model(tmp_path / "model")
    target = name.format(tmp_path)
    line = run(tmp_path / "model", "--verify", "--json", target, *(word.format(tmp_path) for word in suite))
    assert line.startswith(f"error: {target}: cannot be written (")
    assert "name another file for the result of lowbit eval" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["report.md", "quality.png"])
def test_the_page_of_the_suite(tmp_path, name):
    empty_model(tmp_path / "model")
    line = run(tmp_path / "model", "--suite", "text", "--out", tmp_path / "out", "--json", tmp_path / "out" / name)
    assert line == f"error: --json {tmp_path / 'out' / name}: --suite writes its report or plot there; name another file"


def test_a_file_of_somebody_else(tmp_path):
    empty_model(tmp_path / "model")
    (tmp_path / "notes").write_text("dear")
    assert "notes: exists and is no result of lowbit eval" in run(tmp_path / "model", "--json", tmp_path / "notes")
