"""Help texts: short options, completion, and paragraphs wrapped at the terminal's width."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from lowbit import __version__
from lowbit.cli.commands import app


def commands(group, path=()):
    yield list(path)
    for name, command in sorted(getattr(group, "commands", {}).items()):
        yield from commands(command, (*path, name))


COMMANDS = list(commands(get_command(app)))


def help_of(command, width, option="--help"):
    result = CliRunner().invoke(app, [*command, option], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_there_are_commands_to_look_at():
    assert len(COMMANDS) >= 15 and ["quantize"] in COMMANDS and ["bench"] in COMMANDS


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_paragraphs_are_wrapped_and_not_broken_elsewhere(command, width):
    """Paragraphs are wrapped greedily: the first word of a line does not fit on the previous line."""
    text = help_of(command, width).partition("╭")[0].partition("Usage:")[2].partition("\n")[2]
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        for line, following in itertools.pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > width - 2, (line, following)
            assert len(line) <= width


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_choice_is_cut_off_in_a_terminal_of_80_columns(command):
    for line in help_of(command, 80).splitlines():
        types = re.sub(r"\[[^\]]*\]", "", line)  # without ranges such as [x>=1]
        assert types.count("<") == types.count(">"), line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_h_is_help(command):
    assert help_of(command, 100, "-h") == help_of(command, 100)


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_v_is_the_version(option):
    code = f"import sys; sys.argv = ['lowbit', {option!r}]; import lowbit.cli; " + (
        "import atexit; atexit.register(lambda: print('torch' in sys.modules)); lowbit.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    version, imported = done.stdout.splitlines()
    assert re.fullmatch(rf"lowbit {re.escape(__version__)}, torch \d+\.\d+\.\d+\S*, transformers \d+\.\d+\.\S+", version)
    assert imported == "False"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda *a: (shell, f"/bin/{shell}"))
    shown = CliRunner().invoke(app, ["--show-completion"], prog_name="lowbit")
    assert shown.exit_code == 0 and "_LOWBIT_COMPLETE" in shown.stdout


def test_a_shell_gets_commands_and_options():
    def complete(words):
        environment = {"_LOWBIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        return CliRunner().invoke(app, [], prog_name="lowbit", env=environment).stdout.split()

    assert complete("lowbit qua") == ["quantize"]
    assert "--scheme" in complete("lowbit quantize --sch")
