"""Compiles the kernels of a layer before vLLM runs it: several processes at once, and none while a request waits."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.nn import QuantLinear
from lowbit.vllm.product import Product

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel

FEW = 64
"""Up to so many tokens every number may have a tile of its own."""


def token_counts(captured: Iterable[int], most: int) -> tuple[int, ...]:
    """Numbers of tokens, up to `most`, that stand for all that a layer will meet: those of the CUDA graphs, all small ones, and
    larger ones so close to each other that no tile is chosen only between two of them. No kernel is compiled for what a number
    of tokens is a multiple of (`do_not_specialize`)."""
    found, count = {*captured, *range(1, FEW + 1)}, FEW
    while count < most:
        count += max(16, count // 24 // 16 * 16)
        found.add(count)
    return tuple(sorted(each for each in found | {most} if 1 <= each <= most))


def hash_early() -> None:
    """Has a thread compute Triton's hash of itself (0.4 s), which a process needs before its first kernel, while weights are
    read."""
    from triton.runtime.cache import triton_key

    threading.Thread(target=triton_key, name="triton_key", daemon=True).start()


_compiled: set[Any] = set()
"""What was compiled for in this process: a model has many layers alike."""


_noted: list[tuple[RecordedKernel, int]] | None = None
"""Kernels of layers before, with their GPU's compute capability, within `together`."""


@contextmanager
def together() -> Iterator[None]:
    """Within it, kernels are only noted; when it ends, those of all layers are compiled at once. Each time that processes are
    started for it, they import torch and Triton first."""
    global _noted
    _noted = []
    try:
        yield
        noted = _noted
    finally:
        _noted = None
    for sm in dict.fromkeys(sm for _, sm in noted):
        compile_soon([each for each, of in noted if of == sm], sm)


def compile_soon(wanted: Sequence[RecordedKernel], sm: int) -> None:
    """Compiles kernels, now or where `together` ends, each once."""
    from lowbit.kernels.parts.compile import compiled

    if _noted is None:
        for _ in compiled(wanted, sm):
            pass
        return
    _noted.extend((each, sm) for each in wanted if (each, sm) not in _noted)


def form_of(layer: QuantLinear) -> tuple[Any, ...]:
    """What the kernels of a prepared layer are compiled for; by the magnitudes of weights, layers of one scheme differ in the
    types of their scales (pack/weight.py)."""
    types = tuple(None if t is None else t.dtype for t in (layer.kernel_scale, layer.kernel_channel_scale))
    of_x = layer.input_transform.parts
    return (layer.scheme_name, layer.shape, types, of_x, layer.batch_invariant)


def compile_kernels(product: Product, k: int, dtype: torch.dtype, counts: tuple[int, ...], bias: Tensor | None = None) -> int:
    """Compiles what `product` launches for x [count, k] of `dtype`, for every count, or notes it (`together`); returns how many
    kernels were missing.

    On a GPU; a CPU has nothing to compile. Layers alike launch the same kernels, so that the second finds none missing.
    """
    forms = tuple(form_of(layer) for layer in product.linears)
    alike = (forms, k, dtype, counts, bias is None)
    if not forms or product.linears[0].weight_scale.device.type != "cuda" or alike in _compiled:
        return 0
    from lowbit.hardware.machine import machine_of
    from lowbit.kernels.parts.launch import recording

    _compiled.add(alike)
    device = product.linears[0].weight_scale.device
    with torch.inference_mode(), torch.cuda.device(device), recording() as wanted:
        x = torch.zeros((max(counts), k), dtype=dtype, device=device)
        for count in sorted(counts, reverse=True):  # smaller results take the memory of larger ones
            product(x[:count], bias)
    compile_soon(wanted, machine_of(device).arch.sm)
    return len(wanted)
