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
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from triton import knobs

from lowbit.kernels.parts.gluon import CompiledKernel, build_launcher, without_gpu
from lowbit.kernels.parts.launch import Wanted

MOST_PROCESSES = 16
"""They share torch and Triton, 0.4 GB."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process with several threads is not to become two."""


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
    first: subprocess.Popen[bytes] | None = None
    ends: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):  # there is no Python to start, or no memory for it
            first, ends = _processes(sm, count)
        for end in ends:
            threading.Thread(target=_feed, args=(end, left, done), daemon=True).start()
        number, living = 0, len(ends)
        while living:
            if done.get():
                number += 1
                yield number
            else:
                living -= 1
        yield from range(number + 1, len(wanted) + 1)
    finally:
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)
            first.wait()


def _processes(sm: int, count: int) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """A process that runs `main` with this one's path (by `-m` it would look where the program was started) and becomes `count`
    of them, in a group of their own; and a socket to each."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [end.fileno() for _, end in pairs]
    command = f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main({sm}, {theirs})"
    quiet = subprocess.DEVNULL
    try:
        first = subprocess.Popen(
            [sys.executable or "", "-c", command], stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=theirs,
            start_new_session=True, env={**os.environ, **ONE_THREAD},
        )  # fmt: skip
    finally:
        for _, end in pairs:
            end.close()
    return first, [end for end, _ in pairs]


def _feed(end: socket.socket, left: queue.SimpleQueue[Wanted | None], done: queue.SimpleQueue[bool]) -> None:
    """Gives a process one kernel after the other, until there are no more or it has ended."""
    lives = True
    with end, contextlib.suppress(OSError), end.makefile("rb") as answers:
        while lives and (each := left.get()) is not None:
            with contextlib.suppress(OSError):  # nobody reads: so it has ended
                end.sendall(base64.b64encode(pickle.dumps(each)) + b"\n")
            lives = bool(answers.readline())
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


def main(sm: int, sockets: Sequence[int]) -> None:
    """A process that imports what compiling takes, once, and becomes one for each of the `sockets` (file descriptors): pickled
    kernels come in by lines, and for each a line goes out. An error ends the one that meets it."""
    without_gpu(sm)
    for number, mine in enumerate(sockets):
        if os.fork() == 0:
            for other in sockets[number + 1 :]:
                os.close(other)
            try:
                _compile_for(mine)
            finally:
                os._exit(0)
        os.close(mine)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _compile_for(mine: int) -> None:
    with socket.socket(fileno=mine) as end, end.makefile("rb") as lines:
        for line in lines:
            build_launcher(compile_one(pickle.loads(base64.b64decode(line))))
            end.sendall(b"\n")
