"""Quantizes a checkpoint on disk to another one, a tensor at a time: no model of 16-bit weights is ever in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import QuantTensor, Scheme, parse_scheme
from lowbit.models.calibrate import Calibration, Finished, Results, calibrate_layers, measure_sensitivity, recipe_of
from lowbit.models.decoder import Decoder
from lowbit.models.hf import plan_for
from lowbit.nn.convert import Kept, Plan, quantized
from lowbit.quantize.hqq import hqq
from lowbit.quantize.method import DATA_FREE, Hqq, Method, Rtn
from lowbit.quantize.mixed import Mixed, choose
from lowbit.quantize.rtn import Search


def skeleton(folder: Path) -> nn.Module:
    """The model of a Transformers folder on the meta device: its modules and shapes, no weights."""
    config = AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or [""])[0]
    with torch.device("meta"):
        cls = getattr(transformers, architecture, None)
        model: nn.Module = AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    return model


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    scheme: str,
    *,
    skip: Iterable[str] | None = None,
    embeddings: bool = False,
    search: Search = "max",
    method: Method | None = None,
    calibration: Calibration | None = None,
    mixed: Mixed | None = None,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Writes the Transformers checkpoint `source` to the folder `target` with quantized weights.

    By round-to-nearest with scales by `search`, or by `method` (`quantize.method`). Without calibration one tensor is read,
    quantized on `device` and written at a time, so peak memory is one shard of the output (2 GiB at most) plus one layer; with
    it, see `calibrate_layers`: layers outside the decoder are rounded to nearest, and a run that was killed goes on when it is
    called again. `mixed` chooses a scheme for each unit of layers in the decoder. `target` appears complete or not at all.
    `say` gets a line for every choice made on the way. Returns the report of what was converted and what was not. Other
    arguments as for `lowbit.LowbitConfig`. Raises CheckpointError for files that cannot be read or written and ValueError for
    schemes, weights and texts that cannot be used.
    """
    source, target = Path(source), Path(target)
    method = Rtn(search) if method is None else method
    with CheckpointReader(source) as reader:
        if reader.manifest is not None or "quantization_config" in reader.config:
            kind = reader.config.get("quantization_config", {}).get("quant_method", "unknown")
            raise CheckpointError(f"{source}: is quantized already ({kind}); quantize the 16-bit checkpoint it came from")
        model = skeleton(source)
        plan = plan_for(model, scheme, skip, embeddings)
        modules = _modules_by_tensor(model, plan, reader.names())
        plan = _without_missing(plan, set(modules.values()))
        writer = CheckpointWriter(target, overwrite=overwrite)
        weights = _Weights(reader, plan, method, torch.device(device))
        if mixed is not None:
            for candidate in mixed.schemes:
                _same_layers(plan_for(model, candidate, skip, embeddings), plan)
            weights.choose_schemes(mixed, calibration or Calibration(), say, progress)
        if not isinstance(method, DATA_FREE):
            weights.calibrate(target, calibration or Calibration(), say, progress)
        entries = {}
        with writer:
            for tensor in tqdm(reader.names(), desc=f"{scheme}", unit="tensor", disable=not progress, leave=False):
                module = modules.get(tensor)
                if module in plan.shapes:
                    q = weights.quantized(tensor, module)
                    entries[module] = LayerEntry.of(q)
                    for suffix, value in layer_tensors(q).items():
                        writer.add(f"{tensor.removesuffix('weight')}{suffix}", value)
                elif module not in plan.tied:
                    writer.add(tensor, weights.plain(tensor))
            writer.finish(reader.config, manifest_of(plan, entries), copy_from=source)
        weights.done()
    return plan


def manifest_of(plan: Plan, entries: dict[str, LayerEntry]) -> Manifest:
    """What config.json states about the layers of a plan, which `entries` describes."""
    return Manifest(
        scheme=plan.scheme,
        layers={name: entries[name] for name in plan.shapes},
        modules_to_not_convert=tuple(row.name for row in plan.kept),
        tied=dict(plan.tied),
    )


class _Weights:
    """The tensors to write: rounded as they are asked for, or from the finished layers of a calibrated run."""

    def __init__(self, reader: CheckpointReader, plan: Plan, method: Method, device: torch.device) -> None:
        self.reader, self.plan, self.method, self.device = reader, plan, method, device
        self.schemes: dict[str, Scheme] = dict.fromkeys(plan.shapes, plan.scheme)
        self._results: Results | None = None

    def choose_schemes(self, mixed: Mixed, calibration: Calibration, say: Callable[[str], None], progress: bool) -> None:
        """Gives each unit of linear layers in the decoder a scheme, and says which."""
        decoder = self._decoder()
        candidates = [parse_scheme(name) for name in mixed.schemes]
        tokens = calibration.tokens(self.reader.folder)
        units = measure_sensitivity(decoder, list(self.plan.linears), candidates, tokens, progress=progress)
        weights = sum(self.plan.linears[name][0] * self.plan.linears[name][1] for unit in units for name in unit)
        chosen = choose({" ".join(unit): rows for unit, rows in units.items()}, mixed.bits * weights)
        for unit, candidate in chosen.items():
            self.schemes.update(dict.fromkeys(unit.split(" "), candidate.scheme))
            say(f"{candidate.scheme.name}: {unit} (relative error {candidate.error:.2e})")
        bits = sum(c.bits for c in chosen.values()) / max(weights, 1)
        say(f"{bits:.3f} bits per weight on average in {len(chosen)} units, {mixed.bits} allowed")

    def calibrate(self, target: Path, calibration: Calibration, say: Callable[[str], None], progress: bool) -> None:
        """Quantizes the decoder's layers, or what is left of them when an earlier run was killed."""
        decoder = self._decoder()
        tokens = calibration.tokens(self.reader.folder)
        finished = Finished(target, recipe_of(self.reader, self.schemes, self.method, tokens, decoder))
        say(f"calibrating on {tokens.shape[0]} x {tokens.shape[1]} tokens; finished layers are kept in {finished.folder}")
        replaced = {f"{name}.weight": self._rounded(decoder.file_name(f"{name}.weight"), name) for name in self.plan.embeddings}
        dense = {name: q.dequantize() for name, q in replaced.items()}
        for line in calibrate_layers(decoder, self.schemes, self.method, tokens, finished, embeddings=dense, progress=progress):
            say(line)
        self._results = Results(decoder, finished, self.schemes)

    def quantized(self, tensor: str, module: str) -> QuantTensor:
        """The quantized weight of a module, whose tensor in the files is `tensor`."""
        found = None if self._results is None else self._results.quantized(module)
        return self._rounded(tensor, module) if found is None else found

    def plain(self, tensor: str) -> Tensor:
        """A tensor that is not quantized."""
        found = None if self._results is None else self._results.changed(tensor)
        return self.reader.get(tensor) if found is None else found

    def done(self) -> None:
        """Removes what a killed run would have needed."""
        if self._results is not None:
            self._results.finished.clear()

    def _decoder(self) -> Decoder:
        """Computes in float32 on a CPU, elsewhere in the type that most of the weights are stored in."""
        sizes: dict[torch.dtype, int] = {}
        for info in map(self.reader.info, self.reader.names()):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.end - info.begin
        stored = max(sizes, key=lambda dtype: sizes[dtype])
        return Decoder(self.reader, self.device, torch.float32 if self.device.type == "cpu" else stored)

    def _rounded(self, tensor: str | None, module: str) -> QuantTensor:
        assert tensor is not None
        weight, scheme = self.reader.get(tensor).to(self.device), self.schemes[module]
        if isinstance(self.method, Hqq):
            return hqq(weight, scheme).to("cpu")
        search = self.method.search if isinstance(self.method, Rtn) else "max"
        return quantized(f"{self.reader.folder}: {tensor}", weight, scheme, search).to("cpu")


def _same_layers(candidate: Plan, plan: Plan) -> None:
    """Raises ValueError when a scheme offered for mixing cannot take a layer that the default takes."""
    for row in candidate.kept:
        if row.name in plan.linears:
            raise ValueError(f"{candidate.scheme} cannot take {row.name}: {row.reason}")


def _modules_by_tensor(model: nn.Module, plan: Plan, names: Iterable[str]) -> dict[str, str]:
    """Tensor name in the files -> name of the module whose weight it is, for modules of the plan. Files of a base model
    lack the prefix that the model's own names have."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    wanted = {f"{module}.weight": module for module in (*plan.shapes, *plan.tied)}
    found = {}
    for name in names:
        for key in (name, prefix + name):
            if key in wanted:
                found[name] = wanted[key]
    return found


def _without_missing(plan: Plan, found: set[str]) -> Plan:
    """The plan without the modules whose weights the files hold under other names; they stay as they are."""
    missing = {name for name in plan.shapes if name not in found}
    kept = [Kept(name, "", 0, f"the files have no tensor {name}.weight") for name in sorted(missing)]
    return dataclasses.replace(
        plan,
        linears={n: s for n, s in plan.linears.items() if n not in missing},
        embeddings={n: s for n, s in plan.embeddings.items() if n not in missing},
        tied={n: owner for n, owner in plan.tied.items() if owner not in missing},
        kept=plan.kept + kept,
    )
