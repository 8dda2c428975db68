"""Runs the decoder of a causal language model one layer at a time, with weights read from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.formats import rotate_blocks
from lowbit.models.complete import require_finite_tensor
from lowbit.models.expert_names import expert_modules
from lowbit.models.experts import ExpertReader, expert_sources
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import build, config_as_read, require_causal
from lowbit.quantize.expert_layer import RoutedInputs

_NONE: Mapping[str, int] = MappingProxyType({})


class _Stop(Exception):
    """Stops a forward pass whose remainder is not needed."""


@dataclass(frozen=True)
class SharedInput:
    """Linear layers of one decoder layer that read the same tensor, in the order in which they run.

    producer: the module that returns this tensor; None if other operations compute it. Names are relative to the decoder layer.
    """

    linears: tuple[str, ...]
    producer: str | None


class LayerwiseDecoder:
    """The decoder of a checkpoint, on the meta device except for the layers that are loaded.

    Computes on `device` in `dtype`. rotated_inputs: linear layers -> block size; their inputs are rotated in blocks of channels
    (`formats.rotate_blocks`), and their weights when read, so the model computes the same. Experts that the files hold one by
    one are stacked as they are read. Raises CheckpointError for models that have no list of decoder layers or do not predict
    the next token, and for weights other than experts that Transformers splits or merges while loading.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        device: torch.device | str,
        dtype: torch.dtype,
        rotated_inputs: Mapping[str, int] = _NONE,
    ) -> None:
        self.reader, self.device, self.dtype, self.rotated_inputs = reader, torch.device(device), dtype, dict(rotated_inputs)
        model = build(config_as_read(reader), reader.folder / "config.json", buffers=True)
        require_causal(model, reader.folder)
        self.model: nn.Module = model.eval()
        self.name, self.layers = _decoder_layers(self.model, reader)
        names = TensorNames(model)
        own = {tensor: names.parameter(tensor) for tensor in reader.names()}
        self._names = {tensor: name for tensor, name in own.items() if name is not None}
        self._files = {name: tensor for tensor, name in self._names.items()}
        shapes = {p: (m.experts, 0, 0) for m in expert_modules(self.model).values() for p in (m.first, m.down)}
        self._expert_sources = expert_sources(names, reader.names(), shapes)
        self._contexts: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}  # by batch size
        self._returns_tuples = False
        for name, block in self.rotated_inputs.items():
            self.model.get_submodule(name).register_forward_pre_hook(_rotating(block))

    def __len__(self) -> int:
        return len(self.layers)

    def layer_name(self, i: int) -> str:
        """Returns the full name of layer i: `model.layers.3`."""
        return f"{self.name}.{i}"

    def weight(self, i: int, name: str) -> Tensor:
        """Returns the weight [N, K] of a linear layer in the loaded decoder layer i. The caller may change it in place."""
        return self.layers[i].get_parameter(f"{name}.weight").data

    def file_name(self, parameter: str) -> str | None:
        """Returns the name in the files of a parameter of the model; None if they have no such tensor."""
        return self._files.get(parameter)

    def model_name(self, tensor: str) -> str | None:
        """Returns the model's name of a tensor in the files; None if it has no such parameter."""
        return self._names.get(tensor)

    @torch.no_grad()
    def embed(self, tokens: Tensor, replaced: Mapping[str, Tensor] | None = None, together: int = 1) -> list[Tensor]:
        """Returns the input of the first layer for all rows of `tokens` [S, T], in batches [together, T, hidden].

        The last batch may be smaller. replaced: parameters by name that replace those of the files. Records the other arguments
        of each layer (masks, positions) for later calls.
        """
        inner = str(getattr(self.model, "base_model_prefix", ""))
        base: nn.Module = getattr(self.model, inner, self.model)
        prefix = "" if base is self.model else f"{inner}."
        outside = [n for n, _ in base.named_parameters() if not f"{prefix}{n}".startswith(f"{self.name}.")]
        _fill(base, {n: (replaced or {}).get(prefix + n, self._read(prefix + n)) for n in outside}, self.device, self.dtype)
        first: list[Tensor] = []
        self._contexts = {}
        for i, layer in enumerate(self.layers):
            layer.forward = self._recorder(i, first)  # type: ignore[method-assign]
        try:
            for rows in tokens.split(together):
                with _stopped():
                    base(input_ids=rows.to(self.device), use_cache=False)
        finally:
            for layer in self.layers:
                del layer.forward
            _empty(base, outside)
        return first

    def _recorder(self, i: int, first: list[Tensor]) -> Callable[..., Tensor]:
        """Returns a replacement for the forward of layer i that records its arguments and the first layer's input.

        Arguments are recorded at the first call with each batch size. Later calls have the same ones, because all texts have
        one length.
        """

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
            contexts = self._contexts.setdefault(len(hidden), [])
            if len(contexts) == i:
                contexts.append((args[1:], kwargs))
            if i == 0:
                first.append(hidden)
            if i == len(self.layers) - 1 or len(contexts) == len(self.layers):
                raise _Stop
            return hidden

        return forward

    def load(self, i: int, replaced: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Loads the weights of layer i onto the device in the dtype of computing, and returns the layer.

        replaced: parameters by their name in the layer that replace those of the files.
        """
        layer = self.layers[i]
        names = [n for n, _ in layer.named_parameters()] + [n for n, b in layer.named_buffers() if self._has(i, n)]
        replaced = replaced or {}
        values = {n: replaced[n] if n in replaced else self._read(f"{self.layer_name(i)}.{n}") for n in names}
        _fill(layer, values, self.device, self.dtype)
        return layer

    def free(self, i: int) -> None:
        """Frees the memory of layer i."""
        _empty(self.layers[i], [n for n, _ in self.layers[i].named_parameters()])

    def drop(self, i: int, names: list[str]) -> None:
        """Frees the memory of the parameters `names` of layer i. Later calls of `call` have to pass these parameters."""
        _empty(self.layers[i], names)

    @torch.no_grad()
    def run(self, i: int, hidden: list[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Yields the outputs of layer i for batches of inputs as returned by `embed`; computes in `dtype` if given."""
        for x in hidden:
            yield self._call(i, x, dtype)

    def _call(self, i: int, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        context = self._contexts[len(x)][i]
        args, kwargs = context if dtype is None else _cast(context, dtype)
        y = self.layers[i](x if dtype is None else x.to(dtype), *args, **kwargs)
        self._returns_tuples = isinstance(y, tuple)
        out: Tensor = y[0] if isinstance(y, tuple) else y
        return out

    def call(self, i: int, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the output of layer i for x [S, T, hidden] with `weights` instead of the parameters of these names.

        S is the size of a batch of `embed`. Differentiable.
        """
        args, kwargs = self._contexts[len(x)][i]
        y = functional_call(self.layers[i], dict(weights), (x, *args), kwargs)
        out: Tensor = y[0] if isinstance(y, tuple) else y
        return out

    @torch.no_grad()
    def inputs(self, i: int, hidden: Tensor, linears: list[str]) -> list[SharedInput]:
        """Returns the linear layers of `linears` (names in the layer) that run for `hidden` [S, T, hidden], grouped by
        input."""
        layer = self.layers[i]
        seen: list[tuple[Tensor, int, list[str]]] = []
        outputs: list[tuple[Tensor, str]] = []

        def record_input(name: str) -> Callable[..., None]:
            block = self.rotated_inputs.get(f"{self.layer_name(i)}.{name}", 0)

            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                for x, same, names in seen:
                    if _same(x, args[0]) and same == block:
                        names.append(name)
                        return
                seen.append((args[0], block, [name]))

            return hook

        def record_output(name: str) -> Callable[..., None]:
            return lambda module, args, output: outputs.append((output, name)) if isinstance(output, Tensor) else None

        # Recorded before the rotation hooks run: after them each layer has its own rotated copy, and shared inputs could not
        # be recognised.
        hooks = [layer.get_submodule(name).register_forward_pre_hook(record_input(name), prepend=True) for name in linears]
        leaves = [(n, m) for n, m in layer.named_modules() if n and next(m.parameters(recurse=False), None) is not None]
        hooks += [module.register_forward_hook(record_output(name)) for name, module in leaves]
        try:
            list(self.run(i, [hidden]))
        finally:
            for hook in hooks:
                hook.remove()
        return [
            SharedInput(tuple(names), next((name for y, name in reversed(outputs) if y is x), None)) for x, _, names in seen
        ]

    @torch.no_grad()
    def observe(self, i: int, hidden: list[Tensor], callbacks: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Runs layer i on all inputs and calls the function of each linear layer in `callbacks` with its input.

        A run stops at the last of these linear layers; the rest of the layer is not computed.
        """
        layer = self.layers[i]
        pending: set[str] = set()

        def hook(name: str, take: Callable[[Tensor], None]) -> Callable[..., None]:
            def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                take(args[0])
                pending.discard(name)
                if not pending:
                    raise _Stop

            return before

        hooks = [layer.get_submodule(n).register_forward_pre_hook(hook(n, take)) for n, take in callbacks.items()]
        try:
            for x in hidden:
                pending.update(callbacks)
                with _stopped():
                    list(self.run(i, [x]))
        finally:
            for handle in hooks:
                handle.remove()

    @torch.no_grad()
    def observe_experts(self, i: int, hidden: list[Tensor], names: Sequence[str]) -> dict[str, RoutedInputs]:
        """Runs layer i on all inputs and returns the inputs of its expert layers `names` (names in the layer), with the
        router's choices.

        A run stops at the last of these expert layers. Their inputs are kept in memory, in the dtype of computing.
        """
        layer, calls = self.layers[i], {name: [] for name in names}  # type: ignore[var-annotated]
        pending: set[str] = set()

        def hook(name: str) -> Callable[..., None]:
            def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                calls[name].append((*args, *kwargs.values()))
                pending.discard(name)
                if not pending:
                    raise _Stop

            return before

        hooks = [layer.get_submodule(n).register_forward_pre_hook(hook(n), with_kwargs=True) for n in names]
        try:
            for x in hidden:
                pending.update(names)
                with _stopped():
                    list(self.run(i, [x]))
        finally:
            for handle in hooks:
                handle.remove()
        count = {name: len(layer.get_parameter(f"{name}.down_proj")) for name in names}
        return {name: RoutedInputs.of_batches(batches, count[name]) for name, batches in calls.items()}

    def head_gradients(self, hidden: list[Tensor], seed: int = 0) -> list[Tensor]:
        """Returns the gradients, at outputs of the last layer [1, T, hidden], of the summed log-probability of sampled tokens.

        At each position one token is sampled from the model's distribution.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        with self.head():
            return [self._head_gradient(x, generator) for x in hidden]

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits [1, T, vocabulary] of outputs x [1, T, hidden] of the last layer."""
        with self.head():
            return self.after_layers(x)

    @contextmanager
    def head(self) -> Iterator[None]:
        """Loads what comes after the last layer, for `after_layers`."""
        inputs: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        skipped = {f"{name}.weight" for name, module in self.model.named_modules() if module is inputs}
        everything = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        outside = [n for n in everything if not n.startswith(f"{self.name}.") and n not in skipped]
        ties: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        values = {n: self._read(ties[n] if n not in self._files and n in ties else n) for n in outside}
        _fill(self.model, values, self.device, self.dtype)
        try:
            yield
        finally:
            _empty(self.model, outside)

    def after_layers(self, last: Tensor) -> Tensor:
        """Returns the logits of `last` [1, T, hidden], the outputs of the last layer; inside `head`. Differentiable."""
        for layer in self.layers:
            layer.forward = lambda *args, **kwargs: (last,) if self._returns_tuples else last  # type: ignore[method-assign]
        try:
            logits: Tensor = self.model(inputs_embeds=last.detach(), use_cache=False).logits
        finally:
            for layer in self.layers:
                del layer.forward
        return logits

    def _head_gradient(self, x: Tensor, generator: torch.Generator) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            logits = self.after_layers(leaf)
            gradient = logits.detach().float().softmax(dim=-1)
            sampled = torch.multinomial(gradient[0], 1, generator=generator)[None]
            # The gradient of a log-probability at the logits is one-hot minus the probabilities.
            gradient = gradient.neg_().scatter_add_(-1, sampled, torch.ones_like(sampled, dtype=gradient.dtype))
            logits.backward(gradient.to(logits.dtype))
        assert leaf.grad is not None
        return leaf.grad

    def backward(
        self, i: int, x: Tensor, output_gradient: Tensor, callbacks: Mapping[str, Callable[[Tensor, Tensor], None]]
    ) -> Tensor:
        """Returns the gradient at the input x [1, T, hidden] of layer i, given the gradient at its output.

        Calls the function of each linear layer in `callbacks` (names in the layer) with its input and its output gradient.
        """

        def hook(take: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
            def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                read = args[0].detach()
                output.register_hook(lambda gradient: take(read, gradient))

            return after

        hooks = [self.layers[i].get_submodule(n).register_forward_hook(hook(take)) for n, take in callbacks.items()]
        try:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                self._call(i, leaf).backward(output_gradient)
        finally:
            for handle in hooks:
                handle.remove()
        assert leaf.grad is not None
        return leaf.grad

    def stored_dtype(self, i: int, parameter: str) -> torch.dtype:
        """Returns the dtype in the files of a parameter of layer i."""
        name = f"{self.layer_name(i)}.{parameter}"
        return self.reader.info(self._files[name] if name in self._files else self._expert_sources[name].names[0]).dtype

    def head_dim(self, channels: int) -> int:
        """Returns the channels per attention head, of `channels` in all; 0 if the model's config has no heads."""
        config: Any = self.model.config
        heads = getattr(config, "num_attention_heads", None)
        return int(getattr(config, "head_dim", None) or (channels // heads if heads else 0))

    def _has(self, i: int, name: str) -> bool:
        return f"{self.layer_name(i)}.{name}" in self._files

    def _read(self, parameter: str) -> Tensor:
        name = self._files.get(parameter)
        if name is None and parameter in self._expert_sources:
            return self._read_experts(parameter)
        if name is None:
            raise CheckpointError(
                f"{self.reader.folder}: has no tensor {parameter!r}, which {type(self.model).__name__} needs; methods that "
                "calibrate take files whose tensors are the model's own, not split or merged while loading. Use a method "
                "without data (rtn, hqq)"
            )
        value, block = self.reader.get(name), self.rotated_inputs.get(parameter.removesuffix(".weight"))
        require_finite_tensor(self.reader.info(name).file, name, value)
        return rotate_blocks(value.float(), block) if block and parameter.endswith(".weight") else value

    def _read_experts(self, parameter: str) -> Tensor:
        """Returns a weight of experts that Transformers combines from several tensors; reads one expert at a time."""
        read = ExpertReader(self.reader, self._expert_sources[parameter])
        first = read(0)
        value = first.new_empty((len(self.model.get_parameter(parameter)), *first.shape))
        value[0] = first
        for e in range(1, len(value)):
            value[e] = read(e)
        return require_finite_tensor(self.reader.folder, parameter, value)


def _rotating(block: int) -> Callable[..., tuple[Tensor]]:
    return lambda module, args: (rotate_blocks(args[0], block),)


class _stopped:
    """Context manager that suppresses `_Stop`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is _Stop


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns nested tuples, lists and dicts with every floating-point tensor cast to `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(v, dtype) for v in value)
    return {k: _cast(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _decoder_layers(model: nn.Module, reader: CheckpointReader) -> tuple[str, nn.ModuleList]:
    """Returns name and module of the outermost ModuleList with the most parameters."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    lists = [(n, m) for n, m in lists if not any(n.startswith(f"{outer}.") for outer, _ in lists)]
    if not lists:
        raise CheckpointError(f"{reader.folder}: {type(model).__name__} has no list of decoder layers to go through")
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _fill(module: nn.Module, values: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        target = module.get_submodule(owner)
        value = value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)
        if last in target._parameters:
            target._parameters[last] = nn.Parameter(value, requires_grad=False)
        else:
            target._buffers[last] = value
    for owner_module in module.modules():
        for name, buffer in owner_module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                owner_module._buffers[name] = buffer.to(device)


def _empty(module: nn.Module, names: list[str]) -> None:
    for name in names:
        owner, _, last = name.rpartition(".")
        target = module.get_submodule(owner)
        target._parameters[last] = nn.Parameter(target._parameters[last].to("meta"), requires_grad=False)  # type: ignore
