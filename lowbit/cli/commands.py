"""The command line: recommend, quantize, convert, generate, serve, chat, eval, compile, compile-wheel, export-kernel,
eval-images, import-onnx, export-onnx, inspect, explain, schemes, demo, tune, bench.

Exit codes: 0 success, 1 error (one line on stderr says why and what to do), 2 wrong arguments, 130 Ctrl-C, which leaves no
incomplete checkpoint.
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
from lowbit.cli.compile import compile_, compile_wheel
from lowbit.cli.demo import demo
from lowbit.cli.eval import evaluate
from lowbit.cli.export import export_kernel
from lowbit.cli.images import eval_images, export_onnx, import_onnx
from lowbit.cli.inspect import inspect
from lowbit.cli.recommend import recommend
from lowbit.cli.serve import serve
from lowbit.cli.stderr import queued_stderr
from lowbit.cli.terminal import (
    KERNELS_FILE,
    KV,
    AnyModel,
    Device,
    Draft,
    Json,
    Kernels,
    Lora,
    Model,
    Scheme,
    Speculate,
    TensorParallel,
    adapters_of,
    check_device,
    check_exists,
    check_json,
    check_kv,
    check_scheme,
    load_layers,
    local_draft,
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
    help="Run neural networks with low-bit weights: quantize, evaluate, generate, serve, inspect.",
)


class SearchChoice(str, Enum):
    """The criterion that chooses scales."""

    max = "max"
    mse = "mse"
    loss = "loss"


class MethodChoice(str, Enum):
    """The quantization method, which chooses the codes."""

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
    target: Annotated[Path, typer.Argument(help="Folder to write; it appears only when complete.")],
    scheme: Annotated[str, typer.Option(help="Scheme, see above.")] = "w4a16_g64",
    method: Annotated[
        MethodChoice,
        typer.Option(metavar="NAME", help="Quantization method: rtn, hqq, gptq, awq, smoothquant or learned, see above."),
    ] = MethodChoice.rtn,
    search: Annotated[
        SearchChoice | None,
        typer.Option(
            metavar="NAME",
            help="Scale search: max takes the largest weight (rtn, awq), mse the least squared error, loss the least layer "
            "error (gptq).",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help='Calibration text: UTF-8, or .jsonl with a "text" per line. Default: Python\'s documentation.'),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens per calibration sample.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the calibration samples, of learned's order and of --rotate.")] = 0,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="learned: steps of 8 samples per decoder layer. Default: 200.")
    ] = None,
    distill: Annotated[
        int | None,
        typer.Option(min=1, help="learned: steps that train all scales, norms and biases against the 16-bit model's logits."),
    ] = None,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: quantize channels with large inputs first.")] = False,
    static_groups: Annotated[
        bool, typer.Option("--static-groups", help="gptq: choose groups and scales before any update of the weights.")
    ] = False,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="gptq, learned: SmoothQuant first, for schemes with 8-bit activations.")
    ] = False,
    alpha: Annotated[str | None, typer.Option(help="SmoothQuant's migration strength, 0 to 1, or auto. Default: 0.5.")] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate the weights of Llama-like models first, seeded by --seed.")
    ] = False,
    rotate_inputs: Annotated[
        list[str] | None, typer.Option(help="Layer or pattern whose inputs are rotated at run time; repeatable.")
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="Comma-separated schemes, of which each layer gets one; requires --bits.")
    ] = None,
    bits: Annotated[float | None, typer.Option(help="Average bits per weight for --mix, scales included.")] = None,
    low_rank: Annotated[
        int, typer.Option(min=0, help="Rank of a 16-bit correction of each linear layer's quantization error.")
    ] = 0,
    a16: Annotated[
        list[str] | None, typer.Option("--a16", help="Layer or pattern that keeps 16-bit activations; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Module or pattern to keep in 16 bits; replaces the default lm_head; repeatable.")
    ] = None,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Also quantize the embedding and the LM head.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is a checkpoint.")] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Quantize a checkpoint, one tensor or one decoder layer at a time.

    A scheme is w<bits>\\[e<X>m<Y>]a16, then _g<size> for groups along K, then _z (integer zero points) or _fz
    (floating-point zeros): w8a16, w4a16_g64, w6e3m2a16, w4a16_g32_fz. With a8 or a8e4m3 instead of a16, activations are
    quantized too: w8a8, w4a8_g128, w8a8_az (with zero points). Without a granularity, each output channel has one scale
    (_pc). Names of other tools work too: W4A16 (as w4a16: groups of 128; w4a16_pc: channels), wf6af16, fp8, fp8_block.

    Methods without data take seconds: rtn rounds each weight; hqq optimizes the zeros of _fz schemes. Methods with
    calibration take minutes: gptq compensates each rounding error in later columns; awq scales channels with large inputs;
    smoothquant moves the range of activations into the weights; learned, the slowest, for 4 bits and fewer, optimizes
    rounding and clipping per decoder layer. To resume an interrupted run, repeat the command. Evaluate on a text other than
    the calibration text.

    Example: lowbit quantize HuggingFaceTB/SmolLM2-135M SmolLM2-135M-fp6 --scheme w6e3m2a16

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-int4 --scheme w4a16_g64 --method learned --samples 64

    Example: lowbit quantize SmolLM2-135M SmolLM2-135M-mix --mix w3a16_g64,w4a16_g64,w8a16 --bits 4.5
    """
    from lowbit.formats import parse_scheme
    from lowbit.methods import Mixed, method_of
    from lowbit.sources import local_model

    options = {
        "search": None if search is None else search.value, "act_order": act_order, "static_groups": static_groups,
        "smooth": smooth, "alpha": alpha, "iterations": iterations, "distill": distill,
    }  # fmt: skip
    options |= {"seed": seed} if method is MethodChoice.learned else {}
    chosen = method_of(method.value, options, lambda name: f"--{name.replace('_', '-')}")
    if (mix is None) != (bits is None):
        raise ValueError("--mix and --bits are needed together: --mix w3a16_g64,w4a16_g64,w8a16 --bits 4.5")
    mixed = None if mix is None or bits is None else Mixed(tuple(mix.split(",")), bits)
    for name in (scheme, *(mixed.schemes if mixed else ())):
        parse_scheme(name)
    check_device(device)
    check_exists(calibration, '--calibration takes UTF-8 text, or .jsonl with a "text" per line')
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
            say(f"finished layers are kept in {unfinished_folder(target)}; repeat the command to resume")
        raise
    _report([*plan.lines(), f"wrote {target}"])
    write_result(json_file, "lowbit quantize", _plan_as_json(plan))


def _report(lines: list[str]) -> None:
    for line in lines:
        say(line)


def _plan_as_json(plan: Plan) -> dict[str, object]:
    """Returns a plan as JSON. `layers` has the shape [N, K] of each layer, or [E, N, K] of weights of experts. `others` maps
    layers whose scheme is not `scheme` to their own scheme."""
    return {
        "scheme": plan.scheme.name,
        "others": {name: other.name for name, other in plan.others.items()},
        "layers": plan.layers,
        "tied": plan.tied,
        "kept": [asdict(row) for row in plan.kept],
    }


class TargetChoice(str, Enum):
    """The checkpoint formats that `lowbit convert` writes."""

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
    target: Annotated[Path, typer.Argument(help="Folder to write; it appears only when complete.")],
    to: Annotated[
        TargetChoice,
        typer.Option(
            "--to",
            metavar="NAME",
            help="Format to write: lowbit, gptq, awq, compressed-tensors, tensorrt-llm or dequantized, see above.",
        ),
    ] = TargetChoice.lowbit,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is a checkpoint.")] = False,
    json_file: Json = None,
) -> None:
    """Convert a quantized checkpoint to another tool's format without rounding a weight.

    generate, eval and inspect read the formats below directly; they need no conversion.

    Reads: GPTQ (versions 1 and 2, act-order), AWQ (gemm), auto-round, compressed-tensors (integers, FP8, MX, NVFP4), FP8,
    torchao, ModelOpt (FP8, NVFP4, AWQ), bitsandbytes NF4 and FP4 (to dequantized only), GGUF (Q4_0 to Q6_K of llama, qwen2 and
    qwen3 models), TensorRT-LLM (W4A16_AWQ, W8A16, W4A16 and GPTQ of llama, mistral, qwen2 and qwen3 models), and lowbit.
    config.json determines the format.

    Writes: lowbit (loads here with plain from_pretrained), gptq, awq, compressed-tensors (for vLLM and others), tensorrt-llm
    (symmetric int4 in groups of 64 or 128, for trtllm-build), and dequantized: plain weights in the model's dtype, to quantize
    again (if config.json states none, in the 16-bit dtype with the smaller error). A layer that the format cannot represent
    is an error with its name and the reason; docs/checkpoints.md has the table.

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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of generated tokens.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample (top-p 0.9) instead of greedy decoding.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of --sample.")] = None,
    kv: KV = "16",
    speculate: Speculate = 0,
    draft: Draft = None,
    lora: Lora = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of several --lora computes. Default: the only one.")
    ] = None,
    tensor_parallel: TensorParallel = 1,
    kernels: Kernels = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the files with their checksums first.")] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Continue prompts with a model, greedily unless --sample is given. On a terminal, a single response is streamed.

    Progress bars show the loading of weights and, on the first run on a GPU, the compilation of kernels. If stderr is a file
    or a pipe, a line every ten seconds does.

    GPTQ, AWQ, auto-round, compressed-tensors, FP8, torchao, ModelOpt and GGUF weights load without conversion
    (docs/checkpoints.md).

    Example: lowbit generate Llama-3-8B-AWQ "The light of the sun"
    """
    from lowbit.sources import local_model

    check_scheme(scheme)
    check_kv(kv)
    check_device(device)
    check_exists(kernels, KERNELS_FILE)
    adapters = adapters_of(lora)
    if adapter is None and len(adapters) > 1:
        raise ValueError(f"--lora names several adapters: say which computes, --adapter {next(iter(adapters))}")
    if adapter is not None and adapter not in adapters:
        raise ValueError(f"--adapter {adapter!r}: no --lora has this name")
    path, draft_path = str(local_model(model)), local_draft(draft)
    load_layers("lowbit.pipeline")
    from lowbit.pipeline import pipeline

    check_json(json_file, "lowbit generate")
    pipe = pipeline(
        path, scheme=scheme, device=device, verify=verify, progress=True, kv=kv, speculate=speculate,
        draft=draft_path, lora=adapters, kernels=kernels, tensor_parallel=tensor_parallel,
    )  # fmt: skip
    adapter = next(iter(adapters), None) if adapter is None else adapter
    options = {"max_new_tokens": max_new_tokens, "do_sample": sample, "seed": seed, "adapter": adapter}
    if len(prompts) == 1 and out.is_terminal and str(json_file) != "-" and not pipe.refusals:
        responses = [_print_stream(pipe.stream(prompts[0], **options), prompts[0])]
    else:
        responses = pipe(prompts, **options)
        if str(json_file) != "-":
            for prompt, response in zip(prompts, responses, strict=True):
                _print_prompt(prompt)
                out.print(response.generated_text)
    answers = [{"prompt": p, **asdict(r)} for p, r in zip(prompts, responses, strict=True)]
    write_result(json_file, "lowbit generate", {"responses": answers})


def _print_prompt(prompt: str) -> None:
    out.print(prompt, style="bold", end="")


def _print_stream(stream: Stream, prompt: str) -> Response:
    """Prints a response while it is generated."""
    _print_prompt(prompt)
    with stream:
        for delta in stream:
            out.print(delta, end="", soft_wrap=True)
    out.print()
    assert stream.response is not None
    return stream.response


app.command()(queued_stderr()(user_errors(serve)))
app.command(name="run")(user_errors(chat))
app.command(name="chat", help="The same as run.", short_help="The same as run.")(user_errors(chat))
app.command(name="eval")(user_errors(evaluate))
app.command(name="compile")(user_errors(compile_))
app.command(name="compile-wheel")(user_errors(compile_wheel))
app.command(name="export-kernel")(user_errors(export_kernel))
app.command(name="eval-images")(user_errors(eval_images))
app.command(name="import-onnx")(user_errors(import_onnx))
app.command(name="export-onnx")(user_errors(export_onnx))
app.command()(user_errors(inspect))


@app.command()
@user_errors
def explain(
    model: Model,
    layer: Annotated[str | None, typer.Argument(help="Layer to follow. Default: the first one.")] = None,
    row: Annotated[int, typer.Option(min=0, help="Output channel of the weight.")] = 0,
    column: Annotated[int, typer.Option(min=0, help="Input channel of the weight.")] = 0,
    scheme: Annotated[str | None, typer.Option(help="For a 16-bit model: quantize the weight to this scheme first.")] = None,
    sm: Annotated[int, typer.Option(help="SM version of the GPU: 80, 86, 89, 90, 100, 120.")] = 90,
) -> None:
    """Follow one weight, source file by source file, from the checkpoint to the tensor core, and name its kernels."""
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
    """Print the grammar of schemes with examples, and the aliases."""
    from lowbit.formats import ALIASES, GRAMMAR
    from lowbit.formats.scheme import PRESET

    out.print(GRAMMAR, markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"without _g, _b or _t: one scale per output channel (_pc); {PRESET}",
        soft_wrap=True,
    )
    out.print(
        "_ct, _hf, _fb: activations are quantized as in the tool that wrote the original checkpoint",
        soft_wrap=True,
    )
    table = Table("name", "means")
    for alias, meaning in ALIASES.items():
        table.add_row(alias, meaning)
    out.print(table)


app.command()(user_errors(demo))
