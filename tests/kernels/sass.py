"""Compiles a Gluon kernel for a GPU that need not be there, and reads its machine code with the tools in Triton's wheel."""

from __future__ import annotations

import bisect
import collections
import functools
import importlib.metadata
import importlib.util
import itertools
import re
import struct
import subprocess
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

TRITON = (
    tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    if importlib.util.find_spec("triton")
    else ()
)
"""Its version: registers and spills differ, and a bound that fits both says nothing of either."""


_NUMPY = tuple(int(part) for part in importlib.metadata.version("numpy").split(".")[:2])
loops_to_loaded_bounds = pytest.mark.skipif(
    () < TRITON < (3, 7) and _NUMPY >= (2, 4),
    reason="the interpreter of Triton 3.6 cannot loop to a bound loaded from memory with NumPy 2.4 and newer",
)
"""For tests whose kernels do so."""

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
"""Triton's names."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """The machine code of a kernel, the PTX it came from and what it uses."""

    cubin: bytes
    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    capability: int

    def __post_init__(self):
        _UNREAD.add(self)

    @functools.cached_property
    def text(self) -> str:
        """Disassembled once it is asked for, and with it the other kernels that a test has compiled before it reads the first:
        nvdisasm starts in a third of a second, which is more than ptxas took, and reads a kernel in a hundredth."""
        together = [self, *(other for other in _UNREAD if other is not self and other.capability == self.capability)]
        for kernel, text in zip(together, _disassembled([kernel.cubin for kernel in together], self.capability), strict=True):
            kernel.__dict__["text"] = text
            _UNREAD.discard(kernel)
        return self.__dict__["text"]

    @functools.cached_property
    def opcodes(self) -> collections.Counter[str]:
        """How often each operation occurs, with its modifiers."""
        return collections.Counter(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]+)", self.text))

    def count(self, prefix: str) -> int:
        return sum(count for opcode, count in self.opcodes.items() if opcode.startswith(prefix))

    @functools.cached_property
    def lines(self) -> list[str]:
        return re.findall(INSTRUCTION, self.text)

    @property
    def loops(self) -> list[tuple[int, int]]:
        """First and last line, as numbers of `lines`, of what each branch back encloses."""
        places = [int(place, 16) for place in re.findall(r"/\*([0-9a-f]+)\*/", self.text)]
        branches = [(i, re.search(r"BRA.* 0x([0-9a-f]+)$", line)) for i, line in enumerate(self.lines)]
        targets = [(int(branch[1], 16), i) for i, branch in branches if branch]
        return [(bisect.bisect_left(places, target), i) for target, i in targets if places[0] <= target <= places[i]]


def batches(cases, size=4):
    """Cases of a test so many at a time, whose kernels are disassembled together."""
    cases = list(cases)
    return [cases[i : i + size] for i in range(0, len(cases), size)]


INSTRUCTION_BYTES = 16
INSTRUCTION = r"/\*[0-9a-f]+\*/\s+(.*?)(?:\s+[&?]\w.*)?\s*;"
"""A line of nvdisasm. That of Triton 3.6 prints what an instruction of sm_120 waits for behind it: `&req={2}`, `?trans1`."""
_UNREAD: weakref.WeakSet[Compiled] = weakref.WeakSet()


def _code(cubin: bytes) -> bytes:
    """The instructions in an ELF file with one kernel: its section .text.NAME."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]  # name, type, flags, address, place
    (code,) = [header for header in headers if cubin.startswith(b".text.", headers[names][4] + header[0])]
    return cubin[code[4] :][: code[5]]


def _disassembled(cubins: list[bytes], capability: int) -> list[str]:
    """The instructions of each with their addresses, which go on from one to the next."""
    codes = [_code(cubin) for cubin in cubins]
    # Without the analysis of data flow, which is for indirect branches and takes a third of the time: the text is the same.
    options = ["--no-dataflow", "--binary", f"SM{capability}{'a' if capability >= 90 else ''}"]
    lines = re.findall(r"/\*[0-9a-f]+\*/.*;.*", _run("nvdisasm", options, b"".join(codes)))
    assert INSTRUCTION_BYTES * len(lines) == sum(map(len, codes))
    taken = iter(lines)
    return ["\n".join(itertools.islice(taken, len(code) // INSTRUCTION_BYTES)) for code in codes]


def compile_kernel(kernel, signature, config, pointers, warps, capability, **options) -> Compiled:
    """A Gluon kernel whose last argument is the configuration C. `signature` maps names to Triton's type strings, or None for
    arguments that are None; `pointers` are aligned."""
    pytest.importorskip("triton", reason="Triton compiles the kernels")
    from triton.experimental.gluon._runtime import GluonASTSource

    return _compile(GluonASTSource, kernel, signature, {"C": config}, pointers, warps, capability, **options)


def compile_plan(plan, call, capability, pointers=None) -> Compiled:
    """The kernel of a plan for what the plan gives it when it is called with `call`, whose tensors are on the meta device.

    `pointers` names the arguments that are aligned; without, all tensors are.
    """
    pytest.importorskip("triton", reason="Triton compiles the kernels")
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    noted: list[tuple] = []
    launch, plan.launch = plan.launch, lambda *arguments: noted.append(arguments)
    plan(*call)
    plan.launch = launch
    (arguments,) = noted
    kernel, options = launch.function, dict(launch.options)
    warps = options.pop("num_warps")
    assert len(arguments) == len(kernel.params), f"{len(kernel.params)} parameters, the plan gives {len(arguments)} arguments"
    given = list(zip(kernel.params, arguments, strict=True))
    signature = {param.name: _kind(value) for param, value in given if not param.is_constexpr}
    constants = {param.name: value for param, value in given if param.is_constexpr}
    if pointers is None:
        pointers = [name for name, kind in signature.items() if kind is not None and kind.startswith("*")]
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return _compile(source_type, kernel, signature, constants, pointers, warps, capability, **options)


def _kind(value) -> str | None:
    """Triton's type string of an argument."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, (int, float)):
        return "i32" if isinstance(value, int) else "fp32"
    block = ", ".join(str(size) for size in value.block_shape)
    return f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>"


def compile_triton(kernel, signature, constants, pointers, warps, capability, **options) -> Compiled:
    """A plain Triton kernel with the compile-time arguments `constants`; otherwise as `compile_kernel`."""
    pytest.importorskip("triton", reason="Triton compiles the kernels")
    from triton.compiler import ASTSource

    return _compile(ASTSource, kernel, signature, constants, pointers, warps, capability, **options)


def _compile(source_type, kernel, signature, constants, pointers, warps, capability, **options) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    if not (_tools() / "nvdisasm").exists():
        pytest.skip(f"no nvdisasm in {_tools()}")
    names = [*signature, *constants]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    values = {(names.index(name),): None for name, kind in signature.items() if kind is None}
    values |= {(names.index(name),): value for name, value in constants.items()}
    types = {name: kind or "constexpr" for name, kind in signature.items()} | dict.fromkeys(constants, "constexpr")
    source = source_type(kernel, types, values, attributes)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, **options})
    usage = _run("cuobjdump", ["-res-usage"], done.asm["cubin"])
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Compiled(done.asm["cubin"], done.asm["ptx"], registers, stack, done.metadata.shared, capability)


def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _run(tool: str, options: list[str], cubin: bytes) -> str:
    """What one of the tools says of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tools() / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
