"""`python -m benchmarks activations`: speed of quantizing activations relative to a copy, and its share of a product."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.activations_report import ACTIVATIONS, SCHEMA
from benchmarks.protocol import PROTOCOL, capture
from benchmarks.results import default_path, machine
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import versions, write_json
from lowbit.formats import parse_scheme
from lowbit.ops import (
    Activations,
    byte_gemm,
    layer_norm_quantize,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)
from lowbit.pack import OperandWeight
from lowbit.quantize import rtn
from lowbit.tune.timing import WrongResult, gaussian, l2_bytes, warm_up

COLUMNS = (4096, 8192, 28672)
ROWS = (16, 256, 4096, 16384)
PRODUCT_SCHEMES, PRODUCT_K = ("w8a8", "fp8_dynamic"), 8192
REPLAYS = 12
COPIED_BYTES = 1 << 30
MOST_INPUTS = 64

Call = Callable[[Tensor], Activations]


@dataclass(frozen=True)
class Operation:
    """A timed operation: `call(x, ..)` on x [M, K], and the bytes that it reads and writes per element of x."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Activations]
    bytes_each: int


OPERATIONS = (
    Operation("int8", lambda x, other, w: quantize_activations(x, "int8"), 3),
    Operation("fp8_e4m3", lambda x, other, w: quantize_activations(x, "fp8_e4m3"), 3),
    Operation("fp8_e4m3, groups of 128", lambda x, other, w: quantize_activations(x, "fp8_e4m3", group=128), 3),
    Operation("RMSNorm, int8", lambda x, other, w: rms_norm_quantize(x, w, 1e-5, "int8"), 3),
    Operation("x + residual, RMSNorm, int8", lambda x, other, w: rms_norm_quantize(x, w, 1e-5, "int8", residual=other), 7),
    Operation("LayerNorm, int8", lambda x, other, w: layer_norm_quantize(x, w, w, 1e-5, "int8"), 3),
    Operation("SiLU, product, int8", lambda x, other, w: silu_mul_quantize(x, other, "int8"), 5),
)


@dataclass(frozen=True)
class ActivationRow:
    """One operation on x [m, k]: microseconds per call, bytes read and written."""

    operation: str
    m: int
    k: int
    us: float
    nbytes: int


@dataclass(frozen=True)
class ProductRow:
    """A product of x [m, k] and w [k, k] under a scheme. It has the microseconds of three timings: the product of quantized x
    and w, quantizing 16-bit x, and both in sequence."""

    scheme: str
    m: int
    k: int
    product_us: float
    quantize_us: float
    both_us: float


def copy_bandwidth() -> float:
    """Returns the bytes per second, read and written, of the faster of two kernels on COPIED_BYTES: torch's copy and its
    negation. On an H200 the negation is 1.5 times as fast."""
    x = torch.empty(COPIED_BYTES // 4, device="cuda").normal_()
    y = torch.empty_like(x)
    calls = (lambda: y.copy_(x), lambda: torch.neg(x, out=y))
    us = min(statistics.median(capture([call]).times_us(REPLAYS)) for call in calls)
    return 2 * COPIED_BYTES / (us / 1e6)


def measure_activations(rows: tuple[int, ...], columns: tuple[int, ...], dtype: torch.dtype) -> Iterator[ActivationRow]:
    """Measures every operation on every shape on the current GPU. The calls of a graph read different inputs, at most
    MOST_INPUTS, so that together they exceed 3 times the L2."""
    for k in columns:
        w = gaussian(1, k, seed=1, dtype=dtype)[0]
        for m in rows:
            count = min(MOST_INPUTS, max(1, math.ceil(3 * l2_bytes() / (2 * m * k))))
            inputs = [gaussian(m, k, seed=i, dtype=dtype) for i in range(count)]
            others = [gaussian(m, k, seed=-1 - i, dtype=dtype) for i in range(count)]
            for operation in OPERATIONS:
                yield _measure(operation, inputs, others, w)
            del inputs, others
            torch.cuda.empty_cache()


def _measure(operation: Operation, inputs: list[Tensor], others: list[Tensor], w: Tensor) -> ActivationRow:
    """Returns one row. Raises WrongResult if more than one in a thousand codes differs from the CPU's; a few differ at ties."""
    m, k = inputs[0].shape
    got = operation.call(inputs[0][:8], others[0][:8], w)
    wanted = operation.call(inputs[0][:8].cpu(), others[0][:8].cpu(), w.cpu())
    wrong = float((got.codes.cpu().float() != wanted.codes.float()).float().mean())
    if wrong > 1e-3:
        raise WrongResult(f"{operation.name} on {m} x {k}: {100 * wrong:.1f} % of the codes are not those of the reference")
    pairs = zip(inputs, others, strict=True)
    graph = capture([lambda x=x, other=other: operation.call(x, other, w).codes for x, other in pairs])  # type: ignore[misc]
    us = statistics.median(graph.times_us(REPLAYS))
    return ActivationRow(operation.name, m, k, us, m * k * operation.bytes_each)


def measure_products(rows: tuple[int, ...], k: int, dtype: torch.dtype) -> Iterator[ProductRow]:
    """Measures the cost of quantizing x before a product on the current GPU. Weights rotate so that they are read from
    memory."""
    for scheme in PRODUCT_SCHEMES:
        first = OperandWeight.pack(rtn(gaussian(k, k, seed=0, dtype=dtype), scheme))
        weights = [first] + [first.clone() for _ in range(math.ceil(3 * l2_bytes() / first.nbytes) - 1)]
        for m in rows:
            yield _product_row(scheme, gaussian(m, k, seed=m, dtype=dtype), weights)


def _product_row(scheme: str, x: Tensor, weights: list[OperandWeight]) -> ProductRow:
    fmt = parse_scheme(scheme).activation
    assert fmt is not None
    given = quantize_activations(x, fmt)

    def product(w: OperandWeight, made: Activations) -> Tensor:
        return byte_gemm(made.codes, made.scale, w, dtype=x.dtype)

    def us(call: Callable[[OperandWeight], Tensor]) -> float:
        return statistics.median(capture([lambda w=w: call(w) for w in weights]).times_us(REPLAYS))  # type: ignore[misc]

    apart = us(lambda w: product(w, given)), us(lambda w: quantize_activations(x, fmt).codes)
    return ProductRow(scheme, x.shape[0], x.shape[1], *apart, us(lambda w: product(w, quantize_activations(x, fmt))))


def run(
    rows: tuple[int, ...], columns: tuple[int, ...], dtype: torch.dtype, path: Path | None, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]]:
    """Measures on the current GPU and writes the result file after every row. Returns its path and document."""
    described, today = machine(), datetime.date.today()
    if path is None:
        gemm = default_path(described["gpu"], today)
        path = gemm.with_name(gemm.name.replace("-gemm", "-activations"))
    check_file(path, ACTIVATIONS)
    warm_up()
    document: dict[str, Any] = {
        "result": ACTIVATIONS, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": described,
        "versions": versions(()), "protocol": PROTOCOL, "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_s": copy_bandwidth(), "rows": [], "products": [],
    }  # fmt: skip
    for table, made in (
        ("rows", measure_activations(rows, columns, dtype)),
        ("products", measure_products(rows, PRODUCT_K, dtype)),
    ):
        for row in made:
            say(str(row))
            document[table].append(asdict(row))
            write_json(path, document)
    document["complete"] = True
    write_json(path, document)
    return path, document
