"""`lowbit compile` and `lowbit compile-wheel`. The first compiles the kernels of a model into a file, the second those of known
models into a wheel. Both are for machines without a C compiler and for a fast first start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.serve import MOST_ON_A_GPU, CacheGiB, bytes_of
from lowbit.cli.terminal import KV, AnyModel, Lora, Scheme, Speculate, adapters_of, check_kv, check_scheme, load_layers, say

if TYPE_CHECKING:
    from lowbit.hardware.machine import GPU


def compile_(
    model: AnyModel,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: kernels-<gpu>.lowbit in MODEL's folder."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated GPUs: h100, h200, a100, l40s, 5090. Default: this machine's."),
    ] = None,
    scheme: Scheme = None,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Sequences per batch, as for serve: kernels of all smaller batches are compiled.")
    ] = MOST_ON_A_GPU,
    cache_gib: CacheGiB = None,
    kv: KV = "16",
    speculate: Speculate = 0,
    lora: Lora = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="For serve --batch-invariant.")] = False,
) -> None:
    """Compile all kernels that a model needs on a GPU into one file; no GPU is needed.

    serve and generate take the file with --kernels, and then compile nothing and need no C compiler. A file in the model's
    folder that this user compiled is found without the option. It is for this version of lowbit, Triton and Python; another one
    is refused with one line, and its kernels are compiled anew. It contains programs: use only files that you trust.

    Compiling needs a C compiler (gcc) and takes minutes. Options are those of serve.

    Example: lowbit compile Llama-3-8B-int4 -o kernels-h100.lowbit --gpu h100
    """
    from lowbit.sources import is_on_hub, local_model

    check_scheme(scheme)
    check_kv(kv)
    adapters = adapters_of(lora)
    path = local_model(model)
    names = None if gpu is None else [name.strip().lower() for name in gpu.split(",")]
    target = output or _default_target(path, names)
    if output is None and is_on_hub(model):
        raise ValueError(f"{model}: is a model of the hub, so name the file to write: -o {target.name}")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: no folder {target.parent}; create it first")
    load_layers("lowbit.pipeline")
    from lowbit.pipeline.kernels import compile_kernels
    from lowbit.progress import Progress

    gpus = gpus_of(names)
    say(f"finding the kernels of {model} for {' and '.join(each.product for each in gpus)}")
    with Progress(desc="finding kernels", unit="kernels") as bar:
        count = compile_kernels(
            path, target, gpus, progress=lambda done, total: bar.at(done, total, "compiling kernels"), scheme=scheme,
            batch_invariant=batch_invariant, max_concurrent=max_concurrent, cache_bytes=bytes_of(cache_gib), kv=kv,
            speculate=speculate, lora=adapters,
        )  # fmt: skip
    say(f"wrote {target}: {count} kernels, {target.stat().st_size / 2**20:.1f} MiB")


def compile_wheel(
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the wheel.")] = Path("dist"),
    gpu: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated GPUs of one architecture.")] = "h100,h200",
    models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated models whose shapes it has. Default: all twelve.")
    ] = None,
    schemes: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated schemes. Default: six common ones.")
    ] = None,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Sequences per batch, as for compile.")] = MOST_ON_A_GPU,
) -> None:
    """Build a wheel of kernels for the shapes of known models, lowbit-kernels-sm90; no GPU is needed.

    Once installed, lowbit finds it by itself, for any model whose kernels are in it. A wheel of another version of lowbit,
    Triton or Python is refused with one line, and kernels are compiled anew. Compiling all models takes an hour on two cores.

    Example: lowbit compile-wheel -o dist && pip install dist/lowbit_kernels_sm90-*.whl
    """
    load_layers("lowbit.export")
    from lowbit.export.wheel import MODELS, SCHEMES, build_wheel
    from lowbit.progress import Progress

    gpus = gpus_of([name.lower() for name in _names(gpu)])
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(desc="finding kernels", unit="kernels") as bar:
        wheel = build_wheel(
            folder, gpus, MODELS if models is None else _names(models), SCHEMES if schemes is None else _names(schemes),
            max_concurrent=max_concurrent, progress=lambda what, done, total: bar.at(done, total, what),
        )  # fmt: skip
    say(f"wrote {wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _default_target(path: Path, names: list[str] | None) -> Path:
    folder = path if path.is_dir() else path.parent
    return folder / f"kernels-{'-'.join(names) if names else 'gpu'}.lowbit"


def gpus_of(names: list[str] | None) -> list[GPU]:
    """Returns the named GPUs; by default that of this machine."""
    import torch

    from lowbit.hardware.machine import GPUS, present_gpu

    if names is None:
        if not torch.cuda.is_available():
            raise ValueError(f"this machine has no GPU, so name one or several to compile for: --gpu {','.join(GPUS)}")
        return [present_gpu()]
    for name in names:
        if name not in GPUS:
            raise ValueError(
                f"--gpu {name}: is not known, the GPUs are {', '.join(GPUS)}; on a machine with it leave out --gpu"
            )
    return [GPUS[name] for name in dict.fromkeys(names)]
