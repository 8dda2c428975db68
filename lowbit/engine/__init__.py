"""The engine: a decode step over packed weights, a paged KV cache, continuous batching.

engine.py          submit, cancel, stream, step                 scheduler.py         what the next step computes
request.py         a request and its sampled tokens             block_pool.py        pages of the cache, prefix caching
program.py         a decoder as a list of operators             slots.py             device tensors of running requests
chain.py           a step of up to 64 tokens, fewer launches    cache.py             memory of keys and values
product.py         products that share one weight tensor        decode_runner.py     decode steps as CUDA graphs
family.py          known decoders, as data                      prefill_runner.py    prefill chunks as CUDA graphs
forward.py         models without a decode program              ragged.py            prefill chunks as tensors of one shape
check.py           compares a program with its model            prompt_attention.py  attention of prefill chunks
detokenizer.py     incremental detokenization, stop strings     graphs.py            memory shared by all graphs
failure.py         errors of a request or of a step             warm_up.py           kernels that will be launched
"""

import warnings
from typing import Any

from lowbit.engine.detokenizer import Detokenizer
from lowbit.engine.engine import Engine
from lowbit.engine.failure import RequestFailed, StepFailed
from lowbit.engine.request import FinishReason, Request, SampledToken
from lowbit.ops.sample import Sampling

__all__ = ["Detokenizer", "Engine", "FinishReason", "Request", "RequestFailed", "SampledToken", "Sampling", "StepFailed"]

_DEPRECATED: dict[str, Any] = {
    "Drawn": SampledToken,
    "End": FinishReason,
    "RoundFailed": StepFailed,
    "TextFailed": RequestFailed,
    "TextStream": Detokenizer,
}
"""Names until 2026-11."""


def __getattr__(name: str) -> Any:
    if name not in _DEPRECATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _DEPRECATED[name]
    warnings.warn(f"lowbit.engine.{name} is now lowbit.engine.{new.__name__}", DeprecationWarning, stacklevel=2)
    return new
