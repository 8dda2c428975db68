"""The task table of a decode step in one launch: every weight in one block's stream, layouts without overlaps, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.choose.decode_step import (
    BYTES,
    FASTER,
    FIELDS,
    RESERVED_BYTES,
    WAITS,
    Faster,
    StepShape,
    StepTable,
    UnitForm,
    faster_context,
    step_refusals,
    step_table,
    wait_of,
)

HEADS = {"llama": AttentionShape(32, 8, 128, 128**-0.5, 128), "small": AttentionShape(9, 3, 64, 0.125, 64)}
INT4, FP6, INT8, DENSE = UnitForm(4, 32), UnitForm(6, 64), UnitForm(8), UnitForm(16)


def forms(*of_layers, head=()):
    return (*((of_layers),) * 4, head)


LLAMA = StepShape(32, 4096, 14336, HEADS["llama"], 1, forms(INT4, head=(INT8,)), 128256)
SMALL = StepShape(30, 576, 1536, HEADS["small"], 2, forms(FP6, head=(DENSE,)), 49152)
WIDE = StepShape(80, 8192, 28672, AttentionShape(64, 8, 128, 128**-0.5, 128), 1, forms(INT8))
MIXED = dataclasses.replace(LLAMA, forms=((INT4, DENSE), (INT8,), (INT4, FP6, INT8), (DENSE,), ()), vocab=0)
QWEN = AttentionShape(32, 4, 128, 128**-0.5, 128)
EXPERTS = StepShape(48, 2048, 8 * 768, QWEN, 1, forms(INT4, head=(INT8,)), 151936, experts=128, top_k=8)
SHAPES = {"llama": LLAMA, "small": SMALL, "wide": WIDE, "mixed": MIXED, "experts": EXPERTS}


@pytest.mark.parametrize("blocks", [16, 78, 114, 132])
@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_is_in_one_stream(name, blocks):
    """All k blocks of all row blocks, each once, in each form; o and down have the same owners."""
    shape = SHAPES[name]
    table = StepTable(shape, blocks)
    for product in shape.products:
        rows, columns = -(-shape.rows(product) // 16), -(-shape.columns(product) // 128)
        shares = [len(table.own_row_blocks(product, block)) for block in range(blocks)]
        assert max(shares) - min(shares) <= 1
        for form in range(len(shape.forms_of(product))):
            found = []
            for block in range(blocks):
                for slot in table.slots(block, product, form):
                    assert 0 <= slot.k_blocks <= table.units(product, form)
                    found += [(slot.row_block, slot.first_k_block + i) for i in range(slot.k_blocks)]
            assert sorted(found) == [(row, k) for row in range(rows) for k in range(columns)]
    assert all(table.own_row_blocks("o", block) == table.own_row_blocks("down", block) for block in range(blocks))


@pytest.mark.parametrize("name", SHAPES)
def test_slots_hold_their_units(name):
    """Units of each form fit into a slot, as many as warps or a part of them."""
    table = StepTable(SHAPES[name], 132)
    for product in table.shape.products:
        for i, form in enumerate(table.shape.forms_of(product)):
            units = table.units(product, i)
            assert table.warps % units == 0 and table.slots_of_chunk(product, i) * units == table.warps
            assert form.slot_bytes(units) <= table.slot_bytes
    assert table.slot_bytes <= 21 << 10
    assert DENSE.row_bytes(8) // 16 % 2 == 1


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_every_split_has_one_owner(tokens):
    table = StepTable(dataclasses.replace(LLAMA, tokens=tokens), 132)
    assert table.splits == {1: 16, 2: 8, 4: 4}[tokens]
    assert sorted(task for block in range(132) for task in table.own_tasks(block)) == list(range(table.attention_tasks))
    assert PAGE % table.share_tokens == 0


@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 128, 129, 1000, 1024, 1025, 8191, 131072])
def test_splits_cover_the_context(context):
    """The splits with work cover all tokens, and each of them has some. Up to 128 tokens are one split."""
    table = StepTable(LLAMA, 132)
    active, tokens = table.active(context)
    assert 1 <= active <= table.splits and active * tokens >= context
    assert context == 0 or (active - 1) * tokens < context
    assert (active == 1) == (context <= 128)


def test_splits_share_long_contexts():
    """The largest split has at most a share more than the others."""
    table = StepTable(LLAMA, 132)
    for context in (1024, 8192, 8193, 32768):
        active, tokens = table.active(context)
        assert active * table.shape.attention.kv_heads >= 0.8 * 132 and tokens <= context / active + table.share_tokens


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "small"])
def test_shared_memory_fits(name, tokens):
    shape = SHAPES[name]
    table = step_table(dataclasses.replace(shape, tokens=tokens), typical_machine(90))
    assert table.shared_bytes <= BYTES - RESERVED_BYTES and 3 <= table.ring_slots <= 16
    assert table.x_start % 128 == 0 and table.barriers_start % 8 == 0 and table.slot_bytes % 16 == 0
    assert table.sums_start - table.x_start >= max(table.merge_bytes, table.warps * table.x_warp_bytes)
    assert table.x_warp_bytes % 16 == 0 and table.x_warp_bytes > table.x_sums_start
    for name in shape.products:  # a thread has at most one output of a flush
        rows = 8 if name == "gate_up" else 16
        assert table.at_once(name) * rows * tokens <= 32 * table.warps


@pytest.mark.parametrize("blocks", [16, 78, 132])
def test_experts(blocks):
    """The choice has memory of its own behind the barriers; a block's rows of the router and factors of down fit."""
    table = StepTable(EXPERTS, blocks)
    starts = [getattr(table, f"{name}_start") for name in ("flag", "routed", "chosen", "weights", "factors")]
    assert starts == sorted(starts) and all(start % 8 == 0 for start in starts)
    rows = max(len(table.own_row_blocks("down", block)) for block in range(blocks))
    assert table.shared_bytes - table.factors_start >= 4 * 16 * rows * 8
    assert table.shared_bytes <= BYTES - RESERVED_BYTES
    assert table.router_rows == -(-128 // blocks) and table.sums_bytes >= 4 * table.router_rows * table.warps
    assert (EXPERTS.expert_row_blocks, EXPERTS.expert_k_blocks) == (96, 6)
    assert table.start("end") - table.start("logits") == 128 and "router: 128 rows" in str(table)


def test_expert_refusals():
    def reasons(**changes):
        return "; ".join(step_refusals(dataclasses.replace(EXPERTS, **changes), typical_machine(90)))

    assert reasons() == ""
    assert [reasons(tokens=m, intermediate=m * 8 * 768) for m in (2, 4, 8)] == [""] * 3
    wide = reasons(hidden=16384, tokens=4, intermediate=4 * 8 * 768)
    assert "a router takes all of x at a time, at most 73728 bytes, not 4 tokens of 16384" in wide
    assert "a multiple of 128 columns of down, not 704" in reasons(intermediate=8 * 704)
    assert "16 of up to 256 experts, not 8 of 512" in reasons(experts=512)
    assert "not 8 of 4" in reasons(experts=4)
    assert "not 16 bits" in reasons(forms=((INT4,), (INT4,), (DENSE,), (INT4,), ()))


def test_vectors_do_not_overlap():
    table = StepTable(LLAMA, 132)
    starts = list(table.starts.values())
    assert starts == sorted(starts) and all(start % 32 == 0 for start in starts)
    assert table.words == 32 * starts[-1] + table.start("mlp_x")
    assert table.start("attended") - table.start("qkv") >= 6144 // 2


def test_names():
    assert len(set(FIELDS)) == len(FIELDS) and len(set(WAITS)) == len(WAITS)
    assert wait_of(1 + 3 * len(WAITS) + WAITS.index("weights")) == (3, "weights")
    text = str(StepTable(LLAMA, 132))
    assert "gate_up: 1792 row blocks, 13 to 14 a block, in 2 slots each" in text and "128 tasks, up to 16 splits" in text
    assert "head: 8016 row blocks, 60 to 61 a block, in 4 slots each" in text
    assert "qkv: 384 row blocks, 2 to 3 a block, in 2 or 8 slots each" in str(StepTable(MIXED, 132))


def test_where_one_launch_is_faster(monkeypatch):
    """The longest context of the measurements that fit: same GPU, number format, form, group and kind of MLP, an 8-bit head."""
    h200, int4, fp6 = typical_machine(90), "int4", "fp6_e3m2"
    small = dataclasses.replace(SMALL, forms=forms(FP6, head=(INT8,)))
    assert LLAMA.layer_bytes == 218_103_808 * 33 // 64  # 4 bits and a 16-bit scale for 128 weights
    assert faster_context(LLAMA, h200, int4) == 8192 and faster_context(LLAMA, h200, "fp4_e2m1") == 0
    for head in ((DENSE,), ()):
        assert faster_context(dataclasses.replace(LLAMA, forms=forms(INT4, head=head)), h200, int4) == 0
    assert faster_context(dataclasses.replace(LLAMA, tokens=4), h200, int4) == faster_context(MIXED, h200, "") == 0
    assert faster_context(LLAMA, dataclasses.replace(h200, product="H200 NVL"), int4) == 0
    rows = (
        Faster("H200", 1, int4, INT4, 4, 10**8, 2 * 10**8, 1024), Faster("H200", 1, int4, INT4, 4, 0, 2 * 10**8, 512),
        Faster("H200", 1, fp6, FP6, 3, 0, 10**9, 99), Faster("H100 80GB HBM3", 1, int4, INT4, 4, 0, 10**9, 9999),
    )  # fmt: skip
    for row in FASTER:  # all were measured with these two shapes
        shape = dataclasses.replace(LLAMA, tokens=row.tokens, forms=forms(row.form, head=(INT8,)))
        if row.experts:
            shape = dataclasses.replace(EXPERTS, tokens=row.tokens, intermediate=row.tokens * EXPERTS.intermediate)
        assert faster_context(shape, h200, row.number) == row.context
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.FASTER", rows)
    assert faster_context(LLAMA, h200, int4) == 1024
    assert faster_context(small, h200, fp6) == faster_context(dataclasses.replace(LLAMA, tokens=2), h200, int4) == 0
    assert faster_context(dataclasses.replace(small, tokens=1), h200, fp6) == 99
    assert faster_context(LLAMA, dataclasses.replace(h200, product="H100 80GB HBM3"), int4) == 9999
    assert EXPERTS.layer_bytes < 2 * 10**8 and faster_context(EXPERTS, h200, int4) == 0  # no row of these is of experts
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.FASTER", (dataclasses.replace(rows[1], group=8, experts=True),))
    assert faster_context(EXPERTS, h200, int4) == 512 and faster_context(dataclasses.replace(small, tokens=1), h200, fp6) == 0


@pytest.mark.parametrize(
    ("shape", "sm", "words"),
    [
        (LLAMA, 80, "needs the shared memory of sm_90"),
        (dataclasses.replace(LLAMA, tokens=3), 90, "1, 2, 4, 8 tokens, not 3"),
        (dataclasses.replace(LLAMA, hidden=544), 90, "qkv is 6144 x 544"),
        (dataclasses.replace(SMALL, vocab=49153), 90, "head is 49153 x 576"),
        (dataclasses.replace(LLAMA, attention=dataclasses.replace(HEADS["llama"], rotary_dim=64)), 90, "not 64 of 128"),
        (dataclasses.replace(LLAMA, attention=AttentionShape(32, 32, 96, 96**-0.5, 96)), 90, "64 or 128 elements, not 96"),
        (dataclasses.replace(LLAMA, attention=dataclasses.replace(HEADS["llama"], softcap=50.0)), 90, "no soft cap"),
        (dataclasses.replace(LLAMA, attention=dataclasses.replace(HEADS["llama"], kv_heads=2)), 90, "at most 8 heads"),
    ],
)
def test_refusals(shape, sm, words):
    machine = typical_machine(sm)
    assert words in "; ".join(step_refusals(shape, machine))
    with pytest.raises(ValueError, match="a decode step in one launch"):
        step_table(shape, machine)


def test_room(monkeypatch):
    """Activations are gathered in parts, so that wide models have slots for 8 tokens; less shared memory has not."""
    wide, machine = dataclasses.replace(WIDE, tokens=8), typical_machine(90)
    assert StepTable(wide, 132).parts("down") == 7 and not step_refusals(wide, machine)
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.BYTES", 128 << 10)
    (reason,) = step_refusals(wide, machine)
    assert "8 tokens of 28672 columns leave room for" in reason and "one launch takes 3" in reason
