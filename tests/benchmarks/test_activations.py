from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.activations import OPERATIONS, PRODUCT_SCHEMES, measure_activations, measure_products, run
from benchmarks.activations_report import load, markdown
from benchmarks.cli import app


def test_every_operation_moves_the_bytes_that_it_says():
    """The stated bytes are those of input and output tensors. Vectors of a row's length, and scales, are not counted."""
    x, other, w = torch.randn(4, 256).half(), torch.randn(4, 256).half(), torch.ones(256).half()
    for operation in OPERATIONS:
        made = operation.call(x, other, w)
        reads = x.nbytes + (other.nbytes if "residual" in operation.name or "product" in operation.name else 0)
        writes = made.codes.nbytes + (0 if made.sum is None else made.sum.nbytes)
        assert operation.bytes_each * x.numel() == reads + writes, operation.name


def test_without_a_gpu_and_with_a_wrong_type():
    if not torch.cuda.is_available():
        shown = CliRunner().invoke(app, ["activations"])
        assert shown.exit_code == 1 and "measures an NVIDIA GPU" in shown.output
    shown = CliRunner().invoke(app, ["activations", "--dtype", "float32"])
    assert shown.exit_code == 1 and "--dtype is float16 or bfloat16" in shown.output


def document(**changed):
    return {
        "result": "lowbit bench activations", "schema": 1, "date": "2026-11-21", "complete": True,
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {"torch": "2.11", "triton": "3.6"}, "dtype": "float16", "copy_bytes_per_s": 4e12,
        "rows": [
            {"operation": "int8", "m": 16, "k": 4096, "us": 1.26, "nbytes": 3 * 16 * 4096},
            {"operation": "int8", "m": 4096, "k": 4096, "us": 20.0, "nbytes": 3 * 4096 * 4096},
            {"operation": "RMSNorm, int8", "m": 4096, "k": 4096, "us": 25.17, "nbytes": 3 * 4096 * 4096},
        ],
        "products": [
            {"scheme": "w8a8", "m": 16, "k": 8192, "product_us": 17.2, "quantize_us": 1.3, "both_us": 18.96},
        ],
    } | changed  # fmt: skip


def test_the_tables_of_a_result_file(tmp_path):
    """int8 codes of 4096 x 4096 take 50.3 MB of traffic, that is 12.58 us at 4 TB/s: 63 % of 20 us, and 50 % of 25.17 us."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document()))
    shown = CliRunner().invoke(app, ["activations", "--report", str(path)])
    assert shown.exit_code == 0 and shown.output == markdown(load(path))
    lines = shown.output.splitlines()
    assert "NVIDIA H200, 2026-11-21, torch 2.11, triton 3.6" in lines[0] and "4.00 TB/s" in lines[0]
    assert "| | K | M 16 | M 4096 |" in lines
    assert "| int8 | 4096 | 1.3 | 20.0 (63 %) |" in lines and "| RMSNorm, int8 | 4096 | - | 25.2 (50 %) |" in lines
    assert "| `w8a8` | 8192 | 16 | 17.2 | 1.3 | 19.0 |" in lines
    assert "interrupted" not in shown.output and "interrupted" in markdown(document(complete=False))


def test_files_that_are_no_results(tmp_path):
    path = tmp_path / "a.json"
    for text, why in (
        ("{", "not JSON"),
        ("[]", "not a result file"),
        (json.dumps(document(result="lowbit bench conv")), "not a result file"),
        (json.dumps({key: value for key, value in document().items() if key != "machine"}), "'machine'"),
        (json.dumps(document(rows=[{"operation": "int8", "m": 1, "k": 8}])), "row 0 lacks nbytes, us"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            load(path)


@pytest.mark.gpu
def test_a_run_writes_what_it_prints(tmp_path):
    path, made = run((3,), (4096,), torch.float16, tmp_path / "a.json", lambda line: None)
    assert load(path) == made and made["complete"] and len(made["rows"]) == len(OPERATIONS)


@pytest.mark.gpu
def test_rows_on_a_gpu():
    rows = list(measure_activations((3,), (4096,), torch.bfloat16))
    assert [row.operation for row in rows] == [operation.name for operation in OPERATIONS]
    assert all(0 < row.us < 1000 and row.nbytes >= 3 * 3 * 4096 for row in rows)
    products = list(measure_products((1, 40), 1024, torch.float16))
    assert [(row.scheme, row.m) for row in products] == [(scheme, m) for scheme in PRODUCT_SCHEMES for m in (1, 40)]
    assert all(0 < row.product_us < row.both_us < 1000 and row.quantize_us > 0 for row in products)
