"""Kernels on mma.sync and cp.async: sm_80 and everything newer."""
