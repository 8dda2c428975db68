"""Runs the kernel of experts for 8-bit activations as Python, block by block: what it copies, multiplies and stores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lowbit.kernels.choose.experts import ExpertShape
from lowbit.kernels.reference.experts import expert_gemm_reference
from lowbit.ops import quantize_activations
from lowbit.pack import ExpertOperandWeight
from lowbit.quantize import rtn

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import byte_block, scaled_epilogue
from lowbit.kernels.sm80 import expert_scaled_gemm as kernel
from lowbit.kernels.sm80.expert_scaled_gemm import ExpertScaledPlan
from tests.kernels.parts.plain import plain
from tests.kernels.routing import choices, routing_of
from tests.kernels.sm80.test_expert_large_m_in_torch import Place, arguments_of, load, store


class Stage:
    """A stage of shared memory, [rows, 128]."""

    def __init__(self):
        self.values = None

    def load(self, layout):
        return self.values

    def permute(self, order):
        return SimpleNamespace(load=lambda layout: self.values.T)


def copy_ahead(stage, pointer, mask):
    """Copies to a stage, with zeros where the mask is False. All other elements must be in the tensor."""
    stage.values = load(pointer, mask.expand(torch.broadcast_shapes(mask.shape, pointer.index.shape)), 0).double()


def blocks(plan, call):
    """Runs every block of a launch and returns y, which is NaN before."""
    given, y = arguments_of(plan, call, kernel.expert_scaled_gemm)
    gl = SimpleNamespace(
        arange=lambda first, end, layout: torch.arange(first, end), SliceLayout=lambda dim, layout: None, static_range=range,
        constexpr=None, int64=torch.int64, float32=torch.float64, int8=torch.int8, load=load, store=store, exp=torch.exp,
        where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
        zeros=lambda shape, kind, layout: torch.zeros(shape, dtype=torch.float64),
        full=lambda shape, value, kind, layout: torch.full(shape, value, dtype=torch.float64),
        allocate_shared_memory=lambda kind, shape, layout: SimpleNamespace(
            index=[Stage() for _ in range(shape[0])].__getitem__
        ),
    )  # fmt: skip
    of_tokens, of_channels = plain(scaled_epilogue.of_tokens), plain(scaled_epilogue.of_channels)
    copy_rows = plain(byte_block.copy_rows, gl=gl, copy_ahead=copy_ahead, BLOCK=128)
    nothing = lambda *given: None  # noqa: E731
    device = {
        "BLOCK": 128, "rows_of_x": plain(kernel.rows_of_x, gl=gl), "wait_copies": nothing, "barrier": nothing,
        "copy_stage": plain(
            kernel.copy_stage, gl=gl, BLOCK=128, copy_ahead=copy_ahead, copy_rows=copy_rows, commit_copies=nothing
        ),
        "mma_v2": lambda a, b, sums: sums + a @ b,
        "block_scale_of": plain(byte_block.block_scale_of, gl=gl),
        "finished": plain(
            scaled_epilogue.finished, gl=gl, of_tokens=of_tokens, of_channels=of_channels,
            function_of=plain(scaled_epilogue.function_of, gl=gl),
        ),
        "ScaledSource": lambda *values: SimpleNamespace(
            **dict(zip(("x", "x_stride", "tokens", "w", "w_stride", "channels"), values, strict=False)), ks=values[9]
        ),
        "ScaledEpilogueArgs": lambda *values: SimpleNamespace(
            **dict(zip(("x_scale", "x_zero", "channel_scale", "sums", "bias"), values, strict=False))
        ),
    }  # fmt: skip
    C = plan.config
    names = ("rows", "columns", "parts", "stages", "planes", "narrow", "promote", "grouped", "block_scale", "x_scale", "x_zero")
    config = SimpleNamespace(
        **{name: getattr(C, name) for name in (*names, "channel_scale", "factor", "bias", "weighted", "function")},
        **dict.fromkeys(("accumulator", "copy_layout", "shared_layout", "operand_layout", "x_layout", "sums", "x", "w")),
        tokens_are_rows=False, y=torch.float64,
    )  # fmt: skip
    places = {
        name: Place(t.flatten().float() if t.dtype == torch.float8_e4m3fn else t.flatten())
        if isinstance(t, torch.Tensor)
        else t
        for name, t in given.items()
    }
    places["y"] = Place(y.view(-1))
    places["y"].dtype = SimpleNamespace(element_ty=y.dtype)
    for block in range(plan.launch_grid[0]):
        gl.program_id = lambda axis, block=block: block
        plain(kernel.expert_scaled_gemm, gl=gl, **device)(*{**places, "C": config}.values())
    return y


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("scheme", "rows"), [("w8a8", 8), ("w8e4m3a8e4m3", 16), ("fp8_block", 64)])
def test_every_slot_gets_its_row(scheme, rows, down):
    """Experts without slots, with one tile and with several; N of no whole block, K of no whole stage."""
    generator = torch.Generator().manual_seed(rows)
    n, k, tokens, count = 136, 336, 70, 5
    w = ExpertOperandWeight.pack([rtn(torch.randn(n, k, generator=generator) * k**-0.5, scheme) for _ in range(count)])
    routing = routing_of(choices(tokens, 2, 4, generator), count, rows)
    block = scheme == "fp8_block"
    x = quantize_activations(
        torch.randn(2 * tokens if down else tokens, k, generator=generator), w.scheme.activation.name,
        **({"group": 128} if block else {"symmetric": not (down and scheme == "w8a8")}),
    )  # fmt: skip
    bias = torch.randn(count, n, generator=generator)
    shape = ExpertShape(tokens, 2, count, n, k, 8, rows, down)
    plan = ExpertScaledPlan(
        shape, w.scheme, torch.float32, "block" if block else "token", x.zero is not None, True, weighted=down
    )
    call = x.codes, x.scale, x.zero, w.codes, w.scale, w.channel_scale, w.sums, bias, routing.tiles, routing.tile_count
    y = blocks(plan, (*call, routing.order, routing.weights if down else None))
    scale = x.scale.double().repeat_interleave(128, 1)[:, :k] if block else x.scale.double()
    values = (x.codes.double() - (0 if x.zero is None else x.zero)) * scale
    expected = expert_gemm_reference(values, w, routing.experts, routing.weights, bias, weighted=down)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
