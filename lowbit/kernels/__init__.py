"""How packed weights are multiplied: the reference and the kernels."""
