"""The processes of tensor parallelism: how rank 0 starts the others, and what happens when one of them fails.

    rank 0 (the caller's process)  --commands, pickled, over a socket--> ranks 1, 2, .. (rank_process.py)
           schedules, reads tokens <--"loaded", or the reason of a failure--  load their part, follow (lockstep.py)

All processes are on one host, one GPU each. A thread of rank 0 reads each other rank's messages. If a rank fails or ends, rank
0 ends all others and its own waiting operations, and every later use raises `RankFailed` with the reason. If rank 0 ends, the
standard input of the others ends, and so do they.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from lowbit.engine.failure import RankFailed, one_line
from lowbit.engine.graphs import release_graphs_of_ranks
from lowbit.engine.shard_loading import ShardSource, check_part, load_part
from lowbit.models.source import ResolvedSource
from lowbit.ops.ranks import WAIT, Ranks, prepare_libraries

T = TypeVar("T")

SECONDS_TO_END = 5.0
"""Seconds that a rank may take to end before it is killed. Running work on the GPU and the end of NCCL get as many."""


MakeModel = Callable[[int, torch.device], PreTrainedModel]
"""Returns a rank's part of a model on the rank's device. It is pickled, so it must be a top-level function or a partial of
one."""

CheckModel = Callable[[PreTrainedModel, Ranks], None]
"""Checks the part of a model together with all other ranks. It is pickled like `MakeModel`."""

CommonFunction = Callable[..., T]
"""A top-level function that all ranks call, each with its own engine as the first argument."""


@dataclass(frozen=True)
class Job:
    """The task of a rank: what it loads, and the port on which it joins the others. device: "cuda" or "cpu". check: called once
    all ranks have joined. kernels, beside: arguments of `use_kernels`."""

    rank: int
    size: int
    port: int
    device: str
    make: MakeModel
    check: CheckModel | None
    kernels: Path | None
    beside: Path | None


class LeadingRanks(Ranks):
    """Rank 0 of the processes of a model. `tell` sends a command to all others; `check` raises an error if one has failed."""

    def __init__(self, jobs: list[Job], device: torch.device, store: TCPStore) -> None:
        self.size = len(jobs) + 1
        self._store = store
        self.failure = ""
        """Why the ranks were ended; "" if none has failed."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called, by a thread of its own, once a rank has failed."""
        self._ended = self._joined = self._have_engines = False
        self._stuck = False
        """True if work on the GPU or NCCL did not end. The interpreter's shutdown would then wait for it."""
        self._aborting: threading.Thread | None = None
        self._changed = threading.Condition()
        self._loaded = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for job in jobs:
            process, connection = _started(job)
            self.processes.append(process)
            self._connections.append(connection)
            threading.Thread(target=self._watch, args=(job.rank, process, connection), daemon=True).start()
        self.device = device

    def join(self) -> None:
        """Waits until all ranks have loaded their part, then connects them. Raises RankFailed if one cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._loaded == self.size - 1)
        self.tell("join")
        errors: list[BaseException | None] = []

        def connect() -> None:
            error = None
            try:
                Ranks.__init__(self, 0, self.size, self.device, self._store.port, store=self._store)
            except BaseException as raised:  # noqa: BLE001 - raised again in the thread that waits
                error = raised
            with self._changed:
                errors.append(error)
                self._changed.notify_all()

        # The ranks connect in a separate thread, since NCCL and gloo would keep waiting for a rank that ends meanwhile.
        threading.Thread(target=connect, daemon=True).start()
        with self.guarded():
            with self._changed:
                self._changed.wait_for(lambda: self.failure or errors)
            if errors and errors[0] is not None:
                raise errors[0]
            self._joined = bool(errors)
            self._stuck = not errors
            self.check()

    def make_engines(self, options: dict[str, Any]) -> None:
        """Makes the engines of all other ranks with these arguments; the caller makes its own. Raises ValueError if they have
        engines already."""
        if self._have_engines:
            raise ValueError("these ranks have an engine; for another one, load the model again")
        self._have_engines = True
        self.tell("engine", options)

    def tell(self, command: str, *arguments: Any) -> None:
        """Sends a command to all other ranks. Raises RankFailed if a rank has failed."""
        self.check()
        data = pickle.dumps((command, arguments))
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(data)
            except OSError:
                with self._changed:  # gives the thread that watches this rank time to find the reason
                    self._changed.wait_for(lambda: self.failure, SECONDS_TO_END)
                self.fail(f"rank {rank} reads no more commands")
                self.check()

    def everywhere(self, engine: Any, function: CommonFunction[T], *arguments: Any) -> T:
        """Calls function(engine, *arguments) on all ranks, each with its own engine, and returns the result of this rank."""
        with self.together("call", function, arguments):
            return function(engine, *arguments)

    @contextlib.contextmanager
    def together(self, command: str, *arguments: Any) -> Iterator[None]:
        """Sends a command to all other ranks; the caller runs the same command inside the context. An error inside it fails all
        ranks."""
        with self.guarded():
            self.tell(command, *arguments)
            yield

    def check(self) -> None:
        """Raises RankFailed if a rank has failed or the ranks were ended."""
        if self.failure or self._ended:
            raise RankFailed(self.failure or "the ranks of this model were ended")

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A context for operations that all ranks run together. An error inside it fails all ranks, since the others would wait
        for this one."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankFailed):
                with self._changed:  # such an error usually means that another rank has ended; waits for its reason
                    self._changed.wait_for(lambda: self.failure, 1.0)
                self.fail(f"rank 0: {one_line(error)}")
            if isinstance(error, Exception):
                raise RankFailed(self.failure) from error
            raise

    def total(self, x: Tensor, phase: int) -> Tensor:
        with self.guarded():
            return super().total(x, phase)

    def gathered(self, x: Tensor, columns: int) -> Tensor:
        with self.guarded():
            return super().gathered(x, columns)

    def least(self, number: int) -> int:
        with self.guarded():
            found = super().least(number)
            self.check()  # the result of an aborted operation is undefined
            return found

    def fail(self, reason: str) -> None:
        """Ends all other ranks, and records the reason. Does nothing if the ranks have failed or were ended before."""
        with self._changed:
            if self.failure or self._ended:
                return
            self.failure = reason
            if self._joined:  # a thread of its own, since NCCL's abort does not return before its graphs are freed
                self._aborting = threading.Thread(target=self._abort, daemon=True)
            self._changed.notify_all()
        for process in self.processes:
            process.kill()
        if self._aborting is not None:
            self._aborting.start()
        self.on_failure()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # raised if PyTorch has ended the group by itself
            self.abort()

    def end(self) -> None:
        """Ends the other ranks, which frees their GPUs."""
        if self._ended:
            return
        told = False
        if not self.failure:
            with contextlib.suppress(RankFailed):
                self.tell("end")
                told = True
        self._ended = True
        if self._joined:
            self._stuck = not self._leave_in_time(told)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            process.kill()
            process.wait()
        for connection in self._connections:
            connection.close()
        if not self._stuck:
            atexit.unregister(self.end_with_interpreter)

    def end_with_interpreter(self) -> None:
        """Ends the other ranks. If NCCL or work on this rank's GPU still waits for a rank that has ended, ends this process at
        once with status 1, since the interpreter's shutdown would wait too."""
        self.end()
        if self._stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _leave_in_time(self, told: bool) -> bool:
        """Leaves the group. Returns True if this rank's GPU became idle and NCCL ended, each within SECONDS_TO_END. `told`: all
        ranks leave together; else one has failed, and NCCL's operations were aborted."""
        if self.device.type == "cpu":
            with contextlib.suppress(RuntimeError):
                self.leave()
            return True
        if not _becomes_idle(self.device):
            return False
        release_graphs_of_ranks()
        leaving = threading.Thread(target=self.leave, daemon=True) if told else self._aborting
        if leaving is not None:
            if told:
                leaving.start()
            leaving.join(SECONDS_TO_END)
        return leaving is None or not leaving.is_alive()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        """Reads a rank's messages until it ends."""
        reason = ""
        with contextlib.suppress(EOFError, OSError):
            while not reason:
                kind, reason = connection.recv()
                if kind == "loaded":
                    with self._changed:
                        self._loaded += 1
                        self._changed.notify_all()
        if not reason:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            code = process.returncode
            reason = "ended its connection" if code is None else f"ended with {_status(code)}"
        self.fail(f"rank {rank}: {reason}")


def load_ranks(
    source: str | Path | ResolvedSource, size: int, device: torch.device, *, scheme: str | None = None,
    dtype: torch.dtype | None = None, head: str | None = None, batch_invariant: bool = False, verify: bool = False,
    kernels: str | Path | None = None,
) -> tuple[PreTrainedModel, LeadingRanks]:  # fmt: skip
    """Loads a stored model, one part in each of `size` processes. Returns the same as `start_ranks`; other arguments are those
    of `load_causal`.

    Raises ValueError for a model that cannot be cut and for what `start_ranks` refuses, RankFailed if another rank cannot load
    its part, and CheckpointError where `load_causal` does. Raises CheckpointError also if layers compute something else than
    the checkpoint states (`models.numerics`).
    """
    refusals = rank_refusals(size, device)
    if batch_invariant and size > 2:
        refusals += (
            f"the order in which sums of {size} ranks are added depends on the size of the batch: batch_invariant goes with up "
            "to 2 ranks",
        )
    if refusals:
        raise ValueError("; ".join(refusals))
    resolved = ShardSource(source, size, device, scheme=scheme, dtype=dtype).resolved  # refuses before a process is started
    make = functools.partial(
        load_part, source=str(resolved.path), ranks=size, scheme=scheme, dtype=dtype, head=head,
        batch_invariant=batch_invariant, verify=verify,
    )  # fmt: skip
    folder = resolved.path if resolved.path.is_dir() else resolved.path.parent
    check = functools.partial(check_part, source=str(resolved.path))
    return start_ranks(make, size, device, check=check, kernels=kernels, beside=folder)


def start_ranks(
    make: MakeModel, size: int, device: torch.device, *, check: CheckModel | None = None, kernels: str | Path | None = None,
    beside: Path | None = None,
) -> tuple[PreTrainedModel, LeadingRanks]:  # fmt: skip
    """Makes the parts of a model in `size` processes. Returns the part of this process, which is rank 0, and the ranks for
    `Engine(model, ranks=..)`. Rank r computes on GPU r of this host; on a CPU all ranks share it.

    Raises ValueError for fewer than 2 ranks, a machine with fewer GPUs, and a process that already belongs to a group of
    torch.distributed; RankFailed if another rank cannot make its part; and what `make` and `check` raise here.
    """
    refusals = rank_refusals(size, device)
    if refusals:
        raise ValueError("; ".join(refusals))
    prepare_libraries()
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=WAIT)
    file = None if kernels is None else Path(kernels)
    jobs = [Job(rank, size, store.port, device.type, make, check, file, beside) for rank in range(1, size)]
    own = torch.device("cuda", 0) if device.type == "cuda" else device
    ranks = LeadingRanks(jobs, own, store)
    atexit.register(ranks.end_with_interpreter)
    try:
        model = make(0, own)
        ranks.join()
        if check is not None:
            check(model, ranks)
    except BaseException:
        ranks.end()
        raise
    return model, ranks


def rank_refusals(size: int, device: torch.device) -> tuple[str, ...]:
    """Returns why `size` ranks cannot compute on this machine; empty if they can."""
    reasons = []
    if size < 2:
        reasons.append(f"tensor parallelism is for 2 or more ranks, got {size}")
    if device.type == "cuda" and device.index not in (None, 0):
        reasons.append(f"rank r computes on GPU r, and this process is rank 0: leave out the device, got {device}")
    if device.type == "cuda" and (found := torch.cuda.device_count()) < size:
        reasons.append(f"{size} ranks take {size} GPUs, torch sees {found}")
    if dist.is_initialized():
        reasons.append(
            "this process already belongs to a group of torch.distributed; tensor parallelism starts processes of its own: use "
            "it in a program without a group (not one that torchrun started)"
        )
    return tuple(reasons)


def _becomes_idle(device: torch.device) -> bool:
    """Waits up to SECONDS_TO_END for the work of a GPU. Returns False if it takes longer or ends in a CUDA error."""
    deadline = time.monotonic() + SECONDS_TO_END
    with contextlib.suppress(RuntimeError):
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
    return False


def _started(job: Job) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts the process of a rank with this process's `sys.path`, and returns it with the connection to it."""
    ours, theirs = socket.socketpair()
    path = [entry for entry in sys.path if isinstance(entry, str)]
    with theirs:
        number = theirs.fileno()
        code = f"import sys; sys.path[:] = {path!r}; from lowbit.engine.rank_process import main; main({number})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True
        )
    connection = Connection(ours.detach())
    connection.send_bytes(pickle.dumps(job))
    return process, connection


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
