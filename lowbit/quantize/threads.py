"""Threads of a CPU: each computes rows of its own, since torch's own threads spin.

torch shares each operation on a CPU among its threads, which spin at its end until the last one is done. A method of
quantization is thousands of short operations. Beside a busy core each of them takes until the scheduler runs the late thread:
hqq of 2,048 x 2,048 weights took 1.24 s alone and 19.4 s beside a busy core, GPTQ 1.63 s and over 80 s. With a
thread for each part hqq takes 0.97 and 1.47 s; GPTQ on one thread takes 1.86 and 1.76 s (two cores of a Xeon, torch 2.11, 2
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
"""Threads at most, which bounds the memory of all parts in work."""


def map_rows(function: Callable[[Tensor], T], weight: Tensor, rows: int) -> Iterator[T]:
    """Yields `function(part)` for the parts of `rows` rows of `weight` [N, K], in order.

    On a CPU as many parts are in work as torch has threads, `MOST` at most, and each is computed on one thread. Restores the
    number of torch's threads at the end; read the generator to its end or close it.
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
    finally:  # a thread that uses torch for the first time takes the number that any thread set last
        torch.set_num_threads(threads)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch's operations on a CPU on the calling thread alone, for short ones in a loop; restores the number then."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
