"""Small networks with every structure that the compiler passes handle; batch norms have non-trivial statistics, as after
training.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification


def seasoned(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode, with random statistics and affine parameters in its batch norms."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(module.bias, 0, 0.3, generator=generator)
    return model.eval()


def resnet(layer_type="basic", channels=3, sizes=(64, 128), depths=(1, 1), embedding=32, classes=10):
    """A small Transformers ResNet with random weights."""
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=channels, embedding_size=embedding, hidden_sizes=list(sizes), depths=list(depths), layer_type=layer_type,
        num_labels=classes,
    )  # fmt: skip
    return seasoned(ResNetForImageClassification(config))


class Plain(nn.Module):
    """Convolutions, then flatten and two linear layers as in VGG, without average pooling."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(24, 40, (3, 1), stride=(2, 1), padding=(1, 0), bias=False), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(40 * 4 * 8, 20), nn.ReLU(), nn.Linear(20, 6))

    def forward(self, x):
        return self.head(self.features(x))


class Shared(nn.Module):
    """A convolution whose result is read twice, so neither the ReLU nor the addition may be fused into it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(torch.nn.functional.silu(a))
        return torch.relu(a + b).mean((2, 3))


class Sums(nn.Module):
    """A ReLU and sums that cannot be fused into a convolution: their terms have other readers, or have a ReLU already."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 1), nn.Conv2d(24, 24, 1)
        self.pool, self.last = nn.MaxPool2d(3, 1, 1), nn.Linear(24, 5)

    def forward(self, x):
        a = self.a(x)
        y = torch.relu(a)
        z = torch.relu(self.pool(y) + a)
        y = self.b(z + y)
        return self.last(torch.relu(self.pool(y) + torch.relu(self.c(y))).mean((2, 3)))


class Mixed(nn.Module):
    """Depthwise convolution, ReLU6, a gate and a separate batch norm: operations without an integer form between ones that have
    it.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.deep = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 8, 3, groups=8)
        self.clip, self.norm, self.last = nn.ReLU6(), nn.BatchNorm2d(8), nn.Linear(8 * 4, 5)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))

    def forward(self, x):
        y = self.clip(self.deep(self.stem(x)))
        y = self.norm(y + y.mean((2, 3), keepdim=True).sigmoid())
        return self.last(self.pool(y).view(x.shape[0], -1))


def logits(model, images):
    """The model's output as a tensor."""
    with torch.no_grad():
        out = model(images)
    return getattr(out, "logits", out)
