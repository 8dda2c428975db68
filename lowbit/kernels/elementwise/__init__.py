"""Kernels that touch each element once or twice, bound by memory; in plain Triton."""
