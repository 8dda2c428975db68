"""Norm and RoPE of heads as kernels compute them, in Triton's interpreter, against their formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.kernels.choose.attention import AttentionShape
from tests.kernels.interpreter import interpreted

pytest.importorskip("triton", reason="the functions are written in Triton")

import triton
import triton.language as tl

from lowbit.kernels.parts.rotary import angles, gammas, normed, pairs, turned


@dataclass(frozen=True)
class Config:
    shape: AttentionShape
    heads: int = 4


@triton.jit
def norm_and_turn(out, x, cos_sin, gamma, positions, C: tl.constexpr, TWICE: tl.constexpr):
    position = tl.load(positions)
    d, head = tl.arange(0, C.shape.lanes), tl.arange(0, C.heads)[:, None]
    heads, others = pairs(x + head * C.shape.head_dim, head >= 0, d, C, TWICE)
    cos, sin = angles(cos_sin, position, d, C)
    heads, others = normed(heads, others, gammas(gamma, d, C), C)
    heads = turned(heads, others, cos[None, :], sin[None, :], C)
    tl.store(out + head * C.shape.lanes + d[None, :], heads)


def check(head_dim, rotary_dim):
    shape = AttentionShape(4, 4, head_dim, 1.0, rotary_dim, norm_eps=1e-5, norm_offset=1.0)
    generator = torch.Generator().manual_seed(head_dim)
    x, gamma = torch.randn(4, head_dim, generator=generator), torch.randn(head_dim, generator=generator)
    angle = torch.rand(9, rotary_dim // 2, generator=generator) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    found = []
    for twice in (False, True):
        found.append(torch.full((4, shape.lanes), torch.nan))
        norm_and_turn[(1,)](found[-1], x, cos_sin, gamma, torch.tensor([7]), Config(shape), twice)
    out = found[0]
    assert torch.equal(*found)
    wide = x.double() / (x.double().square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * (1 + gamma.double())
    pairs = torch.complex(wide[:, : rotary_dim // 2], wide[:, rotary_dim // 2 : rotary_dim])
    pairs = pairs * torch.polar(torch.ones_like(angle[7]), angle[7])
    expected = torch.cat([pairs.real, pairs.imag, wide[:, rotary_dim:]], dim=1)
    assert torch.allclose(out[:, :head_dim].double(), expected, atol=1e-5)
    assert not out[:, head_dim:].any(), "lanes beyond a head stay zero, so that they add nothing to q . k"


def check_shapes():
    for shape in ((64, 64), (80, 20), (96, 96), (128, 0), (32, 16)):
        check(*shape)


def test_heads_are_normed_and_turned():
    interpreted(check_shapes)
