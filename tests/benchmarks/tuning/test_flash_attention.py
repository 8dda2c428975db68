"""FlashAttention-3 beside decode attention: the arguments of its call, executed by plain torch, and its absence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.tuning import flash_attention
from benchmarks.tuning.flash_attention import FP8_TOLERANCE, Fa3Time, fa3_call, fp8_reference, make_fp8_batch, refusals
from lowbit.kernels.choose.attention import AttentionShape

SHAPE = AttentionShape(4, 2, 64, 64**-0.5, 64)


def varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, block_table, scheduler_metadata,
           fa_version, q_descale, k_descale, v_descale, num_splits):  # fmt: skip
    """What vLLM's `flash_attn_varlen_func` computes for one token per row, by torch's attention over gathered pages."""
    assert causal and fa_version == 3 and scheduler_metadata == ("schedule", num_splits, k.shape[1])
    assert max_seqlen_q == 1 and cu_seqlens_q.tolist() == [*range(len(q) + 1)] and max_seqlen_k == int(seqused_k.max())
    found = []
    for row, used in enumerate(seqused_k.tolist()):
        keys, values = (
            t[block_table[row].long()].flatten(0, 1)[:used].float() * scale[row][:, None]
            for t, scale in ((k, k_descale), (v, v_descale))
        )
        queries = q[row].float() * q_descale[row].repeat_interleave(SHAPE.group)[:, None]
        keys, values = (t.repeat_interleave(SHAPE.group, 1).transpose(0, 1) for t in (keys, values))
        y = torch.nn.functional.scaled_dot_product_attention(queries[:, None], keys, values, scale=softmax_scale)
        found.append(y[:, 0])
    return torch.stack(found).bfloat16()


PACKAGE = SimpleNamespace(
    flash_attn_varlen_func=varlen,
    get_scheduler_metadata=lambda **given: ("schedule", given["num_splits"], given["page_size"]),
)


@pytest.mark.parametrize("page", flash_attention.PAGES)
@pytest.mark.parametrize("splits", flash_attention.SPLITS)
def test_the_call_and_its_reference(page, splits):
    batch = make_fp8_batch(3, 300, SHAPE, page, 2, "cpu")
    assert sorted(batch.tables.flatten().tolist()) == list(range(3 * -(-300 // page)))
    call = fa3_call(batch, 300, splits, page, SHAPE, PACKAGE)
    expected = [fp8_reference(batch, copy, 2, SHAPE) for copy in range(2)]
    for copy in range(2):
        error = (call(copy)[:2].double() - expected[copy]).norm() / expected[copy].norm()
        assert error < FP8_TOLERANCE / 10
    assert (expected[0] - expected[1]).norm() / expected[0].norm() > FP8_TOLERANCE  # another copy is another result
    k = batch.caches[0][0].float() * flash_attention.DESCALE
    assert 0.5 < k.std() < 1.5


def test_variants_are_named_and_a_missing_package_is_refused(monkeypatch):
    assert Fa3Time(16, 32, 5.0).variant == "pages of 16 tokens, at most 32 splits"
    assert Fa3Time(128, 0, None, error="x").variant == "pages of 128 tokens, its own choice of splits"
    monkeypatch.setattr(flash_attention, "MODULE", "no_such_package_of_attention")
    (found,) = refusals()
    assert "--fa3 needs vLLM 0.25.1's" in found
    monkeypatch.setattr(flash_attention.importlib, "import_module", lambda name: SimpleNamespace(FA3_AVAILABLE=False))
    assert "cannot be loaded" in refusals()[0]
