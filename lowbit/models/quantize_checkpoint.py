"""Quantizes a checkpoint on disk a tensor at a time; the 16-bit model is never in memory as a whole."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.checkpoint.target import check_space, discard
from lowbit.formats import ExpertTensor, QuantTensor, Scheme, parse_scheme, rotate_blocks
from lowbit.hardware.machine import torch_device
from lowbit.methods import DATA_FREE, Awq, Hqq, Learned, Method, Mixed, Rtn, Search, SmoothQuant, method_of, method_record
from lowbit.models import numerics
from lowbit.models.calibrate import CalibratedWeights, Calibration, FinishedLayers, calibrate_layers, finished_bytes, recipe_of
from lowbit.models.complete import require_complete, require_finite_tensor
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.experts import ExpertReader, ExpertSource, expert_sources
from lowbit.models.hf import give_back_freed_memory, plan_for
from lowbit.models.learn import ENOUGH_TOKENS
from lowbit.models.names import TensorNames
from lowbit.models.rotate import RotatedReader
from lowbit.models.sensitivity import SCRATCH_FILES, measure_sensitivity
from lowbit.models.skeleton import build, config_as_read
from lowbit.models.source import ResolvedSource, resolve
from lowbit.nn.convert import Plan, Rounding, matches, quantized, quantized_experts, rounding
from lowbit.nn.experts import expert_weights
from lowbit.progress import Progress
from lowbit.quantize.hqq import hqq
from lowbit.quantize.lorc import lorc
from lowbit.quantize.mixed import choose, stored_bits


def _silent(line: str) -> None:
    """Discards a line."""


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    scheme: str,
    *,
    skip: Iterable[str] | None = None,
    embeddings: bool = False,
    search: Search | None = None,
    method: str | Method | None = None,
    calibration: Calibration | None = None,
    mixed: Mixed | None = None,
    low_rank: int = 0,
    wide_inputs: Iterable[str] = (),
    rotation: int | None = None,
    rotate_inputs: Iterable[str] = (),
    device: str | torch.device | None = None,
    overwrite: bool = False,
    progress: bool = False,
    say: Callable[[str], None] = _silent,
    **options: Any,
) -> Plan:
    """Writes the Transformers checkpoint `source` to the folder `target` with quantized weights.

    source: a folder, or a name on the hub. method: the name of one ("rtn", "gptq", ...), with `search` and `options` named as
    on the command line (act_order=True, `methods.method_of`), or an object of `methods` with its options; default: round to
    nearest. device: "cuda" if torch sees a GPU, else "cpu".

    Without calibration one tensor is read, quantized on `device` and written at a time, so peak memory is one shard of the
    output (2 GiB at most) plus one layer. With calibration see `calibrate_layers`: layers outside the decoder are rounded to
    nearest, and a killed run resumes when it is called again.

    mixed: a scheme for each unit of layers in the decoder. low_rank: the rank of a correction per linear layer
    (`quantize.lorc`), weighted by the inputs if the method observes them; 0 for none. wide_inputs: patterns of layers with
    16-bit activations. rotation: a seed, with which residual stream and heads are rotated before they are quantized
    (`models.rotate`). rotate_inputs: patterns of layers whose inputs are rotated at run time, in blocks of channels
    (`formats.rotate_blocks`). say: called with a line for every choice; without it, warnings are issued as Python warnings.
    Other arguments as for `lowbit.LowbitConfig`.

    `target` is written atomically. Returns the plan: the layers that were quantized and those that were not. Raises
    CheckpointError for files that cannot be read or written, and ValueError for unusable schemes, weights, texts, patterns and
    devices, and if nothing can be quantized.
    """
    method = _chosen(method, search, options)
    resolved, target, device = resolve(source), Path(target), torch_device(device)
    source = resolved.path
    with (
        CheckpointWriter(target, overwrite=overwrite, sources=[source], say=say) as writer,
        _opened(resolved, rotation, say) as reader,
    ):
        discard(_scratch_folder(target), SCRATCH_FILES)  # left by a killed run
        model = build(config_as_read(reader), source / "config.json")
        names = TensorNames(model)
        require_complete(source, model, {tensor: reader.info(tensor).shape for tensor in reader.names()}, names)
        skip = None if skip is None else _fitting(tuple(skip), model)
        plan = names.followed(plan_for(model, scheme, skip, embeddings), reader.names())
        modules = names.modules(plan, reader.names())
        experts = expert_sources(names, reader.names(), plan.experts)
        _same_weights(reader, plan, modules)
        if not plan.layers:
            raise ValueError("; ".join([f"{source}: nothing in it can be quantized to {plan.scheme}", *plan.lines()[1:]]))
        _announce(low_rank, plan, say)
        needed_bytes = _output_bytes(reader, modules, experts, plan, mixed, low_rank)
        writer.reserve(needed_bytes)
        plan = dataclasses.replace(plan, others=_wide(plan, wide_inputs, mixed))
        rotated_inputs = _rotated(plan, rotate_inputs)
        if rotated_inputs and (isinstance(method, SmoothQuant) or getattr(method, "smooth", None) is not None):
            say(f"the inputs of {len(rotated_inputs)} layers are rotated, not smoothed: no factor passes through a rotation")
        weights = _OutputTensors(reader, plan, method, device, low_rank, rotated_inputs, experts, model, modules)
        if mixed is not None:
            for candidate in mixed.schemes:
                _same_layers(plan_for(model, candidate, skip, embeddings), plan)
            weights.choose_schemes(mixed, target, calibration or Calibration(), say, progress)
            others = {name: chosen for name, chosen in weights.schemes.items() if chosen != plan.scheme}
            plan = weights.plan = dataclasses.replace(plan, others=others)
        static = any(scheme.static_activations for scheme in weights.schemes.values())
        calibrated = static or not isinstance(method, DATA_FREE)
        used = (calibration or Calibration()).record() if calibrated or mixed is not None else None
        if calibrated:
            weights.calibrate(target, calibration or Calibration(), needed_bytes, say, progress)
        entries: dict[str, LayerEntry] = {}
        of_experts = {tensor: name for name, source in experts.items() for tensor in source.names}
        for tensor in Progress(reader.names(), desc=f"{scheme}", unit="tensors", shown=progress):
            module = of_experts.get(tensor, modules.get(tensor))
            if module in entries:  # an earlier tensor of the same experts has written all of them
                continue
            if module in plan.layers:
                q = weights.experts(module) if module in plan.experts else weights.quantized(tensor, module)
                entries[module] = LayerEntry.of(q)
                for suffix, value in layer_tensors(q).items():
                    writer.add(f"{module}.{suffix}", value)
                del q, value
                give_back_freed_memory()
            elif module not in plan.tied:
                writer.add(names.written(tensor, plan.layers), weights.plain(tensor))
        manifest = dataclasses.replace(
            manifest_of(plan, entries), rotation=rotation, method=method_record(method), calibration=used
        )
        say("recording the outputs of each layer for the comparison at each start")
        writer.finish(
            reader.config, manifest, copy_from=source,
            beside=lambda folder: numerics.write(folder, numerics.record(folder, weights.plain_weight, device, say)),
        )  # fmt: skip
        weights.remove_finished()
    return plan


def manifest_of(plan: Plan, entries: dict[str, LayerEntry]) -> Manifest:
    """Returns the manifest of the layers of a plan with their `entries`."""
    return Manifest(
        scheme=plan.scheme,
        layers={name: entries[name] for name in plan.layers},
        modules_to_not_convert=tuple(row.name for row in plan.kept),
        tied=dict(plan.tied),
    )


class _OutputTensors:
    """Computes the tensors to write, by rounding or from the finished layers of a calibrated run."""

    def __init__(
        self, reader: CheckpointReader, plan: Plan, method: Method, device: torch.device, low_rank: int,
        rotated_inputs: Mapping[str, int], experts: Mapping[str, ExpertSource], model: nn.Module, modules: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._experts, self._model = experts, model
        self._sources = {module: tensor for tensor, module in modules.items()}
        self.reader, self.plan, self.method, self.device, self.low_rank = reader, plan, method, device, low_rank
        self.rotated_inputs = rotated_inputs
        self.schemes: dict[str, Scheme] = dict.fromkeys(plan.layers, plan.scheme) | plan.others
        self._results: CalibratedWeights | None = None

    def choose_schemes(
        self, mixed: Mixed, target: Path, calibration: Calibration, say: Callable[[str], None], progress: bool
    ) -> None:
        """Chooses and reports a scheme for each unit of linear layers in the decoder."""
        # In float32, since gradients may underflow 16 bits.
        decoder = LayerwiseDecoder(self.reader, self.device, torch.float32, self._rotated_linears())
        schemes = [parse_scheme(name) for name in mixed.schemes]
        shapes = [shape for name, shape in self.plan.linears.items() if name.startswith(f"{decoder.name}.")]
        weights = sum(n * k for n, k in shapes)
        smallest = sum(min(stored_bits(s, scheme, self.low_rank) for scheme in schemes) for s in shapes) / max(weights, 1)
        if smallest > mixed.bits:
            raise ValueError(
                f"the smallest of {', '.join(mixed.schemes)} take {smallest:.3f} bits per weight, scales and corrections "
                f"included, {mixed.bits} are allowed; allow more or offer smaller schemes"
            )
        tokens = calibration.tokens(self.reader.folder)
        scratch = _scratch_folder(target)
        try:
            units = measure_sensitivity(
                decoder, list(self.plan.linears), schemes, tokens, _existing(scratch), low_rank=self.low_rank, progress=progress
            )
        finally:
            discard(scratch, SCRATCH_FILES)
        weights = sum(self.plan.linears[name][0] * self.plan.linears[name][1] for unit in units for name in unit)
        chosen = choose({" ".join(unit): rows for unit, rows in units.items()}, mixed.bits * weights)
        for unit, candidate in chosen.items():
            self.schemes.update(dict.fromkeys(unit.split(" "), candidate.scheme))
            say(f"{candidate.scheme.name}: {unit} ({candidate.error:.2e} nats per token)")
        bits = sum(c.bits for c in chosen.values()) / max(weights, 1)
        nats = sum(c.error for c in chosen.values())
        say(
            f"{bits:.3f} bits per weight on average in {len(chosen)} units, {mixed.bits} allowed; {nats:.4f} nats per token "
            "from the 16-bit model are expected, by second-order estimate and if rounded to nearest"
        )

    def calibrate(
        self, target: Path, calibration: Calibration, needed_bytes: int, say: Callable[[str], None], progress: bool
    ) -> None:
        """Quantizes the decoder's layers that are not finished yet. `needed_bytes` of the output, beside those of the finished
        layers, must fit on the disk."""
        decoder = self._decoder()
        tokens = calibration.tokens(self.reader.folder)
        weights = [n * k for name, (n, k) in self.plan.linears.items() if name.startswith(f"{decoder.name}.")]
        weights += [math.prod(shape) for shape in self.plan.experts.values()]
        stages = 2 if isinstance(self.method, Learned) and self.method.distill else 1
        layer_bytes = stages * sum(weights) - finished_bytes(target)
        expert_rotations = {name: block for name, block in self.rotated_inputs.items() if name in self.plan.experts}
        check_space(target, needed_bytes + layer_bytes, "the checkpoint, with its finished layers at a byte per weight,")
        recipe = recipe_of(self.reader, self.schemes, self.method, self.low_rank, tokens, decoder, expert_rotations)
        finished = FinishedLayers(target, recipe, say)
        if isinstance(self.method, Learned) and tokens.numel() < ENOUGH_TOKENS:
            samples = -(-ENOUGH_TOKENS // tokens.shape[1])
            size = f"{tokens.shape[0]} x {tokens.shape[1]}"
            _warn(
                f"learned from {tokens.numel():,} tokens ({size}), weights may be worse than rounded to nearest; take "
                f"{samples} samples of {tokens.shape[1]} tokens or more (--samples {samples}), or --method rtn",
                say,
            )
        say(f"calibrating on {tokens.shape[0]} x {tokens.shape[1]} tokens; finished layers are kept in {finished.folder}")
        replaced = {f"{name}.weight": self._rounded(decoder.file_name(f"{name}.weight"), name) for name in self.plan.embeddings}
        dense = {name: q.dequantize() for name, q in replaced.items()}
        notes = calibrate_layers(
            decoder, self.schemes, self.method, tokens, finished, embeddings=dense, low_rank=self.low_rank,
            expert_rotations=expert_rotations, progress=progress,
        )  # fmt: skip
        for line in notes:
            say(line)
        self._results = CalibratedWeights(decoder, finished, self.schemes)

    def quantized(self, tensor: str, module: str) -> QuantTensor:
        """Returns the quantized weight of a module, whose tensor in the files is `tensor`."""
        q = None if self._results is None else self._results.quantized(module)
        q = self._rounded(tensor, module) if q is None else q
        return q.rotated_by(self.rotated_inputs.get(module, 0))

    def experts(self, name: str) -> ExpertTensor:
        """Returns quantized weights of experts: those of a calibrated run, or quantized here, one expert at a time."""
        calibrated = None if self._results is None else self._results.experts(name)
        if calibrated is not None:
            return ExpertTensor.stack(calibrated, len(calibrated)).to("cpu")
        read, found = (
            ExpertReader(self.reader, self._experts[name]),
            expert_weights(self._model.get_submodule(name.rpartition(".")[0])),
        )
        assert found is not None
        block = self.rotated_inputs.get(name, 0)

        def weight(e: int) -> Tensor:
            matrix = found.matrices(read(e)).to(self.device)
            return rotate_blocks(matrix.float(), block) if block else matrix

        where = f"{self.reader.folder}: {name}"
        q = quantized_experts(where, found.experts, weight, self.schemes[name], self._rounding(read.stored))
        return q.rotated_by(block).to("cpu")

    def _rounding(self, stored: torch.dtype) -> Rounding:
        """Returns how the weights of experts are rounded: by the method, if it needs no data, else to nearest."""
        if isinstance(self.method, Hqq):
            return lambda weight, scheme, scale_type: hqq(weight, scheme, scale_type=scale_type)
        return rounding(self.method.search if isinstance(self.method, Rtn) else "max", stored)

    def plain(self, tensor: str) -> Tensor:
        """Returns a tensor that is not quantized."""
        changed = None if self._results is None else self._results.changed(tensor)
        value = self.reader.get(tensor) if changed is None else changed
        info = self.reader.info(tensor)
        return require_finite_tensor(info.file, tensor, value.to(info.dtype))

    def plain_weight(self, name: str) -> Tensor | None:
        """Returns the 16-bit weight of a layer, or None if the method scaled its input channels and has changed it."""
        moved = isinstance(self.method, (Awq, SmoothQuant)) or getattr(self.method, "smooth", None) is not None
        tensor = None if moved else self._sources.get(name)
        return None if tensor is None else self.reader.get(tensor)

    def remove_finished(self) -> None:
        """Removes the finished layers of a calibrated run."""
        if self._results is not None:
            self._results.finished.clear()

    def _decoder(self) -> LayerwiseDecoder:
        """Returns a decoder in float32 on a CPU and for learned rounding, else in the dtype of most weights."""
        sizes: dict[torch.dtype, int] = {}
        for info in map(self.reader.info, self.reader.names()):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.end - info.begin
        stored = max(sizes, key=lambda dtype: sizes[dtype])
        exact = self.device.type == "cpu" or isinstance(self.method, Learned)
        return LayerwiseDecoder(self.reader, self.device, torch.float32 if exact else stored, self._rotated_linears())

    def _rotated_linears(self) -> dict[str, int]:
        """Returns the linear layers whose inputs are rotated, with channels per block."""
        return {name: block for name, block in self.rotated_inputs.items() if name in self.plan.linears}

    def _rounded(self, tensor: str | None, module: str) -> QuantTensor:
        assert tensor is not None
        weight, scheme = self.reader.get(tensor).to(self.device), self.schemes[module]
        if module in self.rotated_inputs:
            weight = rotate_blocks(weight.float(), self.rotated_inputs[module])
        if isinstance(self.method, Hqq):
            q = hqq(weight, scheme)
        else:
            search = self.method.search if isinstance(self.method, Rtn) else "max"
            q = quantized(f"{self.reader.folder}: {tensor}", weight, scheme, search, self.reader.info(tensor).dtype)
        if self.low_rank and module in self.plan.linears:
            q = dataclasses.replace(q, low_rank=lorc(weight, q, self.low_rank))
        return q.to("cpu")


def _warn(line: str, say: Callable[[str], None]) -> None:
    """Reports a warning by `say`, or by Python's warnings if the caller gave none."""
    if say is _silent:
        warnings.warn(line, stacklevel=4)
    else:
        say(f"warning: {line}")


def _opened(source: ResolvedSource, rotation: int | None, say: Callable[[str], None]) -> CheckpointReader:
    """Returns the reader of a 16-bit checkpoint, rotated by the seed `rotation` unless it is None."""
    source.require_unquantized("quantize the 16-bit checkpoint it came from")
    if rotation is None:
        return source.reader()
    rotated = RotatedReader(source.path, rotation)
    rotated.check()
    if rotated.untied:
        more = rotated.info("lm_head.weight")
        say(f"embedding and LM head come apart when they are rotated: {more.end - more.begin:,} bytes more")
    return rotated


def _chosen(method: str | Method | None, search: Search | None, options: dict[str, Any]) -> Method:
    """Returns the method of a call; raises TypeError for options beside a method object, and for unknown options."""
    given = options if search is None else {"search": search, **options}
    if method is None or isinstance(method, str):
        return method_of(method or "rtn", given)
    if given:
        raise TypeError(f"{', '.join(given)}: options go with the name of a method, {type(method).__name__} has its own")
    return method


def _fitting(patterns: tuple[str, ...], model: nn.Module) -> tuple[str, ...]:
    """Returns `patterns`; raises ValueError for one that matches no module."""
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"nothing to skip: no module fits {pattern!r}; names are such as {names[-1]}")
    return patterns


def _wide(plan: Plan, patterns: Iterable[str], mixed: Mixed | None) -> dict[str, Scheme]:
    """Returns the scheme with 16-bit activations for the linear layers and weights of experts that match a pattern."""
    patterns = tuple(patterns)
    if not patterns:
        return {}
    if mixed is not None:
        raise ValueError("a mix chooses the scheme of every layer; inputs in 16 bits go with one scheme for all")
    if plan.scheme.activation is None:
        raise ValueError(f"{plan.scheme} has 16-bit activations everywhere; inputs in 16 bits are for schemes such as w8a8")
    for pattern in patterns:
        if not any(matches(name, pattern) for name in (*plan.linears, *plan.experts)):
            raise ValueError(f"no linear layer that is quantized fits {pattern!r}, such as {next(iter(plan.linears), 'none')}")
    scheme = plan.scheme.weight_only
    names = (*plan.linears, *plan.experts)
    return {name: scheme for name in names if any(matches(name, pattern) for pattern in patterns)}


def _rotated(plan: Plan, patterns: Iterable[str]) -> dict[str, int]:
    """Returns the block size of the input rotation for each linear layer, and each weight of experts, that matches a pattern.

    Blocks have 64 channels if that divides K, else 16, so that groups of a multiple of 64 contain whole blocks.
    """
    blocks = {}
    columns = {name: shape[-1] for name, shape in (*plan.linears.items(), *plan.experts.items())}
    for pattern in patterns:
        fitting = [name for name in columns if matches(name, pattern)]
        if not fitting:
            raise ValueError(f"no linear layer that is quantized fits {pattern!r}, such as {next(iter(plan.linears), 'none')}")
        for name in fitting:
            k = columns[name]
            if k % 16:
                raise ValueError(f"{name}: inputs are rotated in blocks of 64 or 16 channels, which do not divide its {k}")
            blocks[name] = 64 if k % 64 == 0 else 16
    return blocks


def _announce(low_rank: int, plan: Plan, say: Callable[[str], None]) -> None:
    """Reports the bits of corrections; raises ValueError, naming the layer, for a rank that a layer cannot have."""
    if low_rank == 0 or not plan.linears:
        return
    for name, shape in plan.linears.items():
        if not 1 <= low_rank <= min(shape):
            raise ValueError(f"{name}: the rank of a correction of {shape} is 1 to {min(shape)}, got {low_rank}")
    weights = sum(n * k for n, k in plan.linears.values())
    more = sum(16 * low_rank * (n + k) for n, k in plan.linears.values()) / weights
    say(f"corrections of rank {low_rank} in {len(plan.linears)} linear layers take {more:.3f} bits per weight more")
    if plan.experts:
        say(f"{len(plan.experts)} weights of experts have no correction")


def _scratch_folder(target: Path) -> Path:
    """Returns the folder for the inputs of layers while schemes are chosen."""
    return target.absolute().parent / f".{target.name}.sensitivity"


def _existing(folder: Path) -> Path:
    """Creates the folder if it does not exist, and returns it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be created ({error})") from error
    return folder


def _same_weights(reader: CheckpointReader, plan: Plan, modules: dict[str, str]) -> None:
    """Raises CheckpointError for tied weights that differ in the files."""
    tensors = {module: tensor for tensor, module in modules.items()}
    for follower, owner in plan.tied.items():
        a, b = tensors.get(follower), tensors.get(owner)
        if a is not None and b is not None and not torch.equal(reader.get(a), reader.get(b)):
            raise CheckpointError(
                f"{reader.folder}: {a} and {b} differ, config.json says that they are tied; set tie_word_embeddings to false"
            )


def _output_bytes(
    reader: CheckpointReader, modules: dict[str, str], experts: Mapping[str, ExpertSource], plan: Plan, mixed: Mixed | None,
    low_rank: int,
) -> int:  # fmt: skip
    """Returns the bytes of the output; a lower bound with `mixed`."""
    schemes = [plan.scheme] if mixed is None else [parse_scheme(name) for name in mixed.schemes]
    of_experts = {tensor for source in experts.values() for tensor in source.names}
    layers = (*plan.shapes, *plan.tied)
    plain = [name for name in reader.names() if modules.get(name) not in layers and name not in of_experts]
    total = sum(info.end - info.begin for info in map(reader.info, plain))
    for name, shape in plan.shapes.items():
        rank = low_rank if name in plan.linears else 0
        total += min(stored_bits(shape, scheme, rank) for scheme in schemes) // 8
    for count, *matrix in plan.experts.values():
        total += count * stored_bits((matrix[0], matrix[1]), plan.scheme) // 8
    return total


def _same_layers(candidate: Plan, plan: Plan) -> None:
    """Raises ValueError if a candidate scheme cannot quantize a layer that the default scheme can."""
    for row in candidate.kept:
        if row.name in plan.linears:
            raise ValueError(f"{candidate.scheme} cannot take {row.name}: {row.reason}")
