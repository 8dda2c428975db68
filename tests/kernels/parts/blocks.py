"""Runs device functions of the small-M kernel as plain Python for all threads of a block. Gluon operations act on NumPy arrays
with one element per thread, and tests/kernels/parts/threads.py runs the PTX. No GPU and no compiler is needed.
"""

from __future__ import annotations

import ast
import inspect
import types

import numpy as np

from tests.kernels.parts.threads import run


class Lanes(np.ndarray):
    """A kernel's tensor with one element per thread, or a scalar."""

    def to(self, kind, bitcast=False):
        return self.astype(kind).view(Lanes)


def lanes(values):
    return np.asarray(values).view(Lanes)


class Memory:
    """A tensor in global memory that counts the stores to each element; a Pointer is a Memory and indices into it.

    cp.async reads one array of bytes. `values` may be a view of it, which starts at byte `address`.
    """

    def __init__(self, values, address=0):
        self.values, self.address, self.written = values, address, np.zeros(values.size, dtype=np.int64)
        self.dtype = types.SimpleNamespace(element_ty=values.dtype)

    def __add__(self, place):
        return Pointer(self, lanes(place))


class Pointer:
    def __init__(self, memory, place):
        self.memory, self.place, self.dtype = memory, place, memory.dtype

    def __add__(self, place):
        return Pointer(self.memory, self.place + place)

    @property
    def bytes(self):
        """Byte addresses of the elements."""
        return self.memory.address + self.place * self.memory.values.itemsize


def load(pointer, mask=True, other=0.0, cache_modifier=""):
    pointer = pointer + 0 if isinstance(pointer, Memory) else pointer
    there = np.broadcast_to(mask, np.shape(pointer.place))
    values = pointer.memory.values.reshape(-1)[np.where(there, pointer.place, 0)]
    return lanes(np.where(there, values, np.asarray(other, values.dtype)))


def store(pointer, value, mask=True):
    there = np.broadcast_to(mask, np.shape(pointer.place))
    places = np.broadcast_to(pointer.place, there.shape)[there]
    pointer.memory.values.reshape(-1)[places] = np.broadcast_to(value, there.shape)[there]
    np.add.at(pointer.memory.written, places, 1)


def atomic_add(pointer, value, sem):
    before = int(load(pointer))
    store(pointer, before + value)
    return before


def exp(x):
    with np.errstate(over="ignore"):
        return np.exp(x)


def bundles(module):
    """{name: factory} of a module's Gluon aggregates; the factory makes a SimpleNamespace of the fields."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(d) == "aggregate" for d in node.decorator_list):
            names = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
            found[node.name] = lambda *values, names=names: types.SimpleNamespace(**dict(zip(names, values, strict=True)))
    return found


class Block:
    """One block of a grid. `device` holds the device functions of `modules` and those that these import."""

    def __init__(self, config, grid, place, *modules, memory=None, after_wait=lambda: None, **names):
        self.config, self.memory, self.after_wait = config, memory, after_wait
        self.thread = lanes(np.arange(config.threads))
        self.shared = np.full(4 * config.shared_rows * config.threads, 255, dtype=np.uint8)  # NaN
        gl = types.SimpleNamespace(
            static_range=range, float32=np.float32, int32=np.int32, int64=np.int64, constexpr=None, load=load, store=store,
            atomic_add=atomic_add, program_id=lambda axis: place[axis], num_programs=lambda axis: grid[axis],
            minimum=lambda a, b: lanes(np.minimum(a, b)), maximum=lambda a, b: lanes(np.maximum(a, b)),
            where=lambda c, a, b: lanes(np.where(c, a, b)), exp=exp,
            rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32), arange=lambda first, end, layout: self.thread,
            zeros=lambda shape, kind, layout: lanes(np.zeros(shape, kind)), BlockedLayout=lambda *layout: None,
            SwizzledSharedLayout=lambda *layout: None, allocate_shared_memory=lambda *shape: self.tile(),
            inline_asm_elementwise=lambda text, takes, arguments, dtype, **_: self.asm(text, takes, arguments, dtype),
        )  # fmt: skip
        self.device = {}
        for module in modules:
            self.device |= vars(module)
        for module in modules:
            self.device |= bundles(module)
        for name, value in list(self.device.items()):
            if hasattr(value, "fn") and hasattr(value.fn, "__code__"):
                self.device[name] = types.FunctionType(value.fn.__code__, self.device, name)
            elif type(value).__name__ == "constexpr":
                self.device[name] = value.value
        self.device |= {"gl": gl, "barrier": lambda: None, "asm": self.asm, "run": self.run}
        self.device |= {"ptx": lambda write, *numbers: write(*numbers), **names}

    def asm(self, text, constraints, arguments, kinds):
        text = getattr(text, "value", text)
        several = isinstance(kinds, tuple)
        words = [np.broadcast_to(a.bytes if isinstance(a, Pointer) else lanes(a), self.thread.shape) for a in arguments]
        words = [np.ascontiguousarray(a.astype(np.float32 if a.dtype.kind == "f" else np.int32)).view(np.uint32) for a in words]
        if "griddepcontrol.wait" in text:
            self.after_wait()
        words = run(text, words or [self.thread], len(kinds) if several else 1, self.shared, memory=self.memory)
        kinds = kinds if several else (kinds,)
        made = tuple(
            lanes(w.view(np.int32 if "int32" in str(kind) else np.float32)) for w, kind in zip(words, kinds, strict=True)
        )
        return made if several else made[0]

    def run(self, text, constraints, arguments):
        self.asm(text, constraints, arguments, np.int32)

    def fence_registers(self, value):
        self.shared.view(np.float32)[: self.config.threads] = value

    def tile(self):
        return types.SimpleNamespace(index=lambda i: types.SimpleNamespace(store=self.fence_registers))
