"""The base of QuantLinear and QuantEmbedding: a quantized matrix as parameters in its form on disk."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats import (
    NO_PARTS,
    InputParts,
    LowRank,
    QuantTensor,
    Scheme,
    pack_words,
    unpack_words,
)
from lowbit.nn.parameters import PackedParameters, parameter
from lowbit.ops.cpu_gemm import pack_for_cpu
from lowbit.ops.table import Problem, UnsupportedProblem, choose, problem_on, warn_slow, weight_refusals, why_slow
from lowbit.ops.workspace import make_counters
from lowbit.pack import FragmentWeight, OperandWeight
from lowbit.pack.cpu import CpuWeight
from lowbit.pack.gemm_weight import GemmWeight, RowWeight
from lowbit.pack.scaled import scaled_refusals

KERNEL_TENSORS = ("kernel_codes", "kernel_scale", "kernel_channel_scale", "kernel_sums")
"""Tensors of a weight packed for a GPU's kernels. They are buffers, because torch.compile copies other tensors into each CUDA
graph at every replay.
"""


class PackedWeight(PackedParameters):
    """A matrix [N, K] with the parameters of `PackedParameters`, packed for the kernels of its device at the first product.

    With `low_rank` r there are also `weight_up` [N, r] and `weight_down` [r, K], fp16.
    """

    weight_up: nn.Parameter | None
    weight_down: nn.Parameter | None
    kernel_codes: Tensor | None
    kernel_scale: Tensor | None
    kernel_channel_scale: Tensor | None
    kernel_sums: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int],
        scheme: str | Scheme,
        device: torch.device | str | None = None,
        *,
        input_parts: InputParts = NO_PARTS,
        low_rank: int = 0,
    ) -> None:
        super().__init__(shape, scheme, device, input_parts=input_parts)
        n, k = shape
        self._set_correction(
            parameter(torch.empty(n, low_rank, dtype=torch.float16, device=device)) if low_rank else None,
            parameter(torch.empty(low_rank, k, dtype=torch.float16, device=device)) if low_rank else None,
        )
        for name in KERNEL_TENSORS:
            self.register_buffer(name, None, persistent=False)
        self.kernel_subnormal = False
        self.cpu_weight: CpuWeight | None = None
        self.decode_bytes = 0
        self.batch_invariant = False
        self.kernel_dtypes = _kernel_dtypes(self.scheme)
        self._shared = False
        self._refused: dict[torch.dtype, tuple[str, ...]] = {}

    def _set_correction(self, up: nn.Parameter | None, down: nn.Parameter | None) -> None:
        self.register_parameter("weight_up", up)
        self.register_parameter("weight_down", down)
        self.has_correction = up is not None

    @property
    def count(self) -> int:
        """The number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def is_decoded(self) -> bool:
        """True if the dequantized weights are in memory beside the form on disk."""
        return self.cpu_weight is not None and self.cpu_weight.form == "decoded"

    @property
    def is_prepared(self) -> bool:
        """True if the weights are packed for the kernels of their device."""
        return self.kernel_codes is not None or self.cpu_weight is not None

    def prepare(self, dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
        """Packs the weights for their device's kernels and x of `dtype`: in fragment order on a GPU, for torch's GEMMs on a
        CPU. The form on disk is then dropped from memory.

        Returns the reasons why the weights cannot be packed, empty on success. Saving, moving to another device and
        `quant_tensor` restore the form on disk without loss. Tied weights keep both forms, since other modules read the form on
        disk. A CPU without a GEMM for the scheme dequantizes once if `decode_bytes`, the allowed bytes per weight, suffice
        (nn/decoding.py), and keeps the form on disk too.
        """
        if self.cpu_weight is not None and self.scheme.activation is None and self.cpu_weight.dtype != dtype:
            self.restore()
        if self.is_prepared and (self.kernel_codes is None or dtype in self.kernel_dtypes):
            return ()
        reasons = self.placement_refusals()  # checked every time, since hooks can change
        if not reasons:
            if dtype not in self._refused:
                with torch.inference_mode(False), torch.no_grad():  # the tensors outlive this call
                    self._refused[dtype] = why_slow(self.problem(dtype)) if self.is_prepared else self._prepare(dtype)
            reasons = self._refused[dtype]
        if reasons and self.weight_scale.device.type == "cuda":
            warn_slow(self.scheme_name, reasons)
        return reasons

    def clear_refusals(self) -> None:
        """Clears the cached refusals of kernels, after a change of the layer."""
        self._refused.clear()

    def problem(self, dtype: torch.dtype, m: int = 1) -> Problem:
        """Returns the problem (shape, scheme, device) of the layer's product with `m` rows of x of `dtype`."""
        return problem_on(
            self.weight_packed.device, self.scheme, m, self.shape, dtype, scale_dtype=self.weight_scale.dtype,
            batch_invariant=self.batch_invariant, decode_bytes=self.decode_bytes,
        )  # fmt: skip

    def _prepare(self, dtype: torch.dtype) -> tuple[str, ...]:
        problem = self.problem(dtype)
        form = choose(problem).form
        if form == "rows":
            return why_slow(problem)
        if form == "fragments" or form == "operands":
            make_counters(self.weight_packed.device)  # they cannot be allocated while a graph captures the first product
            self._pack_for_gpu()
        else:
            self.cpu_weight = pack_for_cpu(self._weight_alone(), form, dtype)
        if form != "decoded":
            self._drop_form_on_disk()
        return ()

    def _pack_for_gpu(self) -> None:
        q = self._weight_alone()
        self.set_gpu_weight(FragmentWeight.pack(q) if self.scheme.activation is None else OperandWeight.pack(q))

    @property
    def gpu_weight(self) -> FragmentWeight | OperandWeight | None:
        """The weights packed for a GPU's kernels; None if they are not packed."""
        if self.kernel_codes is None:
            return None
        return self.kernel_weight() if self.scheme.activation is None else self.scaled_weight()

    def set_gpu_weight(self, w: FragmentWeight | OperandWeight) -> None:
        """Makes the tensors of `w`, which must have this module's weights, the buffers that products read."""
        held = w.tensors()
        for name in KERNEL_TENSORS:
            setattr(self, name, held.get(name.removeprefix("kernel_")))
        self.kernel_subnormal = isinstance(w, FragmentWeight) and w.subnormal

    def _weight_alone(self) -> QuantTensor:
        """Returns the weights without the input transform. Raises ValueError if the transform's order would index out of
        bounds.
        """
        self.input_transform.check_values()
        return self.quant_tensor().without_input()

    def _drop_form_on_disk(self) -> None:
        if not self._shared:
            self.weight_packed = parameter(self.weight_packed.new_empty(0))

    def weight_for(self, dtype: torch.dtype) -> GemmWeight:
        """Returns the weights in the form for products with x of `dtype`; the first call packs them (`prepare`).

        Raises UnsupportedProblem for a `batch_invariant` layer without a kernel.
        """
        found = self._form_for(dtype)
        if found is None and not torch.compiler.is_compiling():
            self.prepare(dtype)
            found = self._form_for(dtype)
        return self._rows() if found is None else found

    def _form_for(self, dtype: torch.dtype) -> GemmWeight | None:
        """Returns the packed form if the weights are packed and it is for x of `dtype`; else None."""
        held = self.cpu_weight
        if held is not None:
            return held if self.scheme.activation is not None or held.dtype == dtype else None
        return self.gpu_weight if dtype in self.kernel_dtypes else None

    def _rows(self) -> RowWeight:
        """Returns the form on disk, for products without a kernel; unpacks another form if necessary."""
        if self.batch_invariant:
            raise UnsupportedProblem(f"{self.scheme}: no kernel for x of this type, or here, has batch-invariant sums")
        packed: Tensor = self.weight_packed
        if not packed.numel() and self.is_prepared:
            packed = pack_words(self._prepared_codes(), self.scheme.weight.bits)
        return RowWeight(packed, self.weight_scale, self.weight_zero, self.scheme, self.shape)

    def kernel_weight(self) -> FragmentWeight:
        """The prepared weights of a scheme with 16-bit activations."""
        codes = self.kernel_codes
        assert codes is not None
        tensors = codes, self.kernel_scale, self.kernel_channel_scale
        return FragmentWeight(*tensors, self.scheme, self.shape, self.kernel_subnormal)

    def scaled_weight(self) -> OperandWeight:
        """The prepared weights of a scheme with 8-bit activations."""
        codes, sums = self.kernel_codes, self.kernel_sums
        assert codes is not None and sums is not None
        return OperandWeight(codes, self.kernel_scale, self.kernel_channel_scale, sums, self.scheme, self.shape)

    def _prepared_codes(self) -> Tensor:
        prepared = self.gpu_weight if self.cpu_weight is None else self.cpu_weight
        assert prepared is not None
        return prepared.unpack_codes()

    def restore(self) -> None:
        """Restores the form on disk: the inverse of `prepare`."""
        if not self.is_prepared:
            return
        if self.weight_packed.numel() == 0:
            self.weight_packed = self._form_on_disk()
        self._forget_prepared()

    def _forget_prepared(self) -> None:
        self.kernel_codes = self.kernel_scale = self.kernel_channel_scale = self.kernel_sums = None
        self.cpu_weight = None
        self._refused.clear()

    def set_weight(self, q: QuantTensor) -> None:
        """Sets weights, input transform and low-rank correction to those of `q`. Raises ValueError for another shape or
        scheme.
        """
        if q.shape != self.shape or q.scheme != self.scheme:
            raise ValueError(f"this module holds {self.scheme} {self.shape}, got {q.scheme} {q.shape}")
        self._set_input(q.input_transform)
        factors = (None, None) if q.low_rank is None else (q.low_rank.up, q.low_rank.down)
        self._set_correction(*(None if t is None else parameter(t) for t in factors))
        self._forget_prepared()
        self.weight_packed = parameter(pack_words(q.codes, q.scheme.weight.bits))
        self.weight_scale = parameter(q.scale)
        if q.zero is not None:
            self.weight_zero = parameter(q.zero)

    def share_weight(self, other: PackedWeight) -> None:
        """Ties this module to `other`: both then have the same parameters."""
        if other.shape != self.shape or other.scheme != self.scheme:
            raise ValueError(f"cannot tie {self.scheme} {self.shape} to {other.scheme} {other.shape}")
        self._set_input(other.input_transform)
        self._set_correction(other.weight_up, other.weight_down)
        other.restore()
        self.restore()
        self._shared = other._shared = True
        self.weight_packed, self.weight_scale = other.weight_packed, other.weight_scale
        if other.weight_zero is not None:
            self.weight_zero = other.weight_zero

    def quant_tensor(self) -> QuantTensor:
        """Returns the weights as codes, scales and zeros, with the input transform and the low-rank correction."""
        if self.weight_packed.numel() == 0 and self.is_prepared:
            codes = self._prepared_codes()
        else:
            codes = unpack_words(self.weight_packed.data, self.scheme.weight.bits, self.shape[1])
        up, down = self.weight_up, self.weight_down
        correction = None if up is None or down is None else LowRank(up.data, down.data)
        zero = None if self.weight_zero is None else self.weight_zero.data
        transform = self.input_transform.map(lambda t: t.data)
        return QuantTensor(codes, self.weight_scale.data, zero, self.scheme, transform, correction)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights [N, K] for the untransformed x, in `dtype`. Raises UnsupportedProblem if
        `dequantize_refusals` has reasons.
        """
        if refusals := self.dequantize_refusals():
            raise UnsupportedProblem("; ".join(refusals))
        return self.quant_tensor().dequantize(dtype)

    @property
    def weight_nbytes(self) -> int:
        """Returns the bytes of the packed weights, the input transform and the low-rank correction."""
        beside = sum(p.nbytes for p in (self.weight_up, self.weight_down, self.input_transform) if p is not None)
        if self.kernel_codes is not None:
            scaled = self.scheme.activation is not None
            return (self.scaled_weight().nbytes if scaled else self.kernel_weight().nbytes) + beside
        held = [self.weight_packed, self.weight_scale, self.weight_zero]
        form = 0 if self.cpu_weight is None else self.cpu_weight.nbytes
        return sum(p.nbytes for p in held if p is not None) + beside + form

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the form on disk, since the layout of the CPU form depends on the machine."""
        state = self.__dict__.copy()
        if self.cpu_weight is not None:
            state |= {"cpu_weight": None, "_refused": {}, "_parameters": self._parameters.copy()}
            if self.weight_packed.numel() == 0:
                state["_parameters"]["weight_packed"] = self._form_on_disk()
        return state

    def _form_on_disk(self) -> nn.Parameter:
        return parameter(pack_words(self._prepared_codes(), self.scheme.weight.bits))

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight_packed.numel() == 0 and self.is_prepared:
            # The form on disk is allocated in addition to the packed form, which a captured graph may read.
            packed = self._form_on_disk()
            destination[f"{prefix}weight_packed"] = packed if keep_vars else packed.detach()

    def _load_from_state_dict(self, state_dict, prefix, *arguments, **options):  # type: ignore[no-untyped-def]
        """Loads the form on disk; scales take the dtypes of the loaded tensors. A GPU's packed tensors are overwritten in
        place, so that captured graphs stay valid. If the new weights need other shapes or dtypes (pack/weight.py), these graphs
        must be captured again.
        """
        before = {name: getattr(self, name) for name in KERNEL_TENSORS}
        with torch.inference_mode(False), torch.no_grad():
            self.restore()
            self._adopt_types(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)
        codes, scaled = before["kernel_codes"], self.scheme.activation is not None
        if codes is None or self.weight_packed.device != codes.device:
            return
        if scaled_refusals(self.scheme, self.weight_scale.dtype) if scaled else weight_refusals(self.scheme):
            return
        with torch.inference_mode(False), torch.no_grad():
            self._pack_for_gpu()
            pairs = [(old, getattr(self, name), name) for name, old in before.items()]
            if all(_alike(old, new) for old, new, _ in pairs):
                for old, new, name in pairs:
                    setattr(self, name, old if old is None else old.copy_(new))
            else:
                warnings.warn("CUDA graphs that were captured with the previous weights must be captured again", stacklevel=2)
            self._drop_form_on_disk()

    def _exact_tensors(self) -> tuple[Tensor | None, ...]:
        """Returns those of `PackedParameters`, the factors of the low-rank correction and the kernels' tensors."""
        own = (getattr(self, name) for name in ("weight_up", "weight_down", *KERNEL_TENSORS))
        return (*super()._exact_tensors(), *own)


@functools.lru_cache(maxsize=256)
def _kernel_dtypes(scheme: Scheme) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of x that a GPU's kernels support for a scheme; all dtypes if x is quantized first."""
    halves = (torch.float16, torch.bfloat16)
    if scheme.activation is not None:
        return (*halves, torch.float32)
    return tuple(dtype for dtype in halves if not weight_refusals(scheme, dtype))


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Returns True if both have the same shape and dtype, or both are None."""
    return a is b or (a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype))
