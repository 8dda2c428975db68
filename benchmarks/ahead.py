"""Compiles kernels in many processes before one process times them.

Compiled kernels are stored on disk (Triton's cache, peers' caches), where the timing process loads them. Nothing is timed while
this runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from benchmarks.protocol import Build
from benchmarks.request import GemmRequest
from lowbit.formats import parse_scheme
from lowbit.tune.timing import failures, gaussian, quantized

MOST_PROCESSES = 16
"""Largest number of processes. Each one holds one weight on the GPU while it is quantized and packed."""


def pieces(request: GemmRequest) -> list[GemmRequest]:
    """Splits the request into requests of one scheme, one shape and one M."""
    return [
        replace(request, schemes=(scheme,), shapes=(shape,), rows=(m,))
        for shape in request.shapes
        for scheme in request.schemes
        for m in request.rows
    ]


def compile_ahead(request: GemmRequest, builds: Sequence[Build]) -> None:
    """Computes every product of the request once with each of `builds`. These are module-level functions, since they are
    pickled for other processes.

    Failures are ignored here; they occur again, with a reason in the row, when the product is timed.
    """
    tasks = [(build, piece) for piece in pieces(request) for build in builds]
    processes = min(len(tasks), os.cpu_count() or 1, MOST_PROCESSES)
    with (
        contextlib.suppress(BrokenProcessPool),  # a process crashed
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
    ):
        list(pool.map(_compute_once, tasks))


def _compute_once(task: tuple[Build, GemmRequest]) -> None:
    build, request = task
    (scheme,), (shape,), (m,) = request.schemes, request.shapes, request.rows
    try:
        contender = build(quantized(parse_scheme(scheme), shape, request.torch_dtype), request)
        x = contender.prepare(gaussian(m, shape[1], seed=2, dtype=contender.dtype))
        for _, product in contender.products(m):
            product(x, contender.weight)
        torch.cuda.synchronize()
    except failures():
        pass
    finally:
        torch.cuda.empty_cache()
