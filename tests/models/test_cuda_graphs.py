"""Quantized models in CUDA graphs (of torch.compile, of static caches, captured by hand), and which graphs share memory."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.nn import QuantLinear, convert
from lowbit.ops import workspace as module
from lowbit.ops.byte_gemm import byte_gemm
from lowbit.ops.fragment_gemm import fragment_gemm
from lowbit.ops.workspace import make_counters, workspace
from lowbit.pack import FragmentWeight, OperandWeight
from lowbit.quantize import rtn

SCHEMES = ["w4a16_g128", "w6e3m2a16", "w8a8", "fp8_dynamic", "w4a8_g128"]
SPLIT = (2048, 4096)
"""N and K of a product whose K is split between blocks, with 16-bit x for 32 and 48 tokens, with 8-bit x for 8 and 16."""


def model(scheme: str) -> LlamaForCausalLM:
    """A model whose products split K between blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, dtype=torch.float16,
    )  # fmt: skip
    made = LlamaForCausalLM(config).to(torch.float16).cuda().eval()
    convert(made, scheme)
    for layer in made.modules():
        if isinstance(layer, QuantLinear):
            assert layer.prepare(torch.float16) == ()
    return made


def ids(m: int) -> torch.Tensor:
    return torch.randint(0, 512, (1, m), generator=torch.Generator().manual_seed(m)).cuda()


def products(scheme: str, m: int):
    """Returns a function that multiplies a random weight and a random x by the scheme's operator, with the same bits at every
    call.
    """
    n, k = SPLIT
    q = rtn(torch.randn(n, k, device="cuda"), scheme)
    if q.scheme.activation is None:
        w, x = FragmentWeight.pack(q), torch.randn(m, k, device="cuda", dtype=torch.float16)
        return lambda: fragment_gemm(x, w)
    v, codes = OperandWeight.pack(q), torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
    codes = codes if "int8" in str(q.scheme.activation.name) else (codes / 16).to(torch.float8_e4m3fn)
    scale = torch.rand(m, 1, device="cuda") / 64
    return lambda: byte_gemm(codes, scale, v, dtype=torch.float16)


def captured(product) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product()
    return graph, y


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_reduce_overhead_fullgraph(scheme):
    quantized = model(scheme)
    with torch.inference_mode():
        eager = {m: quantized(ids(m)).logits for m in (1, 32)}
        plain = torch.compile(quantized, fullgraph=True)
        expected = {m: plain(ids(m)).logits for m in (1, 32)}
        torch.compiler.reset()
        compiled = torch.compile(quantized, mode="reduce-overhead", fullgraph=True)
        for m in (1, 32):
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                y = compiled(ids(m)).logits.clone()
            assert (y - expected[m]).norm() < 1e-3 * y.norm()
            assert (y - eager[m]).norm() < 6e-2 * y.norm(), "whose roundings between layers are others"
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_with_a_static_cache(scheme):
    quantized, options = model(scheme), {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 12}
    plain = quantized.generate(ids(16), **options, return_dict_in_generate=True, output_logits=True)
    static = quantized.generate(
        ids(16), **options, cache_implementation="static", return_dict_in_generate=True, output_logits=True
    )
    first = [torch.stack(made.logits)[0] for made in (plain, static)]
    assert (first[0] - first[1]).norm() < 3e-2 * first[0].norm()
    same = (plain.sequences == static.sequences)[0, 16:].cummin(0).values.sum()
    assert same >= 3, "until roundings choose another token"
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 32, 48])
def test_two_graphs_replayed_at_once_and_eager_calls_beside(m):
    """Two graphs captured on one stream may be replayed on two at once, since they share neither counters nor partial sums."""
    made = [products(scheme, m) for scheme in ("w4a16_g128", "w6e3m2a16", "w4a8_g128", "fp8_dynamic")]
    expected = [product() for product in made]
    torch.cuda.synchronize()
    graphs = [captured(product) for product in made for _ in range(2)]
    wanted = [y for y in expected for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(200):
        for _, y in graphs:
            y.fill_(float("nan"))
        torch.cuda.synchronize()
        eager = []
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream, product in zip(streams, made, strict=False):
            with torch.cuda.stream(stream):
                eager.append(product())
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for (_, y), w in zip(graphs, wanted, strict=True))
        assert all(torch.equal(y, w) for y, w in zip(eager, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_saving_copying_and_loading_leave_a_captured_graph_right(scheme):
    quantized = model(scheme)
    with torch.inference_mode():
        given = ids(16)
        quantized(given)
        graph, y = captured(lambda: quantized(given, use_cache=False).logits)
        graph.replay()
        expected = y.clone()
        saved = {name: t.clone() for name, t in quantized.state_dict().items()}
        copied = copy.deepcopy(quantized)
        quantized.to("cuda").half()
        filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]  # allocates the memory that was freed
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected) and len(filler) == 64
        assert torch.equal(copied(given).logits, quantized(given).logits)
        for name, t in saved.items():
            if name.endswith("weight_packed"):
                t.copy_(t.flip(0))
        quantized.load_state_dict(saved)
        graph.replay()
        assert not torch.equal(y, expected)
        another, of_another = captured(lambda: quantized(given, use_cache=False).logits)
        another.replay()
        assert torch.equal(y, of_another), "the graph reads what was loaded"


@pytest.mark.gpu
def test_counters_of_streams_and_launches():
    device = torch.device("cuda", 0)
    make_counters(device)
    first, again = workspace(device, 64, 10)[1], workspace(device, 64, 10)[1]
    assert first.data_ptr() == again.data_ptr(), "launches of one stream follow one another"
    with torch.cuda.stream(torch.cuda.Stream()):
        other = workspace(device, 64, 10)[1]
    held: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held += [workspace(device, 64, 10)[1] for _ in range(3)]
        held[0] += 1  # a node for the graph, since an empty graph does not count as one
    parts = [(t.data_ptr(), t.data_ptr() + 40) for t in (first, other, *held)]
    assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.gpu
def test_a_capture_without_counters_left(monkeypatch):
    product = products("w4a16_g128", 32)
    expected = product()
    monkeypatch.setattr(module._Counters, "part", lambda self, count: None)
    graph, y = captured(product)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
