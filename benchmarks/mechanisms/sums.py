"""fp8 sums that leave the tensor core after every 128 elements of K, or only at the end (`fast_accum`): time and error."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.mechanisms.trial import Row, Trial, blank, timed
from benchmarks.protocol import reference_product
from lowbit.formats import QuantTensor, parse_scheme
from lowbit.ops import byte_gemm
from lowbit.pack import OperandWeight
from lowbit.quantize import rtn
from lowbit.tune.timing import copies_needed, gaussian, l2_bytes
from lowbit.tune.trials import Codes, quantized_x

SCHEME = "fp8_dynamic"
TOKENS = (1, 16, 64, 256, 1024, 4096)
N = 8192
SIZES = (8192, 28672)
"""Values of K; the error of sums that stay in the tensor core grows with K."""
CHECKED = 64
"""Rows of y that are compared with the float64 product, in float32."""


@functools.lru_cache(maxsize=2)
def _weight(k: int, positive: bool) -> tuple[QuantTensor, OperandWeight]:
    w = gaussian(N, k, seed=1) / k**0.5
    q = rtn(w.abs() if positive else w, parse_scheme(SCHEME))
    return q, OperandWeight.pack(q)


def _x(m: int, k: int, positive: bool) -> Codes:
    x = gaussian(m, k, seed=2)
    return quantized_x(x.abs() if positive else x, parse_scheme(SCHEME))


def _error(k: int, positive: bool, fast: bool) -> float:
    """Returns |y - reference| / |reference| in millionths over CHECKED rows. y is float32, so rounding of y does not count."""
    q, w = _weight(k, positive)
    x = _x(CHECKED, k, positive)
    y = byte_gemm(x.codes, x.scale, w, dtype=torch.float32, fast_accum=fast)
    reference = reference_product(x.codes.double() * x.scale.double(), q)
    return 1e6 * float((y.double() - reference).norm() / reference.norm())


def _once(m: int, k: int, fast: bool) -> Tensor:
    x, (_, w) = _x(m, k, False), _weight(k, False)
    return byte_gemm(x.codes, x.scale, w, fast_accum=fast)


def _measure(m: int, k: int, fast: bool) -> Row:
    """Returns the errors for numbers of both signs and for positive ones."""
    errors = {name: _error(k, positive, fast) for name, positive in (("error_ppm", False), ("error_ppm_positive", True))}
    x, (q, w) = _x(m, k, False), _weight(k, False)
    weights = [w, *(w.clone() for _ in range(copies_needed(w.nbytes, l2_bytes()) - 1))]
    calls = [functools.partial(byte_gemm, x.codes, x.scale, each, fast_accum=fast) for each in weights]
    reference = reference_product(x.codes[:CHECKED].double() * x.scale[:CHECKED].double(), q)
    return timed(calls, reference, **errors)


def trials() -> Iterator[Trial]:
    """Returns the trials of both kinds of sums, fp8 by fp8."""
    for k in SIZES:
        for m in TOKENS:
            for fast in (False, True):
                row = blank("sums", SCHEME, "to the end" if fast else "every 128 k", dtype="bf16", m=m, n=N, k=k)
                yield Trial(row, functools.partial(_once, m, k, fast), functools.partial(_measure, m, k, fast))
