"""Text from files and servers on the terminal: brackets are not markup, and control characters do not reach the terminal."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
from rich.table import Column, Table
from typer.testing import CliRunner

from lowbit.checkpoint import CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.cli.commands import app
from lowbit.cli.terminal import Terminal
from lowbit.formats import parse_scheme
from lowbit.printable import printable
from lowbit.progress import Progress
from lowbit.quantize import rtn
from tests.tiny import save_tiny

HOSTILE = "[/b]\x1b]0;owned\x07\x1b[2J\x9b1m\u202e:smile:\udcff"
SHOWN = "[/b]\\x1b]0;owned\\x07\\x1b[2J\\x9b1m\\u202e:smile:\\udcff"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("a\tb\nc\r\nd", "a\tb\nc\nd"),
        ("over\rwritten\x7f", "over\\rwritten\\x7f"),
        ("Grüße, 世界 👍 עברית", "Grüße, 世界 👍 עברית"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown


def test_every_way_of_printing_escapes():
    file = io.StringIO()
    terminal = Terminal(file=file, force_terminal=True, no_color=True, width=200)
    terminal.print(HOSTILE, soft_wrap=True)
    table = Table(Column(HOSTILE), title=HOSTILE)
    table.add_row(HOSTILE)
    terminal.print(table)
    assert file.getvalue().count(SHOWN) >= 4
    assert "\x1b]" not in file.getvalue() and "\x07" not in file.getvalue() and "\u202e" not in file.getvalue()


def test_progress_escapes(capsys, monkeypatch):
    monkeypatch.setattr("lowbit.progress.on_terminal", lambda: True)
    with Progress(desc=HOSTILE, unit="layers", total=2) as bar:
        bar.at(1, 2, HOSTILE + "again\n")
        bar.refresh()
    shown = capsys.readouterr().err
    assert SHOWN in shown and "\x1b]" not in shown and "\x07" not in shown and "\u202e" not in shown


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
    return done


def test_names_of_layers(tmp_path):
    """Layer names in the table of `inspect`, and tensor names in its errors, are printed safely."""
    name = "model.[/b]\x1b[2J.proj"
    q = rtn(torch.ones(8, 32), "w4a16_g16")
    with CheckpointWriter(tmp_path / "c") as writer:
        for suffix, tensor in layer_tensors(q).items():
            writer.add(f"{name}.{suffix}", tensor)
        manifest = Manifest(parse_scheme("w4a16_g16"), {name: LayerEntry.of(q)}, ("[/i]\x1b[1m",))
        writer.finish({"model_type": "llama"}, manifest)
    done = run("inspect", tmp_path / "c")
    assert done.exit_code == 0 and "model.[/b]\\x1b[2J.proj" in done.stdout.replace("\n", "")
    assert "not converted: [/i]\\x1b[1m" in done.stdout.replace("\n", " ")
    done = run("explain", tmp_path / "c", "[/b]\x1b[2J")
    assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("terminal") / "m")


def test_names_of_folders(model, tmp_path):
    """A folder name with markup or control characters does not break the command: results are shown and written."""
    folder = tmp_path / "[/b]\x1b[2J\x9b"
    shutil.copytree(model, folder)
    done = run("eval", folder, "--windows", "1", "--window", "16", "--json", tmp_path / "result.json")
    assert done.exit_code == 0, done.stderr
    cells = [line.split("│")[1].strip() for line in done.stdout.splitlines() if "│" in line]
    assert "[/b]\\x1b[2J\\x9b" in "".join(cells)
    assert json.loads((tmp_path / "result.json").read_text())["rows"][0]["tokens"] > 0
    done = run("quantize", folder, tmp_path / "[/q]", "--scheme", "w4a16_g32")
    assert done.exit_code == 0 and "[/q]" in done.stderr
    assert run("generate", folder, "[/b]\x1b[31m", "--max-new-tokens", "1").exit_code == 0
    assert run("inspect", tmp_path / "[/none]\x1b[2J").exit_code == 1


def test_names_that_are_not_utf_8(model, tmp_path):
    folder = tmp_path / "\udcff"
    shutil.copytree(model, folder)
    for command in (
        ["eval", folder],
        ["generate", folder, "a"],
        ["quantize", folder, tmp_path / "q"],
        ["quantize", model, folder],
    ):
        done = run(*command)
        assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1
        assert "\\udcff: its name is not UTF-8" in done.stderr
