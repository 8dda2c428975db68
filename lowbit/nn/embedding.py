"""A token embedding with quantized rows, which a tied LM head can share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.formats import NO_PARTS, InputParts, InputTransform, PerBlock, PerTensor, QuantTensor, Scheme, unpack_words
from lowbit.nn.packed import PackedWeight


class QuantEmbedding(PackedWeight):
    """An embedding with a packed matrix [num_embeddings, embedding_dim]: token ids [..] give rows [.., embedding_dim].

    `dtype` is the dtype of the returned rows. Only the rows of the token ids are dequantized. Raises ValueError for schemes
    with scales per tensor or per block, and for weights with an input transform or a low-rank correction, since an embedding
    has no input to multiply.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: str | Scheme,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__((num_embeddings, embedding_dim), scheme, device)
        if isinstance(self.scheme.granularity, (PerTensor, PerBlock)):
            raise ValueError(f"an embedding takes scales per channel or per group, not {self.scheme}")
        self.num_embeddings, self.embedding_dim, self.dtype = num_embeddings, embedding_dim, dtype

    @classmethod
    def from_quant_tensor(cls, q: QuantTensor, dtype: torch.dtype) -> QuantEmbedding:
        """Returns the embedding with the rows of `q`."""
        module = cls(*q.shape, q.scheme, dtype, device="meta")
        module.set_weight(q)
        return module

    def _set_input(self, transform: InputTransform) -> None:
        refuse_input(transform.parts, 0)
        super()._set_input(transform)

    def _set_correction(self, up: nn.Parameter | None, down: nn.Parameter | None) -> None:
        refuse_input(NO_PARTS, 0 if up is None else up.shape[1])
        super()._set_correction(up, down)

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.reshape(-1)
        codes = unpack_words(self.weight_packed[rows], self.scheme.weight.bits, self.embedding_dim)
        zero = None if self.weight_zero is None else self.weight_zero[rows]
        picked = QuantTensor(codes, self.weight_scale[rows], zero, self.scheme)
        return picked.dequantize(self.dtype).reshape(*ids.shape, self.embedding_dim)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype  # `.half()` changes the dtype of returned rows
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}"


def refuse_input(parts: InputParts, low_rank: int) -> None:
    """Raises ValueError for an embedding with an input transform or a low-rank correction."""
    words = (*parts.words(), *(("low-rank correction",) if low_rank else ()))
    if words:
        raise ValueError(f"an embedding multiplies no input, so its weights have no {', no '.join(words)}; quantize it without")
