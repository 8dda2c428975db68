"""How good a model still is: perplexity on real text."""

from lowbit.eval.perplexity import Perplexity, perplexity
from lowbit.eval.text import sample_text

__all__ = ["Perplexity", "perplexity", "sample_text"]
