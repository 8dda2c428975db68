"""Rivals of the expert block, as vLLM 0.25.1 calls them: its Marlin, Triton and CUDA kernels, and Humming's.

vLLM is not imported. The operator library `_moe_C_stable_libtorch` of its wheel is loaded, which routes for all rivals. Triton
kernels are read from its Python files. Facts about layouts and the order of calls are from vLLM's
model_executor/layers/fused_moe (fused_moe.py, experts/*.py, moe_fused_mul_sum.py, oracle/mxfp4.py), its
model_executor/layers/quantization/utils (marlin_utils.py, marlin_utils_fp4.py, mxfp4_utils.py), and humming-kernels 0.1.20.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.formats import FloatFormat, IntFormat, PerGroup, QuantTensor, Scheme, ZeroPoint

UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
"""vLLM's id of the scalar type of 4-bit codes with a bias of 8. Bits 8 and up hold the number of mantissa bits, bits 17 and up
the bias, and bit 50 the kind of NaN."""
FLOAT4_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
"""vLLM's id of e2m1: bits 0 and up hold the number of exponent bits, bit 16 the sign, bit 49 "only finite values"."""

BLOCK_ROWS = (8, 16, 32, 48, 64)
"""Possible numbers of rows per block of sorted slots; vLLM chooses one of them for Marlin."""
FUSED_MOE = "model_executor/layers/fused_moe/fused_moe.py"


# ---- what is taken from vLLM's wheel


@functools.cache
def vllm_folder() -> Path:
    """Returns the folder of an installed vLLM. Raises ImportError if there is none."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    for folder in map(Path, folders):
        if any(folder.glob("_moe_C_stable_libtorch*.so")):
            return folder
    raise ImportError("no vLLM with _moe_C_stable_libtorch is installed: pip install vllm (0.25.1 was measured)")


def vllm_version(folder: Path) -> str:
    """Returns vLLM's version: of its metadata, or of `_version.py` in its folder. Raises ImportError if neither has it."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    file = folder / "_version.py"
    found = re.search(r"^__version__ = version = ['\"]([^'\"]+)", file.read_text(), re.MULTILINE) if file.is_file() else None
    if found is None:
        raise ImportError(f"vLLM in {folder} has neither metadata nor _version.py: its version is unknown")
    return found[1]


@functools.cache
def load() -> str:
    """Loads vLLM's operators of experts; returns its version. Raises ImportError if no vLLM wheel is installed."""
    folder = vllm_folder()
    version = vllm_version(folder)
    torch.ops.load_library(str(next(folder.glob("_moe_C_stable_libtorch*.so"))))
    return version


def operators() -> Any:
    """Returns vLLM's operators of experts, loaded."""
    load()
    return torch.ops._moe_C


_SOURCES = tempfile.TemporaryDirectory(prefix="lowbit-rivals-")


@functools.cache
def functions_of(file: Path, names: tuple[str, ...]) -> Any:
    """Returns a module with only these functions of a Python file, and `torch`, `triton` and `tl`.

    The file's own imports are not executed, so vLLM and its dependencies need not be installed. Triton reads the source of a
    kernel from its file, so the functions are written to one. Raises ImportError for a function that the file does not have.
    """
    source = file.read_text()
    lines, parts = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            parts[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    if missing := [name for name in names if name not in parts]:
        raise ImportError(f"{file} has no {', '.join(missing)}: vLLM 0.25.1 was measured")
    head = "from typing import Any\n\nimport torch\nimport triton\nimport triton.language as tl\n"
    copied = Path(_SOURCES.name) / f"{file.stem}_{len(list(Path(_SOURCES.name).glob('*.py')))}.py"
    copied.write_text("\n\n".join([head, *(parts[name] for name in names)]) + "\n")
    spec = importlib.util.spec_from_file_location(f"lowbit_rivals_{copied.stem}", copied)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- layouts


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
    """Returns scales [N, groups] as [groups, N], in the order of Marlin's kernel for more than one group."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    n, groups = scale.shape
    return scale.T.reshape(-1, 64)[:, order].reshape(groups, n).to(dtype).contiguous()


def pack_exponents(scale: Tensor) -> Tensor:
    """Returns scales [N, groups] that are powers of two as e8m0 [groups, N], in the order of Marlin's kernel for MXFP4."""
    packed = pack_scales(scale, torch.bfloat16)
    return packed.view(-1, 4)[:, [0, 2, 1, 3]].view(packed.shape).to(torch.float8_e8m0fnu)


def pack_bias(bias: Tensor) -> Tensor:
    """Returns a bias [N] in the order of the accumulators of Marlin's kernel."""
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return bias.reshape(-1, 32)[:, order].flatten()


def pairs(codes: Tensor) -> Tensor:
    """Packs 4-bit codes [N, K] into uint8 [N, K / 2]; the code of the lower k is in the low bits."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).contiguous()


def exponents(scale: Tensor) -> Tensor:
    """Returns scales that are powers of two as uint8: exponents plus 127, as in MXFP4 files."""
    return (torch.frexp(scale.float()).exponent + 126).to(torch.uint8)


def padded(q: QuantTensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Returns the codes [n, k] and scales of a matrix, padded with code 0 (the number 0 in e2m1) and scale 1."""
    (rows, columns), groups = q.shape, q.scale.shape[1]
    codes = pad(q.codes, (0, k - columns, 0, n - rows))
    return codes, pad(q.scale, (0, groups * k // columns - groups, 0, n - rows), value=1.0)


# ---- what all rivals share


@dataclass(frozen=True, eq=False)
class Source:
    """The experts of a layer: quantized matrices [size, hidden] twice and [hidden, size], which are read once, one after
    another; biases [E, 2 * size], gate first, and [E, hidden], or None; the gate function; and the router's rule.

    `normalize`: the router's weights of a token add up to 1.
    """

    gate: Sequence[QuantTensor]
    up: Sequence[QuantTensor]
    down: Sequence[QuantTensor]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    function: str
    top_k: int
    normalize: bool


def is_mxfp4(scheme: Scheme) -> bool:
    """Returns True for e2m1 in groups of 32 with 16-bit activations. Scales must be powers of two too."""
    fmt, grouped = scheme.weight, scheme.granularity
    e2m1 = isinstance(fmt, FloatFormat) and (fmt.bits, fmt.exponent, fmt.mantissa) == (4, 2, 1)
    return e2m1 and isinstance(grouped, PerGroup) and grouped.size == 32 and scheme.activation is None


def is_int4(scheme: Scheme) -> bool:
    """Returns True for int4 in groups of 32, 64 or 128 without zeros and with 16-bit activations."""
    grouped = isinstance(scheme.granularity, PerGroup) and scheme.granularity.size in (32, 64, 128)
    four = isinstance(scheme.weight, IntFormat) and scheme.weight.bits == 4
    return four and grouped and scheme.zero is ZeroPoint.NONE and scheme.activation is None


def _refuse_unless(taken: bool, who: str, what: str, scheme: Scheme, source: Source) -> None:
    if not taken:
        biased = "" if source.gate_up_bias is None else " and biases"
        raise ValueError(f"{who} are timed with {what}, not {scheme} with {source.function}{biased}")


class Rival(Protocol):
    """The experts of a layer in a rival's layout. Called with x [T, hidden], router logits [T, experts] and residual
    [T, hidden], it returns the block's output plus the residual."""

    kernel: str
    version: str
    weights: dict[str, Any]

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor: ...


def copied(rival: Rival) -> Rival:
    """Returns the same experts in other memory."""
    made: Rival = copy.copy(rival)
    made.weights = copy.deepcopy(rival.weights)
    return made


def routed(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Returns the router's weights float32 [T, top_k] and the chosen experts int32 [T, top_k]."""
    weights = torch.empty((len(logits), top_k), dtype=torch.float32, device=logits.device)
    chosen, unused = torch.empty((2, len(logits), top_k), dtype=torch.int32, device=logits.device)
    operators().topk_softmax(weights, chosen, unused, logits, normalize, None)
    return weights, chosen


def aligned(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns slots sorted by expert in blocks of `rows`, the expert of each block, and the number of slots with padding."""
    slots = chosen.numel()
    most = slots + experts * (rows - 1)
    if slots < experts:
        most = min(slots * rows, most)
    order, owners, count = (torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (most, -(-most // rows), 1))
    operators().moe_align_block_size(chosen, experts, rows, order, owners, count, None)
    return order, owners, count


def _gated(y: Tensor, function: str) -> Tensor:
    """Returns f(gate) * up [slots, size] for y [slots, 2 * size], with this library's kernel for SiLU, and one of this folder
    for the clamped SwiGLU. vLLM's are in a library of 76 MB of their own; they move the same bytes."""
    if function == "clamped_swiglu":
        from benchmarks.clamped_swiglu import clamped_swiglu

        return clamped_swiglu(y)
    from lowbit.ops.elementwise import gate

    return gate(y, function)


def _summed(y: Tensor, tokens: int, hidden: int) -> Tensor:
    """Returns the sum over the slots of each token of y [T * top_k, hidden], by vLLM's kernel."""
    out = torch.empty((tokens, hidden), dtype=y.dtype, device=y.device)
    operators().moe_sum(y.view(tokens, -1, hidden), out)
    return out


# ---- Marlin


class MarlinExperts:
    """vLLM's Marlin kernels, as `fused_marlin_moe` calls them: int4 in groups with SiLU, or MXFP4 with biases and the clamped
    SwiGLU. For MXFP4, vLLM pads the hidden size to a multiple of 256 and the experts' to one of 128; so does this."""

    kernel = "moe_wna16_marlin_gemm"

    def __init__(self, source: Source) -> None:
        scheme = source.down[0].scheme
        own = is_mxfp4(scheme) or (is_int4(scheme) and source.function == "silu" and source.gate_up_bias is None)
        what = "int4 codes in groups, SiLU and no biases, or with MXFP4"
        _refuse_unless(own, "vLLM's Marlin experts", what, scheme, source)
        self.version = load()
        self.source, self.mxfp4 = source, is_mxfp4(scheme)
        size, hidden = source.gate[0].shape
        self.size = -(-size // 128) * 128 if self.mxfp4 else size
        self.hidden = -(-hidden // 256) * 256 if self.mxfp4 else hidden
        if self.size % 64 or self.hidden % 64:
            raise ValueError(f"Marlin takes multiples of 64, not experts of {size} x {hidden}")
        self.experts = len(source.gate)
        first, second = [], []
        for gate, up, down in zip(source.gate, source.up, source.down, strict=True):
            both = [padded(q, self.size, self.hidden) for q in (gate, up)]
            first.append(self._packed(*(torch.cat(part) for part in zip(*both, strict=True))))
            second.append(self._packed(*padded(down, self.hidden, self.size)))
        self.weights: dict[str, Any] = {}
        for name, packed in (("first", first), ("second", second)):
            codes, scales = zip(*packed, strict=True)
            self.weights |= {name: torch.stack(codes), f"{name}_scale": torch.stack(scales)}
        if source.gate_up_bias is not None and source.down_bias is not None:
            parts = (pad(part, (0, self.size - size)) for part in source.gate_up_bias.chunk(2, 1))
            biases = torch.cat([*parts], 1), pad(source.down_bias, (0, self.hidden - hidden))
            for name, bias in zip(("first", "second"), biases, strict=True):
                self.weights[f"{name}_bias"] = torch.stack([pack_bias(row) for row in bias]).bfloat16()
        device = source.down[0].codes.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.locks = torch.zeros(4 * sms, dtype=torch.int32, device=device)

    def _packed(self, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return pack_codes(codes), pack_exponents(scale) if self.mxfp4 else pack_scales(scale, torch.bfloat16)

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        tokens, hidden = x.shape
        top_k = self.source.top_k
        slots = tokens * top_k
        rows = next((rows for rows in BLOCK_ROWS if slots / self.experts / rows < 0.9), BLOCK_ROWS[-1])
        weights, chosen = routed(logits, top_k, self.source.normalize)
        order, owners, count = aligned(chosen, self.experts, rows)

        def product(x: Tensor, name: str, n: int, top_k: int, weighted: bool) -> Tensor:
            y = torch.empty((slots, n), dtype=x.dtype, device=x.device)
            operators().moe_wna16_marlin_gemm(
                x, y, self.weights[name], self.weights.get(f"{name}_bias"), self.weights[f"{name}_scale"], None, None, None,
                None, None, self.locks, order, owners, count, weights, rows, top_k, weighted,
                FLOAT4_E2M1 if self.mxfp4 else UINT4B8, len(x), n, x.shape[1], True, False, True, False, -1, -1, -1,
            )  # fmt: skip
            return y

        if self.hidden > hidden:
            x = pad(x, (0, self.hidden - hidden))
        h = _gated(product(x, "first", 2 * self.size, top_k, False), self.source.function)
        y = product(h, "second", self.hidden, 1, True)
        return _summed(y, tokens, self.hidden)[:, :hidden] + residual


# ---- vLLM's kernels for codes in rows


class _RowExperts:
    """int4 experts with codes [E, N, K / 2] and scales [E, N, groups]; a subclass has the product."""

    kernel: str

    def __init__(self, source: Source) -> None:
        scheme = source.down[0].scheme
        own = is_int4(scheme) and source.function == "silu" and source.gate_up_bias is None
        _refuse_unless(own, f"vLLM's {self.kernel} experts", "int4 codes in groups, SiLU and no biases", scheme, source)
        assert isinstance(scheme.granularity, PerGroup)
        self.version = load()
        self.source, self.group, self.experts = source, scheme.granularity.size, len(source.gate)
        self.size, self.hidden = source.gate[0].shape
        both = [*zip(source.gate, source.up, strict=True)]
        down = [*source.down]
        self.weights: dict[str, Any] = {
            "first": torch.stack([pairs(torch.cat([gate.codes, up.codes])) for gate, up in both]),
            "first_scale": torch.stack([torch.cat([gate.scale, up.scale]) for gate, up in both]).bfloat16(),
            "second": torch.stack([pairs(q.codes) for q in down]),
            "second_scale": torch.stack([q.scale for q in down]).bfloat16(),
        }

    def rows(self, tokens: int) -> int:
        """Returns the rows of a block of sorted slots."""
        raise NotImplementedError

    def product(
        self, x: Tensor, name: str, y: Tensor, top_k: int, weights: Tensor | None, sorted_slots: tuple[Tensor, ...], rows: int
    ) -> None:
        """Computes y [slots, N] from x [T, K]; slot i reads row i / top_k."""
        raise NotImplementedError

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        tokens, top_k, rows = len(x), self.source.top_k, self.rows(len(x))
        weights, chosen = routed(logits, top_k, self.source.normalize)
        sorted_slots = aligned(chosen, self.experts, rows)
        both = x.new_empty((tokens * top_k, 2 * self.size))
        self.product(x, "first", both, top_k, None, sorted_slots, rows)
        h = _gated(both, self.source.function)
        y = x.new_empty((tokens * top_k, self.hidden))
        self.product(h, "second", y, 1, weights, sorted_slots, rows)
        return _summed(y, tokens, self.hidden) + residual


class TritonExperts(_RowExperts):
    """vLLM's Triton kernel for int4 experts, as `TritonWNA16Experts` calls it, with the blocks that vLLM chooses where it has
    no tuned file; its wheel has none for int4 on an H200."""

    kernel = "fused_moe_kernel_gptq_awq"

    def rows(self, tokens: int) -> int:
        return 16 if tokens <= 20 else 32 if tokens <= 40 else 64

    def product(
        self, x: Tensor, name: str, y: Tensor, top_k: int, weights: Tensor | None, sorted_slots: tuple[Tensor, ...], rows: int
    ) -> None:
        names = ("write_zeros_to_output", "fused_moe_kernel_gptq_awq")
        kernel = functions_of(vllm_folder() / FUSED_MOE, names)
        codes, scale, order = self.weights[name], self.weights[f"{name}_scale"], sorted_slots[0]
        (_, n, _), k, slots = codes.shape, x.shape[1], len(x) * top_k
        block_n, block_k = (32, 64) if slots // top_k == 1 else (64, 32)
        most = min(len(order), slots * rows) if len(x) < rows else len(order)
        grid = (-(-most // rows) * -(-n // block_n),)
        kernel.fused_moe_kernel_gptq_awq[grid](
            x, codes, y, scale, None, weights, *sorted_slots, n, k, most, slots, *x.stride(), codes.stride(0), codes.stride(2),
            codes.stride(1), *y.stride(), scale.stride(0), scale.stride(2), scale.stride(1), 0, 0, 0,
            block_k_diviable=k % block_k == 0, group_size=self.group, BLOCK_SIZE_M=rows, BLOCK_SIZE_N=block_n,
            BLOCK_SIZE_K=block_k, GROUP_SIZE_M=1, SPLIT_K=1, MUL_ROUTED_WEIGHT=weights is not None, top_k=top_k,
            compute_type=kernel.tl.bfloat16, has_zp=False, use_int4_w4a16=True, use_int8_w8a16=False,
        )  # fmt: skip


class CudaExperts(_RowExperts):
    """vLLM's CUDA kernel for int4 experts, which `fused_experts` prefers to the Triton kernel for at most 6 slots an expert."""

    kernel = "moe_wna16_gemm"

    def rows(self, tokens: int) -> int:
        slots = tokens * self.source.top_k
        if slots / self.experts > 6:
            raise ValueError(f"vLLM's {self.kernel} is for at most 6 slots an expert, not {slots / self.experts:g}")
        return min(16, tokens)

    def product(
        self, x: Tensor, name: str, y: Tensor, top_k: int, weights: Tensor | None, sorted_slots: tuple[Tensor, ...], rows: int
    ) -> None:
        own = functions_of(vllm_folder() / FUSED_MOE, ("_ensure_block_size_k_divisible", "get_moe_wna16_block_config"))
        codes, n = self.weights[name], self.weights[name].shape[1]
        blocks = own.get_moe_wna16_block_config(  # vLLM gives N as the number of experts
            config={"BLOCK_SIZE_M": rows}, use_moe_wna16_cuda=True, num_valid_tokens=len(x) * top_k, size_k=x.shape[1],
            size_n=n, num_experts=n, group_size=self.group, real_top_k=top_k, block_size_m=rows,
        )  # fmt: skip
        operators().moe_wna16_gemm(
            x, y, codes, self.weights[f"{name}_scale"], None, weights, *sorted_slots, top_k, rows, blocks["BLOCK_SIZE_N"],
            blocks["BLOCK_SIZE_K"], 4,
        )  # fmt: skip


# ---- the Triton kernels package


class TritonKernelsExperts:
    """The Triton kernels package in vLLM's wheel, which vLLM takes for gpt-oss's MXFP4 on Hopper: `matmul_ogs` with routing,
    gather, clamped SwiGLU and weighted scatter inside, as `triton_kernel_moe_forward` calls it. Sizes are not padded."""

    kernel = "triton_kernels.matmul_ogs"

    def __init__(self, source: Source) -> None:
        scheme = source.down[0].scheme
        own = is_mxfp4(scheme) and source.function == "clamped_swiglu" and source.gate_up_bias is not None
        what = "MXFP4, the clamped SwiGLU and biases"
        _refuse_unless(own, "the experts of vLLM's Triton kernels package", what, scheme, source)
        assert source.gate_up_bias is not None and source.down_bias is not None
        self.version = vllm_version(vllm_folder())
        self.source = source
        self.swiglu, self.ogs = (_triton_kernels(name) for name in ("swiglu", "matmul_ogs"))
        both = zip(source.gate, source.up, strict=True)
        alternating = [(_alternating(a.codes, b.codes), _alternating(a.scale, b.scale)) for a, b in both]
        bias = _alternating(*source.gate_up_bias.T.chunk(2)).T
        self.weights: dict[str, Any] = {
            "first": self._swizzled(alternating), "first_bias": bias.float().contiguous(),
            "second": self._swizzled([(q.codes, q.scale) for q in source.down]), "second_bias": source.down_bias.float(),
        }  # fmt: skip

    def _swizzled(self, matrices: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        """Returns the codes and the configuration with the scales, both in the package's layout (vLLM's _swizzle_mxfp4)."""
        flags, numerics, tensor, layout = (
            _triton_kernels(name) for name in ("matmul_ogs_details.opt_flags", "numerics", "tensor", "tensor_details.layout")
        )
        flags.update_opt_flags_constraints({"split_k": 1})
        codes = torch.stack([pairs(codes) for codes, _ in matrices]).transpose(-2, -1)
        scale = torch.stack([exponents(scale) for _, scale in matrices]).transpose(-2, -1)
        value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        value = tensor.convert_layout(tensor.wrap_torch_tensor(codes, dtype=tensor.FP4), value_layout, **value_options)
        scale = tensor.convert_layout(tensor.wrap_torch_tensor(scale), scale_layout, **scale_options)
        flex = self.ogs.FlexCtx(rhs_data=numerics.InFlexData())
        return value, self.ogs.PrecisionConfig(weight_scale=scale, flex_ctx=flex)

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        (tokens, hidden), top_k = x.shape, self.source.top_k
        size = self.source.gate[0].shape[0]
        routing, gather, scatter = _triton_kernels("routing").routing(logits, top_k, sm_first=not self.source.normalize)
        specs = self.ogs.FnSpecs("swiglu", self.swiglu.swiglu_fn, ("alpha", "limit"))
        h, y = x.new_empty((1, tokens * top_k, size)), x.new_empty((1, tokens, hidden))
        first, precision = self.weights["first"]
        self.ogs.matmul_ogs(
            x, first, self.weights["first_bias"], routing, gather_indx=gather, precision_config=precision,
            fused_activation=self.ogs.FusedActivation(specs, (1.702, 7.0), 2), y=h,
        )  # fmt: skip
        second, precision = self.weights["second"]
        self.ogs.matmul_ogs(
            h.view(tokens * top_k, size), second, self.weights["second_bias"], routing, scatter_indx=scatter,
            precision_config=precision, gammas=routing.gate_scal, y=y,
        )  # fmt: skip
        return y.view(tokens, hidden) + residual


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Returns rows of gate and up in turn, as in gpt-oss's files."""
    return torch.stack([gate, up], 1).flatten(0, 1)


def _triton_kernels(name: str) -> Any:
    """Imports a module of the Triton kernels package: the installed one, or the one in vLLM's wheel."""
    if importlib.util.find_spec("triton_kernels") is None:
        sys.path.append(str(vllm_folder() / "third_party"))
    return importlib.import_module(f"triton_kernels.{name}")


# ---- Humming


class HummingExperts:
    """Humming's indexed products, as vLLM's `HummingIndexedExperts` calls them, with Humming's own choice of tiles: integers
    and floats without zeros, MXFP4 with biases. vLLM routes, and sums with the router's weights."""

    kernel = "humming indexed"

    def __init__(self, source: Source) -> None:
        scheme = source.down[0].scheme
        plain = scheme.zero is ZeroPoint.NONE and source.gate_up_bias is None and source.function == "silu"
        own = scheme.activation is None and (is_mxfp4(scheme) or plain)
        what = "16-bit activations and no zeros, biases with MXFP4 alone"
        _refuse_unless(own, "Humming's experts", what, scheme, source)
        load()
        self.version = importlib.metadata.version("humming-kernels")
        self.source, self.experts = source, len(source.gate)
        both = zip(source.gate, source.up, strict=True)
        stacked = [(torch.cat([a.codes, b.codes]), torch.cat([a.scale, b.scale])) for a, b in both]
        self.layers = {
            "first": _humming_layer(stacked, scheme, source.gate_up_bias),
            "second": _humming_layer([(q.codes, q.scale) for q in source.down], scheme, source.down_bias),
        }
        self._tunings: dict[int, dict[str, dict[str, Any]]] = {}
        names = ("weight", "weight_scale", "weight_scale_2", "zero_point", "bias")
        self.weights: dict[str, Any] = {
            part: {name: value.data for name in names if (value := getattr(layer, name, None)) is not None}
            for part, layer in self.layers.items()
        }

    def tunings(self, slots: int) -> dict[str, dict[str, Any]]:
        """Returns Humming's choice of each product for a number of slots."""
        if slots not in self._tunings:
            choose = importlib.import_module("humming.tune").get_heuristics_config
            self._tunings[slots] = {}
            for part, layer in self.layers.items():
                ranges = choose(layer_config=layer.humming_config, gemm_type="indexed", device=torch.cuda.current_device())
                own = (config for low, high, config in ranges if low < slots <= high)
                self._tunings[slots][part] = dict(next(own, ranges[-1][2]))
        return self._tunings[slots]

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        forward = importlib.import_module("humming.forward").humming_forward
        (tokens, hidden), top_k = x.shape, self.source.top_k
        slots = tokens * top_k
        tunings = self.tunings(slots)
        weights, chosen = routed(logits, top_k, self.source.normalize)
        order, owners, count = aligned(chosen, self.experts, tunings["first"]["block_shape"][0])

        def product(x: Tensor, part: str, n: int, top_k: int) -> Tensor:
            y = x.new_empty((slots, n))
            forward(
                self.layers[part].humming_config, inputs=x, outputs=y, sorted_ids=order, expert_ids=owners,
                num_tokens_padded=count, locks=self.layers[part].locks, top_k=top_k, valid_shape_m=slots,
                compute_config={"gemm_type": "indexed"}, tuning_config=json.dumps(tunings[part], default=int),
                **self.weights[part],
            )  # fmt: skip
            return y

        h = _gated(product(x, "first", 2 * self.source.gate[0].shape[0], top_k), self.source.function)
        y = product(h, "second", hidden, 1)
        return weighted_sum(y.view(tokens, top_k, hidden), weights) + residual


def humming_config(scheme: Scheme) -> dict[str, Any]:
    """Returns Humming's description of a scheme of weights."""
    fmt = scheme.weight
    if is_mxfp4(scheme):
        return {"quant_method": "gpt_oss_mxfp4"}
    name = f"float{fmt.bits}e{fmt.exponent}m{fmt.mantissa}" if isinstance(fmt, FloatFormat) else f"uint{fmt.bits}"
    return {"dtype": name, "group_size": scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else 0}


def _humming_layer(matrices: Sequence[tuple[Tensor, Tensor]], scheme: Scheme, bias: Tensor | None) -> Any:
    """Returns Humming's layer of the experts' matrices, each codes [N, K] and scales; padded as in vLLM."""
    ops, layers = importlib.import_module("humming.ops"), importlib.import_module("humming.layer")
    n, k = matrices[0][0].shape
    layer = layers.HummingLayer(
        shape_n=n, shape_k=k, num_experts=len(matrices), has_bias=bias is not None, torch_dtype=torch.bfloat16,
        weight_config=humming_config(scheme), pad_n_to_multiple=256, pad_k_to_multiple=128,
    ).cuda()  # fmt: skip
    if is_mxfp4(scheme):
        tensors = {
            "weight": torch.stack([pairs(codes) for codes, _ in matrices]),
            "weight_scale": torch.stack([exponents(scale) for _, scale in matrices]),
        }
    else:
        tensors = {
            "weight": torch.stack([ops.pack_weight(codes.int(), scheme.weight.bits) for codes, _ in matrices]),
            "weight_scale": torch.stack([scale for _, scale in matrices]).bfloat16(),
        }
    layer.load_from_tensors(tensors if bias is None else {**tensors, "bias": bias.bfloat16()})
    layer.transform()
    return layer


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum over slots of y [T, top_k, N] times weights [T, top_k], by vLLM's kernel with its choice for sm_90."""
    file = vllm_folder() / "model_executor/layers/fused_moe/moe_fused_mul_sum.py"
    kernel = functions_of(file, ("moe_fused_mul_sum_kernel",)).moe_fused_mul_sum_kernel
    tokens, top_k, n = y.shape
    rows = 1 if tokens <= 4 else 2 if tokens <= 128 else 4
    columns = max(256, min(1 << math.ceil(math.log2(n)), 512))
    out = y.new_empty((tokens, n))
    kernel[(-(-n // columns), -(-tokens // rows))](
        y, weights, out, None, None, tokens, top_k * n, False, top_k, n, rows, columns,
        num_warps=max(4, min(8, rows * columns // 256)), num_stages=4 if rows * columns <= 2048 else 2,
    )  # fmt: skip
    return out


def _triton(source: Source) -> Rival:
    return (TritonKernelsExperts if is_mxfp4(source.down[0].scheme) else TritonExperts)(source)


RIVALS: dict[str, Callable[[Source], Rival]] = {
    "marlin": MarlinExperts, "triton": _triton, "wna16": CudaExperts, "humming": HummingExperts,
}  # fmt: skip
"""Rivals by the names of `--rivals`."""
