"""Converts the linear layers of a model to quantized ones and reports which modules it kept and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lowbit.formats import NO_PARTS, InputParts, PerBlock, PerTensor, QuantTensor, Scheme, parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.methods import Search
from lowbit.nn.decoding import allow_decoding
from lowbit.nn.embedding import QuantEmbedding, refuse_input
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedWeight
from lowbit.ops.table import Problem, instead, scheme_refusals, why_slow
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
    """The plan of a conversion. `linears`, `embeddings`: modules that get quantized weights, by name. `tied`: module -> the
    linear layer or embedding whose weights it shares. `kept`: modules that stay, with reasons. `others`: modules whose scheme
    differs from `scheme`.
    """

    scheme: Scheme
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)
    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    others: dict[str, Scheme] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """[N, K] of every matrix to be quantized, by module name; tied matrices occur once."""
        return {**self.linears, **self.embeddings}

    def lines(self) -> list[str]:
        """Returns the report: a line for each scheme, and a line for each reason with the modules that stay unchanged."""
        modules: dict[Scheme, list[str]] = {}
        for name in self.shapes:
            modules.setdefault(self.others.get(name, self.scheme), []).append(name)
        out = []
        for scheme, names in modules.items() or [(self.scheme, [])]:
            count = len(names) + sum(owner in names for owner in self.tied.values())
            weights = sum(self.shapes[name][0] * self.shapes[name][1] for name in names)
            out.append(f"converted to {scheme}: {count} modules, {weights:,} weights")
        out += [f"  {name}: shares the weights of {source}" for name, source in self.tied.items()]
        out += slow_lines((self.others.get(name, self.scheme).name, *shape) for name, shape in self.linears.items())
        alike: dict[tuple[str, str], list[Kept]] = {}
        for row in self.kept:
            alike.setdefault((row.kind, row.reason), []).append(row)
        for (kind, reason), rows in alike.items():
            weights = sum(row.weights for row in rows)
            what = kind if len(rows) == 1 else f"and {len(rows) - 1} more {kind} like it"
            out.append(f"kept: {rows[0].name} ({what}, {weights:,} weights): {reason}")
        return out


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
    head as well. Modules that share one weight tensor are found by identity; `tied` adds ties that do not exist yet, module
    name -> name of the owner.
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
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        if not own:
            continue
        reason = _refusal(name, module, scheme, patterns, embeddings, ties)
        if reason is not None:
            plan.kept.append(Kept(name, type(module).__name__, sum(p.numel() for p in own), reason))
        elif name in ties:
            plan.tied[name] = ties[name]
        elif isinstance(module, nn.Embedding):
            plan.embeddings[name] = (module.num_embeddings, module.embedding_dim)
        elif isinstance(module, nn.Linear):
            plan.linears[name] = (module.out_features, module.in_features)
    for name in [n for n, owner in plan.tied.items() if owner not in plan.shapes]:
        plan.kept.append(
            Kept(name, type(model.get_submodule(name)).__name__, 0, f"shares the weights of {plan.tied.pop(name)}")
        )
    return plan


def matches(name: str, pattern: str) -> bool:
    """True if a module's name fits a pattern, or its last part is the pattern."""
    return fnmatchcase(name, pattern) or name.rpartition(".")[2] == pattern


def _refusal(
    name: str, module: nn.Module, scheme: Scheme, skip: tuple[str, ...], embeddings: bool, ties: dict[str, str]
) -> str | None:
    """Returns the reason why a module with matrices is not converted; None if it is."""
    matching = [p for p in skip if matches(name, p)]
    if matching:
        return f"skipped by {matching[0]!r}"
    if isinstance(module, PackedWeight):
        return "quantized already"
    if type(module) is nn.Embedding:
        if not embeddings:
            return "embeddings are converted on request (embeddings=True)"
        if isinstance(scheme.granularity, (PerTensor, PerBlock)):
            return f"rows of an embedding need scales of their own, {scheme} shares them among rows"
        return None
    if type(module) is not nn.Linear:
        dims = " and ".join(sorted({f"{p.dim()}-dimensional" for p in module.parameters(recurse=False) if p.dim() >= 2}))
        return f"only nn.Linear and nn.Embedding are converted; {type(module).__name__} holds {dims} weights"
    if not embeddings and name in ties:
        return f"shares the weights of {ties[name]}, an embedding (embeddings=True converts both)"
    reasons = scheme_refusals(scheme, module.out_features, module.in_features)
    return f"no kernel: {'; '.join(reasons)}" if reasons else None


def convert(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    skip: Iterable[str] | None = None,
    embeddings: bool = False,
    search: Search = "max",
) -> Plan:
    """Quantizes `model`'s linear layers in place by round-to-nearest, one layer at a time, and returns the report.

    Arguments as for `plan_conversion`; `search` as for `quantize.rtn`. Raises ValueError, naming the layer, for weights
    that cannot be quantized.
    """
    plan = plan_conversion(model, scheme, skip=skip, embeddings=embeddings)
    dtypes = {model.get_parameter(f"{name}.weight").dtype for name in plan.linears}
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
