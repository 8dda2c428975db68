"""Launches are recorded instead of run, and other processes compile their kernels into Triton's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.tiles import GemmShape, RingTile
from lowbit.pack import weight_form

pytest.importorskip("triton")

from triton import knobs

from lowbit.kernels.parts.launch import RecordedKernel

ROOT = Path(__file__).parents[3]
H200 = typical_machine(90)


def ring(m=1, n=256, k=512, scheme="w8a16"):
    """A call of a plan of the small-M kernel with CPU tensors."""
    from lowbit.kernels.parts.epilogue import Epilogue
    from lowbit.kernels.sm80.small_m_gemm import RingPlan

    form = weight_form(parse_scheme(scheme), None, True)
    plan = RingPlan(
        GemmShape(m, n, k, 8), RingTile(8, 1, 2, 1, 4, 1), form, torch.float16, Epilogue(form.channel_scale, False), H200.arch
    )
    x, codes, scale = torch.empty(m, k, dtype=torch.half), torch.empty(n // 16, 4 * k, dtype=torch.int32), torch.empty(n)
    return lambda: plan(x, codes, None, scale, None, torch.empty(1), torch.empty(1, dtype=torch.int32))


def gate(m=1, machine=H200):
    from lowbit.kernels.elementwise.gate import GatePlan

    plan = GatePlan(m, 512, "silu", True, machine)
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


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("specialize", [True, False])
def test_descriptions_compile_to_what_their_arguments_do(specialize, align):
    """Triton itself derives the same types and specializations from a description as from the real argument."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from lowbit.kernels.parts.gluon import gl
    from lowbit.kernels.parts.launch import Address, _described

    class Parameter:
        is_constexpr, do_not_specialize = False, not specialize

    layout, code = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2), torch.empty(64, dtype=torch.int8)
    edges = [0, 1, 16, 31, 1 << 31, 1 << 32, 1 << 63, 1 << 64]
    numbers = [sign * edge + more for edge in edges for more in (-16, -1, 0, 1, 16) for sign in (1, -1)]
    numbers = [number for number in numbers if -(1 << 63) <= number < 1 << 64]
    tensors = [code, code[1:], code[16:], code[:0], torch.empty(8, 8, dtype=torch.bfloat16)[1:], Address(4, torch.int32)]
    tensors += [torch.empty(3, dtype=dtype) for dtype in (torch.bool, torch.float8_e4m3fn, torch.float64)]
    matrix = TensorDescriptor(torch.empty(64, 64, dtype=torch.half), [64, 64], [64, 1], [16, 64], layout)
    small = TensorDescriptor(Address(0, torch.bfloat16), [3, 64], [64, 1], [8, 64], layout, "nan")
    for given in (*numbers, True, False, 0.0, 1.0, -2.5, None, *tensors, matrix, small):
        described = _described(given, Parameter)
        found, expected = (native_specialize_impl(BaseBackend, x, False, specialize, align) for x in (described, given))
        assert found == expected, (given, described)


CHECK = """
from tests.kernels.parts.test_compile import compiled_into
compiled_into()
"""


def compiled_into():
    """Runs in its own process, without a GPU. Kernels that other processes compiled are found in the cache; none is compiled
    twice.
    """
    from lowbit.kernels.parts import compile as compiling
    from lowbit.kernels.parts.compile import compile_all, compile_one, compiled
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
    compiling.compile_all = None  # must not be called: everything is in the cache
    assert list(compiled([*wanted, *wanted], 90)) == [0, 1, 2, 3]
    # A compile error ends its process. Progress still counts all kernels, and the error shows at launch.
    broken = [*wanted[:1], BROKEN]
    assert list(compile_all(broken, 90, processes=1)) == [1, 2]


BROKEN = RecordedKernel("lowbit.kernels.parts.launch", "no_such_kernel", (), {})


def run(code, folder, tmp_path, **environment):
    """Runs Python code in `folder` in a new process; Triton's cache is tmp_path."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_compiled_by_other_processes_which_find_them_where_the_program_does(tmp_path):
    """The program's folder has another package named lowbit, and the real one is found through the program's own sys.path.
    Modules loaded at startup write to stdout. Compiling still works.
    """
    (tmp_path / "lowbit").mkdir()
    (tmp_path / "lowbit" / "__init__.py").write_text("raise ImportError('not this one')")
    (tmp_path / "tests.py").write_text("raise ImportError('nor this one')")
    (tmp_path / "sitecustomize.py").write_text("print('hello'); print('and more, without an end', end='')")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run(f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path.remove('')\n{CHECK}", tmp_path, tmp_path, PYTHONPATH=path)


def left_by_the_dead():
    """Runs in its own process. A kernel that fails ends one of two compiling processes; the other compiles the rest."""
    from lowbit.kernels.parts.compile import compile_all, compile_one
    from lowbit.kernels.parts.gluon import without_gpu
    from lowbit.kernels.parts.launch import recording

    with recording() as wanted:
        ring()(), gate()(), gate(m=2)()
    assert list(compile_all([BROKEN, *wanted], 90, processes=2)) == [*range(1, len(wanted) + 2)]
    hits = []
    knobs.compilation.listener = lambda src, cache_hit, **given: hits.append(cache_hit)
    without_gpu(90)
    for each in wanted:
        compile_one(each)
    assert all(hits) and len(hits) == len(wanted) >= 2, hits
    sys.executable = ""
    assert list(compile_all(wanted, 90)) == [*range(1, len(wanted) + 1)], "nor is there anybody where there is no Python"


def test_who_dies_leaves_the_work_to_others(tmp_path):
    run("from tests.kernels.parts.test_compile import left_by_the_dead as check; check()", ROOT, tmp_path)


def test_recordings_within_recordings():
    from lowbit.kernels.parts.launch import recording

    with recording() as outer:
        with pytest.raises(RuntimeError, match="its end"), recording() as inner:
            gate()()
            raise RuntimeError("its end")
        ring()()  # recorded, not launched: there is no GPU
    assert [each.name for each in inner] == ["gate_rows"] and [each.name for each in outer] == ["ring_gemm"]


@pytest.mark.parametrize("given_up", [True, False])
def test_no_process_is_left(tmp_path, monkeypatch, given_up):
    """No compiling process stays alive, and none stays a zombie, whether compilation finished or was given up."""
    from lowbit.kernels.parts import compile as compiling
    from lowbit.kernels.parts.compile import compile_all
    from lowbit.kernels.parts.launch import recording

    started = []
    make = compiling._processes
    monkeypatch.setattr(compiling, "_processes", lambda sm, count: started.append(make(sm, count)) or started[-1])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recording() as wanted:
        ring()(), gate()()
    progress = compile_all(wanted, 90, processes=2)
    next(progress)
    ((first, _),) = started
    group = ["ps", "-o", "pid=,stat=", "-g", str(first.pid)]
    assert len(subprocess.run(group, capture_output=True, text=True, check=False).stdout.splitlines()) >= 2
    if given_up:
        progress.close()
    else:
        assert len([*progress]) == len(wanted) - 1
    deadline = time.monotonic() + 10  # the last process is killed, and on a busy machine init may need time to reap it
    while (left := subprocess.run(group, capture_output=True, text=True, check=False).stdout) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == ""
