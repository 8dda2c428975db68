"""Kernels on wgmma and TMA: sm_90a (H100, H200)."""
