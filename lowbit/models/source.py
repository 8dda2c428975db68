"""A quantized checkpoint of any tool, opened: its layers and plain tensors as a model of Transformers takes them, one by one.

`convert_checkpoint` writes them to files, `load_foreign` puts them in a model; what is refused, left out and said is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader, ForeignReader, Manifest, expected_tensors
from lowbit.checkpoint.detect import SCHEMAS, quantization_of
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.gguf import GgufReader, gguf_file
from lowbit.checkpoint.gptq import Gptq
from lowbit.checkpoint.reader import read_json
from lowbit.formats import ActivationRule, PerChannel, PerTensor, QuantTensor
from lowbit.models.complete import Shape, require_complete, require_finite_tensor, some
from lowbit.models.gguf import GgufSource
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import build, config_of
from lowbit.models.tensorrt_llm import WEIGHTS, TensorrtLlmSource, is_tensorrt_llm
from lowbit.ops.table import scheme_refusals
from lowbit.sources import model_folder

_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
_ONLY_DEQUANTIZED = "bitsandbytes"
"""A tool whose weights have no scheme here; Transformers loads them, with that tool."""


class Source(Protocol):
    """Layers and plain tensors of some checkpoint."""

    entries: dict[str, ForeignEntry]
    plain: list[str]

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor: ...

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def get(self, name: str) -> Tensor: ...


class _LowbitSource:
    """One of lowbit's own checkpoints."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest) -> None:
        self._reader = reader
        self.entries = {name: ForeignEntry(entry.shape, entry.scheme) for name, entry in manifest.layers.items()}
        taken = {tensor for name, entry in manifest.layers.items() for tensor in expected_tensors(name, entry)}
        self.plain = [name for name in reader.names() if name not in taken]

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        return self._reader.layer(name).to(device)

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._reader.layer(name).dequantize(dtype)

    def get(self, name: str) -> Tensor:
        return self._reader.get(name)


@dataclass
class Opened:
    """A source with what surrounds it: the tool's name, the model's configuration without its quantization (and `stated`, as
    config.json says it), the model on the meta device, and whether GPTQ files are of version 2."""

    tool: str
    source: Source
    config: PreTrainedConfig
    stated: dict[str, Any]
    model: PreTrainedModel
    gptq_v2: bool | None = None
    notes: list[str] = field(default_factory=list)

    def companions(self, path: Path, scratch: Path) -> Path:
        """The folder to copy tokenizer files from: that at `path`, or `scratch`, in which those of a GGUF file are written."""
        if not isinstance(self.source, GgufSource):
            return path
        self.source.save_tokenizer(scratch)
        return scratch


def is_foreign(path: str | Path) -> bool:
    """Whether a quantized checkpoint is at `path` that another tool wrote and whose weights have schemes here."""
    path = Path(path)
    if path.is_dir():
        model_folder(path)
    if gguf_file(path) is not None:
        return True
    if not path.is_dir():
        if path.suffix == ".gguf":
            raise CheckpointError(f"{path}: there is no such file")
        return False
    config = read_json(path / "config.json")
    found = quantization_of(path, config)
    return _is_tensorrt_llm(path, config) or (found is not None and found[0] in SCHEMAS and found[0] != _ONLY_DEQUANTIZED)


def open_checkpoint(path: Path) -> Opened:
    """Opens the quantized checkpoint at `path`, a folder or a GGUF file; raises CheckpointError for anything else, and for
    files whose headers are not as their tool writes them."""
    file = gguf_file(path)
    if not path.is_dir() and file is None:
        what = "is a file" if path.exists() else "no such folder or file"
        raise CheckpointError(
            f"{path}: {what}; give the folder of a quantized model (config.json and *.safetensors), or a GGUF file (*.gguf)"
        )
    if path.is_dir():
        model_folder(path)
    if file is not None:
        gguf = GgufSource(file)
        return _made("gguf", gguf, gguf.config(), file)
    if _is_tensorrt_llm(path, read_json(path / "config.json")):
        found = TensorrtLlmSource(path)
        return _made("tensorrt-llm", found, found.model_config, path / "config.json", found.notes)
    reader = CheckpointReader(path)
    stated = {key: value for key, value in reader.config.items() if key != "quantization_config"}
    tool, v2 = "lowbit", None
    if reader.manifest is not None:
        source: Source = _LowbitSource(reader, reader.manifest)
    else:
        foreign = ForeignReader(path)
        source, tool = foreign, foreign.schema.name
        v2 = foreign.schema.v2 if isinstance(foreign.schema, Gptq) else None
    config = config_of(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return Opened(tool, source, config, stated, build(config, path / "config.json"), v2)


def stored_bytes(path: Path) -> int:
    """Bytes of all tensors of another tool's checkpoint."""
    file = gguf_file(path)
    if file is not None:
        return sum(tensor.end - tensor.begin for tensor in GgufReader(file).tensors.values())
    weights = {"weights": WEIGHTS} if _is_tensorrt_llm(path, read_json(path / "config.json")) else {}
    with CheckpointReader(path, **weights) as reader:
        return sum(info.end - info.begin for info in map(reader.info, reader.names()))


def _made(tool: str, source: Source, config: PreTrainedConfig, where: Path, notes: list[str] | None = None) -> Opened:
    """A source whose configuration is made of what its files say in other words."""
    model = build(config, where)
    config.architectures = [type(model).__name__]
    return Opened(tool, source, config, {**config.to_dict()}, model, notes=list(notes or []))


def _is_tensorrt_llm(path: Path, config: dict[str, Any]) -> bool:
    return (path / WEIGHTS).is_file() and is_tensorrt_llm(config)


class Contents:
    """What an opened checkpoint holds, as the files of the kind `to` (`conversion_targets.TARGETS`) can state it and the model
    has a place for it.

    `refused` has reasons with the layers that have them, `noted` what is not carried over as it was, likewise; both grow while
    layers and tensors are read.
    """

    def __init__(self, where: Path, opened: Opened, to: str = "lowbit") -> None:
        self.where, self.opened, self.source, self.to = where, opened, opened.source, to
        self.names, self.modules = TensorNames(opened.model), dict(opened.model.named_modules())
        self.refused: dict[str, list[str]] = {}
        self.noted: dict[str, list[str]] = {}

    def require_complete(self) -> None:
        """Raises CheckpointError unless the files hold all parameters of the model and nothing else."""
        require_complete(self.where, self.opened.model, self._tensors(), self.names)

    def check(self) -> str:
        """Reads everything; what is refused of it. Raises CheckpointError for tensors that are damaged, lacking or too many."""
        self.require_complete()
        for name, entry in self.source.entries.items():
            if self.judge(name) or entry.scheme is not None:
                self.layer(name)
        for name in self.source.plain:
            if not self.left_out(name):
                self.plain(name)
        return self.refusals()

    def note(self, what: str, name: str) -> None:
        """Keeps a line for the report of something that belongs to a layer or tensor."""
        self.noted.setdefault(what, []).append(name)

    def notes(self) -> list[str]:
        """The lines of the report so far."""
        return [*self.opened.notes, *(f"{some(names, 1)}: {note}" for note, names in self.noted.items())]

    def refuse(self, name: str, *reasons: str) -> None:
        """Keeps the reasons why a layer cannot be carried over."""
        for reason in reasons:
            self.refused.setdefault(reason, []).append(name)

    def refusals(self) -> str:
        """All reasons, the most frequent first, each with layers that have it; empty when there are none."""
        rows = sorted(self.refused.items(), key=lambda row: -len(row[1]))
        return "; ".join(f"{some(names, 1)}: {reason}" for reason, names in rows)

    def judge(self, name: str) -> bool:
        """Keeps why a layer has no scheme or no place in the model, which is known before it is read; whether there is none."""
        entry = self.source.entries[name]
        for note in entry.notes:
            self.note(note, name)
        reasons = (entry.refusal,) if entry.scheme is None else tuple(self._misplaced(name))
        self.refuse(name, *reasons)
        return not reasons

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        """The weights of a layer as they can be stated and run, on a device, which makes them: no order where scales do not
        depend on it, activations in 16 bits where the files have no word or this library no kernel for fewer."""
        q = self.source.layer(name, device)
        order = q.input_transform.order
        if order is not None and isinstance(q.scheme.granularity, (PerChannel, PerTensor)):
            codes = torch.empty_like(q.codes).index_copy_(1, order.long(), q.codes)
            q = replace(q.with_input(order=None), codes=codes)
        stated = self.to == "compressed-tensors" or (self.to == "lowbit" and not scheme_refusals(q.scheme, *q.shape))
        if q.scheme.activation is not None and not stated:
            self.note(f"activations stay in 16 bits, the files asked for {q.scheme.activation.name}", name)
            transform = replace(q.input_transform, activation_scale=None, activation_zero=None)
            q = replace(q, scheme=q.scheme.weight_only, input_transform=transform)
        theirs = ActivationRule.COMPRESSED_TENSORS
        if q.scheme.activation is not None and self.to == "compressed-tensors" and q.scheme.rule is not theirs:
            self.note("activations are quantized by compressed-tensors' rule from here on (docs/numerics.md)", name)
        return q

    def plain(self, name: str) -> Tensor:
        """A tensor of no quantized layer that the model has a place for (`left_out`); raises CheckpointError for one of another
        shape, or with numbers that are not finite."""
        tensor = self.source.get(name)
        own = self.names.parameter(name)
        shape = None if own is None else tuple(self.names.own[own].shape)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.where}: {name} is {list(tensor.shape)}, by config.json it is {list(shape)}")
        return require_finite_tensor(self.where, name, tensor)

    def left_out(self, name: str) -> bool:
        """Whether a plain tensor says nothing that the model needs, with a note: scales of the cache, and biases of zeros that
        the model does not have. Raises CheckpointError for such a bias of other numbers."""
        if name.endswith(_CACHE_SCALES):
            self.note("left out, the key and value cache stays in 16 bits", name)
            return True
        if not self._is_bias_of_none(name):
            return False
        if bool(self.source.get(name).any()):
            raise CheckpointError(f"{self.where}: {name}: {type(self.opened.model).__name__} has no such bias, and it is not 0")
        self.note("left out, the model has no such bias and it is zero", name)
        return True

    def module(self, layer: str) -> str | None:
        """The name in the model of a layer of the files; None if it has no such module."""
        name = self.names.parameter(f"{layer}.weight")
        return None if name is None else name.removesuffix(".weight")

    def kept(self) -> list[str]:
        """Linear layers of the model that are not quantized."""
        linear = [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]
        quantized = {self.module(name) for name in self.source.entries}
        return [name for name in linear if name not in quantized]

    def tied(self, layers: Collection[str]) -> dict[str, str]:
        """Modules that share the weights of one of the quantized `layers`, named as in the model, and are none themselves."""
        mapping: dict[str, str] = getattr(self.opened.model, "all_tied_weights_keys", None) or {}
        pairs = {target.removesuffix(".weight"): owner.removesuffix(".weight") for target, owner in mapping.items()}
        return {name: owner for name, owner in pairs.items() if owner in layers and name not in layers}

    def _tensors(self) -> dict[str, Shape | None]:
        """What the files hold for the model; shapes of plain tensors are looked at when they are read."""
        source = self.source
        tensors: dict[str, Shape | None] = {f"{name}.weight": entry.shape for name, entry in source.entries.items()}
        return tensors | {n: None for n in source.plain if not n.endswith(_CACHE_SCALES) and not self._is_bias_of_none(n)}

    def _is_bias_of_none(self, name: str) -> bool:
        """Whether a tensor is the bias of a linear layer that has none in the model."""
        module = self.modules.get(self.module(name.removesuffix(".bias")) or "")
        return name.endswith(".bias") and isinstance(module, nn.Linear) and module.bias is None

    def _misplaced(self, name: str) -> Iterator[str]:
        """Why the model has no place for a quantized layer of this name."""
        place, module = self.names.place(f"{name}.weight"), self.modules.get(self.module(name) or "")
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and self.to == "lowbit"):
            return
        if isinstance(module, nn.Embedding):
            yield f"{self.to} files have quantized linear layers only, this is an embedding"
        elif self.to == "lowbit":
            found = f"has a {type(module).__name__} there"
            if place is not None and place.operations:
                found = f"makes {some(place.parameters)} of it while loading ({', '.join(place.operations)})"
            yield f"a linear layer is expected, but Transformers' {type(self.opened.model).__name__} {found}"
