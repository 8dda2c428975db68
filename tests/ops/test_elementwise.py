"""Embeddings, norms with residual, and gates on a CPU. They are bit-equal to Transformers' modules or compared with float64.
Also tests refusals."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from lowbit.nn.embedding import QuantEmbedding
from lowbit.ops.elementwise import (
    EmbeddingTable,
    activate,
    add_norm,
    add_norm_squares,
    embed_norm,
    embed_norm_squares,
    embed_rows,
    gate,
    gate2,
)
from lowbit.quantize import rtn

HALVES = [torch.float16, torch.bfloat16]
WIDTHS = [1, 64, 203, 576]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


def norm_of(family, weight, eps):
    module = family(weight.shape[0], eps=eps).to(weight.dtype)
    module.weight.data = weight.clone()
    return module


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("family", "offset"), [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_norms_are_transformers_to_the_bit(family, offset, width, dtype):
    h, delta = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    gamma, post_gamma = (random(width, dtype=dtype, seed=seed) for seed in (2, 3))
    norm, post = norm_of(family, gamma, 1e-5), norm_of(family, post_gamma, 1e-5)
    with torch.no_grad():
        assert torch.equal(add_norm(h.clone(), None, gamma, 1e-5, offset=offset), norm(h))
        for given, added in ((None, delta), (post_gamma, post(delta))):
            mine = h.clone()
            x = add_norm(mine, delta, gamma, 1e-5, offset=offset, post_gamma=given)
            assert torch.equal(mine, h + added), "the residual is added in place"
            assert torch.equal(x, norm(h + added))


def test_the_two_orders_of_rounding_differ():
    """Norms with the two orders of rounding give different results, so a test of one order fails with the other."""
    h, gamma = random(64, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16, seed=2)
    made = add_norm(h, None, gamma, 1e-5)
    values = h.double()
    normed = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    once = (normed * gamma.double()).to(torch.bfloat16)
    assert 0 < float((made != once).float().mean()) < 0.5


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_squares_and_products_make_the_norm(dtype, offset):
    """GEMM epilogues compute the norm from squares and products. Without the factor, x would exceed fp16's range."""
    h, delta = 1000 * random(6, 576, dtype=dtype), random(6, 576, dtype=dtype, seed=1)
    gamma = 100 + random(576, dtype=dtype, seed=2)
    mine, factor = h.clone(), 2.0**-8
    x, squares = add_norm_squares(mine, delta, gamma, offset=offset, factor=factor)
    assert torch.equal(mine, h + delta) and squares.shape == (1, 6) and x.dtype == dtype
    wanted = (h + delta).double()
    torch.testing.assert_close(squares[0].double(), wanted.square().sum(1), rtol=1e-6, atol=0)
    normed = x.double() / factor / (squares[0].double() / 576 + 1e-5).sqrt()[:, None]
    exact = wanted / (wanted.square().mean(1, keepdim=True) + 1e-5).sqrt() * (offset + gamma.double())
    torch.testing.assert_close(normed, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_embedding_is_transformers_to_the_bit(dtype):
    """Gemma multiplies by sqrt(H), rounded to the model's type first."""
    module = Gemma2TextScaledWordEmbedding(50, 203, None, embed_scale=math.sqrt(203)).to(dtype)
    tokens, rows = ids(4, 49, 7, 0), ids(3, 1, 1)
    with torch.no_grad():
        wanted = module(tokens[rows.long()].long())
        table = module.weight.detach()
        assert torch.equal(embed_rows(tokens, rows, table, dtype, scale=math.sqrt(203)), wanted)
        assert torch.equal(embed_rows(tokens, None, table, dtype), table[tokens.long()])
        gamma = random(203, dtype=dtype, seed=2)
        h, x = embed_norm(tokens, rows, table, gamma, 1e-6, dtype, scale=math.sqrt(203), offset=1.0)
        assert torch.equal(h, wanted) and torch.equal(x, norm_of(Gemma2RMSNorm, gamma, 1e-6)(wanted))
        h, x, squares = embed_norm_squares(tokens, rows, table, gamma, dtype, factor=0.5)
        again = add_norm_squares(table[[0, 49, 49]], None, gamma, factor=0.5)
        assert torch.equal(x, again[0]) and torch.equal(squares, again[1]) and torch.equal(h, table[[0, 49, 49]])


@pytest.mark.parametrize("dtype", HALVES)
def test_an_embedding_of_8_bits_is_the_librarys_own(dtype):
    """`EmbeddingTable` has the codes of a `w8a16` weight: its rows equal those of QuantEmbedding, within half a step of the
    weight.
    """
    weight = random(40, 203) * torch.logspace(-3, 1, 40)[:, None]
    weight[7] = 0
    q = rtn(weight, "w8a16")
    table = EmbeddingTable.from_quant_tensor(q)
    tokens = torch.arange(40, dtype=torch.int32)
    module = QuantEmbedding.from_quant_tensor(q, dtype)
    made = embed_rows(tokens, None, table, dtype)
    assert torch.equal(made, module(tokens)) and table.nbytes == 40 * 203 + 4 * 40
    assert torch.equal(table.codes, module.weight_packed), "8 bits are packed as they are"
    error = (embed_rows(tokens, None, table, torch.float32) - weight).abs()
    assert bool((error <= 0.5001 * table.scale[:, None]).all()) and not made[7].any()


def test_tables_that_are_none_are_refused():
    q = rtn(random(8, 32), "w4a16")
    with pytest.raises(ValueError, match="a plain w8a16 weight, got w4a16"):
        EmbeddingTable.from_quant_tensor(q)
    with pytest.raises(ValueError, match=r"contiguous codes uint8 \[V, H\], got torch.int8 \(8, 32\)"):
        EmbeddingTable(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8))
    with pytest.raises(ValueError, match="one floating scale each"):
        EmbeddingTable(torch.zeros(8, 32, dtype=torch.uint8), torch.ones(7))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_is_torch_to_the_bit(width, dtype):
    h, delta = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    norm = torch.nn.LayerNorm(width, eps=1e-5).to(dtype)
    norm.weight.data, norm.bias.data = (random(width, dtype=dtype, seed=seed) for seed in (2, 3))
    with torch.no_grad():
        gamma, bias = norm.weight.detach(), norm.bias.detach()
        mine = h.clone()
        assert torch.equal(add_norm(mine, delta, gamma, 1e-5, bias=bias), norm(h + delta))
        assert torch.equal(mine, h + delta), "the residual is added in place"
        wide = torch.nn.functional.layer_norm(h.float(), (width,), gamma.float(), bias.float(), 1e-5)
        assert torch.equal(add_norm(h, None, gamma.float(), 1e-5, bias=bias.float()), wide.to(dtype)), "weights of 32 bits"


@pytest.mark.parametrize("dtype", HALVES)
def test_an_embedding_with_positions_is_opts_to_the_bit(dtype):
    """Positions are given per slot or per prompt token. OPT's table has 2 padding rows before position 0."""
    words = torch.nn.Embedding(50, 203).to(dtype)
    places = OPTLearnedPositionalEmbedding(30, 203).to(dtype)
    gamma, bias = random(203, dtype=dtype, seed=2), random(203, dtype=dtype, seed=3)
    tokens, positions, rows = ids(4, 49, 7, 0), ids(29, 0, 5, 6), ids(3, 1, 1)
    for given in (None, rows):
        which = slice(None) if given is None else given.long()
        with torch.no_grad():
            wanted = words(tokens[which].long()) + places(None, position_ids=positions[which].long())
            h, x = embed_norm(
                tokens, given, words.weight.detach(), gamma, 1e-5, dtype, bias=bias, positions=positions,
                position_table=places.weight.detach()[2:],
            )  # fmt: skip
        assert torch.equal(h, wanted) and torch.equal(x, torch.nn.functional.layer_norm(wanted, (203,), gamma, bias, 1e-5))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("function", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu", "relu")])
def test_gates_are_transformers_to_the_bit(function, name, dtype):
    both = 3 * random(5, 2 * 203, dtype=dtype)
    wanted = ACT2FN[name](both[:, :203]) * both[:, 203:]
    assert torch.equal(gate(both, function), wanted)
    assert torch.equal(activate(both, function), ACT2FN[name](both)), "an MLP without a gate"
    first, second = (half[:, :200].unflatten(1, (-1, 8)) for half in both.chunk(2, dim=-1))
    assert torch.equal(gate(torch.stack([first, second], dim=2).flatten(1), function, alternate=True), wanted[:, :200])
    wide = random(5, 600, dtype=dtype, seed=4)
    assert torch.equal(gate2(both[:, :203], wide[:, 7:210], function), ACT2FN[name](both[:, :203]) * wide[:, 7:210])


def test_compilation_and_no_rows():
    h, delta, gamma = random(3, 64), random(3, 64, seed=1), random(64, seed=2)

    def step(h, delta, gamma):
        x = add_norm(h, delta, gamma, 1e-5)
        y, squares = add_norm_squares(h, None, gamma)
        z = add_norm(h, delta, gamma, 1e-5, bias=gamma)
        return x, gate(torch.cat([y, x], dim=-1), "silu"), squares, activate(z, "relu")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(h.clone(), delta, gamma), step(h.clone(), delta, gamma), strict=True):
        assert torch.equal(got, wanted)
    mine = h.clone()
    compiled(mine, delta, gamma)
    assert torch.equal(mine, h + delta + delta), "the mutation is declared"
    meta = embed_norm_squares(ids(1).to("meta"), None, torch.empty(4, 8, device="meta"), gamma[:8].to("meta"), torch.float32)
    assert [t.shape for t in meta] == [(1, 8), (1, 8), (1, 1)]
    assert add_norm(torch.ones(0, 64), torch.ones(0, 64), gamma, 1e-5).shape == (0, 64)
    assert embed_rows(ids(), None, gamma[None], torch.float32).shape == (0, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, g: add_norm(h[0], None, g, 1e-5), r"h is \[B, H\], got \(64,\)"),
        (lambda h, g: add_norm(h.int(), None, g, 1e-5), "rows are torch.float16, torch.bfloat16, torch.float32 on cpu"),
        (lambda h, g: add_norm(h, h[:1], g, 1e-5), r"delta is torch.float32 \(2, 64\) like h, got torch.float32 \(1, 64\)"),
        (lambda h, g: add_norm(h, None, g[:63], 1e-5), r"gamma is floating \[64\], got torch.float32 \(63,\)"),
        (lambda h, g: add_norm(h, None, g, 1e-5, post_gamma=g), "post_gamma normalises delta, and there is none"),
        (lambda h, g: add_norm(h.t().contiguous().t(), None, g, 1e-5), "h is contiguous, got strides"),
        (lambda h, g: gate(h[:, :63], "silu"), r"gate_up is \[B, 2 I\], got \(2, 63\)"),
        (lambda h, g: gate(h[:, :24], "silu", alternate=True), r"gate_up is \[B, 2 I\], I a multiple of 8, got \(2, 24\)"),
        (lambda h, g: gate(h, "tanh"), "functions are silu, gelu_tanh, relu, not 'tanh'"),
        (lambda h, g: activate(h[0], "relu"), r"gate is \[B, I\], got \(64,\)"),
        (lambda h, g: add_norm(h, None, g, 1e-5, bias=g[:3]), r"bias is floating \[64\], got torch.float32 \(3,\)"),
        (lambda h, g: add_norm(h, None, g, 1e-5, bias=g, offset=1.0), "LayerNorm, which has a bias, has neither an offset nor"),
        (lambda h, g: add_norm(h, h.clone(), g, 1e-5, bias=g, post_gamma=g), "has neither an offset nor post_gamma"),
        (
            lambda h, g: embed_norm(ids(1), None, h, g, 1e-5, h.dtype, positions=ids(1)),
            r"positions have a table of torch.float32 \[P, 64\] like the rows, got None",
        ),
        (
            lambda h, g: embed_norm(ids(1), None, h, g, 1e-5, h.dtype, positions=ids(1), position_table=h.half()),
            r"got \(torch.float16, \(2, 64\)\)",
        ),
        (lambda h, g: gate2(h, h[:1], "silu"), "up is .* like gate"),
        (lambda h, g: embed_rows(ids(1).long(), None, h, h.dtype), r"tokens are int32 \[..\], got torch.int64"),
        (lambda h, g: embed_rows(ids(1), None, h, torch.float16), "the table is torch.float16 like the rows"),
    ],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(2, 64), torch.ones(64))
