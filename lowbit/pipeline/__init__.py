"""Loads a model, quantizes it if a scheme is given, and generates text. The interface is that of DeepSpeed-MII's pipeline, with
streams added.

pipe = lowbit.pipeline("path", scheme="wf6af16")
for response in pipe(["DeepSpeed is", "Seattle is"], max_new_tokens=128):
    print(response.generated_text, response.finish_reason)
for piece in pipe.stream("Seattle is", max_new_tokens=128):
    print(piece, end="", flush=True)
"""

import inspect
import sys
from types import ModuleType

from lowbit.engine.sequence import FinishReason
from lowbit.pipeline.params import GenerateParams, Response, UnknownArgument
from lowbit.pipeline.pipeline import Pipeline, pipeline
from lowbit.pipeline.stream import Stream

__all__ = ["FinishReason", "GenerateParams", "Pipeline", "Response", "Stream", "UnknownArgument", "pipeline"]


class _Callable(ModuleType):
    """A callable module: `lowbit.pipeline(..)` and `lowbit.pipeline.Response` both work, whichever was imported first."""

    __call__ = staticmethod(pipeline)
    __signature__ = inspect.signature(pipeline)


sys.modules[__name__].__class__ = _Callable
