"""How codes lie in memory: lossless layouts between codes [N, K] and the bytes that a kernel reads."""

from lowbit.pack.fragment import FragmentOrder
from lowbit.pack.layout import Layout, PackedTensor, RowMajor, pack
from lowbit.pack.scaled import ScaledWeight, pack_scaled_weight, scaled_refusals, unpack_scaled_weight
from lowbit.pack.scales import pack_scales, unpack_scales
from lowbit.pack.tensorrt_llm import ColumnMajorTileInterleave
from lowbit.pack.weight import (
    KernelWeight,
    WeightForm,
    has_channel_scale,
    kernel_group,
    pack_weight,
    unpack_weight,
    weight_form,
)

__all__ = [
    "ColumnMajorTileInterleave",
    "FragmentOrder",
    "KernelWeight",
    "Layout",
    "PackedTensor",
    "RowMajor",
    "ScaledWeight",
    "WeightForm",
    "has_channel_scale",
    "kernel_group",
    "pack",
    "pack_scaled_weight",
    "pack_scales",
    "pack_weight",
    "scaled_refusals",
    "unpack_scaled_weight",
    "unpack_scales",
    "unpack_weight",
    "weight_form",
]
