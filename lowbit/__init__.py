"""Low-bit neural networks on NVIDIA GPUs: quantize, convert, evaluate and run them fast.

    import lowbit
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=lowbit.LowbitConfig("w6e3m2a16"))

The packages below are the biography of a weight, in the order in which to read them: what a code means, where it comes
from, how it is chosen, what the machine wants, how it lies in memory, how it is multiplied, how torch calls that, and
what is built on top. A layer imports only earlier ones. Importing `lowbit` makes no CUDA call; it registers the
quantization method "lowbit" with Transformers, so that saved checkpoints load with plain `from_pretrained`.
"""

from lowbit import vision
from lowbit._version import __version__
from lowbit.formats import QuantTensor, Scheme, parse_scheme
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.hf import LowbitConfig
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn import QuantLinear, convert
from lowbit.ops import mixed_gemm
from lowbit.pipeline import Pipeline, Response, pipeline
from lowbit.quantize import rtn

LAYERS = (
    "formats",
    "checkpoint",
    "quantize",
    "hardware",
    "pack",
    "kernels",
    "ops",
    "nn",
    "models",
    "vision",
    "pipeline",
    "picture",
    "eval",
    "explain",
    "demo",
    "study",
    "bench",
    "cli",
)

__all__ = [
    "LAYERS",
    "LowbitConfig",
    "Pipeline",
    "QuantLinear",
    "QuantTensor",
    "Response",
    "Scheme",
    "__version__",
    "convert",
    "convert_checkpoint",
    "mixed_gemm",
    "parse_scheme",
    "pipeline",
    "quantize_checkpoint",
    "rtn",
    "vision",
]
