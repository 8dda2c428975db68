from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from lowbit.bench.activations import OPERATIONS, PRODUCT_SCHEMES, measure_activations, measure_products
from lowbit.cli import app


def test_every_operation_moves_the_bytes_that_it_says():
    """What goes in and comes out, counted on tensors; vectors as long as a row, and scales, are left out."""
    x, other, w = torch.randn(4, 256).half(), torch.randn(4, 256).half(), torch.ones(256).half()
    for operation in OPERATIONS:
        made = operation.call(x, other, w)
        reads = x.nbytes + (other.nbytes if "residual" in operation.name or "product" in operation.name else 0)
        writes = made.codes.nbytes + (0 if made.sum is None else made.sum.nbytes)
        assert operation.bytes_each * x.numel() == reads + writes, operation.name


def test_without_a_gpu_and_with_a_wrong_type():
    if not torch.cuda.is_available():
        shown = CliRunner().invoke(app, ["bench", "activations"])
        assert shown.exit_code == 1 and "measures an NVIDIA GPU" in shown.output
    shown = CliRunner().invoke(app, ["bench", "activations", "--dtype", "float32"])
    assert shown.exit_code == 1 and "--dtype is float16 or bfloat16" in shown.output


@pytest.mark.gpu
def test_rows_on_a_gpu():
    rows = list(measure_activations((3,), (4096,), torch.bfloat16, 4e12))
    assert [row.operation for row in rows] == [operation.name for operation in OPERATIONS]
    assert all(0 < row.us < 1000 and row.share > 0 for row in rows)
    products = list(measure_products((1, 40), 1024, torch.float16))
    assert [(row.scheme, row.m) for row in products] == [(scheme, m) for scheme in PRODUCT_SCHEMES for m in (1, 40)]
    assert all(0 < row.product_us < row.both_us < 1000 and row.quantize_us > 0 for row in products)
