"""`python -m study quantizing-speed`: how long quantizing a model of a shape takes, by lowbit and by another tool.

A few decoder layers with Gaussian weights are quantized from files to files, once with one layer and once with several. The
difference is the time of a layer, and the run with several plus that for each missing layer is the time of the whole shape: an
extrapolation, since a whole 8B model would take minutes for each row. A short run before compiles the kernels.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.language_model import SHAPES, random_model
from lowbit.checkpoint.target import CHECKPOINT, discard
from lowbit.cli.terminal import check_device, say, user_errors
from lowbit.hardware.machine import torch_device
from lowbit.methods import Gptq, Learned
from lowbit.models.calibrate import Calibration
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.progress import Progress
from study.results import Results
from study.rival import Batch, Iterations, Rival, bits_and_group, check_rival, quantize_by_rival

Document = Mapping[str, Any]

RESULT = "lowbit study quantizing-speed"
ROW_KEYS = ("key", "method", "seconds", "peak_bytes", "options", "figures")
PACKAGES = ("transformers", "tokenizers", "auto-round")
METHODS = ("learned", "gptq")
WARM_UP_ITERATIONS = 2

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Settings:
    """A model of `shape` with 1 and with `layers` decoder layers in `scheme`, calibrated on `samples` pieces of `length`
    tokens; learning takes `iterations` of `batch` pieces a layer."""

    shape: str = "Llama-3-8B"
    layers: int = 2
    scheme: str = "w4a16_g128"
    iterations: int = 200
    batch: int = 8
    samples: int = 128
    length: int = 512


@app.command()
@user_errors
def main(
    shape: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(SHAPES)}.")] = Settings.shape,
    layers: Annotated[int, typer.Option(min=2, help="Decoder layers of the longer run.")] = Settings.layers,
    scheme: Annotated[str, typer.Option(help="Scheme: integers in groups.")] = Settings.scheme,
    methods: Annotated[str, typer.Option(help="Methods of lowbit, separated by commas.")] = ",".join(METHODS),
    rival: Rival = None,
    iterations: Iterations = Settings.iterations,
    batch: Batch = Settings.batch,
    samples: Annotated[int, typer.Option(min=1, help="Pieces to calibrate on, the same for all.")] = Settings.samples,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = Settings.length,
    output: Annotated[Path, typer.Option(help="Result file, complete after every row and resumed.")] = Path(
        "quantizing-speed.json"
    ),
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for the checkpoints, 7 GB for an 8B shape; by default the system's for such files."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Times quantizing a model of a shape by learned rounding and by GPTQ, and with --rival by another tool on the same pieces.

    lowbit's time is that of `lowbit quantize`: reading, quantizing, writing, embedding and head. That of auto-round is reading
    and quantizing, without writing. Weights are Gaussian and tokens are characters, on which no time depends.

    Example: python -m study quantizing-speed --device cuda --rival auto-round

    Example: python -m study quantizing-speed --shape SmolLM2-135M --scheme w4a16_g64 --iterations 5 --samples 4    (on a CPU)
    """
    check_device(device)
    check_rival(rival)
    if shape not in SHAPES:
        raise ValueError(f"--shape {shape!r}: must be one of {', '.join(SHAPES)}")
    bits_and_group(scheme)
    chosen = list(dict.fromkeys(part.strip() for part in methods.split(",") if part.strip()))
    if unknown := [method for method in chosen if method not in METHODS]:
        raise ValueError(f"--methods {methods!r}: {', '.join(unknown)} is none of {', '.join(METHODS)}")
    settings = Settings(shape, layers, scheme, iterations, batch, samples, length)
    every = [*chosen, *([] if rival is None else [rival])]
    document = measure(output, settings, every, work=work, device=device, say=say, progress=True)
    typer.echo(table(document))
    say(f"wrote {output}")


def measure(
    output: Path,
    settings: Settings,
    methods: Sequence[str],
    *,
    work: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> Document:
    """Times each of `methods`, names of `METHODS` or of a rival, and writes the result file `output` after each. Returns its
    document. `work`: where the checkpoints are written, and removed. Raises ValueError for a file measured otherwise."""
    request = {"device": device, "settings": asdict(settings)}
    results = Results(output, request, RESULT, ROW_KEYS, PACKAGES)
    results.document["layers"] = SHAPES[settings.shape]().num_hidden_layers
    missing = [method for method in methods if method not in results]
    with tempfile.TemporaryDirectory(dir=work, prefix="lowbit-speed-") as scratch:
        folders = {}
        for layers in (1, settings.layers) if missing else ():
            say(f"writing {settings.shape} with {layers} layer{'s' * (layers > 1)}")
            folders[layers] = write_model(Path(scratch) / f"{layers}", settings.shape, layers, device)
        for method in Progress(missing, desc="quantizing speed", unit="methods", shown=progress):
            say(method)
            results.add(_row(method, folders, settings, device, progress), ())
    results.write(complete=True)
    return results.document


def write_model(folder: Path, shape: str, layers: int, device: str) -> Path:
    """Writes a model of a shape with Gaussian weights in bf16, and a tokenizer of single characters. Returns the folder."""
    model = random_model(shape, None, None, torch.bfloat16, torch_device(device), layers)
    model.save_pretrained(folder)
    vocabulary = {chr(code): number for number, code in enumerate(range(32, 127))} | {"<unk>": 95}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(folder)
    return folder


def _row(method: str, folders: Mapping[int, Path], settings: Settings, device: str, progress: bool) -> dict[str, Any]:
    """Returns the row of a method: the seconds by number of layers, after a short run that compiles."""
    calibration = Calibration(settings.samples, settings.length)
    short = Calibration(settings.batch, settings.length)
    _seconds(method, folders[1], settings, WARM_UP_ITERATIONS, short, device, progress)
    on_gpu = torch_device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds: dict[str, float] = {}
    options: dict[str, Any] = {}
    for layers, folder in folders.items():
        seconds[str(layers)], options = _seconds(method, folder, settings, settings.iterations, calibration, device, progress)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return {"key": method, "method": method, "seconds": seconds, "peak_bytes": peak, "options": options}


def _seconds(
    method: str, source: Path, settings: Settings, iterations: int, calibration: Calibration, device: str, progress: bool
) -> tuple[float, dict[str, Any]]:
    """Quantizes the model in `source` once. Returns the seconds, and the options of a rival."""
    if method not in METHODS:
        tokens = calibration.tokens(source)
        start = time.perf_counter()
        _, options = quantize_by_rival(
            source, settings.scheme, tokens, iterations=iterations, batch=settings.batch, seed=0, device=device
        )
        return time.perf_counter() - start, options
    target = source.with_name(f"{source.name}-{method}")
    chosen = Gptq() if method == "gptq" else Learned(iterations, settings.batch)
    start = time.perf_counter()
    quantize_checkpoint(
        source, target, settings.scheme, method=chosen, calibration=calibration, device=device, progress=progress
    )
    seconds = time.perf_counter() - start
    discard(target, CHECKPOINT)
    return seconds, {}


def layer_seconds(row: Mapping[str, Any]) -> float:
    """Returns the time of a layer: what the longer run takes more than the shorter one, by layer."""
    (fewer, short), (more, long) = sorted((int(layers), seconds) for layers, seconds in row["seconds"].items())
    return float(long - short) / (more - fewer)


def whole_seconds(row: Mapping[str, Any], layers: int) -> float:
    """Returns the extrapolated time of `layers` layers."""
    measured, seconds = max((int(count), seconds) for count, seconds in row["seconds"].items())
    return float(seconds) + (layers - measured) * layer_seconds(row)


def table(document: Document) -> str:
    """Returns a Markdown table of the measured seconds and the extrapolated minutes."""
    s, layers = document["request"]["settings"], document["layers"]
    where = ", ".join(document["machine"]["gpus"]) or "a CPU"
    lines = [
        f"{s['shape']} to {s['scheme']} on {where}: {s['samples']} x {s['length']} tokens; learning {s['iterations']} "
        f"iterations of {s['batch']} pieces. Minutes of {layers} layers are extrapolated from {s['layers']}.",
        "",
        f"| method | seconds, 1 layer | {s['layers']} layers | a layer | minutes, {layers} layers | peak GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        cells = [f"{row['seconds'][str(count)]:.1f}" for count in (1, s["layers"])]
        cells += [f"{layer_seconds(row):.1f}", f"{whole_seconds(row, layers) / 60:.1f}", peak]
        lines.append(f"| {' | '.join([row['method'], *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    app()
