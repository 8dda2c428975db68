"""Activation quantization by the rules of other tools. The reference is tested on values by hand; the kernel is bit-equal to
it."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import ActivationRule, number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.reference.activations import quantize_activations_reference
from lowbit.ops import quantize_activations, rms_norm_quantize, silu_mul_quantize
from tests.kernels.elementwise.test_quantize_rows import SHAPES, compiled, hard_rows, same
from tests.kernels.interpreter import interpreted

triton = pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise import quantize_rows as kernel_module  # noqa: E402
from lowbit.kernels.elementwise.quantize_rows import QuantizePlan, QuantizeRequest  # noqa: E402

gpu = pytest.mark.gpu
OWN, TOOL, FINEGRAINED, FBGEMM = ActivationRule


def cases(name):
    """(rule, options) pairs that quantize activations to the format `name`."""
    found = [(TOOL, {}), (TOOL, {"group": 128}), (TOOL, {"static": True})]
    if name == "int8":
        return [*found, (TOOL, {"symmetric": False}), (TOOL, {"static": True, "symmetric": False})]
    return [*found, *((rule, o) for rule in (FINEGRAINED, FBGEMM) for o in ({}, {"group": 128}, {"static": True}))]


def check(x, name, rule, group=0, static=False, symmetric=True, device=80):
    fmt = number_format(name)
    scale = torch.full((1,), 0.0312345, device=x.device) if static else None
    given = torch.full((1,), -37, dtype=torch.int32, device=x.device) if static and not symmetric else None
    aligned = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    request = QuantizeRequest("", fmt, group, static, symmetric, rule=rule)
    plan = QuantizePlan(*x.shape, request, aligned, typical_machine(device))
    codes, own, zero = quantize_activations_reference(x, fmt, group, scale, symmetric, given, rule)
    expected = [t for t in ((codes,) if static else (codes, own, zero)) if t is not None]
    made = plan(x, None, None, None, scale, 0.0, given)
    for got, wanted in zip(made, expected, strict=True):
        assert same(got.contiguous(), wanted), (x.shape, x.dtype, name, rule, group, static, symmetric)


def extreme_rows(m, k, dtype, device="cpu"):
    """`hard_rows`, then rows of the dtype's smallest and largest numbers, and rows whose scale the dtype cannot represent."""
    x = hard_rows(m, k, dtype)
    info = torch.finfo(dtype)
    rows = (info.smallest_normal / 64, info.smallest_normal, info.max, info.max / 2, 1e-7, 1300.0)
    for i, value in enumerate(rows[: max(m - 4, 0)]):
        x[4 + i] = (torch.linspace(-1, 1, k) * value).to(dtype)
    return x.to(device)


def check_without_a_gpu():
    for few in (0, 4):
        kernel_module.FEW_PER_SM = few
        for m, k in ((9, 64), (10, 203), (5, 576)):
            x = extreme_rows(m, k, torch.float16)
            for rule, options in cases("int8"):
                check(x, "int8", rule, **options)


def test_the_arithmetic_in_tritons_interpreter():
    """Checks int8 in fp16 only: the interpreter converts to 8-bit floats in another way than the hardware."""
    interpreted(check_without_a_gpu)


def test_by_hand():
    """In fp16, 1 / 127.5 is 0.00784301. 1 divided by that is 127.5, which exceeds the largest code; -127.5 does not exceed the
    smallest."""
    x = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]).half()
    codes, scale, zero, *_ = quantize_activations(x, "int8", rule="ct")
    assert zero is None and codes.tolist() == [[127, -128, 64, 0], [0, 0, 0, 0]]
    assert scale.flatten().tolist() == [float(torch.tensor(1 / 127.5).half()), 2.0**-10], "a row of zeros has fp16's epsilon"
    codes, scale, zero, *_ = quantize_activations(torch.tensor([[0.0, 2.55, 0.01, 1.0]]), "int8", symmetric=False, rule="ct")
    assert (codes.tolist(), zero.item()) == ([[-128, 127, -127, -28]], -128)
    x = torch.tensor([[896.0, 448.0, 1.0], [2400.0, -1200.0, 3.0], [0.0, 0.0, 0.0]])
    codes, scale, *_ = quantize_activations(x, "fp8_e4m3", rule="fb")
    assert scale.flatten().tolist() == [2.0, float(torch.tensor(1200 / 448)), float(torch.tensor(1 / (448 * 512)))]
    assert codes.float()[:, :2].tolist() == [[448, 224], [448, -448], [0, 0]]
    scale = quantize_activations(x, "fp8_e4m3", rule="hf").scale
    assert scale.flatten().tolist() == [2.0, float(torch.tensor(2400 / 448)), float(torch.tensor(1e-12))]
    given = quantize_activations(x.bfloat16(), "fp8_e4m3", scale=torch.tensor([0.1]), rule="ct")
    assert given.scale.tolist() == [float(torch.tensor(0.1).bfloat16())], "a given scale is rounded to x's type first"


def test_what_is_not_finite_shows():
    x = torch.randn(4, 64).half()
    x[1, 7], x[2, 9], x[3, 11] = float("inf"), float("nan"), -float("nan")
    for name in ("int8", "fp8_e4m3"):
        for rule, options in cases(name):
            if not options:
                scale = quantize_activations(x, name, rule=rule.value).scale
                assert scale.isfinite().flatten().tolist()[2:] == [False, False] and scale[0].isfinite()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_activations(x, "int8", rule="tf"), "rules are '', 'ct', 'hf', 'fb', not 'tf'"),
        (lambda x: quantize_activations(x, "int8", rule="hf"), "the rule 'hf' makes fp8_e4m3, not int8"),
        (lambda x: quantize_activations(x, "fp8_e5m2", rule="ct"), "the rule 'ct' makes int8 and fp8_e4m3, not fp8_e5m2"),
        (lambda x: rms_norm_quantize(x, x[0], 1e-5, "int8", rule="ct"), "fused with rms_norm; quantize what that step returns"),
        (lambda x: silu_mul_quantize(x, x, "int8", rule="ct"), "fused with silu; quantize what that step returns"),
    ],
)
def test_what_no_rule_says_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 8).half())


@pytest.mark.parametrize(
    # Divisions and roundings are in float32, and the dtype only affects loads. So each machine is compiled with one dtype.
    ("sm", "dtype"),
    [(80, torch.bfloat16), (90, torch.float16), (100, torch.bfloat16)],
)
def test_every_rule_compiles(sm, dtype):
    for name in ("int8", "fp8_e4m3") if sm >= 90 else ("int8",):
        for rule, options in cases(name):
            _, kernel = compiled(sm, 4096, name, dtype=dtype, rule=rule, **options)
            assert kernel.stack_bytes == 0, (name, rule, options)
            assert "div.rn.f32" in kernel.ptx, "divisions are true ones"


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("m", "k"), [*SHAPES, (10, 1024)])
def test_bit_equal_to_the_reference(dtype, name, m, k):
    x = extreme_rows(m, k, dtype, "cuda")
    for rule, options in cases(name):
        check(x, name, rule, device=90, **options)


@gpu
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("m", "k"), [(10, 203), (16, 4096), (9, 28672), (3, 40000)])
def test_in_the_shapes_for_many_rows(name, m, k, monkeypatch):
    monkeypatch.setattr(kernel_module, "FEW_PER_SM", 0)
    x = extreme_rows(m, k, torch.float16, "cuda")
    for rule, options in cases(name):
        check(x, name, rule, device=90, **options)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_same_on_a_cpu(dtype):
    """CPU and GPU agree. The comparison with the tools themselves runs on a CPU (tests/models/test_same_as_the_tool.py)."""
    x = extreme_rows(10, 1024, dtype)
    for name in ("int8", "fp8_e4m3"):
        for rule, options in cases(name):
            options = {key: value for key, value in options.items() if key != "static"}
            here, there = (quantize_activations(x.to(d), name, rule=rule.value, **options) for d in ("cpu", "cuda"))
            for one, other in zip(here, there, strict=True):
                if isinstance(one, torch.Tensor):
                    assert same(other.cpu().contiguous(), one), (name, rule, options)
                else:  # the dtype of x, or no such field
                    assert one == other
