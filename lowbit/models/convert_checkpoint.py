"""Converts a quantized checkpoint to another tool's files, or lowbit's own, a layer at a time and without rounding a weight."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, ForeignReader, Manifest, expected_tensors
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.gptq import Gptq
from lowbit.checkpoint.reader import read_json
from lowbit.formats import ActivationRule, PerChannel, PerTensor, QuantTensor, ZeroPoint
from lowbit.models.complete import Shape, require_complete, require_finite_tensor, some
from lowbit.models.conversion_targets import TARGETS, rounding_error, rounding_errors, target_of
from lowbit.models.gguf import GgufSource
from lowbit.models.names import Names
from lowbit.models.skeleton import build, skeleton
from lowbit.models.tensorrt_llm import WEIGHTS, TensorrtLlmSource, is_tensorrt_llm
from lowbit.ops.table import scheme_refusals

_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ADVICE = "--to lowbit can hold every layer that is read, --to dequantized writes 16-bit weights"


@dataclass
class Conversion:
    """What `convert_checkpoint` did: the tool whose files were read (`source`), `target`, the scheme of each layer, and
    `notes`, a line for everything that the target does not say as the source did."""

    source: str
    target: str
    layers: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report, a line each."""
        schemes = ", ".join(f"{count} of {name}" for name, count in Counter(self.layers.values()).most_common())
        return [f"{self.source} to {self.target}: {len(self.layers)} layers ({schemes})", *self.notes]


class Source(Protocol):
    """Layers and plain tensors of some checkpoint."""

    entries: dict[str, ForeignEntry]
    plain: list[str]

    def layer(self, name: str) -> QuantTensor: ...

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def get(self, name: str) -> Tensor: ...


class _LowbitSource:
    """One of lowbit's own checkpoints."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest) -> None:
        self._reader = reader
        self.entries = {name: ForeignEntry(entry.shape, entry.scheme) for name, entry in manifest.layers.items()}
        taken = {tensor for name, entry in manifest.layers.items() for tensor in expected_tensors(name, entry)}
        self.plain = [name for name in reader.names() if name not in taken]

    def layer(self, name: str) -> QuantTensor:
        return self._reader.layer(name)

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._reader.layer(name).dequantize(dtype)

    def get(self, name: str) -> Tensor:
        return self._reader.get(name)


@dataclass
class _Opened:
    """A source with what surrounds it: the tool's name, config.json without its quantization, the model on the meta device, and
    the folder to copy tokenizer files from."""

    tool: str
    source: Source
    config: dict[str, Any]
    model: PreTrainedModel
    companions: Path
    gptq_v2: bool | None = None
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(
    source: str | Path, target: str | Path, to: str = "lowbit", *, overwrite: bool = False, progress: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Conversion:  # fmt: skip
    """Writes the quantized checkpoint `source` to the folder `target` in the files of another tool.

    source: a Transformers folder quantized by AutoAWQ, GPTQ tools, compressed-tensors, FP8 or bitsandbytes (4 bits), one of
    lowbit's own, one of TensorRT-LLM, or a GGUF file (or a folder with one). to: "lowbit", "gptq", "awq", "compressed-tensors",
    "tensorrt-llm" (one file, in memory as a whole), or "dequantized" for plain weights in the model's dtype, or the 16-bit one
    that rounds least where the files state none. Codes, scales and
    zero points are carried over as they are; only "dequantized" rounds.
    Peak memory is one shard of the output (2 GiB at most) plus one layer. `target` appears complete or not at all; `say` gets a
    line on what it replaced.

    Raises CheckpointError for files that cannot be read or written, and for layers that the target's files cannot hold: it
    names each reason, a layer that has it, and what to do.
    """
    if to not in TARGETS:
        raise CheckpointError(f"checkpoints are converted to {', '.join(TARGETS)}, not to {to!r}")
    source, target = Path(source), Path(target)
    single: dict[str, Any] = {"single": WEIGHTS, "shard_bytes": 1 << 62} if to == "tensorrt-llm" else {}
    writer = CheckpointWriter(target, overwrite=overwrite, sources=[source], say=say, **single)
    with tempfile.TemporaryDirectory() as scratch:
        opened = _open(source, Path(scratch))
        report = Conversion(opened.tool, to, notes=list(opened.notes))
        if opened.tool == to == "lowbit":
            raise CheckpointError(
                f"{source}: is a lowbit checkpoint already; --to names what to make of it: {', '.join(TARGETS)}"
            )
        converter = _Converter(source, opened, to, writer, report)
        writer.reserve(converter.least_bytes())
        with writer:
            written = converter.run(progress)
            if single and written is not None:
                writer.finish(written, None, copy_from=opened.companions)
            else:
                writer.finish(opened.config, written, copy_from=opened.companions)
    return report


class _Converter:
    """One conversion: reads, adapts and writes every layer; once one is refused, only looks for further reasons."""

    def __init__(self, source: Path, opened: _Opened, to: str, writer: CheckpointWriter, report: Conversion) -> None:
        self.where, self.opened, self.writer, self.report = source, opened, writer, report
        self.names, self.modules = Names(opened.model), dict(opened.model.named_modules())
        zeros = any(e.scheme is not None and e.scheme.zero is ZeroPoint.INTEGER for e in opened.source.entries.values())
        self.dtype = self._plain_dtype(to)
        v2 = zeros if opened.gptq_v2 is None else opened.gptq_v2
        self.target = target_of(to, gptq_v2=v2, model=opened.config, dtype=self.dtype)
        self.refused: dict[str, list[str]] = {}
        self.noted: dict[str, list[str]] = {}
        self.rounded = 0.0

    def _plain_dtype(self, to: str) -> torch.dtype:
        """The type of weights that are not quantized: the model's, or, where files name none and one must be stated, that of 16
        bits which rounds least; noted then."""
        stated = str(self.opened.config.get("dtype") or self.opened.config.get("torch_dtype")).removeprefix("torch.")
        if stated in _DTYPES or to not in ("dequantized", "tensorrt-llm"):
            return _DTYPES.get(stated, torch.bfloat16)
        source = self.opened.source
        layers = (source.dequantize(name, torch.float32) for name in source.entries)
        errors = rounding_errors(itertools.chain(layers, map(source.get, source.plain)))
        chosen, other = sorted(errors, key=errors.__getitem__)
        self.opened.config["dtype"] = _name(chosen)
        self.report.notes.append(
            f"no type of weights is stated; {_name(chosen)} is taken, which is at most {errors[chosen]:.1e} of a tensor's "
            f"largest weight off ({_name(other)}: {errors[other]:.1e})"
        )
        return chosen

    def least_bytes(self) -> int:
        """What the output takes at least: the codes of every layer, or its weights where they are written dequantized."""
        total = 0
        for entry in self.opened.source.entries.values():
            n, k = entry.shape
            if self.target is None:
                total += n * k * self.dtype.itemsize
            elif entry.scheme is not None:
                total += n * k * entry.scheme.weight.bits // 8
        return total

    def run(self, progress: bool) -> dict[str, Any] | None:
        """Converts everything; the quantization configuration for config.json, None for plain weights."""
        source = self.opened.source
        require_complete(self.where, self.opened.model, self._tensors(), self.names)
        for name in tqdm(source.entries, desc=f"to {self.report.target}", unit="layer", disable=not progress, leave=False):
            self._layer(name, source.entries[name])
        if self.refused:
            advice = "" if self.report.target == "lowbit" else f"; {_ADVICE}"
            raise CheckpointError(f"{self.where}: {self._refusals()}. Nothing was written{advice}")
        for name in source.plain:
            self._plain(name)
        self.report.notes += [f"{some(names, 1)}: {note}" for note, names in self.noted.items()]
        if self.target is None:
            self.report.notes.append(f"weights are rounded to {_name(self.dtype)}, by {self.rounded:.1e} of a layer's largest")
        return None if self.target is None else self.target.config(self._kept(), self._tied())

    def _layer(self, name: str, entry: ForeignEntry) -> None:
        for note in entry.notes:
            self.noted.setdefault(note, []).append(name)
        if self.target is None:
            self._dequantized(name)
            return
        if entry.scheme is None:
            self.refused.setdefault(entry.refusal, []).append(name)
            return
        q = self._adapted(name, self.opened.source.layer(name))
        reasons = (*self._misplaced(name), *self.target.refusals(name, q))
        for reason in reasons:
            self.refused.setdefault(reason, []).append(name)
        if self.refused:
            return
        written = (self._module(name) or name) if self.report.target == "lowbit" else name
        self._add(self.target.tensors(written, q))
        self.report.layers[written] = q.scheme.name

    def _tensors(self) -> dict[str, Shape | None]:
        """What the files hold for the model; shapes of plain tensors are looked at when they are read."""
        source = self.opened.source
        tensors: dict[str, Shape | None] = {f"{name}.weight": entry.shape for name, entry in source.entries.items()}
        return tensors | {n: None for n in source.plain if not n.endswith(_CACHE_SCALES) and not self._is_bias_of_none(n)}

    def _module(self, layer: str) -> str | None:
        """The name in the model of a layer of the files; None if it has no such module."""
        name = self.names.parameter(f"{layer}.weight")
        return None if name is None else name.removesuffix(".weight")

    def _is_bias_of_none(self, name: str) -> bool:
        """Whether a tensor is the bias of a linear layer that has none in the model."""
        module = self.modules.get(self._module(name.removesuffix(".bias")) or "")
        return name.endswith(".bias") and isinstance(module, nn.Linear) and module.bias is None

    def _dequantized(self, name: str) -> None:
        """Writes a layer's plain weights, rounded once."""
        exact = self.opened.source.dequantize(name, torch.float32)
        weight = exact.to(self.dtype)
        error = rounding_error(exact, self.dtype)
        if math.isinf(error):
            raise CheckpointError(
                f"{self.where}: {name}: weights up to {float(exact.abs().max()):.3g} are beyond {_name(self.dtype)}, the type "
                "that config.json states; state bfloat16 or float32 there"
            )
        self.rounded = max(self.rounded, error)
        self._add({f"{name}.weight": weight})
        self.report.layers[name] = _name(self.dtype)

    def _adapted(self, name: str, q: QuantTensor) -> QuantTensor:
        """The same weights as the target can state and run them: no order where scales do not depend on it, activations in 16
        bits where the files have no word or this library no kernel for fewer."""
        if q.order is not None and isinstance(q.scheme.granularity, (PerChannel, PerTensor)):
            codes = torch.empty_like(q.codes).index_copy_(1, q.order.long(), q.codes)
            q = replace(q, codes=codes, order=None)
        stated = self.report.target == "compressed-tensors" or (self.report.target == "lowbit" and _runs(q))
        if q.scheme.activation is not None and not stated:
            note = f"activations stay in 16 bits, the files asked for {q.scheme.activation.name}"
            self.noted.setdefault(note, []).append(name)
            q = replace(q, scheme=q.scheme.weight_only, activation_scale=None, activation_zero=None)
        theirs = ActivationRule.COMPRESSED_TENSORS
        if q.scheme.activation is not None and self.report.target == "compressed-tensors" and q.scheme.rule is not theirs:
            note = "activations are quantized by compressed-tensors' rule from here on (docs/numerics.md)"
            self.noted.setdefault(note, []).append(name)
        return q

    def _misplaced(self, name: str) -> Iterator[str]:
        """Why the model has no place for a quantized layer of this name."""
        place, module = self.names.place(f"{name}.weight"), self.modules.get(self._module(name) or "")
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and self.report.target == "lowbit"):
            return
        if isinstance(module, nn.Embedding):
            yield f"{self.report.target} files have quantized linear layers only, this is an embedding"
        elif self.report.target == "lowbit":
            found = f"has a {type(module).__name__} there"
            if place is not None and place.through:
                found = f"makes {some(place.parameters)} of it while loading ({', '.join(place.through)})"
            yield f"a linear layer is expected, but Transformers' {type(self.opened.model).__name__} {found}"

    def _plain(self, name: str) -> None:
        tensor = self.opened.source.get(name)
        if name.endswith(_CACHE_SCALES):
            self.noted.setdefault("left out, the key and value cache stays in 16 bits", []).append(name)
            return
        if self._is_bias_of_none(name):
            if bool(tensor.any()):
                raise CheckpointError(
                    f"{self.where}: {name}: {type(self.opened.model).__name__} has no such bias, and it is not 0"
                )
            self.noted.setdefault("left out, the model has no such bias and it is zero", []).append(name)
            return
        own = self.names.parameter(name)
        shape = None if own is None else tuple(self.names.own[own].shape)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.where}: {name} is {list(tensor.shape)}, by config.json it is {list(shape)}")
        require_finite_tensor(self.where, name, tensor)
        written = self.names.written(name) if self.report.target == "lowbit" else name
        names = (written,) if self.target is None else self.target.plain(written)
        self._add({new: tensor if i == 0 else tensor.clone() for i, new in enumerate(names)})

    def _add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.writer.add(name, tensor)

    def _kept(self) -> list[str]:
        """Linear layers of the model that are not quantized."""
        linear = [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]
        quantized = {self._module(name) for name in self.opened.source.entries}
        return [name for name in linear if name not in quantized]

    def _tied(self) -> dict[str, str]:
        """Modules that share the weights of a quantized embedding."""
        mapping: dict[str, str] = getattr(self.opened.model, "all_tied_weights_keys", None) or {}
        pairs = {target.removesuffix(".weight"): owner.removesuffix(".weight") for target, owner in mapping.items()}
        return {name: owner for name, owner in pairs.items() if owner in self.report.layers and name not in self.report.layers}

    def _refusals(self) -> str:
        """All reasons, the most frequent first, each with layers that have it."""
        rows = sorted(self.refused.items(), key=lambda row: -len(row[1]))
        return "; ".join(f"{some(names, 1)}: {reason}" for reason, names in rows)


def _open(path: Path, scratch: Path) -> _Opened:
    """Opens whatever is at `path`."""
    if not path.is_dir() and (path.suffix != ".gguf" or not path.exists()):
        what = "is a file" if path.exists() else "no such folder or file"
        raise CheckpointError(
            f"{path}: {what}; give the folder of a quantized model (config.json and *.safetensors), or a GGUF file (*.gguf)"
        )
    file = path if path.suffix == ".gguf" else None
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise CheckpointError(f"{path}: holds {len(files)} GGUF files; name the one to convert")
        file = files[0] if files else None
    if file is not None:
        gguf = GgufSource(file)
        config = gguf.config()
        model = build(config, file)
        gguf.save_tokenizer(scratch)
        stated = {**config.to_dict(), "architectures": [type(model).__name__]}
        return _Opened("gguf", gguf, stated, model, scratch)
    if path.is_dir() and (path / WEIGHTS).is_file() and is_tensorrt_llm(read_json(path / "config.json")):
        found = TensorrtLlmSource(path)
        model = build(found.model_config, path / "config.json")
        stated = {**found.model_config.to_dict(), "architectures": [type(model).__name__]}
        return _Opened("tensorrt-llm", found, stated, model, path, notes=found.notes)
    files_reader = CheckpointReader(path)
    stated = {key: value for key, value in files_reader.config.items() if key != "quantization_config"}
    if files_reader.manifest is not None:
        return _Opened("lowbit", _LowbitSource(files_reader, files_reader.manifest), stated, skeleton(path), path)
    foreign = ForeignReader(path)
    v2 = foreign.schema.v2 if isinstance(foreign.schema, Gptq) else None
    return _Opened(foreign.schema.name, foreign, stated, skeleton(path), path, v2)


def _runs(q: QuantTensor) -> bool:
    """Whether some kernel multiplies the scheme's activations."""
    return not scheme_refusals(q.scheme, *q.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
