"""Networks for images in INT8 and INT4: `quantize` takes a CNN of torch and some images.

In the order of a network's way: `trace` (a module becomes a `Graph`, batch norms folded, what follows a convolution fused),
`observe` (ranges on calibration images), `sensitivity` and `bits` (4 or 8 bits for each layer, scales and codes), `finetune`
(learned step sizes), `lower` (a `Program` of integers), `fusion` (what kernels compute together), `memory` (where values lie).
"""

from lowbit.vision.finetune import FineTune
from lowbit.vision.memory import MemoryPlan, plan_memory
from lowbit.vision.network import QuantizedNetwork, quantize
from lowbit.vision.observe import observe
from lowbit.vision.pixels import Pixels
from lowbit.vision.program import Program
from lowbit.vision.saved import load, save
from lowbit.vision.sensitivity import choose_int8
from lowbit.vision.trace import UnsupportedNetwork, trace

__all__ = [
    "FineTune",
    "MemoryPlan",
    "Pixels",
    "Program",
    "QuantizedNetwork",
    "UnsupportedNetwork",
    "choose_int8",
    "load",
    "observe",
    "plan_memory",
    "quantize",
    "save",
    "trace",
]
