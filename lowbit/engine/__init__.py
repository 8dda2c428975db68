"""How a language model runs: a decode step around packed weights, a paged cache, many requests at once.

engine.py     the rounds: plans, launches, reads a round later      batching.py  who computes what next
program.py    the step of a decoder as a list of operators          pages.py     which request holds which page
product.py    products whose weights lie side by side               slots.py     what lies on the device for each request
family.py     which decoders are known, as data                     cache.py     keys and values, and how many fit
forward.py    models that no program knows, one text at a time      steps.py     a step as one CUDA graph for each size
check.py      whether a program computes what its model does        text.py      whole characters, stop strings
"""

from lowbit.engine.engine import Engine
from lowbit.engine.request import Drawn, End, Request
from lowbit.engine.text import TextStream
from lowbit.ops.sample import Sampling

__all__ = ["Drawn", "End", "Engine", "Request", "Sampling", "TextStream"]
