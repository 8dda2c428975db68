"""How a GEMM is timed and checked, equally for this library, cuBLAS and every peer.

`PROTOCOL` describes it and is stored in each result file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.request import DTYPES, GemmRequest, columns_of
from benchmarks.under_load import NOTHING, Reading, monitor
from lowbit.formats import QuantTensor, Scheme, parse_scheme
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.tune.timing import (
    ROW_TOLERANCE,
    TOLERANCE,
    WARM_UP_S,
    Graph,
    WrongResult,
    copies_needed,
    failures,
    gaussian,
    l2_bytes,
    quantized,
    reason,
)

REPLAYS = 24
GRAPH_US = 1000.0
"""Least microseconds of work in one graph, so that the time to start it is negligible."""
MOST_LAUNCHES = 128
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
    "configurations the fastest correct one counts. tuned: the configuration was measured on this GPU. sm_clock_mhz, power_w: "
    "nvidia-smi's readings while the graph is replayed right after it is timed."
)

Product = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Contender:
    """A weight in the form of one implementation, and the implementation's kernels that multiply by it.

    products(M) lists (name of kernel and configuration, function of prepare(x) and a weight). truth(x) is the float64 product
    of the implementation's inputs. prepare(x), for example the quantization of x, is not timed. `tuned`: True if the
    implementation's configuration was measured on this GPU for each M, by itself or by the benchmark.
    """

    weight: Any
    nbytes: int
    clone: Callable[[Any], Any]
    products: Callable[[int], Sequence[tuple[str, Product]]]
    truth: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    prepare: Callable[[Tensor], Any] = lambda x: x
    tuned: bool = False


Build = Callable[[QuantTensor, GemmRequest], Contender]


@dataclass(frozen=True)
class Measurement:
    """The fastest correct kernel of a contender, and the GPU's clock and power while it ran."""

    kernel: str
    us: float
    rel_err: float
    load: Reading = NOTHING


def capture(calls: Sequence[Callable[[], Tensor]]) -> Graph:
    """Returns a graph of the calls, repeated until they take GRAPH_US."""
    graph = Graph(calls)
    total = len(calls) * min(graph.times_us(2))
    repeats = min(math.ceil(GRAPH_US / total), MOST_LAUNCHES // len(calls))
    return Graph([*calls] * repeats) if repeats > 1 else graph


def relative_error(y: Tensor, reference: Tensor) -> float:
    """Returns |y - ref| / |ref| over the rows of the reference. Raises WrongResult if a value of y is not finite. Also checks
    each row, since the total error could hide a single wrong row.
    """
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
    """Returns the measurement of the fastest correct one of `products`. Raises the error of the first one if none is
    correct."""
    best: Measurement | None = None
    first: Exception | None = None
    watched = monitor(torch.cuda.current_device())
    for kernel, product in products:
        try:
            graph = capture([lambda w=w, product=product: product(x, w) for w in weights])  # type: ignore[misc]
            us = statistics.median(graph.times_us(replays))
            load = watched.while_running(lambda graph=graph: graph.times_us(2, warm=0))  # type: ignore[misc]
            error = max(relative_error(y, reference) for y in graph.poisoned_outputs()[: len(weights)])
            if error > TOLERANCE:
                raise WrongResult(f"wrong result of {kernel}: relative error {error:.3g}")
        except failures() as failure:
            first = first or failure
            continue
        if best is None or us < best.us:
            best = Measurement(kernel, us, error, load)
    if best is None:
        raise first or RuntimeError("the implementation offers no kernel for this problem")
    return best


def blank_row(impl: str, scheme: Scheme | None, shape: tuple[int, int], m: int, dtype: str) -> dict[str, Any]:
    """Returns a row before measurement; scheme None is the 16-bit product."""
    named = {"scheme": "fp16", "format": "fp16", "granularity": "-"} if scheme is None else columns_of(scheme)
    activation = dtype if scheme is None or scheme.activation is None else scheme.activation.name
    return {
        "impl": impl, "kernel": None, **named, "activation": activation, "n": shape[0], "k": shape[1], "m": m, "us": None,
        "limit_us": None, "compute_us": None, "cublas_fp16_us": None, "rel_err": None, "error": None, "tuned": None,
        "sm_clock_mhz": None, "power_w": None,
    }  # fmt: skip


def reference_product(x: Tensor, q: QuantTensor, rows_at_once: int = 1024) -> Tensor:
    """Returns `mixed_gemm_reference`, computed by blocks of output channels to limit the float64 weights in memory."""
    parts = []
    for start in range(0, q.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        zero = None if q.zero is None else q.zero[rows]
        scale = q.scale if q.scale.shape[0] == 1 else q.scale[rows]
        parts.append(mixed_gemm_reference(x, replace(q, codes=q.codes[rows], scale=scale, zero=zero)))
    return torch.cat(parts, dim=-1)


def measured_rows(impl: str, build: Build, request: GemmRequest) -> Iterator[dict[str, Any]]:
    """Yields one row for each scheme, shape and M of the request; a failed row has its reason in `error`."""
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
    """Measures and yields the rows `blanks` of one weight."""
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
            yield {
                **row, "kernel": best.kernel, "us": best.us, "rel_err": best.rel_err, "tuned": contender.tuned,
                "sm_clock_mhz": best.load.sm_clock_mhz, "power_w": best.load.power_w,
            }  # fmt: skip
