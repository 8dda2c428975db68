"""Products of experts with 8-bit x, compared with a float64 product of the same numbers. On a GPU the kernel is tested too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.kernels.reference.experts import expert_gemm_reference
from lowbit.ops import expert_gemm, quantize_activations, scaled_expert_gemm
from lowbit.ops.experts import expert_mlp
from lowbit.pack import ExpertOperandWeight, ExpertWeight
from lowbit.quantize import rtn
from tests.kernels.routing import choices, routing_of

INT8 = ["w8a8", "w8a8_t", "w4a8_g128", "w5a8", "w6a8"]
FP8 = ["w8e4m3a8e4m3", "w6e3m2a8e4m3", "fp8_block", "w4a8e4m3_g128"]


def matrices(scheme, count, n, k, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [rtn((torch.randn(n, k, generator=generator) * k**-0.5).to(device), scheme) for _ in range(count)]


def quantized(x, scheme, zero=False):
    parsed = parse_scheme(scheme)
    blocks = "_b" in parsed.name
    return quantize_activations(x, parsed.activation.name, **({"group": 128} if blocks else {"symmetric": not zero}))


def values(x):
    """Returns the values that codes, scales and zeros of x represent."""
    codes = x.codes.double() - (0 if x.zero is None else x.zero)
    scale = x.scale.double()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes * scale


def check(x, w, routing, bias, **given):
    """Checks that y has the error of one rounding and of float32 sums, and the same bits in a second run."""
    # the allocator returns this memory next
    torch.full((routing.experts.numel(), w.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    y = scaled_expert_gemm(x, w, routing, bias, **given)
    weighted = given.get("weighted", False)
    expected = expert_gemm_reference(values(x), w, routing.experts, routing.weights, bias, weighted=weighted)
    assert y.shape == expected.shape and y.dtype == x.dtype
    error = float((y.double() - expected).norm() / expected.norm())
    assert error <= 2 * float((expected.to(x.dtype).double() - expected).norm() / expected.norm()) + 5e-4
    assert torch.equal(y, scaled_expert_gemm(x, w, routing, bias, **given)), "same input, same bits"


@pytest.mark.parametrize("scheme", [*INT8, *FP8])
def test_on_a_cpu(scheme):
    generator = torch.Generator().manual_seed(0)
    w = ExpertOperandWeight.pack(matrices(scheme, 6, 48, 264))
    assert all(
        torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(w.unpack(), matrices(scheme, 6, 48, 264), strict=True)
    )
    routing, bias = routing_of(choices(9, 2, 5, generator), 6, 8), torch.randn(6, 48, generator=generator)
    for per_slot in (False, True):
        x = torch.randn(18 if per_slot else 9, 264, generator=generator).bfloat16()
        x = quantized(x, scheme, zero=per_slot and scheme in INT8)
        check(x, w, routing, bias if per_slot else None, per_slot=per_slot, weighted=per_slot)


def test_what_does_not_fit_says_why():
    w, routing = ExpertOperandWeight.pack(matrices("w8a8", 4, 48, 200)), routing_of(torch.tensor([[1, 3], [0, 1]]), 4, 8)
    x = quantized(torch.randn(2, 200), "w8a8")
    with pytest.raises(ValueError, match=r"x of 4 slots \(per_slot\) is \[4, K\], got \(2, 200\)"):
        scaled_expert_gemm(x, w, routing, per_slot=True)
    with pytest.raises(ValueError, match=r"bias of 4 experts \[48, 200\] under w8a8 is \(4, 48\)"):
        scaled_expert_gemm(x, w, routing, torch.randn(48))
    with pytest.raises(ValueError, match="w8a8 takes x torch.int8"):
        scaled_expert_gemm(x._replace(codes=x.codes.float()), w, routing)
    with pytest.raises(ValueError, match="one scheme, shape and type of scales"):
        ExpertOperandWeight.pack([*matrices("w8a8", 1, 48, 200), *matrices("w8a8", 1, 48, 100)])


def test_without_data():
    w, routing = ExpertOperandWeight.pack(matrices("w4a8_g128", 4, 48, 200)), routing_of(torch.tensor([[1, 3], [0, 1]]), 4, 8)
    w = replace(w, **{name: t.to("meta") for name, t in w.tensors().items()})
    routing = replace(routing, **{n: t.to("meta") for n, t in vars(routing).items() if isinstance(t, torch.Tensor)})
    x = quantized(torch.randn(2, 200).half(), "w4a8_g128")
    x = x._replace(codes=x.codes.to("meta"), scale=x.scale.to("meta"))
    y = scaled_expert_gemm(x, w, routing)
    assert y.shape == (4, 48) and y.dtype == torch.float16


@pytest.mark.parametrize("mixed", [False, True])
def test_a_layer_of_experts(mixed):
    """Computes both products of a layer, each with its own quantized x. The first product may have another scheme."""
    generator = torch.Generator().manual_seed(3)
    up, down = matrices("w4a16_g32" if mixed else "w8a8", 5, 96, 64, seed=1), matrices("w8a8", 5, 64, 48, seed=2)
    x, experts = torch.randn(7, 64, generator=generator), choices(7, 2, 5, generator)
    weights = torch.rand(7, 2, generator=generator)

    def silu(h):
        gate, up = h.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    given = x if mixed else quantized(x, "w8a8")
    packed = (ExpertWeight if mixed else ExpertOperandWeight).pack(up)
    inner = lambda h: quantized(h, "w8a8")  # noqa: E731
    y = expert_mlp(given, experts, weights, packed, ExpertOperandWeight.pack(down), gate="none", apply_gate=silu, inner=inner)
    routing = routing_of(experts, 5, 8, weights)
    h = expert_gemm(x, packed, routing) if mixed else scaled_expert_gemm(given, packed, routing)
    expected = expert_gemm_reference(values(inner(silu(h))), ExpertOperandWeight.pack(down), experts, weights, weighted=True)
    torch.testing.assert_close(y.double(), expected.view(7, 2, 64).sum(1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="an ExpertOperandWeight by quantized x"):
        expert_mlp(x, experts, weights, ExpertOperandWeight.pack(down), ExpertOperandWeight.pack(down), gate="none")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [*INT8, *FP8])
def test_a_row_has_the_same_bits_in_every_batch(scheme):
    """One block sums all of K for its rows, whatever the batch and the rows of the routing's tiles."""
    if torch.cuda.get_device_capability() < (8, 9) and scheme in FP8:
        pytest.skip("fp8 needs sm_89 or newer")
    generator = torch.Generator().manual_seed(4)
    w = ExpertOperandWeight.pack(matrices(scheme, 8, 512, 1024, "cuda"))
    x = torch.randn(200, 1024, generator=generator).to("cuda", torch.bfloat16)
    experts, weights = choices(200, 2, 8, generator, "cuda"), torch.rand(200, 2, generator=generator).cuda()
    whole = None
    for tokens in (200, 1, 7, 40, 129):
        for rows in (8, 16, 64, 128):
            routing = routing_of(experts[:tokens], 8, rows, weights[:tokens].cpu())
            y = scaled_expert_gemm(quantized(x[:tokens], scheme), w, routing, weighted=True)
            whole = y if whole is None else whole
            assert torch.equal(y, whole[: 2 * tokens]), (tokens, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("tile_rows", [8, 16, 64, 128])
@pytest.mark.parametrize("scheme", [*INT8, *FP8])
def test_on_a_gpu(scheme, tile_rows):
    if torch.cuda.get_device_capability() < (8, 9) and scheme in FP8:
        pytest.skip("fp8 needs sm_89 or newer")
    generator = torch.Generator().manual_seed(tile_rows)
    for n, k, tokens in ((48, 264, 9), (200, 1000, 70), (1536, 2048, 333)):
        w = ExpertOperandWeight.pack(matrices(scheme, 6, n, k, "cuda"))
        routing = routing_of(choices(tokens, 2, 5, generator, "cuda"), 6, tile_rows)
        bias = torch.randn(6, n, generator=generator).cuda()
        for per_slot in (False, True):
            x = torch.randn(2 * tokens if per_slot else tokens, k, generator=generator).bfloat16().cuda()
            x = quantized(x, scheme, zero=per_slot and scheme in INT8)
            check(x, w, routing, bias if per_slot else None, per_slot=per_slot, weighted=per_slot)
            if x.zero is not None:
                static = x._replace(scale=x.scale[0].clone(), zero=x.zero[0].clone())
                check(static, w, routing, None, per_slot=per_slot)
