"""Quantizes one decoder layer from the inputs of its linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme
from lowbit.methods import Method
from lowbit.models.decoder import LayerwiseDecoder, SharedInput
from lowbit.models.expert_calibration import LayerExperts
from lowbit.models.layer_methods import CalibratedLinears, LayerResult, layer_method, naming_errors, observe_inputs
from lowbit.models.scale_folding import ScaledInputs, ScaleFolder
from lowbit.quantize.expert_layer import calibrate_experts
from lowbit.quantize.lorc import lorc
from lowbit.quantize.rtn import rtn


class LayerQuantizer:
    """Quantizes the loaded layers of `decoder` one after the other by `method`. Each weight of a linear layer gets a correction
    of rank `low_rank`, unless that is 0. Afterwards a layer computes with its dequantized weights, so that its outputs are the
    inputs of the next layer in the quantized model.

    expert_rotations: weights of experts (full names of parameters) -> block size of the rotation of their input."""

    def __init__(
        self, decoder: LayerwiseDecoder, method: Method, low_rank: int = 0, expert_rotations: Mapping[str, int] | None = None
    ) -> None:
        self.decoder, self.method, self.low_rank = decoder, layer_method(method), low_rank
        self._options, self._expert_rotations = method, dict(expert_rotations or {})
        self._scale_folder = ScaleFolder(decoder)

    @torch.no_grad()
    def quantize(
        self, i: int, hidden: list[Tensor], schemes: Mapping[str, Scheme], expected: list[Tensor] | None = None
    ) -> LayerResult:
        """Quantizes the linear layers and weights of experts of layer i that `schemes` names (relative to the layer), in place.
        Experts come last, so that their inputs are computed by the quantized linear layers.

        hidden: the inputs of the layer. expected: the outputs of the float model, for a method that learns.
        """
        experts = LayerExperts.of(self.decoder.layers[i], list(schemes))
        of_experts = {name: schemes[name] for name in experts.parameters}
        schemes = {name: scheme for name, scheme in schemes.items() if name not in of_experts}
        inputs = self.decoder.inputs(i, hidden[0], list(schemes)) if schemes else []
        result, scaled = LayerResult(), ScaledInputs({}, {}, {})
        if self.method.scaling is not None:
            scaled = self._scale_folder.scale(self.method.scaling, i, hidden, inputs, schemes)
            result.changed = scaled.changed
        for batch in [[each] for each in inputs] if self.method.sequential else [inputs] if inputs else []:
            self._quantize_batch(i, hidden, expected, batch, schemes, scaled, result)
        for name in [n for n in schemes if n not in result.quantized]:
            full = f"{self.decoder.layer_name(i)}.{name}"
            result.notes.append(f"{full}: the first calibration text did not reach it; rounded to nearest")
            q = rtn(self.decoder.weight(i, name), schemes[name], stored=self.decoder.stored_dtype(i, f"{name}.weight"))
            result.quantized[name] = self._replace_weight(i, name, q)
        if experts.modules:
            self._quantize_experts(i, hidden, experts, of_experts, result)
        return result

    def _quantize_experts(
        self, i: int, hidden: list[Tensor], experts: LayerExperts, schemes: Mapping[str, Scheme], result: LayerResult
    ) -> None:
        """Observes the inputs of the expert layers, quantizes them, and adds their weights to `result`."""
        inputs = self.decoder.observe_experts(i, hidden, list(experts.modules))
        for name, (_, own) in experts.modules.items():
            full = f"{self.decoder.layer_name(i)}.{name}"
            rotations = [
                self._expert_rotations.get(f"{self.decoder.layer_name(i)}.{each}", 0) for each in (own.first, own.down)
            ]
            with naming_errors(full):
                quantized = calibrate_experts(
                    experts.matrices(name), inputs.pop(name), (schemes[own.first], schemes[own.down]), self._options,
                    rotations=(rotations[0], rotations[1]), stored=self.decoder.stored_dtype(i, own.first),
                )  # fmt: skip
            experts.replace(name, quantized.gate_up, quantized.down)
            result.experts |= {own.first: quantized.gate_up, own.down: quantized.down}
            result.notes += quantized.notes(full)
            result.notes.append(f"{full}: relative error of the experts' outputs {quantized.error:.3e}")

    def _quantize_batch(
        self, i: int, hidden: list[Tensor], expected: list[Tensor] | None, inputs: Sequence[SharedInput],
        schemes: Mapping[str, Scheme], scaled: ScaledInputs, result: LayerResult,
    ) -> None:  # fmt: skip
        """Observes the inputs, quantizes the linear layers that read them, and adds these to `result`."""
        names = [name for each in inputs for name in each.linears]
        if self.method.reuses_statistics:
            statistics = scaled.statistics
        else:
            seen = hidden if self.method.needs_statistics([schemes[name] for name in names]) else []
            statistics = observe_inputs(self.decoder, i, seen, inputs, hessian=self.method.needs_hessian)
        linears = CalibratedLinears(
            self.decoder, i, hidden, expected, schemes,
            weights={name: self.decoder.weight(i, name) for name in names},
            stored_dtypes={name: self.decoder.stored_dtype(i, f"{name}.weight") for name in names},
            statistics=statistics,
        )  # fmt: skip
        quantized = self.method.quantize(linears)
        for name, q in quantized.quantized.items():
            q = q.with_input(**linears.static_range(name))
            if name in scaled.pre_quant_scales:
                q = q.with_input(pre_quant_scale=scaled.pre_quant_scales[name])
            hessian = statistics[name].hessian if self.method.needs_hessian else None
            result.quantized[name] = self._replace_weight(i, name, q, hessian)
        result.error = quantized.error

    def _replace_weight(self, i: int, name: str, q: QuantTensor, hessian: Tensor | None = None) -> QuantTensor:
        """Copies dequantized `q` into the layer and returns it with its low-rank correction, for inputs with this Hessian."""
        weight = self.decoder.weight(i, name)
        if self.low_rank:
            scale = q.input_transform.pre_quant_scale
            if scale is not None:  # the correction multiplies x before it is scaled
                weight.mul_(scale)
                hessian = None if hessian is None else hessian / scale / scale[:, None]
            q = replace(q, low_rank=lorc(weight, q, self.low_rank, hessian))
        weight.copy_(q.dequantize())
        return q
