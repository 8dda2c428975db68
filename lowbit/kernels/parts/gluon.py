"""Gluon under one set of names for all supported versions of Triton, from 3.6 on. Code that depends on the version is here.

Kernels import `gluon`, `gl` and the names below from here. Importing it needs Triton but no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
import shlex
import subprocess
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import triton
from triton import knobs
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
from triton.runtime import build, cache

from lowbit.hardware.half import HalfType

__all__ = [
    "CompiledKernel",
    "Descriptor",
    "Scalar",
    "Tuple",
    "aggregate",
    "asm",
    "barrier",
    "build_extension",
    "build_launcher",
    "builtin",
    "commit_copies",
    "compiling_for",
    "copy_ahead",
    "extension_sources",
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
    "serve_extensions",
    "source_digest",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "triton_digest",
    "wait_alone",
    "wait_copies",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "without_gpu",
]

# Renamed between Triton 3.6 and 3.9: the left names are those of 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_ahead = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
commit_copies, wait_copies = async_copy.commit_group, async_copy.wait_group
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait


T = typing.TypeVar("T")

Descriptor = tma.tensor_descriptor
"""Type of a TMA descriptor in an `aggregate`."""

Scalar = gl.tensor | gl.constexpr
"""Type of a pointer or number, or None, in an `aggregate`."""

Tuple = triton.language.core.tuple
"""Type of a tuple of any length in an `aggregate`, for example of one value for each plane of codes."""


def _aggregate(cls):
    """Replaces `triton.aggregate` for Triton 3.6, whose version needs a constructor and does not accept strings as
    annotations."""
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
    """A struct of device code: a class whose annotated values are passed together, under their names."""


@builtin
def part(memory, first, end, dtype, shape, layout, _semantic=None):
    """Returns entries `first` to `end` of shared memory [entries, ..] as a view with another type, shape and layout."""
    first, end = int(first), int(end)
    if hasattr(memory, "reinterpret"):
        entries = memory.slice(first, end - first, _semantic=_semantic)
        return entries.reinterpret(dtype, shape, layout, _semantic=_semantic)
    # Triton 3.6 only slices powers of two, but lets a view of one entry extend beyond that entry.
    entry = memory.index(first, _semantic=_semantic)
    return entry._reinterpret(dtype, shape, layout, _semantic=_semantic)


@builtin
def asm(text, constraints, inputs, dtype, _semantic=None):
    """Inline PTX on tensors of one element per thread; returns results of types `dtype`. It is marked as having side effects,
    so the compiler does not move it."""
    return gl.inline_asm_elementwise(text, constraints, inputs, dtype=dtype, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def run(asm, constraints, arguments, _semantic=None):
    """Runs inline PTX for its side effects, on tensors of one element per thread; $0 is a dummy output."""
    gl.inline_asm_elementwise(asm, constraints, arguments, dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def prefetch_descriptor(descriptor, kernel, _semantic=None):
    """Prefetches a TMA descriptor, an argument of the kernel named `kernel`, so that the first copy does not wait for memory.
    The first thread of a block does it. Must be called in the body of the kernel itself, not in a function that it calls."""
    # Triton 3.6 does not accept a descriptor as an operand of PTX, so it is named by its parameter's index in the kernel.
    block = _semantic.builder.get_insertion_block()
    numbers = {block.get_argument(i).id(): i for i in range(block.get_num_arguments())}
    place = f"{getattr(kernel, 'value', kernel)}_param_{numbers[descriptor.handle.id()]}"
    text = f"{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p prefetch.param.tensormap [{place}];"
    run(f"{text} mov.b32 $0, 0; }}", "=r", [], _semantic=_semantic)


@builtin
def wait_alone(sums, pending, _semantic=None):
    """Waits until at most `pending` wgmma groups of this warpgroup are unfinished, and returns the sums.

    `warpgroup_mma_wait` of Triton 3.9 also synchronises all warps of the block, which would be a deadlock where warpgroups take
    different branches.
    """
    kind = getattr(sums.type, "tensor_type", sums.type)  # sums of unfinished products have a special type
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
    """Calls a plain Python function that writes PTX during compilation; kernels call Python only through this."""
    return write(*numbers)


WRITERS = ("kernels", "hardware", "formats", "pack")
"""Packages whose Python is called while a kernel is compiled."""

COSTS = frozenset(
    f"kernels/choose/{name}.py"
    for name in ("candidate", "experts", "fused_gemm", "gemm", "large_m", "measured", "scaled_gemm", "small_m", "tiles")
)
"""Files of these packages that only choose tiles. The numbers of the chosen tile are part of a kernel's configuration, so
compiled kernels stay valid when these files change."""


@functools.cache
def source_digest() -> str:
    """A digest of the Python that writes PTX for the kernels.

    Triton's cache of compiled kernels detects changes of a kernel's source, but not of plain Python that is called during
    compilation. Configurations include this digest, so that an upgrade of the library recompiles its kernels.
    """
    package = Path(__file__).parents[2]
    found = sorted(file for room in WRITERS for file in (package / room).glob("**/*.py"))
    files = [file for file in found if file.relative_to(package).as_posix() not in COSTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


class _Compiling:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, sm: int) -> None:
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton caches a function's target by device, so each target needs a device of its own, which no GPU has.
        return 1000 + self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def without_gpu(sm: int) -> None:
    """Makes Triton compile for GPUs of compute capability `sm` in this process, without a GPU; kernels cannot be launched."""
    triton.runtime.driver.set_active(_Compiling(sm))


@contextlib.contextmanager
def compiling_for(sm: int) -> Iterator[None]:
    """`without_gpu` for the duration of a context."""
    driver = triton.runtime.driver
    before = driver._active
    without_gpu(sm)
    try:
        yield
    finally:
        driver._active = before


def build_launcher(kernel: CompiledKernel) -> None:
    """Builds a kernel's launcher ahead of its first launch. Triton 3.6 compiles C code for each signature; newer versions have
    one launcher for all kernels."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher") and torch.cuda.is_available():  # the launcher is linked against libcuda
        driver.CudaLauncher(kernel.src, kernel.metadata)


def triton_digest() -> str:
    """Returns a digest of the installed Triton, which is part of the keys of its cache."""
    return hashlib.sha256(cache.triton_key().encode()).hexdigest()


def extension_sources(kernels: Iterable[CompiledKernel]) -> dict[str, tuple[str, str]]:
    """Returns the C extensions of Python that Triton builds to launch `kernels`: digest of the source -> (name, source)."""
    from triton.backends.nvidia import driver

    sources = [("cuda_utils", Path(driver.dirname, "driver.c").read_text())]
    if hasattr(driver, "make_launcher"):  # Triton 3.6
        for kernel in kernels:
            numbers = {(kernel.src.fn.arg_names.index(i),) if isinstance(i, str) else i: i for i in kernel.src.constants}
            constants = {number: kernel.src.constants[i] for number, i in numbers.items()}
            signature, described = dict(kernel.src.signature), getattr(kernel.metadata, "tensordesc_meta", None)
            sources.append(("__triton_launcher", driver.make_launcher(constants, signature, described)))
    return {hashlib.sha256(source.encode()).hexdigest(): (name, source) for name, source in sources}


def build_extension(name: str, source: str, folder: Path) -> bytes:
    """Builds one of `extension_sources` in an empty folder, with the C compiler that Triton uses but without a GPU's driver.

    It is linked against a library with the driver's name and functions that do nothing, so that the loader takes the driver on
    the machine with the GPU. Raises ValueError without a C compiler, and if it fails.
    """
    from triton.backends.nvidia import driver

    code, functions = folder / f"{name}.c", folder / "functions.c"
    code.write_text(source)
    # cuda.h renames functions to their newer versions, cuX to cuX_v2. A linker may drop a library without used functions.
    called = sorted({f"{call}{version}" for call in re.findall(r"\bcu[A-Z]\w*", source) for version in ("", "_v2", "_v3")})
    functions.write_text("".join(f"void {call}(void) {{}}\n" for call in called))
    try:
        stub = Path(build._build("libcuda", str(functions), str(folder), [], [], [], ["-Wl,-soname,libcuda.so.1"]))
        stub.rename(folder / "libcuda.so.1")
        built = build._build(name, str(code), str(folder), [str(folder)], driver.include_dirs, driver.libraries, [])
    except RuntimeError as error:
        raise ValueError("Triton's launchers are C code, and this machine has no C compiler: install gcc, or set CC") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"Triton's launchers are C code, and the C compiler fails here: {shlex.join(error.cmd)}") from error
    return Path(built).read_bytes()


_extensions: dict[str, Path] = {}
"""Built C extensions by the digests of their sources."""


def serve_extensions(paths: Mapping[str, Path]) -> None:
    """From now on, Triton takes C extensions with these digests of their sources from files, and builds others itself."""
    _extensions.update(paths)
    global _earlier
    if knobs.build.impl is not _served_or_built:
        _earlier, knobs.build.impl = knobs.build.impl, _served_or_built


_earlier: typing.Any = None
"""The function that built extensions before `serve_extensions`; None: Triton's own."""


def _served_or_built(name, source, folder, library_dirs, include_dirs, libraries):
    ready = _extensions.get(hashlib.sha256(Path(source).read_bytes()).hexdigest())
    if ready is not None:
        return str(ready)
    if _earlier is not None:
        return _earlier(name, source, folder, library_dirs, include_dirs, libraries)
    knobs.build.impl = None
    try:
        return build._build(name, source, folder, library_dirs, include_dirs, libraries, [])
    finally:
        knobs.build.impl = _served_or_built
