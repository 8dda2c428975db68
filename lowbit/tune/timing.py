"""Timing on a GPU: CUDA graphs of calls over rotating copies of a weight, warm clocks, seeded Gaussian data.

`lowbit tune` and all benchmarks of this repository use this module.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme
from lowbit.quantize import rtn

WARM_UP_S = 1.0
MOST_COPIES_BYTES = 8 << 30
TOLERANCE = 1e-2
"""Relative error above which a result is wrong: rounding y to bf16 gives 2e-3, a wrong layout gives 1."""
ROW_TOLERANCE = 5e-2
"""Relative error above which a single row of y is wrong; it varies more than that of the whole result."""


class WrongResult(RuntimeError):
    """A kernel ran and returned a wrong result."""


def failures() -> tuple[type[Exception], ...]:
    """Returns the exceptions that a row of results records for a kernel, so that the run continues."""
    named = (RuntimeError, ValueError, AssertionError, ImportError, AttributeError, TypeError, LookupError, OSError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return named
    return (*named, TritonError)


def reason(error: Exception) -> str:
    """Returns one line for a row's `error`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:6]) or "no message"
    return f"{type(error).__name__}: {text}"[:500]


def warm_up(seconds: float = WARM_UP_S) -> None:
    """Keeps the GPU busy until its clocks are high: the first timing on an idle GPU is up to 10 % slow."""
    gc.freeze()  # every capture runs the garbage collector; imported modules are excluded from now on
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.matmul(x, x)
        torch.cuda.synchronize()


def copies_needed(nbytes: int, l2_bytes: int) -> int:
    """Returns the number of copies of a weight that together exceed 3 times the L2; at most MOST_COPIES_BYTES in all, but at
    least 2 copies."""
    copies = max(2, math.ceil(3 * l2_bytes / max(nbytes, 1)))
    return max(2, min(copies, MOST_COPIES_BYTES // max(nbytes, 1)))


def l2_bytes() -> int:
    """Returns the size of the current GPU's L2 in bytes."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


class Memory:
    """A stream and a memory pool shared by graphs that are captured one after another."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.anchor = torch.cuda.CUDAGraph()  # a pool without a live graph would be freed
        with torch.cuda.graph(self.anchor, pool=self.pool, stream=self.stream):
            self.output = torch.zeros(1, device="cuda")


class Graph:
    """Captured calls and their outputs, which every replay overwrites.

    With a shared `memory`, all calls must launch the same kernels: only the first one runs before the capture, to compile.
    """

    def __init__(self, calls: Sequence[Callable[[], Tensor]], memory: Memory | None = None) -> None:
        self.calls = calls
        stream = torch.cuda.Stream() if memory is None else memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls if memory is None else calls[:1]:  # compiles and autotunes
                call()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, pool=None if memory is None else memory.pool):
            self.outputs = [call() for call in calls]

    def times_us(self, replays: int, warm: int = 3) -> list[float]:
        """Returns the microseconds per call of each replay, after `warm` untimed ones."""
        return times_in_turn([self], replays, warm)[0]

    def poisoned_outputs(self) -> list[Tensor]:
        """Fills the outputs with NaN (or the smallest integer), replays once and returns them."""
        for y in self.outputs:
            y.fill_(math.nan if y.is_floating_point() else torch.iinfo(y.dtype).min)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.outputs


def times_in_turn(graphs: Sequence[Graph], replays: int, warm: int) -> list[list[float]]:
    """Returns the microseconds per call of each replay of each graph, after `warm` untimed rounds over all graphs.

    Graphs are replayed alternately. All replays are queued at once, so the GPU is never idle.
    """
    for _ in range(warm):
        for graph in graphs:
            graph.graph.replay()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, of in zip(graphs, events, strict=True):
            of.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            of[-1][0].record()
            graph.graph.replay()
            of[-1][1].record()
    torch.cuda.synchronize()
    return [
        [1e3 * start.elapsed_time(end) / len(graph.calls) for start, end in of]
        for graph, of in zip(graphs, events, strict=True)
    ]


def gaussian(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a standard Gaussian matrix; the same seed gives the same matrix in every process."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)


def quantized(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype = torch.float16) -> QuantTensor:
    """Returns a quantized Gaussian weight with deviation 1/sqrt(K), so that y has the scale of x."""
    return rtn(gaussian(*shape, seed=1) / math.sqrt(shape[1]), scheme, stored=dtype)
