"""Quantization on a CPU uses threads that each compute alone, without torch's threads, which spin while they wait."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.formats import parse_scheme
from lowbit.quantize import gptq, hqq, rtn
from lowbit.quantize.awq import clipped
from lowbit.quantize.threads import map_rows, one_thread
from tests.quantize.data import weights

W = weights(512, 512)
HESSIAN = torch.eye(512) + 0.1
METHODS = {
    "rtn": lambda w: rtn(w, "w4a16_g64"),
    "rtn, mse": lambda w: rtn(w, "w4a16_g64", search="mse"),
    "hqq": lambda w: hqq(w, "w4a16_g64_fz"),
    "gptq": lambda w: gptq(w, HESSIAN, "w4a16_g64"),
    "awq": lambda w: clipped(w, parse_scheme("w4a16_g64"), HESSIAN),
}
FEW = 40
"""Operations of a whole weight that may be shared among torch's threads: checks, factorization, products, joining."""


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Shared(TorchDispatchMode):
    """Counts the calling thread's operations during which torch may use several threads."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += torch.get_num_threads() > 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_short_operations_are_not_shared(method, four_threads):
    with Shared() as shared:
        METHODS[method](W)
    assert shared.count <= FEW + 8 * 16 * (method in ("gptq", "awq"))  # 8 groups of columns
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_threads_changes_nothing(method, four_threads):
    several = METHODS[method](W)
    torch.set_num_threads(1)
    one = METHODS[method](W)
    assert torch.equal(several.scale, one.scale) and (several.codes != one.codes).sum() <= W.numel() // 10_000


def test_parts_come_in_order_from_threads_of_one(four_threads):
    seen = []

    def copied(part):
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return part.clone()

    found = list(map_rows(copied, W, 100))
    assert torch.equal(torch.cat(found), W) and [len(part) for part in found] == [100] * 5 + [12]
    assert {number for _, number in seen} == {1} and threading.get_ident() not in {who for who, _ in seen}
    assert torch.get_num_threads() == 4


def test_errors_come_through_and_the_number_is_restored(four_threads):
    def fails(part):
        raise KeyError("no")

    for rows in (100, 1000):
        with pytest.raises(KeyError):
            list(map_rows(fails, W, rows))
        assert torch.get_num_threads() == 4
    with pytest.raises(KeyError), one_thread():
        fails(W)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("method", METHODS)
def test_inside_inference_mode(method, four_threads):
    """Inference mode applies per thread, but the result must not change."""
    with torch.inference_mode():
        inside = METHODS[method](W.clone())
    assert torch.equal(inside.codes, METHODS[method](W).codes)
