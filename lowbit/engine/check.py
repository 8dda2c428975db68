"""Chooses the program of a model: a decode program if it computes what the model does, else the model's own forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbit.engine.balance import balance_keys
from lowbit.engine.cache import Cache
from lowbit.engine.decoder import Decoder
from lowbit.engine.forward import ForwardProgram
from lowbit.engine.model_program import ModelProgram
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.engine.request import Request
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence
from lowbit.engine.slots import Slots, on_device
from lowbit.formats.kv import KV16, KVScheme
from lowbit.kernels.choose.attention import attention_refusals
from lowbit.ops.elementwise import MOST_COLUMNS
from lowbit.ops.operands import triton_refusals
from lowbit.ops.ranks import Ranks
from lowbit.pack.kv_pages import kv_refusals

LARGEST_DIFFERENCE = 0.2
"""Maximum of ||program - model|| / ||model|| of the logits. Rounding, which random weights amplify, gives 1e-6 in float32 and
0.14 in bf16 with fp8 activations. Wrong formulas (GELU for SiLU, another attention scale, no window) differ by 0.26 to 1.8.
tests/engine/test_family.py proves the formulas of a family; this check finds models that deviate from them.
"""

TOKENS = 33
"""Number of prompt tokens with which a program is compared; a decode step then computes one more token."""


def program_for(
    model: PreTrainedModel, positions: int, batch_invariant: bool, forward: bool, kv: KVScheme,
    persistent_step: bool | None = None, ranks: Ranks | None = None,
) -> tuple[ModelProgram, float]:  # fmt: skip
    """Returns the program of a model, and the relative difference of its logits from the model's own. Raises ValueError if
    there is no decode program and one is needed: for a `kv` of fewer than 16 bits, and for one rank's part of a model."""
    program: ModelProgram
    if forward:
        on_cpu = model.device.type == "cpu"
        reason = "on a CPU that is faster for one user" if on_cpu else "the engine was made so, with forward=True"
        program, difference = ForwardProgram(model, (reason,)), 0.0
    else:
        program, difference = program_of(
            model, positions, batch_invariant=batch_invariant, kv=kv, persistent_step=persistent_step, ranks=ranks
        )
    if program.reasons and ranks is not None:
        raise ValueError(
            f"tensor parallelism needs a decode program; this model would run through Transformers' forward "
            f"({'; '.join(program.reasons)}): load it without tensor_parallel"
        )
    if program.reasons and kv.quantized:
        raise ValueError(
            f"keys and values in {kv} need a decode program; this model would run through Transformers' forward and its 16-bit "
            f"cache ({'; '.join(program.reasons)}): leave kv at '16'"
        )
    return program, difference


def program_of(
    model: PreTrainedModel, positions: int, *, batch_invariant: bool, kv: KVScheme = KV16, persistent_step: bool | None = None,
    ranks: Ranks | None = None,
) -> tuple[ModelProgram, float]:  # fmt: skip
    """Returns (program, difference) of a model for sequences of up to `positions` tokens, with keys and values in `kv`. If the
    model has a decode program, returns it with the relative difference of its logits from the model's. Else returns a
    `ForwardProgram`, whose `reasons` say why there is none, and 0.
    """
    decoder = recognise(model, max(positions, TOKENS + 1))
    if isinstance(decoder, tuple):
        return ForwardProgram(model, decoder), 0.0
    refused = kernel_refusals(decoder, model.dtype, kv) if model.device.type == "cuda" else ()
    if refused:
        return ForwardProgram(model, refused), 0.0

    if kv.quantized:
        balance_keys(decoder)

    def make() -> DecodeProgram:
        return DecodeProgram(
            decoder, model.dtype, model.device, batch_invariant=batch_invariant, kv=kv, persistent_step=persistent_step,
            ranks=ranks,
        )  # fmt: skip

    forward = contextlib.nullcontext() if ranks is None else summing_forward(decoder, ranks)
    program, difference = difference_to(model, make, forward)
    if not difference <= LARGEST_DIFFERENCE:  # or NaN
        return ForwardProgram(model, (f"the decode program of {decoder.family} differs from it by {difference:.2g}",)), 0.0
    return program, difference


def kernel_refusals(decoder: Decoder, dtype: torch.dtype, kv: KVScheme = KV16) -> tuple[str, ...]:
    """Returns the reasons why the kernels of a decode step cannot compute a decoder in `dtype` with keys and values in `kv`;
    empty if they can."""
    reasons = [*attention_refusals(decoder.attention), *kv_refusals(kv, decoder.attention.head_dim), *triton_refusals()]
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"its kernels compute in fp16 and bf16, the model is in {str(dtype).removeprefix('torch.')}")
    if decoder.hidden > MOST_COLUMNS:
        reasons.append(f"its norms take up to {MOST_COLUMNS:,} columns, the model has {decoder.hidden:,}")
    return tuple(reasons)


@contextlib.contextmanager
def summing_forward(decoder: Decoder, ranks: Ranks) -> Iterator[None]:
    """Inside the context, Transformers' forward of one rank's part computes the logits of the whole model. All ranks must run
    it together."""

    def gathered(module: nn.Module, args: object, y: Tensor) -> Tensor:
        return ranks.gathered(y.reshape(-1, y.shape[-1]), decoder.vocab).view(*y.shape[:-1], decoder.vocab)

    hooks = [decoder.head.register_forward_hook(gathered)]
    for layer in decoder.layers:
        for phase, module in enumerate((*layer.modules("o"), *layer.modules("down"))):
            hooks.append(module.register_forward_hook(lambda module, args, y, phase=phase: ranks.total(y, phase)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()  # not inference_mode: the model's weights may be trained later
def difference_to(
    model: PreTrainedModel, make: Callable[[], DecodeProgram], forward: AbstractContextManager[object] | None = None
) -> tuple[DecodeProgram, float]:  # fmt: skip
    """Returns the program of `make` and the relative difference ||program - model|| / ||model|| of the logits, after a random
    prompt and after one decode step. The model runs first, since the program may repack its weights. The comparison is about
    formulas, so it stores keys and values in 16 bits even if the program has fewer. `forward`: a context in which the model
    runs.
    """
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (TOKENS + 1,), generator=generator)
    with forward or contextlib.nullcontext():
        expected = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, -2:].float()
    program = make()
    program.cache = Cache(replace(program.cache_spec, kv=KV16), 2, program.device)
    slots = Slots(1, TOKENS + 1, vocab, (), program.device)
    sequence = Sequence(Request(ids[:-1].tolist(), 1), slot=0)
    slots.update([(0, 0, 1)], [(0, TOKENS)])
    slots.tokens[0] = int(ids[-1])
    prompt = program.prompt([PrefillChunk(sequence, 0, tuple(ids[:-1].tolist()), True)], slots)
    step = program.step(on_device([0], program.device), slots)
    program.cache = None
    assert prompt is not None
    logits = torch.cat([prompt, step]).float()
    return program, float((logits - expected).norm() / expected.norm())
