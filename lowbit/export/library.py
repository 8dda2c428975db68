"""Compiles the kernels of one scheme for some shapes, GPUs and all M, and writes them as the sources of a C library.

The kernels, their choice and their launches are those of `ops.fragment_gemm`: a plan (`ops.fragment_gemm.plan_for`) is called
with tensors without memory on a simulated GPU, and the arguments of its launch are described for C (`tables.h`).
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from lowbit.export.tables import Choice, Kernel, Library, Parameter, TensorMap, write_tables
from lowbit.formats import Scheme, parse_scheme
from lowbit.hardware.machine import GPU, Machine, machine_of
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape, RingTile, Tile, WgmmaTile
from lowbit.kernels.parts.compile import compile_all, compile_one
from lowbit.kernels.parts.gluon import CompiledKernel, compiling_for
from lowbit.kernels.parts.launch import RecordedKernel
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.simulated_gpu import simulated_gpu
from lowbit.ops.table import weight_refusals
from lowbit.pack.weight import FragmentWeight, WeightForm, has_channel_scale, kernel_group, may_be_subnormal, weight_form
from lowbit.quantize.rtn import scale_dtype

MOST_ROWS = 4096
"""Largest M of the tables. The launcher divides larger products into slices of this many rows."""

SOURCES = Path(__file__).parent / "c"

_ARGUMENTS = {
    "y": "FROM_Y", "x": "FROM_X", "w": "FROM_CODES", "scale": "FROM_SCALE", "channel_scale": "FROM_CHANNEL_SCALE",
    "partial": "FROM_SUMS", "arrived": "FROM_COUNTERS", "M": "FROM_M", "token_tiles": "FROM_TOKEN_TILES",
    "w_desc": "FROM_CODES", "w_desc_1": "FROM_CODES", "w_desc_2": "FROM_CODES", "x_desc": "FROM_X", "y_desc": "FROM_Y",
}  # fmt: skip
"""Parameters of the kernels that the launcher supplies. All other parameters are equal for every M."""

_MAP_TYPES = {torch.int32: 3, torch.float16: 6, torch.bfloat16: 9}
"""Element types of tensor maps: CUtensorMapDataType of the driver's API."""

_SIZES = {"u64": 8, "u32": 4, "f32": 4, "b64": 8, "b32": 4}


def export_kernels(
    scheme: str | Scheme, shapes: Sequence[tuple[int, int]], gpus: Sequence[GPU], folder: Path, *,
    dtype: torch.dtype = torch.bfloat16, progress: Callable[[int, int], object] = lambda done, total: None,
    processes: int | None = None,
) -> int:  # fmt: skip
    """Writes a C library of the products of weights of each shape (N, K) under a scheme with x of `dtype`, fp16 or bf16, to a
    new folder; returns the number of its kernels.

    progress: called with (done, total) after each compiled kernel. processes: compiling processes; default: one for each core.
    Raises ValueError for a scheme, shape or folder that is not supported.
    """
    parsed = parse_scheme(scheme)
    refused = _refusals(parsed, shapes, dtype)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        refused = (*refused, f"{folder} is not empty; name a new folder")
    if refused:
        raise ValueError(f"export-kernel: {'; '.join(refused)}")
    launches = [launch for gpu in gpus for launch in launches_on(gpu, parsed, shapes, dtype)]
    compiled = _compiled(launches, progress, processes)
    library = _library(parsed, shapes, gpus, dtype, launches, compiled)
    unfinished = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    try:
        _write(library, {kernel.cubin: kernel_of.asm["cubin"] for kernel, kernel_of in library.machine_code}, unfinished)
        unfinished.chmod(0o755)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return len({kernel.cubin for kernel in library.kernels})


def _refusals(scheme: Scheme, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[str, ...]:
    """Returns why there are no kernels to export; empty if there are."""
    reasons = []
    if scheme.activation is not None:
        reasons.append(f"{scheme} quantizes activations; schemes with 16-bit activations (such as w4a16_g128) are supported")
    for n, k in shapes:
        if n < 1 or k < 8 or k % 8:
            reasons.append(f"{n}x{k}: N is at least 1 and K a multiple of 8")
    return (*reasons, *(() if scheme.activation else weight_refusals(scheme, dtype)))


def forms_of(scheme: Scheme, dtype: torch.dtype) -> dict[int, WeightForm]:
    """Returns the forms of weights that the library's packing can produce, by their numbers in C's `enum scaling`: "channels",
    "divided" and "subnormal" of `pack.weight.Scaling`."""
    if has_channel_scale(scheme):
        return {0: weight_form(scheme, torch.bfloat16 if kernel_group(scheme) else None, True)}
    half = scale_dtype(scheme, stored=dtype)
    forms = {1: weight_form(scheme, half, True)}
    return {**forms, 2: weight_form(scheme, half, True, True)} if may_be_subnormal(scheme) else forms


@dataclass
class Launch:
    """The launch of a kernel by a plan, for a GPU, a shape (N, K), a form of weights, a tile, and M from `first_row` on."""

    gpu: GPU
    shape: tuple[int, int]
    form: int
    first_row: int
    tile: Tile
    plan: Any
    arguments: dict[str, Any]
    recorded: RecordedKernel


def launches_on(gpu: GPU, scheme: Scheme, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Launch]:
    """Returns the launches on a GPU for every shape, form and range of M. Ranges with the same tile share a plan."""
    found = []
    with simulated_gpu(gpu) as device:
        machine = machine_of(device)
        for n, k in shapes:
            chosen = [(m, choose(GemmShape(m, n, k, scheme.weight.bits), machine)) for m in range(1, MOST_ROWS + 1)]
            ranges = [next(of_tile) for _, of_tile in groupby(chosen, lambda row: row[1])]
            for number, form in forms_of(scheme, dtype).items():
                planned: dict[Tile, Launch] = {}
                for first, tile in ranges:
                    if tile not in planned:
                        planned[tile] = _launch(scheme, gpu, (n, k), number, form, first, tile, dtype, machine, device)
                    of = planned[tile]
                    found.append(Launch(gpu, (n, k), number, first, tile, of.plan, of.arguments, of.recorded))
    return found


def _launch(
    scheme: Scheme, gpu: GPU, shape: tuple[int, int], number: int, form: WeightForm, m: int, tile: Tile, dtype: torch.dtype,
    machine: Machine, device: torch.device,
) -> Launch:  # fmt: skip
    n, k = shape
    plan = plan_for(tile, GemmShape(m, n, k, scheme.weight.bits), form, dtype, False, machine)
    launcher, launched = plan.launch, []
    plan.launch = lambda *arguments: launched.append(arguments)
    weight = _meta_weight(scheme, shape, form, device)
    sums, counters = (max(size, 1) for size in plan.workspace)
    plan(
        torch.empty(m, k, dtype=dtype, device=device), *weight, None,
        torch.empty(sums, dtype=torch.float32, device=device), torch.empty(counters, dtype=torch.int32, device=device),
    )  # fmt: skip
    plan.launch = launcher
    names = [parameter.name for parameter in launcher.function.params]
    return Launch(gpu, shape, number, m, tile, plan, dict(zip(names, launched[0], strict=True)), launcher.recorded(launched[0]))


def _meta_weight(scheme: Scheme, shape: tuple[int, int], form: WeightForm, device: torch.device) -> tuple[Any, Any, Any]:
    """Returns codes, scales of groups and scales of channels of a weight without memory."""
    (n, k), half = shape, torch.bfloat16 if form.scale_dtype == "bf16" else torch.float16
    (codes,) = FragmentWeight.layout(scheme.weight).plane_shapes(scheme.weight.bits, shape)
    scale = (codes[0], -(-k // 128) * (128 // form.group), 8, 2 if form.zero == "none" else 4) if form.group else None
    channel = torch.bfloat16 if form.subnormal else torch.float32
    return (
        torch.empty(codes, dtype=torch.int32, device=device),
        None if scale is None else torch.empty(scale, dtype=half, device=device),
        torch.empty(n, dtype=channel, device=device),
    )


def _compiled(
    launches: Sequence[Launch], progress: Callable[[int, int], object], processes: int | None
) -> dict[int, CompiledKernel]:
    """Compiles the kernels of launches; returns them by the identity of the launch's `recorded`."""
    recorded: dict[int, list[RecordedKernel]] = {}
    for launch in launches:
        of = recorded.setdefault(launch.gpu.sm, [])
        if launch.recorded not in of:
            of.append(launch.recorded)
    total, before = sum(map(len, recorded.values())), 0
    compiled: dict[int, CompiledKernel] = {}
    for sm, kernels in recorded.items():
        for done in compile_all(kernels, sm, processes):
            progress(before + done, total)
        before += len(kernels)
        with compiling_for(sm):
            ready = [compile_one(kernel) for kernel in kernels]  # from Triton's cache; raises the error of one that failed
        for launch in launches:
            if launch.gpu.sm == sm:
                compiled[id(launch.recorded)] = ready[kernels.index(launch.recorded)]
    return compiled


def _library(
    scheme: Scheme, shapes: Sequence[tuple[int, int]], gpus: Sequence[GPU], dtype: torch.dtype, launches: Sequence[Launch],
    compiled: dict[int, CompiledKernel],
) -> Library:  # fmt: skip
    kernels: dict[Kernel, CompiledKernel] = {}
    choices: dict[tuple[int, int, tuple[int, int]], list[tuple[int, Kernel]]] = {}
    for launch in launches:
        code = compiled[id(launch.recorded)]
        kernel = _kernel(launch, code)
        kernels.setdefault(kernel, code)
        key = ([*gpus].index(launch.gpu), launch.form, launch.shape)
        choices.setdefault(key, []).append((launch.first_row, kernel))
    numbers = {kernel: number for number, kernel in enumerate(kernels)}
    found = [
        Choice(gpu, form, shape, tuple((first, numbers[kernel]) for first, kernel in ranges))
        for (gpu, form, shape), ranges in choices.items()
    ]
    return Library(
        scheme, dtype, scale_dtype(scheme, stored=dtype), tuple(shapes), tuple(gpus), tuple(found), [*kernels.items()]
    )


def _kernel(launch: Launch, code: CompiledKernel) -> Kernel:
    """Describes a kernel and its launch for C."""
    plan, tile, metadata = launch.plan, launch.tile, code.metadata
    tiles = -(-plan.shape.m // tile.tokens)
    stream_k = isinstance(tile, WgmmaTile) and tile.splits == 0
    if isinstance(tile, RingTile):
        grid, axis, most = (plan.grid[0], 1, tile.splits), 1, None
    elif isinstance(tile, WgmmaTile):
        grid, axis = (plan.tiles[1] * max(tile.splits, 1), 1, 1), 0
        most = launch.gpu.multi_processor_count
    else:
        grid, axis, most = (plan.tiles[1] * tile.splits, 1, 1), 0, None
    sums, counters = plan.workspace
    parameters, maps = _parameters(launch, code)
    of = Kernel(
        name=metadata.name, tile=str(tile), cubin=f"{metadata.name}_{code.hash[:16]}.cubin", threads=32 * metadata.num_warps,
        shared_bytes=metadata.shared, overlap=metadata.launch_pdl, tokens=tile.tokens, grid=grid,
        token_axis=axis, most_blocks=most, stream_k=stream_k, sums=sums // (plan.grid[0] if stream_k else tiles),
        counters=0 if stream_k else counters // tiles, parameters=parameters, maps=maps,
    )  # fmt: skip
    _check_parameters(of, code)
    return of


def _parameters(launch: Launch, code: CompiledKernel) -> tuple[tuple[Parameter, ...], tuple[TensorMap, ...]]:
    """Returns the parameters of the machine code in order, and the tensor maps among them.

    Triton passes a tensor map with its sizes and strides, and two more addresses at the end, for memory that these kernels do
    not use.
    """
    parameters: list[Parameter] = []
    maps: list[TensorMap] = []
    described = [*(code.metadata.tensordesc_meta or ())]
    for name, kind in code.src.signature.items():
        value = launch.arguments[name]
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            rows, columns = value.shape
            by_m = name in ("x_desc", "y_desc")
            about = described[len(maps)]
            parameters += [
                Parameter("FROM_MAP", len(maps)), Parameter("FROM_M") if by_m else Parameter("FROM_INT", rows),
                Parameter("FROM_INT", columns), *(Parameter("FROM_LONG", stride) for stride in value.strides),
            ]  # fmt: skip
            maps.append(
                TensorMap(
                    _ARGUMENTS[name], 0 if by_m else rows, columns, tuple(about["block_size"]), value.base.dtype.itemsize,
                    _MAP_TYPES[value.base.dtype], about["swizzle"],
                )
            )  # fmt: skip
        elif name in _ARGUMENTS:
            # If there are no scales of groups, kernels do not read them, and the launcher passes the address of the codes.
            parameters.append(Parameter(_ARGUMENTS[name]))
        elif kind == "fp32":
            parameters.append(Parameter("FROM_FLOAT", struct.unpack("<i", struct.pack("<f", value))[0]))
        else:
            parameters.append(Parameter("FROM_INT", value))
    return (*parameters, Parameter("FROM_NULL"), Parameter("FROM_NULL")), tuple(maps)


def _check_parameters(kernel: Kernel, code: CompiledKernel) -> None:
    """Raises RuntimeError unless the machine code has parameters of these sizes, which another Triton could change."""
    entry = code.asm["ptx"].partition(f".entry {kernel.name}(")[2].partition(")")[0]
    found = []
    for line in filter(None, (line.strip(" ,\t") for line in entry.splitlines())):
        words = line.split()
        kind = next(word.lstrip(".") for word in words if word.lstrip(".") in (*_SIZES, "b8"))
        found.append(int(line.rpartition("[")[2].rstrip("]")) if kind == "b8" else _SIZES[kind])
    sizes = {"FROM_MAP": 128, "FROM_INT": 4, "FROM_FLOAT": 4, "FROM_M": 4, "FROM_TOKEN_TILES": 4}
    expected = [sizes.get(parameter.source, 8) for parameter in kernel.parameters]
    if found != expected:
        raise RuntimeError(f"{kernel.name} has parameters of {found} bytes, this release of lowbit passes {expected}")


def _write(library: Library, cubins: dict[str, bytes], folder: Path) -> None:
    for source in sorted(SOURCES.iterdir()):
        shutil.copyfile(source, folder / source.name)
    (folder / "cubins").mkdir()
    for name, code in cubins.items():
        (folder / "cubins" / name).write_bytes(code)
    write_tables(library, folder)
