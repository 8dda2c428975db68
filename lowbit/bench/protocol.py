"""How a product is timed and checked, the same way for this library, cuBLAS and every peer.

`PROTOCOL` says it in words; it is stored in each result file.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.bench.request import DTYPES, Request, columns_of
from lowbit.formats import QuantTensor, Scheme, parse_scheme
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.quantize import rtn

REPLAYS = 24
WARM_UP_S = 1.0
GRAPH_US = 1000.0
"""One graph holds at least this much work, so that its start is lost in it."""
MOST_LAUNCHES = 128
MOST_COPIES_BYTES = 8 << 30
TOLERANCE = 1e-2
"""Relative error above which a result is wrong: rounding y to bf16 gives 2e-3, a wrong layout gives 1."""
ROW_TOLERANCE = 5e-2
"""The same for a single row of y, whose error scatters more than that of all."""

PROTOCOL = (
    "Time per call inside one CUDA graph of many calls, over copies of the weight that together exceed 3 times the L2 so that "
    f"weights come from memory; the graph is captured once and replayed 3 times, then the median of {REPLAYS} replays timed "
    f"with events is taken, after {WARM_UP_S:g} s of matrix products to warm the machine. Weights are Gaussian and quantized "
    "by round-to-nearest, x is Gaussian. Every output of the timed graph is filled with NaN, the graph is replayed, all "
    "values must be finite, and rel_err = |y - ref| / |ref| over all rows of y against the float64 product "
    "with the dequantized weights (a peer that stores scales in 16 bits is held to those scales). limit_us = bytes of "
    "codes, scales, zeros, x and y at the read bandwidth measured in the same run; compute_us = 2 M N K operations at the "
    "fp16 rate of an 8192^3 torch.matmul, twice that rate where x has 8 bits; the limit of a row is the larger of the two. "
    "cublas_fp16_us is torch.matmul over fp16 weights, measured the same way. Where x has 8 bits it is quantized before "
    "anything is timed, and the reference is the product of x as quantized. Each peer runs in its own process; of several "
    "configurations the fastest correct one counts."
)

Product = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Contender:
    """A weight as one implementation holds it, and the ways the implementation offers to multiply by it.

    products(M) lists (name of the kernel and its configuration, function of prepare(x) and a weight); truth(x) is the float64
    product of what the implementation was given. prepare, such as quantizing x, is not timed.
    """

    weight: Any
    nbytes: int
    clone: Callable[[Any], Any]
    products: Callable[[int], Sequence[tuple[str, Product]]]
    truth: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    prepare: Callable[[Tensor], Any] = lambda x: x


Build = Callable[[QuantTensor, Request], Contender]


@dataclass(frozen=True)
class Measurement:
    """The fastest correct kernel of a contender."""

    kernel: str
    us: float
    rel_err: float


class WrongResult(RuntimeError):
    """A kernel ran and computed something else."""


def failures() -> tuple[type[Exception], ...]:
    """What a kernel or a peer may raise for one row; the row records it and the run goes on."""
    named = (RuntimeError, ValueError, AssertionError, ImportError, AttributeError, TypeError, LookupError, OSError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return named
    return (*named, TritonError)


def reason(error: Exception) -> str:
    """One line for a row's `error`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:6]) or "no message"
    return f"{type(error).__name__}: {text}"[:500]


def warm_up(seconds: float = WARM_UP_S) -> None:
    """Keeps the GPU busy until its clocks are up: the first thing timed on a cold one reads up to 10 % slow."""
    gc.freeze()  # every capture collects garbage; what was imported need not be walked each time
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.matmul(x, x)
        torch.cuda.synchronize()


def copies_needed(nbytes: int, l2_bytes: int) -> int:
    """Copies of a weight that together exceed 3 times the L2, at least 2, of at most MOST_COPIES_BYTES where 2 fit."""
    wanted = max(2, math.ceil(3 * l2_bytes / max(nbytes, 1)))
    return max(2, min(wanted, MOST_COPIES_BYTES // max(nbytes, 1)))


def l2_bytes() -> int:
    """Size of the L2 of the current GPU."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


class Memory:
    """What graphs that are captured one after the other have in common: a stream, and a pool of memory in which a graph that is
    gone leaves its outputs to the next."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.held = torch.cuda.CUDAGraph()  # without a graph the pool would be given back
        with torch.cuda.graph(self.held, pool=self.pool, stream=self.stream):
            self.output = torch.zeros(1, device="cuda")


class Graph:
    """Calls captured once, with their outputs, which every replay writes again.

    With `memory` of graphs before it, all calls are one kernel's: the first is enough to compile it.
    """

    def __init__(self, calls: Sequence[Callable[[], Tensor]], memory: Memory | None = None) -> None:
        self.calls = calls
        stream = torch.cuda.Stream() if memory is None else memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls if memory is None else calls[:1]:  # compiles and tunes what is compiled and tuned at first use
                call()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, pool=None if memory is None else memory.pool):
            self.outputs = [call() for call in calls]

    def times_us(self, replays: int, warm: int = 3) -> list[float]:
        """Microseconds per call of each replay, after `warm` of them that are not timed."""
        return times_in_turn([self], replays, warm)[0]

    def poisoned_outputs(self) -> list[Tensor]:
        """The outputs of one more replay, filled with NaN before it."""
        for y in self.outputs:
            y.fill_(math.nan if y.is_floating_point() else torch.iinfo(y.dtype).min)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.outputs


def times_in_turn(graphs: Sequence[Graph], replays: int, warm: int) -> list[list[float]]:
    """Microseconds per call of each replay of each graph, in turn, after `warm` turns that are not timed; all replays are
    queued at once, so that the GPU never waits for Python."""
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


def capture(calls: Sequence[Callable[[], Tensor]]) -> Graph:
    """A graph of the calls, repeated as often as it takes to fill GRAPH_US."""
    graph = Graph(calls)
    total = len(calls) * min(graph.times_us(2))
    repeats = min(math.ceil(GRAPH_US / total), MOST_LAUNCHES // len(calls))
    return Graph([*calls] * repeats) if repeats > 1 else graph


def relative_error(y: Tensor, reference: Tensor) -> float:
    """|y - ref| / |ref| over the rows of the reference; raises WrongResult for a value of y that is not finite and for a row of
    another product, which the error of all rows might hide."""
    bad = int((~y.isfinite()).sum())
    if bad:
        raise WrongResult(f"{bad} of {y.numel()} outputs are not finite or were not written")
    difference = y[: len(reference)].double() - reference
    of_rows = difference.norm(dim=-1) / reference.norm(dim=-1)
    worst = int(of_rows.argmax())
    if not of_rows[worst] <= ROW_TOLERANCE:
        raise WrongResult(f"row {worst} of {len(reference)}: relative error {float(of_rows[worst]):.3g}")
    return float(difference.norm() / reference.norm())


def measure(
    products: Sequence[tuple[str, Product]], x: Any, weights: Sequence[Any], reference: Tensor, replays: int = REPLAYS
) -> Measurement:
    """The fastest correct one of `products`; when there is none, raises the error of the first one."""
    best: Measurement | None = None
    first: Exception | None = None
    for kernel, product in products:
        try:
            graph = capture([lambda w=w, product=product: product(x, w) for w in weights])  # type: ignore[misc]
            us = statistics.median(graph.times_us(replays))
            error = max(relative_error(y, reference) for y in graph.poisoned_outputs()[: len(weights)])
            if error > TOLERANCE:
                raise WrongResult(f"wrong result of {kernel}: relative error {error:.3g}")
        except failures() as failure:
            first = first or failure
            continue
        if best is None or us < best.us:
            best = Measurement(kernel, us, error)
    if best is None:
        raise first or RuntimeError("the implementation offers no kernel for this problem")
    return best


def blank_row(impl: str, scheme: Scheme | None, shape: tuple[int, int], m: int, dtype: str) -> dict[str, Any]:
    """A row before it is measured; scheme None is the 16-bit product."""
    named = {"scheme": "fp16", "format": "fp16", "granularity": "-"} if scheme is None else columns_of(scheme)
    activation = dtype if scheme is None or scheme.activation is None else scheme.activation.name
    return {
        "impl": impl, "kernel": None, **named, "activation": activation, "n": shape[0], "k": shape[1], "m": m, "us": None,
        "limit_us": None, "compute_us": None, "cublas_fp16_us": None, "rel_err": None, "error": None,
    }  # fmt: skip


def gaussian(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same standard Gaussian matrix in every process."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)


def quantized(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype = torch.float16) -> QuantTensor:
    """The weight of a problem, of a model in `dtype`: Gaussian, of deviation 1/sqrt(K) so that y is of the size of x."""
    return rtn(gaussian(*shape, seed=1) / math.sqrt(shape[1]), scheme, stored=dtype)


def reference_product(x: Tensor, q: QuantTensor, rows_at_once: int = 1024) -> Tensor:
    """`mixed_gemm_reference` by blocks of output channels, so that the float64 weights never exist at once."""
    parts = []
    for start in range(0, q.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        zero = None if q.zero is None else q.zero[rows]
        scale = q.scale if q.scale.shape[0] == 1 else q.scale[rows]
        parts.append(mixed_gemm_reference(x, replace(q, codes=q.codes[rows], scale=scale, zero=zero)))
    return torch.cat(parts, dim=-1)


def measured_rows(impl: str, build: Build, request: Request) -> Iterator[dict[str, Any]]:
    """One row for each scheme, shape and M of the request; what fails carries its reason in `error`."""
    for shape in request.shapes:
        for name in request.schemes:
            scheme = parse_scheme(name)
            blanks = [blank_row(impl, scheme, shape, m, request.dtype) for m in request.rows]
            try:
                contender = build(quantized(scheme, shape, request.torch_dtype), request)
            except failures() as error:
                yield from ({**row, "error": reason(error)} for row in blanks)
            else:
                yield from contender_rows(contender, blanks, shape[1])
            torch.cuda.empty_cache()


def contender_rows(contender: Contender, blanks: Sequence[dict[str, Any]], k: int) -> Iterator[dict[str, Any]]:
    """The rows `blanks` of one weight, measured."""
    try:
        x = gaussian(max(row["m"] for row in blanks), k, seed=2, dtype=contender.dtype)
        reference = contender.truth(x)
        count = copies_needed(contender.nbytes, l2_bytes())
        weights = [contender.weight, *(contender.clone(contender.weight) for _ in range(count - 1))]
    except failures() as error:
        yield from ({**row, "error": reason(error)} for row in blanks)
        return
    for row in blanks:
        m = row["m"]
        if row["activation"] in DTYPES:
            row = {**row, "activation": str(contender.dtype).removeprefix("torch.")}
        try:
            best = measure(contender.products(m), contender.prepare(x[:m]), weights, reference[:m])
        except failures() as error:
            yield {**row, "error": reason(error)}
        else:
            yield {**row, "kernel": best.kernel, "us": best.us, "rel_err": best.rel_err}
