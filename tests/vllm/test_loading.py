"""The plug-in's loading of a layer's tensors in the form vLLM passes them, for every rank. None of this needs vLLM."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest, layer_tensors
from lowbit.formats import QuantTensor, parse_scheme, rotate_blocks
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from lowbit.vllm import version_refusals
from lowbit.vllm.loading import LayerLoader, ShardSpec
from lowbit.vllm.matrices import PackedMatrix, PlainMatrix, RoundedMatrix
from lowbit.vllm.product import Product
from lowbit.vllm.sources import OwnCheckpoint, SixteenBits, VocabLayer, order_refusals, source_of
from tests.forks import ROOT, forked
from tests.tiny import with_channels

K = 256
DEVICE = torch.device("cpu")


def weight(n, seed=0, k=K):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def packed(name, n, scheme, seed=0, k=K, channels=False, rotated=0):
    """(PackedMatrix, tensor) of a random weight in `scheme`. `rotated` is the block size of the input's rotation at run time, 0
    for none.
    """
    w = weight(n, seed, k)
    q = rtn(rotate_blocks(w, rotated) if rotated else w, scheme).with_input(hadamard=rotated)
    q = with_channels(q) if channels else q
    return PackedMatrix(name, LayerEntry.of(q)), q


def loaded(cut, matrices, k=K):
    """The product of a layer made of `matrices`, [(PackedMatrix, weight, output)]. The tensors are loaded in random order."""
    loading = LayerLoader([matrix for matrix, _, _ in matrices], cut, k, torch.float32, DEVICE, Product)
    come = [(suffix, tensor, of) for _, q, of in matrices for suffix, tensor in tensors_of(q).items()]
    random.Random(0).shuffle(come)
    for suffix, tensor, of in come:
        loading.take(suffix, tensor, of)
    product = loading.finish()
    product.prepare("layer", torch.float32)
    return product


def tensors_of(q):
    return layer_tensors(q) if isinstance(q, QuantTensor) else {"weight": q}


def dense(q):
    return (q.dequantize(torch.float64) if isinstance(q, QuantTensor) else q.double()).float()


def product_of(q, x):
    """x times the whole matrix, as on one rank, with 8-bit activations if the scheme has them."""
    is_8_bits = isinstance(q, QuantTensor) and q.scheme.activation is not None
    return QuantLinear.from_quant_tensor(q)(x) if is_8_bits else x @ dense(q).T


def close(y, expected):
    assert y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "names",
    [
        ("w4a16_g64",) * 3,
        ("w4a16_g64", "w4a16_g64", "w6e3m2a16"),
        ("w3a16_g32_z", "", "w8a16"),
        ("w8a8", "w8a8", "w4a8_g128"),
        ("w8e4m3a8e4m3", "w8e4m3a8e4m3", "w6e3m2a8e4m3"),
        ("w8a8_t", "w8a8_az", ""),
        ("w8e4m3a8e4m3_b128x128",) * 3,
        ("w8e4m3a16_b128x128", "w4a16_b32x64_z", "w4e2m1a16_g16"),
    ],
)
def test_q_k_and_v_on_every_rank(names, ranks):
    """24 q heads of size 8. There are 8 kv heads for 1, 2, 4 or 8 ranks, otherwise 3, and ranks may share kv heads."""
    kv = 8 if ranks in (1, 2, 4, 8) else 3
    sizes, x, bias = (192, 8 * kv, 8 * kv), weight(5, 9), torch.randn(192 + 16 * kv)
    held = []
    for number, (scheme, n, of) in enumerate(zip(names, sizes, "qkv", strict=True)):
        name = f"model.layers.0.self_attn.{of}_proj"
        matrix, q = packed(name, n, scheme, number) if scheme else (PlainMatrix(name, torch.float32), weight(n, number))
        held.append((matrix, q, of))
    own = [192 // ranks, max(8, 8 * kv // ranks), max(8, 8 * kv // ranks)]
    for rank in range(ranks):
        product = loaded(ShardSpec(tuple(own), sizes, rank, ranks), held)
        if not any("_b" in name for name in names):  # blocks of adjacent matrices may overlap
            assert len(product.factors) == 1 + sum(one != other for one, other in pairwise(names))
        rows = [slice(rank * part, (rank + 1) * part) for part in own]
        expected = torch.cat([product_of(q, x)[:, r] for (_, q, _), r in zip(held, rows, strict=True)], dim=1)
        biased = bias[: expected.shape[1]]
        close(product(x, None), expected)
        close(product(x, biased), expected + biased)


@pytest.mark.parametrize(("ranks", "kv"), [(4, 2), (8, 2), (8, 1), (2, 1)])
def test_more_ranks_than_heads_of_keys(ranks, kv):
    sizes, x = (64, 8 * kv, 8 * kv), weight(3, 9)
    held = [(*packed(of, n, "w4a16_g32", number), of) for number, (of, n) in enumerate(zip("qkv", sizes, strict=True))]
    for rank in range(ranks):
        product = loaded(ShardSpec((64 // ranks, 8, 8), sizes, rank, ranks), held)
        head = rank // (ranks // kv)
        rows = [slice(rank * 64 // ranks, (rank + 1) * 64 // ranks), *[slice(8 * head, 8 * head + 8)] * 2]
        close(product(x, None), torch.cat([x @ dense(q)[r].T for (_, q, _), r in zip(held, rows, strict=True)], dim=1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(64, 32, 32), (96, 96)], ids=["qkv", "gate and up"])
def test_matrices_that_are_one_on_disk(sizes, ranks):
    """Phi-3's qkv_proj and gate_up_proj are single matrices on disk: vLLM loads them whole, without naming an output."""
    matrix, q = packed("qkv_proj", sum(sizes), "w4a16_g32")
    x, own = weight(3, 9), tuple(size // ranks for size in sizes)
    for rank in range(ranks):
        product = loaded(ShardSpec(own, sizes, rank, ranks), [(matrix, q, None)])
        begins = [sum(sizes[:i]) + rank * part for i, part in enumerate(own)]
        rows = [dense(q)[begin : begin + part] for begin, part in zip(begins, own, strict=True)]
        close(product(x, None), x @ torch.cat(rows).T)


def test_several_outputs_in_one_of_two_matrices():
    """Of the outputs q, k, v and z, the first three are one matrix on disk; vLLM passes the outputs (0, 1, 2) and 3."""
    first, second = packed("in_proj_qkv", 96, "w4a16_g32"), packed("in_proj_z", 64, "w4a16_g32", 1)
    product = loaded(ShardSpec((16, 16, 16, 32), (32, 32, 32, 64), 1, 2), [(*first, (0, 1, 2)), (*second, 3)])
    x = weight(3, 9)
    rows = [dense(first[1])[begin + 16 : begin + 32] for begin in (0, 32, 64)] + [dense(second[1])[32:]]
    close(product(x, None), x @ torch.cat(rows).T)


def sum_of_ranks(x, matrix, q, ranks):
    """The sum [5, 48] of the ranks' products, each with its own channels of x [5, K]."""
    total = torch.zeros(5, 48)
    for rank in range(ranks):
        product = loaded(ShardSpec((48,), (48,), rank, ranks, ranks_along_k=ranks), [(matrix, q, None)])
        total += product(x[:, rank * K // ranks : (rank + 1) * K // ranks], None)
    return total


@pytest.mark.parametrize("channels", [False, True], ids=["", "act-order and factors of x"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["w4a16_g128", "w3a16_g32_z", "w6e3m2a16", "w8a16_t", "w2a16_g64"])
def test_parts_of_input_channels_add_up(name, ranks, channels):
    matrix, q = packed("down_proj", 48, name, channels=channels)
    x = weight(5, 9)
    total = sum_of_ranks(x, matrix, q, ranks)
    close(total, x @ dense(q).T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", ["w4a16_g64", "w4a16_g128", "w3a16_g32_z", "w8a8", "w6e3m2a16"])
def test_parts_of_rotated_input_channels_add_up(name, block, ranks):
    """With 256 channels, each of four ranks has one block of 64."""
    matrix, q = packed("down_proj", 48, name, rotated=block)
    x = weight(5, 9)
    total = sum_of_ranks(x, matrix, q, ranks)
    expected = x @ dense(q).T
    if q.scheme.activation is None:
        close(total, expected)
    assert (total - expected).norm() < 0.02 * expected.norm()
    assert (x @ dense(q.with_input(hadamard=0)).T - expected).norm() > expected.norm(), "what it is without a rotation"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rotated_inputs_of_q_k_and_v(ranks):
    """If all rotations are equal, the layer is one product; otherwise it has one product per rotation."""
    sizes, x = (64, 32, 32), weight(5, 9)
    for blocks, products in (((64, 64, 64), 1), ((64, 64, 0), 2), ((64, 16, 64), 3)):
        held = [
            (*packed(of, n, "w4a16_g64", number, rotated=block), of)
            for number, (of, n, block) in enumerate(zip("qkv", sizes, blocks, strict=True))
        ]
        for rank in range(ranks):
            own = [n // ranks for n in sizes]
            product = loaded(ShardSpec(tuple(own), sizes, rank, ranks), held)
            rows = [slice(rank * part, (rank + 1) * part) for part in own]
            assert len(product.factors) == products
            close(product(x, None), torch.cat([x @ dense(q)[r].T for (_, q, _), r in zip(held, rows, strict=True)], dim=1))


@pytest.mark.parametrize(("block", "ranks", "order"), [(64, 8, False), (256, 2, False), (64, 2, True)])
def test_blocks_of_rotated_channels_are_not_cut(block, ranks, order):
    """Splits within a rotated block are refused: a rank can rotate only its own channels, so the sum would be wrong."""
    matrix, q = packed("down_proj", 48, "w4a16_g16", rotated=block)
    if order:
        q = with_channels(q, pre_quant_scale=None)
        matrix = PackedMatrix("down_proj", LayerEntry.of(q))
    with pytest.raises(CheckpointError, match=f"down_proj: cannot be split .* rotated in blocks of {block} channels are split"):
        loaded(ShardSpec((48,), (48,), 0, ranks, ranks_along_k=ranks), [(matrix, q, None)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_vocabulary_is_filled_up(ranks):
    """A vocabulary of 150 tokens is padded to 192 over all ranks."""
    matrix, q = packed("lm_head", 150, "w8a16")
    x, part, y = weight(3, 9), 192 // ranks, []
    for rank in range(ranks):
        rows = (min(rank * part, 150), min((rank + 1) * part, 150))
        y.append(loaded(ShardSpec((part,), (150,), rows=rows, fill=part), [(matrix, q, None)])(x, None))
    y = torch.cat(y, dim=1)
    close(y[:, :150], x @ dense(q).T)
    assert y.shape == (3, 192) and not y[:, 150:].any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_16_bit_weights_are_rounded_as_a_checkpoint_of_them_is(ranks):
    w, x = weight(64), weight(3, 9)
    q = rtn(w, "w4a16_g64", search="mse")
    matrix = RoundedMatrix("o_proj", torch.float32, parse_scheme("w4a16_g64"), "mse")
    cuts = [ShardSpec((64,), (64,), rank, ranks, ranks_along_k=ranks) for rank in range(ranks)]
    parts = [loaded(cut, [(matrix, w, None)]) for cut in cuts]
    total = sum(part(own, None) for part, own in zip(parts, x.chunk(ranks, dim=1), strict=True))
    close(total, x @ dense(q).T)


def test_a_layer_of_nothing_but_its_shape():
    matrices = [packed("gate_proj", 64, "w4a16_g64")[0], PlainMatrix("up_proj", torch.float32)]
    loading = LayerLoader(matrices, ShardSpec((32, 32), (64, 64), 0, 2), K, torch.float32, DEVICE, Product)
    assert loading.finish(random=True)(weight(3), None).shape == (3, 64)


def test_what_does_not_fit_is_named():
    matrix, q = packed("model.layers.3.down_proj", 48, "w4a16_g128")

    def loading(cut, k=K):
        return LayerLoader([matrix], cut, k, torch.float32, DEVICE, Product)

    def refused(match, given, tensors):
        with pytest.raises(CheckpointError, match=match):
            for suffix, tensor in tensors.items():
                given.take(suffix, tensor)
            given.finish()

    tensors, whole = layer_tensors(q), ShardSpec((48,), (48,))
    refused("lack model.layers.3.down_proj.weight_scale", loading(whole), {"weight_packed": tensors["weight_packed"]})
    refused("lack model.layers.3.down_proj.weight_packed, model", loading(whole), {})
    refused('_proj.weight_order: config.json does not state "order"', loading(whole), {"weight_order": tensors["weight_scale"]})
    refused(
        r"weight_packed: config.json states torch.uint8 \(48, 128\), the", loading(whole), tensors | {"weight_packed": q.codes}
    )
    refused("has 256 input channels, vLLM's layer 512", loading(whole, 512), tensors)
    refused("rank 1 of 3: 256 input channels are no multiple of 3 ranks", loading(ShardSpec((48,), (48,), 1, 3, 3)), tensors)
    refused(
        "layer has 64 output channels on all ranks together, the matrix has 48", loading(ShardSpec((32,), (64,), 1, 2)), tensors
    )
    refused(
        "layer has 96 output channels on all ranks together, the matrix has 48", loading(ShardSpec((48,), (96,), 1, 2)), tensors
    )
    refused("48 channels cannot be split into parts of 32", loading(ShardSpec((32,), (48,), 1, 2)), tensors)
    with pytest.raises(CheckpointError, match="loads output 'k' of a layer that consists of model.layers.3.down_proj"):
        loading(whole).take("weight_packed", tensors["weight_packed"], "k")
    twice = loading(whole)
    for suffix, tensor in tensors.items():
        twice.take(suffix, tensor)
    with pytest.raises(CheckpointError, match="loaded twice; a running engine cannot load its weights again"):
        twice.take("weight_packed", tensors["weight_packed"])


def test_outputs_that_are_not_known_are_refused():
    """MiniMax-M3's layer has five outputs, q, k, v and two of an indexer, and is refused."""
    matrices = [packed(f"layers.0.{of}", 64, "w4a16_g64")[0] for of in ("q", "k", "v", "index_q", "index_k")]
    with pytest.raises(CheckpointError, match="layers.0.q: vLLM's layer has 5 outputs, lowbit supports 3; .* in 16 bits"):
        LayerLoader(matrices, ShardSpec((64,) * 5, (64,) * 3), K, torch.float32, DEVICE, Product)


def test_a_checkpoint_of_ours_says_what_is_quantized():
    entry = LayerEntry((160, 64), parse_scheme("w8a16"))
    layers = {"model.embed_tokens": entry, "model.layers.0.mlp.down_proj": LayerEntry((64, 176), parse_scheme("w4a16_g16"))}
    stated = Manifest(parse_scheme("w4a16_g16"), layers, tied={"lm_head": "model.embed_tokens"}).to_dict()
    source = source_of(stated)
    assert isinstance(source, OwnCheckpoint)
    assert not source.matrix("model.layers.0.mlp.down_proj", torch.float16).is_plain
    assert source.matrix("model.layers.0.mlp.up_proj", torch.float16).is_plain
    for end in (
        VocabLayer("", (160, 64), False, True),
        VocabLayer("model.embed_tokens", (160, 64), False, True),
        VocabLayer("lm_head", (160, 64), True, True),
    ):
        assert source.vocab_matrix(end, torch.float16) == PackedMatrix("model.embed_tokens", entry)
    assert source.vocab_matrix(VocabLayer("", (99, 64), False, False), torch.float16) is None
    moved = source.renamed(lambda names: {name: f"language_model.{name}" for name in names})
    assert (
        moved.vocab_matrix(VocabLayer("language_model.lm_head", (160, 64), True, True), torch.float16).name
        == "language_model.model.embed_tokens"
    )
    assert not moved.matrix("language_model.model.layers.0.mlp.down_proj", torch.float16).is_plain


def test_what_the_files_have_as_one_matrix_is_one():
    """The files decide whether a layer is one matrix. GLM-4's gate_up_proj is one although vLLM's model lists two; StableLM's
    files have two although its model lists none.
    """
    entry, stated = LayerEntry((160, 64), parse_scheme("w8a16")), {"gate_up_proj": ["gate_proj", "up_proj"]}
    for held, of_model in (("gate_up_proj",), stated), (("gate_proj", "up_proj"), {}), (("gate_proj", "up_proj"), stated):
        layers = {f"model.layers.0.mlp.{name}": entry for name in held}
        source = source_of(Manifest(parse_scheme("w8a16"), layers).to_dict())
        found = source.matrices("model.layers.0.mlp.gate_up_proj", of_model, torch.bfloat16)
        assert found == [PackedMatrix(name, entry) for name in layers]
    rounded = SixteenBits(parse_scheme("w8a16")).matrices("mlp.gate_up_proj", stated, torch.bfloat16)
    assert [matrix.name for matrix in rounded] == ["mlp.gate_proj", "mlp.up_proj"]


def test_a_head_of_its_own_in_a_tied_model_is_refused():
    source = source_of(Manifest(parse_scheme("w8a16"), {"lm_head": LayerEntry((160, 64), parse_scheme("w8a16"))}).to_dict())
    assert source.vocab_matrix(VocabLayer("lm_head", (160, 64), True, False), torch.float16).name == "lm_head"
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        source.vocab_matrix(VocabLayer("lm_head", (160, 64), True, True), torch.float16)


@pytest.mark.parametrize(
    ("stated", "match"),
    [
        ({"quant_method": "lowbit"}, "states no layers and no scheme, such as w4a16_g128"),
        ({"quant_method": "lowbit", "scheme": "w4a16_g128", "bits": 4}, r"unknown keys \['bits'\]"),
        ({"quant_method": "lowbit", "scheme": "w9"}, "unknown scheme 'w9'"),
        ({"quant_method": "lowbit", "scheme": 4}, "quantization_config"),
        ({"quant_method": "lowbit", "scheme": "w4a16_g128", "head": "w8a16_t"}, "head: w8a16_t shares scales among rows"),
        ({"quant_method": "lowbit", "scheme": "w4a16_g128", "search": "best"}, "search max or mse"),
        ({"quant_method": "quark"}, "quant_method 'quark' is not supported; supported are gptq, awq"),
    ],
)
def test_configurations_that_say_nothing_are_refused(stated, match):
    with pytest.raises(CheckpointError, match=match):
        source_of(stated)


def test_16_bits_with_a_scheme():
    source = source_of({"quant_method": "lowbit", "scheme": "wf6af16", "modules_to_not_convert": ["*.o_proj"], "head": "w8a16"})
    assert source == SixteenBits(parse_scheme("w6e3m2a16"), ("*.o_proj",), parse_scheme("w8a16"))
    assert source.matrix("model.layers.0.self_attn.o_proj", torch.bfloat16).is_plain
    for router in ("gate", "router", "shared_expert_gate"):
        assert source.matrix(f"model.layers.0.mlp.{router}", torch.bfloat16).is_plain
    assert source.matrix("model.layers.0.mlp.up_proj", torch.bfloat16).scheme_of().name == "w6e3m2a16"
    assert source.vocab_matrix(VocabLayer("", (160, 64), False, True), torch.bfloat16).scheme_of().name == "w8a16"


def test_modules_that_stay_in_16_bits_have_the_names_of_vllms_model_too():
    """Names of layers left in 16 bits are translated: Qwen2-VL's config.json has model.language_model, vLLM's model
    language_model.model.
    """
    source = SixteenBits(parse_scheme("w8a16"), ("model.language_model.layers.0.mlp.down_proj", "*.o_proj"))
    moved = source.renamed(
        lambda names: {name: name.replace("model.language_model.", "language_model.model.") for name in names}
    )
    assert moved.matrix("language_model.model.layers.0.mlp.down_proj", torch.bfloat16).is_plain
    assert moved.matrix("language_model.model.layers.0.self_attn.o_proj", torch.bfloat16).is_plain
    assert not moved.matrix("language_model.model.layers.1.mlp.down_proj", torch.bfloat16).is_plain


def test_packed_rows_that_vllm_rearranges_are_refused():
    matrix, _ = packed("transformer.h.0.self_attention.query_key_value", 96, "w4a16_g32_z")
    rounded = RoundedMatrix("query_key_value", torch.bfloat16, parse_scheme("w4a16_g32"))
    (reason,) = order_refusals("falcon", matrix.name, [matrix])
    assert "vLLM reorders these rows of falcon" in reason and "leave q, k and v in 16 bits" in reason
    assert order_refusals("llama4_text", "model.layers.0.self_attn.qkv_proj", [rounded, matrix, rounded])
    assert not order_refusals("falcon", matrix.name, [rounded])
    assert not order_refusals("falcon", "transformer.h.0.self_attention.dense", [matrix])
    assert not order_refusals("chatglm", "transformer.encoder.layers.0.self_attention.query_key_value", [matrix])


@pytest.mark.parametrize("version", ["0.25.1", "0.25.2", "0.26.0", "0.32.0+cpu", "0.33.0", "0.33.4.post1"])
def test_supported_versions(version):
    assert version_refusals(version) == ()


@pytest.mark.parametrize("version", ["0.25.0", "0.9.2", "0.34.0", "1.0.0", "0.1.dev1+g1234", "dev"])
def test_other_versions_are_refused_in_one_line(version):
    (reason,) = version_refusals(version)
    assert reason == f"lowbit supports vLLM 0.25.1 to 0.33, installed is {version}: pip install vllm~=0.33.0"


def test_the_entry_point_imports_nothing_where_there_is_no_vllm():
    """vLLM calls the entry point of pyproject.toml in every process, sometimes twice. Without vLLM it imports nothing."""
    code = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "vllm":
            raise ImportError("hidden")
sys.meta_path.insert(0, Hidden())
from lowbit.vllm import register
register(), register()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "triton", "numpy"}))
"""
    assert forked(code).strip() == "[]"
    entry = '\n[project.entry-points."vllm.general_plugins"]\nlowbit = "lowbit.vllm:register"\n'
    assert entry in (ROOT / "pyproject.toml").read_text()
