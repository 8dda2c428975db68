"""Convolutions of codes as objects: a lowered layer, packed for the chosen kernel; created once, called many times.

`prepare_conv` packs a layer for a GPU and chooses its kernel and tile from shapes alone. The result writes to a given output
and allocates nothing else, so that a network of such layers can be captured in one CUDA graph. On a CPU the same call computes
the same bits with the reference. Pools of codes also write to a given output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, CODES, ConvLayer, ConvSpec, output_size, stored_dtype
from lowbit.hardware.machine import Machine, features_of, machine_of, machine_refusals
from lowbit.kernels.choose.conv import ConvCandidate, Size, choose_conv, features_refusals, strip_refusals
from lowbit.kernels.choose.depthwise import DEPTHWISE_FORM, depthwise_tile, quad_refusals
from lowbit.kernels.reference.conv import average_pool_reference, conv_reference, max_pool_reference, quantize_reference
from lowbit.ops.register import on_device_of_first
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.conv_pair import ThirdStages
from lowbit.pack.grouped import GroupedBlocks
from lowbit.pack.nhwc64 import Nhwc64, pixel_elements
from lowbit.pack.stem import StemImages

if TYPE_CHECKING:
    from lowbit.kernels.parts.conv_plan import ConvPlan

ALIGNED_BYTES = 16
"""On a GPU tensors must start at multiples of this, since kernels are compiled for it."""

STEM_POOL = ((3, 3), (2, 2), (1, 1))
"""Window, stride and padding of the max-pool that can be fused into a stem."""


def conv_refusals(layer: ConvLayer, device: torch.device | str) -> tuple[str, ...]:
    """Returns the reasons why the kernels cannot run a layer on `device`; empty if they can."""
    device = torch.device(device)
    if device.type == "cpu":
        return ()
    if device.type != "cuda":
        return (f"convolutions of codes run on NVIDIA GPUs and on the CPU, not on {device.type}",)
    unknown = machine_refusals(device)
    if unknown:
        return tuple(f"the convolution kernel {reason}" for reason in unknown)
    return features_refusals(layer.spec, features_of(device))


class Conv:
    """A lowered layer on one device, created by `prepare_conv` or `prepare_stem`. Calls read and write packed codes.

    `choice`: the kernel that runs the layer, its tile, and the reason.
    """

    def __init__(
        self, layer: ConvLayer, size: Size, device: torch.device, images: StemImages | None, pooled: bool = False
    ) -> None:
        self.layer, self.images, self.device, self.pooled = layer, images, device, pooled
        self.outputs = layer.weight.shape[0]
        machine = machine_of(device) if device.type == "cuda" else None
        self.choice = choose_conv(layer.spec, size, machine, images, pooled)
        self._kernel = None if machine is None else on_device_of_first(GpuConv(layer, self.choice, machine, images))

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Returns the shape of the output [N, Ho, Wo, bytes or channels] for an input of packed shape `size`."""
        height, width = self.layer.output_size(size[1], size[2]) if self.images is None else self.images.output
        if self.pooled:
            height, width = output_size((height, width), *STEM_POOL)
        return size[0], height, width, pixel_elements(self.layer.y, self.outputs)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns packed codes uint8 [N, Ho, Wo, bytes], or values [N, Ho, Wo, O] for f16 and f32, of packed x [N, H, W,
        bytes].

        `residual` and `second` must be given if the layer has them. `out` is contiguous, and written if given. Raises
        ValueError for tensors that do not match the layer.
        """
        self._check(x, residual, second, out)
        if self._kernel is not None:
            return self._kernel(x, residual, second, out)
        y = self._on_cpu(x, residual, second)
        return y if out is None else out.copy_(y)

    def _check(self, x: Tensor, residual: Tensor | None, second: Tensor | None, out: Tensor | None) -> None:
        layer = self.layer
        if self.images is None:
            pixel = Nhwc64(layer.x).pixel_bytes(layer.channels)
            wanted = f"[N, H, W, {pixel}]"
            fits = x.dim() == 4 and x.shape[3] == pixel
        else:
            wanted = f"[N, {self.images.rows}, {self.images.columns}, 16]"
            fits = x.dim() == 4 and tuple(x.shape[1:]) == (self.images.rows, self.images.columns, 16)
        if x.dtype != torch.uint8 or not fits or not x.is_contiguous():
            raise ValueError(f"x of {layer.name or 'the layer'} is contiguous uint8 {wanted}, got {x.dtype} {list(x.shape)}")
        if (residual is None) == (layer.residual is not None) or (second is None) == (layer.second is not None):
            raise ValueError(
                f"{layer.name or 'the layer'} takes residual {layer.residual}, second product {layer.second is not None}"
            )
        shape = self.output_shape(tuple(x.shape))
        if out is not None and (tuple(out.shape) != shape or out.dtype != stored_dtype(layer.y) or not out.is_contiguous()):
            raise ValueError(
                f"the output is contiguous {stored_dtype(layer.y)} {list(shape)}, got {out.dtype} {list(out.shape)}"
            )
        if residual is not None and layer.residual is not None:
            pixel = Nhwc64(layer.residual).pixel_bytes(self.outputs)
            if tuple(residual.shape) != (*shape[:3], pixel) or not residual.is_contiguous():
                raise ValueError(f"the residual is contiguous uint8 {[*shape[:3], pixel]}, got {list(residual.shape)}")
            if residual.dtype != torch.uint8:
                raise ValueError(f"the residual is contiguous uint8, got {residual.dtype}")
        if second is not None and layer.second is not None:
            pixel = Nhwc64(layer.second.x).pixel_bytes(layer.second.weight.shape[1])
            fits = second.dim() == 4 and second.shape[0] == shape[0] and second.shape[3] == pixel
            product = layer.spec.second
            if not fits or product is None or product.output_size(second.shape[1], second.shape[2]) != tuple(shape[1:3]):
                wanted = f"pixels of {pixel} bytes that make an output of {list(shape[:3])}"
                raise ValueError(f"the second input has {wanted}, got {list(second.shape)}")
            if second.dtype != torch.uint8 or not second.is_contiguous():
                raise ValueError(f"the second input is contiguous uint8, got {second.dtype} with strides {second.stride()}")
        given = [t for t in (x, residual, second, out) if t is not None]
        if any(t.device != self.device for t in given):
            raise ValueError(f"all tensors must be on {self.device}, where the layer was prepared")
        if x.is_cuda and any(t.data_ptr() % ALIGNED_BYTES for t in given):
            raise ValueError(f"all tensors must start at multiples of {ALIGNED_BYTES} bytes; clone() those that do not")

    def _on_cpu(self, x: Tensor, residual: Tensor | None, second: Tensor | None) -> Tensor:
        layer = self.layer
        if self.images is None:
            codes = Nhwc64(layer.x).unpack(x, layer.channels)
        else:
            codes = self.images.unpack(x)
        added = None if residual is None or layer.residual is None else Nhwc64(layer.residual).unpack(residual, self.outputs)
        other = None
        if second is not None and layer.second is not None:
            other = Nhwc64(layer.second.x).unpack(second, layer.second.weight.shape[1])
        y = conv_reference(codes, layer, added, other)
        if self.pooled:
            y = max_pool_reference(y, *STEM_POOL)
        if layer.y in ACTIVATIONS:
            return Nhwc64(layer.y).pack(y)
        return y.permute(0, 2, 3, 1).contiguous()


def prepare_conv(layer: ConvLayer, size: Size, device: torch.device | str | None = None) -> Conv:
    """Returns the layer packed for inputs of about `size` (images, height, width). Other sizes also run, with the tile for this
    size.

    `device`: by default that of the weights. Raises ValueError with every reason why the layer cannot run there.
    """
    device = device_for(layer, device)
    _refuse(layer, device)
    return Conv(layer.to(device), size, device, None)


def prepare_stem(layer: ConvLayer, size: Size, device: torch.device | str | None = None, pooled: bool = False) -> Conv:
    """Returns a first convolution with stride 2, packed for images of 1 to 4 channels and `size` (images, height, width), as s8
    codes.

    Its input is the result of `ops/relayout.py::pack_values` for images and the returned object's `images`. With `pooled`, the
    following 3 x 3 max-pool with stride 2 and padding 1 is fused, and its codes are the output. Raises ValueError with every
    reason why this is not supported. `prepare_conv` supports any convolution, with channels padded to multiples of 64.
    """
    device = device_for(layer, device)
    images = StemImages(layer.channels, size[1], size[2], layer.kernel, layer.padding)
    reasons = list(images.refusals())
    if layer.stride != (2, 2):
        reasons.append(f"stride {layer.stride}, a stem has 2 x 2")
    if layer.x != "s8" or layer.second is not None or layer.residual is not None or layer.groups > 1:
        reasons.append("a stem reads s8 codes in one group and adds nothing")
    if pooled:
        reasons += stem_pool_refusals(layer, machine_of(device) if device.type == "cuda" else None)
    if reasons:
        raise ValueError(f"{layer.name or 'the layer'} is no stem: {'; '.join(reasons)}")
    _refuse(layer, device)
    return Conv(layer.to(device), size, device, images, pooled)


def stem_pool_refusals(layer: ConvLayer, machine: Machine | None) -> tuple[str, ...]:
    """Returns the reasons why a max-pool cannot be fused into a stem on a GPU (None: the CPU); empty if it can."""
    reasons = []
    if layer.y not in ACTIVATIONS:
        reasons.append(f"its output is stored as {layer.y}, not as codes")
    if bool((layer.s < 0).any()):
        reasons.append("some s are negative, so that larger sums are smaller codes")
    if machine is not None and "wgmma" not in machine.arch.features:
        reasons.append("the kernel with the pool inside is for sm_90")
    return tuple(reasons)


def max_pool_codes(
    x: Tensor, storage: str, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], out: Tensor
) -> None:
    """Writes the largest code of each window of packed codes uint8 [N, H, W, bytes], as packed codes."""
    if x.is_cuda:
        from lowbit.kernels.elementwise.pool import max_pool

        max_pool(x, storage, window, stride, padding, out)
    else:
        codes = Nhwc64(storage).unpack(x, x.shape[3] * 8 // CODES[storage].bits)
        out.copy_(Nhwc64(storage).pack(max_pool_reference(codes, window, stride, padding)))


def average_pool_codes(x: Tensor, storage: str, channels: int, scale: float, out: Tensor) -> None:
    """Writes the mean values float32 [N, channels] of packed codes whose scale is `scale`."""
    if x.is_cuda:
        from lowbit.kernels.elementwise.pool import average_pool

        average_pool(x, storage, channels, scale, torch.float32, out)
    else:
        out.copy_(average_pool_reference(Nhwc64(storage).unpack(x, channels), scale))


def average_pool_to_codes(x: Tensor, storage: str, channels: int, scale: float, gain: float, out: Tensor) -> None:
    """Writes packed s8 codes clamp(rne(fma(mean, gain, 0))), uint8 [N, 1, 1, bytes], of the means of packed codes."""
    if x.is_cuda:
        from lowbit.kernels.elementwise.pool import average_codes

        average_codes(x, storage, scale, gain, out)
        return
    means = average_pool_reference(Nhwc64(storage).unpack(x, channels), scale)[:, :, None, None]
    gains, zeros = torch.full((channels,), gain), torch.zeros(channels)
    out.copy_(Nhwc64("s8").pack(quantize_reference(means, gains, zeros, "s8")))


def device_for(layer: ConvLayer, device: torch.device | str | None) -> torch.device:
    """Returns the given device, by default that of the layer, with the index of the GPU."""
    wanted = layer.weight.device if device is None else torch.device(device)
    if wanted.type == "cuda" and wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


def _refuse(layer: ConvLayer, device: torch.device) -> None:
    reasons = conv_refusals(layer, device)
    if reasons:
        raise ValueError(f"{layer.name or 'the layer'} cannot run on {device}: {'; '.join(reasons)}")


class GpuConv:
    """A layer packed for the kernel of `choice`. Inputs of other sizes also run. Images that are too wide for the chosen strips
    use the kernel that copies taps, which reads the same packed weights."""

    def __init__(self, layer: ConvLayer, choice: ConvCandidate, machine: Machine, images: StemImages | None = None) -> None:
        if choice.layout is None:
            raise ValueError(f"{choice.kernel} is no kernel of a GPU")
        self.spec, self.choice, self.machine, self.images = layer.spec, choice, machine, images
        self.packed = choice.layout.pack_layer(layer)
        self.launcher = launcher(self.spec, self.packed, choice, machine, images)
        self._wide: ConvPlan | None = None

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output for an input of packed shape `size`."""
        return self.launcher.output_shape(size)

    def __call__(self, x: Tensor, residual: Tensor | None, second: Tensor | None, out: Tensor | None) -> Tensor:
        """Returns y of packed x, written to `out` if given."""
        tile, width = self.choice.tile, x.shape[2]
        if self.choice.kernel != "sm90/conv_strip" or tile is None or not strip_refusals(self.spec, tile, width, self.machine):
            return self.launcher(x, residual, second, out)
        if self._wide is None:
            choice = choose_conv(self.spec, (x.shape[0], x.shape[1], width), self.machine)
            if choice.layout != self.choice.layout:
                raise ValueError(f"images {width} pixels wide: {choice} reads weights in another order than {self.choice}")
            self._wide = launcher(self.spec, self.packed, choice, self.machine)
        return self._wide(x, residual, second, out)


def launcher(
    spec: ConvSpec, packed: PackedConv, choice: ConvCandidate, machine: Machine, images: StemImages | None = None
) -> ConvPlan:
    """Returns the plan of a packed layer on a GPU, for the chosen kernel and tile."""
    if choice.kernel == "sm80/conv":
        from lowbit.kernels.sm80.conv import PreparedMmaConv

        return PreparedMmaConv(spec, packed, "mma_s4" in machine.arch.features, images)
    if choice.kernel == "sm90/stem_pool" and images is not None:
        from lowbit.kernels.sm90.stem_pool import PreparedStemPool

        return PreparedStemPool(spec, packed, images, machine.sm_count)
    if choice.kernel == "sm80/depthwise":
        from lowbit.kernels.sm80.depthwise import PreparedDepthwise

        if DEPTHWISE_FORM == "quads":
            from lowbit.kernels.sm80.depthwise_quads import PreparedDepthwiseQuads
            from lowbit.pack.depthwise import DepthwiseTaps

            weight = DepthwiseTaps().unpack(packed.weight, (spec.outputs, 1, *spec.kernel))
            if not quad_refusals(spec, weight):
                return PreparedDepthwiseQuads(spec, packed, weight)
        return PreparedDepthwise(spec, packed, depthwise_tile(spec))
    if isinstance(choice.layout, GroupedBlocks):
        from lowbit.kernels.sm80.grouped_conv import PreparedGrouped

        return PreparedGrouped(spec, packed, choice.layout)
    if isinstance(choice.layout, ThirdStages):
        from lowbit.kernels.sm90.conv_pair import PreparedThird

        return PreparedThird(spec, packed, choice.layout.pair, machine.sm_count)
    if choice.tile is None:
        raise ValueError(f"{choice.kernel} takes a tile")
    if choice.kernel == "sm90/conv_strip":
        from lowbit.kernels.sm90.conv_strip import PreparedStrip

        return PreparedStrip(spec, packed, choice.tile, machine.sm_count)
    if choice.kernel == "sm90/conv_deep":
        from lowbit.kernels.sm90.conv_deep import PreparedDeep

        return PreparedDeep(spec, packed, choice.tile, machine.sm_count)
    from lowbit.kernels.sm90.conv import PreparedConv

    return PreparedConv(spec, packed, choice.tile, machine.sm_count, images)
