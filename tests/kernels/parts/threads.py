"""Runs the PTX of kernels/parts in NumPy, one instruction at a time for all threads. A register is a uint32 array, one element
per thread.
"""

from __future__ import annotations

import re

import numpy as np
import torch

from lowbit.kernels.reference.conv import fma
from tests.hardware.emulate import ldmatrix


def float32(bits):
    return bits.view(np.float32)


def bits_of(values):
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def rounded(x):
    whole = np.clip(np.rint(float32(x).astype(np.float64)), -(2**31), 2**31 - 1)
    return whole.astype(np.int64).astype(np.int32).view(np.uint32)


def packed(a, b, c, low, high):
    byte = [np.clip(x.view(np.int32).astype(np.int64), low, high).astype(np.uint32) & 255 for x in (a, b)]
    return byte[0] << 8 | byte[1] | c << 16


def fused(a, b, c):
    return bits_of(fma(*(torch.from_numpy(float32(x).copy()) for x in (a, b, c))).numpy())


def looked_up(a, b, c, table):
    found = np.zeros_like(a)
    for i in range(8):
        if table[0] >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def permuted(a, b, selector):
    """prmt: a hex digit of the selector chooses each byte; with 8 added, the byte's sign is replicated."""
    found = np.zeros_like(a)
    for byte in range(4):
        digit = int(selector[0]) >> 4 * byte & 15
        taken = (b if digit & 4 else a) >> np.uint32(8 * (digit & 3)) & np.uint32(255)
        taken = np.where(taken >> 7, 255, 0).astype(np.uint32) if digit & 8 else taken
        found |= taken << np.uint32(8 * byte)
    return found


def halves(*words):
    return [np.ascontiguousarray(word).view(np.float16).reshape(-1, 2).astype(np.float64) for word in words]


def words_of(values):
    """float64 values rounded once to fp16, as words. Sums and products of fp16 values are (nearly) exact in float64."""
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32).reshape(-1)


def halves_added(a, b):
    return words_of(sum(halves(a, b)))


def halves_fused(a, b, c):
    x, y, z = halves(a, b, c)
    return words_of(x * y + z)


RUN = {
    "cvt.rn.f32.s32": lambda a: bits_of(a.view(np.int32).astype(np.float32)),
    "fma.rn.f32": fused,
    "mul.rn.f32": lambda a, b: bits_of(float32(a) * float32(b)),
    "cvt.rni.s32.f32": rounded,
    "cvt.pack.sat.u8.s32.b32": lambda a, b, c: packed(a, b, c, 0, 255),
    "cvt.pack.sat.s8.s32.b32": lambda a, b, c: packed(a, b, c, -128, 127),
    "cvt.f32.f16": lambda a: bits_of(a.astype(np.uint16).view(np.float16).astype(np.float32)),
    "add.rn.f16x2": halves_added,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "add": lambda a, b: a + b,
    "shfl.sync.idx.b32": lambda a, lane, *_: np.take_along_axis(a.reshape(-1, 32), lane.reshape(-1, 32), 1).reshape(-1),
    "shfl.sync.bfly.b32": lambda a, mask, *_: a.reshape(-1, 32)[:, np.arange(32) ^ mask[0]].reshape(-1),
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "bfe.u32": lambda a, start, size: a >> start & (np.uint32(1) << size) - np.uint32(1),
    "setp.ne.s32": lambda a, b: (a != b).astype(np.uint32),
    "selp.b32": lambda a, b, p: np.where(p != 0, a, b),
    "mov": lambda a: a,
    "setp.lt.s32": lambda a, b: (a.view(np.int32) < b.view(np.int32)).astype(np.uint32),
    "min.s32": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mad.wide.s32": lambda a, b, c: a * b + c,  # addresses here have 32 bits
    "mul.wide.s32": lambda a, b: a * b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "not.pred": lambda p: 1 - p,
    "setp.lt.and.s32": lambda a, b, p: (a.view(np.int32) < b.view(np.int32)) & p,
    "setp.ne.and.s32": lambda a, b, p: (a != b) & p,
    "setp.gt.and.s32": lambda a, b, p: (a.view(np.int32) > b.view(np.int32)) & p,
    "setp.eq.s32": lambda a, b: (a == b).astype(np.uint32),
    "setp.le.s32": lambda a, b: (a.view(np.int32) <= b.view(np.int32)).astype(np.uint32),
    "setp.gt.s32": lambda a, b: (a.view(np.int32) > b.view(np.int32)).astype(np.uint32),
    "add.f32": lambda a, b: bits_of(float32(a) + float32(b)),
    "lop3.b32": looked_up,
    "prmt.b32": permuted,
    "fma.rn.f16x2": halves_fused,
    "mul.rn.f16x2": lambda a, b: halves_fused(a, b, np.full_like(a, 0x80008000)),
    "sub.f16x2": lambda a, b: halves_added(a, b ^ np.uint32(0x80008000)),
    "sub.rn.f16x2": lambda a, b: halves_added(a, b ^ np.uint32(0x80008000)),
}


WAITS = ("cp.async.commit_group", "cp.async.wait_group", "bar.warp.sync", "griddepcontrol.", "prefetch.")
"""Instructions that do nothing here. Waits and barriers are unnecessary, since instructions run one at a time; prefetches
change no values."""


def run(text, inputs, outputs, shared=None, start=0, memory=None, copies=None):
    """Runs PTX on the uint32 arrays `inputs` and returns `outputs` words. `shared` holds the bytes of shared memory from
    address `start` (`global_smem`) on, `memory` those of global memory. If `copies` is given, cp.async appends (destination,
    source, bytes read, active threads) to it instead of copying.
    """
    threads = len(inputs[0])
    registers = {f"${outputs + i}": np.asarray(value, dtype=np.uint32) for i, value in enumerate(inputs)}
    registers["global_smem"] = np.full(threads, start, dtype=np.uint32)
    predicates: set[str] = set()

    def value(name):
        if name in registers:
            return registers[name]
        return np.full(threads, int(name[2:], 16) if name.startswith("0f") else int(name, 0), dtype=np.uint32)

    for line in re.split(r"[;\n]+", text.strip()[1:-1] if text.strip().startswith("{") else text):
        line, where = line.strip(), slice(None)
        if line.startswith("@"):
            predicate, _, line = line[1:].partition(" ")
            where = np.flatnonzero(registers[predicate])
        name, _, rest = line.partition(" ")
        if line.startswith(".reg .pred "):
            predicates |= {one.strip() for one in line.removeprefix(".reg .pred ").split(",")}
        if not name or name == ".reg" or line.startswith(WAITS):
            continue
        if name.startswith("cp.async"):
            to, source, size, *read = [part.strip(" []") for part in rest.split(",")]
            (to, to_offset), (source, offset) = ((*part.split("+"), 0)[:2] for part in (to, source))
            if read and read[0] in predicates:  # ignore-src: threads where it is set write zeros
                read = np.where(value(read[0]) != 0, 0, int(size)).astype(np.uint32)
            else:
                read = value(read[0]) if read else np.full(threads, int(size), dtype=np.uint32)
            if copies is not None:
                active = np.zeros(threads, dtype=bool)
                active[where] = True
                copies.append((value(to) + np.uint32(to_offset), value(source) + np.uint32(offset), read, active))
                continue
            for lane in np.arange(threads)[where]:
                at, begin = int(value(to)[lane]) + int(to_offset) - start, int(value(source)[lane]) + int(offset)
                shared[at : at + int(size)] = 0
                shared[at : at + read[lane]] = memory[begin : begin + read[lane]]
        elif name.startswith("ld.global"):
            *words, base, offset = [part.strip() for part in re.split(r"[\[\]{},+]", rest) if part.strip()]
            places = (value(base) + np.uint32(offset))[where].astype(np.int64) // 4
            for i, register in enumerate(words):
                loaded = value(register).copy()
                loaded[where] = memory[: len(memory) // 4 * 4].view(np.uint32)[places + i]
                registers[register] = loaded
        elif name.startswith("ld.shared") or name.startswith("st.shared"):
            words = [part.strip() for part in re.split(r"[\[\]{},]", rest) if part.strip()]
            at = words.pop(-1 if name.startswith("ld") else 0)
            base, _, offset = at.partition("+")
            of_shared, place = shared.view(np.uint32), (value(base) + int(offset or 0) - start) // 4
            for i, register in enumerate(words):
                if name.startswith("ld"):
                    registers[register] = of_shared[place + i]
                else:
                    of_shared[(place + i)[where]] = value(register)[where]
        elif name.startswith("ldmatrix"):
            to, base, offset = re.fullmatch(r"\{(.*)\}, \[(\$?\w+)(?:\+(\d+))?\]", rest).groups()
            loaded = [
                ldmatrix(shared, (value(base) + int(offset or 0) - start)[w : w + 32].reshape(4, 8))
                for w in range(0, threads, 32)
            ]
            for i, register in enumerate(to.split(", ")):
                registers[register] = np.concatenate([words[:, i] for words in loaded])
        elif rest.startswith("{h0, h1}"):
            word = value(rest.split("},")[1].strip())
            registers["h0"], registers["h1"] = word & 0xFFFF, word >> 16
        else:
            to, *read = [part.strip() for part in rest.split(",")]
            registers[to] = RUN[name if name in RUN else name.split(".")[0]](*map(value, read))
    return [registers[f"${i}"] for i in range(outputs)]
