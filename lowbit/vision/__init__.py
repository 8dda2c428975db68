"""Image networks in INT8 and INT4: `quantize` takes a torch CNN and calibration images.

Modules in the order of use: `trace` (module -> `Graph`, with batch norms folded and operations fused), `observe` (ranges on
calibration images), `sensitivity` and `bits` (4 or 8 bits per layer, scales and codes), `finetune` (learned step sizes),
`lower` (an integer `Program`), `fusion` (operations that share a kernel), `memory` (the memory plan). `onnx_reader` and
`onnx_writer` exchange networks with other tools.
"""

from lowbit.vision.finetune import FineTune
from lowbit.vision.memory import MemoryPlan, plan_memory
from lowbit.vision.network import QuantizedNetwork, quantize
from lowbit.vision.observe import observe
from lowbit.vision.onnx_nodes import OnnxError
from lowbit.vision.onnx_reader import OnnxNetwork, read_onnx
from lowbit.vision.onnx_writer import write_onnx
from lowbit.vision.pixels import Pixels
from lowbit.vision.program import Program
from lowbit.vision.saved import load, save
from lowbit.vision.sensitivity import choose_int8
from lowbit.vision.trace import UnsupportedNetwork, trace

__all__ = [
    "FineTune",
    "MemoryPlan",
    "OnnxError",
    "OnnxNetwork",
    "Pixels",
    "Program",
    "QuantizedNetwork",
    "UnsupportedNetwork",
    "choose_int8",
    "load",
    "observe",
    "plan_memory",
    "quantize",
    "read_onnx",
    "save",
    "trace",
    "write_onnx",
]
