"""CPU threads that each compute their own rows, instead of torch's intra-op threads.

torch splits each CPU operation among its threads, which spin until the last one is done. Quantization consists of thousands of
short operations. If another process keeps a core busy, each operation takes until the operating system schedules the last
thread: HQQ of 2,048 x 2,048 weights took 1.24 s on idle cores and 19.4 s with a busy core, GPTQ 1.63 s and over 80 s. With a
thread per part, HQQ takes 0.97 and 1.47 s; GPTQ on one thread takes 1.86 and 1.76 s (two cores of a Xeon, torch 2.11, 2
threads, 2026-11-24).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MOST = 16
"""Maximum number of threads; it bounds the memory of the temporaries."""


def map_rows(function: Callable[[Tensor], T], weight: Tensor, rows: int) -> Iterator[T]:
    """Yields `function(part)` for the parts of `rows` rows of `weight` [N, K], in order.

    On a CPU as many parts run concurrently as torch has threads, `MOST` at most, each on one thread. Restores torch's number of
    threads at the end: exhaust or close the generator.
    """
    parts, threads = weight.split(rows), torch.get_num_threads()
    if weight.device.type != "cpu" or threads == 1:
        yield from map(function, parts)
        return
    if len(parts) == 1:
        with one_thread():
            yield function(weight)
        return
    try:
        with ThreadPoolExecutor(min(threads, MOST, len(parts)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(function, parts)
    finally:  # a thread that first uses torch inherits the number that was set last by any thread
        torch.set_num_threads(threads)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch's CPU operations on the calling thread only, for short ones in a loop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
