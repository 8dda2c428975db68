"""Memory-bound kernels that read or write each element once or twice, in plain Triton."""
