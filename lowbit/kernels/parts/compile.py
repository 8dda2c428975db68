"""Compiles kernels ahead of use in several processes. Triton compiles one kernel in a second or two; a model has dozens.

    with recording() as kernels:
        model(x)                        # records kernels instead of launching them
    for done in compile_all(kernels):   # into Triton's cache on disk, where the first launch finds them
        print(done, "of", len(kernels))

A worker process gets a kernel by name and its arguments without their contents. It needs no GPU and has this process's
`sys.path`. It does not import or run the program's main module. A kernel that fails to compile fails again, with its message,
at its launch.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
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
from lowbit.kernels.parts.launch import RecordedKernel

FEW = 3
"""With fewer kernels than this, compiling in this process is faster than starting workers, which first import torch and
Triton."""
MOST_PROCESSES = 16
"""Limit of workers. All fork from one process, so their imports (torch and Triton) take memory once: 0.4 GB."""
PR_SET_CHILD_SUBREAPER = 36
"""From Linux's sys/prctl.h: makes orphaned descendants of a process its children, instead of children of init."""


def compile_all(kernels: Sequence[RecordedKernel], sm: int, processes: int | None = None) -> Iterator[int]:
    """Compiles kernels for GPUs of compute capability `sm` (90: 9.0); yields the number of finished kernels after each.

    It uses `processes` workers (default: one per core, at most MOST_PROCESSES), which end when the iterator is closed. If a
    worker dies, the others compile its kernels. If all die, the remaining kernels count as finished and are compiled at their
    launch.
    """
    count = min(processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, len(kernels))
    left: queue.SimpleQueue[RecordedKernel | None] = queue.SimpleQueue()
    for each in [*kernels, *[None] * count]:
        left.put(each)
    done: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: a kernel is done; False: a worker has ended
    first: subprocess.Popen[bytes] | None = None
    ends: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):  # no Python executable, or no memory
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
        yield from range(number + 1, len(kernels) + 1)
    finally:
        for end in ends:
            with contextlib.suppress(OSError):  # closed by its thread
                end.shutdown(socket.SHUT_RDWR)
        if first is not None:
            _end(first)


def _end(first: subprocess.Popen[bytes]) -> None:
    """Ends the process group of the first process. That process reaps its forks, because in a container nothing else would."""
    for asked, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, asked)
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(seconds)
            return


def _processes(sm: int, count: int) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """Starts a process that runs `main` with this process's `sys.path` (`python -m` would change that path) and forks `count`
    workers, all in a new process group. Returns it, and a socket to each worker."""
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


def _feed(end: socket.socket, left: queue.SimpleQueue[RecordedKernel | None], done: queue.SimpleQueue[bool]) -> None:
    """Sends a worker one kernel after the other, until no kernels are left or the worker has ended."""
    try:
        lives = True
        with end, end.makefile("rb") as answers:
            while lives and (each := left.get()) is not None:
                try:
                    end.sendall(base64.b64encode(pickle.dumps(each)) + b"\n")
                    lives = bool(answers.readline())
                except OSError:  # the worker has ended
                    lives = False
                done.put(True)
    finally:
        done.put(False)


def compile_one(kernels: RecordedKernel) -> CompiledKernel:
    """Compiles a kernel for the current GPU, or the one that `without_gpu` names."""
    function: Any = importlib.import_module(kernels.module)
    for name in kernels.name.split("."):
        function = getattr(function, name)
    return function.warmup(*kernels.arguments, grid=(1, 1, 1), **kernels.options)


@contextlib.contextmanager
def misses() -> Iterator[list[str]]:
    """Lists by name the kernels that are compiled in this context because Triton's cache on disk does not have them."""
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


def compiled(kernels: Sequence[RecordedKernel], sm: int) -> Iterator[int]:
    """Compiles kernels into this process, for GPUs of compute capability `sm`; yields the number of finished kernels before
    each. After the first kernel that is missing in Triton's cache on disk, worker processes compile the rest."""
    for number, each in enumerate(kernels):
        yield number
        with misses() as missing:  # a miss is not detected by its time, since a process's first kernel always takes long
            compile_one(each)
        left = kernels[number + 1 :]
        if missing and len(left) >= FEW:
            for more in compile_all(left, sm):
                yield number + more
            for one in left:  # load from the cache
                compile_one(one)
            return


def main(sm: int, sockets: Sequence[int]) -> None:
    """Entry point of the first process: imports what compilation needs once, then forks a worker for each of `sockets` (file
    descriptors). Workers read pickled kernels line by line and answer each with a line; an error ends the worker. This process
    ignores SIGTERM, and reaps the workers and the compiler processes that an ended worker leaves. It can fork safely: its only
    other threads are those of NumPy's OpenBLAS, which stops them at a fork."""
    without_gpu(sm)
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number, mine in enumerate(sockets):
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for other in sockets[number + 1 :]:  # a worker detects a close only when no other process has its socket
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
