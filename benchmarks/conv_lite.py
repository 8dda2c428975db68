"""EfficientNet-lite0 as `lowbit.vision` runs it, and in fp16 by torch: rows of `python -m benchmarks conv`.

Its weights are the trained ones if `lowbit demo --vision imagenet` has downloaded them on this machine, else random; times do
not depend on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.conv_network import LaunchedNetwork, Reference
from benchmarks.resnet50 import IMAGE
from lowbit.folders import cache_folder
from lowbit.hardware.machine import machine_of
from lowbit.vision.bits import assign_bits, calibrate
from lowbit.vision.imagenet import VARIANTS, EfficientNetLite, load_network
from lowbit.vision.lower import lower
from lowbit.vision.observe import observe
from lowbit.vision.program import Program
from lowbit.vision.trace import trace

MODEL = "efficientnet-lite0"
BATCH = 128
SCHEMES = ("w8a8", "w8a4", "w4a8")
"""Schemes of the rows. The weights of w4a8 are bytes in memory, as those of w8a8, so both run the same kernels."""


def lite0() -> tuple[EfficientNetLite, str]:
    """Returns the network in evaluation mode on the CPU, and "trained" or "random"."""
    folder = cache_folder() / "imagenet-20"
    if (folder / VARIANTS["lite0"].file).is_file():
        return load_network(folder), "trained"
    torch.manual_seed(0)
    model = EfficientNetLite(VARIANTS["lite0"])
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(0.2, 1.0)  # type: ignore[union-attr]
            module.running_mean.normal_(0, 0.2)  # type: ignore[union-attr]
    return model.eval(), "random"


def programs(model: EfficientNetLite, schemes: Sequence[str] = SCHEMES) -> dict[str, Program]:
    """Returns the integer network of each scheme, calibrated on random images, on the device of the model."""
    device = next(model.parameters()).device
    images = torch.randn(8, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1)).to(device)
    graph = trace(model, images)
    ranges = observe(graph, [images])
    return {scheme: lower(graph, calibrate(graph, ranges, assign_bits(graph, scheme))) for scheme in schemes}


def compile_kernels(found: dict[str, Program]) -> int:
    """Compiles the kernels of all networks in parallel processes; returns their number."""
    from lowbit.kernels.parts.compile import compiled
    from lowbit.kernels.parts.launch import recording

    with recording() as kernels:
        for program in found.values():
            LaunchedNetwork(Reference(program), BATCH)
    for _done in compiled(kernels, machine_of("cuda").arch.sm):
        pass
    return len(kernels)


NetworkFactory = Callable[[EfficientNetLite, Callable[[str], None]], Callable[[], object]]
"""Function of a module and a progress callback that returns a call of the network."""


def half_precision(model: EfficientNetLite) -> tuple[torch.nn.Module, torch.Tensor]:
    """Returns the module and a batch of images in fp16 and channels-last on the GPU."""
    torch.backends.cudnn.benchmark = True
    half = model.half().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(BATCH, 3, IMAGE, IMAGE, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    return half, x


def cudnn_network(model: EfficientNetLite, say: Callable[[str], None]) -> Callable[[], object]:
    """Returns the module in fp16, its convolutions by cuDNN."""
    half, x = half_precision(model)
    say("the first call chooses algorithms of cuDNN")
    return lambda: half(x)


def compiled_network(mode: str | None) -> NetworkFactory:
    """Returns a function that returns the module in fp16 compiled by torch.compile in a mode."""

    def network(model: EfficientNetLite, say: Callable[[str], None]) -> Callable[[], object]:
        half, x = half_precision(model)
        logging.getLogger("torch._inductor").setLevel(logging.INFO)  # lines on stderr for the steps of compiling
        compiled = torch.compile(half, mode=mode, dynamic=False)
        say(f"the first call compiles, mode {mode or 'default'}")
        return lambda: compiled(x)

    return network


@dataclass(frozen=True)
class Rival:
    """Another implementation: a function of the module that returns a call, its fusions, and whether the call is captured in
    a CUDA graph."""

    network: NetworkFactory
    fusion: str
    captured: bool = True


RIVALS = {
    "cudnn": Rival(cudnn_network, "batch norms and ReLUs apart"),
    "compile": Rival(compiled_network(None), "torch.compile's"),
    "reduce-overhead": Rival(compiled_network("reduce-overhead"), "torch.compile's", captured=False),
    "max-autotune": Rival(compiled_network("max-autotune-no-cudagraphs"), "torch.compile's"),
}
