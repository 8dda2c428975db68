"""Kernels compiled by many processes at once, before one process times them one after the other.

What a compiler makes it keeps on disk, where the process that times finds it: Triton in its cache, peers in theirs. Nothing is
timed here, and nothing is timed while this runs.
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
"""Each holds one weight of the request on the GPU while it is being quantized and packed."""


def pieces(request: GemmRequest) -> list[GemmRequest]:
    """The request cut into products of one scheme, one shape and one M."""
    return [
        replace(request, schemes=(scheme,), shapes=(shape,), rows=(m,))
        for shape in request.shapes
        for scheme in request.schemes
        for m in request.rows
    ]


def compile_ahead(request: GemmRequest, builds: Sequence[Build]) -> None:
    """Every product of the request computed once by each of `builds`, which are functions of a module.

    What fails here fails again, with its reason in its row, when it is to be timed.
    """
    tasks = [(build, piece) for piece in pieces(request) for build in builds]
    processes = min(len(tasks), os.cpu_count() or 1, MOST_PROCESSES)
    with (
        contextlib.suppress(BrokenProcessPool),  # a process died of its task
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
