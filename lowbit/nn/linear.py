"""A linear layer with quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.formats import QuantTensor, Scheme
from lowbit.nn.packed import PackedWeight
from lowbit.ops import fragment_gemm, mixed_gemm


class QuantLinear(PackedWeight):
    """y [.., out_features] = x [.., in_features] . dequant(w)^T + bias, with w packed (see `PackedWeight`).

    x is fp16, bf16 or fp32 and y has its type; bias [out_features] is kept as it was in the original layer. With an `order` or
    an `input_scale`, x is brought into the order of the codes and scaled first, at every call. On a GPU the
    first call with 16-bit activations brings the weights into the order of the tensor-core kernels (`prepare`).
    """

    bias: nn.Parameter | None

    # Transformers' tensor parallelism hands such modules plain local shards.
    _hf_quantized_needs_local_tp = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: str | Scheme,
        *,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        order: bool = False,
        input_scale: bool = False,
    ) -> None:
        super().__init__((out_features, in_features), scheme, device, order=order, input_scale=input_scale)
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", bias)

    @classmethod
    def from_quant_tensor(cls, q: QuantTensor, bias: nn.Parameter | None = None) -> QuantLinear:
        """The layer that computes with `q`."""
        module = cls(q.shape[1], q.shape[0], q.scheme, bias=bias, device="meta")
        module.set_weight(q)
        return module

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not self.is_prepared and not torch.compiler.is_compiling():
            self.prepare(x.dtype)
        if self.is_prepared and x.dtype in (torch.float16, torch.bfloat16):
            return fragment_gemm(x, self.kernel_weight(), self.bias)
        self.restore()
        channels = (self.weight_order, self.input_scale) if self.has_channels else ()
        return mixed_gemm(x, self.weight_packed, self.weight_scale, self.weight_zero, self.bias, self.scheme_name, *channels)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}, bias={self.bias is not None}"
