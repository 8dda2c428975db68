"""Mixtures of experts in a decode program: the MLP of a layer whose tokens are routed to experts, and the norm of whole q and k
that OLMoE has.

    add, norm | router  gate-up of the experts {gate}  down {* weight} | sum over slots, add, norm of the next layer

A layer is eight launches on a GPU for up to 16 tokens: these five, qkv, attention and o; and seven where o has the residual in
its epilogue and the router the norm (`ResidualRouter`). None synchronises with the host, so CUDA graphs capture steps and
prompts. The sum over the slots of a token is part of the next norm (`SlotOutputs`). A shared expert takes three launches more:
two products, and the router's product apart from its choice, with a row for the gate of the shared expert. On a CPU
Transformers' router computes the choice, and the module of the experts their sum. Experts in 16 bits take torch's grouped
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit.engine.chain import Gamma
from lowbit.engine.decoder import ExpertsMLP
from lowbit.engine.product import Dense, Packed, Product, gated_product, product
from lowbit.hardware.machine import features_of
from lowbit.kernels.choose.tiles import RING_TOKENS, SMALL_TOKENS
from lowbit.kernels.reference.elementwise import Gate
from lowbit.nn import QuantLinear
from lowbit.nn.experts import PackedExperts, QuantExperts, expert_weights
from lowbit.nn.fused import AlternatingMLP
from lowbit.ops.elementwise import add_norm, gate
from lowbit.ops.expert_gemm import sum_norm, sum_slots
from lowbit.ops.experts import Gate as ExpertGate
from lowbit.ops.experts import Stacked, multiply_slots
from lowbit.ops.fused_gemm import chain_refusals, residual_gemm
from lowbit.ops.table import UnsupportedProblem, why_slow
from lowbit.pack import DenseWeight, ExpertOperandWeight

if TYPE_CHECKING:
    from lowbit.ops.route import Routing


def shared_linears(block: Any) -> tuple[nn.Module, ...]:
    """The linear layers of the shared expert of a block: gate, up and down, or down alone once gate and up are one weight; ()
    without a shared expert."""
    shared = getattr(block, "shared_expert", None)
    if shared is None:
        return ()
    if isinstance(shared, AlternatingMLP):
        return (shared.down_proj,)
    return shared.gate_proj, shared.up_proj, shared.down_proj


def block_refusals(block: Any) -> Iterator[str]:
    """Reasons why a decode program cannot compute a block of experts on the device of its weights."""
    experts = block.experts
    weight = next(experts.parameters())
    if not weight.is_cuda:
        return
    if not isinstance(experts, QuantExperts):
        yield from grouped_refusals(experts, weight.dtype, features_of(weight.device))
    else:
        for part in experts.packed().values():
            if part.scheme.activation is not None and (reasons := why_slow(part.problem(torch.bfloat16))):
                yield f"experts of {part.scheme}, which are multiplied one after another ({'; '.join(reasons)})"


def grouped_refusals(experts: nn.Module, dtype: torch.dtype, features: frozenset[str]) -> Iterator[str]:
    """Reasons why torch's grouped product does not multiply by experts that are not quantized, on a GPU with these features."""
    if dtype != torch.bfloat16 or "wgmma" not in features:
        yield f"experts in 16 bits, which a GPU multiplies in bf16 and by wgmma (sm_90) alone, not in {dtype}"
        return
    weights = expert_weights(experts)
    if weights is None or any(size % 8 for shape in weights.shapes.values() for size in shape):
        yield "experts in 16 bits whose rows are no multiples of 8 elements"


def activation_of(block: Any) -> Callable[[Tensor], Tensor] | None:
    """The activation of the gate of a block's experts; None for a gate that is no activation times up (gpt-oss)."""
    experts: Any = block.experts.original if isinstance(block.experts, QuantExperts) else block.experts
    return getattr(experts, "act_fn", None)


@dataclass(frozen=True, eq=False)
class SlotOutputs:
    """The output of a layer of experts for M tokens that is not summed yet.

    y [M * top_k, H]: outputs by slot, times the router's weights. shared [M, H]: the output of the shared expert, to be
    multiplied by the sigmoid of share [M, 1].
    """

    y: Tensor
    top_k: int
    shared: Tensor | None = None
    share: Tensor | None = None

    def __getitem__(self, tokens: Tensor | slice) -> SlotOutputs:
        """The outputs of some tokens, by their indices int64 or a slice."""
        y = self.y.unflatten(0, (-1, self.top_k))[tokens].flatten(0, 1)
        shared, share = (None if t is None else t[tokens] for t in (self.shared, self.share))
        return SlotOutputs(y, self.top_k, shared, share)

    def total(self) -> Tensor:
        """The output of the layer [M, H]."""
        total = sum_slots(self.y, self.top_k)
        if self.shared is None or self.share is None:
            return total
        return torch.addcmul(total, self.shared, self.share.sigmoid().to(total.dtype))

    def add_norm(self, h: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """x [M, H], the norm of h, after h += the output of the layer."""
        return sum_norm(h, self.y, self.top_k, gamma, eps, shared=self.shared, share=self.share)


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The MLP of all tokens beside the experts: sigmoid(share(x)) * down(activation(gate) * up); `share` has one output."""

    gate_up: Product
    down: Product
    share: nn.Module
    activation: Gate

    def ungated(self, x: Tensor) -> Tensor:
        """down(activation(gate) * up) [M, H], to be multiplied by sigmoid(share(x))."""
        if isinstance(self.gate_up, Packed) and self.gate_up.alternates:
            return self.down(self.gate_up.gated(x, self.activation))
        return self.down(gate(self.gate_up(x), self.activation))

    def __call__(self, x: Tensor) -> Tensor:
        share: Tensor = self.share(x)
        return self.ungated(x) * share.sigmoid()


@dataclass(frozen=True, eq=False)
class Router:
    """The routing of normalised x [M, H], by kernels that do not synchronise with the host.

    weight [E, H], with `shares` [E + 1, H]: the last row is the gate of the shared expert. rule: a `RouterRule`; bias float32
    [E]. bits: those of a code of the experts. Up to 16 tokens are one launch, a product and the choice. Otherwise logits are 16
    bits, as Transformers' router has them; with `batch_invariant` they are multiplied in blocks of 64 tokens.
    """

    weight: Tensor
    rule: Any
    bias: Tensor | None
    shares: bool
    bits: int
    batch_invariant: bool

    def __call__(self, x: Tensor) -> tuple[Routing, Tensor | None]:
        """The routing, and the logits [M, 1] of the shared expert's gate."""
        from lowbit.kernels.choose.experts import tile_rows_for
        from lowbit.ops.route import MOST_FUSED, route, route_tokens

        experts = len(self.weight) - self.shares
        tile_rows = tile_rows_for(len(x), self.rule.top_k, experts, self.bits, self.batch_invariant)
        fits = self.weight.dtype == x.dtype in (torch.float16, torch.bfloat16) and len(x) <= MOST_FUSED
        if fits and not (self.shares or self.batch_invariant):
            return route_tokens(x, self.weight, self.rule, self.bias, tile_rows=tile_rows), None
        logits = Dense(DenseWeight(self.weight), None, self.batch_invariant)(x.to(self.weight.dtype))
        routing = route(logits[:, :experts], self.rule, self.bias, tile_rows=tile_rows)
        return routing, logits[:, experts:] if self.shares else None

    @classmethod
    def of(cls, router: Any, share: Any, bits: int, batch_invariant: bool) -> Router:
        """That of Transformers' router, and of the gate of a shared expert (None without one)."""
        weight = router.weight.detach()
        if share is not None:
            weight = torch.cat([weight, share.weight.detach().to(weight.dtype)])
        return cls(weight.contiguous(), rule_of(router), bias_of(router), share is not None, bits, batch_invariant)


@dataclass(frozen=True, eq=False)
class ResidualRouter:
    """The product o with the residual, then the router with the norm before it: two launches for up to `most` tokens.

    gamma: the weight of the norm, whose sums of squares the product makes (ops/fused_gemm.py).
    """

    o: Packed | Dense
    router: Router
    gamma: Gamma
    eps: float
    most: int

    def __call__(self, attended: Tensor, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Routing]:
        """(x [M, H], its routing) after h [M, H] += o(attended), in place, with `bias` [H] or [M, H] in place of that of o; x
        is the norm of h."""
        from lowbit.kernels.choose.experts import tile_rows_for
        from lowbit.ops.route import norm_route

        router, gamma = self.router, self.gamma
        x, squares = residual_gemm(attended, self.o.weight, h, gamma.values, bias, factor=gamma.factor)
        tile_rows = tile_rows_for(len(h), router.rule.top_k, len(router.weight), router.bits)
        return norm_route(
            x, squares, router.weight, router.rule, router.bias, eps=self.eps, factor=gamma.factor, tile_rows=tile_rows
        )  # fmt: skip

    @classmethod
    def of(
        cls, o: Product, experts: ExpertMLP, gamma: Tensor, eps: float, dtype: torch.dtype, features: frozenset[str]
    ) -> ResidualRouter | None:  # fmt: skip
        """That of a layer whose router routes alone, on a GPU with these features; None where the kernels do not take it."""
        router = experts.router
        if router is None or router.batch_invariant or experts.shared is not None or router.weight.dtype != dtype:
            return None
        if not isinstance(o, Packed | Dense) or chain_refusals(o.weight, 1, dtype):
            return None
        # As in a dense chain: without wgmma the small-M kernel's tiles of 16 tokens leave the next start no registers.
        most = RING_TOKENS if "wgmma" in features else SMALL_TOKENS
        return cls(o, router, Gamma.of(gamma, 0.0, dtype), eps, most)


@dataclass(frozen=True, eq=False)
class PackedProducts:
    """The products of quantized experts by two kernels: y [M * top_k, H] of x [M, H].

    gate_up and down: weights of all experts. first and second: their modules, which transform inputs. function: the gate in the
    epilogue of the first product, "none" if apply_gate is another. Biases are in the order of the packed rows.
    """

    gate_up: Stacked
    down: Stacked
    first: PackedExperts
    second: PackedExperts
    function: ExpertGate
    apply_gate: Callable[[Tensor], Tensor]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    batch_invariant: bool

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        invariant = self.batch_invariant
        rows = self.first.transformed(x)
        h = multiply_slots(rows, self.gate_up, routing, self.gate_up_bias, gate=self.function, batch_invariant=invariant)
        hidden = self.second.transformed(self.apply_gate(h) if self.function == "none" else h)
        # A kernel that transforms the hidden rows stands between the products, and need not have waited for the routing.
        early = hidden is h
        return multiply_slots(
            hidden, self.down, routing, self.down_bias, per_slot=True, weighted=True, routed_before=early,
            batch_invariant=invariant,
        )  # fmt: skip

    @classmethod
    def of(cls, experts: QuantExperts, gate_up: Stacked, down: Stacked, batch_invariant: bool) -> PackedProducts:
        """Those of a module of experts whose weights are packed as `gate_up` and `down`."""
        first, second = experts.packed().values()
        bias, down_bias = (None if t is None else t.detach() for t in experts._biases())
        # The product with 8-bit activations does not fuse the gate, so rows of gate and up are not interleaved in its weight.
        rows = None if isinstance(gate_up, ExpertOperandWeight) else first.row_order
        if rows is not None and bias is not None:
            bias = bias[:, rows.to(bias.device)].contiguous()
        function: ExpertGate = "none" if rows is None else experts.gate.kind
        gate_of = experts._apply_gate
        return cls(gate_up, down, first, second, function, gate_of, bias, down_bias, batch_invariant)


@dataclass(frozen=True, eq=False)
class GroupedProducts:
    """Multiplies 16-bit experts by torch's grouped matrix product. Maps x [M, H] to y [M * top_k, H], the outputs of each
    token's experts times the router's weights.

    gate_up [E, H, N] and down [E, I, H] are views of the model's parameters.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    apply_gate: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        slots = routing.experts.numel()
        if x.is_cuda:
            from lowbit.kernels.parts.launch import is_recording

            if is_recording():  # then the routing is uninitialised, and torch would read experts that do not exist
                return x.new_empty((slots, self.down.shape[2]))
        order = routing.order.long()
        expert = routing.experts.flatten()[order] if self.gate_up_bias is not None or self.down_bias is not None else None
        h = torch._grouped_mm(x[order // routing.top_k], self.gate_up, offs=routing.offsets[1:])
        if self.gate_up_bias is not None:
            h = h + self.gate_up_bias[expert]
        y = torch._grouped_mm(self.apply_gate(h), self.down, offs=routing.offsets[1:])
        if self.down_bias is not None:
            y = y + self.down_bias[expert]
        y = y * routing.weights.flatten()[order, None]
        return y.new_empty((slots, y.shape[1]), dtype=x.dtype).index_copy_(0, order, y.to(x.dtype))

    @classmethod
    def of(cls, experts: Any, activation: Gate | None) -> GroupedProducts:
        """Those of Transformers' module; `activation` of its gate, None for a gate of its own."""
        weights = expert_weights(experts)
        assert weights is not None
        first, second = (
            weights.matrices(getattr(experts, name).detach()).transpose(1, 2) for name in (weights.first, weights.second)
        )
        biases = (getattr(experts, f"{name}_bias", None) for name in (weights.first, weights.second))
        bias, down_bias = (None if t is None else t.detach() for t in biases)
        if activation is None:
            return cls(first, second, bias, down_bias, experts._apply_gate)
        return cls(first, second, bias, down_bias, lambda h: gate(h, activation))


@dataclass(frozen=True, eq=False)
class ExpertMLP:
    """The output of a block of experts for normalised x [M, H]: `SlotOutputs` where kernels route, else a tensor [M, H].

    choose: Transformers' router. router and products: the kernels'; None where the module of experts computes.
    """

    experts: nn.Module
    choose: nn.Module
    router: Router | None
    products: PackedProducts | GroupedProducts | None
    shared: SharedExpert | None

    def __call__(self, x: Tensor) -> Tensor | SlotOutputs:
        if self.router is None or self.products is None:
            _, weights, experts = self.choose(x)
            y: Tensor = self.experts(x, experts, weights)
            return y if self.shared is None else y + self.shared(x)
        shared = None if self.shared is None else self.shared.ungated(x)
        routing, share = self.router(x)
        if self.shared is not None and share is None:
            share = self.shared.share(x)
        return SlotOutputs(self.products(x, routing), routing.top_k, shared, share)

    def routed(self, x: Tensor, routing: Routing) -> SlotOutputs:
        """The output for x that is routed already, of a block without a shared expert."""
        assert self.products is not None
        return SlotOutputs(self.products(x, routing), routing.top_k)


def expert_mlp_of(mlp: ExpertsMLP, dtype: torch.dtype, activation: Gate, batch_invariant: bool) -> ExpertMLP:
    """The MLP of a block of experts, its weights packed for x of `dtype`."""
    block: Any = mlp.block
    experts = block.experts
    on_gpu = next(experts.parameters()).is_cuda
    shared = _shared_expert(block, dtype, activation, batch_invariant, on_gpu) if shared_linears(block) else None
    if not on_gpu:
        return ExpertMLP(experts, mlp.router, None, None, shared)
    share = None if shared is None or type(shared.share) is not nn.Linear else shared.share  # a quantized one computes itself
    router = Router.of(mlp.router, share, _bits_of(experts), batch_invariant)
    if not isinstance(experts, QuantExperts):
        if batch_invariant:
            raise UnsupportedProblem("experts in 16 bits: torch's grouped product is not batch-invariant; quantize them")
        own = None if activation_of(block) is None else activation
        return ExpertMLP(experts, mlp.router, router, GroupedProducts.of(experts, own), shared)
    experts.batch_invariant |= batch_invariant
    packed = [part.forms_for(dtype) for part in experts.packed().values()]
    return ExpertMLP(experts, mlp.router, router, PackedProducts.of(experts, packed[0], packed[1], batch_invariant), shared)


def _bits_of(experts: nn.Module) -> int:
    """Bits of a code of quantized experts, 16 of others."""
    if not isinstance(experts, QuantExperts):
        return 16
    return max(part.scheme.weight.bits for part in experts.packed().values())


def _shared_expert(
    block: Any, dtype: torch.dtype, activation: Gate, batch_invariant: bool, on_gpu: bool
) -> SharedExpert:  # fmt: skip
    """The shared expert of a block, with gate and up in one weight where their weights permit it."""
    linears = shared_linears(block)
    for module in linears if on_gpu else ():
        if isinstance(module, QuantLinear):
            module.prepare(dtype)
    gate_up = gated_product(linears[:-1], block, linears[-1], activation, batch_invariant, name="shared_expert")
    return SharedExpert(gate_up, product(linears[-1:], batch_invariant), block.shared_expert_gate, activation)


def rule_of(router: Any) -> Any:
    """The `RouterRule` of a router of gpt-oss, Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE."""
    from lowbit.ops.route import RouterRule

    if bias_of(router) is not None:  # gpt-oss
        return RouterRule(router.top_k, bias_use="logits", softmax_over_selected=True)
    return RouterRule(router.top_k, "softmax", normalize=bool(getattr(router, "norm_topk_prob", True)))


def bias_of(router: Any) -> Tensor | None:
    """The bias float32 [E] of a router's logits; None without one."""
    bias = getattr(router, "bias", None)
    return None if bias is None else bias.detach().float()


@dataclass(frozen=True, eq=False)
class NormedQkv:
    """q, k and v [M, N], of which q and k are normalised over all their heads together, with `gammas` and `eps`."""

    product: Product
    widths: Sequence[int]
    gammas: Sequence[Tensor]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.normed(self.product(x))

    def normed(self, qkv: Tensor) -> Tensor:
        """Returns the product's output with q and k normalised."""
        q, k, v = qkv.split(list(self.widths), dim=-1)
        normed = (add_norm(t.contiguous(), None, gamma, self.eps) for t, gamma in zip((q, k), self.gammas, strict=True))
        return torch.cat((*normed, v), dim=-1)
