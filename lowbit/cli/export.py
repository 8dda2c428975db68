"""`lowbit export-kernel`: writes a C library of compiled kernels."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.compile import gpus_of
from lowbit.cli.terminal import check_scheme, load_layers, say


class HalfDtype(str, Enum):
    """Types of x."""

    bf16 = "bf16"
    fp16 = "fp16"


def export_kernel(
    scheme: Annotated[str, typer.Option(help="Scheme with 16-bit activations, such as w4a16_g128 or w6e3m2a16.")],
    shape: Annotated[str, typer.Option(metavar="NxK", help="Shape of the weights; several with commas: 4096x4096,14336x4096.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="New folder for the library's sources.")],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated GPUs: h100, h200, a100, l40s, 5090. Default: this machine's."),
    ] = None,
    dtype: Annotated[HalfDtype, typer.Option(help="Type of x and y.")] = HalfDtype.bf16,
) -> None:
    """Export compiled kernels as a C library, for programs without Python; no GPU is needed.

    FOLDER gets the machine code of every kernel that products of these shapes use for any number of tokens, and C sources: the
    choice of the kernel, its launch by the CUDA driver, rounding and packing of weights, a header, a Makefile and an example.
    `make -C FOLDER` builds liblowbit_kernels.so with a C compiler alone.

    Example: lowbit export-kernel --scheme w4a16_g128 --shape 4096x4096 --gpu h100 -o lowbit-c
    """
    check_scheme(scheme)
    shapes = _shapes(shape)
    if not output.absolute().parent.is_dir():
        raise ValueError(f"{output}: no folder {output.parent}; create it first")
    load_layers("lowbit.export")
    import torch

    from lowbit.export import export_kernels
    from lowbit.progress import Progress

    gpus = gpus_of(None if gpu is None else [name.strip().lower() for name in gpu.split(",")])
    half = torch.bfloat16 if dtype is HalfDtype.bf16 else torch.float16
    with Progress(desc="compiling kernels", unit="kernels") as bar:
        count = export_kernels(
            scheme, shapes, gpus, output, dtype=half, progress=lambda done, total: bar.at(done, total, "compiling kernels")
        )
    size = sum(path.stat().st_size for path in (output / "cubins").iterdir())
    say(f"wrote {output}: {count} kernels, {size / 2**20:.1f} MiB; build it with: make -C {output}")


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = [re.fullmatch(r"(\d+)x(\d+)", each.strip().lower()) for each in text.split(",")]
    if not all(shapes):
        raise ValueError(f"--shape {text}: shapes of weights are N x K, such as 4096x4096 or 4096x4096,14336x4096")
    return [*dict.fromkeys((int(shape[1]), int(shape[2])) for shape in shapes if shape)]
