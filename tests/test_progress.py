"""Progress output of all commands: a bar on a terminal, otherwise a plain line every ten seconds."""

from __future__ import annotations

import ast
import re
import threading
import time
from pathlib import Path

import pytest
from transformers.utils import logging
from typer.testing import CliRunner

from lowbit import progress
from lowbit.cli.commands import app
from lowbit.progress import Progress
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent


class Clock:
    """A clock that a test sets; it replaces tqdm's."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("tqdm.std.time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def written(capsys):
    return lambda: capsys.readouterr().err


def test_a_line_every_ten_seconds(clock, written):
    for _ in Progress(range(100), desc="gptq", unit="layers"):
        clock.now += 1
    text = written()
    assert text.splitlines()[0] == "gptq: 10 of 100 layers, 00:10 passed, 01:30 left"
    assert re.findall(r"^gptq: (\d+) of", text, re.MULTILINE) == [str(n) for n in range(10, 101, 10)]
    assert "\r" not in text and "\x1b" not in text


def test_items_are_counted_once_beside_lines_of_the_thread(clock, written, monkeypatch):
    """`write_if_due`, which the thread of `periodic_lines` calls, does not change the count of a loop."""
    monkeypatch.setattr(progress, "time", clock)
    clock.time = lambda: clock.now
    bar = Progress(range(30), desc="gptq", unit="layers")
    for _ in bar:
        clock.now += 4
        bar.write_if_due()
    assert bar.n == 30
    numbers = [int(n) for n in re.findall(r"^gptq: (\d+) of", written(), re.MULTILINE)]
    assert numbers == sorted(numbers) and max(numbers) <= 30


def test_work_of_seconds_writes_nothing(clock, written):
    for _ in Progress(range(9), desc="gptq", unit="layers"):
        clock.now += 1
    with Progress(desc="programs", unit="problems", total=3) as bar:
        bar.update(3)
    assert written() == ""


def test_a_long_step_writes_its_line_at_its_end(clock, written):
    with Progress(desc="learned", unit="layers", total=2) as bar:
        clock.now += 100
        bar.update()
        clock.now += 1
        bar.update()
    assert written() == "learned: 1 of 2 layers, 01:40 passed, 01:40 left\n"


def test_a_step_that_takes_longer_than_ten_seconds(monkeypatch, capsys):
    """Lines are written even during a step that takes longer than ten seconds."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.05)
    with progress.periodic_lines(), Progress(desc="learned", unit="layers", total=2) as bar:
        bar.set_postfix_str("error 1")
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10 and set(lines) == {"learned: 0 of 2 layers, 00:00 passed, ? left, error 1"}
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join(5)
            assert not thread.is_alive()


def test_one_within_another(clock, written):
    for _ in Progress(range(3), desc="outer", unit="models"):
        for _ in Progress(range(3), desc="inner", unit="windows"):
            clock.now += 11
    assert [line.split(":")[0] for line in written().splitlines()] == [*["inner"] * 3, "outer"] * 3


def test_stages(clock, written):
    bar = Progress(desc="starting", unit="kernels")
    clock.now += 11
    bar.at(5, 20, "compiling")
    bar.close()
    assert written() == "compiling: 5 of 20 kernels, 00:11 passed, 00:33 left\n"


def test_a_bar_on_a_terminal(written, monkeypatch):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    for _ in Progress(range(3), desc="gptq", unit="layers"):
        pass
    text = written()
    assert "\r" in text and "gptq:" in text and "\n" not in text


def test_not_shown(clock, written):
    for _ in Progress(range(100), desc="gptq", unit="layers", shown=False):
        clock.now += 1
    assert written() == ""


def test_the_thread_may_see_a_bar_that_is_being_made():
    """tqdm lists an object when it is created, before `__init__` runs."""
    Progress.__new__(Progress).write_if_due()


def test_there_is_no_other_mechanism():
    for file in sorted((*(ROOT / "lowbit").rglob("*.py"), *(ROOT / "study").rglob("*.py"))):
        if file != ROOT / "lowbit" / "progress.py":
            imported = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]
            names = {a.name for n in imported for a in n.names} | {getattr(n, "module", None) for n in imported}
            assert not names & {"tqdm", "tqdm.auto", "rich.progress"}, file


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["quantize", "{model}", "{out}", "--scheme", "w8a16"], ["w8a16: 1 of 20 tensors"]),
        (["convert", "{quantized}", "{out}", "--to", "dequantized"], ["to dequantized: 1 of 14 layers"]),
        (["eval", "{model}", "--windows", "2", "--window", "32"], ["Loading weights: 1 of", "perplexity: 1 of 2 windows"]),
        (["generate", "{quantized}", "hi", "--max-new-tokens", "2", "--verify"], ["checksums: ", "Loading weights: 1 of"]),
        (["inspect", "{quantized}", "--check"], ["checksums: ", "layers: 1 of 14 layers"]),
    ],
    ids=lambda v: v[0],
)
def test_commands_write_lines(folders, tmp_path, monkeypatch, command, what):
    monkeypatch.setattr(progress, "INTERVAL_S", 0)
    result = CliRunner().invoke(app, [word.format(**folders, out=tmp_path / "out") for word in command])
    assert result.exit_code == 0, result.stderr
    for line in what:
        assert re.search(f"^{line}", result.stderr, re.MULTILINE), result.stderr
    assert "\r" not in result.stderr
    assert logging.set_tqdm_hook(None) is None  # Transformers' hook was restored


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress")
    save_tiny(folder / "model")
    made = CliRunner().invoke(app, ["quantize", str(folder / "model"), str(folder / "quantized"), "--scheme", "w8a16"])
    assert made.exit_code == 0, made.stderr
    return {"model": folder / "model", "quantized": folder / "quantized"}
