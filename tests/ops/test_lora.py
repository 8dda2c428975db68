"""The operator of low-rank adapters, and products whose bias is of tokens: on a CPU by references, on a GPU against float64."""

from __future__ import annotations

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
from lowbit.ops.lora import LoraWeight, lora
from lowbit.pack import DenseWeight, FragmentWeight, WeightForm
from lowbit.pack.gated import pack_gated
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
