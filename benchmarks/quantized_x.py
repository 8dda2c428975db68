"""Rows with 8-bit activations: x is quantized before the timing, in the same way for all implementations.

x has a scale per token. If the weight has one scale per tensor (`_t`), x has one static scale, as in checkpoints of that kind.
`python -m benchmarks activations` measures the cost of quantizing x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Contender, reference_product
from benchmarks.request import GemmRequest
from lowbit.formats import IntFormat, PerChannel, PerTensor, QuantTensor, decode
from lowbit.tune.trials import Codes, quantized_x

INT_MM_ROWS = 32
"""`torch._int_mm` needs more than 16 rows; x is padded to this number outside the timed region."""


def truth(x: Tensor, q: QuantTensor) -> Tensor:
    """Returns the float64 product of the quantized x, which is the kernels' input."""
    given = quantized_x(x, q.scheme)
    zero = 0.0 if given.zero is None else given.zero.double()
    return reference_product((given.codes.double() - zero) * given.scale.double(), q)


def contender(
    q: QuantTensor, request: GemmRequest, weight: Any, nbytes: int, clone: Callable[[Any], Any],
    products: Callable[[int], Sequence[tuple[str, Callable[[Codes, Any], Tensor]]]],
) -> Contender:  # fmt: skip
    """Returns a contender whose products take quantized x (`Codes`)."""
    return Contender(
        weight, nbytes, clone, products, lambda x: truth(x, q), request.torch_dtype, lambda x: quantized_x(x, q.scheme)
    )


def this_library(q: QuantTensor, request: GemmRequest) -> Contender:
    """Returns this library's kernels for 8-bit activations as a contender."""
    from lowbit.ops import byte_gemm
    from lowbit.ops.table import describe, problem_on
    from lowbit.pack import OperandWeight

    weight = OperandWeight.pack(q)

    def product(x: Codes, w: Any) -> Tensor:
        return byte_gemm(x.codes, x.scale, w, dtype=request.torch_dtype, x_zero=x.zero)

    return contender(
        q,
        request,
        weight,
        weight.nbytes,
        lambda w: w.clone(),
        lambda m: [(describe(problem_on(q.codes.device, q.scheme, m, q.shape, request.torch_dtype)), product)],
    )


def torch_bytes(q: QuantTensor, request: GemmRequest) -> Contender:
    """Returns PyTorch's `_int_mm` for int8, whose int32 sums stay unscaled, or `_scaled_mm` for e4m3, with and without fast
    accumulation.
    """
    scheme = q.scheme
    plain = isinstance(scheme.granularity, (PerChannel, PerTensor)) and not scheme.activation_zero
    if scheme.weight != scheme.activation or not plain:
        raise ValueError(f"torch multiplies int8 by int8 and e4m3 by e4m3, with scales per channel or tensor, not {scheme}")
    if isinstance(scheme.weight, IntFormat):
        return _int_mm(q, request)
    weight = [q.codes.view(torch.float8_e4m3fn), q.scale.float().reshape(1, -1).contiguous()]

    def product(fast: bool) -> Callable[[Codes, Any], Tensor]:
        return lambda x, w: torch._scaled_mm(
            x.codes, w[0].T, x.scale, w[1], out_dtype=torch.bfloat16, use_fast_accum=fast
        )  # fmt: skip

    def products(m: int) -> list[tuple[str, Callable[[Codes, Any], Tensor]]]:
        return [(f"torch._scaled_mm{', fast sums' if fast else ''}", product(fast)) for fast in (False, True)]

    return contender(q, request, weight, sum(t.nbytes for t in weight), lambda w: [t.clone() for t in w], products)


def _int_mm(q: QuantTensor, request: GemmRequest) -> Contender:
    weight = (q.codes ^ 128).view(torch.int8)

    def padded(x: Tensor) -> Tensor:
        codes = quantized_x(x, q.scheme).codes
        return torch.nn.functional.pad(codes, (0, 0, 0, max(0, INT_MM_ROWS - codes.shape[0])))

    def exact(x: Tensor) -> Tensor:
        return quantized_x(x, q.scheme).codes.double() @ decode(q.codes, q.scheme.weight, torch.float64).T

    products = [("torch._int_mm, s32 sums", lambda x, w: torch._int_mm(x, w.T))]
    return Contender(weight, weight.nbytes, Tensor.clone, lambda m: products, exact, request.torch_dtype, padded)
