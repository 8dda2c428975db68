"""Properties of GPUs: SMs, L2, memory bandwidth and peaks. Those of this machine's GPU come from its driver as far as it states
them, all others from a table.

Sources of the rows: NVIDIA's architecture whitepapers and data sheets of A100, A10, Jetson AGX Orin 64GB, L40S, H200, HGX B200,
HGX B300, Jetson T5000, RTX 5090 and DGX Spark (SMs, L2, bandwidth, dense peaks; where only one peak is given, the others are
derived from it: Orin from int8, T5000 from fp8, DGX Spark from fp4 with sparsity).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from lowbit.folders import tuned_file
from lowbit.hardware.arch import Arch, arch_for, arch_refusals

READ_SHARE = 0.95
"""Fraction of the data sheet's bandwidth that a kernel is assumed to reach if it only reads, on GPUs that were not measured. An
H200 reaches 4.58 of 4.8 TB/s."""

MMA_SHARES = {"wgmma": 0.62, "tcgen05": 0.25}
"""Fraction of the fp16 peak that mma.sync reaches on GPUs whose peak needs another instruction, by that instruction. wgmma:
measured by Luo et al. (arXiv:2402.13499). tcgen05: not measured; assumes as many mma.sync operations per SM and cycle as on
sm_90."""


@dataclass(frozen=True)
class Machine:
    """One GPU. Peaks are dense (no sparsity), in operations per second; None for types that the tensor cores do not support.

    product: the driver's name without "NVIDIA". measured_read_bytes: measured bandwidth of a kernel that only reads, in bytes
    per second; None if it was not measured. tuned: the file of `lowbit tune` with tiles measured on this GPU; "" without one.
    """

    product: str
    arch: Arch
    sm_count: int
    l2_bytes: int
    bandwidth_bytes: float
    peak_fp16: float
    peak_fp8: float | None
    peak_int8: float | None
    peak_int4: float | None
    measured_read_bytes: float | None = None
    tuned: str = ""

    @property
    def peak_mma_fp16(self) -> float:
        """Operations per second of mma.sync on fp16: the peak, or a share of it (MMA_SHARES) if the peak needs another
        instruction."""
        newer = next((share for feature, share in MMA_SHARES.items() if feature in self.arch.features), 1.0)
        return newer * self.peak_fp16

    @property
    def read_bytes(self) -> float:
        """Highest read bandwidth that kernels reach, in bytes per second."""
        return self.measured_read_bytes or READ_SHARE * self.bandwidth_bytes


_MIB = 1 << 20

MACHINES: tuple[Machine, ...] = (
    Machine("A100-SXM4-80GB", arch_for(80), 108, 40 * _MIB, 2.039e12, 312e12, None, 624e12, 1248e12),
    Machine("A10", arch_for(86), 72, 6 * _MIB, 600e9, 125e12, None, 250e12, 500e12),
    Machine("Orin", arch_for(87), 16, 4 * _MIB, 204.8e9, 42.5e12, None, 85e12, 170e12),
    Machine("L40S", arch_for(89), 142, 96 * _MIB, 864e9, 362e12, 733e12, 733e12, None),
    # Read bandwidth measured 2026-11-21 by a pure read kernel, one run: docs/log.
    Machine("H200", arch_for(90), 132, 50 * _MIB, 4.8e12, 989e12, 1979e12, 1979e12, None, 4.58e12),
    Machine("B200", arch_for(100), 148, 126 * _MIB, 8e12, 2250e12, 4500e12, 4500e12, None),
    Machine("B300 SXM6 AC", arch_for(103), 148, 126 * _MIB, 8e12, 2250e12, 4500e12, 125e12, None),
    Machine("Thor", arch_for(110), 20, 32 * _MIB, 273e9, 258e12, 517e12, 517e12, None),
    Machine("GeForce RTX 5090", arch_for(120), 170, 96 * _MIB, 1.792e12, 210e12, 419e12, 838e12, None),
    Machine("GB10", arch_for(121), 48, 24 * _MIB, 273e9, 125e12, 250e12, 250e12, None),
)
"""One product for each SM version. Its row is used when there is no GPU of that version."""


@dataclass(frozen=True)
class GPU:
    """A GPU product as its driver describes it, for compiling without such a GPU. Attributes have the names of torch's device
    properties; the memory's clock is in kHz, its bus width in bits."""

    name: str
    sm: int
    multi_processor_count: int
    L2_cache_size: int
    total_memory: int
    memory_clock_rate: int
    memory_bus_width: int

    @property
    def product(self) -> str:
        """The name as in `Machine.product`."""
        return self.name.removeprefix("NVIDIA ")


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", 90, 132, 50 * _MIB, 80 << 30, 2_619_000, 5120),
    "h200": GPU("NVIDIA H200", 90, 132, 60 * _MIB, 140 << 30, 3_201_000, 6144),
    "a100": GPU("NVIDIA A100-SXM4-80GB", 80, 108, 40 * _MIB, 80 << 30, 1_593_000, 5120),
    "l40s": GPU("NVIDIA L40S", 89, 142, 96 * _MIB, 45 << 30, 9_001_000, 384),
    "5090": GPU("NVIDIA GeForce RTX 5090", 120, 170, 96 * _MIB, 32 << 30, 14_001_000, 512),
}
"""GPUs by the names that `lowbit compile --gpu` takes. The tiles of a product depend on its SMs, clock and bus."""


def present_gpu(device: torch.device | str = "cuda") -> GPU:
    """Returns a GPU of this machine as its driver describes it."""
    found = torch.cuda.get_device_properties(device)
    memory = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return GPU(found.name, _sm(device), found.multi_processor_count, found.L2_cache_size, found.total_memory, *memory)


def typical_machine(sm: int) -> Machine:
    """Returns the product in MACHINES for an SM version (90 for 9.0); raises ValueError with the known versions."""
    for machine in MACHINES:
        if machine.arch.sm == sm:
            return machine
    raise ValueError(f"no row for sm_{sm}; known: {', '.join(f'{m.arch.sm} ({m.product})' for m in MACHINES)}")


def machine_refusals(device: torch.device | str) -> tuple[str, ...]:
    """Returns the reasons why no kernel runs on a GPU, because of its SM version; empty if kernels may run."""
    return arch_refusals(_sm(device), torch.cuda.get_device_name(device))


def features_of(device: torch.device | str) -> frozenset[str]:
    """Returns the instructions of a GPU (`Arch.features`); empty for an unknown SM version."""
    sm = _sm(device)
    return frozenset() if arch_refusals(sm, "") else arch_for(sm).features


def machine_of(device: torch.device | str) -> Machine:
    """Returns the GPU `device` as the driver describes it; raises ValueError for an unknown SM version.

    For a product in `MACHINES`, bandwidth and peaks are those of the table (measured, or from the data sheet). For other
    products the bandwidth is memory clock times bus width, and peaks are those of the SM version's product, scaled by the
    number of SMs.
    """
    device = torch.device(device)
    return _machine_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=16)
def _machine_of(device: int) -> Machine:
    found = torch.cuda.get_device_properties(device)
    typical = typical_machine(_sm(device))
    product = found.name.removeprefix("NVIDIA ")
    here = replace(typical, sm_count=found.multi_processor_count, l2_bytes=found.L2_cache_size, tuned=_tuned(product))
    if product == typical.product:
        return here
    share = here.sm_count / typical.sm_count
    clock_khz, bus_bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    # Memory transfers data on both clock edges. Some builds of torch lack the clock; bandwidth is then scaled by the SMs.
    bandwidth = 2e3 * clock_khz * bus_bits / 8 if clock_khz and bus_bits else share * typical.bandwidth_bytes
    fp8, int8, int4 = (None if p is None else share * p for p in (typical.peak_fp8, typical.peak_int8, typical.peak_int4))
    return replace(
        here, product=product, bandwidth_bytes=bandwidth, peak_fp16=share * typical.peak_fp16, peak_fp8=fp8, peak_int8=int8,
        peak_int4=int4, measured_read_bytes=None,
    )  # fmt: skip


def _tuned(product: str) -> str:
    try:
        file = tuned_file(product)
        return str(file) if file.is_file() else ""
    except (OSError, ValueError):  # no home directory, or an unreadable one
        return ""


def _sm(device: torch.device | str | int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def torch_device(device: str | torch.device | None = None) -> torch.device:
    """Returns the named device; by default "cuda" if torch finds a GPU, else "cpu". Raises ValueError if there is no such
    device."""
    count = torch.cuda.device_count()
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"devices are cpu, cuda or one GPU such as cuda:1, not {str(device)!r}") from None
    if found.type == "cuda" and (found.index or 0) >= count:
        why = f"it finds {count} GPUs" if count or torch.version.cuda else "it was built without CUDA"
        raise ValueError(f"{found}: torch {torch.__version__} has no such device, {why}; compute on cpu instead")
    return found
