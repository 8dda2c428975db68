"""`lowbit bench activations`: how fast activations are quantized beside what memory gives, and what that adds to a product."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from lowbit.bench.protocol import WrongResult, capture, gaussian, l2_bytes, warm_up
from lowbit.bench.request import DTYPES, parse_rows
from lowbit.formats import parse_scheme
from lowbit.ops import (
    Activations,
    byte_gemm,
    layer_norm_quantize,
    pack_scaled_weight,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)
from lowbit.pack import ScaledWeight
from lowbit.quantize import rtn

COLUMNS = (4096, 8192, 28672)
ROWS = (1, 16, 256, 4096, 16384)
PRODUCT_SCHEMES, PRODUCT_K = ("w8a8", "fp8_dynamic"), 8192
REPLAYS = 12
COPIED_BYTES = 1 << 30
MOST_INPUTS = 64

Call = Callable[[Tensor], Activations]


@dataclass(frozen=True)
class Operation:
    """What is timed: `call(x, ..)` on x [M, K] and what it reads and writes per element of x, in bytes."""

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
    """One operation on x [m, k]: microseconds per call, and those of a plain copy that moves as many bytes."""

    operation: str
    m: int
    k: int
    us: float
    copy_us: float
    nbytes: int

    @property
    def share(self) -> float:
        """Of the speed of the copy."""
        return self.copy_us / self.us


@dataclass(frozen=True)
class ProductRow:
    """A product of x [m, k] by w [k, k] under a scheme: microseconds of the product of codes, of making them from 16-bit x, and
    of both, one right after the other."""

    scheme: str
    m: int
    k: int
    product_us: float
    quantize_us: float
    both_us: float


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of COPIED_BYTES from place to place: by torch's copy, or by its kernel that negates
    numbers, which on an H200 is half as fast again."""
    x = torch.empty(COPIED_BYTES // 4, device="cuda").normal_()
    y = torch.empty_like(x)
    calls = (lambda: y.copy_(x), lambda: torch.neg(x, out=y))
    us = min(statistics.median(capture([call]).times_us(REPLAYS)) for call in calls)
    return 2 * COPIED_BYTES / (us / 1e6)


def measure_activations(
    rows: tuple[int, ...], columns: tuple[int, ...], dtype: torch.dtype, copy_bytes_per_s: float
) -> Iterator[ActivationRow]:
    """Every operation on every shape on the current GPU, over inputs that together exceed 3 times the L2."""
    for k in columns:
        w = gaussian(1, k, seed=1, dtype=dtype)[0]
        for m in rows:
            count = min(MOST_INPUTS, max(1, math.ceil(3 * l2_bytes() / (2 * m * k))))
            inputs = [gaussian(m, k, seed=i, dtype=dtype) for i in range(count)]
            others = [gaussian(m, k, seed=-1 - i, dtype=dtype) for i in range(count)]
            for operation in OPERATIONS:
                yield _measure(operation, inputs, others, w, copy_bytes_per_s)
            del inputs, others
            torch.cuda.empty_cache()


def _measure(operation: Operation, inputs: list[Tensor], others: list[Tensor], w: Tensor, speed: float) -> ActivationRow:
    """One row; raises WrongResult unless the codes are those of the same call on a CPU, but for a few at ties."""
    m, k = inputs[0].shape
    got = operation.call(inputs[0][:8], others[0][:8], w)
    wanted = operation.call(inputs[0][:8].cpu(), others[0][:8].cpu(), w.cpu())
    wrong = float((got.codes.cpu().float() != wanted.codes.float()).float().mean())
    if wrong > 1e-3:
        raise WrongResult(f"{operation.name} on {m} x {k}: {100 * wrong:.1f} % of the codes are not those of the reference")
    pairs = zip(inputs, others, strict=True)
    graph = capture([lambda x=x, other=other: operation.call(x, other, w).codes for x, other in pairs])  # type: ignore[misc]
    us = statistics.median(graph.times_us(REPLAYS))
    nbytes = m * k * operation.bytes_each
    return ActivationRow(operation.name, m, k, us, 1e6 * nbytes / speed, nbytes)


def measure_products(rows: tuple[int, ...], k: int, dtype: torch.dtype) -> Iterator[ProductRow]:
    """What quantizing x costs before a product on the current GPU: weights rotate so that they come from memory."""
    for scheme in PRODUCT_SCHEMES:
        first = pack_scaled_weight(rtn(gaussian(k, k, seed=0, dtype=dtype), scheme))
        weights = [first] + [first.clone() for _ in range(math.ceil(3 * l2_bytes() / first.nbytes) - 1)]
        for m in rows:
            yield _product_row(scheme, gaussian(m, k, seed=m, dtype=dtype), weights)


def _product_row(scheme: str, x: Tensor, weights: list[ScaledWeight]) -> ProductRow:
    fmt = parse_scheme(scheme).activation
    assert fmt is not None
    given = quantize_activations(x, fmt)

    def product(w: ScaledWeight, made: Activations) -> Tensor:
        return byte_gemm(made.codes, made.scale, w, dtype=x.dtype)

    def us(call: Callable[[ScaledWeight], Tensor]) -> float:
        return statistics.median(capture([lambda w=w: call(w) for w in weights]).times_us(REPLAYS))  # type: ignore[misc]

    apart = us(lambda w: product(w, given)), us(lambda w: quantize_activations(x, fmt).codes)
    return ProductRow(scheme, x.shape[0], x.shape[1], *apart, us(lambda w: product(w, quantize_activations(x, fmt))))


def bench_activations(
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, separated by commas: 1,16,256,4096,16384.")] = None,
    k: Annotated[str | None, typer.Option("--k", help="Columns of x, separated by commas: 4096,8192,28672.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of x: float16 or bfloat16.")] = "float16",
) -> None:
    """Time the quantization of activations on this GPU, alone and fused with norms and SiLU: us, GB/s, share of a copy's speed.

    Needs an NVIDIA GPU. Results are compared with the CPU's. A second table has products with x quantized outside and inside
    the timed region.

    Example: lowbit bench activations --m 16,4096 --k 8192
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {' or '.join(DTYPES)}, got {dtype!r}")
    rows = ROWS if m is None else parse_rows(m)
    columns = COLUMNS if k is None else parse_rows(k)
    if not torch.cuda.is_available():
        raise ValueError(f"bench activations measures an NVIDIA GPU and torch {torch.__version__} sees none")
    warm_up()
    speed = copy_bandwidth()
    print(f"a copy moves {speed / 1e9:,.0f} GB/s\n{'operation':28}{'M x K':>15}{'us':>9}{'GB/s':>8}{'of a copy':>11}")
    for row in measure_activations(rows, columns, DTYPES[dtype], speed):
        rate = row.nbytes / row.us / 1e3
        print(f"{row.operation:28}{f'{row.m} x {row.k}':>15}{row.us:9.1f}{rate:8,.0f}{100 * row.share:9.0f} %", flush=True)
    print(f"{'product, N = K':16}{'M x K':>15}{'codes given':>13}{'to codes':>10}{'both':>9}  us")
    for made in measure_products(rows, PRODUCT_K, DTYPES[dtype]):
        us = f"{made.product_us:13.1f}{made.quantize_us:10.1f}{made.both_us:9.1f}"
        print(f"{made.scheme:16}{f'{made.m} x {made.k}':>15}{us}", flush=True)
