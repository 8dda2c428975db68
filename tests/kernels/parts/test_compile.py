"""Kernels written down instead of launched, and compiled by other processes into the cache that a launch looks into."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.mixed_gemm import GemmShape, RingTile
from lowbit.pack import weight_form

pytest.importorskip("triton")

H200 = typical_machine(90)


def ring(m=1, n=256, k=512, scheme="w8a16"):
    """A call of a plan of the ring kernel, its tensors on a CPU."""
    from lowbit.kernels.sm80.mixed_gemm import RingPlan

    form = weight_form(parse_scheme(scheme), None, True)
    plan = RingPlan(GemmShape(m, n, k, 8), RingTile(8, 1, 2, 1, 4, 1), form, torch.float16, False, H200.arch)
    x, codes, scale = torch.empty(m, k, dtype=torch.half), torch.empty(n // 16, 4 * k, dtype=torch.int32), torch.empty(n)
    return lambda: plan(x, codes, None, scale, None, torch.empty(1), torch.empty(1, dtype=torch.int32))


def gate(m=1):
    from lowbit.kernels.elementwise.gate import GatePlan

    plan = GatePlan(m, 512, "silu", True, H200)
    return lambda: plan(*torch.empty(m, 1024, dtype=torch.half).chunk(2, dim=1))


def test_each_kernel_once():
    from lowbit.kernels.parts.launch import recording

    same, others = ring(), ring(n=512, k=1024)
    with recording() as wanted:
        same(), same(), others(), ring(scheme="w8a16", k=520)()
        assert wanted == [], "listed when it ends"
    assert [each.name for each in wanted] == ["ring_gemm", "ring_gemm"], "sizes make no other kernel, a part of a step does"


def test_numbers_by_what_is_compiled_for_them():
    from lowbit.kernels.parts.launch import _described

    class Parameter:
        is_constexpr, do_not_specialize = False, False

    class Constant(Parameter):
        is_constexpr = True

    class Plain(Parameter):
        do_not_specialize = True

    kinds = [_described(value, Parameter) for value in (1, 2, 16, 4096, 1 << 33, True, 0.25, None)]
    assert kinds == [1, 3, 16, 16, (1 << 40) + 16, True, 2.0, None]
    assert [_described(value, Plain) for value in (1, 16)] == [3, 3] and _described(17, Constant) == 17


CHECK = """
from tests.kernels.parts.test_compile import compiled_into
compiled_into()
"""


def compiled_into():
    """In a process of its own, which compiles without a GPU: what others compiled is found, nothing is compiled twice."""
    from triton import knobs

    from lowbit.kernels.parts.compile import compile_all, compile_one
    from lowbit.kernels.parts.gluon import without_gpu
    from lowbit.kernels.parts.launch import recording

    hits = []
    knobs.compilation.listener = lambda src, cache_hit, **given: hits.append(cache_hit)
    with recording() as wanted:
        ring()(), gate()()
    without_gpu(90)
    assert list(compile_all(wanted, 90, processes=2)) == [1, 2]
    for each in wanted:
        compile_one(each)
    assert hits == [True, True], hits
    # An error ends the process that meets it; all kernels count as done, and fail where they are launched.
    broken = [*wanted[:1], wanted[1].__class__("lowbit.kernels.parts.launch", "no_such_kernel", (), {})]
    assert list(compile_all(broken, 90, processes=1)) == [1, 2]


def test_compiled_by_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_giving_up_ends_the_processes(tmp_path, monkeypatch):
    from lowbit.kernels.parts.compile import compile_all
    from lowbit.kernels.parts.launch import recording

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recording() as wanted:
        ring()(), gate()()
    progress = compile_all(wanted, 90, processes=2)
    next(progress)
    progress.close()
    ps = subprocess.run(["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True)
    assert "lowbit.kernels.parts.compile" not in ps.stdout
