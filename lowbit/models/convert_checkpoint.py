"""Converts a quantized checkpoint to another tool's files, or lowbit's own, one layer at a time. Weights are not rounded
again."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint import CheckpointError, CheckpointWriter, Manifest
from lowbit.formats import ExpertTensor, QuantTensor, ZeroPoint
from lowbit.formats.split import rows_of
from lowbit.models.conversion_targets import (
    TARGETS,
    LowbitTarget,
    converted_record,
    rounding_error,
    rounding_errors,
    target_of,
)
from lowbit.models.expert_names import ExpertModule, tensors_of
from lowbit.models.layer_importer import LayerImporter
from lowbit.models.source import QuantizedCheckpoint, resolve
from lowbit.models.tensorrt_llm import WEIGHTS
from lowbit.progress import Progress

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ADVICE = "--to lowbit can hold every layer that is read, --to dequantized writes 16-bit weights"


@dataclass
class ConversionReport:
    """The report of `convert_checkpoint`.

    source: the tool whose files were read. layers: name -> scheme. notes: a line for everything that the target states
    differently from the source.
    """

    source: str
    target: str
    layers: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        schemes = ", ".join(f"{count} of {name}" for name, count in Counter(self.layers.values()).most_common())
        return [f"{self.source} to {self.target}: {len(self.layers)} layers ({schemes})", *self.notes]


def convert_checkpoint(
    source: str | Path, target: str | Path, to: str = "lowbit", *, overwrite: bool = False, progress: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> ConversionReport:  # fmt: skip
    """Writes the quantized checkpoint `source` to the folder `target` in the files of another tool.

    source: a Transformers folder or hub name, quantized by lowbit, AutoAWQ, GPTQ tools, compressed-tensors, FP8 or bitsandbytes
    (4 bits); a TensorRT-LLM checkpoint; or a GGUF file (or a folder with one). to: "lowbit", "gptq", "awq",
    "compressed-tensors", "tensorrt-llm" (one file, completely in memory), or "dequantized" for plain weights in the model's
    dtype. If the files state no dtype, the 16-bit one with the least rounding error is used. Codes, scales and zero points are
    unchanged; only "dequantized" rounds. Peak memory is one shard of the output (2 GiB at most) plus one layer. `target` is
    written atomically; `say` is called with a line about a replaced checkpoint.

    Raises CheckpointError for files that cannot be read or written, and for layers that the target's files cannot hold, with
    each reason, a layer that has it, and the remedy.
    """
    if to not in TARGETS:
        raise CheckpointError(f"checkpoints are converted to {', '.join(TARGETS)}, not to {to!r}")
    resolved, target = resolve(source, quantized=True), Path(target)
    single: dict[str, Any] = {"single": WEIGHTS, "shard_bytes": 1 << 62} if to == "tensorrt-llm" else {}
    with (
        CheckpointWriter(target, overwrite=overwrite, sources=[resolved.path], say=say, **single) as writer,
        tempfile.TemporaryDirectory() as scratch,
    ):
        checkpoint = resolved.open_quantized()
        report = ConversionReport(checkpoint.tool, to)
        if checkpoint.tool == to == "lowbit":
            raise CheckpointError(
                f"{resolved.path}: is a lowbit checkpoint already; --to names what to make of it: {', '.join(TARGETS)}"
            )
        converter = _Converter(checkpoint, to, writer, report)
        writer.reserve(converter.least_bytes())
        companions = checkpoint.tokenizer_folder(Path(scratch))
        written = converter.run(progress)
        if single and isinstance(written, dict):
            writer.finish(written, None, copy_from=companions)
        else:
            if isinstance(written, Manifest):
                written = replace(written, method=converted_record(checkpoint.tool))
            writer.finish(checkpoint.stated, written, copy_from=companions)
    return report


class _Converter:
    """Reads and writes every layer. After the first layer that the target cannot hold, it only collects further reasons."""

    def __init__(self, checkpoint: QuantizedCheckpoint, to: str, writer: CheckpointWriter, report: ConversionReport) -> None:
        self.checkpoint, self.reader, self.writer, self.report = checkpoint, checkpoint.reader, writer, report
        self.importer = LayerImporter(checkpoint, to)
        zeros = any(e.scheme is not None and e.scheme.zero is ZeroPoint.INTEGER for e in self.reader.entries.values())
        self._stacked = [n for n, experts in self.reader.experts.items() if to == "lowbit" or not experts.layers]
        self.dtype = self._plain_dtype(to)
        v2 = zeros if checkpoint.gptq_v2 is None else checkpoint.gptq_v2
        self.target = target_of(to, gptq_v2=v2, model=checkpoint.stated, dtype=self.dtype)
        self.rounded = 0.0

    def _plain_dtype(self, to: str) -> torch.dtype:
        """Returns the dtype of plain weights: the model's, or, if none is stated, the 16-bit one with the least rounding
        error."""
        stated = str(self.checkpoint.stated.get("dtype") or self.checkpoint.stated.get("torch_dtype")).removeprefix("torch.")
        if stated in _DTYPES or to not in ("dequantized", "tensorrt-llm"):
            return _DTYPES.get(stated, torch.bfloat16)
        layers = (self.reader.dequantize(name, torch.float32) for name in self.reader.entries)
        stacked = (self.reader.expert_layer(name) for name in self._stacked)
        experts = (q.dequantize() for each in stacked for q in (*each.gate_up, *each.down))
        errors = rounding_errors(itertools.chain(layers, experts, map(self.reader.get, self.reader.plain)))
        chosen, other = sorted(errors, key=errors.__getitem__)
        self.checkpoint.stated["dtype"] = _name(chosen)
        self.checkpoint.notes.append(
            f"no type of weights is stated; {_name(chosen)} is taken, which is at most {errors[chosen]:.1e} of a tensor's "
            f"largest weight off ({_name(other)}: {errors[other]:.1e})"
        )
        return chosen

    def least_bytes(self) -> int:
        """Returns a lower bound of the output's bytes: the codes of every layer, or its dequantized weights."""
        total = 0
        for entry in self.reader.entries.values():
            n, k = entry.shape
            if self.target is None:
                total += n * k * self.dtype.itemsize
            elif entry.scheme is not None:
                total += n * k * entry.scheme.weight.bits // 8
        for experts in map(self.reader.experts.__getitem__, self._stacked if self.target is None else ()):
            total += experts.experts * sum(n * k for n, k in (experts.gate_up.shape, experts.down.shape)) * self.dtype.itemsize
        return total

    def run(self, progress: bool) -> Manifest | dict[str, Any] | None:
        """Converts everything; returns `quantization_config`, None for plain weights."""
        self.importer.require_complete()
        for name in Progress(self.reader.entries, desc=f"to {self.report.target}", unit="layers", shown=progress):
            if name not in self.importer.in_experts:
                self._layer(name)
        for name in self._stacked:
            self._experts(name)
        if self.importer.refused:
            advice = "" if self.report.target == "lowbit" else f"; {_ADVICE}"
            raise CheckpointError(f"{self.checkpoint.path}: {self.importer.refusals()}. Nothing was written{advice}")
        for name in self.reader.plain:
            if not self.importer.left_out(name):
                self._plain(name)
        self.report.notes += self.importer.notes()
        if self.target is None:
            self.report.notes.append(f"weights are rounded to {_name(self.dtype)}, by {self.rounded:.1e} of a layer's largest")
            return None
        return self.target.config(self.importer.unquantized_linears(), self.importer.tied(self.report.layers))

    def _layer(self, name: str) -> None:
        if self.target is None:
            for note in self.reader.entries[name].notes:
                self.importer.note(note, name)
            self._dequantized(name)
            return
        if not self.importer.judge(name) and self.reader.entries[name].scheme is None:
            return
        q = self.importer.layer(name)
        self.importer.refuse(name, *self.target.refusals(name, q))
        if self.importer.refused:
            return
        written = (self.importer.module(name) or name) if self.report.target == "lowbit" else name
        self._add(self.target.tensors(written, q))
        self.report.layers[written] = q.scheme.name

    def _experts(self, name: str) -> None:
        """Writes the experts of a layer: together for lowbit's files, else under the names of the architecture's files."""
        if not self.importer.judge_experts(name) or self.importer.refused:
            return
        module = self.importer.expert_module(name)
        assert module is not None
        if isinstance(self.target, LowbitTarget):
            for parameter, value in self.importer.expert_tensors(name).items():
                self._add({parameter: value} if isinstance(value, Tensor) else self.target.experts(parameter, value))
                if isinstance(value, ExpertTensor):
                    self.report.layers[parameter] = value.scheme.name
            return
        experts = self.importer.expert_layer(name)
        matrices = {module.first: experts.gate_up, module.down: experts.down}
        biases = {f"{module.first}_bias": experts.gate_up_bias, f"{module.down}_bias": experts.down_bias}
        for tensor, (parameter, expert, role) in tensors_of(self.checkpoint.model, module).items():
            if parameter in biases:
                bias = biases[parameter]
                self._add({} if bias is None else {tensor: bias if expert is None else bias[expert]})
            elif expert is None:
                self._stacked_weights(tensor, module, matrices[parameter])
            else:
                q = matrices[parameter][expert]
                half = q.shape[0] // 2
                rows = {"gate": [(0, half)], "up": [(half, 2 * half)]}.get(role if module.gated else "", [(0, q.shape[0])])
                self._single_expert(tensor.removesuffix(".weight"), rows_of(q, rows))

    def _stacked_weights(self, name: str, module: ExpertModule, matrices: tuple[QuantTensor, ...]) -> None:
        """Writes the dequantized matrices of all experts as one tensor."""
        if self.target is not None:
            self.importer.refuse(name, f"{self.report.target} files hold experts one by one, this architecture's are stacked")
            return
        weights = [self._rounded(name, q.dequantize(torch.float32)) for q in matrices]
        self._add({name: torch.stack([w.T if module.transposed else w for w in weights])})
        self.report.layers[name] = _name(self.dtype)

    def _single_expert(self, name: str, q: QuantTensor) -> None:
        """Writes one matrix of one expert."""
        if self.target is None:
            self._add({f"{name}.weight": self._rounded(name, q.dequantize(torch.float32))})
            self.report.layers[name] = _name(self.dtype)
            return
        self.importer.refuse(name, *self.target.refusals(name, q))
        if not self.importer.refused:
            self._add(self.target.tensors(name, q))
            self.report.layers[name] = q.scheme.name

    def _dequantized(self, name: str) -> None:
        """Writes the dequantized weights of a layer, rounded once."""
        self._add({f"{name}.weight": self._rounded(name, self.reader.dequantize(name, torch.float32))})
        self.report.layers[name] = _name(self.dtype)

    def _rounded(self, name: str, exact: Tensor) -> Tensor:
        """Returns weights in the dtype of plain weights. Raises CheckpointError for weights beyond it."""
        weight = exact.to(self.dtype)
        error = rounding_error(exact, self.dtype)
        if math.isinf(error):
            raise CheckpointError(
                f"{self.checkpoint.path}: {name}: weights up to {float(exact.abs().max()):.3g} are beyond {_name(self.dtype)}, "
                "the type that config.json states; state bfloat16 or float32 there"
            )
        self.rounded = max(self.rounded, error)
        return weight

    def _plain(self, name: str) -> None:
        tensor = self.importer.plain(name)
        written = self.importer.names.written(name, self.report.layers) if self.report.target == "lowbit" else name
        names = (written,) if self.target is None else self.target.plain(written)
        self._add({new: tensor if i == 0 else tensor.clone() for i, new in enumerate(names)})

    def _add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.writer.add(name, tensor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
