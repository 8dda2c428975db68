"""The operator of low-rank adapters, and products whose bias is of tokens: on a CPU by references, on a GPU against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.tiles import GemmShape
from lowbit.kernels.reference.elementwise import gate_reference
from lowbit.kernels.reference.fused_gemm import norm_gemm_reference, residual_gemm_reference
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.kernels.reference.lora import lora_reference, part_of_columns
from lowbit.ops.fragment_gemm import fragment_gemm, plan_for
from lowbit.ops.fused_gemm import norm_gemm, residual_gemm
from lowbit.ops.gated_gemm import gated_gemm
from lowbit.ops.lora import LoraWeight, epilogue_refusals, lora, lora_sums
from lowbit.pack import DenseWeight, FragmentWeight, WeightForm
from lowbit.pack.gated import alternate, pack_gated
from tests.kernels.calls import meta, mixed_call
from tests.kernels.sass import compile_plan
from tests.ops.test_fused_gemm import poison, quantized, relative_error

gpu = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]


def weight_of(adapters, widths, rank, k, dtype, device="cpu", alternates=False):
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(adapters, len(widths), rank, k, generator=generator) * k**-0.5
    b = torch.randn(adapters, sum(widths), rank, generator=generator)
    return LoraWeight(a.to(device, dtype), b.to(device, dtype), widths, alternates)


# ---- without a GPU


def test_the_formula():
    """y = b a x of each row's adapter, part by part; divided by the RMS with squares."""
    weight = weight_of(2, (24, 8), 16, 40, torch.float32)
    x, adapter_of, bias = torch.randn(5, 40), torch.tensor([1, -1, 0, 1, -1], dtype=torch.int32), torch.randn(32)
    squares = torch.rand(3, 5)
    rms = (squares.sum(0) / 40 + 1e-5).sqrt()
    for given, scale in ((None, torch.ones(5)), (squares, 1 / (rms * 0.5))):
        y = lora(x, weight, adapter_of, bias, squares=given, width=40, eps=1e-5, factor=0.5)
        for row, adapter in enumerate(adapter_of.tolist()):
            expected = bias.clone()
            if adapter >= 0:
                a, b = weight.a[adapter], weight.b[adapter]
                expected[:24] += b[:24] @ (a[0] @ x[row]) * scale[row]
                expected[24:] += b[24:] @ (a[1] @ x[row]) * scale[row]
            assert torch.allclose(y[row], expected, atol=1e-4)


def test_parts_of_columns():
    assert part_of_columns((3, 2), False).tolist() == [0, 0, 0, 1, 1]
    assert part_of_columns((16, 16), True).tolist() == ([0] * 8 + [1] * 8) * 2


def test_what_does_not_fit_is_refused():
    good = weight_of(2, (24, 8), 16, 40, torch.float32)
    for a, b, widths, alternates in (
        (good.a, good.b[:1], (24, 8), False), (good.a, good.b, (24, 9), False), (good.a[:, :1], good.b, (24, 8), False),
        (good.a[:, :, :12].contiguous(), good.b[..., :12].contiguous(), (24, 8), False),
        (good.a, good.b.half(), (24, 8), False), (good.a[..., ::2], good.b, (24, 8), False),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="adapters of"):
            LoraWeight(a, b, widths, alternates)
    x, rows = torch.randn(3, 40), torch.zeros(3, dtype=torch.int32)
    for case, message in (
        ((x.half(), rows), "lora: x is torch.float32"), ((x[:, :39], rows), "lora: x is"),
        ((x, rows[:2]), "adapter_of is int32"), ((x, rows.long()), "adapter_of is int32"),
        ((x, rows, torch.zeros(31)), "bias is"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            lora(case[0], good, *case[1:])
    with pytest.raises(ValueError, match="squares are float32"):
        lora(x, good, rows, squares=torch.rand(2, 4))


def test_opcheck():
    weight = weight_of(2, (16, 16), 16, 40, torch.float16, alternates=True)
    x, rows = torch.randn(3, 40).half(), torch.tensor([0, -1, 1], dtype=torch.int32)
    arguments = x, weight.a, weight.b, rows, torch.rand(2, 3), torch.randn(32).half(), [16, 16], True, 40, 1e-5, 1.0
    torch.library.opcheck(torch.ops.lowbit.lora.default, arguments)


@pytest.mark.parametrize("dense", [False, True])
def test_a_bias_of_tokens_on_a_cpu(dense):
    q = quantized("w4a16_g32", 64, 64)
    w = DenseWeight(torch.randn(64, 64).half()) if dense else FragmentWeight.pack(q)
    x, h, squares, gamma = torch.randn(3, 64).half(), torch.randn(3, 64).half(), torch.rand(2, 3), torch.rand(64)
    bias = torch.randn(3, 64).half()
    for gated in ("none", "silu"):
        y = norm_gemm(x, w, squares, bias, width=64, eps=1e-5, gated=gated)
        rows = [norm_gemm(x[i : i + 1], w, squares[:, i : i + 1], bias[i], width=64, eps=1e-5, gated=gated) for i in range(3)]
        assert torch.equal(y, torch.cat(rows))
    added = h.clone()
    residual_gemm(x, w, added, gamma, bias)
    for i in range(3):
        one = h[i : i + 1].clone()
        residual_gemm(x[i : i + 1], w, one, gamma, bias[i])
        assert torch.equal(one, added[i : i + 1])
    with pytest.raises(ValueError, match=r"bias is \[64\] or \[3, 64\], got \(2, 64\)"):
        norm_gemm(x, w, squares, bias[:2], width=64, eps=1e-5)


def sums_of(m, widths, rank, k, dtype, device="cpu", alternates=False, adapters=3, **norm):
    """(x, the sums of rows of several adapters and of none)."""
    weight = weight_of(adapters, widths, rank, k, dtype, device, alternates)
    x = torch.randn(m, k, device=device).to(dtype)
    adapter_of = ((torch.arange(m, dtype=torch.int32) + 1) % (adapters + 1) - 1).to(device)
    return x, lora_sums(x, weight, adapter_of, **norm)


@pytest.mark.parametrize("dense", [False, True])
def test_sums_in_an_epilogue_are_a_bias_of_tokens_on_a_cpu(dense):
    q = quantized("w4a16_g32", 64, 64)
    w = DenseWeight(torch.randn(64, 64).half()) if dense else FragmentWeight.pack(q)
    squares, bias, given = torch.rand(2, 5) + 0.5, torch.randn(64).half(), {"width": 64, "eps": 1e-5, "factor": 0.5}
    for gated in ("none", "silu"):
        x, sums = sums_of(5, (32, 32), 16, 64, torch.float16, alternates=not dense, squares=squares, **given)
        tokens = lora(x, sums.weight, sums.adapter_of, bias, squares=squares, **given)
        y = norm_gemm(x, w, squares, bias, gated=gated, lora=sums, **given)
        assert relative_error(y, norm_gemm(x, w, squares, tokens, gated=gated, **given).double()) < 2e-3
    x, sums = sums_of(5, (64,), 32, 64, torch.float16)
    h, gamma = torch.randn(5, 64).half(), torch.rand(64)
    made = [h.clone(), h.clone()]
    residual_gemm(x, w, made[0], gamma, bias, lora=sums)
    residual_gemm(x, w, made[1], gamma, lora(x, sums.weight, sums.adapter_of, bias))
    assert relative_error(made[0], made[1].double()) < 2e-3


def test_sums_that_do_not_fit_are_refused():
    w, squares = FragmentWeight.pack(quantized("w4a16_g32", 64, 64)), torch.rand(2, 5)
    x, sums = sums_of(5, (32, 32), 16, 64, torch.float16)
    for wrong in (
        dataclasses.replace(sums, t=sums.t[:, :4]), dataclasses.replace(sums, t=sums.t.double()),
        dataclasses.replace(sums, adapter_of=sums.adapter_of.long()), sums_of(5, (32, 24), 16, 64, torch.float16)[1],
        sums_of(5, (64,), 128, 64, torch.float16)[1],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="norm_gemm: adapters of 64 columns in parts"):
            norm_gemm(x, w, squares, width=64, eps=1e-5, lora=wrong)
    with pytest.raises(ValueError, match=r"lora_sums: x is torch.float16 \[M, 64\]"):
        lora_sums(x[:, :32], sums.weight, sums.adapter_of)
    reasons = epilogue_refusals(weight_of(1, (8,), 128, 60, torch.float32), torch.device("cpu"))
    assert len(reasons) == 4 and "ranks of up to 64, not 128" in reasons[2]
    assert not epilogue_refusals(sums.weight, torch.device("cuda"))


def test_opcheck_of_sums():
    weight = weight_of(2, (16, 16), 16, 40, torch.float16)
    x, rows = torch.randn(3, 40).half(), torch.tensor([0, -1, 1], dtype=torch.int32)
    torch.library.opcheck(torch.ops.lowbit.lora_sums.default, (x, weight.a, rows, torch.rand(2, 3), 40, 1e-5, 1.0))


@pytest.mark.parametrize(("m", "role"), [(1, "gated"), (8, "norm"), (16, "residual"), (64, "gated"), (64, "norm")])
def test_machine_code_with_adapters(m, role):
    """Products with adapters do not spill in their main loops."""
    from lowbit.kernels.choose.fused_gemm import choose_chain
    from lowbit.kernels.parts.lora_epilogue import LoraTerms
    from tests.kernels.sm90.test_compile import main_loop

    machine, half, n, k = typical_machine(90), torch.float16, 4096, 4096
    shape, form = GemmShape(m, n, k, 4), WeightForm("int4", 128, "none", "fp16")
    widths = (n,) if role == "residual" else (n // 2, n // 2)
    terms = LoraTerms(widths, role == "gated", 4, 16, 2, "fp16")
    options = {"h_type": "fp16"} if role == "residual" else {"norm_parts": 32, "gate": "silu" if role == "gated" else "none"}
    plan = plan_for(choose_chain(role, shape, machine), shape, form, half, False, machine, lora=terms, **options)
    x, codes, scale, channel, _, sums, arrived = mixed_call(shape, half, 128, half)
    call = x, codes, scale, channel if form.channel_scale else None, None, sums, arrived
    if role == "residual":
        call += meta((plan.squares_parts, m), torch.float32), meta((m, n), half), meta((n,), torch.float32), 1.0, None, None
    else:
        call += meta((32, m), torch.float32), None, None, 1.0, 1.0 / k, 1e-5
    call += meta((2, m, len(widths), 16), torch.float32), meta((4, n, 16), half), meta((m,), torch.int32)
    kernel = compile_plan(plan, call, 90)
    if type(plan.tile).__name__ == "WgmmaTile":
        assert not any("LDL" in line or "STL" in line for line in main_loop(kernel.lines)), "registers spilled"
    else:
        spilled = [i for i, line in enumerate(kernel.lines) if "LDL" in line or "STL" in line]
        assert not any(first <= i <= last for i in spilled for first, last in kernel.loops), "registers spilled"


@pytest.mark.parametrize("end", ["norm", "silu", "residual", "plain"])
@pytest.mark.parametrize(("m", "sm"), [(1, 90), (16, 90), (64, 90), (8, 80), (1024, 90), (300, 80)])
def test_machine_code(end, m, sm):
    """Products with a bias of tokens do not spill in their main loops."""
    if m > 64 and end in ("norm", "residual"):
        pytest.skip("a chain has up to 64 tokens")
    from lowbit.kernels.choose.fused_gemm import choose_chain
    from lowbit.kernels.choose.gemm import choose
    from tests.kernels.sm90.test_compile import main_loop

    machine, half = typical_machine(sm), torch.float16
    shape, form = GemmShape(m, 4096, 4096, 4), WeightForm("int4", 128, "none", "fp16")
    in_chain = m <= 64 and end != "plain"
    role = {"norm": "norm", "residual": "residual"}.get(end, "gated")
    tile = choose_chain(role, shape, machine) if in_chain else choose(shape, machine)
    if end == "silu" and not in_chain and type(tile).__name__ == "RingTile":
        pytest.skip("a separate kernel computes the gate")
    options = {"gate": end} if end == "silu" else {"h_type": "fp16"} if end == "residual" else {}
    options |= {"norm_parts": 32} if in_chain and end != "residual" else {}
    plan = plan_for(tile, shape, form, half, True, machine, bias_of_tokens=True, **options)
    x, codes, scale, channel, _, sums, arrived = mixed_call(shape, half, 128, half)
    call = x, codes, scale, channel if form.channel_scale else None, meta((m, 4096), half), sums, arrived
    if end == "residual":
        h = meta((m, 4096), half)
        call += meta((plan.squares_parts, m), torch.float32), h, meta((4096,), torch.float32), 1.0
        call += (None, None) if type(tile).__name__ == "RingTile" else ()
    elif in_chain:
        call += meta((32, m), torch.float32), None, None, 1.0, 1.0 / 4096, 1e-5
    kernel = compile_plan(plan, call, sm)
    if type(tile).__name__ == "WgmmaTile":
        assert not any("LDL" in line or "STL" in line for line in main_loop(kernel.lines)), "registers spilled"
    else:
        assert kernel.stack_bytes == 0 or not any("LDL" in line for line in kernel.lines), "registers spilled"


# ---- on a GPU


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64])
def test_chains_with_a_bias_of_tokens_on_a_gpu(m, dtype):
    for scheme, n, k in (("w4a16_g128", 4096, 2048), ("w8a16", 1008, 576)):
        q = quantized(scheme, n, k, "cuda")
        w = FragmentWeight.pack(q)
        x, h, bias = (torch.randn(m, size, device="cuda", dtype=dtype) for size in (k, n, n))
        squares, gamma = k * (0.5 + torch.rand(37, m, device="cuda")), torch.rand(n, device="cuda") + 0.5
        for gated in ("none", "silu"):
            given = {"width": k, "eps": 1e-5, "gated": gated}
            poison((m, n), dtype=dtype)
            y = norm_gemm(x, w, squares, bias, factor=0.5, **given)
            expected = norm_gemm_reference(x, q, squares, bias, x_factor=0.5, **given)
            assert relative_error(y, expected) < (2e-3 if dtype == torch.float16 else 1.2e-2), (scheme, gated)
            assert torch.equal(y, norm_gemm(x, w, squares, bias, factor=0.5, **given))
        after = h.clone()
        following, _ = residual_gemm(x, w, after, gamma, bias)
        added, _, _ = residual_gemm_reference(x, q, h, gamma, bias)
        assert relative_error(after, added) < (2e-3 if dtype == torch.float16 else 1.2e-2), scheme
        assert torch.equal(following, (after.float() * gamma).to(dtype))


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [1, 4, 8, 16, 33, 64])
def test_chains_with_adapters_on_a_gpu(m, dtype):
    """Against float64, with the same bits twice; q, k and v of unequal widths, gates and ups, ragged columns."""
    limit = 2e-3 if dtype == torch.float16 else 1.2e-2
    for scheme, widths, k, rank in (
        ("w4a16_g128", (4096, 1024, 1024), 4096, 16), ("w4a16_g128", (1792, 1792), 2048, 32),
        ("w8a16", (600, 200, 208), 576, 64),
    ):  # fmt: skip
        n = sum(widths)
        q = quantized(scheme, n, k, "cuda")
        w = FragmentWeight.pack(q)
        squares, bias = k * (0.5 + torch.rand(37, m, device="cuda")) / 37, torch.randn(n, device="cuda").to(dtype)
        given = {"width": k, "eps": 1e-5, "factor": 0.5}
        gates = len(widths) == 2
        x, sums = sums_of(m, widths, rank, k, dtype, "cuda", gates, squares=squares, **given)
        part_of = part_of_columns(widths, gates)
        a, b, adapter_of = sums.weight.a, sums.weight.b, sums.adapter_of
        added = lora_reference(x, a, b, adapter_of, part_of, squares, bias, **given)
        for gated in ("none", "silu") if gates else ("none",):
            expected = norm_gemm_reference(x, q, squares, added, width=k, eps=1e-5, x_factor=0.5, gated=gated)
            made = []
            for _ in range(2):
                poison((m, n), dtype=dtype)
                made.append(norm_gemm(x, w, squares, bias, gated=gated, lora=sums, **given))
            assert relative_error(made[0], expected) < limit, (scheme, gated)
            assert torch.equal(*made)
    for k, rank in ((4096, 16), (14336, 16), (4096, 64)):
        q = quantized("w4a16_g128", 4096, k, "cuda")
        w, h = FragmentWeight.pack(q), torch.randn(m, 4096, device="cuda").to(dtype)
        gamma = torch.rand(4096, device="cuda") + 0.5
        x, sums = sums_of(m, (4096,), rank, k, dtype, "cuda")
        added = lora_reference(x, sums.weight.a, sums.weight.b, sums.adapter_of, part_of_columns((4096,), False))
        after = [h.clone(), h.clone()]
        following = [residual_gemm(x, w, each, gamma, lora=sums)[0] for each in after]
        expected, _, _ = residual_gemm_reference(x, q, h, gamma, added)
        assert relative_error(after[0], expected) < limit, k
        assert torch.equal(*after) and torch.equal(following[0], (after[0].float() * gamma).to(dtype))


@gpu
@pytest.mark.parametrize("m", [1, 16])
def test_rows_of_16_bits_with_adapters_on_a_gpu(m):
    values = (torch.randn(2048, 1024, device="cuda") * 1024**-0.5).half()
    squares, given = 1024 * (0.5 + torch.rand(9, m, device="cuda")) / 9, {"width": 1024, "eps": 1e-5}
    x, sums = sums_of(m, (1024, 1024), 16, 1024, torch.float16, "cuda", squares=squares, **given)
    y = norm_gemm(x, DenseWeight(values), squares, gated="silu", lora=sums, **given)
    a, b, adapter_of = sums.weight.a, sums.weight.b, sums.adapter_of
    added = lora_reference(x, a, b, adapter_of, part_of_columns((1024, 1024), False), squares, **given)
    paired = DenseWeight(alternate(*values.chunk(2)))
    bias = alternate(*added.T.chunk(2)).T
    assert relative_error(y, norm_gemm_reference(x, paired, squares, bias, gated="silu", **given)) < 2e-3


@gpu
@pytest.mark.parametrize("m", [1, 16, 100, 1000])
def test_products_with_a_bias_of_tokens_on_a_gpu(m):
    for n, k in ((4096, 2048), (1008, 576)):
        q, other = quantized("w4a16_g64", n, k, "cuda"), quantized("w4a16_g64", n, k, "cuda", 1)
        x, bias = torch.randn(m, k, device="cuda").half(), torch.randn(m, 2 * n, device="cuda").half()
        poison((m, n), dtype=torch.float16)
        y = fragment_gemm(x, FragmentWeight.pack(q), bias[:, :n])
        assert relative_error(y, mixed_gemm_reference(x, q, bias[:, :n])) < 2e-3
        y = gated_gemm(x, pack_gated(q, other), bias, "silu")
        gate, up = bias.unflatten(1, (-1, 2, 8)).unbind(2)
        both = [mixed_gemm_reference(x, part, added.flatten(1)) for part, added in ((q, gate), (other, up))]
        assert relative_error(y, gate_reference(both[0], both[1], "silu")) < 4e-3


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_a_graph_on_a_gpu(dtype):
    """A captured call takes adapter_of at its replay."""
    weight = weight_of(3, (512, 128, 128), 16, 1024, dtype, "cuda")
    x = torch.randn(9, 1024, device="cuda", dtype=dtype)
    adapter_of = torch.full((9,), -1, dtype=torch.int32, device="cuda")
    bias = torch.randn(768, device="cuda", dtype=dtype)
    lora(x, weight, adapter_of, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lora(x, weight, adapter_of, bias)
    for which in ([-1] * 9, [0, 1, 2, -1, 2, 1, 0, -1, 1], [2] * 9):
        adapter_of.copy_(torch.tensor(which, dtype=torch.int32))
        graph.replay()
        expected = lora_reference(x, weight.a, weight.b, adapter_of, part_of_columns(weight.widths, False), None, bias)
        assert relative_error(y, expected) < (2e-3 if dtype == torch.float16 else 1.2e-2)
