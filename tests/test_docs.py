"""The documents run: every python block is executed, every link leads somewhere, every number in a table is computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit.formats import FloatFormat, code_values, number_format

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    if page.name == "README.md":
        from tests.tiny import save_tiny

        save_tiny(tmp_path / "SmolLM2-135M-Instruct")  # the README's model, in small
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_prose_exist(page):
    for name in re.findall(r"`((?:lowbit|tests|docs)/[\w/.]+\.(?:py|md))`", page.read_text()):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_the_table_of_formats_is_computed():
    rows = re.findall(
        r"^\| (fp\w+|int\d) \| (\S+) \| (\S+) \| (\S+) \|", (ROOT / "docs" / "numerics.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 12
    for name, largest, smallest_normal, smallest in rows:
        fmt = number_format(name)
        positive = sorted(v for v in code_values(fmt).tolist() if 0 < v < float("inf"))
        assert float(largest) == fmt.max, name
        assert float(smallest) == positive[0], name
        normal = 2.0 ** (1 - fmt.bias) if isinstance(fmt, FloatFormat) else 1.0
        assert float(smallest_normal) == normal, name
