"""`python -m benchmarks e2e`: decode steps, prompts and whole requests of language models.

Models have random weights in known shapes; `lowbit.pipeline` runs the same programs and graphs.
"""

from __future__ import annotations

import datetime
import gc
import statistics
import time
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from benchmarks.ceilings import read_bandwidth
from benchmarks.e2e_report import E2E, KINDS, SCHEMA
from benchmarks.language_model import OWN_SCHEMES, SHAPES, random_model, weight_bytes
from benchmarks.results import default_path, machine
from lowbit.checkpoint.target import check_file
from lowbit.engine import Engine, Request, Sequence
from lowbit.engine.block_pool import pages_for
from lowbit.engine.chain import Chain
from lowbit.engine.decode_runner import DecodeRunner, DecodeStep
from lowbit.engine.graphs import Graphs
from lowbit.engine.one_launch import OneLaunch
from lowbit.engine.program import DecodeProgram
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import on_device
from lowbit.eval.results import versions, write_json
from lowbit.formats import parse_scheme
from lowbit.formats.kv import parse_kv
from lowbit.kernels.choose.attention import PAGE
from lowbit.kernels.choose.experts import experts_hit
from lowbit.models.experts import experts_per_token
from lowbit.pack.kv_pages import KVPages
from lowbit.tune.timing import failures, reason, warm_up

REPLAYS = 24
PROMPT, OUTPUT = 1024, 64
"""Tokens of the timed prompt, and tokens that a whole request generates."""

WARM_PROMPT = 12288
"""Tokens of the request before a long prompt: more than the graphs of prompts hold, so that it takes the same kernels."""

PROMPT_COLUMNS = ("model", "scheme", "gpus", "kv_dtype", "head", "impl", "weight_bytes")
"""Columns that rows of long prompts share with those of steps."""

PRODUCTS = KINDS["products"]
"""Parts of the names by which kernels that multiply by weights are recognised: this library's, cuBLAS's, and cuBLAS's split-K
reduction."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

RIVALS: dict[str, dict[str, Any]] = {"eager": {}, "static": {"cache_implementation": "static"}}
"""Arguments of Transformers' `generate`, by name of the rival. With a static cache, `generate` compiles the model."""

PROTOCOL = (
    "Gaussian weights in the shape of the model, each layer in memory of its own; keys and values Gaussian, stored as "
    f"kv_dtype, in pages of 128 tokens in random order. ms_per_token: median of {REPLAYS} replays, timed with events, of the "
    "CUDA graph that the engine runs, which embeds, computes all layers and the head, samples, feeds it back "
    "and moves positions on; all requests have `context` tokens before them and begin with random tokens. limit_ms: bytes of "
    "all weights as stored and of keys and values of the context, at the read bandwidth of the same run. prefill_tok_s: a "
    "prompt of `prompt` tokens, alone, from tokens on the host to logits; prefill_products: the share of its time in matrix "
    "products. request_s: wall time of `batch` requests from Python, of 128 tokens each, from the first "
    f"call to the last token of {OUTPUT}; step_wall_ms is that time without the prompts, by token. Products of 16-bit weights "
    "are timed twice, by torch.nn.functional.linear (cuBLAS), eight launches a layer, and, for as many requests as it takes, "
    "by this library's ring kernel, five; the faster one's is the row (products), other_ms_per_token the other one's. "
    "Mixtures of experts are in bf16; their limit counts the experts that are hit if tokens choose independently and uniformly "
    "(experts_hit; experts_hit_once: the mean over the layers of one step of the measured model), and of layers with a window "
    "the keys and values within it. Quantized experts of a layer have the rows of one Gaussian matrix, each in other places. "
    "Experts in 16 bits take torch._grouped_mm. "
    "With --one-launch a step is timed by several launches a layer (impl lowbit) and in one launch (impl lowbit one launch), "
    "whichever the engine chooses; without, as it chooses. "
    "prompts: one request of `prompt` tokens, of quantized weights, alone, from its submission to its first token (prompt_s), "
    "by the engine's own steps, after a shorter request. "
    "bf16_ms_per_token is the ms_per_token of that row, with keys and values in 16 bits too. impl transformers: the same "
    "model's own `generate`, the time of 8 tokens more, its cache dynamic or, compiled, static. kernels: of each how often it "
    "runs in a step, its microseconds from start to end, and those that it adds, from the end of the kernel before to its own; "
    "layer: what each kernel of a layer adds, in order, the median over the layers."
)

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class E2EConfig:
    """Configuration of a run."""

    models: tuple[str, ...]
    schemes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    head: str | None = "w8a16"
    dtype: str | None = None
    layers: int | None = None
    rivals: tuple[str, ...] = ()
    kv: tuple[str, ...] = ("16",)
    one_launch: bool = False
    prompts: tuple[int, ...] = ()


def run(config: E2EConfig, path: Path | None, progress: ProgressCallback) -> tuple[Path, dict[str, Any]]:
    """Measures everything and writes the result file after each row. Returns its path and document."""
    about = machine()
    path = path or default_path(about["gpu"], datetime.date.today()).with_name(f"{datetime.date.today().isoformat()}-e2e.json")
    check_file(path, E2E)
    warm_up()
    bandwidth, kernel = read_bandwidth()
    rows: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": E2E, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False, "machine": about,
        "versions": versions(("transformers",)), "read_bytes_per_s": bandwidth, "read_kernel": kernel, "protocol": PROTOCOL,
        "rows": rows, "prompts": prompts,
    }  # fmt: skip
    for model in config.models:
        wide: dict[tuple[int, int], float] = {}
        for scheme in (None, *dict.fromkeys((*OWN_SCHEMES.get(model, ()), *config.schemes))):
            for row in _rows_of(model, scheme, config, bandwidth, progress):
                if "prompt_s" in row:
                    prompts.append(row)
                    write_json(path, document)
                    continue
                key = (row["batch"], row["context"])
                if scheme is None and row["impl"] == "lowbit" and row["kv_dtype"] in DTYPES and row["ms_per_token"]:
                    wide[key] = row["ms_per_token"]
                rows.append({**row, "bf16_ms_per_token": wide.get(key)})
                write_json(path, document)
    document["complete"] = True
    write_json(path, document)
    return path, document


def _rows_of(
    model: str, scheme: str | None, config: E2EConfig, bandwidth: float, progress: ProgressCallback
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one model in one scheme; a failed one has its reason."""
    name = "16 bits" if scheme is None else parse_scheme(scheme).name
    dtype = config.dtype or dtype_of(model)
    blank = {"model": model, "scheme": scheme, "gpus": 1, "kv_dtype": dtype, "head": config.head if scheme else None}
    measures = ("ms_per_token", "limit_ms", "prefill_tok_s", "tokens_per_gpu_s", "kernels_per_layer")
    nothing = dict.fromkeys((*measures, "products", "other_ms_per_token", "error"))
    try:
        progress(f"{model}, {name}: making the model")
        made = random_model(model, scheme, config.head if scheme else None, DTYPES[dtype], torch.device("cuda"), config.layers)
        held = weight_bytes(made)
        yield from ({**blank, **nothing, "weight_bytes": held, **row} for row in _rivals(made, config, progress))
    except failures() as error:
        yield {**blank, **nothing, "impl": "lowbit", "batch": None, "context": None, "error": reason(error)}
        return
    # 16-bit weights are the baseline. They are timed with the first format of keys and values only, 16 bits by default.
    for kv in config.kv if scheme else config.kv[:1]:
        stored = blank if not parse_kv(kv).quantized else {**blank, "kv_dtype": kv}
        said = f"{model}, {name}, keys and values in {stored['kv_dtype']}"
        row = {**stored, **nothing, "impl": "lowbit", "weight_bytes": held}
        yield from _rows_of_engine(made, kv, row, config, bandwidth, said, progress)
        gc.collect()
        torch.cuda.empty_cache()
    del made
    gc.collect()
    torch.cuda.empty_cache()


def _rows_of_engine(
    model: PreTrainedModel, kv: str, blank: dict[str, Any], config: E2EConfig, bandwidth: float, said: str,
    progress: ProgressCallback,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields the rows of one model and one format of keys and values. `blank` has the columns that all rows share."""
    cases = [(batch, context) for context in config.contexts for batch in config.batches]
    try:
        prompts = config.prompts if blank["scheme"] else ()
        engine = engine_for(model, [*cases, *((1, prompt) for prompt in prompts)], kv, config.one_launch or None)
        for stage in engine.compile():
            progress(f"{said}: compiling, {stage.done} of {stage.total} kernels")
        rate, in_products = _prefill(engine)
    except failures() as error:
        yield {**blank, "batch": None, "context": None, "error": reason(error)}
        return
    for batch, context in cases:
        progress(f"{said}: batch {batch}, context {context}")
        row = {**blank, "batch": batch, "context": context, "prompt": PROMPT, "output": OUTPUT}
        row |= {"prefill_tok_s": rate, "prefill_products": in_products}
        try:
            measured, read = (_decode if blank["scheme"] else _better), weight_bytes(model, batch)
            row |= experts_of_a_step(engine, model, batch, context)
            if config.one_launch:
                yield {**row, **_launches(measured, engine, batch, context, read, bandwidth)}
                if not computes_in_one_launch(engine, batch, context):
                    continue
                row["impl"], measured = "lowbit one launch", _decode
            yield {**row, **measured(engine, batch, context, read, bandwidth), **_request(engine, batch)}
        except failures() as error:
            yield {**row, "error": reason(error)}
    for prompt in prompts:
        progress(f"{said}: a prompt of {prompt} tokens")
        row = {**{name: blank[name] for name in PROMPT_COLUMNS}, "prompt": prompt, "prompt_s": None, "prefill_tok_s": None}
        try:
            yield {**row, **_long_prompt(engine, prompt), "error": None}
        except failures() as error:
            yield {**row, "error": reason(error)}


def dtype_of(model: str) -> str:
    """Returns the default dtype of a shape. It is bf16 for mixtures of experts, since their 16-bit products support no other
    dtype."""
    return "bfloat16" if experts_per_token(SHAPES[model]()) else "float16"


def engine_for(
    model: PreTrainedModel, cases: abc.Sequence[tuple[int, int]], kv: str = "16", one_launch: bool | None = None
) -> Engine:
    """Returns an engine with a KV cache of the format `kv`, large enough for every case, as far as memory allows.
    `one_launch`: of `Engine.persistent_step`."""
    longest = max(context for _, context in cases) + 4 * REPLAYS
    engine = Engine(
        model, max_concurrent=max(batch for batch, _ in cases), max_length=max(longest, PROMPT + OUTPUT), kv=kv,
        prefix_caching=False, persistent_step=one_launch,
    )  # fmt: skip
    program = engine.program
    if not isinstance(program, DecodeProgram) or program.cache is None:
        raise ValueError(f"there is no decode program: {'; '.join(program.reasons)}")
    for pages in program.cache.layers:
        fill(pages)
    return engine


def fill(pages: KVPages) -> None:
    """Fills the pages of a layer with Gaussian keys and values. All pages are copies of one page."""
    places = torch.arange(PAGE, device=pages.k.device)
    k, v = torch.randn(2, PAGE, pages.kv_heads, pages.head_dim, device=pages.k.device)
    pages.write(torch.zeros_like(places), places, k, v)
    for part in pages.tensors:
        if part is not None:
            part[1:] = part[0]


def place(engine: Engine, batch: int, context: int, tokens: int) -> None:
    """Prepares the first `batch` slots: random first tokens, position `context`, and random pages for `context` + `tokens`
    tokens. Raises ValueError if there are too few pages."""
    each, count = pages_for(context + tokens), engine.scheduler.pages.count - 1
    if batch * each > count:
        raise ValueError(f"keys and values of {batch} x {context} tokens take {batch * each:,} pages, {count:,} fit")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: batch * each] + 1
    engine.slots.tables[:batch, :each] = order.view(batch, each).to(engine.device, torch.int32)
    engine.slots.positions[:batch] = context
    vocab = engine.slots.sampling.counts.shape[1]
    first_tokens = torch.randint(vocab, (batch,), generator=torch.Generator().manual_seed(3))
    engine.slots.tokens[:batch] = first_tokens.to(engine.device, engine.slots.tokens.dtype)


class RoutingCounts(TorchDispatchMode):
    """Counts the experts hit in each call of a router inside this context. `hit` has a tensor with one number per call."""

    def __init__(self) -> None:
        super().__init__()
        self.hit: list[torch.Tensor] = []

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = called(*args, **(kwargs or {}))
        if called.name() in ("lowbit::route", "lowbit::route_tokens"):
            self.hit.append((made[3].diff() > 0).sum())
        return made


@torch.inference_mode()
def experts_of_a_step(engine: Engine, model: PreTrainedModel, batch: int, context: int) -> dict[str, float]:
    """Returns the number of experts of a layer that a step is expected to hit, and the measured mean over the layers of one
    step. Returns {} for models without experts."""
    top_k = experts_per_token(model.config)
    if not top_k:
        return {}
    place(engine, batch, context, 1)
    program, rows = engine.program, on_device(list(range(batch)), engine.device)
    assert isinstance(program, DecodeProgram)
    with RoutingCounts() as counts:
        program.step(rows, engine.slots, context + 1)
    count = model.config.num_local_experts if hasattr(model.config, "num_local_experts") else model.config.num_experts
    once = {"experts_hit_once": float(torch.stack(counts.hit).double().mean())} if counts.hit else {}
    return {"experts_hit": experts_hit(batch, top_k, count), **once}


def computes_in_one_launch(engine: Engine, batch: int, context: int) -> bool:
    """Returns whether the engine computes the timed steps of a case in one launch."""
    one_launch = engine.program.one_launch if isinstance(engine.program, DecodeProgram) else None
    rows, _, reach = engine.decode_runner.variant(batch, False, context + 4 * REPLAYS)
    return isinstance(one_launch, OneLaunch) and one_launch.computes(rows, engine.slots, reach)


@torch.inference_mode()
def _launches(
    measured: Callable[..., dict[str, Any]], engine: Engine, batch: int, context: int, held: float, bandwidth: float
) -> dict[str, Any]:  # fmt: skip
    """Returns the row of a step that takes several launches a layer, of an engine that may compute it in one."""
    program = engine.program
    assert isinstance(program, DecodeProgram)
    one_launch, program.one_launch = program.one_launch, None
    try:
        if measured is _better:
            return _better(engine, batch, context, held, bandwidth)
        steps = DecodeRunner(program, engine.slots, batch, graphs=Graphs(engine.device))
        return _decode(engine, batch, context, held, bandwidth, steps)
    finally:
        program.one_launch = one_launch


@torch.inference_mode()
def _better(engine: Engine, batch: int, context: int, held: float, bandwidth: float) -> dict[str, Any]:
    """Measures a step of 16-bit weights by cuBLAS and, where it takes the batch, by the small-M kernel. Returns the row of the
    faster one, with the time of the other."""
    program = engine.program
    assert isinstance(program, DecodeProgram)
    chain, found = program.chain, dict[str, dict[str, Any]]()
    if isinstance(chain, Chain) and batch <= chain.most:
        steps = DecodeRunner(program, engine.slots, batch, graphs=Graphs(engine.device))
        found["ring"] = _decode(engine, batch, context, held, bandwidth, steps)
    program.chain = ("products by cuBLAS are timed",)
    try:
        steps = DecodeRunner(program, engine.slots, batch, graphs=Graphs(engine.device))
        found["cuBLAS"] = _decode(engine, batch, context, held, bandwidth, steps)
    finally:
        program.chain = chain
    first, *others = sorted(found, key=lambda name: found[name]["ms_per_token"])
    return {**found[first], "products": first, "other_ms_per_token": found[others[0]]["ms_per_token"] if others else None}


@torch.inference_mode()  # an engine's own steps run in this mode, and they may have captured the graph
def _decode(
    engine: Engine, batch: int, context: int, held: float, bandwidth: float, steps: DecodeRunner | None = None
) -> dict[str, Any]:
    """Returns the row of a decode step of a batch at a context: time, limit, kernels. `held` is the bytes of weights that the
    step reads."""
    program = engine.program
    assert isinstance(program, DecodeProgram)
    place(engine, batch, context, 4 * REPLAYS)
    torch.cuda.reset_peak_memory_stats()
    step = (steps or engine.decode_runner).launch(range(batch), False, context + 4 * REPLAYS)
    us = times_us(step)
    engine.slots.positions[:batch] = context
    assert step.graph is not None
    kernels = timeline(step.graph.replay)
    spec = program.cache_spec
    kv = batch * kv_bytes(program, context)
    ms = statistics.median(us) / 1e3
    return {
        "ms_per_token": ms, "limit_ms": 1e3 * (held + kv) / bandwidth, "tokens_per_gpu_s": 1e3 * batch / ms,
        "kernels_per_layer": len(kernels) / spec.layers, "kernels": by_name(kernels), "layer": one_layer(kernels),
        "gaps_us": statistics.median(us) - sum(added for _, _, added in kernels),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }  # fmt: skip


def kv_bytes(program: DecodeProgram, context: int) -> float:
    """Returns the bytes of keys and values that a step reads for a request with `context` earlier tokens. A layer with a window
    reads at most the tokens in its window."""
    spec = program.cache_spec
    tokens = sum(min(context, layer.shape.window or context) for layer in program.layers)
    return tokens * spec.page_bytes / PAGE / spec.layers


def times_us(step: DecodeStep) -> list[float]:
    """Returns the microseconds of each replay. All are queued at once, so that Python does not delay the GPU."""
    assert step.graph is not None
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for _ in range(3):
        step.graph.replay()
    for start, end in events:
        start.record()
        step.graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


Timeline = list[tuple[str, float, float]]
"""(name, microseconds from start to end, microseconds after the end of the previous kernel) of each kernel, in the order of
their ends."""


def timeline(launch: Callable[[], object]) -> Timeline:
    """Returns the kernels of `launch` from CUDA's profiler. With programmatic launch a kernel starts before the previous one
    ends, so it adds only the time after that end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    found: Timeline = []
    before = float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.end):
        start, end = event.time_range.start, event.time_range.end
        found.append((event.name, end - start, end - max(start, before)))
        before = end
    return found


def by_name(kernels: Timeline) -> dict[str, tuple[int, float, float]]:
    """Returns by kernel name: number of runs, total microseconds, and microseconds added."""
    found: dict[str, tuple[int, float, float]] = {}
    for name, us, added in kernels:
        count, so_far, adding = found.get(name, (0, 0.0, 0.0))
        found[name] = (count + 1, so_far + us, adding + added)
    return found


def one_layer(kernels: Timeline) -> list[tuple[str, float]]:
    """Returns the kernels of one layer, from the kernel before attention on, with the microseconds that each adds (median over
    layers)."""
    at = [i for i, (name, _, _) in enumerate(kernels) if "attention" in name]
    if len(at) < 3 or at[0] == 0:
        return []
    each = at[1] - at[0]
    layers = [kernels[i - 1 : i - 1 + each] for i in at[1:-1]]
    return [(column[0][0], statistics.median(added for _, _, added in column)) for column in zip(*layers, strict=True)]


@torch.inference_mode()
def _prefill(engine: Engine) -> tuple[float, float]:
    """Returns tokens per second of a prompt of PROMPT tokens, and the share of its time in products."""
    ids = torch.randint(engine.slots.sampling.counts.shape[1], (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    place(engine, 1, PROMPT, 0)
    sequence = Sequence(Request(ids, 1), slot=0)
    size = engine.scheduler.chunk_tokens

    def prompt() -> None:
        for begin in range(0, PROMPT, size):
            tokens = tuple(ids[begin : begin + size])
            engine.prefill_runner.launch([PrefillChunk(sequence, begin, tokens, begin + size >= PROMPT)])

    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        prompt()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds[1:])
    products_us = sum(added for name, _, added in timeline(prompt) if any(part in name for part in PRODUCTS))
    return PROMPT / took, products_us / 1e6 / took


def _long_prompt(engine: Engine, prompt: int) -> dict[str, float]:
    """Returns the seconds from the submission of a request of `prompt` tokens to its first token, which the engine computes in
    chunks over pages as they are stored, and the prompt's tokens per second. A shorter request runs before."""
    vocab = engine.slots.sampling.counts.shape[1]
    generator = torch.Generator().manual_seed(4)
    taken = 0.0
    for tokens in (min(prompt, WARM_PROMPT), prompt):
        ids = torch.randint(vocab, (tokens,), generator=generator).tolist()
        start = time.perf_counter()
        sequence = engine.submit(Request(ids, 1))
        while sequence.finish_reason is None:
            engine.step()
        taken = time.perf_counter() - start
        if not sequence.sampled:
            raise RuntimeError(f"a request of {tokens} tokens ended without a token: {sequence.finish_reason}")
    return {"prompt_s": taken, "prefill_tok_s": prompt / taken}


def _request(engine: Engine, batch: int) -> dict[str, Any]:
    """Returns the wall time of whole requests. They run twice; the second run counts."""
    vocab = engine.slots.sampling.counts.shape[1]
    generator = torch.Generator().manual_seed(2)
    taken: dict[str, float] = {}
    for _ in range(2):
        prompts = [torch.randint(vocab, (128,), generator=generator).tolist() for _ in range(batch)]
        sequences = [engine.submit(Request(ids, OUTPUT)) for ids in prompts]
        start = time.perf_counter()
        while not all(sequence.sampled for sequence in sequences):
            engine.step()
        begun = time.perf_counter()
        sampled = min(len(sequence.sampled) for sequence in sequences)
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        end = time.perf_counter()
        taken = {"request_s": end - start, "step_wall_ms": 1e3 * (end - begun) / (OUTPUT - sampled)}
    return taken


def _rivals(model: PreTrainedModel, config: E2EConfig, progress: ProgressCallback) -> Iterator[dict[str, Any]]:
    """Yields rows of Transformers' `generate` with the same model, before an engine allocates its cache."""
    for rival in config.rivals:
        for context in config.contexts[:1]:
            for batch in config.batches:
                progress(f"transformers, {rival}: batch {batch}, context {context}")
                row = {"impl": f"transformers {rival}", "batch": batch, "context": context}
                try:
                    ms = _generate_ms(model, batch, context, **RIVALS[rival])
                    yield {**row, "ms_per_token": ms, "tokens_per_gpu_s": 1e3 * batch / ms}
                except failures() as error:
                    yield {**row, "error": reason(error)}


@torch.inference_mode()
def _generate_ms(model: PreTrainedModel, batch: int, context: int, **options: Any) -> float:
    """Returns milliseconds per token of `generate`, from the time of 16 tokens minus the time of 8."""
    ids = torch.randint(model.config.vocab_size, (batch, context), device="cuda")

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(16)
    return 1e3 * min(seconds(16) - seconds(8) for _ in range(2)) / 8
