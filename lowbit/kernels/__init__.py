"""Multiplication of packed weights, and the other kernels of a model.

`reference`: definitions in plain torch. `cpu`: fast plain torch. GPU kernels: `sm80`, `sm90` (one kernel per file, none imports
another) and `elementwise`, built from `parts`. `choose`: choice of kernel and tile, without Triton.
"""
