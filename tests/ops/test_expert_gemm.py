"""Expert GEMMs against a float64 product of the same dequantized weights: on a CPU, and every kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.experts import ExpertShape, candidates, tile_rows_for
from lowbit.kernels.reference.experts import EXPERT_GATES, expert_gemm_reference
from lowbit.ops.expert_gemm import expert_gemm, plan_for
from lowbit.pack import ExpertWeight
from lowbit.quantize import rtn
from tests.kernels.routing import choices, routing_of

gpu = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]
SCHEMES = [
    "w2a16_g64", "w3a16_g128", "w4a16_g128", "w4a16_g32", "w4a16_pc", "w5a16_g32", "w6a16_g128", "w7a16_g64", "w8a16",
    "w6e3m2a16", "w6e2m3a16_g64", "w5e2m2a16", "w4e2m1a16_g32", "w8e4m3a16", "w8e4m3a16_b128x128", "w8e5m2a16_t",
    "w4a16_g128_z", "w4a16_g16_z", "w4a16_g32_fz", "w8a16_z",
]  # fmt: skip


def matrices(scheme, count, n, k, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [rtn((torch.randn(n, k, generator=generator) * k**-0.5).to(device), scheme) for _ in range(count)]


def packed(scheme, count, n, k, gate, device="cpu"):
    if gate == "none":
        return ExpertWeight.pack(matrices(scheme, count, n, k, device))
    return ExpertWeight.pack_gated(*(matrices(scheme, count, n // 2, k, device, seed) for seed in (1, 2)))


def relative_error(y, reference) -> float:
    return float((y.double() - reference).norm() / reference.norm())


def honest(x, w, routing, bias, gate, weighted):
    """Returns torch's result in the dtype of x with dequantized weights. It is rounded where modules that are not fused
    round."""
    wide = expert_gemm_reference(x, w, routing.experts, None, bias).to(x.dtype)
    if gate != "none":
        first, second = (part.flatten(1) for part in wide.unflatten(1, (-1, 2, 8)).unbind(2))
        wide = EXPERT_GATES[gate](first, second)
    return wide * routing.weights.flatten()[:, None].to(x.dtype) if weighted else wide


def check(x, w, routing, bias, gate, per_slot, weighted, **options):
    """Checks y with poisoned outputs: its error is bounded by that of torch's roundings, and two runs give equal bits."""
    columns = w.shape[0] // (1 if gate == "none" else 2)
    given = {"gate": gate, "per_slot": per_slot, "weighted": weighted, **options}
    torch.full((routing.experts.numel(), columns), float("nan"), dtype=x.dtype, device=x.device)  # poisons memory to be reused
    y = expert_gemm(x, w, routing, bias, **given)
    expected = expert_gemm_reference(x, w, routing.experts, routing.weights, bias, gate=gate, weighted=weighted)
    assert y.shape == expected.shape and y.dtype == x.dtype
    plain = relative_error(honest(x, w, routing, bias, gate, weighted), expected)
    assert relative_error(y, expected) <= 2 * plain + 2e-4
    assert torch.equal(y, expert_gemm(x, w, routing, bias, **given)), "same input, same bits"
    return y


# ---- without a GPU


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(("scheme", "gate"), [("w4a16_g128", "silu"), ("w8a16", "none"), ("w4e2m1a16_g32", "clamped_swiglu")])
def test_on_a_cpu(scheme, gate, dtype):
    generator = torch.Generator().manual_seed(0)
    w = packed(scheme, 6, 48, 200, gate)
    routing = routing_of(choices(9, 2, 5, generator), 6, 8)
    bias = torch.randn(6, 48, generator=generator).to(dtype)
    for per_slot in (False, True):
        x = torch.randn(18 if per_slot else 9, 200, generator=generator).to(dtype)
        for weighted in (False, True):
            y = check(x, w, routing, bias if weighted else None, gate, per_slot, weighted)
            if dtype == torch.float32:
                reference = expert_gemm_reference(
                    x, w, routing.experts, routing.weights, bias if weighted else None, gate=gate, weighted=weighted
                )
                torch.testing.assert_close(y.double(), reference, rtol=1e-5, atol=1e-5)


def test_experts_without_slots_are_not_dequantized(monkeypatch):
    w = packed("w4a16_g128", 6, 48, 200, "none")
    routing, taken = routing_of(torch.tensor([[1, 4], [4, 1]]), 6, 8), []
    whole = ExpertWeight.expert
    monkeypatch.setattr(ExpertWeight, "expert", lambda self, e: taken.append(e) or whole(self, e))
    expert_gemm(torch.randn(2, 200), w, routing)
    assert taken == [1, 4]


def on(device, w):
    return replace(w, **{name: t.to(device) for name, t in w.tensors().items()})


def test_without_data():
    w, routing = on("meta", packed("w4a16_g128", 4, 48, 200, "silu")), routing_of(torch.tensor([[1, 3], [0, 1]]), 4, 8)
    routing = replace(routing, **{n: t.to("meta") for n, t in tensors_of(routing).items()})
    x = torch.empty(2, 200, dtype=torch.float16, device="meta")
    assert expert_gemm(x, w, routing).shape == (4, 48)
    assert expert_gemm(x, w, routing, gate="silu").shape == (4, 24)


def test_what_does_not_fit_says_why():
    w, routing = packed("w4a16_g128", 4, 48, 200, "none"), routing_of(torch.tensor([[1, 3], [0, 1]]), 4, 8)
    x, bias = torch.randn(2, 200), torch.randn(4, 48)
    with pytest.raises(ValueError, match=r"x of 2 tokens has as many rows, got \(3, 200\)"):
        expert_gemm(torch.randn(3, 200), w, routing)
    with pytest.raises(ValueError, match=r"x of 4 slots \(per_slot\) has as many rows, got \(2, 200\)"):
        expert_gemm(x, w, routing, per_slot=True)
    with pytest.raises(ValueError, match="another K, another scheme"):
        expert_gemm(torch.randn(2, 128), w, routing)
    with pytest.raises(ValueError, match=r"bias of 4 experts is \[4, \.\.\], got \(3, 48\)"):
        expert_gemm(x, w, routing, bias[:3])
    with pytest.raises(ValueError, match=r"bias is \[48\], got \(40,\)"):
        expert_gemm(x, w, routing, bias[:, :40])
    with pytest.raises(ValueError, match="gate is none, silu, gelu_tanh, clamped_swiglu, .* got 'relu', N 48"):
        expert_gemm(x, w, routing, gate="relu")
    with pytest.raises(ValueError, match=r"x is fp16 or bf16 \[\.\., K\], got torch.float64"):
        expert_gemm(x.double(), w, routing)
    with pytest.raises(ValueError, match=r"weights of a routing of 4 slots is contiguous torch.float32 \[2, 2\]"):
        expert_gemm(x, w, replace(routing, weights=routing.weights.half()))
    with pytest.raises(ValueError, match=r"tiles of a routing of 4 slots is contiguous torch.int32 .* got torch.int32 \[12\]"):
        expert_gemm(x, w, replace(routing, tiles=routing.tiles.flatten()))
    eight = packed("w4a8_g128", 4, 48, 256, "none")
    with pytest.raises(ValueError, match="w4a8_g128 has int8 activations; call scaled_expert_gemm"):
        expert_gemm(torch.randn(2, 256), eight, routing)


# ---- on a GPU


def routings(tokens, top_k, count, tile_rows, generator):
    """Three routings: random choices; one expert for all first choices; choices spread over as many experts as possible. Some
    experts have no slot.
    """
    random = choices(tokens, top_k, max(count - 1, top_k), generator, "cuda")
    together = random.clone()
    together[:, 0] = count - 1
    spread = (torch.arange(tokens * top_k, device="cuda", dtype=torch.int32) % count).view(tokens, top_k)
    return [routing_of(each, count, tile_rows) for each in (random, together, spread)]


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_format(scheme, dtype):
    """N and K are no multiples of a tile. Experts have no slot, one slot, or more slots than a tile has rows. There are few and
    many rows, gates, biases and router weights."""
    generator = torch.Generator().manual_seed(0)
    for place, (n, k) in enumerate([(528, 1096), (1000, 576)]):
        gate = "none" if place else "silu"
        w = packed(scheme, 7, n, k, gate, "cuda")
        bias = torch.randn(7, n, generator=generator).to("cuda", dtype)
        for tokens, tile_rows in ((1, 8), (13, 8), (30, 16), (150, 64), (300, 128)):
            x = torch.randn(3 * tokens if place else tokens, k, generator=generator).to("cuda", dtype)
            for routing in routings(tokens, 3, 7, tile_rows, generator)[: 1 if tokens == 1 else 3]:
                check(x, w, routing, bias if tokens % 2 else None, gate, bool(place), weighted=bool(place))


@gpu
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("tile_rows", [8, 16, 64, 128])
def test_gates(gate, tile_rows):
    generator = torch.Generator().manual_seed(1)
    w = packed("w4e2m1a16_g32", 5, 320, 704, gate, "cuda")
    bias = 4 * torch.randn(5, 320, generator=generator).to("cuda", torch.bfloat16)
    x = 3 * torch.randn(90, 704, generator=generator).to("cuda", torch.bfloat16)
    check(x, w, routing_of(choices(90, 2, 5, generator, "cuda"), 5, tile_rows), bias, gate, False, True)


@gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a16_z"])
@pytest.mark.parametrize(("tokens", "tile_rows"), [(20, 8), (40, 16), (200, 64), (400, 128)])
def test_every_tile(scheme, tokens, tile_rows):
    """Runs each candidate tile; the shapes of the other tests reach only a few."""
    generator, machine = torch.Generator().manual_seed(2), machine_of("cuda")
    n, k, count = 528, 1096, 6
    w = packed(scheme, count, n, k, "silu", "cuda")
    x = torch.randn(tokens, k, generator=generator).to("cuda", torch.float16)
    routing = routing_of(choices(tokens, 2, 5, generator, "cuda"), count, tile_rows)
    shape = ExpertShape(tokens, 2, count, n, k, w.scheme.weight.bits, tile_rows)
    expected = expert_gemm_reference(x, w, routing.experts, routing.weights, gate="silu", weighted=True)
    plain = relative_error(honest(x, w, routing, None, "silu", True), expected)
    listed = routing.tiles, routing.tile_count, routing.order, routing.weights
    for place, row in enumerate(row for row in candidates(shape, machine) if not row.reasons):
        plan = plan_for(
            row.tile, shape, w.form, x.dtype, False, machine, gate="silu", weighted=True, early=place % 2 == 1
        )  # fmt: skip
        torch.full_like(expected, float("nan"), dtype=x.dtype)
        y = plan(x, w.codes, w.scale, w.channel_scale, None, *listed)
        assert relative_error(y, expected) <= 2 * plain + 2e-4, row.tile


@gpu
def test_one_hot_activations_return_the_weights():
    w, generator = packed("w4a16_g64", 4, 200, 704, "none", "cuda"), torch.Generator().manual_seed(3)
    for tokens, tile_rows in ((8, 8), (33, 16), (150, 64)):
        columns = torch.randint(704, (tokens,), generator=generator).cuda()
        x = torch.nn.functional.one_hot(columns, 704).half()
        routing = routing_of(choices(tokens, 2, 4, generator, "cuda"), 4, tile_rows)
        values = torch.stack([q.dequantize(torch.float32) for q in w.unpack()])
        slots = routing.experts.flatten().long()
        expected = values[slots, :, columns.repeat_interleave(2)].half()
        assert torch.equal(expert_gemm(x, w, routing), expected)


@gpu
def test_rows_do_not_depend_on_the_batch_where_they_must_not():
    w, generator = packed("w4a16_g128", 8, 512, 1024, "silu", "cuda"), torch.Generator().manual_seed(4)
    x = torch.randn(200, 1024, generator=generator).to("cuda", torch.bfloat16)
    experts, weights = choices(200, 2, 8, generator, "cuda"), torch.rand(200, 2, generator=generator).cuda()
    whole = None
    for tokens in (200, 1, 7, 40, 129):
        rows = tile_rows_for(tokens, 2, 8, 4, batch_invariant=True)
        routing = routing_of(experts[:tokens], 8, rows, weights[:tokens].cpu())
        y = expert_gemm(x[:tokens], w, routing, gate="silu", weighted=True, batch_invariant=True)
        whole = y if whole is None else whole
        assert torch.equal(y, whole[: 2 * tokens])
    with pytest.raises(ValueError, match="batch-invariant products of experts have tiles of 8, 16 rows, .* tiles of 64"):
        expert_gemm(x, w, routing_of(experts, 8, 64), batch_invariant=True)


@gpu
def test_a_layer_in_a_graph_follows_its_routing():
    """A captured layer is replayed with a different routing. The host's work does not depend on the routing."""
    generator = torch.Generator().manual_seed(5)
    up, down = packed("w4a16_g128", 8, 512, 256, "silu", "cuda"), packed("w4a16_g128", 8, 256, 256, "none", "cuda")
    x = torch.randn(12, 256, generator=generator).to("cuda", torch.bfloat16)
    several = [routing_of(choices(12, 2, 8, generator, "cuda"), 8, 8) for _ in range(3)]
    routing = replace(several[0], **{n: t.clone() for n, t in tensors_of(several[0]).items()})

    def layer():
        h = expert_gemm(x, up, routing, gate="silu")
        return expert_gemm(h, down, routing, per_slot=True, weighted=True, routed_before=True)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    for other in several:
        for name, t in tensors_of(other).items():
            getattr(routing, name).copy_(t)
        y.fill_(float("nan"))
        graph.replay()
        h = expert_gemm_reference(x, up, other.experts, None, gate="silu").to(x.dtype)
        expected = expert_gemm_reference(h, down, other.experts, other.weights, weighted=True)
        assert relative_error(y, expected) < 1e-2


def tensors_of(routing):
    return {n: t for n, t in vars(routing).items() if isinstance(t, torch.Tensor)}


@gpu
def test_no_tokens():
    w = packed("w4a16_g128", 4, 48, 256, "none", "cuda")
    routing = routing_of(torch.zeros(0, 2, dtype=torch.int32, device="cuda"), 4, 8)
    assert expert_gemm(torch.empty(0, 256, dtype=torch.float16, device="cuda"), w, routing).shape == (0, 48)
