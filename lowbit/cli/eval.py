"""`lowbit eval`: perplexity of models, or a suite of tasks with a result file, a report and a plot."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lowbit.cli.terminal import KV, Device, check_device, check_exists, check_kv, load_layers, out, say

if TYPE_CHECKING:
    from lowbit.eval.results import Results
    from lowbit.eval.suite import Settings

PERPLEXITY = "lowbit eval"
PAGE, PLOT = "report.md", "quality.png"
TEXT = "--text takes a file of UTF-8 text; the default is Newton's Opticks"


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders of models (16-bit, or quantized by lowbit or others), GGUF files, or names on the hub: org/name.",
        ),
    ],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to measure on. Default: Newton's Opticks.")] = None,
    reference: Annotated[str | None, typer.Option(help="16-bit model to measure too and to compare with.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 1024,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between starts of windows. Default: --window.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Maximum number of windows; a short text has fewer.")] = 8,
    kv: KV = "16",
    suite: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tasks as .txt and .jsonl files; or text: the built-in text; or javascript: functions in "
            "JavaScript."
        ),
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="--suite: folder for the results. Default: lowbit-eval.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="--suite: maximum number of records per .jsonl file.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="--suite: programs per problem; 1 is greedy decoding.")] = 1,
    k: Annotated[str, typer.Option("--k", help="--suite: the k of pass@k, comma-separated.")] = "1",
    temperature: Annotated[float, typer.Option(min=0.01, help="--suite: sampling temperature with several --samples.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="--suite: sampling seed with several --samples.")] = 0,
    run_generated_code: Annotated[
        bool, typer.Option("--run-generated-code", help="--suite: run the generated programs, isolated by Linux namespaces.")
    ] = False,
    unsafe: Annotated[
        bool,
        typer.Option(
            "--unsafe",
            help="--run-generated-code: run them even if this machine cannot isolate them; they can then read, change and "
            "delete your files.",
        ),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the models' files with their checksums first.")] = False,
    gate: Annotated[
        float | None,
        typer.Option(min=0.0, help="Exit with 1 if a model loses more nats per token than this against --reference."),
    ] = None,
    device: Device = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result as JSON to this file; - for standard output.")
    ] = None,
) -> None:
    """Measure the perplexity of models on a text, with the number of tokens and a standard error.

    With --suite, also the tasks that the folder has files for: divergence from --reference (KL, same top-1), multiple choice
    ("question", "choices", "answer"), summaries by ROUGE ("document", "summary"; needs the extra eval) and programs by pass@k
    (HumanEval's file; JavaScript needs node). OUT gets results.json, saved after every task, report.md and a plot (needs the
    extra plot). docs/internals/evaluate.md defines each measure.

    With --kv, the models read keys and values as an engine stores them in that format; the reference keeps 16 bits. A model
    that is its own reference shows what the format alone loses.

    Example: lowbit eval SmolLM2-int4 --reference SmolLM2

    Example: lowbit eval SmolLM2 --reference SmolLM2 --kv int4 --suite text

    --gate is for scripts: it compares the increase of nats per token on the text, or with --suite the mean KL on each text.

    Example: lowbit eval SmolLM2-int4 --reference SmolLM2 --gate 0.02

    Example: lowbit eval SmolLM2-int4 SmolLM2-fp6 --reference SmolLM2 --suite my-tasks --out results

    Example: lowbit eval Coder-int4 --reference Coder --suite javascript --run-generated-code
    """  # fmt: skip
    from lowbit.sources import local_model

    if suite is None and (out_folder, limit, samples, k, run_generated_code, unsafe) != (None, None, 1, "1", False, False):
        options = "--out, --limit, --samples, --k, --run-generated-code and --unsafe"
        raise ValueError(f"{options} need --suite, such as --suite text")
    if gate is not None and reference is None:
        raise ValueError(f"--gate {gate} compares with a 16-bit model; name it with --reference")
    if unsafe and not run_generated_code:
        raise ValueError("--unsafe needs --run-generated-code; give both or neither")
    check_kv(kv)
    check_device(device)
    check_exists(text, TEXT)
    for name in (*models, *([] if reference is None else [reference])):
        local_model(name)
    load_layers()
    from lowbit.checkpoint.target import check_file
    from lowbit.eval.results import SUITE, as_json, write_json
    from lowbit.eval.suite import Settings
    from lowbit.models.load import verify_checkpoint

    folder = Path("lowbit-eval") if out_folder is None else out_folder
    if json_file is not None and str(json_file) != "-":
        check_file(json_file, PERPLEXITY if suite is None else SUITE)
        if suite is not None and json_file.resolve() in ((folder / name).resolve() for name in (PAGE, PLOT)):
            raise ValueError(f"--json {json_file}: --suite writes its report or plot there; name another file")
    for name in models if verify else ():
        verify_checkpoint(name, progress=True)
    if suite is None:
        document = _perplexities(models, reference, text, window, stride, windows, kv, json_file, device)
    else:
        settings = Settings(window, stride, windows, limit, samples, _ks(k), temperature, seed, run_generated_code, unsafe, kv)
        document = _suite(models, reference, text, suite, settings, folder, str(json_file) == "-", device)
    if json_file is not None:
        if str(json_file) == "-":
            sys.stdout.write(as_json(document))
        else:
            write_json(json_file, document)
    if gate is not None and (above := _above(document, gate)):
        for line in above:
            say(line)
        raise typer.Exit(1)


def _above(document: dict[str, Any], gate: float) -> list[str]:
    """Returns a line for each loss of a result that is above `gate` nats per token. Raises ValueError if no loss was
    measured."""
    if "rows" in document:
        first, *others = document["rows"]
        losses = [(row["model"], "nats per token", row["nll"] - first["nll"]) for row in others]
    else:
        losses = [
            (model["label"], f"KL on {figure['task']}", figure["value"])
            for model in document["models"]
            for figure in model["figures"]
            if figure["metric"] == "KL mean"
        ]
    if not losses:
        raise ValueError("--gate: no loss against --reference was measured; --suite needs a .txt file and an equal vocabulary")
    return [f"{model}: {what} {loss:.4f} above --gate {gate}" for model, what, loss in losses if not loss <= gate]


def _ks(text: str) -> tuple[int, ...]:
    try:
        ks = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        ks = ()
    if not ks or min(ks) < 1:
        raise ValueError(f"--k {text!r}: must be whole numbers of at least 1, comma-separated, such as 1,10")
    return ks


def _perplexities(
    models: list[str],
    reference: str | None,
    text: Path | None,
    window: int,
    stride: int | None,
    windows: int,
    kv: str,
    json_file: Path | None,
    device: str | None,
) -> dict[str, Any]:
    from lowbit.checkpoint.reader import read_text
    from lowbit.eval import perplexity, sample_text
    from lowbit.eval.kv import stored_kv
    from lowbit.eval.suite import to_measure, token_ids, with_kv
    from lowbit.formats.kv import parse_kv
    from lowbit.models.skeleton import require_causal

    content = sample_text() if text is None else read_text(text, TEXT)
    rows = []
    table = Table(Column("model", overflow="fold"), "perplexity", "standard error", "tokens", "nats per token")
    asked = [(name, kv) for name in models]
    for name, stored in asked if reference is None else [(reference, "16"), *asked]:
        pipe = to_measure(name, True, device)
        require_causal(pipe.model, name)
        ids = token_ids(pipe, content, window, stride, windows)
        with stored_kv(pipe.model, parse_kv(stored)):
            result = perplexity(pipe.model, ids, window=window, stride=stride, progress=True)
        pipe.destroy()
        rows.append({"model": name, "kv": stored, **asdict(result)})
        error = "-" if result.standard_error is None else f"{result.standard_error:.4f}"
        table.add_row(with_kv(name, stored), f"{result.perplexity:.4f}", error, f"{result.tokens:,}", f"{result.nll:.5f}")
    if str(json_file) != "-":
        out.print(table)
    return {"result": PERPLEXITY, "rows": rows}


def _suite(
    models: list[str],
    reference: str | None,
    text: Path | None,
    suite: Path,
    settings: Settings,
    folder: Path,
    quiet: bool,
    device: str | None,
) -> dict[str, Any]:
    from lowbit.checkpoint.target import check_file
    from lowbit.eval import report
    from lowbit.eval.results import RESULTS, SUITE, UNFINISHED, check_plot
    from lowbit.eval.suite import WORDS, read_tasks, run_suite

    for name in (RESULTS, UNFINISHED, PAGE):
        check_file(folder / name, SUITE)
    check_plot(folder / PLOT, SUITE)
    if str(suite) in WORDS and suite.exists():
        raise ValueError(f"--suite {suite}: is both a built-in suite and a folder; for the folder give {suite.resolve()}")
    tasks = read_tasks(WORDS.get(str(suite), suite), text, settings)
    try:
        results = run_suite(models, reference, tasks, settings, folder, say, True, device)
    except KeyboardInterrupt:
        unfinished = folder / UNFINISHED
        say(f"the results so far are in {unfinished if unfinished.exists() else folder / RESULTS}")
        raise
    _write_report(results, folder)
    if not quiet:
        for table in report.tables(results.document):
            out.print(table)
        for line in report.skipped(results.document):
            say(f"not measured: {line}")
    return results.document


def _write_report(results: Results, folder: Path) -> None:
    """Writes the plot, if matplotlib is installed, and the report."""
    from lowbit.eval import report
    from lowbit.eval.plot import plot
    from lowbit.eval.results import RESULTS

    plots = [PLOT]
    try:
        plot(results.document, folder / plots[0])
    except ValueError as error:
        say(f"no plot: {error}")
        plots = []
    report.write_page(results.document, folder / PAGE, plots)
    for name in (RESULTS, *plots, PAGE):
        say(f"wrote {folder / name}")
