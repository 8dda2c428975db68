"""Low-bit neural networks on NVIDIA GPUs: quantize, convert, evaluate and run them fast.

    import lowbit
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=lowbit.LowbitConfig("w6e3m2a16"))

The packages below are the biography of a weight, in the order in which to read them: what a code means, where it comes
from, how it is chosen, what the machine wants, how it lies in memory, how it is multiplied, how torch calls that, and
what is built on top. A layer imports only earlier ones. Importing `lowbit` imports none of them, nor torch, nor Transformers:
a name brings its modules when it is used. Whenever Transformers is imported, before or after, the quantization method
"lowbit" is registered with it, so that saved checkpoints load with plain `from_pretrained`.
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
"""Where the public names are defined; torch takes over a second to import and Transformers twice that."""


_first_use = threading.RLock()
"""One thread imports at a time: modules that import each other are otherwise seen half made."""

_WITH_MODELS = tuple(
    f"lowbit.{room}" for room in ("models", "engine", "pipeline", "serve", "eval", "recommend", "explain", "demo", "bench")
)
"""Rooms that import Transformers' models."""


def __getattr__(name: str) -> Any:
    home = f"lowbit.{name}" if name in LAYERS else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
    with _first_use:
        if home.startswith(_WITH_MODELS):  # which imports models.hf in turn: threads must not meet between the two
            importlib.import_module(_MODELS)
        module = importlib.import_module(home)
        if name in LAYERS:  # packages, of which `pipeline` can be called
            return module
        found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_MODELS = "transformers.modeling_utils"
"""The module of Transformers that loads models, and asks for quantization methods by name."""


class _WithTransformers(importlib.abc.MetaPathFinder):
    """Registers this library's method once Transformers can load models, and not before: importing it is then no detour."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODELS:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # those before have passed
        found = (f.find_spec(fullname, path, target) for f in behind if hasattr(f, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """Loads a module as `loader` does, and leaves no trace of itself."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        try:
            importlib.import_module("lowbit.models.hf")
        except ImportError as error:
            raise ImportError(f"lowbit could not register with Transformers: {error}") from error


if _MODELS in sys.modules:
    importlib.import_module("lowbit.models.hf")
else:
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != _WithTransformers.__name__]  # of an import before this
    sys.meta_path.insert(0, _WithTransformers())
