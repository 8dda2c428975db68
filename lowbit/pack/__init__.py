"""Layouts: lossless conversions between codes [N, K] and the bytes that a kernel reads."""

from lowbit.pack.dense import DenseWeight
from lowbit.pack.expert import ExpertWeight
from lowbit.pack.expert_operand import ExpertOperandWeight
from lowbit.pack.fragment import FragmentOrder
from lowbit.pack.gated import gated_refusals, pack_gated
from lowbit.pack.layout import Layout
from lowbit.pack.scaled import OperandWeight, scaled_refusals
from lowbit.pack.scales import pack_scales, unpack_scales
from lowbit.pack.tensorrt_llm import ColumnMajorTileInterleave, PermutedColumnMajor, SignedColumnMajor
from lowbit.pack.weight import (
    DENSE_FORM,
    FragmentWeight,
    WeightForm,
    has_channel_scale,
    kernel_group,
    may_be_subnormal,
    weight_form,
)

__all__ = [
    "DENSE_FORM",
    "ColumnMajorTileInterleave",
    "DenseWeight",
    "ExpertOperandWeight",
    "ExpertWeight",
    "FragmentOrder",
    "FragmentWeight",
    "Layout",
    "OperandWeight",
    "PermutedColumnMajor",
    "SignedColumnMajor",
    "WeightForm",
    "gated_refusals",
    "has_channel_scale",
    "kernel_group",
    "may_be_subnormal",
    "pack_gated",
    "pack_scales",
    "scaled_refusals",
    "unpack_scales",
    "weight_form",
]
