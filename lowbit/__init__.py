"""Low-bit neural networks on NVIDIA GPUs: quantize, convert, evaluate and run them fast.

    import lowbit
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=lowbit.LowbitConfig("w6e3m2a16"))

`LAYERS` lists the packages in the order of a weight's path: number formats, checkpoints, quantization, hardware, packing,
kernels, operators, modules, models, engine, and what is built on them. A layer imports only earlier ones.
Importing `lowbit` imports none of them, nor torch, nor Transformers; a public name imports its module on first use.
The quantization method "lowbit" is registered with Transformers, whether that is imported before or after `lowbit`, so
saved checkpoints load with plain `from_pretrained`.
"""

import importlib
import importlib.abc
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowbit._version import __version__

if TYPE_CHECKING:
    from lowbit import vision
    from lowbit.formats import QuantTensor, Scheme, parse_scheme
    from lowbit.models.convert_checkpoint import convert_checkpoint
    from lowbit.models.hf import LowbitConfig
    from lowbit.models.load import load
    from lowbit.models.lora import support_lora
    from lowbit.models.quantize_checkpoint import quantize_checkpoint
    from lowbit.nn import QuantLinear, convert
    from lowbit.ops import gemm, pack_for
    from lowbit.pipeline import Pipeline, Response, pipeline
    from lowbit.quantize import rtn

LAYERS = (
    "folders",
    "sources",
    "extras",
    "printable",
    "progress",
    "formats",
    "methods",
    "checkpoint",
    "quantize",
    "hardware",
    "pack",
    "kernels",
    "ops",
    "nn",
    "models",
    "vision",
    "engine",
    "pipeline",
    "serve",
    "vllm",
    "sglang",
    "picture",
    "eval",
    "recommend",
    "explain",
    "demo",
    "tune",
    "export",
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
    "gemm",
    "load",
    "pack_for",
    "parse_scheme",
    "pipeline",
    "quantize_checkpoint",
    "rtn",
    "support_lora",
    "vision",
]

_HOMES = {
    "LowbitConfig": "lowbit.models.hf",
    "Pipeline": "lowbit.pipeline",
    "QuantLinear": "lowbit.nn",
    "QuantTensor": "lowbit.formats",
    "Response": "lowbit.pipeline",
    "Scheme": "lowbit.formats",
    "convert": "lowbit.nn",
    "convert_checkpoint": "lowbit.models.convert_checkpoint",
    "gemm": "lowbit.ops",
    "load": "lowbit.models.load",
    "pack_for": "lowbit.ops",
    "parse_scheme": "lowbit.formats",
    "quantize_checkpoint": "lowbit.models.quantize_checkpoint",
    "rtn": "lowbit.quantize",
    "support_lora": "lowbit.models.lora",
}
"""The module that defines each public name. Imported on first use: torch takes over a second, Transformers twice that."""

_MODELING_UTILS = "transformers.modeling_utils"
"""The module of Transformers that loads models and looks up quantization methods by name."""

_import_lock = threading.RLock()
"""Serializes imports of layers: with circular imports, a second thread could see a partly initialized module."""

_IMPORT_MODELS = tuple(
    f"lowbit.{layer}" for layer in ("models", "engine", "pipeline", "serve", "eval", "recommend", "explain", "demo", "bench")
)
"""Layers that import `transformers.modeling_utils`, which in turn imports `lowbit.models.hf`."""


def __getattr__(name: str) -> Any:
    home = f"lowbit.{name}" if name in LAYERS else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
    with _import_lock:
        if home.startswith(_IMPORT_MODELS):  # always in this order, else two threads can deadlock on the import locks
            importlib.import_module(_MODELING_UTILS)
        module = importlib.import_module(home)
        if name in LAYERS:
            return module
        value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterWithTransformers(importlib.abc.MetaPathFinder):
    """Imports `lowbit.models.hf`, which registers the method "lowbit", right after `transformers.modeling_utils`.

    `import lowbit` must not import Transformers, so it cannot register the method itself. Transformers has no entry point
    for quantization methods. Python has no callback for "module imported" either. This finder therefore finds that one
    module as Python would, and adds an import to the end of its `exec_module`.
    """

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODELING_UTILS:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # Python has asked the earlier finders: they returned None
        specs = (finder.find_spec(fullname, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # removes this function: the next line calls the method of the loader's class
            loader.exec_module(module)
            try:
                importlib.import_module("lowbit.models.hf")
            except ImportError as error:
                raise ImportError(f"lowbit could not register with Transformers: {error}") from error

        if loader is not None:
            loader.exec_module = exec_module
        return spec


if _MODELING_UTILS in sys.modules:
    importlib.import_module("lowbit.models.hf")
else:
    sys.meta_path.insert(0, _RegisterWithTransformers())
