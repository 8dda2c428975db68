"""A model with given next-token probabilities, and a pipeline with given answers."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from lowbit.pipeline import FinishReason, Response
from tests.tiny import tiny_tokenizer


class Scripted(torch.nn.Module):
    """Logits [B, T, V] that depend on the last token only: log(table[token])."""

    def __init__(self, table, context=None):
        super().__init__()
        self.register_buffer("table", torch.as_tensor(table, dtype=torch.float32).log())
        self.config = SimpleNamespace(vocab_size=self.table.shape[1], max_position_embeddings=context)
        self.device = torch.device("cpu")

    def forward(self, ids, attention_mask=None, use_cache=None, logits_to_keep=0):
        return SimpleNamespace(logits=self.table[ids][:, -logits_to_keep:])


class ScriptedPipeline:
    """Answers each prompt with the next of `answers`, and records the prompts."""

    def __init__(self, answers, context=None):
        self.answers, self.asked = iter(answers), []
        self.tokenizer, self.is_encoder_decoder = tiny_tokenizer(), False
        self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=context))

    def __call__(self, prompts, **arguments):
        prompts = [prompts] if isinstance(prompts, str) else prompts
        self.asked.append((prompts, arguments))
        return [Response(next(self.answers), 0, 0, FinishReason.STOP) for _ in prompts]
