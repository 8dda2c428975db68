"""`python -m benchmarks conv`: ResNet-50 and EfficientNet-lite0, 224 x 224, packed images to logits, in INT4 and INT8, and
16-bit rivals.

Each row is one CUDA graph. Before timing, codes and logits are compared with the integer reference, bit for bit, and a row says
how many differ.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import conv_lite
from benchmarks.bounded import in_process
from benchmarks.conv_network import CHECKED_IMAGES, FUSIONS, KernelWork, LaunchedNetwork, Network, Reference
from benchmarks.conv_report import CONV, SCHEMA
from benchmarks.conv_rivals import RIVALS
from benchmarks.results import default_path, machine
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import write_json
from lowbit.hardware.machine import machine_of
from lowbit.tune.timing import failures, reason, warm_up

RESNET = "resnet50"
MODELS = (RESNET, conv_lite.MODEL)
BATCHES = (1, 8, 32, 128, 256, 2048)
REPLAYS = 40
ROUNDS = 3
"""Times each network is timed, in turn with the others of its storage and batch."""
LAYER_BATCH = 128
RIVAL_SECONDS = 120.0
"""Limit of a rival of EfficientNet-lite0, compiling included."""

PROTOCOL = (
    f"Time of one CUDA graph from packed int8 images in GPU memory to logits, median of {REPLAYS} replays (a quarter "
    "beyond 512 images) timed with events after 3 untimed ones, after matrix products that warm the machine; fusions of one "
    f"storage and batch are timed in turn, and ms is the median of {ROUNDS} such medians. The network is "
    "a module of torch with random weights, quantized (w8a4, w8a8) and run by lowbit.vision as any other. Before timing, the "
    f"codes of all values and the logits of {CHECKED_IMAGES} images of the batch, the first, the last and those between, are "
    "compared with the integer reference: wrong_codes is how many differ, and a network with a wrong one is not timed. Without "
    "a fusion its ReLUs and sums are kernels of their own, on codes: values before a ReLU have 8 bits. limit_ms "
    "is the sum over the network's kernels of the larger of two times: bytes of inputs, weights and output at the data "
    "sheet's bandwidth, operations at its int8 rate. A layer's time is that of its kernel alone, repeated in a graph on the "
    "network's own buffers, so that small layers find their input in the L2. Rows of impl 'published' were measured by "
    "others: MLPerf Inference v4.1, ResNet-50 Offline, TensorRT INT8, 8 x H200, 756,960 images/s at batch 2048, an eighth of "
    "it per GPU. fp16, this run, channels-last, one CUDA graph each: cuDNN's fused convolution + bias + ReLU and convolution "
    "+ add + ReLU; torch.compile of the module in its default mode with freezing, captured as all others. EfficientNet-lite0: "
    f"batch {conv_lite.BATCH}, storage is the scheme, weights as the row says. Its rivals in fp16, channels-last, have a "
    "process each and a limit of seconds: cuDNN is the module as it is, in one CUDA graph; compile is torch.compile in its "
    "default mode, captured in one CUDA graph; reduce-overhead and max-autotune are its modes reduce-overhead, which "
    "captures its own graphs, and max-autotune-no-cudagraphs, captured. setup_s is the time to their first result."
)

PUBLISHED = {"impl": "published", "storage": "int8", "fusion": "TensorRT, MLPerf v4.1", "batch": 2048, "images_s": 94620.0}

ProgressCallback = Callable[[str], None]


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Captures the call after two warm-up calls, which compile kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def replay_ms(replay: Callable[[], object], replays: int = REPLAYS) -> float:
    """Returns the median milliseconds of a replay."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(3):
        replay()
    for start, end in events:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def step_limit_us(step: KernelWork) -> tuple[float, str]:
    """Returns the roofline time of a kernel on the current GPU in microseconds, and what sets it."""
    machine = machine_of("cuda")
    memory = 1e6 * step.moved_bytes / machine.bandwidth_bytes
    compute = 1e6 * step.operations / (machine.peak_int8 or float("inf"))
    return max(memory, compute), "memory" if memory > compute else "tensor cores"


def layer_rows(network: LaunchedNetwork, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Returns one row per kernel of the network: `known`, microseconds, limit, what sets it, operations and bytes."""
    network.launched.launch()
    for step in network.steps:
        graph = graph_of(lambda step=step: [step.call() for _ in range(4)])  # type: ignore[misc]
        limit, bound = step_limit_us(step)
        yield known | {
            "layer": step.name, "us": 1e3 * replay_ms(graph.replay, 8) / 4, "limit_us": limit, "bound": bound,
            "operations": step.operations, "bytes": step.moved_bytes,
        }  # fmt: skip


def measured(
    storages: Sequence[str], batches: Sequence[int], fusions: Sequence[str], rivals: Sequence[str], say: ProgressCallback
) -> Iterator[dict[str, Any]]:
    """Yields rows of this library and of `rivals`; a failed one has its reason in `error`."""
    for batch in batches:
        for storage in storages:
            yield from network_rows(storage, batch, fusions if batch == LAYER_BATCH else fusions[-1:], say)
            torch.cuda.empty_cache()
        for rival in rivals:
            say(f"ResNet-50 fp16 by {rival}, batch {batch}")
            row = {"impl": rival, "model": RESNET, "storage": "fp16", "fusion": RIVALS[rival].fusion, "batch": batch}
            try:
                with torch.inference_mode():
                    graph = graph_of(RIVALS[rival].network(batch))
                    yield _row(row, replay_ms(graph.replay, _replays(batch)), batch, None)
                    del graph
            except failures() as error:
                yield _row(row, None, batch, None, reason(error))
            torch.cuda.empty_cache()


def network_rows(storage: str, batch: int, fusions: Sequence[str], say: ProgressCallback) -> list[dict[str, Any]]:
    """Returns one row per fusion. Networks whose codes are right are timed in turn; the row of a wrong one has their number
    and no time."""
    rows: list[dict[str, Any]] = []
    right: dict[int, Network] = {}
    for fusion in fusions:
        row = {"impl": "lowbit", "model": RESNET, "storage": storage, "fusion": fusion, "batch": batch}
        say(f"ResNet-50 {storage} {fusion}, batch {batch}: comparing codes")
        try:
            network = Network(storage, batch, fusion)
            limit = sum(step_limit_us(step)[0] for step in network.steps) / 1e3
            row |= {"launches": len(network.steps)} | comparison(network)
            if not row["wrong_codes"]:
                right[len(rows)] = network
            rows.append(_row(row, None, batch, limit, wrong_codes_error(row)))
        except failures() as error:
            rows.append(_row(row, None, batch, None, reason(error)))
    say(f"ResNet-50 {storage}, batch {batch}: timing {len(right)} of {len(rows)}")
    times: dict[int, list[float]] = {at: [] for at in right}
    try:
        for _ in range(ROUNDS):
            for at, network in right.items():
                times[at].append(replay_ms(network.launched.replay, _replays(batch)))
    except failures() as error:
        return [row | {"error": row["error"] or reason(error)} for row in rows]
    for at, found in times.items():
        rows[at] = _row(rows[at], statistics.median(found), batch, rows[at]["limit_ms"])
    return rows


def comparison(network: LaunchedNetwork) -> dict[str, int]:
    """Returns how many images were compared with the reference and how many of their codes and logits differ."""
    return {"checked_images": len(network.checked), "wrong_codes": network.wrong_values()}


def wrong_codes_error(row: dict[str, Any]) -> str | None:
    """Returns the `error` of a row whose codes differ from the reference; None if all are equal."""
    wrong = row["wrong_codes"]
    return f"not timed: {wrong} codes and logits differ from the integer reference" if wrong else None


def lite_rows(
    schemes: Sequence[str], rivals: Sequence[str], rival_seconds: float, layers: list[dict[str, Any]], say: ProgressCallback
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields rows of EfficientNet-lite0: this library's first, then those of `rivals`, each in a process that is ended after
    `rival_seconds`. Adds the kernels of the first scheme to `layers`."""
    model, weights = conv_lite.lite0()
    say(f"EfficientNet-lite0, {weights} weights: tracing")
    found = conv_lite.programs(model.cuda(), schemes)
    count = conv_lite.compile_kernels(found)
    say(f"{count} kernels compiled")
    known = {"model": conv_lite.MODEL, "batch": conv_lite.BATCH, "weights": weights}
    for scheme, program in found.items():
        say(f"EfficientNet-lite0 {scheme}, batch {conv_lite.BATCH}")
        row = {"impl": "lowbit", "storage": scheme, "fusion": "all"} | known
        try:
            network = LaunchedNetwork(Reference(program), conv_lite.BATCH)
            limit = sum(step_limit_us(step)[0] for step in network.steps) / 1e3
            row |= {"launches": len(network.steps)} | comparison(network)
            ms = None if row["wrong_codes"] else statistics.median(replay_ms(network.launched.replay) for _ in range(ROUNDS))
            yield _row(row, ms, conv_lite.BATCH, limit, wrong_codes_error(row))
            if scheme == schemes[0]:
                say(f"layers of EfficientNet-lite0 {scheme}")
                layers += layer_rows(network, {"storage": scheme, "fusion": "all"} | known)
            del network
        except failures() as error:
            yield _row(row, None, conv_lite.BATCH, None, reason(error))
        torch.cuda.empty_cache()
    del model, found
    torch.cuda.empty_cache()
    yield from rival_rows(known, rivals, rival_seconds, say)


def rival_rows(
    known: dict[str, Any], rivals: Sequence[str], rival_seconds: float, say: ProgressCallback
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields a row per rival of EfficientNet-lite0, with `known`; one that does not end in time has the reason in `error`."""
    for rival in (name for name in conv_lite.RIVALS if name in rivals):
        row = {"impl": rival, "storage": "fp16", "fusion": conv_lite.RIVALS[rival].fusion} | known
        name = f"EfficientNet-lite0 fp16 by {rival}"
        say(name)
        try:
            setup_s, ms = in_process(rival_time, (rival,), rival_seconds, name, say)
            yield _row(row | {"setup_s": setup_s}, ms, conv_lite.BATCH, None)
        except (TimeoutError, RuntimeError) as error:
            yield _row(row, None, conv_lite.BATCH, None, reason(error))


def rival_time(name: str, say: ProgressCallback) -> tuple[float, float]:
    """Returns the seconds to the first result of a rival of EfficientNet-lite0, and its milliseconds for a batch."""
    rival = conv_lite.RIVALS[name]
    with torch.no_grad():
        start = time.monotonic()
        call = rival.network(conv_lite.lite0()[0], say)
        call()
        torch.cuda.synchronize()
        setup_s = time.monotonic() - start
        say(f"first result after {setup_s:.0f} s")
        replay = graph_of(call).replay if rival.captured else call
        warm_up()
        return setup_s, statistics.median(replay_ms(replay) for _ in range(ROUNDS))


def _replays(batch: int) -> int:
    return REPLAYS if batch <= 512 else REPLAYS // 4


def _row(row: dict[str, Any], ms: float | None, batch: int, limit: float | None, error: str | None = None) -> dict[str, Any]:
    return row | {"ms": ms, "images_s": None if ms is None else 1e3 * batch / ms, "limit_ms": limit, "error": error}


@dataclass(frozen=True)
class ConvRequest:
    """What to measure. `storages`, `batches` and `fusions` are of ResNet-50, `schemes` of EfficientNet-lite0, whose rivals
    have `rival_seconds` each."""

    models: Sequence[str] = MODELS
    storages: Sequence[str] = ("u4", "s8")
    batches: Sequence[int] = BATCHES
    fusions: Sequence[str] = FUSIONS
    schemes: Sequence[str] = conv_lite.SCHEMES
    rivals: Sequence[str] = ("cudnn",)
    rival_seconds: float = RIVAL_SECONDS


def run(request: ConvRequest, path: Path | None, say: ProgressCallback) -> tuple[Path, dict[str, Any]]:
    """Checks, measures and writes the result file after every row: EfficientNet-lite0 first, which is fast. Returns its path
    and document.

    Raises ValueError without a GPU of sm_90, and RuntimeError at the end if codes of a row differ from the reference.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise ValueError("bench conv measures an H100 or H200 (sm_90); torch sees none")
    today = datetime.date.today()
    described = machine()
    if path is None:
        gemm = default_path(described["gpu"], today)
        path = gemm.with_name(gemm.name.replace("-gemm", "-conv"))
    document: dict[str, Any] = {
        "result": CONV, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": described,
        "versions": {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}, "protocol": PROTOCOL,
        "rows": [], "layers": [],
    }  # fmt: skip
    rows = document["rows"]

    def write() -> None:
        write_json(path, document)

    check_file(path, CONV)
    warm_up()
    if conv_lite.MODEL in request.models:
        for row in lite_rows(request.schemes, request.rivals, request.rival_seconds, document["layers"], say):
            rows.append(row)
            write()
    if RESNET in request.models:
        rows.append(PUBLISHED | {"model": RESNET, "ms": None, "limit_ms": None, "error": None})
        rivals = [name for name in request.rivals if name in RIVALS]
        for row in measured(request.storages, request.batches, request.fusions, rivals, say):
            rows.append(row)
            write()
        for storage in request.storages if LAYER_BATCH in request.batches else ():
            say(f"layers of {storage}")
            known = {"model": RESNET, "storage": storage, "fusion": request.fusions[-1], "batch": LAYER_BATCH}
            document["layers"] += layer_rows(Network(storage, LAYER_BATCH, request.fusions[-1]), known)
            write()
    document["complete"] = True
    write()
    if wrong := [row for row in rows if row.get("wrong_codes")]:
        names = ", ".join(f"{row['model']} {row['storage']} {row['fusion']}" for row in wrong)
        raise RuntimeError(f"codes differ from the integer reference: {names}; see wrong_codes in {path}")
    return path, document
