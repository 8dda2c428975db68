"""`python -m benchmarks`: the help lists the commands, and a wrong file gives a one-line error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from tests.tiny import save_tiny


def test_help_from_a_checkout():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert all(name in done.stdout for name in ("gemm", "choice", "e2e", "conv", "serve", "load", "vllm", "mechanisms"))


def test_vllm_has_its_own_options():
    assert "--together" in CliRunner().invoke(app, ["vllm", "--help"]).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{tmp}/none.json"], "none.json: no such file; give a result file of `python -m benchmarks gemm`"),
        (["report", "{tmp}"], "is a folder; name a file"),
        (["report", "{tmp}/pipe"], "pipe: is a pipe"),
        (["report", "{tiny}/config.json"], "not a result file of `python -m benchmarks gemm`"),
        (["conv", "--report", "{tmp}/none.json"], "no such file; give a result file of `python -m benchmarks conv`"),
        (["activations", "--report", "{tiny}/config.json"], "not a result file of `python -m benchmarks activations`"),
        (["gemm", "--plot", "{tiny}/config.json"], "a plot must be a .png, .svg or .pdf file"),
    ],
)
def test_mistakes_are_one_line_and_exit_1(arguments, message, tmp_path):
    tiny = save_tiny(tmp_path / "tiny")
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(app, [each.format(tiny=tiny, tmp=tmp_path) for each in arguments])
    line = result.stderr.replace("\n", " ")
    assert result.exit_code == 1 and line.count("error: ") == 1 and message in line and "Traceback" not in line
