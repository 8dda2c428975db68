"""Records what the layers of a checkpoint compute, and checks that a loaded model computes the same with its kernels.

Errors in scales, layouts and kernels change a model's answers without an error message. `record` writes, when a checkpoint is
quantized, sums of each layer's outputs for known inputs and the logits of a few tokens (`checkpoint.numerics`), computed from
the files by float32 products of dequantized weights. `check` computes them with the loaded model: in a second or two, on the
kernels that will serve it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader, LayerEntry
from lowbit.checkpoint.numerics import (
    KEPT_LOGITS,
    PROBES,
    LayerSums,
    Numerics,
    difference,
    layer_sums,
    probes,
    read,
    to_text,
    tokens,
)
from lowbit.checkpoint.reader import TensorInfo
from lowbit.checkpoint.schema import expected_tensors
from lowbit.checkpoint.target import NUMERICS as FILE
from lowbit.formats import ExpertTensor, FloatFormat, InputTransform, QuantTensor
from lowbit.formats.split import rows_of
from lowbit.models.complete import some
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.nn.experts import PackedExperts, QuantExperts
from lowbit.nn.linear import QuantLinear

ROWS_ON_GPU = 34
"""Number of rows of x, and of tokens, on a GPU. The engine's comparison with the model (`engine.check`) has the same number, so
no kernel is compiled for this check alone."""
ROWS_AT_ONCE = 1024
"""Number of rows of a weight that are in memory in float32 at a time."""
LARGEST = {torch.float32: 0.0015, torch.float16: 0.012, torch.bfloat16: 0.012}
"""Largest relative difference of a sum (`checkpoint.numerics.difference`) that is attributed to rounding, by the dtype of x.
Measured over formats and layers of SmolLM2 and of random weights were up to 0.0007 in float32 and 0.0071 in 16 bits (two cores
of a Xeon, torch 2.13, 2026-11-28, by a script that was not kept); torch's int4 product there rounds scales to bf16. Not
measured on a GPU."""
LARGEST_WITH_QUANTIZED_X = 0.03
"""The limit if x is quantized to 8 bits after a rotation or a scaling, because codes next to a tie may differ. It also holds
for fp8, because tensor cores add fp8 products with fewer bits than float32 has."""
LARGEST_OF_EXPERTS = (0.002, 0.06, 0.15)
"""The limits for a whole expert, whose gate makes differences larger: in float32, in 16 bits, and with quantized x."""
LARGEST_OF_LOGITS = 0.25
LARGEST_OF_LOGITS_WITH_QUANTIZED_X = 0.6
"""Limits of the relative difference of the stored logits (`compare_logits`), with 16-bit and with quantized activations. Models
with random weights amplify rounding most."""


class NumericsError(CheckpointError):
    """A loaded model computes something else than its checkpoint states."""


def amplitude(transform: InputTransform) -> float:
    """Returns the magnitude of the inputs of a layer: 64 times its static activation scale, or 1 without one."""
    return 1.0 if transform.activation_scale is None else 64.0 * float(transform.activation_scale)


@torch.no_grad()
def expected(q: QuantTensor) -> Tensor:
    """Returns the outputs float32 [PROBES, N] of a layer with the weights `q`, without bias."""
    x = probes(q.shape[1], amplitude(q.input_transform)).to(q.codes.device)
    if q.scheme.activation is None:
        return _times(x, q)
    return QuantLinear.from_quant_tensor(q.to("cpu")).multiply(x.cpu(), None).float()


def _times(x: Tensor, w: QuantTensor | Tensor) -> Tensor:
    """Returns x [.., K] times the weights [N, K], computed in float32. ROWS_AT_ONCE rows of the weights are converted at a
    time."""
    n = w.shape[0]
    ranges = [(begin, min(begin + ROWS_AT_ONCE, n)) for begin in range(0, n, ROWS_AT_ONCE)]
    if isinstance(w, QuantTensor):
        return torch.cat([x @ rows_of(w, [part]).dequantize().T for part in ranges], -1)
    return torch.cat([x @ w[slice(*part)].to(x.device).float().T for part in ranges], -1)


def record(
    folder: Path, weight: Callable[[str], Tensor | None], device: torch.device, say: Callable[[str], None]
) -> Numerics:  # fmt: skip
    """Returns what the layers of the finished checkpoint in `folder` compute on `device`. Reads one layer at a time.

    weight: returns the 16-bit weight [N, K] of a layer, or None if the layer's error cannot be computed from it. say: called
    with a line if the logits cannot be computed.
    """
    layers: dict[str, LayerSums] = {}
    with CheckpointReader(folder) as reader:
        assert reader.manifest is not None
        for name, entry in reader.manifest.layers.items():
            if entry.experts:
                continue
            q = reader.layer(name).to(device)
            y, plain = expected(q).cpu(), weight(name)
            error = None
            if plain is not None:
                wanted = _times(probes(q.shape[1], amplitude(q.input_transform)), plain)
                error = round(float((y - wanted).norm() / wanted.norm().clamp(min=1e-30)), 6)
            layers[name] = layer_sums(y, error)
        layers |= dict(_of_experts(reader, device))
        logits = _logits(reader, device, say)
    return Numerics(layers, logits)


def write(folder: Path, numerics: Numerics) -> None:
    """Writes the file into a checkpoint's folder."""
    (folder / FILE).write_text(to_text(numerics), encoding="utf-8")


def check(model: PreTrainedModel, folder: Path) -> str | None:
    """Compares a model that was loaded from `folder` with the record in its checkpoint. Returns a line that says what was
    compared; None if the checkpoint has no record.

    Raises NumericsError, with the names of the layers, if outputs differ by more than rounding.
    """
    kept = read(folder)
    if kept is None:
        return None
    wrong, compared = [], 0
    for name, y, layer in _outputs(model, kept):
        compared += 1
        wrong += _wrong(name, y, layer, _parts(model.get_submodule(name)))
    _refuse(folder, wrong, compared, model.device)
    return f"{compared} layers{compare_logits(model, kept, folder)} compute what {FILE} states"


@torch.no_grad()
def check_stacked(
    names: Sequence[str], product: nn.Module, k: int, dtype: torch.dtype, device: torch.device, folder: Path
) -> None:  # fmt: skip
    """Compares a module with stacked weights, such as q, k and v in vLLM, with the record of each layer in `folder`.

    names: the layers, in the order of their rows in the module. product: the module; `product(x, bias)` multiplies x [.., k] by
    all rows. Raises NumericsError, with the name of a layer that differs by more than rounding. Nothing is compared if a layer
    has no record.
    """
    kept = _read_once(folder)
    layers = None if kept is None else [kept.layers.get(name) for name in names]
    linears = [module for module in product.modules() if isinstance(module, QuantLinear)]
    if layers is None or None in layers or not linears:
        return
    x = probes(k, amplitude(linears[0].input_transform)).to(device, dtype)
    y = product(x, None)
    rows = [of.outputs for of in layers if of is not None]
    if sum(rows) != y.shape[1] or len({amplitude(linear.input_transform) for linear in linears}) > 1:
        return
    parts = zip(names, y.split(rows, dim=1), layers, strict=True)
    wrong = [line for name, part, layer in parts if layer is not None for line in _wrong(name, part, layer, linears)]
    _refuse(folder, wrong, len(names), device)


def check_outputs(outputs: Mapping[str, tuple[Tensor, QuantLinear]], kept: Numerics, folder: Path) -> None:
    """Compares outputs that several ranks have computed together with the record in `folder`.

    outputs: for each layer y [rows, N] and this rank's module. Raises NumericsError, with the names of layers that differ by
    more than rounding."""
    wrong = [line for name, (y, module) in outputs.items() for line in _wrong(name, y, kept.layers[name], [module])]
    _refuse(folder, wrong, len(outputs), next(iter(outputs.values()))[0].device)


@functools.lru_cache(maxsize=2)
def _read_once(folder: Path) -> Numerics | None:
    return read(folder) if folder.is_dir() else None


Part = QuantLinear | PackedExperts


def _wrong(name: str, y: Tensor, layer: LayerSums, parts: Sequence[Part]) -> list[str]:
    """Returns a line for the message if the outputs y of a layer differ from the record by more than rounding, else []."""
    found, limit = difference(y, layer), _limit(parts, y.dtype, layer.experts)
    return [] if found <= limit else [f"{name} (by {found:.2g}, rounding makes up to {limit:.2g})"]


def _refuse(folder: Path, wrong: Sequence[str], compared: int, device: torch.device) -> None:
    if wrong:
        raise NumericsError(
            f"{folder}: {len(wrong)} of {compared} layers do not compute on {device} what {FILE} states: {some(wrong)}. "
            "Weights were changed after quantization, or a kernel is wrong: `lowbit inspect --check` compares the files with "
            f"their checksums; without {FILE} a start compares nothing"
        )


def _parts(module: nn.Module) -> list[Part]:
    return [module] if isinstance(module, QuantLinear) else list(module.packed().values())  # type: ignore[operator]


def _limit(parts: Sequence[Part], dtype: torch.dtype, experts: bool) -> float:
    quantized = any(part.scheme.activation is not None for part in parts)
    if experts:
        return LARGEST_OF_EXPERTS[0 if dtype == torch.float32 else 2 if quantized else 1]
    transforms = [part.input_transform.parts for part in parts]
    moved = any(of.changes_channels for of in transforms)
    fp8 = any(isinstance(part.scheme.activation, FloatFormat) for part in parts)
    return LARGEST_WITH_QUANTIZED_X if quantized and (moved or fp8) and dtype != torch.float32 else LARGEST[dtype]


@torch.no_grad()
def _outputs(model: PreTrainedModel, kept: Numerics) -> Iterator[tuple[str, Tensor, LayerSums]]:
    """Yields name, outputs and record of each layer of a model that has a record."""
    rows = ROWS_ON_GPU if model.device.type == "cuda" else PROBES
    for name, module in model.named_modules():
        layer = kept.layers.get(name)
        if layer is None:
            continue
        if isinstance(module, QuantLinear):
            x = probes(module.in_features, amplitude(module.input_transform))
            x = x[torch.arange(rows) % PROBES].to(model.device, model.dtype)
            # The same kernels are compiled for a bias of zeros as for the layer's own bias.
            yield name, module.multiply(x, None if module.bias is None else torch.zeros_like(module.bias)), layer
        elif isinstance(module, QuantExperts):
            size = amplitude(next(iter(module.packed().values())).input_transform)
            yield name, _expert_outputs(module, model.device, model.dtype, size), layer


def launch_experts(model: PreTrainedModel) -> None:
    """Runs the products of `check` with all experts of a model, so that `lowbit compile` records their kernels."""
    for module in model.modules():
        if isinstance(module, QuantExperts):
            _expert_outputs(module, model.device, model.dtype, 1.0)


def _expert_outputs(module: QuantExperts, device: torch.device, dtype: torch.dtype, size: float) -> Tensor:
    """Returns [E, H]: row e is the output of expert e for one row of the inputs +-size."""
    x, chosen = _expert_inputs(module, size)
    return module(x.to(device, dtype), chosen.to(device), torch.ones(chosen.shape, device=device, dtype=dtype))


def _expert_inputs(module: QuantExperts, size: float) -> tuple[Tensor, Tensor]:
    """Returns a row of the inputs +-size for each expert, and the expert's index [E, 1]."""
    first, _ = module.packed().values()
    each = torch.arange(module.num_experts)
    return probes(first.shape[1], size)[each % PROBES], each[:, None]


@torch.no_grad()
def _of_experts(reader: CheckpointReader, device: torch.device) -> Iterator[tuple[str, LayerSums]]:
    """Yields name and output sums of each layer of experts. One layer at a time is in memory."""
    from lowbit.models.load import placed_skeleton

    assert reader.manifest is not None
    if not any(entry.experts for entry in reader.manifest.layers.values()):
        return
    for name, module in placed_skeleton(reader).named_modules():
        if isinstance(module, QuantExperts):
            stacked = {part: reader.experts(f"{name}.{part}") for part in module.packed()}
            products = [_product(reader, f"{name}.{part}", q, module, device) for part, q in stacked.items()]
            x, chosen = _expert_inputs(module, amplitude(next(iter(stacked.values())).input_transform))
            yield name, layer_sums(module.one_by_one(x, chosen, torch.ones(chosen.shape), products), experts=True)


def _product(
    reader: CheckpointReader, name: str, stacked: ExpertTensor, module: QuantExperts, device: torch.device
) -> Callable[[int, Any], Tensor]:
    """Returns the function that multiplies rows by the matrix of one expert, computed as in `expected`. The matrix is
    dequantized at each call."""
    biased = getattr(module, f"{name.rpartition('.')[2]}_bias") is not None
    bias = reader.get(f"{name}_bias").float() if biased else None

    def multiply(e: int, x: Any) -> Tensor:
        q = stacked.expert(e)
        if q.scheme.activation is None:
            y = _times(x.to(device), q.to(device)).cpu()
            return y if bias is None else y + bias[e]
        return QuantLinear.from_quant_tensor(q).multiply(x, None if bias is None else bias[e])

    return multiply


@torch.no_grad()
def _logits(
    reader: CheckpointReader, device: torch.device, say: Callable[[str], None]
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Returns the largest logits of each token, ids and values, computed in float32 from dequantized weights.

    None for models that are not decoders, and for those with experts. One matrix at a time is in memory."""
    assert reader.manifest is not None
    if any(entry.experts for entry in reader.manifest.layers.values()):
        return None
    try:
        decoder = LayerwiseDecoder(_Dequantized(reader), device, torch.float32)
        _stream(decoder.model, reader, device)
        hidden = decoder.embed(tokens(_vocabulary(decoder.model))[None])
        for i in range(len(decoder)):
            decoder.load(i)
            hidden = list(decoder.run(i, hidden))
            decoder.free(i)
        found = decoder.logits(hidden[0])[0].float().cpu().topk(KEPT_LOGITS)
    except Exception as error:  # noqa: BLE001  # of any architecture: the checkpoint is complete without logits
        say(f"{FILE} has no logits, since the model is not computed a layer at a time: {error}")
        return None
    return found.indices, found.values


def _stream(model: nn.Module, reader: CheckpointReader, device: torch.device) -> None:
    """Replaces the quantized layers of a model, and its embedding and head, by modules that read their weights at each call."""
    assert reader.manifest is not None
    layers, ties = reader.manifest.layers, reader.manifest.tied
    inputs, outputs = (get() for get in (model.get_input_embeddings, model.get_output_embeddings))  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    stored = set(reader.names())
    for name, module in list(model.named_modules()):
        owner = ties.get(name, name)
        if type(module) in (nn.Linear, nn.Embedding) and (owner in layers or module is inputs or module is outputs):
            plain = name if f"{name}.weight" in stored else names[id(inputs)]  # a tied head has no tensor
            model.set_submodule(name, _Streamed(module, reader, owner if owner in layers else None, f"{plain}.weight", device))


class _Streamed(nn.Module):
    """A linear layer or an embedding that reads its weights from a checkpoint at each call: the quantized layer `owner`, or the
    tensor `plain` if `owner` is None."""

    bias: Tensor | None

    def __init__(
        self, replaced: nn.Module, reader: CheckpointReader, owner: str | None, plain: str, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__()
        self._looked_up = isinstance(replaced, nn.Embedding)
        self._read = (lambda: reader.get(plain)) if owner is None else (lambda: reader.layer(owner).to(device))
        self.register_parameter("bias", getattr(replaced, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        w = self._read()
        if self._looked_up:
            rows = [(int(i), int(i) + 1) for i in x.flatten()]
            picked = rows_of(w, rows).dequantize() if isinstance(w, QuantTensor) else w[x.flatten().cpu()].float()
            return picked.view(*x.shape, -1).to(x.device)
        y = _times(x, w)
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def compare_logits(model: PreTrainedModel, kept: Numerics, folder: Path) -> str:
    """Compares the logits of a model with the stored ones. Returns the words for `check`'s line, empty if none are stored.

    Raises NumericsError if the logits differ by more than rounding."""
    if kept.logits is None:
        return ""
    ids, values = (t.to(model.device) for t in kept.logits)
    given = tokens(_vocabulary(model), max(len(ids), ROWS_ON_GPU if model.device.type == "cuda" else 0))
    found = model(input_ids=given[None].to(model.device), use_cache=False).logits[0, : len(ids)].float()
    # The stored logits of a token are its largest ones, so they are close to each other. Differences are therefore relative to
    # their distance from the mean of all logits.
    spread = (values - found.mean(1, keepdim=True)).norm().clamp(min=1e-30)
    off = float((found.gather(1, ids) - values).norm() / spread)
    quantized = any(m.scheme.activation is not None for m in model.modules() if isinstance(m, QuantLinear))
    limit = LARGEST_OF_LOGITS_WITH_QUANTIZED_X if quantized else LARGEST_OF_LOGITS
    if not off <= limit:
        raise NumericsError(
            f"{folder}: its quantized layers compute what {FILE} states, but the model's logits differ by {off:.2g} (rounding "
            f"makes up to {limit}): something that is not quantized was changed, such as a norm, the embedding or config.json"
        )
    return f" and the logits of {len(ids)} tokens"


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)


class _Dequantized(CheckpointReader):
    """A lowbit checkpoint presented as unquantized: each quantized layer has a `weight`, whose values `_Streamed` reads."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._layers: dict[str, LayerEntry] = {}  # read while the folder is opened
        super().__init__(reader.folder)
        assert self.manifest is not None
        self._layers = {f"{name}.weight": entry for name, entry in self.manifest.layers.items()}
        packed = {tensor for name, entry in self.manifest.layers.items() for tensor in expected_tensors(name, entry)}
        self._plain = [name for name in super().names() if name not in packed]

    def names(self) -> list[str]:
        return sorted([*self._plain, *self._layers])

    def info(self, name: str) -> TensorInfo:
        if name not in self._layers:
            return super().info(name)
        entry = self._layers[name]
        return TensorInfo(self.folder, torch.float32, entry.shape, 0, 4 * entry.weights)
