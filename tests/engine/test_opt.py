"""OPT: LayerNorm, learned positions, biases, an MLP without a gate. Its program's logits are OPTForCausalLM's in float32."""

from __future__ import annotations

import sys

import pytest
import torch

from lowbit.engine import Engine, Request, Sequence
from lowbit.engine.cache import Cache
from lowbit.engine.decoder import Decoder
from lowbit.engine.product import Packed, Scaled
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.models.head import quantize_head
from lowbit.nn import convert
from lowbit.ops import Activations
from lowbit.ops.elementwise import EmbeddingTable
from tests.engine.pages import fill_unwritten
from tests.engine.test_chain import dequantized, packed, random_ids, stepped
from tests.tiny import eager_opt

VOCAB = 160


def program_of(model, **options):
    decoder = recognise(model)
    assert isinstance(decoder, Decoder), decoder
    return DecodeProgram(decoder, model.dtype, model.device, **{"batch_invariant": False, **options})


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False, "enable_bias": False}], ids=["tied", "untied"])
@torch.inference_mode()
def test_logits_of_chunks_and_steps(options):
    """The prompts of two sequences are computed in different chunks, then token by token across page borders. The order of rows
    differs from that of slots, and positions differ."""
    model = eager_opt(**options)
    ids = [prompt(300), prompt(260, 1)]
    program = program_of(model)
    program.cache = Cache(program.cache_spec, 7, program.device)
    fill_unwritten(program.cache)
    slots = Slots(2, 384, VOCAB, (), program.device)
    slots.update([(slot, place, 1 + 2 * place + slot) for slot in range(2) for place in range(3)], [])
    sequences = [Sequence(Request(text, 1), slot=slot) for slot, text in enumerate(ids)]

    def chunk(slot, begin, end):
        return PrefillChunk(sequences[slot], begin, tuple(ids[slot][begin:end]), True)

    expected = [logits_of(model, text) for text in ids]
    tolerance = 1e-5 * float(expected[0].abs().max())
    for chunks in ([chunk(0, 0, 128)], [chunk(1, 0, 126), chunk(0, 128, 255)]):
        found = program.prompt(chunks, slots)
        for row, each in zip(found, chunks, strict=True):
            torch.testing.assert_close(row, expected[each.sequence.slot][each.end - 1], rtol=0, atol=tolerance)
    places = [255, 126]
    while places[0] < 300:
        slots.update([], list(enumerate(places)))
        slots.tokens[:2] = torch.tensor([text[at] for text, at in zip(ids, places, strict=True)], dtype=torch.int32)
        found = program.step(on_device([1, slots.dummy_slot, 0], program.device), slots)
        for row, slot in ((0, 1), (2, 0)):
            torch.testing.assert_close(found[row], expected[slot][places[slot]], rtol=0, atol=tolerance)
        places = [at + 1 for at in places]


def test_greedy_tokens_match_transformers():
    model = eager_opt(tie_word_embeddings=False)
    engine = Engine(model, max_concurrent=4, chunk_tokens=128, cache_bytes=1 << 24)
    sequences = engine.generate([Request(prompt(length, length), 20) for length in (1, 2, 77, 127, 128, 129, 200)])
    assert isinstance(engine.program, DecodeProgram) and engine.difference < 1e-5
    for sequence in sequences:
        sampled = [each.token for each in sequence.sampled]
        chosen = (
            logits_of(model, [*sequence.request.prompt, *sampled])[len(sequence.request.prompt) - 1 : -1].argmax(-1).tolist()
        )
        assert sampled == chosen and len(set(sampled)) > 5, "a model that repeats itself would hide errors"


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a8_g64", "fp8_dynamic"])
def test_quantized_layers(scheme, monkeypatch):
    """With 8-bit activations, LayerNorm and ReLU return 16-bit values (32-bit in this test). Each product quantizes its own
    input."""
    model = eager_opt()
    convert(model, scheme)
    inputs = []
    call = Scaled.__call__
    monkeypatch.setattr(Scaled, "__call__", lambda product, x: (inputs.append(x), call(product, x))[1])
    engine = Engine(model, max_concurrent=2, cache_bytes=1 << 24)
    assert isinstance(engine.program, DecodeProgram) and engine.difference < 1e-5
    assert isinstance(engine.program.layers[0].down, Scaled) == (scheme != "w8a16")
    assert not any(isinstance(x, Activations) for x in inputs) and bool(inputs) == (scheme != "w8a16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("invariant", [False, True])
def test_weights_packed_for_a_gpu(dtype, invariant, monkeypatch):
    """q, k and v are one product with their biases. LM head and embedding are tied and have 8 bits. There is no chain. Products
    use their reference, since their kernels need a GPU."""

    def product_of(x, weight, bias, batch_invariant):
        return mixed_gemm_reference(x, weight.unpack(), bias).to(x.dtype)

    monkeypatch.setattr(sys.modules["lowbit.ops.gemm"], "fragment_gemm", product_of)
    model = packed(eager_opt(dtype), "w4a16_g32")
    assert sorted(quantize_head(model)) == ["lm_head", "model.decoder.embed_tokens"]
    model.lm_head._pack_for_gpu()
    ids = random_ids(4)
    with torch.inference_mode():
        expected = dequantized(model, torch.float32)(ids).logits.transpose(0, 1).float()
    program = program_of(model, batch_invariant=invariant)
    assert isinstance(program.table, EmbeddingTable)
    layer = program.layers[0]
    assert all(isinstance(product, Packed) for product in (layer.qkv, layer.o, layer.gate_up, layer.down, program.head))
    assert layer.qkv.bias is not None and layer.qkv.weight.shape == (192, 64) and not layer.alternates
    found = stepped(program, ids).float()
    assert float((found - expected).norm() / expected.norm()) < (0.01 if dtype == torch.float16 else 0.06)
    if not invariant:
        assert program.chain == (
            "its norms are LayerNorms, whose means no product subtracts at its end",
            "its MLP is relu without a gate, known are gates of silu and gelu_tanh",
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"do_layer_norm_before": False, "word_embed_proj_dim": 32}, "norms stand after attention and MLP"),
        ({"max_position_embeddings": 20}, "its embedding has 20 positions, 34 are asked for"),
    ],
)
def test_other_models_run_through_their_forward(options, reason):
    model = eager_opt(**options)
    engine = Engine(model, max_concurrent=2, cache_bytes=1 << 24)
    assert reason in engine.report()[0]
    (sequence,) = engine.generate([Request(prompt(9), 5)])
    ids = [*sequence.request.prompt, *(each.token for each in sequence.sampled)]
    assert ids[9:] == logits_of(model, ids)[8:-1].argmax(-1).tolist()
