"""Which scheme and method to quantize a model with, for a memory budget or a bound on the divergence from its 16-bit self.

What each costs in quality was measured, on small models (docs/internals/study.md; the table comes with the package); how many
bytes it takes follows from the shapes in config.json, without reading a weight. Whatever a row is not measured
on is said beside it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lowbit.engine.block_pool import pages_for
from lowbit.engine.cache import CacheSpec
from lowbit.formats import PerGroup, Scheme, ZeroPoint, parse_scheme
from lowbit.models.hf import plan_for
from lowbit.models.rotate import rotation_refusals
from lowbit.models.skeleton import causal_skeleton
from lowbit.models.source import resolve
from lowbit.nn.convert import Plan
from lowbit.quantize.mixed import stored_bits
from lowbit.quantize.rotate import rotation_factors
from lowbit.sources import CONFIG

GROUPS = (128, 64, 32, 16)
SIMILAR = 1.25
"""Divergences this close are one: draws of the calibration text differ by as much (docs/internals/study.md), so fewer bytes or
less work decide."""
NEGLIGIBLE = 0.002
"""Divergences up to here are one as well: a fifth of a percent of perplexity."""
BROKEN = 0.5
"""From here on text breaks down: at 0.49 SmolLM2's summaries had the ROUGE-1 of 16 bits, at 0.78 an eighth
(docs/internals/study.md)."""
NEIGHBOURS = 3
"""Rows shown on either side of what is taken."""

_OPTIONS = {
    "search": "--search", "iterations": "--iterations", "samples": "--samples", "rotate_inputs": "--rotate-inputs",
}  # fmt: skip
_FLAGS = {"act_order=True": "--act-order", "static_groups=True": "--static-groups", "rotate=True": "--rotate"}


@dataclass(frozen=True)
class Candidate:
    """A scheme and a method, its checkpoint's `bytes`, and its divergence `kl` in nats a token as far as it is known: measured
    on the model `of`, times `factor` where that is not the measured model nearest to the one asked about."""

    scheme: Scheme
    method: str
    bytes: int
    kl: float
    of: str
    factor: float
    measured: Scheme
    """The scheme that was measured; groups may be of another size."""

    @property
    def options(self) -> tuple[str, ...]:
        """What follows `lowbit quantize SOURCE TARGET`."""
        words = options_of(self.method)
        assert words is not None
        return ("--scheme", self.scheme.name, *words)

    @property
    def work(self) -> int:
        """0 without data, 1 with a text to calibrate on, 2 where rounding is learned."""
        return {"rtn": 0, "hqq": 0, "learned": 2}.get(self.method.split(" ")[0], 1)

    def source(self) -> str:
        """What the divergence is from."""
        groups = "" if self.scheme == self.measured else f", as {self.measured}"
        return f"{self.of}{groups}" if self.factor == 1 else f"{self.factor:.2f} x {self.of}{groups}: estimate"


@dataclass(frozen=True)
class Recommendation:
    """What to do with the model at `model`: `chosen`, with `neighbours` by size, `chosen` among them, and `why`, a line each.
    `weights_16bit_bytes` is the model as it is, `cache_bytes` what keys and values of the context take besides."""

    model: str
    weights: int
    linear_weights: int
    weights_16bit_bytes: int
    cache_bytes: int
    chosen: Candidate
    neighbours: tuple[Candidate, ...]
    why: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that makes it."""
        source = Path(self.model)
        target = f"{source.resolve().name}-{self.chosen.scheme.name}"
        return shlex.join(["lowbit", "quantize", str(source), target, *self.chosen.options])


def recommend(
    model: str | Path, *, budget_bytes: float | None = None, divergence: float | None = None, context: int = 0
) -> Recommendation:
    """What to quantize the 16-bit model `model`, a folder or a name on the hub, with: the least divergence in `budget_bytes`,
    or the fewest bytes with at most `divergence` nats a token, within the budget where both are given.

    The budget is for all weights, embeddings and LM head in 16 bits, and for keys and values of `context` tokens. Among the
    divergences within a quarter of the least (`SIMILAR`), and negligible ones, less work decides, then fewer bytes. Reads
    config.json only. Raises CheckpointError for a folder that holds no such model, ValueError where nothing that was measured
    fits, saying what would.
    """
    if budget_bytes is None and divergence is None:
        raise ValueError(
            "say what is wanted: a budget of memory (--budget-gb 6) or a bound on the divergence (--divergence 0.05)"
        )
    source = resolve(model, CONFIG)
    source.require_unquantized("give the 16-bit model it came from")
    path = source.path
    skeleton = causal_skeleton(path)
    kv = cache_bytes(skeleton, context)
    candidates = _candidates(skeleton)
    room = None if budget_bytes is None else budget_bytes - kv
    fitting = [
        c
        for c in candidates
        if c.scheme.activation is None and (room is None or c.bytes <= room) and (divergence is None or c.kl <= divergence)
    ]
    if not fitting:
        raise ValueError(f"{path}: {_nothing_fits(skeleton, candidates, room, kv, divergence)}")
    if divergence is None:
        least = min(c.kl for c in fitting)
        alike = [c for c in fitting if c.kl <= max(SIMILAR * least, NEGLIGIBLE)]
        chosen = min(alike, key=lambda c: (c.work, c.bytes, c.kl))
    else:
        chosen = min(fitting, key=lambda c: (c.bytes, c.work, c.kl))
    plan = plan_for(skeleton, chosen.scheme.name, None, False)
    weights = sum(p.numel() for p in skeleton.parameters())
    linear = sum(n * k for n, k in plan.linears.values())
    full = tensor_bytes(skeleton, None)
    why = (*_why(chosen, candidates, budget_bytes, divergence, full, kv), *_limits(chosen, plan, skeleton))
    return Recommendation(str(model), weights, linear, full, kv, chosen, _neighbours(chosen, candidates), why)


def tensor_bytes(model: PreTrainedModel, plan: Plan | None) -> int:
    """Bytes of all tensors of a model quantized by `plan` (None: not at all), rounded to nearest: what is quantized with its
    scales and zeros, everything else in the type that config.json names (16 bits where it names none)."""
    dtype = _dtype(model)
    own: set[int] = set()
    total = 0
    shapes = {} if plan is None else plan.shapes
    tied = _tied(model)
    others = {} if plan is None else plan.others
    for name, tensor in model.state_dict(keep_vars=True).items():
        module = name.removesuffix(".weight")
        if name in tied or id(tensor) in own:
            continue
        own.add(id(tensor))
        if module in shapes and name != module:
            assert plan is not None
            total += stored_bits(shapes[module], others.get(module, plan.scheme)) // 8
        else:
            total += tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())
    return total


def cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes of keys and values of `context` tokens, in whole pages as the decode engine has them."""
    if context == 0:
        return 0
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads or not getattr(config, "num_hidden_layers", None):
        raise ValueError(f"{type(model).__name__}: config.json names no attention heads, so what a context takes is not known")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys, values = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))  # DeepSeek's differ
    dtype = _dtype(model)
    spec = CacheSpec(config.num_hidden_layers, kv_heads, (keys + values) // 2, dtype if dtype.itemsize == 2 else torch.bfloat16)
    return spec.page_bytes * pages_for(context)


def options_of(method: str) -> tuple[str, ...] | None:
    """The options of `lowbit quantize` for a method as the study names it ("gptq act_order=True"); None where it has none for
    one of them."""
    name, *settings = method.split(" ")
    words = [] if name == "rtn" else ["--method", name]
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting in _FLAGS:
            words.append(_FLAGS[setting])
        elif key in _OPTIONS:
            words += [_OPTIONS[key], value]
        else:
            return None
    return tuple(words)


@cache
def measured() -> tuple[dict[str, Any], ...]:
    """The table that `python -m study` writes: models, the smallest first, each with its rows."""
    text = resources.files("lowbit.eval").joinpath("data/divergence.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


@cache
def of_one_text() -> tuple[dict[str, Any], ...]:
    """What was measured on one text alone, outside the study: each row names its `source` in the documentation."""
    text = resources.files("lowbit.eval").joinpath("data/one_text.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


def _tied(model: PreTrainedModel) -> set[str]:
    """Names of weights that are another one's."""
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def _dtype(model: PreTrainedModel) -> torch.dtype:
    found = getattr(model.config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _candidates(model: PreTrainedModel) -> list[Candidate]:
    """Everything that was measured, with its bytes for this model. The divergence is that on the largest measured model that is
    no larger than this one (the smallest, if all are); of a case that only another one has, that one's times the ratio of the
    two models over all cases that both have (geometric mean), and so is that of a case measured on one text alone."""
    linears = plan_for(model, "w8a16", None, False).linears
    base = _base(linears)
    found: dict[tuple[Scheme, str], Candidate] = {}
    plans: dict[Scheme, Plan] = {}
    rotatable, apart = _rotatable(model), _untied_bytes(model)
    for other in (base, *(m for m in measured() if m is not base), *of_one_text()):
        factor = 1.0 if other is base else _ratio(base, other)
        for row in other["rows"]:
            was = parse_scheme(row["scheme"])
            scheme = _for_model(was, other["group"], linears)
            if scheme is None or (scheme, row["method"]) in found or options_of(row["method"]) is None:
                continue
            rotated = "rotate=True" in row["method"]
            if (rotated and not rotatable) or ("rotate_inputs" in row["method"] and any(k % 16 for _, k in linears.values())):
                continue
            if scheme.zero is not ZeroPoint.NONE:  # the measured weights were on such a grid once, which flatters these
                continue
            if scheme not in plans:
                plans[scheme] = plan_for(model, scheme.name, None, False)
            if plans[scheme].linears:
                size = tensor_bytes(model, plans[scheme]) + (apart if rotated else 0)
                found[scheme, row["method"]] = Candidate(
                    scheme, row["method"], size, row["kl"] * factor, other["model"], factor, was
                )
    return list(found.values())


def _rotatable(model: PreTrainedModel) -> bool:
    """Whether a model is of the kind that `--rotate` takes, by its tensors' names and sizes; the rest is tried out there."""
    text: Any = model.config.get_text_config()
    roles = {name.removeprefix(f"{model.base_model_prefix}.") for name in model.state_dict()}
    try:
        sizes = (text.hidden_size, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        return not rotation_refusals(roles) and all(rotation_factors(size) for size in sizes)
    except (AttributeError, ValueError):  # no such size, or no matrix of it
        return False


def _untied_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that are another one's, which `--rotate` takes apart."""
    return sum(tensor.numel() * _dtype(model).itemsize for name, tensor in model.state_dict().items() if name in _tied(model))


def _ratio(base: dict[str, Any], other: dict[str, Any]) -> float:
    """By what the divergences of `other` are multiplied to be those of `base`: geometric mean over the cases of both."""
    one, two = _by_case(base), _by_case(other)
    logs = [math.log(one[case] / two[case]) for case in one.keys() & two.keys()]
    return math.exp(math.fsum(sorted(logs)) / len(logs)) if logs else 1.0


def _by_case(model: dict[str, Any]) -> dict[tuple[Scheme, str], float]:
    """Divergence by method and scheme, the model's groups counting as groups of 128."""
    found = {}
    for row in model["rows"]:
        scheme = parse_scheme(row["scheme"])
        if scheme.granularity == PerGroup(model["group"]):
            scheme = replace(scheme, granularity=PerGroup(GROUPS[0]))
        found[scheme, row["method"]] = row["kl"]
    return found


def _base(linears: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The largest measured model with no more linear weights than there are in `linears`; the smallest if all have more."""
    weights = sum(n * k for n, k in linears.values())
    return next((m for m in reversed(measured()) if m["linear"] <= weights), measured()[0])


def _for_model(scheme: Scheme, group: int, linears: Mapping[str, tuple[int, int]]) -> Scheme | None:
    """The scheme with the largest groups that divide this model's layers where it was measured in those of its own model; None
    if no groups do."""
    if not isinstance(scheme.granularity, PerGroup):
        return scheme
    sizes = [size for size in GROUPS if all(k % size == 0 for _, k in linears.values())]
    size = scheme.granularity.size
    if size != group:
        return scheme if size in sizes else None
    return replace(scheme, granularity=PerGroup(sizes[0])) if sizes else None


def _front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates to which none of as few bytes comes as near, the smallest first."""
    front: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.bytes, c.kl, c.work)):
        if not front or c.kl < front[-1].kl:
            front.append(c)
    return front


def _neighbours(chosen: Candidate, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    front = _front(candidates)
    below = [c for c in front if c.bytes < chosen.bytes][-NEIGHBOURS:]
    above = [c for c in front if c.bytes > chosen.bytes][:NEIGHBOURS]
    same = [c for c in candidates if c.scheme == chosen.scheme or (c.bytes == chosen.bytes and c in front)]
    return tuple(sorted([*below, *same, *above], key=lambda c: (c.bytes, -c.kl)))


def gigabytes(count: float) -> str:
    """Bytes as a person reads them: GB of 10^9 bytes, MB of 10^6 where there are few."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _why(
    chosen: Candidate, candidates: Sequence[Candidate], budget: float | None, divergence: float | None, full: int, kv: int
) -> list[str]:
    lines = []
    beside = f", with {gigabytes(kv)} of keys and values {gigabytes(chosen.bytes + kv)}" if kv else ""
    if divergence is None:
        assert budget is not None
        better = [c for c in _front(candidates) if c.bytes + kv > budget and c.kl * SIMILAR < chosen.kl]
        least = min((c for c in candidates if c.bytes + kv <= budget), key=lambda c: c.kl)
        near = "" if least.kl == chosen.kl else f", all but that of {_of(least)}, for less work or fewer bytes"
        lines.append(f"the least divergence in {gigabytes(budget)}{near}: {gigabytes(chosen.bytes)} of weights{beside}")
        if full + kv <= budget:
            lines.append(f"the model takes {gigabytes(full)} and fits as it is; quantized it is smaller and faster")
        if better:
            lines.append(f"the next better is {better[0].scheme} by {better[0].method}, {gigabytes(better[0].bytes + kv)}")
    else:
        lines.append(f"the fewest bytes with at most {divergence:g} nats a token: {gigabytes(chosen.bytes)} of weights{beside}")
    same = [c for c in candidates if c.scheme == chosen.scheme and c != chosen]
    rounded = next((c for c in same if c.method == "rtn"), None)
    calibrated = min((c for c in same if c.work), key=lambda c: c.kl, default=None)
    if chosen.work and rounded is not None:
        lines.append(f"{chosen.method} leaves {chosen.kl / rounded.kl:.0%} of the divergence that rounding to nearest has")
    if not chosen.work and calibrated is not None:
        lines.append(
            f"{calibrated.method}, with a text to calibrate on, leaves {calibrated.kl / chosen.kl:.0%} of its divergence"
        )
    learned = min((c for c in same if c.work == 2), key=lambda c: c.kl, default=None)
    if chosen.work == 1 and learned is not None and learned.kl < chosen.kl:
        lines.append(
            f"--method learned, for more work, leaves {learned.kl / chosen.kl:.0%} of its divergence ({learned.source()})"
        )
    eight = [c for c in candidates if c.scheme.activation is not None and c.bytes <= chosen.bytes]
    fast = min(eight, key=lambda c: c.kl, default=None)
    if fast is not None and (divergence is None or fast.kl <= divergence):
        lines.append(
            f"for many tokens at once, with activations in 8 bits: {shlex.join(fast.options)}, {gigabytes(fast.bytes)} with a "
            f"divergence of {fast.kl:.2g} ({fast.source()})"
        )
    if chosen.kl >= BROKEN:
        lines.append(
            f"a divergence of {chosen.kl:.2g} is one at which text breaks down: take a shorter context, more memory or "
            "a smaller model in more bits"
        )
    return lines


def _limits(chosen: Candidate, plan: Plan, model: PreTrainedModel) -> list[str]:
    """What the figures do not cover, a line each."""
    base, lines = _base(plan.linears), []
    times = sum(n * k for n, k in plan.linears.values()) / base["linear"]
    if 0.5 <= times <= 2:
        lines.append(f"measured on {chosen.of}" + (", a model of this very shape" if times == 1 else ", not on this model"))
    else:
        size = f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
        lines.append(
            f"extrapolated: this model has {size} times the linear weights of {base['model']}, the nearest one that was "
            "measured; that larger models lose less at the same bits is not in these figures"
        )
    if chosen.factor != 1:
        lines.append(
            f"its divergence is an estimate: that of {chosen.of}, times {chosen.factor:.2f}, the ratio to {base['model']} "
            "where both were measured"
        )
    if chosen.scheme != chosen.measured:
        lines.append(f"it was measured as {chosen.measured}; finer groups lose less, coarser ones more")
    if plan.kept:
        weights = sum(row.weights for row in plan.kept if f"{row.name}.weight" not in _tied(model))
        others = sorted({row.kind for row in plan.kept} - {"Linear", "Embedding"})
        among = ", ".join(["embeddings and LM head among them", *others])
        lines.append(
            f"{weights:,} weights of {len(plan.kept)} modules ({among}) are counted in {8 * _dtype(model).itemsize} bits"
        )
    lines += [line for line in plan.lines() if line.startswith("slow on a GPU")]
    lines.append("measure it on your own text: lowbit eval OUT --reference MODEL --suite text")
    return lines


def _nothing_fits(
    model: PreTrainedModel, candidates: Sequence[Candidate], room: float | None, kv: int, divergence: float | None
) -> str:
    if not candidates:
        return "none of its layers can be quantized by a scheme that was measured"
    small, near = min(candidates, key=lambda c: (c.bytes, c.kl)), min(candidates, key=lambda c: c.kl)
    if room is None:
        return f"no scheme that was measured diverges by {divergence:g} or less; {_of(near)} is the nearest; or keep 16 bits"
    inside = [c for c in candidates if c.bytes <= room]
    context = f", {gigabytes(kv)} of it keys and values" if kv else ""
    if inside:
        assert divergence is not None
        best, least = min(inside, key=lambda c: c.kl), [c for c in candidates if c.kl <= divergence]
        wanted = f"{_of(min(least, key=lambda c: c.bytes))} has it" if least else f"{_of(near)} is the nearest of all"
        return f"nothing in {gigabytes(room + kv)}{context} diverges by {divergence:g} or less: there, {_of(best)}; {wanted}"
    whole = tensor_bytes(model, plan_for(model, small.scheme.name, None, True))
    return (
        f"nothing that was measured fits {gigabytes(room + kv)}{context}: the smallest is {_of(small)}. With the embedding and "
        f"the LM head in {small.scheme} too (lowbit quantize --embeddings) it takes {gigabytes(whole)}, which was not measured"
    )


def _of(c: Candidate) -> str:
    return f"{c.scheme} by {c.method}, {gigabytes(c.bytes)} with a divergence of {c.kl:.2g}"
