"""The calibrated quantization methods behind one protocol: weights, schemes and input statistics in, quantized weights out."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme
from lowbit.methods import Awq, Gptq, Learned, Method, Rtn, SmoothQuant
from lowbit.models.decoder import LayerwiseDecoder, SharedInput
from lowbit.models.learn import learn
from lowbit.quantize.activations import static_range
from lowbit.quantize.awq import clipped
from lowbit.quantize.gptq import gptq
from lowbit.quantize.learned import FEW_BITS, LearnedRounding
from lowbit.quantize.rtn import rtn
from lowbit.quantize.statistics import InputStatistics


@dataclass
class LayerResult:
    """The result of quantizing a decoder layer; names are relative to the layer.

    quantized: weights by the name of their linear layer. experts: the matrices of all experts by the name of their parameter,
    with the parameter's order of rows. changed: other parameters, scaled, in the dtype of the files. notes: lines about layers
    that were only rounded. error: the error of the layer's output before and after learning, if the method learns.
    """

    quantized: dict[str, QuantTensor] = field(default_factory=dict)
    experts: dict[str, list[QuantTensor]] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: tuple[float, float] | None = None


@dataclass(frozen=True)
class CalibratedLinears:
    """Linear layers of decoder layer `index`, the input of a method; the keys of all fields are names relative to the layer.

    weights: [N, K] in the dtype of computing. stored_dtypes: those of the weights in the files. statistics: of the input x.
    hidden, expected: the inputs of the decoder layer and the outputs of the float model, for methods that learn.
    """

    decoder: LayerwiseDecoder
    index: int
    hidden: list[Tensor]
    expected: list[Tensor] | None
    schemes: Mapping[str, Scheme]
    weights: dict[str, Tensor]
    stored_dtypes: dict[str, torch.dtype]
    statistics: dict[str, InputStatistics]

    def full_name(self, name: str) -> str:
        """Returns the name of a linear layer in the model."""
        return f"{self.decoder.layer_name(self.index)}.{name}"

    def static_range(self, name: str) -> dict[str, Tensor]:
        """Returns the calibrated scale of the activations of a linear layer (`quantize.activations`)."""
        return static_range(self.schemes[name], self.statistics[name].low, self.statistics[name].high)


class LayerMethod(ABC):
    """A quantization method; its attributes state the statistics that it needs."""

    needs_hessian: ClassVar[bool] = True
    """False: the range of each channel is enough."""
    sequential: ClassVar[bool] = False
    """True: linear layers that share an input are quantized before the inputs of the next ones are observed."""
    reuses_statistics: ClassVar[bool] = False
    """True: after scaling, the statistics of the unscaled layer are divided by the scales. False: inputs are observed again."""

    def needs_statistics(self, schemes: Iterable[Scheme]) -> bool:
        """Returns True if layers of these schemes need statistics of their inputs."""
        return self.needs_hessian or any(scheme.static_activations for scheme in schemes)

    def __init__(self, scaling: Awq | SmoothQuant | None = None) -> None:
        self.scaling = scaling
        """The method that first moves a scale per input channel into the weights, if any."""

    @abstractmethod
    def quantize(self, linears: CalibratedLinears) -> LayerResult:
        """Returns the quantized weights of the linear layers."""


class _WeightByWeight(LayerMethod):
    def quantize(self, linears: CalibratedLinears) -> LayerResult:
        result = LayerResult()
        for name, weight in linears.weights.items():
            with naming_errors(linears.full_name(name)):
                result.quantized[name] = self.quantize_weight(
                    weight, linears.schemes[name], linears.statistics[name], linears.stored_dtypes[name]
                )
        return result

    @abstractmethod
    def quantize_weight(
        self, weight: Tensor, scheme: Scheme, statistics: InputStatistics, stored: torch.dtype
    ) -> QuantTensor: ...


class _RoundToNearest(_WeightByWeight):
    """Observes inputs only for the range of static activations."""

    needs_hessian = False

    def __init__(self, options: Rtn) -> None:
        super().__init__()
        self.options = options

    def quantize_weight(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics, stored: torch.dtype) -> QuantTensor:
        return rtn(weight, scheme, search=self.options.search, stored=stored)


class _Gptq(_WeightByWeight):
    sequential = True

    def __init__(self, options: Gptq) -> None:
        super().__init__(options.smooth)
        self.options = options

    def quantize_weight(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics, stored: torch.dtype) -> QuantTensor:
        options = self.options
        return gptq(
            weight, statistics.hessian, scheme, act_order=options.act_order, static_groups=options.static_groups,
            search=options.search, damping=options.damping, stored=stored,
        )  # fmt: skip


class _ScaledRounding(_WeightByWeight):
    """AWQ and SmoothQuant: input channels are scaled, then each weight is rounded to nearest."""

    reuses_statistics = True

    def quantize_weight(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics, stored: torch.dtype) -> QuantTensor:
        if isinstance(self.scaling, Awq) and self.scaling.search == "loss":
            return clipped(weight, scheme, statistics.hessian, stored)
        return rtn(weight, scheme, stored=stored)


class _LearnedRounding(LayerMethod):
    """Learns all weights of the layer at once, against the output of the float model."""

    needs_hessian = False

    def __init__(self, options: Learned) -> None:
        super().__init__(options.smooth)
        self.options = options

    def needs_statistics(self, schemes: Iterable[Scheme]) -> bool:
        return any(scheme.static_activations or scheme.weight.bits <= FEW_BITS for scheme in schemes)

    def quantize(self, linears: CalibratedLinears) -> LayerResult:
        assert linears.expected is not None
        roundings: dict[str, LearnedRounding] = {}
        for name, weight in linears.weights.items():
            with naming_errors(linears.full_name(name)):
                scheme, statistics = linears.schemes[name], linears.statistics[name]
                importance = statistics.mean_square if scheme.weight.bits <= FEW_BITS else None
                roundings[name] = LearnedRounding(weight, scheme, linears.stored_dtypes[name], importance=importance)
        ranges = {name: linears.static_range(name) for name in roundings}
        error = learn(
            linears.decoder, linears.index, linears.hidden, linears.expected, roundings, ranges, self.options
        )  # fmt: skip
        return LayerResult({name: rounding.quantized() for name, rounding in roundings.items()}, error=error)


def layer_method(options: Method) -> LayerMethod:
    """Returns the method with these options; raises ValueError for one that has no use for inputs."""
    match options:
        case Rtn():
            return _RoundToNearest(options)
        case Gptq():
            return _Gptq(options)
        case Awq() | SmoothQuant():
            return _ScaledRounding(options)
        case Learned():
            return _LearnedRounding(options)
    raise ValueError(f"{type(options).__name__} does not look at inputs")


def observe_inputs(
    decoder: LayerwiseDecoder,
    i: int,
    hidden: list[Tensor],
    inputs: Sequence[SharedInput],
    *,
    hessian: bool = True,
    sample: int = 0,
) -> dict[str, InputStatistics]:
    """Runs decoder layer i and returns the statistics of `inputs` by linear layer, shared by those that read one input."""
    statistics = [
        InputStatistics(decoder.weight(i, each.linears[0]).shape[1], hessian=hessian, keep=sample, device=decoder.device)
        for each in inputs
    ]
    decoder.observe(i, hidden, {each.linears[0]: seen.add for each, seen in zip(inputs, statistics, strict=True)})
    return {name: seen for each, seen in zip(inputs, statistics, strict=True) for name in each.linears}


@contextlib.contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Prefixes the message of a ValueError raised inside with the name of a layer."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
