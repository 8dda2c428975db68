"""The paged-attention operators: refusals, torch registrations, prefill against decode steps, and GPU tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.formats.kv import KV16, parse_kv
from lowbit.kernels.choose.attention import PAGE
from lowbit.ops.attention import append_kv, decode_attention, prompt_attention
from lowbit.pack.kv_pages import KVPages
from tests.kernels.attention import angles_of, compare, make_case, packed, shape

gpu = pytest.mark.gpu

CONTEXTS = [0, 1, 127, 128, 300]


def step(case, **options):
    return decode_attention(*case.arguments[:6], case.shape, *case.arguments[6:8], sinks=case.sinks, **options)


def test_a_step_on_a_cpu():
    case = make_case(shape(norm_eps=1e-5), CONTEXTS, padding=3, norms=torch.float16, sinks=torch.float16, shared=True)
    given = case.copy()
    compare(case, given, step(case), len(CONTEXTS))


def prompt_then_steps(given, device, dtype, tolerance, sinks=None, kv="16"):
    """Checks that a slot's tokens give the same results as one prompt, as two prefill chunks and as decode steps."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(200, given.features, generator=generator).to(device, dtype)
    cos_sin = angles_of(200, given.rotary_dim).to(device)
    tables = torch.tensor([[0, 0, 0], [3, 1, 0]], dtype=torch.int32, device=device)

    def new_pages():
        """Pages full of NaN. Packed pages are full of codes and scales that are NaN, if the format has such codes."""
        made = KVPages.make(parse_kv(kv), 4, given.kv_heads, given.head_dim, dtype, device)
        for t in made.tensors:
            if t is not None:
                t.fill_(torch.nan if t.is_floating_point() else 255)
        return made

    def prompt(chunks, pages):
        found, first = [], 0
        for end in chunks:
            position_of = torch.arange(first, end, dtype=torch.int32, device=device)
            q = append_kv(qkv[first:end], pages, tables, torch.ones_like(position_of), position_of, cos_sin, given)
            found.append(prompt_attention(q, pages, tables[1], first, given, sinks))
            first = end
        return torch.cat(found)

    pages, of_steps, steps = new_pages(), new_pages(), []
    whole = prompt([200], pages)
    parts = prompt([77, 199, 200], new_pages())
    rows = torch.tensor([1], dtype=torch.int32, device=device)
    for position in range(200):
        positions = torch.tensor([0, position], dtype=torch.int32, device=device)
        row = qkv[position : position + 1]
        steps.append(decode_attention(row, of_steps, tables, positions, rows, cos_sin, given, sinks=sinks))
    token = torch.arange(200, device=device)
    (k, v), (steps_k, steps_v) = (
        p.read(tables[1][token // PAGE].long(), token % PAGE, torch.float32) for p in (pages, of_steps)
    )
    assert torch.equal(steps_v, v)
    # A different rounding of RoPE may change a code by one.
    step_of_code = {"16": tolerance, "fp8": 0.3, "int8": 0.06, "int4": 0.6}[pages.scheme.k.name]
    assert (steps_k - k).abs().max() < step_of_code and (steps_k != k).float().mean() < (1.0 if kv == "16" else 0.02)
    for p in (pages, of_steps):
        assert all(t is None or (t[[0, 2]] != t[[0, 2]]).all() or (t[[0, 2]] == 255).all() for t in p.tensors)
    for other in (parts, torch.cat(steps)):
        assert (other - whole).float().norm() < tolerance * whole.float().norm()


KINDS = {
    "plain": shape(),
    "window": shape(window=50),
    "soft cap": shape(softcap=4.0, window=150, head_dim=32),
    "one head each": shape(4, 4),
}


@pytest.mark.parametrize("kv", ["16", "fp8", "int8", "int4", "k8v4"])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_steps_agree(name, kv):
    prompt_then_steps(KINDS[name], "cpu", torch.float32, 1e-5, kv=kv)


def test_prompts_and_steps_agree_with_sinks():
    prompt_then_steps(shape(window=50), "cpu", torch.float32, 1e-5, torch.linspace(-2, 9, 8))


def test_torch_knows_the_operators():
    """torch's opcheck passes: schema, mutated arguments, fake tensors."""
    case = make_case(shape(), [3, 130], torch.float32)
    fields = dataclasses.astuple(case.shape)
    checks = ("test_schema", "test_faketensor")
    others = case.tables, case.positions, case.rows, case.cos_sin
    given = (case.qkv, *case.pages.tensors, *others, None, None, "16", *fields)
    torch.library.opcheck(torch.ops.lowbit.decode_attention.default, given, test_utils=checks)
    with_sinks = {"sinks": torch.zeros(8)}
    torch.library.opcheck(torch.ops.lowbit.decode_attention.default, given, with_sinks, test_utils=checks)
    packed = KVPages.make(parse_kv("k8v4"), case.pages.pages, 2, 64, torch.float32, "cpu")
    slots = torch.zeros(2, dtype=torch.int32)
    for pages in (case.pages, packed):
        given = (case.qkv, *pages.tensors, case.tables, slots, slots, case.cos_sin, None, None, str(pages.scheme), *fields)
        torch.library.opcheck(torch.ops.lowbit.append_kv.default, given, test_utils=checks)
    given = (case.qkv, *packed.tensors, *others, None, None, "k8v4", *fields)
    torch.library.opcheck(torch.ops.lowbit.decode_attention.default, given, test_utils=checks)


FULL = torch.zeros(3, 2, 128, 64)
PACKED = KVPages.make(parse_kv("k8v4"), 3, 2, 64, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": torch.zeros(2, 100)}, r"qkv is \[B, 768\], got \(2, 100\)"),
        ({"pages": KVPages(KV16, 64, torch.zeros(3, 2, 64, 64), FULL)}, r"k is torch.float32 \('pages', 2, 128, 64\)"),
        ({"pages": KVPages(KV16, 64, FULL, FULL.half())}, r"v is torch.float32 .* got torch.float16"),
        ({"pages": KVPages(KV16, 64, FULL, FULL, FULL, FULL)}, "packed pages, and only those, have k_scale and v_scale"),
        ({"pages": dataclasses.replace(PACKED, k_scale=None)}, "packed pages, and only those, have k_scale and v_scale"),
        (
            {"pages": dataclasses.replace(PACKED, k=PACKED.v)},
            r"k is torch.uint8 \('pages', 2, 8192\), got .* \(3, 2, 4096",
        ),
        (
            {"pages": dataclasses.replace(PACKED, k_scale=FULL)},
            r"k_scale is torch.float16 \('pages', 2, 128\), got",
        ),
        ({"tables": torch.zeros(3, 2)}, "tables are int32"),
        ({"rows": torch.zeros(2).long()}, r"int32, one for each slot or row, \[2\], got torch.int64"),
        ({"positions": torch.zeros(7).int()}, r"\[3\], got torch.int32 \(7,\)"),
        ({"cos_sin": torch.zeros(9, 32)}, r"cos_sin is float32 \[positions, 64\]"),
        ({"sinks": torch.zeros(9)}, r"sinks are floating \[8\], got torch.float32 \(9,\)"),
        ({"q_norm": torch.zeros(9)}, r"q_norm and k_norm are \[64\], got \(9,\)"),
        ({"shape": shape(rotary_dim=65)}, "rotary_dim is even and at most head_dim 64, got 65"),
        ({"shape": shape(8, 3)}, "8 heads are no multiple of 3 kv heads"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, words):
    case = dataclasses.replace(make_case(shape(), [0, 1], torch.float32), **change)
    with pytest.raises(ValueError, match=f"^decode_attention: .*{words}"):
        step(case)


def test_prompts_beyond_the_table_are_refused():
    case = make_case(shape(), [0], torch.float32)
    q = torch.zeros(300, 8, 64)
    with pytest.raises(ValueError, match="its 300 tokens on 2 pages"):
        prompt_attention(q, case.pages, case.tables[0], 0, case.shape)
    with pytest.raises(ValueError, match=r"q is \[T, 8, 64\]"):
        prompt_attention(q[:, :3], case.pages, case.tables[0], 0, case.shape)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_steps_agree_on_a_gpu(name, dtype):
    tolerance = 5e-3 if dtype == torch.float16 else 3e-2
    for kv in ("16", "fp8", "int8", "int4", "k8v4"):
        prompt_then_steps(KINDS[name], "cuda", dtype, tolerance, kv=kv)
    prompt_then_steps(KINDS[name], "cuda", dtype, tolerance, torch.linspace(-2, 9, KINDS[name].heads, device="cuda"))


@gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_a_graph_follows_positions(rows):
    """A graph captured once is replayed with changed positions, tables and contexts, between other kernels of the stream."""
    given = shape(32, 8, 128)
    contexts = [(97 * i) % 1500 for i in range(rows)]
    case = make_case(given, contexts, device="cuda", padding=1)
    step(case.copy())
    torch.cuda.synchronize()
    source, graph = case.qkv.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 1.0
        out = decode_attention(doubled, case.pages, case.tables, case.positions, case.rows, case.cos_sin, given) + 0
    for seed in range(3):
        other = make_case(given, contexts[seed:] + contexts[:seed], device="cuda", padding=1, seed=seed)
        for name in ("positions", "tables"):
            getattr(case, name).copy_(getattr(other, name))
        own = KVPages(KV16, given.head_dim, *(t[: other.pages.pages] for t in case.pages.tensors[:2]))
        own.k.copy_(other.pages.k), own.v.copy_(other.pages.v), source.copy_(other.qkv)
        graph.replay()
        torch.cuda.synchronize()
        compare(dataclasses.replace(case, pages=own), other, out, rows)


@gpu
@pytest.mark.parametrize("kv", ["16", "int4"])
@pytest.mark.parametrize("longest", [128, 2048, 65536])
def test_contexts_of_any_length_come_out_right_whatever_was_said(longest, kv):
    given = shape(32, 8, 128)
    case = make_case(given, [(311 * i) % 4000 for i in range(9)], device="cuda")
    case = case if kv == "16" else packed(case, kv)
    before = case.copy()
    expected, found = step(case).float(), step(before.copy(range(9)), longest=longest).float()
    assert (found - expected).norm() < 2e-3 * expected.norm()


@gpu
@pytest.mark.parametrize("kv", ["16", "int4", "fp8"])
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(kv):
    given = shape(32, 8, 128)
    case = make_case(given, [(211 * i) % 3000 for i in range(33)], device="cuda")
    case = case if kv == "16" else packed(case, kv)
    before = case.copy()
    together = step(case, batch_invariant=True)
    for rows in ([0], [7], [5, 6, 7], list(range(20))):
        assert torch.equal(step(before.copy(rows), batch_invariant=True), together[rows])


@gpu
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": shape(34, 2, 64)}, "at most 16 heads share a kv head, got 17"),
        ({"dtype": torch.float32}, "takes fp16 and bf16, got torch.float32"),
        ({"shape": shape(head_dim=8, rotary_dim=8), "kv": "int4"}, "packed keys and values have heads of 16 to 256 elements"),
    ],
)
def test_what_no_kernel_takes_is_refused(change, words):
    case = make_case(change.get("shape", shape()), [0, 1], change.get("dtype", torch.float16), "cuda")
    case = packed(case, change["kv"]) if "kv" in change else case
    with pytest.raises(ValueError, match=words):
        step(case)
