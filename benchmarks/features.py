"""`python -m benchmarks features`: what adapters, grammars, guessed tokens, and prompts beside decoding cost a step.

Steps are of a language model of a known shape with random weights; guesses, which depend on the text, of a real small model.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lowbit
from benchmarks.e2e import DTYPES, REPLAYS, computes_in_one_launch, fill, one_layer, place, timeline, times_us
from benchmarks.features_report import FEATURES, SCHEMA
from benchmarks.language_model import meta_model, random_model
from benchmarks.results import default_path, machine
from lowbit.checkpoint.target import check_file
from lowbit.engine import Engine, Grammar, GrammarCompiler, Request, Sampling
from lowbit.engine.block_pool import pages_for
from lowbit.engine.decode_runner import DecodeRunner
from lowbit.engine.graphs import Graphs
from lowbit.engine.program import DecodeProgram
from lowbit.engine.scheduler import SchedulerOutput
from lowbit.engine.verify_runner import VerifyRow
from lowbit.engine.warm_up import Part, WarmUpRun
from lowbit.eval.results import versions, write_json
from lowbit.models.skeleton import tokenizer_of
from lowbit.tune.timing import failures, reason, warm_up

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel

PARTS = ("lora", "verify", "grammar", "mixed", "guesses")
RANK, ADAPTERS = 16, 4
ROUNDS = 3
"""Number of times that wall times are measured, in turn; the median counts."""
TASK_ROUNDS = 9
"""The same for tasks of the small model, which take some 50 ms."""
USERS, PROMPT, OUTPUT, REQUESTS = 32, 512, 128, 160
"""The load for mixed steps: concurrent sequences, tokens of a prompt, tokens of an answer, number of requests."""
LOAD = 0.95
CACHE_BYTES = 12 << 30
"""Keys and values: those of 64 sequences of 1,120 tokens of Llama-3-8B are 9.4 GB."""

PROTOCOL = (
    "Gaussian weights in the shape of the model. lora, verify: median of replays of the CUDA graph that the engine runs, timed "
    "with events, at a context of `context` tokens. plain_us: the plain step as the engine takes it, perhaps in one launch; "
    "launches_us: the same by several launches a layer, as steps with adapters and guesses are. "
    "lora: adapters of rank 16 in all seven layers, random, of four names; one row has one of them, several rows take turns "
    "with each and with none; layer: what each kernel of a layer adds in us, in order, by CUDA's profiler, the median over the "
    "layers. verify: guessed tokens of one sequence in one step, beside a step of one token. "
    "grammar: wall time per token of 16 sampled sequences, with a JSON schema (strings of any "
    f"length) and without, median of {ROUNDS} rounds in turn; all tokens are random, as the weights are. mixed: {REQUESTS} "
    f"requests of {PROMPT} + {OUTPUT} tokens, {USERS} at once. Capacity is tokens/s with a request waiting always; at "
    f"{LOAD:.0%} of it requests come at equal intervals, and the times between a sequence's tokens are those on the host. "
    "Apart: prompts in chunks of up to 1,024 tokens run between steps. Mixed: prompts and steps in one forward. steps: number, "
    "mean prompt tokens and mean ms on the GPU of each kind of step, mixed ones by the rows of their forward; idle_ms: time "
    "between steps in all; loaded_steps, loaded_idle_ms: those at "
    f"{LOAD:.0%}. "
    "All graphs are captured before. guesses: tokens/s of a real model by prompt lookup of up to 7 tokens and without, greedy "
    f"but for the task that is sampled, from Python, median of {TASK_ROUNDS} rounds in turn; waits: plain steps that were "
    "launched late for guesses that were none in the end; step_ratio: the engine's own measure of a step with guesses by a "
    "plain one, at the end of the task."
)

PAGE = (
    "The lighthouse at the northern cape was built in 1871 by the harbour board of the town. Its tower is thirty metres "
    "high and stands on a rock that the sea covers twice a day. Until 1932 a keeper lived in it with his family and "
    "carried oil up the hundred and sixty steps every evening. Then the lamp became electric, and the keeper moved to the "
    "village. In the storm of 1953 waves broke the windows of the lantern room, and the light went out for the first "
    "time. Fishermen lit fires on the beach that night, and no boat was lost. Today the light is switched on by a "
    "computer in the capital, and the tower is a museum that opens in summer. Visitors may climb the steps, see the old "
    "oil lamp, and read the diary in which the keepers wrote down every ship that passed. The last entry says that the "
    "fog had lifted and that the sea was calm."
)
MORE = (
    "The keepers worked in three watches. The first man lit the lamp at dusk and trimmed its wick every two hours. The second "
    "wound the clockwork that turned the lens, since its weight took four hours to sink to the foot of the tower. The third "
    "wrote the weather and the ships into the diary and woke the others before dawn. Twice a month a boat brought oil, flour "
    "and letters, if the sea allowed it. In the winter of 1897 it did not come for forty days, and the family lived on fish "
    "and on the hens that they kept behind the tower. A teacher from the village came every spring and stayed for six weeks, "
    "so that the children of the keepers learned to read. Two of them became keepers themselves, and one became a captain who "
    "greeted the light with his horn whenever he passed. The lens was made in Paris and weighed two tons. It was taken down in "
    "1974 and now stands in the hall of the museum, where children may turn it by hand."
)
STORY = "Tell me a story about a girl who finds a door in the forest."
TASK_TOKENS = 200
TASKS = {
    "summary": f"Summarize the text below in its own sentences, word for word, beginning with the first one.\n\n{PAGE}",
    "code": "Rewrite this function with the name `total` instead of `s`, and nothing else changed:\n\ndef mean(values):\n"
    "    s = 0\n    for value in values:\n        s = s + value\n    return s / len(values)\n",
    "prose": STORY,
    "long summary": f"Write a detailed summary of this text:\n\n{PAGE}\n\n{MORE}",
    "sampled prose": STORY,
}
SETTINGS = {"sampled prose": Sampling(temperature=1.0, top_p=0.95, seed=2, min_new_tokens=TASK_TOKENS)}
"""Sampling of a task; greedy by default. Greedy prose of a small model repeats itself, sampled prose does not."""

Row = dict[str, Any]


@dataclass(frozen=True)
class FeaturesConfig:
    """Configuration of a run: the parts, the folder of the small model (its tokenizer for grammars, itself for guesses) and its
    scheme, the shape and scheme of the large one."""

    parts: tuple[str, ...]
    small: Path | None
    small_scheme: str
    model: str
    scheme: str
    head: str
    context: int
    dtype: str = "float16"
    layers: int | None = None


def run(config: FeaturesConfig, path: Path | None, progress: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Measures everything and writes the result file after each row. Returns its path and document."""
    about = machine()
    today = datetime.date.today()
    path = path or default_path(about["gpu"], today).with_name(f"{today.isoformat()}-features.json")
    check_file(path, FEATURES)
    warm_up()
    rows: list[Row] = []
    document: dict[str, Any] = {
        "result": FEATURES, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": about,
        "versions": versions(("transformers",)), "model": config.model, "scheme": config.scheme, "head": config.head,
        "context": config.context, "layers": config.layers, "small": None if config.small is None else config.small.name,
        "small_scheme": config.small_scheme, "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip
    measured = {"lora": _lora, "verify": _verified, "grammar": _grammar, "mixed": _mixed, "guesses": _guesses}
    begun = time.perf_counter()

    def say(line: str) -> None:
        progress(f"{time.perf_counter() - begun:5.0f} s, {part}: {line}")

    for part in config.parts:
        say("begins")
        try:
            for row in measured[part](config, say):
                say(f"{row['what']}, {row['rows']}")
                rows.append({"part": part, "error": None, **row})
                write_json(path, document)
        except failures() as error:
            rows.append({"part": part, "what": None, "error": reason(error)})
            write_json(path, document)
        _free()
    _model.cache_clear()
    document["complete"] = True
    write_json(path, document)
    return path, document


@functools.lru_cache(maxsize=1)
def _model(config: FeaturesConfig) -> PreTrainedModel:
    return random_model(
        config.model, config.scheme, config.head, DTYPES[config.dtype], torch.device("cuda"), config.layers
    )  # fmt: skip


def _engine(model: PreTrainedModel, **options: Any) -> Engine:
    """Returns an engine with random keys and values in its pages."""
    engine = Engine(model, prefix_caching=False, cache_bytes=CACHE_BYTES, **options)
    if not isinstance(engine.program, DecodeProgram) or engine.program.cache is None:
        raise ValueError(f"there is no decode program: {'; '.join(engine.program.reasons)}")
    for pages in engine.program.cache.layers:
        fill(pages)
    return engine


def _compile(engine: Engine, kernels: Sequence[RecordedKernel], progress: Callable[[str], None]) -> None:
    """Compiles kernels in several processes, those that are given twice once."""
    for stage in engine.runner.compile([kernel for i, kernel in enumerate(kernels) if kernel not in kernels[:i]]):
        if stage.done % 8 == 0:
            progress(f"compiling, {stage.done} of {stage.total} kernels")


def _kernels(engine: Engine, parts: Sequence[Part]) -> list[RecordedKernel]:
    """Returns the kernels of parts of a step that are not compiled yet."""
    assert engine.runner.warm_up_run is not None
    return engine.runner.warm_up_run.kernels(parts)


@contextlib.contextmanager
def _by_launches(engine: Engine) -> Iterator[DecodeRunner]:
    """Yields a runner whose steps take several launches a layer, as with `Engine(persistent_step=False)`."""
    program = engine.program
    assert isinstance(program, DecodeProgram)
    one_launch, program.one_launch = program.one_launch, None
    try:
        yield DecodeRunner(program, engine.slots, engine.decode_runner.sizes[-1], graphs=Graphs(engine.device))
    finally:
        program.one_launch = one_launch


def _ratio(what: str, rows: int, plain: float, taken: float, launches: float | None = None) -> Row:
    """Returns a row. `launches`: microseconds of the plain step by several launches a layer, if it may be one launch."""
    row = {"what": what, "rows": rows, "plain_us": plain, "us": taken, "ratio": taken / plain}
    return row if launches is None else {**row, "launches_us": launches, "launches_ratio": taken / launches}


@torch.inference_mode()
def _step_us(engine: Engine, runner: DecodeRunner, rows: int, context: int) -> float:
    """Returns the median microseconds of a step of the first slots."""
    tokens = 4 * REPLAYS
    place(engine, rows, context, tokens)
    return statistics.median(times_us(runner.launch(range(rows), False, context + tokens)))


@torch.inference_mode()
def _adapted_us(
    engine: Engine, rows: int, context: int, adapters: Sequence[tuple[int, int]]
) -> tuple[float, list[tuple[str, float]]]:  # fmt: skip
    """Returns the median microseconds of a step of the first slots with the adapters (slot, number), and what each kernel of a
    layer adds."""
    tokens = 4 * REPLAYS
    place(engine, rows, context, tokens)
    engine.slots.update([], [], adapters)
    step = engine.decode_runner.launch(range(rows), False, context + tokens)
    taken = statistics.median(times_us(step))
    return taken, [] if step.graph is None else one_layer(timeline(step.graph.replay))


def _plain_us(
    engine: Engine, batches: Sequence[int], context: int, progress: Callable[[str], None], more: Sequence[Part] = ()
) -> dict[int, tuple[float, float]]:  # fmt: skip
    """Returns the microseconds of a plain step by its number of rows: as the engine takes it, and by several launches a layer.
    Compiles their kernels and those of the parts `more`."""
    longest = context + 4 * REPLAYS
    parts: list[Part] = [("step", *engine.decode_runner.variant(rows, False, longest)) for rows in batches]
    kernels = _kernels(engine, [*parts, *more])
    with _by_launches(engine) as runner:
        run = WarmUpRun(engine.program, runner, engine.prefill_runner, None, None, max(batches), longest)
        _compile(engine, [*kernels, *run.kernels(parts)], progress)
        launches = [_step_us(engine, runner, rows, context) for rows in batches]
    found = {}
    for rows, by_launches in zip(batches, launches, strict=True):
        one = computes_in_one_launch(engine, rows, context)
        found[rows] = (_step_us(engine, engine.decode_runner, rows, context) if one else by_launches, by_launches)
        progress(f"plain step of {rows}: {found[rows][0]:.0f} us, by launches {by_launches:.0f} us")
    return found


def _lora(config: FeaturesConfig, progress: Callable[[str], None]) -> Iterator[Row]:
    model, batches = _model(config), (1, 4, 16, 64)
    options = {"max_concurrent": max(batches), "max_length": config.context + 4 * REPLAYS}
    plain = _plain_us(_engine(model, **options), batches, config.context, progress)
    _free()
    shape = meta_model(config.model, DTYPES[config.dtype], config.layers)
    with tempfile.TemporaryDirectory(prefix="adapters-") as work:
        folders = {str(i): write_adapter(Path(work) / str(i), shape, i) for i in range(ADAPTERS)}
        progress("loading the adapters")
        engine = _engine(model, lora=folders, **options)
    variants = [engine.decode_runner.variant(rows, False, options["max_length"]) for rows in batches]
    _compile(engine, _kernels(engine, [("step", *variant) for variant in variants]), progress)
    for rows in batches:
        chosen = [(0, 0)] if rows == 1 else [(i, i % (ADAPTERS + 1) - 1) for i in range(rows)]
        taken, layer = _adapted_us(engine, rows, config.context, chosen)
        yield {**_ratio(f"adapters of rank {RANK} in all layers", rows, plain[rows][0], taken, plain[rows][1]), "layer": layer}


def _free() -> None:
    """Frees the memory of engines that nothing refers to."""
    gc.collect()
    torch.cuda.empty_cache()


def write_adapter(folder: Path, model: nn.Module, seed: int) -> Path:
    """Writes an adapter of rank 16 for the linear layers of a model's decoder layers, of small random numbers, as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {name: of for name, of in model.named_modules() if isinstance(of, nn.Linear) and of is not head}
    tensors = {}
    for name, of in linears.items():
        for part, size in (("A", (RANK, of.in_features)), ("B", (of.out_features, RANK))):
            made = torch.randn(size, generator=generator) * 0.01
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = made.half()
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    targets = sorted({name.rpartition(".")[2] for name in linears})
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


@torch.inference_mode()
def _verified(config: FeaturesConfig, progress: Callable[[str], None]) -> Iterator[Row]:
    tokens = 4 * REPLAYS
    engine = _engine(_model(config), max_concurrent=8, max_length=config.context + tokens, speculate=7)
    runner = engine.runner.verify_runner
    assert runner is not None
    counts = (2, 4, 8)
    parts: list[Part] = [("verify", *runner.variant(count, False, config.context + tokens)) for count in counts]
    ((plain, launches),) = _plain_us(engine, (1,), config.context, progress, parts).values()
    for count in counts:
        place(engine, 1, config.context, tokens)
        rows = [VerifyRow(0, 5 + i, config.context + i, i) for i in range(count)]
        taken = statistics.median(times_us(runner.launch(rows, False, config.context + tokens)))
        yield _ratio("tokens of one sequence verified", count, plain, taken, launches)


def _small(config: FeaturesConfig) -> Path:
    if config.small is None:
        raise ValueError("needs the folder of a small model: name one as the argument")
    return config.small


def _grammar(config: FeaturesConfig, progress: Callable[[str], None]) -> Iterator[Row]:
    users, limit = 16, 160
    model = _model(config)
    vocab, tokenizer = model.config.get_text_config().vocab_size, tokenizer_of(_small(config), None)
    engine = _engine(model, max_concurrent=users, max_length=512)
    stops = [_stop(tokenizer)]
    compiler = GrammarCompiler(tokenizer, vocab, stops)
    grammar = compiler.compile(Grammar.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 400}))

    def per_token(of: Any) -> float:
        requests = [
            Request(list(range(9, 40 + i)), limit, Sampling(temperature=1.0, seed=i), frozenset(stops) if of else frozenset(),
                    grammar=of)
            for i in range(users)
        ]  # fmt: skip
        begun, done = time.perf_counter(), engine.generate(requests)
        taken = time.perf_counter() - begun
        shortest = min(len(sequence.sampled) for sequence in done)
        if shortest < limit:
            raise ValueError(f"a text of the grammar ended after {shortest} of {limit} tokens")
        return 1e6 * taken / limit

    for of in (None, grammar):
        per_token(of)  # compiles and captures
        progress("plain" if of is None else "with the grammar")
    times = [(per_token(None), per_token(grammar)) for _ in range(ROUNDS)]
    plain, taken = (statistics.median(column) for column in zip(*times, strict=True))
    yield _ratio("JSON schema", users, plain, taken)


def _stop(tokenizer: PreTrainedTokenizerBase) -> int:
    stop = tokenizer.eos_token_id
    if not isinstance(stop, int):
        raise ValueError(f"the tokenizer has no end-of-text token, but {stop!r}")
    return stop


def _mixed(config: FeaturesConfig, progress: Callable[[str], None]) -> Iterator[Row]:
    model = _model(config)
    for what in ("apart", "mixed"):
        limit = {"step_ms": None} if what == "apart" else {}
        engine = _engine(model, max_concurrent=USERS, max_length=pages_for(PROMPT + OUTPUT) * 128, **limit)
        if what == "apart":  # as before steps could have both
            engine.mixed_runner.takes = lambda chunks, rows: False  # type: ignore[method-assign]
        progress(f"{what}, an engine with its graphs")
        _warm_up_greedy(engine, what == "mixed", progress)
        _served(engine, USERS, None, seed=0)
        progress(f"{what}, as many as it takes")
        with _timed_steps(engine) as steps:
            capacity, _ = _served(engine, REQUESTS, None, seed=1)
        progress(f"{what}, {LOAD:.0%} of it")
        with _timed_steps(engine) as loaded:
            reached, gaps = _served(engine, REQUESTS, OUTPUT / (LOAD * capacity), seed=2)
        yield {
            "what": what, "rows": USERS, "tokens_per_s": capacity, "loaded_tokens_per_s": reached,
            "median_ms": statistics.median(gaps), "p99_ms": sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1],
            "steps": _by_kind(steps), "idle_ms": _idle_ms(steps),
            "loaded_steps": _by_kind(loaded), "loaded_idle_ms": _idle_ms(loaded),
        }  # fmt: skip
        del engine
        _free()


@dataclass(frozen=True)
class TimedStep:
    """A launched step: its kind, its prompt tokens, and CUDA events before and behind its launches."""

    kind: str
    prompt_tokens: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


@contextlib.contextmanager
def _timed_steps(engine: Engine) -> Iterator[list[TimedStep]]:
    """Yields a list of the steps that the engine launches inside. Two events are recorded for each of them, and nothing is
    awaited."""
    steps: list[TimedStep] = []
    launch = engine._launch

    def timed(scheduled: SchedulerOutput) -> None:
        kind = _kind(engine, scheduled)  # before the launch, whose results may finish sequences
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch(scheduled)
        end.record()
        steps.append(TimedStep(kind, sum(len(chunk.tokens) for chunk in scheduled.chunks), begin, end))

    engine._launch = timed  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine._launch  # the class's own again


def _kind(engine: Engine, scheduled: SchedulerOutput) -> str:
    """Returns the kind of a step: what it computes, and the rows of a forward of both."""
    if not scheduled.chunks:
        return "plain"
    if not scheduled.decoding:
        return "prompts"
    runner, rows = engine.mixed_runner, len(scheduled.decoding)
    if not runner.takes(scheduled.chunks, rows):
        return "apart"
    shape = runner.shape(scheduled.chunks, rows)
    return "mixed" if shape is None else f"mixed, {shape.rows + shape.prompts.tokens} rows"


def _by_kind(steps: Sequence[TimedStep]) -> dict[str, list[float]]:
    """Returns (number of steps, mean prompt tokens, mean milliseconds) by kind."""
    found: dict[str, list[float]] = {}
    for kind in sorted({step.kind for step in steps}):
        own = [step for step in steps if step.kind == kind]
        taken = statistics.fmean(step.begin.elapsed_time(step.end) for step in own)
        found[kind] = [len(own), statistics.fmean(step.prompt_tokens for step in own), taken]
    return found


def _idle_ms(steps: Sequence[TimedStep]) -> float:
    """Returns the milliseconds between the end of a step and the begin of the next one, in all."""
    return sum(before.end.elapsed_time(after.begin) for before, after in itertools.pairwise(steps))


@torch.inference_mode()
def _warm_up_greedy(engine: Engine, mixed: bool, progress: Callable[[str], None]) -> None:
    """Compiles and captures what greedy requests may need. `mixed`: also steps together with prompts."""
    run, steps, prompts, both = engine.runner.warm_up_run, engine.decode_runner, engine.prefill_runner, engine.mixed_runner
    assert run is not None
    parts = [part for part in run.all_parts() if part[2] is not True and (mixed or part[0] != "mixed")]
    _compile(engine, _kernels(engine, parts), progress)
    captures: list[Callable[[], object]] = [
        *(functools.partial(steps.captured, variant) for variant in steps.variants() if not variant[1]),
        *(functools.partial(prompts.captured, shape) for shape in prompts.graph_shapes),
        *(functools.partial(both.captured, shape) for shape in (both.shapes if mixed else ())),
    ]
    for done, capture in enumerate(captures):
        if done % 8 == 0:
            progress(f"capturing, {done} of {len(captures)} graphs")
        capture()


def _served(engine: Engine, count: int, interval: float | None, seed: int) -> tuple[float, list[float]]:
    """Runs requests that come every `interval` seconds; None: as soon as fewer than USERS run. Returns (tokens/s, milliseconds
    between a sequence's tokens)."""
    vocab = engine.slots.sampling.counts.shape[1]
    generator = torch.Generator().manual_seed(seed)
    came: list[list[float]] = [[] for _ in range(count)]

    def request(i: int) -> Request:
        prompt = torch.randint(vocab, (PROMPT,), generator=generator).tolist()

        def on_token(token: object) -> bool:
            came[i].append(time.perf_counter())
            return False

        return Request(prompt, OUTPUT, on_token=on_token)

    waiting = [request(i) for i in range(count)]
    running: list[Any] = []
    torch.cuda.synchronize()
    begun = time.perf_counter()
    started = 0
    while started < count or running:
        due = count if interval is None else int((time.perf_counter() - begun) / interval) + 1
        while started < min(count, due) and (interval is not None or len(running) < USERS):
            running.append(engine.submit(waiting[started]))
            started += 1
        if running:
            engine.step()
        running = [sequence for sequence in running if sequence.finish_reason is None]
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()  # the last sequence may run one step more
    gaps = [1e3 * (after - before) for times in came for before, after in itertools.pairwise(times)]
    return count * OUTPUT / taken, gaps


def _guesses(config: FeaturesConfig, progress: Callable[[str], None]) -> Iterator[Row]:
    folder = _small(config)
    tokenizer = tokenizer_of(folder, None)
    pipes = {
        speculate: lowbit.pipeline(
            str(folder), scheme=config.small_scheme, device="cuda", max_concurrent=4, max_length=2048, cache_bytes=1 << 29,
            speculate=speculate,
        )
        for speculate in (0, 7)
    }  # fmt: skip
    engines = {speculate: pipe.engine for speculate, pipe in pipes.items()}
    for name, text in TASKS.items():
        chat = [{"role": "user", "content": text}]
        said = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(said, add_special_tokens=False).input_ids
        speeds: dict[int, list[float]] = {0: [], 7: []}
        tokens: dict[int, list[int]] = {}
        counts = {}
        asked: Row = {"sampling": SETTINGS.get(name, Sampling()), "stop_token_ids": frozenset([_stop(tokenizer)])}
        progress(f"{name}, {len(prompt)} tokens")
        for _ in range(TASK_ROUNDS + 1):  # the first round captures, and fills the prefix cache
            for speculate, engine in engines.items():
                before = _counts(engine)
                torch.cuda.synchronize()
                begun = time.perf_counter()
                (done,) = engine.generate([Request(prompt, TASK_TOKENS, **asked)])
                speeds[speculate].append(len(done.sampled) / (time.perf_counter() - begun))
                tokens[speculate] = [token.token for token in done.sampled]
                counts[speculate] = [after - since for after, since in zip(_counts(engine), before, strict=True)]
        plain, guessed = (statistics.median(speeds[speculate][1:]) for speculate in (0, 7))
        same = next((i for i, (a, b) in enumerate(zip(*tokens.values(), strict=False)) if a != b), len(tokens[7]))
        speculation = engines[7].speculation
        assert speculation is not None
        yield {
            "what": name, "rows": 1, "plain_tokens_per_s": plain, "tokens_per_s": guessed, "ratio": guessed / plain,
            "tokens": len(tokens[7]), "same_tokens": same, "steps_with_guesses": counts[7][0], "drafted": counts[7][1],
            "accepted": counts[7][2], "waits": counts[7][3], "step_ratio": speculation.clock.ratio,
        }  # fmt: skip


def _counts(engine: Engine) -> tuple[int, int, int, int]:
    of = engine.speculation
    return (0, 0, 0, 0) if of is None else (of.steps, of.drafted, of.accepted, of.waits)
