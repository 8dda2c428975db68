"""The engine: a decode step over packed weights, a paged KV cache, continuous batching.

engine.py          submit, cancel, stream, step                 scheduler.py         what the next step computes
request.py         a prompt and how to continue it              sequence.py          its state: tokens, pages, finish reason
block_pool.py      pages of the cache, prefix caching           deprecated.py        names until 2026-11
program.py         a decoder as a list of operators             slots.py             device tensors of running requests
chain.py           a step of up to 64 tokens, fewer launches    cache.py             memory of keys and values
product.py         products that share one weight tensor        decode_runner.py     decode steps as CUDA graphs
family.py          known decoders, as data                      prefill_runner.py    prefill chunks as CUDA graphs
forward.py         models without a decode program              ragged.py            prefill chunks as tensors of one shape
check.py           compares a program with its model            prompt_attention.py  attention of prefill chunks
detokenizer.py     incremental detokenization, stop strings     graphs.py            memory shared by all graphs
failure.py         errors of a request or of a step             warm_up.py           kernels that will be launched
"""

from lowbit.engine import deprecated
from lowbit.engine.detokenizer import Detokenizer
from lowbit.engine.engine import Engine
from lowbit.engine.failure import RequestFailed, StepFailed
from lowbit.engine.request import Request, SampledToken
from lowbit.engine.sequence import FinishReason, Sequence
from lowbit.ops.sample import Sampling

__all__ = [
    "Detokenizer", "Engine", "FinishReason", "Request", "RequestFailed", "SampledToken", "Sampling", "Sequence", "StepFailed",
]  # fmt: skip

deprecated.accept_names()
__getattr__ = deprecated.class_of
