"""Paged attention in plain torch against Transformers' eager attention on contiguous keys and values."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.kv import KV16
from lowbit.kernels.choose.attention import PAGE
from lowbit.kernels.reference import attention
from lowbit.kernels.reference.attention import append_reference, attend, decode_reference, gathered
from lowbit.pack.kv_pages import KVPages
from tests.kernels.attention import angles_of, make_case, shape

SHAPES = {
    "llama": (shape(), None),
    "gemma2": (shape(4, 2, 32, softcap=5.0, window=70, scale=0.7), None),
    "qwen3": (shape(6, 2, 32, norm_eps=1e-6), torch.float32),
    "gemma3": (shape(2, 2, 64, norm_eps=1e-6, norm_offset=1.0, window=64), torch.float32),
    "phi": (shape(4, 4, 80, rotary_dim=32), None),
}


class _Config:
    """The attributes of a configuration that Transformers' modules read."""

    attention_dropout = 0.0


def by_transformers(shape, qkv, cos_sin, q_norm, k_norm):
    """Transformers' attention of one sequence, positions 0, 1, ..: [T, heads * head_dim]."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

    length = len(qkv)
    heads = qkv.view(1, length, -1, shape.head_dim).transpose(1, 2)
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if q_norm is not None:
        turned = []
        for x, gamma in ((q, q_norm), (k, k_norm)):
            norm = (Gemma3RMSNorm if shape.norm_offset else LlamaRMSNorm)(shape.head_dim, shape.norm_eps).double()
            norm.weight.data = gamma.double()
            turned.append(norm(x).double())
        q, k = turned
    cos, sin = cos_sin[:length].double().chunk(2, dim=1)
    cos, sin = torch.cat([cos, cos], 1)[None], torch.cat([sin, sin], 1)[None]
    r = shape.rotary_dim
    turned = apply_rotary_pos_emb(q[..., :r], k[..., :r], cos, sin)
    q, k = (torch.cat([t, x[..., r:]], dim=-1) for t, x in zip(turned, (q, k), strict=True))
    sees = sliding_window_causal_mask_function(shape.window) if shape.window else causal_mask_function
    places = list(torch.arange(length))
    mask = torch.tensor([[bool(sees(0, 0, i, j)) for j in places] for i in places])
    mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(~mask, -torch.inf)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups, module.config, module.training = shape.group, _Config(), False
    out, _ = eager_attention_forward(
        module, q, k, v, mask, scaling=shape.scale, softcap=shape.softcap or None, dropout=0.0
    )  # fmt: skip
    return out[0].flatten(1).double()


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_and_steps_against_transformers(name, monkeypatch):
    """140 tokens: a prompt of 100 in chunks of 64 and 36, then 40 decode steps. SCORES is small, so scores are chunked too."""
    given, norms = SHAPES[name]
    monkeypatch.setattr(attention, "SCORES", 20 * given.heads * PAGE)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(140, given.features, generator=generator, dtype=torch.float64)
    gammas = [None if norms is None else torch.randn(given.head_dim, generator=generator).to(norms) for _ in range(2)]
    cos_sin = angles_of(140, given.rotary_dim)
    k = torch.full((4, given.kv_heads, PAGE, given.head_dim), torch.nan, dtype=torch.float64)
    pages, tables = KVPages(KV16, given.head_dim, k, k.clone()), torch.tensor([[0, 0, 0], [3, 1, 0]], dtype=torch.int32)
    expected, found = by_transformers(given, qkv, cos_sin, *gammas), []
    for first, end in ((0, 64), (64, 100)):
        position_of = torch.arange(first, end, dtype=torch.int32)
        q = append_reference(qkv[first:end], pages, tables, torch.ones_like(position_of), position_of, cos_sin, given, *gammas)
        found.append(attend(q, *gathered(pages, tables[1], end, q.dtype), first, given))
    for position in range(100, 140):
        positions, rows = torch.tensor([0, position], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        found.append(decode_reference(qkv[position][None], pages, tables, positions, rows, cos_sin, given, *gammas))
    # Transformers' norms and softmax compute in float32.
    assert torch.allclose(torch.cat(found), expected, rtol=1e-5, atol=2e-6)


def test_sinks_against_transformers():
    from transformers.masking_utils import sliding_window_causal_mask_function
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    given, generator = shape(4, 2, 32, window=9), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, 40, 32, generator=generator).double() for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups, module.training, module.sinks = 2, False, torch.tensor([-4.0, 0.0, 2.0, 7.0]).double()
    sees, places = sliding_window_causal_mask_function(9), list(torch.arange(40))
    mask = torch.tensor([[0.0 if bool(sees(0, 0, i, j)) else -1e30 for j in places] for i in places]).double()
    expected, _ = eager_attention_forward(module, q[None], k[None], v[None], mask[None, None], scaling=given.scale)
    found = attend(q.transpose(0, 1), k, v, 0, given, module.sinks)
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype):
    case = make_case(shape(), [0, 5, 128, 300], dtype, padding=2, shared=True)
    given = case.copy()
    out = decode_reference(*case.arguments[:6], case.shape)
    expected, _, _ = given.expected()
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert ((out[:4].double() - expected[:4]).norm(dim=1) < tolerance * expected[:4].norm(dim=1)).all()
