"""Installation instructions use the checkout or the wheel, never the name lowbit, which is another project on PyPI."""

from __future__ import annotations

import re
from pathlib import Path

from lowbit import __version__
from lowbit.extras import install

ROOT = Path(__file__).parent.parent
BY_NAME = re.compile(
    r"""(pip|uv)3?\ (install|add)\b[^\n`\#]*?[\ '"]lowbit(?![-\w.]*\.whl)(?=[\s\[,'"`=<>~]|$) | [`'"]lowbit\\*\[""", re.VERBOSE
)
"""Matches `pip install lowbit`, also with other packages, a version or an extra. A plain `lowbit[serve]`, the name of an extra,
is no match.
"""
FOLDERS = ("lowbit", "docs", "examples", "tests", "study", "benchmarks")
HISTORY = {"CHANGELOG.md", "tests/test_installing.py"}


def test_the_pattern():
    for text in ("pip install lowbit", "pip install 'lowbit[serve]'", "pip install vllm lowbit==1", "the extra `lowbit[plot]`"):
        assert BY_NAME.search(text), text
    for text in ("pip install '.[serve]'", "pip install . vllm", "pip install './lowbit-0.2.0-py3-none-any.whl[serve]'"):
        assert not BY_NAME.search(text), text


def test_nobody_is_told_to_install_it_by_name():
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".md", ".html", ".toml")]
    found = []
    for file in (*files, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"):
        name = str(file.relative_to(ROOT))
        if name not in HISTORY and not name.startswith("docs/log/"):
            lines = enumerate(file.read_text().splitlines(), 1)
            found += [f"{name}:{number}: {line.strip()}" for number, line in lines if BY_NAME.search(line)]
    assert not found, "\n".join(found)


def test_what_is_advised_are_an_extra_of_ours_and_the_wheel():
    optional = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    called = {e for f in (ROOT / "lowbit").rglob("*.py") for e in re.findall(r"\{install\(['\"](\w+)['\"]\)\}", f.read_text())}
    assert called == {"demo", "eval", "onnx", "plot", "serve", "structured", "vision"}
    assert called <= set(re.findall(r"^(\w+) = \[", optional, re.MULTILINE))
    first, second = re.findall(r"pip install '([^']+)'", install("serve"))
    assert (first, second) == (".[serve]", f"./lowbit-{__version__}-py3-none-any.whl[serve]")
