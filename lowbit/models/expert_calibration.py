"""Reads the experts of a loaded decoder layer for `quantize.expert_layer`, and writes their quantized weights back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.formats import QuantTensor
from lowbit.models.expert_names import ExpertModule, expert_modules
from lowbit.quantize.expert_layer import ExpertMatrices


@dataclass(frozen=True)
class LayerExperts:
    """The expert layers of one decoder layer: module and its description, by name in the decoder layer."""

    modules: Mapping[str, tuple[nn.Module, ExpertModule]]

    @classmethod
    def of(cls, layer: nn.Module, parameters: Sequence[str]) -> LayerExperts:
        """Returns the expert layers whose two weights are both among `parameters` (names in the decoder layer)."""
        wanted, own = set(parameters), expert_modules(layer)
        return cls({n: (layer.get_submodule(n), m) for n, m in own.items() if {m.first, m.down} <= wanted})

    @property
    def parameters(self) -> set[str]:
        """The names of all their weights."""
        return {name for _, module in self.modules.values() for name in (module.first, module.down)}

    def matrices(self, name: str) -> ExpertMatrices:
        """Returns the weights of an expert layer, with rows in the order of its parameters."""
        module, own = self.modules[name]
        first, down = (module.get_parameter(each.rpartition(".")[2]).data for each in (own.first, own.down))
        if own.transposed:
            first, down = first.transpose(1, 2), down.transpose(1, 2)
        biases = [getattr(module, f"{each.rpartition('.')[2]}_bias", None) for each in (own.first, own.down)]
        gate = module._apply_gate if own.gated else module.act_fn
        assert callable(gate)
        rows = torch.arange(first.shape[1], device=first.device)
        up_rows = (rows[1::2] if own.alternating else rows[len(rows) // 2 :]) if own.gated else None
        if up_rows is not None and not _proportional(gate, up_rows, first.shape[1]):
            up_rows = None
        return ExpertMatrices(first, down, gate, *(None if b is None else b.data for b in biases), up_rows=up_rows)

    def replace(self, name: str, gate_up: Sequence[QuantTensor], down: Sequence[QuantTensor]) -> None:
        """Copies the dequantized matrices of the experts into the parameters of an expert layer."""
        module, own = self.modules[name]
        for parameter, matrices in ((own.first, gate_up), (own.down, down)):
            dense_parameter(matrices, own.transposed, module.get_parameter(parameter.rpartition(".")[2]).data)


def dense_parameter(matrices: Sequence[QuantTensor], transposed: bool, out: Tensor | None = None) -> Tensor:
    """Returns the dequantized matrices [E, N, K] of all experts, or [E, K, N]; written to `out` if given, else float32."""
    n, k = matrices[0].shape
    if out is None:
        out = torch.empty((len(matrices), *((k, n) if transposed else (n, k))), device=matrices[0].codes.device)
    for target, q in zip(out, matrices, strict=True):
        weight = q.dequantize()
        target.copy_(weight.T if transposed else weight)
    return out


def _proportional(gate: object, up_rows: Tensor, rows: int) -> bool:
    """Returns True if the output of `gate` is proportional to its rows of up, tried on values up to some hundreds."""
    assert callable(gate)
    y = torch.randn(64, rows, generator=torch.Generator().manual_seed(0)).to(up_rows.device)
    y *= 10.0 ** torch.linspace(-2, 2, 64, device=y.device)[:, None]
    twice = y.index_copy(1, up_rows, 2 * y[:, up_rows])
    return bool(torch.equal(gate(twice), 2 * gate(y)))  # a factor of two is exact
