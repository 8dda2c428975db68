"""Memory in which the blocks that share a tile of a product meet: sums of the splits of K, and a counter for each tile.

Sums come from torch's allocator at every call and go back to it: nothing else has them meanwhile, and in a captured CUDA graph
they are the graph's. Counters are zero whenever no kernel runs, each kernel leaves them so, and who counts in them must be
alone. So every stream has its own, and every launch that a graph captures has some that nobody else ever gets: two graphs may
then run at once, whichever stream they were captured on. They are parts of one allocation for each GPU, made when a weight is
packed for use (`nn.QuantLinear.prepare`, `ops.pack_for`): before anything is captured, outside the pools that captures, and the
first runs of what torch.compile will capture, allocate from.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

COUNTERS = 1 << 22
"""Counters of a GPU, 16 MiB: more than 30,000 captured launches that split K."""

ALIGNED = 32
"""Counters of one launch start at multiples of this: 128 bytes, a line of the cache."""


@dataclass
class _Counters:
    """The counters of one GPU: parts are handed out one after the other and never come back."""

    memory: Tensor
    nothing: tuple[Tensor, Tensor]
    """What a launch without splits gets: one float32 and one int32, which it does not touch."""
    used: int = ALIGNED
    of_streams: dict[int, Tensor] = field(default_factory=dict)

    def part(self, count: int) -> Tensor | None:
        """`count` counters that nobody else gets; None if no so many are left."""
        begin, self.used = self.used, self.used + -(-count // ALIGNED) * ALIGNED
        if self.used > self.memory.numel():
            self.used = begin
            return None
        return self.memory[begin : begin + count]


_counters: dict[torch.device, _Counters] = {}
_lock = threading.Lock()


def make_counters(device: torch.device) -> None:
    """Makes the counters of a GPU if there are none, which takes a call that no graph captures."""
    if device not in _counters and not torch.cuda.is_current_stream_capturing():
        with _lock, torch.inference_mode(False), torch.cuda.device(device):
            if device not in _counters:
                memory = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
                torch.cuda.current_stream().synchronize()  # other streams use them next
                _counters[device] = _Counters(memory, (memory[:1].view(torch.float32), memory[:1]))


def workspace(device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
    """Memory for so many float32 sums, and for so many int32 counters that are zero, for one launch on the current stream.

    Within a captured graph whose GPU has no counters left (`COUNTERS`), they are made zero at each replay, by a kernel more.
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
