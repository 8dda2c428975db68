"""Several models, several tasks, one result file: every model is measured on the same tokens, questions and programs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lowbit.checkpoint.card import record_divergence
from lowbit.eval.choice import choose, read_questions
from lowbit.eval.divergence import Divergence, divergence
from lowbit.eval.figure import Figure
from lowbit.eval.pass_at_k import read_problems, solve
from lowbit.eval.perplexity import perplexity
from lowbit.eval.records import read_records
from lowbit.eval.results import Results
from lowbit.eval.rouge import read_documents, scorer, summarize
from lowbit.eval.sandbox import choose_isolation, enforcement
from lowbit.eval.size import size_of
from lowbit.eval.text import sample_text
from lowbit.models.cpu import measuring_dtype
from lowbit.pipeline import Pipeline, pipeline
from lowbit.sources import regular_file

BUILT_IN = "opticks"
WORDS: dict[str, Path | None] = {"text": None, "javascript": Path(__file__).parent / "data" / "javascript"}
"""What `--suite` takes beside folders of the user's: the built-in text alone; with it 53 functions to write in JavaScript."""
_FIELDS = {
    "choice": ("choices", "answer"),
    "summary": ("document", "summary"),
    "code": ("task_id", "prompt", "entry_point", "test"),
}
"""Kind of a task -> the fields by which its file is recognised."""


class Measured(Protocol):
    """What every measurement returns: a dataclass with the figures to show."""

    def figures(self) -> list[Figure]:
        """The figures to show."""


@dataclass(frozen=True)
class Settings:
    """How a suite is run; `limit`: at most so many questions, documents and problems of a file;
    `unsafe`: generated code runs even where the kernel cannot isolate it."""

    window: int = 1024
    stride: int | None = None
    windows: int = 8
    limit: int | None = None
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    temperature: float = 0.8
    seed: int = 0
    run_generated_code: bool = False
    unsafe: bool = False


@dataclass(frozen=True)
class Task:
    """One data file, read and checked: its kind ("text", "choice", "summary" or "code"), content and origin."""

    name: str
    kind: str
    content: Any
    path: str | None
    sha256: str

    def described(self) -> dict[str, Any]:
        """What the result file says of it."""
        count = None if self.kind == "text" else len(self.content)
        return {"task": self.name, "kind": self.kind, "path": self.path, "sha256": self.sha256, "items": count}


def read_tasks(suite: Path | None, text: Path | None, settings: Settings) -> list[Task]:
    """The tasks of a folder's files: *.txt to measure perplexity on, *.jsonl and *.jsonl.gz by the fields of their records.

    Without `text` and without a .txt file (or without a folder) the built-in text is the one measured on. Raises ValueError
    for a file of no known kind, for programs with `ks` beyond the samples, and for summaries when rouge-score is missing:
    before any model is loaded.
    """
    if suite is not None and not suite.is_dir():
        words = " or ".join(WORDS)
        raise ValueError(f"{suite}: no such folder; --suite takes a folder of .txt and .jsonl files, or the word {words}")
    paths = [] if suite is None else sorted(p for p in suite.iterdir() if not p.is_dir() and not p.name.startswith("."))
    files = [_read_task(path, settings) for path in paths]
    if text is not None:
        files = [_text_task(text), *(task for task in files if task.kind != "text")]
    elif not any(task.kind == "text" for task in files):
        content = sample_text()
        files.insert(0, Task(BUILT_IN, "text", content, None, hashlib.sha256(content.encode()).hexdigest()))
    names = [task.name for task in files]
    if len(set(names)) < len(names):
        raise ValueError(f"{suite}: two files of one name but for their endings: {', '.join(names)}; rename one")
    return sorted(files, key=lambda task: ("text", *_FIELDS).index(task.kind))


def _text_task(path: Path) -> Task:
    try:
        raw = regular_file(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; --text takes UTF-8 text") from None
    try:
        return Task(path.stem, "text", raw.decode("utf-8"), str(path), hashlib.sha256(raw).hexdigest())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error


def _read_task(path: Path, settings: Settings) -> Task:
    if path.suffix == ".txt":
        return _text_task(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{path}: a suite holds .txt, .jsonl and .jsonl.gz files only; take it out of the folder")
    first = read_records(path, 1)[0]
    kind = next((kind for kind, fields in _FIELDS.items() if set(fields) <= set(first)), None)
    if kind == "choice":
        content: Sequence[Any] = read_questions(path, settings.limit)
    elif kind == "summary":
        scorer()
        content = read_documents(path, settings.limit)
    elif kind == "code":
        if max(settings.ks) > settings.samples:
            raise ValueError(f"pass@{max(settings.ks)} needs as many samples per problem, --samples is {settings.samples}")
        content = read_problems(path, settings.limit)
    else:
        known = "; ".join(f"{kind}: {', '.join(fields)}" for kind, fields in _FIELDS.items())
        raise ValueError(f"{path}: its records have the fields {', '.join(first)}; known are {known}")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Task(name, kind, content, str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def to_measure(name: str, progress: bool = False, device: str | None = None) -> Pipeline:
    """A pipeline of a model as its files have it: the decode engine, which on a GPU rounds LM head and embedding of quantized
    models to 8 bits and takes most of the memory for its cache, is left out."""
    return pipeline(name, device=device, dtype=measuring_dtype(device), progress=progress, engine=False)


def run_suite(
    models: Sequence[str],
    reference: str | None,
    tasks: Sequence[Task],
    settings: Settings,
    folder: Path,
    say: Callable[[str], None],
    progress: bool = False,
    device: str | None = None,
) -> Results:
    """Measures the reference, then each model, on every task; the file of `Results` in `folder` is complete after every task.

    The reference stays in memory beside each model, for the divergence on every text, which is written into the model card of
    a lowbit checkpoint. Programs are generated and run only with `settings.run_generated_code`. Raises ValueError, before a
    model is loaded, where nothing isolates them and `settings.unsafe` is not set.
    """
    request = {"settings": asdict(settings), "reference": reference, "tasks": [task.described() for task in tasks]}
    isolation: str | None = None
    if settings.run_generated_code and (programs := [task for task in tasks if task.kind == "code"]):
        languages = sorted({task.content[0].language for task in programs})
        isolation = choose_isolation(settings.unsafe)
        request["sandbox"] = {language: enforcement(language, isolation) for language in languages}
    results = Results(folder, request)
    names = [reference, *models] if reference is not None else list(models)
    held: Pipeline | None = None
    for name, label in zip(names, labels(names), strict=True):
        pipe = to_measure(name, progress, device)
        first = reference is not None and held is None
        dtype = str(pipe.model.dtype).removeprefix("torch.")
        results.add_model(name, label, first, size_of(name, pipe.model), dtype, str(pipe.model.device))
        divergences = []
        for task in tasks:
            say(f"{label}: {task.name}")
            found = _measure(pipe, held, task, settings, results, isolation, progress)
            if found is not None:
                divergences.append(f"{found.mean:.4f} nats per token on {task.name} ({found.tokens:,} tokens)")
        if divergences and Path(name).is_dir():
            _complete_card(Path(name), f"{', '.join(divergences)}, from {Path(str(reference)).name}", say)
        if first:
            held = pipe
        else:
            pipe.destroy()
    results.finish()
    return results


def _complete_card(folder: Path, measured: str, say: Callable[[str], None]) -> None:
    try:
        if record_divergence(folder, measured):
            say(f"{folder}: the divergence is in the model card now")
    except OSError as error:
        say(f"the model card does not get the divergence: {error}")


def labels(names: Sequence[str]) -> list[str]:
    """The last part of each name, or the whole names when two end alike."""
    short = [Path(name).name or name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def _measure(
    pipe: Pipeline,
    reference: Pipeline | None,
    task: Task,
    settings: Settings,
    results: Results,
    isolation: str | None,
    progress: bool,
) -> Divergence | None:
    """Measures one task; returns the divergence, if that was measured."""

    def add(measured: Measured) -> None:
        results.add(task.name, measured.figures(), measured)

    if pipe.is_encoder_decoder and task.kind != "summary":
        results.skip(task.name, "an encoder-decoder does not continue a text; it is measured on summaries")
    elif task.kind == "text":
        ids = token_ids(pipe, task.content, settings.window, settings.stride, settings.windows)
        add(perplexity(pipe.model, ids, window=settings.window, stride=settings.stride, progress=progress))
        if reference is None or reference.is_encoder_decoder:
            return None
        same = torch.equal(ids, token_ids(reference, task.content, settings.window, settings.stride, settings.windows))
        if same and reference.model.config.vocab_size == pipe.model.config.vocab_size:
            found = divergence(
                pipe.model, reference.model, ids, window=settings.window, stride=settings.stride, progress=progress
            )
            add(found)
            return found
        else:
            results.skip(task.name, "no divergence: the reference has another tokenizer or vocabulary")
    elif task.kind == "choice":
        add(choose(pipe.model, pipe.tokenizer, task.content, progress=progress))
    elif task.kind == "summary":
        add(summarize(pipe, task.content, progress=progress))
    elif settings.run_generated_code:
        add(
            solve(
                pipe, task.content, samples=settings.samples, ks=settings.ks, temperature=settings.temperature,
                seed=settings.seed, isolation=isolation, progress=progress,
            )
        )  # fmt: skip
    else:
        results.skip(task.name, "generated code is run only with --run-generated-code")
    return None


def token_ids(pipe: Pipeline, text: str, window: int, stride: int | None, windows: int) -> torch.Tensor:
    """Token ids [1, T] of the beginning of a text that fills so many windows, on the model's device."""
    ids: torch.Tensor = pipe.tokenizer(text, return_tensors="pt").input_ids
    return ids[:, : window + (windows - 1) * (stride or window)].to(pipe.model.device)
