"""RoPE and append of prompt tokens. Results are compared with float64; without a GPU the kernel runs in Triton's interpreter.
Also tests its machine code."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit.formats.kv import KV16, parse_kv
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.attention import append_reference
from lowbit.pack.kv_pages import KVPages
from tests.kernels.attention import TOLERANCE, angles_of, shape
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")

from lowbit.kernels.elementwise.append import AppendPlan

gpu = pytest.mark.gpu

SHAPES = {
    "plain": (shape(), None),
    "groups of 3, a quarter of 80 turns": (shape(3, 1, 80, rotary_dim=20), None),
    "norms": (shape(6, 2, 128, norm_eps=1e-6), torch.float32),
    "norms of Gemma": (shape(4, 4, 256, norm_eps=1e-6, norm_offset=1.0), torch.bfloat16),
    "no turn": (shape(2, 1, 96, rotary_dim=0), None),
}


def check(shape, norms, dtype=torch.float16, device="cpu", kv="16"):
    """Checks tokens of three slots, some out of order, across page boundaries. Pages and q hold NaN before."""
    generator = torch.Generator().manual_seed(0)
    slot_of = torch.tensor([0] * 5 + [2] * 3 + [1], dtype=torch.int32)
    position_of = torch.tensor([126, 127, 128, 129, 130, 2, 0, 1, 700], dtype=torch.int32)
    tables = torch.zeros(4, 6, dtype=torch.int32)
    tables[0, :2], tables[1, 5], tables[2, 0] = torch.tensor([4, 1]), 3, 2
    pages = torch.full((5, shape.kv_heads, 128, shape.head_dim), torch.nan, dtype=dtype, device=device)
    qkv = torch.randn(len(slot_of), shape.features, generator=generator).to(dtype)
    gammas = [None if norms is None else torch.randn(shape.head_dim, generator=generator).to(norms) for _ in range(2)]
    given = [qkv, tables, slot_of, position_of, angles_of(701, shape.rotary_dim), *gammas]
    qkv, tables, slot_of, position_of, cos_sin, *gammas = (None if t is None else t.to(device) for t in given)
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    plan = AppendPlan(len(slot_of), shape, parse_kv(kv), machine)
    if kv != "16":
        return check_packed(plan, kv, shape, qkv, tables, slot_of, position_of, cos_sin, gammas)
    wide = [None if t is None else t.double() for t in (qkv, cos_sin, *gammas)]
    stored = KVPages(KV16, shape.head_dim, pages.double(), pages.double())
    expected = append_reference(wide[0], stored, tables, slot_of, position_of, wide[1], shape, *wide[2:])
    for _ in range(2):
        k, v = pages.clone(), pages.clone()
        q = plan(qkv, KVPages(KV16, shape.head_dim, k, v), tables, slot_of, position_of, cos_sin, *gammas)
        for found, of in ((q, expected), (k, stored.k), (v, stored.v)):
            assert torch.allclose(found.double(), of, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
        assert torch.equal(v.double().nan_to_num(7), stored.v.nan_to_num(7))


def check_packed(plan, kv, shape, qkv, tables, slot_of, position_of, cos_sin, gammas):
    """Checks packed pages. Values have the same bytes as the reference's. Keys differ in few bytes, since RoPE may round
    differently before. Nothing else is written."""
    made = []
    for _ in range(2):
        pages = KVPages.make(parse_kv(kv), 5, shape.kv_heads, shape.head_dim, qkv.dtype, qkv.device)
        for t in pages.tensors:
            t.fill_(torch.nan if t.is_floating_point() else 255)
        made.append(pages)
    found, stored = made
    q = plan(qkv, found, tables, slot_of, position_of, cos_sin, *gammas)
    expected = append_reference(qkv, stored, tables, slot_of, position_of, cos_sin, shape, *gammas)
    assert torch.allclose(q.float(), expected.float(), rtol=TOLERANCE[qkv.dtype], atol=TOLERANCE[qkv.dtype])
    assert torch.equal(found.v, stored.v)
    assert torch.equal(found.v_scale.nan_to_num(-1), stored.v_scale.nan_to_num(-1))
    where = tables[slot_of.long(), position_of.long() // 128].long(), position_of.long() % 128
    (k, v), (of_k, of_v) = (pages.read(*where, torch.float32) for pages in (found, stored))
    assert torch.equal(v, of_v) and not k.isnan().any()
    assert (k - of_k).norm() < {"fp8": 0.02, "int8": 0.005, "int4": 0.03}[found.scheme.k.name] * of_k.norm()
    differ = (found.k != stored.k).float().mean()
    assert differ < 0.02 and torch.equal(found.k_scale.isnan(), stored.k_scale.isnan())


KVS = ("fp8", "int8", "int4", "k8v4", "kint4-plainvint8-rotated")


def check_shapes():
    for given, norms in SHAPES.values():
        check(given, norms)


def check_packed_shapes():
    for i, (given, norms) in enumerate(SHAPES.values()):
        check(given, norms, kv=KVS[i])
        check(given, norms, kv=KVS[(i + 2) % 5])


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_shapes)


def test_packed_pages_in_tritons_interpreter():
    interpreted(check_packed_shapes)


@pytest.mark.parametrize("sm", [80, 90])
def test_heads_move_in_vectors_of_16_bytes(sm):
    kernels, int32, half = {}, torch.int32, torch.float16
    for head_dim, turns in itertools.product((64, 80, 128, 256), (True, False)):
        given = shape(32, 8, head_dim, rotary_dim=head_dim if turns else 0)
        pages = KVPages.make(KV16, 9, 8, head_dim, half, "meta")
        of_tokens = meta((1000,), int32), meta((1000,), int32), meta((8192, given.rotary_dim), torch.float32)
        call = meta((1000, given.features), half), pages, meta((4, 9), int32), *of_tokens, None, None
        kernels[head_dim, turns] = compile_plan(AppendPlan(1000, given, KV16, typical_machine(sm)), call, sm)
    for case, kernel in kernels.items():
        assert kernel.stack_bytes == 0, case
        assert kernel.count("LDG.E.128") >= 1 and kernel.count("STG.E.128") == kernel.count("STG") >= 3, case
        assert kernel.count("PREEXIT") == kernel.count("ACQBULK") == (sm >= 90), case


def test_packed_rows_stay_in_registers():
    int32, half = torch.int32, torch.bfloat16
    for kv, head_dim in (("int4", 256), ("k8v4", 64)):
        given = shape(32, 8, head_dim)
        pages = KVPages.make(parse_kv(kv), 9, 8, head_dim, half, "meta")
        of_tokens = meta((1000,), int32), meta((1000,), int32), meta((8192, given.rotary_dim), torch.float32)
        call = meta((1000, given.features), half), pages, meta((4, 9), int32), *of_tokens, None, None
        kernel = compile_plan(AppendPlan(1000, given, parse_kv(kv), typical_machine(90)), call, 90)
        assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") >= 1 and kernel.count("STG.E.U8") >= 8, (kv, head_dim)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(name, dtype):
    check(*SHAPES[name], dtype, "cuda")
    for kv in KVS:
        check(*SHAPES[name], dtype, "cuda", kv)
