"""The CUDA graphs of an engine share one memory pool; without a GPU, a fixture records what torch.cuda would do."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from lowbit.engine import Engine
from lowbit.engine.cache import CacheBudget
from lowbit.engine.decode_runner import DecodeRunner, graph_bytes
from lowbit.engine.graphs import Graphs
from lowbit.engine.mixed_runner import MixedRunner
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.slots import Slots
from lowbit.engine.verify_runner import VerifyRunner
from tests.tiny import eager_llama


@pytest.fixture
def captures(monkeypatch):
    """Records the pool and the stream of each capture, in order. Every call for a stream or a pool makes a new one."""
    found = []

    def graph(graph, pool, stream, capture_error_mode):
        found.append((pool, stream))
        return contextlib.nullcontext()

    def stream():
        return SimpleNamespace(wait_stream=lambda other: None)

    for name, made in (
        ("device", contextlib.nullcontext), ("stream", contextlib.nullcontext), ("Stream", stream),
        ("current_stream", stream), ("graph_pool_handle", object), ("CUDAGraph", object), ("graph", graph),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, made)
    return found


def test_steps_and_prompts_are_captured_in_one_pool_on_one_stream(captures):
    """All captures use one stream, since PyTorch's allocator reuses memory only on the stream that freed it, also within a
    pool."""
    engine = Engine(eager_llama(), max_concurrent=4, chunk_tokens=128, cache_bytes=1 << 24)
    graphs = Graphs(torch.device("cpu"))
    steps = DecodeRunner(engine.program, engine.slots, 4, graphs=graphs)
    prompts = PrefillRunner(engine.program, engine.slots, 128, graphs=graphs)
    mixed = MixedRunner(engine.program, engine.slots, 128, 4, graphs=graphs, invariant=False)
    with torch.inference_mode():
        for variant in steps.variants(grammars=True):
            steps.captured(variant)
        for shape in prompts.graph_shapes:
            prompts.captured(shape)
        for shape in mixed.shapes:
            mixed.captured(shape)
    assert len(captures) == len(steps.variants(grammars=True)) + len(prompts.graph_shapes) + len(mixed.shapes) > 15
    assert len(steps.variants(grammars=True)) == len(steps.variants()) * 3 // 2
    assert len({id(part) for pair in captures for part in pair}) == 2


def test_a_capture_is_preceded_by_a_run(captures):
    """A run before the capture compiles kernels and allocates persistent memory, which are not allowed during a capture."""
    graphs, called = Graphs(torch.device("cpu")), []
    _, made = graphs.capture(lambda: called.append(len(captures)) or len(called))
    assert called == [0, 1] and made == 2


def test_the_cache_leaves_memory_for_graphs(monkeypatch):
    """The memory bound includes the logits of every captured step: plain, with guesses, and of a draft model. The cache leaves
    this memory free."""
    vocab, most, drafts = 1000, 20, 3
    slots = Slots(most, 20_000, vocab, (), torch.device("cpu"), drafts)
    steps, verified = DecodeRunner(None, slots, most), VerifyRunner(None, slots, most, drafts)

    def logits(runner, kinds):
        return sum(2 * vocab * size for size, filtered, _ in runner.variants(True) if filtered in kinds)

    every = (True, False, None)
    assert graph_bytes(most, 0, vocab, 0, 2) == logits(steps, every)
    assert logits(steps, every) + logits(verified, every) <= graph_bytes(most, drafts, vocab, 0, 2)
    drafting = graph_bytes(most, drafts, vocab, vocab, 2) - graph_bytes(most, drafts, vocab, 0, 2)
    assert drafting == logits(steps, (False,))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    budget = CacheBudget.for_device(torch.device("cuda"), None, graph_bytes=1 << 29)
    assert budget.bytes_ == int(0.9 * (1 << 29)) and "less 0.50 GiB for graphs" in budget.source
    assert CacheBudget.for_device(torch.device("cuda"), 77, graph_bytes=1 << 29).bytes_ == 77
    assert CacheBudget.for_device(torch.device("cuda"), None, graph_bytes=1 << 31).bytes_ == 0
