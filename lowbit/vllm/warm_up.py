"""Compiles the kernels of a layer before vLLM runs it, so that no request waits for a compilation. Several processes
compile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.nn import QuantLinear
from lowbit.nn.experts import PackedExperts
from lowbit.vllm.experts import LocalExperts
from lowbit.vllm.product import Product

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel

FEW = 64
"""Up to this number of tokens, each number may have its own tile."""


def token_counts(captured: Iterable[int], most: int) -> tuple[int, ...]:
    """Returns numbers of tokens up to `most` for which every tile is chosen at least once. They are the sizes of the CUDA
    graphs, all numbers up to FEW, and larger numbers that are so close that no tile is missed between two of them.

    A kernel for one number of tokens also serves others with the same tile, since kernels are not specialized for divisibility
    of that number (`do_not_specialize`).
    """
    counts, count = {*captured, *range(1, FEW + 1)}, FEW
    while count < most:
        count += max(16, count // 24 // 16 * 16)
        counts.add(count)
    return tuple(sorted(each for each in counts | {most} if 1 <= each <= most))


def hash_early() -> None:
    """Computes Triton's hash of its own sources in a thread, while weights load. It takes 0.4 s and is needed before the first
    kernel is compiled."""
    from triton.runtime.cache import triton_key

    threading.Thread(target=triton_key, name="triton_key", daemon=True).start()


def named_kernels(additional_config: object) -> str | None:
    """Returns the kernels file of vLLM's option `--additional-config '{"lowbit_kernels": "FILE"}'`; None without it. Raises
    ValueError for a value that is not a string."""
    given = additional_config.get("lowbit_kernels") if isinstance(additional_config, dict) else None
    if not (given is None or isinstance(given, str)):
        raise ValueError(f"--additional-config: lowbit_kernels is the name of a kernels file (lowbit compile), not {given!r}")
    return given


@functools.cache
def use_kernels_file(kernels: str | None, model: str) -> None:
    """Uses a kernels file on this process's GPU: `kernels`, else one beside the checkpoint, else that of an installed package.

    model: the checkpoint's folder, or its name on the hub. Raises OSError if `kernels` cannot be read.
    """
    from lowbit.engine.kernels import use_kernels

    if torch.cuda.is_available():
        use_kernels(torch.device("cuda", torch.cuda.current_device()), kernels, Path(model))


_compiled: set[Any] = set()
"""Keys of layers whose kernels this process has compiled or queued. A model has many equal layers, which are compiled once."""


_queued: list[tuple[RecordedKernel, int]] | None = None
"""Kernels, each with its SM version, that are queued inside `together`; None outside of it."""


@contextmanager
def together() -> Iterator[None]:
    """Queues the kernels of all layers in the block and compiles them at its end, with one start of worker processes."""
    global _queued
    _queued = []
    try:
        yield
        queued = _queued
    finally:
        _queued = None
    for sm in dict.fromkeys(sm for _, sm in queued):
        compile_soon([kernel for kernel, its_sm in queued if its_sm == sm], sm)


def compile_soon(kernels: Sequence[RecordedKernel], sm: int) -> None:
    """Compiles kernels now, or inside `together` queues them for its end. A kernel is queued only once."""
    from lowbit.kernels.parts.compile import compiled

    if _queued is None:
        for _ in compiled(in_own_order(kernels), sm):
            pass
        return
    _queued.extend((kernel, sm) for kernel in kernels if (kernel, sm) not in _queued)


def in_own_order(kernels: Sequence[RecordedKernel]) -> Sequence[RecordedKernel]:
    """Returns kernels in the order in which this process compiles them. All ranks compile the same kernels into one cache.
    Every second rank begins with the last kernel, so that each finds in the cache what another rank has compiled meanwhile."""
    return kernels[::-1] if dist.is_initialized() and dist.get_rank() % 2 else kernels


def form_of(layer: QuantLinear) -> tuple[Any, ...]:
    """Returns a key with all properties of a prepared layer on which its kernels depend."""
    return (layer.scheme_name, layer.shape, _types(layer), layer.input_transform.parts, layer.batch_invariant)


def compile_kernels(product: Product, k: int, dtype: torch.dtype, counts: tuple[int, ...], bias: Tensor | None = None) -> int:
    """Compiles (or queues, see `together`) what `product` launches for x [count, k] of `dtype` and every count.

    Returns the number of kernels that were not compiled yet: 0 on a CPU and for a layer equal to an earlier one.
    """
    forms = tuple(form_of(layer) for layer in product.linears)
    key = (forms, k, dtype, counts, bias is None)
    if not forms or product.linears[0].weight_scale.device.type != "cuda" or key in _compiled:
        return 0
    _compiled.add(key)

    def products(x: Tensor) -> None:
        product(x, bias)

    return _compile(products, k, dtype, counts, product.linears[0].weight_scale.device)


def compile_expert_kernels(experts: LocalExperts, k: int, top_k: int, dtype: torch.dtype, counts: tuple[int, ...]) -> int:
    """Does the same as `compile_kernels` for prepared experts, for x [count, k] whose tokens have `top_k` experts each."""
    parts = list(experts.experts.packed().values())
    forms = tuple((part.scheme_name, part.experts, part.shape, *_types(part), part.input_transform.parts) for part in parts)
    key = (forms, experts.experts.batch_invariant, experts.numbers is None, k, top_k, dtype, counts)
    device = parts[0].weight_scale.device
    if device.type != "cuda" or key in _compiled:
        return 0
    _compiled.add(key)

    def products(x: Tensor) -> None:
        numbers = torch.zeros((len(x), top_k), dtype=torch.int32, device=device)
        experts(x, numbers, torch.zeros((len(x), top_k), device=device))

    return _compile(products, k, dtype, counts, device)


def _types(layer: QuantLinear | PackedExperts) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes of the scales as they are packed for kernels. They depend on the weights (pack/weight.py)."""
    return tuple(None if t is None else t.dtype for t in (layer.kernel_scale, layer.kernel_channel_scale))


def _compile(
    products: Callable[[Tensor], None], k: int, dtype: torch.dtype, counts: tuple[int, ...], device: torch.device
) -> int:
    """Compiles or queues what `products` launches for x [count, k] of every count; returns the number of kernels."""
    from lowbit.hardware.machine import machine_of
    from lowbit.kernels.parts.launch import recording

    with torch.inference_mode(), torch.cuda.device(device), recording() as wanted:
        x = torch.zeros((max(counts), k), dtype=dtype, device=device)
        for count in sorted(counts, reverse=True):  # smaller results reuse the memory of larger ones
            products(x[:count])
    compile_soon(wanted, machine_of(device).arch.sm)
    return len(wanted)
