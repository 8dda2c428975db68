"""How torch calls the kernels: operators with schema, checks and fakes, and the choice among back ends."""

from lowbit.ops.dispatch import BACKENDS, Backend, Problem, UnsupportedProblem, candidates, choose_backend
from lowbit.ops.mixed_gemm import mixed_gemm

__all__ = ["BACKENDS", "Backend", "Problem", "UnsupportedProblem", "candidates", "choose_backend", "mixed_gemm"]
