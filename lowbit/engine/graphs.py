"""Captures what an engine launches as CUDA graphs that have the same memory, since one runs after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Graphs:
    """Where the graphs of an engine are captured: one pool of memory, and one stream.

    Torch's allocator gives what one stream has let go of to no other, within a pool too: on a stream for each graph, which come
    from 32, a pool would hold the memory of 32 graphs side by side, and so many workspaces of cuBLAS.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):  # streams are of the current one
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of what `run` launches, and what it returned, which replays write again as long as it is held."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # compiles kernels and makes plans, which a capture may not
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                made = run()
        return graph, made
