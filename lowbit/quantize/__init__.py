"""Which code to choose for each weight: float [N, K] -> QuantTensor.

`rtn` and `hqq` need nothing but the weight; `gptq`, `awq`, `smoothquant` and `mixed` also what calibration saw of the layer's
inputs (`statistics`). `learned` has what `models.learn` moves in a whole decoder layer at once. `fold` moves factors into the
layer before, `lorc` takes back part of the error by a low-rank matrix.
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
