"""Instructions and limits of each SM version, one row per version. `machine.py` has the properties that differ between GPUs of
one version.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (shared memory).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One SM version (90 for 9.0): bytes of shared memory of an SM and of one block, and its instructions."""

    sm: int
    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    features: frozenset[str]


_AMPERE = frozenset({"cp_async", "ldmatrix", "mma_f16", "mma_bf16", "mma_s8", "mma_s4"})
_ADA = _AMPERE | {"mma_fp8"}
_HOPPER = frozenset(
    {"cp_async", "ldmatrix", "mma_f16", "mma_bf16", "mma_s8", "mma_fp8", "tma", "wgmma", "cluster", "half_bf16"}
)
_BLACKWELL = frozenset(
    {"cp_async", "ldmatrix", "mma_f16", "mma_bf16", "mma_s8", "mma_fp8", "tma", "cluster", "half_bf16", "mma_fp4"}
)

_KIB = 1 << 10

ARCHS: tuple[Arch, ...] = (
    Arch(80, 164 * _KIB, 163 * _KIB, _AMPERE),
    Arch(86, 100 * _KIB, 99 * _KIB, _AMPERE),
    Arch(87, 164 * _KIB, 163 * _KIB, _AMPERE),
    Arch(89, 100 * _KIB, 99 * _KIB, _ADA),
    Arch(90, 228 * _KIB, 227 * _KIB, _HOPPER),
    Arch(100, 228 * _KIB, 227 * _KIB, _BLACKWELL | {"tcgen05"}),
    Arch(103, 228 * _KIB, 227 * _KIB, _BLACKWELL | {"tcgen05"}),
    Arch(110, 228 * _KIB, 227 * _KIB, _BLACKWELL | {"tcgen05"}),
    Arch(120, 100 * _KIB, 99 * _KIB, _BLACKWELL),
    Arch(121, 100 * _KIB, 99 * _KIB, _BLACKWELL),
)
"""The versions for which the tests compile kernels. For sm_110 Triton needs the ptxas of CUDA 13; Triton 3.6 includes that of
12.9."""


def arch_refusals(sm: int, name: str) -> tuple[str, ...]:
    """Returns the reasons why no kernel runs on a GPU called `name` of an SM version; empty if kernels may run."""
    if any(arch.sm == sm for arch in ARCHS):
        return ()
    return (f"is for {', '.join(f'sm_{arch.sm}' for arch in ARCHS)}; {name} is sm_{sm}",)


def arch_for(sm: int) -> Arch:
    """Returns the row of an SM version; raises ValueError with the known versions."""
    for arch in ARCHS:
        if arch.sm == sm:
            return arch
    raise ValueError(f"no row for sm_{sm}; known: {', '.join(f'sm_{arch.sm}' for arch in ARCHS)}")
