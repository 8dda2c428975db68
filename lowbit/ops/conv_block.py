"""Three convolutions of codes around a bottleneck of 64, 128 or 256 channels in one call; packed once, called many times.

`second` is the 3 x 3 convolution of a block, `third` its last convolution, with a residual or with the shortcut as its second
product, `following` the first convolution of the next block. On sm_90 one kernel runs all three; only y (the output of `third`)
and z (the output of `following`) are written to memory. On a CPU the same call computes the same bits with the reference, layer
by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.formats.conv import ConvLayer
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.conv import MOST_WIDTH, WHOLE_WIDTH, Size, block_refusals, pair_layout, whole_refusals
from lowbit.kernels.reference.conv import conv_reference
from lowbit.ops.conv import ALIGNED_BYTES, device_for
from lowbit.ops.register import on_device_of_first
from lowbit.pack.conv_block import CHANNELS, BlockLayout
from lowbit.pack.nhwc64 import Nhwc64

if TYPE_CHECKING:
    from lowbit.kernels.sm90.conv_block import PreparedBlock
    from lowbit.kernels.sm90.conv_pair import PreparedPair


class ConvBlock:
    """Three lowered layers on one device, created by `prepare_block`. Calls read and write packed codes."""

    def __init__(self, second: ConvLayer, third: ConvLayer, following: ConvLayer, device: torch.device) -> None:
        self.second, self.third, self.following, self.device = second, third, following, device
        self.expanded, self.outputs = third.weight.shape[0], following.weight.shape[0]
        self.most_width = MOST_WIDTH if second.channels == CHANNELS else WHOLE_WIDTH
        self._kernel = None
        if device.type == "cuda":
            self._kernel = on_device_of_first(block_launcher(second, third, following, machine_of(device)))

    def output_shapes(self, size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes [N, H, W, bytes] of y and z for an input of packed shape `size`."""
        layout = Nhwc64(self.second.x)
        return (*size[:3], layout.pixel_bytes(self.expanded)), (*size[:3], layout.pixel_bytes(self.outputs))

    def __call__(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Returns packed codes (y, z), uint8 [N, H, W, bytes], of packed x [N, H, W, bytes].

        `added` is the third convolution's residual, or the input of the shortcut if it has a second product. `out` are two
        contiguous tensors, written if given; they must not share memory with x. Raises ValueError for tensors that do not match
        the layers.
        """
        self._check(x, added, out)
        if self._kernel is None:
            found = self._on_cpu(x, added)
            return found if out is None else (out[0].copy_(found[0]), out[1].copy_(found[1]))
        if out is None:
            first, last = self.output_shapes(tuple(x.shape))
            out = (x.new_empty(first), x.new_empty(last))
        return self._kernel(x, added, out)

    def _check(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor] | None) -> None:
        layout = Nhwc64(self.second.x)
        if x.dim() != 4 or x.shape[2] > self.most_width:
            raise ValueError(f"x is [N, H, W, bytes] with W up to {self.most_width}, got {list(x.shape)}")
        channels = self.expanded if self.third.second is None else CHANNELS
        wanted = {"x": (x, (*x.shape[:3], layout.pixel_bytes(self.second.channels)))}
        wanted["added"] = (added, (*x.shape[:3], layout.pixel_bytes(channels)))
        if out is not None:
            first, last = self.output_shapes(tuple(x.shape))
            wanted |= {"y": (out[0], first), "z": (out[1], last)}
        for name, (tensor, shape) in wanted.items():
            if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ValueError(f"{name} is contiguous uint8 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
            if tensor.is_cuda and tensor.data_ptr() % ALIGNED_BYTES:
                raise ValueError(f"{name} must start at a multiple of {ALIGNED_BYTES} bytes; clone() it")
            if tensor.device != self.device:
                raise ValueError(f"{name} must be on {self.device}, where the layers were prepared, got {tensor.device}")

    def _on_cpu(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        layout, shortcut = Nhwc64(self.second.x), self.third.second
        middle = conv_reference(layout.unpack(x, self.second.channels), self.second)
        codes = layout.unpack(added, self.expanded if shortcut is None else CHANNELS)
        y = conv_reference(middle, self.third, codes if shortcut is None else None, None if shortcut is None else codes)
        return layout.pack(y), layout.pack(conv_reference(y, self.following))


def prepare_block(
    second: ConvLayer, third: ConvLayer, following: ConvLayer, size: Size,
    device: torch.device | str | None = None,
) -> ConvBlock:  # fmt: skip
    """Returns the layers packed for inputs of about `size` (images, height, width), on `device` (by default that of the
    weights).

    Raises ValueError with every reason why the layers cannot run in one kernel.
    """
    wanted = device_for(second, device)
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"convolutions of codes run on NVIDIA GPUs and on the CPU, not on {wanted.type}")
    machine = machine_of(wanted) if wanted.type == "cuda" else None
    refusals = block_refusals if second.channels == CHANNELS else whole_refusals
    reasons = refusals(second.spec, third.spec, following.spec, size, machine)
    if reasons:
        raise ValueError(f"{second.name or 'the block'} cannot run whole on {wanted}: {'; '.join(reasons)}")
    return ConvBlock(second.to(wanted), third.to(wanted), following.to(wanted), wanted)


def block_launcher(
    second: ConvLayer, third: ConvLayer, following: ConvLayer, machine: Machine
) -> PreparedBlock | PreparedPair:  # fmt: skip
    """Returns the layers packed for the sm_90 kernel that runs all three."""
    from lowbit.kernels.sm90.conv_block import PreparedBlock
    from lowbit.kernels.sm90.conv_pair import PreparedPair

    if second.channels != CHANNELS:
        whole = pair_layout(third.spec, following.spec, True)
        return PreparedPair(third.spec, whole, whole.pack_layers(third, following, second), third.g, machine.sm_count)
    layout = BlockLayout(second.x, following.weight.shape[0], third.second is not None)
    packed = layout.pack_layers(second, third, following)
    return PreparedBlock(third.spec, following.spec, packed, third.g, machine.sm_count)
