"""Data and network of the vision demo: Fashion-MNIST from a Debian package, and a small ResNet.

Fashion-MNIST (Xiao, Rasul and Vollgraf, arXiv:1708.07747; MIT license) has 60,000 training and 10,000 test images, gray, 28 x
28 pixels, in ten classes. The network is a Transformers ResNet with basic blocks; its channels are multiples of 64.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification

from lowbit.checkpoint.target import locked_scratch

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the installed Debian or Ubuntu package."""

FILES = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""The four files and the SHA-256 of each, unpacked."""

MEAN, DEVIATION = 0.2860, 0.3530
"""Mean and standard deviation of the training pixels, scaled to 0 to 1."""
SMOOTHING = 0.05


class DataError(ValueError):
    """The images are not available; the message says why and what to do."""


@dataclass(frozen=True, eq=False)
class Images:
    """Gray images uint8 [N, 1, 28, 28] and their classes int64 [N]."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def normalized(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Returns the normalized float32 images, the network's input."""
        return normalize(self.pixels[index])

    def to(self, device: torch.device | str) -> Images:
        """Returns the same images on `device`."""
        return Images(self.pixels.to(device), self.labels.to(device))


def normalize(pixels: Tensor) -> Tensor:
    """Converts uint8 pixels to float32 with mean 0 and variance 1 over the training images."""
    return (pixels.float() / 255 - MEAN) / DEVIATION


def bring_data(cache: Path, say: Callable[[str], None], folder: Path | None = None) -> Path:
    """Returns the folder with the four files: `folder`, the installed package, or `cache`. The first call downloads 31 MB
    with apt-get, without root. Raises DataError if they are not available."""
    for place in (folder,) if folder is not None else (INSTALLED, cache):
        if all((place / name).is_file() for name in FILES):
            return place
    if folder is not None:
        raise DataError(f"{folder}: should hold the four files of Fashion-MNIST: {', '.join(FILES)}")
    with locked_scratch(cache, say) as work:
        if all((cache / name).is_file() for name in FILES):  # another demo has downloaded them in the meantime
            return cache
        say(f"downloading {PACKAGE} (31 MB) with apt-get")
        _command(["apt-get", "download", PACKAGE], work)
        packages = list(work.glob(f"{PACKAGE}_*.deb"))
        _command(["dpkg-deb", "--extract", str(packages[0]), str(work / "tree")], work)
        os.replace(work / "tree" / INSTALLED.relative_to("/"), cache)
    return cache


def _command(command: list[str], work: Path) -> None:
    by_hand = (
        f"copy {', '.join(FILES)} to a folder (they are in data/fashion of github.com/zalandoresearch/fashion-mnist, and in "
        "FashionMNIST/raw of torchvision's data) and run: lowbit demo --vision --data FOLDER"
    )
    if shutil.which(command[0]) is None:
        raise DataError(f"the images come as Debian's package {PACKAGE}, and this machine has no {command[0]}: {by_hand}")
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"{' '.join(command)} failed ({last[0]}): run apt-get update and try again, or {by_hand}")


def load(folder: Path) -> tuple[Images, Images]:
    """Returns (training images, test images). Raises DataError for a damaged file."""
    return tuple(
        Images(_read(folder, f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28),
               _read(folder, f"{part}-labels-idx1-ubyte.gz", 8).long())
        for part in ("train", "t10k")
    )  # type: ignore[return-value]  # fmt: skip


def _read(folder: Path, name: str, header_bytes: int) -> Tensor:
    try:
        content = gzip.decompress((folder / name).read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{folder / name}: cannot be read ({error})") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != FILES[name]:
        raise DataError(f"{folder / name}: not the file of Fashion-MNIST (sha256 {digest}, expected {FILES[name]})")
    return torch.frombuffer(bytearray(content[header_bytes:]), dtype=torch.uint8)


def network() -> ResNetForImageClassification:
    """Returns the untrained network: a 7 x 7 stem with max-pool and three stages of two basic blocks, 2.8 million weights."""
    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=64, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], layer_type="basic",
            num_labels=10,
        )
    )  # fmt: skip


def train(
    model: torch.nn.Module, images: Images, epochs: int, say: Callable[[str], None], *, batch: int = 128, seed: int = 0
) -> None:
    """Trains `model` (its output has `logits`) in place on `images`: SGD with one learning-rate cycle, on flipped and
    shifted images."""
    device = images.pixels.device
    generator = torch.Generator(device).manual_seed(seed)
    steps = len(images) // batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * steps, pct_start=0.2)
    model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    half = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for epoch in range(epochs):
        start, total = time.perf_counter(), 0.0
        order = torch.randperm(len(images), generator=generator, device=device)
        for index in order[: steps * batch].split(batch):
            x = _varied(images.normalized(index), generator).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                logits = model(x).logits
            loss = F.cross_entropy(logits.float(), images.labels[index], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        say(f"epoch {epoch + 1} of {epochs}: loss {total / steps:.3f}, {time.perf_counter() - start:.0f} s")
    model.eval()


def _varied(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flips half of the images and shifts all of them by up to two pixels."""
    mirrored = torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device) < 0.5
    shift = torch.randint(-2, 3, (2,), generator=generator, device=x.device).tolist()
    return torch.where(mirrored, x.flip(3), x).roll(shift, (2, 3))
