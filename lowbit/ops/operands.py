"""Checks of the operands of operators on packed weights, and of the installed Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import Scheme, ZeroPoint, packed_bytes, parse_scheme, scale_shape

scheme_of = functools.lru_cache(maxsize=None)(parse_scheme)
"""Returns the scheme of a name; each name is parsed only once."""


def check_weight(
    operator: str, k: int, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> None:
    """Raises ValueError with the name `operator` unless the tensors are one weight [N, k] under `scheme` and its bias [N]."""
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != packed_bytes(k, scheme.weight.bits):
        raise ValueError(
            f"{operator}: {scheme} with K {k} takes packed uint8 [N, {packed_bytes(k, scheme.weight.bits)}], "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    n = packed.shape[0]
    expected = scale_shape(scheme.granularity, (n, k))
    if tuple(scale.shape) != expected or not scale.is_floating_point():
        raise ValueError(f"{operator}: {scheme} takes floating scales {expected}, got {scale.dtype} {tuple(scale.shape)}")
    if (zero is None) != (scheme.zero is ZeroPoint.NONE):
        raise ValueError(f"{operator}: {scheme} {'needs zeros' if zero is None else 'has no zeros, but some were given'}")
    if zero is not None and tuple(zero.shape) != expected:
        raise ValueError(f"{operator}: {scheme} takes zeros {expected}, got {tuple(zero.shape)}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"{operator}: bias is [{n}], got {tuple(bias.shape)}")


def check_one_device(operator: str, *tensors: Tensor | None) -> None:
    """Raises ValueError with the name `operator` unless all tensors that are not None are on one device."""
    _one_device(operator, {tensor.device for tensor in tensors if tensor is not None})


def _one_device(operator: str, devices: set[torch.device]) -> torch.device:
    if len(devices) > 1:
        raise ValueError(f"{operator}: all tensors must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


TensorSpec = tuple[torch.Size, torch.dtype, torch.device, bool]
"""The properties of a tensor on which a plan depends: shape, dtype, device, and True if it starts at a multiple of 16 bytes."""


def spec_of(t: Tensor | None) -> TensorSpec | None:
    """Returns the properties of a tensor on which a plan depends; None for None."""
    return None if t is None else (t.shape, t.dtype, t.device, t.data_ptr() % 16 == 0)


def meta_tensors(specs: Iterable[TensorSpec | None]) -> tuple[Any, ...]:
    """Returns a tensor on the meta device for each shape and dtype; None for None."""
    return tuple(None if t is None else torch.empty(t[0], dtype=t[1], device="meta") for t in specs)


def device_of(operator: str, specs: Iterable[TensorSpec | None], *others: torch.device) -> torch.device:
    """Returns the device of all tensors and `others`; raises ValueError with the name `operator` if there are several."""
    return _one_device(operator, {*others, *(t[2] for t in specs if t is not None)})


def check_weight_places(operator: str, on: torch.device, specs: Sequence[TensorSpec | None], weights: int, maker: str) -> None:
    """Raises ValueError with the name `operator` unless all tensors are on `on`, and the first `weights` tensors start at
    multiples of 16 bytes, like those that `maker` returns."""
    device_of(operator, specs, on)
    if not all(t is None or t[3] for t in specs[:weights]):
        raise ValueError(f"{operator}: weights must start at multiples of 16 bytes ({maker}'s do); clone() them")


@functools.cache
def triton_refusals() -> tuple[str, ...]:
    """Returns the reasons why the installed Triton cannot compile the kernels; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return ("is written in Gluon, which comes with Triton 3.6 or newer: pip install triton",)
    version = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 6):
        return (f"is written in Gluon of Triton 3.6 or newer, installed is {version}: pip install --upgrade triton",)
    return ()
