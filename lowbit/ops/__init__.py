"""How torch calls the kernels: operators with schema, checks and fakes, and the choice among back ends."""

from lowbit.ops.byte_gemm import byte_gemm, byte_refusals, describe_scaled
from lowbit.ops.dispatch import BACKENDS, Backend, Problem, UnsupportedProblem, candidates, choose_backend
from lowbit.ops.fragment_gemm import describe, fragment_gemm, gemm_shape, kernel_refusals, weight_refusals
from lowbit.ops.mixed_gemm import mixed_gemm
from lowbit.ops.quantize_activations import (
    Activations,
    layer_norm_quantize,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)
from lowbit.ops.scaled_gemm import scaled_gemm

__all__ = [
    "BACKENDS",
    "Activations",
    "Backend",
    "Problem",
    "UnsupportedProblem",
    "byte_gemm",
    "byte_refusals",
    "candidates",
    "choose_backend",
    "describe",
    "describe_scaled",
    "fragment_gemm",
    "gemm_shape",
    "kernel_refusals",
    "layer_norm_quantize",
    "mixed_gemm",
    "quantize_activations",
    "rms_norm_quantize",
    "scaled_gemm",
    "silu_mul_quantize",
    "weight_refusals",
]
