"""The paged-attention operators: refusals, torch registrations, prefill against decode steps, and GPU tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.kernels.choose.attention import PAGE
from lowbit.ops.attention import append_kv, decode_attention, prompt_attention
from tests.kernels.attention import angles_of, compare, make_case, shape

gpu = pytest.mark.gpu

CONTEXTS = [0, 1, 127, 128, 300]


def step(case, **options):
    return decode_attention(*case.arguments[:7], case.shape, *case.arguments[7:9], sinks=case.sinks, **options)


def test_a_step_on_a_cpu():
    case = make_case(shape(norm_eps=1e-5), CONTEXTS, padding=3, norms=torch.float16, sinks=torch.float16, shared=True)
    given = case.copy()
    compare(case, given, step(case), len(CONTEXTS))


def prompt_then_steps(given, device, dtype, tolerance, sinks=None):
    """Checks that a slot's tokens give the same results as one prompt, as two prefill chunks and as decode steps."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(200, given.features, generator=generator).to(device, dtype)
    cos_sin = angles_of(200, given.rotary_dim).to(device)
    tables = torch.tensor([[0, 0, 0], [3, 1, 0]], dtype=torch.int32, device=device)

    def pages():
        return torch.full((4, given.kv_heads, PAGE, given.head_dim), torch.nan, dtype=dtype, device=device)

    def prompt(chunks, k, v):
        found, first = [], 0
        for end in chunks:
            position_of = torch.arange(first, end, dtype=torch.int32, device=device)
            q = append_kv(qkv[first:end], k, v, tables, torch.ones_like(position_of), position_of, cos_sin, given)
            found.append(prompt_attention(q, k, v, tables[1], first, given, sinks))
            first = end
        return torch.cat(found)

    k, v = pages(), pages()
    whole = prompt([200], k, v)
    parts = prompt([77, 199, 200], pages(), pages())
    steps_k, steps_v, steps = pages(), pages(), []
    rows = torch.tensor([1], dtype=torch.int32, device=device)
    for position in range(200):
        positions = torch.tensor([0, position], dtype=torch.int32, device=device)
        row = qkv[position : position + 1]
        steps.append(decode_attention(row, steps_k, steps_v, tables, positions, rows, cos_sin, given, sinks=sinks))
    assert torch.equal(steps_v.nan_to_num(7), v.nan_to_num(7))
    assert torch.allclose(steps_k, k, rtol=tolerance, atol=tolerance, equal_nan=True)
    for other in (parts, torch.cat(steps)):
        assert (other - whole).float().norm() < tolerance * whole.float().norm()


KINDS = {
    "plain": shape(),
    "window": shape(window=50),
    "soft cap": shape(softcap=4.0, window=150, head_dim=32),
    "one head each": shape(4, 4),
}


@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_steps_agree(name):
    prompt_then_steps(KINDS[name], "cpu", torch.float32, 1e-5)


def test_prompts_and_steps_agree_with_sinks():
    prompt_then_steps(shape(window=50), "cpu", torch.float32, 1e-5, torch.linspace(-2, 9, 8))


def test_torch_knows_the_operators():
    """torch's opcheck passes: schema, mutated arguments, fake tensors."""
    case = make_case(shape(), [3, 130], torch.float32)
    fields = dataclasses.astuple(case.shape)
    checks = ("test_schema", "test_faketensor")
    given = (*case.arguments[:7], None, None, *fields)
    torch.library.opcheck(torch.ops.lowbit.decode_attention.default, given, test_utils=checks)
    with_sinks = {"sinks": torch.zeros(8)}
    torch.library.opcheck(torch.ops.lowbit.decode_attention.default, given, with_sinks, test_utils=checks)
    slots = torch.zeros(2, dtype=torch.int32)
    given = (*case.arguments[:4], slots, slots, case.cos_sin, None, None, *fields)
    torch.library.opcheck(torch.ops.lowbit.append_kv.default, given, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": torch.zeros(2, 100)}, r"qkv is \[B, 768\], got \(2, 100\)"),
        ({"k": torch.zeros(3, 2, 64, 64)}, r"k is torch.float32 \('pages', 2, 128, 64\)"),
        ({"v": torch.zeros(3, 2, 128, 64).half()}, r"v is torch.float32 .* got torch.float16"),
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
        prompt_attention(q, case.k, case.v, case.tables[0], 0, case.shape)
    with pytest.raises(ValueError, match=r"q is \[T, 8, 64\]"):
        prompt_attention(q[:, :3], case.k, case.v, case.tables[0], 0, case.shape)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_steps_agree_on_a_gpu(name, dtype):
    tolerance = 5e-3 if dtype == torch.float16 else 3e-2
    prompt_then_steps(KINDS[name], "cuda", dtype, tolerance)
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
        out = decode_attention(doubled, case.k, case.v, case.tables, case.positions, case.rows, case.cos_sin, given) + 0
    for seed in range(3):
        other = make_case(given, contexts[seed:] + contexts[:seed], device="cuda", padding=1, seed=seed)
        for name in ("positions", "tables"):
            getattr(case, name).copy_(getattr(other, name))
        case.k[: len(other.k)].copy_(other.k), case.v[: len(other.v)].copy_(other.v), source.copy_(other.qkv)
        graph.replay()
        torch.cuda.synchronize()
        compare(dataclasses.replace(case, k=case.k[: len(other.k)], v=case.v[: len(other.v)]), other, out, rows)


@gpu
@pytest.mark.parametrize("longest", [128, 2048, 65536])
def test_contexts_of_any_length_come_out_right_whatever_was_said(longest):
    given = shape(32, 8, 128)
    case = make_case(given, [(311 * i) % 4000 for i in range(9)], device="cuda")
    before = case.copy()
    expected, found = step(case).float(), step(before.copy(range(9)), longest=longest).float()
    assert (found - expected).norm() < 2e-3 * expected.norm()


@gpu
def test_batch_invariant_rows_have_the_same_bits_in_every_batch():
    given = shape(32, 8, 128)
    case = make_case(given, [(211 * i) % 3000 for i in range(33)], device="cuda")
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
    ],
)
def test_what_no_kernel_takes_is_refused(change, words):
    case = make_case(change.get("shape", shape()), [0, 1], change.get("dtype", torch.float16), "cuda")
    with pytest.raises(ValueError, match=words):
        step(case)
