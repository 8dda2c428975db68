"""Executes the PTX of a persistent kernel without a GPU: all blocks at once, warp by warp, in a random order.

Warps of all blocks run for turns of random length, so that they access shared memory, barriers and polled words in many orders.
Bulk copies complete at random later times, some much later than others, and read their source only then. Memory is sequentially
consistent. A launch that stops making progress raises. tests/kernels/ptx.py executes the instructions that it has in common
with this file.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import numpy as np
import torch

from tests.kernels.ptx import Block, Memory, _half_bits, parsed

MOST_STEPS = 1 << 26
"""Number of instructions after which a launch counts as stuck."""

LATE = 0.05
"""Share of bulk copies that complete after all others in flight, a long time later."""


def with_unique_labels(ptx: str) -> str:
    """The PTX with the labels of inline assembly renamed, so that all are unique and begin with a dollar."""
    numbers = itertools.count()

    def renamed(block: re.Match) -> str:
        number = next(numbers)
        return re.sub(r"\b(AGAIN|CHECK|DONE)\b", rf"$L_{number}_\1", block[0])

    return re.sub(r"// begin inline asm.*?// end inline asm", renamed, ptx, flags=re.S)


class WarpMemory(Memory):
    """Memory whose accesses are made for all lanes together where they are in one tensor."""

    def _span(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the tensor and the indices of all bytes; None if the lanes access several tensors."""
        low, high = int(addresses.min()), int(addresses.max())
        memory, place = self._place(low, size)
        other, _ = self._place(high, size)
        assert not (addresses % size).any(), f"an address is no multiple of {size}"
        if memory is not other:
            return None
        return memory, (addresses - (low - place))[:, None] + np.arange(size)

    def load(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        out = np.zeros((len(addresses), size), np.uint8)
        if mask.any():
            found = self._span(addresses[mask], size)
            if found is None:
                return super().load(addresses, size, mask)
            memory, indices = found
            out[mask] = memory[indices]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        found = self._span(addresses[mask], values.shape[1]) if mask.any() else None
        if found is None:
            return super().store(addresses, values, mask)
        memory, indices = found
        memory[indices] = values[mask]
        return None


class Barrier:
    """An mbarrier: arrivals and bytes that are still due in its phase."""

    def __init__(self, count: int) -> None:
        self.count = self.due = count
        self.bytes = self.phase = 0

    def change(self, arrivals: int = 0, more_bytes: int = 0) -> None:
        self.due -= arrivals
        self.bytes += more_bytes
        assert self.due >= 0, "more arrivals than the barrier counts"
        if self.due == 0 and self.bytes == 0:
            self.due, self.phase = self.count, self.phase + 1


class ThreadBlock:
    """The state that the warps of a block share."""

    def __init__(self, memory: Memory, threads: int) -> None:
        self.memory, self.threads = memory, threads
        self.barriers: dict[int, Barrier] = {}
        self.arrived: dict[int, int] = {}
        self.released: dict[int, int] = {}
        self.copies: list[tuple[int, int, int, int]] = []
        self.late: tuple[int, int, int, int] | None = None

    def complete(self, choice: random.Random) -> None:
        """Picks one of the copies in flight and completes it. A late copy completes only once no other is in flight, and even
        then only by chance."""
        index = choice.randrange(len(self.copies))
        if self.late is None and choice.random() < LATE:
            self.late = self.copies[index]
        if self.copies[index] is self.late:
            if len(self.copies) > 1 or choice.random() < 1 - LATE:
                return
            self.late = None
        to, source, size, barrier = self.copies.pop(index)
        assert to % 16 == source % 16 == size % 16 == 0, "a bulk copy takes multiples of 16 bytes"
        every, steps = np.ones(size // 16, bool), 16 * np.arange(size // 16)
        self.memory.store(to + steps, self.memory.load(source + steps, 16, every), every)
        self.barriers[barrier].change(more_bytes=-size)


class Warp(Block):
    """A warp."""

    def __init__(self, code, labels, parameters, shared: ThreadBlock, first_thread: int, ids, grid) -> None:
        super().__init__(code, labels, parameters, shared.memory, 32, ids, grid)
        self.shared, self.first_thread = shared, first_thread
        self.constants: dict[str, np.ndarray] = {}

    def bits(self, operand) -> np.ndarray:
        if operand not in self.registers and operand.startswith(("%tid.x", "%laneid")):
            return np.arange(32, dtype=np.uint64) + np.uint64(self.first_thread if operand.startswith("%tid") else 0)
        if operand not in self.registers and operand not in self.constants and operand[0] in "-0123456789":
            self.constants[operand] = super().bits(operand)
        return self.constants[operand] if operand in self.constants else super().bits(operand)

    def steps(self) -> Iterator[bool]:
        """Executes the warp. Yields after each instruction: True if the warp repeats something, as it does while it waits."""
        at = 0
        while True:
            step = self.now = self.code[at]
            mask = self.all if step.guard is None else self.value(step.guard, "pred") ^ step.negated
            kind = step.parts[0]
            if kind == "ret":
                assert mask.all()
                return
            if kind == "bra":
                assert mask.all() or not mask.any(), "a branch is not uniform"
                target = self.labels[step.operands[0]] if mask.all() else at + 1
                yield target <= at
                at = target
                continue
            if kind == "brx":  # the second operand is a label, at which the list of targets is
                index, targets = step.operands
                at = self.labels[self.code[self.labels[targets]].operands[self.one(index)]]
                yield True
                continue
            if kind in ("bar", "barrier") and step.parts[1] == "sync":
                yield from self.synchronise(step)
            elif mask.any() and kind:
                handler = getattr(self, "_" + kind, None)
                if handler is None:
                    raise NotImplementedError(f"{step.name} {step.operands}")
                handler(step, mask)
                yield False
            at += 1

    def synchronise(self, step) -> Iterator[bool]:
        """Waits at a barrier of all threads, or of as many threads as the instruction states."""
        number = int(step.operands[0])
        count = int(step.operands[1]) if len(step.operands) > 1 else self.shared.threads
        turn = self.shared.released.get(number, 0)
        self.shared.arrived[number] = self.shared.arrived.get(number, 0) + 32
        if self.shared.arrived[number] == count:
            self.shared.arrived[number] = 0
            self.shared.released[number] = turn + 1
        while self.shared.released.get(number, 0) == turn:
            yield True

    def one(self, operand) -> int:
        values = self.bits(operand)
        assert (values == values[0]).all()
        return int(values[0])

    # ---- instructions that ptx.py does not know

    def _setmaxnreg(self, step, mask):
        pass

    def _fence(self, step, mask):
        pass

    def _prefetch(self, step, mask):
        pass

    def _bar(self, step, mask):
        assert step.parts[:3] == ["bar", "warp", "sync"]

    def _vote(self, step, mask):
        dest, source, _ = step.operands
        values = self.value(source, "pred")
        self.write(dest, np.full(32, values.any() if "any" in step.parts else values.all()), mask)

    def _redux(self, step, mask):
        function = {"max": np.max, "min": np.min}[step.parts[2]]
        self.write(step.operands[0], np.full(32, function(self.value(step.operands[1], step.parts[3]))), mask)

    def _shfl(self, step, mask):
        if step.parts[2] != "idx":
            return super()._shfl(step, mask)
        lanes = self.value(step.operands[2], "u32")
        return self.write(step.operands[0], self.value(step.operands[1], "u32")[lanes % 32], mask)

    def _setp(self, step, mask):
        if len(step.operands) == 4:  # setp.ne.and, setp.ne.or
            dest, a, b, also = step.operands
            others = self.value(also, "pred")
            super()._setp(type(step)(None, False, step.name, ["setp", step.parts[1], step.parts[-1]], [dest, a, b]), self.all)
            both = np.logical_or if "or" in step.parts else np.logical_and
            return self.write(dest, both(self.value(dest, "pred"), others), mask)
        return super()._setp(step, mask)

    def _sub(self, step, mask):
        if step.parts[-1].endswith("x2"):
            return self._halves_of(step, mask, lambda a, b: a - b)
        return super()._sub(step, mask)

    def _fma(self, step, mask):
        if step.parts[-1].endswith("x2"):
            return self._halves_of(step, mask, lambda a, b, c: a * b + c)
        return super()._fma(step, mask)

    def _halves_of(self, step, mask, function):
        """Two halves of each register, computed exactly and rounded once."""
        kind = step.parts[-1][:-2]
        words = [self.value(each, "u32") for each in step.operands[1:]]
        result = []
        for low in (True, False):
            bits = [(word if low else word >> np.uint32(16)) & np.uint32(0xFFFF) for word in words]
            if kind == "f16":
                values = [each.astype(np.uint16).view(np.float16).astype(np.float64) for each in bits]
            else:
                values = [(each << np.uint32(16)).view(np.float32).astype(np.float64) for each in bits]
            result.append(_half_bits(function(*values).astype(np.float32), kind).astype(np.uint32))
        return self.write(step.operands[0], result[0] | result[1] << np.uint32(16), mask)

    def _mul(self, step, mask):
        if step.parts[-1].endswith("x2"):
            return self._halves_of(step, mask, lambda a, b: a * b)
        if "hi" not in step.parts:
            return super()._mul(step, mask)
        kind = step.parts[-1]
        letter, bits = "i" if kind[0] == "s" else "u", int(kind[1:])
        a, b = (self.value(each, kind).astype(f"{letter}8") for each in step.operands[1:])
        return self.write(step.operands[0], ((a * b) >> np.asarray(bits, f"{letter}8")).astype(f"{letter}{bits // 8}"), mask)

    def _mbarrier(self, step, mask):
        name, barriers = step.parts[1], self.shared.barriers
        if name == "init":
            for address in set(self.address(step.operands[0])[mask]):
                barriers[int(address)] = Barrier(self.one(step.operands[1]))
        elif name in ("try_wait", "test_wait"):
            dest, place, parity = step.operands[:3]
            (address,) = set(self.address(place))
            self.write(dest, np.full(32, barriers[int(address)].phase % 2 != self.one(parity)), mask)
        else:
            for lane in np.flatnonzero(mask):
                bar = barriers[int(self.address(step.operands[1])[lane])]
                third = int(self.value(step.operands[2], "u32")[lane]) if len(step.operands) > 2 else 1
                bar.change(*((1, third) if "expect_tx" in step.parts else (third, 0)))

    def _cp(self, step, mask):
        to, source, size, barrier = step.operands
        for lane in np.flatnonzero(mask):
            self.shared.copies.append(
                (
                    int(self.address(to)[lane]), int(self.address(source)[lane]), int(self.value(size, "u32")[lane]),
                    int(self.address(barrier)[lane]),
                )
            )  # fmt: skip

    def _ldmatrix(self, step, mask):
        names, source = step.operands
        rows = self.memory.load(self.address(source), 16, self.all).view(np.uint32)  # lane, word
        lanes = np.arange(32)
        for i, name in enumerate(names):
            self.write(name, rows[8 * i + lanes // 4, lanes % 4], mask)

    def _mma(self, step, mask):
        if step.parts[-4:] == ["f32", "f16", "f16", "f32"]:
            return super()._mma(step, mask)
        assert step.parts[-4:] == ["f32", "bf16", "bf16", "f32"]
        halves = self._halves
        self._halves = self._bf16
        super()._mma(type(step)(None, False, step.name, [*step.parts[:-4], "f32", "f16", "f16", "f32"], step.operands), mask)
        self._halves = halves
        return None

    def _bf16(self, names) -> np.ndarray:
        words = np.stack([self.value(name, "u32") for name in names], axis=1)
        both = np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], axis=-1)
        return both.view(np.float32)[None].astype(np.float64)


def execute(
    ptx: str, shared_bytes: int, arguments, blocks: int, threads: int, seed: int = 0, longest: int = 400, others=()
) -> int:
    """Runs a kernel of `blocks` blocks of `threads` threads; returns the number of executed instructions. `arguments` are as in
    ptx.py. `others` are tensors whose addresses the kernel finds in memory. `longest` is the longest turn of a warp, in
    instructions."""
    code, labels = parsed(with_unique_labels(ptx))
    given = [each for each in arguments if each is not None]
    parameters = [
        each.data_ptr()
        if isinstance(each, torch.Tensor)
        else each
        if isinstance(each, int)
        else int(np.float32(each).view(np.uint32))
        for each in given
    ]
    choice, groups, running = random.Random(seed), [], []
    for block in range(blocks):
        memory = WarpMemory([each for each in (*given, *others) if isinstance(each, torch.Tensor)], shared_bytes)
        memory.shared[:] = 0xFF  # NaN
        group = ThreadBlock(memory, threads)
        groups.append(group)
        for first in range(0, threads, 32):
            warp = Warp(code, labels, parameters, group, first, (block, 0, 0), (blocks, 1, 1))
            running.append((group, warp, warp.steps()))
    done = 0
    with np.errstate(all="ignore"):
        while running:
            group, _, steps = running[choice.randrange(len(running))]
            for _ in range(choice.randrange(longest)):
                done += 1
                waits = next(steps, None)
                if waits is None:
                    running = [each for each in running if each[2] is not steps]
                if waits is not False:
                    break
            while group.copies and choice.random() < 0.5:
                group.complete(choice)
            if done > MOST_STEPS:
                where = [
                    f"block {warp.ids[0]}, thread {warp.first_thread}: {warp.now.name} {warp.now.operands}"
                    for _, warp, _ in running
                ]
                raise TimeoutError("the launch does not end:\n" + "\n".join(where))
    assert not any(group.copies for group in groups), "copies are in flight at the end"
    return done
