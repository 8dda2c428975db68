"""The kernels that route tokens to experts. Results equal the reference; without a GPU they run in Triton's interpreter. Also
tests their machine code."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.route import RouterRule, RoutingTensors, group_reference, route_reference
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan, loops_to_loaded_bounds

pytest.importorskip("triton", reason="the kernels are written in Triton")

from lowbit.kernels.elementwise import route as kernel_module
from lowbit.kernels.elementwise.route import GroupPlan, RoutePlan, RouteTokensPlan

gpu = pytest.mark.gpu

V3 = {"score": "sigmoid", "normalize": True, "epsilon": 1e-20, "groups": 8, "top_groups": 4, "group_score": "top2"}
OSS = {"softmax_over_selected": True, "bias_use": "logits"}
QWEN = RouterRule(8, normalize=True)


def logits_of(tokens, experts, dtype=torch.float32, gap=0, device="cpu"):
    """Random logits with `gap` elements between rows. One row has ties, one a NaN, one infinities."""
    generator = torch.Generator().manual_seed(tokens * experts)
    wide = (torch.randn(tokens, experts + gap, generator=generator) * 2).to(dtype)
    wide[:, experts:] = math.nan
    if tokens > 4 and experts > 4:
        wide[1, :experts] = wide[1, :experts].round()
        wide[2, experts // 2], wide[3, 1], wide[3, 2] = math.nan, -math.inf, -math.inf
        wide[4, :experts] = 0.0
    return wide.to(device)[:, :experts]


def poison(device):
    """Fills the memory that the allocator returns next."""
    for size in (1, 64, 1024, 1 << 16):
        torch.full((size,), -77, dtype=torch.int32, device=device)


def assert_same(made, wanted, of):
    """Asserts that integers equal the reference and that weights agree within rounding."""
    for name, one, other in zip(RoutingTensors._fields, made, wanted, strict=True):
        if name != "weights":
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other), (name, of, one, other)
    torch.testing.assert_close(made.weights.cpu(), wanted.weights, rtol=4e-6, atol=1e-7, equal_nan=True)


def check_route(logits, rule, bias=None, tile_rows=8, machine=None):
    machine = machine or (machine_of("cuda") if logits.is_cuda else typical_machine(80))
    plan = RoutePlan(*logits.shape, rule, bias is not None, tile_rows, machine)
    words, counters = plan.workspace
    space = torch.full((words,), math.nan, device=logits.device)
    arrived = torch.zeros(counters, dtype=torch.int32, device=logits.device)
    poison(logits.device)
    made = plan(logits, bias, space, arrived)
    wanted = route_reference(logits.cpu(), None if bias is None else bias.cpu(), rule, tile_rows)
    assert_same(made, wanted, (rule, logits.shape))
    assert not arrived.any()
    return plan, made


def check_group(given, weights, experts, tile_rows=8, machine=None):
    machine = machine or (machine_of("cuda") if given.is_cuda else typical_machine(80))
    plan = GroupPlan(*given.shape, experts, tile_rows, machine)
    poison(given.device)
    made = plan(given, weights)
    wanted = group_reference(given.cpu(), weights.cpu(), experts, tile_rows)
    assert_same(made, wanted, (given.shape, experts))
    assert torch.equal(made.weights.cpu(), wanted.weights)
    return plan


def bias_of(experts, seed=0):
    return torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.2


CASES = [
    (1, 128, QWEN, False, torch.float32, 0),
    (1, 8, RouterRule(2, normalize=True), False, torch.float16, 0),
    (5, 60, RouterRule(4), False, torch.float16, 5),
    (7, 32, RouterRule(4, **OSS), True, torch.float32, 0),
    (6, 160, RouterRule(6, groups=8, top_groups=3, scale=16.0), False, torch.float32, 0),
    (5, 64, RouterRule(8, **V3, scale=2.5), True, torch.float32, 3),
    (9, 21, RouterRule(5, groups=3, top_groups=2, group_score="top2"), True, torch.float32, 0),
    (5, 20, RouterRule(3, groups=4, top_groups=2), True, torch.float32, 0),
    (5, 10, RouterRule(3, score="sigmoid"), True, torch.float32, 0),
    (5, 10, RouterRule(3, normalize=True, epsilon=1e-6), True, torch.float32, 0),
    (3, 1, RouterRule(1, normalize=True), False, torch.float32, 0),
]


def check_choices():
    for tokens, experts, rule, biased, dtype, gap in CASES:
        check_route(logits_of(tokens, experts, dtype, gap), rule, bias_of(experts) if biased else None, tile_rows=2)


def check_few():
    """Checks launches of one block, and launches of several blocks, where the last block to finish sorts."""
    for tokens, experts, blocks in ((9, 64, 1), (64, 8, 1), (64, 64, 8), (33, 130, 5)):
        plan, _ = check_route(logits_of(tokens, experts), QWEN, tile_rows=4)
        assert plan.blocks == blocks and plan.many is None


def check_many():
    plan, _ = check_route(logits_of(150, 24), RouterRule(5), tile_rows=16)
    assert plan.many is not None and plan.many.chunks == 12
    whole, kernel_module.ROWS = kernel_module.ROWS, 2  # makes more chunks than `sum_counts` reads at a time
    check_route(logits_of(400, 40), RouterRule(4, **OSS), bias_of(40), tile_rows=8)
    check_route(logits_of(65, 8), RouterRule(2), tile_rows=1)
    kernel_module.ROWS = whole
    generator = torch.Generator().manual_seed(1)
    for tokens, top_k, experts in ((90, 7, 60), (600, 2, 5)):
        given = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator)
        check_group(given, torch.rand(tokens, top_k, generator=generator), experts)
    check_group(torch.full((300, 2), 1 << 40), torch.full((300, 2), math.nan), 4)


def check_groups():
    generator = torch.Generator().manual_seed(0)
    for tokens, top_k, experts in ((1, 1, 1), (1, 8, 128), (31, 3, 12), (64, 16, 300)):
        given = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator)
        weights = torch.rand(tokens, top_k, generator=generator)
        check_group(given, weights, experts)
        check_group(given.int(), weights.half(), experts, tile_rows=64)
    check_group(torch.full((20, 2), -1), torch.full((20, 2), math.nan), 4)
    check_group(torch.full((60, 1), 3), torch.ones(60, 1), 4, tile_rows=16)


def check_tokens(tokens, k, experts, rule, biased=False, dtype=torch.float16, gap=0, device="cpu"):
    """Checks x and router weights of small integers, scaled by a power of two. The logits are exact, so the routing must be
    exact too."""
    generator = torch.Generator().manual_seed(k)
    wide = torch.randint(-3, 4, (tokens, k + gap), generator=generator).to(dtype)
    wide[:, k:] = math.nan
    x, router = wide.to(device)[:, :k], (torch.randint(-3, 4, (experts, k), generator=generator) / 64).to(dtype).to(device)
    bias = bias_of(experts).to(device) if biased else None
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    pieces = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and router.data_ptr() % 16 == 0
    plan = RouteTokensPlan(tokens, k, experts, rule, biased, 4, pieces, machine)
    words, counters = plan.workspace
    space, arrived = torch.full((words,), math.nan, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
    wanted = route_reference(
        (x.cpu().double() @ router.cpu().double().T).float(), bias_of(experts) if biased else None, rule, 4
    )
    for _ in range(2):
        poison(device)
        assert_same(plan(x, router, bias, space, arrived), wanted, (tokens, k, experts, rule))
        assert not arrived.any()


def check_norms(tokens, k, experts, rule, biased=False, dtype=torch.float16, gap=0, device="cpu", parts=5):
    """Checks logits and the normalised x. Each row has its own rms, a power of two, so that dividing by it is exact."""
    generator = torch.Generator().manual_seed(k)
    wide = torch.randint(-3, 4, (tokens, k + gap), generator=generator).to(dtype)
    wide[:, k:] = math.nan
    x, router = wide.to(device)[:, :k], (torch.randint(-3, 4, (experts, k), generator=generator) / 64).to(dtype).to(device)
    rms = torch.exp2(torch.arange(tokens) % 3 - 1.0)
    squares = torch.randint(0, k // parts, (parts, tokens), generator=generator).float()
    squares[-1] = 0
    squares[-1] = k * rms.square() - squares.sum(0)
    bias = bias_of(experts).to(device) if biased else None
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    pieces = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and router.data_ptr() % 16 == 0
    plan = RouteTokensPlan(tokens, k, experts, rule, biased, 4, pieces, machine, parts)
    words, counters = plan.workspace
    space, arrived = torch.full((words,), math.nan, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
    logits = x.cpu().double() @ router.cpu().double().T / rms[:, None].double() / 4
    wanted = route_reference(logits.float(), bias_of(experts) if biased else None, rule, 4)
    for _ in range(2):
        poison(device)
        normed, made = plan.norm(x, squares.to(device), router, bias, space, arrived, 0.0, 4.0)
        if device == "cpu":  # only a CPU: the root of a GPU is approximate
            assert_same(made, wanted, (tokens, k, experts, rule))
            assert torch.equal(normed, (x.float() / rms[:, None] / 4).to(dtype))
        else:
            torch.testing.assert_close(normed.float().cpu(), x.float().cpu() / rms[:, None] / 4, rtol=1e-2, atol=1e-3)
            close = (made.weights.cpu() - wanted.weights).abs() < 1e-4
            # ties may be chosen differently
            assert close.all() and (made.experts.cpu() == wanted.experts).float().mean() > 0.95
        assert not arrived.any()


TOKENS = [
    (1, 256, 32, RouterRule(4, **OSS), True),
    (3, 600, 60, RouterRule(4), False),
    (16, 1100, 8, RouterRule(2, normalize=True), False),
    (5, 130, 64, RouterRule(8, **V3), True),
]


def check_products():
    for case in TOKENS:
        check_tokens(*case, gap=len(case))
    check_tokens(2, 64, 8, RouterRule(2), False, gap=8)
    for case in TOKENS:
        check_norms(*case, gap=len(case))
    check_norms(2, 64, 8, RouterRule(2), gap=8, parts=1)


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_choices, check_few, check_groups, check_products)


@loops_to_loaded_bounds
def test_the_arithmetic_of_many_tokens_in_tritons_interpreter():
    interpreted(check_many)


def kernels_of(plan, *call, sm=90):
    """{name: kernel} of all kernels that a call launches, compiled without a GPU."""
    noted = []

    def note(launch):
        return lambda *arguments: noted.append((launch, arguments))

    many = getattr(plan, "many", None)
    places = [(plan, "launch"), *((many, name) for name in ("count", "sum", "place") if many)]
    launches = [getattr(*place) for place in places]
    for place, launch in zip(places, launches, strict=True):
        setattr(*place, note(launch))
    plan(*call)
    for place, launch in zip(places, launches, strict=True):
        setattr(*place, launch)

    class One:
        """A plan with a single launch."""

        def __init__(self, launch):
            self.launch = launch

        def __call__(self, *arguments):
            self.launch(*arguments)

    return {launch.function.fn.__name__: compile_plan(One(launch), arguments, sm) for launch, arguments in noted}


def routed(tokens, experts, rule, sm=90, dtype=torch.bfloat16, biased=False):
    plan = RoutePlan(tokens, experts, rule, biased, 16, typical_machine(sm))
    bias = meta((experts,), torch.float32) if biased else None
    space = [meta((max(size, 1),), dtype) for size, dtype in zip(plan.workspace, (torch.float32, torch.int32), strict=True)]
    return plan, kernels_of(plan, meta((tokens, experts), dtype), bias, *space, sm=sm)


MODELS = [
    (8, RouterRule(2, normalize=True), False, torch.bfloat16),
    (128, QWEN, False, torch.bfloat16),
    (256, RouterRule(8, **V3, scale=2.5), True, torch.float32),
    (512, RouterRule(10, normalize=True), False, torch.float32),
]
"""Rules of Mixtral, Qwen3, DeepSeek-V3 and Qwen3-Next: (experts, rule, whether there is a bias, dtype of the logits)."""


@pytest.mark.parametrize(
    ("sm", "tokens", "models"),
    [(80, 1, (1,)), (90, 16, (0, 2, 3)), (80, 64, (2,)), (90, 64, (1, 3)), (120, 64, (1,)), (90, 1024, (3,))],
)
def test_machine_code(sm, tokens, models):
    """Nothing spills, and blocks fit every GPU. Up to 64 tokens take one launch."""
    for experts, rule, biased, dtype in [MODELS[i] for i in models]:
        plan, kernels = routed(tokens, experts, rule, sm, dtype, biased)
        assert list(kernels) == (
            ["choose_many", "count_slots", "sum_counts", "place_slots"] if tokens > 64
            else ["route_block"] if plan.blocks == 1 else ["route_blocks"]
        )  # fmt: skip
        for name, kernel in kernels.items():
            print(f"\nsm_{sm} {tokens} {experts} {name}: {kernel.registers} registers, {kernel.shared_bytes} bytes shared")
            assert kernel.stack_bytes == 0 and not kernel.count("LDL") and not kernel.count("STL"), name
            assert kernel.shared_bytes <= 1 << 16 and kernel.registers <= 128, name


def product(tokens, k, experts, rule, sm=90, dtype=torch.bfloat16, biased=False, parts=0):
    plan = RouteTokensPlan(tokens, k, experts, rule, biased, 16, True, typical_machine(sm), parts)
    bias = meta((experts,), torch.float32) if biased else None
    space = [meta((max(size, 1),), kind) for size, kind in zip(plan.workspace, (torch.float32, torch.int32), strict=True)]
    x, router = meta((tokens, k), dtype), meta((experts, k), dtype)
    if not parts:
        return plan, kernels_of(plan, x, router, bias, *space, sm=sm)["route_tokens"]
    squares, call = meta((parts, tokens), torch.float32), plan.norm

    class Normed:
        """The plan with the norm in front."""

        launch = property(lambda self: plan.launch, lambda self, value: setattr(plan, "launch", value))

        def __call__(self, *arguments):
            return call(*arguments)

    return plan, kernels_of(Normed(), x, squares, router, bias, *space, 1e-5, 1.0, sm=sm)["route_tokens"]


@pytest.mark.parametrize(
    ("sm", "tokens", "k", "experts", "rule", "blocks"),
    [
        (80, 4, 4096, 8, RouterRule(2, normalize=True), (1, 16)),
        (90, 1, 2048, 128, QWEN, (8, 8)),
        (90, 16, 7168, 256, RouterRule(8, **V3), (16, 4)),
        (120, 16, 2880, 32, RouterRule(4, **OSS), (2, 12)),
    ],
)
def test_machine_code_of_the_product(sm, tokens, k, experts, rule, blocks):
    """The router product uses tensor cores without spills. On sm_90 weights are loaded before the wait for the previous
    kernel.
    """
    plan, kernel = product(tokens, k, experts, rule, sm, biased=True)
    assert plan.launch.grid[:2] == blocks
    assert kernel.stack_bytes == 0 and kernel.registers <= 128 and kernel.shared_bytes <= 1 << 16
    assert kernel.count("HMMA.16816") and kernel.count("LDG.E.128")
    if sm == 90:
        lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
        wait = lines.index("ACQBULK")
        assert sum(line.startswith("LDG.E.128") for line in lines[:wait]) >= 1 and "PREEXIT" in lines[:wait]
        assert not any(line.startswith(("STG", "ATOM", "RED.")) for line in lines[:wait])


@pytest.mark.parametrize(
    ("sm", "tokens", "k", "experts", "rule"),
    [(80, 4, 4096, 8, RouterRule(2, normalize=True)), (90, 1, 2048, 128, QWEN), (90, 16, 2880, 32, RouterRule(4, **OSS))],
)
def test_machine_code_with_the_norm(sm, tokens, k, experts, rule):
    _, kernel = product(tokens, k, experts, rule, sm, biased=rule.bias_use == "logits", parts=256)
    assert kernel.stack_bytes == 0 and kernel.registers <= 168 and kernel.shared_bytes <= 1 << 16
    assert kernel.count("HMMA.16816") and kernel.count("MUFU.RSQ") and kernel.count("STG.E.128")
    if sm == 90:
        lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
        wait = lines.index("ACQBULK")
        assert sum(line.startswith("LDG.E.128") for line in lines[:wait]) >= 1 and "PREEXIT" in lines[:wait]


def test_a_token_is_chosen_within_its_warp():
    """With 8 tokens, a warp each, all top-k rounds precede the first barrier of the block."""
    _, kernels = routed(8, 128, QWEN)
    lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernels["route_block"].lines]
    barrier = next(i for i, line in enumerate(lines) if line.startswith("BAR"))
    reductions = [i for i, line in enumerate(lines) if line.startswith(("REDUX", "CREDUX"))]
    assert sum(i < barrier for i in reductions) >= 2 * QWEN.top_k


def test_neighbours_in_the_stream_overlap():
    """sm_90: the next kernel may start at once. Before the wait for the previous one, only the bias is read."""
    machine = typical_machine(90)
    i64, f16 = torch.int64, torch.float16
    made = [*routed(4, 256, MODELS[2][1], biased=True)[1].items(), *routed(64, 128, QWEN)[1].items()]
    for tokens in (8, 300):
        made += kernels_of(GroupPlan(tokens, 8, 64, 16, machine), meta((tokens, 8), i64), meta((tokens, 8), f16)).items()
    assert [name for name, _ in made][-4:] == ["group_few", "count_slots", "sum_counts", "place_slots"]
    for name, kernel in made:
        lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
        start, wait = lines.index("PREEXIT"), lines.index("ACQBULK")
        assert start < wait and "EXIT" not in lines[:wait], name
        assert not any(line.startswith(("STG", "ATOM", "RED.")) for line in lines[:wait]), name
        assert any(line.startswith("LDG") for line in lines[:wait]) == (name == "route_block"), name


@gpu
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 40, 64, 65, 1000])
def test_the_references_routing_on_a_gpu(tokens):
    """Outputs are poisoned before each run, and every run gives the same bits."""
    for experts, rule in ((8, RouterRule(2)), (60, RouterRule(4)), (128, QWEN), (384, RouterRule(8)), (512, RouterRule(10))):
        for dtype, gap in ((torch.bfloat16, 0), (torch.float32, 3)):
            logits = logits_of(tokens, experts, dtype, gap, "cuda")
            plan, made = check_route(logits, rule, tile_rows=16)
            for _ in range(3):
                poison("cuda")
                words, counters = plan.workspace
                space = torch.full((words,), math.nan, device="cuda")
                again = plan(logits, None, space, torch.zeros(counters, dtype=torch.int32, device="cuda"))
                both = zip(again, made, strict=True)
                assert all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in both)


@gpu
def test_given_experts_on_a_gpu():
    for tokens, top_k, experts in ((1, 1, 1), (1, 8, 128), (31, 3, 12), (64, 16, 512), (90, 7, 60), (5000, 2, 5)):
        given = torch.randint(-1, experts + 2, (tokens, top_k), device="cuda")
        check_group(given, torch.rand(tokens, top_k, device="cuda"), experts)
        check_group(given.int(), torch.rand(tokens, top_k, device="cuda").half(), experts, tile_rows=64)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_on_a_gpu(dtype):
    for case in TOKENS:
        check_tokens(*case, dtype=dtype, device="cuda")


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_products_of_known_models_on_a_gpu(tokens, dtype):
    for gap in (0, 3, 8):
        check_tokens(tokens, 2048, 128, QWEN, False, dtype, gap, "cuda")
        check_tokens(tokens, 7168, 256, RouterRule(8, **V3), True, dtype, gap, "cuda")
        check_tokens(tokens, 2880, 32, RouterRule(4, **OSS), True, dtype, gap, "cuda")
        check_norms(tokens, 2048, 128, QWEN, False, dtype, gap, "cuda", 128)
        check_norms(tokens, 2880, 32, RouterRule(4, **OSS), True, dtype, gap, "cuda", 180)
