"""The whole expert kernel for few rows, run in NumPy on packed weights: tasks, the ring across tasks, products, epilogue.

Runs the kernel's device code and PTX thread by thread, as test_small_m_in_numpy.py does. Outputs of previous kernels hold NaN
until the kernel has waited for them.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.experts import ExpertShape
from lowbit.kernels.choose.tiles import RingTile
from lowbit.pack import ExpertWeight
from lowbit.quantize import rtn

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import epilogue as epilogue_part
from lowbit.kernels.parts import prologue, ring_loop, small_m_epilogue
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.reference.experts import expert_gemm_reference
from lowbit.kernels.sm80 import expert_small_m_gemm
from lowbit.kernels.sm80.expert_small_m_gemm import ExpertRingPlan
from tests.kernels.parts.blocks import Block, Memory, lanes
from tests.kernels.parts.plain import plain
from tests.kernels.routing import choices, routing_of
from tests.kernels.sm80.test_small_m_in_numpy import close, multiply

NAN_BYTES = 255


def launch(plan, blocks, late, call):
    """Runs a plan's launch in `blocks` blocks and returns y. The tensors `late` are outputs of previous kernels."""
    noted = []
    plan.launch = lambda *arguments: noted.append(arguments)
    y = plan(*call)
    names = [param.name for param in expert_small_m_gemm.expert_ring_gemm.params]
    given = dict(zip(names, noted[0], strict=True))
    y.fill_(float("nan"))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    # NumPy has no bf16. The kernel's bf16 inputs are powers of two, which are exact in float32.
    tensors = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
    places, end = {}, 4096
    for name, tensor in tensors.items():
        places[name], end = end, (end + tensor.nbytes + 511) // 256 * 256
    everything = np.full(end, NAN_BYTES, dtype=np.uint8)
    for name, tensor in tensors.items():
        at, flat = places[name], np.ascontiguousarray(tensor.numpy()).reshape(-1)
        everything[at : at + tensor.nbytes] = flat.view(np.uint8)
        given[name] = Memory(everything[at : at + tensor.nbytes].view(flat.dtype), at)
    hidden = [slice(places[name], places[name] + t.nbytes) for name, t in tensors.items() if any(t is one for one in late)]
    for i in range(blocks):
        held = [everything[place].copy() for place in hidden]
        for place in hidden:
            everything[place] = NAN_BYTES

        def after_wait(held=held):
            for place, values in zip(hidden, held, strict=True):
                everything[place] = values

        block = Block(
            plan.config, (lanes(blocks), 1, 1), (lanes(i), 0, 0), epilogue_part, prologue, small_m_epilogue, ring_loop,
            expert_small_m_gemm, memory=everything, after_wait=after_wait, multiply=multiply,
            range=lambda *ends: map(lanes, range(*map(int, ends))),
        )  # fmt: skip
        if not plan.config.overlap:
            after_wait()
        block.device["expert_ring_gemm"](*given.values())
    y.copy_(torch.from_numpy(given["y"].values).view(y.shape))
    assert (given["y"].written > 0).all(), "a row for each slot"
    return y


def made(scheme, n, k, rows, top_k, count, tile_rows, gated, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def experts(n):
        return [rtn(torch.randn(n, k, generator=generator) * k**-0.5, scheme) for _ in range(count)]

    w = ExpertWeight.pack_gated(experts(n // 2), experts(n // 2)) if gated else ExpertWeight.pack(experts(n))
    routing = routing_of(choices(rows, top_k, count, generator), count, tile_rows)
    x, bias = torch.randn(rows, k, generator=generator).half(), torch.randn(count, n, generator=generator).half()
    return w, routing, x, bias


TILES = [
    RingTile(8, 2, 2, 1, 2, 1), RingTile(8, 3, 1, 2, 1, 1), RingTile(16, 1, 2, 1, 4, 1), RingTile(16, 2, 1, 2, 2, 1),
]  # fmt: skip
SCHEMES = [("w4a16_g128", 512), ("w6e3m2a16", 400), ("w5a16_g64", 648), ("w4a16_g128", 136)]
CASES = [(*SCHEMES[i], tile, gate) for tile in TILES for i, gate in enumerate(("silu", "none", "clamped_swiglu", "none"))]


@pytest.mark.parametrize(("scheme", "k", "tile", "gate"), [CASES[i] for i in range(0, 16, 1) if i % 3 != 2], ids=str)
def test_every_slot_gets_its_row(scheme, k, tile, gate):
    """Some experts have no slots, one slot, or more slots than a tile; some blocks have several tasks, some none."""
    n = 104 if gate == "none" else 112
    w, routing, x, bias = made(scheme, n, k, 11, 2, 5, tile.tokens, gate != "none")
    shape = ExpertShape(11, 2, 5, n, k, w.scheme.weight.bits, tile.tokens)
    weighted = gate == "none"
    early = tile.warps_n == 2
    plan = ExpertRingPlan(
        shape, tile, w.form, torch.float16, Epilogue(w.form.channel_scale, True, gate=gate), typical_machine(90),
        weighted=weighted, early=early,
    )  # fmt: skip
    call = x, w.codes, w.scale, w.channel_scale, bias, routing.tiles, routing.tile_count, routing.order, routing.weights
    late = (x,) if early else (x, routing.tiles, routing.tile_count, routing.order, routing.weights)
    tasks = int(routing.tile_count) * plan.units
    expected = expert_gemm_reference(x, w, routing.experts, routing.weights, bias, gate=gate, weighted=weighted)
    y = launch(plan, max(2, tasks // 3), late, call)
    assert close(y, expected)
    if tile is TILES[0]:
        assert torch.equal(y, launch(plan, tasks + 1, late, call)), "the same bits in any number of blocks"


def test_quotients_are_exact():
    rng, one = np.random.default_rng(0), 1 << expert_small_m_gemm.INVERSE_BITS.value
    gl = SimpleNamespace(int64=np.int64, int32=np.int32)
    quotient = plain(expert_small_m_gemm.quotient, gl=gl, INVERSE_BITS=30)
    for divisor in [*range(1, 130), 509, 1792, 4096]:
        most = (one - 1) // divisor
        edges = [0, divisor - 1, divisor, most - most % divisor - 1, most]
        n = np.concatenate([rng.integers(0, most, 500, endpoint=True), edges])
        assert np.array_equal(quotient(lanes(n.clip(0, most)), -(-one // divisor)), n.clip(0, most) // divisor)


def test_rows_of_slots():
    """x has a row for each slot; the GPU has no programmatic dependent launch."""
    tile = TILES[2]
    w, routing, x, bias = made("w4a16_g128", 72, 640, 6, 3, 4, 16, False)
    x = torch.randn(18, 640).half()
    plan = ExpertRingPlan(
        ExpertShape(6, 3, 4, 72, 640, 4, 16, per_slot=True), tile, w.form, torch.float16, Epilogue(w.form.channel_scale, True),
        typical_machine(80),
    )  # fmt: skip
    y = launch(
        plan, 3, (), (x, w.codes, w.scale, w.channel_scale, bias, routing.tiles, routing.tile_count, routing.order, None)
    )
    assert close(y, expert_gemm_reference(x, w, routing.experts, routing.weights, bias))
