"""The processes of tensor parallelism: rank 0, which started the others, and what all do when one of them fails.

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
"""How long a rank may take to end after it was told to, before it is killed; also work on the GPU, and the end of NCCL."""


MakeModel = Callable[[int, torch.device], PreTrainedModel]
"""Returns the part of a model of a rank on its device. It is pickled: a function of a module, or a partial of one."""

CheckModel = Callable[[PreTrainedModel, Ranks], None]
"""Checks parts of a model, with all ranks; pickled as `MakeModel`."""

CommonFunction = Callable[..., T]
"""A function of a module that all ranks call, each with its own engine as the first argument."""


@dataclass(frozen=True)
class Job:
    """What a rank loads, and where it joins the others. device: "cuda" or "cpu"; check: called once all have joined; kernels
    and beside as for `use_kernels`."""

    rank: int
    size: int
    port: int
    device: str
    make: MakeModel
    check: CheckModel | None
    kernels: Path | None
    beside: Path | None


class LeadingRanks(Ranks):
    """Rank 0 of the processes of a model. `tell` sends a command to all others, `check` raises if one has failed."""

    def __init__(self, jobs: list[Job], device: torch.device, store: TCPStore) -> None:
        self.size = len(jobs) + 1
        self._store = store
        self.failure = ""
        """Why the ranks have ended; "" while all work."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called, by a thread of its own, once a rank has failed."""
        self._ended = self._joined = self._have_engines = False
        self._stuck = False
        """True if work on the GPU or NCCL did not end: the end of this process would wait for it."""
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

        # In a thread of its own, as both NCCL and gloo would wait on for a rank that ends meanwhile.
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
        """Lets all other ranks make their engine with these arguments, as this one is about to. Raises ValueError if they have
        one."""
        if self._have_engines:
            raise ValueError("these ranks have an engine; for another one, load the model again")
        self._have_engines = True
        self.tell("engine", options)

    def tell(self, command: str, *arguments: Any) -> None:
        """Sends a command to all other ranks. Raises RankFailed after a failure of any."""
        self.check()
        data = pickle.dumps((command, arguments))
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(data)
            except OSError:
                with self._changed:  # the thread that watches this rank finds out why
                    self._changed.wait_for(lambda: self.failure, SECONDS_TO_END)
                self.fail(f"rank {rank} reads no more commands")
                self.check()

    def everywhere(self, engine: Any, function: CommonFunction[T], *arguments: Any) -> T:
        """Calls function(engine, *arguments) on all ranks, each with its own engine, and returns what it returns here."""
        with self.together("call", function, arguments):
            return function(engine, *arguments)

    @contextlib.contextmanager
    def together(self, command: str, *arguments: Any) -> Iterator[None]:
        """Tells all other ranks a command, which this one runs inside the context. An error in it fails all ranks."""
        with self.guarded():
            self.tell(command, *arguments)
            yield

    def check(self) -> None:
        """Raises RankFailed if a rank has failed, or all were ended."""
        if self.failure or self._ended:
            raise RankFailed(self.failure or "the ranks of this model were ended")

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What this rank does beside the others: an error of it fails all, since they would wait for it."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankFailed):
                with self._changed:  # an error of a common operation is usually the end of another rank
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
            self.check()  # an operation that was aborted returns anything
            return found

    def fail(self, reason: str) -> None:
        """Ends all other ranks for a reason; only the first one counts."""
        with self._changed:
            if self.failure or self._ended:
                return
            self.failure = reason
            if self._joined:  # in a thread of its own: NCCL's abort returns once all graphs with its operations are gone
                self._aborting = threading.Thread(target=self._abort, daemon=True)
            self._changed.notify_all()
        for process in self.processes:
            process.kill()
        if self._aborting is not None:
            self._aborting.start()
        self.on_failure()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # of a group that PyTorch has ended by itself
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
        """Ends the other ranks; if NCCL, or work on this rank's GPU, waits for a rank that has ended, ends this process at
        once, with status 1: the interpreter's end would wait too."""
        self.end()
        if self._stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _leave_in_time(self, told: bool) -> bool:
        """Leaves the group. Returns whether this rank's GPU is idle and NCCL has ended, in the seconds that both have. `told`:
        all ranks leave together; otherwise one has failed, and NCCL's operations were aborted."""
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
    """Loads a stored model as `start_ranks` does, a part in each of `size` processes; arguments as for `load_causal`.

    Raises ValueError for a model that cannot be cut and for what `start_ranks` refuses, CheckpointError as `load_causal` does
    and if layers compute something else than the checkpoint states (`models.numerics`), and RankFailed if another rank cannot
    load its part.
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
    """Makes the parts of a model in `size` processes, and returns the part of this one, rank 0, with the ranks for
    `Engine(model, ranks=..)`. Rank r computes on GPU r of this host; on a CPU all share it.

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
    """Waits for the work of a GPU, up to SECONDS_TO_END. Returns False if it takes longer or ends in a CUDA error."""
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
