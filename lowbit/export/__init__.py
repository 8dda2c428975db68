"""Exports compiled kernels as a C library: machine code, tables of the choice by M, packing, and a launcher.

library.py   finds and compiles the kernels of a scheme for some shapes and GPUs
tables.py    writes their description as C
c/           the library's own sources: API, launcher, packing, Makefile, an example
"""

from lowbit.export.library import export_kernels

__all__ = ["export_kernels"]
