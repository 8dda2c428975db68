"""Attention of concatenated sequences. Each sequence attends to its own tokens only, as if computed alone. Also tests
refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.formats.kv import KV16, parse_kv
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.reference.attention import attend
from lowbit.ops.ragged_attention import gather_kv, ragged_attention, with_sinks
from lowbit.pack.kv_pages import KVPages

SHAPE = AttentionShape(4, 2, 16, 0.3, 16)


def texts(lengths, begins, filled=0):
    """Returns q, k, v and the start of each sequence. `filled` padding rows at the end belong to no sequence."""
    generator = torch.Generator().manual_seed(0)
    q_begins = torch.tensor([0, *lengths]).cumsum(0).int()
    k_begins = torch.tensor([0, *(a + b for a, b in zip(lengths, begins, strict=True))]).cumsum(0).int()
    sizes = ((int(q_begins[-1]) + filled, 4), (int(k_begins[-1]) + filled, 2), (int(k_begins[-1]) + filled, 2))
    return [torch.randn(*size, 16, generator=generator) for size in sizes], q_begins, k_begins


def each_alone(q, k, v, q_begins, k_begins, shape, sinks=None):
    out = []
    for i in range(len(q_begins) - 1):
        own, keys, values = q[q_begins[i] : q_begins[i + 1]], k[k_begins[i] : k_begins[i + 1]], v[k_begins[i] : k_begins[i + 1]]
        if len(own):
            out.append(attend(own, keys.transpose(0, 1), values.transpose(0, 1), len(keys) - len(own), shape, sinks))
    return torch.cat(out)


CASES = [([5], [0]), ([3, 0, 7], [0, 0, 0]), ([1, 40, 2], [9, 0, 300]), ([33, 1, 1], [100, 0, 1])]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("lengths", "begins"), CASES, ids=str)
def test_each_text_alone(lengths, begins, window):
    shape = AttentionShape(4, 2, 16, 0.3, 16, window=window)
    given, q_begins, k_begins = texts(lengths, begins, 5)
    for sinks in (None, torch.linspace(-2, 4, 4)):
        found = ragged_attention(*given, q_begins, k_begins, shape, sinks)
        assert torch.equal(found[:-5], each_alone(*given, q_begins, k_begins, shape, sinks))


def test_sinks_by_the_logarithm_of_the_denominator():
    """On a GPU, sinks are added to the two outputs of flash attention by this function. Sinks may have any size, and scores may
    be far from 0."""
    q, k, v = (torch.randn(heads, 7, 16, generator=torch.Generator().manual_seed(heads)).double() for heads in (4, 2, 3))
    k, v = k.repeat_interleave(2, 0), v[:2].repeat_interleave(2, 0)
    for scale, sinks in ((1.0, [-3.0, 0.0, 2.0, 40.0]), (30.0, [-300.0, 200.0, 90.0, 0.0])):
        scores, sink = scale * q @ k.transpose(1, 2), torch.tensor(sinks).double()
        both = torch.cat([scores, sink[:, None, None].expand(4, 7, 1)], dim=-1).softmax(-1)[..., :-1]
        out = (scores.softmax(-1) @ v).transpose(0, 1)
        found = with_sinks(out, scores.logsumexp(-1), sink)
        torch.testing.assert_close(found, (both @ v).transpose(0, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 6, 200])
@pytest.mark.parametrize(("lengths", "begins"), CASES, ids=str)
def test_on_a_gpu(lengths, begins, window, dtype):
    shape = AttentionShape(4, 2, 16, 0.3, 16, window=window)
    given, *of_texts = texts(lengths, begins, 5)
    for sinks in (None, torch.linspace(-2, 4, 4)):
        expected = each_alone(*given, *of_texts, shape, sinks)
        on_gpu = sinks if sinks is None else sinks.cuda()
        found = ragged_attention(*(t.to("cuda", dtype) for t in given), *(t.cuda() for t in of_texts), shape, on_gpu)
        torch.testing.assert_close(found[:-5].float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [0, 6, 65, 320])
def test_flash_attention_has_a_window_however_many_keys_there_are(window):
    """If at most as many keys are given as the window has, torch calls its kernel without a window. Then the lengths of other
    sequences would decide which kernel runs."""
    calls = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, called, types, args=(), kwargs=None):
            if called is torch.ops.aten._flash_attention_forward.default:
                calls.append((args[6], kwargs.get("window_size_left")))
            return called(*args, **(kwargs or {}))

    for keys in (64, 8192):
        with FakeTensorMode(), Noted():
            q, *kv = (
                torch.empty(rows, heads, 16, dtype=torch.float16, device="cuda") for rows, heads in ((64, 4), *((keys, 2),) * 2)
            )
            begins = torch.empty(3, dtype=torch.int32, device="cuda")
            sinks = torch.empty(4, device="cuda") if keys == 64 else None
            out = ragged_attention(q, *kv, begins, begins, AttentionShape(4, 2, 16, 0.3, 16, window=window), sinks)
            assert out.shape == (64, 64) and out.dtype == torch.float16
    assert len(calls) == 2
    for most_keys, left in calls:
        assert left is None if not window else left == window - 1 < most_keys


def test_what_is_refused():
    given, *of_texts = texts([5], [0])
    with pytest.raises(ValueError, match="not capped here, got softcap 30"):
        ragged_attention(*given, *of_texts, AttentionShape(4, 2, 16, 0.3, 16, softcap=30.0))
    with pytest.raises(ValueError, match=r"q, k and v are .* got \(5, 4, 16\), \(5, 2, 16\), \(4, 2, 16\)"):
        ragged_attention(*given[:2], given[2][:4], *of_texts, SHAPE)
    pages, where, count = torch.zeros(2, 2, 128, 16), torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    packed = KVPages.make(parse_kv("int4"), 2, 2, 16, torch.float32, "cpu")
    for k, v, of_where, of_count, reason in (
        (pages, pages[:1], where, count, "pages"),
        (pages[:, :, :64], pages[:, :, :64], where, count, "128"),
        (pages, pages.half(), where, count, "of one type"),
        (pages.double(), pages.double(), where, count, "torch.float32 pages"),
        (pages, pages, where.int(), count, "where is int64"),
        (pages, pages, where, count[0], "count int32"),
    ):
        with pytest.raises(ValueError, match=reason):
            gather_kv(KVPages(KV16, 16, k, v), of_where, of_count, torch.float32)
    for change in ({"k": packed.k[:, :, :9]}, {"v_scale": None}, {"k_scale": pages}, {"head_dim": 64}):
        with pytest.raises(ValueError, match=r"int4 pages of heads of (16|64) are uint8"):
            gather_kv(replace(packed, **change), where, count, torch.float32)


def test_the_operator_as_torch_checks_it():
    pages, where = torch.randn(2, 2, 128, 16), torch.tensor([3, 300, 5])
    count = torch.tensor([3], dtype=torch.int32)
    checks = ("test_schema", "test_faketensor")
    of_layer = KVPages(KV16, 16, pages, pages + 1)
    packed = KVPages.make(parse_kv("int4"), 2, 2, 16, torch.float32, "cpu")
    for kv in (of_layer, packed):
        given = (*kv.tensors, where, count, str(kv.scheme), 16, torch.float32)
        torch.library.opcheck(torch.ops.lowbit.gather_kv.default, given, test_utils=checks)
    k, v = gather_kv(of_layer, where, count, torch.float32)
    assert torch.equal(k[:, 0], pages[[0, 1, 0], 0, [3, 300 - 256, 5]]) and torch.equal(v, k + 1)
