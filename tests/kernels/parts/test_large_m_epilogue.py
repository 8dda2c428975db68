"""The epilogue of the wgmma kernel, run as Python on whole tiles, against the reference. GPU tests: tests/ops/."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import large_m_epilogue
from lowbit.kernels.parts.epilogue import Epilogue, activated, gate_times_up
from lowbit.kernels.parts.large_m_epilogue import SUMS
from tests.kernels.parts.plain import Pointer, plain


def load(pointer, mask, other):
    assert bool(((pointer.index >= 0) & (pointer.index < len(pointer.memory)))[mask.expand_as(pointer.index)].all())
    found = pointer.memory[pointer.index.clamp(0, len(pointer.memory) - 1)]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(pointer, value, mask):
    index, value, mask = torch.broadcast_tensors(pointer.index, value, mask)
    pointer.memory[index[mask]] = value[mask]


class Shared:
    """Shared memory, NaN until stored to; `permute` gives a transposed view."""

    def __init__(self, memory):
        self.memory, self.dtype = memory, memory.dtype

    def permute(self, order):
        return Shared(self.memory.permute(order))

    def slice(self, first, count):
        return Shared(self.memory[first : first + count])

    def store(self, value):
        assert value.shape == self.memory.shape and value.dtype == self.dtype
        self.memory.copy_(value)

    def load(self, layout):
        return self.memory.clone()


def tma_load(matrix, at, barrier, tile):
    (first, column), (rows, columns) = at, tile.memory.shape
    tile.memory.zero_()
    part = matrix[first : first + rows, column : column + columns]
    tile.memory[: part.shape[0], : part.shape[1]] = part


def tma_store(matrix, at, tile):
    (first, column), (rows, columns) = at, tile.memory.shape
    part = matrix[first : first + rows, column : column + columns]
    part.copy_(tile.memory[: part.shape[0], : part.shape[1]])


def put(out, result, first_token, first_row, tokens_are_rows):
    out.tile.permute([1, 0]).store(result)
    tma_store(out.descriptor, [first_token, first_row], out.tile)


GL = SimpleNamespace(
    arange=lambda first, end, layout: torch.arange(first, end), SliceLayout=lambda dim, layout: None, static_range=range,
    constexpr=None, float32=torch.float32, int64=torch.int64, zeros=lambda shape, kind, layout: torch.zeros(shape, dtype=kind),
    load=load, store=store, sum=lambda x, axis: x.sum(axis), rsqrt=torch.rsqrt, exp=torch.exp, where=torch.where,
    reshape=torch.reshape, permute=lambda x, order: x.permute(order), split=lambda x: (x[..., 0], x[..., 1]),
    convert_layout=lambda x, layout, assert_trivial: x,
)  # fmt: skip


def device(name, **more):
    """A device function of the module as Python, together with the device functions that it calls."""
    nothing = lambda *given: None  # noqa: E731
    names = {
        "gl": GL, "tma_load": tma_load, "tma_store": tma_store, "put": put, "barrier": nothing, "fence_async_shared": nothing,
        "wait_for_previous_kernel": nothing, "mbarrier": SimpleNamespace(expect=nothing, wait=nothing), "SQUARES": SUMS,
        "gate_times_up": plain(gate_times_up, gl=GL, activated=plain(activated, gl=GL)),
    }  # fmt: skip
    others = {"load_squares", "rms_factors", "gated", "store_squares", "add_to_residual", "add_bias"} - {name}
    names |= {other: device(other) for other in others if other in getattr(large_m_epilogue, name).fn.__code__.co_names}
    return plain(getattr(large_m_epilogue, name), **names)


def run(epilogue, m, n, tokens, rows, generator, half=torch.float16):
    """Runs the epilogue on random accumulators: y, or h, x and sums of squares, each with the reference's result."""
    config = SimpleNamespace(
        epilogue=epilogue, rows=rows, tokens=tokens, accumulator=None, of_parts=None, of_columns=None, of_tokens=None, y=half,
        store_by_tma=n % 8 == 0,
    )  # fmt: skip
    gated, tiles = epilogue.gate != "none", -(-n // rows)
    sums = torch.randn(tiles * rows, tokens, generator=generator)
    scale, bias, gamma = (torch.rand(n, generator=generator) for _ in range(3))
    parts = epilogue.norm_parts
    squares = n * torch.rand(parts, m, generator=generator) if parts else torch.full((tiles, m), torch.nan)
    h = torch.randn(m, n, generator=generator).to(half)
    before, y = h.clone(), torch.full((m, n // 2 if gated else n), torch.nan, dtype=half)
    epilogue_args = SimpleNamespace(channel_scale=Pointer(scale), bias=Pointer(bias.to(half)), factor=0.5)
    stream = SimpleNamespace(
        squares=Pointer(squares.view(-1)), inverse_width=1 / n, eps=1e-3, x_factor=0.25, gamma=Pointer(gamma), h=h, h_there=None
    )  # fmt: skip
    for tile in range(tiles):
        stream.sums = Shared(torch.full((SUMS, tokens), torch.nan))
        stream.h_tile = Shared(torch.full((tokens, rows), torch.nan, dtype=half))
        columns = rows // 2 if gated else rows
        out = SimpleNamespace(
            descriptor=y,
            pointer=Pointer(y.view(-1)),
            tile=Shared(torch.full((tokens, columns), torch.nan, dtype=half)),
            M=m,
            N=n,
        )
        device("load_epilogue_inputs")(stream, tile * rows, 0, m, config)
        device("wait_for_h")(stream, config)
        device("apply_epilogue")(out, sums[tile * rows :][:rows], epilogue_args, stream, tile, tile * rows, 0, config)
    total = (sums[:n, :m].double() * 0.5 * (scale.double()[:, None] if epilogue.channel_scale else 1)).T
    if epilogue.norm_parts:
        total = total / (squares.double().sum(0) / n + 1e-3).sqrt()[:, None] / 0.25
    total = total + (bias.to(half).double() if epilogue.bias else 0)
    return y, h, squares, gamma, before, total


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize(("m", "n"), [(16, 256), (5, 120), (11, 392)])
def test_norm_and_gate(m, n, tokens):
    for gate in ("none", "silu", "gelu_tanh"):
        for parts in (0, 1, 16, 37):
            epilogue = Epilogue(parts != 16, parts != 1, parts, gate)
            y, *_, total = run(
                epilogue, m, n // 16 * 16 if gate != "none" else n, tokens, 128, torch.Generator().manual_seed(parts)
            )
            if gate != "none":
                pairs = total.unflatten(1, (-1, 2, 8))
                total = (activation(gate, pairs[:, :, 0]) * pairs[:, :, 1]).flatten(1)
            torch.testing.assert_close(y.double(), total, rtol=1e-3, atol=2e-4)


def activation(gate, x):
    return torch.nn.functional.silu(x) if gate == "silu" else torch.nn.functional.gelu(x, approximate="tanh")


def test_rows_that_tma_cannot_store():
    y, *_, total = run(Epilogue(True, True, 3), 7, 125, 16, 128, torch.Generator().manual_seed(0))
    torch.testing.assert_close(y.double(), total, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "tokens", "rows"), [(16, 256, 16, 128), (5, 120, 16, 128), (50, 520, 64, 256)])
def test_residual(m, n, tokens, rows, half):
    generator = torch.Generator().manual_seed(n)
    x, h, squares, gamma, before, total = run(Epilogue(True, m != 5, h_type="fp16"), m, n, tokens, rows, generator, half)
    added = (before.double() + total).to(half)
    assert float((h != added).double().mean()) < 0.01, "float32 rounds before"
    torch.testing.assert_close(h, added, rtol=2 * torch.finfo(half).eps, atol=1e-6)
    assert torch.equal(x, (h.float() * (gamma * 0.25)).to(half))
    assert squares.shape[0] == -(-n // rows)
    torch.testing.assert_close(squares.sum(0), h.float().square().sum(1))


def test_sums_of_squares_are_where_lanes_have_their_columns():
    """The layout `of_columns` gives each lane the two of every eight columns that it has in mma accumulators, and its share of
    rows.
    """

    class Config(large_m_epilogue.SquaresLayouts):
        warpgroups, tokens = 2, 64

    layout, seen = Config().of_columns, {}
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    registers, lanes = len(layout.reg_bases), len(layout.lane_bases)
    for place in range(1 << registers + lanes):
        row = column = 0
        for bit, (r, c) in enumerate(bases[: registers + lanes]):
            if place >> bit & 1:
                row, column = row ^ r, column ^ c
        assert column % 8 // 2 == (place >> registers) % 4
        seen.setdefault((row, column), []).append(place)
    assert len(seen) == SUMS * 64 and all(len(places) == 1 for places in seen.values())
    assert layout.warp_bases == [[0, 0]] * 3
