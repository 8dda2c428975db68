"""The documentation is tested: every Python block runs, every link has a target, and the numbers in generated tables are
recomputed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

import lowbit
from benchmarks import report
from lowbit.formats import FloatFormat, IntFormat, code_values, number_format

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """A page's path from the root."""
    return page.relative_to(ROOT).as_posix()


FENCE = re.compile(r"^ *```+ *(.*?) *$")
NOT_RUN = ("python no-run: needs a GPU", "python no-run: needs the real model")
"""The only info strings of Python blocks that are not run."""
MODEL_PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/generate.md",
    "docs/kv.md",
    "docs/speculate.md",
    "docs/finetune.md",
    "docs/lora.md",
    "docs/internals/engine.md",
)
"""Pages whose programs use SmolLM2-135M-Instruct; they run on a tiny model of that name."""


def blocks(text):
    """(info string, line of the fence, content) of every fenced block."""
    found, opening, content = [], None, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence and opening is None:
            opening, content = (fence[1], number), []
        elif fence:
            found.append((*opening, "\n".join(content)))
            opening = None
        elif opening is not None:
            content.append(line)
    assert opening is None, f"the block of line {opening[1]} has no end"
    return found


def python_blocks(text):
    """(line, code) of the Python blocks to run; Python blocks with another info string are an error."""
    out = []
    for info, line, code in blocks(text):
        if info == "python":
            out.append((line, code))
        elif info not in NOT_RUN:
            assert not info.lower().startswith("py"), (
                f"line {line}: ```{info} would not run; write ```python or one of {NOT_RUN}"
            )
    return out


@pytest.mark.parametrize("page", [p for p in PAGES if "```py" in p.read_text().lower()], ids=name_of)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    if name_of(page) in MODEL_PAGES:
        from tests.tiny import save_tiny

        for folder in (tmp_path, tmp_path / "HuggingFaceTB"):  # a tiny stand-in for their model
            save_tiny(folder / "SmolLM2-135M-Instruct")
    if page.name in ("checkpoints.md", "foreign-checkpoints.md"):
        from tests.checkpoint.foreign import DATA
        from tests.tiny import tiny_tokenizer

        shutil.copytree(DATA / "awq-auto-round", tmp_path / "Llama-3-8B-AWQ")
        tiny_tokenizer().save_pretrained(tmp_path / "Llama-3-8B-AWQ")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        here = "127.0.0.1:8000"
        if page.name in ("serve.md", "server.md"):
            from tests.serve.running import running

            server = stack.enter_context(running(name="SmolLM2-135M-Instruct"))
            here = server.url.removeprefix("http://")
        for line, code in python_blocks(page.read_text()):
            code = code.replace("127.0.0.1:8000", here)
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_no_block_escapes():
    assert python_blocks("```python\na\n```\n\n```\nb\n```\n```python no-run: needs a GPU\nc\n```") == [(1, "a")]
    for info in ("python no-run", "py", "Python", "python no-run: slow", "python3"):
        with pytest.raises(AssertionError, match="would not run"):
            python_blocks(f"```{info}\nx\n```")
    with pytest.raises(AssertionError, match="line 1 has no end"):
        python_blocks("```python\nx\n")


def anchors(text):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?(?: [^)]*)?\)", page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_tests_named_in_prose_exist(page):
    """`lowbit/a/b.py`, or `a/b.py` inside lowbit, or `tests/a/test_b.py::test_c`."""
    for name, test in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|md))(?:::(\w+))?`", page.read_text()):
        file = next((path for path in (ROOT / name, ROOT / "lowbit" / name) if path.is_file()), None)
        assert file is not None, f"{page.name} names {name}"
        if test:
            assert re.search(rf"^ *(?:def|class) {test}\b", file.read_text(), re.MULTILINE), f"{page.name}: {name}::{test}"


def test_files_named_in_docstrings_exist():
    """Checks names that begin with a folder of the repository: `tests/ops/test_a.py`, `docs/a.md`, `pack/a.py`,
    `parts/a.py`.
    """
    roots = (ROOT, ROOT / "lowbit", ROOT / "lowbit" / "kernels")
    for source in [*ROOT.glob("lowbit/**/*.py"), *ROOT.glob("study/*.py")]:
        for name in re.findall(r"(?<![\w/.{}-])((?:\w+/)+\w+\.(?:py|md))\b", source.read_text()):
            if any((root / name.split("/")[0]).is_dir() for root in roots) and not name.startswith("docs/source/"):
                assert any((root / name).is_file() for root in roots), f"{source.relative_to(ROOT)} names {name}"


def test_the_log_lists_its_entries():
    """docs/log/index.md has one line per entry of every file beside it, with a question, an answer and the link."""
    folder = ROOT / "docs" / "log"
    text = (folder / "index.md").read_text()
    listed = re.findall(r"^\| \S[^|]*\? \| \S[^|]* \| \[(\d{4}-\d\d-\d\d)\]\(([\w-]+\.md)#([^)]*)\) \|$", text, re.MULTILINE)
    entries = []
    for file in re.findall(r"^## \[.*?\]\(([\w-]+\.md)\)$", text, re.MULTILINE):
        headings = re.findall(r"^## ((\d{4}-\d\d-\d\d): .*)$", (folder / file).read_text(), re.MULTILINE)
        entries += [(day, file, next(iter(anchors(f"## {heading}")))) for heading, day in headings]
    assert listed == entries and len(listed) == text.count("\n| ") - text.count("\n| Question ")
    assert {file for _, file, _ in entries} == {path.name for path in folder.glob("*.md")} - {"index.md"}


def block(page: str, mark: str) -> str:
    """The generated block of a page."""
    return (ROOT / page).read_text().partition(f"<!-- {mark} -->")[2].partition(f"<!-- /{mark} -->")[0]


def generated_tables():
    """Returns the module docs/tables.py."""
    specification = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    tables = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tables)
    return tables


def test_tables_have_the_newest_runs_of_each_gpu_and_rivals_first(tmp_path):
    """Files of one day are one run, older and incomplete ones are left out; what a rival wins is said before the table."""
    kept = json.loads((ROOT / "benchmarks/results/h200/2026-11-23-gemm.json").read_text())
    rows = [row for row in kept["rows"] if (row["n"], row["k"]) == (8192, 8192)]

    def write(name, gpu, shape, factor, complete=True):
        own = [dict(row, n=shape) for row in rows]
        rivals = [dict(row, impl="humming", us=row["us"] * factor) for row in own if row["impl"] == "lowbit" and row["us"]]
        document = {**kept, "machine": {**kept["machine"], "gpu": gpu}, "rows": own + rivals, "complete": complete}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(document))

    write("h100/2026-12-01-gemm-a.json", "NVIDIA H100", 8192, 0.5)
    write("h200/2026-12-01-gemm-a.json", "NVIDIA H200", 8192, 2.0)
    write("h200/2026-12-01-gemm-b.json", "NVIDIA H200", 1024, 2.0)
    write("h200/2026-12-02-gemm.json", "NVIDIA H200", 8192, 2.0, complete=False)
    write("h200/2026-11-01-gemm.json", "NVIDIA H200", 512, 2.0)
    text = generated_tables().speeds(tmp_path)
    h100, h200 = text.split("NVIDIA H200, 2026-12-01:")
    assert (
        "NVIDIA H100, 2026-12-01:" in h100
        and "A rival is ahead in 36 of 36 products: `w4a16_g128` 8192 x 8192 M 1 (humming, 2.00)" in h100
    )
    assert "A rival is ahead in 0 of 72 products." in h200 and "N = 1024" in h200 and "N = 512" not in h200
    assert "| `w4a16_g128` | 3.87 / 2.00 |" in h200


def test_the_generated_tables_are_current():
    """If this fails, run `python docs/tables.py`."""
    tables = generated_tables()
    for (page, mark), make in tables.BLOCKS.items():
        assert block(page, mark).strip() == make().strip(), f"{page}: {mark}"


def test_the_products_of_the_readme_are_those_of_the_result_file():
    """If this fails, run `python -m benchmarks report FILE --m 1,64 --formats .. --shapes 8192x28672 --readme README.md`."""
    document = json.loads((ROOT / "benchmarks" / "results" / "h200" / "2026-11-23-gemm.json").read_text())
    formats = ("w4a16_g128", "w6e3m2a16", "w8a16")
    assert block("README.md", "bench:gemm").strip() == report.markdown(document, (1, 64), formats, [(8192, 28672)]).strip()


@pytest.mark.model
def test_the_first_program_of_the_readme_prints_what_it_shows(smollm2, capsys):
    """Runs it with the model of `make demo` and greedy sampling."""
    found = blocks((ROOT / "README.md").read_text())
    code = next(content for info, _, content in found if info == "python")
    exec(code.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(smollm2))), {})
    shown = next(content for info, _, content in found if not info)
    assert capsys.readouterr().out.rstrip("\n") == shown


USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_pages_for_users_are_short(page):
    """At most about 1,500 words; details belong to docs/internals/."""
    words = len(page.read_text().split())
    assert words <= 1_600, f"{page.name} has {words} words"


def test_the_reference_has_every_public_name_and_the_site_every_page():
    reference = (ROOT / "docs" / "api.md").read_text()
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (lowbit\.[\w.]+)$", reference, re.MULTILINE)}
    assert set(lowbit.__all__) - {"LAYERS", "__version__"} <= listed
    pages = set(re.findall(r"^ *- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert pages == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_the_table_of_formats_is_computed():
    text = (ROOT / "docs" / "internals" / "numerics.md").read_text()
    rows = re.findall(r"^\| (fp\w+|int\d) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (.*?) \|$", text, re.MULTILINE)
    wanted = {f"int{bits}" for bits in range(2, 9)} | {
        *("fp4_e2m1", "fp5_e2m2", "fp6_e3m2", "fp6_e2m3", "fp7_e3m3", "fp8_e4m3", "fp8_e5m2", "fp8_e3m4")
    }
    assert {row[0] for row in rows} == wanted
    for name, largest, least, normal, smallest, special in rows:
        fmt = number_format(name)
        values = code_values(fmt)
        positive = sorted(v for v in values.tolist() if 0 < v < float("inf"))
        assert (float(largest), float(least)) == (fmt.max, fmt.min), name
        assert float(largest) == max(positive) and float(least) == values[values.isfinite()].min(), name
        if isinstance(fmt, IntFormat):
            assert (normal, smallest) == ("-", "-"), name
        else:
            assert isinstance(fmt, FloatFormat)
            # The smallest normal number has exponent field 1 and mantissa 0; smaller numbers are subnormal.
            assert float(normal) == fmt.value_of(1 << fmt.mantissa), name
            assert float(smallest) == positive[0] == fmt.value_of(1), name
        infinite, not_a_number = int(values.isinf().sum()), int(values.isnan().sum())
        said = {(0, 0): "none", (0, 2): "2 NaN", (2, 6): "2 infinities, 6 NaN"}[infinite, not_a_number]
        assert special == said, name
