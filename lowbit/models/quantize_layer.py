"""Quantizes one decoder layer from the inputs that its linear layers get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats import QuantTensor, Scheme
from lowbit.methods import Awq, Gptq, Learned, Method, Rtn, SmoothQuant
from lowbit.models.decoder import Decoder, Input
from lowbit.models.learn import learn
from lowbit.quantize.activations import static_range
from lowbit.quantize.awq import clipped, search_scale
from lowbit.quantize.fold import Fold, divide_outputs, multiply_inputs
from lowbit.quantize.gptq import gptq
from lowbit.quantize.learned import LearnedRounding
from lowbit.quantize.lorc import lorc
from lowbit.quantize.rtn import rtn
from lowbit.quantize.smoothquant import best_alpha, smoothing_scale
from lowbit.quantize.statistics import InputStatistics

SAMPLE = 256
"""Rows of x kept for the search of alpha."""

# Linear layers that stand before others with only operations between them that a positive factor per channel passes through.
_PAIRS = (("v_proj", "o_proj"), ("v_proj", "out_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"))


@dataclass
class LayerResult:
    """What quantizing a decoder layer brought: `quantized` by the name of the linear layer, `changed`, other parameters that
    took up factors, in the type of the files, `notes` on layers that did not take part, and `error`, of a method that learns,
    that of the layer's outputs before and after. Names are relative to the layer."""

    quantized: dict[str, QuantTensor] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: tuple[float, float] | None = None


class LayerQuantizer:
    """Quantizes the loaded layers of `decoder` one after the other by `method`, with a correction of rank `low_rank` for each
    weight unless that is 0. Afterwards a layer computes with its dequantized weights, so its outputs are the inputs that the
    next layer will really get."""

    def __init__(self, decoder: Decoder, method: Method, low_rank: int = 0) -> None:
        self.decoder, self.method, self.low_rank = decoder, method, low_rank
        self._folds: dict[object, list[Fold | None]] = {}

    @torch.no_grad()
    def quantize(
        self, i: int, hidden: list[Tensor], schemes: Mapping[str, Scheme], exact: list[Tensor] | None = None
    ) -> LayerResult:
        """Quantizes the linear layers named in `schemes` (names in the layer) of layer i, whose inputs are `hidden`. `exact`,
        what the layer is to put out, is for a method that learns."""
        inputs = self.decoder.inputs(i, hidden[0], list(schemes))
        result = LayerResult()
        match self.method:
            case Rtn():
                self._round(i, hidden, schemes, inputs, result)
            case Gptq():
                if self.method.smooth is not None:
                    self._move_factors(self.method.smooth, i, hidden, schemes, inputs, result)
                self._gptq(i, hidden, schemes, inputs, result)
            case Awq() | SmoothQuant():
                self._rescale(i, hidden, schemes, inputs, result)
            case Learned():
                assert exact is not None
                if self.method.smooth is not None:
                    self._move_factors(self.method.smooth, i, hidden, schemes, inputs, result)
                self._learn(i, hidden, exact, schemes, inputs, result)
            case _:
                raise ValueError(f"{type(self.method).__name__} does not look at inputs")
        layer = self.decoder.layers[i]
        for name in [n for n in schemes if n not in result.quantized]:
            full = f"{self.decoder.layer_name(i)}.{name}"
            result.notes.append(f"{full}: the first calibration text did not reach it; rounded to nearest")
            self._set(i, name, rtn(_weight(layer, name), schemes[name], stored=self._stored(i, name)), result)
        return result

    def _round(
        self, i: int, hidden: list[Tensor], schemes: Mapping[str, Scheme], inputs: list[Input], result: LayerResult
    ) -> None:
        """Rounds to nearest; what it looks at inputs for is their range."""
        assert isinstance(self.method, Rtn)
        seen = self._ranges(i, hidden, inputs)
        for group in inputs:
            for name in group.linears:
                with _naming(f"{self.decoder.layer_name(i)}.{name}"):
                    weight, search = _weight(self.decoder.layers[i], name), self.method.search
                    q = rtn(weight, schemes[name], search=search, stored=self._stored(i, name))
                self._set(i, name, q.with_input(**static_range(schemes[name], *seen[group.linears[0]])), result)

    def _ranges(self, i: int, hidden: list[Tensor], inputs: list[Input]) -> dict[str, Tensor]:
        """The least and the largest number of each input, and 0, by the first linear layer that reads it."""
        seen = {group.linears[0]: torch.zeros(2, device=self.decoder.device) for group in inputs}

        def watch(name: str) -> Callable[[Tensor], None]:
            def take(x: Tensor) -> None:
                low, high = seen[name].unbind()
                seen[name] = torch.stack((torch.minimum(low, x.amin().float()), torch.maximum(high, x.amax().float())))

            return take

        self.decoder.observe(i, hidden, {name: watch(name) for name in seen})
        return seen

    def _learn(
        self, i: int, hidden: list[Tensor], exact: list[Tensor], schemes: Mapping[str, Scheme], inputs: list[Input],
        result: LayerResult,
    ) -> None:  # fmt: skip
        """All weights of the layer at once, against its float output."""
        assert isinstance(self.method, Learned)
        full = self.decoder.layer_name(i)
        roundings: dict[str, LearnedRounding] = {}
        seen = self._ranges(i, hidden, inputs) if any(s.static_activations for s in schemes.values()) else {}
        ranges: dict[str, dict[str, Any]] = {}
        for group in inputs:
            for name in group.linears:
                with _naming(f"{full}.{name}"):
                    weight = _weight(self.decoder.layers[i], name)
                    roundings[name] = LearnedRounding(weight, schemes[name], self._stored(i, name))
                ranges[name] = static_range(schemes[name], *seen[group.linears[0]]) if seen else {}
        result.error = learn(self.decoder, i, hidden, exact, roundings, ranges, self.method)
        for name, rounding in roundings.items():
            self._set(i, name, rounding.quantized().with_input(**ranges[name]), result)

    def _gptq(
        self, i: int, hidden: list[Tensor], schemes: Mapping[str, Scheme], inputs: list[Input], result: LayerResult
    ) -> None:
        """True sequential: the inputs of each linear layer are those that the quantized ones before it make."""
        assert isinstance(self.method, Gptq)
        layer = self.decoder.layers[i]
        for group in inputs:
            statistics = self._statistics(i, group, keep=0)
            self.decoder.observe(i, hidden, {group.linears[0]: statistics.add})
            for name in group.linears:
                with _naming(f"{self.decoder.layer_name(i)}.{name}"):
                    q = gptq(
                        _weight(layer, name), statistics.hessian, schemes[name], act_order=self.method.act_order,
                        static_groups=self.method.static_groups, search=self.method.search, damping=self.method.damping,
                        stored=self._stored(i, name),
                    )  # fmt: skip
                q = q.with_input(**static_range(schemes[name], statistics.low, statistics.high))
                self._set(i, name, q, result, statistics.hessian)

    def _rescale(
        self, i: int, hidden: list[Tensor], schemes: Mapping[str, Scheme], inputs: list[Input], result: LayerResult
    ) -> None:
        """AWQ and SmoothQuant: all inputs as the float layer makes them, factors folded, then every weight on its own."""
        assert isinstance(self.method, (Awq, SmoothQuant))
        statistics, factors = self._move_factors(self.method, i, hidden, schemes, inputs, result)
        for group, stats in zip(inputs, statistics, strict=True):
            for name in group.linears:
                weight, scheme = _weight(self.decoder.layers[i], name), schemes[name]
                with _naming(f"{self.decoder.layer_name(i)}.{name}"):
                    clip = isinstance(self.method, Awq) and self.method.search == "loss"
                    stored = self._stored(i, name)
                    q = clipped(weight, scheme, stats.hessian, stored) if clip else rtn(weight, scheme, stored=stored)
                q = q.with_input(pre_quant_scale=factors.get(name), **static_range(scheme, stats.low, stats.high))
                self._set(i, name, q, result, stats.hessian)

    def _move_factors(
        self, method: Awq | SmoothQuant, i: int, hidden: list[Tensor], schemes: Mapping[str, Scheme], inputs: list[Input],
        result: LayerResult,
    ) -> tuple[list[InputStatistics], dict[str, Tensor]]:  # fmt: skip
        """Moves a factor per channel from every input into the weights. Returns the statistics of the inputs as they are then,
        and the input scales of the layers before which no module could take the factors."""
        layer = self.decoder.layers[i]
        keep = SAMPLE if isinstance(method, SmoothQuant) and method.alpha is None else 0
        statistics = [self._statistics(i, group, keep) for group in inputs]
        self.decoder.observe(i, hidden, {g.linears[0]: s.add for g, s in zip(inputs, statistics, strict=True)})
        factors: dict[str, Tensor] = {}
        takes = [True] * len(inputs)
        if isinstance(method, SmoothQuant) and any(scheme.activation is not None for scheme in schemes.values()):
            # Inputs that stay in 16 bits among others that do not gain nothing.
            takes = [any(schemes[name].activation is not None for name in group.linears) for group in inputs]
        for j, (group, fold) in enumerate(zip(inputs, self._find_folds(i, hidden[0], inputs), strict=True)):
            if not takes[j]:
                continue
            weights = [_weight(layer, name) for name in group.linears]
            with _naming(f"{self.decoder.layer_name(i)}.{group.linears[0]}"):
                scale = _factors(method, weights, [schemes[n] for n in group.linears], statistics[j], fold)
            if scale is None:
                continue
            statistics[j] = statistics[j].divided(scale)
            for name in group.linears:
                multiply_inputs(layer.get_submodule(name), scale)
            if fold is None:
                for name in group.linears:
                    factors[name] = 1 / scale  # a tensor each: files hold no tensor twice
            else:
                self._fold(i, fold, scale, schemes, result)
        return statistics, factors

    def _fold(self, i: int, fold: Fold, scale: Tensor, schemes: Mapping[str, Scheme], result: LayerResult) -> None:
        """Divides the producer's outputs; what it stores in 16 bits is rounded as it will be stored."""
        module = self.decoder.layers[i].get_submodule(fold.producer)
        kept = [n for n, _ in module.named_parameters(recurse=False) if n != "weight" or fold.producer not in schemes]
        types = {n: self.decoder.stored_dtype(i, f"{fold.producer}.{n}") for n in kept}
        divide_outputs(module, fold.channels, scale, types)
        for n in kept:
            result.changed[f"{fold.producer}.{n}"] = getattr(module, n).detach().to(types[n])

    def _set(self, i: int, name: str, q: QuantTensor, result: LayerResult, hessian: Tensor | None = None) -> None:
        """Puts `q` in place of a weight, corrected for the inputs whose sum of x^T x is `hessian`, as the weight meets them."""
        weight = _weight(self.decoder.layers[i], name)
        if self.low_rank:
            factors = q.input_transform.pre_quant_scale
            if factors is not None:  # the correction multiplies x before it is scaled
                weight.mul_(factors)
                hessian = None if hessian is None else hessian / factors / factors[:, None]
            q = replace(q, low_rank=lorc(weight, q, self.low_rank, hessian))
        result.quantized[name] = q
        weight.copy_(q.dequantize())

    def _stored(self, i: int, name: str) -> torch.dtype:
        """The type in which the files hold a linear layer's weight."""
        return self.decoder.stored_dtype(i, f"{name}.weight")

    def _statistics(self, i: int, group: Input, keep: int) -> InputStatistics:
        channels = _weight(self.decoder.layers[i], group.linears[0]).shape[1]
        return InputStatistics(channels, keep=keep, device=self.decoder.device)

    def _find_folds(self, i: int, hidden: Tensor, inputs: list[Input]) -> list[Fold | None]:
        """Where a factor on each input can go: tried out on the layer, so that it is known and not assumed. Layers with the
        same modules, shapes and rotations share the answer."""
        layer = self.decoder.layers[i]
        prefix = f"{self.decoder.layer_name(i)}."
        rotated = tuple(name.removeprefix(prefix) for name in self.decoder.rotated_inputs if name.startswith(prefix))
        signature = (type(layer), tuple((n, tuple(p.shape)) for n, p in layer.named_parameters()), tuple(inputs), rotated)
        if signature not in self._folds:
            self._folds[signature] = [
                next((f for f in self._candidates(layer, group) if self._holds(i, hidden, f)), None) for group in inputs
            ]
        return self._folds[signature]

    def _candidates(self, layer: nn.Module, group: Input) -> list[Fold]:
        channels = _weight(layer, group.linears[0]).shape[1]
        names = [] if group.producer is None else [group.producer]
        parent, _, last = group.linears[0].rpartition(".")
        names += [f"{parent}.{before}" if parent else before for before, after in _PAIRS if after == last]
        modules = dict(layer.named_modules())
        found = []
        for name in names:
            weight = getattr(modules.get(name), "weight", None)
            if isinstance(weight, Tensor) and weight.dim() in (1, 2) and channels % weight.shape[0] == 0:
                source = _sources(channels, weight.shape[0], self.decoder.head_dim(channels)).to(self.decoder.device)
                found.append(Fold(name, group.linears, source))
        return found

    def _holds(self, i: int, hidden: Tensor, fold: Fold) -> bool:
        """Whether the layer computes the same, in float32, with arbitrary factors folded."""
        layer = self.decoder.layers[i]
        before = {n: p.detach().clone() for n, p in layer.named_parameters()}
        _convert(layer, torch.float32)
        expected = next(self.decoder.run(i, [hidden], torch.float32))
        sources = int(fold.channels.max()) + 1
        scale = (0.5 + 1.5 * torch.rand(sources, generator=torch.Generator().manual_seed(0))).to(hidden.device)
        scale = scale[fold.channels]
        divide_outputs(layer.get_submodule(fold.producer), fold.channels, scale, {})
        for name in fold.consumers:
            multiply_inputs(layer.get_submodule(name), scale)
        got = next(self.decoder.run(i, [hidden], torch.float32))
        _convert(layer, self.decoder.dtype)
        for n, p in layer.named_parameters():
            p.copy_(before[n])
        # The layer adds to its input, which may be much larger than what it adds.
        return bool((got - expected).norm() <= 1e-4 * (expected - hidden.float()).norm())


def _factors(
    method: Awq | SmoothQuant, weights: list[Tensor], schemes: list[Scheme], statistics: InputStatistics, fold: Fold | None
) -> Tensor | None:
    """The factors for one input; None to leave it as it is."""
    shared = None if fold is None else fold.shared
    if isinstance(method, Awq):
        return search_scale(weights, schemes, statistics, shared)
    if fold is None:
        return None  # a factor at run time would cost what it is there to save
    alpha = best_alpha(weights, schemes[0], statistics) if method.alpha is None else method.alpha
    return None if alpha is None else smoothing_scale(weights, statistics.abs_max, alpha, shared)


def _sources(channels: int, outputs: int, head_dim: int) -> Tensor:
    """Output channel of the layer before for each of `channels` inputs. With fewer outputs, heads of `head_dim` channels are
    shared by neighbouring heads (grouped-query attention)."""
    k = torch.arange(channels)
    times = channels // outputs
    if times == 1 or head_dim < 1 or outputs % head_dim:
        return k % outputs
    return k // (head_dim * times) * head_dim + k % head_dim


def _convert(layer: nn.Module, dtype: torch.dtype) -> None:
    for p in layer.parameters():
        p.data = p.data.to(dtype)


def _weight(layer: nn.Module, name: str) -> Tensor:
    weight = layer.get_submodule(name).weight
    assert isinstance(weight, nn.Parameter)
    return weight.data


class _naming:
    """Errors inside say which layer they are about."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self.name}: {error}") from error
