"""The GEMM benchmark without measurements, and a very small real run on a GPU."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import gemm, peers
from benchmarks.cli import app
from benchmarks.protocol import contender_rows, reference_product, relative_error
from benchmarks.request import make_request
from benchmarks.results import load
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.quantize import rtn
from lowbit.tune.timing import TOLERANCE, WrongResult, failures, reason

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_help_teaches():
    assert "gemm" in run("--help").stdout and "report" in run("--help").stdout
    assert "python -m benchmarks gemm --formats" in run("gemm", "--help").stdout
    shown = " ".join(run("report", "--help").stdout.split())
    assert "python -m benchmarks report benchmarks/results" in shown


@without_gpu
def test_no_gpu_is_one_clear_line(tmp_path):
    result = run("gemm", "--out", tmp_path / "r.json", "--peers", "none")
    assert result.exit_code == 1 and "bench gemm measures an NVIDIA GPU" in result.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--formats", "int4"), "unknown scheme 'int4'"),
        (("--shapes", "12"), "a shape is NxK"),
        (("--m", "x"), "numbers of tokens"),
        (("--peers", "cutlass"), "known peers are humming, marlin, machete, bitsandbytes, quack, gemlite, torch, or none"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = run("gemm", *arguments)
    assert result.exit_code == 1 and message in result.stderr.replace("\n", " ")


def test_absent_peers_are_reported(monkeypatch):
    monkeypatch.setattr(gemm.importlib.util, "find_spec", lambda name: object() if name == "torch" else None)
    present, absent = gemm.choose_peers(None)
    assert present == ("torch",)
    assert absent[0] == ("humming", "humming-kernels is not installed (pip install humming-kernels)")
    assert gemm.choose_peers("Torch, torch") == (("torch",), ())
    assert gemm.choose_peers("none") == ((), ())


@without_gpu
def test_a_peer_that_dies_leaves_rows_with_its_last_words():
    request = make_request("w4a16_g128", "64x128", "1,2")
    rows = list(gemm.peer_rows("torch", request))
    assert [row["m"] for row in rows] == [1, 2]
    assert all(row["us"] is None and row["error"].endswith("ended with 1: torch sees no NVIDIA GPU") for row in rows)


def test_rows_arrive_as_a_peer_writes_them(monkeypatch):
    """A partial line is read once it is complete, and rows written before a crash are kept."""
    code = """
import json, sys, time
out = open(sys.argv[sys.argv.index("--out") + 1], "a")
line = json.dumps({"m": 1, "us": 5.0})
out.write(line[:6]); out.flush(); time.sleep(0.3); out.write(line[6:] + "\\n"); out.flush()
sys.exit("out of luck")
"""
    real = gemm.subprocess.Popen
    monkeypatch.setattr(gemm.subprocess, "Popen", lambda command, **kw: real([sys.executable, "-c", code, *command[4:]], **kw))
    rows = list(gemm.peer_rows("torch", make_request("w4a16_g128", "64x128", "1,2")))
    assert rows[0] == {"m": 1, "us": 5.0}
    assert rows[1]["m"] == 2 and "ended with 1: out of luck" in rows[1]["error"]


def test_report_command(result_file, tmp_path):
    result = run("report", result_file, "--m", "1")
    assert result.exit_code == 0 and "humming 4.0" in result.stdout and "| 16 |" not in result.stdout
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- bench:gemm -->\n<!-- /bench:gemm -->\n")
    assert run("report", result_file, "--readme", readme).exit_code == 0
    assert "| w4a16_g128 | 1 | 2.0 |" in readme.read_text()
    readme.write_text("no marks")
    refused = run("report", result_file, "--readme", readme)
    assert refused.exit_code == 1 and "bench:gemm" in refused.stderr and readme.read_text() == "no marks"
    assert run("report", tmp_path / "none.json").exit_code == 1


def test_the_check_finds_wrong_and_missing_values():
    y = torch.randn(4, 8, dtype=torch.float64)
    assert relative_error(y, y[:2]) == 0
    assert relative_error(y * 1.02, y) == pytest.approx(0.02) and TOLERANCE < 0.02
    many = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)).double()
    wrong = many.clone()
    wrong[1234] *= 1.2
    assert float((wrong - many).norm() / many.norm()) < TOLERANCE, "which the error of all rows would hide"
    with pytest.raises(WrongResult, match="row 1234 of 4096: relative error 0.2"):
        relative_error(wrong, many)
    y[3, 7] = math.nan
    with pytest.raises(WrongResult, match="1 of 32 outputs are not finite"):
        relative_error(y, y[:2])


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w4a16_g32_z"])
def test_the_reference_by_blocks_is_the_reference(scheme):
    torch.manual_seed(0)
    q, x = rtn(torch.randn(37, 256), scheme), torch.randn(3, 256)
    torch.testing.assert_close(reference_product(x, q, 16), mixed_gemm_reference(x, q), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["humming", "gemlite", "torch"])
def test_adapters_refuse_what_their_peer_has_not(name):
    request = make_request("w5e2m2a16", "64x128", "1")
    q = rtn(torch.randn(64, 128), "w5e2m2a16" if name != "humming" else "w4a16_g128_z")
    with pytest.raises(ValueError, match=r"symmetric|no kernel|takes int4"):
        peers.PEERS[name].build(q, request)


def test_reasons_are_one_line():
    assert reason(ValueError("a\n\n  b")) == "ValueError: a | b" and reason(RuntimeError()) == "RuntimeError: no message"
    assert Exception not in failures() and RuntimeError in failures()


@pytest.mark.gpu
def test_a_real_run(tmp_path):
    """A small product has times, ceilings, a cuBLAS row and torch's int4 kernel as peer."""
    out = tmp_path / "r.json"
    result = run("gemm", "--formats", "w4a16_g128", "--shapes", "1024x2048", "--m", "1,64", "--peers", "torch", "--out", out)
    assert result.exit_code == 0, result.output
    document = load(out)
    assert document["complete"] and document["ceilings"]["read_bytes_per_s"] > 1e11
    for row in document["rows"]:
        assert row["error"] is None and row["rel_err"] < TOLERANCE and row["cublas_fp16_us"] > 0
    assert json.loads(out.read_text())["machine"]["sm_count"] > 0


@pytest.mark.gpu
def test_wrong_kernels_get_no_time():
    from benchmarks.ceilings import cublas
    from benchmarks.protocol import Contender, blank_row

    w = torch.randn(256, 512, device="cuda", dtype=torch.float16)
    honest = cublas(w)
    blank = [blank_row("x", None, (256, 512), 4, "float16")]
    kinds = {
        "wrong": lambda x, w: x @ w.T * 1.1,
        "nothing written": lambda x, w: x.new_empty(x.shape[0], w.shape[0]),
    }
    for name, product in kinds.items():
        contender = Contender(w, w.nbytes, torch.Tensor.clone, lambda m, p=(name, product): [p], honest.truth, torch.float16)
        (row,) = contender_rows(contender, blank, 512)
        assert row["us"] is None and "WrongResult" in row["error"], name
