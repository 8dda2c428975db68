"""How a language model runs: a decode step around packed weights, a paged cache, many requests at once.

engine.py     the rounds: plans, launches, reads a round later      batching.py  who computes what next
request.py    one text: what was asked, how far it is               pages.py     which request holds which page
program.py    the step of a decoder as a list of operators          slots.py     what lies on the device for each request
chain.py      the same for up to 64, in fewer launches              cache.py     keys and values, and how many fit
product.py    products whose weights lie side by side               steps.py     a step as one CUDA graph for each size
family.py     which decoders are known, as data                     text.py      whole characters, stop strings
forward.py    models that no program knows, one text at a time      check.py     whether a program computes its model
prompts.py    prompts as CUDA graphs, by number of tokens           ragged.py    prompts of any lengths as tensors of one size
prompt_attention.py  attention of all prompts of a round            graphs.py    one memory for all graphs
failure.py    one text that fails, or a round                       warm_up.py   what will be launched, before it is
"""

from lowbit.engine.detokenizer import Detokenizer
from lowbit.engine.engine import Engine
from lowbit.engine.failure import RequestFailed, StepFailed
from lowbit.engine.request import FinishReason, Request, SampledToken
from lowbit.ops.sample import Sampling

__all__ = ["Detokenizer", "Engine", "FinishReason", "Request", "RequestFailed", "SampledToken", "Sampling", "StepFailed"]
