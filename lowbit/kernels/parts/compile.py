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

FEW = 3
"""Fewer kernels are compiled sooner than other processes have begun: these import torch and Triton first."""
MOST_PROCESSES = 16
"""What they import, torch and Triton, is there once: 0.4 GB."""


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
        for end in ends:
            with contextlib.suppress(OSError):  # closed by who fed it
                end.shutdown(socket.SHUT_RDWR)
        if first is not None:
            _end(first)


def _end(first: subprocess.Popen[bytes]) -> None:
    """Ends the group of the first process, which waits for those that it became: in a container nobody else would."""
    for asked, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, asked)
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(seconds)
            return


def _processes(sm: int, count: int) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """A process that runs `main` with this one's path (by `-m` it would look where the program was started) and becomes `count`
    of them, in a group of their own; and a socket to each."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        ends, files = [], []
        for _ in range(count):
            mine, other = socket.socketpair()
            ends.append(ours.enter_context(mine))
            files.append(theirs.enter_context(other).fileno())
        command = f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main({sm}, {files})"
        quiet = subprocess.DEVNULL
        first = subprocess.Popen(
            [sys.executable or "", "-c", command], stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=files,
            start_new_session=True,
        )  # fmt: skip
        ours.pop_all()
    return first, ends


def _feed(end: socket.socket, left: queue.SimpleQueue[Wanted | None], done: queue.SimpleQueue[bool]) -> None:
    """Gives a process one kernel after the other, until there are no more or it has ended."""
    try:
        lives = True
        with end, end.makefile("rb") as answers:
            while lives and (each := left.get()) is not None:
                try:
                    end.sendall(base64.b64encode(pickle.dumps(each)) + b"\n")
                    lives = bool(answers.readline())
                except OSError:  # nobody reads: it has ended
                    lives = False
                done.put(True)
    finally:
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


def compiled(wanted: Sequence[Wanted], sm: int) -> Iterator[int]:
    """Compiles kernels into this process, for GPUs of compute capability `sm`, by several processes where Triton's cache does
    not have enough of them (those after one that it has not, it will not have either); says before each how many are done."""
    for number, each in enumerate(wanted):
        yield number
        with misses() as missing:  # by the time that it takes a process's first kernel looks like one that is not there
            compile_one(each)
        left = wanted[number + 1 :]
        if missing and len(left) >= FEW:
            for more in compile_all(left, sm):
                yield number + more
            for one in left:  # from the cache into this process
                compile_one(one)
            return


def main(sm: int, sockets: Sequence[int]) -> None:
    """A process that imports what compiling takes, once, and becomes one for each of the `sockets` (file descriptors): pickled
    kernels come in by lines, and for each a line goes out. An error ends the one that meets it. The first waits for all others,
    and so ignores what ends them. It has no thread but its own and those of NumPy's OpenBLAS, which stops them at a fork."""
    without_gpu(sm)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number, mine in enumerate(sockets):
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for other in sockets[number + 1 :]:  # its end is noticed where nobody else holds its socket
                    os.close(other)
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
