"""Pieces of which kernels are made: what several of them share, and what would not fit into the file of one."""
