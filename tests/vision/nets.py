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
        b = self.b(torch.nn.functional.leaky_relu(a))
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
    """Dilated convolution, ReLU6, a gate and a separate batch norm: operations without an integer form between ones that have
    it.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.deep = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 8, 3, groups=8, dilation=2)
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


class Inverted(nn.Module):
    """An inverted bottleneck of MobileNet-v3 or EfficientNet: expand, depthwise, squeeze-and-excite, project, residual."""

    def __init__(self, channels, outputs, wide, kernel=3, stride=1, act=nn.Hardswish, gate=nn.Hardsigmoid, squeezed=8):
        super().__init__()
        self.adds = stride == 1 and channels == outputs
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide), act()
        )
        self.squeeze = None
        if squeezed:
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, squeezed, 1), nn.ReLU(), nn.Conv2d(squeezed, wide, 1), gate()
            )
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        y = self.project(y if self.squeeze is None else y * self.squeeze(y))
        return y + x if self.adds else y


def mobilenet(version):
    """A small MobileNet: version 2 with ReLU6, 3 with hard-swish and squeeze-and-excite; "efficient" with SiLU and sigmoid."""
    torch.manual_seed(5)
    act, gate, squeezed = {
        2: (nn.ReLU6, nn.Identity, 0), 3: (nn.Hardswish, nn.Hardsigmoid, 8), "efficient": (nn.SiLU, nn.Sigmoid, 8)
    }[version]  # fmt: skip
    more = dict(act=act, gate=gate, squeezed=squeezed)
    return seasoned(nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), act(), Inverted(16, 16, 32, **more),
        Inverted(16, 24, 72, 5, 2, **more), Inverted(24, 24, 80, 3, 1, **more), nn.Conv2d(24, 96, 1), act(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10),
    ))  # fmt: skip


class RegNetBlock(nn.Module):
    """A block of RegNet-Y: 1 x 1, 3 x 3 in groups of 24 channels, squeeze-and-excite, 1 x 1, shortcut, ReLU."""

    def __init__(self, channels, outputs, stride):
        super().__init__()

        def conv(a, b, k, s=1, g=1):
            return nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(b))

        self.first, self.second = conv(channels, outputs, 1), conv(outputs, outputs, 3, stride, outputs // 24)
        self.reduce, self.expand = nn.Conv2d(outputs, 8, 1), nn.Conv2d(8, outputs, 1)
        self.third = conv(outputs, outputs, 1)
        self.shortcut = None if channels == outputs and stride == 1 else conv(channels, outputs, 1, stride)

    def forward(self, x):
        y = torch.relu(self.second(torch.relu(self.first(x))))
        y = y * torch.sigmoid(self.expand(torch.relu(self.reduce(y.mean((2, 3), keepdim=True)))))
        return torch.relu(self.third(y) + (x if self.shortcut is None else self.shortcut(x)))


def regnet():
    """A small RegNet-Y."""
    torch.manual_seed(6)
    return seasoned(nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), RegNetBlock(32, 48, 2), RegNetBlock(48, 48, 1),
        RegNetBlock(48, 120, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(120, 10),
    ))  # fmt: skip


class SsdLite(nn.Module):
    """A small SSD-lite: a MobileNet backbone, depthwise heads of classes and boxes at three sizes, returned as a dictionary of
    all anchors."""

    def __init__(self, classes=5, anchors=3):
        super().__init__()
        torch.manual_seed(7)
        self.classes = classes
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        more = dict(act=nn.ReLU6, gate=nn.Identity, squeezed=0)
        self.stages = nn.ModuleList([Inverted(16, 24, 64, 3, 2, **more), Inverted(24, 32, 96, 3, 2, **more),
                                     Inverted(32, 32, 96, 3, 2, **more)])  # fmt: skip
        self.scores, self.boxes = nn.ModuleList(), nn.ModuleList()
        for channels in (24, 32, 32):
            for heads, outputs in ((self.scores, classes), (self.boxes, 4)):
                heads.append(nn.Sequential(
                    nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False), nn.BatchNorm2d(channels), nn.ReLU6(),
                    nn.Conv2d(channels, anchors * outputs, 1),
                ))  # fmt: skip

    def forward(self, x):
        x, scores, boxes = self.stem(x), [], []
        for stage, score, box in zip(self.stages, self.scores, self.boxes, strict=True):
            x = stage(x)
            scores.append(score(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.classes))
            boxes.append(box(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
        return {"scores": torch.cat(scores, 1), "boxes": torch.cat(boxes, 1)}


class Yolo(nn.Module):
    """A small YOLO: split stages that are concatenated, spatial pyramid pooling, a path upwards with nearest pixels, and one
    map per size, returned as a tuple."""

    def __init__(self, act=nn.SiLU):
        super().__init__()
        torch.manual_seed(8)

        def conv(a, b, k=1, s=1):
            return nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b), act())

        self.stem, self.down = conv(3, 16, 3, 2), conv(16, 32, 3, 2)
        self.left, self.right, self.inner, self.joined = conv(32, 15), conv(32, 17), conv(17, 17, 3), conv(32, 40)
        self.deep = conv(40, 64, 3, 2)
        self.squeeze, self.pool, self.spread = conv(64, 24), nn.MaxPool2d(5, 1, 2), conv(96, 48)
        self.lateral, self.up = conv(48, 40), nn.Upsample(scale_factor=2, mode="nearest")
        self.merged = conv(80, 40, 3)
        self.small, self.large = nn.Conv2d(40, 27, 1), nn.Conv2d(48, 27, 1)

    def forward(self, x):
        x = self.down(self.stem(x))
        fine = self.joined(torch.cat([self.left(x), self.inner(self.right(x))], 1))
        y = self.squeeze(self.deep(fine))
        pools = [y]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        deep = self.spread(torch.cat(pools, 1))
        fine = self.merged(torch.cat([self.up(self.lateral(deep)), fine], 1))
        return self.small(fine), self.large(deep)


class Fcn(nn.Module):
    """A small FCN: a residual backbone, scores of classes at two sizes that are added, and bilinear interpolation to the size
    of the images; also returns the smaller scores."""

    def __init__(self, classes=7, aligned=False):
        super().__init__()
        torch.manual_seed(9)
        self.aligned = aligned

        def conv(a, b, s=1):
            return nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

        self.stem, self.first, self.second = conv(3, 16, 2), conv(16, 32, 2), conv(32, 48, 2)
        self.score8, self.score4 = nn.Conv2d(48, classes, 1), nn.Conv2d(32, classes, 1)

    def forward(self, x):
        fine = self.first(self.stem(x))
        coarse = self.score8(self.second(fine))
        more = dict(mode="bilinear", align_corners=self.aligned)
        y = self.score4(fine) + nn.functional.interpolate(coarse, size=fine.shape[2:], **more)
        return {"out": nn.functional.interpolate(y, size=x.shape[2:], **more), "aux": (coarse,)}
