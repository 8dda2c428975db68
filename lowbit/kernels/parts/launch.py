"""What a plan needs to launch its kernel: compile once, descriptors by address, clusters; and the plan of a tiled product.

A plan is all of a call that does not depend on the tensors' contents: made once for a shape, called many times. Descriptors say
where memory is, nothing of what is in it, so those of addresses seen before serve again.
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
    """As much of a tensor as a descriptor or the compiler needs: it must not keep the memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As Triton asks a tensor for it."""
        return self.address


@dataclass(frozen=True)
class Wanted:
    """A kernel to compile: where its function is, and of what it is called with as much as the compiler looks at."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


_thread = threading.local()


@contextmanager
def recording() -> Iterator[list[Wanted]]:
    """Within it, kernels that this thread launches are not: those not compiled yet are listed, each once, when it ends.
    Results are what memory happens to hold. Within another recording, that one goes on without what this one lists."""
    listed: list[Wanted] = []
    met: dict[Launcher, Wanted] = {}
    around, _thread.met = getattr(_thread, "met", None), met
    try:
        yield listed
    finally:
        _thread.met = around
        for each in met.values():
            if each not in listed:
                listed.append(each)


class Launcher:
    """A kernel with its grid, compiled for the arguments of the first call; later ones only differ in addresses and numbers.

    `overlap`: the kernel knows what to wait for and may start before the one before it has finished (sm_90). `cluster`: blocks
    that start together. Triton has a size of clusters for its launcher, but takes it from layouts that spread over them, which
    none does here. `registers`: the most of a thread (0: any).

    Triton also computes each sum and product of integers in 64 bits, for a check that it only makes with TRITON_DEBUG and then
    throws away: only wanted then. Without, a kernel is the same instructions after a fifth less time of its front end.
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
    ) -> None:
        self.function, self.cluster = function, cluster
        self.grid = (grid[0] // cluster, grid[1], grid[2])
        self.options = {"num_warps": warps, "sanitize_overflow": knobs.runtime.debug}
        self.options |= ({"launch_pdl": True} if overlap else {}) | ({"maxnreg": registers} if registers else {})
        self.kernel: CompiledKernel | None = None

    def __call__(self, *arguments: Any) -> None:
        """Launches the kernel; the first call compiles it, or finds it in Triton's cache."""
        met = getattr(_thread, "met", None)
        if met is not None:
            if self.kernel is None and self not in met:
                met[self] = self._wanted(arguments)
        elif self.kernel is not None:
            self.kernel[self.grid](*arguments)
        elif self.cluster == 1:  # compiles and launches
            self.kernel = self.function[self.grid](*arguments, **self.options)
        else:
            made = self.function.warmup(*arguments, grid=self.grid, **self.options)
            num_warps, _, shared_bytes = made.packed_metadata
            made.packed_metadata = (num_warps, self.cluster, shared_bytes)
            self.kernel = made  # whole: another thread may take it at once
            made[self.grid](*arguments)

    def _wanted(self, arguments: Sequence[Any]) -> Wanted:
        """The kernel by name, its arguments without their contents."""
        function = self.function.fn
        described = tuple(map(_described, arguments, self.function.params))
        return Wanted(function.__module__, function.__qualname__, described, self.options)


def _described(argument: Any, parameter: Any) -> Any:
    """One argument for all that Triton compiles alike: numbers by whether they are 1, multiples of 16, of 64 bits."""
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
    """A function of address and row stride (default: none between rows) that makes, and remembers, descriptors of a matrix."""

    @functools.lru_cache(maxsize=seen)
    def descriptor(address: int, stride: int = shape[1]) -> TensorDescriptor:
        return TensorDescriptor(Address(address, dtype), [*shape], [stride, 1], [*block], layout)

    return descriptor


WORDS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def plane_descriptors(
    row_blocks: int, row_words: int, blocks: Sequence[Sequence[int]]
) -> Callable[[int], tuple[TensorDescriptor | None, ...]]:
    """The same for codes [strips, row_words]: one for each plane, filled up with None to the three that kernels take."""

    @functools.lru_cache(maxsize=1024)
    def planes(address: int) -> tuple[TensorDescriptor | None, ...]:
        codes, shape = Address(address, torch.int32), [row_blocks, row_words]
        made = [TensorDescriptor(codes, shape, [row_words, 1], [*block], WORDS_LAYOUT) for block in blocks]
        return (*made, *(None,) * (3 - len(made)))

    return planes


class TilePlan:
    """What the plans of products by wgmma have in common: tiles, grid, workspace, launcher, descriptors of x and y.

    `config` is the configuration of the kernel; it says how many tokens and channels a tile has, what is read and stored of it
    at a time, and whether TMA stores it. y has as many `columns`; None: one for each row of w.
    """

    def __init__(self, function: Any, shape: Any, tile: Any, config: Any, sm_count: int, columns: int | None = None) -> None:
        self.shape, self.tile, self.config = shape, tile, config
        self.tiles = (-(-shape.m // config.tile_tokens), -(-shape.n // config.tile_channels))
        blocks = self.tiles[0] * self.tiles[1] * config.splits
        # Blocks of a pair have one tile: the next one would overwrite the stages in which they meet.
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
        """Elements of the two workspaces, float32 sums and int32 counters (which are zero before and after)."""
        if self.config.splits == 1 or self.config.paired:
            return 0, 0
        tiles, sums = self.tiles[0] * self.tiles[1], self.config.rows * self.config.columns
        if self.config.splits == 0:  # a part of each block, a counter of each tile that they share
            return self.grid[0] * sums, tiles % self.grid[0]
        return tiles * self.config.splits * sums, tiles
