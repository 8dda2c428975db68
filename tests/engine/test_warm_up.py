"""Kernels are found before their first launch. Without a GPU, engines use kernels whose launches are only recorded."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from lowbit.engine import Engine, FinishReason, Request, Sampling, Sequence
from lowbit.engine.mixed_runner import MixedRunner
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.scheduler import PrefillChunk, SchedulerOutput
from lowbit.engine.warm_up import Stage, WarmUpRun
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.parts import compile as compiling
from lowbit.kernels.parts.launch import Launcher, RecordedKernel, _thread
from tests.tiny import eager_llama

VOCAB = 160


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Kernel(Launcher):
    """A kernel that differs from others only in its name. Its launches are recorded."""

    def __init__(self, name, events):
        self.name, self.events, self.kernel = name, events, None

    def recorded(self, arguments):
        return RecordedKernel("", self.name, (), {})

    def __call__(self):
        if getattr(_thread, "recorded", None) is None:
            self.events.append(("launched", self.name))
        else:
            super().__call__()


@pytest.fixture
def recorded(model, monkeypatch):
    """Returns an engine with a warm-up run as on a GPU, a list of its compilations and launches in order, and its progress."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("lowbit.engine.model_runner.machine_of", lambda device: typical_machine(90))
    events, told = [], []

    def compiles(wanted, sm):
        assert sm == 90
        for number, each in enumerate(wanted):
            yield number
            events.append(("compiled", each.name))

    monkeypatch.setattr("lowbit.kernels.parts.compile.compiled", compiles)
    engine = Engine(model, max_concurrent=4, chunk_tokens=256, cache_bytes=1 << 24, prefix_caching=False, progress=told.append)
    engine.runner.warm_up_run = WarmUpRun(
        engine.program, engine.decode_runner, engine.prefill_runner, None, None, 4, engine.max_length
    )
    engine.mixed_runner.takes = lambda chunks, rows: False  # mixed steps are refused, since only graphs compute them, on a GPU
    program = engine.program
    step, prompts, logits = program.step, program.prompt, program.logits

    def stepping(rows, slots, longest):
        Kernel(f"step {engine.decode_runner.variant(len(rows), False, longest)[::2]}", events)()
        stepping.inside = True  # a step computes its own head, which has as many rows as the step
        made = step(rows, slots, longest)
        stepping.inside = False
        return made

    stepping.inside = False

    def prompting(chunks, slots):
        total = sum(len(chunk.tokens) for chunk in chunks)
        Kernel(f"prompt {engine.prefill_runner.size(total)}", events)()
        return prompts(chunks, slots)

    def heading(h, delta):
        if not stepping.inside:
            Kernel(f"head of {len(h)}", events)()
        return logits(h, delta)

    monkeypatch.setattr(program, "step", stepping)
    monkeypatch.setattr(program, "prompt", prompting)
    monkeypatch.setattr(program, "logits", heading)
    return engine, events, told


def some_requests():
    return [Request(prompt(3 + 40 * i, i), 4 + i, Sampling(0.5 * (i % 2), seed=i)) for i in range(6)]


def test_kernels_are_compiled_before_their_first_launch(recorded):
    """The kernels of a prompt and of the step after it are compiled together, before the first launch. A part that ran once is
    not run again."""
    engine, events, told = recorded
    first = engine.generate([Request(prompt(9), 5)])[0]
    names = [name for what, name in events if what == "compiled"]
    assert names == ["step (1, 256)", "prompt 16", "head of 1"] and events.index(("launched", "prompt 16")) == 3
    assert engine.runner.warm_up_run.count == 1
    assert told == [Stage("kernels", done, 3) for done in range(4)]
    engine.generate(some_requests())
    seen = set()
    for what, name in events:
        assert what == "compiled" or name in seen, (name, "was compiled when it was launched")
        seen.add(name)
    count = engine.runner.warm_up_run.count
    engine.generate(some_requests())
    (again,) = engine.generate([Request(prompt(9), 5)])
    assert engine.runner.warm_up_run.count == count and [d.token for d in again.sampled] == [d.token for d in first.sampled]


def test_after_a_warm_up_nothing_is_compiled(recorded):
    engine, events, told = recorded
    stages = list(engine.warm_up())
    assert stages == [Stage("kernels", number, len(events)) for number in range(len(events))]
    assert {name for _, name in events} >= {"step (4, 256)", "prompt 8", "prompt 256", "head of 3"}
    engine.generate(some_requests())
    assert engine.runner.warm_up_run.count == 1 and not told
    assert not [event for event in events[len(stages) :] if event[0] == "compiled"]


def test_steps_with_more_prompt_tokens_than_a_sequence_may_have(recorded):
    """Kernels are chosen for all prompt tokens of a step, of which there may be more than one sequence may have."""
    engine = recorded[0]
    prompts = engine.prefill_runner = PrefillRunner(engine.program, engine.slots, 4 * 100)
    warm_up_run = WarmUpRun(engine.program, engine.decode_runner, prompts, None, None, 4, 100)
    assert prompts.sizes[-2:] == (384, 448)
    names = {each.name for each in warm_up_run.kernels([part for part in warm_up_run.all_parts() if part[0] == "prompt"])}
    assert len(names) == len(prompts.sizes)


def test_steps_with_more_sequences_than_a_graph_has(model):
    """With graphs, such a step is launched in parts, and each part is recorded with its own number of tokens."""
    engine = Engine(model, max_concurrent=40, chunk_tokens=256, cache_bytes=1 << 24)
    chunks = [PrefillChunk(Sequence(Request([3] * 6, 1)), 0, (3,) * 6, False) for _ in range(40)]
    for graphs, expected in ((object(), [192, 64]), (None, [256])):
        prompts = PrefillRunner(engine.program, engine.slots, 256, graphs=graphs)
        parts = WarmUpRun(engine.program, engine.decode_runner, prompts, None, None, 40, engine.max_length).parts_of(
            SchedulerOutput(chunks=chunks)
        )
        assert parts == [("prompt", size, False, 0) for size in expected]


def test_steps_with_guesses_are_recorded(model, monkeypatch):
    """Verified steps of every size are recorded, and the dry run changes no slot. When such a step is scheduled, nothing is
    left to record."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    engine = Engine(model, max_concurrent=4, chunk_tokens=256, cache_bytes=1 << 24, speculate=3)
    runners = engine.decode_runner, engine.prefill_runner, engine.runner.verify_runner
    run, slots = WarmUpRun(engine.program, *runners, None, 4, engine.max_length), engine.slots
    parts = [part for part in run.all_parts() if part[0] == "verify"]
    assert {(count, filters) for _, count, filters, _ in parts} == {(size, f) for size in (2, 4, 8, 16) for f in (False, True)}
    before = [t.clone() for t in (slots.tokens, slots.positions, slots.sampling.settings, slots.sampling.counts)]
    run.kernels(parts)
    after = slots.tokens, slots.positions, slots.sampling.settings, slots.sampling.counts
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    sequence = Sequence(Request([3] * 6, 10), computed_tokens=7)
    scheduled = SchedulerOutput(decoding=[sequence], drafts={sequence: 3})
    assert [part for part in run.parts_of(scheduled) if part[0] == "verify"] == []
    assert ("verify", 4, False, 256) in WarmUpRun(engine.program, *runners, None, 4, engine.max_length).parts_of(scheduled)


def test_steps_with_prompts_are_recorded(model, monkeypatch):
    """A forward of each graph's size is recorded, in the dummy slot. Sampling for the decoding sequences is a separate part."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    engine = Engine(model, max_concurrent=20, chunk_tokens=128, cache_bytes=1 << 24)
    mixed = MixedRunner(engine.program, engine.slots, 128, 20, graphs=object(), invariant=False)
    run = WarmUpRun(engine.program, engine.decode_runner, engine.prefill_runner, None, mixed, 20, engine.max_length)
    parts = [part for part in run.all_parts() if part[0] == "mixed"]
    totals = (64, 128, 256)  # rows of a forward: half a tile, then tiles, up to 128 prompt tokens
    assert {(count, rows) for _, count, _, rows in parts} == {(total - r, r) for total in totals for r in (16, 24)}
    before = engine.slots._all.clone()
    run.kernels(parts)
    assert torch.equal(engine.slots._all, before)
    decoding = [Sequence(Request([3] * 6, 10), computed_tokens=7) for _ in range(17)]
    chunks = [PrefillChunk(Sequence(Request([3] * 60, 1)), 0, (3,) * 60, True)]
    found = WarmUpRun(engine.program, engine.decode_runner, engine.prefill_runner, None, mixed, 20, engine.max_length).parts_of(
        SchedulerOutput(decoding=decoding, chunks=chunks)
    )
    assert {("mixed", 104, None, 24), ("sample", 17, False, 0), ("sample", 1, False, 0)} <= set(found)


def test_a_failed_compilation_does_not_fail_the_step(recorded, monkeypatch):
    """If a compilation fails, the step runs. Only a launch of that kernel would raise the error again; this step has none."""
    engine, _, _ = recorded

    asked = []

    def fails(wanted, sm):
        asked.append(wanted)
        raise RuntimeError("ptxas does not want to")
        yield

    monkeypatch.setattr("lowbit.kernels.parts.compile.compiled", fails)
    assert {sequence.finish_reason for sequence in engine.generate(some_requests())} == {FinishReason.LENGTH} and asked


@pytest.mark.parametrize(("count", "missing", "processes"), [(3, True, False), (4, True, True), (9, False, False)])
def test_processes_are_started_for_more_than_a_few_kernels(monkeypatch, count, missing, processes):
    wanted = [RecordedKernel("", str(number), (), {}) for number in range(count)]
    done, by_processes = [], []

    def compile_one(each):
        done.append(each)
        knobs.compilation.listener(src=SimpleNamespace(name=each.name), cache_hit=not missing, metadata={})

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    monkeypatch.setattr(compiling, "compile_all", lambda left, sm: (by_processes.append(each) or 1 for each in left))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **given: None)
    assert len(list(compiling.compiled(wanted, 90))) == count
    assert done == wanted and by_processes == (wanted[1:] if processes else [])
