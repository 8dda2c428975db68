"""`python -m study learned MODEL`: learned rounding at 2 and 3 bits, beside another tool's on the same pieces.

A row quantizes the model once, in one scheme, by one way, with one seed, and compares it with the 16-bit model on texts that
calibration never saw. The seed chooses the pieces of the calibration text and their order, so rows of several seeds show how
far chance moves a figure. The result file is complete after every row; the same command resumes an interrupted run.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.terminal import check_device, say, user_errors
from lowbit.eval.figure import Figure
from lowbit.eval.report import number
from lowbit.methods import Learned
from lowbit.models.calibrate import Calibration
from lowbit.models.hf import give_back_freed_memory, plan_for
from lowbit.progress import Progress
from lowbit.sources import model_folder
from lowbit.tune.timing import reason
from study.cases import DEFAULT_TEXT, DISTILL, Case
from study.data import gather, text_tasks
from study.results import ROW, UNQUANTIZED, Results, figure_of
from study.rival import AUTO_ROUND, Batch, Iterations, Rival, bits_and_group, bits_per_weight, check_rival, quantize_by_rival
from study.run import Measure, measured, task_record
from study.run import Settings as TextSettings

Document = Mapping[str, Any]
Measured = tuple[dict[str, Any], list[tuple[str, Figure]]]
"""The row of a result file without its figures, and (text, figure) pairs."""

RESULT = "lowbit study learned"
ROW_KEYS = (*ROW, "way", "seed", "processes", "options")
PACKAGES = ("transformers", "tokenizers", "auto-round")
SCHEMES = ("w2a16_g32", "w2a16_g64", "w3a16_g64", "w3a16_g128")
TEXTS = ("opticks", "handbook")
"""Texts whose second halves are measured on. The calibration text, `DEFAULT_TEXT`, is none of them."""
PLAIN = "plain"
WAYS = {PLAIN: (False, False), "rotated": (True, False), "distilled": (False, True), "rotated+distilled": (True, True)}
"""Ways of lowbit: are inputs rotated at run time, and are scales and norms distilled at the end?"""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Settings:
    """Learning takes `iterations` of `batch` pieces, of `samples` pieces of `length` tokens; distilled ways add `distill`
    steps. Measured on `windows` of `window` tokens of each text."""

    iterations: int = 200
    batch: int = 8
    samples: int = 128
    length: int = 512
    distill: int = DISTILL
    window: int = 512
    windows: int = 8


@dataclass(frozen=True)
class Job:
    """A row to measure: a way is one of `WAYS` or the rival's name; "16 bits" has no scheme."""

    scheme: str | None
    way: str
    seed: int

    @property
    def key(self) -> str:
        """Unique key of the row."""
        return UNQUANTIZED if self.scheme is None else f"{self.scheme} {self.way} seed {self.seed}"


@app.command()
@user_errors
def main(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a 16-bit model.")],
    rows: Annotated[str, typer.Option(help="Schemes, separated by commas: integers in groups.")] = ",".join(SCHEMES),
    ways: Annotated[str, typer.Option(help="What lowbit does, separated by commas.")] = ",".join(WAYS),
    rival: Rival = None,
    seeds: Annotated[str, typer.Option(help="Seeds of pieces and order, separated by commas.")] = "0,1,2",
    iterations: Iterations = Settings.iterations,
    batch: Batch = Settings.batch,
    samples: Annotated[int, typer.Option(min=1, help="Pieces to calibrate on, the same for both tools.")] = Settings.samples,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = Settings.length,
    distill: Annotated[int, typer.Option(min=1, help="Steps of distillation, of the ways that have it.")] = Settings.distill,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window that is measured on.")] = Settings.window,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each text.")] = Settings.windows,
    texts: Annotated[str, typer.Option(help="Texts to measure on, separated by commas.")] = ",".join(TEXTS),
    data: Annotated[Path, typer.Option(help="Folder of texts (*.txt); those of the study are fetched.")] = Path("study-data"),
    output: Annotated[Path, typer.Option(help="Result file, complete after every row and resumed.")] = Path("learned.json"),
    processes: Annotated[
        int, typer.Option(min=1, help="Rows measured at once, on one GPU; their seconds do not compare then.")
    ] = 1,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Measures learned rounding at 2 and 3 bits, with several seeds, and with --rival another tool on the same pieces.

    Ways of lowbit: plain; rotated has the inputs of all layers rotated at run time; distilled trains scales, norms and biases
    on the logits of the 16-bit model at the end; rotated+distilled is both. Rows are w2a16_g32, w2a16_g64, w3a16_g64 and
    w3a16_g128 by default.

    The divergence (KL) is that from the 16-bit model on the second halves of texts; calibration takes another text (topics).
    Both tools get the same token ids, iterations and batch. auto-round runs with its newest options: enable_alg_ext, and
    torch.compile on a GPU. The table on standard output has means over seeds and their standard deviation. A row that fails
    does not stop the others; the same command tries it again.

    Example: python -m study learned SmolLM2-135M-Instruct --device cuda --rival auto-round

    Example: python -m study learned SmolLM2-135M-Instruct --rows w2a16_g32 --ways plain --seeds 0 --samples 16 --iterations 20
    """
    check_device(device)
    check_rival(rival)
    wanted = jobs(_parts(rows), _ways(ways), rival, _seeds(seeds))
    measured_on = _parts(texts)
    if DEFAULT_TEXT in measured_on:
        raise ValueError(f"--texts {texts!r}: {DEFAULT_TEXT} is the calibration text; measure on others")
    model_folder(model)
    gather(data, say, (*measured_on, DEFAULT_TEXT))
    settings = Settings(iterations, batch, samples, length, distill, window, windows)
    document = measure(
        model.resolve(), data, measured_on, output, settings, wanted, processes=processes, device=device, say=say, progress=True
    )
    typer.echo(table(document))
    say(f"wrote {output}")
    if document["failed"]:
        raise ValueError(f"not measured: {', '.join(document['failed'])}; the same command tries them again")


def _parts(text: str) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list, without duplicates."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _seeds(text: str) -> tuple[int, ...]:
    if not (parts := _parts(text)) or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--seeds {text!r}: must be whole numbers, comma-separated, such as 0,1,2")
    return tuple(int(part) for part in parts)


def _ways(text: str) -> tuple[str, ...]:
    if unknown := [way for way in _parts(text) if way not in WAYS]:
        raise ValueError(f"--ways {text!r}: {', '.join(unknown)} is none of {', '.join(WAYS)}")
    return _parts(text)


def jobs(schemes: Sequence[str], ways: Sequence[str], rival: str | None, seeds: Sequence[int]) -> list[Job]:
    """Returns the rows to measure, 16 bits first, then seed by seed. The rival follows the first way of a scheme, so that a run
    cut short has rows to compare. Raises ValueError for other schemes than integers in groups, and if there is nothing."""
    for scheme in schemes:
        bits_and_group(scheme)
    every = [*ways[:1], *([] if rival is None else [rival]), *ways[1:]]
    found = [Job(scheme, way, seed) for seed in seeds for scheme in schemes for way in every]
    if not found:
        raise ValueError("no row to measure: --rows, --seeds, and --ways or --rival name at least one each")
    return [Job(None, UNQUANTIZED, 0), *found]


def measure(
    source: Path,
    data: Path,
    texts: Collection[str],
    output: Path,
    settings: Settings,
    wanted: Sequence[Job],
    *,
    processes: int = 1,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> Document:
    """Measures the rows `wanted` of the model in `source`, and writes the result file `output` after each. Returns its
    document.

    data: folder of the texts. Rows in the file are not measured again; they may be more than those wanted. `failed` in the
    document has the error of each row that could not be measured. Raises ValueError for missing texts and for a file measured
    with other settings.
    """
    tasks = text_tasks(data, (*texts, DEFAULT_TEXT))
    request = {"model": source.name, "device": device, "settings": asdict(settings), "texts": list(texts)}
    results = Results(output, request | {"tasks": [task_record(task) for task in tasks]}, RESULT, ROW_KEYS, PACKAGES)
    failed: dict[str, str] = {}
    results.document["failed"] = failed
    missing = [job for job in wanted if job.key not in results]
    work = output.absolute().with_name(f".{output.stem}.work")
    shutil.rmtree(work, ignore_errors=True)  # left by a killed run
    work.mkdir(parents=True)
    worker = _Worker(source, data, work, tuple(texts), settings, device, processes, progress)
    with Progress(desc="learned", unit="rows", total=len(missing), shown=progress) as bar:
        for job, outcome in _outcomes(worker, missing):
            if isinstance(outcome, Failure):
                failed[job.key] = outcome.reason
                say(f"{outcome.trace}{job.key} failed: {outcome.reason}; the other rows go on")
            else:
                results.add(*outcome)
            bar.update(1)
    shutil.rmtree(work)
    results.write(complete=not failed)
    return results.document


@dataclass(frozen=True)
class Failure:
    """Why a row could not be measured: the error on one line, and its traceback."""

    reason: str
    trace: str = ""


def _outcomes(worker: _Worker, missing: Sequence[Job]) -> Iterator[tuple[Job, Measured | Failure]]:
    """Yields each row, or why there is none, as soon as it is there. Of several processes, each has a worker."""
    if worker.processes == 1:
        for job in missing:
            yield job, worker.attempt(job)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(worker.processes, spawn, initializer=_start, initargs=(worker,))
    try:
        futures = {pool.submit(_attempt, job): job for job in missing}
        for future in as_completed(futures):
            error = future.exception()  # the process was killed
            yield futures[future], future.result() if error is None else Failure(f"{type(error).__name__}: {error}")
    finally:
        # after an interrupt, rows that have not begun do not begin, and those that run are not waited for
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


_own: list[_Worker] = []
"""The worker of this process, if a pool started it."""


def _start(worker: _Worker) -> None:
    _own.append(worker)


def _attempt(job: Job) -> Measured | Failure:
    return _own[0].attempt(job)


@dataclass
class _Worker:
    """Quantizes and measures rows in one process. The 16-bit model is loaded for the first one. Checkpoints are written below
    the folder `work`, and removed."""

    source: Path
    data: Path
    work: Path
    texts: tuple[str, ...]
    settings: Settings
    device: str
    processes: int
    progress: bool
    _measure: Measure | None = None

    def attempt(self, job: Job) -> Measured | Failure:
        """Returns the row, or why there is none: a row that fails must not cost the others."""
        try:
            return self.row(job)
        except Exception as error:  # noqa: BLE001  (of another tool too, whatever it raises)
            return Failure(reason(error), traceback.format_exc())
        finally:
            give_back_freed_memory()

    def row(self, job: Job) -> Measured:
        """Returns a row with its figures."""
        more = {"way": job.way, "seed": job.seed, "processes": self.processes}
        if job.scheme is None:
            row: dict[str, Any] = {
                "scheme": None,
                "method": None,
                "calibration": None,
                "bits_per_weight": 16.0,
                "seconds": 0.0,
                "options": {},
            }
            return {"key": job.key, **row, **more}, self.measure.unquantized()
        s = self.settings
        calibration = Calibration(s.samples, s.length, job.seed, self.data / f"{DEFAULT_TEXT}.txt")
        row, figures = self._learned(job, calibration) if job.way in WAYS else self._rival(job, calibration)
        return {**row, "key": job.key, **more}, figures

    @property
    def measure(self) -> Measure:
        """The 16-bit model and the texts."""
        if self._measure is None:
            s = self.settings
            alone = self.progress and self.processes == 1
            measured = TextSettings(s.window, s.windows, s.samples, s.length)
            self._measure = Measure(self.source, text_tasks(self.data, self.texts), measured, self.device, alone)
        return self._measure

    def _learned(self, job: Job, calibration: Calibration) -> Measured:
        """Returns the row of lowbit."""
        s, (rotated, distilled) = self.settings, WAYS[job.way]
        method = Learned(s.iterations, s.batch, job.seed, distill=s.distill if distilled else 0)
        assert job.scheme is not None
        case = Case(job.scheme, method, DEFAULT_TEXT, job.seed, rotate_inputs=rotated)
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            row, figures = measured(
                case, self.source, Path(scratch) / "q", calibration, self.measure, self.device, self.measure.progress
            )
        return {**row, "options": {}}, figures

    def _rival(self, job: Job, calibration: Calibration) -> Measured:
        """Returns the row of the rival."""
        s, tokens = self.settings, calibration.tokens(self.source)
        assert job.scheme is not None
        start = time.perf_counter()
        model, options = quantize_by_rival(
            self.source, job.scheme, tokens, iterations=s.iterations, batch=s.batch, seed=job.seed, device=self.device
        )
        seconds = time.perf_counter() - start
        self.measure.load_model(model)
        shapes = plan_for(self.measure.model, job.scheme, None, False).linears.values()
        row = {
            "scheme": job.scheme, "method": job.way, "calibration": {"text": DEFAULT_TEXT, "seed": job.seed},
            "bits_per_weight": bits_per_weight(job.scheme, shapes), "seconds": seconds, "options": options,
        }  # fmt: skip
        return row, self.measure.texts()


# ---- table


def table(document: Document) -> str:
    """Returns a Markdown table of the divergence on each text: the mean over seeds and, of several, their standard deviation.

    The last but one column is the divergence relative to the rival's in the same scheme, the mean over texts. Seconds are the
    mean over the rows of a single process.
    """
    texts = document["request"]["texts"]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in document["rows"]:
        if row["scheme"] is not None:
            groups.setdefault((row["scheme"], row["way"]), []).append(row)
    base = [figure_of(row, text, "perplexity") for row in document["rows"] if row["scheme"] is None for text in texts]
    in_16_bits = ", ".join(f"{text} {number(*figure)}" for text, figure in zip(texts, base, strict=False) if figure)
    head = ["scheme", "way", "bits", "seeds", *(f"KL, {text}" for text in texts), f"/ {AUTO_ROUND}", "seconds"]
    lines = [f"{document['request']['model']}, perplexity in 16 bits: {in_16_bits or 'not measured'}", ""]
    lines += [_line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    for (scheme, way), rows in sorted(groups.items(), key=lambda item: item[0][0]):
        other = groups.get((scheme, AUTO_ROUND))
        means = [statistics.fmean(_kl(rows, text)) for text in texts]
        seeds = {row["seed"] for row in rows} & {row["seed"] for row in other or ()}
        pairs = [[row for row in of if row["seed"] in seeds] for of in (rows, other or ())]
        ratio = None if not seeds else statistics.fmean(
            statistics.fmean(_kl(pairs[0], text)) / statistics.fmean(_kl(pairs[1], text)) for text in texts
        )  # fmt: skip
        seconds = [row["seconds"] for row in rows if row["processes"] == 1]
        cells = [f"`{scheme}`", way, f"{rows[0]['bits_per_weight']:.2f}", str(len(rows))]
        cells += [number(mean, _spread(_kl(rows, text))) for mean, text in zip(means, texts, strict=True)]
        cells += ["" if ratio is None else f"{ratio:.3f}", f"{statistics.fmean(seconds):.0f}" if seconds else ""]
        lines.append(_line(cells))
    return "\n".join(lines)


def _kl(rows: Sequence[Mapping[str, Any]], text: str) -> list[float]:
    """Returns the divergence of each row on a text."""
    found = (figure_of(dict(row), text, "KL mean") for row in rows)
    return [figure[0] for figure in found if figure is not None]


def _spread(values: Sequence[float]) -> float | None:
    """Returns the standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    app()
