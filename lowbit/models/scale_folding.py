"""Moves a scale per input channel into linear layers and its inverse into the module that computes the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.formats import Scheme
from lowbit.methods import Awq, SmoothQuant
from lowbit.models.decoder import LayerwiseDecoder, SharedInput
from lowbit.models.layer_methods import naming_errors, observe_inputs
from lowbit.quantize.awq import search_scale
from lowbit.quantize.fold import Fold, divide_outputs, multiply_inputs
from lowbit.quantize.smoothquant import best_alpha, smoothing_scale
from lowbit.quantize.statistics import InputStatistics

SAMPLE_ROWS = 256
"""Rows of x that the search of alpha computes with."""

_PAIRS = (("v_proj", "o_proj"), ("v_proj", "out_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"))
"""Producers and consumers between which a positive factor per channel commutes with all operations."""


@dataclass(frozen=True)
class ScaledInputs:
    """The outcome of scaling a decoder layer; keys are names relative to it.

    statistics: of the scaled inputs. pre_quant_scales: factors of x for layers whose scale could not be folded into a producer.
    changed: the changed parameters of producers with a folded scale, in the dtype of the files.
    """

    statistics: dict[str, InputStatistics]
    pre_quant_scales: dict[str, Tensor]
    changed: dict[str, Tensor]


class ScaleFolder:
    """Scales the inputs of the linear layers of `decoder` by AWQ or SmoothQuant, one decoder layer at a time."""

    def __init__(self, decoder: LayerwiseDecoder) -> None:
        self.decoder = decoder
        self._folds: dict[object, list[Fold | None]] = {}

    def scale(
        self,
        method: Awq | SmoothQuant,
        i: int,
        hidden: list[Tensor],
        inputs: Sequence[SharedInput],
        schemes: Mapping[str, Scheme],
    ) -> ScaledInputs:
        """Scales every input of loaded layer `i` for which the method finds a scale, in place."""
        layer = self.decoder.layers[i]
        sample = SAMPLE_ROWS if isinstance(method, SmoothQuant) and method.alpha is None else 0
        out = ScaledInputs(observe_inputs(self.decoder, i, hidden, inputs, sample=sample), {}, {})
        # If some layers quantize activations, SmoothQuant gains nothing for inputs that all layers read in 16 bits.
        activations = isinstance(method, SmoothQuant) and any(scheme.activation is not None for scheme in schemes.values())
        for each, fold in zip(inputs, self.find_folds(i, hidden[0], inputs), strict=True):
            own = [schemes[name] for name in each.linears]
            if activations and all(scheme.activation is None for scheme in own):
                continue
            statistics = out.statistics[each.linears[0]]
            with naming_errors(f"{self.decoder.layer_name(i)}.{each.linears[0]}"):
                scale = input_scale(method, [self.decoder.weight(i, n) for n in each.linears], own, statistics, fold)
            if scale is None:
                continue
            out.statistics.update(dict.fromkeys(each.linears, statistics.divided(scale)))
            for name in each.linears:
                multiply_inputs(layer.get_submodule(name), scale)
            if fold is None:
                for name in each.linears:
                    out.pre_quant_scales[name] = 1 / scale  # a tensor each: safetensors refuses shared memory
            else:
                out.changed.update(self._divide_producer(i, fold, scale, schemes))
        return out

    def _divide_producer(self, i: int, fold: Fold, scale: Tensor, schemes: Mapping[str, Scheme]) -> dict[str, Tensor]:
        """Divides the producer's outputs; returns its parameters that stay in 16 bits, rounded to their dtype in the files."""
        module = self.decoder.layers[i].get_submodule(fold.producer)
        plain = [n for n, _ in module.named_parameters(recurse=False) if n != "weight" or fold.producer not in schemes]
        types = {n: self.decoder.stored_dtype(i, f"{fold.producer}.{n}") for n in plain}
        divide_outputs(module, fold.channels, scale, types)
        return {f"{fold.producer}.{n}": getattr(module, n).detach().to(types[n]) for n in plain}

    def find_folds(self, i: int, hidden: Tensor, inputs: Sequence[SharedInput]) -> list[Fold | None]:
        """Returns for each input the module into which its scale can be folded, verified by running the layer, or None.

        Layers with the same modules, shapes and rotations share the result.
        """
        layer = self.decoder.layers[i]
        prefix = f"{self.decoder.layer_name(i)}."
        rotated = tuple(name.removeprefix(prefix) for name in self.decoder.rotated_inputs if name.startswith(prefix))
        signature = (type(layer), tuple((n, tuple(p.shape)) for n, p in layer.named_parameters()), tuple(inputs), rotated)
        if signature not in self._folds:
            self._folds[signature] = [
                next((f for f in self._candidates(i, each) if self._is_exact(i, hidden, f)), None) for each in inputs
            ]
        return self._folds[signature]

    def _candidates(self, i: int, shared: SharedInput) -> list[Fold]:
        channels = self.decoder.weight(i, shared.linears[0]).shape[1]
        names = [] if shared.producer is None else [shared.producer]
        parent, _, last = shared.linears[0].rpartition(".")
        names += [f"{parent}.{before}" if parent else before for before, after in _PAIRS if after == last]
        modules = dict(self.decoder.layers[i].named_modules())
        folds = []
        for name in names:
            weight = getattr(modules.get(name), "weight", None)
            if isinstance(weight, Tensor) and weight.dim() in (1, 2) and channels % weight.shape[0] == 0:
                producers = _producer_channels(channels, weight.shape[0], self.decoder.head_dim(channels))
                folds.append(Fold(name, shared.linears, producers.to(self.decoder.device)))
        return folds

    def _is_exact(self, i: int, hidden: Tensor, fold: Fold) -> bool:
        """True if the layer's float32 output is the same with arbitrary factors folded."""
        layer = self.decoder.layers[i]
        before = {n: p.detach().clone() for n, p in layer.named_parameters()}
        _convert(layer, torch.float32)
        expected = next(self.decoder.run(i, [hidden], torch.float32))
        outputs = int(fold.channels.max()) + 1
        scale = (0.5 + 1.5 * torch.rand(outputs, generator=torch.Generator().manual_seed(0))).to(hidden.device)
        scale = scale[fold.channels]
        divide_outputs(layer.get_submodule(fold.producer), fold.channels, scale, {})
        for name in fold.consumers:
            multiply_inputs(layer.get_submodule(name), scale)
        actual = next(self.decoder.run(i, [hidden], torch.float32))
        _convert(layer, self.decoder.dtype)
        for n, p in layer.named_parameters():
            p.copy_(before[n])
        # Relative to what the layer adds to its input: the input itself may be much larger.
        return bool((actual - expected).norm() <= 1e-4 * (expected - hidden.float()).norm())


def input_scale(
    method: Awq | SmoothQuant,
    weights: Sequence[Tensor],
    schemes: Sequence[Scheme],
    statistics: InputStatistics,
    fold: Fold | None,
) -> Tensor | None:
    """Returns the scale [K] of one input of `weights` [N_i, K]; None to leave the input unscaled."""
    shared = None if fold is None else fold.shared
    if isinstance(method, Awq):
        return search_scale(weights, schemes, statistics, shared)
    if fold is None:
        return None  # scaling at run time would cost what SmoothQuant saves
    alpha = best_alpha(weights, schemes[0], statistics) if method.alpha is None else method.alpha
    return None if alpha is None else smoothing_scale(weights, statistics.abs_max, alpha, shared)


def _producer_channels(channels: int, outputs: int, head_dim: int) -> Tensor:
    """Returns the output channel of the producer that each of `channels` inputs comes from, int64 [channels].

    With fewer outputs than inputs, neighbouring heads of `head_dim` channels share one (grouped-query attention).
    """
    k = torch.arange(channels)
    times = channels // outputs
    if times == 1 or head_dim < 1 or outputs % head_dim:
        return k % outputs
    return k // (head_dim * times) * head_dim + k % head_dim


def _convert(layer: nn.Module, dtype: torch.dtype) -> None:
    for p in layer.parameters():
        p.data = p.data.to(dtype)
