"""Accuracy of image classifiers on a folder of labelled photographs, as ImageNet's validation set is usually arranged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.extras import install

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
"""Endings of image files, in any case."""
FIRST = 5
"""Number of answers that count as right for top-5."""


@dataclass(frozen=True)
class Figure:
    """A mean over photographs and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        digits = 1 if max(abs(self.mean), self.error) > 1 else 3
        return f"{self.mean:.{digits}f} ± {self.error:.{digits}f}"


def figure(values: Tensor) -> Figure:
    """Returns the mean of values [N] and its standard error, from the sample's standard deviation."""
    values = values.double()
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Figure(float(values.mean()), error)


@dataclass(frozen=True)
class Preparation:
    """How a photograph becomes the network's input, as torchvision does it: the shorter side is scaled to `resized` pixels with
    bilinear interpolation, the centre of `size` x `size` pixels is cut out, and x = (pixel / 255 - mean) / deviation."""

    resized: int = 256
    size: int = 224
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.resized:
            raise ValueError(f"the centre of {self.size} pixels is cut out of {self.resized}: sizes are positive, and it fits")
        if len(self.mean) != 3 or len(self.deviation) != 3 or min(self.deviation) <= 0:
            raise ValueError(f"means and positive deviations are three numbers, got {self.mean} and {self.deviation}")

    def image(self, path: Path) -> Tensor:
        """Returns a file's pixels as float32 [3, size, size]. Raises ValueError with the path for files that are no images."""
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError as error:
            raise ValueError(f"photographs are decoded by Pillow: {install('vision')}") from error
        try:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
        except (OSError, UnidentifiedImageError, ValueError) as error:
            raise ValueError(f"{path}: no image that Pillow reads: {error}") from error
        width, height = picture.size
        short = min(width, height)
        scaled = picture.resize((self.resized * width // short, self.resized * height // short), Image.Resampling.BILINEAR)
        left, top = round((scaled.width - self.size) / 2), round((scaled.height - self.size) / 2)
        cut = scaled.crop((left, top, left + self.size, top + self.size))
        pixels = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).reshape(self.size, self.size, 3).permute(2, 0, 1)
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (self.mean, self.deviation))
        return (pixels.float() / 255.0 - mean) / deviation

    def batch(self, paths: Sequence[Path]) -> Tensor:
        """Returns the images of some files, float32 [N, 3, size, size]."""
        return torch.stack([self.image(path) for path in paths])


@dataclass(frozen=True)
class Labelled:
    """Image files and the class of each, 0 and up."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def split(self, count: int) -> tuple[Labelled, Labelled]:
        """Returns `count` evenly spaced images, for calibration, and the others. Raises ValueError if none would be left."""
        if not 0 < count < len(self.paths):
            raise ValueError(f"{count} of {len(self.paths)} images cannot calibrate: some must be left to be answered")
        chosen = {i * len(self.paths) // count for i in range(count)}
        return self._of(sorted(chosen)), self._of([i for i in range(len(self.paths)) if i not in chosen])

    def first(self, count: int) -> Labelled:
        """Returns `count` evenly spaced images, or all if there are fewer."""
        if count >= len(self.paths):
            return self
        return self._of([i * len(self.paths) // count for i in range(count)])

    def _of(self, places: Sequence[int]) -> Labelled:
        return Labelled(tuple(self.paths[i] for i in places), tuple(self.labels[i] for i in places))


def labelled(folder: Path, labels: Path | None = None) -> Labelled:
    """Returns the images of a folder that has one folder per class; classes are numbered in the order of their names, which for
    the WordNet names of ImageNet is the usual order. With `labels`, a file with lines "FILE CLASS" (or FILE,CLASS; classes are
    numbers from 0), returns those images instead.

    Raises ValueError, with what is expected, for folders without images and lines of another kind.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if labels is not None:
        return _listed(folder, labels)
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(path, i) for i, each in enumerate(classes) for path in images_in(each)]
    if not found:
        raise ValueError(
            f"{folder}: no images in folders of classes, such as {folder}/n01440764/x.JPEG; give --labels FILE with lines "
            "'FILE CLASS' if they lie otherwise"
        )
    return Labelled(tuple(path for path, _ in found), tuple(i for _, i in found))


def images_in(folder: Path) -> list[Path]:
    """Returns the image files below a folder, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _listed(folder: Path, labels: Path) -> Labelled:
    paths, classes = [], []
    try:
        lines = labels.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{labels}: cannot be read as text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, label = line.strip().replace("\t", " ").rpartition("," if "," in line else " ")
        if not name or not label.strip().isdigit():
            raise ValueError(f"{labels}:{number}: a line is FILE CLASS or FILE,CLASS with a class from 0, got {line[:80]!r}")
        path = folder / name.strip()
        if not path.is_file():
            raise ValueError(f"{labels}:{number}: no file {path}")
        paths.append(path)
        classes.append(int(label))
    if not paths:
        raise ValueError(f"{labels}: no lines")
    return Labelled(tuple(paths), tuple(classes))


@dataclass(frozen=True)
class Accuracy:
    """Percent of right answers, of right answers among the first five, and seconds for all images, with decoding."""

    top1: Figure
    top5: Figure
    count: int
    seconds: float


def answers(
    model: Callable[[Tensor], Any], images: Labelled, preparation: Preparation, *, batch: int = 64,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yields (logits float32 [N, classes], classes int64 [N]) of each batch, on the CPU.

    Raises ValueError if the model returns something else than logits, or has fewer classes than the images.
    """
    for start in range(0, len(images.paths), batch):
        labels = torch.tensor(images.labels[start : start + batch])
        with torch.no_grad():
            logits = model(preparation.batch(images.paths[start : start + batch]).to(device))
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"a classifier returns logits [N, classes], got {shape}")
        if int(labels.max()) >= logits.shape[1]:
            raise ValueError(f"the images have a class {int(labels.max())}, the network has {logits.shape[1]} classes")
        yield logits.float().cpu(), labels


def right_answers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 100 or 0 for each image [N]: whether the first answer is right, and whether one of the first five is."""
    best = logits.topk(min(FIRST, logits.shape[1])).indices
    return 100.0 * (best[:, 0] == labels), 100.0 * (best == labels[:, None]).any(1)
