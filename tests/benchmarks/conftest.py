"""A small hand-made result file: two shapes in one format, measured for this library, two peers and cuBLAS, with one
failure.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.limits import Ceilings
from benchmarks.protocol import blank_row
from benchmarks.request import GemmRequest
from benchmarks.results import Results, load
from lowbit.formats import parse_scheme

CEILINGS = Ceilings(4e12, 8e14)


def timed(impl, scheme, shape, m, us, error=None):
    row = blank_row(impl, None if scheme is None else parse_scheme(scheme), shape, m, "float16")
    return {**row, "kernel": "a kernel" if us else None, "us": us, "rel_err": 3e-4 if us else None, "error": error}


@pytest.fixture
def result_file(tmp_path):
    path = tmp_path / "results.json"
    request = GemmRequest(("w4a16_g128",), ((1024, 2048), (512, 1024)), (1, 16))
    versions = {"lowbit": "0", "torch": "2.11", "cuda": "13.0", "triton": "3.6", "some-peer": "1.2"}
    results = Results(path, request, {"gpu": "NVIDIA H200"}, versions)
    results.skip("gemlite", "gemlite is not installed")
    results.set_ceilings(CEILINGS, {"read_bytes_per_s": 4e12, "fp16_flops": 8e14})
    for row in (
        timed("cublas", None, (1024, 2048), 1, 8.0),
        timed("cublas", None, (1024, 2048), 16, 9.0),
        timed("lowbit", "w4a16_g128", (1024, 2048), 1, 2.0),
        timed("lowbit", "w4a16_g128", (1024, 2048), 16, None, "UnsupportedProblem: no kernel"),
        timed("lowbit", "w4a16_g128", (512, 1024), 1, 1.5),
        timed("humming", "w4a16_g128", (1024, 2048), 1, 4.0),
        timed("gemlite", "w4a16_g128", (1024, 2048), 1, 5.0),
        timed("humming", "w6e3m2a16", (1024, 2048), 1, 1.0),
    ):
        results.add(row)
    results.finish()
    return path


@pytest.fixture
def document(result_file):
    return load(result_file)


@pytest.fixture
def changed(result_file):
    """A function that applies `change` to the file's document and rewrites the file."""

    def apply(change):
        value = json.loads(result_file.read_text())
        change(value)
        result_file.write_text(json.dumps(value))
        return result_file

    return apply
