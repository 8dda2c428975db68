"""What adapters add to a tile of the large-M kernel: its PTX in NumPy against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.kernels.reference.lora import lora_terms_reference, part_of_columns
from tests.kernels.ptx import execute
from tests.kernels.sass import compile_kernel

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.lora_epilogue import LoraArgs, LoraTerms, add_terms, prefetch_tile
from lowbit.kernels.parts.tile import Warpgroups


@dataclass(frozen=True)
class Tile(Warpgroups):
    """A tile of a product with adapters."""

    warpgroups: int
    tokens: int
    epilogue: Epilogue

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, self.tokens, 16])


@gluon.jit
def add_to_tile(y, t, b, adapter_of, M, N, C: gl.constexpr):
    """y float32 [N, M] += b t, a tile for each block."""
    TOKENS: gl.constexpr = C.tokens
    lora = LoraArgs(t, b, adapter_of)
    first_row, first_token = gl.program_id(0) * C.rows, gl.program_id(1) * TOKENS
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    tokens = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, C.accumulator))
    at = y + rows[:, None] * M + tokens[None, :]
    exists = (rows < N)[:, None] & (tokens < M)[None, :]
    prefetch_tile(lora, first_row, first_token, N, M, C)
    sums = add_terms(gl.load(at, mask=exists, other=0.0), lora, first_row, first_token, N, M, C)
    gl.store(at, sums, mask=exists)


@pytest.mark.parametrize(
    ("warpgroups", "tokens", "m", "widths", "alternates", "rank", "splits"),
    [
        (1, 16, 9, (64, 24, 24), False, 16, 2), (2, 32, 32, (80, 80), True, 16, 1), (2, 16, 20, (144,), False, 32, 3),
        (1, 64, 50, (40, 40), False, 64, 1),
    ],
)  # fmt: skip
def test_terms_of_a_tile(warpgroups, tokens, m, widths, alternates, rank, splits):
    generator, n, adapters = torch.Generator().manual_seed(m), sum(widths), 3
    t = torch.randn(splits, m, len(widths), rank, generator=generator)
    b = torch.randn(adapters, n, rank, generator=generator).half()
    adapter_of = torch.randint(-1, 2, (m,), generator=generator, dtype=torch.int32)  # none has the third one
    t[:, adapter_of < 0] = torch.nan
    y = torch.randn(n, m, generator=generator)
    expected = y.double() + lora_terms_reference(t, b, adapter_of, part_of_columns(widths, alternates)).T
    tile = Tile(warpgroups, tokens, Epilogue(False, False, lora=LoraTerms(widths, alternates, adapters, rank, splits, "fp16")))
    signature = {"y": "*fp32", "t": "*fp32", "b": "*fp16", "adapter_of": "*i32", "M": "i32", "N": "i32"}
    kernel = compile_kernel(add_to_tile, signature, tile, ("y", "t", "b", "adapter_of"), tile.warps, 80)
    grid = -(-n // tile.rows), -(-m // tokens), 1
    execute(kernel.ptx, max(kernel.shared_bytes, 1), (y, t, b, adapter_of, m, n), grid, tile.threads)
    assert float((y - expected).abs().max()) < 1e-4
