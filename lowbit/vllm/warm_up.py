"""Compiles the kernels of a layer before vLLM runs it: several processes at once, and none while a request waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowbit.vllm.product import Product

FEW = 64
"""Up to so many tokens every number may have a tile of its own."""


def token_counts(captured: Iterable[int], most: int) -> tuple[int, ...]:
    """Numbers of tokens, up to `most`, that stand for all that a layer will meet: those of the CUDA graphs, all small ones, and
    larger ones so close to each other that no tile is chosen only between two of them; multiples of 16, for which Triton
    compiles kernels of their own, and others."""
    found, count = {*captured, *range(1, FEW + 1)}, FEW
    while count < most:
        count += max(16, count // 24 // 16 * 16)
        found |= {count, count + 1}
    return tuple(sorted(each for each in found | {most} if 1 <= each <= most))


_compiled: set[Any] = set()
"""What was compiled for in this process: a model has many layers alike."""


def compile_kernels(product: Product, k: int, dtype: torch.dtype, counts: tuple[int, ...], bias: Tensor | None = None) -> int:
    """Compiles what `product` launches for x [count, k] of `dtype`, for every count; returns how many kernels were missing.

    On a GPU; a CPU has nothing to compile. Layers alike launch the same kernels, so that the second finds none missing.
    """
    forms = tuple((q.scheme_name, q.shape, q.weight_scale.dtype, q.batch_invariant) for q in product.linears)
    of_x = tuple((q.has_channels, q.hadamard, q.activation_scale is None) for q in product.linears)
    alike = (forms, of_x, k, dtype, counts, bias is None)
    if not forms or product.linears[0].weight_scale.device.type != "cuda" or alike in _compiled:
        return 0
    from lowbit.engine.warm_up import compiled
    from lowbit.hardware.machine import machine_of
    from lowbit.kernels.parts.launch import recording

    _compiled.add(alike)
    device = product.linears[0].weight_scale.device
    with torch.inference_mode(), torch.cuda.device(device), recording() as wanted:
        x = torch.zeros((max(counts), k), dtype=dtype, device=device)
        for count in counts:
            product(x[:count], bias)
    for _ in compiled(wanted, machine_of(device).arch.sm):
        pass
    return len(wanted)
