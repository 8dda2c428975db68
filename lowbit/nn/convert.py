"""Converts the linear layers of a model to quantized ones and reports which modules it kept and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lowbit.formats import NO_PARTS, ExpertTensor, InputParts, PerBlock, PerTensor, QuantTensor, Scheme, parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.methods import Search
from lowbit.nn.decoding import allow_decoding
from lowbit.nn.embedding import QuantEmbedding, refuse_input
from lowbit.nn.experts import ExpertWeights, PackedExperts, QuantExperts, expert_refusals, expert_weights
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedWeight
from lowbit.nn.parameters import PackedParameters
from lowbit.ops.table import Problem, instead, scheme_refusals, why_slow
from lowbit.quantize.experts import quantize_experts
from lowbit.quantize.rtn import rtn


@dataclass(frozen=True)
class Kept:
    """A module that is not converted, with the reason."""

    name: str
    kind: str
    weights: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """The modules that a conversion quantizes or keeps.

    `linears` and `embeddings` have (N, K) by module name. `experts` has (E, N, K) of the weights of experts, by the name of the
    parameter (`model.layers.0.mlp.experts.gate_up_proj`). `tied` maps a module to the linear layer or embedding whose weights
    it shares. `kept` has the other modules, with reasons. `others` has the scheme of each module or parameter whose scheme
    differs from `scheme`.
    """

    scheme: Scheme
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)
    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)
    experts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    others: dict[str, Scheme] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """[N, K] of every single matrix to be quantized, by module name; a tied one counts once."""
        return {**self.linears, **self.embeddings}

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """[N, K] of every single matrix and [E, N, K] of the weights of experts, by name."""
        return {**self.shapes, **self.experts}

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """[N, K] of all matrices that linear layers and experts multiply by, one for each expert."""
        return [*self.linears.values(), *((n, k) for count, n, k in self.experts.values() for _ in range(count))]

    def scheme_of(self, name: str) -> Scheme:
        """The scheme of a module, or of the weights of experts, by name."""
        return self.others.get(name, self.scheme)

    def lines(self) -> list[str]:
        """Returns the report: lines on each scheme, the experts, tied modules and slow layers. Modules of one class that are
        kept for one reason share a line."""
        modules: dict[Scheme, list[str]] = {}
        for name in self.layers:
            modules.setdefault(self.scheme_of(name), []).append(name)
        out = []
        for scheme, names in modules.items() or [(self.scheme, [])]:
            single = [name for name in names if name in self.shapes]
            count = len(single) + sum(owner in names for owner in self.tied.values())
            weights = sum(math.prod(self.layers[name]) for name in names)
            of_experts = len(names) - len(single)
            experts = f" and {of_experts} weights of experts" if of_experts else ""
            out.append(f"converted to {scheme}: {count} modules{experts}, {weights:,} weights")
        out += expert_lines(self.experts)
        out += [f"  {name}: shares the weights of {source}" for name, source in self.tied.items()]
        out += slow_lines((self.scheme_of(name).name, *shape) for name, shape in self.linears.items())
        out += slow_lines((self.scheme_of(name).name, n, k) for name, (_, n, k) in self.experts.items())
        alike: dict[tuple[str, str], list[Kept]] = {}
        for row in self.kept:
            alike.setdefault((row.kind, row.reason), []).append(row)
        for (kind, reason), rows in alike.items():
            weights = sum(row.weights for row in rows)
            what = kind if len(rows) == 1 else f"and {len(rows) - 1} more {kind} like it"
            out.append(f"kept: {rows[0].name} ({what}, {weights:,} weights): {reason}")
        return out


def expert_lines(experts: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """Report lines on expert weights. Weights whose names differ only in the layer number, and whose shapes agree, share a
    line."""
    alike: dict[tuple[str, tuple[int, int, int]], list[str]] = {}
    for name, shape in experts.items():
        alike.setdefault((re.sub(r"\.\d+\.", ".*.", name), shape), []).append(name)
    return [
        f"  {names[0]}{f' and {len(names) - 1} more like it' if names[1:] else ''}: {count} experts of {n} x {k}"
        for (_, (count, n, k)), names in alike.items()
    ]


def slow_lines(layers: Iterable[tuple[str, int, int]]) -> list[str]:
    """Returns lines of the report on linear layers (scheme, N, K) that would dequantize their weights at every call on a
    GPU.
    """
    slow: dict[tuple[Scheme, tuple[str, ...], Scheme | None], int] = {}
    for scheme, n, k in layers:
        problem = Problem(parse_scheme(scheme), 1, n, k, torch.bfloat16, typical_machine(90))
        reasons = why_slow(problem)
        if reasons:
            key = (problem.scheme, reasons, instead(problem))
            slow[key] = slow.get(key, 0) + 1
    return [
        f"slow on a GPU: {count} module{'s' if count > 1 else ''} of {scheme} decode their weights at every call, since no "
        f"kernel takes them ({'; '.join(reasons)})" + ("" if better is None else f"; {better} has one")
        for (scheme, reasons, better), count in slow.items()
    ]


def plan_conversion(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    skip: Iterable[str] | None = None,
    embeddings: bool = False,
    tied: dict[str, str] | None = None,
) -> Plan:
    """Returns the plan of `convert` for `model`, which may be on the meta device and is not changed.

    `skip` holds module names or patterns (`lm_head`, `*.mlp.gate`, `model.layers.0.*`; a plain name also matches as the
    last part of one); None skips `lm_head`, or nothing with `embeddings=True`, which quantizes the embedding and the LM
    head as well. Modules that share one weight tensor are recognised by the tensor's identity. `tied` adds modules that do not
    share it yet (module name -> name of the module that owns the weights).
    """
    scheme = parse_scheme(scheme)
    plan = Plan(scheme)
    patterns = (() if embeddings else ("lm_head",)) if skip is None else tuple(skip)
    owners: dict[int, str] = {}
    ties = dict(tied or {})
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        if not own:
            continue
        if isinstance(module, (nn.Linear, nn.Embedding)):
            owner = owners.setdefault(id(module.weight), name)
            if owner != name:
                ties[name] = owner
    routers = _linear_routers(model)
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        if not own:
            continue
        experts = expert_weights(module)
        reason = _refusal(name, module, experts, scheme, patterns, embeddings, ties)
        if reason is None and name in routers:
            reason = _ROUTER
        if reason is not None:
            plan.kept.append(Kept(name, type(module).__name__, sum(p.numel() for p in own), reason))
        elif name in ties:
            plan.tied[name] = ties[name]
        elif isinstance(module, nn.Embedding):
            plan.embeddings[name] = (module.num_embeddings, module.embedding_dim)
        elif isinstance(module, nn.Linear):
            plan.linears[name] = (module.out_features, module.in_features)
        elif experts is not None:
            plan.experts.update({f"{name}.{part}": (experts.experts, *shape) for part, shape in experts.shapes.items()})
    for name in [n for n, owner in plan.tied.items() if owner not in plan.shapes]:
        plan.kept.append(
            Kept(name, type(model.get_submodule(name)).__name__, 0, f"shares the weights of {plan.tied.pop(name)}")
        )
    return plan


_ROUTER = "a router, which chooses experts, is not quantized"


def _linear_routers(model: nn.Module) -> set[str]:
    """Returns the names of linear layers that are routers. Their name says so (router, gate or wg), they are in the parent of a
    module of experts, and they have one output for each expert."""
    routers = set()
    for name, module in model.named_modules():
        experts = module.weights if isinstance(module, QuantExperts) else expert_weights(module)
        if experts is None:
            continue
        parent = name.rpartition(".")[0]
        for inner, linear in model.get_submodule(parent).named_modules():
            called = re.search(r"(^|\.)(\w*(router|gate)\w*|wg)(\.|$)", inner) is not None
            if called and isinstance(linear, nn.Linear) and linear.out_features == experts.experts:
                routers.add(f"{parent}.{inner}" if parent else inner)
    return routers


def matches(name: str, pattern: str) -> bool:
    """True if a module's name fits a pattern, or its last part is the pattern."""
    return fnmatchcase(name, pattern) or name.rpartition(".")[2] == pattern


def _refusal(
    name: str, module: nn.Module, experts: ExpertWeights | None, scheme: Scheme, skip: tuple[str, ...], embeddings: bool,
    ties: dict[str, str],
) -> str | None:  # fmt: skip
    """Returns the reason why a module with matrices is not converted; None if it is."""
    matching = [p for p in skip if matches(name, p)]
    if matching:
        return f"skipped by {matching[0]!r}"
    if isinstance(module, PackedParameters):
        return "quantized already"
    if experts is not None:
        return _expert_refusal(module, experts, scheme)
    if type(module) is nn.Embedding:
        if not embeddings:
            return "embeddings are converted on request (embeddings=True)"
        if isinstance(scheme.granularity, (PerTensor, PerBlock)):
            return f"rows of an embedding need scales of their own, {scheme} shares them among rows"
        return None
    if type(module).__name__.endswith("Router"):
        return _ROUTER
    if type(module) is not nn.Linear:
        dims = " and ".join(sorted({f"{p.dim()}-dimensional" for p in module.parameters(recurse=False) if p.dim() >= 2}))
        return f"only nn.Linear, nn.Embedding and fused experts are converted; {type(module).__name__} holds {dims} weights"
    if not embeddings and name in ties:
        return f"shares the weights of {ties[name]}, an embedding (embeddings=True converts both)"
    reasons = scheme_refusals(scheme, module.out_features, module.in_features)
    return f"no kernel: {'; '.join(reasons)}" if reasons else None


def _expert_refusal(module: nn.Module, experts: ExpertWeights, scheme: Scheme) -> str | None:
    """Returns the reason why a module of experts is not converted; None if it is."""
    if reasons := expert_refusals(module, experts):
        return "; ".join(reasons)
    for part, (n, k) in experts.shapes.items():
        if reasons := scheme_refusals(scheme, n, k):
            return f"no kernel for {part}: {'; '.join(reasons)}"
    return None


def convert(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    skip: Iterable[str] | None = None,
    embeddings: bool = False,
    search: Search = "max",
) -> Plan:
    """Quantizes `model`'s linear layers and experts in place by round-to-nearest, one matrix at a time, and returns the report.

    Arguments as for `plan_conversion`; `search` as for `quantize.rtn`. Raises ValueError, naming the layer, for weights
    that cannot be quantized.
    """
    plan = plan_conversion(model, scheme, skip=skip, embeddings=embeddings)
    dtypes = {model.get_parameter(f"{name}.weight").dtype for name in plan.linears}
    dtypes |= {model.get_parameter(name).dtype for name in plan.experts}
    for experts in {name.rpartition(".")[0]: None for name in plan.experts}:
        original = model.get_submodule(experts)  # a reference, since the first `swap_experts` replaces the module
        for name in (name for name in plan.experts if name.rpartition(".")[0] == experts):
            weight = expert_matrices(original, name.rpartition(".")[2])
            swap_experts(model, name, quantized_experts(name, len(weight), weight.__getitem__, plan.scheme, rounding(search)))
    for name in plan.shapes:
        swap(model, name, quantized(name, model.get_submodule(name).weight, plan.scheme, search))  # type: ignore[arg-type]
    for name, owner in plan.tied.items():
        tie(model, name, owner)
    for dtype in dtypes:
        allow_decoding(model, dtype)
    return plan


def quantized(
    name: str, weight: Tensor, scheme: Scheme, search: Search = "max", stored: torch.dtype | None = None
) -> QuantTensor:
    """Returns `rtn` of the weight; its errors name the layer."""
    try:
        return rtn(weight, scheme, search=search, stored=stored)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


Rounding = Callable[[Tensor, Scheme, torch.dtype | None], QuantTensor]
"""Quantizes a matrix to a scheme; its scales have the given dtype, or that of `quantize.rtn.scale_dtype` if it is None."""


def rounding(search: Search = "max", stored: torch.dtype | None = None) -> Rounding:
    """Returns rounding to nearest as `quantized_experts` calls it; arguments as for `quantize.rtn`."""
    return lambda weight, scheme, scale_type: rtn(weight, scheme, search=search, stored=stored, scale_type=scale_type)


def quantized_experts(
    name: str, count: int, weight: Callable[[int], Tensor], scheme: Scheme, quantize: Rounding,
) -> ExpertTensor:  # fmt: skip
    """Returns the quantized weights of `count` experts. `weight(e)` returns the matrix [N, K] of expert e; errors name it."""

    def of_expert(e: int, scale_type: torch.dtype | None) -> QuantTensor:
        try:
            return quantize(weight(e), scheme, scale_type)
        except ValueError as error:
            raise ValueError(f"{name}: expert {e}: {error}") from error

    return quantize_experts(count, of_expert)


def expert_matrices(experts: nn.Module, part: str) -> Tensor:
    """Returns the unquantized weights `part` ("gate_up_proj", ..) of a module of experts as matrices [E, N, K]."""
    found = expert_weights(experts)
    assert found is not None
    return found.matrices(experts.get_parameter(part).detach())


def swap_experts(model: nn.Module, name: str, q: ExpertTensor) -> PackedExperts:
    """Sets the weights `name` of a model's experts to `q`, on q's device.

    The first call for a module of experts replaces it by `QuantExperts`; its other weights are on the meta device until they
    are set.
    """
    return _quant_experts(model, name, q.scheme).set_weights(name.rpartition(".")[2], PackedExperts.from_expert_tensor(q))


def empty_experts(
    model: nn.Module, name: str, count: int, shape: tuple[int, int], scheme: Scheme, input_parts: InputParts = NO_PARTS
) -> PackedExperts:
    """Does what `swap_experts` does, with empty weights (on the meta device) of this scheme and these parts of an input
    transform."""
    empty = PackedExperts(count, shape, scheme, "meta", input_parts=input_parts)
    return _quant_experts(model, name, scheme).set_weights(name.rpartition(".")[2], empty)


def _quant_experts(model: nn.Module, name: str, scheme: Scheme) -> QuantExperts:
    """Returns the `QuantExperts` that has the weights `name`. A module that is not quantized yet is replaced by an empty one
    first."""
    experts = name.rpartition(".")[0]
    module = model.get_submodule(experts)
    if isinstance(module, QuantExperts):
        return module
    found = expert_weights(module)
    assert found is not None
    empty = {part: PackedExperts(found.experts, shape, scheme, "meta") for part, shape in found.shapes.items()}
    new = QuantExperts(module, empty).train(module.training)
    model.set_submodule(experts, new)
    return new


def swap(model: nn.Module, name: str, q: QuantTensor) -> PackedWeight:
    """Replaces the linear layer or embedding `name` by a quantized one with the weights `q`, on q's device, with the same
    bias.
    """
    module = model.get_submodule(name)
    new: PackedWeight
    if isinstance(module, nn.Embedding):
        new = QuantEmbedding.from_quant_tensor(q, module.weight.dtype)
    else:
        new = QuantLinear.from_quant_tensor(q, module.bias)  # type: ignore[arg-type]
    new.train(module.training)
    model.set_submodule(name, new)
    return new


def dequantized(module: PackedWeight, dtype: torch.dtype, shared: nn.Parameter | None = None) -> nn.Linear | nn.Embedding:
    """Returns a plain layer or embedding with the dequantized weights in `dtype`, on the same device, with the same bias. If
    `shared` is given, it is used as the weight. Raises UnsupportedProblem for sharded or offloaded weights.
    """
    weight = nn.Parameter(module.dequantized_weight(dtype)) if shared is None else shared
    new: nn.Linear | nn.Embedding
    if isinstance(module, QuantLinear):
        new = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        new.register_parameter("bias", module.bias)
    else:
        new = nn.Embedding(*module.shape, device="meta")
    new.weight = weight
    return new.train(module.training)


def tie(model: nn.Module, name: str, owner: str) -> None:
    """Replaces the linear layer or embedding `name` by a quantized one that shares the parameters of `owner`."""
    module, source = model.get_submodule(name), model.get_submodule(owner)
    assert isinstance(source, PackedWeight)
    new = empty_like(module, source.scheme, device="meta")
    new.share_weight(source)
    model.set_submodule(name, new)


def empty_like(
    module: nn.Module,
    scheme: Scheme,
    device: torch.device | str | None = None,
    *,
    input_parts: InputParts = NO_PARTS,
    low_rank: int = 0,
) -> PackedWeight:
    """Returns a quantized layer or embedding of the same shape, without weights, with the given parts of an input transform and
    the given rank of a low-rank correction.

    Raises ValueError for an embedding with either of them.
    """
    if isinstance(module, nn.Embedding):
        refuse_input(input_parts, low_rank)
        return QuantEmbedding(module.num_embeddings, module.embedding_dim, scheme, module.weight.dtype, device)
    assert isinstance(module, nn.Linear)
    features = (module.in_features, module.out_features)
    return QuantLinear(*features, scheme, bias=module.bias, device=device, input_parts=input_parts, low_rank=low_rank)
