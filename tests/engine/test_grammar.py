"""A random model under grammars generates only what they allow, whatever else the engine computes."""

from __future__ import annotations

import json
import random
import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.engine import Detokenizer, Engine, FinishReason, Grammar, GrammarCompiler, GrammarsUnavailable, Request, Sampling
from lowbit.engine.grammar import masks_of
from tests.tiny import eager_llama, json_tokenizer, tiny_tokenizer

pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")

VOCAB, END = 160, 1
tokenizer = json_tokenizer()


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tokenizer, VOCAB, [END])


@pytest.fixture(scope="module")
def engine():
    return Engine(eager_llama(), max_concurrent=4, chunk_tokens=128, cache_bytes=1 << 24)


def prompt(seed=0, length=9):
    return torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(grammar, seed=0, limit=120, temperature=1.0, **options):
    return Request(prompt(seed), limit, Sampling(temperature, seed=seed), frozenset([END]), grammar=grammar, **options)


def text_of(sequence):
    """Text of a finished sequence."""
    stream = Detokenizer(tokenizer, sequence.request.prompt)
    pieces = [stream.push(each.token) for each in sequence.sampled if each.token != END]
    return "".join(pieces) + stream.finish()


def schemas():
    """Random JSON schemas of the keywords that grammars enforce."""
    names = st.text("abcxyz_", min_size=1, max_size=5)
    leaves = st.one_of(
        st.sampled_from(
            [{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}, {}]
        ),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-50, 50),
            st.integers(0, 300),
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 4),
            st.integers(0, 9),
        ),
        st.lists(st.one_of(names, st.integers(-9, 9), st.none(), st.booleans()), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
        names.map(lambda value: {"const": value}),
    )

    def larger(inner):
        def of_object(properties, required):
            names = sorted(properties)[:required]
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

        return st.one_of(
            st.builds(of_object, st.dictionaries(names, inner, max_size=4), st.integers(0, 4)),
            st.builds(
                lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
                inner, st.integers(0, 2), st.integers(0, 2),
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        )  # fmt: skip

    return st.recursive(leaves, larger, max_leaves=8)


def allows(schema, value):
    """True if a schema made by `schemas` allows a value: JSON Schema's definitions of its keywords."""
    if "anyOf" in schema:
        return any(allows(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(each) is type(value) and each == value for each in schema["enum"])
    if "const" in schema:
        return value == schema["const"]
    kind = schema.get("type")
    if kind == "object":
        known = schema["properties"]
        complete = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= known.keys()
        return complete and all(allows(known[name], value[name]) for name in value)
    if kind == "array":
        right = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return right and all(allows(schema["items"], each) for each in value)
    if kind == "string":
        right = isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        return right and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    kinds = {"null": type(None), "boolean": bool, "number": (int, float), None: object}
    return isinstance(value, kinds[kind]) and not (kind == "number" and isinstance(value, bool))


@settings(max_examples=25, deadline=None)
@given(st.lists(schemas(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_random_schemas_give_json_that_they_allow(engine, compiler, some, seed):
    """A batch has several schemas, and requests without a schema. A text that the token limit cuts off is not complete JSON."""
    limit = 60
    requests = [request(compiler.compile(Grammar.json_schema(each)), seed + i, limit) for i, each in enumerate(some)]
    sequences = engine.generate([*requests, Request(prompt(seed % 1000), 20, Sampling(1.0, seed=seed % 1000))])
    ended = 0
    for schema, sequence in zip(some, sequences, strict=False):
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(sequence.sampled) == limit
            continue
        ended += 1
        assert sequence.finish_reason is FinishReason.STOP
        assert allows(schema, json.loads(text_of(sequence))), (schema, text_of(sequence))
    alone = engine.generate([Request(prompt(seed % 1000), 20, Sampling(1.0, seed=seed % 1000))])
    tokens, expected = ([each.token for each in sequence.sampled] for sequence in (sequences[-1], alone[0]))
    assert tokens == expected, "grammars do not change what other sequences of their steps say"


def random_schema(source, depth=0):
    """Returns a JSON schema that is chosen by a `random.Random`, with the keywords that `allows` knows."""
    leaves = ["enum", "const", "string", "pattern", "integer", "number", "boolean", "null", "any"]
    kind = source.choice([*leaves, *(["object", "object", "array", "anyOf"] if depth < 3 else [])])

    def name():
        return "".join(source.choices("abcxyz_", k=source.randint(1, 5)))

    def more():
        return random_schema(source, depth + 1)

    low = source.randint(0, 3)
    match kind:
        case "enum":
            return {"enum": [source.choice([name(), source.randint(-9, 9), None, True, False]) for _ in range(low + 1)]}
        case "const":
            return {"const": name()}
        case "string":
            return {"type": "string", "minLength": low, "maxLength": low + source.randint(0, 9)}
        case "pattern":
            return {"type": "string", "pattern": source.choice(["^[a-c]{2,4}$", "^x[0-9]+y?$", "^(yes|no)$"])}
        case "integer":
            return {"type": "integer", "minimum": low - 50, "maximum": low + source.randint(0, 300)}
        case "object":
            properties = {name(): more() for _ in range(source.randint(0, 4))}
            required = sorted(properties)[: source.randint(0, 4)]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": more(), "minItems": low // 2, "maxItems": low // 2 + source.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [more() for _ in range(source.randint(1, 3))]}
    return {} if kind == "any" else {"type": kind}


def test_a_thousand_random_schemas(compiler):
    """Each of a thousand schemas gives JSON that it allows, or ends at the limit. Requests are sampled and greedy, 32 at
    once."""
    source, limit = random.Random(44), 48
    schemas_ = [random_schema(source) for _ in range(1000)]
    engine = Engine(eager_llama(), max_concurrent=32, max_length=128, chunk_tokens=128, cache_bytes=1 << 25)
    asked = [
        request(compiler.compile(Grammar.json_schema(schema)), seed, limit, temperature=float(seed % 3 > 0))
        for seed, schema in enumerate(schemas_)
    ]
    ended = 0
    for schema, sequence in zip(schemas_, engine.generate(asked), strict=True):
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(sequence.sampled) == limit
            continue
        ended += 1
        assert sequence.finish_reason is FinishReason.STOP
        assert allows(schema, json.loads(text_of(sequence))), (schema, text_of(sequence))
    assert ended > 500, ended


@pytest.mark.parametrize("ahead", [True, False])
def test_forced_tokens_are_verified_in_one_step(compiler, ahead):
    """Forced tokens are verified together in fewer steps. Tokens and log-probabilities are those of steps of one token, greedy
    and sampled, also beside sequences without grammars."""
    source = random.Random(9)
    schemas_ = [random_schema(source) for _ in range(60)]
    names = {f"a_long_name_{i}": {"enum": [i, None]} for i in range(4)}
    schemas_ += [{"type": "object", "properties": names, "required": sorted(names), "additionalProperties": False}] * 3

    def asked():
        settings_ = [Sampling(), Sampling(1.0, seed=5), Sampling(0.8, seed=1, top_k=9), Sampling(1.0, repetition_penalty=1.3)]
        constrained = [
            Request(prompt(i), 90, settings_[i % 4], frozenset([END]), top_logprobs=i % 3, grammar=grammars[i])
            for i in range(len(schemas_))
        ]
        return [*constrained, Request(prompt(99), 60), Request(prompt(98), 60, Sampling(1.0, seed=4))]

    grammars = [compiler.compile(Grammar.json_schema(schema)) for schema in schemas_]
    options = {"max_concurrent": 8, "max_length": 256, "cache_bytes": 1 << 25, "async_scheduling": ahead}
    plain, jumping = Engine(eager_llama(), **options), Engine(eager_llama(), speculate=5, **options)
    steps = []
    for engine in (plain, jumping):
        launch = engine.runner.decode
        engine.runner.decode = lambda *given, launch=launch, **more: (steps.append(1), launch(*given, **more))[1]
        steps.append(0)
    expected = plain.generate(asked())
    count, found = len(steps), jumping.generate(asked())
    for one, other in zip(found, expected, strict=True):
        assert [each.token for each in one.sampled] == [each.token for each in other.sampled]
        assert one.finish_reason is other.finish_reason
        for mine, theirs in zip(one.sampled, other.sampled, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    speculation = jumping.speculation
    assert len(steps) - count < count and speculation.accepted > 200


def test_the_first_forced_token_is_in_flight(compiler):
    """`masks_ahead` returns the mask of a state and of the states after its forced tokens. The matcher's own state does not
    change."""
    state = compiler.compile(Grammar.lark('start: "abc" /[xy]/ "d"')).start()
    assert state.forced == tuple(tokenizer.convert_tokens_to_ids(list("abc")))
    before = masks_of([state], state.words)[0]
    masks = state.masks_ahead(state.forced)
    assert torch.equal(masks[0], before) and torch.equal(masks_of([state], state.words)[0], before)
    other = compiler.compile(Grammar.lark('start: "abc" /[xy]/ "d"')).start()
    for row, token in enumerate(state.forced):
        assert torch.equal(masks_of([other], other.words)[0], masks[row]) and not other.accept(token)
    assert torch.equal(masks_of([other], other.words)[0], masks[3]) and other.forced == ()
    (x, d) = tokenizer.convert_tokens_to_ids(["x", "d"])
    assert not other.accept(x) and other.forced == (d,)
    assert bool((other.masks_ahead((d,))[1] == -1).all()), "a complete text: its next token is discarded"
    assert not other.accept(d) and other.is_complete and other.forced == ()


def test_the_schemas_check_is_one():
    """`allows` refuses what it should. Otherwise the tests with random schemas could not fail."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    assert allows(schema, {"a": 1})
    assert not any(allows(schema, value) for value in ({}, {"a": True}, {"a": 1, "b": 2}, [], None))


CASES = [
    (Grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
    (Grammar.regex(r"[a-c]{3}/\d+\.x"), lambda text: re.fullmatch(r"[a-c]{3}/\d+\.x", text)),
    (Grammar.regex(r"a\/b|/+"), lambda text: re.fullmatch(r"a/b|/+", text)),
    (Grammar.choice(["yes", "no", 'a "quote"', "back\\slash"]), ["yes", "no", 'a "quote"', "back\\slash"].__contains__),
    (Grammar.lark('start: "(" start ")" | /[xy]/'), lambda text: re.fullmatch(r"(\(*)[xy](\)*)", text)),
]


@pytest.mark.parametrize(("grammar", "right"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("forward", [False, True])
def test_every_kind_of_grammar(compiler, grammar, right, forward):
    """Every kind of grammar holds in the decode program and in the model's own forward, greedy and sampled, scheduled ahead of
    the GPU or not."""
    compiled, found = compiler.compile(grammar), set()
    for ahead in (False, True):
        engine = Engine(eager_llama(), max_concurrent=3, cache_bytes=1 << 24, forward=forward, async_scheduling=ahead)
        requests = [request(compiled, seed, 100, temperature) for seed, temperature in enumerate((0.0, 1.0, 5.0, 5.0))]
        texts = []
        for sequence in engine.generate(requests):
            text = text_of(sequence)
            assert sequence.finish_reason is FinishReason.LENGTH or right(text), text
            texts.append((text, sequence.finish_reason))
        found.add(tuple(texts))
    assert len(found) == 1, "scheduling ahead does not change the text"
    assert any(reason is FinishReason.STOP for _, reason in texts) and len({text for text, _ in texts}) > 1


def test_a_text_ends_when_it_is_complete(engine, compiler):
    """A complete text ends without a stop token, and even if the request has none. If the text may end or continue, a stop
    token may be sampled."""
    grammar = compiler.compile(Grammar.choice(["abc"]))
    (sequence,) = engine.generate([Request(prompt(), 50, grammar=grammar)])
    assert text_of(sequence) == "abc" and sequence.finish_reason is FinishReason.STOP
    grammar = compiler.compile(Grammar.regex("a*"))
    (sequence,) = engine.generate([Request(prompt(), 20, Sampling(logit_bias={END: 100.0}), frozenset([END]), grammar=grammar)])
    assert [each.token for each in sequence.sampled] == [END]


def test_a_preempted_sequence_continues_its_text(compiler):
    """The state of a grammar survives the preemption of its sequence. The text is that of an engine with enough pages."""
    grammar = compiler.compile(Grammar.regex("([ab][cd]){70}"))

    def texts(cache_bytes):
        engine = Engine(eager_llama(), max_concurrent=3, cache_bytes=cache_bytes, max_length=256)
        preempted, preempt = [], engine.scheduler._preempt
        engine.scheduler._preempt = lambda scheduled: (preempted.append(1), preempt(scheduled))
        asked = [Request(prompt(seed, 100), 150, Sampling(1.0, seed=seed), grammar=grammar) for seed in range(3)]
        return [text_of(sequence) for sequence in engine.generate(asked)], len(preempted)

    page = Engine(eager_llama(), max_concurrent=1, cache_bytes=1 << 24).program.page_bytes
    few, preempted = texts(5 * page)
    many, none = texts(1 << 24)
    assert few == many and preempted and not none
    assert all(re.fullmatch("([ab][cd]){70}", text) for text in few)


def test_tokens_have_the_models_log_probabilities(engine, compiler):
    """Log-probabilities are those before the mask, just as other requests have those before temperature and filters."""
    (one,) = engine.generate([request(compiler.compile(Grammar.choice(["abc", "abd"])), top_logprobs=3)])
    ids, logits = list(one.request.prompt), None
    model = eager_llama()
    for sampled in one.sampled:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        assert sampled.logprob == pytest.approx(float(torch.log_softmax(logits, 0)[sampled.token]), abs=1e-3)
        assert sampled.top_logprobs[0][0] == int(logits.argmax())
        ids.append(sampled.token)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar.json_schema({"type": "foo"}), "foo"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"$ref": "http://example.com/a"}), "example.com"),
        (Grammar.json_schema({"$ref": "#/$defs/none"}), "none"),
        (Grammar.json_schema({"$ref": "#"}), "no token of the model"),
        (Grammar.json_schema(False), "schema is false"),
        (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.lark("start: missing"), "missing"),
        (Grammar.lark("begin: missing"), "start"),
    ],
    ids=str,
)
def test_grammars_that_cannot_be_enforced(compiler, grammar, why):
    with pytest.raises(ValueError, match=re.escape(why)) as raised:
        compiler.compile(grammar)
    assert 5 < len(str(raised.value)) < 500 and "\n" not in str(raised.value)


def test_a_grammar_that_becomes_too_costly_fails_its_sequence_alone(engine, compiler):
    """The cost of computing a mask is bounded. A sequence that exceeds it fails with the reason; the others continue."""
    costly = compiler.compile(Grammar.regex("((a{1,100}){1,100}){1,100}"))
    other = compiler.compile(Grammar.choice(["yes", "no"]))
    (a,) = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    long = Request(prompt(), 200, Sampling(logit_bias={a: 100.0}), frozenset([END]), grammar=costly)
    sequences = [engine.submit(each) for each in (long, request(other))]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    assert sequences[0].finish_reason is FinishReason.FAILED and "too many" in sequences[0].error
    assert "state" not in sequences[0].error and text_of(sequences[1]) in ("yes", "no")


def test_one_grammar_for_many_sequences_and_threads(compiler):
    """A compiled grammar has no state. Threads may compile grammars and start matchers at the same time."""
    compiled, found = compiler.compile(Grammar.choice(["aa", "ab"])), []

    def use():
        for i in range(40):
            state = compiled.start()
            ids = tokenizer(f"a{'ab'[i % 2]}", add_special_tokens=False).input_ids
            found.append([state.accept(each) for each in ids] == ["", ""] and state.is_complete)
            compiler.compile(Grammar.json_schema({"const": f"{i}"}))
        found.append(bool(compiled.start().accept(ids[1] + 1)))  # this token is not allowed, so that a reason is returned

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 41 and all(found)


def test_what_does_not_fit_is_refused(engine, compiler):
    grammar = compiler.compile(Grammar.json_object())
    with pytest.raises(ValueError, match="min_new_tokens=3"):
        Request(prompt(), 9, Sampling(min_new_tokens=3), grammar=grammar)
    small = GrammarCompiler(tokenizer, len(tokenizer), [END]).compile(Grammar.json_object())
    with pytest.raises(ValueError, match="at most 128 tokens, the model has 160"):
        engine.submit(Request(prompt(), 9, grammar=small))
    with pytest.raises(GrammarsUnavailable, match="does not read this model's tokenizer"):
        GrammarCompiler(tiny_tokenizer(), VOCAB, [END])
    with pytest.raises(GrammarsUnavailable, match="tokenizers library"):
        GrammarCompiler(object.__new__(SlowTokenizer), VOCAB, [END])


class SlowTokenizer:
    """A tokenizer in Python."""

    def __len__(self):
        return 5


def test_a_tokenizer_with_more_tokens_than_the_model(engine):
    """The model's vocabulary bounds what is sampled. Tokens that only the tokenizer has are never sampled."""
    grown = json_tokenizer()
    grown.add_tokens([f"<extra{i}>" for i in range(100)])
    assert len(grown) > VOCAB + 32
    compiler = GrammarCompiler(grown, VOCAB, [END])
    requests = [request(compiler.compile(Grammar.regex("[ab]{5,9}")), seed) for seed in range(3)]
    for sequence in engine.generate(requests):
        assert re.fullmatch("[ab]{5,9}", text_of(sequence))


def test_masks_are_computed_while_the_logits_are(compiler, monkeypatch):
    """A step's logits are launched before the tokens of the step before are read. Without a grammar, no masks are computed."""
    engine, events = Engine(eager_llama(), max_concurrent=1, cache_bytes=1 << 24), []

    def noted(owner, name):
        called = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (events.append(name), called(*given))[1])

    noted(engine.program, "step")
    noted(engine, "_read")
    noted(engine.runner, "write_masks")
    engine.generate([request(compiler.compile(Grammar.regex("[ab]{8}")), temperature=0.0)])
    assert events[:8] == ["write_masks", "step", "_read", "write_masks", "step", "_read", "write_masks", "step"]
    assert events.count("step") == 8, "the last step runs before its sequence is known to have finished"
    engine.step()  # reads what is still in flight
    events.clear()
    engine.generate([Request(prompt(), 5)])
    assert events[:4] == ["step", "_read", "step", "_read"] and "write_masks" not in events
