"""Rivals of the expert block: vLLM's Marlin kernels for int4 experts, called as vLLM's `fused_marlin_moe` calls them.

Only the operator library `_moe_C_stable_libtorch` of an installed vLLM wheel is loaded; vLLM is not imported. Facts about the
layout of weights and the order of calls are from vLLM 0.25.1: model_executor/layers/fused_moe/experts/marlin_moe.py,
_custom_ops.py and model_executor/layers/quantization/utils/marlin_utils.py.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import QuantTensor

UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
"""vLLM's id of the scalar type of 4-bit codes with a bias of 8. Bits 8 and up hold the number of mantissa bits, bits 17 and up
the bias, and bit 50 the kind of NaN."""

BLOCK_ROWS = (8, 16, 32, 48, 64)
"""Possible numbers of rows per block of sorted slots; vLLM chooses one of them."""


@functools.cache
def load() -> str:
    """Loads the operators; returns vLLM's version. Raises ImportError if no vLLM wheel is installed."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    found = [file for folder in folders for file in Path(folder).glob("_moe_C_stable_libtorch*.so")]
    if not found:
        raise ImportError("no vLLM with _moe_C_stable_libtorch is installed: pip install vllm (0.25.1 was measured)")
    torch.ops.load_library(str(found[0]))
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _code_order() -> Tensor:
    """Returns the order in which Marlin stores 1,024 codes of 16 rows of K and 64 channels. Before, each of the four 16 x 16
    tiles is in row-major order. Afterwards, each thread of mma.sync has its 8 codes of a tile in one word, in which codes of
    neighbouring rows are 16 bits apart."""
    order = []
    for lane in range(32):
        column, row = lane // 4, lane % 4 * 2
        own = [16 * (row + i) + column + 8 * half for half in (0, 1) for i in (0, 1, 8, 9)]
        order += [place + 256 * tile for tile in range(4) for place in own]
    return torch.tensor(order).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def pack_codes(codes: Tensor) -> Tensor:
    """Packs codes [N, K] from 0 to 15 into int32 [K / 16, 2 N], in Marlin's order."""
    n, k = codes.shape
    tiles = codes.T.reshape(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(k // 16, n // 64, 1024)
    ordered = tiles[:, :, _code_order().to(codes.device)].view(k // 16, 2 * n, 8).long()
    words = (ordered << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def pack_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scales [N, groups] as [groups, N], in the order of the kernel for more than one group."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    n, groups = scale.shape
    return scale.T.reshape(-1, 64)[:, order].reshape(groups, n).to(dtype).contiguous()


def _parts(q: QuantTensor) -> tuple[Tensor, Tensor]:
    return q.codes, q.scale


class MarlinExperts:
    """The experts of a layer for vLLM's Marlin kernels: int4 codes in groups without zeros, bf16 x, a SiLU gate. The given
    sequences are read once, one matrix after another."""

    def __init__(
        self, gate: Sequence[QuantTensor], up: Sequence[QuantTensor], down: Sequence[QuantTensor], top_k: int, normalize: bool
    ) -> None:  # fmt: skip
        load()
        self.top_k, self.normalize, self.experts = top_k, normalize, len(gate)
        self.size, self.hidden = gate[0].shape
        first = [[torch.cat(both) for both in zip(_parts(a), _parts(b), strict=True)] for a, b in zip(gate, up, strict=True)]
        second = [_parts(q) for q in down]
        self.first, self.second = (torch.stack([pack_codes(codes) for codes, _ in each]) for each in (first, second))
        self.first_scale, self.second_scale = (
            torch.stack([pack_scales(scale, torch.bfloat16) for _, scale in each]) for each in (first, second)
        )
        sms = torch.cuda.get_device_properties().multi_processor_count
        self.locks = torch.zeros(4 * sms, dtype=torch.int32, device="cuda")

    def copy(self) -> MarlinExperts:
        """Returns the same experts in other memory."""
        made = copy.copy(self)
        for name in ("first", "second", "first_scale", "second_scale"):
            setattr(made, name, getattr(self, name).clone())
        return made

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        """Returns the block's output for x [T, hidden] and router logits [T, experts], plus the residual [T, hidden]."""
        tokens, slots = len(x), len(x) * self.top_k
        rows = next((rows for rows in BLOCK_ROWS if slots / self.experts / rows < 0.9), BLOCK_ROWS[-1])
        weights = torch.empty((tokens, self.top_k), dtype=torch.float32, device="cuda")
        chosen, unused = torch.empty((2, tokens, self.top_k), dtype=torch.int32, device="cuda")
        ops: Any = torch.ops._moe_C
        ops.topk_softmax(weights, chosen, unused, logits, self.normalize, None)
        padded = slots + self.experts * (rows - 1)
        if slots < self.experts:
            padded = min(slots * rows, padded)
        order, owners, count = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (padded, -(-padded // rows), 1))
        ops.moe_align_block_size(chosen, self.experts, rows, order, owners, count, None)

        def product(x: Tensor, w: Tensor, scale: Tensor, n: int, top_k: int, weighted: bool) -> Tensor:
            y = torch.empty((slots, n), dtype=x.dtype, device="cuda")
            ops.moe_wna16_marlin_gemm(
                x, y, w, None, scale, None, None, None, None, None, self.locks, order, owners, count, weights, rows, top_k,
                weighted, UINT4B8, len(x), n, x.shape[1], True, False, True, False, -1, -1, -1,
            )  # fmt: skip
            return y

        from lowbit.ops.elementwise import gate

        h = gate(product(x, self.first, self.first_scale, 2 * self.size, self.top_k, False), "silu")
        y = product(h, self.second, self.second_scale, self.hidden, 1, True)
        out = torch.empty_like(x)
        ops.moe_sum(y.view(tokens, self.top_k, self.hidden), out)
        return out + residual
