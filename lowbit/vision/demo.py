"""The vision demo trains a small ResNet on Fashion-MNIST, quantizes it in several ways and measures its accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import ResNetForImageClassification

from lowbit.checkpoint.lock import Lock
from lowbit.checkpoint.target import locked_scratch
from lowbit.formats.conv import CODES, weight_storage
from lowbit.vision import fashion
from lowbit.vision.finetune import FineTune
from lowbit.vision.network import QuantizedNetwork, quantize
from lowbit.vision.saved import save
from lowbit.vision.sensitivity import divergence

EPOCHS = 5
CALIBRATION_IMAGES = 512
TUNING = FineTune(epochs=2, rate=2e-4)
TUNING_IMAGES = 8192
BATCH = 500
SCHEMES: tuple[tuple[str, bool], ...] = (("w8a8", False), ("w8a4", False), ("w4a4", False), ("w4a4", True))
"""Measured configurations: scheme, and whether quantization-aware fine-tuning follows."""


@dataclass(frozen=True)
class AccuracyRow:
    """Results of one network: top-1 accuracy and agreement with the fp32 network in percent, mean KL divergence from it in
    nats, weight bytes."""

    scheme: str
    fine_tuned: bool
    top1: float
    same: float
    divergence: float
    weight_bytes: int
    seconds: float


def run(
    data: Path, out: Path, say: Callable[[str], None], *, epochs: int = EPOCHS, device: torch.device | str = "cpu"
) -> list[AccuracyRow]:
    """Trains the network unless `out` contains it, quantizes it and measures it. The first row is the fp32 network.

    Networks are saved to folders below `out`. Raises CheckpointError if another demo is writing there.
    """
    with Lock(out / "demo"):
        return _run(data, out, say, epochs, device)


def _run(data: Path, out: Path, say: Callable[[str], None], epochs: int, device: torch.device | str) -> list[AccuracyRow]:
    training, test = fashion.load(data)
    start = time.perf_counter()
    model = trained(out / "fashion-resnet", training.to(device), epochs, say).to(device).eval()
    wanted = answers(lambda x: model(x).logits, test, device)
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    rows = [AccuracyRow("fp32", False, top1(wanted, test), 100.0, 0.0, 4 * weights, time.perf_counter() - start)]
    say(f"fp32: {rows[0].top1:.2f} % of {len(test):,} test images")
    for scheme, tuned in SCHEMES:
        start = time.perf_counter()
        images = training.normalized(slice(TUNING_IMAGES if tuned else CALIBRATION_IMAGES))
        network = quantize(model, images.split(128), scheme, fine_tuning=TUNING if tuned else None, say=say)
        got = answers(network, test, device)
        name = f"fashion-{scheme}{'-tuned' * tuned}"
        save(network, out / name, overwrite=True, say=say)
        same = 100 * float((got.argmax(1) == wanted.argmax(1)).float().mean())
        seconds = time.perf_counter() - start
        rows.append(AccuracyRow(scheme, tuned, top1(got, test), same, divergence(wanted, got), weight_bytes(network), seconds))
        say(f"{name}: {rows[-1].top1:.2f} %")
    return rows


def trained(folder: Path, images: fashion.Images, epochs: int, say: Callable[[str], None]) -> ResNetForImageClassification:
    """Loads the network in `folder`, or trains a new one on `images` and saves it there."""
    if (folder / "config.json").is_file():
        say(f"taking the trained network in {folder}")
        return ResNetForImageClassification.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    say(f"training a ResNet of 2.8 million weights on {len(images):,} images, {epochs} epochs")
    torch.manual_seed(0)
    model = fashion.network().to(images.pixels.device)
    fashion.train(model, images, epochs, say)
    with locked_scratch(folder, say) as scratch:
        model.save_pretrained(scratch)
        scratch.replace(folder)
    return model


def answers(network: Callable[[Tensor], Tensor], images: fashion.Images, device: torch.device | str) -> Tensor:
    """Returns the logits [N, 10] for images, on the CPU."""
    parts = (images.normalized(slice(i, i + BATCH)) for i in range(0, len(images), BATCH))
    with torch.no_grad():
        return torch.cat([network(part.to(device)).float().cpu() for part in parts])


def top1(logits: Tensor, images: fashion.Images) -> float:
    """Returns the top-1 accuracy in percent."""
    return 100 * float((logits.argmax(1) == images.labels).float().mean())


def weight_bytes(network: QuantizedNetwork) -> int:
    """Returns the bytes of all quantized weights, without scales."""
    return sum(codes.numel() * CODES[weight_storage(codes)].bits // 8 for codes in network.program.weights)


def table(rows: list[AccuracyRow]) -> Table:
    """Returns the rows as a table for a terminal."""
    printed = Table("network", "top-1", "as fp32", "divergence", "weight bytes", "seconds", box=None, padding=(0, 2, 0, 0))
    for r in rows:
        printed.add_row(
            r.scheme + ", fine-tuned" * r.fine_tuned, f"{r.top1:.2f} %", f"{r.same:.2f} %", f"{r.divergence:.4f}",
            f"{r.weight_bytes:,}", f"{r.seconds:.1f}",
        )  # fmt: skip
    return printed


def as_json(rows: list[AccuracyRow]) -> dict[str, Any]:
    """Returns `{"rows": [...]}` with data set, network and device."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "data": "Fashion-MNIST, 10,000 test images",
        "network": "Transformers ResNet, basic blocks, 64-128-256 channels",
        "device": device,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
