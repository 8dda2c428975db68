"""The experts of a mixture with quantized weights: one module in place of a model's fused experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit.formats import (
    NO_PARTS,
    ExpertTensor,
    InputParts,
    QuantTensor,
    Scheme,
    pack_words,
    unpack_words,
)
from lowbit.nn.parameters import PackedParameters, parameter
from lowbit.ops.cpu_gemm import pack_for_cpu
from lowbit.ops.experts import Gate, Input, Multiply, expert_mlp, multiply_experts
from lowbit.ops.gemm import gemm
from lowbit.ops.table import Form, Problem, UnsupportedProblem, choose, problem_on, warn_slow, weight_refusals, why_slow
from lowbit.ops.workspace import make_counters
from lowbit.pack import ExpertOperandWeight, ExpertWeight
from lowbit.pack.form import PackedMatrix
from lowbit.pack.gated import HALF, alternate, with_scales_of_rows
from lowbit.pack.gemm_weight import GemmWeight, RowWeight

if TYPE_CHECKING:
    from lowbit.ops.route import Routing

KERNEL_TENSORS = ("kernel_codes", "kernel_scale", "kernel_channel_scale", "kernel_sums")
"""Buffers of the weights in the form of a GPU's expert kernels. Buffers, because torch.compile copies other tensors into each
CUDA graph at every replay."""

_FIRST = ("gate_up_proj", "up_proj")
_SECOND = "down_proj"


class PackedExperts(PackedParameters):
    """One of the two matrices [N, K] of a layer's experts, for all E experts, with the parameters of `PackedParameters`.

    The experts share the input transform. The first product packs the matrices for the device. On a CPU each matrix gets the
    form that `QuantLinear` has there. On a GPU all get one `pack.expert.ExpertWeight`, or with 8-bit activations one
    `pack.expert_operand.ExpertOperandWeight`. Matrices that these forms do not support stay in the form on disk. row_order:
    int64 [N]; row i of an `ExpertWeight` is row row_order[i] of the matrix. None keeps the matrix's own order, as an
    `ExpertOperandWeight` always does.
    """

    kernel_codes: Tensor | None
    kernel_scale: Tensor | None
    kernel_channel_scale: Tensor | None
    kernel_sums: Tensor | None

    def __init__(
        self,
        experts: int,
        shape: tuple[int, int],
        scheme: str | Scheme,
        device: torch.device | str | None = None,
        *,
        input_parts: InputParts = NO_PARTS,
    ) -> None:
        super().__init__(shape, scheme, device, input_parts=input_parts, experts=experts)
        self.experts = experts
        self.decode_bytes = 0
        self.row_order: Tensor | None = None
        self._form: Form = "rows"
        self._packed_for: torch.dtype | None = None
        for name in KERNEL_TENSORS:
            self.register_buffer(name, None, persistent=False)
        self._matrices: list[GemmWeight] | None = None
        self._stacked: PackedMatrix | None = None  # of all experts; its tensors are the buffers
        self._rows: Tensor | None = None  # row i of the packed form is row _rows[i] of the matrix

    @classmethod
    def from_expert_tensor(cls, q: ExpertTensor) -> PackedExperts:
        """The module with the weights `q`."""
        module = cls(q.experts, q.shape, q.scheme, device="meta")
        module.set_weight(q)
        return module

    def set_weight(self, q: ExpertTensor) -> None:
        """Sets the weights and the input transform to those of `q`. Raises ValueError for another shape or scheme."""
        if (q.experts, q.shape, q.scheme) != (self.experts, self.shape, self.scheme):
            raise ValueError(f"these are {self.experts} x {self.scheme} {self.shape}, got {q.experts} x {q.scheme} {q.shape}")
        self._set_input(q.input_transform)
        self._forget_prepared()
        self.weight_packed = parameter(q.packed)
        self.weight_scale = parameter(q.scale)
        if q.zero is not None:
            self.weight_zero = parameter(q.zero)

    def expert_tensor(self) -> ExpertTensor:
        """The weights as packed codes, scales and zeros, with the input transform."""
        zero = None if self.weight_zero is None else self.weight_zero.data
        transform = self.input_transform.map(lambda t: t.data)
        return ExpertTensor(self._packed_codes(), self.weight_scale.data, zero, self.scheme, self.shape, transform)

    def expert(self, e: int) -> QuantTensor:
        """The matrix of expert `e`, with the input transform."""
        if self.weight_packed.numel() or not self.is_prepared:
            codes = unpack_words(self.weight_packed[e].data, self.scheme.weight.bits, self.shape[1])
        else:
            codes = self._prepared_codes(e)
        zero = None if self.weight_zero is None else self.weight_zero[e].data
        transform = self.input_transform.map(lambda t: t.data)
        return QuantTensor(codes, self.weight_scale[e].data, zero, self.scheme, transform)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the packed weights and everything beside them."""
        forms: list[PackedMatrix] = [] if self._matrices is None else list(self._matrices)
        forms += [] if self._stacked is None else [self._stacked]
        held = [self.weight_packed, self.weight_scale, self.weight_zero, self.input_transform]
        stored = sum(t.nbytes for t in held if t is not None)
        return stored + sum(form.nbytes for form in forms if not isinstance(form, RowWeight))

    @property
    def count(self) -> int:
        """The number of weights of all experts."""
        return self.experts * self.shape[0] * self.shape[1]

    @property
    def is_decoded(self) -> bool:
        """True if dequantized weights are in memory beside the form on disk."""
        return self.is_prepared and self._form == "decoded"

    @property
    def is_prepared(self) -> bool:
        return self._matrices is not None or self._stacked is not None

    def problem(self, dtype: torch.dtype, m: int = 1) -> Problem:
        """The product of `m` rows of x of `dtype` with the matrix of one expert, on the device of the weights."""
        return problem_on(
            self.weight_scale.device, self.scheme, m, self.shape, dtype, scale_dtype=self.weight_scale.dtype,
            decode_bytes=self.decode_bytes,
        )  # fmt: skip

    def clear_refusals(self) -> None:
        """Makes the next product check again whether the packed form suits its x. Needed after a change of the module."""
        self._packed_for = None

    def forms_for(self, dtype: torch.dtype) -> Any:
        """Returns the weights in the form for products with x of `dtype`: one weight of all experts, or a list with a matrix
        for each expert. The first call packs them. Raises UnsupportedProblem for weights that Accelerate has offloaded."""
        if self.is_prepared and self._packed_for != dtype and not self._fits(dtype):
            self.restore()
        if not self.is_prepared:
            if self.weight_scale.is_meta:
                raise UnsupportedProblem("Accelerate has offloaded the weights of experts: load the model without offloading")
            with torch.inference_mode(False), torch.no_grad():  # the tensors outlive this call
                self._prepare(dtype)
        self._packed_for = dtype
        return self._matrices if self._stacked is None else self._stacked_weight()

    @property
    def packed_rows(self) -> Tensor | None:
        """Row i of the packed form is row packed_rows[i] of the matrix, int64 [N]; None for the matrix's own order."""
        return self._rows

    def multiply(self, e: int, x: Input, bias: Tensor | None = None) -> Tensor:
        """Returns y [M, N] = x [M, K] times the matrix of expert `e`, plus bias [N]. x has the input transform applied."""
        form = self.forms_for(x.dtype)
        if isinstance(form, list):
            return gemm(x, form[e], bias)
        y = gemm(x, form.expert(e))
        if self._rows is not None:
            y = torch.empty_like(y).index_copy_(1, self._rows, y)
        return y if bias is None else y + bias.to(y.dtype)

    def _stacked_weight(self) -> Any:
        """The weight of all experts, with this module's buffers as its tensors."""
        assert self._stacked is not None
        return replace(self._stacked, **{name: getattr(self, f"kernel_{name}") for name in self._stacked.NAMES})  # type: ignore[type-var]

    def _fits(self, dtype: torch.dtype) -> bool:
        """True if the packed form is for x of `dtype`."""
        if self._stacked is not None:
            return self._form == "operands" or not weight_refusals(self.scheme, dtype)
        assert self._matrices is not None
        problem = replace(self.problem(dtype), form=None)
        return choose(problem).form == self._form and (self._form != "decoded" or self._matrices[0].codes.dtype == dtype)

    def _prepare(self, dtype: torch.dtype) -> None:
        problem = self.problem(dtype)
        self._form = choose(problem).form
        reasons = why_slow(problem) if self._form == "rows" else self.placement_refusals()
        if reasons:
            self._form = "rows"
            if self.weight_scale.device.type == "cuda":
                warn_slow(self.scheme_name, reasons)
        if self._form in ("fragments", "operands"):
            make_counters(self.weight_scale.device)  # a graph that captures the first product cannot allocate them
        q = self.expert_tensor().without_input()
        if self._form in ("fragments", "operands"):
            self._pack_stacked(q)
        else:
            self._matrices = [self._matrix(q, e, dtype) for e in range(self.experts)]
        if self._form not in ("rows", "decoded"):
            self.weight_packed = parameter(self.weight_packed.new_empty(0))

    def _pack_stacked(self, q: ExpertTensor) -> None:
        if self._form == "operands":
            self._stacked = ExpertOperandWeight.pack(_Matrices(q, None))
        else:
            rows = None if self.row_order is None else self.row_order.to(q.packed.device)
            self._stacked, self._rows = ExpertWeight.pack(_Matrices(q, rows)), rows
        held = self._stacked.tensors()
        for name in KERNEL_TENSORS:
            setattr(self, name, held.get(name.removeprefix("kernel_")))

    def _matrix(self, q: ExpertTensor, e: int, dtype: torch.dtype) -> GemmWeight:
        match self._form:
            case "rows":
                zero = None if q.zero is None else q.zero[e]
                return RowWeight(q.packed[e], q.scale[e], zero, q.scheme, q.shape)
            case "int4" | "int8" | "decoded":
                return pack_for_cpu(q.expert(e), self._form, dtype)
            case "fragments" | "operands":
                raise AssertionError("all experts are one weight")

    def _packed_codes(self) -> Tensor:
        """The codes in the form on disk; packs them again if only the kernels' form is in memory."""
        if self.weight_packed.numel() or not self.is_prepared:
            return self.weight_packed.data
        packed = torch.empty(self._stored_shape, dtype=torch.uint8, device=self.weight_scale.device)
        for e in range(self.experts):
            packed[e] = pack_words(self._prepared_codes(e), self.scheme.weight.bits)
        return packed

    def _prepared_codes(self, e: int) -> Tensor:
        """The codes uint8 [N, K] of an expert whose form on disk was dropped."""
        if self._matrices is not None:
            return self._matrices[e].unpack_codes()
        codes: Tensor = self._stacked_weight().expert(e).unpack_codes()
        return codes if self._rows is None else torch.empty_like(codes).index_copy_(0, self._rows, codes)

    def restore(self) -> None:
        if not self.is_prepared:
            return
        if self.weight_packed.numel() == 0:
            self.weight_packed = parameter(self._packed_codes())
        self._forget_prepared()

    def _forget_prepared(self) -> None:
        self._matrices = self._stacked = self._rows = None
        for name in KERNEL_TENSORS:
            setattr(self, name, None)

    def transformed(self, x: Tensor) -> Input:
        """x [.., K] after the input transform: rotated, scaled and, under a scheme with 8-bit activations, quantized."""
        return self.after_rotation(self.rotated(x))

    def _exact_tensors(self) -> tuple[Tensor | None, ...]:
        return (*super()._exact_tensors(), *(getattr(self, name) for name in KERNEL_TENSORS))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the form on disk, since the kernels' forms depend on the machine."""
        state = self.__dict__.copy()
        if self.is_prepared:
            state |= {"_matrices": None, "_stacked": None, "_rows": None}
            state["_parameters"] = self._parameters | {"weight_packed": parameter(self._packed_codes())}
            state["_buffers"] = dict.fromkeys(self._buffers)
        return state

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight_packed.numel() == 0 and self.is_prepared:
            packed = parameter(self._packed_codes())
            destination[f"{prefix}weight_packed"] = packed if keep_vars else packed.detach()

    def _load_from_state_dict(self, state_dict, prefix, *arguments, **options):  # type: ignore[no-untyped-def]
        """Loads the form on disk; the next product packs it for kernels again. Scales take the dtypes of the loaded tensors."""
        with torch.inference_mode(False), torch.no_grad():
            self.restore()
            self._adopt_types(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)

    def extra_repr(self) -> str:
        return f"{self.experts} x {list(self.shape)}, {self.scheme}"


class _Matrices(Sequence[QuantTensor]):
    """The matrices of the experts, unpacked one at a time when they are read, with their rows in another order."""

    def __init__(self, q: ExpertTensor, rows: Tensor | None) -> None:
        self.q, self.rows = q, rows

    def __len__(self) -> int:
        return self.q.experts

    def __getitem__(self, e: int) -> QuantTensor:  # type: ignore[override]
        if not 0 <= e < len(self):
            raise IndexError(e)
        q = self.q.expert(e)
        if self.rows is None:
            return q
        q = with_scales_of_rows(q)
        zero = None if q.zero is None else q.zero[self.rows]
        return QuantTensor(q.codes[self.rows], q.scale[self.rows], zero, q.scheme)


@dataclass(frozen=True)
class GateRule:
    """How a model combines gate and up, the outputs of the experts' first product. `kind` names a function that an epilogue can
    compute; "none" is any other function.

    interleaved: rows of gate and up alternate in the model's matrix, instead of all rows of gate before those of up.
    """

    kind: Gate
    interleaved: bool = False

    def rows(self, n: int) -> Tensor | None:
        """Returns the order of the N rows that an epilogue with this gate needs: 8 rows of gate alternate with 8 of up.

        None if the rows keep their order, because no epilogue has this gate or `n` is no multiple of 16."""
        if self.kind == "none" or n % (2 * HALF):
            return None
        numbers = torch.arange(n, device="cpu")
        pairs = (numbers[::2], numbers[1::2]) if self.interleaved else numbers.chunk(2)
        return alternate(*pairs)


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.gelu(gate, approximate="tanh") * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_GATES: dict[Gate, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu, "gelu_tanh": _gelu_tanh, "clamped_swiglu": _clamped_swiglu,
}  # fmt: skip


def gate_rule(apply_gate: Callable[[Tensor], Tensor]) -> GateRule:
    """Returns the rule of a model's gate. It is recognised by the values that `apply_gate` computes, because names of classes
    and options differ from model to model."""
    values = (torch.linspace(-12, 12, 25, device="cpu"), torch.linspace(-9, 9, 19, device="cpu"))
    gate, up = (t.flatten() for t in torch.meshgrid(*values, indexing="ij"))
    for interleaved in (False, True):
        rows = torch.stack((gate, up), dim=-1).flatten() if interleaved else torch.cat((gate, up))
        y = apply_gate(rows[None])[0]
        for kind, function in _GATES.items():
            if y.shape == gate.shape and torch.allclose(y, function(gate, up), rtol=1e-4, atol=1e-5):
                return GateRule(kind, interleaved)
    return GateRule("none")


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a model's fused experts: `first` (gate and up, or up alone) and `second`, names of parameters.

    shapes: (N, K) of one expert by name. transposed: the model's parameters are [E, K, N].
    """

    experts: int
    first: str
    second: str
    shapes: Mapping[str, tuple[int, int]]
    transposed: bool

    def matrices(self, weight: Tensor) -> Tensor:
        """Returns a parameter of the model, of one expert or all, as matrices [.., N, K]."""
        return weight.transpose(-1, -2) if self.transposed else weight


def expert_weights(module: nn.Module) -> ExpertWeights | None:
    """Returns the weights of a module that has Transformers' interface of experts; None for any other module.

    Such a module has the parameters gate_up_proj or up_proj, and down_proj, with a leading dimension E, and the attributes that
    `transformers.integrations.use_experts_implementation` sets.
    """
    own = dict(module.named_parameters(recurse=False))
    first = next((name for name in _FIRST if name in own), None)
    if first is None or _SECOND not in own or not hasattr(module, "is_transposed"):
        return None
    up, down = own[first], own[_SECOND]
    if up.dim() != 3 or down.dim() != 3 or len(up) != len(down):
        return None
    transposed = bool(module.is_transposed)
    shapes = {name: _matrix_shape(t, transposed) for name, t in ((first, up), (_SECOND, down))}
    return ExpertWeights(len(up), first, _SECOND, shapes, transposed)


def _matrix_shape(weight: Tensor, transposed: bool) -> tuple[int, int]:
    n, k = weight.shape[1:]
    return (k, n) if transposed else (n, k)


def expert_refusals(module: nn.Module, weights: ExpertWeights) -> tuple[str, ...]:
    """Returns the reasons why `QuantExperts` cannot compute what a module of experts does; empty if it can."""
    reasons = []
    if getattr(module, "has_post_expert_norm", False):
        reasons.append("a norm follows each expert")
    known = {name for part in (weights.first, weights.second) for name in (part, f"{part}_bias")}
    others = [name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name not in known]
    if others:
        reasons.append(f"its experts have {', '.join(others)} too")
    up, down = (weights.shapes[name] for name in (weights.first, weights.second))
    halves = 2 if weights.first == "gate_up_proj" else 1
    if up[0] != halves * down[1]:
        reasons.append(f"{weights.first} has {up[0]} outputs, {weights.second} {down[1]} inputs")
    return tuple(reasons)


class QuantExperts(nn.Module):
    """Quantized experts with the interface of Transformers' experts. The inputs are hidden states [T, H], the indices of each
    token's experts [T, top_k] and the router's weights of these experts [T, top_k]; the output is y [T, H].

    The weights of the original module become submodules of the same names (`PackedExperts`); its biases stay parameters. The
    router is not part of the module. Gradients reach the hidden states, the router's weights and the biases, never the packed
    weights. For the gradient, backward dequantizes the matrix of one expert at a time.
    """

    def __init__(self, original: nn.Module, packed: Mapping[str, PackedExperts]) -> None:
        """original: the module that is replaced. packed: its weights by name."""
        super().__init__()
        weights = expert_weights(original)
        assert weights is not None
        self.weights = weights
        for name in (weights.first, weights.second):
            self.add_module(name, packed[name])
            self.register_parameter(f"{name}_bias", getattr(original, f"{name}_bias", None))
        # The original computes the gate, and `dequantized` returns a module of its class. Inside a tuple it is no submodule.
        self._original = (_without_weights(original),)
        self.gate = gate_rule(self._apply_gate) if weights.first == "gate_up_proj" else GateRule("none")
        packed[weights.first].row_order = self.gate.rows(packed[weights.first].shape[0])
        self.num_experts = weights.experts
        self.batch_invariant = False

    @property
    def original(self) -> nn.Module:
        """The original module with its parameters on the meta device."""
        return self._original[0]

    def packed(self) -> dict[str, PackedExperts]:
        """The quantized weights by the name of the original's parameter."""
        return {name: self.get_submodule(name) for name in (self.weights.first, self.weights.second)}  # type: ignore[misc]

    def set_weights(self, name: str, new: PackedExperts) -> PackedExperts:
        """Replaces the weights `name`, which may have another scheme than before, and returns them."""
        new.row_order = self.gate.rows(new.shape[0]) if name == self.weights.first else None
        self.add_module(name, new.train(self.training))
        return new

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, routing: Routing | None = None
    ) -> Tensor:
        """Returns y [.., H]. routing: what `ops.route` returned on a GPU for these experts and weights, if it was called."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        first, second = self.packed().values()
        biases = self._biases()
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, top_k_weights, *biases)):
            return self._differentiable(x, top_k_index, top_k_weights).reshape(hidden_states.shape)
        up, down = first.forms_for(x.dtype), second.forms_for(x.dtype)
        if isinstance(up, list) != isinstance(down, list):  # the kernels of experts take only one of the two matrices
            products = [_with_bias(part, bias) for part, bias in zip((first, second), biases, strict=True)]
            y = self.one_by_one(first.transformed(x), top_k_index, top_k_weights, products, second.transformed)
            return y.reshape(hidden_states.shape)
        rows = first.packed_rows
        y = expert_mlp(
            first.transformed(x), top_k_index, top_k_weights, up, down, gate="none" if rows is None else self.gate.kind,
            apply_gate=self._apply_gate, gate_up_bias=biases[0] if rows is None or biases[0] is None else biases[0][:, rows],
            down_bias=biases[1], inner=second.transformed, routing=routing,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return y.reshape(hidden_states.shape)

    def batch_invariant_refusals(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Returns the reasons why no kernel computes rows with the same bits in every batch, for x of `dtype`."""
        for name, part in self.packed().items():
            if not part.weight_scale.is_cuda:
                return (f"{name} is on a CPU, whose sums depend on the batch",)
            if why_slow(part.problem(dtype)):
                return (f"{name}: the kernels of experts do not take {part.scheme} with x of {dtype}",)
        return ()

    def _biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases [E, N] of both products."""
        return getattr(self, f"{self.weights.first}_bias"), getattr(self, f"{self.weights.second}_bias")

    def _apply_gate(self, y: Tensor) -> Tensor:
        """Applies the original's gate or activation function to the outputs of the first product."""
        original: Any = self.original
        gated: Tensor = original._apply_gate(y) if self.weights.first == "gate_up_proj" else original.act_fn(y)
        return gated

    def _differentiable(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`forward` with gradients of x, of the router's weights and of the biases."""
        products = [_with_gradient(part, bias) for part, bias in zip(self.packed().values(), self._biases(), strict=True)]
        return self.one_by_one(x, experts, weights, products)

    def one_by_one(
        self, x: Input, experts: Tensor, weights: Tensor, products: Sequence[Multiply],
        inner: Callable[[Tensor], Input] | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns y [T, H] as `forward` does, computed one expert after another. products: the first and the second product
        with their biases, as functions of an expert's index and its rows. inner: applied to the rows after the gate, before
        the second product."""
        first, second = products
        return multiply_experts(x, experts, weights, self.num_experts, first, self._apply_gate, second, inner=inner)

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """A module of the original class with the weights in `dtype`. Raises UnsupportedProblem for weights that are split or
        offloaded."""
        restored = _without_weights(self.original)
        for name, part in self.packed().items():
            weight = self.weights.matrices(part.expert_tensor().dequantize(dtype)).contiguous()
            setattr(restored, name, nn.Parameter(weight))
            bias = getattr(self, f"{name}_bias")
            if bias is not None:
                setattr(restored, f"{name}_bias", nn.Parameter(bias.detach().clone(), bias.requires_grad))
        return restored.train(self.training)


def _without_weights(module: nn.Module) -> nn.Module:
    """Returns a copy of a module of experts whose parameters are on the meta device."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__ = {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
    for name, held in module.named_parameters(recurse=False):
        copied._parameters[name] = nn.Parameter(torch.empty_like(held, device="meta"), requires_grad=False)
    return copied


def _with_bias(part: PackedExperts, bias: Tensor | None) -> Multiply:
    """Returns the function that multiplies transformed rows by an expert's matrix."""
    return lambda e, x: part.multiply(e, x, None if bias is None else bias[e])


def _with_gradient(part: PackedExperts, bias: Tensor | None) -> Multiply:
    """Returns the function that transforms rows and multiplies them by an expert's matrix, with gradients of rows and bias."""

    def multiply(e: int, x: Input) -> Tensor:
        y: Tensor = _Product.apply(x, None if bias is None else bias[e], part, e)
        return y

    return multiply


class _Product(torch.autograd.Function):
    """The product of rows with the matrix of one expert, with gradients of the rows and of the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, part: PackedExperts, e: int) -> Tensor:
        ctx.part, ctx.e, ctx.bias_dtype = part, e, None if bias is None else bias.dtype
        return part.multiply(e, part.transformed(x), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ ctx.part.expert(ctx.e).dequantize(gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return of_x, of_bias, None, None
