"""The choice of experts by one warp, against the reference router: ties, infinities, NaN, all counts of logits a lane."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.kernels.reference.route import RouterRule, choose_reference
from tests.kernels.sass import compile_kernel
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.chosen_experts import ChosenExperts, choose, weights_of
from lowbit.kernels.parts.gluon import gl, gluon


@dataclass(frozen=True)
class Choice(ChosenExperts):
    experts: int
    top_k: int
    normalize: bool

    @property
    def logits_of_lane(self) -> int:
        return -(-self.experts // 32)


@gluon.jit
def choice(experts, weights, logits, root, C: gl.constexpr):
    """experts int32 [32] and weights float32 [32] of logits float32 [C.experts] times `root`, in one warp."""
    COUNT: gl.constexpr = C.logits_of_lane
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    words = ()
    for i in gl.static_range(COUNT):
        word = gl.load(logits + gl.minimum(lane + 32 * i, C.experts - 1)).to(gl.int32, bitcast=True)
        words += (word,)
    expert, key = choose(words, lane, C.experts, C.top_k, C)
    gl.store(experts + lane, expert)
    gl.store(weights + lane, weights_of(words, key, root, lane, C.experts, C.top_k, C))


def chosen(logits, root, C):
    """(experts, weights) of the kernel."""
    pointers = {"experts": "*i32", "weights": "*fp32", "logits": "*fp32"}
    kernel = compile_kernel(choice, pointers | {"root": "fp32"}, C, list(pointers), 1, 90)
    experts, weights = torch.full((32,), -1, dtype=torch.int32), torch.full((32,), torch.nan)
    execute(kernel.ptx, kernel.shared_bytes, (experts, weights, logits, root), 1, 32)
    return experts[: C.top_k], weights[: C.top_k]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(2, 2), (8, 2), (32, 5), (40, 1), (100, 8), (128, 8), (256, 16)])
def test_choice(experts, top_k, normalize):
    generator = torch.Generator().manual_seed(experts)
    cases = {
        "random": torch.randn(experts, generator=generator) * 3,
        "ties": torch.randint(-1, 2, (experts,), generator=generator).float(),
        "equal": torch.zeros(experts).copysign(torch.randn(experts, generator=generator)),
        "negative": -torch.rand(experts, generator=generator) - 5,
    }
    for name, logits in cases.items():
        found, weights = chosen(logits, 0.5, Choice(experts, top_k, normalize))
        expected, factors = choose_reference(logits[None] * 0.5, None, RouterRule(top_k, normalize=normalize))
        assert torch.equal(found, expected[0]), name
        torch.testing.assert_close(weights, factors[0], msg=name)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_experts_exist_whatever_the_logits_are(value):
    """All experts of a token are distinct and exist, so that weights are read where there are some."""
    for logits in (torch.full((40,), value), torch.where(torch.arange(40) == 7, 1.0, value)):
        found, weights = chosen(logits, 1.0, Choice(40, 8, True))
        assert len(set(found.tolist())) == 8 and ((found >= 0) & (found < 40)).all()
    if value == -torch.inf:
        assert found[0] == 7 and weights.tolist() == [1.0] + [0.0] * 7
