"""Products of layers with several matrices as on a GPU, and the kernels compiled ahead."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowbit.formats import QuantTensor
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from lowbit.vllm.product import Product, Shard
from lowbit.vllm.warm_up import (
    compile_kernels,
    compile_soon,
    form_of,
    in_own_order,
    named_kernels,
    together,
    token_counts,
    use_kernels_file,
)

K = 512


def weight(n, seed=0):
    return torch.randn(n, K, generator=torch.Generator().manual_seed(seed)) / K**0.5


def layer(schemes, device="cpu", dtype=torch.float32):
    """(Product of matrices of 64 rows, their dense concatenation). Each has one of `schemes`; "" means 16 bits."""
    held = [rtn(weight(64, i), name) if name else weight(64, i).to(dtype) for i, name in enumerate(schemes)]
    product = Product([Shard(each.to(device)) for each in held])
    dense = [each.dequantize() if isinstance(each, QuantTensor) else each.float() for each in held]
    return product, torch.cat(dense)


@pytest.mark.parametrize(
    ("schemes", "products"),
    [
        (("w4a16_g64",) * 3, 1),
        (("w4a16_g64", "w4a16_g64", "w6e3m2a16"), 2),
        (("w4a16_g64", "w3a16_g64", "w4a16_g64"), 3),
        (("", "", "w8a16"), 2),
        (("w8a16_t", "w8a16_t"), 1),
    ],
)
def test_neighbours_that_fit_together_are_one_product(schemes, products):
    product, dense = layer(schemes)
    product.prepare("layer", torch.float32)
    x, bias = torch.randn(2, 3, K), torch.randn(len(dense))
    assert len(product.factors) == products
    assert torch.allclose(product(x, bias), x @ dense.T + bias, atol=1e-4)


@pytest.mark.parametrize("schemes", [("w4a16_g64",), ("w4a16_g64", "w8a16"), ("w8a8",), ("w6e3m2a16", "")])
def test_traced_once_for_all_batches(schemes):
    """On a CPU, few and many tokens take different paths through torch's GEMMs. One trace must contain both paths."""
    product, _ = layer(schemes, dtype=torch.bfloat16)
    product.prepare("layer", torch.bfloat16)
    count = [0]

    def backend(graph, inputs):
        count[0] += 1
        return graph.forward

    compiled = torch.compile(product, fullgraph=True, backend=backend, dynamic=True)
    for m in (50, 3, 17, 128):
        x = torch.randn(m, K).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, None), product(x, None), rtol=2e-2, atol=2e-2)
    assert count == [1]


def test_numbers_of_tokens_stand_close_to_each_other():
    counts = token_counts((1, 2, 4, 8, 16, 511, 1 << 20), 8192)
    assert counts[:64] == tuple(range(1, 65)) and counts[-1] == 8192 and 511 in counts and len(counts) < 400
    assert all(b - a <= max(16, a // 20) for a, b in pairwise(counts))
    assert token_counts((), 5) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", ["sm80.small_m_gemm:ring_gemm", "sm80.large_m_gemm:mma_gemm", "sm90.large_m_gemm:wgmma_gemm"])
def test_no_kernel_is_compiled_for_what_a_number_of_tokens_is_a_multiple_of(name):
    module, function = name.split(":")
    parameters = getattr(importlib.import_module(f"lowbit.kernels.{module}"), function).params
    assert next(p for p in parameters if p.name == "M").do_not_specialize


def test_a_cpu_has_nothing_to_compile():
    product, _ = layer(("w4a16_g64",))
    assert compile_kernels(product, K, torch.float32, (1, 2)) == 0


def test_layers_of_one_scheme_may_have_kernels_of_their_own():
    """Layers of one scheme may take different kernels: codes are subnormal unless a row has groups of much smaller scales
    (pack/weight.py).
    """
    plain, uneven = weight(64).bfloat16(), weight(64).bfloat16()
    uneven[:, :64] *= 2.0**-10
    layers = [QuantLinear.from_quant_tensor(rtn(each, "w4a16_g64")) for each in (plain, 2 * plain, uneven)]
    for each in layers:
        each._pack_for_gpu()
    assert {each.weight_scale.dtype for each in layers} == {torch.bfloat16}
    assert form_of(layers[0]) == form_of(layers[1]) != form_of(layers[2])


def test_kernels_of_all_layers_are_compiled_at_once(monkeypatch):
    done = []
    monkeypatch.setattr("lowbit.kernels.parts.compile.compiled", lambda wanted, sm: done.append((wanted, sm)) or iter(()))
    compile_soon(["a"], 90)
    with together():
        compile_soon(["b", "c"], 90)
        compile_soon(["c", "d"], 90)
        assert done == [(["a"], 90)]
    with pytest.raises(ValueError, match="of a layer"), together():
        compile_soon(["e"], 90)
        raise ValueError("of a layer")
    compile_soon(["f"], 90)
    assert done == [(["a"], 90), (["b", "c", "d"], 90), (["f"], 90)]


@pytest.mark.parametrize(("rank", "kernels"), [(0, ["a", "b", "c"]), (1, ["c", "b", "a"]), (2, ["a", "b", "c"])])
def test_every_other_rank_compiles_from_the_end(rank, kernels):
    """Two ranks compile half of the kernels each and find the other half in the cache."""
    assert in_own_order(["a", "b", "c"]) == ["a", "b", "c"], "without ranks"
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        assert in_own_order(["a", "b", "c"]) == kernels
    finally:
        torch.distributed.destroy_process_group()


def test_layers_that_are_not_batch_invariant_are_named():
    product, _ = layer(("w4a16_g64",))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp: .* without VLLM_BATCH_INVARIANT"):
        product.prepare("model.layers.0.mlp", torch.bfloat16, batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("schemes", [("w4a16_g64",) * 3, ("w4a16_g128", "w6e3m2a16"), ("w8a8", "w8a8"), ("w3a16_g32", "")])
def test_on_a_gpu(schemes, invariant):
    product, dense = layer(schemes, "cuda", torch.bfloat16)
    product.prepare("layer", torch.bfloat16, batch_invariant=invariant)
    counts, bias = (1, 2, 17, 300), torch.randn(len(dense)).bfloat16().cuda()
    from triton import knobs

    with together():
        compile_kernels(product, K, torch.bfloat16, counts, bias)
    compiled = []
    knobs.compilation.listener = lambda src, **given: compiled.append(src.name)
    for m in counts:
        x = torch.randn(m, K).bfloat16().cuda()
        expected = x.float().cpu() @ dense.T + bias.float().cpu()
        error = (product(x, bias).float().cpu() - expected).norm() / expected.norm()
        assert error < (0.02 if "w8a8" in schemes else 0.01)
    knobs.compilation.listener = None
    assert not compiled, "a kernel that a request would have waited for"


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_slow_in_silence():
    product, _ = layer(("w4a8_g32",), "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match=r"layer: no kernel for w4a8_g32 .* use fewer ranks"):
        product.prepare("layer", torch.bfloat16)


def test_a_kernels_file_by_name_or_beside_the_checkpoint(monkeypatch):
    """vLLM asks for every layer; the file is installed once."""
    used = []
    monkeypatch.setattr("lowbit.engine.kernels.use_kernels", lambda *arguments: used.append(arguments))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use_kernels_file("on-a-cpu.lowbit", "model")
    assert used == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for given in ({"lowbit_kernels": "mine.lowbit"}, {}, {"other": 1}, None):
        use_kernels_file(named_kernels(given), "model")
    device = torch.device("cuda", 1)
    assert used == [(device, "mine.lowbit", Path("model")), (device, None, Path("model"))]
    with pytest.raises(ValueError, match="lowbit_kernels is the name of a kernels file"):
        named_kernels({"lowbit_kernels": 3})
