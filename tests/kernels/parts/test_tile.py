"""Tiles of the wgmma kernels: for every candidate the loaded, computed and stored parts have matching sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.scaled_gemm import candidates_scaled
from lowbit.kernels.parts.smem import UNIT
from lowbit.kernels.sm90.scaled_gemm import scaled_config
from lowbit.kernels.sm90.sub_byte_scaled_gemm import narrow_config
from lowbit.ops.byte_gemm import scaled_shape


@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "fp8_block", "w4a8_g128", "w6e3m2a8e4m3"])
def test_parts_of_a_tile_fit_together(scheme):
    parsed = parse_scheme(scheme)
    for m in (1, 40, 300, 4096):
        shape = scaled_shape(parsed, m, 4096, 4096)
        for row in candidates_scaled(shape, typical_machine(90)):
            if row.reasons:
                continue
            make = scaled_config if shape.bits == 8 else narrow_config
            config = make(shape, row.tile, parsed, torch.bfloat16, "token", False, False)
            assert (config.tile_tokens, config.tile_channels) == (row.tile.tokens, row.tile.channels)
            assert config.rows * config.columns == config.tile_tokens * config.tile_channels
            stored = config.store_block[0] * config.store_block[1]
            assert stored * config.stores == config.rows * config.columns
            operands = sum(size for _, size in config.operand_regions)
            assert operands == config.stages * config.stage_bytes, "all that a stage waits for has its place"
            y = UNIT * (config.regions.end("y") - config.regions.start("y"))
            assert y == (2 * stored if config.store_by_tma else 0)
            assert config.barriers.readers == config.warps == config.threads // 32
            assert config.barriers.end <= config.regions.bytes
