"""The table of all kernels that multiply quantized weights, in order of preference, with the reasons why each does not support
a problem.

A kernel's refusals are data: a tuple of reasons, empty if it supports the problem. Layers choose the form of their weights by
this table. `gemm` then runs the operator of that form, which chooses the tile by kernels/choose/. `explain`, reports, warnings
and errors print the table's rows. Only `problem_on` queries a GPU, so a laptop can print what a server would run.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from lowbit.formats import PerBlock, PerGroup, Scheme, ZeroPoint, parse_scheme
from lowbit.hardware.conversions import conversion
from lowbit.hardware.machine import Machine, machine_of, machine_refusals
from lowbit.kernels.choose.candidate import Candidate
from lowbit.kernels.choose.experts import ExpertCandidate, ExpertShape, tile_rows_for
from lowbit.kernels.choose.experts import candidates as expert_candidates
from lowbit.kernels.choose.gemm import candidates
from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile, candidates_scaled
from lowbit.kernels.choose.tiles import GemmCandidate, GemmShape, MmaTile, RingTile, WgmmaTile
from lowbit.kernels.cpu import torch_int8
from lowbit.kernels.cpu.scaled_blocked import X_BLOCK
from lowbit.kernels.reference.activations import CODE_DTYPES
from lowbit.ops.operands import triton_refusals
from lowbit.pack import kernel_group, scaled_refusals
from lowbit.pack.cpu import int4_refusals, int8_refusals

Form = Literal["fragments", "operands", "int4", "int8", "decoded", "rows"]
"""The form of a weight; see pack/gemm_weight.py."""


@dataclass(frozen=True)
class Problem:
    """One product: y[m, n] = x[m, k] . w[n, k]^T under a scheme, for x of `dtype` before it is quantized.

    With `experts`, the layer has that many matrices, and each of the m rows of x is multiplied by `top_k` of them.

    `machine`: the GPU; None on a CPU. `excluded`: reasons why no kernel of this library runs on the GPU. `scale_dtype`: type of
    the weight's scales, if known. `decode_bytes`: bytes that one dequantized weight (an element) may take on a CPU; 0 if
    weights must stay packed. `form`: the form in which the weight is already packed; None if it will be packed for the chosen
    kernel.
    """

    scheme: Scheme
    m: int
    n: int
    k: int
    dtype: torch.dtype
    machine: Machine | None = None
    excluded: tuple[str, ...] = ()
    scale_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    decode_bytes: int = 0
    form: Form | None = None
    experts: int = 0
    top_k: int = 1

    def __str__(self) -> str:
        where = (
            "a CPU" if self.machine is None and not self.excluded else "a GPU" if self.machine is None else self.machine.product
        )
        invariant = ", batch-invariant" if self.batch_invariant else ""
        of = f"{self.top_k} of {self.experts} experts, " if self.experts else ""
        return f"{of}{self.scheme} M {self.m} N {self.n} K {self.k}, x {_name(self.dtype)} on {where}{invariant}"

    @property
    def on_gpu(self) -> bool:
        """True if the product runs on a GPU, supported or not."""
        return self.machine is not None or bool(self.excluded)


def problem_on(
    device: torch.device | str, scheme: Scheme, m: int, shape: tuple[int, int], dtype: torch.dtype, *,
    scale_dtype: torch.dtype | None = None, batch_invariant: bool = False, decode_bytes: int = 0, form: Form | None = None,
) -> Problem:  # fmt: skip
    """Returns the problem of a product with a weight of `shape` (N, K) on a device of this machine."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    machine, excluded = _place(device)
    return Problem(scheme, m, *shape, dtype, machine, excluded, scale_dtype, batch_invariant, decode_bytes, form)


@functools.lru_cache(maxsize=64)
def _place(device: torch.device) -> tuple[Machine | None, tuple[str, ...]]:
    if device.type == "cpu":
        return None, ()
    if device.type != "cuda":
        return None, (f"runs on NVIDIA GPUs and on CPUs, not on {device.type}",)
    unknown = machine_refusals(device)
    return (None if unknown else machine_of(device)), (*unknown, *triton_refusals())


def scaled_shape(scheme: Scheme, m: int, n: int, k: int, x_blocks: bool = False, fast_accum: bool = False) -> ScaledShape:
    """Returns the properties of a product on which the tile for 8-bit activations depends. `x_blocks`: True if x has scales of
    blocks."""
    blocks = isinstance(scheme.granularity, PerBlock)
    integer = scheme.activation is not None and scheme.activation.name == "int8"
    grouped = isinstance(scheme.granularity, PerGroup)
    fast = fast_accum and scheme.weight.bits == 8 and not (integer or grouped or blocks or x_blocks)
    return ScaledShape(m, n, k, scheme.weight.bits, integer, grouped, blocks, x_blocks, fast)


@dataclass(frozen=True)
class Kernel:
    """A kernel: its file, where it runs, and the form of weight that it reads. `scaled`: True if its x has 8 bits. `experts`:
    True if it multiplies the matrices of a layer of experts, False for single matrices.

    `own` returns the kernel's own refusals of a problem whose device, x and form match. `tile` returns lines of text: the
    chosen tile with the reason, then the next best tile with its cost.
    """

    name: str
    file: str
    runs_on: str
    scaled: bool
    form: Form
    own: Callable[[Problem], tuple[str, ...]]
    tile: Callable[[Problem], tuple[str, ...]] = lambda problem: ()
    experts: bool = False

    @property
    def is_slow(self) -> bool:
        """True if the kernel dequantizes the whole weight at every call."""
        return self.form == "rows"

    @property
    def on_gpu(self) -> bool:
        """True if the kernel needs a GPU."""
        return self.form in ("fragments", "operands")

    def concerns(self, p: Problem) -> bool:
        """True if the kernel is written for the device, the x and the form of weight of a problem."""
        device = self.is_slow or self.on_gpu == p.on_gpu
        of_kind = self.experts == bool(p.experts) and self.scaled == (p.scheme.activation is not None)
        return p.form in (None, self.form) and device and of_kind

    def refusals(self, p: Problem) -> tuple[str, ...]:
        """Returns the reasons why the kernel does not support a problem; empty if it does."""
        reasons = []
        if self.experts != bool(p.experts):
            reasons.append(
                "multiplies layers of experts" if self.experts else "multiplies single matrices, not layers of experts"
            )
        if p.form is not None and self.form != p.form:
            reasons.append(f"reads weights in the form {self.form}, this one is in the form {p.form}")
        if not self.is_slow and self.on_gpu != p.on_gpu:
            reasons.append("runs on NVIDIA GPUs, x is on a CPU" if self.on_gpu else "runs on a CPU, x is on a GPU")
        if self.scaled != (p.scheme.activation is not None):
            given = "16 bits" if p.scheme.activation is None else p.scheme.activation.name
            reasons.append(f"multiplies {'8-bit' if self.scaled else '16-bit'} activations, the scheme has {given}")
        if not self.on_gpu and p.batch_invariant:
            reasons.append("sums small and large batches in different orders (batch_invariant)")
        if self.on_gpu and p.excluded:
            reasons += p.excluded
        return tuple(reasons) or self.own(p)


class UnsupportedProblem(RuntimeError):
    """Raised if no kernel supports the problem; the message has every kernel's reasons."""


def rows(problem: Problem) -> list[tuple[Kernel, tuple[str, ...]]]:
    """Returns every kernel with its reasons against the problem."""
    return [(kernel, kernel.refusals(problem)) for kernel in KERNELS]


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> Kernel:
    """Returns the first kernel that supports the problem; raises UnsupportedProblem with the reasons of all kernels if there is
    none."""
    for kernel in KERNELS:
        if not kernel.refusals(problem):
            return kernel
    listed = "\n".join(f"  {kernel.name}: {'; '.join(reasons)}" for kernel, reasons in rows(problem))
    raise UnsupportedProblem(f"no kernel for {problem}:\n{listed}")


def describe(problem: Problem) -> str:
    """Returns the name of the chosen kernel and, if it has several tiles, the tile."""
    kernel = choose(problem)
    return ", ".join((kernel.name, *(line.partition(": ")[0] for line in kernel.tile(problem)[:1])))


def why_slow(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons why no fast kernel for the problem's device and x supports it; empty if one does.

    A fast kernel keeps weights packed or dequantizes them once. Equal reasons of several kernels are listed once.
    """
    if not choose(problem).is_slow:
        return ()
    said: dict[str, str] = {}
    for kernel in KERNELS:
        if kernel.concerns(problem) and not kernel.is_slow:
            for reason in kernel.refusals(problem):
                said.setdefault(reason, f"{kernel.name}: {reason}")
    return tuple(said.values())


def instead(problem: Problem) -> Scheme | None:
    """Returns a scheme similar to the problem's that a fast kernel supports; None if there is none. Other group sizes are tried
    first, then schemes without zero points."""
    name = problem.scheme.name
    plain = re.sub(r"_(fz|z)(?=_|$)", "", name)
    for base in (name, plain):
        for group in ("_g128", "_g64", "_g32", ""):
            tried = re.sub(r"_(g\d+|b\d+x\d+)(?=_|$)", group, base)
            with contextlib.suppress(ValueError):
                scheme = parse_scheme(tried)
                if scheme != problem.scheme and not why_slow(replace(problem, scheme=scheme)):
                    return scheme
    return None


@functools.cache
def warn_slow(scheme: str, reasons: tuple[str, ...]) -> None:
    """Warns that layers of a scheme dequantize their weights at every call. The same warning is given only once."""
    warnings.warn(
        f"layers of {scheme} decode their weights at every call, several times slower than without quantization, since no "
        f"kernel takes them ({'; '.join(reasons)})",
        stacklevel=2,
    )


def scheme_refusals(scheme: Scheme, n: int, k: int) -> tuple[str, ...]:
    """Returns the reasons why a layer [n, k] of a scheme cannot run anywhere; empty if it can, at least on a CPU in float32."""
    problem = Problem(scheme, 1, n, k, torch.float32)
    rows_ = [(kernel, kernel.refusals(problem)) for kernel in KERNELS if kernel.is_slow and kernel.concerns(problem)]
    return tuple(f"{kernel.name} {reason}" for kernel, reasons in rows_ for reason in reasons)


def weight_refusals(scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
    """Returns the reasons why weights of a scheme cannot be packed for the kernels for 16-bit x; empty if they can."""
    reasons = []
    for check in (
        lambda: kernel_group(scheme),
        lambda: conversion(scheme.weight, "fp16" if dtype == torch.float16 else "bf16"),
    ):
        try:
            check()
        except ValueError as error:
            reasons.append(str(error))
    return tuple(reasons)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- NVIDIA GPUs, 16-bit x


def _without_wgmma(p: Problem) -> tuple[str, ...]:
    assert p.machine is not None
    if "wgmma" in p.machine.arch.features:
        return ()
    return (f"needs the wgmma instruction of sm_90, {p.machine.product} is sm_{p.machine.arch.sm}",)


def _of_16_bits(p: Problem) -> tuple[str, ...]:
    of_x = () if p.dtype in (torch.float16, torch.bfloat16) else (f"takes fp16 and bf16 activations, not {_name(p.dtype)}",)
    return (*of_x, *weight_refusals(p.scheme, p.dtype))


@functools.lru_cache(maxsize=4096)
def _tiles_16(p: Problem) -> tuple[GemmCandidate, ...]:
    assert p.machine is not None
    found = candidates(GemmShape(p.m, p.n, p.k, p.scheme.weight.bits), p.machine, batch_invariant=p.batch_invariant)
    return tuple(row for row in found if not row.reasons)


def _better_tile(p: Problem, kind: type[RingTile] | type[MmaTile] | type[WgmmaTile]) -> tuple[str, ...]:
    """Returns the reasons against a kernel for 16-bit x: another kernel has the better tile, or no kernel has a tile."""
    tiles = _tiles_16(p)
    if not tiles:
        return (f"has no tile for {p.scheme} with M {p.m}, N {p.n} and K {p.k}",)
    if isinstance(tiles[0].tile, kind):
        return ()
    own = next((row for row in tiles if isinstance(row.tile, kind)), None)
    best = f"the other kernel {tiles[0].cost_us:.1f} us"
    return (f"is not for M {p.m}" if own is None else f"would take {own.cost_us:.1f} us ({own.tile}), {best}",)


def _wgmma(p: Problem) -> tuple[str, ...]:
    return _of_16_bits(p) or _without_wgmma(p) or _better_tile(p, WgmmaTile)


def _mma(p: Problem) -> tuple[str, ...]:
    assert p.machine is not None
    if "wgmma" in p.machine.arch.features:
        return (f"is for GPUs without wgmma, {p.machine.product} has it",)
    return _of_16_bits(p) or _better_tile(p, MmaTile)


def _ring(p: Problem) -> tuple[str, ...]:
    return _of_16_bits(p) or _better_tile(p, RingTile)


def _tile_16(p: Problem) -> tuple[str, ...]:
    return _in_words(*_tiles_16(p))


def _in_words(best: Candidate[Any], *others: Candidate[Any]) -> tuple[str, ...]:
    """Returns lines of text: the chosen tile and the reason, then the next best tile and its cost."""
    why = best.measured or f"modelled {best.cost_us:.1f} us"
    return (f"{best.tile}: {why}", *(f"next best: {row.tile}, {row.cost_us:.1f} us" for row in others[:1]))


# ---- NVIDIA GPUs, experts


@functools.lru_cache(maxsize=4096)
def _tiles_experts(p: Problem) -> tuple[ExpertCandidate, ...]:
    assert p.machine is not None
    bits = p.scheme.weight.bits
    rows = tile_rows_for(p.m, p.top_k, p.experts, bits, p.batch_invariant)
    shape = ExpertShape(p.m, p.top_k, p.experts, p.n, p.k, bits, rows)
    return tuple(row for row in expert_candidates(shape, p.machine, batch_invariant=p.batch_invariant) if not row.reasons)


def _experts(p: Problem, kind: type[RingTile] | type[MmaTile] | type[WgmmaTile]) -> tuple[str, ...]:
    """Returns the reasons why a kernel with tiles of a `kind` does not compute a layer of experts; empty if it does."""
    assert p.machine is not None
    if reasons := (*_of_16_bits(p), *(_without_wgmma(p) if kind is WgmmaTile else ())):
        return reasons
    tiles = _tiles_experts(p)
    if not tiles:
        return (f"has no tile for {p.scheme} with M {p.m}, N {p.n} and K {p.k}",)
    if isinstance(tiles[0].tile, kind):
        return ()
    own = next((row for row in tiles if isinstance(row.tile, kind)), None)
    if own is None:
        return (f"is not for tiles of {tiles[0].tile.tokens} rows, which {p.m} tokens get here",)
    return (f"would take {own.cost_us:.1f} us ({own.tile}), the other kernel {tiles[0].cost_us:.1f} us",)


def _tile_experts(p: Problem) -> tuple[str, ...]:
    return _in_words(*_tiles_experts(p))


# ---- NVIDIA GPUs, 8-bit x


def _of_8_bits(p: Problem) -> tuple[str, ...]:
    assert p.machine is not None and p.scheme.activation is not None
    reasons = scaled_refusals(p.scheme, p.scale_dtype)
    if p.scheme.activation.name != "int8" and "mma_fp8" not in p.machine.arch.features:
        reasons = (*reasons, f"needs sm_89 or newer for fp8, {p.machine.product} is older; int8 activations run there")
    return reasons


def _scaled_wgmma(p: Problem, narrow: bool) -> tuple[str, ...]:
    other = (f"multiplies weights of {'fewer than 8' if narrow else '8'} bits, the scheme has {p.scheme.weight.bits}",)
    return _of_8_bits(p) or _without_wgmma(p) or (other if (p.scheme.weight.bits < 8) != narrow else ())


def _scaled_mma(p: Problem) -> tuple[str, ...]:
    assert p.machine is not None
    slower = f"is for GPUs without wgmma, {p.machine.product} has it"
    return _of_8_bits(p) or ((slower,) if "wgmma" in p.machine.arch.features else ())


@functools.lru_cache(maxsize=4096)
def _tiles_8(p: Problem) -> tuple[Candidate[ScaledTile], ...]:
    assert p.machine is not None
    x_blocks = isinstance(p.scheme.granularity, PerBlock) and p.k > p.scheme.granularity.k  # one block: one scale per token
    shape = scaled_shape(p.scheme, p.m, p.n, p.k, x_blocks)
    found = candidates_scaled(shape, p.machine, batch_invariant=p.batch_invariant)
    return tuple(row for row in found if not row.reasons)


def _tile_8(p: Problem) -> tuple[str, ...]:
    return _in_words(*_tiles_8(p))


# ---- CPUs, and any device


def _bf16(p: Problem) -> tuple[str, ...]:
    return () if p.dtype == torch.bfloat16 else (f"takes bfloat16 activations, not {_name(p.dtype)}",)


def _torch_int4(p: Problem) -> tuple[str, ...]:
    return (*int4_refusals(p.scheme, (p.n, p.k)), *_bf16(p))


def _torch_int8(p: Problem) -> tuple[str, ...]:
    return (*int8_refusals(p.scheme, (p.n, p.k)), *_bf16(p))


def _torch_scaled_int8(p: Problem) -> tuple[str, ...]:
    scheme, reasons = p.scheme, []
    assert scheme.activation is not None
    if scheme.activation.name != "int8":
        reasons.append(f"takes int8 activations, not {scheme.activation.name}")
    if scheme.zero is not ZeroPoint.NONE:
        reasons.append(f"takes weights without zero points, not {scheme}")
    if not torch_int8.sums_are_exact():
        reasons.append("saturates sums of int8 x on this CPU, which has no VNNI instructions")
    return (*reasons, *int8_refusals(scheme, (p.n, p.k)))


def _decoded_once(p: Problem) -> tuple[str, ...]:
    size = p.dtype.itemsize
    return () if size <= p.decode_bytes else (f"would take {size} bytes for each weight, which was not allowed",)


def _blocked(p: Problem) -> tuple[str, ...]:
    known = (torch.float16, torch.bfloat16, torch.float32)
    return () if p.dtype in known else (f"takes fp16, bf16 and fp32 activations, not {_name(p.dtype)}",)


def _scaled_blocked(p: Problem) -> tuple[str, ...]:
    activation, granularity, reasons = p.scheme.activation, p.scheme.granularity, []
    assert activation is not None
    if activation.name not in CODE_DTYPES:
        reasons.append(f"multiplies activations of {', '.join(CODE_DTYPES)}, the scheme has {activation.name}")
    if isinstance(granularity, PerBlock) and granularity.k != X_BLOCK:
        reasons.append(f"takes blocks of {X_BLOCK} columns together with quantized activations, not {p.scheme}")
    return tuple(reasons)


KERNELS: tuple[Kernel, ...] = (
    Kernel("wgmma_gemm", "kernels/sm90/large_m_gemm.py", "sm_90", False, "fragments", _wgmma, _tile_16),
    Kernel("mma_gemm", "kernels/sm80/large_m_gemm.py", "sm_80 and newer", False, "fragments", _mma, _tile_16),
    Kernel("ring_gemm", "kernels/sm80/small_m_gemm.py", "sm_80 and newer", False, "fragments", _ring, _tile_16),
    Kernel(
        "scaled_gemm", "kernels/sm90/scaled_gemm.py", "sm_90", True, "operands", partial(_scaled_wgmma, narrow=False), _tile_8
    ),
    Kernel(
        "narrow_scaled_gemm", "kernels/sm90/sub_byte_scaled_gemm.py", "sm_90", True, "operands",
        partial(_scaled_wgmma, narrow=True), _tile_8,
    ),
    Kernel("plain_scaled_gemm", "kernels/sm80/scaled_gemm.py", "sm_80 and newer", True, "operands", _scaled_mma),
    Kernel("torch_int4", "kernels/cpu/torch_int4.py", "CPUs with AVX2", False, "int4", _torch_int4),
    Kernel("torch_int8", "kernels/cpu/torch_int8.py", "CPUs with AVX2", False, "int8", _torch_int8),
    Kernel("scaled_torch_int8", "kernels/cpu/torch_int8.py", "CPUs with VNNI", True, "int8", _torch_scaled_int8),
    Kernel("decoded_once", "ops/cpu_gemm.py", "CPUs", False, "decoded", _decoded_once),
    Kernel(
        "expert_wgmma_gemm", "kernels/sm90/expert_large_m_gemm.py", "sm_90", False, "fragments",
        partial(_experts, kind=WgmmaTile), _tile_experts, experts=True,
    ),
    Kernel(
        "expert_mma_gemm", "kernels/sm80/expert_large_m_gemm.py", "sm_80 and newer", False, "fragments",
        partial(_experts, kind=MmaTile), _tile_experts, experts=True,
    ),
    Kernel(
        "expert_ring_gemm", "kernels/sm80/expert_small_m_gemm.py", "sm_80 and newer", False, "fragments",
        partial(_experts, kind=RingTile), _tile_experts, experts=True,
    ),
    Kernel(
        "expert_scaled_gemm", "kernels/sm80/expert_scaled_gemm.py", "sm_80 and newer", True, "operands", _of_8_bits,
        experts=True,
    ),
    Kernel("experts_one_by_one", "ops/experts.py", "any device", False, "rows", lambda p: (), experts=True),
    Kernel("scaled_experts_one_by_one", "ops/experts.py", "any device", True, "rows", lambda p: (), experts=True),
    Kernel("blocked", "kernels/cpu/blocked.py", "any device", False, "rows", _blocked),
    Kernel("scaled_blocked", "kernels/cpu/scaled_blocked.py", "any device", True, "rows", _scaled_blocked),
)  # fmt: skip
"""All kernels in order of preference."""
