"""Loads one rank's part of a stored language model (shard.py).

Tensors are read one at a time, cut and moved to the device, so that memory holds the rank's part and one whole matrix. A matrix
that is quantized while loading is quantized before it is cut. So its codes and scales are the same as on a single GPU. Any
source of `models.load.load` can be loaded, except one whose tensors Transformers converts into others.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.numerics import PROBES, probes
from lowbit.checkpoint.numerics import read as read_numerics
from lowbit.engine.check import summing_forward
from lowbit.engine.recognise import recognise
from lowbit.engine.shard import Cut, ShardPlan
from lowbit.formats import QuantTensor, parse_scheme
from lowbit.models import numerics
from lowbit.models.complete import require_complete, require_finite_tensor
from lowbit.models.cpu import cpu_dtype, plan_on_cpu, quantizing_dtype
from lowbit.models.fuse import prepare_on_gpu
from lowbit.models.head import quantize_head
from lowbit.models.hf import give_back_freed_memory, plan_for, put_plain_weights_first
from lowbit.models.layer_importer import LayerImporter
from lowbit.models.load import verify_checkpoint
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import build, config_of, require_causal
from lowbit.models.source import QuantizedCheckpoint, ResolvedSource, resolve
from lowbit.nn import QuantLinear
from lowbit.nn.convert import Plan, quantized
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import make_batch_invariant
from lowbit.ops.ranks import Ranks

Part = tuple[str, QuantTensor | Tensor]
"""The name of a module and its quantized weight, or the name of a parameter and its values. Both are not cut yet, and named as
in the model."""


class ShardSource:
    """A stored causal language model, opened for loading by `ranks` ranks. Raises every error that is possible before weights
    are read: CheckpointError for files that cannot be loaded, and ValueError for models that cannot be cut.

    scheme: quantize 16-bit weights to it. dtype: dtype of activations (default: as in `load`, for `device`).
    """

    def __init__(
        self, source: str | Path | ResolvedSource, ranks: int, device: torch.device, *, scheme: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.resolved = resolved = resolve(source)
        self.checkpoint: QuantizedCheckpoint | None = None
        if resolved.tool is not None:
            if not resolved.is_foreign and resolved.tool != "lowbit":
                raise CheckpointError(
                    f"{resolved.name}: weights of {resolved.tool} are loaded by Transformers, on one GPU only"
                )
            self.checkpoint = resolved.open_quantized()
        if scheme is not None and resolved.quantized_to not in (None, parse_scheme(scheme).name):
            stated = resolved.quantized_to
            raise ValueError(f"{resolved.name} is quantized already, to {stated}; leave out the scheme {scheme!r}")
        config = config_of(resolved.path) if self.checkpoint is None else self.checkpoint.config
        self.model = build(config, resolved.path) if self.checkpoint is None else self.checkpoint.model
        require_causal(self.model, resolved.name)
        self.plan = ShardPlan.of(self.model, ranks)
        self.quantizes: Plan | None = None
        if scheme is not None and resolved.quantized_to is None:
            self.quantizes = plan_for(self.model, scheme, None, False)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
        narrow = self.checkpoint is not None or self.quantizes is not None
        self.dtype = dtype or (own if device.type == "cuda" else cpu_dtype(narrow))
        self._read = quantizing_dtype(config, self.dtype)

    def parts(self, device: torch.device) -> Iterator[Part]:
        """Yields all weights. Weights that are quantized here or by another tool are on `device`."""
        yield from self._plain_files(device) if self.checkpoint is None else self._quantized_files(device)

    def _quantized_files(self, device: torch.device) -> Iterator[Part]:
        assert self.checkpoint is not None
        importer, reader, where = LayerImporter(self.checkpoint), self.checkpoint.reader, self.resolved.name
        importer.require_complete()
        for name in reader.entries:
            importer.judge(name)
        if importer.refused:
            raise CheckpointError(f"{where}: {importer.refusals()}")
        for name in reader.entries:
            yield importer.module(name) or name, importer.layer(name, device)
        for name in reader.plain:
            if not importer.left_out(name):
                parameter = importer.names.parameter(name)
                if parameter is not None:
                    yield parameter, importer.plain(name)

    def _plain_files(self, device: torch.device) -> Iterator[Part]:
        where, names = self.resolved.name, TensorNames(self.model)
        with self.resolved.reader() as reader:
            require_complete(where, self.model, {name: reader.info(name).shape for name in reader.names()}, names)
            for name in reader.names():
                target = names.target(name)
                if target is None:
                    continue  # `require_complete` allows it: a buffer of older releases
                if target.operations:
                    raise CheckpointError(
                        f"{where}: Transformers makes {target.parameters[0]} of {name} while loading "
                        f"({', '.join(target.operations)}), but not for several ranks; load it without tensor_parallel"
                    )
                tensor = require_finite_tensor(where, name, reader.get(name))
                module = target.parameters[0].removesuffix(".weight")
                if self.quantizes is not None and module in self.quantizes.linears:
                    weight = tensor.to(device, self._read)
                    yield module, quantized(module, weight, self.quantizes.scheme_of(module))
                else:
                    yield target.parameters[0], tensor

    def generation(self) -> GenerationConfig:
        """Returns the generation config of the files, or else one made from the model's configuration."""
        folder = self.resolved.path
        if folder.is_dir() and (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_model_config(self.model.config)


@torch.no_grad()
def load_shard(
    source: ShardSource, rank: int, device: torch.device, *, head: str | None = None, batch_invariant: bool = False,
    verify: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """Returns the model of one rank on `device`. Only `Engine` can compute with it, since the ranks' outputs must be summed.

    head: scheme for the LM head and the embedding of a model whose layers are quantized. batch_invariant, verify: as in `load`.
    """
    plan, dtype, where = source.plan, source.dtype, source.resolved.name
    if verify:
        verify_checkpoint(source.resolved.path)
    model = rank_model(plan, where)
    for name, value in source.parts(device):
        for module, own in _owners(plan, name):
            if isinstance(value, QuantTensor):
                _set_quantized(model, module, plan.weight(module, value, rank), dtype)
            else:
                _set_plain(model, plan, own, value, rank, device, dtype)
        del value
        give_back_freed_memory()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{where}: no file has {', '.join(missing[:3])}")
    model.config.dtype = dtype
    model.generation_config = source.generation()
    finish(model, device, head, dtype)
    if batch_invariant:
        make_batch_invariant(model, model.dtype)
    model.name_or_path = str(source.resolved.path)
    gc.collect()
    return model.eval()


def load_part(
    rank: int, device: torch.device, *, source: str, ranks: int, scheme: str | None, dtype: torch.dtype | None,
    head: str | None, batch_invariant: bool, verify: bool,
) -> PreTrainedModel:  # fmt: skip
    """Opens a source and returns `load_shard` of it. Only rank 0 verifies checksums."""
    opened = ShardSource(source, ranks, device, scheme=scheme, dtype=dtype)
    return load_shard(opened, rank, device, head=head, batch_invariant=batch_invariant, verify=verify and rank == 0)


@torch.no_grad()
def check_part(model: PreTrainedModel, ranks: Ranks, *, source: str) -> None:
    """Compares the results of all ranks together with those that their checkpoint states: outputs of layers, and logits.
    `models.numerics.check` does the same with a whole model. Does nothing if the checkpoint states no results. All ranks must
    call it.

    Raises NumericsError. Outputs of layers are compared on rank 0 only, logits on all ranks.
    """
    folder = resolve(source).path
    kept = read_numerics(folder) if folder.is_dir() else None
    if kept is None:
        return
    plan = ShardSource(source, ranks.size, ranks.device).plan
    outputs: dict[str, tuple[Tensor, QuantLinear]] = {}
    for name, cut in plan.cuts.items():
        module = model.get_submodule(name)
        if name in kept.layers and isinstance(module, QuantLinear):
            y = plan.whole(cut, _part_of_probes(module, cut, ranks, model.dtype), ranks, kept.layers[name].outputs)
            outputs[name] = y, module
    if ranks.rank == 0 and outputs:
        numerics.check_outputs(outputs, kept, folder)
    decoder = recognise(model)
    if not isinstance(decoder, tuple):
        with summing_forward(decoder, ranks):
            numerics.compare_logits(model, kept, folder)


def _part_of_probes(module: QuantLinear, cut: Cut, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """Returns the outputs of this rank's part of a layer for the inputs `checkpoint.numerics.probes`, without bias."""
    whole = module.in_features * (ranks.size if cut.kind == "columns" else 1)
    rows = numerics.ROWS_ON_GPU if ranks.device.type == "cuda" else PROBES
    x = probes(whole, numerics.amplitude(module.input_transform))[torch.arange(rows) % PROBES]
    if cut.kind == "columns":
        x = x[:, ranks.rank * module.in_features : (ranks.rank + 1) * module.in_features]
    # A layer with a bias gets a bias of zeros, so that it uses the kernels that it needs anyway.
    bias = None if module.bias is None else torch.zeros_like(module.bias)
    return module.multiply(x.contiguous().to(ranks.device, dtype), bias)


def rank_model(plan: ShardPlan, where: Path | str) -> PreTrainedModel:
    """Returns the model of a rank without weights; its buffers are on the CPU."""
    model = build(plan.config, where, buffers=True)
    head = model.get_submodule(plan.head)
    rows = -(-int(head.out_features) // plan.ranks)  # type: ignore[arg-type]
    own = nn.Linear(head.in_features, rows, bias=head.bias is not None, device="meta")  # type: ignore[arg-type]
    model.set_submodule(plan.head, own)
    for name, cut in plan.cuts.items():
        if cut.kind == "columns":
            model.get_submodule(name).bias = None  # `_set_plain` sets it on the rank that adds it
    return model


def finish(model: PreTrainedModel, device: torch.device, head: str | None, dtype: torch.dtype) -> None:
    """Moves the buffers of a rank's model to its device, quantizes LM head and embedding to `head`, and packs the weights."""
    model.to(device)
    if head is not None:
        quantize_head(model, head)
    put_plain_weights_first(model)
    if device.type == "cpu":
        plan_on_cpu(model, decode_program=True)
    prepare_on_gpu(model)


def _owners(plan: ShardPlan, name: str) -> list[tuple[str, str]]:
    """Returns the modules that have a weight, each with the name of its parameter. The weight of a tied embedding belongs to
    the LM head too."""
    module, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):  # a quantized module
        module, leaf = name, "weight"
    found = [(module, f"{module}.{leaf}")]
    if plan.tied and module in (plan.head, plan.embedding):
        found = [(each, f"{each}.{leaf}") for each in (plan.embedding, plan.head)]
    return found


def _set_quantized(model: PreTrainedModel, name: str, q: QuantTensor, dtype: torch.dtype) -> None:
    """Replaces a module by a quantized one with the same bias."""
    module = model.get_submodule(name)
    new: nn.Module
    if isinstance(module, nn.Embedding):
        new = QuantEmbedding.from_quant_tensor(q, dtype)
    else:
        new = QuantLinear.from_quant_tensor(q, module.bias)  # type: ignore[arg-type]
    model.set_submodule(name, new.train(module.training))


def _set_plain(
    model: PreTrainedModel, plan: ShardPlan, name: str, tensor: Tensor, rank: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Sets this rank's part of a parameter or of a persistent buffer."""
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    own = plan.plain(module_name, leaf, tensor, rank)
    if own is None:
        return
    own = own.to(device, dtype if own.is_floating_point() else None)
    if leaf in module._buffers:
        module._buffers[leaf] = own
    else:
        setattr(module, leaf, nn.Parameter(own, requires_grad=False))
