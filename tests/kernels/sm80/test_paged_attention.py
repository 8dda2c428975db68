"""Paged attention of a decode step, compared with float64. Without a GPU it runs in Triton's interpreter. Also tests its
machine code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.formats.kv import KV16
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.attention import DecodeTask, DecodeTile
from lowbit.pack.kv_pages import KVPages
from tests.kernels.attention import compare, compare_verified, make_case, one_by_one, several_tokens, shape, with_task
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan, loops_to_loaded_bounds

pytest.importorskip("triton", reason="the kernel is written in Triton")

from lowbit.kernels.sm80.paged_attention import PagedAttentionPlan

gpu = pytest.mark.gpu

RAGGED = [0, 1, 15, 127, 128, 129, 300, 1000]
"""Context lengths: numbers of tokens before the new one."""


def run(case, tile, machine, verify=False):
    """The output of a plan; memory that it allocates is poisoned, and counters must end at zero. On a GPU it runs twice and
    must give the same bits (the interpreter always has one order).
    """
    plan = PagedAttentionPlan(len(case.rows), case.shape, tile, machine, verify=verify)
    sums, counters = plan.workspace
    arrived = torch.zeros(max(counters, 1), dtype=torch.int32, device=case.qkv.device)
    before, found = case.copy(), []
    for _ in range(2 if case.qkv.is_cuda else 1):
        case.pages.k.copy_(before.pages.k), case.pages.v.copy_(before.pages.v)
        partial = torch.full((max(sums, 1),), torch.nan, device=case.qkv.device)
        found.append(plan(*case.arguments, partial, arrived))
        assert not arrived.any()
    real = case.rows < case.rows.max() if verify else case.rows < len(case.positions) - 1  # padding rows overwrite each other
    assert torch.equal(found[0][real], found[-1][real])
    return found[0]


def check(shape, contexts, tile, dtype=torch.float16, device="cpu", **options):
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    case = make_case(shape, contexts, dtype, device, **options)
    given = case.copy()
    compare(case, given, run(case, tile, machine), len(contexts))


def check_verify(given, contexts, counts, tile, dtype=torch.float16, device="cpu", **options):
    """Several new tokens per slot are compared with the reference, and have the bits of as many steps of one token."""
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    case = several_tokens(make_case(given, contexts, dtype, device, padding=2, **options), counts)
    before, single = case.copy(), case.copy()
    out = run(case, tile, machine, verify=True)
    compare_verified(case, before, out, sum(counts))
    expected = one_by_one(single, len(counts), lambda step: run(step, tile, machine))
    assert torch.equal(out[: sum(counts)], expected[: sum(counts)])
    dummy = case.tables[-1, 0].long()
    for found, alone in zip(case.pages.tensors[:2], single.pages.tensors[:2], strict=True):
        found[dummy] = alone[dummy]  # padding rows overwrite each other there
        assert torch.equal(found.view(torch.int16), alone.view(torch.int16))


FEATURES = {
    "plain": (shape(), {}),
    "one head each": (shape(2, 2), {}),
    "groups of 3": (shape(6, 2), {}),
    "groups of 16": (shape(16, 1), {}),
    "half turns": (shape(rotary_dim=32), {}),
    "a quarter of 80 turns": (shape(head_dim=80, rotary_dim=20), {}),
    "no turn": (shape(rotary_dim=0), {}),
    "no turn, one head each": (shape(3, 3, 128, rotary_dim=0), {}),
    "96": (shape(head_dim=96), {}),
    "128": (shape(4, 1, 128), {}),
    "256": (shape(4, 1, 256), {}),
    "soft cap": (shape(softcap=5.0, scale=0.3), {}),
    "window": (shape(window=200), {}),
    "window of a page": (shape(window=128), {}),
    "window of itself": (shape(window=1), {}),
    "norms": (shape(norm_eps=1e-6), {"norms": torch.float32}),
    "norms of Gemma, soft cap, window": (
        shape(head_dim=96, norm_eps=1e-6, norm_offset=1.0, softcap=3.0, window=130), {"norms": torch.bfloat16},
    ),
    "shared pages and padding": (shape(), {"shared": True, "padding": 3}),
    "sinks": (shape(), {"sinks": torch.float32}),
    "sinks and window of gpt-oss": (shape(16, 2, window=128), {"sinks": torch.bfloat16}),
}  # fmt: skip


def tile_for(shape, splits, warps=1, chunk=64, stages=1):
    block = min(128, 2048 * warps // shape.lanes)
    return DecodeTile(splits, max(chunk, block), block, warps, stages)


def warps_for(shape):
    """The numbers of warps that fit the shape. With blocks of 16 tokens, several warps would all compute the same products."""
    return [warps for warps in (1, 2, 4) if 2048 * warps // shape.lanes >= (16 if warps == 1 else 32)]


def check_features():
    """Checks all features. Features that do not concern the addressing of kv heads run with a single kv head."""
    for name, (given, options) in FEATURES.items():
        if name not in ("plain", "one head each", "groups of 3", "96", "shared pages and padding", "sinks"):
            given = dataclasses.replace(given, heads=given.group, kv_heads=1)
        check(given, [300, 129, 1], tile_for(given, 4, warps_for(given)[0]), **options)


def check_tiles():
    given = shape()
    for splits, chunk, block in ((1, 64, 64), (2, 64, 16), (8, 128, 128), (64, 64, 16)):
        check(given, [400, 64, 65, 300], DecodeTile(splits, chunk, block, 1))
    check(given, [300, 129, 1, 0], DecodeTile(4, 64, 16, 1, 3))
    check(given, [300, 0, 65], DecodeTile(4, 64, 64, 2), sinks=torch.float16)  # several warps hold rows of the new token
    check(given, [*RAGGED[:-1], 500], DecodeTile(16, 64, 32, 1))  # in fp16, since the interpreter does not multiply bf16


def check_several_tokens():
    """Checks new tokens within a page and across pages, splits that end among them, windows, norms and sinks."""
    check_verify(shape(2, 1), [130, 66, 3], [5, 1, 4], tile_for(shape(2, 1), 4))
    check_verify(shape(2, 1), [130, 1], [3, 2], tile_for(shape(2, 1), 4, stages=3))
    given = shape(2, 1, window=128, norm_eps=1e-6)
    check_verify(given, [260, 65], [4, 2], tile_for(given, 4, 2), norms=torch.float32, sinks=torch.float32)


def rows_alone(device, dtype):
    """Checks that each row alone gives the same bits as in a batch."""
    machine = machine_of(device) if device == "cuda" else typical_machine(80)
    tile = tile_for(shape(), 8)
    case = make_case(shape(), [300, 500, 0, 77], dtype, device, padding=1)
    given = case.copy()
    together = run(case, tile, machine)
    for row in range(4):
        assert torch.equal(run(given.copy([row]), tile, machine)[0], together[row])


def check_rows_alone():
    rows_alone("cpu", torch.float16)


@loops_to_loaded_bounds
def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_features, check_tiles, check_rows_alone, check_several_tokens)


def compiled(given, tile, sm=90, dtype=torch.float16, norms=None, sinks=None, task=DecodeTask.STEP):
    """The kernel of a decode step of 4 rows; `norms` and `sinks` are the dtypes of gammas and sinks."""
    half, whole = (lambda *size: meta(size, dtype)), (lambda *size: meta(size, torch.int32))
    pages = KVPages.make(KV16, 100, given.kv_heads, given.head_dim, dtype, "meta")
    gamma = None if norms is None else meta((given.head_dim,), norms)
    state = whole(9, 64), whole(9), whole(4), meta((8192, given.rotary_dim), torch.float32), gamma, gamma
    sink = None if sinks is None else meta((given.heads,), sinks)
    call = (half(4, given.features), pages, *state, sink, meta((1,), torch.float32), whole(1))
    plan = PagedAttentionPlan(4, given, tile, typical_machine(sm), verify=task is not DecodeTask.STEP)
    return compile_plan(with_task(plan, task), call, sm)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "programs"),
    # head_dim 128 runs with every number of warps, other sizes with those that take most registers. The group is the worst one,
    # which adds up to 28. head_dim 64 takes 175 to 204 registers, 128 up to 247, and 80 or 96 with four warps 202. fp16 and
    # bf16 take the same registers in every tile.
    [
        (128, 4, torch.float16, (1, 2, 4)), (256, 16, torch.float16, (4,)), (64, 16, torch.float16, (1,)),
        (80, 3, torch.float16, (1, 2)), (96, 8, torch.bfloat16, (1, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_spills_and_pages_are_read_in_vectors_of_16_bytes(head_dim, group, dtype, programs):
    """Covers all tiles, but only one number of parts, since registers depend on the number of warps only."""
    given = shape(4 * group, 4, head_dim)
    for warps, kernel in [(warps, compiled(given, tile_for(given, 32, warps), 90, dtype)) for warps in programs]:
        assert kernel.stack_bytes == 0 and kernel.count("LDL") == kernel.count("STL") == 0, (warps, kernel.registers)
        # 64 registers each hold keys and values, for the first block and for the loop. Others hold q and the partial results of
        # a round.
        assert kernel.count("LDG.E.128") >= 33, warps
        assert kernel.count("HMMA.16816") >= 32


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("window", [0, 128])
def test_heads_of_gpt_oss(window, sm):
    """64 heads over 8, of 64 elements, with sinks, which are read before the wait like gammas."""
    given = shape(64, 8, 64, window=window)
    for warps in (1, 4):
        kernel = compiled(given, tile_for(given, 32, warps), sm, torch.bfloat16, sinks=torch.bfloat16)
        plain = compiled(given, tile_for(given, 32, warps), sm, torch.bfloat16)
        assert kernel.stack_bytes == 0 and kernel.registers <= plain.registers + 16, (warps, kernel.registers)
        assert kernel.count("MUFU.EX2") > plain.count("MUFU.EX2")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "programs"),
    # One warp takes most registers: 250 for head_dim 80, 243 for 128. 128 with four warps, and 64, take at most 203 of 255.
    [(80, torch.bfloat16, (1,)), (128, torch.float16, (1,))],
    ids=str,
)
def test_heads_of_opt(head_dim, dtype, programs):
    """OPT's heads: as many kv heads as q heads, and no RoPE."""
    given = shape(12, 12, head_dim, rotary_dim=0)
    for warps, kernel in [(warps, compiled(given, tile_for(given, 32, warps), 90, dtype)) for warps in programs]:
        assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") >= 32, (warps, kernel.registers)


@pytest.mark.parametrize(
    ("sm", "head_dim", "programs"),
    # The cases with most registers, 248 to 255 of 255. Others take at most 220; head_dim 128 with one warp on sm_80 takes two
    # fewer than on sm_90.
    [(90, 128, (1, 2)), (90, 256, (4,)), (80, 128, (2,)), (80, 256, (4,))],
)
def test_all_features_at_once_do_not_spill(sm, head_dim, programs):
    given = shape(32, 8, head_dim, rotary_dim=head_dim // 2, softcap=50.0, window=4096, norm_eps=1e-6, norm_offset=1.0)
    for warps in programs:
        kernel = compiled(given, tile_for(given, 64, warps), sm, norms=torch.float16)
        assert kernel.stack_bytes == 0, (warps, kernel.registers)


def test_old_keys_are_asked_for_before_the_wait():
    """sm_90: tables, positions and the first block of keys are loaded before the wait, q after it. Then the next kernel may
    start. Stores come last.
    """
    given = shape(16, 4, 128)  # the tests above compiled it into Triton's cache
    for kernel in [compiled(given, tile_for(given, 32, warps)) for warps in (1, 2, 4)]:
        names = [line.split()[line.startswith("@")] for line in kernel.lines]
        wait, start = names.index("ACQBULK"), names.index("PREEXIT")
        before = [name for name in names[:wait] if name.startswith("LDG")]
        assert before.count("LDG.E.128") >= 16 and wait < start
        assert not any(name.startswith(("STG", "ATOM", "HMMA")) for name in names[:start])
    kernel = compiled(given, tile_for(given, 16), 80)
    assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_several_tokens_per_slot(head_dim):
    """The attention of a verified step loads no keys before the wait, and stores none. A launch before it stores them."""
    given = shape(32, 8, head_dim)
    for tile in (tile_for(given, 32, 1), tile_for(given, 32, 4), tile_for(given, 16, 4, stages=2)):
        kernel = compiled(given, tile, task=DecodeTask.VERIFY)
        names = [line.split()[line.startswith("@")] for line in kernel.lines]
        wait = names.index("ACQBULK")
        assert kernel.stack_bytes == 0 and kernel.count("HMMA.16816") >= 8
        assert not any(name.startswith(("LDG.E.128", "LDGSTS", "STG")) for name in names[:wait])
        append = compiled(given, tile, task=DecodeTask.APPEND)
        assert append.stack_bytes == 0 and append.count("HMMA") == append.count("ATOM") == 0
        assert append.count("STG") >= 2 and append.registers <= 64


# (128, 4) is left out: it takes 150 registers, so it would not show spills. The others take the limit of 168.
@pytest.mark.parametrize(("head_dim", "warps"), [(64, 1), (64, 4), (128, 1)])
def test_blocks_on_their_way_in_shared_memory(head_dim, warps):
    """Blocks of keys and values are copied by cp.async in vectors of 16 bytes. This takes no registers, so more programs fit an
    SM.
    """
    given, stages = shape(32, 8, head_dim), 2
    kernel = compiled(given, tile_for(given, 32, warps, stages=stages))
    assert kernel.stack_bytes == 0 and kernel.count("LDGSTS.E") == kernel.count("LDGSTS") >= 16
    assert kernel.registers <= 168 and kernel.shared_bytes >= stages * 8192 * warps // 2


def test_without_parts_there_is_no_counter():
    assert compiled(shape(), tile_for(shape(), 1)).count("ATOM") == 0
    assert PagedAttentionPlan(4, shape(), tile_for(shape(), 1), typical_machine(90)).workspace == (0, 0)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_against_the_reference(name, dtype):
    given, options = FEATURES[name]
    for warps in warps_for(given):
        for splits, stages in ((1, 1), (4, 1), (64, 1), (4, 3)):
            check(given, [*RAGGED, 4000], tile_for(given, splits, warps, stages=stages), dtype, "cuda", **options)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_do_not_feel_each_other(dtype):
    rows_alone("cuda", dtype)


@gpu
def test_many_rows_and_parts_meet():
    """More programs than fit the GPU at once run repeatedly. Counters end at zero, and every run gives the same bits."""
    given = shape(32, 8, 128)
    case = make_case(given, [(331 * i) % 2500 for i in range(64)], device="cuda", padding=8)
    before, tile = case.copy(), tile_for(given, 32)
    first = run(case, tile, machine_of("cuda"))
    compare(case, before, first, 64)
    for _ in range(20):
        assert torch.equal(run(before.copy(), tile, machine_of("cuda"))[:64], first[:64])


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in FEATURES if "padding" not in name])
def test_several_tokens_per_slot_on_a_gpu(name, dtype):
    given, options = FEATURES[name]
    for warps in warps_for(given):
        for splits, stages in ((1, 1), (8, 1), (8, 2)):
            tile = tile_for(given, splits, warps, stages=stages)
            check_verify(given, [1000, 130, 8, 300], [8, 5, 3, 1], tile, dtype, "cuda", **options)
