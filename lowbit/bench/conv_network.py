"""ResNet-50 with random weights as this library runs it: prepared layers on fixed buffers, one list of calls.

What a network's weights are does not change how long it takes; scales are such that codes spread over their range. Fusions
are switched by name, each including those before it:

    none      every convolution writes codes; a pass over them stands for ReLU, another for each sum of two tensors
    relu      convolution + ReLU, the sum apart
    add       convolution + add + ReLU: what MegEngine fuses
    shortcut  the convolution of the shortcut computed inside the one it is added to
    stem      the max-pool computed inside the first convolution
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.bench.resnet50 import CLASSES, IMAGE, STEM, Block, Layer, blocks
from lowbit.kernels.conv_reference import ConvLayer, SecondProduct, Storage, requantize
from lowbit.kernels.pool import average_pool, max_pool
from lowbit.ops.conv import Conv, prepare_conv, prepare_stem
from lowbit.pack.nhwc64 import ActivationStorage

FUSIONS = ("none", "relu", "add", "shortcut", "stem")

_SPREAD: dict[str, float] = {"u4": 5.0, "s8": 45.0}
"""Root mean square of codes."""

_WEIGHT_RMS = 74.0


@dataclass(frozen=True)
class Step:
    """One kernel of the network; `layer` is the convolution it is, None for passes and pools. `pooled`: with the max-pool."""

    name: str
    call: Callable[[], object]
    layer: Layer | None = None
    shortcut: Layer | None = None
    pooled: bool = False


class Network:
    """ResNet-50 of `storage` activations at a batch, on the current GPU; `run` computes logits of what `image` holds."""

    def __init__(self, storage: ActivationStorage, batch: int, fusion: str = FUSIONS[-1], seed: int = 0) -> None:
        if fusion not in FUSIONS:
            raise ValueError(f"fusions are {', '.join(FUSIONS)}, got {fusion!r}")
        self.storage, self.batch, self.level = storage, batch, FUSIONS.index(fusion)
        self.random = torch.Generator(device="cuda").manual_seed(seed)
        self.layers: dict[str, ConvLayer] = {}
        self.steps: list[Step] = []
        self._memory: dict[str, Tensor] = {}
        self.stem, x = self._stem()
        for index, block in enumerate(blocks()):
            x = self._block(block, x, f"block{index % 2}")
        self.last = x
        channels = blocks()[-1].third.outputs
        mean = torch.empty((batch, channels), dtype=torch.float16, device="cuda")
        self.classifier = 0.02 * torch.randn((CLASSES, channels), device="cuda", generator=self.random).half()
        self.logits = torch.empty((batch, CLASSES), dtype=torch.float16, device="cuda")
        self.steps.append(Step("average pool", lambda: average_pool(x, storage, channels, 0.05, torch.float16, mean)))
        self.steps.append(Step("classifier", lambda: torch.mm(mean, self.classifier.t(), out=self.logits)))

    def run(self) -> None:
        """Launches every kernel, on the current stream."""
        for step in self.steps:
            step.call()

    def _stem(self) -> tuple[Conv, Tensor]:
        pooled = self.level >= FUSIONS.index("stem")
        size = (self.batch, IMAGE, IMAGE)
        conv = prepare_stem(self._layer(STEM, "s8", self.storage), size, pooled=pooled)
        images = conv.images
        assert images is not None
        self.image = torch.zeros((self.batch, images.rows, images.columns, 16), dtype=torch.uint8, device="cuda")
        shape = conv.output_shape(tuple(self.image.shape))
        if pooled:
            y = self._buffer("pooled", shape)
            self.steps.append(Step("stem and max-pool", lambda: conv(self.image, None, None, y), STEM, pooled=True))
            return conv, y
        wide = self._buffer("stem", shape)
        y = self._buffer("pooled", (shape[0], shape[1] // 2, shape[2] // 2, shape[3]))
        self.steps.append(Step("stem", lambda: conv(self.image, None, None, wide), STEM))
        self._pass("stem", wide)
        self.steps.append(Step("max-pool", lambda: max_pool(wide, self.storage, (3, 3), (2, 2), (1, 1), y)))
        return conv, y

    def _block(self, block: Block, x: Tensor, out: str) -> Tensor:
        st = self.storage
        y = self._convolve(block.first, self._layer(block.first, st, st), x, "first")
        y = self._convolve(block.second, self._layer(block.second, st, st), y, "second")
        if block.shortcut is not None and self.level >= FUSIONS.index("shortcut"):
            return self._convolve(
                block.third, self._layer(block.third, st, st, None, block.shortcut), y, out, None, x, block.shortcut
            )
        z, added = x, st
        if block.shortcut is not None:
            z, added = self._convolve(block.shortcut, self._layer(block.shortcut, st, "s8"), x, "shortcut"), "s8"
        if self.level >= FUSIONS.index("add"):
            return self._convolve(block.third, self._layer(block.third, st, st, added), y, out, z)
        y = self._convolve(block.third, self._layer(block.third, st, st), y, "third")
        total = self._buffer(out, tuple(y.shape))
        size = y.numel()
        other = z.view(-1)[:size].view(y.shape)
        self.steps.append(Step(f"{block.third.name} sum", lambda: torch.maximum(y, other, out=total)))
        self._pass(f"{block.third.name} sum", total)
        return total

    def _convolve(
        self, layer: Layer, lowered: ConvLayer, x: Tensor, out: str, residual: Tensor | None = None,
        second: Tensor | None = None, shortcut: Layer | None = None,
    ) -> Tensor:  # fmt: skip
        conv = prepare_conv(lowered, (self.batch, layer.size, layer.size))
        y = self._buffer(out, conv.output_shape(tuple(x.shape)))
        self.steps.append(Step(layer.name, lambda: conv(x, residual, second, y), layer, shortcut))
        if layer.relu and not layer.residual:
            self._pass(layer.name, y)
        return y

    def _pass(self, name: str, y: Tensor) -> None:
        """A pass that reads and writes all codes, where ReLU is not fused."""
        if self.level < FUSIONS.index("relu"):
            self.steps.append(Step(f"{name} ReLU", lambda: max_pool(y, self.storage, (1, 1), (1, 1), (0, 0), y)))

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Memory of this name, shared by all layers that use it at different times."""
        size = 1
        for extent in shape:
            size *= extent
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self._memory[name][:size].view(shape)

    def _layer(
        self, layer: Layer, x: Storage, y: Storage, residual: Storage | None = None, shortcut: Layer | None = None
    ) -> ConvLayer:
        """A convolution of random weights whose outputs spread over their codes."""
        share = 0.7 if residual or shortcut else 1.0
        scale = self._scale(layer, x, y, share)
        bias = 0.3 * _SPREAD[y] * torch.randn(layer.outputs, device="cuda", generator=self.random)
        added = None if residual is None else share * _SPREAD[y] / _SPREAD[residual]
        s, b, g = requantize(scale, bias, 1.0, 1.0, y, added)
        second = None
        if shortcut is not None:
            s2, _, _ = requantize(self._scale(shortcut, x, y, share), None, 1.0, 1.0, y)
            second = SecondProduct(self._weight(shortcut), s2, x, (shortcut.stride, shortcut.stride))
        lowered = ConvLayer(
            self._weight(layer), s, b, x, y, (layer.stride, layer.stride), (layer.padding, layer.padding), layer.relu,
            residual, g, second, layer.name,
        )  # fmt: skip
        self.layers[layer.name] = lowered
        return lowered

    def _weight(self, layer: Layer) -> Tensor:
        shape = (layer.outputs, layer.channels, layer.kernel, layer.kernel)
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=self.random)

    def _scale(self, layer: Layer, x: Storage, y: Storage, share: float) -> Tensor:
        spread = _WEIGHT_RMS if layer.channels == 3 else _SPREAD[x]
        factor = share * _SPREAD[y] / ((layer.channels * layer.kernel**2) ** 0.5 * _WEIGHT_RMS * spread)
        return factor * (0.5 + torch.rand(layer.outputs, device="cuda", generator=self.random))
