"""The torch operator `lowbit::accept`: advances the slots after a step in which a sequence may have several rows.

On a GPU it is one launch, which a CUDA graph may capture. On a CPU it is plain torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.kernels.reference import sampling
from lowbit.kernels.reference.sampling import AcceptInputs
from lowbit.ops.operands import check_one_device
from lowbit.ops.register import register
from lowbit.ops.sample import SamplingState

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.accept import AcceptPlan


def accept(
    rows: Tensor, given: Tensor, row_positions: Tensor, ahead: Tensor, sampled: Tensor, state: SamplingState, tokens: Tensor,
    positions: Tensor,
) -> None:  # fmt: skip
    """Accepts the sampled tokens that continue their sequences. Tensors of rows are int32 [B]; rows of a slot are adjacent.

    Row i computed the token given[i] of slot rows[i] at row_positions[i], and then sampled[i] was sampled. The row is number
    ahead[i] of its slot, counted from 0. The token that a slot's first row sampled is accepted. The token of a further row is
    accepted if the row before it is accepted and sampled exactly the token that this row was given. An accepted token was
    sampled after the sequence's own tokens, so acceptance does not change the distribution. If a slot s has n accepted tokens,
    tokens[s] becomes the last of them, positions[s] becomes the first row's position + n (both int32 [slots]), and
    state.generated[s] grows by n. If the slot has penalties, state.counts counts the tokens. The last slot is a dummy: its rows
    have ahead 0, and it does not change. Raises ValueError for tensors that do not fit together.
    """
    torch.ops.lowbit.accept(rows, given, row_positions, ahead, sampled, state.settings, state.counts, tokens, positions)


def _check(a: AcceptInputs) -> None:
    """Raises ValueError unless the tensors fit together."""
    slots, rows = a.counts.shape[0], (a.rows.numel(),)
    shapes = [rows] * 5 + [(slots, sampling.WORDS), tuple(a.counts.shape), (slots,), (slots,)]
    for name, t, shape in zip(AcceptInputs._fields, a, shapes, strict=True):
        if tuple(t.shape) != shape or t.dtype != torch.int32 or not t.is_contiguous():
            raise ValueError(
                f"accept: {name} is contiguous int32 {shape} for {rows[0]} rows and {slots} slots, "
                f"got {t.dtype} {tuple(t.shape)}"
            )
    check_one_device("accept", *a)


def _on_cpu(a: AcceptInputs) -> None:
    _check(a)
    sampling.accept_reference(a)


def _on_gpu(a: AcceptInputs) -> None:
    _check(a)
    if len(a.rows):
        _plan(len(a.rows), *a.counts.shape, a.rows.device)(a)


@functools.lru_cache(maxsize=1024)
def _plan(rows: int, slots: int, vocab: int, on: torch.device) -> AcceptPlan:
    from lowbit.kernels.elementwise.accept import AcceptPlan

    return AcceptPlan(rows, slots, vocab)


register(
    "accept(Tensor rows, Tensor given, Tensor row_positions, Tensor ahead, Tensor sampled, Tensor(a!) settings,"
    " Tensor(b!) counts, Tensor(c!) tokens, Tensor(d!) positions) -> ()",
    cuda=_on_gpu,
    cpu=_on_cpu,
    fake=_check,
    arguments=AcceptInputs,
)
