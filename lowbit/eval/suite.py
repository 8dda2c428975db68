"""Measures several models on several tasks, and writes one result file. All models get the same texts, questions and
problems."""

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
from lowbit.eval.kv import stored_kv
from lowbit.eval.pass_at_k import read_problems, solve
from lowbit.eval.perplexity import perplexity
from lowbit.eval.records import read_records
from lowbit.eval.results import Results
from lowbit.eval.rouge import read_documents, scorer, summarize
from lowbit.eval.sandbox import choose_isolation, enforcement
from lowbit.eval.size import size_of
from lowbit.eval.text import sample_text
from lowbit.formats.kv import KV16, parse_kv
from lowbit.models.cpu import measuring_dtype
from lowbit.pipeline import Pipeline, pipeline
from lowbit.sources import regular_file

BUILT_IN = "opticks"
WORDS: dict[str, Path | None] = {"text": None, "javascript": Path(__file__).parent / "data" / "javascript"}
"""Built-in values of `--suite`: the built-in text; the text and 53 problems in JavaScript."""
_FIELDS = {
    "choice": ("choices", "answer"),
    "summary": ("document", "summary"),
    "code": ("task_id", "prompt", "entry_point", "test"),
}
"""Kind of a task -> the fields that identify its file."""


class Measured(Protocol):
    """The result of a measurement. It is a dataclass with the method `figures`."""

    def figures(self) -> list[Figure]:
        """Returns the figures for tables and plots."""


@dataclass(frozen=True)
class Settings:
    """Settings of a suite. `limit`: maximum number of records per file. `unsafe`: True runs generated code even if it cannot be
    isolated. `kv`: how the models store keys and values (`formats.kv`); the reference keeps 16 bits."""

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
    kv: str = "16"


@dataclass(frozen=True)
class Task:
    """A data file that was read and checked: its kind ("text", "choice", "summary" or "code"), content and origin."""

    name: str
    kind: str
    content: Any
    path: str | None
    sha256: str

    def described(self) -> dict[str, Any]:
        """Returns its description for the result file."""
        count = None if self.kind == "text" else len(self.content)
        return {"task": self.name, "kind": self.kind, "path": self.path, "sha256": self.sha256, "items": count}


def read_tasks(suite: Path | None, text: Path | None, settings: Settings) -> list[Task]:
    """Returns the tasks of a folder. *.txt files are for perplexity; the kind of *.jsonl and *.jsonl.gz files is recognised by
    the fields of their records.

    The built-in text is added if there is neither `text` nor a .txt file. Raises ValueError for an unknown kind of file, for a
    k in `settings.ks` that is larger than the number of samples, and for summaries if rouge-score is not installed.
    """
    if suite is not None and not suite.is_dir():
        words = " or ".join(WORDS)
        raise ValueError(f"{suite}: no such folder; --suite takes a folder of .txt and .jsonl files, or {words}")
    paths = [] if suite is None else sorted(p for p in suite.iterdir() if not p.is_dir() and not p.name.startswith("."))
    files = [_read_task(path, settings) for path in paths]
    if text is not None:
        files = [text_task(text), *(task for task in files if task.kind != "text")]
    elif not any(task.kind == "text" for task in files):
        content = sample_text()
        files.insert(0, Task(BUILT_IN, "text", content, None, hashlib.sha256(content.encode()).hexdigest()))
    names = [task.name for task in files]
    if len(set(names)) < len(names):
        raise ValueError(f"{suite}: two files have the same name without suffix: {', '.join(names)}; rename one")
    return sorted(files, key=lambda task: ("text", *_FIELDS).index(task.kind))


def text_task(path: Path) -> Task:
    """Returns the task of a text file. Raises ValueError if it does not exist or is not UTF-8."""
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
        return text_task(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{path}: a suite may only contain .txt, .jsonl and .jsonl.gz files; remove this one")
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
        raise ValueError(f"{path}: unknown fields {', '.join(first)}; supported are {known}")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Task(name, kind, content, str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def to_measure(name: str, progress: bool = False, device: str | None = None) -> Pipeline:
    """Returns a pipeline without the decode engine, to measure a model exactly as stored.

    On a GPU, the engine would round LM head and embedding of quantized models to 8 bits, and use most memory for its KV cache.
    """
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
    """Measures the reference, then each model, on every task. The result file in `folder` is saved after every task.

    The reference stays in memory, since each model's divergence from it is measured on every text. The divergence is also
    written into the model card of a lowbit checkpoint. Programs are generated and run only with `settings.run_generated_code`.
    Raises ValueError, before a model is loaded, if programs cannot be isolated and `settings.unsafe` is False.
    """
    request = {"settings": asdict(settings), "reference": reference, "tasks": [task.described() for task in tasks]}
    isolation: str | None = None
    if settings.run_generated_code and (programs := [task for task in tasks if task.kind == "code"]):
        languages = sorted({task.content[0].language for task in programs})
        isolation = choose_isolation(settings.unsafe)
        request["sandbox"] = {language: enforcement(language, isolation) for language in languages}
    results = Results(folder, request)
    names = [reference, *models] if reference is not None else list(models)
    reference_pipe: Pipeline | None = None
    for name, label in zip(names, labels(names), strict=True):
        pipe = to_measure(name, progress, device)
        first = reference is not None and reference_pipe is None
        if not first:
            label = with_kv(label, settings.kv)
        dtype = str(pipe.model.dtype).removeprefix("torch.")
        results.add_model(name, label, first, size_of(name, pipe.model), dtype, str(pipe.model.device))
        divergences = []
        for task in tasks:
            say(f"{label}: {task.name}")
            with stored_kv(pipe.model, KV16 if first else parse_kv(settings.kv)):
                kl = _measure(pipe, reference_pipe, task, settings, results, isolation, progress)
            if kl is not None:
                divergences.append(f"{kl.mean:.4f} nats per token on {task.name} ({kl.tokens:,} tokens)")
        if divergences and Path(name).is_dir() and not parse_kv(settings.kv).quantized:
            _complete_card(Path(name), f"{', '.join(divergences)}, from {Path(str(reference)).name}", say)
        if first:
            reference_pipe = pipe
        else:
            pipe.destroy()
    results.finish()
    return results


def _complete_card(folder: Path, measured: str, say: Callable[[str], None]) -> None:
    try:
        if record_divergence(folder, measured):
            say(f"{folder}: wrote the divergence into the model card")
    except OSError as error:
        say(f"cannot write the divergence into the model card: {error}")


def with_kv(name: str, kv: str) -> str:
    """Returns the name of a model, followed by the format of its keys and values unless that is 16 bits."""
    return name if not parse_kv(kv).quantized else f"{name}, KV {kv}"


def labels(names: Sequence[str]) -> list[str]:
    """Returns the last part of each name, or the whole names if two would be equal."""
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
    """Measures one task; returns the divergence if it was measured."""

    def add(measured: Measured) -> None:
        results.add(task.name, measured.figures(), measured)

    if pipe.is_encoder_decoder and task.kind != "summary":
        results.skip(task.name, "an encoder-decoder model is measured on summaries only")
    elif task.kind == "text":
        ids = token_ids(pipe, task.content, settings.window, settings.stride, settings.windows)
        add(perplexity(pipe.model, ids, window=settings.window, stride=settings.stride, progress=progress))
        if reference is None or reference.is_encoder_decoder:
            return None
        same = torch.equal(ids, token_ids(reference, task.content, settings.window, settings.stride, settings.windows))
        if same and reference.model.config.vocab_size == pipe.model.config.vocab_size:
            kl = divergence(pipe.model, reference.model, ids, window=settings.window, stride=settings.stride, progress=progress)
            add(kl)
            return kl
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
    """Returns the token ids [1, T] of the first `windows` windows of a text, on the model's device."""
    ids: torch.Tensor = pipe.tokenizer(text, return_tensors="pt").input_ids
    return ids[:, : window + (windows - 1) * (stride or window)].to(pipe.model.device)
