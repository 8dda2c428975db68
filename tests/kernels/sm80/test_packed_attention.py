"""Paged attention over packed pages, compared with float64. Without a GPU its PTX is executed (tests/kernels/ptx.py). Also
tests its machine code."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from lowbit.formats.kv import parse_kv
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.attention import DecodeTask
from lowbit.kernels.choose.packed_attention import EARLY_KEYS_REGISTERS, PackedTile, packed_tile, register_limits
from lowbit.pack.kv_pages import KVPages
from tests.kernels.attention import (
    compare_packed,
    compare_verified,
    make_case,
    one_by_one,
    packed,
    several_tokens,
    shape,
    with_task,
)
from tests.kernels.calls import meta
from tests.kernels.ptx import execute
from tests.kernels.sass import TRITON, compile_plan

pytest.importorskip("triton", reason="the kernel is written in Gluon")

from lowbit.kernels.sm80.packed_attention import PackedAttentionPlan

gpu = pytest.mark.gpu

RAGGED = [0, 1, 15, 127, 128, 129, 300, 1000]
"""Context lengths: numbers of tokens before the new one."""


def tile_for(given, kv, splits, chunk=128, registers=None) -> PackedTile:
    """A tile with a limit of registers, by default the smallest that may be chosen."""
    limits = register_limits(given, parse_kv(kv))
    return packed_tile(splits, chunk, limits, limits[0] if registers is None else registers)


@functools.cache
def compiled(given, kv, sm=90, dtype=torch.float16, norms=None, sinks=None, task=DecodeTask.STEP, registers=None):
    """The kernel of a decode step; `norms` and `sinks` are the dtypes of gammas and sinks. Splits are arguments."""
    whole = lambda *size: meta(size, torch.int32)  # noqa: E731
    pages = KVPages.make(parse_kv(kv), 100, given.kv_heads, given.head_dim, dtype, "meta")
    gamma = None if norms is None else meta((given.head_dim,), norms)
    state = whole(9, 64), whole(9), whole(4), meta((8192, given.rotary_dim), torch.float32), gamma, gamma
    sink = None if sinks is None else meta((given.heads,), sinks)
    call = (meta((4, given.features), dtype), pages, *state, sink, meta((1,), torch.float32), whole(1))
    tile = tile_for(given, kv, 4, registers=registers)
    plan = PackedAttentionPlan(4, given, parse_kv(kv), tile, typical_machine(sm), verify=task is not DecodeTask.STEP)
    return compile_plan(with_task(plan, task), call, sm)


def emulated(plan, case, sm, partial, arrived, registers=None):
    """The output of a plan on a CPU."""
    launched = []
    launches = [launch for launch in (plan.append, plan.launch) if launch is not None]
    for name in ("append", "launch")[-len(launches) :]:
        setattr(plan, name, lambda *arguments: launched.append(arguments))
    out = plan(*case.arguments, partial, arrived).fill_(torch.nan)
    types = [None if t is None else t.dtype for t in (case.q_norm, case.sinks)]
    for launch, (*arguments, config) in zip(launches, launched, strict=True):
        kernel = compiled(case.shape, str(case.pages.scheme), sm, case.qkv.dtype, *types, config.task, registers)
        execute(kernel.ptx, kernel.shared_bytes, arguments, launch.grid, 128)
    return out


def run(case, splits, chunk=128, sm=90, verify=False, registers=None):
    """The output of a plan; memory that it allocates is poisoned, and counters must end at zero. On a GPU it runs twice and
    must give the same bits.
    """
    device = case.qkv.device
    machine = machine_of("cuda") if device.type == "cuda" else typical_machine(sm)
    plan = PackedAttentionPlan(
        len(case.rows), case.shape, case.pages.scheme, tile_for(case.shape, str(case.pages.scheme), splits, chunk, registers),
        machine, verify=verify,
    )  # fmt: skip
    sums, counters = plan.workspace
    arrived = torch.zeros(max(counters, 1), dtype=torch.int32, device=device)
    before, found = case.copy(), []
    for _ in range(2 if device.type == "cuda" else 1):
        for t, old in zip(case.pages.tensors, before.pages.tensors, strict=True):
            t.copy_(old)
        partial = torch.full((max(sums, 1),), torch.nan, device=device)
        if device.type == "cuda":
            found.append(plan(*case.arguments, partial, arrived))
        else:
            found.append(emulated(plan, case, sm, partial, arrived, registers))
        assert not arrived.any()
    real = case.rows < case.rows.max() if verify else case.rows < len(case.positions) - 1  # padding rows overwrite each other
    assert torch.equal(found[0][real].nan_to_num(7), found[-1][real].nan_to_num(7))
    return found[0]


def check(given, kv, contexts, splits=4, chunk=128, sm=90, dtype=torch.float16, device="cpu", registers=None, **options):
    case = packed(make_case(given, contexts, dtype, device, **options), kv)
    before = case.copy()
    compare_packed(case, before, run(case, splits, chunk, sm, registers=registers), len(contexts))


def check_verify(given, kv, contexts, counts, splits=3, sm=90, dtype=torch.float16, device="cpu", **options):
    """Several new tokens per slot are compared with the reference, and have the bits of as many steps of one token."""
    case = packed(make_case(given, contexts, dtype, device, padding=1, **options), kv)
    case = several_tokens(case, counts)
    before, single = case.copy(), case.copy()
    out = run(case, splits, sm=sm, verify=True)
    expected = one_by_one(single, len(counts), lambda step: run(step, splits, sm=sm))
    compare_verified(case, before, out, sum(counts))
    assert torch.equal(out[: sum(counts)], expected[: sum(counts)])
    dummy = case.tables[-1, 0].long()
    for found, alone in zip(case.pages.tensors, single.pages.tensors, strict=True):
        found[dummy] = alone[dummy]  # padding rows overwrite each other there
        assert torch.equal(found.view(torch.uint8), alone.view(torch.uint8))


FEATURES = {
    "plain": (shape(), "int4", {}),
    "fp8": (shape(4, 1, 128), "fp8", {}),
    "int8": (shape(4, 1, 128), "int8", {}),
    "keys in 8 bits": (shape(4, 1, 128), "k8v4", {}),
    "values in 8 bits, rotated": (shape(2, 1), "kint4-plainvint8-rotated", {}),
    "groups of 3": (shape(6, 2), "kint4vfp8", {}),
    "groups of 12": (shape(12, 1), "int4", {}),
    "a quarter of 80 turns": (shape(3, 1, head_dim=80, rotary_dim=20), "int4", {}),
    "96, no turn": (shape(2, 1, 96, rotary_dim=0), "fp8", {}),
    "256": (shape(4, 1, 256), "k8v4", {}),
    "256, codes one at a time": (shape(4, 1, 256), "fp8", {}),
    "soft cap": (shape(4, 1, softcap=5.0, scale=0.3), "int8", {}),
    "window": (shape(4, 1, window=200), "int4", {}),
    "window of itself": (shape(4, 1, window=1), "fp8", {}),
    "norms of Gemma, soft cap, window": (
        shape(4, 1, head_dim=96, norm_eps=1e-6, norm_offset=1.0, softcap=3.0, window=130), "int4", {"norms": torch.bfloat16},
    ),
    "shared pages and padding": (shape(4, 1), "int4", {"shared": True, "padding": 3}),
    "sinks and window of gpt-oss": (shape(16, 2, window=128), "fp8", {"sinks": torch.bfloat16}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features_by_executed_ptx(name):
    given, kv, options = FEATURES[name]
    check(given, kv, [300, 129, 1, 0], **options)


@pytest.mark.parametrize(("splits", "chunk"), [(1, 128), (3, 256), (24, 128)])
def test_splits_by_executed_ptx(splits, chunk):
    check(shape(), "int4", [2300, 128, 65, 700], splits, chunk)


@pytest.mark.parametrize("registers", [128, 168])
def test_both_limits_of_registers_by_executed_ptx(registers):
    check(shape(4, 1, 128), "int4", [300, 129, 1, 0], registers=registers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sm_80_by_executed_ptx(dtype):
    check(shape(4, 1), "k8v4", [300, 0, 127], sm=80, dtype=dtype)


@pytest.mark.parametrize("name", ["plain", "fp8", "values in 8 bits, rotated", "norms of Gemma, soft cap, window"])
def test_several_tokens_per_slot_by_executed_ptx(name):
    given, kv, options = FEATURES[name]
    check_verify(given, kv, [130, 3], [4, 2], **options)


def poisoned(kv, device):
    """A batch in which one row has NaN in a key, one row has values of 1e-4, one has rows of zeros."""
    case = make_case(shape(4, 1), [300, 200, 150, 129], device=device)
    page = case.tables[0, 1].long()
    case.pages.k[page, :, 3, 5] = torch.nan
    for slot, factor in ((1, 1e-4), (2, 0.0)):
        for number in case.tables[slot, :2].tolist():
            case.pages.v[number] *= factor
    case.qkv[1, -64:] *= 1e-4
    case = packed(case, kv)
    return case, case.copy()


def check_poison(kv, device="cpu"):
    """Checks that NaN stays in its row, and that small values keep their accuracy."""
    case, before = poisoned(kv, device)
    out = run(case, 4)
    assert out[0].isnan().any()
    rows = [1, 2, 3]
    some = [dataclasses.replace(c, qkv=c.qkv[rows], rows=c.rows[rows]) for c in (case, before)]
    out, given = out[rows], some[1]
    # The new token of the first row is not compared.
    slot = case.tables[0, 300 // 128].long()
    for t, old in zip(case.pages.tensors, before.pages.tensors, strict=True):
        t[slot] = old[slot]
    compare_packed(some[0], given, out)


@pytest.mark.parametrize("kv", ["int4", "fp8"])
def test_nan_stays_in_its_row_and_small_values_stay_exact(kv):
    check_poison(kv)


def rows_alone(device):
    """Checks that each row alone gives the same bits as in a batch."""
    case = packed(make_case(shape(4, 1), [300, 500, 0, 77], device=device, padding=1), "int4")
    given = case.copy()
    together = run(case, 3)
    for row in range(4):
        assert torch.equal(run(given.copy([row]), 3)[0], together[row])


def test_rows_do_not_depend_on_the_batch():
    rows_alone("cpu")


@pytest.mark.parametrize(
    ("head_dim", "kv", "registers", "per_value"),
    # Instructions of the main loop for each value: the codes take 0.5 (int8), 0.625 (int4) or 1.75 (fp8), the products 0.14.
    [
        (128, "int4", 128, 1.85),
        (128, "int4", 168, 1.75),
        (128, "int8", 168, 1.7),
        (128, "fp8", 168, 2.9),
        (64, "int4", 128, 2.6),
        (96, "k8v4", 168, 2.0),
    ],
)
def test_codes_are_read_in_vectors_of_16_bytes_and_nothing_spills(head_dim, kv, registers, per_value):
    given = shape(32, 8, head_dim)
    limits = register_limits(given, parse_kv(kv))
    kernel = compiled(given, kv, registers=registers if registers in limits else None)
    assert kernel.registers <= registers
    if TRITON >= (3, 9) or limits[-1] in (0, registers):
        assert kernel.stack_bytes == 0
    else:  # the smaller of two limits, with an older Triton
        assert kernel.stack_bytes <= 24
    (loop,) = [kernel.lines[a : b + 1] for a, b in kernel.loops if any("HMMA" in line for line in kernel.lines[a : b + 1])]
    scheme = parse_kv(kv)
    assert sum("LDG.E.NA.128" in line for line in loop) == head_dim * (scheme.k.bits + scheme.v.bits) // 128
    assert sum("HMMA.16816" in line for line in loop) == head_dim // 4 + (0 if kv == "fp8" else 2)
    assert not any(name in line for line in loop for name in ("STS", "BAR."))
    if registers >= EARLY_KEYS_REGISTERS and register_limits(given, scheme)[-1]:
        (first, *_), (softmax, *_) = (
            [i for i, line in enumerate(loop) if name in line] for name in ("LDG.E.NA.128", "MUFU.LG2")
        )
        assert first < softmax, "the next keys are loaded before the softmax"
    assert len(loop) * 32 / (2 * 32 * head_dim) < per_value + (0.1 if TRITON < (3, 9) else 0)


@pytest.mark.parametrize(("head_dim", "kv"), [(128, "int4"), (128, "fp8"), (256, "int4"), (256, "int8")])
def test_all_features_at_once_hardly_spill(head_dim, kv):
    """For int4 with 256 elements, Triton 3.9 spills two registers outside the main loop. Triton 3.6 spills more."""
    given = shape(32, 8, head_dim, rotary_dim=head_dim // 2, softcap=50.0, window=4096, norm_eps=1e-6, norm_offset=1.0)
    kernel = compiled(given, kv, norms=torch.float16, sinks=torch.float16)
    assert kernel.stack_bytes <= (160 if TRITON < (3, 9) else 8)


def test_old_keys_are_asked_for_before_the_wait():
    """sm_90: tables, positions and the first block are loaded before the wait for the previous kernel, q after it. Stores come
    last."""
    kernel = compiled(shape(32, 8, 128), "int4")
    names = [line.split()[line.startswith("@")] for line in kernel.lines]
    wait, start = names.index("ACQBULK"), names.index("PREEXIT")
    assert wait < start and sum("LDG.E.NA.128" in name for name in names[:wait]) == 8
    assert not any(name.startswith(("STG", "ATOM", "HMMA")) for name in names[:start])
    kernel = compiled(shape(4, 1), "k8v4", 80)
    assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == 0


def test_several_tokens_per_slot():
    """The attention of a verified step loads no codes before the wait, and stores none. A launch before it stores keys and
    values, and does nothing else."""
    kernel = compiled(shape(32, 8, 128), "int4", task=DecodeTask.VERIFY)
    names = [line.split()[line.startswith("@")] for line in kernel.lines]
    assert not any("128" in name or name.startswith("STG") for name in names[: names.index("ACQBULK")])
    append = compiled(shape(32, 8, 128), "int4", task=DecodeTask.APPEND)
    assert append.count("HMMA") == append.count("ATOM") == 0 and append.count("STG") >= 2


def test_workspace():
    wide = shape(12, 1)
    plan = PackedAttentionPlan(4, wide, parse_kv("int4"), tile_for(wide, "int4", 1), typical_machine(90))
    assert plan.workspace == (0, 0) and plan.launch.grid == (2, 4, 1)
    plan = PackedAttentionPlan(4, wide, parse_kv("int4"), tile_for(wide, "int4", 6), typical_machine(90))
    assert plan.workspace == (4 * 12 * 6 * 66, 8) and plan.launch.grid == (2, 4, 6)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_against_the_reference(name, dtype):
    given, kv, options = FEATURES[name]
    for splits, chunk in ((1, 128), (4, 256), (64, 128)):
        check(given, kv, [*RAGGED, 4000], splits, chunk, dtype=dtype, device="cuda", **options)


@gpu
@pytest.mark.parametrize("kv", ["fp8", "int8", "int4", "k8v4", "kint4vfp8"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_format_and_head_size(head_dim, kv):
    check(shape(8, 2, head_dim), kv, [*RAGGED, 2500], 8, device="cuda")


@gpu
def test_rows_do_not_depend_on_the_batch_on_a_gpu():
    rows_alone("cuda")


@gpu
@pytest.mark.parametrize("kv", ["int4", "fp8", "int8"])
def test_nan_stays_in_its_row_on_a_gpu(kv):
    check_poison(kv, "cuda")


@gpu
@pytest.mark.parametrize("registers", [128, 168])
def test_many_rows_and_splits(registers):
    """More programs than fit the GPU at once run repeatedly. Counters end at zero, and every run gives the same bits."""
    given = shape(32, 8, 128)
    case = packed(make_case(given, [(331 * i) % 2500 for i in range(64)], device="cuda", padding=8), "int4")
    before = case.copy()
    first = run(case, 16, registers=registers)
    compare_packed(case, before, first, 64)
    for _ in range(20):
        assert torch.equal(run(before.copy(), 16, registers=registers)[:64], first[:64])


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in FEATURES if "padding" not in name])
def test_several_tokens_per_slot_on_a_gpu(name, dtype):
    given, kv, options = FEATURES[name]
    for splits in (1, 8):
        check_verify(given, kv, [1000, 130, 8, 300], [8, 5, 3, 1], splits, dtype=dtype, device="cuda", **options)
