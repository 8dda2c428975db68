"""Quantization-aware fine-tuning of weights, biases and scales.

Step sizes are learned as in LSQ (Esser et al., arXiv:1902.08153): the gradient of a scale is that of the rounded value, divided
by sqrt(count * highest code). The teacher is the floating-point network, so no labels are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowbit.formats.conv import code_range
from lowbit.vision.bits import Quantization, QuantWeight, largest_scale, shared_scales, storage_of, with_shared
from lowbit.vision.graph import Conv, Graph, MaxPool, Node
from lowbit.vision.sensitivity import loss


@dataclass(frozen=True)
class FineTune:
    """Number of passes over the images, and the peak learning rate (Adam, cosine decay)."""

    epochs: int = 1
    rate: float = 2e-4


def fine_tune(
    graph: Graph,
    quantization: Quantization,
    batches: Sequence[Tensor],
    options: FineTune,
    say: Callable[[str], None] = lambda line: None,
    teacher: Graph | None = None,
) -> tuple[Graph, Quantization]:
    """Returns the graph and its quantization after training on `batches` of images [N, C, H, W] against the results of
    `teacher`, by default those of the graph itself, which compensation may have changed.

    Training runs on the device of the images. The returned codes are the rounded trained weights.
    """
    device = batches[0].device
    student = _Student(graph.to(device), quantization).to(device)
    teacher = (graph if teacher is None else teacher).to(device)
    optimizer = torch.optim.Adam(student.parameters(), lr=options.rate)
    steps = options.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for i in torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist():
            with torch.no_grad():
                wanted = teacher.results(batches[i])
            difference = loss(wanted, student(batches[i]))
            optimizer.zero_grad()
            difference.backward()
            optimizer.step()
            schedule.step()
            total += difference.detach()
        say(f"fine-tuning epoch {epoch + 1} of {options.epochs}: divergence {float(total) / len(batches):.4f}")
    return student.result()


class _Student(nn.Module):
    """The graph with trainable weights, biases and scales. Every value is fake-quantized."""

    def __init__(self, graph: Graph, quantization: Quantization) -> None:
        super().__init__()
        self.graph, self.quantization = graph, quantization
        self.convs = {c.name: c for node in graph.nodes.values() if isinstance(node, Conv) for c in (node, node.second) if c}
        self.keys = {name: str(i) for i, name in enumerate(dict.fromkeys([*self.convs, *quantization.scales]))}
        self.weight, self.bias = nn.ParameterDict(), nn.ParameterDict()
        self.weight_step, self.step = nn.ParameterDict(), nn.ParameterDict()
        self.bits: dict[str, int] = {}
        for node in graph.nodes.values():
            if isinstance(node, Conv):
                for name in (node.name, *([node.second.name] if node.second is not None else [])):
                    self.bits[name] = quantization.bits[node.name].weight
        for name, conv in self.convs.items():
            weight = _starting(conv.weight, quantization.weights[name], self.bits[name])
            self.weight[self.keys[name]] = nn.Parameter(weight)
            self.bias[self.keys[name]] = nn.Parameter(conv.bias.clone())
            self.weight_step[self.keys[name]] = nn.Parameter(quantization.weights[name].scale.clone().float())
        self.shared = shared_scales(graph, quantization.bits)
        for name, scale in quantization.scales.items():
            if name not in self.shared:
                self.step[self.keys[name]] = nn.Parameter(torch.tensor(scale))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        nodes = {name: self._rounded(node) for name, node in self.graph.nodes.items()}
        return replace(self.graph, nodes=nodes).results(images, self._round_value)

    def _rounded(self, node: Node) -> Node:
        if not isinstance(node, Conv):
            return node
        second = None if node.second is None else replace(node.second, weight=self._weight(node.second.name))
        return replace(node, weight=self._weight(node.name), bias=self.bias[self.keys[node.name]], second=second)

    def _weight(self, name: str) -> Tensor:
        key, highest = self.keys[name], (1 << (self.bits[name] - 1)) - 1
        step = self.weight_step[key][:, None, None, None]
        return fake_quantize(self.weight[key], step, -highest - 1, highest, self.weight[key][0].numel())

    def _round_value(self, name: str, value: Tensor) -> Tensor:
        if isinstance(self.graph.nodes[name], MaxPool) or name in self.graph.outputs:
            return value  # a max pool returns codes of its input
        while name in self.shared:
            name = self.shared[name]
        key = self.keys.get(name, "")
        if key not in self.step:
            return value
        low, highest = code_range(storage_of(self.graph, self.quantization.bits, name))
        step = self.step[key].abs().clamp(max=largest_scale(self.graph.nodes[name], highest))
        return fake_quantize(value, step, low, highest, value[0].numel())

    @torch.no_grad()
    def result(self) -> tuple[Graph, Quantization]:
        """Returns the trained graph and the quantization given by its parameters."""
        weights = {}
        for name in self.convs:
            key, highest = self.keys[name], (1 << (self.bits[name] - 1)) - 1
            scale = self.weight_step[key].detach().abs()
            codes = (self.weight[key] / scale[:, None, None, None]).round().clamp(-highest - 1, highest)
            weights[name] = QuantWeight(codes.char(), scale.clone())
        scales: dict[str, float] = {}
        for name, node in self.graph.nodes.items():
            if self.keys.get(name, "") in self.step:
                _, highest = code_range(storage_of(self.graph, self.quantization.bits, name))
                scales[name] = min(abs(float(self.step[self.keys[name]].detach())), largest_scale(node, highest))
        scales = with_shared(scales, self.shared)
        nodes = dict(self.graph.nodes)
        for name, node in nodes.items():
            if isinstance(node, Conv):
                second = node.second and replace(node.second, weight=self.weight[self.keys[node.second.name]].detach())
                weight, bias = self.weight[self.keys[name]].detach(), self.bias[self.keys[name]].detach()
                nodes[name] = replace(node, weight=weight, bias=bias, second=second)
        return replace(self.graph, nodes=nodes), Quantization(dict(self.quantization.bits), scales, weights)


def _starting(weight: Tensor, rounded: QuantWeight, bits: int) -> Tensor:
    """Returns weights [O, C, R, S] that round to the given codes of `bits` bits: the given weights where they do so, and else,
    after compensation, the values of the codes. At the border between two codes they would fall back at the first step."""
    scale, highest = rounded.scale.float()[:, None, None, None], (1 << (bits - 1)) - 1
    codes = rounded.codes.float()
    same = (weight / scale).round().clamp(-highest - 1, highest) == codes
    return torch.where(same, weight, codes * scale)


def fake_quantize(x: Tensor, step: Tensor, low: int, high: int, count: int) -> Tensor:
    """Rounds x to codes `low` to `high` of step size `step`, with LSQ gradients. `count` is the number of weights or
    features that share the step."""
    gain = 1.0 / math.sqrt(count * high)
    step = step.abs()
    step = step * gain + (step - step * gain).detach()
    scaled = (x / step).clamp(low, high)
    return (scaled + (scaled.round() - scaled).detach()) * step
