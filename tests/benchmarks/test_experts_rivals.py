"""Rivals of the expert block. On a CPU, their layouts, refusals and the arguments of vLLM's kernels, which functions with the
same parameters stand for; on a GPU with vLLM's wheel, their outputs."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import experts_rivals as rivals
from benchmarks.experts import ExpertLayer, Inputs, Layer, Weights, block_reference, make_inputs, rival_row, source_of
from benchmarks.experts_rivals import Source, pack_bias, pack_codes, pack_exponents, pack_scales
from lowbit.formats import parse_scheme
from lowbit.kernels.reference.experts import EXPERT_GATES
from lowbit.pack import ExpertWeight
from lowbit.quantize import rtn
from tests.kernels.routing import routing_of

INT4 = ExpertLayer(4, 2, 128, 192)
OSS = ExpertLayer(4, 2, 320, 192, "clamped_swiglu", bias=True, softmax_over_selected=True, normalize=False)
"""Like gpt-oss, with sizes that Marlin pads: 320 to 512 and 192 to 256."""


def matrices(layer, scheme, n, k, seed, device="cpu"):
    made = []
    for e in range(layer.experts):
        generator = torch.Generator().manual_seed(100 * seed + e)
        q = rtn((torch.randn(n, k, generator=generator) * k**-0.5).to(device), scheme)
        if rivals.is_mxfp4(q.scheme):
            q = replace(q, scale=q.scale.float().log2().round().exp2().to(q.scale.dtype))
        made.append(q)
    return made


def layer_of(layer, scheme, monkeypatch, device="cpu"):
    """The weights of a layer, and the same as a rival's source."""
    gate, up = (matrices(layer, scheme, layer.size, layer.hidden, seed, device) for seed in (1, 2))
    down = matrices(layer, scheme, layer.hidden, layer.size, 3, device)
    monkeypatch.setattr("benchmarks.experts.matrices", lambda *_: (gate, up, down))
    generator = torch.Generator().manual_seed(5)
    widths = (2 * layer.size, layer.hidden) if layer.bias else ()
    biases = [torch.randn(layer.experts, n, generator=generator).bfloat16().to(device) for n in widths] or [None, None]
    weights = Weights(ExpertWeight.pack_gated(gate, up), ExpertWeight.pack(down), *biases)
    return weights, source_of(layer, scheme, weights)


def test_words_of_marlin_hold_the_codes_of_a_threads_fragments():
    """Nibbles i and i + 4 of a word are neighbours along K. One mask on both halves of the word extracts such a pair."""
    places = marlin_places(64, 32)
    number = torch.arange(64 * 32)
    assert torch.equal(places.flatten().sort().values, number), "each code once"
    row, k = places // 32, places % 32
    assert torch.equal(row[..., 4:], row[..., :4]) and torch.equal(k[..., 4:], k[..., :4] + 1)
    assert torch.equal(row[..., 2:4], row[..., :2] + 8) and torch.equal(k[..., 1], k[..., 0] + 8)
    lane = torch.arange(128) // 4
    assert torch.equal(row[0, :, 0], lane // 4 + torch.arange(128) % 4 * 16) and torch.equal(k[0, :, 0], lane % 4 * 2)


def marlin_places(n, k):
    """The place n * K + k of each nibble of Marlin's words, int64 [K / 16, 2 N, 8]."""
    number, places = torch.arange(n * k).view(n, k), torch.zeros(k // 16, 2 * n, 8, dtype=torch.long)
    for digit in range(6):
        words = pack_codes(number >> 4 * digit & 15)
        places += torch.stack([words >> 4 * i & 15 for i in range(8)], -1).long() << 4 * digit
    return places


def test_layouts_of_mxfp4():
    scale = torch.tensor([2.0**-20, 0.25, 1.0, 2.0, 2.0**30])
    assert rivals.exponents(scale).tolist() == [107, 125, 127, 128, 157]
    assert torch.equal(rivals.exponents(scale).view(torch.float8_e8m0fnu).float(), scale)
    grid = torch.randint(-9, 9, (64, 4)).float().exp2()
    packed = pack_exponents(grid)
    assert packed.dtype == torch.float8_e8m0fnu and packed.shape == (4, 64)
    assert torch.equal(packed.float().view(-1, 4)[:, [0, 2, 1, 3]].view(4, 64), pack_scales(grid, torch.float32))
    assert pack_bias(torch.arange(64))[:8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    q = matrices(OSS, "w4e2m1a16_g32", 192, 320, 1)[0]
    codes, scales = rivals.padded(q, 256, 512)
    assert codes.shape == (256, 512) and scales.shape == (256, 16) and bool((scales[192:] == 1).all())
    assert torch.equal(codes[:192, :320], q.codes) and int(codes[192:].max()) == int(codes[:, 320:].max()) == 0
    assert rivals.pairs(torch.tensor([[1, 2, 15, 0]])).tolist() == [[0x21, 0x0F]]
    assert rivals.humming_config(parse_scheme("w4e2m1a16_g32")) == {"quant_method": "gpt_oss_mxfp4"}
    assert rivals.humming_config(parse_scheme("w6e3m2a16")) == {"dtype": "float6e3m2", "group_size": 0}
    assert rivals.humming_config(parse_scheme("w4a16_g128")) == {"dtype": "uint4", "group_size": 128}


def test_functions_come_from_a_file_that_cannot_be_imported(tmp_path):
    file = tmp_path / "fused.py"
    file.write_text(
        "import no_such_package\n\n\n@triton.jit\ndef kernel(x, C: tl.constexpr):\n    pass\n\n\n"
        "def blocks(n: Any) -> int:\n    return helper(n) + 1\n\n\ndef helper(n):\n    return 2 * n\n"
    )
    made = rivals.functions_of(file, ("blocks", "helper"))
    assert made.blocks(4) == 9 and not hasattr(made, "kernel")
    kernel = rivals.functions_of(file, ("kernel",)).kernel
    assert type(kernel).__name__ == "JITFunction" and kernel.arg_names == ["x", "C"]
    with pytest.raises(ImportError, match=r"fused.py has no other: vLLM 0.25.1 was measured"):
        rivals.functions_of(file, ("kernel", "other"))


def test_the_version_of_vllm_is_never_unknown(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"has neither metadata nor _version.py"):
        rivals.vllm_version(tmp_path)
    (tmp_path / "_version.py").write_text("version: str\n__version__ = version = '0.25.1'\n")
    assert rivals.vllm_version(tmp_path) == "0.25.1"


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_refusals_say_what_is_timed(name, monkeypatch):
    monkeypatch.setattr(rivals, "load", lambda: "0")
    _, source = layer_of(INT4, "w4a16_g32_z", monkeypatch)
    with pytest.raises(ValueError, match=r"are timed with .*not w4a16_g32_z with silu"):
        rivals.RIVALS[name](source)
    _, source = layer_of(OSS, "w4a16_g32", monkeypatch)
    with pytest.raises(ValueError, match=r"are timed with .*not w4a16_g32 with clamped_swiglu and biases"):
        rivals.RIVALS[name](source)


def test_a_refusal_is_a_row_for_each_number_of_tokens(monkeypatch):
    tried = []

    def refusing(source):
        tried.append(source)
        raise ValueError("not this layer")

    monkeypatch.setitem(rivals.RIVALS, "marlin", refusing)
    monkeypatch.setattr("benchmarks.experts.source_of", lambda *_: None)
    layer = Layer("OLMoE-1B-7B", "w4a16_g128", SimpleNamespace(rivals=("marlin",)))
    layer.weights = [None]
    for _ in range(2):
        with pytest.raises(ValueError, match="not this layer"):
            layer.rival("marlin", 3)
    assert len(tried) == 1


# ---- the operators that the adapters call, in torch


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Operators:
    """vLLM's operators `_moe_C`, with the parameters and the meaning that their callers in vLLM 0.25.1 assume."""

    def topk_softmax(self, weights, chosen, unused, logits, normalize, bias):
        probabilities, numbers = logits.float().softmax(-1).topk(weights.shape[1])
        weights.copy_(probabilities / probabilities.sum(-1, keepdim=True) if normalize else probabilities)
        chosen.copy_(numbers)

    def moe_align_block_size(self, chosen, experts, rows, order, owners, count, expert_map):
        slots, blocks = [], []
        for e in range(experts):
            own = (chosen.flatten() == e).nonzero().flatten().tolist()
            padded = -(-len(own) // rows) * rows
            slots += own + [chosen.numel()] * (padded - len(own))
            blocks += [e] * (padded // rows)
        order.fill_(chosen.numel())
        order[: len(slots)] = torch.tensor(slots)
        owners[: len(blocks)] = torch.tensor(blocks)
        count.fill_(len(slots))

    def moe_sum(self, y, out):
        out.copy_(y.float().sum(1))

    def moe_wna16_gemm(self, x, y, codes, scale, zeros, weights, order, owners, count, top_k, rows, block_n, block_k, bits):
        assert bits == 4 and block_n % 64 == 0 and x.shape[1] % block_k == 0
        product(x, y, in_rows(codes, scale), None, weights, order, owners, count, top_k, rows)

    def moe_wna16_marlin_gemm(
        self, x, y, codes, bias, scale, a_scale, global_scale, zeros, g_idx, perm, locks, order, owners, count, weights, rows,
        top_k, weighted, kind, m, n, k, is_k_full, atomic, fp32_reduce, zp_float, thread_k, thread_n, blocks,
    ):  # fmt: skip
        assert (m, k) == x.shape and n == y.shape[1] and locks.dtype == torch.int32 and fp32_reduce and not atomic
        assert kind == (rivals.FLOAT4_E2M1 if scale.dtype == torch.float8_e8m0fnu else rivals.UINT4B8)
        values = E2M1 if kind == rivals.FLOAT4_E2M1 else torch.arange(-8.0, 8.0)
        places, single = marlin_places(n, k), torch.argsort(pack_bias(torch.arange(n)))
        dense, offset = [], None if bias is None else bias[:, single]
        for words, scales in zip(codes, scale, strict=True):
            one = torch.empty(n * k)
            one[places.flatten()] = values[torch.stack([words >> 4 * i & 15 for i in range(8)], -1).flatten().long()]
            groups = len(scales)
            order_of = pack_scales(torch.arange(n * groups).view(n, groups).float(), torch.float32)
            if kind == rivals.FLOAT4_E2M1:
                order_of = order_of.view(-1, 4)[:, [0, 2, 1, 3]].view(groups, n)
            grid = torch.empty(n * groups)
            grid[order_of.flatten().long()] = scales.float().flatten()
            dense.append(one.view(n, k) * grid.view(n, groups).repeat_interleave(k // groups, 1))
        product(x, y, torch.stack(dense), offset, weights if weighted else None, order, owners, count, top_k, rows)


def in_rows(codes, scale):
    """int4 weights [E, N, K] of bytes with two codes, the lower k in the low bits."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
    return both * scale.float().repeat_interleave(both.shape[-1] // scale.shape[-1], -1)


def product(x, y, dense, bias, weights, order, owners, count, top_k, rows):
    """The product of sorted slots, in blocks of `rows` with an expert each."""
    y.fill_(float("nan"))
    assert len(owners) == -(-len(order) // rows) and int(count) % rows == 0
    for block in range(int(count) // rows):
        e = int(owners[block])
        for slot in order[block * rows : (block + 1) * rows].tolist():
            if slot < len(x) * top_k:
                row = dense[e] @ x[slot // top_k].float() + (0 if bias is None else bias[e].float())
                y[slot] = row * (1 if weights is None else weights.flatten()[slot])


class Kernel:
    """vLLM's Triton kernel `fused_moe_kernel_gptq_awq`, with its parameters in their order."""

    def __getitem__(self, grid):
        def launch(
            a, b, c, b_scale, b_zp, weights, order, owners, count, N, K, EM, valid, stride_am, stride_ak, stride_be, stride_bk,
            stride_bn, stride_cm, stride_cn, stride_bse, stride_bsk, stride_bsn, stride_bze, stride_bzk, stride_bzn, *,
            block_k_diviable, group_size, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, SPLIT_K, MUL_ROUTED_WEIGHT,
            top_k, compute_type, has_zp, use_int4_w4a16, use_int8_w8a16,
        ):  # fmt: skip
            assert grid == (-(-EM // BLOCK_SIZE_M) * -(-N // BLOCK_SIZE_N),) and int(count) <= EM <= len(order)
            assert (stride_am, stride_ak, stride_cm, stride_cn) == (K, 1, N, 1) and valid == len(a) * top_k
            assert (stride_be, stride_bk, stride_bn) == (N * K // 2, 1, K // 2)
            groups = K // group_size
            assert (stride_bse, stride_bsk, stride_bsn) == (N * groups, 1, groups) and block_k_diviable
            assert use_int4_w4a16 and not (use_int8_w8a16 or has_zp) and (weights is not None) == MUL_ROUTED_WEIGHT
            product(a, c, in_rows(b, b_scale), None, weights, order, owners, count, top_k, BLOCK_SIZE_M)

        return launch


@pytest.mark.parametrize("tokens", [1, 5, 30])
@pytest.mark.parametrize(
    ("name", "layer", "scheme"),
    [
        ("marlin", INT4, "w4a16_g64"), ("triton", INT4, "w4a16_g64"), ("wna16", INT4, "w4a16_g64"),
        ("marlin", OSS, "w4e2m1a16_g32"),
    ],
)  # fmt: skip
def test_arguments_of_vllms_kernels(name, layer, scheme, tokens, monkeypatch):
    """With operators that do what vLLM's do, a rival computes the block of the same weights."""
    monkeypatch.setattr(rivals, "operators", Operators)
    monkeypatch.setattr(rivals, "load", lambda: "0")
    monkeypatch.setattr(rivals, "vllm_folder", lambda: rivals.Path("vllm"))
    blocks = lambda **given: {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}  # noqa: E731
    module = SimpleNamespace(
        fused_moe_kernel_gptq_awq=Kernel(), tl=SimpleNamespace(bfloat16=None), get_moe_wna16_block_config=blocks
    )
    monkeypatch.setattr(rivals, "functions_of", lambda file, names: module)
    monkeypatch.setattr(rivals, "_gated", lambda y, function: EXPERT_GATES[function](*y.float().chunk(2, -1)).bfloat16())
    weights, source = layer_of(layer, scheme, monkeypatch)
    rival = rivals.copied(rivals.RIVALS[name](source))
    generator = torch.Generator().manual_seed(tokens)
    x, residual = torch.randn(2, tokens, layer.hidden, generator=generator).bfloat16()
    logits = torch.randn(tokens, layer.experts, generator=generator)
    if name == "wna16" and tokens == 30:
        with pytest.raises(ValueError, match="moe_wna16_gemm is for at most 6 slots an expert, not 15"):
            rival(x, logits, residual)
        return
    y = rival(x, logits, residual)
    probabilities, chosen = logits.softmax(-1).topk(layer.top_k)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    routing = routing_of(chosen.int(), layer.experts, 8, probabilities)
    expected = block_reference(layer, weights, Inputs(x, residual, logits, routing))
    assert float((y.double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize(
    ("name", "layer", "scheme"),
    [
        *((name, replace(INT4, hidden=512, size=256), "w4a16_g128") for name in ("marlin", "triton", "humming")),
        ("humming", replace(INT4, hidden=512, size=256), "w6e3m2a16"),
        *((name, OSS, "w4e2m1a16_g32") for name in ("marlin", "triton", "humming")),
    ],
)
def test_rivals_compute_the_block_on_a_gpu(name, layer, scheme, tokens, monkeypatch):
    """As in a run: in a CUDA graph, compared with float64."""
    check(name, layer, scheme, tokens, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 12])
def test_the_cuda_kernel_of_few_slots_on_a_gpu(tokens, monkeypatch):
    check("wna16", replace(INT4, hidden=512, size=256), "w4a16_g128", tokens, monkeypatch)


def check(name, layer, scheme, tokens, monkeypatch):
    try:
        rivals.load()
    except ImportError as error:
        pytest.skip(str(error))
    if name == "humming":
        pytest.importorskip("humming")
    weights, source = layer_of(layer, scheme, monkeypatch, "cuda")
    row = rival_row(layer, [rivals.RIVALS[name](source)], weights, make_inputs(layer, tokens, 2, 8))
    assert row["us"] > 0 and row["rel_err"] < 1e-2 and row["version"] not in ("", "unknown")


def test_a_source_has_the_biases_of_gate_first(monkeypatch):
    weights, source = layer_of(OSS, "w4e2m1a16_g32", monkeypatch)
    assert isinstance(source, Source) and source.normalize
    rows = weights.gate_up_bias.unflatten(1, (-1, 2, 8))
    assert torch.equal(source.gate_up_bias, torch.cat([rows[:, :, 0].flatten(1), rows[:, :, 1].flatten(1)], 1))
