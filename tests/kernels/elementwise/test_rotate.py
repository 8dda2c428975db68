"""Hadamard transforms in registers, alone and fused with quantization of activations. They are bit-equal to butterflies in
plain torch."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import BLOCKS, number_format, rotate_blocks
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.reference.activations import quantize_activations_reference
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

triton = pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise import quantize_rows as kernel_module  # noqa: E402
from lowbit.kernels.elementwise.quantize_rows import CODE_VECTOR, QuantizePlan, QuantizeRequest  # noqa: E402
from lowbit.kernels.elementwise.rotate import RotatePlan  # noqa: E402
from lowbit.ops import (  # noqa: E402
    add_norm_quantize,
    layer_norm_quantize,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)
from lowbit.ops.channels import rotate_channels  # noqa: E402
from tests.kernels.elementwise.test_quantize_rows import exact, hard_rows, near, same  # noqa: E402
from tests.kernels.parts.test_rotation import butterflies  # noqa: E402

gpu = pytest.mark.gpu


def rows_for(m, k, dtype, device="cpu"):
    """`hard_rows`, clamped so that no rotated row overflows in fp16."""
    return hard_rows(m, k, torch.float32, device).clamp(-3000, 3000).to(dtype)


def vectors(x):
    return x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def check_rotation(x, block, sm=80):
    plan = RotatePlan(*x.shape, block, vectors(x), typical_machine(sm))
    wanted = butterflies(x, block).to(x.dtype)
    for _ in range(2 if x.is_cuda else 1):  # the first call compiles, the second uses the cached launch
        if x.is_cuda:
            torch.full_like(x, float("nan"))  # poisons the memory that the allocator returns next
        assert torch.equal(plan(x), wanted), (x.shape, x.dtype, block)


def check_codes(x, name, block, group=0, symmetric=True, static=False, rule="", sm=80):
    """Checks that codes and scales are bit-equal to those of an x that was rotated and rounded before."""
    scale = torch.full((1,), 0.03, device=x.device) if static else None
    request = QuantizeRequest(
        "", number_format(name), group, static, symmetric, False, kernel_module.ActivationRule(rule), block
    )
    plan = QuantizePlan(*x.shape, request, vectors(x), typical_machine(sm))
    apart = butterflies(x, block).to(x.dtype)
    wanted = quantize_activations_reference(apart, request.fmt, group, scale, symmetric, None, request.rule)
    for _ in range(2 if x.is_cuda else 1):
        if x.is_cuda:
            torch.full((x.shape[0], x.shape[1] + CODE_VECTOR), -1, dtype=torch.int8, device=x.device)
        made = plan(x, None, None, None, scale, 0.0)
        for got, right in zip(made, [wanted[0]] if static else [t for t in wanted if t is not None], strict=True):
            assert same(got.contiguous(), right), (x.shape, x.dtype, name, block, group, symmetric, static, rule)


def check_fused(m, k, block, device="cpu", sm=80, dtype=torch.float16, name="int8", group=0):
    """Checks a rotation in float32 between a norm or gate and quantization, against the operator on a CPU and float64."""
    generator = torch.Generator().manual_seed(k)
    x, other = (torch.randn(m, k, generator=generator).to(dtype) for _ in range(2))
    weight, bias = (torch.rand(k, generator=generator).to(dtype) + 0.5 for _ in range(2))
    options = {"group": group, "hadamard": block}
    cases = [
        ("rms_norm", None, None, rms_norm_quantize(x, weight, 1e-5, name, **options)),
        ("rms_norm", other, None, rms_norm_quantize(x, weight, 1e-5, name, residual=other, **options)),
        ("layer_norm", None, bias, layer_norm_quantize(x, weight, bias, 1e-5, name, **options)),
        ("silu", other, None, silu_mul_quantize(x, other, name, **options)),
    ]
    for before, beside, b, wanted in cases:
        residual = before != "silu" and beside is not None
        request = QuantizeRequest(before, number_format(name), group, residual=residual, hadamard=block)
        plan = QuantizePlan(m, k, request, True, typical_machine(sm))
        given = (None if t is None else t.to(device) for t in (x, beside, None if before == "silu" else weight, b, None))
        made = [t.cpu() for t in plan(*given, 1e-5)]
        assert not residual or torch.equal(made[2], wanted.sum)
        values = rotate_blocks(exact(before, wanted.sum if residual else x, other, weight, b), block)
        near(type(wanted)(*made[:2]), wanted, wanted.scale.repeat_interleave(group or k, -1)[..., :k], values)


def check_without_a_gpu():
    for m, k, block in ((5, 64, 16), (4, 192, 64), (2, 2304, 256)):
        x = rows_for(m, k, torch.float16)
        check_rotation(x, block)
        for few in (0, 4):  # launch shapes for many rows, then for few rows
            kernel_module.FEW_PER_SM = few
            check_codes(x, "int8", block)
    check_rotation(rows_for(3, 80, torch.float32), 16)
    check_rotation(rows_for(3, 203, torch.float16)[:, 3:195], 64)
    x = rows_for(4, 320, torch.float16)
    check_codes(x, "int8", 64, symmetric=False)
    check_codes(x, "int8", 64, static=True)
    check_codes(x, "int8", 64, group=128)
    check_codes(x, "int8", 16, rule="ct")
    for block in (16, 256):
        check_fused(3, 768, block)


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


def compiled(sm, k, block, before="", name="int8", m=4096, dtype=torch.bfloat16, **asked):
    plan = QuantizePlan(m, k, QuantizeRequest(before, number_format(name), hadamard=block, **asked), True, typical_machine(sm))
    beside = meta((m, k), dtype) if plan.request.residual or before == "silu" else None
    weight = meta((k,), dtype) if before.endswith("norm") else None
    bias = meta((k,), dtype) if before == "layer_norm" else None
    return plan, compile_plan(plan, (meta((m, k), dtype), beside, weight, bias, None, 1e-5, None), sm)


@pytest.mark.parametrize("sm", [80, 89, 90])
@pytest.mark.parametrize("block", BLOCKS)
def test_in_registers(sm, block):
    """No butterfly step uses shared memory, nothing spills and x is read once. A step across threads is one shuffle per
    element.
    """
    asked = [(k, *case) for k in (4096, 14336) for case in (("", False), ("rms_norm", True), ("silu", False))]
    # all kernels are compiled before one is disassembled
    made = [compiled(sm, k, block, before, residual=residual) for k, before, residual in asked]
    for (k, before, residual), (plan, kernel) in zip(asked, made, strict=True):
        _, threads, vector, chunks, *_ = plan.constants
        steps = (block // vector).bit_length() - 1
        loads = [line for line in kernel.lines if "LDG" in line]
        assert kernel.stack_bytes == 0 and kernel.shared_bytes <= 8 * threads // 32, (k, before)
        assert kernel.count("BAR") <= 2 and 0 < kernel.count("SHFL") - steps * vector * chunks <= 20, (k, before)
        assert len(loads) == chunks * (3 if residual else 2 if before else 1), (k, before)


@pytest.mark.parametrize("sm", [80, 89, 90])
def test_a_rotation_alone(sm):
    for k, dtype in ((4096, torch.bfloat16), (14336, torch.float16)):
        plan = RotatePlan(4096, k, 64, True, typical_machine(sm))
        kernel = compile_plan(plan, (meta((4096, k), dtype),), sm)
        loads = [line for line in kernel.lines if "LDG" in line]
        assert len(loads) == 2 and all(".128" in line for line in loads) and kernel.count("STG.E.128") == 2
        assert kernel.stack_bytes == kernel.shared_bytes == kernel.count("BAR") == 0
        assert kernel.registers <= 40, "1536 threads on an SM, 48 KiB on their way"
        assert kernel.count("SHFL") == 3 * 16 and kernel.count("ACQBULK") == kernel.count("PREEXIT") == (sm >= 90)


def test_few_instructions_per_element():
    """At 4 TB/s an SM of an H200 moves 17.3 bytes per clock, and in a clock it issues 128 thread instructions or shuffles 32
    numbers.
    """
    for before, nbytes, share in (("", 3, 0.95), ("rms_norm", 3, 1.0), ("silu", 5, 0.75)):
        plan, kernel = compiled(90, 4096, 64, before)
        executed = max(number for number, line in enumerate(kernel.lines) if "EXIT" in line)
        assert executed * plan.constants[1] / 4096 < share * 128 * nbytes / 17.3, before
        assert kernel.count("SHFL") * plan.constants[1] / 4096 < 0.65 * 32 * nbytes / 17.3, before


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_bit_equal_to_butterflies(dtype, block):
    for m, k in ((1, 256), (300, 768), (33, 8192)):
        check_rotation(rows_for(m, k, dtype, "cuda"), block, sm=90)
        check_rotation(rows_for(m, k + 5, dtype, "cuda")[:, 3 : k + 3], block, sm=90)
    x = rows_for(33, 8192, dtype, "cuda").view(3, 11, 8192)
    assert torch.equal(rotate_channels(x, block), butterflies(x, block).to(dtype)), "through the operator"
    assert torch.equal(rotate_channels(x, block)[1:2, 5], rotate_channels(x[1:2, 5], block)), "the same bits in every batch"


@gpu
@pytest.mark.parametrize(
    ("name", "dtype", "block"),
    [
        ("int8", torch.float16, 64), ("int8", torch.bfloat16, 16), ("int8", torch.bfloat16, 256),
        ("fp8_e4m3", torch.bfloat16, 64), ("fp8_e5m2", torch.float16, 64),
    ],
)  # fmt: skip
def test_the_codes_of_rows_that_were_rotated_before(name, dtype, block):
    for m, k in ((1, 256), (5, 768), (700, 4096), (33, 8192), (9, 28672)):
        check_codes(rows_for(m, k, dtype, "cuda"), name, block, sm=90)
    for m, k in ((5, 768), (33, 8192)):
        x = rows_for(m, k, dtype, "cuda")
        check_codes(rows_for(m, k + 5, dtype, "cuda")[:, 3 : k + 3], name, block, sm=90)
        check_codes(x, name, block, group=128, sm=90)
        check_codes(x, name, block, static=True, sm=90)
        if name == "int8":
            check_codes(x, name, block, symmetric=False, sm=90)
        if name != "fp8_e5m2":
            check_codes(x, name, block, rule="ct", sm=90)


@gpu
@pytest.mark.parametrize(
    ("name", "dtype", "group"),
    [("int8", torch.float16, 0), ("int8", torch.bfloat16, 128), ("fp8_e4m3", torch.bfloat16, 0)],
)
def test_after_norms_and_gates(name, dtype, group):
    for block, m, k in ((16, 5, 576), (64, 600, 4096), (256, 9, 14336), (64, 9, 28672)):
        check_fused(m, k, block, "cuda", 90, dtype, name, group)


@gpu
def test_the_operators_rotate():
    h, delta = (rows_for(16, 4096, torch.bfloat16, "cuda") for _ in range(2))
    weight = torch.rand(4096, device="cuda").bfloat16()
    made, apart = quantize_activations(h, "int8", hadamard=64), quantize_activations(rotate_channels(h, 64), "int8")
    assert torch.equal(made.codes, apart.codes) and torch.equal(made.scale, apart.scale)
    fused = rms_norm_quantize(h, weight, 1e-5, "int8", residual=delta, hadamard=64)
    made = add_norm_quantize(h, delta, weight, 1e-5, "int8", hadamard=64)
    assert torch.equal(made.codes, fused.codes) and torch.equal(made.scale, fused.scale) and torch.equal(h, fused.sum)
