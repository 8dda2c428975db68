"""Alternative conversions that the library does not use: each gives its format's values and compiles in the library's
kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit.formats import code_values, number_format, parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape
from lowbit.pack import WeightForm
from lowbit.pack.fragment import FragmentOrder, word_places
from tests.kernels.calls import mixed_call
from tests.kernels.sass import TRITON, compile_kernel, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from benchmarks.mechanisms.kernels import DecodeLoop, StepLoop, decode_loop, step_loop
from benchmarks.mechanisms.loops import CONVERSIONS, STEP_GROUPS, STEP_TOKENS, longest_loop, step_operands
from benchmarks.mechanisms.products import CONVERTED, MMA, TOKENS, TORCH, decode_by, scale_first
from benchmarks.mechanisms.ways import Decoding, ScaledFirst, nothing, ways
from lowbit.kernels.parts.k_block import KBlock
from lowbit.ops.fragment_gemm import plan_for
from tests.kernels.parts.plain import check_operands

EVERY = [(fmt, dtype, way) for fmt, dtype in CONVERSIONS for way in ways(fmt, dtype)]
NAMES = [f"{fmt}-{dtype}-{way.name}" for fmt, dtype, way in EVERY]


@pytest.mark.parametrize(("fmt", "dtype", "way"), EVERY, ids=NAMES)
def test_halves_are_the_values_of_the_codes(fmt, dtype, way):
    """Every code at every position of a tile is packed, converted in NumPy and multiplied by the factor. The result is the
    format's value.
    """
    number = number_format(fmt)
    codes = torch.randint(0, 1 << number.bits, (16, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    codes[0, : 1 << number.bits] = torch.arange(min(64, 1 << number.bits)).to(torch.uint8)
    words = way.plane(codes)[0, 0][word_places(number.bits)].numpy().view(np.uint32)  # [lane, word]
    c = way.conversion
    runs = words.reshape(32, -1, c.fields.words)
    halves = c.run([runs[..., i] for i in range(c.fields.words)]) * c.scale_factor
    row, k = FragmentOrder(MMA_M16N8K16_F16, number).tile.coordinates()
    assert np.array_equal(halves.reshape(32, 16, 2), code_values(number)[codes.long()].double().numpy()[row, k])


@pytest.mark.parametrize(("fmt", "dtype", "way"), EVERY, ids=NAMES)
def test_ptx_names_its_operands(fmt, dtype, way):
    decode = Decoding(fmt, dtype, 0, "none", "fp16", by=way.conversion)
    check_operands(decode.asm, decode.constraints)


def test_instructions_are_those_that_the_sources_count():
    """FP6-LLM's cast of four codes takes 2 ANDs, 1 shift and 1 OR, besides assembling the codes. The library's conversion takes
    fewer instructions.
    """
    per_weight = {way.name: way.conversion.integer_per_weight for way in ways("fp6_e3m2", "fp16")}
    assert per_weight["own"] == 1.25 < per_weight["4+2"] == 2.3125 < per_weight["rebuilt"]


LOOP = {"out": "*i32", "clocks": "*i32", "words": "*i32", "step": "i32", "turns": "i32"}


def loop_of(kernel) -> list[str]:
    first, last = max(kernel.loops, key=lambda loop: loop[1] - loop[0])
    return kernel.lines[first : last + 1]


def test_loops_hold_the_conversion_and_nothing_else():
    """The measured loop has no memory access except stores that never execute, casts only if requested, and no spills."""
    kernels = []
    for fmt, dtype, way in EVERY:
        config = DecodeLoop(Decoding(fmt, dtype, 0, "none", "fp16", by=way.conversion), 16, dtype == "bf16")
        kernels.append(compile_kernel(decode_loop, LOOP, config, ("out", "clocks", "words"), 16, 90))
    for name, (_, _, way), kernel in zip(NAMES, EVERY, kernels, strict=True):
        loop = loop_of(kernel)
        assert kernel.stack_bytes == 0, name
        assert not any(memory in line for line in loop for memory in ("LDG", "LDS", "LDL", "STL", "STG")), name
        assert sum("STS.128" in line for line in loop) == 4, name
        casts = sum("I2F" in line for line in loop)
        assert casts == (32 if way.name in ("cast", "float32") else 0), (name, "one for each weight")


def test_an_empty_loop_is_short():
    kernels = []
    for fmt in ("int4", "int8", "fp6_e3m2"):
        config = DecodeLoop(Decoding(fmt, "fp16", 0, "none", "fp16", by=nothing(fmt, "fp16")), 16, False)
        kernels.append(compile_kernel(decode_loop, LOOP, config, ("out", "clocks", "words"), 16, 90))
    assert all(len(loop_of(kernel)) <= 26 for kernel in kernels)


@pytest.mark.parametrize("kind", [KBlock, ScaledFirst])
@pytest.mark.parametrize("tokens", STEP_TOKENS[::3])
def test_steps_multiply_as_often(kind, tokens):
    step = kind("int4", "fp16", tokens, STEP_GROUPS[0], "none", "fp16")
    check_operands(step.asm, step.constraints)
    kernel = compile_kernel(step_loop, LOOP | {"out": "*fp32"}, StepLoop(step, 8), ("out", "clocks", "words"), 8, 90)
    loop = loop_of(kernel)
    assert sum("HMMA" in line for line in loop) == tokens
    assert sum("FFMA" in line for line in loop) == (0 if kind is ScaledFirst else tokens // 2 * 128 // STEP_GROUPS[0])
    assert sum("HMUL2" in line or "HFMA2.MMA" in line for line in loop) >= (32 if kind is ScaledFirst else 0)
    assert not any("LDL" in line or "STL" in line for line in loop)


@pytest.mark.parametrize("group", STEP_GROUPS)
def test_operands_of_steps_are_the_fragments_of_a_product(group):
    """The emulated instruction on the lanes' registers gives the expected sums."""
    step = KBlock("int4", "fp16", 16, group, "none", "fp16")
    lanes, expected = step_operands(step)
    words, x, scale = lanes.split([step.words, step.token_words, step.scale_words])
    c = step.conversion
    runs = words.numpy().view(np.uint32).reshape(-1, c.fields.words, 32)
    a = np.concatenate([c.run(list(run)) for run in runs], axis=1)  # [lane, register, element]
    x, scale = (part.numpy().view(np.float16).reshape(len(part), 32, 2).astype(np.float64) for part in (x, scale))
    sums = np.zeros((step.accumulators, 32))
    lane, t = np.arange(32) // 4, np.arange(32) % 4
    for k in range(8):
        weights, of_rows = np.zeros((16, 16)), np.zeros(16)
        for i, element in np.ndindex(4, 2):
            weights[lane + 8 * (i % 2), 2 * t + element + 8 * (i // 2)] = a[:, 4 * k + i, element]
        for half in (0, 1):
            of_rows[lane + 8 * half] = scale[k * 16 // group, :, half]
        for eight in range(step.n8_tiles):
            tokens = np.zeros((16, 8))
            for i, element in np.ndindex(2, 2):
                tokens[2 * t + element + 8 * i, lane] = x[16 * eight + 2 * k + i, :, element]
            product = of_rows[:, None] * weights @ tokens
            for i in range(4):
                sums[4 * eight + i] += product[lane + 8 * (i // 2), 2 * t + i % 2]
    assert np.allclose(sums, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("scheme", "dtype"), CONVERTED)
@pytest.mark.parametrize("m", [1, 64, "mma.sync"])
def test_products_by_another_conversion_compile(scheme, dtype, m):
    """Kernels with another conversion compile for sm_90 without spills in the loop, and packed weights keep their size."""
    fmt = parse_scheme(scheme).weight
    machine, tile = typical_machine(90), MMA if m == "mma.sync" else None
    shape = GemmShape(TOKENS[-1] if tile else m, 8192, 8192, fmt.bits)
    form = WeightForm(fmt.name, 0, "none", "fp16")
    others = ways(fmt.name, dtype)[1:]
    # Conversion is the same code in each kernel. Kernels for 64 tokens leave it the fewest registers, since four warpgroups
    # share an SM. So every conversion runs there, and only one in the other kernels.
    for way in others if m == 64 else others[:1] if m == 1 else others[-1:]:
        plan = plan_for(tile or choose(shape, machine), shape, form, TORCH[dtype], False, machine)
        decode_by(plan, way.conversion)
        x, codes, _, channel, *rest = mixed_call(shape, TORCH[dtype], 0, torch.float16)
        assert way.plane(torch.zeros(16, 64, dtype=torch.uint8)).shape == codes[:1, : 32 * fmt.bits].unflatten(1, (1, -1)).shape
        kernel = compile_plan(plan, (x, codes.unflatten(1, (shape.steps(64), -1)), None, channel, None, *rest[1:]), 90)
        assert kernel.stack_bytes <= 64, f"{way.name} spills"
        assert plan.factor == way.conversion.scale_factor


@pytest.mark.parametrize("m", [1, 16])
def test_products_that_scale_first_compile(m):
    shape, machine = GemmShape(m, 8192, 8192, 4), typical_machine(90)
    plan = plan_for(
        choose(shape, machine), shape, WeightForm("int4", 32, "none", "fp16", True, True), torch.float16, False, machine
    )
    scale_first(plan)
    x, codes, scale, channel, *rest = mixed_call(shape, torch.float16, 32, torch.float16)
    codes = codes.unflatten(1, (shape.steps(64), -1))
    kernel = compile_plan(plan, (x, codes, scale, channel.to(torch.bfloat16), None, *rest[1:]), 90, ("x", "w", "scale"))
    assert kernel.stack_bytes == 0 and plan.factor == 2.0**16


def test_the_longest_loop_is_counted():
    text = "Function:f\n--:-:-:Y:1\tMOV R1, R2;\nLBB0:\n--:-:-:Y:1\tIADD3 R1, R1, R2, RZ;\n--:-:-:Y:1\tNOP;\n"
    text += "--:-:-:Y:1\t@P0 BRA LBB0;\n--:-:-:Y:1\tEXIT;\nLBB1:\n--:-:-:Y:1\tBRA LBB1;\n"
    assert longest_loop(text) == 2 and longest_loop("") == 0


def test_triton_disassembles():
    if TRITON < (3, 6):
        pytest.skip("the tools came with Triton 3.6")
    from triton.tools.disasm import get_sass

    config = DecodeLoop(Decoding("int4", "fp16", 0, "none", "fp16", by=ways("int4", "fp16")[0].conversion), 16, False)
    kernel = compile_kernel(decode_loop, LOOP, config, ("out", "clocks", "words"), 16, 90)
    assert longest_loop(get_sass(kernel.cubin)) == sum("NOP" not in line for line in loop_of(kernel))
