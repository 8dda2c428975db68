"""Imports the layers and tensors of a quantized checkpoint, for a model in memory or another tool's files.

`convert_checkpoint` writes them to files and `load_foreign` puts them in a model; both refuse and report the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.experts import ExpertEntry, ExpertTensors
from lowbit.formats import ActivationRule, ExpertTensor, PerChannel, PerTensor, QuantTensor
from lowbit.models.complete import Shape, require_complete, require_finite_tensor, some
from lowbit.models.expert_names import ExpertModule, expert_modules, module_of
from lowbit.models.names import TensorNames
from lowbit.models.source import QuantizedCheckpoint
from lowbit.nn.experts import expert_refusals, expert_weights
from lowbit.ops.table import scheme_refusals

_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


class LayerImporter:
    """Imports the layers and tensors of a checkpoint in a form that the format `to` (`conversion_targets.TARGETS`) can
    represent.

    refused: reason -> layers that cannot be imported. noted: description of a change -> layers and tensors that are changed by
    the import. Both grow while layers and tensors are read.
    """

    def __init__(self, checkpoint: QuantizedCheckpoint, to: str = "lowbit") -> None:
        self.checkpoint, self.where, self.reader, self.to = checkpoint, checkpoint.path, checkpoint.reader, to
        self.names, self.modules = TensorNames(checkpoint.model), dict(checkpoint.model.named_modules())
        self.expert_modules = expert_modules(checkpoint.model)
        together = self.reader.experts if to == "lowbit" else {}
        self.in_experts = frozenset(name for entry in together.values() for name in entry.layers)
        """Layers of the files that belong to experts, which lowbit's files and models hold together."""
        self._expert_biases = {name: layer for layer, entry in self.reader.experts.items() for name in entry.biases}
        self.refused: dict[str, list[str]] = {}
        self.noted: dict[str, list[str]] = {}

    def require_complete(self) -> None:
        """Raises CheckpointError unless the files hold all parameters of the model and nothing else."""
        require_complete(self.where, self.checkpoint.model, self._tensors(), self.names)

    def check(self) -> str:
        """Reads everything and returns the refusals; raises CheckpointError for damaged, missing and unexpected tensors."""
        self.require_complete()
        for name, entry in self.reader.entries.items():
            if name not in self.in_experts and (self.judge(name) or entry.scheme is not None):
                self.layer(name)
        for name, experts in self.reader.experts.items():
            if (self.to == "lowbit" or not experts.layers) and self.judge_experts(name):
                self.expert_layer(name)
        for name in self.reader.plain:
            if not self.left_out(name):
                self.plain(name)
        return self.refusals()

    def note(self, what: str, name: str) -> None:
        """Records a line of the report about a layer or tensor."""
        self.noted.setdefault(what, []).append(name)

    def notes(self) -> list[str]:
        """Returns the lines of the report so far."""
        return [*self.checkpoint.notes, *(f"{some(names, 1)}: {note}" for note, names in self.noted.items())]

    def refuse(self, name: str, *reasons: str) -> None:
        """Records why a layer cannot be imported."""
        for reason in reasons:
            self.refused.setdefault(reason, []).append(name)

    def refusals(self) -> str:
        """Returns all reasons, the most frequent first, each with layers that have it; "" if there are none."""
        rows = sorted(self.refused.items(), key=lambda row: -len(row[1]))
        return "; ".join(f"{some(names, 1)}: {reason}" for reason, names in rows)

    def judge(self, name: str) -> bool:
        """Returns True if a layer has a scheme and a module in the model, by the headers alone; else records why not."""
        entry = self.reader.entries[name]
        for note in entry.notes:
            self.note(note, name)
        reasons = (entry.refusal,) if entry.scheme is None else tuple(self._misplaced(name))
        self.refuse(name, *reasons)
        return not reasons

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        """Returns the weights of a layer, computed on `device`, in a form that the target can hold and run.

        An act-order permutation is undone if scales do not depend on it. Activations become 16-bit if the target cannot express
        fewer bits or lowbit has no kernel for them.
        """
        q = self.reader.layer(name, device)
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
            self.note("activations are quantized by compressed-tensors' rule from here on (docs/internals/numerics.md)", name)
        return q

    def judge_experts(self, name: str) -> bool:
        """Returns True if an expert layer has schemes and a module of its shapes in the model, by the headers alone; else
        records why not."""
        entry = self.reader.experts[name]
        for note in entry.notes:
            self.note(note, name)
        reasons = (*entry.refusals, *self._misplaced_experts(name, entry))
        self.refuse(name, *reasons)
        return not reasons

    def expert_module(self, name: str) -> ExpertModule | None:
        """Returns the model's module of an expert layer of the files; None if it has no such module."""
        module = module_of(self.names, name, self.reader.experts[name])
        return None if module is None else self.expert_modules.get(module)

    def expert_layer(self, name: str, device: torch.device | str = "cpu") -> ExpertTensors:
        """Returns the experts of a layer with rows of gate and up in the order of the model's parameters; `judge_experts` must
        be True.

        Biases that the model does not have are left out if they are 0; raises CheckpointError for others.
        """
        experts, module = self.reader.expert_layer(name, device), self.expert_module(name)
        assert module is not None
        for note in experts.notes:
            self.note(note, name)
        biases = [bias for bias in (experts.gate_up_bias, experts.down_bias) if bias is not None]
        for bias in biases:
            require_finite_tensor(self.where, f"{name}: biases", bias)
        if biases and not module.biased:
            if any(bool(bias.any()) for bias in biases):
                model = type(self.checkpoint.model).__name__
                raise CheckpointError(f"{self.where}: {name}: experts of {model} have no biases, and these are not 0")
            self.note("biases are left out, the model's experts have none and these are zero", name)
            experts = replace(experts, gate_up_bias=None, down_bias=None)
        experts = replace(experts, gate_up=self._runnable(name, experts.gate_up), down=self._runnable(name, experts.down))
        return experts.alternating() if module.alternating else experts

    def expert_tensors(self, name: str, device: torch.device | str = "cpu") -> dict[str, ExpertTensor | Tensor]:
        """Returns `expert_layer` as the parameters of the model's module by name: packed weights, and biases."""
        experts, module = self.expert_layer(name, device), self.expert_module(name)
        assert module is not None
        tensors: dict[str, ExpertTensor | Tensor] = {
            parameter: ExpertTensor.stack(matrices, len(matrices))
            for parameter, matrices in ((module.first, experts.gate_up), (module.down, experts.down))
        }
        biases = {f"{module.first}_bias": experts.gate_up_bias, f"{module.down}_bias": experts.down_bias}
        return tensors | {parameter: bias for parameter, bias in biases.items() if bias is not None}

    def _runnable(self, name: str, matrices: tuple[QuantTensor, ...]) -> tuple[QuantTensor, ...]:
        """Returns the matrices of experts, with 16-bit activations if the library has no kernel for the stated ones."""
        scheme, shape = matrices[0].scheme, matrices[0].shape
        if scheme.activation is None or not scheme_refusals(scheme, *shape):
            return matrices
        self.note(f"activations stay in 16 bits, the files asked for {scheme.activation.name}", name)
        return tuple(replace(q, scheme=scheme.weight_only) for q in matrices)

    def plain(self, name: str) -> Tensor:
        """Returns a tensor that belongs to no quantized layer (see `left_out`); raises CheckpointError for one of another shape
        than the model's, or with numbers that are not finite."""
        tensor = self.reader.get(name)
        own = self.names.parameter(name)
        shape = None if own is None else tuple(self.names.own[own].shape)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.where}: {name} is {list(tensor.shape)}, by config.json it is {list(shape)}")
        return require_finite_tensor(self.where, name, tensor)

    def left_out(self, name: str) -> bool:
        """Returns True, and records a note, for a plain tensor that the model does not need: scales of the KV cache, and a bias
        of zeros that the model does not have. Raises CheckpointError for such a bias of other numbers."""
        if name.endswith(_CACHE_SCALES):
            self.note("left out, the key and value cache stays in 16 bits", name)
            return True
        if name in self._expert_biases and self.to == "lowbit":
            return True  # `expert_layer` has read it
        if not self._is_bias_of_none(name):
            return False
        if bool(self.reader.get(name).any()):
            raise CheckpointError(
                f"{self.where}: {name}: {type(self.checkpoint.model).__name__} has no such bias, and it is not 0"
            )
        self.note("left out, the model has no such bias and it is zero", name)
        return True

    def module(self, layer: str) -> str | None:
        """Returns the model's name of a layer of the files; None if it has no such module."""
        name = self.names.parameter(f"{layer}.weight")
        return None if name is None else name.removesuffix(".weight")

    def unquantized_linears(self) -> list[str]:
        """Returns the linear layers of the model that are not quantized."""
        linear = [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]
        quantized = {self.module(name) for name in self.reader.entries}
        return [name for name in linear if name not in quantized]

    def tied(self, layers: Collection[str]) -> dict[str, str]:
        """Returns the modules that share the weights of a quantized layer, with that layer, by the model's names."""
        mapping: dict[str, str] = getattr(self.checkpoint.model, "all_tied_weights_keys", None) or {}
        pairs = {target.removesuffix(".weight"): owner.removesuffix(".weight") for target, owner in mapping.items()}
        return {name: owner for name, owner in pairs.items() if owner in layers and name not in layers}

    def _tensors(self) -> dict[str, Shape | None]:
        """Returns the shapes of the model's tensors in the files; None for plain ones, checked when they are read."""
        tensors: dict[str, Shape | None] = {f"{name}.weight": entry.shape for name, entry in self.reader.entries.items()}
        for name, experts in self.reader.experts.items():
            module = None if experts.layers else self.expert_module(name)
            if not experts.layers:  # one tensor per parameter of the module
                own = (f"{name}.gate_up_proj",) if module is None else module.parameters
                tensors |= {tensor: None for tensor in own if experts.biased or not tensor.endswith("_bias")}
        return tensors | {n: None for n in self.reader.plain if not n.endswith(_CACHE_SCALES) and not self._is_bias_of_none(n)}

    def _is_bias_of_none(self, name: str) -> bool:
        """Returns True for the bias of a linear layer, or of experts, that have none in the model."""
        if name in self._expert_biases:
            experts = self.expert_module(self._expert_biases[name])
            return experts is None or not experts.biased
        module = self.modules.get(self.module(name.removesuffix(".bias")) or "")
        return name.endswith(".bias") and isinstance(module, nn.Linear) and module.bias is None

    def _misplaced_experts(self, name: str, entry: ExpertEntry) -> Iterator[str]:
        """Yields why the model has no module for an expert layer of this name and these shapes."""
        module = self.expert_module(name)
        if module is None:
            yield f"Transformers' {type(self.checkpoint.model).__name__} has no experts there"
            return
        if self.to == "lowbit":
            weights = expert_weights(self.modules[module.name])
            yield from () if weights is None else expert_refusals(self.modules[module.name], weights)
        own = {name: tuple(self.names.own[name].shape) for name in (module.first, module.down)}
        for parameter, (n, k) in ((module.first, entry.gate_up.shape), (module.down, entry.down.shape)):
            shape = (entry.experts, k, n) if module.transposed else (entry.experts, n, k)
            if own[parameter] != shape:
                yield f"the files have experts of {list(shape)}, by config.json {parameter} is {list(own[parameter])}"

    def _misplaced(self, name: str) -> Iterator[str]:
        """Yields why the model has no module for a quantized layer of this name."""
        target, module = self.names.target(f"{name}.weight"), self.modules.get(self.module(name) or "")
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and self.to == "lowbit"):
            return
        if isinstance(module, nn.Embedding):
            yield f"{self.to} files have quantized linear layers only, this is an embedding"
        elif self.to == "lowbit":
            found = f"has a {type(module).__name__} there"
            if target is not None and target.operations:
                found = f"makes {some(target.parameters)} of it while loading ({', '.join(target.operations)})"
            yield f"a linear layer is expected, but Transformers' {type(self.checkpoint.model).__name__} {found}"
