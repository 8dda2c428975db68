"""GPTQ equals slow optimal brain quantization in float64. That takes one column at a time, and updates the inverse Hessian of
the remaining columns by elimination, without a factorization."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from lowbit.formats import PerChannel, PerGroup, Scheme, ZeroPoint, decode, encode, parse_scheme
from lowbit.quantize import gptq, rtn
from lowbit.quantize.gptq import inverse_factor
from tests.quantize.data import inputs, weights


def one_column(w, scale, zero, scheme):
    """Codes and values of one column for given scales and zeros."""
    scale = scale.double()
    if zero is None:
        codes = encode(w / scale, scheme.weight)
        return codes, decode(codes, scheme.weight).double() * scale
    if zero.dtype == torch.uint8:
        codes = (w / scale + zero.double()).round().clamp(0, scheme.weight.max)
        return codes.to(torch.uint8), (codes - zero.double()) * scale
    codes = ((w - zero.double()) / scale).round().clamp(0, scheme.weight.max)
    return codes.to(torch.uint8), codes * scale + zero.double()


def costs(hessian, order):
    """Returns the cost of each channel's squared error: 1 / its diagonal element of the inverse Hessian at the time when the
    channel is quantized."""
    inverse, out = torch.linalg.inv(hessian), torch.zeros(len(hessian), dtype=torch.float64)
    for j in order:
        out[j] = 1 / inverse[j, j]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1, :] / inverse[j, j]
    return out


def scales(w, scheme, search, cost):
    """Returns scale and zero [N] of one group. For every clip factor, the scale is that of the clipped weights. The factor with
    the smallest error of the unclipped weights wins."""
    grouped = isinstance(scheme.granularity, PerGroup)
    alone = Scheme(scheme.weight, None, PerGroup(w.shape[1]) if grouped else PerChannel(), scheme.zero)
    tried = []
    for factor in [1.0] if search == "max" else [1.0 - 0.02 * i for i in range(31)]:
        low, high = w.amin(1, keepdim=True) * factor, w.amax(1, keepdim=True) * factor
        if scheme.zero is ZeroPoint.NONE:
            low, high = torch.minimum(low, -high), torch.maximum(high, -low)
        q = rtn(w.clamp(low, high), alone)
        _, rounded = one_column(w.double(), q.scale, q.zero, scheme)
        error = ((rounded - w).square() * (cost if search == "loss" else 1)).sum(1)
        tried.append((error, q.scale[:, 0], q.zero if q.zero is None else q.zero[:, 0]))
    best = torch.stack([error for error, _, _ in tried]).argmin(0)
    take = lambda i: torch.stack([row[i] for row in tried]).gather(0, best[None])[0]  # noqa: E731
    return take(1), None if scheme.zero is ZeroPoint.NONE else take(2)


def textbook(weight, hessian, name, act_order, static_groups, search, damping=0.05):
    """Codes [N, K] in the order of x's channels, and the weights that they represent."""
    scheme = parse_scheme(name)
    k = weight.shape[1]
    size = getattr(scheme.granularity, "size", k)
    h = hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(k)
    cost = costs(h, order.tolist()).float()
    inverse = torch.linalg.inv(h)
    w = weight.double().clone()
    codes, result = torch.zeros(weight.shape, dtype=torch.uint8), torch.zeros_like(w)
    left = order.tolist()
    members = {}
    for step, j in enumerate(order.tolist()):
        group = j // size if static_groups else step // size
        if group not in members:
            columns = list(range(group * size, min((group + 1) * size, k)))
            columns = columns if static_groups else order[columns].tolist()
            source = weight if static_groups else w.float()
            members[group] = scales(source[:, columns], scheme, search, cost[columns])
        codes[:, j], result[:, j] = one_column(w[:, j], *members[group], scheme)
        error = (w[:, j] - result[:, j]) / inverse[j, j]
        left.remove(j)
        w[:, left] -= error[:, None] * inverse[j, left]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1, :] / inverse[j, j]
    return codes, result


SCHEMES = [
    "w4a16_g16",
    "w4a16_pc",
    "w3a16_g48_z",
    "w4a16_g16_fz",
    "w2a16_g32_z",
    "w8a16",
    "w6e3m2a16",
    "w4e2m1a16_g16",
    "w5e2m2a16",
]


@pytest.mark.parametrize(
    ("name", "act_order", "static_groups", "search"),
    # Scales are searched for the weights at that time, which depend on the order. Not all combinations run: each scheme runs
    # with every order and every search, and each order with every search.
    [
        (name, *order, ("max", "mse", "loss")[(i + j) % 3])
        for i, name in enumerate(SCHEMES)
        for j, order in enumerate(itertools.product((False, True), repeat=2))
    ],
)
def test_equals_the_textbook(name, act_order, static_groups, search, monkeypatch):
    monkeypatch.setattr(sys.modules["lowbit.quantize.gptq"], "BLOCK", 32)  # several blocks, groups inside and across them
    n, k = 7, 112
    x, w = inputs(k), weights(n, k)
    q = gptq(w, x.T @ x, name, act_order=act_order, static_groups=static_groups, search=search)
    codes, values = textbook(w, x.T @ x, name, act_order, static_groups, search)
    own = (
        q.codes
        if q.input_transform.order is None
        else torch.empty_like(q.codes).index_copy_(1, q.input_transform.order.long(), q.codes)
    )
    assert torch.equal(own, codes)
    torch.testing.assert_close(q.dequantize(torch.float64), values, rtol=1e-6, atol=1e-6)
    one_scale = name in ("w4a16_pc", "w8a16", "w6e3m2a16", "w5e2m2a16")
    assert (q.input_transform.order is not None) == (act_order and not static_groups and not one_scale)


def test_the_size_of_blocks_changes_nothing(monkeypatch):
    x, w = inputs(112), weights(7, 112)
    wanted = gptq(w, x.T @ x, "w4a16_g16")
    for block in (16, 20, 64, 200):
        monkeypatch.setattr(sys.modules["lowbit.quantize.gptq"], "BLOCK", block)
        q = gptq(w, x.T @ x, "w4a16_g16")
        assert torch.equal(q.codes, wanted.codes) and torch.equal(q.scale, wanted.scale)


@pytest.mark.parametrize("name", [*SCHEMES, "w4a16_b8x32", "w4a16_t", "w8e4m3a16_b128x128", "w4a16_g100"])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_outputs_are_nearer_than_with_rounding(name, act_order):
    x, w = inputs(192, 800), weights(40, 192)
    error = lambda q: ((q.dequantize() - w) @ x.T).square().sum()  # noqa: E731
    mine = error(gptq(w, x.T @ x, name, act_order=act_order))
    assert mine < 0.9 * error(rtn(w, name, search="mse")), "inputs are correlated: there is much to make up for"


def test_factor_of_the_inverse():
    x = inputs(40)
    u = inverse_factor(x.T @ x, 0.01)
    h = (x.T @ x).double()
    h += 0.01 * h.diagonal().mean() * torch.eye(40)
    torch.testing.assert_close(u.T @ u @ h, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-6)
    assert torch.equal(u, u.triu())


@pytest.mark.parametrize("act_order", [False, True])
def test_channels_without_input_are_rounded(act_order):
    x, w = inputs(64), weights(6, 64)
    x[:, [3, 40]] = 0
    q = gptq(w, x.T @ x, "w8a16", act_order=act_order)
    step = q.scale.float()
    assert ((q.dequantize() - w)[:, [3, 40]].abs() <= 0.5001 * step).all()
    assert torch.equal(gptq(w, torch.zeros(64, 64), "w8a16").codes, rtn(w, "w8a16", search="mse").codes)


def test_few_inputs_and_other_dtypes():
    x, w = inputs(96, rows=5), weights(6, 96)
    q = gptq(w.half(), (x.T @ x).half(), "w4a16_g32")
    assert q.dequantize().isfinite().all() and q.scale.dtype == torch.float16
    again = gptq(w.half(), (x.T @ x).half(), "w4a16_g32")
    assert torch.equal(q.codes, again.codes)


def test_what_cannot_be_done_is_said():
    w = weights(4, 8)
    with pytest.raises(ValueError, match=r"is a finite \[8, 8\], got \(4, 4\)"):
        gptq(w, torch.eye(4), "w8a16")
    with pytest.raises(ValueError, match="not positive definite with damping 0.05"):
        gptq(w, torch.eye(8) - 3 * torch.ones(8, 8).triu(1) - 3 * torch.ones(8, 8).tril(-1), "w8a16")
    w[0, 0] = torch.nan
    with pytest.raises(ValueError, match="1 of 32 weights are not finite"):
        gptq(w, torch.eye(8), "w8a16")
