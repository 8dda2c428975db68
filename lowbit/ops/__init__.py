"""How torch calls the kernels: operators with schema, checks and fakes, and the choice among back ends."""

from lowbit.ops.dispatch import BACKENDS, Backend, Problem, UnsupportedProblem, candidates, choose_backend
from lowbit.ops.fragment_gemm import describe, fragment_gemm, gemm_shape, kernel_refusals, weight_refusals
from lowbit.ops.mixed_gemm import mixed_gemm
from lowbit.pack import pack_weight

__all__ = [
    "BACKENDS",
    "Backend",
    "Problem",
    "UnsupportedProblem",
    "candidates",
    "choose_backend",
    "describe",
    "fragment_gemm",
    "gemm_shape",
    "kernel_refusals",
    "mixed_gemm",
    "pack_weight",
    "weight_refusals",
]
