"""auto-round's own format (`quant_method: "auto-round"`): layers as in GPTQ or AWQ files, named by `packing_format`:

    auto_round:auto_gptq     GPTQ, version 1 (zeros minus 1)
    auto_round, auto_round:gptqmodel
                             GPTQ, version 2 (zeros unchanged)
    auto_round:auto_awq      AWQ, version gemm

GPTQ's codes may also have 5, 6 and 7 bits here, stored as one stream of bits like 3-bit codes. `extra_config` gives single
layers another width or group size, or keeps them in 16 bits; the shapes of a layer's tensors show which. Formats for quantized
activations and floating-point weights have other tensors and are refused.
Source: auto-round 0.16.1, inference/convert_model.py, inference/backend.py, auto_round/export/export_to_autoround/export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.foreign import bit_width, config_value, group_size
from lowbit.checkpoint.gptq import STREAM_BITS, Gptq
from lowbit.checkpoint.schema import CheckpointError

_VERSION_2 = {"auto_round:auto_gptq": False, "auto_round:gptq": False, "auto_round": True, "auto_round:gptqmodel": True}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_EXPORT = "export the model with auto-round's --format llm_compressor"


def schema(config: Mapping[str, Any], where: Path | str) -> Gptq | Awq:
    """Returns the schema of auto-round's own format. Raises CheckpointError, with the supported values, for other formats."""
    packing = config_value(config, where, ("packing_format",), str, "auto_round:auto_gptq")
    if packing not in (*_VERSION_2, *_AWQ):
        raise CheckpointError(
            f"{where}: packing_format {packing!r}; supported are {', '.join((*_VERSION_2, *_AWQ))}; {_EXPORT}"
        )
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(value, Mapping) for value in extra.values()):
        raise CheckpointError(f"{where}: extra_config is an object of objects by layer, got {str(extra)[:80]!r}")
    quantized = {name: value for name, value in extra.items() if not _in_16_bits(value)}
    for name, value in (("", config), *quantized.items()):
        _refuse_others(value, f"{where}: extra_config: {name}" if name else where)
    bits = bit_width(config_value(config, where, ("bits",), int), where, STREAM_BITS, "auto-round's")
    size = group_size(config_value(config, where, ("group_size",), int), where)
    sizes = (group_size(config_value(v, f"{where}: {n}", ("group_size",), int, size), where) for n, v in quantized.items())
    others, mixed = tuple(dict.fromkeys(sizes)), bool(quantized)
    symmetric: bool | None = config_value(config, where, ("sym",), bool, True)
    if any(config_value(v, f"{where}: {n}", ("sym",), bool, symmetric) is not symmetric for n, v in quantized.items()):
        symmetric = None
    if packing in _AWQ:
        return Awq(size, bool(symmetric), bits, mixed, others)
    return Gptq(bits, size, _VERSION_2[packing], symmetric, mixed, others, stream=True)


def _in_16_bits(value: Mapping[str, Any]) -> bool:
    return type(value.get("bits")) is int and value["bits"] >= 16


def _refuse_others(config: Mapping[str, Any], where: Path | str) -> None:
    """Raises CheckpointError for non-integer weights, quantized activations, and rotations at run time."""
    kind = config.get("data_type", "int")
    if kind not in ("int", "int_sym", "int_asym"):
        raise CheckpointError(f"{where}: data_type {kind!r}; supported are integers (int); {_EXPORT}")
    activation = config.get("act_bits")
    if activation is not None and (type(activation) is not int or activation <= 8):
        raise CheckpointError(
            f"{where}: act_bits {activation!r}: activations of auto-round's own format are not supported; {_EXPORT}"
        )
    for key in ("super_bits", "super_group_size", "rotation_config"):
        if config.get(key):
            raise CheckpointError(
                f"{where}: {key} is {str(config[key])[:80]!r}, which is not supported; quantize again without it"
            )
