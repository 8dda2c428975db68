"""The process that renders chat templates and encodes prompts, so that neither can stop or exhaust the server.

    server --(a socket for each worker)--> this process, which has loaded the tokenizer --fork--> worker

A template is code from the model's folder, and a malicious text can make a tokenizer very slow. Workers share the tokenizer's
memory, so a new one starts within milliseconds. The OS kernel ends a worker at the deadline of a request and limits its memory.
All processes end when the server closes its sockets, at the latest one deadline later. torch is not imported.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lowbit.serve.chat import Encoder
from lowbit.serve.errors import ApiError

ENDS = "ends"
"""Key of a reply after which the worker ends, because a request that ran out of memory may have left its memory full."""


@dataclass(frozen=True)
class Job:
    """Parameters of the process. `most`: maximum number of prompt tokens; `seconds`: deadline of a request; `bytes_`: memory
    that a worker may allocate in addition to the shared memory.
    """

    tokenizer: Any
    most: int
    seconds: float
    bytes_: int


def main(control: int) -> None:
    """Reads a pickled `Job` from standard input, then forks a worker for each socket that arrives on the socket `control`."""
    # Both signals are ignored, also if they are sent to the process group, since the server needs workers until it ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # no threads: a process with threads cannot be forked
    job: Job = pickle.load(sys.stdin.buffer)
    encoder = Encoder(job.tokenizer, job.most)
    gc.collect()
    gc.freeze()  # garbage collection in workers must not touch, and thereby copy, shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    with socket.socket(fileno=control) as server:
        while True:
            data, (*descriptors,), _, _ = socket.recv_fds(server, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                server.close()
                _work(Connection(descriptors[0]), encoder, job)
                os._exit(0)
            for descriptor in descriptors:
                os.close(descriptor)


def _work(server: Connection, encoder: Encoder, job: Job) -> None:
    """Answers requests until the server closes the socket. An unexpected error or a missed deadline ends the worker."""
    _limit_memory(job.bytes_)
    while True:
        try:
            request = server.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_REAL, job.seconds)  # SIGALRM ends the process, even within compiled code
        reply = _answer(encoder, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        server.send_bytes(json.dumps(reply).encode())
        if reply.get(ENDS):
            return


def _answer(encoder: Encoder, request: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(request)
        if "messages" in asked:
            return {"ids": [encoder.of_conversation(asked["messages"], asked["tools"])]}
        return {"ids": [encoder.of_text(text, asked["special"]) for text in asked["texts"]]}
    except ApiError as error:
        return {"refusal": [error.status, error.message, error.param, error.code]}
    except MemoryError:
        return {ENDS: True}


def _limit_memory(bytes_: int) -> None:
    """Limits the memory that this process may allocate from now on to `bytes_`. Without /proc, as outside Linux, nothing is
    limited.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + bytes_, held + bytes_))
