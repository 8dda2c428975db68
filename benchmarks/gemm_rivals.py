"""Rivals of `python -m benchmarks gemm`, called from their published packages: vLLM's Marlin and Machete, bitsandbytes' NF4 and
int8, and quack's int4. Nothing is built here. vLLM's operators are loaded from its wheel; vLLM itself is not imported.

Facts about layouts and arguments are from vLLM 0.25.1 (_custom_ops, model_executor/kernels/linear/mixed_precision/machete,
model_executor/layers/quantization/utils/marlin_utils), bitsandbytes 0.50.2 and quack-kernels 0.6.5 (quack/gemm_w4).
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts_rivals import pack_scales
from benchmarks.protocol import Contender, Product, reference_product
from benchmarks.request import GemmRequest
from lowbit.formats import IntFormat, PerChannel, PerGroup, QuantTensor, ZeroPoint

TYPES = {4: 4 << 8 | 8 << 17 | 1 << 50, 8: 8 << 8 | 128 << 17 | 1 << 50}
"""vLLM's ids of scalar types, by bits of a code; the bias is half of the codes' range. Bits 8 and up hold the number of
mantissa bits, bits 17 and up the bias, and bit 50 the kind of NaN."""


@functools.cache
def load_vllm() -> Any:
    """Loads vLLM's operators for dense layers; returns `torch.ops._C`. Raises ImportError if no vLLM wheel is installed."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    found = [file for folder in folders for file in Path(folder).glob("_C_stable_libtorch*.so")]
    if not found:
        raise ImportError("no vLLM with _C_stable_libtorch is installed: pip install vllm (0.25.1 was measured)")
    torch.ops.load_library(str(found[0]))
    return torch.ops._C


def packed_along_k(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [N, K] into int32 [K * bits / 32, N], as in GPTQ's files: neighbours along K share a word, the first in its
    lowest bits."""
    each = 32 // bits
    parts = codes.T.reshape(codes.shape[1] // each, each, codes.shape[0]).long()
    words = (parts << torch.arange(0, 32, bits, device=codes.device)[:, None]).sum(1)
    return words.to(torch.uint32).view(torch.int32).contiguous()


def _group(q: QuantTensor, who: str, groups: tuple[int, ...]) -> int:
    """Returns the group size, -1 for one scale per channel. Raises ValueError for weights that a rival does not take."""
    scheme, fmt = q.scheme, q.scheme.weight
    group = scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else -1
    known = isinstance(scheme.granularity, (PerChannel, PerGroup)) and group in groups
    integers = isinstance(fmt, IntFormat) and fmt.bits in TYPES and scheme.zero is ZeroPoint.NONE
    if scheme.activation is not None or not (known and integers):
        listed = ", ".join("channels" if size == -1 else str(size) for size in groups)
        raise ValueError(f"{who} takes int4 and int8 without zeros in groups of {listed} and 16-bit x here, not {scheme}")
    return group


def _whole(q: QuantTensor, who: str, n: int, k: int) -> None:
    if q.shape[0] % n or q.shape[1] % k:
        raise ValueError(f"{who} takes N a multiple of {n} and K of {k}, not {q.shape[0]}x{q.shape[1]}")


def _cloned(weight: list[Tensor]) -> list[Tensor]:
    """Returns copies in new memory, of the same strides."""
    return [tensor.clone(memory_format=torch.preserve_format) for tensor in weight]


def _contender(
    weight: list[Tensor], products: list[tuple[str, Product]], q: QuantTensor, dtype: torch.dtype, tuned: bool
) -> Contender:
    nbytes = sum(tensor.nbytes for tensor in weight)
    return Contender(weight, nbytes, _cloned, lambda m: products, lambda x: reference_product(x, q), dtype, tuned=tuned)


def _stored(q: QuantTensor, dtype: torch.dtype) -> QuantTensor:
    return QuantTensor(q.codes, q.scale.to(dtype), None, q.scheme)


def marlin(q: QuantTensor, request: GemmRequest) -> Contender:
    """vLLM's Marlin: int4 and int8 in groups of 32, 64, 128 or per channel, as vLLM's `apply_gptq_marlin_linear` calls it.

    It chooses its own configuration; there is nothing to tune.
    """
    group, dtype = _group(q, "marlin", (-1, 32, 64, 128)), request.torch_dtype
    _whole(q, "marlin", 64, 128)
    ops, (n, k), bits = load_vllm(), q.shape, q.scheme.weight.bits
    q = _stored(q, dtype)
    nothing = torch.empty(0, dtype=torch.int32, device=q.codes.device)
    codes = ops.gptq_marlin_repack(packed_along_k(q.codes, bits), nothing, k, n, bits, False)
    scale = pack_scales(q.scale, dtype) if group != -1 else channel_scales(q.scale, dtype)
    workspace = torch.zeros(torch.cuda.get_device_properties().multi_processor_count, dtype=torch.int32, device=q.codes.device)

    def product(x: Tensor, w: list[Tensor]) -> Tensor:
        return ops.marlin_gemm(
            x, None, w[0], None, w[1], None, None, None, None, None, workspace, TYPES[bits], len(x), n, k, True, False, True,
            False,
        )  # fmt: skip

    return _contender([codes, scale], [("vllm marlin_gemm", product)], q, dtype, tuned=False)


def channel_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scales [N, 1] of channels as [1, N], in Marlin's order."""
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scale.T.reshape(-1, 32)[:, order].reshape(1, -1).to(dtype).contiguous()


def machete(q: QuantTensor, request: GemmRequest) -> Contender:
    """vLLM's Machete: int4 and int8 in groups of 128 or per channel, on sm_90.

    As in vLLM, it chooses its own schedule. With `sweep`, all its schedules are tried too.
    """
    group, dtype = _group(q, "machete", (-1, 128)), request.torch_dtype
    _whole(q, "machete", 128, 64)
    ops, bits = load_vllm(), q.scheme.weight.bits
    q = _stored(q, dtype)
    words = packed_along_k(q.codes, bits)
    codes = ops.machete_prepack_B(words.t().contiguous().t(), dtype, TYPES[bits], dtype)
    scale = q.scale.T.contiguous()
    schedules: list[str | None] = [None]
    if request.sweep:
        schedules += ops.machete_supported_schedules(dtype, TYPES[bits], dtype, None, None, None, dtype)

    def product(schedule: str | None) -> Product:
        return lambda x, w: ops.machete_mm(x, w[0], TYPES[bits], None, w[1], None, group, None, None, schedule)

    products = [(f"vllm machete_mm {schedule or 'own schedule'}", product(schedule)) for schedule in schedules]
    return _contender([codes, scale], products, q, dtype, tuned=request.sweep)


def bitsandbytes(q: QuantTensor, request: GemmRequest) -> Contender:
    """bitsandbytes: NF4 in blocks of 64 for int4, and LLM.int8 without outliers for int8 per channel.

    Both quantize the dequantized `q` again by their own rule. Their products are checked against the weights that they rounded
    themselves. int8 also quantizes x, which is included in its time.
    """
    scheme, dtype = q.scheme, request.torch_dtype
    _group(q, "bitsandbytes", (-1, 64, 128))
    package, functional = importlib.import_module("bitsandbytes"), importlib.import_module("bitsandbytes.functional")
    w = q.dequantize(dtype)
    if scheme.weight.bits == 4:
        packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
        exact = functional.dequantize_4bit(packed, state).double()

        def nf4(x: Tensor, weight: list[Tensor]) -> Tensor:
            own = copy.copy(state)
            own.absmax = weight[1]
            return package.matmul_4bit(x, weight[0], quant_state=own)

        return Contender(
            [packed, state.absmax], packed.nbytes + state.absmax.nbytes, _cloned,
            lambda m: [("bitsandbytes NF4, blocks of 64", nf4)],
            lambda x: x.double() @ exact.T, dtype,
        )  # fmt: skip
    if isinstance(scheme.granularity, PerGroup):
        raise ValueError(f"bitsandbytes' int8 has one scale per channel, not {scheme}")
    codes, scales, _ = functional.int8_vectorwise_quant(w.half())
    rounded = (codes.double() * (scales.double() / 127)[:, None]).T

    def int8(x: Tensor, weight: list[Tensor]) -> Tensor:
        state = package.MatmulLtState()
        state.CB, state.SCB = weight
        state.has_fp16_weights, state.is_training = False, False
        return package.matmul(x, weight[0], state=state)

    def truth(x: Tensor) -> Tensor:
        x_codes, x_scales, _ = functional.int8_vectorwise_quant(x.half())
        return (x_codes.double() * (x_scales.double() / 127)[:, None]) @ rounded

    return Contender(
        [codes, scales], codes.nbytes + scales.nbytes, _cloned, lambda m: [("bitsandbytes LLM.int8, no outliers", int8)], truth,
        dtype,
    )  # fmt: skip


def quack(q: QuantTensor, request: GemmRequest) -> Contender:
    """quack's `gemm_w4a16`: int4 in groups of 32, 64 or 128, bf16 x, on sm_90. It chooses its own tile."""
    group = _group(q, "quack", (32, 64, 128))
    if q.scheme.weight.bits != 4:
        raise ValueError(f"this adapter measures quack's int4 in groups, not {q.scheme}")
    _whole(q, "quack", 16, 128)
    module = importlib.import_module("quack.gemm_w4")
    q, n = _stored(q, torch.bfloat16), q.shape[0]
    pairs = (q.codes[:, 0::2] | (q.codes[:, 1::2] << 4)).contiguous()
    name = "int4" if group == 128 else f"int4_g{group}"
    blob, scales = module.prepare_w4_weight(pairs, q.scale.contiguous(), wformat=name)

    def product(x: Tensor, w: list[Tensor]) -> Tensor:
        return module.gemm_w4a16(x, w[0], w[1], n_out=n, wformat=name)

    return _contender([blob, scales], [("quack gemm_w4a16", product)], q, torch.bfloat16, tuned=False)
