"""Mixtures of experts in a decode program: the MLP of a layer whose tokens are routed to experts, and the norm of whole q and k
that OLMoE has.

    norm | router  route | gate-up of the experts {gate}  down {* weight}  sum | + shared expert

On a GPU the router is a product and one launch (`ops.route`) for up to 64 tokens; nothing waits for the device. On a CPU, and
where the kernels do not route as the model does, Transformers' own router computes the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lowbit.engine.product import Product, product
from lowbit.kernels.reference.elementwise import Gate
from lowbit.nn import QuantLinear
from lowbit.nn.experts import QuantExperts
from lowbit.ops.elementwise import gate
from lowbit.ops.table import why_slow


def shared_linears(block: Any) -> tuple[nn.Module, ...]:
    """The linear layers gate, up and down of the shared expert of a block; () without one."""
    shared = getattr(block, "shared_expert", None)
    return () if shared is None else (shared.gate_proj, shared.up_proj, shared.down_proj)


def block_refusals(block: Any) -> Iterator[str]:
    """Reasons why a decode program cannot compute a block of experts on the device of its weights."""
    experts = block.experts
    if not next(experts.parameters()).is_cuda:
        return
    if not isinstance(experts, QuantExperts):
        yield "experts in 16 bits, for which a GPU has no kernel here"
    else:
        for part in experts.packed().values():
            if part.scheme.activation is not None and (reasons := why_slow(part.problem(torch.bfloat16))):
                yield f"experts of {part.scheme}, which are multiplied one after another ({'; '.join(reasons)})"


def activation_of(block: Any) -> Callable[[Tensor], Tensor]:
    """The activation of the gate of a block's experts."""
    experts: Any = block.experts.original if isinstance(block.experts, QuantExperts) else block.experts
    function: Callable[[Tensor], Tensor] = experts.act_fn
    return function


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The MLP of all tokens beside the experts: sigmoid(share(x)) * down(activation(gate) * up); `share` has one output."""

    gate_up: Product
    down: Product
    share: nn.Module
    activation: Gate

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(gate(self.gate_up(x), self.activation))
        share: Tensor = self.share(x)
        return y * share.sigmoid()


@dataclass(frozen=True, eq=False)
class ExpertMLP:
    """The output [M, H] of a block of experts for normalised x [M, H]. `rule`: a `RouterRule` on a GPU, else None."""

    block: nn.Module
    rule: Any
    shared: SharedExpert | None
    batch_invariant: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        block: Any = self.block
        if self.rule is None:
            _, weights, experts = block.gate(x)
            y = block.experts(x, experts, weights)
        else:
            from lowbit.kernels.choose.experts import tile_rows_for
            from lowbit.ops.route import route

            logits = linear(x, block.gate.weight)
            tile_rows = tile_rows_for(len(x), self.rule.top_k, logits.shape[1], self.batch_invariant)
            routing = route(logits, self.rule, tile_rows=tile_rows)
            y = block.experts(x, routing.experts, routing.weights, routing=routing)
        return y if self.shared is None else y + self.shared(x)


def expert_mlp_of(block: Any, dtype: torch.dtype, activation: Gate, batch_invariant: bool) -> ExpertMLP:
    """The MLP of a block of experts, its weights packed for x of `dtype`."""
    on_gpu = next(block.experts.parameters()).is_cuda
    if isinstance(block.experts, QuantExperts) and on_gpu:
        block.experts.batch_invariant |= batch_invariant
        for part in block.experts.packed().values():
            part.forms_for(dtype)
    shared = None
    if linears := shared_linears(block):
        for module in linears:
            if on_gpu and isinstance(module, QuantLinear):
                module.prepare(dtype)
        products = product(linears[:2], batch_invariant), product(linears[2:], batch_invariant)
        shared = SharedExpert(*products, block.shared_expert_gate, activation)
    return ExpertMLP(block, rule_of(block.gate) if on_gpu else None, shared, batch_invariant)


def rule_of(router: Any) -> Any:
    """The `RouterRule` of a router of Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE."""
    from lowbit.ops.route import RouterRule

    return RouterRule(router.top_k, "softmax", normalize=bool(getattr(router, "norm_topk_prob", True)))


@dataclass(frozen=True, eq=False)
class NormedQkv:
    """q, k and v [M, N], of which q and k are normalised over all their heads together, by the modules `norms`."""

    product: Product
    widths: Sequence[int]
    norms: Sequence[nn.Module]

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = self.product(x).split(list(self.widths), dim=-1)
        return torch.cat((self.norms[0](q), self.norms[1](k), v), dim=-1)
