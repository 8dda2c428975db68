"""Whether a decode program computes what its model does: both on the same random tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbit.engine.batching import Piece
from lowbit.engine.cache import Cache
from lowbit.engine.program import DecodeProgram
from lowbit.engine.request import Request
from lowbit.engine.slots import Slots, on_device

LARGEST_DIFFERENCE = 0.1
"""Of logits, over the largest of them: rounding in 16 bits makes 0.001 to 0.02, a wrong formula more than 0.3."""

TOKENS = 33


@torch.inference_mode()
def difference_to(model: PreTrainedModel, make: Callable[[], DecodeProgram]) -> tuple[DecodeProgram, float]:
    """A program that `make` makes of a model, and the largest difference of their logits over the largest logit: after a prompt
    of random tokens, and after one token more. The model computes first: a program may take its weights over."""
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (TOKENS + 1,), generator=generator)
    expected = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, -2:].float()
    program = make()
    program.cache = Cache(program.cache_spec, 2, program.device)
    slots = Slots(1, TOKENS + 1, vocab, (), program.device)
    request = Request(ids[:-1].tolist(), 1)
    request.slot = 0
    slots.update([(0, 0, 1)], [(0, TOKENS)])
    slots.tokens[0] = int(ids[-1])
    prompt = program.prompt([Piece(request, 0, tuple(ids[:-1].tolist()), True)], slots)
    step = program.step(on_device([0], program.device), slots)
    program.cache = None
    assert prompt is not None
    found = torch.cat([prompt, step]).float()
    return program, _largest(found - expected) / _largest(expected)


def _largest(values: Tensor) -> float:
    return float(values.abs().max())
