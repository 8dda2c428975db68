"""Parses `config_groups` in config.json of a compressed-tensors checkpoint: one `WeightArgs` per group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.checkpoint.foreign import MAX_GROUP, ForeignLayer, bit_width, config_value
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import (
    ActivationRule,
    FloatFormat,
    Granularity,
    IntFormat,
    NumberFormat,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    Scheme,
    ZeroPoint,
    float_format,
    int_format,
    uint_format,
)

PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
MX = {
    "mxfp4-pack-quantized": float_format(2, 1),
    "mxfp6-pack-quantized": float_format(2, 3),
    "mxfp8-quantized": float_format(4, 3),
}
NVFP4 = "nvfp4-pack-quantized"
E4M3 = float_format(4, 3)
_SMALL_FLOATS = MX | {NVFP4: float_format(2, 1)}
_FORMATS = (PACKED, INT, FLOAT, NAIVE, *_SMALL_FLOATS)


@dataclass(frozen=True)
class WeightArgs:
    """The layout and number formats of one config group.

    zero: the weights have zero points. activation: format of quantized activations (None: 16 bits); static: their scale is the
    layer's input_scale; activation_zero: they have zero points (static ones: input_zero_point). None for `zero` and
    `activation_zero` means not stated: the layer's tensors decide. left_out: description of activations that no scheme
    represents. padded: words hold 32 // bits codes, as before 0.18. outputs: the files state quantized outputs.
    """

    layout: str
    bits: int
    float: bool
    granularity: Granularity
    zero: bool | None
    activation: NumberFormat | None = None
    static: bool = False
    activation_zero: bool | None = False
    left_out: str = ""
    padded: bool = False
    outputs: bool = False

    @property
    def scheme(self) -> Scheme:
        """Returns the scheme of a layer's QuantTensor. 1-bit integers become 2-bit ones, since no format has 1 bit."""
        weight: NumberFormat
        if self.layout in _SMALL_FLOATS:
            weight = _SMALL_FLOATS[self.layout]
        elif self.float:
            weight = E4M3
        else:
            weight = (uint_format if self.zero else int_format)(max(2, self.bits))
        zero = ZeroPoint.INTEGER if self.zero else ZeroPoint.NONE
        rule = ActivationRule.OWN if self.activation is None else ActivationRule.COMPRESSED_TENSORS
        return Scheme(weight, self.activation, self.granularity, zero, bool(self.activation_zero), rule)

    def resolved(self, layer: ForeignLayer) -> WeightArgs:
        """Returns the arguments with the unstated values determined by a layer's tensors."""
        zero, zero_of_x = self.zero, self.activation_zero
        if zero is None:
            zero = not self.float and layer.has("weight_zero_point")
        if zero_of_x is None:
            zero_of_x = self.static and isinstance(self.activation, IntFormat) and layer.has("input_zero_point")
        return dataclasses.replace(self, zero=zero, activation_zero=zero_of_x)


def weight_args(group: Any, default_format: Any, where: str) -> WeightArgs:
    """Returns the arguments of one entry of `config_groups`."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"{where}: a config group is an object with weights, got {str(group)[:80]!r}")
    weights, layout = group["weights"], group.get("format") or default_format
    if layout not in _FORMATS:
        raise CheckpointError(
            f"{where}: format {layout!r} is not supported; supported are {', '.join(_FORMATS)}. Decompress the model with the "
            "tool that wrote it, or start from its 16-bit checkpoint"
        )
    if weights.get("actorder") in ("group", "dynamic", True):
        raise CheckpointError(
            f"{where}: actorder 'group' (a channel order) is not supported; quantize again with actorder 'weight'"
        )
    kind = config_value(weights, where, ("type",), str, "int")
    bits = config_value(weights, where, ("num_bits",), int)
    is_float = kind == "float"
    if (is_float != (layout in (FLOAT, *_SMALL_FLOATS)) and layout != NAIVE) or kind not in ("int", "float"):
        raise CheckpointError(f"{where}: weights of type {kind!r} do not go with format {layout}")
    allowed: Iterable[int] = (_SMALL_FLOATS[layout].bits,) if layout in _SMALL_FLOATS else (8,) if is_float else range(1, 9)
    bit_width(bits, where, allowed, layout)
    symmetric = config_value(weights, where, ("symmetric",), bool, None)
    if is_float and symmetric is False:
        raise CheckpointError(f"{where}: floating-point weights have no zero points, but symmetric is false")
    small = PerGroup(16 if layout == NVFP4 else 32)
    granularity = small if layout in _SMALL_FLOATS else _granularity(weights, where)
    if layout == PACKED and symmetric is False and isinstance(granularity, (PerTensor, PerBlock)):
        raise CheckpointError(f"{where}: packed zero points go with scales of groups or channels, not {granularity}")
    zero = None if symmetric is None else not symmetric
    activation = _activation(group.get("input_activations"), granularity, where)
    outputs = group.get("output_activations") is not None
    return WeightArgs(layout, bits, is_float, granularity, zero, *activation, outputs=outputs)


def _granularity(weights: Mapping[str, Any], where: str) -> Granularity:
    size = config_value(weights, where, ("group_size",), int, None)
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = config_value(weights, where, ("strategy",), str, inferred)
    if strategy == "group" and size is not None and 0 < size <= MAX_GROUP:
        return PerGroup(size)
    if strategy == "channel":
        return PerChannel()
    if strategy == "tensor":
        return PerTensor()
    block = weights.get("block_structure")
    pair = isinstance(block, list) and len(block) == 2 and all(type(v) is int and 0 < v <= MAX_GROUP for v in block)
    if strategy == "block" and isinstance(block, list) and pair:
        return PerBlock(block[0], block[1])
    raise CheckpointError(
        f"{where}: strategy {strategy!r} with group_size {size!r} and block_structure {block!r}; supported are tensor, "
        "channel, group with a positive group_size, and block with two positive numbers"
    )


def _activation(value: Any, weights: Granularity, where: str) -> tuple[NumberFormat | None, bool, bool | None, str]:
    """Returns the activations' format (None: 16 bits), whether their scale is static, whether they have zero points (None: not
    stated), and why they are ignored if no scheme represents them."""
    if value is None:
        return None, False, False, ""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: input_activations is an object or null, got {str(value)[:80]!r}")
    bits = config_value(value, where, ("num_bits",), int, 8)
    size = config_value(value, where, ("group_size",), int, None)
    fmt: NumberFormat | None
    if value.get("type") == "float":
        fmt = {8: E4M3, 4: float_format(2, 1)}.get(bits)
    else:
        fmt = int_format(bits) if 2 <= bits <= 8 else None
    dynamic = value.get("dynamic", False)
    symmetric = config_value(value, where, ("symmetric",), bool, None)
    strategy = value.get("strategy") or ("token" if dynamic is True else "tensor" if size is None else "group")
    stated = f"the files state {value.get('type') or 'int'} activations of {bits} bits"
    if fmt is None or dynamic not in (True, False):
        return None, False, False, f"{stated}, dynamic {dynamic!r}, which no scheme supports"
    blocks = weights.k if isinstance(weights, PerBlock) else None
    supported = ("tensor", None) if dynamic is False else ("token", None) if blocks is None else ("group", blocks)
    if (strategy, size if strategy == "group" else None) != supported:
        scales = f"{strategy} of {size}" if strategy == "group" else strategy
        return None, False, False, f"{stated} by scales of strategy {scales}; schemes with such weights support {supported[0]}"
    if symmetric is False and (not isinstance(fmt, IntFormat) or blocks is not None):
        return None, False, False, f"{stated} with zero points, which no scheme of such weights supports"
    zero = None if symmetric is None and dynamic is False else symmetric is False
    return fmt, not dynamic, zero, ""


def weights_json(args: WeightArgs) -> dict[str, Any]:
    """Returns `weights` of a config group."""
    granularity = args.granularity
    strategy = {PerGroup: "group", PerChannel: "channel", PerTensor: "tensor", PerBlock: "block"}[type(granularity)]  # type: ignore[index]
    return {
        "num_bits": args.bits,
        "type": "float" if args.float else "int",
        "symmetric": not args.zero,
        "strategy": strategy,
        "group_size": granularity.size if isinstance(granularity, PerGroup) else None,
        "block_structure": [granularity.n, granularity.k] if isinstance(granularity, PerBlock) else None,
        "dynamic": False,
        "actorder": None,
        "zp_dtype": "torch.int8" if args.zero else None,
    }


def activation_json(args: WeightArgs) -> dict[str, Any]:
    """Returns `input_activations` of a config group: per token, per group as long as a block of weights, or static."""
    assert args.activation is not None
    shared = {"type": "float" if isinstance(args.activation, FloatFormat) else "int", "dynamic": True}
    shared["symmetric"] = not args.activation_zero
    if args.static:
        return shared | {"num_bits": args.activation.bits, "strategy": "tensor", "dynamic": False}
    if isinstance(args.granularity, PerBlock):
        return shared | {"num_bits": args.activation.bits, "strategy": "group", "group_size": args.granularity.k}
    return shared | {"num_bits": args.activation.bits, "strategy": "token"}
