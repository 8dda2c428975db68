"""The command line: recommend, quantize, convert, generate, serve, chat, eval, inspect, explain, schemes, demo, tune, bench.

Every command exits with 0 when it did its work, 1 when it could not (one line on stderr says why and what to do), 2 when
it was called wrongly and 130 on Ctrl-C, which leaves no half-written checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lowbit._version import __version__
from lowbit.cli.bench import bench
from lowbit.cli.chat import chat
from lowbit.cli.demo import demo
from lowbit.cli.eval import evaluate
from lowbit.cli.inspect import inspect
from lowbit.cli.recommend import recommend
from lowbit.cli.serve import serve
from lowbit.cli.stderr import queued_stderr
from lowbit.cli.terminal import (
    AnyModel,
    Device,
    Json,
    Model,
    Scheme,
    check_device,
    check_json,
    check_scheme,
    check_there,
    load_layers,
    out,
    say,
    user_errors,
    write_result,
)
from lowbit.cli.tune import tune

if TYPE_CHECKING:
    from lowbit.nn.convert import Plan
    from lowbit.pipeline import Response, Stream

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="Run neural networks with low-bit weights: quantize, measure, generate, look inside.",
)


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
    learned = "learned"


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("-v", "--version", help="Print the versions and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        others = ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers"))
        out.print(f"lowbit {__version__}, {others}", highlight=False)
        raise typer.Exit


app.command()(user_errors(recommend))
app.command()(user_errors(tune))
app.command()(user_errors(bench))


@app.command()
@user_errors
def quantize(
    source: Annotated[str, typer.Argument(help="Folder of the 16-bit model, or its name on the hub: org/name.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; complete or not there at all.")],
    scheme: Annotated[str, typer.Option(help="Scheme, see above.")] = "w4a16_g64",
    method: Annotated[
        MethodChoice,
        typer.Option(metavar="NAME", help="How codes are chosen: rtn, hqq, gptq, awq, smoothquant or learned, see above."),
    ] = MethodChoice.rtn,
    search: Annotated[
        SearchChoice | None,
        typer.Option(
            metavar="NAME",
            help="How scales are found: max, from the largest weight (rtn, awq), mse, of least squares, or loss (gptq).",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help='Calibration text, plain or .jsonl with a "text" per line; Python\'s documentation when absent.'),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the calibration text.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = 512,
    seed: Annotated[int, typer.Option(help="Which pieces are drawn, for learned in which order; of --rotate.")] = 0,
    iterations: Annotated[int | None, typer.Option(min=1, help="learned: steps of 8 pieces for each layer; or 200.")] = None,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: channels with large inputs first.")] = False,
    static_groups: Annotated[bool, typer.Option("--static-groups", help="gptq: groups, scales of the first weights.")] = False,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="gptq, learned: SmoothQuant first, for schemes with 8-bit activations.")
    ] = False,
    alpha: Annotated[
        str | None, typer.Option(help="SmoothQuant: how far activations move into weights, 0 to 1 (0.5 when absent), or auto.")
    ] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Rotate Llama-like models first, by --seed.")] = False,
    rotate_inputs: Annotated[
        list[str] | None, typer.Option(help="Layer or pattern whose inputs are rotated when the model runs; repeatable.")
    ] = None,
    mix: Annotated[str | None, typer.Option(help="Schemes to choose from, layer by layer, with commas; wants --bits.")] = None,
    bits: Annotated[float | None, typer.Option(help="Bits per weight with scales that --mix may take on average.")] = None,
    low_rank: Annotated[
        int, typer.Option(min=0, help="Rank of a 16-bit correction beside each linear layer; takes back part of the error.")
    ] = 0,
    a16: Annotated[
        list[str] | None, typer.Option("--a16", help="Layer or pattern with 16-bit activations; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Module name or pattern to leave in 16 bits, instead of lm_head; repeatable.")
    ] = None,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Quantize the embedding and the LM head too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is a checkpoint.")] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Quantize a checkpoint, one tensor or one decoder layer at a time.

    A scheme is w<bits>\\[e<X>m<Y>]a16, then _g<size> for groups along K, then _z (integer zero points) or _fz
    (floating-point zeros): w8a16, w4a16_g64, w6e3m2a16, w4a16_g32_fz. With a8 or a8e4m3 instead of a16, activations are
    quantized too: w8a8, w4a8_g128, w8a8_az (with zero points). Without a granularity, a scale belongs to an output channel
    (_pc). Other tools' names: W4A16 (w4a16 too: groups of 128; w4a16_pc for channels), wf6af16, fp8, fp8_block.

    Without data, in seconds: rtn rounds each weight; hqq moves the zeros of _fz schemes. With text to calibrate on,
    in minutes: gptq lets later columns make up for each rounding; awq scales channels that meet large inputs;
    smoothquant moves the range of activations into the weights; learned, the slowest, for 4 bits and fewer,
    learns which way each weight of a decoder layer is rounded and where scales clip. A run that was killed goes on
    where it was when the same command is given again. Measure on another text than was calibrated on.

    Example: lowbit quantize HuggingFaceTB/SmolLM2-135M SmolLM2-135M-fp6 --scheme w6e3m2a16

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-int4 --scheme w4a16_g64 --method learned --samples 64

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-mix --mix w3a16_g64,w4a16_g64,w8a16 --bits 4.5
    """
    from lowbit.formats import parse_scheme
    from lowbit.methods import Mixed, method_of
    from lowbit.sources import local_model

    options = {
        "search": None if search is None else search.value, "act_order": act_order, "static_groups": static_groups,
        "smooth": smooth, "alpha": alpha, "iterations": iterations,
    }  # fmt: skip
    options |= {"seed": seed} if method is MethodChoice.learned else {}
    chosen = method_of(method.value, options, lambda name: f"--{name.replace('_', '-')}")
    if (mix is None) != (bits is None):
        raise ValueError("--mix and --bits go together: schemes to choose from, and the bits per weight they may take")
    mixed = None if mix is None or bits is None else Mixed(tuple(mix.split(",")), bits)
    for name in (scheme, *(mixed.schemes if mixed else ())):
        parse_scheme(name)
    check_device(device)
    check_there(calibration, 'calibration takes UTF-8 text, or .jsonl with a "text" a line')
    folder = local_model(source)
    load_layers()
    from lowbit.models.calibrate import Calibration, unfinished_folder
    from lowbit.models.quantize_checkpoint import quantize_checkpoint

    check_json(json_file, "lowbit quantize", target)
    try:
        plan = quantize_checkpoint(
            folder, target, scheme, skip=skip, embeddings=embeddings, method=chosen,
            calibration=Calibration(samples, length, seed, calibration), mixed=mixed, low_rank=low_rank,
            wide_inputs=a16 or (), rotation=seed if rotate else None, rotate_inputs=rotate_inputs or (), device=device,
            overwrite=overwrite, progress=True, say=say,
        )  # fmt: skip
    except KeyboardInterrupt:
        if unfinished_folder(target).exists():
            say(f"finished layers are kept in {unfinished_folder(target)}; the same command goes on from there")
        raise
    _report([*plan.lines(), f"wrote {target}"])
    write_result(json_file, "lowbit quantize", _stated(plan))


def _report(lines: list[str]) -> None:
    for line in lines:
        say(line)


def _stated(plan: Plan) -> dict[str, object]:
    """A plan as JSON: layers with their [N, K], `others` those whose scheme is another than `scheme`."""
    return {
        "scheme": plan.scheme.name,
        "others": {name: other.name for name, other in plan.others.items()},
        "layers": plan.shapes,
        "tied": plan.tied,
        "kept": [asdict(row) for row in plan.kept],
    }


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
    source: Annotated[str, typer.Argument(help="Folder of a quantized model, a GGUF file, or a name on the hub: org/name.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; complete or not there at all.")],
    to: Annotated[
        TargetChoice,
        typer.Option(
            "--to",
            metavar="NAME",
            help="Whose files to write: lowbit, gptq, awq, compressed-tensors, tensorrt-llm or dequantized, see above.",
        ),
    ] = TargetChoice.lowbit,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is a checkpoint.")] = False,
    json_file: Json = None,
) -> None:
    """Turn a quantized checkpoint into another tool's, without rounding a weight.

    To run, measure or inspect a model, no conversion is needed: generate, eval and inspect take the files below as they are.

    Read: GPTQ (versions 1 and 2, act-order), AWQ (gemm), auto-round, compressed-tensors (integers, FP8, MX, NVFP4), FP8,
    torchao, ModelOpt (FP8, NVFP4, AWQ), bitsandbytes NF4 and FP4 (to dequantized only), GGUF (Q4_0 to Q6_K of llama, qwen2 and
    qwen3 models), TensorRT-LLM (W4A16_AWQ, W8A16, W4A16 and GPTQ of llama, mistral, qwen2 and qwen3 models), and lowbit. The
    tool is found out from config.json.

    Written: lowbit (runs here with plain from_pretrained), gptq, awq, compressed-tensors (for vLLM and others), tensorrt-llm
    (symmetric int4 in groups of 64 or 128, for trtllm-build), and dequantized: plain weights in the model's type (of 16 bits
    and rounding least, where none is stated), to quantize anew. What the files of TARGET cannot hold is refused, layer and
    reason named; docs/checkpoints.md has the table.

    Example: lowbit convert Llama-3-8B-AWQ Llama-3-8B-lowbit
    """
    from lowbit.sources import local_model

    folder = local_model(source, quantized=True)
    load_layers()
    from lowbit.models.convert_checkpoint import convert_checkpoint

    check_json(json_file, "lowbit convert", target)
    report = convert_checkpoint(folder, target, to.value, overwrite=overwrite, progress=True, say=say)
    _report([*report.lines(), f"wrote {target}"])
    write_result(json_file, "lowbit convert", asdict(report))


@app.command()
@user_errors
def generate(
    model: AnyModel,
    prompts: Annotated[list[str], typer.Argument(help="One or more texts to continue.")],
    scheme: Scheme = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most, its prompt not counted.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample (top-p 0.9) instead of taking the likeliest token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of --sample.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the files with their checksums first.")] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Continue texts with a model, greedily unless --sample is given; on a terminal, one text as it comes.

    Bars show there how far weights are read, and kernels compiled where a GPU needs them for the first time; where stderr is a
    file or a pipe, lines do, every ten seconds.

    GPTQ, AWQ, auto-round, compressed-tensors, FP8, torchao, ModelOpt and GGUF weights are loaded as they are, without a
    conversion first (docs/checkpoints.md).

    Example: lowbit generate Llama-3-8B-AWQ "The light of the sun"
    """
    from lowbit.sources import local_model

    check_scheme(scheme)
    check_device(device)
    path = str(local_model(model))
    load_layers()
    from lowbit.pipeline import pipeline

    check_json(json_file, "lowbit generate")
    pipe = pipeline(path, scheme=scheme, device=device, verify=verify, progress=True)
    options = {"max_new_tokens": max_new_tokens, "do_sample": sample, "seed": seed}
    if len(prompts) == 1 and out.is_terminal and str(json_file) != "-" and not pipe.refusals:
        responses = [_show_as_it_comes(pipe.stream(prompts[0], **options), prompts[0])]
    else:
        responses = pipe(prompts, **options)
        if str(json_file) != "-":
            for prompt, response in zip(prompts, responses, strict=True):
                _show_prompt(prompt)
                out.print(response.generated_text)
    answers = [{"prompt": p, **asdict(r)} for p, r in zip(prompts, responses, strict=True)]
    write_result(json_file, "lowbit generate", {"responses": answers})


def _show_prompt(prompt: str) -> None:
    out.print(prompt, style="bold", end="")


def _show_as_it_comes(stream: Stream, prompt: str) -> Response:
    """Writes an answer piece by piece; Ctrl-C ends it."""
    _show_prompt(prompt)
    with stream:
        for piece in stream:
            out.print(piece, end="", soft_wrap=True)
    out.print()
    assert stream.response is not None
    return stream.response


app.command()(queued_stderr()(user_errors(serve)))
app.command(name="run")(user_errors(chat))
app.command(name="chat", help="The same as run.", short_help="The same as run.")(user_errors(chat))
app.command(name="eval")(user_errors(evaluate))
app.command()(user_errors(inspect))


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
    from lowbit.sources import local_model

    check_scheme(scheme)
    folder = local_model(model)
    load_layers()
    from lowbit.explain import explain as explain_weight
    from lowbit.explain import render

    steps = explain_weight(folder, layer, row, column, scheme=scheme, sm=sm)
    out.print(render(steps), soft_wrap=True)


@app.command()
@user_errors
def schemes() -> None:
    """List the scheme grammar by example, and the aliases."""
    from lowbit.formats import ALIASES, GRAMMAR
    from lowbit.formats.scheme import PRESET

    out.print(GRAMMAR, markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"one scale per output channel without _g, _b or _t (_pc says so); {PRESET}",
        soft_wrap=True,
    )
    out.print(
        "_ct, _hf, _fb: activations quantized as the tool of a converted file does it",
        soft_wrap=True,
    )
    table = Table("name", "means")
    for alias, meaning in ALIASES.items():
        table.add_row(alias, meaning)
    out.print(table)


app.command()(user_errors(demo))
