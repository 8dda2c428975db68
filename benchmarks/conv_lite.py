"""EfficientNet-lite0 as `lowbit.vision` runs it, and in fp16 by torch: rows of `python -m benchmarks conv`.

Its weights are the trained ones if `lowbit demo --vision imagenet` has downloaded them on this machine, else random; times do
not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.conv_network import LaunchedNetwork
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
CHECKED_IMAGES = 4
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
            LaunchedNetwork(program, BATCH)
    for _done in compiled(kernels, machine_of("cuda").arch.sm):
        pass
    return len(kernels)


def cudnn_network(model: EfficientNetLite) -> Callable[[], object]:
    """Returns the module in fp16, channels-last, its convolutions by cuDNN, as a function that a CUDA graph captures."""
    torch.backends.cudnn.benchmark = True
    half = model.half().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(BATCH, 3, IMAGE, IMAGE, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    return lambda: half(x)


def compiled_network(model: EfficientNetLite) -> Callable[[], object]:
    """Returns `cudnn_network` compiled by torch.compile in its default mode, with frozen constants."""
    import torch._inductor.config as inductor

    torch.backends.cudnn.benchmark = True
    half = model.half().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(BATCH, 3, IMAGE, IMAGE, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    with inductor.patch(freezing=True):
        compiled = torch.compile(half, dynamic=False)
        compiled(x)
    return lambda: compiled(x)


RIVALS = {"cudnn": (cudnn_network, "batch norms and ReLUs apart"), "compile": (compiled_network, "torch.compile's")}
