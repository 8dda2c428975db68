"""A GPU that this machine does not have, for recording the kernels that a model would launch on it.

    with simulated_gpu(GPUS["h200"]) as device, recording() as kernels:
        x = torch.empty(16, 4096, dtype=torch.bfloat16, device=device)
        layer(x)

Inside the context, tensors on the GPU are torch's meta tensors (shapes and dtypes without memory) that report the GPU as their
device. Operators of lowbit run their CUDA implementation, whose launches `recording` lists; torch's operators compute shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowbit.hardware.machine import GPU
from lowbit.ops.register import cuda_implementation

_numbers: dict[GPU, int] = {}
"""Number of each simulated GPU, which is added to the count of this machine's GPUs to get a device index of its own. Plans and
machines are cached by device, so no two may share an index. Torch has 128 indices."""


@contextlib.contextmanager
def simulated_gpu(gpu: GPU) -> Iterator[torch.device]:
    """Simulates `gpu` in this process; yields its device.

    Reading a value from a tensor without memory returns what valid data would have: True for a condition, 0 for a number. Only
    one thread of the process may use torch inside the context, because functions of `torch.cuda` are replaced.
    """
    device = torch.device("cuda", torch.cuda.device_count() + _numbers.setdefault(gpu, len(_numbers)))
    with mock.patch.multiple(torch.cuda, **_queries(gpu, device)), _SimulatedGpu(device):
        yield device


def _queries(gpu: GPU, device: torch.device) -> dict[str, Any]:
    """Returns the functions of `torch.cuda` that lowbit calls, answering for the simulated GPU."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda other: None)
    nothing = contextlib.nullcontext
    return {
        "current_device": lambda: device.index,
        "current_stream": lambda device=None: stream,
        "device": nothing,
        "device_of": nothing,
        "get_device_capability": lambda device=None: divmod(gpu.sm, 10),
        "get_device_name": lambda device=None: gpu.name,
        "get_device_properties": lambda device=None: gpu,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (gpu.total_memory, gpu.total_memory),
        "Stream": lambda: stream,
        "synchronize": lambda device=None: None,
    }


class _SimulatedGpu(TorchFunctionMode):
    """Makes meta tensors appear to be on `device`, and creates meta tensors for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        on_gpu = any(isinstance(value, Tensor) and value.is_meta for value in args)
        implementation = cuda_implementation(function) if on_gpu else None
        if implementation is not None:
            with self:  # torch switches the mode off while it handles a function
                return implementation(*args, **named)
        if on_gpu and function in _ANSWERS:
            return _ANSWERS[function](*args)
        if on_gpu and function == Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.device
        if function == Tensor.pin_memory:
            return args[0]
        if function is torch.device:
            return torch.device(*args, **named)
        return function(*map(_placed, args), **{name: _placed(value) for name, value in named.items()})


def _placed(value: Any) -> Any:
    """Replaces a GPU as an argument by torch's device of tensors without memory."""
    is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return torch.device("meta") if is_gpu else value


def _address(tensor: Tensor) -> int:
    """Returns an address for a tensor without memory. The address of a storage is aligned, and tensors that share a storage
    have addresses in it."""
    return (tensor.untyped_storage()._cdata << 8) + tensor.storage_offset() * tensor.element_size()


def _grouped_mm(x: Tensor, weights: Tensor, *others: object) -> Tensor:
    """Returns y [rows, N] of x [rows, K] and weights [E, K, N]; torch's own computation of shapes refuses fp16."""
    return x.new_empty(len(x), weights.shape[-1])


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    Tensor.data_ptr: _address,
    Tensor.__bool__: lambda tensor: True,
    Tensor.__float__: lambda tensor: 0.0,
    Tensor.__int__: lambda tensor: 0,
    Tensor.item: lambda tensor: tensor.dtype == torch.bool or 0,
    torch.equal: lambda tensor, other: True,
    torch._grouped_mm: _grouped_mm,
    getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm): _grouped_mm,
}
"""Results of functions that torch does not compute for meta tensors, or computes differently from those of a GPU."""
