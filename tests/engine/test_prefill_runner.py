"""Prefill chunks in graphs: which graph is replayed, and with which input. Without a GPU, functions replace graphs."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine import Engine, Request, Sampling
from lowbit.engine import prefill_runner as module
from lowbit.engine.mixed_runner import MixedRunner
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.program import DecodeProgram
from lowbit.engine.ragged import RaggedShape
from tests.tiny import eager_llama

VOCAB = 160


class FunctionGraph:
    """The replay of a graph as a function, which makes the same launches on the same tensors."""

    def __init__(self, launch):
        self.replay = launch


@pytest.fixture
def replayed(monkeypatch):
    """Makes engines capture prompts, which are computed apart from decode steps. Returns a list of the shapes that were
    replayed."""
    shapes = []
    monkeypatch.setattr(MixedRunner, "takes", lambda self, chunks, rows: False)
    inner = PrefillRunner.__init__

    def init(self, program, slots, most, *, graphs=None):
        inner(self, program, slots, most, graphs=object())

    def capture(self, shape):
        numbers = torch.tensor(shape.numbers((), self.slots.dummy_slot), dtype=torch.int32)
        if self._logits is None:
            self._logits = torch.empty_like(self.run(shape, numbers))

        def replay():
            shapes.append(shape)
            self._logits.copy_(self.run(shape, numbers))

        return FunctionGraph(replay), numbers

    monkeypatch.setattr(PrefillRunner, "__init__", init)
    monkeypatch.setattr(PrefillRunner, "_capture", capture)
    return shapes


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_requests():
    """Returns requests with and without a common prefix. Prompts take several chunks, and several requests are sampled."""
    shared = prompt(140, 9)
    ids = [prompt(1 + 11 * i, i) for i in range(5)] + [[*shared, *prompt(1 + 30 * i, i)] for i in range(4)] + [prompt(200, 7)]
    return [Request(each, 5, Sampling(0.7 * (i % 2), seed=i)) for i, each in enumerate(ids)]


def generated(model, **options):
    engine = Engine(model, max_concurrent=6, chunk_tokens=128, cache_bytes=1 << 24, **options)
    return [[sampled.token for sampled in sequence.sampled] for sequence in engine.generate(some_requests())], engine


@pytest.mark.parametrize("invariant", [False, True])
def test_graphs_do_not_change_the_tokens(model, replayed, monkeypatch, invariant):
    found, engine = generated(model, batch_invariant=invariant)
    assert engine.prefill_runner.captures == len({*replayed}) > 3
    # some chunks follow a cached prefix, others start at the first token
    assert {shape.keys > shape.tokens for shape in replayed} == {True, False}
    assert {shape.tokens for shape in replayed} <= {*engine.prefill_runner.sizes} and engine.prefill_runner.sizes[-1] == 128
    monkeypatch.undo()
    expected, engine = generated(model, batch_invariant=invariant)
    assert found == expected and not engine.prefill_runner.captures


def test_more_sequences_than_a_graph_has_take_several_launches(model, replayed, monkeypatch):
    monkeypatch.setattr(module, "MAX_SEQUENCES", 2)
    found, _ = generated(model)
    assert {shape.sequences for shape in replayed} == {2}
    monkeypatch.undo()
    assert generated(model)[0] == found


def test_chunks_with_more_keys_than_a_graph_has_run_without_one(model, replayed, monkeypatch):
    monkeypatch.setattr(module, "KEYS", 16)
    calls = []
    inner = DecodeProgram.prompt
    monkeypatch.setattr(DecodeProgram, "prompt", lambda *args: (calls.append(args[1]), inner(*args))[1])
    found, _ = generated(model)
    # excludes the requests with which the program is checked
    calls = [chunks for chunks in calls if chunks[0].sequence.request.limit > 1]
    assert calls and replayed
    for chunks in calls:
        assert any(chunk.begin for chunk in chunks)
    monkeypatch.undo()
    assert generated(model)[0] == found


def test_every_shape_is_captured_once(model, replayed):
    engine = Engine(model, max_concurrent=2, chunk_tokens=256, cache_bytes=1 << 24)
    stages = list(engine.warm_up())
    assert [stage.what.split()[0] for stage in stages] == ["prompts"] * len(engine.prefill_runner.graph_shapes)
    assert [stage.done for stage in stages] == list(range(len(stages))) and {stage.total for stage in stages} == {len(stages)}
    count = engine.prefill_runner.captures
    assert (
        count
        == len(engine.prefill_runner.graph_shapes)
        == len(set(engine.prefill_runner.graph_shapes))
        == 2 * len(engine.prefill_runner.sizes)
    )
    assert engine.prefill_runner.graph_shapes[0] == RaggedShape(256, 2, 2 * 256), "more keys than all sequences can have"
    engine.generate([Request(prompt(100), 3), Request(prompt(250), 3)])
    assert engine.prefill_runner.captures == count
