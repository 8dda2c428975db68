"""wgmma as PTX: each register of sums and of operand A is a separate value of the kernel.

The sums of 64 pixels x `outputs` take outputs / 2 registers of a thread. Register 4 j + 2 r + e is column 8 j + 2 q + e of the
r-th of the thread's two rows (q = lane % 4). Operand A is 4 registers for each k32 step: register 4 step + 2 half + r is row r,
and four columns of K from 32 step + 16 half + 4 q on. Source: PTX ISA, wgmma. Triton's wgmma computes each weight address anew
in six instructions, and does not support unsigned codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.gluon import asm, gl, gluon, ptx, run

_SWIZZLE = {32: 3, 64: 2, 128: 1}
"""Swizzle modes of a descriptor by bytes of a row of weights."""


@dataclass(frozen=True)
class ThreadProduct:
    """Products with weight tiles [outputs, row_bytes], which start at byte `weights` of shared memory. `unsigned`: operand A is
    unsigned."""

    outputs: int
    row_bytes: int
    unsigned: bool
    weights: int
    base = "{ .reg .b32 at; mov.u32 at, global_smem; shr.u32 at, at, 4; and.b32 $0, at, 0x3FFF; }"
    """PTX that computes in $0 the base of all weight descriptors, from the start of shared memory; $1 is unused."""

    @property
    def sums(self) -> int:
        return self.outputs // 2

    @property
    def w_tile_bytes(self) -> int:
        return self.outputs * self.row_bytes

    def start(self, w_tile: int, steps: int, adds: bool, commits: bool = True) -> str:
        """PTX that starts the product of operand A and `steps` k32 steps of the weight tiles from tile `w_tile` on. The sums in
        $0.. are overwritten or, if `adds`, added to. See `constraints`."""
        first = self.sums * (2 if adds else 1)
        base = f"${first + 4 * steps}"
        sums = ", ".join(f"${i}" for i in range(self.sums))
        high = _SWIZZLE[self.row_bytes] << 30 | 8 * self.row_bytes // 16
        kind = "u8" if self.unsigned else "s8"
        lines = [".reg .b64 w; .reg .b32 low; .reg .pred add; wgmma.fence.sync.aligned;"]
        for step in range(steps):
            rows, within = divmod(32 * step, self.row_bytes)
            offset = self.weights + (w_tile + rows) * self.w_tile_bytes + within
            a = ", ".join(f"${first + 4 * step + i}" for i in range(4))
            lines.append(f"add.u32 low, {base}, {offset // 16}; mov.b64 w, {{low, 0x{high:08x}}};")
            lines.append(f"setp.ne.b32 add, {int(adds or step > 0)}, 0;")
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{self.outputs}k32.s32.{kind}.s8 {{{sums}}}, {{{a}}}, w, add;"
            )  # fmt: skip
        if commits:
            lines.append("wgmma.commit_group.sync.aligned;")
        return "{\n" + "\n".join(lines) + "\n}"

    def constraints(self, steps: int, adds: bool) -> str:
        """Constraints of `start`. Outputs: the sums. Inputs: if `adds`, the previous sums; operand A; the output of `base`."""
        return ",".join(
            ["=&r"] * self.sums + [str(i) for i in range(self.sums)] * adds + ["r"] * (4 * steps + 1)
        )  # fmt: skip


@gluon.constexpr_function
def thread_words(count):
    """Result types for `count` integer registers."""
    return (gl.int32,) * count


@gluon.constexpr_function
def thread_floats(count):
    """Result types for `count` float registers."""
    return (gl.float32,) * count


@gluon.constexpr_function
def fence_asm(count):
    """PTX of a register fence for $1 to $count: stores that are only executed if the next operand is negative, which it never
    is. See parts/operand.py."""
    last = f"${count + 1}"
    stores = [
        f"@p st.shared.v4.b32 [{last}+{4 * i}], {{{', '.join(f'${1 + i + j}' for j in range(4))}}};" for i in range(0, count, 4)
    ]
    return f"{{ .reg .pred p; setp.eq.s32 p, {last}, -1;\n" + "\n".join(stores) + "\nmov.b32 $0, 0; }"


@gluon.constexpr_function
def fence_constraints(count):
    """Constraints of `fence_asm`."""
    return "=r" + ",r" * (count + 1)


@gluon.constexpr_function
def shared_asm(offset):
    """PTX that loads 16 bytes of shared memory at address $4 + offset into $0 to $3."""
    return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"


@gluon.constexpr_function
def load_asm(offset, words):
    """PTX that loads `words` words at address $words + offset. They are zeros if the operand after the address is 0."""
    to = ", ".join(f"${i}" for i in range(words))
    clear = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
    return (
        f"{{ .reg .pred p; setp.ne.s32 p, ${words + 1}, 0; {clear}\n@p ld.global.v{words}.b32 {{{to}}}, [${words}+{offset}]; }}"
    )


@gluon.constexpr_function
def load_constraints(words):
    """Constraints of `load_asm`."""
    return ",".join(["=&r"] * words + ["l", "r"])


@gluon.constexpr_function
def store_asm(offset, words):
    """PTX that stores $1 to $words at address $(words + 1) + offset, if the operand after the address is not 0."""
    what = ", ".join(f"${1 + i}" for i in range(words))
    return (
        f"{{ .reg .pred p; setp.ne.s32 p, ${words + 2}, 0; mov.b32 $0, 0;\n"
        f"@p st.global.v{words}.b32 [${words + 1}+{offset}], {{{what}}}; }}"
    )


@gluon.constexpr_function
def store_constraints(words):
    """Constraints of `store_asm`."""
    return "=r" + ",r" * words + ",l,r"


@gluon.constexpr_function
def wait_asm(later):
    """PTX that waits until all but the `later` youngest products are complete."""
    return f"wgmma.wait_group.sync.aligned {later};"


@gluon.constexpr_function
def wait_constraints(count):
    """Constraints of `wait_asm`, whose outputs are its inputs, the sums."""
    return ",".join(["=r"] * count + [str(i) for i in range(count)])


@gluon.jit
def start(sums, operand, base, first: gl.constexpr, steps: gl.constexpr, adds: gl.constexpr, P: gl.constexpr):
    """Starts a product of `steps` k32 steps, from weight tile `first` on."""
    inputs = operand + (base,)
    if adds:
        inputs = sums + inputs
    return asm(ptx(P.start, first, steps, adds), ptx(P.constraints, steps, adds), inputs, thread_words(P.sums))


@gluon.jit
def wait(sums, later: gl.constexpr, count: gl.constexpr):
    """Waits until at most `later` younger products are unfinished; returns the `count` registers of sums."""
    return asm(wait_asm(later), wait_constraints(count), sums, thread_words(count))


@gluon.jit
def fence_registers(registers, turn, count: gl.constexpr):
    """Register fence: operand A is not overwritten before this point. `turn` must be a value that is never negative, but that
    the compiler cannot prove to be so."""
    run(fence_asm(count), fence_constraints(count), registers + (turn,))


@gluon.jit
def shared_floats(at, offset: gl.constexpr):
    """Loads four floats at address `at` + offset of shared memory."""
    return asm(shared_asm(offset), "=f,=f,=f,=f,r", (at,), thread_floats(4))


@gluon.jit
def load_words(at, exists, offset: gl.constexpr, count: gl.constexpr):
    """Loads `count` words of global memory from `at` + `offset` bytes on; zeros where `exists` is 0."""
    return asm(load_asm(offset, count), load_constraints(count), (at, exists), thread_words(count))


@gluon.jit
def store_words(at, words, exists, offset: gl.constexpr, count: gl.constexpr):
    """Stores `count` words at `at` + `offset` bytes, where `exists` is not 0."""
    run(store_asm(offset, count), store_constraints(count), words + (at, exists))
