"""Quantizes the weights of the experts of a layer one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lowbit.formats import ExpertTensor, QuantTensor

QuantizeExpert = Callable[[int, torch.dtype | None], QuantTensor]
"""Returns the quantized matrix of an expert; its scales have the given dtype, or that of `rtn.scale_dtype` if it is None."""


class _MixedScales(Exception):
    """Scales of two experts have different dtypes."""


def quantize_experts(count: int, quantize: QuantizeExpert) -> ExpertTensor:
    """Returns the weights of `count` experts, each quantized by `quantize` and packed before the next.

    All experts of a layer have scales of one dtype. If fp16 can hold the scales of some experts only (`rtn.scale_dtype`), all
    experts are quantized again with bf16 scales. Converting the scales alone would leave codes that are not the nearest ones.
    """
    try:
        return ExpertTensor.stack(_one_by_one(count, quantize, None), count)
    except _MixedScales:
        return ExpertTensor.stack(_one_by_one(count, quantize, torch.bfloat16), count)


def _one_by_one(count: int, quantize: QuantizeExpert, scale_type: torch.dtype | None) -> Iterator[QuantTensor]:
    first: torch.dtype | None = None
    for e in range(count):
        q = quantize(e, scale_type)
        first = q.scale.dtype if first is None else first
        if q.scale.dtype != first:
            raise _MixedScales
        yield q
