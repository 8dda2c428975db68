"""Router of a mixture of experts: experts and weights of each token, and its slots sorted by expert. Plain torch reference.

A slot is one (token, choice) pair: slot t * top_k + s is the s-th expert of token t. CPUs run these functions too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

MOST_EXPERTS = 1024
"""Largest number of experts of a router. The sorting kernel's tables take 64 bytes of shared memory per expert, 64 KiB in all.
"""

SLOT_BITS = 21
"""There must be fewer than 2^SLOT_BITS slots: the kernels count slots and tiles in the bit fields of one 64-bit integer."""

Score = Literal["softmax", "sigmoid"]
BiasUse = Literal["choice", "logits"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses `top_k` experts of a token from its logits, and what it multiplies their outputs by.

    `score` of an expert: "softmax" over all experts (Mixtral, Qwen, OLMoE, DeepSeek-V2) or "sigmoid" (DeepSeek-V3, GLM-4).
    `normalize` divides the chosen scores by their sum plus `epsilon` (1e-20 in DeepSeek-V3, 0 in Mixtral and Qwen). Weights are
    the chosen scores times `scale`, DeepSeek's routed_scaling_factor. With `softmax_over_selected` weights are a softmax over
    the chosen logits instead (gpt-oss, Granite).

    With `groups` > 1 the experts are divided into that number of groups of neighbours, and the choice is limited to the
    `top_groups` groups of the highest `group_score`: the largest score of a group's experts ("max", DeepSeek-V2's
    group_limited_greedy) or the sum of the two largest ("top2", DeepSeek-V3).

    `bias_use` says where a bias [E] is added: to the scores, for the choice alone ("choice", DeepSeek-V3's correction bias), or
    to the logits ("logits", the bias of gpt-oss's router).

    Raises ValueError for a combination that no router has.
    """

    top_k: int
    score: Score = "softmax"
    normalize: bool = False
    epsilon: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    bias_use: BiasUse = "choice"
    scale: float = 1.0
    softmax_over_selected: bool = False

    def __post_init__(self) -> None:
        for name, kinds in (("score", Score), ("group_score", GroupScore), ("bias_use", BiasUse)):
            if (value := getattr(self, name)) not in get_args(kinds):
                raise ValueError(f"router: {name} is one of {', '.join(get_args(kinds))}, got {value!r}")
        if self.top_k < 1 or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"router: top_k is 1 or more and top_groups is 1 to groups, got top_k {self.top_k}, top_groups "
                f"{self.top_groups}, groups {self.groups}"
            )
        if not (0 <= self.epsilon < math.inf and math.isfinite(self.scale)):
            raise ValueError(f"router: epsilon is 0 or more and scale finite, got {self.epsilon} and {self.scale}")
        if self.softmax_over_selected and (self.score != "softmax" or self.normalize):
            raise ValueError(
                f"router: a softmax over the chosen experts takes score softmax without normalize, got score {self.score} and "
                f"normalize {self.normalize}"
            )

    def refusals(self, experts: int) -> tuple[str, ...]:
        """Returns the reasons why the rule does not fit a router of `experts` experts; empty if it does."""
        if experts % self.groups:
            return (f"{experts} experts are not {self.groups} groups of one size",)
        size = experts // self.groups
        reasons = []
        if self.top_k > size * self.top_groups:
            reasons.append(f"top_k {self.top_k} is more than the {size * self.top_groups} experts to choose from")
        if self.group_score == "top2" and self.groups > 1 and size < 2:
            reasons.append("a group of one expert has no two best ones")
        return tuple(reasons)

    def chooses_by_logit(self, bias: bool) -> bool:
        """True if the choice compares logits: the score is a rising function of them, so their order is the same.

        Comparing scores instead could give ties, because scores are rounded. `bias`: True if a bias is given.
        """
        corrected = bias and self.bias_use == "choice"
        return not corrected and (self.groups == 1 or self.group_score == "max")


class RoutingTensors(NamedTuple):
    """The tensors of `ops.Routing`, which documents them."""

    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor
    tiles: Tensor
    tile_count: Tensor


def tile_bound(slots: int, experts: int, tile_rows: int) -> int:
    """The largest number of tiles of `tile_rows` rows that `slots` slots of `experts` experts can fill."""
    return min(slots, experts) + slots // tile_rows


def best(values: Tensor, k: int) -> Tensor:
    """Indices int64 [.., k] of the k largest values, in falling order, the lower index first among equals; NaN counts as
    -inf."""
    cleaned = values.masked_fill(values.isnan(), -math.inf)
    return cleaned.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def choose_reference(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """Returns experts int32 [T, top_k] and weights float32 [T, top_k] for logits [T, E] and a bias float32 [E] under `rule`.

    Everything is computed in float32. A token's slots are in falling order of the values that the choice compares. A token with
    a NaN among its logits has NaN weights; its experts are chosen as if NaN were -inf. The experts of a token are always
    distinct and in range.
    """
    x = logits.float()
    if bias is not None and rule.bias_use == "logits":
        x = x + bias
    nan = x.isnan()
    x = x.masked_fill(nan, -math.inf)
    scores = x.sigmoid() if rule.score == "sigmoid" else x.softmax(-1)
    choice = x if rule.chooses_by_logit(bias is not None) else scores
    if bias is not None and rule.bias_use == "choice":
        choice = choice + bias
    choice = choice.masked_fill(nan, -math.inf)
    if rule.groups > 1:
        members = choice.unflatten(-1, (rule.groups, -1))
        cleaned = members.masked_fill(members.isnan(), -math.inf)
        of_groups = cleaned.amax(-1) if rule.group_score == "max" else cleaned.topk(2, dim=-1).values.sum(-1)
        groups = best(of_groups, rule.top_groups).sort(dim=-1).values
        inside = members.gather(1, groups[..., None].expand(-1, -1, members.shape[-1])).flatten(1)
        picked, size = best(inside, rule.top_k), members.shape[-1]
        experts = groups.gather(1, picked // size) * size + picked % size
    else:
        experts = best(choice, rule.top_k)
    weights = x.gather(1, experts).softmax(-1) if rule.softmax_over_selected else scores.gather(1, experts)
    if rule.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    weights = weights.masked_fill(nan.any(-1, keepdim=True), math.nan)
    return experts.int(), weights * rule.scale


def local_experts(experts: Tensor, count: int) -> Tensor:
    """Returns experts int32 [T, top_k] with -1 instead of every index outside 0 .. count - 1."""
    return experts.masked_fill((experts < 0) | (experts >= count), -1).int()


def group_reference(experts: Tensor, weights: Tensor, count: int, tile_rows: int) -> RoutingTensors:
    """Sorts slots by expert: `experts` [T, top_k] holds the expert of each slot, below `count`. Returns the tensors that
    `ops.Routing` documents."""
    here = local_experts(experts, count)
    flat = here.flatten()
    slots = len(flat)
    counts = torch.bincount(flat[flat >= 0], minlength=count)
    offsets = torch.zeros(count + 1, dtype=torch.int32, device=flat.device)
    offsets[1:] = counts.cumsum(0)
    order = torch.where(flat < 0, count, flat).argsort(stable=True).int()
    total = int(offsets[-1])
    order[total:] = -1
    of_expert = (counts + tile_rows - 1) // tile_rows
    expert = torch.repeat_interleave(torch.arange(count, device=flat.device), of_expert)
    number = torch.arange(len(expert), device=flat.device) - (of_expert.cumsum(0) - of_expert)[expert]
    first = offsets[:-1][expert] + number * tile_rows
    tiles = torch.zeros((tile_bound(slots, count, tile_rows), 3), dtype=torch.int32, device=flat.device)
    tiles[: len(expert)] = torch.stack([expert, first, (offsets[1:][expert] - first).clamp(max=tile_rows)], dim=1).int()
    tile_count = torch.tensor([len(expert)], dtype=torch.int32, device=flat.device)
    return RoutingTensors(here, weights.float().masked_fill(here < 0, 0.0), order, offsets, tiles, tile_count)


def norm_route_reference(
    x: Tensor, squares: Tensor, router: Tensor, bias: Tensor | None, eps: float, factor: float, rule: RouterRule, tile_rows: int
) -> tuple[Tensor, RoutingTensors]:
    """Returns (normalised x [T, K] in x's type, the routing of its logits). The given x is h * gamma * factor; `squares`
    [parts, T] are partial sums of squares of the rows of h. Logits are computed in float32 from the given x, then
    normalised."""
    inverse = torch.rsqrt(squares.float().sum(0) / x.shape[1] + eps)[:, None] / factor
    logits = (x.float() @ router.float().T) * inverse
    return (x.float() * inverse).to(x.dtype), route_reference(logits, bias, rule, tile_rows)


def route_reference(logits: Tensor, bias: Tensor | None, rule: RouterRule, tile_rows: int) -> RoutingTensors:
    """`choose_reference`, then `group_reference`."""
    return group_reference(*choose_reference(logits, bias, rule), logits.shape[1], tile_rows)
