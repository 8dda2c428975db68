"""`python -m benchmarks tensor-parallel`: decode steps of language models on one GPU and on several.

Models have random weights in known shapes, as in e2e.py. On several GPUs each rank makes its part, and all replay the same
graphs.
"""

from __future__ import annotations

import datetime
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.ceilings import read_bandwidth
from benchmarks.e2e import DTYPES, REPLAYS, by_name, fill, kv_bytes, one_layer, place, timeline, times_us
from benchmarks.language_model import random_model, random_part, weight_bytes
from benchmarks.results import default_path, machine
from benchmarks.tensor_parallel_report import RANKS, SCHEMA
from lowbit.checkpoint.target import check_file
from lowbit.engine import Engine, Request
from lowbit.engine.chain import Chain
from lowbit.engine.decode_runner import DecodeRunner, Variant
from lowbit.engine.graphs import Graphs
from lowbit.engine.program import DecodeProgram
from lowbit.engine.rank_processes import start_ranks
from lowbit.eval.results import versions, write_json
from lowbit.formats import parse_scheme
from lowbit.ops.peers import Peers
from lowbit.tune.timing import failures, reason, warm_up

T = TypeVar("T")

OUTPUT = 64
"""Tokens of a whole request."""

PROTOCOL = (
    "Gaussian weights in the shape of the model, each layer in memory of its own; on several GPUs each has its part, and all "
    "parts have the same weights. Keys and values Gaussian, in 16 bits, in pages of 128 tokens in random order. ms_per_token: "
    f"median of {REPLAYS} replays on rank 0, timed with events, of the CUDA graph that the engine runs, which embeds, computes "
    "all layers and the head, samples and feeds back; all ranks replay it. sums: how partial sums of several GPUs are added in "
    "the graph, over peer memory or by NCCL. limit_ms: bytes of one GPU's weights as stored and of its keys and values of the "
    "context, at the read bandwidth of GPU 0 in the same run. Weights of 16 bits take the faster of cuBLAS and the small-M "
    "kernel (products). step_wall_ms: wall time of a token of requests from Python, after a prompt of 128 tokens. kernels and "
    "layer: as in `bench e2e`, of rank 0."
)


@dataclass(frozen=True)
class RanksConfig:
    """Configuration of a run: a shape, a scheme (None for 16 bits), and numbers of GPUs. If `requests` is set, whole requests
    are timed too, for which the kernels of prompts are compiled."""

    model: str
    scheme: str | None
    gpus: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    head: str | None = "w8a16"
    dtype: str = "float16"
    layers: int | None = None
    requests: bool = True


def run(config: RanksConfig, path: Path | None, progress: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Measures everything and writes the result file after each row. Returns its path and document."""
    about = machine()
    today = datetime.date.today()
    what = f"{config.model.lower()}-{config.scheme or '16-bits'}"
    path = path or default_path(about["gpu"], today).with_name(f"{today.isoformat()}-tensor-parallel-{what}.json")
    check_file(path, RANKS)
    warm_up()
    bandwidth, kernel = read_bandwidth()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": RANKS, "schema": SCHEMA, "date": today.isoformat(), "complete": False,
        "machine": about | {"gpus": torch.cuda.device_count()}, "versions": versions(("transformers",)),
        "read_bytes_per_s": bandwidth, "read_kernel": kernel, "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip
    for gpus in config.gpus:
        for row in _rows_of(gpus, config, bandwidth, progress):
            rows.append(row)
            write_json(path, document)
        gc.collect()
        torch.cuda.empty_cache()
    document["complete"] = True
    write_json(path, document)
    return path, document


def _rows_of(gpus: int, config: RanksConfig, bandwidth: float, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a number of GPUs. If it fails, the row has the reason."""
    model, scheme = config.model, config.scheme
    name = "16 bits" if scheme is None else parse_scheme(scheme).name
    said = f"{model}, {name}, {gpus} GPU{'s' if gpus > 1 else ''}"
    row: dict[str, Any] = {"model": model, "scheme": scheme, "gpus": gpus, "context": config.context, "error": None}
    head = config.head if scheme else None
    ranks = None
    started = time.perf_counter()
    try:
        progress(f"{said}: making the model")
        if gpus == 1:
            made = random_model(model, scheme, head, DTYPES[config.dtype], torch.device("cuda"), config.layers)
        else:
            make = functools.partial(
                random_part, ranks=gpus, shape=model, scheme=scheme, head=head, dtype=DTYPES[config.dtype], layers=config.layers
            )
            made, ranks = start_ranks(make, gpus, torch.device("cuda"))
        # read before the engine exists: it joins matrices, after which their modules hold no weights
        row["weight_bytes"] = weight_bytes(made)
        engine = Engine(
            made, ranks=ranks, max_concurrent=max(config.batches), max_length=config.context + 4 * REPLAYS + OUTPUT,
            prefix_caching=False,
        )  # fmt: skip
        row["difference"] = engine.difference
        _everywhere(engine, _fill)
        for batch in config.batches:
            progress(f"{said}: batch {batch}")
            _compile(engine, batch, config.context)
            for measured in _everywhere(engine, measure, batch, config.context, row["weight_bytes"], bandwidth):
                yield {**row, "batch": batch, "made_s": time.perf_counter() - started, **measured}
        if config.requests:
            progress(f"{said}: requests")
            yield {**row, "batch": max(config.batches), "step_wall_ms": _step_wall_ms(engine, max(config.batches))}
    except failures() as error:
        yield {**row, "batch": None, "error": reason(error)}
    finally:
        if ranks is not None:
            ranks.end()


def _everywhere(engine: Engine, function: Callable[..., T], *arguments: Any) -> T:
    """Calls function(engine, *arguments), on all ranks if there are several."""
    if engine.ranks is None:
        return function(engine, *arguments)
    return engine.ranks.everywhere(engine, function, *arguments)


def _fill(engine: Engine) -> None:
    """Fills all pages of the engine's KV cache."""
    assert isinstance(engine.program, DecodeProgram) and engine.program.cache is not None
    for pages in engine.program.cache.layers:
        fill(pages)


def _variant(engine: Engine, batch: int, context: int) -> Variant:
    return engine.decode_runner.variant(batch, False, context + 4 * REPLAYS)


def _compile(engine: Engine, batch: int, context: int) -> None:
    """Compiles the kernels of a step in several processes."""
    run_ = engine.runner.warm_up_run
    assert run_ is not None
    for _ in engine.runner.compile(run_.kernels([("step", *_variant(engine, batch, context))])):
        pass


@torch.inference_mode()
def measure(engine: Engine, batch: int, context: int, held: float, bandwidth: float) -> list[dict[str, Any]]:
    """Returns the rows of a step of a batch. The first has the engine's own graph. On several GPUs another has sums by NCCL,
    and 16-bit weights in a chain have one with products by cuBLAS."""
    program = engine.program
    assert isinstance(program, DecodeProgram)
    found = [_step(engine, engine.decode_runner, batch, context, held, bandwidth)]
    if program.ranks is not None and isinstance(program.ranks.peers, Peers):
        peers, program.ranks.peers = program.ranks.peers, ("sums by NCCL are timed",)
        try:
            found.append(_other_step(engine, batch, context, held, bandwidth))
        finally:
            program.ranks.peers = peers
    chain = program.chain
    if isinstance(chain, Chain) and all(type(link.o).__name__ == "Dense" for link in chain.links):
        program.chain = ("products by cuBLAS are timed",)
        try:
            found.append(_other_step(engine, batch, context, held, bandwidth))
        finally:
            program.chain = chain
    return found


def _other_step(engine: Engine, batch: int, context: int, held: float, bandwidth: float) -> dict[str, Any]:
    """Returns the row of a step that is captured again, with the program as it is changed now."""
    runner = DecodeRunner(engine.program, engine.slots, batch, graphs=Graphs(engine.device))
    return _step(engine, runner, batch, context, held, bandwidth)


def _step(
    engine: Engine, runner: DecodeRunner, batch: int, context: int, held: float, bandwidth: float
) -> dict[str, Any]:  # fmt: skip
    program = engine.program
    assert isinstance(program, DecodeProgram)
    place(engine, batch, context, 4 * REPLAYS)
    step = runner.launch(range(batch), False, context + 4 * REPLAYS)
    us = times_us(step)
    engine.slots.positions[:batch] = context
    assert step.graph is not None
    kernels = timeline(step.graph.replay)
    ms = statistics.median(us) / 1e3
    ranks, chained = program.ranks, isinstance(program.chain, Chain) and batch <= program.chain.most
    size = 1 if ranks is None else ranks.size
    sums = None if ranks is None else "peer memory" if isinstance(ranks.peers, Peers) else "NCCL"
    return {
        "ms_per_token": ms, "slowest_ms": max(us) / 1e3, "tokens_per_gpu_s": 1e3 * batch / ms / size, "sums": sums,
        "products": "chain" if chained else "apart",
        "limit_ms": 1e3 * (held + batch * kv_bytes(program, context)) / bandwidth,
        "kernels_per_layer": len(kernels) / program.cache_spec.layers, "kernels": by_name(kernels), "layer": one_layer(kernels),
    }  # fmt: skip


def _step_wall_ms(engine: Engine, batch: int) -> float:
    """Returns the milliseconds per token of `batch` requests from Python, in the second of two runs."""
    generator, taken = torch.Generator().manual_seed(2), 0.0
    for _ in range(2):
        prompts = [torch.randint(engine.vocab, (128,), generator=generator).tolist() for _ in range(batch)]
        sequences = [engine.submit(Request(ids, OUTPUT)) for ids in prompts]
        while not all(sequence.sampled for sequence in sequences):
            engine.step()
        begun, sampled = time.perf_counter(), min(len(sequence.sampled) for sequence in sequences)
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        taken = 1e3 * (time.perf_counter() - begun) / (OUTPUT - sampled)
    return taken
