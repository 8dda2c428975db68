"""The engine on a GPU generates the tokens of Transformers' forward, and allocates nothing after the warm-up."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from triton import knobs

from lowbit.engine import Engine, FinishReason, Grammar, GrammarCompiler, Request, Sampling
from lowbit.engine.chain import Chain
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.models.head import quantize_head
from lowbit.nn import convert
from lowbit.nn.linear import make_batch_invariant
from tests.engine.pages import fill_unwritten, zero
from tests.engine.test_chain import stepped
from tests.tiny import json_tokenizer

pytestmark = pytest.mark.gpu

VOCAB = 4096
LENGTHS = (1, 2, 77, 127, 128, 129, 255, 600)

COMMON = dict(
    vocab_size=VOCAB, hidden_size=512, intermediate_size=1408, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip


def model_of(family="Llama", dtype=torch.float16, scheme="w4a16_g128", ends=False):
    """Returns a model whose next token depends on all tokens before. Its weights are large, so that the largest logits are far
    apart."""
    kinds = {
        "Llama": (LlamaConfig, LlamaForCausalLM),
        "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "OPT": (OPTConfig, OPTForCausalLM),
    }
    config, kind = kinds[family]
    torch.manual_seed(0)
    more = {"head_dim": 64} if family == "Qwen3" else {"ffn_dim": 2048, "tie_word_embeddings": True} if family == "OPT" else {}
    with torch.device("cuda"):
        model = kind(config(**{**COMMON, **more})).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
        elif name.endswith("bias"):  # OPT has biases in every layer; larger ones would make it repeat one token
            torch.nn.init.normal_(parameter, std=0.1 if family == "OPT" else 0.5)
    if scheme is not None:
        convert(model, scheme)
    if ends:
        quantize_head(model)
    return model


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens(sequence):
    return [sampled.token for sampled in sequence.sampled]


@torch.inference_mode()
def logits_and_nudged(model, ids):
    """Returns the logits of Transformers' forward, and the logits after each element of the embeddings moved by a last bit up,
    down or not at all."""
    embedded = model.get_input_embeddings()(ids)
    signs = torch.randint(-1, 2, embedded.shape, generator=torch.Generator().manual_seed(0)).to(embedded)
    nudged = embedded * (1 + signs * torch.finfo(embedded.dtype).eps)
    return tuple(model(inputs_embeds=given).logits.float() for given in (embedded, nudged))


def compared(model, sequence):
    """Compares the sampled tokens with Transformers' forward of the same sequence. Returns (wrong, near, other), tensors with
    one element a token.

    wrong: another token is more likely by more than rounding. Rounding is twice the change of the logits when the embeddings
    move by a last bit (8-bit activations magnify that), but at most 0.7 of the distance from the mean to the largest logit.
    near: rounding as a share of that distance. other: the token is not the most likely one.
    """
    ids = torch.tensor([[*sequence.request.prompt, *tokens(sequence)]], device="cuda")
    logits, others = (each[0, len(sequence.request.prompt) - 1 : -1] for each in logits_and_nudged(model, ids))
    sampled = torch.tensor(tokens(sequence), device="cuda")
    chosen = logits.gather(1, sampled[:, None])[:, 0]
    above = logits.amax(1) - logits.mean(1)
    near = 2 * (logits - others).abs().amax(1)
    return logits.amax(1) - chosen > near.minimum(0.7 * above), near / above, sampled != logits.argmax(1)


def check_greedy(model, sequences, why=()):
    """Checks that each token is the most likely one, up to rounding. Also checks that the allowed rounding is too small for any
    token to pass."""
    found = [compared(model, sequence) for sequence in sequences]
    assert torch.cat([near for _, near, _ in found]).median() < 0.7, "any token would pass"
    assert [int(wrong.sum()) for wrong, _, _ in found] == [0] * len(found), ([len(r.request.prompt) for r in sequences], why)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "OPT"])
@pytest.mark.parametrize("scheme", [None, "w4a16_g128", "w6e3m2a16", "w8a16", "w8a8", "w4a8_g128", "fp8_dynamic"])
def test_greedy_tokens(family, scheme, dtype):
    """Tokens are right for many sequences at once and for one sequence alone, which takes five launches a layer with a
    chain."""
    model = model_of(family, dtype, scheme, ends=scheme is not None)
    sequences = [Request(prompt(length, length), 40) for length in LENGTHS]
    engine = Engine(model, max_concurrent=16, max_length=1024, chunk_tokens=256)
    assert isinstance(engine.program, DecodeProgram), engine.report()
    if scheme in ("w4a16_g128", "w6e3m2a16", "w8a16"):
        assert isinstance(engine.program.chain, Chain) == (family != "OPT"), engine.report()
    answered = [*engine.generate(sequences), *engine.generate([Request(prompt(33), 40)])]
    assert all(sequence.finish_reason is FinishReason.LENGTH and len(set(tokens(sequence))) > 15 for sequence in answered)
    check_greedy(model, answered, engine.report())


@pytest.mark.parametrize("family", ["Llama", "OPT"])
def test_after_warm_up_nothing_is_captured_compiled_or_allocated(family):
    engine = Engine(model_of(family), max_concurrent=16, max_length=1024)
    stages = list(engine.warm_up())
    assert {stage.what for stage in stages} >= {"kernels", "step of 16 with filters, up to 1,024 tokens"}
    assert all(stage.done < stage.total for stage in stages)
    compiled = []
    knobs.compilation.listener = lambda src, **given: compiled.append(src.name)
    asked = [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=50, presence_penalty=0.5, seed=1)]

    def texts(seed):
        return [Request(prompt(50 + 9 * i, seed + i), 30, asked[i % 2], top_logprobs=i % 3) for i in range(20)]

    engine.generate(texts(0))
    assert engine.mixed_runner.captures == len(engine.mixed_runner.shapes)
    captures, segments = (
        (engine.decode_runner.captures, engine.prefill_runner.captures),
        torch.cuda.memory_stats()["num_device_alloc"],
    )
    for sequence in engine.generate(texts(100)):
        assert sequence.finish_reason is FinishReason.LENGTH
    assert (engine.decode_runner.captures, engine.prefill_runner.captures) == captures
    assert captures == (len(engine.decode_runner.variants()), len(engine.prefill_runner.graph_shapes))
    assert engine.mixed_runner.captures == len(engine.mixed_runner.shapes) and engine.step_budget.steps > 0
    assert torch.cuda.memory_stats()["num_device_alloc"] == segments
    knobs.compilation.listener = None
    assert not compiled, "kernels were compiled, or loaded from Triton's cache"


@torch.inference_mode()
def test_prefill_graphs_share_the_memory_of_the_largest():
    engine = Engine(model_of(), max_concurrent=8, max_length=1024, cache_bytes=1 << 28)
    largest, *others = engine.prefill_runner.graph_shapes
    engine.prefill_runner.captured(largest)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for shape in others:
        engine.prefill_runner.captured(shape)
    torch.cuda.empty_cache()
    assert len(others) > 30 and torch.cuda.memory_reserved() - before < 1 << 26


@pytest.mark.parametrize("invariant", [False, True])
def test_prefill_graphs_do_not_change_the_tokens(invariant, monkeypatch):
    """Prompts are computed in chunks, after cached prefixes, several at once, and with more sequences than a graph has."""
    shared = prompt(300, 9)
    ids = [prompt(1 + 37 * i % 200, i) for i in range(20)] + [[*shared, *prompt(1 + 30 * i, i)] for i in range(4)]
    ids += [prompt(700, 5), *(prompt(3 + i, i) for i in range(20))]

    def generated():
        model = model_of()
        if invariant:
            make_batch_invariant(model, model.dtype)
        engine = Engine(
            model, max_concurrent=32, max_length=1024, chunk_tokens=256, cache_bytes=1 << 28, batch_invariant=invariant
        )
        return engine, [tokens(sequence) for sequence in engine.generate([Request(each, 8) for each in ids])]

    engine, found = generated()
    assert engine.prefill_runner.captures > 3 and {shape.keys for shape in engine.prefill_runner._captured} >= {256, 8192}
    monkeypatch.setattr("lowbit.engine.prefill_runner.PrefillRunner._shape", lambda self, chunks: None)
    engine, expected = generated()
    assert not engine.prefill_runner.captures
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    assert same == len(ids) if invariant else same > len(ids) - 3  # two logits may differ by less than rounding


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "OPT"])
def test_prompts_beside_decoding_sequences(family):
    """Requests arrive one by one. Decode steps and prompts are computed in one graph, within the stated time."""
    model = model_of(family, ends=True)
    engine = Engine(model, max_concurrent=24, max_length=1024, cache_bytes=1 << 28, step_ms=5.0)
    waiting, sequences, steps = [Request(prompt(40 + 70 * i % 500, i), 40) for i in range(24)], [], 0
    while waiting or any(s.finish_reason is None for s in sequences):
        if waiting and steps % 2 == 0:
            sequences.append(engine.submit(waiting.pop()))
        engine.step()
        steps += 1
    assert engine.mixed_runner.captures > 0 and engine.step_budget.steps > 10
    check_greedy(model, sequences)
    print(f"\n{engine.step_budget.tokens} prompt tokens a step after {engine.step_budget.steps} steps")


@pytest.mark.parametrize("kv", ["16", "int4"])
def test_batch_invariant_sequences_have_the_same_bits_beside_prompts(kv):
    model = model_of("Qwen3")
    make_batch_invariant(model, model.dtype)
    options = dict(max_concurrent=8, max_length=1024, cache_bytes=1 << 28, batch_invariant=True, kv=kv, chunk_tokens=256)
    requests = lambda: [Request(prompt(60 + 90 * i, i), 40) for i in range(6)]  # noqa: E731
    engine, waiting, sequences = Engine(model, **options), requests(), []
    while waiting or any(s.finish_reason is None for s in sequences):
        if waiting:
            sequences.append(engine.submit(waiting.pop(0)))
        for _ in range(3):
            engine.step()
    assert engine.mixed_runner.captures > 0
    for request, found in zip(requests(), sequences, strict=True):
        (alone,) = Engine(model, **options).generate([request])
        assert found.sampled == alone.sampled


def test_kernels_are_compiled_for_the_first_requests_only():
    """Without a warm-up, each part of a step is run once without launches before its first launch, to compile its kernels."""
    told = []
    engine = Engine(
        model_of(), max_concurrent=4, max_length=512, cache_bytes=1 << 26, prefix_caching=False, progress=told.append
    )
    texts = [(prompt(30, 1), 20), (prompt(100, 2), 10)]
    first = [tokens(r) for r in engine.generate([Request(*each) for each in texts])]
    assert told and told[-1].done == told[-1].total and engine.runner.warm_up_run is not None
    count, so_far = engine.runner.warm_up_run.count, len(told)
    assert [tokens(r) for r in engine.generate([Request(*each) for each in texts])] == first
    assert engine.runner.warm_up_run.count == count and len(told) == so_far


@pytest.mark.parametrize("sampled", [0.0, 0.8], ids=["greedy", "sampled"])
def test_nan_logits_fail_one_sequence(sampled):
    """The embedding of one token is NaN. Sequences fail that have it in the prompt or sample it; other rows of the same graph
    are unchanged."""
    model = model_of(scheme=None)
    engine = Engine(model, max_concurrent=16, max_length=512, cache_bytes=1 << 26, batch_invariant=True, prefix_caching=False)
    asked = [dict(prompt=prompt(20 + 30 * i, i), limit=40, sampling=Sampling(sampled, seed=i)) for i in range(12)]
    expected = engine.generate([Request(**each) for each in asked])
    bad = tokens(expected[3])[20]
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    found = [engine.submit(Request(**each)) for each in asked]
    while any(sequence.finish_reason is None for sequence in found):
        engine.step()
    for one, other in zip(found, expected, strict=True):
        drawn_before = tokens(other)[:-1]  # the last token is never embedded
        until = 0 if bad in one.request.prompt else drawn_before.index(bad) + 1 if bad in drawn_before else 40
        assert one.finish_reason is (FinishReason.FAILED if until < 40 else FinishReason.LENGTH)
        assert one.error == ("the model's logits are NaN or infinite" if until < 40 else "")
        assert [(d.token, d.logprob) for d in one.sampled] == [(d.token, d.logprob) for d in other.sampled][:until]
    assert found[3].finish_reason is FinishReason.FAILED and any(
        sequence.finish_reason is FinishReason.LENGTH for sequence in found
    )


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w8a8"])
def test_batch_invariant_sequences_have_the_same_bits(scheme):
    model = model_of(scheme=scheme)
    make_batch_invariant(model, model.dtype)
    engine = Engine(model, max_concurrent=32, max_length=1024, chunk_tokens=256, batch_invariant=True)
    asked = dict(prompt=prompt(300, 7), limit=60, sampling=Sampling(temperature=0.9, top_p=0.95, seed=5))
    (alone,) = engine.generate([Request(**asked)])
    others = [Request(prompt(20 + 31 * i, i), 80, Sampling(1.0, seed=i)) for i in range(24)]
    among = engine.generate([*others[:11], Request(**asked), *others[11:]])[11]
    assert [(d.token, d.logprob) for d in among.sampled] == [(d.token, d.logprob) for d in alone.sampled]


def test_the_same_bits_every_run():
    engine = Engine(model_of(), max_concurrent=8, max_length=1024, prefix_caching=False)
    runs = []
    for _ in range(2):
        sequences = [Request(prompt(40 + 50 * i, i), 50, Sampling(0.7 * (i % 2), seed=i)) for i in range(8)]
        runs.append([[(d.token, d.logprob) for d in r.sampled] for r in engine.generate(sequences)])
    assert runs[0] == runs[1]


def test_unwritten_pages_are_never_read():
    """Every page that is not written yet holds NaN, and so does the dummy page, which padding rows write."""
    engine = Engine(model_of(), max_concurrent=5, max_length=512, prefix_caching=False)
    assert isinstance(engine.program, DecodeProgram) and engine.program.cache is not None
    fill_unwritten(engine.program.cache)
    asked = [(prompt(100 + i, i), 60) for i in range(5)]  # five rows are padded to eight
    poisoned = [tokens(r) for r in engine.generate([Request(*each) for each in asked])]
    zero(engine.program.cache)
    assert poisoned == [tokens(r) for r in engine.generate([Request(*each) for each in asked])]


def test_preempted_sequences_are_completed():
    model = model_of()
    page = Engine(model, max_concurrent=1, max_length=128).program.cache_spec.page_bytes
    engine = Engine(model_of(), max_concurrent=8, max_length=512, cache_bytes=12 * page, prefix_caching=False)
    sequences = engine.generate([Request(prompt(100, seed), 200) for seed in range(8)])
    assert all(r.finish_reason is FinishReason.LENGTH and len(r.sampled) == 200 for r in sequences)
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_the_model_computes_as_before():
    """An engine takes over the weights, and the model's own forward still works. It then computes gate and up as one product,
    whose sums have another order. So logits may differ, by less than they change with a last bit of the embeddings."""
    model = model_of(dtype=torch.bfloat16)
    ids = torch.tensor([prompt(50)], device="cuda")
    with torch.inference_mode():
        before, nudged = logits_and_nudged(model, ids)
        allocated = torch.cuda.memory_allocated()
        engine = Engine(model, max_concurrent=2, max_length=256, cache_bytes=1 << 24)
        grown = torch.cuda.memory_allocated() - allocated - engine.program.cache.nbytes
        after = model(ids).logits.float()
    assert (after - before).norm() < (nudged - before).norm() < 0.1 * before.norm()
    assert grown < 20e6, "weights are held once"


def test_a_model_in_float32_runs_through_its_forward():
    engine = Engine(model_of(dtype=torch.float32, scheme=None), max_concurrent=2, max_length=256)
    assert engine.report() == [
        "through Transformers' forward, one text at a time: its kernels compute in fp16 and bf16, the model is in float32"
    ]


@pytest.mark.parametrize("scheme", [None, "w4a16_g128", "w8a8"])
def test_a_second_engine_of_a_model(scheme):
    model = model_of(scheme=scheme)
    asked = dict(max_concurrent=4, max_length=256, cache_bytes=1 << 26)
    first, second = (Engine(model, **asked).generate([Request(prompt(33), 40)])[0] for _ in range(2))
    assert tokens(first) == tokens(second)
    check_greedy(model, [first])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_gpu_that_is_not_the_current_one():
    """Graphs, streams and events belong to the model's GPU."""
    found = []
    for device in ("cuda:0", "cuda:1"):
        engine = Engine(model_of().to(device), max_concurrent=4, max_length=512, cache_bytes=1 << 26)
        found.append([tokens(r) for r in engine.generate([Request(prompt(20 + 50 * i, i), 40) for i in range(4)])])
    assert found[0] == found[1]


def test_steps_with_and_without_the_chain_agree():
    """Eight rows use the chain, sixteen do not. After the same token, log-probabilities differ only by rounding."""
    engine = Engine(model_of(), max_concurrent=16, max_length=256)
    ids = [prompt(64, seed) for seed in range(16)]
    few = engine.generate([Request(i, 2) for i in ids[:8]])
    many = engine.generate([Request(i, 2) for i in ids])[:8]
    alike = [
        (one.sampled[1].logprob, other.sampled[1].logprob)
        for one, other in zip(few, many, strict=True)
        if tokens(one) == tokens(other)
    ]
    assert len(alike) >= 6 and all(abs(one - other) < 0.02 for one, other in alike)


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a16", "w8a8", "fp8_dynamic"])
@pytest.mark.parametrize("count", [8, 16], ids=["five launches", "eight launches"])
def test_perplexity_of_steps(scheme, count):
    """Sequences are computed token by token. Their mean loss is within a thousandth of that of the model's own forward."""
    model = model_of(scheme=scheme)
    ids = torch.stack([torch.tensor(prompt(100, seed)) for seed in range(count)]).cuda()
    with torch.inference_mode():
        logits = model(ids).logits[:, :-1].float()
    decoder = recognise(model)
    assert not isinstance(decoder, tuple), decoder
    program = DecodeProgram(decoder, model.dtype, model.device, batch_invariant=False)
    found = stepped(program, ids, VOCAB).transpose(0, 1)[:, :-1].float()
    following = ids[:, 1:].reshape(-1)
    expected, got = (cross_entropy(part.reshape(-1, VOCAB), following) for part in (logits, found))
    assert abs(got - expected) < 1e-3 * expected


def test_grammars_in_graphs():
    """Texts follow their grammars, and sequences without a grammar do not change. After a warm-up that includes grammars,
    nothing is captured or compiled for them."""
    pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")
    tokenizer = json_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB, [1])
    patterns = ["[ab]{30}", "([0-9]{3}-){9}[xyz]", '\\{"[a-f]{2,40}": (true|null)\\}']
    compiled = [compiler.compile(Grammar.regex(pattern)) for pattern in patterns]
    model = model_of()
    make_batch_invariant(model, model.dtype)
    engine = Engine(model, max_concurrent=8, max_length=512, batch_invariant=True)
    assert {stage.what for stage in engine.warm_up(grammars=True)} >= {"step of 8 for grammars, up to 512 tokens"}
    captures, count = engine.decode_runner.captures, engine.runner.warm_up_run.count

    def asked(with_grammars):
        settings = [Sampling(0.9, top_p=0.95, seed=seed) if seed % 2 else Sampling() for seed in range(6)]
        return [
            Request(prompt(40 + seed, seed), 80, settings[seed], frozenset([1]),
                    grammar=compiled[seed // 2] if (with_grammars and seed % 2 == 0) or seed == 5 else None)
            for seed in range(6)
        ]  # fmt: skip

    for _ in range(2):
        sequences = engine.generate(asked(True))
        plain = engine.generate(asked(False))
        for seed, sequence in enumerate(sequences):
            if sequence.request.grammar is None:
                assert [each.token for each in sequence.sampled] == [each.token for each in plain[seed].sampled]
                continue
            text = tokenizer.decode([each.token for each in sequence.sampled if each.token != 1])
            assert sequence.finish_reason is FinishReason.STOP and re.fullmatch(patterns[seed // 2], text), text
    assert (engine.decode_runner.captures, engine.runner.warm_up_run.count) == (captures, count)


def test_how_long_a_step_with_grammars_takes():
    """Prints the milliseconds of a step of 16 sequences without grammars, and with a grammar for each sequence. No limit is
    asserted."""
    pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")
    compiler = GrammarCompiler(json_tokenizer(), VOCAB, [1])
    engine = Engine(model_of(), max_concurrent=16, max_length=1024)
    list(engine.warm_up(grammars=True))
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[a-z ]{40}$"}, "minItems": 20, "maxItems": 30}
    for name, grammar in (("without grammars", None), ("with grammars", compiler.compile(Grammar.json_schema(schema)))):
        for _ in range(2):
            asked = [Request(prompt(64, seed), 400, Sampling(1.0, seed=seed), grammar=grammar) for seed in range(16)]
            sequences = [engine.submit(each) for each in asked]
            while min(len(sequence.sampled) for sequence in sequences) < 20:
                engine.step()
            begin, before = time.perf_counter(), len(sequences[0].sampled)
            while len(sequences[0].sampled) < before + 200:
                engine.step()
            took = time.perf_counter() - begin
            for sequence in sequences:
                engine.cancel(sequence)
        print(f"{name}: {took / 200 * 1e3:.3f} ms a step")
