"""Which kernels an engine will ever launch, found by going through every step and prompt without launching any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.engine.batching import Piece
from lowbit.engine.program import DecodeProgram
from lowbit.engine.request import Request
from lowbit.engine.slots import on_device
from lowbit.engine.steps import Steps, draw

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import Wanted

SLOW_SECONDS = 0.5
"""A kernel that takes longer was not in Triton's cache, and so are not those after it."""


@dataclass(frozen=True)
class Stage:
    """What a warm-up does next, and how far it is with all that is of this kind."""

    what: str
    done: int
    total: int


def lengths(most: int) -> list[int]:
    """Tokens of prompts of up to `most` that between them need every tile that one of any length needs."""
    return [*range(1, min(most, 17)), *range(24, most, 8), most]


@torch.inference_mode()
def kernels_of(program: DecodeProgram, steps: Steps, concurrent: int, piece: int) -> list[Wanted]:
    """The kernels of all steps, of prompts of up to `piece` tokens, and of the tokens drawn behind up to `concurrent` of them,
    but for those that are compiled already. What they would read and write is nobody's."""
    from lowbit.kernels.parts.launch import recording

    slots = steps.slots
    request = Request([0], 1)
    request.slot = slots.nobodys
    with torch.cuda.device(program.device), recording() as wanted:
        for size, filters, reach in steps.variants():
            steps.run(_nobodys(steps, size), filters, reach)
        for length in lengths(piece):
            program.prompt([Piece(request, 0, (0,) * length, False)], slots)
        for count in range(1, concurrent + 1):
            h = torch.zeros(count, program.decoder.hidden, dtype=program.dtype, device=program.device)
            for filters in (False, True):
                draw(program.logits(h, h), _nobodys(steps, count), slots, filters)
    return wanted


def _nobodys(steps: Steps, count: int) -> Tensor:
    return on_device([steps.slots.nobodys] * count, steps.slots.device)


def compiled(wanted: list[Wanted], sm: int) -> Iterator[Stage]:
    """Compiles kernels for GPUs of compute capability `sm`, by several processes where Triton's cache does not have them; says
    how far it is before each."""
    from lowbit.kernels.parts.compile import compile_all, compile_one

    for number, each in enumerate(wanted):
        yield Stage("kernels", number, len(wanted))
        begun = time.perf_counter()
        compile_one(each)
        if time.perf_counter() - begun > SLOW_SECONDS:
            left = wanted[number + 1 :]
            for more in compile_all(left, sm):
                yield Stage("kernels", number + more, len(wanted))
            for one in left:  # from the cache into this process
                compile_one(one)
            return
