"""`lowbit bench conv`: ResNet-50, 224 x 224, packed images to logits, in INT4 and INT8 against 16-bit rivals.

Everything of a row is one CUDA graph. Codes of the last block are compared with the integer reference, bit for bit, before
anything is timed.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.bench.conv_network import FUSIONS, Network, Step
from lowbit.bench.protocol import failures, reason, warm_up
from lowbit.bench.resnet50 import IMAGE, STEM, Layer, blocks
from lowbit.bench.results import default_path, machine
from lowbit.eval.results import write_whole
from lowbit.hardware.device import device_for
from lowbit.kernels.conv_reference import conv_reference, max_pool_reference
from lowbit.pack.nhwc64 import CODE_BITS, ActivationStorage, Nhwc64

SCHEMA = 1
BATCHES = (1, 8, 32, 128, 256, 2048)
REPLAYS = 40
CHECKED_IMAGES = 2
LAYER_BATCH = 128

PROTOCOL = (
    f"Time of one CUDA graph from packed int8 images in GPU memory to fp16 logits, median of {REPLAYS} replays (a quarter "
    "beyond 512 images) timed with events after 3 untimed ones, after matrix products that warm the machine. Weights are "
    "random, codes spread over their range. Before timing, the codes of the last block are compared with the integer "
    f"reference for {CHECKED_IMAGES} images: all must be equal. limit_ms is the sum over the network's kernels of the larger "
    "of two times: bytes of input, residual, weights and output at the data sheet's bandwidth, operations at its int8 rate. "
    "A layer's time is that of its kernel alone, repeated in a graph on the network's own buffers, so that small layers find "
    "their input in the L2. Rows of impl 'published' were measured by others: MLPerf Inference v4.1, ResNet-50 Offline, "
    "TensorRT INT8, 8 x H200, 756,960 images/s at batch 2048, an eighth of it per GPU. fp16: cuDNN's fused convolution + bias "
    "+ ReLU and convolution + add + ReLU in channels-last, one CUDA graph, this run."
)

PUBLISHED = {"impl": "published", "storage": "int8", "fusion": "TensorRT, MLPerf v4.1", "batch": 2048, "images_s": 94620.0}

Watch = Callable[[str], None]


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call captured, after two calls that compile what is compiled at first use."""
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


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int = REPLAYS) -> float:
    """Median milliseconds of a replay."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(3):
        graph.replay()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def reference_codes(network: Network, images: Tensor) -> Tensor:
    """Codes of the last block by the reference, of int8 codes of images [N, 3, 224, 224]; for the fused network."""
    layers = network.layers
    x = max_pool_reference(conv_reference(images.int(), layers["stem"]), (3, 3), (2, 2), (1, 1))
    for block in blocks():
        y = conv_reference(conv_reference(x, layers[block.first.name]), layers[block.second.name])
        third = layers[block.third.name]
        if third.second is not None:
            x = conv_reference(y, third, None, x)
        else:
            x = conv_reference(y, third, x if block.shortcut is None else conv_reference(x, layers[block.shortcut.name]))
    return x


def wrong_codes(storage: ActivationStorage, fusion: str) -> int:
    """How many codes of the last block differ from the reference's."""
    network = Network(storage, CHECKED_IMAGES, fusion)
    images = torch.randint(-128, 128, (CHECKED_IMAGES, 3, IMAGE, IMAGE), dtype=torch.int8, device="cuda")
    assert network.stem.images is not None
    network.image.copy_(network.stem.images.pack(images))
    network.run()
    codes = Nhwc64(storage).unpack(network.last, blocks()[-1].third.outputs)
    return int((codes != reference_codes(network, images)).sum())


def work_of(step: Step, batch: int, bits: int) -> tuple[float, float]:
    """Bytes moved and operations of a convolution, with its shortcut or its pool inside."""
    layer = step.layer
    assert layer is not None
    moved, work = layer.moved_bytes(batch, bits), layer.operations(batch)
    if step.pooled:  # a quarter of the pixels is written
        moved -= 0.75 * layer.written(batch) * bits / 8
    if step.shortcut is not None:
        moved += step.shortcut.read(batch) * bits / 8 + step.shortcut.weights() - layer.written(batch) * bits / 8
        work += step.shortcut.operations(batch)
    return moved, work


def step_limit_us(step: Step, batch: int, bits: int) -> tuple[float, str]:
    """Least microseconds of a convolution on the current GPU, and what sets them."""
    major, minor = torch.cuda.get_device_capability()
    device = device_for(10 * major + minor)
    moved, work = work_of(step, batch, bits)
    memory, compute = 1e6 * moved / device.bandwidth_bytes, 1e6 * work / (device.peak_int8 or float("inf"))
    return max(memory, compute), "memory" if memory > compute else "tensor cores"


def network_limit_ms(network: Network) -> float:
    """Sum of the limits of the convolutions, and of the bytes of a max-pool apart."""
    bits = CODE_BITS[network.storage]
    total = sum(step_limit_us(step, network.batch, bits)[0] for step in network.steps if step.layer is not None)
    if not any(step.pooled for step in network.steps):
        total += 1e6 * 1.25 * STEM.written(network.batch) * bits / 8 / device_for(90).bandwidth_bytes
    return total / 1e3


def layer_rows(storage: ActivationStorage, fusion: str, batch: int) -> Iterator[dict[str, Any]]:
    """One row per kernel of the network: microseconds, limit, what sets it, operations and bytes."""
    network = Network(storage, batch, fusion)
    network.image.random_()
    network.run()
    bits = CODE_BITS[storage]
    for step in network.steps:
        us = 1e3 * replay_ms(graph_of(lambda step=step: [step.call() for _ in range(4)]), 8) / 4  # type: ignore[misc]
        row: dict[str, Any] = {"storage": storage, "fusion": fusion, "batch": batch, "layer": step.name, "us": us}
        yield row | _limits(step, batch, bits)


def _limits(step: Step, batch: int, bits: int) -> dict[str, Any]:
    if step.layer is None:
        return {"limit_us": None, "bound": None, "operations": 0.0, "bytes": None}
    limit, bound = step_limit_us(step, batch, bits)
    moved, work = work_of(step, batch, bits)
    return {"limit_us": limit, "bound": bound, "operations": work, "bytes": moved}


def cudnn_network(batch: int) -> Callable[[], object]:
    """The network in fp16 by cuDNN's fused convolutions, channels-last; random weights, batch-norm folded away."""
    half = {"device": "cuda", "dtype": torch.float16}

    def image(channels: int, size: int) -> Tensor:
        return torch.randn(batch, channels, size, size, **half).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def weights(layer: Layer) -> tuple[Tensor, Tensor]:
        shape = (layer.outputs, 4 if layer.channels == 3 else layer.channels, layer.kernel, layer.kernel)
        scale = (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        w = (scale * torch.randn(shape, **half)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return w, torch.zeros(layer.outputs, **half)  # type: ignore[call-overload]

    x0, stem = image(4, IMAGE), weights(STEM)
    held = [
        (b, weights(b.first), weights(b.second), weights(b.third), weights(b.shortcut) if b.shortcut else None)
        for b in blocks()
    ]
    classifier = torch.randn(1000, blocks()[-1].third.outputs, **half)  # type: ignore[call-overload]

    def run() -> Tensor:
        relu, add = torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu
        x = relu(x0, *stem, (2, 2), (3, 3), (1, 1), 1)
        x = torch.nn.functional.max_pool2d(x, 3, 2, 1)
        for block, first, second, third, shortcut in held:
            z, stride = x, (block.second.stride, block.second.stride)
            y = relu(x, *first, (1, 1), (0, 0), (1, 1), 1)
            y = relu(y, *second, stride, (1, 1), (1, 1), 1)
            if shortcut is not None:
                z = torch.nn.functional.conv2d(x, *shortcut, stride=stride)
            x = add(y, third[0], z, 1.0, third[1], (1, 1), (0, 0), (1, 1), 1)
        return x.mean((2, 3)) @ classifier.t()

    return run


def measured(
    storages: Sequence[ActivationStorage], batches: Sequence[int], fusions: Sequence[str], rivals: bool, say: Watch
) -> Iterator[dict[str, Any]]:
    """Rows of this library and, with `rivals`, of cuDNN in fp16; one that fails carries its reason in `error`."""
    for batch in batches:
        for storage in storages:
            for fusion in fusions if batch == LAYER_BATCH else fusions[-1:]:
                say(f"ResNet-50 {storage} {fusion}, batch {batch}")
                row = {"impl": "lowbit", "model": "resnet50", "storage": storage, "fusion": fusion, "batch": batch}
                try:
                    network = Network(storage, batch, fusion)
                    network.image.random_()
                    yield _row(row, replay_ms(graph_of(network.run), _replays(batch)), batch, network_limit_ms(network))
                    del network
                except failures() as error:
                    yield _row(row, None, batch, None, reason(error))
                torch.cuda.empty_cache()
        if rivals:
            row = {"impl": "cudnn", "model": "resnet50", "storage": "fp16", "fusion": "add", "batch": batch}
            torch.backends.cudnn.benchmark = True
            try:
                with torch.inference_mode():
                    yield _row(row, replay_ms(graph_of(cudnn_network(batch)), _replays(batch)), batch, None)
            except failures() as error:
                yield _row(row, None, batch, None, reason(error))
            torch.cuda.empty_cache()


def _replays(batch: int) -> int:
    return REPLAYS if batch <= 512 else REPLAYS // 4


def _row(row: dict[str, Any], ms: float | None, batch: int, limit: float | None, error: str | None = None) -> dict[str, Any]:
    return row | {"ms": ms, "images_s": None if ms is None else 1e3 * batch / ms, "limit_ms": limit, "error": error}


def run(
    storages: Sequence[ActivationStorage], batches: Sequence[int], fusions: Sequence[str], rivals: bool, path: Path | None,
    say: Watch,
) -> tuple[Path, dict[str, Any]]:  # fmt: skip
    """Checks, measures and writes the result file, which is complete after every row; returns its path and document.

    Raises ValueError without a GPU of sm_90 and RuntimeError when codes differ from the reference's.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise ValueError("bench conv measures an H100 or H200 (sm_90); torch sees none")
    today = datetime.date.today()
    described = machine()
    if path is None:
        gemm = default_path(described["gpu"], today)
        path = gemm.with_name(gemm.name.replace("-gemm", "-conv"))
    document: dict[str, Any] = {
        "schema": SCHEMA, "benchmark": "conv", "date": today.isoformat(), "complete": False, "machine": described,
        "versions": {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}, "protocol": PROTOCOL,
        "checked": [], "rows": [], "layers": [],
    }  # fmt: skip

    def write() -> None:
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        write_whole(path, lambda scratch: scratch.write_text(text))

    warm_up()
    for storage in storages:
        for fusion in (f for f in fusions if f in FUSIONS[2:]):
            wrong = wrong_codes(storage, fusion)
            document["checked"].append({"storage": storage, "fusion": fusion, "images": CHECKED_IMAGES, "wrong_codes": wrong})
            if wrong:
                raise RuntimeError(f"{wrong} codes of {storage}, {fusion} differ from the integer reference")
    document["rows"].append(PUBLISHED | {"model": "resnet50", "ms": None, "limit_ms": None, "error": None})
    for storage in storages:
        say(f"layers of {storage}")
        document["layers"] += layer_rows(storage, fusions[-1], LAYER_BATCH)
        write()
    for row in measured(storages, batches, fusions, rivals, say):
        document["rows"].append(row)
        write()
    document["complete"] = True
    write()
    return path, document
