"""The named measurements are commands that exist, and each runs within its time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.measure import PARTS, Part, chosen, measure
from study.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent.parent


def test_names_are_different():
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_commands_exist(part, tmp_path):
    python, option, module, *words = part.arguments(tmp_path, tmp_path, tmp_path)
    assert (python, option) == (sys.executable, "-m")
    if module == "pytest":
        files = [word for word in words if word.startswith("tests/")]
        assert files and all((ROOT / file).exists() for file in files)
    elif module in ("benchmarks", "study") and words[0] != "vllm":
        command = typer.main.get_command(COMMANDS[words[0]] if module == "study" else app)
        command = command if module == "study" else command.commands[words[0]]
        command.make_context(words[0], words[1:])  # fails for an unknown option or a wrong value
    else:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or words[0] == "vllm"
        assert set(words) & {"--out"}


def test_parts_in_order_within_their_time(tmp_path):
    """Parts side by side come first. One that fails, one that lasts too long, and one for which no time is left are said."""
    sleep = "timeit -n 1 -r 1 -s 'import time' 'time.sleep(60)'"
    parts = [
        Part("works", 1, "timeit -n 1 pass"), Part("absent", 1, "no_module_of_this_name", alone=False),
        Part("lasts", 1, sleep), Part("waits", 1000, "timeit -n 1 pass"),
    ]  # fmt: skip
    said: list[str] = []
    rows = measure(sorted(parts, key=lambda part: part.alone), tmp_path / "out", 900, say=said.append)
    assert [row["name"] for row in rows] == ["absent", "works", "lasts", "waits"]
    assert [row["status"] for row in rows] == [
        "ended with 1", "done", "interrupted at its limit", "not started: too little time is left",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "measure.json").read_text())["rows"] == rows
    assert "no_module_of_this_name" in (tmp_path / "out" / "absent.log").read_text()
    assert rows[2]["seconds"] < 20 and any("No module named" in line for line in said)


def test_parts_side_by_side_have_their_own_times(tmp_path):
    """A short part beside a long one has its own seconds and limit. Children of a part that has ended are ended too."""
    sleeping = "subprocess.Popen(['sleep', '60'])"
    parts = [
        Part("long", 3, "timeit -n 1 -r 1 -s 'import time' 'time.sleep(3)'", alone=False),
        Part("short", 1, "timeit -n 1 pass", alone=False),
        Part("over", 1, "timeit -n 1 -r 1 -s 'import time' 'time.sleep(60)'", alone=False),
        Part("parent", 1, f"timeit -n 1 -r 1 -s 'import subprocess' \"print({sleeping}.pid)\"", alone=False),
    ]  # fmt: skip
    rows = {row["name"]: row for row in measure(parts, tmp_path, 900, say=lambda line: None)}
    assert rows["short"]["seconds"] < rows["long"]["seconds"] > 3 and rows["over"]["status"] == "interrupted at its limit"
    assert {rows[name]["status"] for name in ("long", "short", "parent")} == {"done"}
    child = int((tmp_path / "parent.log").read_text().splitlines()[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rsplit(") ", 1)[1][0] == "Z"


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ValueError, match="needs --model FOLDER"):
        measure(chosen(["features-requests"]), tmp_path, 100)
    result = CliRunner().invoke(app, ["measure", "conv", "no-part"])
    assert result.exit_code == 1 and "got no-part" in result.stderr
    assert "conv-resnet50" in CliRunner().invoke(app, ["measure"]).stdout
