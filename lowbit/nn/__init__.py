"""Modules with quantized weights, and the conversion of a model's modules to them."""

from lowbit.nn.convert import Kept, Plan, convert, plan_conversion
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import PackedExperts, QuantExperts
from lowbit.nn.linear import QuantLinear, make_batch_invariant
from lowbit.nn.packed import PackedWeight

__all__ = [
    "Kept", "PackedExperts", "PackedWeight", "Plan", "QuantEmbedding", "QuantExperts", "QuantLinear", "convert",
    "make_batch_invariant", "plan_conversion",
]  # fmt: skip
