"""Keys and values in few bits in the engine on a CPU: every family, chunks, preemption, prefix caching, memory, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lowbit.engine import Engine, Request
from lowbit.engine.cache import CacheSpec
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots, on_device
from lowbit.eval.kv import stored_kv
from lowbit.formats.kv import KV16, parse_kv
from tests.engine.pages import fill_unwritten
from tests.engine.test_engine import engine_of, expected, prompt, tokens
from tests.engine.test_family import CASES, tiny
from tests.tiny import eager_llama

NARROW = ("fp8", "int8", "int4", "k8v4")


@pytest.fixture(scope="module")
def model():
    return eager_llama()


@torch.inference_mode()
def logits_of(program, ids, chunks):
    """Returns logits [2, V] of a program: after a prompt, computed in `chunks` parts, and after one more step."""
    program.allocate_cache(3)
    fill_unwritten(program.cache)
    slots = Slots(1, 256, program.decoder.vocab, (), program.device)
    slots.update([(0, 0, 2), (0, 1, 1)], [(0, len(ids) - 1)])
    slots.tokens[0] = int(ids[-1])
    sequence, length = Sequence(Request(ids[:-1].tolist(), 1), slot=0), len(ids) - 1
    bounds = [length * i // chunks for i in range(chunks + 1)]
    for begin, end in itertools.pairwise(bounds):
        found = program.prompt([PrefillChunk(sequence, begin, tuple(ids[begin:end].tolist()), end == length)], slots)
    return torch.cat([found, program.step(on_device([0], program.device), slots)])


@pytest.mark.parametrize("kv", ["fp8", "int4"])
@pytest.mark.parametrize("case", CASES)
def test_the_program_of_every_family_reads_what_it_stores(case, kv):
    """A prompt and a step over quantized pages have the logits of the model's forward over quantized rows, as `lowbit eval`
    computes it. Rounding changes a code now and then, but the logits are far nearer to those than to logits of 16 bits."""
    family, options = CASES[case]
    model = tiny(family, **options)
    ids = torch.randint(1, 97, (34,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wide = model(ids[None], use_cache=False).logits[0, -2:]
        with stored_kv(model, parse_kv(kv)):
            narrow = model(ids[None], use_cache=False).logits[0, -2:]
    program = DecodeProgram(recognise(model), model.dtype, model.device, batch_invariant=False, kv=parse_kv(kv))
    error = float((logits_of(program, ids, 1) - narrow).norm())
    assert error < 0.1 * float((wide - narrow).norm()) and error < 0.01 * float(wide.norm())


@pytest.mark.parametrize("kv", NARROW)
def test_chunks_do_not_change_what_is_read(model, kv):
    """Each chunk reads earlier chunks, and itself, as they are stored. So logits differ only by the rounding of sums."""
    ids = torch.tensor(prompt(150))
    program = DecodeProgram(recognise(model), model.dtype, model.device, batch_invariant=True, kv=parse_kv(kv))
    whole = logits_of(program, ids, 1)
    for chunks in (2, 5):
        torch.testing.assert_close(logits_of(program, ids, chunks), whole, rtol=0, atol=0.01 * float(whole.abs().max()))


@pytest.mark.parametrize("kv", NARROW)
def test_greedy_tokens_do_not_depend_on_chunks_and_other_sequences(model, kv):
    lengths = (1, 77, 128, 129, 200)
    asked = [Request(prompt(length), 20) for length in lengths]
    together = engine_of(model, kv=kv, max_concurrent=5, chunk_tokens=1024).generate(asked)
    small = engine_of(model, kv=kv, chunk_tokens=128, max_concurrent=2, prefix_caching=False)
    alone = small.generate([Request(prompt(length), 20) for length in lengths])
    assert [tokens(sequence) for sequence in together] == [tokens(sequence) for sequence in alone]
    assert len({token for sequence in together for token in tokens(sequence)}) > 20


@pytest.mark.parametrize("kv", NARROW)
def test_preemption_does_not_change_the_tokens(model, kv):
    """The cache has 4 pages for 3 sequences of 2 pages. A preempted sequence is computed again from its tokens."""
    page = engine_of(model, kv=kv).program.page_bytes
    tight = engine_of(model, kv=kv, cache_bytes=5 * page, max_length=256, prefix_caching=False)
    assert tight.scheduler.pages.count == 5
    asked = [(prompt(100, seed), 60) for seed in range(3)]
    found = tight.generate([Request(*each) for each in asked])
    roomy = engine_of(model, kv=kv).generate([Request(*each) for each in asked])
    assert [tokens(sequence) for sequence in found] == [tokens(sequence) for sequence in roomy]


@pytest.mark.parametrize("kv", NARROW)
def test_prefix_caching(model, kv):
    engine, common = engine_of(model, kv=kv), prompt(200)
    first, second = engine.generate([Request([*common, 5], 8), Request([*common, 6, 7], 8)])
    assert second.cached_tokens == 128
    apart = engine_of(model, kv=kv, prefix_caching=False)
    for sequence in (first, second):
        (alone,) = apart.generate([Request(sequence.request.prompt, 8)])
        assert tokens(alone) == tokens(sequence)


def test_more_bits_are_nearer_to_sixteen(model):
    ids = torch.tensor(prompt(150))

    def logits(kv):
        return logits_of(
            DecodeProgram(recognise(model), model.dtype, model.device, batch_invariant=False, kv=parse_kv(kv)), ids, 1
        )

    wide = logits("16")
    errors = {kv: float((logits(kv) - wide).norm() / wide.norm()) for kv in ("fp8", "int8", "int4", "int4-plain")}
    assert 0 < errors["int8"] < errors["fp8"] < errors["int4"] < 1
    assert errors["int8"] < 0.05


def test_sixteen_bits_are_the_default(model):
    engine = engine_of(model)
    assert engine.program.cache_spec.kv == KV16 and "keys and values" not in "".join(engine.report())
    (sequence,) = engine_of(model, kv="16").generate([Request(prompt(30), 10)])
    assert tokens(sequence) == expected(model, prompt(30), 10)


@pytest.mark.parametrize(("kv", "bits"), [("16", 16), ("fp8", 8.125), ("int8", 8.125), ("int4", 4.125), ("k8v4", 6.125)])
def test_bytes_of_a_page(kv, bits):
    """Llama-3-8B stores 2 x 8 heads of 128 elements in each of 32 layers. Each head of a token has one 16-bit scale."""
    spec = CacheSpec(32, 8, 128, torch.float16, parse_kv(kv))
    assert spec.page_bytes == 2 * 32 * 8 * 128 * 128 * bits / 8


def test_the_same_memory_holds_more_tokens(model):
    """Heads of 16 elements are padded to 32 when they are stored. The pool counts the bytes that it allocates."""
    engines = {
        kv: engine_of(model, kv=kv, max_concurrent=64, cache_bytes=1 << 20, max_length=256) for kv in ("16", "int8", "int4")
    }
    for kv, engine in engines.items():
        cache = engine.program.cache
        assert cache.nbytes == sum(layer.nbytes for layer in cache.layers) <= 1 << 20
        stated = f", keys and values in {kv}" if kv != "16" else ""
        assert str(cache) == f"{cache.pages} pages of 128 tokens, {128 * cache.pages:,} tokens in 0.00 GiB{stated}"
    pages = {kv: engine.scheduler.pages.count for kv, engine in engines.items()}
    # layers, keys and values, heads, tokens; a row takes 64 bytes in float32, 32 + 2 in int8, 16 + 2 in int4
    rows = 2 * 2 * 2 * 128
    assert pages == {"16": (1 << 20) // (64 * rows), "int8": (1 << 20) // (34 * rows), "int4": (1 << 20) // (18 * rows)}


def test_a_request_that_does_not_fit_in_few_bits(model):
    with pytest.raises(ValueError, match="a request of 256 tokens takes .* MiB of keys and values"):
        engine_of(model, kv="int4", cache_bytes=1 << 14, max_length=256)


def test_refusals(model):
    with pytest.raises(ValueError, match="formats of keys and values are 16 .* got 'int3'"):
        engine_of(model, kv="int3")
    with pytest.raises(ValueError, match=r"in int4 need a decode program; .*\(on a CPU that is faster .*leave kv at '16'"):
        engine_of(model, kv="int4", forward=True)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()
    with pytest.raises(ValueError, match="in k8v4 need a decode program; .*none of the families"):
        Engine(gpt2, kv="k8v4")
    assert Engine(gpt2, kv="16").program.reasons
