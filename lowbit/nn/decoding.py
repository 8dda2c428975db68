"""Dequantizes layers of a model on a CPU once, if torch has no fast product for their packed form.

Dequantizing at every call takes several times as long as the product of one token. A layer dequantized once is as fast as an
unquantized one, but takes 2 or 4 bytes per weight in addition to the form on disk.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from lowbit.nn.experts import PackedExperts
from lowbit.nn.linear import QuantLinear
from lowbit.ops.table import choose, problem_on

SHARE = 0.5
"""Share of the machine's memory that the parameters of a model may take together with its dequantized weights."""


def allow_decoding(model: nn.Module, dtype: torch.dtype, memory_bytes: int | None = None) -> list[str]:
    """Lets quantized linear layers and experts on a CPU dequantize their weights once, at the first call with x of `dtype`, if
    there is enough memory for all of them.

    There is enough if dequantized weights and all parameters take at most `SHARE` of `memory_bytes`. The default is the
    machine's total memory, not its free memory, so that a model always runs in the same way. If the memory is unknown, nothing
    is dequantized. Returns a line for each form in which the layers will run.
    """
    kinds = (QuantLinear, PackedExperts)
    layers = [m for m in model.modules() if isinstance(m, kinds) and m.weight_scale.device.type == "cpu"]
    forms = {id(layer): choose(problem_on("cpu", layer.scheme, 1, layer.shape, dtype)).form for layer in layers}
    slow = [layer for layer in layers if forms[id(layer)] == "rows" and layer.scheme.activation is None]
    decoded = dtype.itemsize * sum(layer.count for layer in slow)
    held = sum(p.nbytes for p in model.parameters())
    limit = SHARE * (_machine_memory() if memory_bytes is None else memory_bytes)
    for layer in layers:
        layer.decode_bytes = dtype.itemsize if held + decoded <= limit else 0
        layer.clear_refusals()
        if not layer.decode_bytes and layer.is_decoded:
            layer.restore()
    groups: dict[tuple[str, str, str], int] = {}
    for layer in layers:
        how = "decoded" if layer in slow and layer.decode_bytes else forms[id(layer)]
        key = ("weights of experts" if isinstance(layer, PackedExperts) else "layers", layer.scheme_name, how)
        groups[key] = groups.get(key, 0) + 1
    name = str(dtype).removeprefix("torch.")
    return [
        f"{what} of {scheme} on this CPU ({n}): {_HOW[how].format(dtype=name)}" for (what, scheme, how), n in groups.items()
    ]


SLOW = "decoded at every call, several times slower than without quantization"
"""The report's text for layers that are dequantized at every call."""

_HOW = {
    "int4": "torch's int4 product, packed once",
    "int8": "torch's int8 product, packed once",
    "decoded": "decoded once to {dtype}, beside their form on disk",
    "rows": SLOW,
}


def _machine_memory() -> int:
    """Returns the machine's memory in bytes; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
