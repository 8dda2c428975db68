"""CUDA graphs of an engine that share one memory pool, since they run one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_of_ranks: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
"""Graphs of this process that were captured while it belonged to a group of ranks."""


def release_graphs_of_ranks() -> None:
    """Frees the graphs that may contain operations of several ranks. They cannot be replayed afterwards.

    NCCL keeps a communicator until all graphs with its operations are freed. Destroying or aborting it does not return before.
    """
    for graph in list(_of_ranks):
        graph.reset()
    _of_ranks.clear()


class Graphs:
    """Captures the CUDA graphs of an engine with one memory pool and one stream.

    PyTorch's allocator reuses freed memory only on the stream that freed it, even within a pool. Captures on different streams
    would each need separate memory and a separate cuBLAS workspace.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):  # a stream belongs to the current device
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Captures the launches of `run`. Returns the graph and the result of `run`, whose tensors are overwritten by
        replays.
        """
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # compiles kernels and plans, which is not possible in a capture
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # A thread of torch.distributed may query CUDA events at any time. That would break a capture in "global" mode,
            # which covers all threads.
            several = torch.distributed.is_initialized()
            mode = "thread_local" if several else "global"
            if several:
                _of_ranks.add(graph)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                tensors = run()
        return graph, tensors
