"""`python -m benchmarks`: measures products, activations, convolutions, decode steps and servers; prints tables of results."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lowbit.cli.serve import MOST_ON_A_CPU, MOST_ON_A_GPU, extra_missing
from lowbit.cli.terminal import KV, Device, check_device, check_kv, check_schemes, err, load_layers, out, say, user_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Measure this library beside cuBLAS and its rivals, from a checkout; make tables of the results.",
)


@app.command(name="gemm")
@user_errors
def gemm(
    formats: Annotated[str | None, typer.Option(help="Schemes, separated by commas.")] = None,
    shapes: Annotated[
        str | None, typer.Option(help="Weights as NxK, or models, separated by commas: 8192x28672,Llama-3-8B,Qwen2.5-7B.")
    ] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, separated by commas: 1,16,64,256,1024,4096.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of x and y: float16 or bfloat16.")] = "float16",
    peers: Annotated[
        str | None,
        typer.Option(help="humming, marlin, machete, bitsandbytes, quack, gemlite, torch, or none. Default: those installed."),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-gemm.json.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them too: a .png or .svg file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer formats, shapes and M, and no tuning of peers.")] = False,
) -> None:
    """Time y = x w^T with quantized weights on this GPU: us, share of the machine's limit, times cuBLAS and the best peer.

    Needs an NVIDIA GPU. Kernels are compiled first, in up to 16 processes. Each row is checked against a float64 product. The
    file is complete after every row, so Ctrl-C keeps what was measured.

    Example: python -m benchmarks gemm --formats w4a16_g128,w6e3m2a16 --shapes 8192x28672 --m 1,16,256 --peers none
    """
    check_schemes(formats)
    load_layers()
    from benchmarks import report
    from benchmarks.gemm import choose_peers, run
    from benchmarks.request import make_request
    from benchmarks.results import GEMM
    from lowbit.eval.results import check_plot

    if plot_file is not None:
        check_plot(plot_file, GEMM)
    request = make_request(formats, shapes, m, dtype, quick)
    present, absent = choose_peers(peers)
    from lowbit.progress import Progress

    with Progress(desc="starting", unit="products") as bar:
        results = run(request, present, absent, out_file, say, bar.at)
    out.print(report.table(results.document))
    for line in report.failed(results.document):
        say(line)
    say(f"wrote {results.path}")
    if plot_file is not None:
        _plot(results.document, plot_file)


@app.command(name="tiles")
@user_errors
def tiles(
    formats: Annotated[str | None, typer.Option(help="Schemes, separated by commas.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Weights as NxK, separated by commas: 8192x8192,8192x28672.")] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, separated by commas: 1,16,64,256,1024,4096.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of x and y: float16 or bfloat16.")] = "float16",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer formats, shapes and M.")] = False,
) -> None:
    """Check the choice of tile on this GPU: time the chosen one, the next candidates and the batch-invariant one.

    Needs an NVIDIA GPU. Rows in which another tile is more than 3 % faster are printed at the end, in the form of
    kernels/choose/measured.py.

    Example: python -m benchmarks tiles --formats w4a16_g128 --shapes 4096x4096 --m 16,64,256
    """
    check_schemes(formats)
    load_layers()
    import torch

    from benchmarks.request import make_request
    from benchmarks.tiles import measure_tiles
    from lowbit.hardware.machine import machine_of
    from lowbit.tune.timing import warm_up

    request = make_request(formats, shapes, m, dtype, quick)
    if not torch.cuda.is_available():
        raise ValueError(f"bench tiles measures an NVIDIA GPU and torch {torch.__version__} sees none")
    warm_up()
    machine = replace(machine_of("cuda"), tuned="")
    rows = list(measure_tiles(request, machine, say))
    table = Table("format", "N x K", "M", "chosen", "us", "best us", "batch-invariant us", "cost")
    for row in rows:
        table.add_row(
            row.scheme, f"{row.shape.n} x {row.shape.k}", str(row.shape.m), str(row.chosen), f"{row.chosen_us:.1f}",
            f"{row.best_us:.1f}", f"{row.invariant_us:.1f}", f"{row.invariant_us / row.chosen_us:.2f}x",
        )  # fmt: skip
    out.print(table)
    for row in rows:
        if row.worth_a_row:
            print(row.measured(machine.product))


@app.command(name="experts")
@user_errors
def experts(
    models: Annotated[
        str | None, typer.Option(help="Models, separated by commas: Qwen3-30B-A3B,Mixtral-8x7B; all four.")
    ] = None,
    formats: Annotated[str | None, typer.Option(help="Schemes, separated by commas.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of a step, separated by commas: 1,4,16,64,256,1024.")] = None,
    tiles: Annotated[bool, typer.Option("--tiles", help="Time the next candidates of each product too.")] = False,
    tile_rows: Annotated[int, typer.Option(help="Rows of the routing's tiles: 8, 16, 64, 128; 0 for the chosen.")] = 0,
    torch16: Annotated[bool, typer.Option("--torch16/--no-torch16", help="Time torch's 16-bit experts beside.")] = True,
    rivals: Annotated[
        str, typer.Option(help="Time beside, from vLLM's wheel (pip install vllm): marlin,triton,wna16,humming; or none.")
    ] = "none",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-experts.json.")
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file; needs no GPU.")] = None,
) -> None:
    """Time the expert block of a layer on this GPU (route, gate and up, down, sum). Its limit is the time to read the experts
    used.

    Needs an NVIDIA GPU. The first call of each row is checked against a float64 layer. The file is complete after every row.

    Example: python -m benchmarks experts --models Qwen3-30B-A3B --formats w4a16_g128 --tokens 1,16 --tiles
    """
    check_schemes(formats)
    load_layers()
    from benchmarks import experts as bench
    from lowbit.eval.results import read_json

    if report_file is not None:
        document = read_json(report_file, bench.RESULT, bench.SCHEMA)
    else:
        path, document = bench.run(
            bench.make_request(models, formats, tokens, tiles, torch16, tile_rows, rivals), out_file, say
        )
        say(f"wrote {path}")
    shown = Table(*bench.COLUMNS)
    for row in bench.table(document):
        shown.add_row(*row)
    out.print(shown)
    for line in bench.tile_lines(document):
        print(line)


@app.command(name="choice")
@user_errors
def choice(
    models: Annotated[str | None, typer.Option(help="Models, separated by commas: Llama-3-8B,Qwen2.5-7B; all twelve.")] = None,
    schemes: Annotated[str | None, typer.Option(help="Schemes, separated by commas: w4a16_g128,w8a8.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Rows of x, separated by commas: 1,16,64,256.")] = None,
    half: Annotated[str | None, typer.Option(help="Only weights of this half: tuned or untuned.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="End after so long, compiling included.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-choice.json.")
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file; needs no GPU.")] = None,
) -> None:
    """Time the chosen tile and all reasonable others, for weights of twelve models: gap to the best, and time by tokens.

    Needs an H100 or H200. Weights are whole, halves and quarters. Half of the weights are for tuning the choice, the other half
    for judging it. The two halves alternate in the run. The file is written at intervals and at the end, so Ctrl-C keeps what
    was measured.

    Example: python -m benchmarks choice --models Llama-3-8B --schemes w4a16_g128 --tokens 1,16,64,256
    """
    check_schemes(schemes)
    load_layers()
    from benchmarks import choice_report
    from benchmarks.choice import as_chosen_now, make_trial_grid, run
    from lowbit.hardware.machine import typical_machine

    if report_file is not None:
        document = choice_report.load(report_file)
        now = as_chosen_now(document["rows"], typical_machine(90))
        title = f"regret with the tiles that are chosen today, {len(now)} of {len(document['rows'])} timed"
        out.print(choice_report.regret_table(now, "scheme", title))
        out.print(f"Below: as they were chosen on {document['date']}.")
    else:
        grid = make_trial_grid(models, schemes, tokens, half, seconds)
        from lowbit.progress import Progress

        with Progress(desc="starting", unit="products") as bar:
            path, document = run(grid, out_file, say, bar.at)
        say(f"wrote {path}")
    out.print(*choice_report.tables(document), sep="\n\n")
    for line in choice_report.failed(document):
        say(line)


@app.command(name="report")
@user_errors
def report(
    files: Annotated[
        list[Path], typer.Argument(help="Result files of `python -m benchmarks gemm`, of one machine and commit.")
    ],
    m: Annotated[str | None, typer.Option("--m", help="Only these numbers of rows of x: 1,16,256.")] = None,
    formats: Annotated[str | None, typer.Option(help="Only these schemes, separated by commas.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Only weights of these NxK, separated by commas.")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the block between <!-- bench:gemm --> and <!-- /bench:gemm --> of this file.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the results: a .png or .svg file.")] = None,
) -> None:
    """Print the Markdown tables of result files; needs no GPU. Several files, such as one for each model, are one table.

    Example: python -m benchmarks report benchmarks/results/h200/2026-11-21-gemm.json --readme README.md
    """
    load_layers()
    from benchmarks import report
    from benchmarks.request import parse_shape
    from benchmarks.results import GEMM, load_all
    from lowbit.eval.results import check_plot
    from lowbit.tune.trials import parse_rows

    if plot_file is not None:
        check_plot(plot_file, GEMM)
    document = load_all(files)
    scheme_names = None if formats is None else formats.split(",")
    sizes = None if shapes is None else [parse_shape(part) for part in shapes.split(",")]
    text = report.markdown(document, None if m is None else parse_rows(m), scheme_names, sizes)
    if readme is None:
        sys.stdout.write(text)
    else:
        report.rewrite_readme(readme, text)
        say(f"wrote the table into {readme}")
    if plot_file is not None:
        _plot(document, plot_file)


@app.command(name="activations")
@user_errors
def activations(
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, separated by commas: 16,256,4096,16384.")] = None,
    k: Annotated[str | None, typer.Option("--k", help="Columns of x, separated by commas: 4096,8192,28672.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of x: float16 or bfloat16.")] = "float16",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-activations.json.")
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file; needs no GPU.")] = None,
) -> None:
    """Time the quantization of activations on this GPU, alone and fused with norms and SiLU: us, share of a copy's speed.

    Needs an NVIDIA GPU. Results are compared with the CPU's. A second table has products with x quantized outside and inside
    the timed region. The file is complete after every row, so Ctrl-C keeps what was measured; the tables are Markdown.

    Example: python -m benchmarks activations --m 16,4096 --k 8192
    """
    load_layers()
    import torch

    from benchmarks.activations import COLUMNS, ROWS, run
    from benchmarks.activations_report import load, markdown
    from benchmarks.request import DTYPES
    from lowbit.tune.trials import parse_rows

    if report_file is not None:
        print(markdown(load(report_file)), end="")
        return
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}")
    rows = ROWS if m is None else parse_rows(m)
    columns = COLUMNS if k is None else parse_rows(k)
    if not torch.cuda.is_available():
        raise ValueError(f"bench activations measures an NVIDIA GPU and torch {torch.__version__} sees none")
    path, document = run(rows, columns, DTYPES[dtype], out_file, lambda line: print(line, file=sys.stderr, flush=True))
    print(markdown(document), end="")
    print(f"wrote {path}", file=sys.stderr)


@app.command(name="conv")
@user_errors
def conv(
    models: Annotated[
        str, typer.Option(help="Networks, separated by commas: resnet50, efficientnet-lite0.")
    ] = "resnet50,efficientnet-lite0",
    storages: Annotated[str, typer.Option(help="Activations of ResNet-50, separated by commas: int4, int8.")] = "int4,int8",
    batches: Annotated[str | None, typer.Option(help="Images of ResNet-50, separated by commas: 1,8,32,128,256,2048.")] = None,
    fusions: Annotated[
        str | None,
        typer.Option(
            help="Fusions of ResNet-50 at batch 128, separated by commas, each with all before it: none, relu, add, shortcut, "
            "stem, blocks, and pairs and whole, which networks have only where they are asked for. Other batches, and rows of "
            "layers, have the last one."
        ),
    ] = None,
    schemes: Annotated[
        str, typer.Option(help="Schemes of EfficientNet-lite0, separated by commas; the first one has rows of layers.")
    ] = "w8a8,w8a4,w4a8",
    peers: Annotated[
        str,
        typer.Option(
            help="Rivals in fp16, separated by commas: cudnn, compile (torch.compile), of EfficientNet-lite0 also "
            "reduce-overhead and max-autotune, or none."
        ),
    ] = "cudnn",
    peer_seconds: Annotated[float, typer.Option(min=1, help="Limit of each rival of EfficientNet-lite0.")] = 120.0,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-conv.json.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw where the time goes: a .png or .svg file.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print and draw this result file; needs no GPU.")] = None,
) -> None:
    """Time ResNet-50 in INT4 and INT8 on this GPU, with its fusions on and off at batch 128, and every layer with its roofline;
    and EfficientNet-lite0 at batch 128.

    Needs an H100 or H200. Codes are compared with an integer reference first, bit for bit; a network with a wrong one is not
    timed, and the command fails at its end. The file is complete after every row, so Ctrl-C keeps what was measured.

    Example: python -m benchmarks conv --storages int4 --batches 1,128 --plot layers.png

    Example: python -m benchmarks conv --models resnet50 --batches 128 --fusions blocks,pairs,whole
    """
    load_layers()
    from benchmarks.conv_report import CONV, STORAGES, layer_table, load, network_table, plot
    from lowbit.eval.results import check_plot

    if plot_file is not None:
        check_plot(plot_file, CONV)
    if report_file is not None:
        document = load(report_file)
    else:
        storage_names = storages.split(",")
        unknown = [name for name in storage_names if name not in STORAGES]
        if unknown:
            raise ValueError(f"storages are {' and '.join(STORAGES)}, got {', '.join(unknown)}")
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"bench conv measures an NVIDIA GPU and torch {torch.__version__} sees none")
        from benchmarks.conv import BATCHES, MODELS, ConvRequest, run
        from benchmarks.conv_lite import RIVALS, SCHEMES
        from benchmarks.conv_network import ALL_FUSIONS, FUSIONS
        from lowbit.tune.trials import parse_rows

        request = ConvRequest(
            _parse_names("--models", models, MODELS), [STORAGES[name] for name in storage_names],
            BATCHES if batches is None else parse_rows(batches),
            FUSIONS if fusions is None else sorted(_parse_names("--fusions", fusions, ALL_FUSIONS), key=ALL_FUSIONS.index),
            _parse_names("--schemes", schemes, SCHEMES),
            [] if peers == "none" else _parse_names("--peers", peers, tuple(RIVALS)), peer_seconds,
        )  # fmt: skip
        path, document = run(request, out_file, err.print)
        err.print(f"wrote {path}")
    out.print(network_table(document))
    for storage in dict.fromkeys(row["storage"] for row in document["layers"]):
        out.print(layer_table(document, storage))
    if plot_file is not None:
        plot(document, plot_file)
        err.print(f"wrote {plot_file}")


@app.command(name="e2e")
@user_errors
def e2e(
    models: Annotated[
        str,
        typer.Option(
            help="Shapes, separated by commas: Llama-3-8B, Llama-2-13B, Llama-2-70B, SmolLM2-135M, OPT-30B, Qwen3-30B-A3B, "
            "Mixtral-8x7B, gpt-oss-20b, OLMoE-1B-7B."
        ),
    ] = "Llama-3-8B",
    schemes: Annotated[
        str, typer.Option(help="Schemes of the layers; 16 bits are measured too.")
    ] = "w4a16_g128,w6e3m2a16,w8a16",
    batches: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens before the step.")] = "256,1024,8192",
    head: Annotated[str, typer.Option(help="Scheme of LM head and embedding of quantized models, or none.")] = "w8a16",
    dtype: Annotated[
        str | None,
        typer.Option(help="Activations, keys and values: float16 or bfloat16 (default: bfloat16 for mixtures of experts)."),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(help="Formats of keys and values: 16, fp8, int8, int4, or mixes of two; 16-bit weights take the first."),
    ] = "16",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the model has: for trying.")] = None,
    one_launch: Annotated[
        bool, typer.Option("--one-launch", help="Time each step of 1, 2, 4 or 8 tokens by launches and in one launch.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Time one request of so many tokens to its first token too, for each quantized model.")
    ] = None,
    rivals: Annotated[str, typer.Option(help="Of the same model: eager, static (Transformers' generate), or none.")] = "none",
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-e2e.json.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them too: a .png or .svg file.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print and draw this result file; needs no GPU.")] = None,
) -> None:
    """Time whole steps of language models (random weights in known shapes) on this GPU: decode, prompt, request from Python.

    A step is the CUDA graph that lowbit.pipeline runs. Its limit is all bytes of weights, keys and values at the read bandwidth
    measured in the same run. The file is complete after every row, so Ctrl-C keeps what was measured.

    Example: python -m benchmarks e2e --schemes w4a16_g128 --batches 1,16 --contexts 1024 --plot step.png

    Example: python -m benchmarks e2e --schemes w4a16_g128 --batches 64 --contexts 8192 --kv 16,fp8,int8,int4

    Example: python -m benchmarks e2e --schemes w4a16_g128 --batches 1 --contexts 131072 --kv int4 --prompt 32768,131072
    """
    load_layers()
    from benchmarks.e2e_report import E2E, failed, load, plot, tables
    from lowbit.eval.results import check_plot

    if plot_file is not None:
        check_plot(plot_file, E2E)
    if report_file is not None:
        document = load(report_file)
    else:
        import torch

        from benchmarks.e2e import DTYPES, RIVALS, E2EConfig, run
        from benchmarks.language_model import SHAPES
        from lowbit.formats import parse_scheme
        from lowbit.formats.kv import parse_kv
        from lowbit.tune.trials import parse_rows

        model_names = _parse_names("--models", models, SHAPES)
        rival_names = () if rivals == "none" else _parse_names("--rivals", rivals, RIVALS)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}")
        scheme_names = tuple(parse_scheme(part).name for part in schemes.split(",") if part.strip() and part != "none")
        head_scheme = None if head == "none" else parse_scheme(head).name
        formats = tuple(dict.fromkeys(str(parse_kv(part.strip())) for part in kv.split(",")))
        if not torch.cuda.is_available():
            raise ValueError(f"bench e2e measures an NVIDIA GPU and torch {torch.__version__} sees none")
        config = E2EConfig(
            model_names,
            scheme_names,
            parse_rows(batches),
            parse_rows(contexts),
            head_scheme,
            dtype,
            layers,
            rival_names,
            formats,
            one_launch,
            parse_rows(prompt) if prompt else (),
        )
        path, document = run(config, out_file, say)
        say(f"wrote {path}")
    out.print(*tables(document), sep="\n\n")
    for line in failed(document):
        say(line)
    if plot_file is not None:
        plot(document, plot_file)
        say(f"wrote {plot_file}")


@app.command(name="features")
@user_errors
def features(
    small: Annotated[Path | None, typer.Argument(help="Folder of a 16-bit chat model; default: the demo's.")] = None,
    parts: Annotated[str, typer.Option(help="What is measured.")] = "lora,verify,grammar,mixed,guesses",
    small_scheme: Annotated[str, typer.Option(help="Scheme of that model.")] = "w4a16_g64",
    model: Annotated[str, typer.Option(help="Shape of the large model: Llama-3-8B, Llama-2-13B.")] = "Llama-3-8B",
    scheme: Annotated[str, typer.Option(help="Scheme of its layers.")] = "w4a16_g128",
    head: Annotated[str, typer.Option(help="Scheme of its LM head and embedding.")] = "w8a16",
    context: Annotated[int, typer.Option(min=1, help="Tokens before a step.")] = 1024,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the model has: for trying.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-features.json.")
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file; needs no GPU.")] = None,
) -> None:
    """Time what LoRA adapters, JSON schemas, guessed tokens, and prompts beside decoding cost the engine.

    Steps are timed with a language model of random weights in a known shape. Guesses are measured with a real model. The file
    is complete after every row.

    Example: python -m benchmarks features --parts verify,lora
    """
    load_layers()
    from benchmarks.features_report import failed, load, tables

    if report_file is not None:
        document = load(report_file)
    else:
        import torch

        from benchmarks.features import PARTS, FeaturesConfig, run
        from benchmarks.language_model import SHAPES
        from lowbit.demo import download_model
        from lowbit.formats import parse_scheme

        chosen = _parse_names("--parts", parts, PARTS)
        (shape,) = _parse_names("--model", model, SHAPES)
        names = [parse_scheme(name).name for name in (small_scheme, scheme, head)]
        if not torch.cuda.is_available():
            raise ValueError(f"bench features measures an NVIDIA GPU and torch {torch.__version__} sees none")
        if small is None and {"grammar", "guesses"} & set(chosen):
            small = download_model(say)
        config = FeaturesConfig(chosen, small, names[0], shape, names[1], names[2], context, layers=layers)
        path, document = run(config, out_file, say)
        say(f"wrote {path}")
    out.print(*tables(document), sep="\n\n")
    for line in failed(document):
        say(line)


@app.command(name="tensor-parallel")
@user_errors
def tensor_parallel(
    model: Annotated[str, typer.Option(help="Shape: Llama-3-8B, Llama-2-13B or Llama-2-70B.")] = "Llama-3-8B",
    scheme: Annotated[str, typer.Option(help="Scheme of the layers, or none for 16 bits.")] = "w4a16_g128",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1,2",
    batches: Annotated[str, typer.Option(help="Requests at once.")] = "1,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the step.")] = 1024,
    head: Annotated[str, typer.Option(help="Scheme of LM head and embedding of a quantized model, or none.")] = "w8a16",
    dtype: Annotated[str, typer.Option(help="Activations, keys and values: float16 or bfloat16.")] = "float16",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the model has: for trying.")] = None,
    requests: Annotated[bool, typer.Option(help="Time whole requests too, which compiles the kernels of prompts.")] = True,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-..json.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file; needs no GPU.")] = None,
) -> None:
    """Time decode steps of a language model (random weights in a known shape) on one GPU and on several of this machine.

    On several GPUs partial sums are added over peer memory and, as a second row, by NCCL. torch's peer memory serves only one
    group of GPUs per process, so give at most one number of GPUs above 1.

    Example: python -m benchmarks tensor-parallel --model Llama-2-70B --scheme w6e3m2a16 --gpus 1,2 --batches 1
    """
    load_layers()
    from benchmarks.tensor_parallel_report import failed, table
    from benchmarks.tensor_parallel_report import load as load_report

    if report_file is not None:
        document = load_report(report_file)
    else:
        import torch

        from benchmarks.e2e import DTYPES
        from benchmarks.language_model import SHAPES
        from benchmarks.tensor_parallel import RanksConfig, run
        from lowbit.formats import parse_scheme
        from lowbit.tune.trials import parse_rows

        if dtype not in DTYPES:
            raise ValueError(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}")
        (shape,) = _parse_names("--model", model, SHAPES)
        name = None if scheme == "none" else parse_scheme(scheme).name
        if not torch.cuda.is_available():
            raise ValueError(f"bench tensor-parallel measures NVIDIA GPUs and torch {torch.__version__} sees none")
        config = RanksConfig(
            shape, name, parse_rows(gpus), parse_rows(batches), context, None if head == "none" else parse_scheme(head).name,
            dtype, layers, requests,
        )  # fmt: skip
        path, document = run(config, out_file, say)
        say(f"wrote {path}")
    out.print(table(document))
    for line in failed(document):
        say(line)


@app.command(name="load")
@user_errors
def load(
    model: Annotated[str, typer.Option(help="A shape: Llama-3-8B, Llama-2-13B, Llama-2-70B.")] = "Llama-3-8B",
    schemes: Annotated[
        str, typer.Option(help="Schemes to quantize 16-bit files to; none takes them as they are.")
    ] = "none,w4a16_g128,w6e3m2a16,w8a16",
    kinds: Annotated[
        str, typer.Option(help="Kinds of files: 16-bit, and in w4a16_g128 lowbit, gptq, awq, compressed-tensors.")
    ] = "16-bit,lowbit,gptq",
    head: Annotated[
        str, typer.Option(help="On a GPU, scheme of LM head and embedding of quantized models, or none.")
    ] = "w8a16",
    dtype: Annotated[str, typer.Option(help="Weights and activations: float16 or bfloat16.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the model has: for trying.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Loads of each; the fastest counts.")] = 2,
    device: Device = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the files are written meanwhile; the system's temporary folder.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-load.json.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file.")] = None,
) -> None:
    """Time the loading of a model with random weights in a known shape, until every layer is packed for its kernels.

    Writes the files first (16 GB for Llama-3-8B) and removes them. Reports GB of files per second, the peak GPU memory with its
    bound (the packed model, one layer in 16 bits, a constant), and the peak host memory. The result file is complete after
    every row, so Ctrl-C keeps what was measured.

    Example: python -m benchmarks load --layers 2 --schemes none,w4a16_g128
    """
    check_schemes(schemes)
    check_device(device)
    load_layers()
    from benchmarks.load_report import failed, load, load_table

    if report_file is not None:
        out.print(load_table(load(report_file)))
        return
    from benchmarks.load import DTYPES, KINDS, LoadConfig, run
    from lowbit.formats import parse_scheme
    from lowbit.hardware.machine import torch_device

    kind_names = _parse_names("--kinds", kinds, KINDS)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--dir is a folder, {folder} is none")
    scheme_names = tuple(None if part == "none" else parse_scheme(part).name for part in schemes.split(",") if part.strip())
    target = torch_device(device)
    # the same rule as in `lowbit.pipeline`
    head_scheme = None if head == "none" or target.type == "cpu" else parse_scheme(head).name
    config = LoadConfig(model, kind_names, scheme_names, head_scheme, dtype, target, layers, repeats, folder)
    from lowbit.progress import Progress

    with Progress(desc="starting", unit="tensors") as bar:
        path, document = run(config, out_file, lambda what, done, total: bar.at(done, total, what))
    out.print(load_table(document))
    for line in failed(document):
        say(line)
    say(f"wrote {path}")


def _parse_names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a comma-separated list. Raises ValueError if one is not in `known`."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in known] or ([text] if not names else [])
    if unknown:
        raise ValueError(f"{option} are {', '.join(known)}, got {unknown[0]!r}")
    return names


@app.command(name="start")
@user_errors
def start(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint; when absent, random weights of --shape.", exists=True)
    ] = None,
    shape: Annotated[str, typer.Option(help="Llama-3-8B, Llama-2-13B, ..")] = "Llama-3-8B",
    scheme: Annotated[str, typer.Option(help="Scheme of a shape's layers.")] = "w4a16_g128",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has: for trying.")] = None,
    ways: Annotated[
        str, typer.Option(help="Starts: cold, warm, kernels (a file of lowbit compile, no C compiler).")
    ] = "cold,warm,kernels",
    cores: Annotated[str, typer.Option(help="Numbers of cores, separated by commas.")] = "16,2",
    limit: Annotated[float, typer.Option(min=1, help="Seconds of a start.")] = 600.0,
    device: Device = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-start.json.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file.")] = None,
) -> None:
    """Time `lowbit serve` from the start of its process to the first token, by phase: imports, load, compile, capture.

    A cold start compiles all kernels, a warm one finds them in the cache of the one before. The result file is complete after
    every start.

    Example: python -m benchmarks start --layers 4 --cores 16
    """
    check_device(device)
    load_layers()
    from benchmarks.start_report import failed, load, start_table

    if report_file is not None:
        document = load(report_file)
    else:
        from benchmarks.language_model import SHAPES
        from benchmarks.start import WAYS, StartConfig, run
        from lowbit.formats import parse_scheme
        from lowbit.hardware.machine import torch_device
        from lowbit.tune.trials import parse_rows

        (name,) = _parse_names("--shape", shape, SHAPES)
        config = StartConfig(
            model, name, parse_scheme(scheme).name, layers, _parse_names("--ways", ways, WAYS), parse_rows(cores),
            torch_device(device), limit,
        )  # fmt: skip
        path, document = run(config, out_file, say)
        say(f"wrote {path}")
    out.print(start_table(document))
    for line in failed(document):
        say(line)


@app.command(name="measure")
@user_errors
def measure(
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART]...", help="Names of parts; none: list them.")] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of results and logs.")] = Path("measured"),
    seconds: Annotated[float, typer.Option(min=1, help="For all parts together; the running one is interrupted then.")] = 3600,
    model: Annotated[Path | None, typer.Option(help="Folder of SmolLM2-135M-Instruct, for parts with a real model.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the study's texts, for parts of the study.")] = None,
) -> None:
    """Run measurements and GPU tests behind the documentation's figures, by name; list them with their seconds on an H200.

    Tests run side by side first, then one measurement after the other, so that nothing disturbs a timing. A part for which too
    little time is left is not started. Each has a log; measure.json says how each ended. Exit status 1 if one did not succeed.

    Example: python -m benchmarks measure

    Example: python -m benchmarks measure tests-vision conv-resnet50 --seconds 500
    """
    from benchmarks.measure import PARTS, chosen
    from benchmarks.measure import measure as run

    if not parts:
        listed = Table("part", "s", "GPUs", "python -m")
        for part in PARTS:
            listed.add_row(part.name, str(part.seconds), str(part.gpus), part.command)
        out.print(listed)
        return
    load_layers()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # parts end with this process
    rows = run(chosen(parts), out_folder, seconds, model, data, say)
    if any(row["status"] != "done" for row in rows):
        raise typer.Exit(1)


@app.command(name="mechanisms")
@user_errors
def mechanisms(
    parts: Annotated[
        str | None,
        typer.Option(
            help="Of conversions, products, scales, tiles, lines, fused, sums, cublas, counters, convolution; all when absent."
        ),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-mechanisms.json.")
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print this result file; needs no GPU.")] = None,
) -> None:
    """Measure why the kernels are fast. Each mechanism is timed on and off, in a loop over registers or in a whole product.

    The parts are: conversions of codes by cast and by logic, with and without the shift of exponents, FP6 in segments of 4 + 2
    bits; scales before or after the product; order of tiles, stages, split-K, sliced-K; one kernel or two; fp8 sums that stay
    in the tensor core; hardware counters (needs ncu); channels of convolutions. docs/internals/mechanisms.md explains the rows.

    A run takes about three minutes on an H100 or H200. The file is complete after every row, so Ctrl-C keeps what was measured.

    Example: python -m benchmarks mechanisms --parts conversions,scales

    Example, without a GPU: python -m benchmarks mechanisms --report benchmarks/results/h200/2026-11-23-mechanisms.json
    """
    load_layers()
    from benchmarks.mechanisms import report

    part_names = tuple(report.PARTS) if parts is None else _parse_names("--parts", parts, report.PARTS)
    if report_file is not None:
        document = report.load(report_file)
    else:
        import torch

        if parts is not None and (removed := [part for part in part_names if part in report.REMOVED_PARTS]):
            raise ValueError(f"the kernel of --parts {','.join(removed)} was removed; --report FILE prints its kept results")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            raise ValueError(
                f"bench mechanisms measures an H100 or H200 (sm_90) and torch {torch.__version__} sees none; --report FILE "
                "prints a result file without a GPU"
            )
        from benchmarks.mechanisms.run import run
        from lowbit.progress import Progress

        with Progress(desc="starting", unit="measurements") as bar:
            path, document = run(part_names, out_file, lambda line: bar.at(bar.n + 1, None, line))
        say(f"wrote {path}")
    out.print(*report.tables(document, part_names), sep="\n\n")
    for line in report.failed(document):
        say(line)


@app.command(name="serve")
@user_errors
def serve(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model to serve; when absent, random weights of --shape.", exists=True)
    ] = None,
    shape: Annotated[str, typer.Option(help="Llama-3-8B, Llama-2-13B, Llama-2-70B or OPT-30B.")] = "Llama-3-8B",
    scheme: Annotated[
        str | None, typer.Option(help="Of the layers, or none; w4a16_g128 for a shape, a folder's own, when absent.")
    ] = None,
    head: Annotated[str, typer.Option(help="On a GPU, scheme of LM head and embedding of quantized models.")] = "w8a16",
    dtype: Annotated[str, typer.Option(help="Of a shape's activations, keys and values: float16 or bfloat16.")] = "float16",
    kv: KV = "16",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has: for trying.")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Clients at once; 64, on a CPU 8, when absent.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="That they ask for, by each mix an equal part.")] = 300.0,
    each: Annotated[float, typer.Option(min=1, help="Seconds of each other measurement.")] = 20.0,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of prompts.")] = 512,
    output: Annotated[int, typer.Option(min=2, help="Tokens of answers.")] = 128,
    sharegpt: Annotated[bool, typer.Option(help="Lengths like ShareGPT's too.")] = True,
    loads: Annotated[str, typer.Option(help="Arrivals, in percent of what the closed loop answers.")] = "50,80,95",
    parts: Annotated[str, typer.Option(help="What to measure: engine, streams, idle, open.")] = "engine,streams,idle,open",
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; benchmarks/results/<gpu>/<date>-serve.json.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them too: a .png or .svg file.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print and draw this result file.")] = None,
) -> None:
    """Send a server on this machine many requests; report its speed relative to the engine alone and the latencies of users.

    engine: concurrent sequences without a server. streams: the same load over HTTP for --seconds, with failures and the share
    of the engine's tokens per second; then lengths like ShareGPT's. idle: the time that HTTP adds to a first token. open:
    random arrivals, with percentiles of the time to the first token and of the time per token. The file is complete after every
    part, so Ctrl-C keeps what was measured.

    Example, on a GPU: python -m benchmarks serve --seconds 60 --each 15 --plot serve.png
    Example, on a CPU: python -m benchmarks serve --model SmolLM2-135M --seconds 20 --prompt 64 --output 16 --no-sharegpt
    """
    check_kv(kv)
    load_layers()
    from benchmarks.serve_report import SERVE, failed, load, plot, tables, verdicts
    from lowbit.eval.results import check_plot

    if plot_file is not None:
        check_plot(plot_file, SERVE)
    if report_file is not None:
        document = load(report_file)
    else:
        import torch

        from benchmarks.language_model import SHAPES
        from benchmarks.request import DTYPES
        from lowbit.formats import parse_scheme
        from lowbit.tune.trials import parse_rows

        try:
            from benchmarks.serve import PARTS, run
            from benchmarks.serve_host import ServeConfig
            from benchmarks.serve_load import SHAREGPT, fixed
        except ImportError as error:
            raise extra_missing("bench serve", error) from error
        if shape not in SHAPES:
            raise ValueError(f"--shape is {', '.join(SHAPES)}, got {shape!r}")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}")
        scheme_name = "w4a16_g128" if scheme is None and model is None else scheme
        config = ServeConfig(
            None if model else shape, model, None if scheme_name in (None, "none") else parse_scheme(scheme_name).name,
            None if head == "none" else parse_scheme(head).name, dtype, layers,
            streams or (MOST_ON_A_GPU if torch.cuda.is_available() else MOST_ON_A_CPU),
            (fixed(prompt, output), *([SHAREGPT] if sharegpt else [])),
            _parse_names("--parts", parts, PARTS), parse_rows(loads), seconds, each, seed, kv,
        )  # fmt: skip
        path, document = run(config, out_file, say)
        say(f"wrote {path}")
    out.print(*tables(document), sep="\n\n")
    for line in failed(document):
        say(line)
    for line in verdicts(document):
        out.print(line, highlight=False)
    if plot_file is not None:
        plot(document, plot_file)
        say(f"wrote {plot_file}")


@app.command(name="vllm", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def vllm(arguments: typer.Context) -> None:
    """Run vLLM's engine with this library's schemes and vLLM's own on the same weights; -- --help lists the options."""
    from benchmarks.vllm import main

    main(arguments.args)


def _plot(document: dict[str, Any], path: Path) -> None:
    from benchmarks.plot import plot

    for written in plot(document, path):
        say(f"wrote {written}, and beside it a copy for dark pages")
