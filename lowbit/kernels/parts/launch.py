"""Launching: kernels compiled once, TMA descriptors by address, clusters; and the base class of plans of tiled GEMMs.

A plan holds everything of a call that depends on shapes only; it is created once for a shape and called many times. A
descriptor contains an address, not data, so descriptors are cached by address.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit.kernels.parts.gluon import CompiledKernel, gl


@dataclass(frozen=True)
class Address:
    """The properties of a tensor that a descriptor or the compiler needs. It does not keep the tensor's memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The method that Triton calls on tensors."""
        return self.address


@dataclass(frozen=True)
class RecordedKernel:
    """A kernel to compile: its function's name, and the properties of its arguments that the compiler specialises on."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


_thread = threading.local()


@contextmanager
def recording() -> Iterator[list[RecordedKernel]]:
    """Inside the context, this thread records kernels instead of launching them, so outputs are uninitialised memory. On exit
    the list contains each recorded kernel that is not compiled yet, once. With nested contexts only the inner one records."""
    kernels: list[RecordedKernel] = []
    recorded: dict[Any, RecordedKernel] = {}
    around, _thread.recorded = getattr(_thread, "recorded", None), recorded
    try:
        yield kernels
    finally:
        _thread.recorded = around
        for each in recorded.values():
            if each not in kernels:
                kernels.append(each)


def is_recording() -> bool:
    """True if this thread records kernels instead of launching them: what they would have written is uninitialised memory."""
    return getattr(_thread, "recorded", None) is not None


def record_kernel(launcher: Any, function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Inside `recording`: records the kernel that `launcher` (any object) would launch, for the first arguments that it is
    called with."""
    recorded = _thread.recorded
    if launcher not in recorded:
        recorded[launcher] = recorded_kernel(function, arguments, options)


def recorded_kernel(function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> RecordedKernel:
    """Returns a kernel's name and the properties of its arguments, without the contents of tensors."""
    described = tuple(map(_described, arguments, function.params))
    return RecordedKernel(function.fn.__module__, function.fn.__qualname__, described, options)


class Launcher:
    """A kernel with its grid, compiled at the first call; later calls may only differ in addresses and numbers.

    `overlap`: programmatic dependent launch, for kernels that wait for the previous one themselves (sm_90). `cluster`: blocks
    per cluster, passed to Triton's launcher, which otherwise takes it from layouts that no kernel here uses. `registers`: limit
    per thread (0: none). `cooperative`: all blocks are resident at the same time, or the launch fails; for kernels whose blocks
    wait for each other.

    Triton also generates 64-bit copies of integer sums and products, for an overflow check that only TRITON_DEBUG enables.
    Without TRITON_DEBUG the launcher switches this off: the machine code is the same, and the front end takes a fifth less
    time.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        warps: int,
        *,
        overlap: bool = False,
        cluster: int = 1,
        registers: int = 0,
        cooperative: bool = False,
    ) -> None:
        self.function, self.cluster = function, cluster
        self.grid = (grid[0] // cluster, grid[1], grid[2])
        self.options = {"num_warps": warps, "sanitize_overflow": knobs.runtime.debug}
        self.options |= ({"launch_pdl": True} if overlap else {}) | ({"maxnreg": registers} if registers else {})
        self.options |= {"launch_cooperative_grid": True} if cooperative else {}
        self.kernel: CompiledKernel | None = None

    def __call__(self, *arguments: Any) -> None:
        """Launches the kernel; the first call compiles it or takes it from Triton's cache."""
        recorded = getattr(_thread, "recorded", None)
        if recorded is not None:
            if self.kernel is None and self not in recorded:
                recorded[self] = self.recorded(arguments)
        elif self.kernel is not None:
            self.kernel[self.grid](*arguments)
        elif self.cluster == 1:  # compiles and launches
            self.kernel = self.function[self.grid](*arguments, **self.options)
        else:
            made = self.function.warmup(*arguments, grid=self.grid, **self.options)
            num_warps, _, shared_bytes = made.packed_metadata
            made.packed_metadata = (num_warps, self.cluster, shared_bytes)
            self.kernel = made  # assigned only when complete, since another thread may use it immediately
            made[self.grid](*arguments)

    def recorded(self, arguments: Sequence[Any]) -> RecordedKernel:
        """Returns the kernel's name and the properties of its arguments, without the contents of tensors."""
        return recorded_kernel(self.function, arguments, self.options)


def _described(argument: Any, parameter: Any) -> Any:
    """Replaces an argument by one that Triton specialises in the same way. For integers Triton distinguishes 1, multiples of
    16, and 64-bit values."""
    if parameter.is_constexpr or argument is None or isinstance(argument, bool):
        return argument
    if isinstance(argument, torch.Tensor):
        return Address(argument.data_ptr() % 16, argument.dtype)
    if isinstance(argument, TensorDescriptor):
        shape, strides = [*argument.block_shape], [*[1 << 16] * (len(argument.shape) - 1), 1]
        return replace(argument, base=Address(0, argument.base.dtype), shape=shape, strides=strides)
    if isinstance(argument, int):
        small = 3 if parameter.do_not_specialize else 1 if argument == 1 else 3 if argument % 16 else 16
        return small if -(1 << 31) <= argument < 1 << 31 else (1 << 40 if argument < 1 << 63 else 1 << 63) + small
    return 2.0 if isinstance(argument, float) else argument


def descriptors(
    dtype: torch.dtype, shape: Sequence[int], block: Sequence[int], layout: gl.NVMMASharedLayout, seen: int = 256
) -> Callable[..., TensorDescriptor]:
    """Returns a cached function of address and row stride (default: contiguous) that makes TMA descriptors of a matrix."""

    @functools.lru_cache(maxsize=seen)
    def descriptor(address: int, stride: int = shape[1]) -> TensorDescriptor:
        return TensorDescriptor(Address(address, dtype), [*shape], [stride, 1], [*block], layout)

    return descriptor


WORDS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def plane_descriptors(
    row_blocks: int, row_words: int, blocks: Sequence[Sequence[int]]
) -> Callable[[int], tuple[TensorDescriptor | None, ...]]:
    """Returns a cached function of an address that makes TMA descriptors of codes [row blocks, row_words]: one per plane,
    padded with None to three."""

    @functools.lru_cache(maxsize=1024)
    def planes(address: int) -> tuple[TensorDescriptor | None, ...]:
        codes, shape = Address(address, torch.int32), [row_blocks, row_words]
        made = [TensorDescriptor(codes, shape, [row_words, 1], [*block], WORDS_LAYOUT) for block in blocks]
        return (*made, *(None,) * (3 - len(made)))

    return planes


class TilePlan:
    """Base class of plans of wgmma GEMMs: tiles, grid, workspace, launcher, descriptors of x and y.

    `config` is the kernel's configuration: it has the tokens and channels of a tile, the blocks that TMA loads and stores, and
    whether TMA stores y. `columns`: number of columns of y; None: one for each row of w.
    """

    def __init__(self, function: Any, shape: Any, tile: Any, config: Any, sm_count: int, columns: int | None = None) -> None:
        self.shape, self.tile, self.config = shape, tile, config
        self.tiles = (-(-shape.m // config.tile_tokens), -(-shape.n // config.tile_channels))
        blocks = self.tiles[0] * self.tiles[1] * config.splits
        # With cluster split-K a block has one tile: the next one would overwrite the stages used for the exchange.
        self.grid = (blocks if config.paired else min(sm_count, blocks or sm_count), 1, 1)
        self.launch = Launcher(function, self.grid, config.warps, overlap=True, cluster=2 if config.paired else 1)
        self.x_descriptor = descriptors(config.x_type, (shape.m, shape.k), config.x_block, config.x_shared_layout)
        self.columns = shape.n if columns is None else columns
        self.y_descriptor: Callable[[int], TensorDescriptor | None] = lambda address: None
        if config.store_by_tma:
            stored = gl.NVMMASharedLayout.get_default_for(config.store_block, config.y)
            self.y_descriptor = descriptors(config.y_type, (shape.m, self.columns), config.store_block, stored)

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of elements of the two workspaces: float32 sums, and int32 counters, which are zero before and after a
        launch."""
        if self.config.splits == 1 or self.config.paired:
            return 0, 0
        tiles, sums = self.tiles[0] * self.tiles[1], self.config.rows * self.config.columns
        if self.config.splits == 0:  # a partial tile per block, a counter per shared tile
            return self.grid[0] * sums, tiles % self.grid[0]
        return tiles * self.config.splits * sums, tiles
