"""Recommends a scheme and a method for a memory budget or a bound on the divergence from the 16-bit model.

Divergences were measured on small models (docs/internals/study.md; the table is part of the package). Bytes are computed
from the shapes in config.json, without reading a weight. Every row names the model that it was measured on.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Sequence, Set
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
from lowbit.formats.kv import KV16, KVScheme, parse_kv
from lowbit.models.experts import expert_summary, experts_per_token
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
"""Divergences within this factor count as equal: other calibration samples change them as much (docs/internals/study.md)."""
NEGLIGIBLE = 0.002
"""Divergences up to this value count as equal too: 0.2 % of perplexity."""
BROKEN = 0.5
"""Divergence from which output breaks down: SmolLM2's summaries kept their ROUGE-1 at 0.49 and an eighth of it at 0.78
(docs/internals/study.md)."""
KV_FORMATS = ("16", "fp8", "int8", "k8v4", "int4")
"""Formats of keys and values that the answer compares."""
NEIGHBOURS = 3
"""Rows shown with fewer and with more bytes than the chosen one."""

_OPTIONS = {
    "search": "--search", "iterations": "--iterations", "distill": "--distill", "samples": "--samples",
    "rotate_inputs": "--rotate-inputs",
}  # fmt: skip
_FLAGS = {"act_order=True": "--act-order", "static_groups=True": "--static-groups", "rotate=True": "--rotate"}


@dataclass(frozen=True)
class SchemeOption:
    """A scheme and a method, the checkpoint's `bytes`, and the divergence `kl` in nats per token.

    `kl` was measured on the model `of`. If another measured model is closer in size, it is multiplied by `factor`.
    """

    scheme: Scheme
    method: str
    bytes: int
    kl: float
    of: str
    factor: float
    measured: Scheme
    """The scheme that was measured; its group size may differ."""

    @property
    def options(self) -> tuple[str, ...]:
        """Returns the options of `lowbit quantize SOURCE TARGET`."""
        words = options_of(self.method)
        assert words is not None
        return ("--scheme", self.scheme.name, *words)

    @property
    def work(self) -> int:
        """Returns 0 for methods without data, 1 with calibration, 2 for learned rounding."""
        return {"rtn": 0, "hqq": 0, "learned": 2}.get(self.method.split(" ")[0], 1)

    def source(self) -> str:
        """Returns the origin of the divergence: the measured model, and the factor of an estimate."""
        groups = "" if self.scheme == self.measured else f", as {self.measured}"
        return f"{self.of}{groups}" if self.factor == 1 else f"{self.factor:.2f} x {self.of}{groups}: estimate"


@dataclass(frozen=True)
class Recommendation:
    """The recommendation for `model`: `chosen`, `neighbours` sorted by size with `chosen` among them, and `why`, one reason
    a line. `weights_16bit_bytes` is the unquantized model, `cache_bytes` the KV cache of the context in the format `kv`."""

    model: str
    weights: int
    linear_weights: int
    weights_16bit_bytes: int
    kv: str
    cache_bytes: int
    chosen: SchemeOption
    neighbours: tuple[SchemeOption, ...]
    why: tuple[str, ...]

    @property
    def command(self) -> str:
        """Returns the command that quantizes the model."""
        source = Path(self.model)
        target = f"{source.resolve().name}-{self.chosen.scheme.name}"
        return shlex.join(["lowbit", "quantize", str(source), target, *self.chosen.options])


def recommend(
    model: str | Path, *, budget_bytes: float | None = None, divergence: float | None = None, context: int = 0, kv: str = "16"
) -> Recommendation:
    """Returns the option with the least divergence in `budget_bytes`, or with the fewest bytes for at most `divergence`
    nats per token (within the budget if both are given).

    `model` is a folder or a name on the hub; only config.json is read. The budget covers all weights, with embeddings and
    LM head in 16 bits, and the KV cache of `context` tokens in the format `kv`. Among nearly equal divergences (`SIMILAR`,
    `NEGLIGIBLE`) the option with less work wins, then the one with fewer bytes.

    Raises CheckpointError for a folder without a 16-bit model, ValueError for an unknown `kv` and if no measured option fits.
    """
    if budget_bytes is None and divergence is None:
        raise ValueError(
            "no criterion: give a memory budget (--budget-gb 6) or a bound on the divergence (--divergence 0.05), or both"
        )
    source = resolve(model, CONFIG)
    source.require_unquantized("give the 16-bit model it came from")
    path = source.path
    skeleton = causal_skeleton(path)
    stored = parse_kv(kv)
    of_cache = cache_bytes(skeleton, context, stored)
    candidates = _candidates(skeleton)
    budget = None if budget_bytes is None else budget_bytes - of_cache
    fitting = [
        c
        for c in candidates
        if c.scheme.activation is None and (budget is None or c.bytes <= budget) and (divergence is None or c.kl <= divergence)
    ]
    if not fitting:
        raise ValueError(f"{path}: {_nothing_fits(skeleton, candidates, budget, of_cache, divergence)}")
    if divergence is None:
        least = min(c.kl for c in fitting)
        similar = [c for c in fitting if c.kl <= max(SIMILAR * least, NEGLIGIBLE)]
        chosen = min(similar, key=lambda c: (c.work, c.bytes, c.kl))
    else:
        chosen = min(fitting, key=lambda c: (c.bytes, c.work, c.kl))
    plan = plan_for(skeleton, chosen.scheme.name, None, False)
    weights = sum(p.numel() for p in skeleton.parameters())
    linear = _linear_weights(plan)
    full = tensor_bytes(skeleton, None)
    why = (
        *_why(chosen, candidates, budget_bytes, divergence, full, of_cache),
        *_kv_lines(skeleton, context),
        *_expert_lines(plan, skeleton),
        *_limits(chosen, plan, skeleton),
    )
    return Recommendation(
        str(model), weights, linear, full, str(stored), of_cache, chosen, _neighbours(chosen, candidates), why
    )


def tensor_bytes(model: PreTrainedModel, plan: Plan | None) -> int:
    """Returns the bytes of all tensors of a model that is quantized by `plan` (None: unquantized).

    Quantized weights count with scales and zeros, other tensors in the dtype of config.json (bf16 if it states none).
    """
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
        elif plan is not None and name in plan.experts:
            total += _expert_bytes(plan, name)
        else:
            total += tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())
    return total


def _expert_bytes(plan: Plan, name: str) -> int:
    """Returns the bytes of quantized weights of experts."""
    count, n, k = plan.experts[name]
    return count * stored_bits((n, k), plan.scheme_of(name)) // 8


def _linear_weights(plan: Plan) -> int:
    """Returns the weights of linear layers and experts that are quantized."""
    return sum(math.prod(shape) for shape in (*plan.linears.values(), *plan.experts.values()))


def _columns(plan: Plan) -> set[int]:
    """Returns K of all matrices of linear layers and experts that are quantized."""
    return {shape[-1] for shape in (*plan.linears.values(), *plan.experts.values())}


def _expert_lines(plan: Plan, model: PreTrainedModel) -> list[str]:
    """Returns the line on the bytes of experts, all and those that a token reads; none for a model without experts."""
    if not plan.experts:
        return []
    sizes = [(shape[0], _expert_bytes(plan, name)) for name, shape in plan.experts.items()]
    return [expert_summary(sizes, experts_per_token(model.config))]


def cache_bytes(model: PreTrainedModel, context: int, kv: KVScheme = KV16) -> int:
    """Returns the bytes of the KV cache of `context` tokens in the format `kv`, in whole pages of the engine. Raises ValueError
    for another format than 16 bits if no engine can store the model's keys and values.
    """
    if context == 0:
        return 0
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads or not getattr(config, "num_hidden_layers", None):
        raise ValueError(
            f"{type(model).__name__}: config.json states no num_attention_heads, so the size of the KV cache is unknown; "
            "leave out --context"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys, values = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))  # DeepSeek's differ
    if keys != values and kv.quantized:
        raise ValueError(
            f"{type(model).__name__}: its keys have {keys} channels, its values {values}; the engine does not store them "
            f"in {kv}: take --kv 16"
        )
    dtype = _dtype(model) if _dtype(model).itemsize == 2 else torch.bfloat16
    spec = CacheSpec(config.num_hidden_layers, kv_heads, (keys + values) // 2, dtype, kv)
    return spec.page_bytes * pages_for(context)


def _kv_lines(model: PreTrainedModel, context: int) -> list[str]:
    """Returns the line on the KV cache of `context` tokens in each format, with its measured divergence; none without a
    context, or if the model's keys and values have 16 bits in any engine."""
    try:
        sizes = {name: cache_bytes(model, context, parse_kv(name)) for name in KV_FORMATS}
    except ValueError:
        return []
    if not context:
        return []
    own = kv_divergence()
    losses = {} if own is None else {row["kv"]: f", KL {row['kl']:.2g}" for row in own["rows"]}
    cells = [f"{gigabytes(size)} ({name}{losses.get(name, '')})" for name, size in sizes.items()]
    where = "no divergence was measured" if own is None else f"measured on {own['model']}, {own['context']:,} tokens"
    return [f"keys and values of {context:,} tokens, by --kv: {', '.join(cells)}; {where}"]


@cache
def kv_divergence() -> dict[str, Any] | None:
    """Returns the divergences by format of keys and values (`python -m study kv`) of the largest measured model; None if none
    was measured."""
    text = resources.files("lowbit.eval").joinpath("data/kv.json").read_text(encoding="utf-8")
    models = json.loads(text)["models"]
    return models[-1] if models else None


def options_of(method: str) -> tuple[str, ...] | None:
    """Returns the options of `lowbit quantize` for a method of the study ("gptq act_order=True"); None if one is missing."""
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
    """Returns the table of `python -m study`: models in order of size, each with its rows."""
    text = resources.files("lowbit.eval").joinpath("data/divergence.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


@cache
def of_one_text() -> tuple[dict[str, Any], ...]:
    """Returns the models measured on one text only, outside the study; each row names its `source` in docs/."""
    text = resources.files("lowbit.eval").joinpath("data/one_text.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


def _tied(model: PreTrainedModel) -> set[str]:
    """Returns the names of tied weights, which share another one's tensor."""
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def _dtype(model: PreTrainedModel) -> torch.dtype:
    dtype = getattr(model.config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _candidates(model: PreTrainedModel) -> list[SchemeOption]:
    """Returns all measured options with their bytes for this model.

    Divergences are those of the base model (`_base`). For an option that was measured only on another model, or on one text
    only, the divergence is multiplied by `_ratio`.
    """
    whole = plan_for(model, "w8a16", None, False)
    base, columns = _base(whole), _columns(whole)
    options: dict[tuple[Scheme, str], SchemeOption] = {}
    plans: dict[Scheme, Plan] = {}
    rotatable, untied_bytes = _rotatable(model), _untied_bytes(model)
    for other in (base, *(m for m in measured() if m is not base), *of_one_text()):
        factor = 1.0 if other is base else _ratio(base, other)
        for row in other["rows"]:
            measured_scheme, method = parse_scheme(row["scheme"]), row["method"]
            scheme = _for_model(measured_scheme, other["group"], columns)
            if scheme is None or (scheme, method) in options or options_of(method) is None:
                continue
            rotated = "rotate=True" in method
            if (rotated and not rotatable) or ("rotate_inputs" in method and any(k % 16 for k in columns)):
                continue
            if scheme.zero is not ZeroPoint.NONE:  # too good: the measured model's weights came from such a grid
                continue
            if scheme not in plans:
                plans[scheme] = plan_for(model, scheme.name, None, False)
            if plans[scheme].linears or plans[scheme].experts:
                size = tensor_bytes(model, plans[scheme]) + (untied_bytes if rotated else 0)
                options[scheme, method] = SchemeOption(
                    scheme, method, size, row["kl"] * factor, other["model"], factor, measured_scheme
                )
    return list(options.values())


def _rotatable(model: PreTrainedModel) -> bool:
    """Returns whether `--rotate` supports the model, by names and sizes of its tensors."""
    text: Any = model.config.get_text_config()
    roles = {name.removeprefix(f"{model.base_model_prefix}.") for name in model.state_dict()}
    try:
        sizes = (text.hidden_size, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        return not rotation_refusals(roles) and all(rotation_factors(size) for size in sizes)
    except (AttributeError, ValueError):  # no such size, or no Hadamard matrix of it
        return False


def _untied_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the tied weights, which `--rotate` stores separately."""
    return sum(tensor.numel() * _dtype(model).itemsize for name, tensor in model.state_dict().items() if name in _tied(model))


def _ratio(base: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the divergence of `base` over that of `other`: the geometric mean over the cases measured on both."""
    one, two = _by_case(base), _by_case(other)
    logs = [math.log(one[case] / two[case]) for case in one.keys() & two.keys()]
    return math.exp(math.fsum(sorted(logs)) / len(logs)) if logs else 1.0


def _by_case(model: dict[str, Any]) -> dict[tuple[Scheme, str], float]:
    """Returns the divergence by scheme and method; the model's own group size counts as 128."""
    divergences = {}
    for row in model["rows"]:
        scheme = parse_scheme(row["scheme"])
        if scheme.granularity == PerGroup(model["group"]):
            scheme = replace(scheme, granularity=PerGroup(GROUPS[0]))
        divergences[scheme, row["method"]] = row["kl"]
    return divergences


def _base(plan: Plan) -> dict[str, Any]:
    """Returns the largest measured model with at most as many linear weights as `plan`, else the smallest one."""
    weights = _linear_weights(plan)
    return next((m for m in reversed(measured()) if m["linear"] <= weights), measured()[0])


def _for_model(scheme: Scheme, group: int, columns: Set[int]) -> Scheme | None:
    """Returns the scheme for this model, or None if no group size divides its layers.

    A scheme that was measured with its model's own group size `group` gets the largest size that divides these layers.
    """
    if not isinstance(scheme.granularity, PerGroup):
        return scheme
    sizes = [size for size in GROUPS if all(k % size == 0 for k in columns)]
    size = scheme.granularity.size
    if size != group:
        return scheme if size in sizes else None
    return replace(scheme, granularity=PerGroup(sizes[0])) if sizes else None


def _front(candidates: Iterable[SchemeOption]) -> list[SchemeOption]:
    """Returns the Pareto front of bytes and divergence, in order of bytes."""
    front: list[SchemeOption] = []
    for c in sorted(candidates, key=lambda c: (c.bytes, c.kl, c.work)):
        if not front or c.kl < front[-1].kl:
            front.append(c)
    return front


def _neighbours(chosen: SchemeOption, candidates: Sequence[SchemeOption]) -> tuple[SchemeOption, ...]:
    front = _front(candidates)
    below = [c for c in front if c.bytes < chosen.bytes][-NEIGHBOURS:]
    above = [c for c in front if c.bytes > chosen.bytes][:NEIGHBOURS]
    same = [c for c in candidates if c.scheme == chosen.scheme or (c.bytes == chosen.bytes and c in front)]
    return tuple(sorted([*below, *same, *above], key=lambda c: (c.bytes, -c.kl)))


def gigabytes(count: float) -> str:
    """Returns bytes as text: GB of 10^9 bytes, or MB of 10^6 below 1 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _why(
    chosen: SchemeOption, candidates: Sequence[SchemeOption], budget: float | None, divergence: float | None, full: int, kv: int
) -> list[str]:
    """Returns the reasons for the choice, one a line."""
    lines = []
    total = f", {gigabytes(chosen.bytes + kv)} with {gigabytes(kv)} of KV cache" if kv else ""
    if divergence is None:
        assert budget is not None
        better = [c for c in _front(candidates) if c.bytes + kv > budget and c.kl * SIMILAR < chosen.kl]
        least = min((c for c in candidates if c.bytes + kv <= budget), key=lambda c: c.kl)
        near = "" if least.kl == chosen.kl else f" but for {_describe(least)}, which takes more work or bytes"
        lines.append(f"least divergence in {gigabytes(budget)}{near}: {gigabytes(chosen.bytes)} of weights{total}")
        if full + kv <= budget:
            lines.append(f"the unquantized model fits too ({gigabytes(full)}); the quantized one is smaller and faster")
        if better:
            lines.append(
                f"the next better option is {better[0].scheme} by {better[0].method}, {gigabytes(better[0].bytes + kv)}"
            )
    else:
        lines.append(f"fewest bytes for at most {divergence:g} nats per token: {gigabytes(chosen.bytes)} of weights{total}")
    same = [c for c in candidates if c.scheme == chosen.scheme and c != chosen]
    rounded = next((c for c in same if c.method == "rtn"), None)
    calibrated = min((c for c in same if c.work), key=lambda c: c.kl, default=None)
    if chosen.work and rounded is not None:
        lines.append(f"{chosen.method} has {chosen.kl / rounded.kl:.0%} of the divergence of rounding to nearest")
    if not chosen.work and calibrated is not None:
        lines.append(f"{calibrated.method}, with a calibration text, has {calibrated.kl / chosen.kl:.0%} of its divergence")
    learned = min((c for c in same if c.work == 2), key=lambda c: c.kl, default=None)
    if chosen.work == 1 and learned is not None and learned.kl < chosen.kl:
        lines.append(f"--method learned, slower, has {learned.kl / chosen.kl:.0%} of its divergence ({learned.source()})")
    eight = [c for c in candidates if c.scheme.activation is not None and c.bytes <= chosen.bytes]
    fast = min(eight, key=lambda c: c.kl, default=None)
    if fast is not None and (divergence is None or fast.kl <= divergence):
        lines.append(
            f"for large batches, with 8-bit activations: {shlex.join(fast.options)}, {gigabytes(fast.bytes)} with a "
            f"divergence of {fast.kl:.2g} ({fast.source()})"
        )
    if chosen.kl >= BROKEN:
        lines.append(
            f"warning: output breaks down at a divergence of {chosen.kl:.2g}; use a shorter context, more memory or "
            "a smaller model with more bits"
        )
    return lines


def _limits(chosen: SchemeOption, plan: Plan, model: PreTrainedModel) -> list[str]:
    """Returns the limits of the figures, one a line."""
    base, lines = _base(plan), []
    times = _linear_weights(plan) / base["linear"]
    if 0.5 <= times <= 2:
        same = times == 1 and chosen.of == base["model"]
        lines.append(f"measured on {chosen.of}, {'a model of this very shape' if same else 'not on this model'}")
    else:
        size = f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
        lines.append(
            f"extrapolated: this model has {size} times the linear weights of {base['model']}, the closest measured one; "
            "larger models usually lose less at the same bits, except with int8 activations that are not rotated "
            "(docs/choose.md), which these figures do not include"
        )
    if chosen.factor != 1:
        lines.append(
            f"the divergence is an estimate: {chosen.factor:.2f} times that of {chosen.of}; the factor is the mean ratio of "
            f"{base['model']} to it"
        )
    if chosen.scheme != chosen.measured:
        lines.append(f"it was measured as {chosen.measured}; smaller groups lose less, larger ones more")
    if plan.kept:
        weights = sum(row.weights for row in plan.kept if f"{row.name}.weight" not in _tied(model))
        others = sorted({row.kind for row in plan.kept} - {"Linear", "Embedding"})
        among = ", ".join(["embeddings and LM head among them", *others])
        lines.append(f"{weights:,} weights of {len(plan.kept)} modules ({among}) count with {8 * _dtype(model).itemsize} bits")
    lines += [line for line in plan.lines() if line.startswith("slow on a GPU")]
    lines.append("to measure it: lowbit eval OUT --reference MODEL --suite text")
    return lines


def _nothing_fits(
    model: PreTrainedModel, candidates: Sequence[SchemeOption], budget: float | None, kv: int, divergence: float | None
) -> str:
    """Returns why no option fits and which one comes closest. The bytes of the KV cache are already subtracted from
    `budget`."""
    if not candidates:
        return "none of its layers can be quantized by a measured scheme"
    small, near = min(candidates, key=lambda c: (c.bytes, c.kl)), min(candidates, key=lambda c: c.kl)
    if budget is None:
        return (
            f"no measured scheme has a divergence of at most {divergence:g}; the closest is {_describe(near)}; "
            "raise --divergence, or keep 16 bits"
        )
    inside = [c for c in candidates if c.bytes <= budget]
    context = f" ({gigabytes(kv)} of it KV cache)" if kv else ""
    if inside:
        assert divergence is not None
        best, enough = min(inside, key=lambda c: c.kl), [c for c in candidates if c.kl <= divergence]
        other = (
            f"in more memory {_describe(min(enough, key=lambda c: c.bytes))}" if enough else f"the best is {_describe(near)}"
        )
        return (
            f"nothing in {gigabytes(budget + kv)}{context} has a divergence of at most {divergence:g}: the closest there is "
            f"{_describe(best)}; {other}"
        )
    whole = tensor_bytes(model, plan_for(model, small.scheme.name, None, True))
    return (
        f"no measured scheme fits {gigabytes(budget + kv)}{context}: the smallest is {_describe(small)}. With embedding and "
        f"LM head in {small.scheme} too (lowbit quantize --embeddings) it takes {gigabytes(whole)}, but was not measured"
    )


def _describe(c: SchemeOption) -> str:
    return f"{c.scheme} by {c.method}, {gigabytes(c.bytes)} with a divergence of {c.kl:.2g}"
