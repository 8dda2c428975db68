"""Memory for split-K: the partial sums of the splits, and one counter for each output tile.

Partial sums are allocated by torch at every call; in a captured CUDA graph they belong to the graph's pool. Each kernel resets
its counters to zero, so only one kernel at a time may use a counter. Therefore every stream has separate counters, and so has
every launch in a captured graph: two graphs can run at the same time, whatever streams they were captured on. All counters of a
GPU are parts of one allocation. It is created when a weight is packed (`nn.QuantLinear.prepare`, `ops.pack_for`): before any
capture, and outside the pools of captures and of torch.compile's warm-up runs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

COUNTERS = 1 << 22
"""Number of counters of a GPU (16 MiB), enough for more than 30,000 captured launches that split K."""

ALIGNED = 32
"""Counters of one launch start at multiples of this number: 128 bytes, a cache line."""


@dataclass
class _Counters:
    """The counters of one GPU. Ranges are assigned one after the other and never freed."""

    memory: Tensor
    nothing: tuple[Tensor, Tensor]
    """The arguments of a launch without splits. It does not access these two elements, a float32 and an int32."""
    used: int = ALIGNED
    of_streams: dict[int, Tensor] = field(default_factory=dict)

    def part(self, count: int) -> Tensor | None:
        """Returns `count` counters that were not assigned before; None if fewer are left."""
        begin, self.used = self.used, self.used + -(-count // ALIGNED) * ALIGNED
        if self.used > self.memory.numel():
            self.used = begin
            return None
        return self.memory[begin : begin + count]


_counters: dict[torch.device, _Counters] = {}
_lock = threading.Lock()


def make_counters(device: torch.device) -> None:
    """Allocates the counters of a GPU if there are none and no graph is being captured."""
    if device not in _counters and not torch.cuda.is_current_stream_capturing():
        with _lock, torch.inference_mode(False), torch.cuda.device(device):
            if device not in _counters:
                memory = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
                torch.cuda.current_stream().synchronize()  # other streams use them next
                _counters[device] = _Counters(memory, (memory[:1].view(torch.float32), memory[:1]))


def workspace(device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
    """Returns memory for `sums` float32 sums and `counters` int32 counters, which are zero, for one launch on the current
    stream.

    If a captured launch finds no counters left (`COUNTERS`), new counters are allocated, which one more kernel sets to zero at
    each replay.
    """
    held = _counters.get(device)
    if held is None:
        make_counters(device)
        held = _counters.get(device)
    if not counters:
        if held is not None:
            return held.nothing
        few = torch.empty(1, dtype=torch.int32, device=device)
        return few.view(torch.float32), few
    partial = torch.empty(sums, dtype=torch.float32, device=device)
    counting = None if held is None else _counters_of_launch(held, device, counters)
    return partial, torch.zeros(counters, dtype=torch.int32, device=device) if counting is None else counting


def _counters_of_launch(held: _Counters, device: torch.device, count: int) -> Tensor | None:
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            return held.part(count)
    stream = torch.cuda.current_stream(device).cuda_stream
    own = held.of_streams.get(stream)
    if own is None or own.numel() < count:
        with _lock:
            own = held.part(max(count, 1 << 12))
        if own is not None:
            held.of_streams[stream] = own
    return own
