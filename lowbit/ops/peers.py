"""Memory that all ranks of a host can write (torch's symmetric memory), and sums of a decode step that use it.

A sum of a few rows takes about as long as one transfer of a row over NVLink. NCCL takes 15 to 18 us in a graph (two H200s,
2026-11-22). kernels/elementwise/sum_ranks.py describes which rank writes what and when. NVLink multicast is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.hardware.machine import machine_of

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.sum_ranks import SumRanksPlan

ROWS = 64
"""Maximum number of rows of a sum. A chain of fused products (ops/fused_gemm.py) has at most as many."""

PHASES = 2

_used = False


class Peers:
    """Sums of up to `ROWS` rows of `width` elements of `dtype`, fp16 or bf16. All ranks must create this object together.
    `agreed` returns the smallest of all ranks' numbers. Raises RuntimeError on all ranks if the GPU of one cannot write the
    memory of another.

    On all ranks, calls must alternate between the phases 0 and 1. CUDA graphs may capture them.
    """

    def __init__(
        self, rank: int, size: int, width: int, dtype: torch.dtype, device: torch.device, agreed: Callable[[int], int]
    ) -> None:  # fmt: skip
        self.rank, self.size, self.width, self.dtype, self.device = rank, size, width, dtype, device
        count = PHASES * size * ROWS * width
        global _used
        # Only the first process group can use it: all default groups of a process have one name, under which torch keeps the
        # store of the first one.
        reason, _used = "it serves the first model of a process that is computed by several ranks" if _used else "", True
        if agreed(not reason) == 0:
            raise RuntimeError(reason or "another rank has none")
        try:
            import torch.distributed._symmetric_memory as symmetric

            # Kept as an attribute, so that it is freed with this object.
            self._memory = symmetric.empty(count, dtype=torch.int16, device=device)
            handle = symmetric.rendezvous(self._memory, dist.group.WORLD)  # type: ignore[arg-type]
            buffers = [handle.get_buffer(r, (count,), torch.int16, 0) for r in range(size)]
            if buffers[rank].data_ptr() != self._memory.data_ptr():
                raise RuntimeError("torch's peer memory begins elsewhere than the tensor in it")
        except (RuntimeError, ImportError, AttributeError, TypeError) as error:  # by torch's version or the machine
            reason = " ".join(str(error).split())
        if agreed(not reason) == 0:
            raise RuntimeError(reason or "another rank has none")
        from lowbit.kernels.elementwise.sum_ranks import EMPTY

        self._memory.fill_(EMPTY)
        self._places = torch.tensor([each.data_ptr() for each in buffers], device=device)
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(device)
        agreed(0)  # waits for all ranks, so that no rank stores before all memory is filled with EMPTY

    def takes(self, y: Tensor) -> bool:
        """True if `total` and `added` support a tensor."""
        return y.dim() == 2 and 1 <= len(y) <= ROWS and y.shape[1] == self.width and y.dtype == self.dtype

    def total(self, y: Tensor, phase: int) -> Tensor:
        """Returns the sum of all ranks' y [M, width]."""
        return self._plan(len(y), phase)(None, y.contiguous(), None, self._places, self._stop)[0]

    def added(self, y: Tensor, h: Tensor, gamma: Tensor, factor: float, phase: int) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' y [M, width] to h in place; returns x = h * gamma * factor, and the sums of squares of h,
        float32 [1, M]."""
        plan = self._plan(len(y), phase)
        x, squares = plan(h, y.contiguous(), gamma, self._places, self._stop, factor)
        assert squares is not None
        return x, squares

    @functools.lru_cache(maxsize=4 * ROWS)  # noqa: B019 - an object lives as long as its process
    def _plan(self, m: int, phase: int) -> SumRanksPlan:
        from lowbit.kernels.elementwise.sum_ranks import SumRanksPlan

        return SumRanksPlan(m, self.width, self.rank, self.size, ROWS, phase, machine_of(self.device))

    def stop(self) -> None:
        """Ends kernels that wait for another rank; their sums are undefined. Any thread may call it."""
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream()):
            self._stop.copy_(self._one, non_blocking=True)


def peers_refusals(width: int, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Returns the reasons why this rank cannot use peer memory for sums of rows; empty if it can."""
    reasons = []
    if device.type != "cuda":
        reasons.append("it is memory of GPUs")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it holds rows of fp16 or bf16, not {dtype}")
    if width % 8:
        reasons.append(f"it holds rows of a multiple of 8 elements, not {width}")
    return tuple(reasons)
