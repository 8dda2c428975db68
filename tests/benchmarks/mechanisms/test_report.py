"""`python -m benchmarks mechanisms` without a GPU: help, refusals, tables of a result file, the profiler's table, rows kept
after an interruption.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.mechanisms.report import MECHANISMS, PARTS, SCHEMA, against_first, failed, load, tables
from lowbit.eval.results import write_json


def row(part="products", case="int4, ring", way="own", us=10.0, error=None, **more):
    figures = more.pop("figures", {})
    return {
        "part": part, "case": case, "way": way, "dtype": "fp16", "m": 16, "n": 8192, "k": 8192, "us": us, "figures": figures,
        "rel_err": 3e-4, "error": error, **more,
    }  # fmt: skip


def document(*rows):
    return {
        "result": MECHANISMS, "schema": SCHEMA, "date": "2026-11-23", "complete": True, "machine": {"gpu": "a GPU"},
        "rows": [*rows],
    }  # fmt: skip


ROWS = (
    row(),
    row(way="cast", us=25.0),
    row(case="int4, wgmma", way="cast", us=None, error="WrongResult: relative error 1"),
    row("conversions", "int8", us=None, m=None, n=None, k=None, figures={"instructions": 32, "clocks": 41.25, "latency": None}),
)


def text_of(found):
    terminal = Console(width=80, record=True, quiet=False)
    for table in found:
        terminal.print(table)
    return terminal.export_text()


def test_tables_say_times_ratios_figures_and_errors(tmp_path):
    write_json(tmp_path / "m.json", document(*ROWS))
    text = text_of(tables(load(tmp_path / "m.json")))
    for said in (
        "25.00",
        "2.50",
        "1.00",
        "8192 x 8192",
        "41.25",
        "32",
        PARTS["products"][:30],
    ):
        assert said in text
    assert PARTS["tiles"][:20] not in text, "parts without rows have no table"
    only = text_of(tables(load(tmp_path / "m.json"), ["conversions"]))
    assert "41.25" in only and "25.00" not in only
    assert [line for line in failed(document(*ROWS)) if line.endswith("WrongResult: relative error 1")]


def test_kept_results_fit_a_terminal():
    """No figure is truncated."""
    files = sorted((Path(__file__).parents[3] / "benchmarks/results/h200").glob("*-mechanisms*.json"))
    texts = [text_of(tables(load(file))) for file in files]
    assert "two kernels" in texts[1] and "TensorRT-LLM" in texts[0] and not any("…" in text for text in texts)


def test_times_are_compared_within_a_case():
    rows = [row(us=10.0), row(way="cast", us=15.0), row(case="int4, wgmma", way="cast", us=40.0), row(way="none", us=None)]
    assert [against_first(each, rows) for each in rows] == [1.0, 1.5, 1.0, None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("machine"), "holds no 'machine'"),
        (lambda d: d["rows"][0].pop("figures"), "row 0 lacks figures"),
        (lambda d: d["rows"][1].update(part="odd"), "row 1 is of part 'odd'; parts are conversions, products"),
        (lambda d: d.update(schema=99), "not a result file"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, said):
    value = json.loads(json.dumps(document(*ROWS)))
    change(value)
    (tmp_path / "m.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=said):
        load(tmp_path / "m.json")


def test_the_command(tmp_path, monkeypatch):
    """The help names options and example, --report prints a file, and without an sm_90 GPU one line says what to do."""
    run = CliRunner().invoke
    shown = " ".join(run(app, ["mechanisms", "--help"], env={"COLUMNS": "200"}).output.split())
    assert all(said in shown for said in ("--parts", "--report", "Example", "docs/internals/mechanisms.md", "H100 or H200"))
    write_json(tmp_path / "m.json", document(*ROWS))
    printed = run(app, ["mechanisms", "--report", str(tmp_path / "m.json")], env={"COLUMNS": "200"})
    assert printed.exit_code == 0 and "25.00" in printed.output
    for given, said in ((["--parts", "tiles,odd"], "--parts are conversions"), ([], "--report FILE prints a result file")):
        refused = run(app, ["mechanisms", *given], env={"COLUMNS": "400"})
        assert refused.exit_code == 1 and said in refused.output, refused.output


TABLE = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",\
"device__attribute_confidential_computing_mode"
"","","byte","byte","ns","%","%",""
"0","void at::native::before()","9","9","9","9","9","No-CC"
"1","at::cuda::spin_kernel(long)","0","0","900","0","0","No-CC"
"2","gemm","1,000,000","500000","1000","80","40","No-CC"
"3","reduce","1000000","0","3,000","40","0","No-CC"
"4","at::cuda::spin_kernel(long)","0","0","900","0","0","No-CC"
"5","ring_gemm","34000000","0","10000","90","12.5","No-CC"
"""


def test_the_profilers_table_is_cut_at_its_marks():
    pytest.importorskip("triton.experimental.gluon", reason="the cases are products of the library's kernels")
    from benchmarks.mechanisms.counters import CASES, grouped, summed

    first, second = grouped(TABLE)
    assert [len(first), len(second)] == [2, 1] and len(set(CASES)) == len(CASES)
    whole = summed(first)
    assert whole["us"] == 4.0 and whole["figures"] == {
        "kernels": 2, "read_mb": 2.0, "written_mb": 0.5, "memory_percent": 50.0, "tensor_percent": 10.0,
    }  # fmt: skip
    assert summed(second)["figures"]["read_mb"] == 34.0 and grouped("==PROF== nothing") == []


def test_a_profiler_that_does_not_end_is_ended_with_what_it_started(tmp_path, monkeypatch):
    pytest.importorskip("triton.experimental.gluon", reason="the cases are products of the library's kernels")
    from benchmarks.mechanisms import counters

    monkeypatch.setattr(counters, "LIMIT_S", 1)
    number = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        counters._ended(["sh", "-c", f"sleep 60 & echo $! > {number}; wait"])
    for _ in range(100):  # the profiler's child was killed; its new parent has to reap it
        status = Path("/proc", number.read_text().strip(), "stat")
        if not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the profiler lives on")
    assert counters._ended(["sh", "-c", "echo no >&2; exit 3"]) == (3, "no\n")


def test_every_row_is_written_as_it_comes(tmp_path, monkeypatch):
    """Rows are written as they are measured: a failed one has its reason, and Ctrl-C keeps the earlier ones."""
    pytest.importorskip("triton.experimental.gluon", reason="the kernels are Triton's")
    from benchmarks.limits import Ceilings
    from benchmarks.mechanisms import run
    from benchmarks.mechanisms.trial import Trial, blank

    def stop():
        raise KeyboardInterrupt

    def fail():
        raise RuntimeError("no kernel")

    measures = (lambda: {"us": 5.0}, fail, stop)
    made = [Trial(blank("tiles", "a", str(i)), fail, measure) for i, measure in enumerate(measures)]
    monkeypatch.setattr(run, "trials", lambda parts, ceilings: made)
    for name in ("warm_up", "machine_of"):
        monkeypatch.setattr(run, name, lambda *given: None)
    monkeypatch.setattr(run, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(run, "measured_ceilings", lambda: (Ceilings(4e12, 6e14), {"read_bytes_per_s": 4e12}))
    monkeypatch.setattr(run, "compile_all", lambda kernels, sm: [])
    monkeypatch.setattr(run.torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(KeyboardInterrupt):
        run.run(("tiles",), tmp_path / "m.json", lambda line: None)
    kept = load(tmp_path / "m.json")
    assert not kept["complete"] and [r["us"] for r in kept["rows"]] == [5.0, None]
    assert kept["rows"][1]["error"] == "RuntimeError: no kernel"
