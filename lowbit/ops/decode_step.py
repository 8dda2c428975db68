"""All layers of a decode step of a few tokens in one launch (kernels/sm90/decode_step.py), in place of five launches a layer.

The launch replaces the products and the attention between the embedding, with its sums of squares, and the LM head; x, squares,
gammas and factors are those of ops/fused_gemm.py. It is no torch operator: it holds the addresses of all weights and pages, as
a captured graph does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.formats.kv import KVScheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.choose.decode_step import (
    BLOCK_K,
    FIELDS,
    PRODUCT_NAMES,
    TOKENS,
    StepShape,
    step_refusals,
    step_table,
    wait_of,
)
from lowbit.ops.operands import triton_refusals
from lowbit.ops.register import on_device_of_first
from lowbit.pack import FragmentWeight
from lowbit.pack.kv_pages import KVPages

if TYPE_CHECKING:
    from lowbit.kernels.parts.epilogue import Gate
    from lowbit.kernels.sm90.decode_step import StepPlan


@dataclass(frozen=True, eq=False)
class StepLayer:
    """A decoder layer of the launch.

    products: weights of qkv, o, gate-up (alternating rows) and down. biases: theirs, in the same order, in any floating type.
    factors: of x before qkv and before gate-up, powers of two (`fused_gemm.factor_of`). mlp_gamma [H]: weights of the norm
    before the MLP times the factor before gate-up; next_gamma [H]: those of the next layer's first norm, or of the final norm,
    times its factor. cos_sin float32 [positions, head_dim]. q_gamma and k_gamma [head_dim]: of norms of heads of q and k.
    """

    products: tuple[FragmentWeight, FragmentWeight, FragmentWeight, FragmentWeight]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    factors: tuple[float, float]
    mlp_gamma: Tensor
    next_gamma: Tensor
    cos_sin: Tensor
    q_gamma: Tensor | None = None
    k_gamma: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What all layers of a launch have in common: forms of weights, which biases and norms of heads there are."""
        forms = {w.form for w in self.products}
        return forms, [bias is not None for bias in self.biases], self.q_gamma is not None, self.k_gamma is not None


def decode_step_refusals(
    layers: Sequence[StepLayer], attention: AttentionShape, dtype: torch.dtype, kv: KVScheme, device: torch.device
) -> tuple[str, ...]:
    """Returns the reasons why no launch computes layers of one attention shape; empty if one does, at least for one token."""
    if device.type != "cuda":
        return ("one launch a step runs on a GPU, not on a CPU",)
    reasons = [*triton_refusals()]
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"one launch a step computes in fp16 and bf16, not in {dtype}")
    if kv.quantized:
        reasons.append(f"one launch a step takes keys and values in 16 bits, not in {kv}")
    return (*reasons, *_layer_refusals(layers), *_token_refusals(layers, attention, 1, machine_of(device)))


def _layer_refusals(layers: Sequence[StepLayer]) -> list[str]:
    reasons = []
    forms = {w.form for layer in layers for w in layer.products}
    if len(forms) > 1:
        schemes = sorted({str(w.scheme) for layer in layers for w in layer.products})
        reasons.append(f"one launch a step takes weights of one form, got {len(forms)} forms of {', '.join(schemes)}")
    elif any(layer.kind != layers[0].kind for layer in layers):
        reasons.append("one launch a step takes layers that all have the same biases and norms of heads")
    return reasons


def _token_refusals(layers: Sequence[StepLayer], attention: AttentionShape, tokens: int, machine: Machine) -> tuple[str, ...]:
    return step_refusals(_shape(layers, attention, tokens), machine)


def _shape(layers: Sequence[StepLayer], attention: AttentionShape, tokens: int) -> StepShape:
    w = layers[0].products[0]
    k_blocks = -(-w.shape[1] // BLOCK_K)
    scale_bytes = 0 if w.scale is None else w.scale[0].numel() * w.scale.element_size() // k_blocks
    hidden, intermediate = layers[0].products[3].shape
    return StepShape(len(layers), hidden, intermediate, attention, tokens, w.scheme.weight.bits, scale_bytes)


class DecodeStepLaunch:
    """The layers of a decoder in one launch. `bind` must be called with the pages of keys and values before the first step, and
    before a capture. One step at a time: the steps of an instance share memory.

    Args:
        gate: the activation of the gates.
        eps: of the norms.

    Raises ValueError with `decode_step_refusals`, if there are any.
    """

    def __init__(
        self, layers: Sequence[StepLayer], attention: AttentionShape, dtype: torch.dtype, kv: KVScheme, gate: Gate, eps: float
    ) -> None:
        self.device = layers[0].mlp_gamma.device
        reasons = decode_step_refusals(layers, attention, dtype, kv, self.device)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.layers, self.attention, self.dtype, self.gate, self.eps = tuple(layers), attention, dtype, gate, eps
        machine = machine_of(self.device)
        self.tokens = tuple(m for m in TOKENS if not _token_refusals(layers, attention, m, machine))
        """Numbers of tokens of the steps that the launch computes."""
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        """0, or what a block waited for too long, for `failure`; no step clears it."""
        self._pages: tuple[KVPages, ...] = ()
        self._values = [_float_vectors(layer) for layer in layers]
        self._table: Tensor | None = None
        self._plans: dict[int, StepPlan] = {}
        self._vectors: dict[int, Tensor] = {}

    def is_bound(self, pages: Sequence[KVPages]) -> bool:
        """True if the last `bind` was with these pages."""
        return len(self._pages) == len(pages) and all(a is b for a, b in zip(self._pages, pages, strict=True))

    def bind(self, pages: Sequence[KVPages]) -> None:
        """Uses these pages, one for each layer; allocates what steps need."""
        self._pages = tuple(pages)
        rows = [
            [values.get(name, 0) for name in FIELDS]
            for values in (_addresses(*each) for each in zip(self.layers, self._values, pages, strict=True))
        ]
        self._table = torch.tensor(rows, dtype=torch.int64, device=self.device)
        for tokens in self.tokens:
            plan = self._plans.get(tokens) or self._plan(tokens)
            self._plans[tokens] = plan
            if tokens not in self._vectors:
                self._vectors[tokens] = torch.empty(plan.table.words, dtype=torch.int32, device=self.device)

    def _plan(self, tokens: int) -> StepPlan:
        from lowbit.kernels.sm90.decode_step import StepPlan

        first = self.layers[0]
        table = step_table(_shape(self.layers, self.attention, tokens), machine_of(self.device))
        biases = tuple(name for name, bias in zip(PRODUCT_NAMES, first.biases, strict=True) if bias is not None)
        return StepPlan(table, first.products[0].form, self.dtype, self.gate, biases, first.q_gamma is not None)

    def __call__(
        self, h: Tensor, x: Tensor, squares: Tensor, tables: Tensor, positions: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds all layers to h [M, H] in place, and appends keys and values to the pages. Returns x [M, H] and squares float32
        [parts, M] for the LM head, which the next step overwrites.

        x and squares float32 [parts, M] are those of h before the first layer (`ops.elementwise.embed_norm_squares`). tables
        int32 [slots, pages of a slot] and positions int32 [slots] are indexed by rows int32 [M]. Raises ValueError for a number
        of tokens that is not in `tokens`.
        """
        m = len(h)
        if m not in self.tokens or self._table is None:
            raise ValueError(f"one launch computes {self.tokens} tokens after `bind`, got {m}")
        made: tuple[Tensor, Tensor] = _launched(
            h, self._plans[m], self._table, self._vectors[m], x, squares, tables, positions, rows, self.status, self.eps
        )
        return made

    @staticmethod
    def failure(status: int) -> str:
        """Returns a message for a `status` that is not 0."""
        layer, wait = wait_of(status)
        return (
            f"a decode step in one launch stopped in layer {layer}: a block waited too long for {wait}. Its results and those "
            "of all later steps are wrong: make a new engine without persistent_step, and please report this"
        )


def _launch(h: Tensor, plan: StepPlan, layers: Tensor, vectors: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return plan(layers, vectors, h, *others)


_launched = on_device_of_first(_launch)


def _float_vectors(layer: StepLayer) -> dict[str, Tensor]:
    """The vectors of a layer that the kernel reads, in float32, by their names in the table."""
    vectors = {f"{name} bias": bias for name, bias in zip(PRODUCT_NAMES, layer.biases, strict=True) if bias is not None}
    vectors |= {"mlp_gamma": layer.mlp_gamma, "next_gamma": layer.next_gamma, "cos_sin": layer.cos_sin}
    norms = {"q_gamma": layer.q_gamma, "k_gamma": layer.k_gamma}
    vectors |= {name: gamma for name, gamma in norms.items() if gamma is not None}
    return {name: values.detach().float().contiguous() for name, values in vectors.items()}


def _addresses(layer: StepLayer, values: dict[str, Tensor], pages: KVPages) -> dict[str, int]:
    """A layer's row of the table."""
    tensors = {**values, "k": pages.k, "v": pages.v}
    for name, w in zip(PRODUCT_NAMES, layer.products, strict=True):
        parts = {"codes": w.codes, "scale": w.scale, "channel_scale": w.channel_scale}
        tensors |= {f"{name} {part}": tensor for part, tensor in parts.items() if tensor is not None}
    inverse = torch.tensor([1 / factor for factor in layer.factors]).view(torch.int32).tolist()
    return {name: tensor.data_ptr() for name, tensor in tensors.items()} | {"factors": inverse[0] | inverse[1] << 32}
