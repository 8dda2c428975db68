"""ResNets with the names of torchvision's checkpoints: ResNet-18 to 152, wide ones and ResNeXt, all read from the file itself.

torchvision need not be installed: a checkpoint is a dictionary of tensors, whose names and shapes say what the network is. The
stride of a block is in its 3 x 3 convolution, as in torchvision ("ResNet v1.5").
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

STAGES = 4
STEM_OUTPUTS = 64


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck of 1 x 1, 3 x 3 in groups and 1 x 1; plus the input or a 1 x 1 convolution of it;
    ReLU. `widths` are the outputs of the convolutions."""

    def __init__(self, channels: int, widths: tuple[int, ...], stride: int, groups: int, projects: bool) -> None:
        super().__init__()
        windows = (3, 3) if len(widths) == 2 else (1, 3, 1)
        strides = (stride, 1) if len(widths) == 2 else (1, stride, 1)
        inputs = channels
        for i, (width, window, step) in enumerate(zip(widths, windows, strides, strict=True), 1):
            shared = groups if len(widths) == 3 and window == 3 else 1
            setattr(self, f"conv{i}", nn.Conv2d(inputs, width, window, step, window // 2, groups=shared, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(width))
            inputs = width
        self.count = len(widths)
        self.downsample: nn.Sequential | None = None
        if projects:
            self.downsample = nn.Sequential(nn.Conv2d(channels, widths[-1], 1, stride, bias=False), nn.BatchNorm2d(widths[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output for x [N, C, H, W]."""
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = torch.relu(y) if i < self.count else y
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """The network of a checkpoint's names and shapes: images [N, 3, H, W] to logits [N, classes].

    Raises ValueError if the tensors are not those of such a network.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        try:
            self._build({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        except (KeyError, IndexError, ZeroDivisionError) as error:
            raise ValueError(
                f"no ResNet of torchvision: {error} is missing; supported are its ResNet-18 to 152, wide ResNets and ResNeXt"
            ) from error
        try:
            self.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"no ResNet of torchvision: {' '.join(str(error).split())[:300]}") from error
        self.eval()

    def _build(self, shapes: dict[str, tuple[int, ...]]) -> None:
        channels = shapes["conv1.weight"][0]
        self.conv1, self.bn1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for stage in range(1, STAGES + 1):
            blocks: list[nn.Module] = []
            while (before := f"layer{stage}.{len(blocks)}.") + "conv1.weight" in shapes:
                convs = [f"{before}conv{i}.weight" for i in (1, 2, 3) if f"{before}conv{i}.weight" in shapes]
                widths = tuple(shapes[name][0] for name in convs)
                groups = widths[0] // shapes[convs[1]][1] if len(convs) == 3 else 1
                stride = 2 if stage > 1 and not blocks else 1
                blocks.append(ResidualBlock(channels, widths, stride, groups, f"{before}downsample.0.weight" in shapes))
                channels = widths[-1]
            if not blocks:
                raise KeyError(f"layer{stage}.0.conv1.weight")
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, shapes["fc.weight"][0])

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits for x [N, 3, H, W]."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(1, STAGES + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def load_resnet(path: str | Path) -> ResNet:
    """Returns the ResNet of a torchvision checkpoint, a .pth file or safetensors, without running code of the file.

    Raises FileNotFoundError, and ValueError for files that hold something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path}: neither a checkpoint of torch nor safetensors: {' '.join(str(error).split())[:200]}"
        ) from error
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"{path}: a checkpoint is a dictionary of tensors, or has one named state_dict")
    try:
        return ResNet({str(name).removeprefix("module."): value for name, value in tensors.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
