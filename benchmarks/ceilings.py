"""Measured ceilings of the machine: read bandwidth of a read-only kernel, fp16 rate of a large torch.matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.limits import Ceilings
from benchmarks.protocol import Contender, blank_row, contender_rows, measure
from lowbit.tune.timing import Graph, WrongResult, failures, gaussian, reason

READ_BYTES = 4 << 30
GRIDS = ((2048, 4, 4), (2048, 4, 8), (4096, 4, 4), (4096, 8, 2), (4096, 8, 4), (8192, 8, 2), (8192, 8, 4), (16384, 16, 1))
"""Grids of `read_kernel`: int32 values per tile, warps, programs per SM. Each thread reads 16 to 32 values per tile, so 4 to 8
loads of 16 bytes are in flight."""


@triton.jit
def read_kernel(x, out, programs, tiles_each, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[program] = sum of the int32 values in tiles `program`, `program + programs`, ... of x, modulo 2^32."""
    program = tl.program_id(0)
    offsets = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int32)
    for i in range(tiles_each):
        start = (i * programs + program).to(tl.int64) * TILE
        total += tl.load(x + start + offsets)
    tl.store(out + program, tl.sum(total))


def read_bandwidth() -> tuple[float, str]:
    """Returns the bytes per second of the fastest grid of `read_kernel` over READ_BYTES, and that grid.

    Raises WrongResult if a grid stores wrong sums.
    """
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    x = torch.randint(-(1 << 31), (1 << 31) - 1, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    best, name = 0.0, ""
    for tile, warps, per_sm in GRIDS:
        programs = sms * per_sm
        each = x.numel() // (programs * tile)
        out = torch.zeros(programs, dtype=torch.int32, device="cuda")

        def call(tile: int = tile, warps: int = warps, programs: int = programs, each: int = each, out: Tensor = out) -> Tensor:
            read_kernel[(programs,)](x, out, programs, each, TILE=tile, num_warps=warps)
            return out

        seconds = min(Graph([call, call]).times_us(10)) / 1e6
        used = programs * each * tile
        expected = sum(int(part.sum(dtype=torch.int64)) for part in x[:used].split(1 << 28))
        if (int(out.sum(dtype=torch.int64)) - expected) % (1 << 32):
            raise WrongResult(f"the read kernel (tile {tile}, {warps} warps, {programs} programs) did not read every value")
        if 4 * used / seconds > best:
            best, name = 4 * used / seconds, f"tile {tile} x int32, {warps} warps, {per_sm} programs per SM"
    return best, name


def cublas(w: Tensor) -> Contender:
    """Returns torch.matmul with the fp16 weight w [N, K] as a contender."""

    def truth(x: Tensor) -> Tensor:
        return torch.cat([x.double() @ part.double().T for part in w.split(1024)], dim=-1)

    products = [("torch.matmul", lambda x, w: x @ w.T)]
    return Contender(w, w.nbytes, Tensor.clone, lambda m: products, truth, torch.float16)


def fp16_flops(size: int = 8192) -> float:
    """Returns the operations per second of torch.matmul of two fp16 matrices of size x size."""
    x, w = gaussian(size, size, 2, torch.float16), gaussian(size, size, 1, torch.float16)
    contender = cublas(w)
    best = measure(contender.products(size), x, [w, w.clone()], contender.truth(x[:64]))
    return 2.0 * size**3 / (best.us / 1e6)


def measured_ceilings() -> tuple[Ceilings, dict[str, Any]]:
    """Returns the ceilings, and the entries of a result file that state them."""
    bandwidth, grid = read_bandwidth()
    flops = fp16_flops()
    return Ceilings(bandwidth, flops), {"read_bytes_per_s": bandwidth, "fp16_flops": flops, "read_kernel": grid}


def cublas_rows(shapes: Sequence[tuple[int, int]], rows: Sequence[int], emit: Callable[[dict[str, Any]], None]) -> None:
    """Passes the row of torch.matmul in fp16 to `emit`, for each shape (N, K) and M."""
    for n, k in shapes:
        blanks = [blank_row("cublas", None, (n, k), m, "float16") for m in rows]
        try:
            contender = cublas(gaussian(n, k, 1, torch.float16))
        except failures() as error:
            for row in blanks:
                emit({**row, "error": reason(error)})
            continue
        for row in contender_rows(contender, blanks, k):
            emit(row)
        del contender
        torch.cuda.empty_cache()
