"""Weights in registers as operand A: reads words of codes from shared memory, forms a matrix of dequantized registers, keeps
them alive.

Lane 4g + t of a warp holds the row pair (g, g + 8) of its warp's m16 row block. Its 16 registers belong to four matrix
instructions along K, in the order of hardware/mma.py: 64 columns of K as halves, or 128 as bytes.

The functions take the configuration C of a kernel, which has `dequantizer` (parts/dequantize.py or parts/byte_dequantize.py),
`rows`, `warps`, `threads`, `threads_layout`, `registers_layout` and `operand_layout`. For words from a pipeline it also has
`stage_tiles`, `words_layout` and the fields that parts/pipeline.py needs.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon, ptx, run
from lowbit.kernels.parts.pipeline import release, wait_full

REGISTERS = 16
"""Number of registers of operand A that a lane holds at a time."""

OPERAND_REGISTERS = gl.constexpr(REGISTERS)


def registers_layout(warps: int, elements: int) -> gl.BlockedLayout:
    """Layout [threads, elements]: one register of `elements` elements per thread."""
    return gl.BlockedLayout([1, elements], [32, 1], [warps, 1], [1, 0])


def words_layout(warps: int, words: int) -> gl.DistributedLinearLayout:
    """Layout of words [row blocks, 32 lanes * words]: one warp per row block, up to four neighbouring words per load."""
    vector = min(words, 4)
    register = [[0, 1 << i] for i in range(vector.bit_length() - 1)]
    lane = [[0, vector << i] for i in range(5)]
    if words == 8:
        register.append([0, 128])
    warp = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(register, lane, warp, [], [warps, 32 * words])


def register_fence(count: int) -> str:
    """PTX that keeps registers $1 to $count alive. It stores them only if the next operand is negative, which never happens.

    ptxas then cannot overwrite these registers before this point; see `release_stage`.
    """
    quads = [", ".join(f"${1 + 4 * i + j}" for j in range(4)) for i in range(count // 4)]
    stores = [f"@p st.shared.v4.b32 [at+{16 * i}], {{{quad}}};" for i, quad in enumerate(quads)]
    return (
        f"{{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, ${count + 1}, -1;\n"
        + "\n".join(stores)
        + "\nmov.b32 $0, 0; }"
    )


REGISTER_FENCE = gl.constexpr(register_fence(REGISTERS))


@gluon.jit
def words_of(plane, C: gl.constexpr, p: gl.constexpr):
    """Returns the words of a plane [row blocks, 32 lanes * words] as one tensor [threads] per word."""
    WORDS: gl.constexpr = ptx(C.dequantizer.plane_words, p)
    if WORDS == 8:  # two vectors of 4 words
        plane = gl.permute(gl.reshape(plane, [C.warps, 2, 32, 4]), [0, 2, 1, 3])
    return split_words(gl.reshape(plane, [C.threads, WORDS]), WORDS, C)


@gluon.jit
def split_words(words, count: gl.constexpr, C: gl.constexpr):
    """Splits [threads, count] into `count` tensors [threads], in order."""
    if count == 1:
        return (gl.convert_layout(gl.reshape(words, [C.threads]), C.threads_layout, assert_trivial=True),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(words, [C.threads, 2, count // 2]), [0, 2, 1]))
        return split_words(low, count // 2, C) + split_words(high, count // 2, C)


@gluon.jit
def read_words(w, stage, phase, there, C: gl.constexpr):
    """Waits for a stage and returns its words, tile by tile and plane by plane.

    If `there` is False there is no such stage: the function does not wait, and the words must not be used.
    """
    PLANES: gl.constexpr = C.dequantizer.planes
    TILES: gl.constexpr = C.stage_tiles
    wait_full(stage, phase, there, C)
    words = ()
    for tile in gl.static_range(TILES):
        for p in gl.static_range(PLANES):
            words = words + words_of(w[p].index(TILES * stage + tile).load(ptx(C.words_layout, p)), C, p)
    return words


@gluon.jit
def empty_registers(C: gl.constexpr):
    """Returns registers of zeros, in place of a previous stage's registers before the first stage."""
    THREADS: gl.constexpr = C.threads
    EACH: gl.constexpr = C.threads_layout
    registers = ()
    for _ in gl.static_range(OPERAND_REGISTERS):
        registers = registers + (gl.zeros((THREADS,), gl.int32, EACH),)
    return registers


@gluon.jit
def join(registers, count: gl.constexpr, ELEMENTS: gl.constexpr, C: gl.constexpr):
    """Joins `count` tensors [threads, ELEMENTS] to [threads, count * ELEMENTS], in order."""
    if count == 1:
        return registers[0]
    else:
        low = join(registers[0 : count // 2], count // 2, ELEMENTS, C)
        high = join(registers[count // 2 :], count // 2, ELEMENTS, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [C.threads, ELEMENTS * count])


@gluon.jit
def operand_a(registers, C: gl.constexpr):
    """Returns the dequantized registers as operand A: C.rows x 64 columns of K as halves, or 128 as bytes. This takes no
    instruction.

    Whole registers are passed, not elements: the compiler copies elements that have two uses, here and in `fence_registers`.
    """
    ELEMENTS: gl.constexpr = 32 // C.dequantizer.operand_type.primitive_bitwidth
    LAYOUT: gl.constexpr = C.registers_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    parts = ()
    for i in gl.static_range(OPERAND_REGISTERS):
        column = gl.expand_dims(gl.convert_layout(registers[i], ROWS, assert_trivial=True), 1)
        whole = gl.convert_layout(column.broadcast_to([C.threads, ELEMENTS]), LAYOUT, assert_trivial=True)
        part = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r" + ",r" * ELEMENTS, [whole], dtype=C.dequantizer.operand_type, is_pure=True, pack=ELEMENTS
        )  # fmt: skip
        parts = parts + (part,)
    # [warp, lane group, lane of the group, k step, k half, row half, element] -> rows, k
    joined = gl.reshape(join(parts, OPERAND_REGISTERS, ELEMENTS, C), [C.warps, 8, 4, 4, 2, 2, ELEMENTS])
    matrix = gl.reshape(gl.permute(joined, [0, 5, 1, 3, 4, 2, 6]), [C.rows, 32 * ELEMENTS])
    return gl.convert_layout(matrix, C.operand_layout, assert_trivial=True)


@gluon.jit
def fence_registers(registers, stage, C: gl.constexpr):
    """Forces dequantization to finish here, since compilers would sink it below the next wait, and keeps its registers alive
    until here."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(REGISTER_FENCE, "=r" + ",r" * (OPERAND_REGISTERS + 1), registers + (thread * 0 + stage,))


@gluon.jit
def release_stage(registers, stage, exists, C: gl.constexpr):
    """Marks a stage, whose products are complete, as empty for the loader. The registers of its operand A may then be
    overwritten.

    wgmma reads operand A while it runs, but ptxas considers its registers free once the instruction is issued. Without
    `fence_registers` the next stage is dequantized into them too early. With Triton 3.6 the results then contained weights of
    1024 and more, from the magic number of the conversion.
    """
    fence_registers(registers, stage, C)
    release(stage, exists, C)
