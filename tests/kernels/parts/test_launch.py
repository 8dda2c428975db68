"""Launchers: a kernel is compiled once and launched often; descriptors are passed by address."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl
from lowbit.kernels.parts.launch import Launcher, descriptors, plane_descriptors

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class Kernel:
    """A recording stand-in with the attributes of a Triton kernel and a compiled kernel that a launcher uses."""

    def __init__(self):
        self.events, self.packed_metadata = [], (4, 1, 1000)
        self.compiled = SimpleNamespace(packed_metadata=(4, 1, 1000))

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.events.append(("compile and launch" if options else "launch", grid, arguments, options))
            return self

        return launch

    def warmup(self, *arguments, grid, **options):
        self.events.append(("compile", grid, arguments, options))
        return self


def test_compiles_once():
    kernel = Kernel()
    launch = Launcher(kernel, (6, 2, 1), 8, overlap=True, registers=64)
    launch(1, 2)
    launch(3, 4)
    options = {"num_warps": 8, "sanitize_overflow": False, "launch_pdl": True, "maxnreg": 64}
    assert kernel.events == [("compile and launch", (6, 2, 1), (1, 2), options), ("launch", (6, 2, 1), (3, 4), {})]


def test_clusters_are_launched_as_such():
    kernel = Kernel()
    launch = Launcher(kernel, (6, 1, 1), 8, cluster=2)
    launch(1)
    launch(2)
    assert [event[:3] for event in kernel.events] == [
        *(("compile", (3, 1, 1), (1,)), ("launch", (3, 1, 1), (1,)), ("launch", (3, 1, 1), (2,)))
    ]  # fmt: skip
    assert kernel.packed_metadata == (4, 2, 1000), "twice as many blocks start as the grid has clusters"


def test_descriptors_are_made_once_for_an_address_and_hold_no_memory():
    made = descriptors(torch.float16, (100, 64), (32, 64), LAYOUT)
    tensor = torch.empty(100, 64, dtype=torch.float16)
    gone = weakref.ref(tensor)
    one = made(tensor.data_ptr())
    assert made(tensor.data_ptr()) is one and (one.shape, one.strides, one.block_shape) == ([100, 64], [64, 1], [32, 64])
    assert made(tensor.data_ptr(), 128).strides == [128, 1] and made(1 << 20) is not one
    del tensor
    gc.collect()
    assert gone() is None


def test_planes_are_filled_up():
    made = plane_descriptors(10, 768, [(8, 128), (8, 64)])
    four, two, none = made(1 << 20)
    assert none is None and four.shape == two.shape == [10, 768] and (four.block_shape, two.block_shape) == ([8, 128], [8, 64])
    assert made(1 << 20) == (four, two, none)
