"""LoRA adapters in a decode program: each row of a step or of prompts takes the adapter of its request, or none.

    adapter_of = slots.adapters[rows]
    y = w x + bias of tokens, which is b[adapter] (a[adapter] x) + bias (ops/lora.py)

In a chain (chain.py) the product's epilogue multiplies by b, which is one launch less for each product.

The matrices of all adapters are stacked for each product, in the order of its columns: q, k and v of one product have an a
each, and rows of gate and up alternate where the product's do. Which rows have which adapter is data of the step, so CUDA
graphs and their number do not depend on it. A program with adapters computes every row with their kernels; rows without one add
zeros.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowbit.engine.balance import factors_of
from lowbit.engine.decoder import PRODUCTS, DecoderLayer, ProductName
from lowbit.engine.product import Packed, Product, Scaled
from lowbit.models.adapter import Adapter, LayerAdapter, read_adapter
from lowbit.ops import gemm
from lowbit.ops.gated_gemm import gated_gemm
from lowbit.ops.lora import LEAST_RANK, LoraSums, LoraWeight, epilogue_refusals, lora, lora_sums
from lowbit.pack.gated import alternate

NO_ADAPTER = -1
"""The adapter of rows without one."""


class ProgramLayer(Protocol):
    """What adapters need of a layer of a decode program."""

    @property
    def spec(self) -> DecoderLayer:
        """Its modules."""

    @property
    def alternates(self) -> bool:
        """True if columns of gate and up alternate."""

    def product(self, name: ProductName) -> Product | None:
        """One of its products; None if the layer does not have it."""


@dataclass(frozen=True)
class Part:
    """A linear layer of a product: its path in the model, outputs N and inputs K. factors [N]: what its rows were multiplied by
    (balance.py), so that the adapter's must be too; None if they were not."""

    path: str
    n: int
    k: int
    factors: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LoraStep:
    """The adapters of the rows of one forward: adapter_of int32 [M], -1 for none."""

    adapters: Adapters
    adapter_of: Tensor

    def bias(self, i: int, name: ProductName, x: Tensor, bias: Tensor | None, **norm: Any) -> Tensor | None:
        """Returns what the epilogue of a product of layer i adds for x [M, K]: the bias of tokens [M, N], or the product's own
        bias if no adapter has the product. norm: arguments of `ops.lora.lora` about squares."""
        weight = self.adapters.layers[i].get(name)
        return bias if weight is None else lora(x, weight, self.adapter_of, bias, **norm)

    def sums(self, i: int, name: ProductName, x: Tensor, **norm: Any) -> LoraSums | None:
        """Returns what the epilogue of a product of layer i in a chain needs for x [M, K]; None if no adapter has the product,
        and if no epilogue computes it: then `bias` does. norm: as in `bias`."""
        weight = self.adapters.layers[i].get(name)
        if weight is None or epilogue_refusals(weight, x.device):
            return None
        return lora_sums(x, weight, self.adapter_of, **norm)

    def multiply(self, i: int, name: ProductName, product: Product, x: Tensor) -> Tensor:
        """Returns a product of layer i for x [M, K], adapters included."""
        weight = self.adapters.layers[i].get(name)
        if weight is None:
            return product(x)
        if isinstance(product, Packed):
            bias = lora(x, weight, self.adapter_of, product.bias)
            return gemm(x, product.weight, bias, batch_invariant=product.batch_invariant)
        return product(x) + lora(x, weight, self.adapter_of)

    def gated(self, i: int, product: Packed, x: Tensor, activation: str) -> Tensor:
        """Returns f(gate) * up [M, N / 2] of layer i for x [M, K], adapters included, for alternating rows."""
        bias = self.bias(i, "gate_up", x, product.bias)
        return gated_gemm(x, product.weight, bias, activation, batch_invariant=product.batch_invariant)


@dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters of a decode program: their names, and for each layer the stacked matrices of its adapted products."""

    names: tuple[str, ...]
    layers: abc.Sequence[dict[ProductName, LoraWeight]]

    def index(self, name: str | None) -> int:
        """Returns the number of an adapter; -1 for None. Raises ValueError for a name that there is not."""
        if name is None:
            return NO_ADAPTER
        if name not in self.names:
            raise ValueError(f"there is no adapter {name!r} here, there are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def step(self, adapter_of_slots: Tensor, rows: Tensor) -> LoraStep:
        """Returns the adapters of a forward with the slots `rows` int32 [M]."""
        return LoraStep(self, adapter_of_slots.index_select(0, rows))

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(w.a.nbytes + w.b.nbytes for layer in self.layers for w in layer.values())

    def __str__(self) -> str:
        products = sorted({name for layer in self.layers for name in layer}, key=PRODUCTS.index)
        size = f"{self.nbytes / 2**20:.1f} MiB"
        of = f"{', '.join(products)} of {len(self.layers)} layers"
        more = f"{len(products)} launches a layer more in fused steps whose epilogues add them, else {2 * len(products)}"
        return f"LoRA adapters {', '.join(self.names)} in {size}, of {of}: {more}"

    @classmethod
    def load(
        cls, folders: abc.Mapping[str, str | Path], model: nn.Module, layers: abc.Sequence[ProgramLayer], dtype: torch.dtype,
        device: torch.device,
    ) -> Adapters:  # fmt: skip
        """Returns the adapters in PEFT's folders for the layers of a model's decode program. Raises CheckpointError for files
        that `read_adapter` refuses, and ValueError for an adapter of a layer that is no linear layer of the program.
        """
        given = {name: read_adapter(folder) for name, folder in folders.items()}
        paths = {id(module): path for path, module in model.named_modules()}
        parts = [{name: _parts(layer, name, paths) for name in PRODUCTS} for layer in layers]
        known = {part.path: part for layer in parts for of_product in layer.values() for part in of_product}
        for name, adapter in given.items():
            _check(name, adapter, known, model)
        rank = max(LEAST_RANK, *(adapter.rank for adapter in given.values()))
        rank = 1 << (rank - 1).bit_length()
        stacked = []
        for layer, of_layer in zip(layers, parts, strict=True):
            found = {
                name: _stacked(list(given.values()), of_product, layer.alternates and name == "gate_up", rank, dtype, device)
                for name, of_product in of_layer.items()
                if any(part.path in adapter.layers for adapter in given.values() for part in of_product)
            }
            for name in found:
                if isinstance(layer.product(name), Scaled):
                    raise ValueError(
                        f"LoRA takes layers with 16-bit activations, such as w4a16_g128; {of_layer[name][0].path} quantizes "
                        "its inputs to 8 bits: quantize the model to another scheme"
                    )
            stacked.append(found)
        return cls(tuple(given), stacked)


def _parts(layer: ProgramLayer, name: ProductName, paths: abc.Mapping[int, str]) -> list[Part]:
    """Returns the linear layers of a product; none if the layer does not have it."""
    product = layer.product(name)
    if product is None:
        return []
    if name == "gate_up" and layer.alternates:  # an `AlternatingMLP` has replaced the modules
        assert isinstance(product, Packed)
        n, k = product.weight.shape
        mlp = paths[id(layer.spec.modules("down")[0])].rpartition(".")[0]
        names = ("gate_up_proj",) if layer.spec.module.get_submodule("mlp").joined else ("gate_proj", "up_proj")
        return [Part(f"{mlp}.{each}", n // len(names), k) for each in names]
    modules: list[Any] = list(layer.spec.modules(name))
    return [Part(paths[id(module)], module.out_features, module.in_features, factors_of(module)) for module in modules]


def _check(name: str, adapter: Adapter, known: abc.Mapping[str, Part], model: nn.Module) -> None:
    """Raises ValueError unless each layer of an adapter is a linear layer of the program, with matrices of its shape."""
    modules = {path for path, _ in model.named_modules()}
    for path, layer in adapter.layers.items():
        part = known.get(path)
        if part is None:
            what = "is no linear layer in attention or a dense MLP" if path in modules else "is no layer of this model"
            raise ValueError(f"adapter {name!r} ({adapter.folder}): {path} {what}; those are supported")
        if (layer.a.shape[1], layer.b.shape[0]) != (part.k, part.n):
            shapes = f"lora_A is [r, {layer.a.shape[1]}] and lora_B [{layer.b.shape[0]}, r]"
            raise ValueError(
                f"adapter {name!r} ({adapter.folder}): {path} has {part.k} inputs and {part.n} outputs, {shapes}: it belongs "
                "to another model"
            )


def _stacked(
    adapters: abc.Sequence[Adapter], parts: abc.Sequence[Part], alternates: bool, rank: int, dtype: torch.dtype,
    device: torch.device,
) -> LoraWeight:  # fmt: skip
    """Returns the matrices of all adapters for one product, padded with zeros to `rank`."""
    k, widths = parts[0].k, tuple(part.n for part in parts)
    a = torch.zeros(len(adapters), len(parts), rank, k, dtype=dtype)
    b = torch.zeros(len(adapters), sum(widths), rank, dtype=dtype)
    for i, adapter in enumerate(adapters):
        seconds = []
        for p, part in enumerate(parts):
            layer = adapter.layers.get(part.path) or LayerAdapter(a.new_zeros(0, k), a.new_zeros(part.n, 0))
            a[i, p, : len(layer.a)] = layer.a
            second = b.new_zeros(part.n, rank)
            second[:, : layer.b.shape[1]] = (
                layer.b if part.factors is None else layer.b * part.factors[:, None].cpu().to(layer.b)
            )
            seconds.append(second)
        second = torch.cat(seconds)
        b[i] = alternate(*second.chunk(2)) if alternates else second
    return LoraWeight(a.to(device), b.to(device), widths, alternates and len(parts) == 2)
