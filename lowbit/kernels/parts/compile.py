"""Compiles kernels before they are needed, in several processes at once: one takes Triton a second or two, a model has dozens.

    with recording() as wanted:
        model(x)                      # as ever, but kernels are written down instead of launched
    for done in compile_all(wanted):  # into Triton's cache on disk, where the first launch finds them
        print(done, "of", len(wanted))

A process of its own takes a kernel by name and its arguments without their contents: it needs no GPU, and neither imports nor
repeats what the program that asks does. What fails to compile there fails again, with its message, at its launch.
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from lowbit.kernels.parts.gluon import CompiledKernel, build_launcher, without_gpu
from lowbit.kernels.parts.launch import Wanted

MOST_PROCESSES = 16
"""Each holds torch and Triton, about 0.5 GB."""


def compile_all(wanted: Sequence[Wanted], sm: int, processes: int | None = None) -> Iterator[int]:
    """Compiles kernels for GPUs of compute capability `sm` (90: 9.0), and says after each how many are done.

    `processes` (default: one for each core, at most MOST_PROCESSES) work on them; they end when the iterator is given up.
    """
    count = min(processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, len(wanted))
    left: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
    for each in [*wanted, *[None] * count]:
        left.put(each)
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    command = [sys.executable, "-m", __name__, str(sm)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(count)
    ]
    try:
        for worker in workers:
            threading.Thread(target=_feed, args=(worker, left, done), daemon=True).start()
        for number in range(1, len(wanted) + 1):
            done.get()
            yield number
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _feed(worker: subprocess.Popen[str], left: queue.SimpleQueue[Wanted | None], done: queue.SimpleQueue[None]) -> None:
    """Gives a process one kernel after the other; if it dies, what is left counts as done, and compiles at its launch."""
    assert worker.stdin is not None and worker.stdout is not None
    while (each := left.get()) is not None:
        try:
            worker.stdin.write(base64.b64encode(pickle.dumps(each)).decode() + "\n")
            worker.stdin.flush()
            worker.stdout.readline()
        except (OSError, ValueError):  # it has ended: what it was to compile is compiled when it is launched
            pass
        done.put(None)


def compile_one(wanted: Wanted) -> CompiledKernel:
    """Compiles a kernel for the GPU in hand, or the one that `without_gpu` names."""
    function: Any = importlib.import_module(wanted.module)
    for name in wanted.name.split("."):
        function = getattr(function, name)
    return function.warmup(*wanted.arguments, grid=(1, 1, 1), **wanted.options)


def main() -> None:
    """A process that compiles: pickled kernels come in by lines, and for each a line goes out. An error ends it."""
    without_gpu(int(sys.argv[1]))
    for line in sys.stdin:
        build_launcher(compile_one(pickle.loads(base64.b64decode(line))))
        print("compiled", flush=True)


if __name__ == "__main__":
    main()
