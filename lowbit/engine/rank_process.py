"""The process of a rank other than 0: loads its part of the model, joins the others, and follows rank 0 (rank_processes.py)."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import torch

from lowbit.engine.engine import Engine
from lowbit.engine.failure import one_line
from lowbit.engine.graphs import release_graphs_of_ranks
from lowbit.engine.kernels import use_kernels
from lowbit.engine.lockstep import Follower
from lowbit.engine.rank_processes import Job
from lowbit.ops.ranks import Ranks


def main(descriptor: int) -> None:
    """Runs the commands that arrive at the socket `descriptor`, until rank 0 ends or sends "end"."""
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    connection = Connection(descriptor)
    try:
        _follow(connection)
    except EOFError:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - any failure is rank 0's to report
        traceback.print_exc()
        connection.send(("failed", one_line(error)))
        os._exit(1)
    os._exit(0)  # skips the interpreter's shutdown, where threads of a library may still wait for other ranks


def _follow(connection: Connection) -> None:
    job: Job = pickle.loads(connection.recv_bytes())
    device = torch.device(job.device, job.rank) if job.device == "cuda" else torch.device(job.device)
    if device.type == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // job.size, 1))
    else:
        torch.cuda.set_device(device)
        use_kernels(device, job.kernels, job.beside)
    model = job.make(job.rank, device)
    connection.send(("loaded", ""))
    command, options = pickle.loads(connection.recv_bytes())
    if command != "join":
        return
    ranks = Ranks(job.rank, job.size, device, job.port)
    if job.check is not None:
        job.check(model, ranks)
    command, options = pickle.loads(connection.recv_bytes())
    if command == "engine":
        follower = Follower(Engine(model, ranks=ranks, **options[0]))
        with torch.inference_mode():
            while (told := pickle.loads(connection.recv_bytes()))[0] != "end":
                follower.run(*told)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        release_graphs_of_ranks()
    ranks.leave()


def _end_with_rank_0() -> None:
    """Ends this process when rank 0 ends, which closes this process's standard input."""
    sys.stdin.buffer.read()
    os._exit(0)
