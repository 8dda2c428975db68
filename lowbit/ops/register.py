"""Registration of the `torch.ops.lowbit` operators, and the device guard for every launch.

Operators use `torch.library.define` and `impl`, since calls of a `custom_op` take three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_cuda: dict[str, Callable[..., Any]] = {}
"""CUDA implementations of the operators, by their qualified names."""


def register(
    schema: str, *, cuda: Callable[..., Any] | None = None, cpu: Callable[..., Any] | None = None, fake: Callable[..., Any],
    arguments: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Defines the operator `lowbit::<schema>` with an implementation for each device and one for tensors without data (`fake`).

    `cuda` runs with the GPU of the operator's first tensor as the current device. `arguments` is a NamedTuple whose fields and
    defaults are those of the schema: with it, each implementation takes one such tuple in place of all arguments.
    """
    name = "lowbit::" + schema.partition("(")[0]
    torch.library.define(name, schema[schema.index("(") :])
    if cuda is not None:
        _cuda[name] = _bundled(cuda, arguments)
        torch.library.impl(name, "CUDA", on_device_of_first(_cuda[name]))
    if cpu is not None:
        torch.library.impl(name, "CPU", _bundled(cpu, arguments))
    torch.library.register_fake(name, _bundled(fake, arguments))


def cuda_implementation(operator: Any) -> Callable[..., Any] | None:
    """Returns the CUDA implementation of an operator `torch.ops.lowbit.*`; None for other functions."""
    packet = operator.overloadpacket if isinstance(operator, torch._ops.OpOverload) else operator
    return _cuda.get(packet._qualified_op_name) if isinstance(packet, torch._ops.OpOverloadPacket) else None


def _bundled(function: Callable[..., Any], arguments: Callable[..., Any] | None) -> Callable[..., Any]:
    return function if arguments is None else lambda *given, **named: function(arguments(*given, **named))


def on_device_of_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` wrapped so that the GPU of its first argument, a tensor, is the current device during a call.

    Triton and the counters of ops/workspace.py use the current device. Setting it costs several microseconds, so that is
    skipped if the device is current already.
    """

    def guarded(first: Tensor, *others: Any) -> Any:
        index = first.device.index
        if index is None or index == torch.cuda.current_device():  # None: a CPU tensor, which `function` refuses
            return function(first, *others)
        with torch.cuda.device(first.device):
            return function(first, *others)

    return guarded
