"""A causal language model's decoder, run one layer at a time with weights read from disk as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.formats import rotate_blocks
from lowbit.models.complete import require_finite_tensor
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import build, config_as_read, require_causal

_NONE: Mapping[str, int] = MappingProxyType({})


class _Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass(frozen=True)
class SharedInput:
    """Linear layers of one decoder layer that read the same tensor, in the order in which they run, and `producer`, the
    module whose output that tensor is (None when it comes from other operations). Names are relative to the layer."""

    linears: tuple[str, ...]
    producer: str | None


class LayerwiseDecoder:
    """The decoder of the checkpoint that `reader` has open: a skeleton on the meta device whose layers come and go.

    Computes on `device` in `dtype`. The inputs of the linear layers in `rotated_inputs` are rotated in blocks of so many
    channels (`formats.rotate_blocks`), and their weights as they are read: the model stays the same one. Raises
    CheckpointError for models that have no list of decoder layers or do not predict the next token, and for weights that
    Transformers splits or merges while loading.
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
        self._contexts: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}  # by how many texts a call has
        self._returns_tuples = False
        for name, block in self.rotated_inputs.items():
            self.model.get_submodule(name).register_forward_pre_hook(_rotating(block))

    def __len__(self) -> int:
        return len(self.layers)

    def layer_name(self, i: int) -> str:
        """Full name of layer i: `model.layers.3`."""
        return f"{self.name}.{i}"

    def weight(self, i: int, name: str) -> Tensor:
        """Returns the weight [N, K] of a linear layer of loaded layer i, which may be changed in place."""
        return self.layers[i].get_parameter(f"{name}.weight").data

    def file_name(self, parameter: str) -> str | None:
        """The name in the files of a parameter of the model; None when they have no such tensor."""
        return self._files.get(parameter)

    def model_name(self, tensor: str) -> str | None:
        """The model's own name of a tensor in the files; None when it has no such parameter."""
        return self._names.get(tensor)

    @torch.no_grad()
    def embed(self, tokens: Tensor, replaced: Mapping[str, Tensor] | None = None, together: int = 1) -> list[Tensor]:
        """The input of the first layer for all rows of `tokens` [S, T], a list of [together, T, hidden], the last maybe
        shorter. `replaced` holds parameters by name to take instead of the files'. Also remembers what else each layer is
        called with (masks, positions)."""
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
        """Stands in for layer i while embedding: keeps the layer's other arguments (of the first call with so many texts; they
        are the same for all, which have one length) and the first layer's input."""

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
        """Layer i with its weights, on the device and in the type of computing. `replaced` holds parameters by their name in
        the layer to take instead of the files'."""
        layer = self.layers[i]
        names = [n for n, _ in layer.named_parameters()] + [n for n, b in layer.named_buffers() if self._has(i, n)]
        given = replaced or {}
        values = {n: given[n] if n in given else self._read(f"{self.layer_name(i)}.{n}") for n in names}
        _fill(layer, values, self.device, self.dtype)
        return layer

    def free(self, i: int) -> None:
        """Gives back the memory of layer i."""
        _empty(self.layers[i], [n for n, _ in self.layers[i].named_parameters()])

    @torch.no_grad()
    def run(self, i: int, hidden: list[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """The outputs of layer i for its inputs, in the pieces that `embed` made; computed in `dtype` where it is given."""
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
        """The output of layer i for x [S, T, hidden], of as many texts as one of the pieces that `embed` made, with `weights`
        in place of the parameters of these names; gradients pass."""
        args, kwargs = self._contexts[len(x)][i]
        y = functional_call(self.layers[i], dict(weights), (x, *args), kwargs)
        out: Tensor = y[0] if isinstance(y, tuple) else y
        return out

    @torch.no_grad()
    def inputs(self, i: int, hidden: Tensor, linears: list[str]) -> list[SharedInput]:
        """Which of `linears` (names in the layer) run for `hidden` [S, T, hidden], and which of them read the same tensor."""
        layer = self.layers[i]
        seen: list[tuple[Tensor, int, list[str]]] = []
        made: list[tuple[Tensor, str]] = []

        def reads(name: str) -> Callable[..., None]:
            block = self.rotated_inputs.get(f"{self.layer_name(i)}.{name}", 0)

            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                for x, same, names in seen:
                    if _same(x, args[0]) and same == block:
                        names.append(name)
                        return
                seen.append((args[0], block, [name]))

            return hook

        def makes(name: str) -> Callable[..., None]:
            return lambda module, args, output: made.append((output, name)) if isinstance(output, Tensor) else None

        # Before what rotates: layers whose inputs are rotated alike read the same tensor.
        hooks = [layer.get_submodule(name).register_forward_pre_hook(reads(name), prepend=True) for name in linears]
        leaves = [(n, m) for n, m in layer.named_modules() if n and next(m.parameters(recurse=False), None) is not None]
        hooks += [module.register_forward_hook(makes(name)) for name, module in leaves]
        try:
            list(self.run(i, [hidden]))
        finally:
            for hook in hooks:
                hook.remove()
        return [SharedInput(tuple(names), next((name for y, name in reversed(made) if y is x), None)) for x, _, names in seen]

    @torch.no_grad()
    def observe(self, i: int, hidden: list[Tensor], watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Runs layer i on all inputs and hands the input of each linear layer named in `watch` to its function. A run ends
        where the last of them begins: the rest of the layer is not computed."""
        layer = self.layers[i]
        left: set[str] = set()

        def hook(name: str, take: Callable[[Tensor], None]) -> Callable[..., None]:
            def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                take(args[0])
                left.discard(name)
                if not left:
                    raise _Stop

            return before

        hooks = [layer.get_submodule(n).register_forward_pre_hook(hook(n, take)) for n, take in watch.items()]
        try:
            for x in hidden:
                left.update(watch)
                with _stopped():
                    list(self.run(i, [x]))
        finally:
            for handle in hooks:
                handle.remove()

    def head_gradients(self, hidden: list[Tensor], seed: int = 0) -> list[Tensor]:
        """For the outputs of the last layer, [1, T, hidden] each, the gradients of the sum over all positions of the
        log-probability of a token that is drawn there from the model's own distribution."""
        inputs: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        skipped = {f"{name}.weight" for name, module in self.model.named_modules() if module is inputs}
        everything = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        outside = [n for n in everything if not n.startswith(f"{self.name}.") and n not in skipped]
        ties: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        values = {n: self._read(ties[n] if n not in self._files and n in ties else n) for n in outside}
        _fill(self.model, values, self.device, self.dtype)
        generator = torch.Generator(self.device).manual_seed(seed)
        try:
            return [self._head_gradient(x, generator) for x in hidden]
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)
            _empty(self.model, outside)

    def _head_gradient(self, x: Tensor, generator: torch.Generator) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            for layer in self.layers:
                layer.forward = lambda *args, **kwargs: (leaf,) if self._returns_tuples else leaf  # type: ignore[method-assign]
            logits = self.model(inputs_embeds=x, use_cache=False).logits
            slope = logits.detach().float().softmax(dim=-1)
            drawn = torch.multinomial(slope[0], 1, generator=generator)[None]
            # The gradient of a log-probability at the logits: 1 for the token itself, less the probability of each.
            slope = slope.neg_().scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=slope.dtype))
            logits.backward(slope.to(logits.dtype))
        assert leaf.grad is not None
        return leaf.grad

    def backward(self, i: int, x: Tensor, slope: Tensor, watch: Mapping[str, Callable[[Tensor, Tensor], None]]) -> Tensor:
        """The gradient at the input x [1, T, hidden] of layer i, given that at its output. The function of each linear layer in
        `watch` (names in the layer) gets its input and the gradient at its output."""

        def hook(take: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
            def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                read = args[0].detach()
                output.register_hook(lambda gradient: take(read, gradient))

            return after

        hooks = [self.layers[i].get_submodule(n).register_forward_hook(hook(take)) for n, take in watch.items()]
        try:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                self._call(i, leaf).backward(slope)
        finally:
            for handle in hooks:
                handle.remove()
        assert leaf.grad is not None
        return leaf.grad

    def stored_dtype(self, i: int, parameter: str) -> torch.dtype:
        """The type in which the files hold a parameter of layer i."""
        return self.reader.info(self._files[f"{self.layer_name(i)}.{parameter}"]).dtype

    def head_dim(self, channels: int) -> int:
        """Channels of an attention head, `channels` being all of them; 0 where the model's config names no heads."""
        config: Any = self.model.config
        heads = getattr(config, "num_attention_heads", None)
        return int(getattr(config, "head_dim", None) or (channels // heads if heads else 0))

    def _has(self, i: int, name: str) -> bool:
        return f"{self.layer_name(i)}.{name}" in self._files

    def _read(self, parameter: str) -> Tensor:
        name = self._files.get(parameter)
        if name is None:
            raise CheckpointError(
                f"{self.reader.folder}: has no tensor {parameter!r}, which {type(self.model).__name__} needs; methods that "
                "calibrate take files whose tensors are the model's own, not split or merged while loading. Use a method "
                "without data (rtn, hqq)"
            )
        value, block = self.reader.get(name), self.rotated_inputs.get(parameter.removesuffix(".weight"))
        require_finite_tensor(self.reader.info(name).file, name, value)
        return rotate_blocks(value.float(), block) if block and parameter.endswith(".weight") else value


def _rotating(block: int) -> Callable[..., tuple[Tensor]]:
    return lambda module, args: (rotate_blocks(args[0], block),)


class _stopped:
    """A block that `_Stop` ends."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is _Stop


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in nested tuples, lists and dicts in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(v, dtype) for v in value)
    return {k: _cast(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _decoder_layers(model: nn.Module, reader: CheckpointReader) -> tuple[str, nn.ModuleList]:
    """The outermost list of modules with the most weights in it."""
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
