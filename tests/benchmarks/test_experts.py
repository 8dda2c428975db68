"""Arguments and output of `python -m benchmarks experts` without a GPU; on a CPU, its block equals its reference."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experts import (
    COLUMNS,
    MODELS,
    ExpertLayer,
    Inputs,
    Weights,
    block_reference,
    calls_needed,
    first_product,
    inner_of,
    input_of,
    layer_bytes,
    make_request,
    relative_error,
    run,
    second_product,
    source_of,
    table,
    tile_lines,
    values,
)
from lowbit.ops.expert_gemm import sum_slots
from lowbit.ops.quantize_activations import Activations
from lowbit.pack import ExpertOperandWeight, ExpertWeight
from lowbit.quantize import rtn
from lowbit.tune.timing import WrongResult
from tests.kernels.routing import choices, routing_of


def test_requests():
    request = make_request("OLMoE-1B-7B,Qwen3-30B-A3B", "w4a16_g64", "1,64", True, False)
    assert request.models == ("OLMoE-1B-7B", "Qwen3-30B-A3B") and request.tokens == (1, 64)
    assert make_request(None, None, None, False, True).models == tuple(MODELS)
    with pytest.raises(ValueError, match="known models are Qwen3-30B-A3B, .* got 'Llama'"):
        make_request("Llama", None, None, False, True)
    assert make_request(None, "w8a8", None, False, True).schemes == ("w8a8",)
    with pytest.raises(ValueError, match="--tiles: tiles are timed with 16-bit activations, not w8a8"):
        make_request(None, "w4a16_g128,w8a8", None, True, True)
    assert make_request(None, None, None, False, True, rivals="marlin,humming").rivals == ("marlin", "humming")
    with pytest.raises(ValueError, match="known rivals are marlin, triton, wna16, humming, or none, got 'sglang'"):
        make_request(None, None, None, False, True, rivals="marlin,sglang")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_request(None, None, "0", False, True)
    with pytest.raises(ValueError, match=r"tiles of \(8, 16, 64, 128\) rows, not 32"):
        make_request(None, None, None, False, True, 32)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="measures an NVIDIA GPU"):
            run(request, None, print)


def test_limits_are_those_of_the_experts_hit():
    layer = MODELS["Qwen3-30B-A3B"]
    weights = 3 * 2048 * 768
    assert layer_bytes(layer, None) == 2 * weights
    assert layer_bytes(layer, "w4a16_g128") == weights * (4 + 16 / 128) / 8
    for tokens in (1, 16, 1024):
        for name in MODELS:
            calls, copies = calls_needed(MODELS[name], "w4a16_g128", tokens, 50 << 20)
            one = layer_bytes(MODELS[name], "w4a16_g128")
            assert copies * MODELS[name].experts * one >= 4 << 30 and max(2, copies) <= calls <= 64
            hit = MODELS[name].experts * (1 - (1 - MODELS[name].top_k / MODELS[name].experts) ** tokens)
            assert calls == 64 or calls * hit * one / 3 >= 3 * (50 << 20)


def test_the_block_equals_its_reference():
    layer, generator = ExpertLayer(5, 2, 64, 48, "clamped_swiglu", True), torch.Generator().manual_seed(0)

    def matrices(n, k):
        return [rtn(torch.randn(n, k, generator=generator) * k**-0.5, "w4a16_g32") for _ in range(5)]

    w = Weights(
        ExpertWeight.pack_gated(matrices(48, 64), matrices(48, 64)), ExpertWeight.pack(matrices(64, 48)),
        torch.randn(5, 96, generator=generator).bfloat16(), torch.randn(5, 64, generator=generator).bfloat16(),
    )  # fmt: skip
    x, residual = torch.randn(2, 7, 64, generator=generator).bfloat16()
    routing = routing_of(choices(7, 2, 5, generator), 5, 8)
    h = first_product(layer, w, input_of(w, x), routing)
    y = sum_slots(second_product(w, inner_of(layer, w, h), routing), 2, residual)
    reference = block_reference(layer, w, Inputs(x, residual, torch.empty(0), routing))
    assert relative_error(y, reference) < 5e-3
    with pytest.raises(WrongResult, match="relative error"):
        relative_error(y.roll(1, 0), reference)
    with pytest.raises(WrongResult, match="not finite"):
        relative_error(y.index_fill(0, torch.tensor([3]), float("nan")), reference)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "fp8_block"])
def test_the_block_with_8_bit_activations_equals_its_reference(scheme):
    """Rows of gate precede those of up; the gate and the quantization stand between the products."""
    layer, generator = ExpertLayer(4, 2, 128, 256), torch.Generator().manual_seed(0)

    def packed(n, k):
        return ExpertOperandWeight.pack([rtn(torch.randn(n, k, generator=generator) * k**-0.5, scheme) for _ in range(4)])

    w = Weights(packed(512, 128), packed(128, 256), None, None)
    x, residual = torch.randn(2, 5, 128, generator=generator).bfloat16()
    routing = routing_of(choices(5, 2, 4, generator), 4, 8)
    given = input_of(w, x)
    assert (
        w.is_scaled and isinstance(given, Activations) and float((values(given) - x.double()).norm() / x.double().norm()) < 0.05
    )
    h = first_product(layer, w, given, routing)
    assert h.shape == (10, 512)
    y = sum_slots(second_product(w, inner_of(layer, w, h), routing), 2, residual)
    inputs = Inputs(x, residual, torch.empty(0), routing)
    assert relative_error(y, block_reference(layer, w, inputs)) < 5e-3
    with pytest.raises(ValueError, match=f"rivals are timed with 16-bit activations, not {scheme}"):
        source_of(layer, scheme, w)


def test_table_and_tiles():
    common = {"model": "OLMoE-1B-7B", "tokens": 4, "limit_us": 10.0, "experts_hit": 26.5, "rel_err": 1e-3, "error": None}
    parts = {"route_us": 2.0, "gate_up_us": 11.0, "down_us": 6.0, "sum_us": 1.5}
    timed = [
        {"part": "gate_up", "tile": "A", "chosen": True, "us": 11.0, "modelled_us": 10.0},
        {"part": "gate_up", "tile": "B", "chosen": False, "us": 9.0, "modelled_us": 10.5},
        {"part": "gate_up", "tile": "C", "chosen": False, "us": 12.0, "modelled_us": 10.6},
    ]
    rows = [
        {**common, "impl": "torch16", "scheme": "bf16", "us": 60.0},
        {**common, "impl": "lowbit", "scheme": "w4a16_g128", "us": 20.0, **parts, "tiles": timed},
        {**common, "impl": "lowbit", "scheme": "w8a16", "us": None, "error": "WrongResult: relative error 1"},
    ]
    made = table({"rows": rows})
    assert all(len(row) == len(COLUMNS) for row in made)
    numbers = "26.5", "20.0", "10.0", "50%", "2.0", "11.0", "6.0", "1.5", "3.00"
    assert made[1] == ("OLMoE-1B-7B", "lowbit", "w4a16_g128", "4", *numbers)
    assert made[2][4] == "WrongResult: relative error 1"
    assert tile_lines({"rows": rows}) == [
        "OLMoE-1B-7B w4a16_g128 4 tokens, gate_up:",
        "    chosen A: 11.00 us, modelled 10.00",
        "    fastest B: 9.00 us, modelled 10.50",
    ]
