"""The serving process of `python -m benchmarks serve`: loads a model, measures its engine, then serves it.

The two processes exchange (word, value) messages over a pipe.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks import results
from benchmarks.language_model import random_model
from benchmarks.request import DTYPES
from benchmarks.serve_load import Mix, Prompts, RequestRecord, staggered
from lowbit.engine import Engine, Request, Sequence
from lowbit.engine.warm_up import Stage
from lowbit.eval.results import machine
from lowbit.pipeline import Pipeline, pipeline
from lowbit.serve.limits import Limits
from lowbit.serve.server import Server, bound, service_of
from lowbit.tune.timing import failures, reason

POSITIONS = 8192
"""Maximum sequence length of random models: that of Llama-3-8B."""

NAME = "bench"
QUEUE = 256


@dataclass(frozen=True)
class ServeConfig:
    """Configuration of a run: the model, its load and the durations; `kv`: how keys and values are stored."""

    shape: str | None
    folder: Path | None
    scheme: str | None
    head: str | None
    dtype: str
    layers: int | None
    streams: int
    mixes: tuple[Mix, ...]
    parts: tuple[str, ...]
    loads: tuple[int, ...]
    seconds: float
    each: float
    seed: int
    kv: str = "16"


def host(config: ServeConfig, pipe: Connection) -> None:
    """Main function of the process. It ends on request, or when the other process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the measuring process handles Ctrl-C
    logging.basicConfig(filename=os.devnull)
    disable_progress_bar()
    logging.getLogger("lowbit.serve").setLevel(logging.INFO)  # a line per request, like `lowbit serve`

    def progress(text: str) -> None:
        pipe.send(("progress", text))

    try:
        made = _pipeline(config, progress)
        engine = made.engine
        _warm(engine, progress)
        pipe.send(("about", _about(made)))
        prompts = Prompts(engine.slots.sampling.counts.shape[1], config.seed)
        if "engine" in config.parts:
            progress(f"the engine alone, {config.streams} texts at once")
            pipe.send(("engine", engine_loop(engine, prompts, config)))
        _serve(made, config, pipe)
    except failures() as error:
        pipe.send(("failed", reason(error)))
    except EOFError:
        pass  # the measuring process has ended
    gc.unfreeze()  # otherwise Triton reports leaked objects at exit


def _pipeline(config: ServeConfig, progress: Callable[[str], None]) -> Pipeline:
    options: dict[str, Any] = {"max_concurrent": config.streams, "kv": config.kv}
    if config.folder is not None:
        progress(f"loading {config.folder}")
        return pipeline(str(config.folder), scheme=config.scheme, head=config.head, **options)
    assert config.shape is not None
    progress(f"making a model of the shape {config.shape}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(config.shape, config.scheme, config.head, DTYPES[config.dtype], device, config.layers)
    model.config.max_position_embeddings = POSITIONS
    return Pipeline(model, random_tokenizer(model.config.vocab_size), **options)


def random_tokenizer(vocab: int) -> PreTrainedTokenizerBase:
    """Returns a tokenizer of bytes and short words, each of which decodes to text by itself, with byte-level decoding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab]
    tokens = [*letters, *(f"Ġ{number:x}" for number in range(vocab - len(letters)))]
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def _warm(engine: Engine, progress: Callable[[str], None]) -> None:
    said = 0.0
    for stage in engine.warm_up():
        if time.monotonic() - said > 2:
            said = time.monotonic()
            progress(f"warming up: {stage.what}, {stage.done} of {stage.total}")
    engine.generate([Request([0], 2)])
    gc.collect()
    gc.freeze()  # as the server does


def _about(made: Pipeline) -> dict[str, Any]:
    on_gpu = made.engine.device.type == "cuda"
    return {
        "machine": (results.machine() if on_gpu else machine())
        | {"device": torch.cuda.get_device_name() if on_gpu else "cpu"},
        "engine": made.engine.report(), "max_length": made.engine.max_length,
        "vocab": made.engine.slots.sampling.counts.shape[1],
    }  # fmt: skip


def engine_loop(engine: Engine, prompts: Prompts, config: ServeConfig) -> tuple[list[RequestRecord], float, float]:
    """Runs `serve_load.closed_loop` on the engine without a server. Returns the requests, the end time, and the CPU share of
    a core."""
    mix, rng = config.mixes[0], random.Random(config.seed)

    def lengths() -> tuple[int, int]:
        return mix.draw(rng, engine.max_length)

    streams = [staggered(lengths, number, config.streams) for number in range(config.streams)]
    answers: list[RequestRecord] = []
    live: list[tuple[Sequence, RequestRecord]] = []

    def ask(number: int) -> tuple[Sequence, RequestRecord]:
        prompt, output = next(streams[number])
        answers.append(RequestRecord(time.perf_counter(), output))
        return engine.submit(Request(prompts(prompt), output)), answers[-1]

    begun, cpu = time.perf_counter(), time.process_time()
    end = begun + config.each
    live = [ask(number) for number in range(config.streams)]
    while (now := time.perf_counter()) < end:
        engine.step()
        now = time.perf_counter()
        for number, (sequence, answer) in enumerate(live):
            if len(sequence.sampled) > answer.tokens:
                answer.first, answer.last, answer.tokens = answer.first or now, now, len(sequence.sampled)
            if sequence.finish_reason is not None:
                answer.error = sequence.error or None
                live[number] = ask(number)
    took = (time.process_time() - cpu) / (time.perf_counter() - begun)
    for sequence, _ in live:
        engine.cancel(sequence)
    engine.generate([Request([0], 1)])
    return answers, end, took


def first_token_alone(engine: Engine, prompt: list[int], limit: int) -> float:
    """Returns the seconds to the first token of a request to an idle engine, without a server."""
    begun = time.perf_counter()
    sequence = engine.submit(Request(prompt, limit))
    while not sequence.sampled and sequence.finish_reason is None:
        engine.step()
    took = time.perf_counter() - begun
    while sequence.finish_reason is None:
        engine.step()
    return took


def _serve(made: Pipeline, config: ServeConfig, pipe: Connection) -> None:
    limits = Limits(config.streams, QUEUE, grace_seconds=1)
    prompts = Prompts(made.engine.slots.sampling.counts.shape[1], config.seed + 2)  # other prompts than those of the clients
    with bound("127.0.0.1", 0) as sock:
        server: Server | None = None

        def warm(stage: Stage | None) -> None:
            if stage is None:
                loop = asyncio.get_running_loop()
                assert server is not None
                threading.Thread(target=_obey, args=(pipe, loop, server, prompts), daemon=True).start()
                pipe.send(("address", sock.getsockname()[:2]))

        server = Server(service_of(made, NAME, limits, key=None, local=True), warm)
        server.run(sockets=[sock])


def _obey(pipe: Connection, loop: asyncio.AbstractEventLoop, server: Server, prompts: Prompts) -> None:
    """Replies to messages in a separate thread until the server should end."""
    while True:
        try:
            word, value = pipe.recv()
        except (EOFError, OSError):
            loop.call_soon_threadsafe(server.drain)
            return
        if word == "cpu":
            pipe.send(("cpu", time.process_time()))
        else:
            assert word == "alone", word
            prompt, output = value
            try:
                pipe.send(("alone", first_token_alone(server.service.engine, prompts(prompt), output)))
            except failures() as error:
                pipe.send(("failed", reason(error)))
