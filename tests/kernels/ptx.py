"""Executes a kernel's PTX without a GPU, in NumPy: all threads of a block at once, block after block.

It knows the instructions to which the Gluon kernels of this library compile, and raises NotImplementedError for others. Every
access to memory is checked: global addresses must lie in the tensors of the call, shared addresses in the block's memory.
Threads run in lockstep, so branches must be uniform, and missing barriers are not found. Sums of products of tensor cores are
exact and rounded once. Source of the semantics: PTX ISA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch

from lowbit.hardware.ptx import Lop3, Prmt

SHARED = 1 << 24
"""Address of shared memory in the generic address space of the emulator."""


def _dtype(kind: str) -> np.dtype:
    """NumPy's dtype of a PTX type."""
    if kind == "pred":
        return np.dtype(bool)
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return np.dtype(f"{letter}{int(kind[1:]) // 8}")


@dataclass
class Instruction:
    guard: str | None
    negated: bool
    name: str
    parts: list[str]
    operands: list


def _operands(text: str) -> list:
    """Operands at the top level: names, lists of names for vectors, ("memory", base, offset) for addresses."""
    found, depth, current = [], 0, ""
    for char in text + ",":
        if char == "," and depth == 0:
            if current.strip():
                found.append(current.strip())
            current = ""
            continue
        depth += (char in "{[") - (char in "}]")
        current += char
    made: list = []
    for operand in found:
        if operand[0] == "{":
            made.append([each.strip() for each in operand[1:-1].split(",")])
        elif operand[0] == "[":
            base, _, offset = operand[1:-1].replace(" ", "").partition("+")
            made.append(("memory", base, int(offset or "0", 0)))
        else:
            made.append(operand)
    return made


def parsed(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of the only kernel, with registers of inner scopes renamed, and the index of each label."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :].split("-- End function")[0])
    body = body[body.index("\n{") + 2 :]
    body = re.sub(r"^\s*\.(loc|file|pragma|section)\b[^\n]*\n", "\n", body, flags=re.M)
    instructions, labels, scopes, at, count = [], {}, [{}], 0, 0
    pattern = re.compile(r"\s*(?:(\$\w+):|([{}])|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)")
    while match := pattern.match(body, at):
        at = match.end()
        if match[1]:
            labels[match[1]] = len(instructions)
        elif match[2]:
            if match[2] == "{":
                scopes.append({})
            else:
                scopes.pop()
        else:
            text = match[3].strip()
            if text.startswith(".reg"):
                for name in text.split(None, 2)[2].split(","):
                    stem, _, size = name.strip().partition("<")
                    names = [f"{stem}{i}" for i in range(int(size[:-1]))] if size else [stem]
                    for each in names if not stem.startswith("%") else []:
                        count += 1
                        scopes[-1][each] = f"{each}@{count}"
                continue
            known: dict[str, str] = {}
            for scope in scopes:
                known |= scope
            guard = re.match(r"@(!?)([%\w]+)\s+", text)
            rest = text[guard.end() :] if guard else text
            name, _, operands = rest.partition(" ") if " " in rest else rest.partition("\t")
            name, operands = re.match(r"([\w.:]+)\s*(.*)", rest, re.S).groups()

            def renamed(operand, known=known):
                if isinstance(operand, list):
                    return [known.get(each, each) for each in operand]
                if isinstance(operand, tuple):
                    return (operand[0], known.get(operand[1], operand[1]), operand[2])
                return known.get(operand, operand)

            made = [renamed(each) for each in _operands(operands)]
            of_guard = known.get(guard[2], guard[2]) if guard else None
            instructions.append(Instruction(of_guard, bool(guard and guard[1]), name, name.split("."), made))
    assert not body[at:].strip(), body[at : at + 200]
    return instructions, labels


class Memory:
    """The tensors of a call, by their addresses."""

    def __init__(self, tensors: list[torch.Tensor], shared_bytes: int) -> None:
        spans = {t.data_ptr(): t for t in tensors if t.numel()}
        self.spans = sorted(
            (at, t.untyped_storage().nbytes() - t.storage_offset() * t.element_size(), t) for at, t in spans.items()
        )
        self.bytes = [t.detach().view(-1).view(torch.uint8).numpy() if t.is_contiguous() else None for _, _, t in self.spans]
        self.starts = np.array([at for at, _, _ in self.spans], dtype=np.int64)
        self.shared = np.zeros(shared_bytes, np.uint8)

    def _place(self, address: int, size: int) -> tuple[np.ndarray, int]:
        if SHARED <= address < SHARED + (1 << 20):
            memory, place = self.shared, address - SHARED
        else:
            i = int(np.searchsorted(self.starts, address, side="right")) - 1
            assert i >= 0, f"address {address:#x} is in no tensor"
            memory, place = self.bytes[i], address - int(self.starts[i])
        assert 0 <= place <= len(memory) - size and address % size == 0, f"address {address:#x}, {size} bytes, is in no tensor"
        return memory, place

    def load(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        """Bytes [threads, size]; zeros where the mask is False."""
        out = np.zeros((len(addresses), size), np.uint8)
        for i in np.flatnonzero(mask):
            memory, place = self._place(int(addresses[i]), size)
            out[i] = memory[place : place + size]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        for i in np.flatnonzero(mask):
            memory, place = self._place(int(addresses[i]), values.shape[1])
            memory[place : place + values.shape[1]] = values[i]


class Block:
    """One block of threads."""

    def __init__(self, code, labels, parameters, memory, threads, ids, grid) -> None:
        self.code, self.labels, self.parameters, self.memory = code, labels, parameters, memory
        self.threads, self.ids, self.grid = threads, ids, grid
        self.registers: dict[str, np.ndarray] = {}
        self.all = np.ones(threads, bool)

    # ---- operands

    def bits(self, operand) -> np.ndarray:
        """The raw bits of an operand, uint64 [threads]."""
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("%tid.x"):
            return np.arange(self.threads, dtype=np.uint64)
        if operand.startswith("%ctaid.") or operand.startswith("%nctaid."):
            value = (self.ids if operand.startswith("%c") else self.grid)["xyz".index(operand[-1])]
        elif operand == "global_smem":
            value = SHARED
        elif operand.startswith(("0f", "0F", "0d", "0D")):
            value = int(operand[2:], 16)
        elif re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", operand):
            value = int(operand.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF
        else:
            value = 0  # the register has not been written yet
        return np.full(self.threads, value, np.uint64)

    def value(self, operand, kind: str) -> np.ndarray:
        if kind == "pred":
            return self.bits(operand).astype(bool)
        dtype = _dtype(kind)
        return self.bits(operand).astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)

    def write(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        value = np.broadcast_to(np.asarray(value), (self.threads,))
        if value.dtype == bool:
            bits = value.astype(np.uint64)
        else:
            bits = np.ascontiguousarray(value).view(np.dtype(f"u{value.dtype.itemsize}")).astype(np.uint64)
        if not mask.all():
            bits = np.where(mask, bits, self.bits(name))
        self.registers[name] = bits

    def address(self, operand) -> np.ndarray:
        _, base, offset = operand
        return self.bits(base).astype(np.int64) + offset

    # ---- execution

    def run(self) -> None:
        at = 0
        with np.errstate(all="ignore"):
            while at < len(self.code):
                step = self.code[at]
                mask = self.all
                if step.guard is not None:
                    mask = self.value(step.guard, "pred") ^ step.negated
                if step.parts[0] == "ret":
                    assert mask.all() or not mask.any()
                    if mask.all():
                        return
                if step.parts[0] == "bra":
                    assert mask.all() or not mask.any(), "a branch is not uniform"
                    at = self.labels[step.operands[0]] if mask.all() else at + 1
                    continue
                if not mask.any() and step.guard is not None:
                    at += 1
                    continue
                handler = getattr(self, "_" + step.parts[0], None)
                if handler is None:
                    raise NotImplementedError(f"{step.name} {step.operands}")
                handler(step, mask)
                at += 1

    def _simple(self, step, mask, function, kind=None, to=None):
        kind = kind or step.parts[-1]
        dest, *sources = step.operands
        result = function(*(self.value(each, kind) for each in sources))
        self.write(dest, np.asarray(result).astype(_dtype(to or kind)), mask)

    def _add(self, step, mask):
        if step.parts[-1] == "s16x2":
            a, b = (self.value(each, "b32") for each in step.operands[1:])
            low, high = (a + b) & np.uint32(0xFFFF), ((a >> np.uint32(16)) + (b >> np.uint32(16))) << np.uint32(16)
            return self.write(step.operands[0], low | high, mask)
        return self._simple(step, mask, np.add)

    def _sub(self, step, mask):
        self._simple(step, mask, np.subtract)

    def _neg(self, step, mask):
        self._simple(step, mask, np.negative)

    def _abs(self, step, mask):
        self._simple(step, mask, np.abs)

    def _min(self, step, mask):
        self._simple(step, mask, np.fmin if step.parts[-1][0] == "f" else np.minimum)

    def _max(self, step, mask):
        self._simple(step, mask, np.fmax if step.parts[-1][0] == "f" else np.maximum)

    def _and(self, step, mask):
        self._simple(step, mask, np.bitwise_and if step.parts[-1] != "pred" else np.logical_and)

    def _or(self, step, mask):
        self._simple(step, mask, np.bitwise_or if step.parts[-1] != "pred" else np.logical_or)

    def _xor(self, step, mask):
        self._simple(step, mask, np.bitwise_xor if step.parts[-1] != "pred" else np.logical_xor)

    def _not(self, step, mask):
        self._simple(step, mask, np.invert if step.parts[-1] != "pred" else np.logical_not)

    def _shl(self, step, mask):
        kind = step.parts[-1]
        a, b = self.value(step.operands[1], kind), self.value(step.operands[2], "u32")
        self.write(step.operands[0], np.left_shift(a, b.astype(a.dtype)), mask)

    def _shr(self, step, mask):
        kind = step.parts[-1]
        a, b = self.value(step.operands[1], kind), self.value(step.operands[2], "u32")
        self.write(step.operands[0], np.right_shift(a, b.astype(a.dtype)), mask)

    def _bfe(self, step, mask):
        kind = step.parts[-1]
        a, start, length = self.value(step.operands[1], kind), *(self.value(each, "u32") for each in step.operands[2:])
        left = (32 - start - length).astype(a.dtype)
        self.write(step.operands[0], (a << left) >> (32 - length).astype(a.dtype), mask)

    def _mul(self, step, mask):
        kind = step.parts[-1]
        if "wide" in step.parts:
            a, b = (self.value(each, kind).astype(_dtype(_wider(kind))) for each in step.operands[1:])
            self.write(step.operands[0], a * b, mask)
        elif "hi" in step.parts:
            a, b = (self.value(each, kind).astype(_dtype(_wider(kind))) for each in step.operands[1:])
            self.write(step.operands[0], (a * b >> _dtype(kind).itemsize * 8).astype(_dtype(kind)), mask)
        else:
            self._simple(step, mask, np.multiply)

    def _mad(self, step, mask):
        kind, dest = step.parts[-1], step.operands[0]
        wide = _wider(kind) if "wide" in step.parts else kind
        a, b = (self.value(each, kind).astype(_dtype(wide)) for each in step.operands[1:3])
        self.write(dest, a * b + self.value(step.operands[3], wide), mask)

    def _fma(self, step, mask):
        kind = step.parts[-1]
        a, b, c = (self.value(each, kind).astype(np.float64) for each in step.operands[1:])
        self.write(step.operands[0], (a * b + c).astype(_dtype(kind)), mask)

    def _div(self, step, mask):
        if step.parts[-1][0] == "f":
            return self._simple(step, mask, np.divide)
        a, b = (self.value(each, step.parts[-1]).astype(np.int64) for each in step.operands[1:])
        quotient = np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))
        return self.write(step.operands[0], quotient.astype(_dtype(step.parts[-1])), mask)

    def _rem(self, step, mask):
        a, b = (self.value(each, step.parts[-1]).astype(np.int64) for each in step.operands[1:])
        self.write(step.operands[0], np.fmod(a, np.where(b == 0, 1, b)).astype(_dtype(step.parts[-1])), mask)

    def _rsqrt(self, step, mask):
        self._simple(step, mask, lambda x: 1 / np.sqrt(x))

    def _ex2(self, step, mask):
        self._simple(step, mask, np.exp2)

    def _lg2(self, step, mask):
        self._simple(step, mask, np.log2)

    def _lop3(self, step, mask):
        dest, *sources, table = step.operands
        values = [self.value(each, "u32") for each in sources]
        self.write(dest, Lop3("d", "a", "b", "c", int(table.rstrip("U"), 0)).evaluate(*values), mask)

    def _prmt(self, step, mask):
        dest, a, b, selector = step.operands
        self.write(
            dest, Prmt("d", "a", "b", int(selector.rstrip("U"), 0)).evaluate(self.value(a, "u32"), self.value(b, "u32")), mask
        )

    def _selp(self, step, mask):
        dest, a, b, which = step.operands
        kind = step.parts[-1]
        self.write(dest, np.where(self.value(which, "pred"), self.value(a, kind), self.value(b, kind)), mask)

    def _setp(self, step, mask):
        operation, kind = step.parts[1], step.parts[-1]
        a, b = (self.value(each, kind) for each in step.operands[1:3])
        compare = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }
        if operation.endswith("u") and operation[:-1] in compare:
            result = compare[operation[:-1]](a, b) | np.isnan(a) | np.isnan(b)
        elif operation in ("num", "nan"):
            result = (np.isnan(a) | np.isnan(b)) ^ (operation == "num")
        else:
            result = compare[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(operation, operation)](a, b)
        self.write(step.operands[0], result, mask)

    def _mov(self, step, mask):
        dest, source = step.operands
        kind = step.parts[-1]
        if isinstance(dest, list):
            bits, width = self.bits(source), {"b32": 16, "b64": 32}[kind]
            for i, name in enumerate(dest):
                self.write(name, (bits >> np.uint64(i * width)).astype(f"u{width // 8}"), mask)
        elif isinstance(source, list):
            width = int(kind[1:]) // len(source)
            total = sum(
                self.value(each, f"u{width}").astype(np.uint64) << np.uint64(i * width) for i, each in enumerate(source)
            )
            self.write(dest, total.astype(_dtype("u" + kind[1:])), mask)
        else:
            self.write(dest, self.value(source, kind), mask)

    def _cvt(self, step, mask):
        to, kind = step.parts[-2:]
        if to in ("f16x2", "bf16x2"):
            high, low = (_half_bits(self.value(each, "f32"), to[:-2]).astype(np.uint32) for each in step.operands[1:])
            return self.write(step.operands[0], low | high << np.uint32(16), mask)
        if to == "bf16":
            return self.write(step.operands[0], _half_bits(self.value(step.operands[1], kind), to), mask)
        if kind == "bf16":
            return self.write(step.operands[0], self.value(step.operands[1], "u16").astype(np.uint32) << np.uint32(16), mask)
        value = self.value(step.operands[1], kind)
        return self.write(step.operands[0], value.astype(_dtype(to)), mask)

    # ---- memory

    def _ld(self, step, mask):
        dest, source = step.operands
        kind = step.parts[-1]
        if step.parts[1] == "param":
            return self.write(dest, np.full(self.threads, self.parameters[int(source[1].rsplit("_", 1)[1])], np.uint64), mask)
        names = dest if isinstance(dest, list) else [dest]
        size = int(kind[1:]) // 8
        data = self.memory.load(self.address(source), size * len(names), mask)
        for i, name in enumerate(names):
            self.write(name, np.ascontiguousarray(data[:, size * i : size * (i + 1)]).view(f"u{size}")[:, 0], mask)
        return None

    def _st(self, step, mask):
        target, source = step.operands
        kind = step.parts[-1]
        names = source if isinstance(source, list) else [source]
        parts = [self.value(name, "u" + kind[1:])[:, None].view(np.uint8) for name in names]
        self.memory.store(self.address(target), np.concatenate([np.ascontiguousarray(p) for p in parts], axis=1), mask)

    def _atom(self, step, mask):
        assert step.parts[-2:] == ["add", "u32"]
        dest, target, source = step.operands
        addresses, amounts = self.address(target), self.value(source, "u32")
        old = np.zeros(self.threads, np.uint32)
        for i in np.flatnonzero(mask):
            old[i] = self.memory.load(addresses[i : i + 1], 4, np.ones(1, bool)).view(np.uint32)[0, 0]
            new = (old[i : i + 1] + amounts[i : i + 1]).view(np.uint8)[None]
            self.memory.store(addresses[i : i + 1], new, np.ones(1, bool))
        self.write(dest, old, mask)

    # ---- warps

    def _shfl(self, step, mask):
        dest, source, apart, *_ = step.operands
        assert step.parts[2] == "bfly" and mask.all()
        lanes = self.value(apart, "u32")
        assert (lanes == lanes[0]).all() and lanes[0] < 32
        self.write(dest, self.value(source, "u32")[np.arange(self.threads) ^ int(lanes[0])], mask)

    def _redux(self, step, mask):
        assert step.parts[2] == "max" and mask.all()
        dest, source, _ = step.operands
        self.write(dest, np.repeat(self.value(source, step.parts[-1]).reshape(-1, 32).max(axis=1), 32), mask)

    def _prefetch(self, step, mask):
        self.memory.load(self.address(step.operands[0]), 16, mask)  # it must be in a tensor

    def _halves(self, names) -> np.ndarray:
        """Halves [warps, lanes, registers, 2] as float64."""
        words = np.stack([self.value(name, "u32") for name in names], axis=1)
        return np.ascontiguousarray(words).view(np.float16).reshape(-1, 32, len(names), 2).astype(np.float64)

    def _mma(self, step, mask):
        assert "m16n8k16" in step.parts and mask.all() and step.parts[-4:] == ["f32", "f16", "f16", "f32"]
        d, a, b, c = step.operands
        of_a, of_b = self._halves(a), self._halves(b)
        warps, g, t = len(of_a), np.arange(32) // 4, np.arange(32) % 4
        full_a, full_b = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for half in (0, 1):
            for register in range(4):
                full_a[:, g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)] = of_a[:, :, register, half]
            for register in range(2):
                full_b[:, 2 * t + half + 8 * register, g] = of_b[:, :, register, half]
        product = full_a @ full_b
        for i, name in enumerate(d):
            own = product[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1)
            self.write(name, (own + self.value(c[i], "f32")).astype(np.float32), mask)

    def _movmatrix(self, step, mask):
        assert "trans" in step.parts and mask.all()
        dest, source = step.operands
        halves = self.value(source, "u32").view(np.uint16).reshape(-1, 8, 8)  # warp, row, column
        self.write(dest, np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1).view(np.uint32), mask)

    def _stmatrix(self, step, mask):
        assert "x1" in step.parts and "trans" not in step.parts
        target, (source,) = step.operands
        rows = self.value(source, "u32").reshape(-1, 8, 4)  # warp, row, word
        addresses = self.address(target).reshape(-1, 32)[:, :8]
        self.memory.store(
            addresses.reshape(-1), np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16), np.ones(rows.shape[0] * 8, bool)
        )

    def _bar(self, step, mask):
        assert mask.all()

    def _griddepcontrol(self, step, mask):
        pass


def _half_bits(value: np.ndarray, kind: str) -> np.ndarray:
    """The bits of float32 values rounded to fp16 or bf16."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16)
    return torch.from_numpy(value.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _wider(kind: str) -> str:
    return kind[0] + str(2 * int(kind[1:]))


def execute(ptx: str, shared_bytes: int, arguments, grid, threads: int, order=None) -> None:
    """Runs a kernel. `arguments` are its tensors, integers and floats without constants, as the launch passes them; tensors on
    the CPU. Blocks run one after the other, in the order of `order`, a list of indices of blocks (default: x fastest)."""
    code, labels = parsed(ptx)
    given = [each for each in arguments if each is not None]
    memory = Memory([each for each in given if isinstance(each, torch.Tensor)], shared_bytes)
    parameters = [
        each.data_ptr()
        if isinstance(each, torch.Tensor)
        else each
        if isinstance(each, int)
        else int(np.float32(each).view(np.uint32))
        for each in given
    ]
    blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    for i in order if order is not None else range(len(blocks)):
        memory.shared[:] = 0xFF  # NaN
        Block(code, labels, parameters, memory, threads, blocks[i], grid).run()
