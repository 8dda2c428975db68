"""The wheel is small and has only what users run, and the README's program runs with the wheel alone."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_docs import python_blocks
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent
DATA = {
    *(
        "lowbit/py.typed",
        "lowbit/serve/page.html",
        "lowbit/eval/guard.js",
        "lowbit/eval/namespaces.py",
        "lowbit/eval/data/divergence.json",
    ),
    *("lowbit/eval/data/one_text.json", "lowbit/eval/data/kv.json", "lowbit/eval/data/opticks.txt.bz2"),
    "lowbit/eval/data/javascript/functions.jsonl",
    *(f"lowbit/export/c/{path.name}" for path in (ROOT / "lowbit/export/c").iterdir()),
}

MOST_BYTES = 12 << 17


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools.build_meta", reason="needs setuptools, the build back end")
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "lowbit", source / "lowbit", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("study", "tests", "benchmarks"):  # which are in the checkout too
        (source / folder).mkdir()
        (source / folder / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(source)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = source.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lowbit").rglob("*.py")}
    assert names == modules | DATA


def test_the_readme_runs_from_the_wheel_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    save_tiny(tmp_path / "work" / "HuggingFaceTB" / "SmolLM2-135M-Instruct")  # a tiny stand-in for the README's model
    checks = f"\nimport lowbit; assert lowbit.__file__.startswith({str(tmp_path)!r}), lowbit.__file__\n"
    code = "\n\n".join(block for _, block in python_blocks((ROOT / "README.md").read_text())) + checks
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    entry = configparser.ConfigParser()
    entry.read(next((tmp_path / "site").glob("*.dist-info")) / "entry_points.txt")
    module, function = entry["console_scripts"]["lowbit"].split(":")
    start = (
        f"import sys; sys.argv = ['lowbit', 'inspect', 'SmolLM2-fp6', '--check']; from {module} import {function}; {function}()"
    )
    run = {"cwd": tmp_path / "work", "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code + start], **run)  # one process: imports take four seconds
    assert done.returncode == 0 and "every tensor has the dtype and shape of config.json" in done.stdout, done.stderr
