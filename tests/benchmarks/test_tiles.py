from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.tiles import TileRow
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.gemm import candidates
from lowbit.kernels.choose.measured import Measured
from lowbit.kernels.choose.tiles import GemmShape, RingTile, WgmmaTile


def row(chosen_us, best_us):
    shape = GemmShape(100, 3000, 2000, 4)
    tiles = [candidate.tile for candidate in candidates(shape, typical_machine(90))]
    return TileRow("w4a16_g128", shape, tiles[0], chosen_us, tiles[1], best_us, 2 * chosen_us)


def test_a_printed_row_is_the_row_of_the_table():
    """A row that the command prints can be pasted into MEASURED unchanged."""
    measured = row(10.0, 8.0)
    names = {kind.__name__: kind for kind in (GemmShape, Measured, RingTile, WgmmaTile)}
    (read,) = eval(f"({measured.measured('H200')})", names)
    assert (read.product, read.shape, read.tile, read.us, read.instead_us) == (
        "H200", measured.shape, measured.best, 8.0, 10.0,
    )  # fmt: skip


def test_only_gains_beyond_the_noise_are_worth_a_row():
    assert row(10.0, 9.6).worth_a_row and not row(10.0, 9.8).worth_a_row


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_it_says_so():
    result = CliRunner().invoke(app, ["tiles", "--quick"])
    assert result.exit_code != 0 and "measures an NVIDIA GPU" in result.output
