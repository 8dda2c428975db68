"""Addresses that the copies of the large-M mma.sync kernel read and write, in all threads and stages of the blocks at the
edges. Runs the kernel's own Python and PTX, for every tile that can be chosen for 1 to 1024 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.large_m import mma_tiles
from lowbit.kernels.choose.tiles import GemmShape, MmaTile
from lowbit.kernels.parts import tile_stage as stage
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.mma_loop import first_weights
from lowbit.kernels.parts.schedule import iterations_of, k_range_of, tile_at, workspace_offsets
from lowbit.kernels.sm80.large_m_gemm import MmaPlan, mma_gemm
from lowbit.pack.weight import WeightForm
from tests.kernels.parts.plain import GL, Array, plain
from tests.kernels.parts.threads import run

A100 = typical_machine(80)
MACHINES = [A100, replace(typical_machine(90), arch=A100.arch)]
"""An A100, and an H200 that uses the A100's kernels."""

SHARED = 4096
"""Assumed start address of shared memory."""

ROOM = 1 << 26
"""Distance between the assumed addresses of two tensors."""


class Values(Array):
    """A kernel's tensor."""

    def to(self, kind):
        return self


class Address:
    """A pointer into a tensor whose elements have `size` bytes."""

    def __init__(self, at, size):
        self.at, self.size = at, size

    def __add__(self, elements):
        return Address(self.at + self.size * elements, self.size)


def source_of(x, x_step, tokens, ks, w, w_stride, scale, scale_stride, tiles):
    return SimpleNamespace(**locals())


NAMES = SimpleNamespace(**vars(GL) | {"arange": lambda first, end, layout: np.arange(first, end).view(Values)})


class Blocks:
    """Runs blocks of a GEMM, from the block index to the addresses of the copies: the first and last tile of tokens, with the
    first two and the last tile of rows, for all splits. Between these tiles, addresses are linear.
    """

    def __init__(self, plan, group, of_scale):
        self.plan, self.config, shape = plan, plan.config, plan.shape
        row_blocks, steps = shape.row_blocks, shape.steps(64)
        self.w_stride = steps * 128 * shape.bits
        self.scale_stride = shape.steps(128) * (128 // group) * of_scale if group else 0
        self.x_stride = -(-shape.k // 8) * 8
        sizes = 2 * shape.m * self.x_stride, row_blocks * self.w_stride, row_blocks * self.scale_stride
        assert max(sizes) <= ROOM
        self.tensors = [(ROOM * (i + 1), ROOM * (i + 1) + size) for i, size in enumerate(sizes)]
        self.copies, self.ends = [], []
        names = {"x_vector": plain(stage.x_vector), "x_at": plain(stage.x_at), "asm": lambda *_: SHARED, "ptx": self.ptx}
        self.copy = plain(stage.copy_vector, gl=NAMES, run=self.noted, **names)
        self.tile_at = plain(tile_at, gl=NAMES)
        order = {"tile_at": lambda *_: self.place}
        order["iterations_of"] = plain(iterations_of, k_range_of=plain(k_range_of))
        weights = plain(first_weights, gl=NAMES, ptx=self.ptx, first_vector=plain(stage.first_vector, gl=NAMES))
        gl = SimpleNamespace(**vars(NAMES), program_id=lambda axis: None)
        ends = {name: self.end_of(name) for name in ("store_tile", "reduce_splits", "reduce_splits_serially")}
        self.run_block = plain(
            mma_gemm, gl=gl, products=self.products, allocate_stages=lambda C: None, first_weights=weights,
            TileGrid=lambda *sizes: SimpleNamespace(of_tokens=sizes[0], of_channels=sizes[1], iterations=sizes[2]),
            StageSource=source_of, reader_of_stages=lambda C: None, LargeMEpilogueArgs=lambda *_: None,
            SplitKWorkspace=lambda *_: None, **names, **order, **ends,
        )  # fmt: skip

    def ptx(self, write, *numbers):
        return write(*numbers)

    def end_of(self, name):
        def end(*values):
            self.ends.append((name, values))
            return False, None

        return end

    def products(self, x, reader, source, begin, end, C):
        """All copies that the main loop starts, including those beyond the end of K."""
        assert end > begin
        wanted = {*range(begin, min(begin + C.stages, end)), *range(max(end - C.stages, begin), end + C.stages - 1)}
        iteration = np.array(sorted(wanted))[:, None].view(Values)
        for i in range(C.order.copy_count):
            self.beyond, self.slot = iteration >= end, (iteration - begin) % C.stages
            self.copy(source, iteration, self.slot, i, C)

    def noted(self, text, constraints, inputs):
        inputs = [value.at if isinstance(value, Address) else value for value in inputs]
        together = np.broadcast_arrays(*inputs, self.beyond, self.slot)
        *inputs, beyond, slot = (np.ascontiguousarray(each).reshape(-1) for each in together)
        assert all(value.min() >= 0 and value.max() < 1 << 32 for value in inputs[:2])
        copies = []
        run(text, inputs, 1, copies=copies)
        ((to, source, read, active),) = copies
        self.copies.append((to[active], source[active], read[active] > 0, beyond[active], slot[active]))

    def run_all(self):
        plan, shape, C = self.plan, self.plan.shape, self.config
        x, w, scale = (Address(begin, size) for (begin, _), size in zip(self.tensors, (2, 4, 2), strict=True))
        token_tiles, row_tiles = plan.tiles
        tiles = SimpleNamespace(of_tokens=token_tiles, of_channels=row_tiles)
        edges = {0, token_tiles - 1}, {0, min(1, row_tiles - 1), row_tiles - 1}
        for block in range(plan.launch.grid[0]):
            self.place = self.tile_at(block, tiles, C)
            if self.place[0] not in edges[0] or self.place[1] not in edges[1]:
                continue
            self.run_block(
                None, x, w, scale, None, None, None, None, shape.m, shape.n, shape.k, plan.columns, self.x_stride, *plan.tiles,
                shape.steps(C.stage_k), shape.row_blocks, self.w_stride, self.scale_stride, 1.0, C,
            )  # fmt: skip
        return [np.concatenate(each) for each in zip(*self.copies, strict=True)]


def check(shape, tile, fmt="int4", group=128, zero="none"):
    """Every vector read is inside x, the codes or the scales. Every vector written is inside its stage, and each stage is
    filled completely. Partial sums and counters of split-K are inside their workspaces.
    """
    form = WeightForm(fmt, group, zero, "fp16", False, False)
    plan = MmaPlan(shape, tile, form, torch.float16, Epilogue(form.channel_scale, False))
    blocks = Blocks(plan, group, 32 if zero == "none" else 64)
    C, S = plan.config, plan.config.stage
    to, source, read, beyond, slot = blocks.run_all()
    assert not read[beyond].any(), "nothing is read beyond the end"
    inside = np.zeros(to.shape, dtype=bool)
    for begin, end in blocks.tensors:
        inside |= (begin <= source) & (source + 16 <= end)
    assert (inside | ~read).all(), "read outside of its tensor"
    assert not (source[read] % 16).any() and not (to % 16).any()
    at = to - SHARED
    w_at = at - S.w_start
    of_x, of_w = at // S.x_bytes == slot, (w_at >= 0) & (w_at // S.w_bytes == slot)
    assert ((at >= 0) & (at < S.bytes) & np.where(at < S.w_start, of_x, of_w)).all(), "written outside of its stage"
    whole = (S.x_bytes + S.w_bytes) // 16
    assert len(to) % whole == 0 and len(np.unique(at)) == len(np.unique(slot)) * whole, "a stage is not whole"
    sums, counters = plan.workspace
    place = plain(workspace_offsets, gl=NAMES)(C)
    assert place.min() == 0 and place.max() < C.rows * C.columns
    for name, values in blocks.ends:
        if name == "store_tile":
            assert tile.splits == 1
            continue
        _, _, of_tile, split, _ = values
        own = of_tile if name == "reduce_splits_serially" else of_tile * C.splits + split
        assert of_tile < counters and (own + 1) * C.rows * C.columns <= sums


def tiles_of(n, k, bits):
    """Each candidate tile for 1 to 1024 tokens, with its smallest and largest number of tokens and one between that fills no
    tile.
    """
    found: dict[MmaTile, list[int]] = {}
    for machine in MACHINES:
        for m in range(1, 1025):
            for tile in mma_tiles(GemmShape(m, n, k, bits), machine):
                found.setdefault(tile, []).append(m)
    for tile, counts in found.items():
        ragged = [m for m in counts if m % tile.tokens]
        yield tile, {min(counts), max(counts), *ragged[len(ragged) // 2 :][:1]}


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (8192, 8192), (28672, 4096)])
def test_every_tile_stays_in_its_tensors(n, k):
    for tile, counts in tiles_of(n, k, 4):
        for m in counts:
            check(GemmShape(m, n, k, 4), tile)


SLICED = MmaTile(64, 2, 4, 1, 4, 2, warps_k=2)


@pytest.mark.parametrize("tile", [MmaTile(128, 2, 8, 1, 3, 3), MmaTile(64, 2, 8, 1, 4, 2, in_turn=True), SLICED], ids=str)
@pytest.mark.parametrize(
    ("fmt", "group", "zero"),
    [("fp6_e3m2", 0, "none"), ("int3", 128, "none"), ("uint4", 16, "integer"), ("int7", 64, "none"), ("int8", 0, "none")],
)
def test_other_forms_and_ragged_shapes(fmt, group, zero, tile):
    """Partial tiles of rows, of K (64 elements) and of tokens; splits with fewer k blocks than stages."""
    bits = number_format(fmt).bits
    for m, n, k in ((77, 3989, 1096), (130, 512, 64 * 3)):
        check(GemmShape(m, n, k, bits), tile, fmt, group, zero)
