"""Measures model quality: perplexity and divergence on text, multiple choice, summaries, generated programs."""

from lowbit.eval.choice import Choice, choose
from lowbit.eval.divergence import Divergence, divergence
from lowbit.eval.pass_at_k import PassAtK, pass_at_k, solve
from lowbit.eval.perplexity import Perplexity, perplexity
from lowbit.eval.rouge import Rouge, rouge, summarize
from lowbit.eval.text import sample_text

__all__ = [
    "Choice",
    "Divergence",
    "PassAtK",
    "Perplexity",
    "Rouge",
    "choose",
    "divergence",
    "pass_at_k",
    "perplexity",
    "rouge",
    "sample_text",
    "solve",
    "summarize",
]
