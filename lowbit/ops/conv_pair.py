"""Two 1 x 1 convolutions of codes in one call, the second of which reads what the first one writes; packed once, called many
times.

`third` is the last convolution of a bottleneck block, with a residual or with the shortcut as its second product, `following`
the first convolution of the next block. On sm_90 one kernel runs both. On a CPU the same call computes the same bits with the
reference, layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.formats.conv import ConvLayer
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.conv import Size, pair_layout, pair_refusals
from lowbit.kernels.reference.conv import conv_reference
from lowbit.ops.conv import ALIGNED_BYTES, device_for
from lowbit.ops.register import on_device_of_first
from lowbit.pack.nhwc64 import Nhwc64

if TYPE_CHECKING:
    from lowbit.kernels.sm90.conv_pair import PreparedPair


class ConvPair:
    """Two lowered layers on one device, created by `prepare_pair`. Calls read and write packed codes."""

    def __init__(self, third: ConvLayer, following: ConvLayer, device: torch.device) -> None:
        self.third, self.following, self.device = third, following, device
        self._kernel = None
        if device.type == "cuda":
            self._kernel = on_device_of_first(pair_launcher(third, following, machine_of(device)))

    def output_shapes(self, size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes [N, H, W, bytes] of y and z for an input of packed shape `size`."""
        layout = Nhwc64(self.third.x)
        channels = (self.third.weight.shape[0], self.following.weight.shape[0])
        return (*size[:3], layout.pixel_bytes(channels[0])), (*size[:3], layout.pixel_bytes(channels[1]))

    def __call__(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Returns packed codes (y, z), uint8 [N, H, W, bytes], of packed x [N, H, W, bytes].

        `added` is the first convolution's residual, or the input of the shortcut if it has a second product. `out` are two
        contiguous tensors, written if given; they must not share memory with x or `added`. Raises ValueError for tensors that
        do not match the layers.
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
        layout, third = Nhwc64(self.third.x), self.third
        if x.dim() != 4 or added.dim() != 4:
            raise ValueError(f"x and added are [N, H, W, bytes], got {list(x.shape)} and {list(added.shape)}")
        wanted = {"x": (x, (*x.shape[:3], layout.pixel_bytes(third.channels)))}
        first, last = self.output_shapes(tuple(x.shape))
        product = third.spec.second
        if product is None:
            wanted["added"] = (added, first)
        else:
            if product.output_size(added.shape[1], added.shape[2]) != tuple(x.shape[1:3]):
                raise ValueError(f"the shortcut's input {list(added.shape)} does not make an output of {list(x.shape[:3])}")
            wanted["added"] = (added, (x.shape[0], *added.shape[1:3], layout.pixel_bytes(product.channels)))
        if out is not None:
            wanted |= {"y": (out[0], first), "z": (out[1], last)}
        for name, (tensor, shape) in wanted.items():
            if tensor.dtype != torch.uint8 or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
                raise ValueError(f"{name} is contiguous uint8 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
            if tensor.is_cuda and tensor.data_ptr() % ALIGNED_BYTES:
                raise ValueError(f"{name} must start at a multiple of {ALIGNED_BYTES} bytes; clone() it")
            if tensor.device != self.device:
                raise ValueError(f"{name} must be on {self.device}, where the layers were prepared, got {tensor.device}")

    def _on_cpu(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        layout, third = Nhwc64(self.third.x), self.third
        residual = second = None
        if third.second is None:
            residual = layout.unpack(added, third.weight.shape[0])
        else:
            second = layout.unpack(added, third.second.weight.shape[1])
        y = conv_reference(layout.unpack(x, third.channels), third, residual, second)
        return layout.pack(y), layout.pack(conv_reference(y, self.following))


def prepare_pair(
    third: ConvLayer, following: ConvLayer, size: Size, device: torch.device | str | None = None
) -> ConvPair:  # fmt: skip
    """Returns the layers packed for outputs of about `size` (images, height, width), on `device` (by default that of the
    weights).

    Raises ValueError with every reason why the layers cannot run in one kernel.
    """
    wanted = device_for(third, device)
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"convolutions of codes run on NVIDIA GPUs and on the CPU, not on {wanted.type}")
    machine = machine_of(wanted) if wanted.type == "cuda" else None
    reasons = pair_refusals(third.spec, following.spec, size, machine)
    if reasons:
        raise ValueError(f"{third.name or 'the pair'} cannot run in one kernel on {wanted}: {'; '.join(reasons)}")
    return ConvPair(third.to(wanted), following.to(wanted), wanted)


def pair_launcher(third: ConvLayer, following: ConvLayer, machine: Machine) -> PreparedPair:
    """Returns the layers packed for the sm_90 kernel that runs both."""
    from lowbit.kernels.sm90.conv_pair import PreparedPair

    layout = pair_layout(third.spec, following.spec)
    return PreparedPair(third.spec, layout, layout.pack_layers(third, following), third.g, machine.sm_count)
