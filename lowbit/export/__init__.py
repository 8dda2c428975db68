"""Exports compiled kernels: as a C library with tables of the choice by M, packing and a launcher, and as a wheel.

library.py   finds and compiles the kernels of a scheme for some shapes and GPUs
tables.py    writes their description as C
wheel.py     builds a wheel of kernels for lowbit itself
c/           the library's own sources: API, launcher, packing, Makefile, an example
"""

from lowbit.export.library import export_kernels

__all__ = ["export_kernels"]
