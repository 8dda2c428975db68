"""`lowbit inspect`: lists the layers of a checkpoint and checks its files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lowbit.cli.terminal import AnyModel, Device, Json, check_device, check_json, load_layers, out, write_result

if TYPE_CHECKING:
    from lowbit.checkpoint import CheckpointReader
    from lowbit.formats import ExpertTensor, QuantTensor
    from lowbit.models.source import ResolvedSource

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Matches the number of a layer or an expert in a module name."""


def inspect(
    model: AnyModel,
    check: Annotated[
        bool, typer.Option("--check", help="Read every tensor, and compare names and shapes with the model of config.json.")
    ] = False,
    numerics: Annotated[
        bool,
        typer.Option("--numerics", help="Load the model and compare what its layers compute with what quantization stated."),
    ] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """List a checkpoint's layers: schemes, bytes, bits per weight, layers kept in 16 bits, layers slow on a GPU.

    Layers that differ only in their number share a row; --json lists each of them. For files of other tools, the list shows
    each layer as generate, eval and lowbit.load read it, and what they cannot read.

    --numerics runs the kernels of this machine, as serve and generate do at each start: `lowbit quantize` writes sums of every
    layer's outputs for known inputs, and the largest logits of 16 tokens.

    Example: lowbit inspect SmolLM2-int4 --check --numerics
    """
    from lowbit.sources import local_model

    path = local_model(model)
    load_layers()
    from lowbit.models.experts import expert_summary, experts_per_token
    from lowbit.models.load import check_checkpoint
    from lowbit.models.skeleton import config_of
    from lowbit.models.source import resolve
    from lowbit.nn.convert import slow_lines

    check_json(json_file, "lowbit inspect")
    check_device(device)
    source = resolve(path)
    wrong = check_checkpoint(source) if check else ()
    if wrong:
        raise ValueError(f"{model}: {'; '.join(wrong)}")
    rows, rest, kept, lines, tool = _foreign_contents(source) if source.is_foreign else _contents(source, check)
    if check and source.is_foreign:
        lines.append("every tensor has the layout of its tool, and the model of config.json uses all of them")
    if numerics:
        lines.append(_compare_numerics(source, device))
    lines += slow_lines((row["scheme"], row["n"], row["k"]) for row in rows)
    experts = [(row["experts"], row["bytes"]) for row in rows if row["experts"]]
    if experts:
        lines.append(expert_summary(experts, experts_per_token(config_of(source.path))))
    if str(json_file) != "-":
        _print(rows, rest, kept, lines, tool)
    write_result(json_file, "lowbit inspect", {"tool": tool, "layers": rows, "other_bytes": rest})


def _compare_numerics(source: ResolvedSource, device: str | None) -> str:
    """Returns a line that says what was compared; raises NumericsError for a layer that computes something else."""
    from lowbit.checkpoint import numerics as stated
    from lowbit.checkpoint.target import NUMERICS
    from lowbit.models import numerics
    from lowbit.models.load import load

    if source.is_foreign or not source.path.is_dir() or (kept := stated.read(source.path)) is None:
        raise ValueError(
            f"{source.name}: --numerics needs the file {NUMERICS} of a checkpoint, which `lowbit quantize` writes since "
            "version 0.2; quantize the 16-bit model again"
        )
    line = numerics.check(load(source, device=device), source.path)
    errors = sorted(((of.error, name) for name, of in kept.layers.items() if of.error is not None), reverse=True)
    most = f"; most of their outputs is lost in {errors[0][1]}: {errors[0][0]:.1%}" if errors else ""
    return f"{line}{most}"


def _print(rows: list[dict[str, Any]], rest: int, kept: tuple[str, ...], lines: list[str], tool: str) -> None:
    from lowbit.formats import InputParts

    table = Table(Column("layer", overflow="fold"), "layers", "scheme", "N x K", "bytes each", "bits per weight")
    for name, row, count in _equal_rows(rows):
        parts = InputParts(**{field.name: row[field.name] for field in fields(InputParts)})
        beside = "".join(f" + {word}" for word in parts.words())
        beside += f" + rank {row['low_rank']}" if row["low_rank"] else ""
        experts = f"{row['experts']} x " if row["experts"] else ""
        size, bits = f"{experts}{row['n']} x {row['k']}", f"{row['bits_per_weight']:.3f}"
        table.add_row(name, str(count), row["scheme"] + beside, size, f"{row['bytes']:,}", bits)
    if rows:
        out.print(table)
        total, weights = sum(r["bytes"] for r in rows), sum(max(r["experts"], 1) * r["n"] * r["k"] for r in rows)
        out.print(
            f"{len(rows)} quantized layers{'' if tool == 'lowbit' else f', as loaded from {tool} files'}: {weights:,} "
            f"weights in {total:,} bytes, {8 * total / weights:.3f} bits each"
        )
        out.print(f"in 16 bits or more: {rest:,} bytes; not converted: {', '.join(kept) or '-'}")
    else:
        out.print(f"not quantized: {rest:,} bytes of plain tensors")
    for line in lines:
        out.print(line, soft_wrap=True)


def _equal_rows(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], int]]:
    """Merges rows that differ only in the numbers of their names.

    Returns the name with ranges (`layers.0-29.mlp.up_proj`), the first row and the count of each, in order of first rows.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        pattern = _NUMBER.sub("#", row["layer"])
        groups.setdefault((pattern, *(value for key, value in row.items() if key != "layer")), []).append(row)
    summarised = []
    for (pattern, *_), equal in groups.items():
        numbers = zip(*(map(int, _NUMBER.findall(row["layer"])) for row in equal), strict=True)
        name = str(pattern).replace("#", "{}").format(*map(_ranges, numbers))
        summarised.append((name, equal[0], len(equal)))
    return summarised


def _ranges(numbers: Iterable[int]) -> str:
    """Returns whole numbers as ranges: 0-3,5."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


Inspected = tuple[list[dict[str, Any]], int, tuple[str, ...], list[str], str]
"""Rows of layers, bytes of all other tensors, names of unquantized linear layers, further lines, and the tool."""


def _contents(source: ResolvedSource, check: bool) -> Inspected:
    from lowbit.checkpoint import expected_tensors
    from lowbit.progress import Progress

    with source.reader() as reader:
        checked = _checked(reader) if check else []
        manifest = reader.manifest
        layers = manifest.layers if manifest else {}
        rotated = [] if manifest is None or manifest.rotation is None else [f"rotated (--rotate --seed {manifest.rotation})"]
        bar = Progress(layers, desc="layers", unit="layers")
        rows = [_layer_row(name, reader.experts(name) if layers[name].experts else reader.layer(name)) for name in bar]
        packed = {tensor for name, entry in layers.items() for tensor in expected_tensors(name, entry)}
        rest = sum(_tensor_bytes(reader, name) for name in reader.names() if name not in packed)
    return rows, rest, manifest.modules_to_not_convert if manifest else (), rotated + checked, "lowbit" if manifest else "none"


def _foreign_contents(source: ResolvedSource) -> Inspected:
    from lowbit.formats import ExpertTensor
    from lowbit.models.layer_importer import LayerImporter
    from lowbit.progress import Progress

    importer = LayerImporter(source.open_quantized())
    bar = Progress([n for n in importer.reader.entries if n not in importer.in_experts], desc="layers", unit="layers")
    rows = [_layer_row(importer.module(name) or name, importer.layer(name)) for name in bar if importer.judge(name)]
    biases = 0
    for layer in filter(importer.judge_experts, importer.reader.experts):  # one expert layer in memory at a time
        tensors = importer.expert_tensors(layer)
        rows += [_layer_row(name, q) for name, q in tensors.items() if isinstance(q, ExpertTensor)]
        biases += sum(t.nbytes for t in tensors.values() if not isinstance(t, ExpertTensor))
    rest = biases + sum(importer.plain(name).nbytes for name in importer.reader.plain if not importer.left_out(name))
    refused = importer.refusals()
    lines = [*importer.notes(), *([f"cannot be loaded: {refused}"] if refused else [])]
    return rows, rest, tuple(importer.unquantized_linears()), lines, importer.checkpoint.tool


def _checked(reader: CheckpointReader) -> list[str]:
    """Compares the files of a checkpoint with their checksums, and returns lines that describe what was checked."""
    from lowbit.models.load import verified_files

    total = sum(file.stat().st_size for file in {reader.info(name).file for name in reader.names()})
    verified = verified_files(reader, progress=True)
    files = f"{len(verified)} file{'s' if len(verified) > 1 else ''}, {total:,} bytes: SHA-256 as config.json states"
    files += " (weights and quantization_config; the rest of config.json and the tokenizer have no checksum)"
    none = "config.json states no checksums, so changes of the files cannot be detected"
    return [files if verified else none, "every tensor has the dtype and shape of config.json"]


def _layer_row(name: str, q: QuantTensor | ExpertTensor) -> dict[str, Any]:
    """Returns the row of a layer. "experts" is the number of experts, each with a matrix N x K; 0 for a single matrix."""
    experts, low_rank = getattr(q, "experts", 0), getattr(q, "low_rank", None)
    return {
        "layer": name,
        "scheme": q.scheme.name,
        "n": q.shape[0],
        "k": q.shape[1],
        "bytes": q.nbytes,
        "bits_per_weight": q.bits_per_weight,
        **asdict(q.input_transform.parts),
        "low_rank": 0 if low_rank is None else low_rank.rank,
        "experts": experts,
    }


def _tensor_bytes(reader: CheckpointReader, name: str) -> int:
    return reader.get(name).nbytes
