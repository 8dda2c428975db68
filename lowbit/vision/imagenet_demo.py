"""The ImageNet demo quantizes a trained EfficientNet-lite in several ways and measures it on 20 labelled photographs.

Every figure is held out: the photographs are split in two halves, a network is calibrated on one half and answers for the
other, and both halves count. 20 photographs are few, so each figure has its standard error.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import Tensor

from lowbit.checkpoint.lock import Lock
from lowbit.formats.conv import weight_storage
from lowbit.vision import imagenet
from lowbit.vision.demo import weight_bytes
from lowbit.vision.evaluate import Figure, figure
from lowbit.vision.network import QuantizedNetwork, quantize
from lowbit.vision.observe import observe
from lowbit.vision.saved import save
from lowbit.vision.sensitivity import choose_int8
from lowbit.vision.trace import trace

FOLDS = 2
CONFIGURATIONS: tuple[tuple[str, float | None], ...] = (
    ("w8a8", None), ("w8a4", None), ("w4a8", None), ("w4a4", None), ("w4a8", 0.02), ("w4a8", 0.04)
)  # fmt: skip
"""Measured configurations: scheme, and for mixed bits the divergence in nats up to which layers have 4 bits."""


@dataclass(frozen=True)
class ImageNetRow:
    """Results of one configuration on all photographs, each answered by a network that was calibrated without it.

    bound: the divergence in nats up to which layers have 4 bits, None if all have.
    top1, top5, same: percent of right answers, of right answers among the first five, and of answers as in fp32. cosine: of the
    logits with those of fp32. `int8_layers` of `layers` have 8-bit weights and `four_bits` percent of the weights 4, on average
    over the halves.
    """

    scheme: str
    bound: float | None
    top1: Figure
    top5: Figure
    same: Figure
    cosine: Figure
    int8_layers: float
    layers: int
    four_bits: float
    weight_bytes: int
    seconds: float


def run(
    data: Path, out: Path, say: Callable[[str], None], *, device: torch.device | str = "cpu",
    configurations: Sequence[tuple[str, float | None]] = CONFIGURATIONS, name: str = "lite0",
) -> list[ImageNetRow]:  # fmt: skip
    """Quantizes the network `name` of `imagenet.VARIANTS` in `data`, a folder of `imagenet.bring_data`, and measures it. The
    first row is the fp32 network.

    The networks that were calibrated on the first half are saved to folders below `out`. Raises CheckpointError if another demo
    is writing there.
    """
    with Lock(out / "demo"):
        return _run(data, out, say, device, configurations, name)


def _run(
    data: Path, out: Path, say: Callable[[str], None], device: torch.device | str,
    configurations: Sequence[tuple[str, float | None]], variant: str,
) -> list[ImageNetRow]:  # fmt: skip
    model = imagenet.load_network(data, variant).to(device)
    photographs = imagenet.load_photographs(data, variant)
    start = time.perf_counter()
    with torch.no_grad():
        wanted = model(photographs.images.to(device)).cpu()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    rows = [_row("fp32", None, wanted, wanted, photographs.labels, (0.0, 0, 0.0, 4 * weights), time.perf_counter() - start)]
    say(f"fp32: top-1 {rows[0].top1} % of {len(photographs.labels)} photographs")
    for scheme, bound in configurations:
        start, got = time.perf_counter(), torch.zeros_like(wanted)
        networks = []
        for fold in range(FOLDS):
            seen = torch.arange(len(wanted)) % FOLDS == fold
            networks.append(quantized(model, photographs, seen, scheme, bound, device))
            got[~seen] = networks[fold](photographs.images[~seen].to(device)).cpu()
        name = f"imagenet-{variant}-{scheme}{'' if bound is None else f'-mixed-{bound:g}'}".replace("-lite0", "")
        save(networks[0], out / name, overwrite=True, say=say)
        int8 = [sum(row.weight_bits == 8 for row in network.rows()) for network in networks]
        four = sum(map(four_bits, networks)) / FOLDS
        sizes = sum(int8) / FOLDS, len(networks[0].program.layers), four, max(map(weight_bytes, networks))
        seconds = time.perf_counter() - start
        rows.append(_row(scheme, bound, wanted, got, photographs.labels, sizes, seconds))
        say(f"{name}: top-1 {rows[-1].top1} %, cosine of logits {rows[-1].cosine}")
    return rows


def quantized(
    model: torch.nn.Module, photographs: imagenet.Photographs, seen: Tensor, scheme: str, bound: float | None,
    device: torch.device | str,
) -> QuantizedNetwork:  # fmt: skip
    """Returns the network calibrated on the photographs where `seen` [N] is true.

    `bound`: the divergence in nats up to which the least sensitive layers have the bits of `scheme`, the others 8; None gives
    all layers these bits.
    """
    views = photographs.views[seen].flatten(0, 1).to(device)
    keep: tuple[str, ...] = ()
    if bound is not None:
        graph = trace(model, views)
        centres = photographs.images[seen].to(device)
        keep = choose_int8(graph, observe(graph, [views]), scheme, [centres], bound, rounding=[views]).keep_int8
    return quantize(model, [views], scheme, keep_int8=keep, compensation=scheme != "w8a8")


def _row(
    scheme: str, bound: float | None, wanted: Tensor, got: Tensor, labels: Tensor, sizes: tuple[float, int, float, int],
    seconds: float,
) -> ImageNetRow:  # fmt: skip
    first = got.argmax(1)
    return ImageNetRow(
        scheme, bound, figure(100.0 * (first == labels)),
        figure(100.0 * (got.topk(5).indices == labels[:, None]).any(1)),
        figure(100.0 * (first == wanted.argmax(1))), figure(functional.cosine_similarity(got, wanted, 1)), *sizes, seconds,
    )  # fmt: skip


def four_bits(network: QuantizedNetwork) -> float:
    """Returns the percentage of weights in 4 bits."""
    weights = network.program.weights
    return 100.0 * sum(w.numel() for w in weights if weight_storage(w) == "s4") / sum(w.numel() for w in weights)


def table(rows: list[ImageNetRow]) -> Table:
    """Returns the rows as a table for a terminal."""
    names = (
        "network",
        "top-1, %",
        "top-5, %",
        "as fp32, %",
        "cosine of logits",
        "int8 layers",
        "in 4 bits, %",
        "bytes",
        "seconds",
    )
    printed = Table(*names, box=None, padding=(0, 2, 0, 0))
    for r in rows:
        int8 = f"{r.int8_layers:g} of {r.layers}" if r.layers else ""
        name = r.scheme if r.bound is None else f"{r.scheme}, {r.bound:g} nats"
        printed.add_row(
            name, *map(str, (r.top1, r.top5, r.same, r.cosine)), int8, f"{r.four_bits:.1f}", f"{r.weight_bytes:,}",
            f"{r.seconds:.1f}",
        )  # fmt: skip
    return printed


def as_json(rows: list[ImageNetRow], name: str = "lite0") -> dict[str, Any]:
    """Returns `{"rows": [...]}` with date, data set, network and device."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "data": f"{imagenet.COUNT} photographs of {imagenet.PHOTOGRAPHS.requirement}, halves calibrate for each other",
        "network": f"EfficientNet-{name} of {imagenet.VARIANTS[name].wheel.requirement}, trained on ImageNet-1k",
        "device": device,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
