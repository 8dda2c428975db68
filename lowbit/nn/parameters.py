"""The base of modules with quantized weights: the parameters of their form on disk and the transform of their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats import (
    NO_PARTS,
    InputParts,
    InputTransform,
    PerBlock,
    Scheme,
    ZeroPoint,
    packed_bytes,
    parse_scheme,
    scale_shape,
)
from lowbit.ops.channels import gather_channels, rotate_channels
from lowbit.ops.quantize_activations import Activations, quantize_activations
from lowbit.quantize.rtn import scale_dtype

INPUT_PARAMETERS = {
    "order": "weight_order", "pre_quant_scale": "pre_quant_scale", "activation_scale": "activation_scale",
    "activation_zero": "activation_zero",
}  # fmt: skip
"""The parameter that holds each tensor of an `InputTransform`, by field name. Tensors in files have the parameters' names."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that scales can have."""


class PackedParameters(nn.Module):
    """A matrix [N, K] as the parameters `weight_packed` uint8 [N, ceil(K * bits / 8)], `weight_scale` and, with zeros,
    `weight_zero`. With `experts` = E > 0, each parameter has a leading dimension E and holds the matrices of E experts.

    The parts of the input transform that `input_parts` names are parameters too: `weight_order` int32 [K] and, by the names of
    `InputTransform`, pre_quant_scale float [K] (float32 until loaded otherwise), activation_scale float32 [1], activation_zero
    int32 [1]. They are parameters rather than buffers, because tensor parallelism shards only parameters. None is called
    `weight`, because other libraries would read it as floats.
    """

    weight_zero: nn.Parameter | None
    weight_order: nn.Parameter | None
    pre_quant_scale: nn.Parameter | None
    activation_scale: nn.Parameter | None
    activation_zero: nn.Parameter | None

    def __init__(
        self,
        shape: tuple[int, int],
        scheme: str | Scheme,
        device: torch.device | str | None = None,
        *,
        input_parts: InputParts = NO_PARTS,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.scheme = parse_scheme(scheme)
        self.scheme_name = self.scheme.name
        self.shape = shape
        n, k = shape
        leading = (experts,) if experts else ()
        grid, dtype = (*leading, *scale_shape(self.scheme.granularity, shape)), scale_dtype(self.scheme)
        zero_dtype = torch.uint8 if self.scheme.zero is ZeroPoint.INTEGER else dtype
        self.activation_format = None if self.scheme.activation is None else self.scheme.activation.name
        # If the weights have scales per block, x is quantized in groups along K that are as long as a block.
        self.activation_group = self.scheme.granularity.k if isinstance(self.scheme.granularity, PerBlock) else 0
        self._stored_shape = (*leading, n, packed_bytes(k, self.scheme.weight.bits))
        self.weight_packed = parameter(torch.empty(self._stored_shape, dtype=torch.uint8, device=device))
        self.weight_scale = parameter(torch.empty(grid, dtype=dtype, device=device))
        if self.scheme.zero is ZeroPoint.NONE:
            self.register_parameter("weight_zero", None)
        else:
            self.weight_zero = parameter(torch.empty(grid, dtype=zero_dtype, device=device))
        sizes = {"order": k, "pre_quant_scale": k, "activation_scale": 1, "activation_zero": 1}
        integers = ("order", "activation_zero")
        self._set_input(
            InputTransform(
                **{
                    part: torch.empty(size, dtype=torch.int32 if part in integers else torch.float32, device=device)
                    for part, size in sizes.items()
                    if getattr(input_parts, part)
                },
                hadamard=input_parts.hadamard,
            )
        )

    def _set_input(self, transform: InputTransform) -> None:
        """Makes the tensors of a transform parameters of this module. A tensor that is a parameter already is shared with its
        module."""
        parts = transform.parts
        parts.check(self.scheme, self.shape[1])
        held = transform.tensors()
        for part, name in INPUT_PARAMETERS.items():
            t = held.get(part)
            self.register_parameter(name, t if t is None or isinstance(t, nn.Parameter) else parameter(t))
        # Read at every call: an attribute is faster than looking up whether a parameter is None.
        self.has_channels, self.hadamard = parts.has_channels, parts.hadamard

    @property
    def input_transform(self) -> InputTransform:
        """The transform of x before the product; its tensors are this module's parameters."""
        held = {part: getattr(self, name) for part, name in INPUT_PARAMETERS.items()}
        return InputTransform(**held, hadamard=self.hadamard)

    def quantization(self) -> dict[str, Any]:
        """The arguments of `ops.quantize_activations` with which x is rotated and quantized."""
        static = self.activation_scale
        return {
            "fmt": self.activation_format,
            "group": self.activation_group if static is None else 0,
            "scale": static,
            "symmetric": not self.scheme.activation_zero,
            "zero": self.activation_zero,
            "rule": self.scheme.rule.value,
            "hadamard": self.hadamard,
        }

    @property
    def takes_quantized_input(self) -> bool:
        """True if the layer only rotates and quantizes x, so that the module that computes x can do it instead."""
        return self.activation_format is not None and not self.has_channels

    def rotated(self, x: Tensor) -> Tensor:
        """Returns x [.., K] after the rotation, or x if it is rotated together with the quantization."""
        return rotate_channels(x, self.hadamard) if self.hadamard and not self.takes_quantized_input else x

    def after_rotation(self, x: Tensor) -> Tensor | Activations:
        """Returns the `rotated` x after the rest of the input transform: scaled, reordered and quantized."""
        if self.has_channels:
            x = gather_channels(x, self.weight_order, self.pre_quant_scale)
        if self.activation_format is None:
            return x
        how = self.quantization()
        return quantize_activations(x, **(how if self.takes_quantized_input else how | {"hadamard": 0}))

    @property
    def rotation_repr(self) -> str:
        """What `extra_repr` says of the rotation."""
        return f", hadamard={self.hadamard}" if self.hadamard else ""

    @property
    def is_prepared(self) -> bool:
        """True if the weights are packed for the kernels of their device."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the form on disk if the weights are packed for kernels."""
        raise NotImplementedError

    def clear_refusals(self) -> None:
        """Clears the cached refusals of kernels, after a change of the layer."""
        raise NotImplementedError

    def placement_refusals(self) -> tuple[str, ...]:
        """Returns the reasons, other than the scheme, why the layer must dequantize its weights at every call."""
        if self.is_split:
            return ("takes a whole matrix, this is one rank's part of it",)
        if getattr(getattr(self, "_hf_hook", None), "offload", False):
            return ("keeps weights in memory, these are loaded and dropped at every call (offloaded by Accelerate)",)
        return ()

    @property
    def is_split(self) -> bool:
        """True if tensor parallelism holds only a part of the weights here."""
        if self.is_prepared:
            return False
        packed = self.weight_packed
        return hasattr(packed, "device_mesh") or tuple(packed.shape) != self._stored_shape

    def dequantize_refusals(self) -> tuple[str, ...]:
        """Returns the reasons why the weights cannot be dequantized here; empty if they can."""
        if self.is_split:
            return ("tensor parallelism has split the weights, load the model without it to dequantize them",)
        if self.weight_scale.is_meta:
            return ("Accelerate has offloaded the weights, load the model without offloading (device_map) to dequantize them",)
        return ()

    def _adopt_types(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Gives floating-point scales, zeros and factors the types of the tensors that are about to be loaded."""
        for name in ("weight_scale", "weight_zero", INPUT_PARAMETERS["pre_quant_scale"]):
            held, comes = getattr(self, name), state_dict.get(f"{prefix}{name}")
            if held is not None and held.is_floating_point() and getattr(comes, "dtype", None) in _FLOATS:
                assert comes is not None
                held.data = held.data.to(comes.dtype)  # not a new parameter, since a tied module shares this one

    def _exact_tensors(self) -> tuple[Tensor | None, ...]:
        """Returns the tensors whose type `.half()` and `.bfloat16()` must not change."""
        return tuple(getattr(self, name) for name in ("weight_scale", "weight_zero", *INPUT_PARAMETERS.values()))

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves the parameters to another device as any module does, but keeps the dtype of `_exact_tensors`, because
        `.half()` must not round float32 scales. Without a change of device the packed form stays."""
        here = self.weight_packed.device
        if fn(torch.empty(0, dtype=torch.uint8, device=here)).device != here:
            self.restore()
        self.clear_refusals()
        return super()._apply(keeping_types(fn, self._exact_tensors()), recurse)


def keeping_types(fn: Callable[[Tensor], Tensor], exact: Iterable[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """Returns the function `fn` of `Module._apply`, changed so that the tensors `exact` keep their dtypes."""
    numbers = {id(t) for t in exact}

    def apply(t: Tensor) -> Tensor:
        moved = fn(t)
        return t.to(moved.device) if id(t) in numbers and moved.dtype != t.dtype else moved

    return apply


def parameter(t: Tensor) -> nn.Parameter:
    """Returns `t` as a parameter without a gradient."""
    return nn.Parameter(t, requires_grad=False)
