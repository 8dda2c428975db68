"""Routing of tokens to experts. Results equal those of Transformers' routers, and every slot is in one tile. Also tests experts
of other ranks, ties and NaN."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch

from lowbit.ops.route import RouterRule, Routing, group, route, route_tokens

gpu = pytest.mark.gpu

V3 = {"score": "sigmoid", "normalize": True, "epsilon": 1e-20, "groups": 4, "top_groups": 2, "group_score": "top2"}
OSS = {"softmax_over_selected": True, "bias_use": "logits"}

ROUTERS = {
    "mixtral": ("MixtralTopKRouter", "MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}, {"normalize": True}),
    "qwen2_moe": (
        "Qwen2MoeTopKRouter", "Qwen2MoeConfig", {"num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False}, {},
    ),
    "qwen3_moe": (
        "Qwen3MoeTopKRouter", "Qwen3MoeConfig", {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        {"normalize": True},
    ),
    "olmoe": (
        "OlmoeTopKRouter", "OlmoeConfig", {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}, {},
    ),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig", {"num_local_experts": 32, "num_experts_per_tok": 4}, OSS),
    "deepseek_v2": (
        "DeepseekV2TopkRouter", "DeepseekV2Config",
        {
            "n_routed_experts": 40, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
            "topk_method": "group_limited_greedy",
        },
        {"groups": 8, "top_groups": 3, "scale": 16.0},
    ),
    "deepseek_v2 greedy": (
        "DeepseekV2TopkRouter", "DeepseekV2Config",
        {"n_routed_experts": 64, "num_experts_per_tok": 6, "topk_method": "greedy", "routed_scaling_factor": 1.0}, {},
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter", "DeepseekV3Config",
        {"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {**V3, "scale": 2.5},
    ),
    "glm4_moe": (
        "Glm4MoeTopkRouter", "Glm4MoeConfig",
        {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        {"score": "sigmoid", "normalize": True, "epsilon": 1e-20},
    ),
}  # fmt: skip


def router_of(name):
    """(router module, RouterRule, bias) of a small random Transformers router."""
    cls, config, options, rule = ROUTERS[name]
    package = f"transformers.models.{name.split()[0]}"
    modeling = importlib.import_module(f"{package}.modeling_{name.split()[0]}")
    made = getattr(importlib.import_module(package), config)(hidden_size=64, **options)
    router = getattr(modeling, cls)(made).requires_grad_(False)
    generator = torch.Generator().manual_seed(len(name))
    router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    bias = None
    for field in ("bias", "e_score_correction_bias"):
        if hasattr(router, field):
            bias = getattr(router, field)
            bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    if "routed_scaling_factor" in options or hasattr(router, "routed_scaling_factor"):
        rule = {**rule, "scale": router.routed_scaling_factor}
    return router, RouterRule(options["num_experts_per_tok"], **rule), bias


@pytest.mark.parametrize("name", ROUTERS)
def test_the_routers_of_transformers(name):
    """Experts equal those of Transformers; weights agree within float32 rounding."""
    router, rule, bias = router_of(name)
    x = torch.randn(97, 64, generator=torch.Generator().manual_seed(1)) / 5
    _, weights, experts = router(x)
    made = route(x @ router.weight.T, rule, bias, tile_rows=16)
    ours, theirs = made.experts.long().sort(-1), experts.sort(-1)
    assert torch.equal(ours.values, theirs.values)
    wanted = weights.gather(1, theirs.indices)
    torch.testing.assert_close(made.weights.gather(1, ours.indices), wanted, rtol=2e-6, atol=1e-7)


def brute(logits, bias, rule):
    """Experts and weights in float64 with Python's sort. If the choice compares scores, they are rounded to float32 first."""
    made = []
    for row in logits.double():
        x = row + bias.double() if bias is not None and rule.bias_use == "logits" else row
        scores = x.sigmoid() if rule.score == "sigmoid" else x.softmax(0)
        choice = scores + (bias.double() if bias is not None and rule.bias_use == "choice" else 0)
        size = len(row) // rule.groups

        def of_group(g, choice=choice, size=size):
            best = sorted(choice[g * size : (g + 1) * size].tolist(), reverse=True)
            return best[0] if rule.group_score == "max" else sum(best[:2])

        groups = sorted(range(rule.groups), key=lambda g: -of_group(g))[: rule.top_groups]
        inside = [e for e in range(len(row)) if e // size in groups]
        experts = sorted(inside, key=lambda e: -float(choice[e]))[: rule.top_k]
        weights = x[experts].softmax(0) if rule.softmax_over_selected else scores[experts]
        if rule.normalize:
            weights = weights / (weights.sum() + rule.epsilon)
        made.append((experts, weights * rule.scale))
    return torch.tensor([e for e, _ in made], dtype=torch.int32), torch.stack([w for _, w in made])


RULES = [
    (RouterRule(2), 8),
    (RouterRule(1, normalize=True), 1),
    (RouterRule(4, normalize=True, scale=0.5), 60),
    (RouterRule(8, normalize=True, epsilon=1e-20), 128),
    (RouterRule(4, **OSS), 32),
    (RouterRule(6, groups=8, top_groups=3, scale=16.0), 160),
    (RouterRule(8, **V3), 64),
    (RouterRule(5, groups=3, top_groups=2, group_score="top2"), 21),
    (RouterRule(3, score="sigmoid", groups=5, top_groups=5), 10),
    (RouterRule(2, score="sigmoid", bias_use="logits"), 16),
]


@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_against_brute_force(rule, experts):
    generator = torch.Generator().manual_seed(experts)
    logits, bias = torch.randn(33, experts, generator=generator) * 2, torch.randn(experts, generator=generator) * 0.2
    for given in (None, bias):
        made = route(logits, rule, given, tile_rows=4)
        wanted, weights = brute(logits, given, rule)
        assert torch.equal(made.experts, wanted)
        torch.testing.assert_close(made.weights.double(), weights, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_logits_are_widened_first(dtype):
    logits = torch.randn(9, 64).to(dtype)
    rule = RouterRule(8, normalize=True)
    made, wide = route(logits, rule, tile_rows=8), route(logits.float(), rule, tile_rows=8)
    assert torch.equal(made.weights, wide.weights) and torch.equal(made.experts, wide.experts)
    gap = torch.randn(9, 80).to(dtype)[:, :64]
    assert torch.equal(route(gap, rule, tile_rows=8).experts, route(gap.contiguous(), rule, tile_rows=8).experts)


def assert_sorted(r: Routing, tokens, top_k, experts, tile_rows):
    """Checks every statement of Routing's docstring by counting."""
    flat = r.experts.flatten().tolist()
    assert r.experts.shape == r.weights.shape == (tokens, top_k) and r.tile_rows == tile_rows
    present = [s for s, e in enumerate(flat) if e >= 0]
    wanted = sorted(present, key=lambda s: (flat[s], s))
    assert r.order.tolist() == wanted + [-1] * (tokens * top_k - len(wanted))
    assert r.offsets.tolist() == [sum(0 <= e < i for e in flat) for i in range(experts + 1)]
    assert len(r.tiles) == min(tokens * top_k, experts) + tokens * top_k // tile_rows
    tiles = []
    for e in range(experts):
        begin, end = r.offsets[e : e + 2].tolist()
        tiles += [(e, first, min(tile_rows, end - first)) for first in range(begin, end, tile_rows)]
    assert r.tile_count.tolist() == [len(tiles)]
    assert list(map(tuple, r.tiles.tolist())) == tiles + [(0, 0, 0)] * (len(r.tiles) - len(tiles))
    assert r.expert_count == experts and r.top_k == top_k
    tensors = (r.experts, r.order, r.offsets, r.tiles, r.tile_count)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors) and r.weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile_rows"),
    [
        (0, 2, 8, 8),
        (1, 1, 1, 1),
        (1, 8, 128, 8),
        (3, 4, 60, 1),
        (64, 8, 128, 16),
        (65, 2, 8, 16),
        (300, 6, 12, 64),
        (40, 3, 3, 7),
    ],
)
def test_each_slot_is_in_one_tile(tokens, top_k, experts, tile_rows):
    generator = torch.Generator().manual_seed(tokens)
    made = route(torch.randn(tokens, experts, generator=generator), RouterRule(top_k), tile_rows=tile_rows)
    assert_sorted(made, tokens, top_k, experts, tile_rows)
    given = torch.randint(-1, experts + 3, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    for dtype, kind in ((torch.int64, torch.float64), (torch.int32, torch.bfloat16)):
        made = group(given.to(dtype), weights.to(kind), experts, tile_rows=tile_rows)
        assert_sorted(made, tokens, top_k, experts, tile_rows)
        here = (given >= 0) & (given < experts)
        assert torch.equal(made.experts, torch.where(here, given, -1).int())
        assert torch.equal(made.weights, torch.where(here, weights.to(kind).float(), 0.0))


def test_all_tokens_on_one_expert_and_none_here():
    assert_sorted(group(torch.full((50, 1), 2), torch.ones(50, 1), 4, tile_rows=16), 50, 1, 4, 16)
    none = group(torch.full((5, 2), -1), torch.full((5, 2), math.nan), 4, tile_rows=16)
    assert_sorted(none, 5, 2, 4, 16)
    assert not none.weights.any() and not none.tiles.any(), "weights of absent slots are 0, whatever was given"


def test_the_lower_index_wins_ties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0, -0.0, 0.0, -0.0, -1.0, -0.0]])
    made = route(logits, RouterRule(4), tile_rows=8)
    assert made.experts.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    grouped = route(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0]]), RouterRule(2, groups=3, top_groups=2), tile_rows=8)
    assert grouped.experts.tolist() == [[1, 2]], "of groups too"


def test_a_choice_by_logits_is_exact():
    """The choice compares logits exactly, even if their softmax scores or sigmoids are equal in float32."""
    close = torch.tensor([[1e-6, 2e-6, 30.0]])
    assert route(close, RouterRule(3), tile_rows=8).experts.tolist() == [[2, 1, 0]]
    far = torch.tensor([[40.0, 41.0, 0.0]])
    assert route(far, RouterRule(2, score="sigmoid"), tile_rows=8).experts.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "rule", [RouterRule(4), RouterRule(4, **OSS), RouterRule(4, score="sigmoid"), RouterRule(4, **V3)], ids=str
)
def test_nan_shows_in_the_weights_alone(rule):
    bias = torch.linspace(-0.1, 0.1, 16)
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    clean = route(logits, rule, bias, tile_rows=8)
    logits[1, 3], logits[2], logits[3, :14] = math.nan, math.nan, math.nan
    made = route(logits, rule, bias, tile_rows=8)
    assert made.weights.isnan().all(1).tolist() == [False, True, True, True, False]
    for t, row in enumerate(made.experts.tolist()):
        assert len(set(row)) == 4 and 0 <= min(row) <= max(row) < 16
        if t in (0, 4):
            assert row == clean.experts[t].tolist()
    assert 3 not in made.experts[1]


def test_infinities():
    logits = torch.tensor([[math.inf, 0.0, 1.0], [-math.inf, -math.inf, -math.inf], [-math.inf, 5.0, -math.inf]])
    for rule in (RouterRule(2), RouterRule(2, normalize=True), RouterRule(2, softmax_over_selected=True)):
        made = route(logits, rule, tile_rows=8)
        assert made.experts.tolist() == [[0, 2], [0, 1], [1, 0]]
        assert made.weights[:2].isnan().all() and made.weights[2].tolist() == [1, 0]
    made = route(logits, RouterRule(2, score="sigmoid"), tile_rows=8)
    assert made.weights.isfinite().all() and made.weights[0, 0] == 1 and not made.weights[1].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RouterRule(0), "top_k is 1 or more"),
        (lambda: RouterRule(2, score="tanh"), "score is one of softmax, sigmoid, got 'tanh'"),
        (lambda: RouterRule(2, groups=4, top_groups=5), "top_groups is 1 to groups"),
        (lambda: RouterRule(2, epsilon=math.nan), "epsilon is 0 or more"),
        (lambda: RouterRule(2, score="sigmoid", softmax_over_selected=True), "takes score softmax without normalize"),
        (lambda: route(torch.ones(2, 8), RouterRule(9), tile_rows=8), "top_k 9 is more than the 8 experts"),
        (lambda: route(torch.ones(2, 9), RouterRule(1, groups=2), tile_rows=8), "9 experts are not 2 groups of one size"),
        (lambda: route(torch.ones(2, 8), RouterRule(5, groups=2), tile_rows=8), "more than the 4 experts to choose from"),
        (
            lambda: route(torch.ones(2, 4), RouterRule(1, groups=4, group_score="top2"), tile_rows=8),
            "a group of one expert has no two best ones",
        ),
        (lambda: route(torch.ones(2, 8).double(), RouterRule(1), tile_rows=8), "logits are fp16, bf16 or fp32"),
        (lambda: route(torch.ones(8, 8).T[:, ::2], RouterRule(1), tile_rows=8), "without gaps in a row"),
        (lambda: route(torch.ones(2, 8), RouterRule(1), torch.ones(7), tile_rows=8), r"bias is contiguous float32 \[8\]"),
        (lambda: route(torch.ones(2, 8), RouterRule(1), tile_rows=0), "tile_rows is 1 or more, got 0"),
        (lambda: route(torch.ones(2, 1025), RouterRule(1), tile_rows=8), "1 to 1024 experts, got 1025"),
        (
            lambda: route_tokens(torch.ones(2, 8).half(), torch.ones(4, 9).half(), RouterRule(1), tile_rows=8),
            r"x is \[T, K\] and router \[E, K\], got \(2, 8\) and \(4, 9\)",
        ),
        (
            lambda: route_tokens(torch.ones(2, 8).half(), torch.ones(4, 8), RouterRule(1), tile_rows=8),
            "both fp16 or both bf16, got torch.float16 and torch.float32",
        ),
        (
            lambda: route_tokens(torch.ones(2, 8).half(), torch.ones(8, 4).half().T, RouterRule(1), tile_rows=8),
            "router is contiguous; call",
        ),
        (
            lambda: route_tokens(torch.ones(2, 8).half(), torch.ones(4, 8).half(), RouterRule(5), tile_rows=8),
            "top_k 5 is more than the 4 experts",
        ),
        (
            lambda: route(torch.empty(1, 8).expand(1 << 18, 8), RouterRule(8), tile_rows=8),
            "is below 2097152, got 2097152; route parts",
        ),
        (lambda: group(torch.ones(2, 2), torch.ones(2, 2), 4, tile_rows=8), "experts are int32 or int64"),
        (lambda: group(torch.ones(2, 2).int(), torch.ones(2, 3), 4, tile_rows=8), "like experts, got"),
        (lambda: group(torch.ones(4, 2).int().T, torch.ones(4, 2).T, 4, tile_rows=8), "call .contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("tokens", [0, 1, 5, 20])
def test_tokens_are_multiplied_by_the_router(tokens):
    """The product of tokens and router keeps float32 logits."""
    x, router = torch.randn(tokens, 96).bfloat16(), torch.randn(24, 96).bfloat16()
    rule, bias = RouterRule(4, **OSS), torch.linspace(-0.1, 0.1, 24)
    made = route_tokens(x, router, rule, bias, tile_rows=8)
    wanted = route(x.float() @ router.float().T, rule, bias, tile_rows=8)
    assert torch.equal(made.experts, wanted.experts) and torch.equal(made.weights, wanted.weights)
    assert torch.equal(made.tiles, wanted.tiles)
    assert_sorted(made, tokens, 4, 24, 8)


def test_shapes_without_data():
    """The operators pass torch's opcheck: schemas and fake tensors."""
    rule = RouterRule(8, **V3)
    logits, bias = torch.randn(5, 64), torch.randn(64)
    arguments = (logits, bias, 8, "sigmoid", True, 1e-20, 4, 2, "top2", "choice", 1.0, False, 16)
    torch.library.opcheck(torch.ops.lowbit.route.default, arguments, test_utils=("test_schema", "test_faketensor"))
    x, router = torch.randn(5, 32).half(), torch.randn(64, 32).half()
    fused = (x, router, *arguments[1:])
    torch.library.opcheck(torch.ops.lowbit.route_tokens.default, fused, test_utils=("test_schema", "test_faketensor"))
    given = torch.randint(0, 64, (5, 8)), torch.rand(5, 8), 64, 16
    torch.library.opcheck(torch.ops.lowbit.group.default, given, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(torch.ops.lowbit.route(*arguments)[0], route(logits, rule, bias, tile_rows=16).experts)


def test_rules_are_passed_as_they_are():
    """Every field of a rule reaches the operator."""
    base = RouterRule(4, groups=4, top_groups=2)
    logits, bias = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), torch.linspace(-0.1, 0.1, 16)
    changes = [
        {"top_k": 3}, {"score": "sigmoid"}, {"normalize": True}, {"normalize": True, "epsilon": 0.5}, {"groups": 8},
        {"top_groups": 1}, {"group_score": "top2"}, {"bias_use": "logits"}, {"scale": 2.0}, {"softmax_over_selected": True},
    ]  # fmt: skip
    seen = [route(logits, replace(base, **change), bias, tile_rows=8) for change in ({}, *changes)]
    keys = {(str(r.experts.tolist()), str(r.weights.tolist())) for r in seen}
    assert len(keys) == len(seen)


def on_gpu(logits, bias, rule, tile_rows):
    made = route(logits.cuda(), rule, None if bias is None else bias.cuda(), tile_rows=tile_rows)
    return Routing(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in vars(made).values()))


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_on_a_gpu_as_on_a_cpu(rule, experts, dtype):
    """Results on a GPU and on a CPU are equal, except for choices between scores that rounding makes equal."""
    for tokens in (1, 5, 16, 64, 65, 700):
        generator = torch.Generator().manual_seed(tokens)
        logits = (torch.randn(tokens, experts, generator=generator) * 2).to(dtype)
        for bias in (None, torch.randn(experts, generator=generator) * 0.2):
            made, wanted = on_gpu(logits, bias, rule, 16), route(logits, rule, bias, tile_rows=16)
            assert_sorted(made, tokens, rule.top_k, experts, 16)
            same = (made.experts == wanted.experts).all(1)
            if rule.chooses_by_logit(bias is not None):
                assert same.all()
            assert same.sum() >= tokens - 1 - tokens // 100
            torch.testing.assert_close(made.weights[same], wanted.weights[same], rtol=1e-5, atol=1e-7)


@gpu
def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(2000, 128, device="cuda")
    for rule in (RouterRule(8), RouterRule(8, normalize=True), RouterRule(8, **V3)):
        bias = torch.randn(128, device="cuda") * 0.1
        whole = route(logits, rule, bias, tile_rows=16)
        for count in (1, 3, 16, 40, 64, 65, 999):
            part = route(logits[7 : 7 + count], rule, bias, tile_rows=16)
            assert torch.equal(part.experts, whole.experts[7 : 7 + count])
            assert torch.equal(part.weights, whole.weights[7 : 7 + count])


@gpu
def test_tokens_are_multiplied_on_a_gpu_as_on_a_cpu():
    """Results are equal, except for choices between logits that differ only by the order of additions. Two runs, and runs with
    other tokens in the batch, give equal bits."""
    for k, experts, rule in ((2048, 128, RouterRule(8, normalize=True)), (2880, 32, RouterRule(4, **OSS))):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(40, k, generator=generator).bfloat16()
        router, bias = torch.randn(experts, k, generator=generator).bfloat16() / 16, torch.linspace(-0.1, 0.1, experts)
        whole = route_tokens(x[:16].cuda(), router.cuda(), rule, bias.cuda(), tile_rows=8)
        for tokens in (1, 2, 4, 5, 8, 16, 17, 40):
            wanted = route_tokens(x[:tokens], router, rule, bias, tile_rows=8)
            made, again = (route_tokens(x[:tokens].cuda(), router.cuda(), rule, bias.cuda(), tile_rows=8) for _ in range(2))
            assert torch.equal(made.weights, again.weights) and torch.equal(made.order, again.order)
            same = (made.experts.cpu() == wanted.experts).all(1)
            assert same.sum() >= tokens - 1
            torch.testing.assert_close(made.weights.cpu()[same], wanted.weights[same], rtol=1e-4, atol=1e-6)
            if tokens <= 16:
                assert torch.equal(made.weights, whole.weights[:tokens]) and torch.equal(made.experts, whole.experts[:tokens])


@gpu
def test_in_a_graph_with_other_kernels():
    """The previous kernel writes the logits, the next one reads the routing."""
    for tokens, experts in ((1, 128), (16, 128), (64, 256), (1024, 64)):
        logits = torch.randn(tokens, experts, device="cuda")
        rule = RouterRule(4, normalize=True)
        route(logits, rule, tile_rows=16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = []
            for i in range(5):
                made = route(logits * (1 if i % 2 else -1), rule, tile_rows=16)
                again = group(made.experts, made.weights, experts, tile_rows=16)
                seen.append([t + 0 for r in (made, again) for t in vars(r).values() if isinstance(t, torch.Tensor)])
        for _ in range(3):
            logits.normal_()
            for tensors in seen:
                for t in tensors:
                    t.fill_(-7)
            graph.replay()
            for i, tensors in enumerate(seen):
                wanted = route(logits * (1 if i % 2 else -1), rule, tile_rows=16)
                expected = [t for t in vars(wanted).values() if isinstance(t, torch.Tensor)] * 2
                assert all(torch.equal(t, w) for t, w in zip(tensors, expected, strict=True))


@gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 128, 8192, 65536])
def test_groups_of_another_router(tokens):
    """Given choices include experts of other ranks and an expert twice for a token. Two runs give equal bits."""
    for top_k, experts in ((8, 128), (2, 8), (10, 512)):
        given = torch.randint(-1, experts + 9, (tokens, top_k))
        weights = torch.rand(tokens, top_k).half()
        wanted = group(given, weights, experts, tile_rows=64)
        for _ in range(2):
            made = group(given.cuda(), weights.cuda(), experts, tile_rows=64)
            for one, other in zip(vars(made).values(), vars(wanted).values(), strict=True):
                assert torch.equal(one.cpu(), other) if isinstance(one, torch.Tensor) else one == other
