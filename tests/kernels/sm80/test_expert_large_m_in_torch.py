"""The expert kernels for many rows run as Python, block by block: which rows of x and w they read, and their epilogue.

The main loops are those of the dense kernels (tests: parts/test_mma_loop.py, parts/test_wgmma_loop.py). Here a plain product of
the addressed rows replaces them. Copies by address are tested in test_large_m_addresses.py and parts/test_tile_stage.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.experts import ExpertShape
from lowbit.kernels.choose.tiles import MmaTile, WgmmaTile
from lowbit.kernels.reference.experts import expert_gemm_reference
from lowbit.pack import ExpertWeight
from lowbit.quantize import rtn

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import large_m_epilogue, mma_loop, tile_stage
from lowbit.kernels.parts.epilogue import Epilogue, activated, gate_times_up
from lowbit.kernels.sm80 import expert_large_m_gemm
from lowbit.kernels.sm80.expert_large_m_gemm import ExpertMmaPlan
from lowbit.kernels.sm90 import expert_large_m_gemm as expert_wgmma
from lowbit.kernels.sm90.expert_large_m_gemm import ExpertWgmmaPlan
from tests.kernels.parts.plain import Pointer, plain
from tests.kernels.parts.test_large_m_epilogue import GL
from tests.kernels.routing import choices, routing_of


class Place(Pointer):
    """A pointer: a tensor and an index tensor. Loads may be unmasked."""

    def __add__(self, index):
        return Place(self.memory, self.index + index)

    def __getitem__(self, axes):
        return Place(self.memory, self.index[axes])


def load(pointer, mask=None, other=0):
    index = torch.as_tensor(pointer.index)
    if mask is None:
        return pointer.memory[index]
    assert bool(((index >= 0) & (index < len(pointer.memory)))[mask.expand_as(index)].all())
    found = pointer.memory[index.clamp(0, len(pointer.memory) - 1)]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(pointer, value, mask):
    index, value, mask = torch.broadcast_tensors(pointer.index, value, mask)
    pointer.memory[index[mask]] = value[mask]


def arguments_of(plan, call, kernel):
    """(arguments by name, y) of the launch of a plan; y is filled with NaN."""
    noted = []
    plan.launch_grid = plan.launch.grid
    plan.launch = lambda *arguments: noted.append(arguments)
    y = plan(*call)
    y.fill_(float("nan"))
    return dict(zip([param.name for param in kernel.params], noted[0], strict=True)), y


def device_of():
    """Gluon operations implemented in torch, and the epilogue's device functions on top of them."""
    names = {"arange": lambda first, end, layout: torch.arange(first, end), "load": load, "store": store, "int64": torch.int64}
    names |= {"minimum": least, "maximum": most, "program_id": None, "convert_layout": lambda x, layout: x}
    gl = SimpleNamespace(**{**vars(GL), **names})
    gate = plain(gate_times_up, gl=gl, activated=plain(activated, gl=gl), CLAMP=7.0)
    gated = plain(large_m_epilogue.gated, gl=gl, gate_times_up=gate)
    return gl, {
        "finished_tile": plain(
            large_m_epilogue.finished_tile, gl=gl, gated=gated, add_bias=plain(large_m_epilogue.add_bias, gl=gl)
        ),
        "LargeMEpilogueArgs": lambda *values: SimpleNamespace(channel_scale=values[0], bias=values[1], factor=values[2]),
    }


def least(a, b):
    return a if a < b else b


def most(a, b):
    return a if a > b else b


def blocks(plan, call):
    """Runs every block of a launch and returns y, filled with NaN before."""
    given, y = arguments_of(plan, call, expert_large_m_gemm.expert_mma_gemm)
    C, x, codes = plan.config, given["x"], given["w"]
    flat_x = x.flatten()
    weights = call_weights(plan, call)

    def products(x_shared, reader, source, begin, end, C):
        token, vector = tile_stage_piece(torch.arange(C.threads))
        tile = torch.full((C.tokens, end * C.stage_k), float("nan"), dtype=torch.float64)
        for i, pointer in enumerate(source.x):
            for iteration in range(begin, end):
                for own in range(8):  # the thread's vectors of 8 along K, over all iterations
                    k = iteration * C.stage_k + vector * 8 + own
                    there = (token + i * C.copied_tokens < source.tokens + token) & (k < x.shape[1])
                    index = torch.where(there, pointer.index + iteration * C.stage_k + own, 0)
                    tile[token + i * C.copied_tokens, k] = torch.where(there, flat_x[index].double(), 0.0)
        assert not tile.isnan().any(), "every vector of a stage is copied"
        first = int(source.w[0].index[0]) // (codes.shape[2] * codes.shape[3])
        return (weights[16 * first : 16 * first + C.rows] @ tile[:, : x.shape[1]].T).float()

    gl, device = device_of()
    tile_stage_piece = plain(tile_stage.x_vector)
    first_vector = plain(tile_stage.first_vector, gl=gl)
    device |= {
        "allocate_stages": lambda C: None, "reader_of_stages": lambda C: None, "products": products,
        "x_vector": tile_stage_piece,
        "StageSource": lambda *values: SimpleNamespace(x=values[0], tokens=values[2], w=values[4]),
        "first_weights": plain(
            mma_loop.first_weights, gl=gl, ptx=lambda write, *numbers: write(*numbers), first_vector=first_vector
        ),
        "gathered_rows": plain(expert_large_m_gemm.gathered_rows, gl=gl, x_vector=tile_stage_piece),
        "store_slots": plain(expert_large_m_gemm.store_slots, gl=gl, finished_tile=device["finished_tile"]),
    }  # fmt: skip
    places = {
        name: Place(value.flatten()) if isinstance(value, torch.Tensor) and name != "y" else value
        for name, value in given.items()
    }
    places["y"] = Place(y.view(-1))
    config = SimpleNamespace(
        **{name: getattr(C, name) for name in ("stage", "epilogue", "rows", "channels", "tokens", "threads", "whole")},
        **{name: getattr(C, name) for name in ("weighted", "thread_tokens", "copied_tokens", "stage_k")},
        dequantizer=SimpleNamespace(operand_type=y.dtype), threads_layout=None, accumulator=None, store_layout=None,
    )  # fmt: skip
    for block in range(plan.launch_grid[0]):
        gl.program_id = lambda axis, block=block: block
        plain(expert_large_m_gemm.expert_mma_gemm, gl=gl, **device)(*{**places, "C": config}.values())
    return y


def wgmma_blocks(plan, x, call):
    """As `blocks`, for the wgmma kernel: the loader's copies for each tile are recorded, and the products use these copies."""
    given, y = arguments_of(plan, (x, *call), expert_wgmma.expert_wgmma_gemm)
    C, weights = plan.config, call_weights(plan, call)
    gl, device = device_of()
    named = lambda *names: lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))  # noqa: E731
    listed_tile = plain(
        expert_wgmma.listed_tile, gl=gl, ListedTile=named("expert", "first", "rows", "row_block")
    )  # fmt: skip
    config = SimpleNamespace(
        **{name: getattr(C, name) for name in ("epilogue", "rows", "channels", "tokens", "threads", "whole", "weighted")},
        **{name: getattr(C, name) for name in ("warps", "x_block", "iteration_stages", "stages")},
        dequantizer=C.dequantizer, threads_layout=None, accumulator=None, store_layout=None,
    )  # fmt: skip
    config.dequantizer = SimpleNamespace(operand_type=y.dtype, planes=1, bits=C.dequantizer.bits, plane_start=lambda plane: 0)
    place = {name: Place(value.flatten()) for name, value in given.items() if isinstance(value, torch.Tensor) and name != "y"}
    listed = SimpleNamespace(
        tiles=place["tiles"], count=place["tile_count"], row_tiles=given["row_tiles"], row_blocks=given["row_blocks"],
        iterations=given["iterations"],
    )  # fmt: skip
    p = SimpleNamespace(
        w=None, x=None, scales=None, listed=listed,
        epilogue_args=SimpleNamespace(channel_scale=place["channel_scale"], bias=place["bias"], factor=given["factor"]),
        out=SimpleNamespace(
            y=Place(y.view(-1)), columns=given["columns"], N=given["N"], order=place["order"], weights=place.get("weights")
        ),
    )  # fmt: skip
    gl.load = lambda pointer, mask=None, other=0: load(pointer if hasattr(pointer, "index") else Place(pointer, 0), mask, other)
    gl.num_programs = lambda axis: plan.launch_grid[0]
    stage = SimpleNamespace(index=lambda i: i)
    for block in range(plan.launch_grid[0]):
        gl.program_id = lambda axis, block=block: block
        copied = []

        def tma_load(what, at, barrier, to, copied=copied):
            copied.append((what, *map(int, at)))

        loader = plain(
            expert_wgmma.load_experts, gl=gl, listed_tile=listed_tile, tma_load=tma_load, ptx=lambda write, *numbers: 0,
            wait_for_previous_kernel=lambda: None, launch_next_kernel=lambda: None, acquire=lambda *given: None,
            advance=lambda stage, phase, by, C: (stage, phase),
        )  # fmt: skip
        loader(SimpleNamespace(w_descs=("w",), x_desc="x", w=(stage,), x=stage, barriers=None, listed=listed), config)
        stages = given["iterations"] * C.iteration_stages
        taken = iter([copied[i : i + 2 * stages] for i in range(0, len(copied), 2 * stages)])

        def multiply(p, scale, ahead, words, stage, phase, begin, end, more, C, taken=taken, stages=stages):
            copies = next(taken)
            assert [c[2] for c in copies[::2]] == [k * 32 * plan.config.dequantizer.bits for k in range(stages)]
            assert [c[2] for c in copies[1::2]] == [k * 64 for k in range(stages)]
            ((_, row_block, _), (_, first, _)) = copies[:2]
            rows = x[first : first + C.tokens].double()
            rows = torch.nn.functional.pad(rows, (0, 0, 0, C.tokens - len(rows)))
            return (weights[16 * row_block : 16 * row_block + C.rows] @ rows.T).float(), None, 0, 0

        math = plain(
            expert_wgmma.multiply_experts, gl=gl, listed_tile=listed_tile, multiply=multiply,
            wait_for_previous_kernel=lambda: None, first_scales=lambda *given: (None, ()), read_words=lambda *given: None,
            store_slots=plain(
                expert_wgmma.store_slots, gl=gl, finished_tile=device["finished_tile"],
                LargeMEpilogueArgs=device["LargeMEpilogueArgs"],
            ),
        )  # fmt: skip
        math(p, config)
        assert next(taken, None) is None, "every tile that is loaded is multiplied"
    return y


def call_weights(plan, call):
    """The rows of all experts one after the other, padded to whole row blocks and divided by the epilogue's factors."""
    w = plan.packed
    parts = []
    for q in w.unpack():
        part = torch.nn.functional.pad(q.dequantize(torch.float64), (0, 0, 0, -w.shape[0] % 16), value=float("nan"))
        parts.append(part)
    values = torch.cat(parts) / plan.factor
    if w.channel_scale is not None:
        scale = torch.nn.functional.pad(w.channel_scale.double(), (0, -w.shape[0] % 16), value=1.0)
        values = values / scale.reshape(-1, 1)
    return values


WGMMA = [WgmmaTile(64, 2, 4, 1, 1), WgmmaTile(128, 2, 4, 1, 1)]


@pytest.mark.parametrize("gate", ["none", "silu", "clamped_swiglu"])
@pytest.mark.parametrize("tile", [MmaTile(64, 1, 4, 2, 2, 1), MmaTile(128, 2, 4, 2, 2, 1), *WGMMA], ids=str)
@pytest.mark.parametrize(("scheme", "rows"), [("w4a16_g64", 90), ("w6e3m2a16", 7)])
def test_every_slot_gets_its_row(scheme, rows, tile, gate):
    """Some experts have more rows than a tile, others none. The last tile of w overlaps its neighbour, or y is ragged."""
    generator = torch.Generator().manual_seed(rows)
    n, k, count = (tile.rows + 32 if gate != "none" else tile.rows + 13), 136, 6

    def experts(n):
        return [rtn(torch.randn(n, k, generator=generator) * k**-0.5, scheme) for _ in range(count)]

    w = ExpertWeight.pack(experts(n)) if gate == "none" else ExpertWeight.pack_gated(experts(n // 2), experts(n // 2))
    routing = routing_of(choices(rows, 3, 5, generator), count, tile.tokens)
    weighted = gate == "none"
    x = torch.randn((rows * 3 if weighted else rows), k, generator=generator).half()
    bias = torch.randn(count, n, generator=generator).half()
    shape = ExpertShape(rows, 3, count, n, k, w.scheme.weight.bits, tile.tokens, per_slot=weighted)
    epilogue = Epilogue(w.form.channel_scale, True, gate=gate)
    call = w.codes, w.scale, w.channel_scale, bias, routing.tiles, routing.tile_count, routing.order, routing.weights
    if isinstance(tile, MmaTile):
        plan = ExpertMmaPlan(shape, tile, w.form, torch.float16, epilogue, weighted=weighted)
        plan.packed = w
        y = blocks(plan, (x, *call))
    else:
        machine = replace(typical_machine(90), sm_count=5)
        plan = ExpertWgmmaPlan(shape, tile, w.form, torch.float16, epilogue, machine, weighted=weighted)
        plan.packed = w
        y = wgmma_blocks(plan, x[routing.order.long() // (1 if weighted else 3)], call)
    expected = expert_gemm_reference(x, w, routing.experts, routing.weights, bias, gate=gate, weighted=weighted)
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)
