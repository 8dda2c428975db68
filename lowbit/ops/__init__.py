"""The torch interface of the kernels. It has the table of all kernels, the function `gemm`, which chooses a kernel by the
table, and the registered operators."""

from lowbit.ops.byte_gemm import byte_gemm
from lowbit.ops.dequantize_gemm import mixed_gemm
from lowbit.ops.expert_gemm import expert_gemm, sum_norm, sum_slots
from lowbit.ops.fragment_gemm import fragment_gemm
from lowbit.ops.fused_gemm import chain_refusals, norm_gemm, residual_gemm
from lowbit.ops.gemm import gemm, pack_for
from lowbit.ops.quantize_activations import (
    Activations,
    add_norm_quantize,
    layer_norm_quantize,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)
from lowbit.ops.scaled_expert_gemm import scaled_expert_gemm
from lowbit.ops.scaled_gemm import scaled_gemm
from lowbit.ops.table import KERNELS, Kernel, Problem, UnsupportedProblem, choose, problem_on, rows, weight_refusals, why_slow

__all__ = [
    "KERNELS",
    "Activations",
    "Kernel",
    "Problem",
    "UnsupportedProblem",
    "add_norm_quantize",
    "byte_gemm",
    "chain_refusals",
    "choose",
    "expert_gemm",
    "fragment_gemm",
    "gemm",
    "layer_norm_quantize",
    "mixed_gemm",
    "norm_gemm",
    "pack_for",
    "problem_on",
    "quantize_activations",
    "residual_gemm",
    "rms_norm_quantize",
    "rows",
    "scaled_expert_gemm",
    "scaled_gemm",
    "silu_mul_quantize",
    "sum_norm",
    "sum_slots",
    "weight_refusals",
    "why_slow",
]
