"""A paged KV cache whose slots have given context lengths. Memory that no slot owns holds NaN. The reference runs in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.kv import KV16, parse_kv
from lowbit.kernels.choose.attention import PAGE, AttentionShape, DecodeTask
from lowbit.kernels.reference.attention import append_reference, attend, decode_reference, gathered
from lowbit.pack.kv_pages import KVPages

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Allowed relative error of a row: q, k, p and the result are each rounded once."""


def angles_of(positions: int, rotary_dim: int) -> Tensor:
    """The RoPE table [positions, rotary_dim]: of each position the cosines of all pairs, then their sines."""
    turns = torch.arange(positions).double()[:, None] * 1e4 ** -(
        torch.arange(rotary_dim // 2).double() / max(rotary_dim // 2, 1)
    )
    return torch.cat([turns.cos(), turns.sin()], dim=1).float()


def shape(heads=8, kv_heads=2, head_dim=64, **options) -> AttentionShape:
    options = {"scale": head_dim**-0.5, "rotary_dim": head_dim, **options}
    return AttentionShape(heads, kv_heads, head_dim, **options)


@dataclass
class Case:
    """The arguments of a decode step for all slots. The last slot is a dummy, which all padding rows name."""

    shape: AttentionShape
    qkv: Tensor
    pages: KVPages
    tables: Tensor
    positions: Tensor
    rows: Tensor
    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None = None

    @property
    def arguments(self) -> tuple:
        """The tensors that the plan takes before its workspaces."""
        return (
            self.qkv, self.pages, self.tables, self.positions, self.rows, self.cos_sin, self.q_norm, self.k_norm, self.sinks,
        )  # fmt: skip

    def copy(self, rows: list[int] | None = None) -> Case:
        """A copy with its own pages; with `rows`, of these rows only."""
        rows = list(range(len(self.rows))) if rows is None else rows
        changed = {**vars(self), "qkv": self.qkv[rows].clone(), "rows": self.rows[rows].clone()}
        return Case(**{**changed, "pages": self.pages.clone()})

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """out, k and v that the reference computes in float64, from 16-bit pages."""
        qkv, pages, *others = self.arguments
        pages = KVPages(pages.scheme, pages.head_dim, pages.k.double(), pages.v.double())
        wide = [None if t is None else t.double() if t.is_floating_point() else t for t in (qkv, *others)]
        out = decode_reference(wide[0], pages, *wide[1:5], self.shape, *wide[5:])
        return out, pages.k, pages.v


def make_case(
    shape: AttentionShape, contexts, dtype=torch.float16, device="cpu", *, padding=0, norms=None, sinks=None, shared=False,
    seed=0,
) -> Case:  # fmt: skip
    """A row for each context, the number of tokens before the new one, then `padding` rows that name the last slot.

    Pages are in random order. NaN fills page 0, which tables name where a slot has no page, and everything that was not
    written. With `sinks`, a dtype, heads have sinks about as large as their scores. With `shared`, the second slot shares the
    first slot's full pages as far as both contexts reach.
    """
    generator = torch.Generator().manual_seed(seed)
    random = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    held = [context // PAGE + 1 for context in [*contexts, 0]]
    numbers = iter((torch.randperm(sum(held), generator=generator) + 1).tolist())
    tables = torch.zeros(len(held), max(held) + 1, dtype=torch.int32)
    k = torch.full((sum(held) + 1, shape.kv_heads, PAGE, shape.head_dim), torch.nan)
    v = k.clone()
    for slot, (pages, context) in enumerate(zip(held, [*contexts, 0], strict=True)):
        for i in range(pages):
            whole = min(context, contexts[0]) // PAGE
            if shared and slot == 1 and i < whole:
                tables[1, i] = tables[0, i]
                continue
            tables[slot, i] = number = next(numbers)
            tokens = min(max(context - i * PAGE, 0), PAGE)
            k[number, :, :tokens] = random(shape.kv_heads, tokens, shape.head_dim) * 2
            v[number, :, :tokens] = random(shape.kv_heads, tokens, shape.head_dim)
    rows = torch.tensor([*range(len(contexts)), *[len(contexts)] * padding], dtype=torch.int32)
    positions = torch.tensor([*contexts, 0], dtype=torch.int32)
    gammas = [None if norms is None else (random(shape.head_dim) * 0.3 + 1 - shape.norm_offset).to(norms) for _ in range(2)]
    qkv = (random(len(rows), shape.features) * 2).to(dtype)
    given = [tables, positions, rows, angles_of(max(contexts) + 1, shape.rotary_dim), *gammas]
    given.append(None if sinks is None else (random(shape.heads) * 3 + 6).to(sinks))
    pages = KVPages(KV16, shape.head_dim, k.to(device, dtype), v.to(device, dtype))
    return Case(shape, qkv.to(device), pages, *(None if t is None else t.to(device) for t in given))


def several_tokens(case: Case, counts: list[int], seed=0) -> Case:
    """Returns the case with several rows for each slot: its last `counts[i]` tokens, the new one included. Their old keys and
    values become NaN. Padding rows stay."""
    last = case.positions[: len(counts)].cpu()
    slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
    positions = [int(last[slot]) - counts[slot] + 1 + i for slot, count in enumerate(counts) for i in range(count)]
    for slot, position in zip(slots, positions, strict=True):
        page = case.tables[slot, position // PAGE].long()
        for t in case.pages.tensors if case.pages.scheme.quantized else (case.pages.k, case.pages.v):
            if t.is_floating_point():
                t[page, :, position % PAGE] = torch.nan  # in packed pages, NaN in the scales is enough
    padding = (case.rows == len(case.positions) - 1).sum().item()
    slots, positions = slots + [len(case.positions) - 1] * padding, positions + [0] * padding
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(len(slots), case.shape.features, generator=random) * 2
    rows = (torch.tensor(each, dtype=torch.int32, device=case.qkv.device) for each in (slots, positions))
    return Case(**{**vars(case), "qkv": qkv.to(case.qkv), **dict(zip(("rows", "positions"), rows, strict=True))})


def one_by_one(case: Case, slots: int, run: Callable[[Case], Tensor]) -> Tensor:
    """Returns the output of the rows of `several_tokens`, computed as steps of one new token for each slot. Changes the case's
    pages."""
    out = torch.zeros(len(case.rows), case.shape.heads * case.shape.head_dim, dtype=case.qkv.dtype, device=case.qkv.device)
    left = [row for row, slot in enumerate(case.rows.tolist()) if slot < slots]
    while left:
        slot_of = {case.rows[row].item(): row for row in reversed(left)}  # the first row of each slot
        rows = list(slot_of.values())
        positions = torch.zeros(slots + 1, dtype=torch.int32, device=case.qkv.device)
        positions[case.rows[rows].long()] = case.positions[rows]
        step = Case(**{**vars(case), "qkv": case.qkv[rows].clone(), "rows": case.rows[rows].clone(), "positions": positions})
        out[rows] = run(step)
        left = [row for row in left if row not in rows]
    return out


def with_task(plan: Any, task: DecodeTask) -> Any:
    """Changes the plan of a decode step so that it makes only the launch of `task`."""
    if task is DecodeTask.APPEND:
        plan.launch, plan.config = plan.append, plan.append_config
    plan.append = None
    return plan


def compare_verified(case: Case, given: Case, out: Tensor, real: int) -> None:
    """Compares the output of several new tokens per slot with the reference, in float64 over the pages that the launch left."""
    wide = lambda t: t.double() if t is not None and t.is_floating_point() else t  # noqa: E731
    state = case.tables, case.rows, case.positions, case.cos_sin, case.shape, case.q_norm, case.k_norm
    q = append_reference(wide(given.qkv), given.pages.clone(), *map(wide, state[:4]), case.shape, *map(wide, state[5:]))
    for row in range(real):
        position = int(case.positions[row])
        keys, values = gathered(case.pages, case.tables[int(case.rows[row])], position + 1, torch.float64)
        y = attend(q[row : row + 1], keys.double(), values.double(), position, case.shape, wide(case.sinks))
        error = float((out[row].double() - y[0]).norm() / y.norm())
        assert error < TOLERANCE[out.dtype], (row, error)


def packed(case: Case, kv: str) -> Case:
    """The case with packed pages of its keys and values. What was not written has scales NaN and codes 255."""
    given = case.pages
    pages = KVPages.make(parse_kv(kv), given.pages, given.kv_heads, given.head_dim, case.qkv.dtype, case.qkv.device)
    for t in pages.tensors:
        t.fill_(torch.nan if t.is_floating_point() else 255)
    for slot, context in enumerate(case.positions.tolist()):
        token = torch.arange(context, device=case.qkv.device)
        where = case.tables[slot][token // PAGE].long(), token % PAGE
        pages.write(*where, *given.read(*where, torch.float32))
    return Case(**{**vars(case), "pages": pages})


def compare_packed(case: Case, given: Case, out: Tensor, real: int | None = None) -> None:
    """Compares out and the packed pages of `case` after a step with the reference, which starts from `given`. The output is
    that of attention over the pages as the step left them.
    """
    real = len(case.rows) if real is None else real
    slots, wide = case.rows[:real].long(), lambda t: t.double() if t is not None and t.is_floating_point() else t
    positions = case.positions[slots].long()
    where, expected = (case.tables[slots, positions // PAGE].long(), positions % PAGE), given.pages.clone()
    state = case.tables, case.rows, case.positions[case.rows.long()], case.cos_sin, case.shape, case.q_norm, case.k_norm
    append_reference(given.qkv, expected, *state)
    (k, v), (of_k, of_v) = (pages.read(*where, torch.float64) for pages in (case.pages, expected))
    assert torch.equal(v, of_v)
    # A different rounding of RoPE to 16 bits may change the scale, and codes by one.
    step = {"fp8": 1 / 16, "int8": 1 / 127, "int4": 1 / 7.5}[case.pages.scheme.k.name] * of_k.abs().amax(-1, keepdim=True)
    width = case.shape.head_dim**0.5 if case.pages.scheme.k.rotated else 1
    assert ((k - of_k).abs() <= step * width + 1e-6).all() and (k - of_k).norm() < 0.1 * of_k.norm()
    q = append_reference(wide(given.qkv), given.pages.clone(), *map(wide, state[:4]), case.shape, *map(wide, state[5:]))
    for row in range(real):
        keys, values = gathered(case.pages, case.tables[slots[row]], int(positions[row]) + 1, torch.float64)
        y = attend(q[row : row + 1], keys, values, int(positions[row]), case.shape, wide(case.sinks))
        error = float((out[row].double() - y[0]).norm() / y.norm())
        assert error < TOLERANCE[out.dtype], (row, error)
    places = torch.cat([where[0], case.tables[-1:, 0].long()]), torch.cat([where[1], where[1].new_zeros(1)])
    after, before = case.pages.clone(), given.pages.clone()
    for pages in (after, before):  # padding rows write to the last slot
        nothing = torch.zeros(real + 1, case.shape.kv_heads, case.shape.head_dim, device=out.device)
        pages.write(*places, nothing, nothing)
    for found, old in zip(after.tensors, before.tensors, strict=True):
        assert torch.equal(found.view(torch.uint8), old.view(torch.uint8)), "wrote where nothing was to be written"


def compare(case: Case, given: Case, out: Tensor, real: int | None = None) -> None:
    """Compares out and the pages of `case` after a step with the reference, which starts from `given`, the case before the
    step. Only the first `real` rows are compared.
    """
    expected, k, v = given.expected()
    real = len(expected) if real is None else real
    tolerance = TOLERANCE[out.dtype]
    error = (out[:real].double() - expected[:real]).norm(dim=1) / expected[:real].norm(dim=1)
    assert (error < tolerance).all(), error  # fails for NaN too
    slots, positions = case.rows[:real].long(), case.positions[case.rows[:real].long()].long()
    page = case.tables[slots, positions // PAGE].long()
    assert torch.allclose(
        case.pages.k[page, :, positions % PAGE].double(), k[page, :, positions % PAGE], rtol=tolerance, atol=1e-2
    )
    assert torch.equal(case.pages.v[page, :, positions % PAGE].double(), v[page, :, positions % PAGE])
    nobody = case.tables[-1, 0].long()
    for after, before in zip(case.pages.clone().tensors[:2], given.pages.clone().tensors[:2], strict=True):
        after[page, :, positions % PAGE] = before[page, :, positions % PAGE] = 0
        after[nobody, :, 0] = before[nobody, :, 0] = 0  # padding rows write there
        assert torch.equal(after.view(torch.int16), before.view(torch.int16)), "wrote where nothing was to be written"
