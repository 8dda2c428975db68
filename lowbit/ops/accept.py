"""The torch operator `lowbit::accept`: advances the slots of a step in which rows are several tokens of a sequence.

One launch on a GPU, which a CUDA graph may capture; plain torch on a CPU.
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
    """Accepts sampled tokens that continue their sequences, all int32 [B], of rows that stand side by side for each slot.

    Row i computed the token given[i] of slot rows[i] at row_positions[i]; it is row ahead[i] of its slot, from 0. Then
    sampled[i] was sampled. The token of a slot's first row is accepted, and each further one as long as the token before it is
    the given one: it was sampled from the distribution of the sequence itself, so that acceptance does not change what is
    sampled. For n accepted tokens: tokens[s] becomes the last of them and positions[s] the first row's position + n (int32
    [slots]), state.generated[s] += n, and state.counts if the slot has penalties. The last slot is a dummy: its rows have
    ahead 0, and it does not change. Raises ValueError for tensors that do not fit together.
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
