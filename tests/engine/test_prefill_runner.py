"""Prompts in graphs: which graph, filled with what; graphs are played by functions on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine import Engine, Request, Sampling
from lowbit.engine import prefill_runner as module
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.program import DecodeProgram
from lowbit.engine.ragged import RaggedShape
from tests.tiny import eager_llama

VOCAB = 160


class Played:
    """What a graph does: the same launches at the same addresses."""

    def __init__(self, launch):
        self.replay = launch


@pytest.fixture
def played(monkeypatch):
    """Prompts of engines made here are in graphs; the forms that were replayed."""
    forms = []
    made = PrefillRunner.__init__

    def init(self, program, slots, most, *, graphs=None):
        made(self, program, slots, most, graphs=object())

    def capture(self, form):
        numbers = torch.tensor(form.numbers((), self.slots.dummy_slot), dtype=torch.int32)
        if self._logits is None:
            self._logits = torch.empty_like(self.run(form, numbers))

        def replay():
            forms.append(form)
            self._logits.copy_(self.run(form, numbers))

        return Played(replay), numbers

    monkeypatch.setattr(PrefillRunner, "__init__", init)
    monkeypatch.setattr(PrefillRunner, "_capture", capture)
    return forms


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def asked():
    """Texts that begin alike and that do not, in several chunks, with several drawn at once."""
    shared = prompt(140, 9)
    ids = [prompt(1 + 11 * i, i) for i in range(5)] + [[*shared, *prompt(1 + 30 * i, i)] for i in range(4)] + [prompt(200, 7)]
    return [Request(each, 5, Sampling(0.7 * (i % 2), seed=i)) for i, each in enumerate(ids)]


def generated(model, **options):
    engine = Engine(model, max_concurrent=6, chunk_tokens=128, cache_bytes=1 << 24, **options)
    return [[drawn.token for drawn in sequence.sampled] for sequence in engine.generate(asked())], engine


@pytest.mark.parametrize("invariant", [False, True])
def test_texts_are_those_without_graphs(model, played, monkeypatch, invariant):
    found, engine = generated(model, batch_invariant=invariant)
    assert engine.prefill_runner.captures == len({*played}) > 3
    assert {form.keys > form.tokens for form in played} == {True, False}  # behind what is shared, and from the beginning
    assert {form.tokens for form in played} <= {*engine.prefill_runner.sizes} and engine.prefill_runner.sizes[-1] == 128
    monkeypatch.undo()
    expected, engine = generated(model, batch_invariant=invariant)
    assert found == expected and not engine.prefill_runner.captures


def test_more_texts_than_a_graph_has_are_several(model, played, monkeypatch):
    monkeypatch.setattr(module, "MAX_SEQUENCES", 2)
    found, _ = generated(model)
    assert {form.sequences for form in played} == {2}
    monkeypatch.undo()
    assert generated(model)[0] == found


def test_texts_with_more_before_them_than_a_graph_sees_are_computed_without(model, played, monkeypatch):
    monkeypatch.setattr(module, "KEYS", 16)
    calls = []
    inner = DecodeProgram.prompt
    monkeypatch.setattr(DecodeProgram, "prompt", lambda *args: (calls.append(args[1]), inner(*args))[1])
    found, _ = generated(model)
    calls = [chunks for chunks in calls if chunks[0].sequence.request.limit > 1]  # but for the check of the program
    assert calls and played
    for chunks in calls:
        assert any(chunk.begin for chunk in chunks)
    monkeypatch.undo()
    assert generated(model)[0] == found


def test_every_form_is_captured_once(model, played):
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
    assert engine.prefill_runner.graph_shapes[0] == RaggedShape(256, 2, 2 * 256), "no more than there can be"
    engine.generate([Request(prompt(100), 3), Request(prompt(250), 3)])
    assert engine.prefill_runner.captures == count
