"""The router of a mixture of experts: experts and weights of each token, and the list of tiles for expert products.

NVIDIA GPUs use one launch for up to 64 tokens, else several (kernels/elementwise/route.py). No launch synchronises with the
host, so a CUDA graph may capture them. A CPU uses plain torch (kernels/reference/route.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.fused_gemm import MOST_PARTS
from lowbit.kernels.reference.route import (
    MOST_EXPERTS,
    SLOT_BITS,
    BiasUse,
    GroupScore,
    RouterRule,
    RoutingTensors,
    Score,
    group_reference,
    norm_route_reference,
    route_reference,
    tile_bound,
)
from lowbit.ops.operands import check_one_device
from lowbit.ops.register import register
from lowbit.ops.workspace import workspace

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.route import GroupPlan, RoutePlan, RouteTokensPlan

__all__ = ["BiasUse", "GroupScore", "RouterRule", "Routing", "Score", "group", "norm_route", "route", "route_tokens"]

MOST_FUSED = 16
"""Maximum number of tokens for which the kernel of `route_tokens` computes the logits. It is twice the columns of one matrix
instruction."""

_LOGITS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts of the slots of T tokens, and the tiles of slots for products of experts.

    A slot is one (token, choice): slot t * top_k + s is the s-th expert of token t. S = T * top_k slots, E experts. All tensors
    are contiguous and on one device, and every element of them is written:

    - `experts` int32 [T, top_k]: the expert of each slot, -1 if it is not one of these E experts (an absent slot). From `route`
      there are no absent slots, and the experts of a token are distinct. From `group` a slot is absent if its index is outside
      0 .. E - 1, which expert parallelism uses for experts of other ranks; a token may have the same expert twice.
    - `weights` float32 [T, top_k]: the factor of each slot, 0 for an absent one.
    - `order` int32 [S]: the present slots by expert, and within an expert in ascending order; then -1 for each absent slot.
    - `offsets` int32 [E + 1]: expert e has the positions offsets[e] .. offsets[e + 1] - 1 of `order`. offsets[0] is 0 and
      offsets[E] the number of present slots.
    - `tile_rows`: largest number of slots per tile, 1 or more.
    - `tiles` int32 [bound, 3]: rows (expert, first position in `order`, number of slots), by expert and then by position. A
      tile has slots of one expert: tile_rows slots, or fewer in the last tile of an expert. Experts without slots have no tile.
      Rows from `tile_count` on are (0, 0, 0). bound = min(S, E) + S // tile_rows, which is known without reading from the
      device.
    - `tile_count` int32 [1]: the number of tiles.

    So a product of experts may assume three things. The tiles cover each present slot exactly once, and no absent slot. The
    positions of a tile are below offsets[E], and `order` has slots in 0 .. S - 1 there. The token of a slot is slot // top_k. A
    product must skip tiles of 0 slots, and must not address rows by entries of `order` outside tiles. A product that returns a
    row for each slot does not write the rows of absent slots; `sum_slots` leaves these rows out if it is given `experts`.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor
    tile_rows: int
    tiles: Tensor
    tile_count: Tensor

    @property
    def top_k(self) -> int:
        """Number of slots of a token."""
        return self.experts.shape[1]

    @property
    def expert_count(self) -> int:
        """E, the number of experts."""
        return self.offsets.shape[0] - 1


def route(logits: Tensor, rule: RouterRule, bias: Tensor | None = None, *, tile_rows: int) -> Routing:
    """Routes tokens by the logits [T, E] (fp16, bf16 or fp32, any row stride) of a router.

    `bias` float32 [E] is used according to `rule.bias_use`. Scores and weights are computed in float32 and not rounded further.
    The choice compares logits if scores have the same order, since computed scores may have ties that logits do not have. It
    compares scores with a bias for the choice only, which is added to them, and with groups that are ranked by their two best
    scores. The slots of a token are in falling order of the compared values; among equal values the lower index comes first.

    A token with a NaN among its logits has NaN weights; under a softmax so does a token with +inf, or with only -inf. In the
    choice a NaN counts as -inf; the experts of a token are always distinct. The result of a token depends neither on T nor on
    other tokens.

    Raises ValueError for tensors that do not fit together and for a rule that does not fit E. E must be 1 to 1024, and T *
    top_k below 2^21.
    """
    made = torch.ops.lowbit.route(logits, bias, *_fields(rule), tile_rows)
    return _routing(made, tile_rows)


def route_tokens(
    x: Tensor, router: Tensor, rule: RouterRule, bias: Tensor | None = None, *, tile_rows: int
) -> Routing:  # fmt: skip
    """Returns the same as `route` for the logits x [T, K] . router [E, K]^T. Both are fp16 or bf16; x has any row stride,
    router is contiguous.

    Logits are float32 sums of exact products and are not rounded, unlike those of a 16-bit linear layer. On a GPU up to 16
    tokens take one launch, and a token's logits then have the same bits in any batch; for more tokens torch first computes the
    product. On sm_90 the kernel reads `router` while the preceding kernel in the stream may still run, so that kernel must not
    write it. Raises ValueError as `route` does.
    """
    return _routing(torch.ops.lowbit.route_tokens(x, router, bias, *_fields(rule), tile_rows), tile_rows)


def norm_route(
    x: Tensor, squares: Tensor, router: Tensor, rule: RouterRule, bias: Tensor | None = None, *, eps: float,
    factor: float = 1.0, tile_rows: int,
) -> tuple[Tensor, Routing]:  # fmt: skip
    """Returns (normalised x [T, K], its routing) in one launch. x and squares are results of `ops.fused_gemm.residual_gemm`:
    x [T, K] is h * gamma * factor, and `squares` float32 [parts, T] are sums of squares of parts of the rows of h.

    rms = sqrt(sum of squares / K + eps). The first result is x / (rms * factor), rounded. Logits are computed from x as it is
    given, and then divided by rms * factor in float32. There are 1 to 16 tokens and at most 256 parts; all else is as in
    `route_tokens`.
    """
    normed, *made = torch.ops.lowbit.norm_route(x, squares, router, bias, eps, factor, *_fields(rule), tile_rows)
    return normed, _routing(made, tile_rows)


def group(experts: Tensor, weights: Tensor, expert_count: int, *, tile_rows: int) -> Routing:
    """Returns the routing for experts int32 or int64 [T, top_k] and weights [T, top_k] (any float type) that another router
    computed.

    Both are contiguous. An index outside 0 .. expert_count - 1 is an absent slot (see `Routing`). Raises ValueError for tensors
    that do not fit together. expert_count must be 1 to 1024, and T * top_k below 2^21.
    """
    return _routing(torch.ops.lowbit.group(experts, weights, expert_count, tile_rows), tile_rows)


def _routing(made: Any, tile_rows: int) -> Routing:
    experts, weights, order, offsets, tiles, tile_count = made
    return Routing(experts, weights, order, offsets, tile_rows, tiles, tile_count)


def _fields(rule: RouterRule) -> tuple[Any, ...]:
    """Returns the fields of a rule in the order of the operator's schema."""
    return (
        rule.top_k, rule.score, rule.normalize, rule.epsilon, rule.groups, rule.top_groups, rule.group_score, rule.bias_use,
        rule.scale, rule.softmax_over_selected,
    )  # fmt: skip


_rule = functools.lru_cache(maxsize=256)(RouterRule)


def _check_sizes(operator: str, slots: int, experts: int, tile_rows: int) -> None:
    if slots >= 1 << SLOT_BITS:
        raise ValueError(f"{operator}: T * top_k is below {1 << SLOT_BITS}, got {slots}; route parts of the tokens")
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"{operator}: routers have 1 to {MOST_EXPERTS} experts, got {experts}")
    if tile_rows < 1:
        raise ValueError(f"{operator}: tile_rows is 1 or more, got {tile_rows}")


def _check_route(logits: Tensor, bias: Tensor | None, rule: RouterRule, tile_rows: int) -> None:
    """Raises ValueError unless the arguments fit together."""
    if logits.dim() != 2 or logits.dtype not in _LOGITS or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"route: logits are fp16, bf16 or fp32 [T, E] without gaps in a row, got {logits.dtype} {tuple(logits.shape)} "
            f"with strides {logits.stride()}"
        )
    check_one_device("route", logits, bias)
    _check_rule("route", logits.shape[0], logits.shape[1], bias, rule, tile_rows)


def _check_rule(operator: str, tokens: int, experts: int, bias: Tensor | None, rule: RouterRule, tile_rows: int) -> None:
    """Raises ValueError unless the rule and the bias are valid for a router of `experts` experts."""
    _check_sizes(operator, tokens * rule.top_k, experts, tile_rows)
    if reasons := rule.refusals(experts):
        raise ValueError(f"{operator}: a router of {experts} experts cannot follow {rule}: {'; '.join(reasons)}")
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"{operator}: bias is contiguous float32 [{experts}], got {bias.dtype} {tuple(bias.shape)}")


def _check_group(experts: Tensor, weights: Tensor, expert_count: int, tile_rows: int) -> None:
    """Raises ValueError unless the arguments fit together."""
    if experts.dim() != 2 or not experts.shape[1] or experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"group: experts are int32 or int64 [T, top_k], got {experts.dtype} {tuple(experts.shape)}")
    if weights.shape != experts.shape or not weights.is_floating_point() or weights.dtype.itemsize < 2:
        raise ValueError(
            f"group: weights are fp16, bf16, fp32 or fp64 {tuple(experts.shape)} like experts, got {weights.dtype} "
            f"{tuple(weights.shape)}"
        )
    if not experts.is_contiguous() or not weights.is_contiguous():
        raise ValueError("group: call .contiguous() on experts and weights")
    _check_sizes("group", experts.numel(), expert_count, tile_rows)
    check_one_device("group", experts, weights)


def _empty(like: Tensor, tokens: int, top_k: int, experts: int, tile_rows: int) -> RoutingTensors:
    """Returns the tensors of a routing, uninitialised except offsets and tile_count, which are zero. For T = 0 this is the
    complete result."""
    integers = functools.partial(like.new_empty, dtype=torch.int32)
    zeros = functools.partial(like.new_zeros, dtype=torch.int32)
    slots = tokens * top_k
    return RoutingTensors(
        integers((tokens, top_k)), like.new_empty((tokens, top_k), dtype=torch.float32), integers((slots,)),
        zeros((experts + 1,)), integers((tile_bound(slots, experts, tile_rows), 3)), zeros((1,)),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _route_plan(
    shape: torch.Size, dtype: torch.dtype, aligned: bool, rule: RouterRule, bias: bool, tile_rows: int, on: torch.device
) -> RoutePlan:
    from lowbit.kernels.elementwise.route import RoutePlan

    return RoutePlan(shape[0], shape[1], rule, bias, tile_rows, machine_of(on))


@functools.lru_cache(maxsize=4096)
def _route_tokens_plan(
    shape: torch.Size, dtype: torch.dtype, aligned: bool, pieces: bool, experts: int, rule: RouterRule, bias: bool,
    tile_rows: int, on: torch.device, parts: int = 0,
) -> RouteTokensPlan:  # fmt: skip
    from lowbit.kernels.elementwise.route import RouteTokensPlan

    return RouteTokensPlan(shape[0], shape[1], experts, rule, bias, tile_rows, pieces, machine_of(on), parts)


@functools.lru_cache(maxsize=4096)
def _group_plan(
    shape: torch.Size, dtypes: tuple[torch.dtype, torch.dtype], aligned: bool, experts: int, tile_rows: int, on: torch.device
) -> GroupPlan:
    from lowbit.kernels.elementwise.route import GroupPlan

    return GroupPlan(shape[0], shape[1], experts, tile_rows, machine_of(on))


def _aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def _route_on_gpu(logits: Tensor, bias: Tensor | None, *rest: Any) -> RoutingTensors:
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_route(logits, bias, rule, tile_rows)
    if not len(logits):
        return _empty(logits, 0, rule.top_k, logits.shape[1], tile_rows)
    on, given = logits.device, bias is not None
    plan = _route_plan(logits.shape, logits.dtype, _aligned(logits, bias), rule, given, tile_rows, on)
    return plan(logits, bias, *workspace(on, *plan.workspace))


def _route_on_cpu(logits: Tensor, bias: Tensor | None, *rest: Any) -> RoutingTensors:
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_route(logits, bias, rule, tile_rows)
    return route_reference(logits, bias, rule, tile_rows)


def _route_fake(logits: Tensor, bias: Tensor | None, *rest: Any) -> RoutingTensors:
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_route(logits, bias, rule, tile_rows)
    return _empty(logits, logits.shape[0], rule.top_k, logits.shape[1], tile_rows)


def _check_tokens(x: Tensor, router: Tensor, bias: Tensor | None, rule: RouterRule, tile_rows: int) -> None:
    """Raises ValueError unless the arguments fit together."""
    if x.dim() != 2 or router.dim() != 2 or x.shape[1] != router.shape[1] or not x.shape[1]:
        raise ValueError(f"route_tokens: x is [T, K] and router [E, K], got {tuple(x.shape)} and {tuple(router.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16) or router.dtype != x.dtype:
        raise ValueError(f"route_tokens: x and router are both fp16 or both bf16, got {x.dtype} and {router.dtype}")
    if (x.stride(1) != 1 and x.shape[1] > 1) or not router.is_contiguous():
        raise ValueError("route_tokens: x has no gaps in a row and router is contiguous; call .contiguous()")
    check_one_device("route_tokens", x, router, bias)
    _check_rule("route_tokens", len(x), len(router), bias, rule, tile_rows)


def _route_tokens_on_gpu(x: Tensor, router: Tensor, bias: Tensor | None, *rest: Any) -> RoutingTensors:
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_tokens(x, router, bias, rule, tile_rows)
    if not 1 <= len(x) <= MOST_FUSED:
        return _route_on_gpu(torch.mm(x, router.T, out_dtype=torch.float32), bias, *rest)
    on, aligned = x.device, _aligned(x, router)
    of_x = x.shape, x.dtype, _aligned(x, router, bias), aligned and x.stride(0) % 8 == 0
    plan = _route_tokens_plan(*of_x, len(router), rule, bias is not None, tile_rows, on)
    return plan(x, router, bias, *workspace(on, *plan.workspace))


def _route_tokens_on_cpu(x: Tensor, router: Tensor, bias: Tensor | None, *rest: Any) -> RoutingTensors:
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_tokens(x, router, bias, rule, tile_rows)
    return route_reference(x.float() @ router.float().T, bias, rule, tile_rows)


def _route_tokens_fake(x: Tensor, router: Tensor, bias: Tensor | None, *rest: Any) -> RoutingTensors:
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_tokens(x, router, bias, rule, tile_rows)
    return _empty(x, x.shape[0], rule.top_k, router.shape[0], tile_rows)


def _check_norm(x: Tensor, squares: Tensor, router: Tensor, bias: Tensor | None, rule: RouterRule, tile_rows: int) -> None:
    """Raises ValueError unless the arguments fit together."""
    if not (1 <= len(x) <= MOST_FUSED if x.dim() == 2 else False):
        raise ValueError(f"norm_route: x is [T, K] of 1 to {MOST_FUSED} tokens, got {tuple(x.shape)}")
    _check_tokens(x, router, bias, rule, tile_rows)
    shape = tuple(squares.shape)
    if squares.dtype != torch.float32 or len(shape) != 2 or shape[1] != len(x) or not 1 <= shape[0] <= MOST_PARTS:
        raise ValueError(
            f"norm_route: squares are float32 [parts, {len(x)}] of up to {MOST_PARTS} parts, got {squares.dtype} {shape}"
        )
    if not squares.is_contiguous():
        raise ValueError("norm_route: squares are contiguous; call .contiguous()")
    check_one_device("norm_route", x, squares)


NormRouted = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The normalised x, then the tensors of a routing."""


def _norm_route_on_gpu(
    x: Tensor, squares: Tensor, router: Tensor, bias: Tensor | None, eps: float, factor: float, *rest: Any
) -> NormRouted:  # fmt: skip
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_norm(x, squares, router, bias, rule, tile_rows)
    on, aligned = x.device, _aligned(x, router)
    of_x = x.shape, x.dtype, _aligned(x, router, bias, squares), aligned and x.stride(0) % 8 == 0
    plan = _route_tokens_plan(*of_x, len(router), rule, bias is not None, tile_rows, on, len(squares))
    normed, made = plan.norm(x, squares, router, bias, *workspace(on, *plan.workspace), eps, factor)
    return normed, *made


def _norm_route_on_cpu(
    x: Tensor, squares: Tensor, router: Tensor, bias: Tensor | None, eps: float, factor: float, *rest: Any
) -> NormRouted:  # fmt: skip
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_norm(x, squares, router, bias, rule, tile_rows)
    normed, made = norm_route_reference(x, squares, router, bias, eps, factor, rule, tile_rows)
    return normed, *made


def _norm_route_fake(
    x: Tensor, squares: Tensor, router: Tensor, bias: Tensor | None, eps: float, factor: float, *rest: Any
) -> NormRouted:  # fmt: skip
    *fields, tile_rows = rest
    rule = _rule(*fields)
    _check_norm(x, squares, router, bias, rule, tile_rows)
    return x.new_empty(x.shape), *_empty(x, x.shape[0], rule.top_k, router.shape[0], tile_rows)


def _group_on_gpu(experts: Tensor, weights: Tensor, expert_count: int, tile_rows: int) -> RoutingTensors:
    _check_group(experts, weights, expert_count, tile_rows)
    if not len(experts):
        return _empty(experts, 0, experts.shape[1], expert_count, tile_rows)
    dtypes = experts.dtype, weights.dtype
    plan = _group_plan(experts.shape, dtypes, _aligned(experts, weights), expert_count, tile_rows, experts.device)
    return plan(experts, weights)


def _group_on_cpu(experts: Tensor, weights: Tensor, expert_count: int, tile_rows: int) -> RoutingTensors:
    _check_group(experts, weights, expert_count, tile_rows)
    return group_reference(experts, weights, expert_count, tile_rows)


def _group_fake(experts: Tensor, weights: Tensor, expert_count: int, tile_rows: int) -> RoutingTensors:
    _check_group(experts, weights, expert_count, tile_rows)
    return _empty(experts, experts.shape[0], experts.shape[1], expert_count, tile_rows)


_MADE = "(Tensor experts, Tensor weights, Tensor order, Tensor offsets, Tensor tiles, Tensor tile_count)"

_RULE = (
    "int top_k, str score, bool normalize, float epsilon, int groups, int top_groups, str group_score, str bias_use,"
    " float scale, bool softmax_over_selected, int tile_rows"
)

register(f"route(Tensor logits, Tensor? bias, {_RULE}) -> {_MADE}", cuda=_route_on_gpu, cpu=_route_on_cpu, fake=_route_fake)
register(
    f"route_tokens(Tensor x, Tensor router, Tensor? bias, {_RULE}) -> {_MADE}",
    cuda=_route_tokens_on_gpu,
    cpu=_route_tokens_on_cpu,
    fake=_route_tokens_fake,
)
register(
    f"norm_route(Tensor x, Tensor squares, Tensor router, Tensor? bias, float eps, float factor, {_RULE})"
    f" -> {_MADE.replace('(', '(Tensor normed, ', 1)}",
    cuda=_norm_route_on_gpu,
    cpu=_norm_route_on_cpu,
    fake=_norm_route_fake,
)
register(
    f"group(Tensor experts, Tensor weights, int expert_count, int tile_rows) -> {_MADE}",
    cuda=_group_on_gpu,
    cpu=_group_on_cpu,
    fake=_group_fake,
)
