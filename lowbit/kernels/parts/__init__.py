"""Pieces that the kernels of several architectures share."""
