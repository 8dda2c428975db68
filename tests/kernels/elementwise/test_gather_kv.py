"""The kernel that gathers keys and values from pages. Copies are bit-equal; without a GPU it runs in Triton's interpreter. Also
tests its machine code."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lowbit.formats.kv import KV16, parse_kv
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.attention import gather_reference
from lowbit.pack.kv_pages import KVPages
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.parts.test_compile import ROOT, run
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")

from lowbit.kernels.elementwise.gather_kv import GatherKvPlan

SIZES = [(1, 64), (2, 80), (8, 128), (3, 256)]


@contextlib.contextmanager
def poisoned():
    """Within this context, torch.empty returns memory full of NaN."""
    empty = torch.empty
    torch.empty = lambda *size, **options: empty(*size, **options).fill_(torch.nan)
    try:
        yield
    finally:
        torch.empty = empty


def check(kv_heads, head_dim, dtype=torch.float16, device="cpu", kv="16"):
    """Checks tokens from pages in random order. Beyond `count` tokens nothing is written."""
    generator = torch.Generator().manual_seed(0)
    both = [torch.randn(7, kv_heads, 128, head_dim, generator=generator).to(device, dtype) for _ in range(2)]
    pages = KVPages.make(parse_kv(kv), 7, kv_heads, head_dim, dtype, device)
    every = torch.arange(7 * 128, device=device)
    pages.write(every // 128, every % 128, *(t.transpose(1, 2).flatten(0, 1) for t in both))
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    for tokens, count in ((1, 1), (40, 40), (200, 0), (200, 129)):
        token = torch.randint(7 * 128, (tokens,), generator=generator)
        where = (token // 128 * (kv_heads * 128) + token % 128).to(device)
        counted = torch.tensor([count], dtype=torch.int32, device=device)
        plan = GatherKvPlan(tokens, kv_heads, head_dim, parse_kv(kv), dtype, machine)
        with poisoned():
            found = plan(pages, where, counted)
        for each, of in zip(found, gather_reference(pages, where, counted, dtype), strict=True):
            assert torch.equal(each.nan_to_num(7), of.nan_to_num(7))
            assert not each[:count].isnan().any()


KVS = ("fp8", "int8", "int4", "k8v4", "kint4-plainvint8-rotated")


def check_sizes():
    for size in SIZES:
        check(*size)


def check_packed():
    for i, size in enumerate([*SIZES, (1, 96)]):
        check(*size, kv=KVS[i])


def test_the_copies_in_tritons_interpreter():
    interpreted(check_sizes)


def test_packed_pages_in_tritons_interpreter():
    interpreted(check_packed)


@pytest.mark.parametrize("sm", [80, 90])
def test_heads_move_in_vectors_of_16_bytes(sm):
    kernels = {}
    for head_dim in (64, 80, 128, 256):
        pages = KVPages.make(KV16, 9, 8, head_dim, torch.float16, "meta")
        call = pages, meta((1000,), torch.int64), meta((1,), torch.int32)
        kernels[head_dim] = compile_plan(GatherKvPlan(1000, 8, head_dim, KV16, torch.float16, typical_machine(sm)), call, sm)
    for head_dim, kernel in kernels.items():
        assert kernel.stack_bytes == 0, head_dim
        assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") == kernel.count("STG") >= 2, head_dim
        assert kernel.count("PREEXIT") == kernel.count("ACQBULK") == (sm >= 90), head_dim


def test_packed_rows_stay_in_registers():
    for kv, head_dim in (("int4", 256), ("k8v4", 64)):
        pages = KVPages.make(parse_kv(kv), 9, 8, head_dim, torch.float16, "meta")
        plan = GatherKvPlan(1000, 8, head_dim, parse_kv(kv), torch.bfloat16, typical_machine(90))
        kernel = compile_plan(plan, (pages, meta((1000,), torch.int64), meta((1,), torch.int32)), 90)
        assert kernel.stack_bytes == 0 and kernel.count("STG.E.128") == kernel.count("STG") >= 2, (kv, head_dim)
        assert kernel.count("PREEXIT") == kernel.count("ACQBULK") == 1, (kv, head_dim)


def compiled_once():
    """Runs in its own process, which compiles without a GPU."""
    from triton import knobs

    from lowbit.kernels.parts.compile import compile_one
    from lowbit.kernels.parts.gluon import without_gpu
    from lowbit.kernels.parts.launch import recording

    plan, pages = (
        GatherKvPlan(40, 2, 64, KV16, torch.float16, typical_machine(90)),
        KVPages.make(KV16, 3, 2, 64, torch.float16, "cpu"),
    )
    where, numbers = torch.empty(40, dtype=torch.int64), torch.empty(8, dtype=torch.int32)
    with recording() as wanted:
        plan(pages, where, numbers[3:4])
    plan = GatherKvPlan(40, 2, 64, KV16, torch.float16, typical_machine(90))
    with recording() as again:
        plan(pages, where, numbers[4:5])
    found = []
    knobs.compilation.listener = lambda src, cache_hit, **given: found.append(cache_hit)
    without_gpu(90)
    for each in (*wanted, *again):
        compile_one(each)
    assert found == [False], found


def test_one_kernel_wherever_the_count_lies(tmp_path):
    """The count is one element of a tensor, at an offset that depends on the number of sequences. Every offset, aligned or not,
    must give the same compiled kernel, since the warm-up run tries one offset only.
    """
    run("from tests.kernels.elementwise.test_gather_kv import compiled_once; compiled_once()", ROOT, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), SIZES)
def test_against_the_reference(kv_heads, head_dim, dtype):
    check(kv_heads, head_dim, dtype, "cuda")
    for kv in KVS:
        check(kv_heads, head_dim, dtype, "cuda", kv)
