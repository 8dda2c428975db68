"""What the machines can do: one row per SM version, of a product that stands for it, each figure with its source.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (registers, shared memory); NVIDIA's
architecture whitepapers and data sheets of A100, A10, L40S, H200, B200 and RTX 5090 (SMs, L2, bandwidth, dense peaks).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU; peaks are dense (no sparsity), in operations per second, None where the type has no tensor-core path."""

    sm: int
    product: str
    sm_count: int
    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    l2_bytes: int
    bandwidth_bytes: float
    peak_fp16: float
    peak_fp8: float | None
    peak_int8: float | None
    peak_int4: float | None
    features: frozenset[str]
    measured_read_bytes: float | None = None
    """Read bandwidth of a pure read kernel, where somebody measured it (bytes per second)."""

    registers_per_sm: int = 65536
    warp_size: int = 32


_AMPERE = frozenset({"cp_async", "ldmatrix", "mma_f16", "mma_bf16", "mma_s8", "mma_s4"})
_ADA = _AMPERE | {"mma_fp8"}
_HOPPER = frozenset(
    {"cp_async", "ldmatrix", "mma_f16", "mma_bf16", "mma_s8", "mma_fp8", "tma", "wgmma", "cluster", "half_bf16"}
)
_BLACKWELL = frozenset(
    {"cp_async", "ldmatrix", "mma_f16", "mma_bf16", "mma_s8", "mma_fp8", "tma", "cluster", "half_bf16", "mma_fp4"}
)

_KIB, _MIB = 1 << 10, 1 << 20

DEVICES: tuple[Device, ...] = (
    Device(80, "A100 SXM 80 GB", 108, 164 * _KIB, 163 * _KIB, 40 * _MIB, 2.039e12, 312e12, None, 624e12, 1248e12, _AMPERE),
    Device(86, "A10", 72, 100 * _KIB, 99 * _KIB, 6 * _MIB, 600e9, 125e12, None, 250e12, 500e12, _AMPERE),
    Device(89, "L40S", 142, 100 * _KIB, 99 * _KIB, 96 * _MIB, 864e9, 362e12, 733e12, 733e12, None, _ADA),
    # Read bandwidth measured 2026-11-21 by a pure read kernel, one run: docs/log.md.
    Device(90, "H200 SXM", 132, 228 * _KIB, 227 * _KIB, 50 * _MIB, 4.8e12, 989e12, 1979e12, 1979e12, None, _HOPPER, 4.58e12),
    Device(
        100, "B200", 148, 228 * _KIB, 227 * _KIB, 126 * _MIB, 8e12, 2250e12, 4500e12, 4500e12, None, _BLACKWELL | {"tcgen05"}
    ),
    Device(120, "RTX 5090", 170, 100 * _KIB, 99 * _KIB, 96 * _MIB, 1.792e12, 210e12, 419e12, 838e12, None, _BLACKWELL),
)


def device_for(sm: int) -> Device:
    """The row of an SM version (90 for 9.0); raises ValueError that lists the known ones."""
    for device in DEVICES:
        if device.sm == sm:
            return device
    raise ValueError(f"no row for SM {sm}; known: {', '.join(f'{d.sm} ({d.product})' for d in DEVICES)}")
