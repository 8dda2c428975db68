"""NVFP4: floats e2m1 in groups of 16, each with a scale e4m3, and one float32 number for the whole matrix w [N, K].

    codes           uint8 [N, K / 2], the even column in the low nibble
    scale           float8_e4m3fn [N, K / 16]
    global scale    float32; compressed-tensors divides by it, ModelOpt multiplies with it

    w = code * (scale / global scale)   or   w = code * (scale * global scale)

Both tools round the term in brackets to float32 and multiply the code by it. A QuantTensor has these float32 numbers as its
group scales, so the weights are bit-identical to the tools'. It does not have the two factors, so such files are only read.
Source: compressed-tensors 0.19.0 (compressors/nvfp4, quantization/lifecycle/forward_helpers.py), ModelOpt 0.47.0
(torch/quantization/qtensor/nvfp4_tensor.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import ForeignLayer, read_fp8
from lowbit.formats import PerGroup, QuantTensor, Scheme, float_format, unpack_words

SCHEME = Scheme(float_format(2, 1), None, PerGroup(16))


def nvfp4_shape(layer: ForeignLayer, codes: str, scale: str, global_scale: str) -> tuple[int, int]:
    """Returns (N, K) of a layer; the arguments are suffixes. Raises CheckpointError if the three tensors do not fit."""
    n, width = layer.matrix(codes, (torch.uint8,))
    if width % 8:
        raise layer.error(codes, f"rows of {width} bytes do not hold whole groups of 16 weights")
    layer.expect(scale, (torch.float8_e4m3fn,), (n, width // 8))
    layer.expect(global_scale, (torch.float32,), (1,), ())
    return n, 2 * width


def read_nvfp4(layer: ForeignLayer, codes: str, scale: str, global_scale: str, *, divided: bool) -> QuantTensor:
    """Returns the layer; its group scales are divided by the global scale, or multiplied by it."""
    k = nvfp4_shape(layer, codes, scale, global_scale)[1]
    whole = layer.scales(global_scale).reshape(())
    if not float(whole):
        raise layer.error(global_scale, "the scale of the whole matrix is 0; the file is damaged or its producer failed")
    groups = read_fp8(layer, scale).view(torch.float8_e4m3fn).float()
    scales: Tensor = groups / whole if divided else groups * whole
    if not bool(scales.isfinite().all()):
        raise layer.error(global_scale, f"group scales beyond float32 with {float(whole):g}; the file is damaged")
    return QuantTensor(unpack_words(layer.tensor(codes), 4, k), scales, None, SCHEME)
