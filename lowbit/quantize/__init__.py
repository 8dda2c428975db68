"""Quantization algorithms: float weights [N, K] -> QuantTensor.

`rtn` and `hqq` need only the weight; `gptq`, `awq`, `smoothquant` and `mixed` also statistics of the layer's calibration inputs
(`statistics`). `learned` has the parameters that `models.learn` trains for a whole decoder layer. `fold` moves scales into the
preceding module; `lorc` corrects part of the error by a low-rank matrix.
"""

from lowbit.methods import Awq, Gptq, Hqq, Learned, Method, Mixed, Rtn, SmoothQuant
from lowbit.quantize.gptq import gptq
from lowbit.quantize.hqq import hqq
from lowbit.quantize.lorc import lorc
from lowbit.quantize.rtn import rtn
from lowbit.quantize.statistics import InputStatistics

__all__ = [
    "Awq",
    "Gptq",
    "Hqq",
    "InputStatistics",
    "Learned",
    "Method",
    "Mixed",
    "Rtn",
    "SmoothQuant",
    "gptq",
    "hqq",
    "lorc",
    "rtn",
]
