"""Cluster split-K, with two blocks per tile. Its barriers lie after those of the stages in memory, and its PTX uses its
operands."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import parse_scheme
from lowbit.kernels.choose.scaled_gemm import ScaledTile
from lowbit.kernels.parts.cluster_split_k import ClusterExchange
from lowbit.kernels.parts.smem import UNIT
from lowbit.kernels.sm90.scaled_gemm import scaled_config
from lowbit.ops.byte_gemm import scaled_shape
from tests.kernels.parts.plain import operands

EXCHANGE = ClusterExchange(start=5000, warps=8, bytes=65536)


def test_ptx_names_its_operands():
    wanted = {
        "init": {0, 1},
        "permit_writes": {0, 1, 2},
        "wait_writable": {0},
        "wait_received": {0},
        "arrive": {0},
        "wait_cluster": {0},
    }
    for name, numbers in wanted.items():
        assert operands(getattr(EXCHANGE, name)) == numbers, name
    assert operands(EXCHANGE.send) == {0, 4, 5, 6, 7, 8, 12} and operands(EXCHANGE.read) == {0, 1, 2, 3, 4}
    assert "[at+5000], 8;" in EXCHANGE.init and "[at+5008], 65536;" in EXCHANGE.init


def test_barriers_have_room_behind_those_of_the_stages():
    parsed = parse_scheme("fp8_dynamic")
    shape, tile = scaled_shape(parsed, 256, 8192, 8192), ScaledTile(False, 2, 256, 4, 2, 8, True)
    config = scaled_config(shape, tile, parsed, torch.bfloat16, "token", False, False)
    assert config.exchange.start == config.barriers.start + 2 * 8 * config.stages
    assert config.exchange.start + 16 <= UNIT * config.regions.end("barriers") == config.regions.bytes
    assert config.exchange.bytes == 4 * config.rows * config.columns // 2, "one half of the tile comes in float32"
