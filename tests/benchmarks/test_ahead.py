"""Products computed ahead in separate processes, without a GPU: which products run, and failures."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks import ahead
from benchmarks.protocol import Contender
from benchmarks.request import make_request


def test_pieces_are_the_products():
    request = make_request("w4a16_g128,w8a8", "64x128,32x256", "1,2", quick=True)
    cut = [(piece.schemes, piece.shapes, piece.rows) for piece in ahead.pieces(request)]
    assert len(cut) == len(set(cut)) == 8 and (("w8a8",), ((32, 256),), (2,)) in cut
    assert all(piece.dtype == request.dtype and piece.sweep == request.sweep for piece in ahead.pieces(request))


def noted(q, request):
    """Returns a contender that creates a file for each product it runs. Products of w8a16 raise an error; products of
    w3a16_g128 kill their process."""
    folder = Path(os.environ["LOWBIT_TEST_NOTES"])

    def product(x, w):
        (folder / f"{q.scheme.name} {tuple(q.shape)} {x.shape[0]}").touch()
        if q.scheme.name == "w3a16_g128":
            os._exit(3)
        if q.scheme.name == "w8a16":
            raise ValueError("no kernel")
        return x

    return Contender(None, 0, lambda w: w, lambda m: [("a", product), ("b", product)], lambda x: x, torch.float16)


def compile_on_cpu(tmp_path, monkeypatch, formats):
    monkeypatch.setenv("LOWBIT_TEST_NOTES", str(tmp_path))
    monkeypatch.setattr(ahead, "_compute_once", on_cpu)
    ahead.compile_ahead(make_request(formats, "64x128", "1,2"), [noted])
    return sorted(path.name for path in tmp_path.iterdir())


compute_once = ahead._compute_once


def on_cpu(task):
    ahead.quantized = lambda scheme, shape, dtype: ahead_weight(scheme, shape)
    ahead.gaussian = lambda rows, columns, seed, dtype: torch.zeros(rows, columns, dtype=dtype)
    ahead.torch.cuda.synchronize = ahead.torch.cuda.empty_cache = lambda: None
    compute_once(task)


def ahead_weight(scheme, shape):
    from lowbit.quantize import rtn

    return rtn(torch.ones(shape), scheme)


def test_every_product_once_and_failures_pass(tmp_path, monkeypatch):
    names = compile_on_cpu(tmp_path, monkeypatch, "w8a16,w4a16_g128")
    assert names == [f"{scheme} (64, 128) {m}" for scheme in ("w4a16_g128", "w8a16") for m in (1, 2)]


def test_a_process_that_dies_ends_nothing_but_this(tmp_path, monkeypatch):
    assert any("w3a16" in name for name in compile_on_cpu(tmp_path, monkeypatch, "w3a16_g128,w4a16_g128"))
