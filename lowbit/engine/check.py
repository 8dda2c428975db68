"""Whether a decode program can compute a model, and computes what it does: both on the same random tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from lowbit.engine.cache import Cache
from lowbit.engine.family import Decoder
from lowbit.engine.program import DecodeProgram
from lowbit.engine.request import Request
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import attention_refusals
from lowbit.ops.elementwise import MOST_COLUMNS
from lowbit.ops.operands import triton_refusals

LARGEST_DIFFERENCE = 0.2
"""Of logits, in the norm, over theirs. In a model of random weights that magnifies differences, rounding made 1e-6 in float32
and 0.14 in bf16 with fp8 activations, where a last bit turns codes; wrong formulas (GELU for SiLU, another scale of attention,
no window) 0.26 to 1.8. tests/engine/test_family.py proves a family's formulas; this finds models that are not of them."""

TOKENS = 33
"""Of the prompt; one more is a step."""


def kernel_refusals(decoder: Decoder, dtype: torch.dtype) -> tuple[str, ...]:
    """Why the kernels of a step cannot compute a decoder on a GPU in `dtype`; empty if they can."""
    reasons = [*attention_refusals(decoder.attention), *triton_refusals()]
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"its kernels compute in fp16 and bf16, the model is in {str(dtype).removeprefix('torch.')}")
    if decoder.hidden > MOST_COLUMNS:
        reasons.append(f"its norms take up to {MOST_COLUMNS:,} columns, the model has {decoder.hidden:,}")
    return tuple(reasons)


@torch.no_grad()  # and not inference_mode: what it makes are the model's weights too, which may be trained later
def difference_to(model: PreTrainedModel, make: Callable[[], DecodeProgram]) -> tuple[DecodeProgram, float]:
    """A program that `make` makes of a model, and the norm of the difference of their logits over theirs: after a prompt of
    random tokens, and after one token more. The model computes first: a program may take its weights over."""
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
    prompt = program.prompt([PrefillChunk(request, 0, tuple(ids[:-1].tolist()), True)], slots)
    step = program.step(on_device([0], program.device), slots)
    program.cache = None
    assert prompt is not None
    found = torch.cat([prompt, step]).float()
    return program, float((found - expected).norm() / expected.norm())
