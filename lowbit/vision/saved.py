"""A quantized network on disk: a folder with config.json, which lists the operations, and model.safetensors.

Weights whose codes are all in -8 to 7 are stored in 4 bits (`formats/words.py`), others as int8, constants in float32. The
folder is written atomically. Loading executes no code: floating-point operations are looked up in a fixed list.

config.json contains the SHA-256 of description and tensors, so changed files are refused. `check` validates networks without a
checksum.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter
from lowbit.formats import pack_words, packed_bytes, unpack_words
from lowbit.formats.conv import CODES, ConvLayer, GateSpec, ResizeSpec, SecondProduct, SumSpec, weight_storage
from lowbit.vision.bits import scheme_bits
from lowbit.vision.check import check
from lowbit.vision.graph import Form, Other, Ref
from lowbit.vision.network import QuantizedNetwork
from lowbit.vision.pixels import Pixels
from lowbit.vision.program import (
    Compute,
    ConcatCodes,
    Convolve,
    Dequantize,
    GateCodes,
    MapCodes,
    Operation,
    PoolAverage,
    PoolMax,
    Program,
    Quantize,
    ResizeCodes,
    SumCodes,
    Value,
)

FORMAT = "lowbit.vision"
VERSION = 1
_FLOATING = (
    "adaptive_avg_pool2d.default", "add.Tensor", "avg_pool2d.default", "batch_norm.default", "cat.default", "clamp.default",
    "conv2d.default", "conv2d.padding", "flatten.using_ints", "gelu.default", "group_norm.default", "hardsigmoid.default",
    "hardswish.default", "hardtanh.default", "layer_norm.default", "leaky_relu.default", "linear.default", "max_pool2d.default",
    "mean.dim", "mul.Tensor", "pad.default", "permute.default", "relu.default", "relu6.default", "reshape.default",
    "sigmoid.default", "silu.default", "softmax.int", "sub.Tensor", "sym_size.int", "transpose.int", "upsample_bilinear2d.vec",
    "upsample_nearest2d.vec", "view.default",
)  # fmt: skip
"""aten operations that a saved network may contain. Each depends on its arguments only."""


def save(
    network: QuantizedNetwork, folder: str | Path, *, overwrite: bool = False, say: Callable[[str], None] = lambda line: None
) -> None:
    """Writes `network` to `folder`; `say` is called with a line about what was replaced. Raises CheckpointError if the folder
    exists (unless `overwrite` and it is a network or checkpoint), if it cannot be written, or if an operation cannot be
    saved."""
    program = network.program
    tensors: dict[str, Tensor] = {}
    with CheckpointWriter(folder, overwrite=overwrite, say=say) as writer:
        operations = [_written(op, f"op{i}", tensors.__setitem__) for i, op in enumerate(program.operations)]
        if not program.layers:
            tensors["empty"] = torch.zeros(1)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        config = {
            "format": FORMAT,
            "version": VERSION,
            "scheme": network.scheme,
            "images": program.images,
            **_results(program),
            "pixels": None if program.pixels is None else [list(program.pixels.mean), list(program.pixels.deviation)],
            "values": {name: [v.storage, list(v.shape), v.scale] for name, v in program.values.items()},
            "operations": operations,
        }
        writer.finish({**config, "sha256": _sha256(config, tensors)}, None)


def load(folder: str | Path) -> QuantizedNetwork:
    """Loads the network that `save` wrote. Raises CheckpointError with the folder and the operation, value or tensor if the
    folder is not such a network or its files were changed."""
    with CheckpointReader(folder) as reader:
        config = reader.config
        if config.get("format") != FORMAT:
            raise CheckpointError(f"{folder}: not a quantized network for images (config.json says no {FORMAT!r})")
        if config.get("version") != VERSION:
            raise CheckpointError(f"{folder}: version {config.get('version')!r}, this release reads {VERSION}; update lowbit")
        tensors = {name: reader.get(name) for name in reader.names()}
    try:
        network = _network(config, tensors)
        # Older releases wrote no checksum.
        if config.get("sha256", digest := _sha256(config, tensors)) != digest:
            raise ValueError(
                f"its SHA-256 is {digest}, config.json states {config['sha256']}: it was changed since it was saved"
            )
        return network
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{folder}: config.json does not describe a network: {_said(error)}") from error


def _network(config: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedNetwork:
    """Returns the network of a description and its tensors."""
    unread = set(tensors) - {"empty"}

    def get(name: str) -> Tensor:
        unread.discard(name)
        return tensors[name]

    values = {name: Value(v[0], tuple(v[1]), v[2]) for name, v in config["values"].items()}
    operations: list[Operation] = []
    for i, row in enumerate(config["operations"]):
        try:
            operations.append(_read(row, f"op{i}", get))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(f"operation {i}: {_said(error)}") from error
    if unread:
        raise ValueError(f"nothing reads the tensor {min(unread)}")
    pixels = config.get("pixels") and Pixels(*(tuple(map(float, row)) for row in config["pixels"]))
    results = tuple(config["results"]) if "results" in config else (config["result"],)
    form = _form(config.get("form", 0), len(results))
    program = Program(tuple(operations), values, config["images"], results, pixels, form)
    check(program)
    scheme_bits(config["scheme"])
    return QuantizedNetwork(program, config["scheme"])


def _results(program: Program) -> dict[str, Any]:
    """Returns the names of the results as JSON; one tensor as earlier releases wrote it."""
    if program.form == 0:
        return {"result": program.results[0]}
    return {"results": list(program.results), "form": program.form}


def _form(form: Any, count: int) -> Form:
    """Returns the form of `count` results read from JSON."""
    if isinstance(form, dict) and all(isinstance(key, str) for key in form):
        return {key: _form(part, count) for key, part in form.items()}
    if isinstance(form, list):
        return tuple(_form(part, count) for part in form)
    if type(form) is not int or not 0 <= form < count:
        raise ValueError(f"results are numbered 0 to {count - 1}, got {form!r}")
    return form


def _said(error: Exception) -> str:
    """Returns the message of an error in one line. The message of a KeyError is only a name."""
    line = " ".join(str(error).split())[:500]
    return f"{line} is missing" if isinstance(error, KeyError) else line or type(error).__name__


def _sha256(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 in hexadecimal of the description without its checksum, and of the tensors."""
    description = {key: value for key, value in config.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _written(op: Operation, key: str, add: Callable[[str, Tensor], None]) -> dict[str, Any]:
    """Returns the operation as JSON and passes its tensors to `add`."""
    match op:
        case Convolve(y, x, layer, residual, second):
            row: dict[str, Any] = {"kind": "convolve", "y": y, "x": x, "residual": residual, "second": second}
            row["layer"] = _layer_row(layer, key, add)
            return row
        case SumCodes(y, x, layer, other):
            return {"kind": "sum", "y": y, "x": x, "other": other, "layer": vars(layer)}
        case MapCodes(y, x, table, function):
            add(f"{key}.table", table)
            return {"kind": "map", "y": y, "x": x, "function": function}
        case GateCodes(y, x, gate, layer):
            return {"kind": "gate", "y": y, "x": x, "gate": gate, "layer": vars(layer)}
        case ResizeCodes(y, x, layer):
            return {"kind": "resize", "y": y, "x": x, **vars(layer)}
        case ConcatCodes(y, parts, layers):
            return {"kind": "concat", "y": y, "parts": list(parts), "layers": [vars(layer) for layer in layers]}
        case Compute(y, node):
            return {"kind": "compute", "y": y, **_node_row(node, key, add)}
    kind = {Quantize: "quantize", PoolMax: "max_pool", PoolAverage: "average_pool", Dequantize: "dequantize"}[type(op)]
    return {"kind": kind, **vars(op)}


def _read(row: dict[str, Any], key: str, get: Callable[[str], Tensor]) -> Operation:
    kind, y = row["kind"], row["y"]
    match kind:
        case "quantize":
            return Quantize(y, row["x"], row["factor"])
        case "max_pool":
            return PoolMax(y, row["x"], tuple(row["kernel"]), tuple(row["stride"]), tuple(row["padding"]))
        case "average_pool":
            return PoolAverage(y, row["x"], row["scale"])
        case "dequantize":
            return Dequantize(y, row["x"], row["scale"])
        case "convolve":
            return Convolve(y, row["x"], _layer(row["layer"], key, get), row["residual"], row["second"])
        case "sum":
            return SumCodes(y, row["x"], SumSpec(**row["layer"]), row["other"])
        case "map":
            return MapCodes(y, row["x"], get(f"{key}.table"), row.get("function", ""))  # earlier releases named none
        case "gate":
            return GateCodes(y, row["x"], row["gate"], GateSpec(**row["layer"]))
        case "resize":
            height, width = row["size"]
            return ResizeCodes(y, row["x"], ResizeSpec(row["mode"], (height, width), row["aligned"]))
        case "concat":
            return ConcatCodes(y, tuple(row["parts"]), tuple(SumSpec(**layer) for layer in row["layers"]))
        case "compute":
            return Compute(y, _node(row, key, get))
    raise ValueError(f"unknown operation {kind!r}")


def _layer_row(layer: ConvLayer, key: str, add: Callable[[str, Tensor], None]) -> dict[str, Any]:
    add(f"{key}.s", layer.s)
    add(f"{key}.b", layer.b)
    row = {
        "name": layer.name, "weight": _add_codes(layer.weight, f"{key}.weight", add), "x": layer.x, "y": layer.y,
        "stride": layer.stride, "padding": layer.padding, "relu": layer.relu, "residual": layer.residual, "g": layer.g,
        "second": None, "groups": layer.groups,
    }  # fmt: skip
    if layer.second is not None:
        second = layer.second
        add(f"{key}.s2", second.s)
        codes = _add_codes(second.weight, f"{key}.weight2", add)
        row["second"] = {"weight": codes, "x": second.x, "stride": second.stride, "padding": second.padding}
    return row


def _layer(row: dict[str, Any], key: str, get: Callable[[str], Tensor]) -> ConvLayer:
    second = None
    if row["second"] is not None:
        other = row["second"]
        codes = _codes(other["weight"], f"{key}.weight2", get)
        second = SecondProduct(codes, get(f"{key}.s2"), other["x"], tuple(other["stride"]), tuple(other["padding"]))
    return ConvLayer(
        _codes(row["weight"], f"{key}.weight", get), get(f"{key}.s"), get(f"{key}.b"), row["x"], row["y"],
        tuple(row["stride"]), tuple(row["padding"]), row["relu"], row["residual"], row["g"], second, row["name"],
        row.get("groups", 1),  # earlier releases had one group
    )  # fmt: skip


def _add_codes(codes: Tensor, name: str, add: Callable[[str, Tensor], None]) -> dict[str, Any]:
    """Stores weight codes int8 [O, C, R, S] in 4 or 8 bits and returns their shape and bits."""
    bits = CODES[weight_storage(codes)].bits
    flat = codes.flatten(1)
    add(name, pack_words((flat + 8).to(torch.uint8), 4) if bits == 4 else flat)
    return {"shape": list(codes.shape), "bits": bits}


def _codes(row: dict[str, Any], name: str, get: Callable[[str], Tensor]) -> Tensor:
    stored, shape = get(name), row["shape"]
    if len(shape) != 4 or not all(type(size) is int and 0 < size < 1 << 31 for size in shape) or row["bits"] not in (4, 8):
        raise ValueError(f"weights of 4 or 8 bits [O, C, R, S], got {row['bits']!r} and {shape}")
    count = shape[1] * shape[2] * shape[3]
    dtype, width = (torch.uint8, packed_bytes(count, 4)) if row["bits"] == 4 else (torch.int8, count)
    if stored.dtype != dtype or tuple(stored.shape) != (shape[0], width):
        raise ValueError(f"{name} is {dtype} {[shape[0], width]}, got {stored.dtype} {list(stored.shape)}")
    if row["bits"] == 4:
        stored = unpack_words(stored, 4, count).to(torch.int8) - 8
    return stored.reshape(shape)


def _node_row(node: Other, key: str, add: Callable[[str, Tensor], None]) -> dict[str, Any]:
    name = "getitem" if node.target is operator.getitem else str(node.target).removeprefix("aten.")
    if name not in (*_FLOATING, "getitem"):
        raise CheckpointError(f"{node.name}: {name} cannot be saved; what can is {', '.join(_FLOATING)}")
    count = 0

    def plain(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Ref):
            return {"value": value.name}
        if isinstance(value, Tensor):
            count += 1
            add(f"{key}.{count}", value)
            return {"tensor": f"{key}.{count}"}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise CheckpointError(f"{node.name}: {name} has an argument {value!r} that cannot be saved")

    kwargs = {k: plain(v) for k, v in node.kwargs.items()}
    return {"target": name, "args": plain(node.args), "kwargs": kwargs, "reason": node.reason}


def _node(row: dict[str, Any], key: str, get: Callable[[str], Tensor]) -> Other:
    name = row["target"]
    if name not in (*_FLOATING, "getitem"):
        raise ValueError(f"unknown floating-point operation {name!r}")
    target: Callable[..., Any] = operator.getitem
    if name != "getitem":
        packet, overload = name.split(".")
        target = getattr(getattr(torch.ops.aten, packet), overload)

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return Ref(value["value"]) if "value" in value else get(value["tensor"])
        return [restored(item) for item in value] if isinstance(value, list) else value

    kwargs = {k: restored(v) for k, v in row["kwargs"].items()}
    return Other(row["y"], target, tuple(restored(row["args"])), kwargs, row["reason"])
