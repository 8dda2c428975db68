"""LoRA by PEFT on quantized layers: adapters are trained, the base weights stay quantized (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

try:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge
except ImportError as error:
    raise ImportError(f"LoRA is done by PEFT, which cannot be imported ({error}); pip install peft") from error
from transformers import PreTrainedModel

from lowbit.nn import QuantLinear
from lowbit.nn.convert import dequantized

_INITIALIZATIONS = (True, False, "gaussian")


def support_lora(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Changes a configuration so that PEFT can adapt the quantized layers of `model`, and returns it for `get_peft_model` or
    `PeftModel.from_pretrained`.

    `target_modules="all-linear"` becomes the names of all linear layers but the LM head, quantized or not. Merged layers are
    plain ones in the model's dtype. Raises ValueError for a variant of LoRA other than LoRA itself and rsLoRA.
    """
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} changes the weights under the adapters, which stay quantized; "
            'take True, False or "gaussian"'
        )
    config._register_custom_module({QuantLinear: functools.partial(LoraQuantLinear, dtype=model.dtype)})
    if config.target_modules == "all-linear":
        head = model.get_output_embeddings()
        linears = [name for name, m in model.named_modules() if isinstance(m, (QuantLinear, nn.Linear)) and m is not head]
        config.target_modules = set(linears)
    return config


class LoraQuantLinear(nn.Module, LoraLayer):
    """y = QuantLinear(x) + scaling * B A x, as `peft.tuners.lora.Linear` computes it over a plain layer.

    Merging replaces the quantized layer by a plain one with weights in `dtype`; unmerging puts the quantized one back.
    """

    base_layer: Any
    in_features: int
    out_features: int
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    lora_bias: dict[str, bool]
    scaling: dict[str, float]
    merged: bool
    merged_adapters: list[str]
    active_adapters: list[str]
    disable_adapters: bool
    get_base_layer: Any
    update_layer: Any
    _check_forward_args: Any
    _cast_input_dtype: Any

    def __init__(
        self, base_layer: QuantLinear, adapter_name: str, config: LoraConfig, *, dtype: torch.dtype, **options: Any
    ) -> None:
        if base_layer.scheme.activation is not None:
            raise ValueError(
                f"LoRA takes layers with 16-bit activations, such as w4a16_g64, not {base_layer.scheme}: on a GPU their inputs "
                "are quantized together with the norm before, which has no gradient"
            )
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._dtype = dtype
        self._quantized: tuple[QuantLinear, ...] = ()  # a tuple keeps it out of the state dict
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config=config, **options)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, QuantLinear)
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        weight = base_layer.weight_scale if isinstance(base_layer, QuantLinear) else base_layer.weight
        assert isinstance(weight, Tensor)
        return weight.device, self._dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns y [.., N] for x [.., K]."""
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("adapters are not mixed in a batch on quantized layers; give one adapter a batch")
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        for name in self.active_adapters:
            if name in self.lora_A:
                a, b = self.lora_A[name], self.lora_B[name]
                inner = x if torch.is_autocast_enabled() else self._cast_input_dtype(x, a.weight.dtype)
                y = y + (b(a(self.lora_dropout[name](inner))) * self.scaling[name]).to(y.dtype)
        return y

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the active or named adapters to the dequantized weights.

        With `safe_merge`, raises ValueError for sums that are not finite, before any change.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base = self.get_base_layer()
        plain = base if self.merged else dequantized(base, torch.float32)
        weight = plain.weight.float() + sum(self.get_delta_weight(name) for name in names)
        if safe_merge and not bool(weight.isfinite().all()):
            raise ValueError(f"the merged weights are not finite; one of the adapters {', '.join(names)} is damaged")
        biases = [self.lora_B[name].bias * self.scaling[name] for name in names if self.lora_bias[name]]
        if biases and plain.bias is None:
            raise ValueError("lora_bias=True is merged into a bias, which this layer does not have")
        summed = None if plain.bias is None else (plain.bias + sum(biases)).to(self._dtype)
        bias = None if summed is None else nn.Parameter(summed, requires_grad=False)
        if not self.merged:
            self._quantized = (base,)
        merged = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        merged.weight = nn.Parameter(weight.to(self._dtype), requires_grad=False)
        merged.register_parameter("bias", bias)
        self.base_layer = merged.train(base.training)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Restores the quantized layer exactly."""
        if self._quantized:
            (self.base_layer,), self._quantized = self._quantized, ()
            self.merged_adapters.clear()

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Returns scaling * B A [N, K] of an adapter, in float32."""
        return self.lora_B[adapter].weight.float() @ self.lora_A[adapter].weight.float() * self.scaling[adapter]

    def __repr__(self) -> str:
        return "lora." + super().__repr__()
