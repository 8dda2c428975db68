"""Compiles kernels before they are needed, in several processes at once: one takes Triton a second or two, a model has dozens.

    with recording() as wanted:
        model(x)                      # as ever, but kernels are written down instead of launched
    for done in compile_all(wanted):  # into Triton's cache on disk, where the first launch finds them
        print(done, "of", len(wanted))

A process of its own takes a kernel by name and its arguments without their contents: it needs no GPU, finds modules where the
program that asks finds them, and neither imports nor repeats what that does. What fails to compile there fails again, with its
message, at its launch.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from triton import knobs

from lowbit.kernels.parts.gluon import CompiledKernel, build_launcher, without_gpu
from lowbit.kernels.parts.launch import Wanted

MOST_PROCESSES = 16
"""Each holds torch and Triton, about 0.5 GB."""

COMPILED = "compiled a kernel\n"
"""How the line ends that a process writes after each kernel; what else modules write there says nothing."""


def compile_all(wanted: Sequence[Wanted], sm: int, processes: int | None = None) -> Iterator[int]:
    """Compiles kernels for GPUs of compute capability `sm` (90: 9.0), and says after each how many are done.

    `processes` (default: one for each core, at most MOST_PROCESSES) work on them; they end when the iterator is given up. One
    that ends by itself leaves its work to the others; what no process is left for counts as done, and compiles at its launch.
    """
    count = min(processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, len(wanted))
    left: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
    for each in [*wanted, *[None] * count]:
        left.put(each)
    done: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a kernel; False: a process
    workers: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):  # there is no Python to start, or no memory for it
                workers.append(_process(sm))
                threading.Thread(target=_feed, args=(workers[-1], left, done), daemon=True).start()
        number, living = 0, len(workers)
        while living:
            if done.get():
                number += 1
                yield number
            else:
                living -= 1
        yield from range(number + 1, len(wanted) + 1)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _process(sm: int) -> subprocess.Popen[str]:
    """A process that runs `main`, with this one's path: by `-m` it would look where the program was started."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    command = f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main({sm})"
    return subprocess.Popen(
        [sys.executable or "", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, errors="replace",
    )  # fmt: skip


def _feed(worker: subprocess.Popen[str], left: queue.SimpleQueue[Wanted | None], done: queue.SimpleQueue[bool]) -> None:
    """Gives a process one kernel after the other, until there are no more or it has ended."""
    assert worker.stdin is not None and worker.stdout is not None
    lives = True
    while lives and (each := left.get()) is not None:
        with contextlib.suppress(OSError):  # nobody reads: so it has ended
            worker.stdin.write(base64.b64encode(pickle.dumps(each)).decode() + "\n")
            worker.stdin.flush()
        lives = any(line.endswith(COMPILED) for line in iter(worker.stdout.readline, ""))
        done.put(True)
    done.put(False)


def compile_one(wanted: Wanted) -> CompiledKernel:
    """Compiles a kernel for the GPU in hand, or the one that `without_gpu` names."""
    function: Any = importlib.import_module(wanted.module)
    for name in wanted.name.split("."):
        function = getattr(function, name)
    return function.warmup(*wanted.arguments, grid=(1, 1, 1), **wanted.options)


@contextlib.contextmanager
def misses() -> Iterator[list[str]]:
    """Lists the kernels, by name, that are compiled within it because Triton's cache on disk does not have them."""
    found: list[str] = []
    before = knobs.compilation.listener

    def listener(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            found.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)

    knobs.compilation.listener = listener
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def main(sm: int) -> None:
    """A process that compiles: pickled kernels come in by lines, and for each a line goes out. An error ends it."""
    without_gpu(sm)
    for line in sys.stdin:
        build_launcher(compile_one(pickle.loads(base64.b64decode(line))))
        print(COMPILED, end="", flush=True)
