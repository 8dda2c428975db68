"""Device code of the microkernels: a conversion, or a step of products, repeated on registers (see loops.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.gluon import asm, barrier, gl, gluon, run, source_digest
from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.parts.operand import REGISTER_FENCE, REGISTERS

CLOCK = gl.constexpr("mov.u32 $0, %clock;")
HELD = gl.constexpr(",".join(["=r"] + ["r"] * (REGISTERS + 1)))


class Warps:
    """Layout of a block in the loops: one element per thread."""

    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        return gl.BlockedLayout([1], [32], [self.warps], [0])


@dataclass(frozen=True)
class DecodeLoop(Warps):
    """Compile-time arguments of `decode_loop`."""

    dequantizer: Dequantizer
    warps: int
    chained: bool
    digest: str = source_digest()


@gluon.jit
def dequantized(words, C: gl.constexpr):
    """Returns the 16-bit registers to which a tile's words are dequantized."""
    D: gl.constexpr = C.dequantizer
    return gl.inline_asm_elementwise(D.asm, D.constraints, words, dtype=D.types, is_pure=True, pack=1)


@gluon.jit
def decode_loop(out, clocks, words, step, turns, C: gl.constexpr):
    """Stores the dequantized registers of words int32 [bits, threads] to out int32 [16, threads]. Then dequantizes changing
    words `turns` times and stores the clocks of that loop, int32 [threads]. `threads` counts the threads of all blocks."""
    BITS: gl.constexpr = C.dequantizer.bits
    OUT: gl.constexpr = len(C.dequantizer.types)
    shared = gl.allocate_shared_memory(gl.int32, [C.threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.program_id(0) * C.threads + gl.arange(0, C.threads, C.threads_layout)
    total = gl.num_programs(0) * C.threads
    w = ()
    for i in gl.static_range(BITS):
        w = w + (gl.load(words + i * total + thread),)
    registers = dequantized(w, C)
    for i in gl.static_range(OUT):
        gl.store(out + i * total + thread, registers[i])
    shared.store(thread)
    barrier()
    never = thread * 0 + turns  # the fence in the loop stores to shared memory only if this is -1
    begin = asm(CLOCK, "=r", [], gl.int32)
    for _ in range(turns):
        registers = dequantized(w, C)
        run(REGISTER_FENCE, HELD, registers + (never,))
        following = ()
        if C.chained:
            all_of = registers[0]
            for i in gl.static_range(1, OUT):
                all_of = all_of ^ registers[i]
            for i in gl.static_range(BITS):
                following = following + (w[i] ^ all_of,)
        else:
            for i in gl.static_range(BITS):
                following = following + (w[i] + step,)
        w = following
    end = asm(CLOCK, "=r", [], gl.int32)
    gl.store(clocks + thread, end - begin)


@dataclass(frozen=True)
class StepLoop(Warps):
    """Compile-time arguments of `step_loop`."""

    k_block: KBlock
    warps: int
    digest: str = source_digest()


@gluon.jit
def stepped(words, held, sums, C: gl.constexpr):
    """Returns the accumulators after one more step."""
    S: gl.constexpr = C.k_block
    return gl.inline_asm_elementwise(S.asm, S.constraints, words + held + sums, dtype=S.types, is_pure=True, pack=1)


@gluon.jit
def step_loop(out, clocks, words, step, turns, C: gl.constexpr):
    """Stores to out float32 [2 * accumulators, threads] the accumulators of one step, then those of `turns` steps with changing
    codes. words int32 [words, threads] has the words of codes, of x and of scales. Stores the clocks of the loop, int32
    [threads]. `threads` counts the threads of all blocks."""
    S: gl.constexpr = C.k_block
    WORDS: gl.constexpr = S.words
    HELD: gl.constexpr = S.token_words + S.scale_words
    OUT: gl.constexpr = S.accumulators
    THREADS: gl.constexpr = C.threads
    thread = gl.program_id(0) * THREADS + gl.arange(0, THREADS, C.threads_layout)
    total = gl.num_programs(0) * THREADS
    LAYOUT: gl.constexpr = C.threads_layout
    zero = gl.zeros((THREADS,), gl.float32, LAYOUT)
    w = ()
    held = ()
    sums = ()
    for i in gl.static_range(WORDS):
        w = w + (gl.load(words + i * total + thread),)
    for i in gl.static_range(HELD):
        held = held + (gl.load(words + (WORDS + i) * total + thread),)
    for _ in gl.static_range(OUT):
        sums = sums + (zero,)
    first = stepped(w, held, sums, C)
    for i in gl.static_range(OUT):
        gl.store(out + i * total + thread, first[i])
    begin = asm(CLOCK, "=r", [], gl.int32)
    for _ in range(turns):
        sums = stepped(w, held, sums, C)
        following = ()
        for i in gl.static_range(WORDS):
            following = following + (w[i] + step,)
        w = following
    end = asm(CLOCK, "=r", [], gl.int32)
    gl.store(clocks + thread, end - begin)
    for i in gl.static_range(OUT):
        gl.store(out + (OUT + i) * total + thread, sums[i])
