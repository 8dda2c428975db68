"""The one place that knows which Triton is installed: Gluon under one set of names, from 3.6 to the newest.

Kernels import `gluon`, `gl` and what follows from here. Importing it needs Triton but no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import math
import typing
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowbit.hardware.half import HalfType

__all__ = [
    "CompiledKernel",
    "Descriptor",
    "Scalar",
    "Tuple",
    "aggregate",
    "asm",
    "barrier",
    "build_launcher",
    "builtin",
    "commit_copies",
    "copy_ahead",
    "fence_async_shared",
    "gl",
    "gluon",
    "half_type",
    "mbarrier",
    "mma_v2",
    "part",
    "prefetch_descriptor",
    "ptx",
    "run",
    "source_digest",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "wait_alone",
    "wait_copies",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "without_gpu",
]

# Renamed between Triton 3.6 and 3.9: the left names are today's.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_ahead = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
commit_copies, wait_copies = async_copy.commit_group, async_copy.wait_group
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait


T = typing.TypeVar("T")

Descriptor = tma.tensor_descriptor
"""In an `aggregate`, what TMA copies by."""

Scalar = gl.tensor | gl.constexpr
"""In an `aggregate`, a pointer or number, or None."""

Tuple = triton.language.core.tuple
"""In an `aggregate`, as many values as a kernel happens to have, as one for each plane of codes."""


def _aggregate(cls):
    """`triton.aggregate` for Triton 3.6, which wants real types for annotations and a constructor."""
    hints = cls.__annotations__ = typing.get_type_hints(cls)

    def init(self, *values, **named):
        for name, value in {**dict(zip(hints, values, strict=False)), **named}.items():
            setattr(self, name, value if hasattr(value, "_flatten_ir") else gl.constexpr(value))

    init.__triton_builtin__ = True
    cls.__init__ = init
    return triton.language.core._aggregate(cls)


if typing.TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform()
    def aggregate(cls: type[T]) -> type[T]: ...

else:
    aggregate = triton.aggregate if hasattr(triton, "aggregate") else _aggregate
    """A class whose values, annotated in order, travel together through device code under their names."""


@builtin
def part(memory, first, end, dtype, shape, layout, _semantic=None):
    """Entries `first` to `end` of shared memory [entries, ..] as another type, shape and layout."""
    first, end = int(first), int(end)
    if hasattr(memory, "reinterpret"):
        entries = memory.slice(first, end - first, _semantic=_semantic)
        return entries.reinterpret(dtype, shape, layout, _semantic=_semantic)
    # Triton 3.6 slices powers of two only, but does not mind a view that goes beyond one entry.
    entry = memory.index(first, _semantic=_semantic)
    return entry._reinterpret(dtype, shape, layout, _semantic=_semantic)


@builtin
def asm(text, constraints, inputs, dtype, _semantic=None):
    """PTX that stays where it is, on tensors of one element per thread; its results are of the types `dtype`."""
    return gl.inline_asm_elementwise(text, constraints, inputs, dtype=dtype, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def run(asm, constraints, arguments, _semantic=None):
    """PTX of which nothing but its effect is wanted, on tensors of one element per thread; $0 is written and dropped."""
    gl.inline_asm_elementwise(asm, constraints, arguments, dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def prefetch_descriptor(descriptor, kernel, _semantic=None):
    """Brings a descriptor, an argument of the kernel named `kernel`, to where TMA reads it: the first copy by it need not wait
    for memory. By the first thread of a block, in the kernel's own body."""
    # Not an operand of the PTX, which Triton 3.6 refuses: the parameter has the number of the argument.
    block = _semantic.builder.get_insertion_block()
    numbers = {block.get_argument(i).id(): i for i in range(block.get_num_arguments())}
    place = f"{getattr(kernel, 'value', kernel)}_param_{numbers[descriptor.handle.id()]}"
    text = f"{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p prefetch.param.tensormap [{place}];"
    run(f"{text} mov.b32 $0, 0; }}", "=r", [], _semantic=_semantic)


@builtin
def wait_alone(sums, pending, _semantic=None):
    """The sums, once at most `pending` groups of products that this warpgroup has started are not done.

    `warpgroup_mma_wait` of Triton 3.9 brings all warps of the block together besides, for ever where warpgroups go ways of
    their own.
    """
    kind = getattr(sums.type, "tensor_type", sums.type)  # products under way have a type of their own
    count = math.prod(int(size) for size in kind.shape) // (32 * int(math.prod(kind.layout.warps_per_cta)))
    constraints = ",".join(["=r"] * count + [str(i) for i in range(count)])
    tensor = gl.tensor(sums.handle, kind)
    return gl.inline_asm_elementwise(
        f"wgmma.wait_group.sync.aligned {int(pending)};", constraints, [tensor], dtype=tensor.dtype, is_pure=False, pack=count,
        _semantic=_semantic,
    )  # fmt: skip


def half_type(dtype: torch.dtype) -> HalfType:
    """ "fp16" or "bf16"; raises ValueError for any other dtype."""
    names: dict[torch.dtype, HalfType] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    if dtype not in names:
        raise ValueError(f"the tensor-core kernels take fp16 and bf16, got {dtype}")
    return names[dtype]


@gluon.constexpr_function
def ptx(write, *numbers):
    """Calls a plain function that writes PTX while a kernel is compiled; kernels reach Python only through here."""
    return write(*numbers)


WRITERS = ("kernels", "hardware", "formats", "pack")
"""Packages whose Python is called while a kernel is compiled."""

COSTS = frozenset(f"kernels/choose/{name}.py" for name in ("candidate", "gemm", "fused_gemm", "scaled_gemm"))
"""Files in there that only say which tile is chosen. A tile's numbers are in the configuration of its kernel: where others are
chosen, those that were compiled still serve."""


@functools.cache
def source_digest() -> str:
    """A digest of the Python that writes PTX for the kernels.

    Triton's cache of compiled kernels notices changes of a kernel's own source, but not of plain Python that it calls
    while compiling; configurations carry this digest so that an upgrade of the library is noticed too.
    """
    package = Path(__file__).parents[2]
    found = sorted(file for room in WRITERS for file in (package / room).glob("**/*.py"))
    files = [file for file in found if file.relative_to(package).as_posix() not in COSTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


class _Compiling:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, sm: int) -> None:
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def without_gpu(sm: int) -> None:
    """Makes Triton compile for GPUs of compute capability `sm` in this process, which needs none and cannot launch kernels."""
    triton.runtime.driver.set_active(_Compiling(sm))


def build_launcher(kernel: CompiledKernel) -> None:
    """What else a first launch builds: Triton 3.6 compiles C for each signature, newer ones have one launcher for all."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher") and torch.cuda.is_available():  # it is linked with the driver
        driver.CudaLauncher(kernel.src, kernel.metadata)
