"""`lowbit inspect`: what a checkpoint holds, layer by layer, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lowbit.cli.terminal import Json, Model, check_json, err, out, write_result

if TYPE_CHECKING:
    from lowbit.checkpoint import CheckpointReader


def inspect(
    model: Model,
    check: Annotated[bool, typer.Option("--check", help="Read every tensor; compare all with config.json's model.")] = False,
    json_file: Json = None,
) -> None:
    """What a checkpoint holds: layers, schemes, bytes, bits per weight, what stayed in 16 bits."""
    from lowbit.checkpoint import CheckpointReader, expected_tensors
    from lowbit.models.load import check_checkpoint

    check_json(json_file, "lowbit inspect")
    with CheckpointReader(model) as reader:
        wrong = check_checkpoint(model) if check else ()
        if wrong:
            raise ValueError(f"{model}: {'; '.join(wrong)}")
        checked = _checked(reader) if check else []
        manifest = reader.manifest
        layers = manifest.layers if manifest else {}
        rows = [_layer_row(reader, name, str(entry.scheme)) for name, entry in layers.items()]
        packed = {tensor for name, entry in layers.items() for tensor in expected_tensors(name, entry)}
        rest = sum(_tensor_bytes(reader, name) for name in reader.names() if name not in packed)
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
                f"{len(rows)} quantized layers: {weights:,} weights in {total:,} bytes, {8 * total / weights:.3f} bits each"
            )
            out.print(f"in 16 bits or more: {rest:,} bytes; not converted: {', '.join(manifest.modules_to_not_convert) or '-'}")  # type: ignore[union-attr]
        else:
            out.print(f"not a lowbit checkpoint: {rest:,} bytes of plain tensors")
        for line in checked:
            out.print(line, highlight=False, soft_wrap=True)
    write_result(json_file, "lowbit inspect", {"layers": rows, "other_bytes": rest})


def _checked(reader: CheckpointReader) -> list[str]:
    """Compares the files of a checkpoint with their checksums; what was found right, a line each."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in {reader.info(name).file for name in reader.names()})
    shown = err.is_terminal and reader.manifest is not None and bool(reader.manifest.files)
    with tqdm(total=total, desc="checksums", unit="B", unit_scale=True, disable=not shown, leave=False) as bar:
        verified = reader.verify_files(bar.update)
    files = f"{len(verified)} file{'s' if len(verified) > 1 else ''}, {total:,} bytes: SHA-256 as config.json states"
    files += " (of weights and of its own quantization_config, not of the rest of it nor of the tokenizer)"
    none = "config.json states no checksums of its files: whether they are those that were written is not known"
    return [files if verified else none, "every tensor is as config.json says"]


def _layer_row(reader: CheckpointReader, name: str, scheme: str) -> dict[str, Any]:
    q = reader.layer(name)
    return {
        "layer": name,
        "scheme": scheme,
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
