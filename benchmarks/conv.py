"""`python -m benchmarks conv`: ResNet-50 and EfficientNet-lite0, 224 x 224, packed images to logits, in INT4 and INT8, and
16-bit rivals.

Each row is one CUDA graph. Before timing, all codes and logits are compared with the integer reference, bit for bit.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import conv_lite
from benchmarks.conv_network import KernelWork, LaunchedNetwork, Network
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
CHECKED_IMAGES = 2
LAYER_BATCH = 128

PROTOCOL = (
    f"Time of one CUDA graph from packed int8 images in GPU memory to logits, median of {REPLAYS} replays (a quarter "
    "beyond 512 images) timed with events after 3 untimed ones, after matrix products that warm the machine. The network is "
    "a module of torch with random weights, quantized (w8a4, w8a8) and run by lowbit.vision as any other. Before timing, all "
    f"codes of all values and the logits of {CHECKED_IMAGES} images are compared with the integer reference: all must be "
    "equal. Without a fusion its ReLUs and sums are kernels of their own, on codes: values before a ReLU have 8 bits. limit_ms "
    "is the sum over the network's kernels of the larger of two times: bytes of inputs, weights and output at the data "
    "sheet's bandwidth, operations at its int8 rate. A layer's time is that of its kernel alone, repeated in a graph on the "
    "network's own buffers, so that small layers find their input in the L2. Rows of impl 'published' were measured by "
    "others: MLPerf Inference v4.1, ResNet-50 Offline, TensorRT INT8, 8 x H200, 756,960 images/s at batch 2048, an eighth of "
    "it per GPU. fp16, this run, channels-last, one CUDA graph each: cuDNN's fused convolution + bias + ReLU and convolution "
    "+ add + ReLU; torch.compile of the module in its default mode with freezing, captured as all others. EfficientNet-lite0: "
    f"batch {conv_lite.BATCH}, codes of {conv_lite.CHECKED_IMAGES} images compared, storage is the scheme, weights as the row "
    "says; fp16 by cuDNN is the module as it is, in one CUDA graph."
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


def layer_rows(storage: str, fusion: str, batch: int) -> Iterator[dict[str, Any]]:
    """Returns one row per kernel of the network: microseconds, limit, what sets it, operations and bytes."""
    network = Network(storage, batch, fusion)
    network.launched.launch()
    for step in network.steps:
        graph = graph_of(lambda step=step: [step.call() for _ in range(4)])  # type: ignore[misc]
        limit, bound = step_limit_us(step)
        yield {
            "storage": storage, "fusion": fusion, "batch": batch, "layer": step.name,
            "us": 1e3 * replay_ms(graph.replay, 8) / 4, "limit_us": limit, "bound": bound, "operations": step.operations,
            "bytes": step.moved_bytes,
        }  # fmt: skip


def measured(
    storages: Sequence[str], batches: Sequence[int], fusions: Sequence[str], rivals: Sequence[str], say: ProgressCallback
) -> Iterator[dict[str, Any]]:
    """Yields rows of this library and of `rivals`; a failed one has its reason in `error`."""
    for batch in batches:
        for storage in storages:
            for fusion in fusions if batch == LAYER_BATCH else fusions[-1:]:
                say(f"ResNet-50 {storage} {fusion}, batch {batch}")
                row = {"impl": "lowbit", "model": RESNET, "storage": storage, "fusion": fusion, "batch": batch}
                try:
                    network = Network(storage, batch, fusion)
                    limit = sum(step_limit_us(step)[0] for step in network.steps) / 1e3
                    yield _row(row, replay_ms(network.launched.replay, _replays(batch)), batch, limit)
                    del network
                except failures() as error:
                    yield _row(row, None, batch, None, reason(error))
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


def lite_rows(rivals: Sequence[str], checked: list[dict[str, Any]], say: ProgressCallback) -> Iterator[dict[str, Any]]:
    """Yields rows of EfficientNet-lite0: this library's first, then those of `rivals`, the slowest to compile last. Adds the
    comparison of codes to `checked`; raises RuntimeError if any is wrong."""
    model, weights = conv_lite.lite0()
    say(f"EfficientNet-lite0, {weights} weights: tracing")
    found = conv_lite.programs(model.cuda())
    count = conv_lite.compile_kernels(found)
    say(f"{count} kernels compiled")
    known = {"model": conv_lite.MODEL, "batch": conv_lite.BATCH, "weights": weights}
    for scheme, program in found.items():
        network, images = LaunchedNetwork(program, conv_lite.BATCH), conv_lite.CHECKED_IMAGES
        wrong = network.wrong_values(images)
        checked.append({"model": conv_lite.MODEL, "storage": scheme, "fusion": "all", "images": images, "wrong_codes": wrong})
        if wrong:
            raise RuntimeError(f"{wrong} codes and logits of {conv_lite.MODEL}, {scheme} differ from the integer reference")
        say(f"EfficientNet-lite0 {scheme}, batch {conv_lite.BATCH}")
        limit = sum(step_limit_us(step)[0] for step in network.steps) / 1e3
        row = {"impl": "lowbit", "storage": scheme, "fusion": "all"} | known
        yield _row(row, replay_ms(network.launched.replay), conv_lite.BATCH, limit)
        del network
        torch.cuda.empty_cache()
    for rival in (name for name in conv_lite.RIVALS if name in rivals):
        say(f"EfficientNet-lite0 fp16 by {rival}, batch {conv_lite.BATCH}")
        make, fusion = conv_lite.RIVALS[rival]
        row = {"impl": rival, "storage": "fp16", "fusion": fusion} | known
        try:
            with torch.inference_mode():
                graph = graph_of(make(model))
                yield _row(row, replay_ms(graph.replay), conv_lite.BATCH, None)
                del graph
        except failures() as error:
            yield _row(row, None, conv_lite.BATCH, None, reason(error))
        torch.cuda.empty_cache()


def _replays(batch: int) -> int:
    return REPLAYS if batch <= 512 else REPLAYS // 4


def _row(row: dict[str, Any], ms: float | None, batch: int, limit: float | None, error: str | None = None) -> dict[str, Any]:
    return row | {"ms": ms, "images_s": None if ms is None else 1e3 * batch / ms, "limit_ms": limit, "error": error}


def run(
    models: Sequence[str], storages: Sequence[str], batches: Sequence[int], fusions: Sequence[str], rivals: Sequence[str],
    path: Path | None, say: ProgressCallback,
) -> tuple[Path, dict[str, Any]]:  # fmt: skip
    """Checks, measures and writes the result file after every row: EfficientNet-lite0 first, which is fast. Returns its path
    and document.

    Raises ValueError without a GPU of sm_90, and RuntimeError if codes differ from the reference.
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
        "checked": [], "rows": [], "layers": [],
    }  # fmt: skip

    def write() -> None:
        write_json(path, document)

    check_file(path, CONV)
    warm_up()
    if conv_lite.MODEL in models:
        for row in lite_rows(rivals, document["checked"], say):
            document["rows"].append(row)
            write()
    storages = storages if RESNET in models else ()
    for storage in storages:
        for fusion in fusions:
            wrong = Network(storage, CHECKED_IMAGES, fusion).wrong_values()
            document["checked"].append({"storage": storage, "fusion": fusion, "images": CHECKED_IMAGES, "wrong_codes": wrong})
            if wrong:
                raise RuntimeError(f"{wrong} codes and logits of {storage}, {fusion} differ from the integer reference")
    if storages:
        document["rows"].append(PUBLISHED | {"model": RESNET, "ms": None, "limit_ms": None, "error": None})
    for storage in storages:
        say(f"layers of {storage}")
        document["layers"] += layer_rows(storage, fusions[-1], LAYER_BATCH)
        write()
    for row in measured(storages, batches, fusions, rivals, say) if storages else ():
        document["rows"].append(row)
        write()
    document["complete"] = True
    write()
    return path, document
