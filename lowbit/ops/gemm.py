"""`gemm`: y = x . dequant(w)^T for a weight in any form and x in 16 bits or quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import PerBlock, QuantTensor, Scheme
from lowbit.ops.byte_gemm import byte_gemm
from lowbit.ops.cpu_gemm import cpu_gemm, pack_for_cpu, scaled_cpu_gemm
from lowbit.ops.dequantize_gemm import mixed_gemm
from lowbit.ops.fragment_gemm import fragment_gemm
from lowbit.ops.quantize_activations import Activations, quantize_activations
from lowbit.ops.scaled_gemm import check_activations, scaled_gemm
from lowbit.ops.table import Form, UnsupportedProblem, choose, problem_on
from lowbit.ops.workspace import make_counters
from lowbit.pack.cpu import CpuWeight
from lowbit.pack.gemm_weight import GemmWeight, RowWeight
from lowbit.pack.scaled import OperandWeight
from lowbit.pack.weight import FragmentWeight


def pack_for(
    q: QuantTensor, dtype: torch.dtype = torch.bfloat16, *, batch_invariant: bool = False, form: Form | None = None
) -> GemmWeight:
    """Returns `q` in the form of the first kernel of ops/table.py that supports it on its device for x of `dtype`; or in the
    form `form`.

    Raises UnsupportedProblem with every kernel's reasons if there is no kernel. Raises ValueError for an input transform or a
    low-rank correction: `nn.QuantLinear` computes these, products do not.
    """
    device = q.codes.device
    known = {"scale_dtype": q.scale.dtype, "batch_invariant": batch_invariant, "form": form}
    chosen = choose(problem_on(device, q.scheme, 1, q.shape, dtype, **known)).form  # type: ignore[arg-type]
    q.require_product()
    match chosen:
        case "fragments":
            make_counters(device)  # counters cannot be allocated later, if the first product runs in a graph capture
            return FragmentWeight.pack(q)
        case "operands":
            make_counters(device)
            return OperandWeight.pack(q)
        case "rows":
            return RowWeight.pack(q)
        case "int4" | "int8" | "decoded":
            return pack_for_cpu(q, chosen, dtype)


def gemm(
    x: Tensor | Activations, w: GemmWeight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None,
    batch_invariant: bool = False, function: str = "none", y_scale: Tensor | None = None, fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y [.., N] = x [.., K] . dequant(w)[N, K]^T + bias [N], in x's dtype.

    x is fp16, bf16 or fp32. Under a scheme with 8-bit activations it is quantized first, token by token, unless it is already
    quantized (`quantize_activations`). Only for 8-bit activations: `dtype` is another type of y, and `function` and `y_scale`
    are as in `ops.scaled_gemm`. With `batch_invariant`, a row of y has the same bits in every batch. `fast_accum` is that of
    `torch._scaled_mm`: sums of fp8 x times fp8 w stay in the tensor core, which has few bits for them. This is a little faster
    and has 10 to 600 times the error, more with longer K and with sums of one sign (docs/internals/numerics.md). For other
    8-bit x it changes nothing. Raises ValueError for tensors that do not fit together, and UnsupportedProblem if no kernel for
    this form supports the product.
    """
    if batch_invariant and isinstance(w, (RowWeight, CpuWeight)):
        problem = problem_on(w.codes.device, w.scheme, 1, w.shape, torch.bfloat16, batch_invariant=True)
        raise UnsupportedProblem(f"{problem}: weights in the form {type(w).__name__} have no product that is batch-invariant")
    if w.scheme.activation is not None:
        made = quantized(x, w.scheme) if isinstance(x, Tensor) else x
        return _scaled(made, w, bias, dtype or made.dtype, batch_invariant, function, y_scale, fast_accum)
    if not isinstance(x, Tensor) or dtype is not None or function != "none" or y_scale is not None or fast_accum:
        wanted = "x in 16 or 32 bits, and y is of its type, with no function after the product and no fast_accum"
        raise ValueError(f"gemm: {w.scheme} takes {wanted}")
    match w:
        case FragmentWeight():
            return fragment_gemm(x, w, bias, batch_invariant=batch_invariant)
        case CpuWeight():
            if x.dtype != w.dtype or not x.dim() or x.shape[-1] != w.shape[1]:
                wanted = f"{str(w.dtype).removeprefix('torch.')} [.., {w.shape[1]}]"
                raise ValueError(f"gemm: this weight of {w.scheme} takes x {wanted}, got {x.dtype} {tuple(x.shape)}")
            return cpu_gemm(x, w, bias)
        case RowWeight():
            return mixed_gemm(x, w.codes, w.scale, w.zero, bias, w.scheme.name)
        case OperandWeight():
            raise ValueError(f"gemm: {w.scheme} has no weights in the form of 8-bit operands")


def quantized(x: Tensor, scheme: Scheme) -> Activations:
    """Returns x quantized as a scheme with 8-bit activations requires it without a calibrated scale: with a scale for each
    token, or for each token and block along K."""
    assert scheme.activation is not None
    group = scheme.granularity.k if isinstance(scheme.granularity, PerBlock) else 0
    return quantize_activations(x, scheme.activation, group=group, symmetric=not scheme.activation_zero, rule=scheme.rule.value)


def _scaled(
    x: Activations, w: GemmWeight, bias: Tensor | None, dtype: torch.dtype, batch_invariant: bool, function: str,
    y_scale: Tensor | None, fast_accum: bool,
) -> Tensor:  # fmt: skip
    match w:
        case OperandWeight():
            return byte_gemm(
                x.codes, x.scale, w, bias, dtype=dtype, x_zero=x.zero, function=function, y_scale=y_scale,
                batch_invariant=batch_invariant, fast_accum=fast_accum,
            )  # fmt: skip
        case RowWeight():
            given = (x.codes, x.scale, w.codes, w.scale, w.zero, bias, w.scheme.name, dtype, x.zero)
            return scaled_gemm(*given, function, y_scale)
        case CpuWeight() if function == "none" and y_scale is None:
            check_activations("gemm", x.codes, x.scale, x.zero, w.scheme)
            if x.codes.shape[-1] != w.shape[1] or x.scale.numel() not in (1, x.codes[..., 0].numel()):
                raise ValueError(f"gemm: {w.scheme} {w.shape} takes x [.., {w.shape[1]}] with a scale per token or one for all")
            if x.zero is not None and w.sums is None:
                raise ValueError(f"gemm: this weight of {w.scheme} holds no sums for zeros of x; use a scheme with them (_az)")
            return scaled_cpu_gemm(x.codes, x.scale, w, bias, dtype, x.zero)
    raise ValueError(f"gemm: {type(w).__name__} of {w.scheme} takes no function and no y_scale")
