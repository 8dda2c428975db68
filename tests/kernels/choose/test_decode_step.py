"""The task table of a decode step in one launch: every weight in one block's stream, layouts without overlaps, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.choose.decode_step import (
    BYTES,
    FIELDS,
    PRODUCT_NAMES,
    RESERVED_BYTES,
    WAITS,
    StepShape,
    StepTable,
    step_refusals,
    step_table,
    wait_of,
)

HEADS = {"llama": AttentionShape(32, 8, 128, 128**-0.5, 128), "small": AttentionShape(9, 3, 64, 0.125, 64)}
LLAMA = StepShape(32, 4096, 14336, HEADS["llama"], 1, 4, 32)
SMALL = StepShape(30, 1152, 1536, dataclasses.replace(HEADS["small"], heads=18), 2, 6, 64)
WIDE = StepShape(80, 8192, 28672, AttentionShape(64, 8, 128, 128**-0.5, 128), 1, 8, 0)


@pytest.mark.parametrize("blocks", [16, 78, 114, 132])
@pytest.mark.parametrize("shape", [LLAMA, SMALL, WIDE], ids=["llama", "small", "wide"])
def test_every_weight_is_in_one_stream(shape, blocks):
    """All k blocks of all row blocks, each once; o and down have the same owners."""
    table = StepTable(shape, blocks)
    found = {name: [] for name in PRODUCT_NAMES}
    for block in range(blocks):
        for slot in table.slots(block):
            assert 0 < slot.k_blocks <= table.warps
            found[slot.product] += [(slot.row_block, slot.first_k_block + i) for i in range(slot.k_blocks)]
        assert table.own_row_blocks("o", block) == table.own_row_blocks("down", block)
    for name in PRODUCT_NAMES:
        shares = [len(table.own_row_blocks(name, block)) for block in range(blocks)]
        assert max(shares) - min(shares) <= 1
        rows, columns = shape.rows(name) // 16, shape.columns(name) // 128
        assert sorted(found[name]) == [(row, k) for row in range(rows) for k in range(columns)]


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_every_split_has_one_owner(tokens):
    table = StepTable(dataclasses.replace(LLAMA, tokens=tokens), 132)
    assert table.splits == {1: 16, 2: 8, 4: 4}[tokens]
    assert sorted(task for block in range(132) for task in table.own_tasks(block)) == list(range(table.attention_tasks))
    assert PAGE % table.tokens_at_once == 0


@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 1000, 1024, 1025, 8191, 131072])
def test_splits_cover_the_context(context):
    """The splits with work cover all tokens, and each of them has some."""
    table = StepTable(LLAMA, 132)
    active, each = table.active(context)
    tokens = each * table.tokens_at_once
    assert 1 <= active <= table.splits and active * tokens >= context
    assert context == 0 or (active - 1) * tokens < context


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("shape", [LLAMA, SMALL], ids=["llama", "small"])
def test_shared_memory_fits(shape, tokens):
    table = step_table(dataclasses.replace(shape, tokens=tokens), typical_machine(90))
    assert table.shared_bytes <= BYTES - RESERVED_BYTES and 3 <= table.ring_slots <= 12
    assert table.x_start % 128 == 0 and table.barriers_start % 8 == 0 and table.slot_bytes % 16 == 0
    assert table.sums_start - table.x_start >= max(table.merge_bytes, table.warps * table.x_warp_bytes)
    for name in PRODUCT_NAMES:  # a thread has at most one output of a flush
        rows = 8 if name == "gate_up" else 16
        assert table.at_once(name) * rows * tokens <= 32 * table.warps


def test_vectors_do_not_overlap():
    table = StepTable(LLAMA, 132)
    starts = list(table.starts.values())
    assert starts == sorted(starts) and all(start % 32 == 0 for start in starts)
    assert table.words == 32 * starts[-1]
    assert table.start("attended") - table.start("qkv") >= 6144 // 2


def test_names():
    assert len(set(FIELDS)) == len(FIELDS) and len(set(WAITS)) == len(WAITS)
    assert wait_of(1 + 3 * len(WAITS) + 8) == (3, "weights")
    text = str(StepTable(LLAMA, 132))
    assert "gate_up: 1792 row blocks, 13 to 14 a block, in 2 slots each" in text and "128 tasks, up to 16 splits" in text


@pytest.mark.parametrize(
    ("shape", "sm", "words"),
    [
        (LLAMA, 80, "needs the shared memory of sm_90"),
        (dataclasses.replace(LLAMA, tokens=3), 90, "1, 2, 4, 8 tokens, not 3"),
        (dataclasses.replace(LLAMA, hidden=576), 90, "qkv is 6144 x 576"),
        (dataclasses.replace(WIDE, tokens=4), 90, "leave room for"),
        (dataclasses.replace(LLAMA, attention=dataclasses.replace(HEADS["llama"], rotary_dim=64)), 90, "all of which turn"),
        (dataclasses.replace(LLAMA, attention=dataclasses.replace(HEADS["llama"], window=512)), 90, "no window"),
        (dataclasses.replace(LLAMA, attention=dataclasses.replace(HEADS["llama"], kv_heads=2)), 90, "at most 8 heads"),
    ],
)
def test_refusals(shape, sm, words):
    machine = typical_machine(sm)
    assert words in "; ".join(step_refusals(shape, machine))
    with pytest.raises(ValueError, match="a decode step in one launch"):
        step_table(shape, machine)
