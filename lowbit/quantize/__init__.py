"""Which code to choose for each weight: float [N, K] -> QuantTensor."""

from lowbit.quantize.rtn import rtn

__all__ = ["rtn"]
