"""A decode step of a few tokens in one launch (kernels/sm90/decode_step.py), in place of five launches a layer.

The launch computes the embedding, all layers and the LM head; where the head's weights do not permit that, it ends with the
head's x and squares. x, squares, gammas and factors are those of ops/fused_gemm.py. It is no torch operator: it holds the
addresses of all weights and pages, as a captured graph does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.formats.kv import KVScheme
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.choose.decode_step import (
    BLOCK_K,
    LAYER_PRODUCTS,
    PRODUCT_NAMES,
    TILE_K,
    TOKENS,
    StepShape,
    UnitForm,
    faster_context,
    step_refusals,
    step_table,
    wait_of,
)
from lowbit.ops.elementwise import EmbeddingTable
from lowbit.ops.operands import triton_refusals
from lowbit.ops.register import on_device_of_first
from lowbit.pack import DenseWeight, ExpertWeight, FragmentWeight
from lowbit.pack.fragment import ROW_BLOCK
from lowbit.pack.gated import alternate
from lowbit.pack.kv_pages import KVPages
from lowbit.pack.weight import WeightForm

if TYPE_CHECKING:
    from lowbit.kernels.parts.epilogue import Gate
    from lowbit.kernels.sm90.decode_step import StepPlan

Weight = FragmentWeight | DenseWeight | ExpertWeight

MOST_FORMS = 4
"""Largest number of forms of a product's weights: the kernel has code for each."""

UNLIMITED = 1 << 30
"""A window or a context of more tokens than any."""


@dataclass(frozen=True, eq=False)
class StepRouter:
    """The router of a layer: weight [experts, H] in h's type; experts of a token are the `top_k` of the largest logits, their
    weights the softmax over all experts, or with `normalize` over the chosen ones."""

    weight: Tensor
    top_k: int
    normalize: bool

    @property
    def rule(self) -> tuple[int, int, bool]:
        """What all layers of a launch have in common."""
        return len(self.weight), self.top_k, self.normalize


@dataclass(frozen=True, eq=False)
class StepLayer:
    """A decoder layer of the launch.

    products: weights of qkv, o, gate-up (in fragment order: alternating rows) and down. biases: theirs, in the same order, in
    any floating type; that of gate-up in the order of its weight. factors: of x before qkv and before gate-up, powers of two
    (`fused_gemm.factor_of`). mlp_gamma [H]: weights of the norm before the MLP times the factor before gate-up; next_gamma [H]:
    those of the next layer's first norm, or of the final norm, times its factor. cos_sin float32 [positions, head_dim]. q_gamma
    and k_gamma [head_dim]: of norms of heads of q and k. sinks [heads]: scores without a value. window: tokens that a token
    attends to, itself included; 0: all. router: of a layer of experts, whose gate-up and down are `ExpertWeight`; else None."""

    products: tuple[Weight, Weight, Weight, Weight]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    factors: tuple[float, float]
    mlp_gamma: Tensor
    next_gamma: Tensor
    cos_sin: Tensor
    q_gamma: Tensor | None = None
    k_gamma: Tensor | None = None
    sinks: Tensor | None = None
    window: int = 0
    router: StepRouter | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What all layers of a launch have in common: which biases, norms of heads and sinks there are, and the experts."""
        values = (*self.biases, self.q_gamma, self.k_gamma, self.sinks)
        return (*(each is not None for each in values), None if self.router is None else self.router.rule)


@dataclass(frozen=True, eq=False)
class StepEnds:
    """What a launch computes before and after the layers.

    embedding: [V, H] in the type of h, or in 8 bits. embedding_scale: a factor, as in `ops.elementwise.embed_rows`. gamma [H]:
    weights of the first layer's first norm times the factor before its qkv. head [V, H]: None where the launch ends before it;
    head_bias [V] in any floating type; head_factor: of x before the head.
    """

    embedding: Tensor | EmbeddingTable
    embedding_scale: float
    gamma: Tensor
    head: Weight | None = None
    head_bias: Tensor | None = None
    head_factor: float = 1.0


def decode_step_refusals(
    layers: Sequence[StepLayer], ends: StepEnds, attention: AttentionShape, dtype: torch.dtype, kv: KVScheme,
    device: torch.device,
) -> tuple[str, ...]:  # fmt: skip
    """Returns the reasons why no launch computes a decoder of one attention shape, windows apart; empty if one does, at least
    for one token."""
    if device.type != "cuda":
        return ("one launch a step runs on a GPU, not on a CPU",)
    reasons = [*triton_refusals()]
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"one launch a step computes in fp16 and bf16, not in {dtype}")
    if kv.quantized:
        reasons.append(f"one launch a step takes keys and values in 16 bits, not in {kv}")
    reasons += _layer_refusals(layers, dtype)
    if isinstance(ends.embedding, Tensor) and ends.embedding.dtype != dtype:
        reasons.append(f"one launch a step takes an embedding in {dtype} or in 8 bits, not in {ends.embedding.dtype}")
    if reasons:
        return tuple(reasons)
    return step_refusals(_shape(layers, ends, attention, 1), machine_of(device))


def head_refusals(head: Weight, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the reasons why a launch ends before an LM head; empty if it computes the head."""
    reasons = []
    if isinstance(head, DenseWeight) and (head.shape[0] % ROW_BLOCK or head.values.dtype != dtype):
        reasons.append(
            f"a head of 16 bits has a multiple of {ROW_BLOCK} rows in {dtype}, got {head.shape[0]} in {head.values.dtype}"
        )
    if head.shape[1] % TILE_K:
        reasons.append(f"a head has a multiple of {TILE_K} columns, got {head.shape[1]}")
    return tuple(reasons)


def _layer_refusals(layers: Sequence[StepLayer], dtype: torch.dtype) -> list[str]:
    reasons = []
    for name, forms in zip(LAYER_PRODUCTS, _forms(layers), strict=True):
        if len(forms) > MOST_FORMS:
            formats = ", ".join(sorted({form.format for form in forms}))
            reasons.append(
                f"one launch a step takes {MOST_FORMS} forms of a product's weights, {name} has {len(forms)}: {formats}"
            )
    dense = {w.values.dtype for layer in layers for w in layer.products if isinstance(w, DenseWeight)} - {dtype}
    if dense:
        reasons.append(f"one launch a step takes 16-bit weights in {dtype}, not in {', '.join(map(str, dense))}")
    if any(layer.kind != layers[0].kind for layer in layers):
        reasons.append("one launch a step takes layers that all have the same biases, norms of heads, sinks and experts")
    for layer in layers:
        reasons += _router_refusals(layer, dtype)
    return list(dict.fromkeys(reasons))


def _router_refusals(layer: StepLayer, dtype: torch.dtype) -> list[str]:
    stacked = [isinstance(w, ExpertWeight) for w in layer.products]
    if layer.router is None:
        return ["one launch a step takes experts with their router"] if any(stacked) else []
    reasons, weight = [], layer.router.weight
    if stacked != [False, False, True, True]:
        reasons.append("one launch a step takes gate-up and down of all experts as one weight each (ExpertWeight)")
    if layer.biases[2] is not None or layer.biases[3] is not None:
        reasons.append("one launch a step takes experts without biases")
    if weight.dtype != dtype or not weight.is_contiguous() or weight.data_ptr() % 8:
        kind = f"{weight.dtype} at {weight.data_ptr() % 8} bytes from that"
        reasons.append(f"one launch a step takes a router in {dtype} without gaps, at a multiple of 8 bytes, not {kind}")
    return reasons


def _forms(layers: Sequence[StepLayer]) -> list[tuple[WeightForm, ...]]:
    """The different forms of each product's weights, in the order in which layers have them."""
    return [tuple(dict.fromkeys(layer.products[i].form for layer in layers)) for i in range(len(LAYER_PRODUCTS))]


def unit_form(w: Weight) -> UnitForm:
    """Returns the bytes of a unit of a weight."""
    if isinstance(w, DenseWeight):
        return UnitForm(16)
    if isinstance(w, ExpertWeight):
        return unit_form(w.expert(0))
    k_blocks = -(-w.shape[1] // BLOCK_K)
    scale_bytes = 0 if w.scale is None else w.scale[0].numel() * w.scale.element_size() // k_blocks
    return UnitForm(w.scheme.weight.bits, scale_bytes)


def _shape(layers: Sequence[StepLayer], ends: StepEnds, attention: AttentionShape, tokens: int) -> StepShape:
    units = []
    for i in range(len(LAYER_PRODUCTS)):
        units.append(tuple({layer.products[i].form: unit_form(layer.products[i]) for layer in layers}.values()))
    units.append(() if ends.head is None else (unit_form(ends.head),))
    hidden, intermediate = layers[0].products[3].shape
    vocab = 0 if ends.head is None else ends.head.shape[0]
    windows, router = any(layer.window for layer in layers), layers[0].router
    experts, top_k = (0, 1) if router is None else (len(router.weight), router.top_k)
    return StepShape(
        len(layers), hidden, intermediate * (tokens * top_k if experts else 1), attention, tokens, tuple(units), vocab, windows,
        experts, top_k,
    )  # fmt: skip


def faster_contexts(
    layers: Sequence[StepLayer], ends: StepEnds, attention: AttentionShape, device: torch.device
) -> dict[int, int]:
    """Returns for each number of tokens the longest context at which one launch was measured to be faster; numbers without such
    a context are missing."""
    machine = machine_of(device)
    numbers = {w.scheme.weight.name for layer in layers for w in layer.products if not isinstance(w, DenseWeight)}
    number = numbers.pop() if len(numbers) == 1 else ""
    contexts = {m: faster_context(_shape(layers, ends, attention, m), machine, number) for m in TOKENS}
    return {m: context for m, context in contexts.items() if context}


class DecodeStepLaunch:
    """A decoder's step in one launch. `bind` must be called with the pages of keys and values before the first step, and before
    a capture. One step at a time: the steps of an instance share memory.

    Args:
        gate: the activation of the gates.
        eps: of the norms.
        tokens: numbers of tokens of steps to compute; others are refused.

    Raises ValueError with `decode_step_refusals`, if there are any.
    """

    def __init__(
        self, layers: Sequence[StepLayer], ends: StepEnds, attention: AttentionShape, dtype: torch.dtype, kv: KVScheme,
        gate: Gate, eps: float, tokens: Collection[int] = TOKENS,
    ) -> None:  # fmt: skip
        self.device = layers[0].mlp_gamma.device
        reasons = decode_step_refusals(layers, ends, attention, dtype, kv, self.device)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.layers, self.ends, self.attention, self.dtype, self.gate, self.eps = (
            tuple(layers), ends, attention, dtype, gate, eps,
        )  # fmt: skip
        machine = machine_of(self.device)
        self.tokens = tuple(m for m in TOKENS if m in tokens and not step_refusals(self._shape(m), machine))
        """Numbers of tokens of the steps that the launch computes."""
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        """0, or what a block waited for too long, for `failure`; no step clears it."""
        self._pages: tuple[KVPages, ...] = ()
        self._values = [_float_vectors(layer) for layer in layers]
        self._end_values = {"next_gamma": ends.gamma.detach().float().contiguous()}
        if ends.head_bias is not None:
            self._end_values["head bias"] = ends.head_bias.detach().float().contiguous()
        self._table: Tensor | None = None
        self._plans: dict[int, StepPlan] = {}
        self._vectors: dict[int, Tensor] = {}

    def _shape(self, tokens: int) -> StepShape:
        return _shape(self.layers, self.ends, self.attention, tokens)

    def is_bound(self, pages: Sequence[KVPages]) -> bool:
        """True if the last `bind` was with these pages."""
        return len(self._pages) == len(pages) and all(a is b for a, b in zip(self._pages, pages, strict=True))

    def bind(self, pages: Sequence[KVPages]) -> None:
        """Uses these pages, one for each layer; allocates what steps need."""
        self._pages, forms = tuple(pages), _forms(self.layers)
        rows = [
            _layer_row(*each, forms) for each in zip(self.layers, self._values, pages, strict=True)
        ] + [_end_row(self.ends, self._end_values)]  # fmt: skip
        numbers = [[row.get(name, 0) for name in self._shape(1).fields] for row in rows]
        self._table = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        for tokens in self.tokens:
            plan = self._plans.get(tokens) or self._plan(tokens)
            self._plans[tokens] = plan
            if tokens not in self._vectors:
                self._vectors[tokens] = torch.empty(plan.table.words, dtype=torch.int32, device=self.device)

    def _plan(self, tokens: int) -> StepPlan:
        from lowbit.kernels.sm90.decode_step import StepPlan

        first = self.layers[0]
        table = step_table(self._shape(tokens), machine_of(self.device))
        with_bias = zip(PRODUCT_NAMES, (*first.biases, self.ends.head_bias), strict=True)
        biases = tuple(name for name, bias in with_bias if bias is not None)
        forms = (*_forms(self.layers), () if self.ends.head is None else (self.ends.head.form,))
        return StepPlan(
            table, forms, self.dtype, self.gate, biases, first.q_gamma is not None, first.sinks is not None,
            torch.tensor(self.ends.embedding_scale, dtype=self.dtype).item(), first.router is None or first.router.normalize,
        )  # fmt: skip

    def __call__(
        self, tokens: Tensor, tables: Tensor, positions: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Computes the step of the slots `rows` int32 [M], and appends keys and values to the pages. Returns (h [M, H], x [M,
        H], squares float32 [blocks, M], logits [M, V]): x and squares are the head's input, which the next step overwrites;
        logits are None without a head.

        tokens int32 [slots], tables int32 [slots, pages of a slot] and positions int32 [slots] are indexed by rows. Raises
        ValueError for a number of tokens that is not in `tokens`.
        """
        m = len(rows)
        if m not in self.tokens or self._table is None:
            raise ValueError(f"one launch computes {self.tokens} tokens after `bind`, got {m}")
        h = torch.empty(m, self.layers[0].products[3].shape[0], dtype=self.dtype, device=self.device)
        logits = None
        if self.ends.head is not None:
            logits = torch.empty(m, self.ends.head.shape[0], dtype=self.dtype, device=self.device)
        table = self.ends.embedding
        embedding, scale = (table.codes, table.scale) if isinstance(table, EmbeddingTable) else (table, None)
        x, squares = _launched(
            h, self._plans[m], self._table, self._vectors[m], tokens, embedding, scale, tables, positions, rows, self.status,
            logits, self.eps,
        )  # fmt: skip
        return h, x, squares, logits

    @staticmethod
    def failure(status: int) -> str:
        """Returns a message for a `status` that is not 0."""
        layer, wait = wait_of(status)
        return (
            f"a decode step in one launch stopped in layer {layer}: a block waited too long for {wait}. Its results and those "
            "of all later steps are wrong: make a new engine with persistent_step=False, and please report this"
        )


def _launch(h: Tensor, plan: StepPlan, layers: Tensor, vectors: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return plan(layers, vectors, h, *others)


_launched = on_device_of_first(_launch)


def _float_vectors(layer: StepLayer) -> dict[str, Tensor]:
    """The vectors of a layer that the kernel reads, in float32, by their names in the table."""
    biases = dict(zip(LAYER_PRODUCTS, layer.biases, strict=True))
    if isinstance(layer.products[2], DenseWeight) and biases["gate_up"] is not None:
        biases["gate_up"] = alternate(*biases["gate_up"].chunk(2))  # the kernel reads gate and up in the order of row blocks
    vectors = {f"{name} bias": bias for name, bias in biases.items()}
    vectors |= {"mlp_gamma": layer.mlp_gamma, "next_gamma": layer.next_gamma, "cos_sin": layer.cos_sin}
    vectors |= {"q_gamma": layer.q_gamma, "k_gamma": layer.k_gamma, "sinks": layer.sinks}
    return {name: values.detach().float().contiguous() for name, values in vectors.items() if values is not None}


def _layer_row(
    layer: StepLayer, values: dict[str, Tensor], pages: KVPages, forms: Sequence[tuple[WeightForm, ...]]
) -> dict[str, int]:
    """A layer's row of the table."""
    row = {name: tensor.data_ptr() for name, tensor in {**values, "k": pages.k, "v": pages.v}.items()}
    for name, w, of_product in zip(LAYER_PRODUCTS, layer.products, forms, strict=True):
        row |= _weight_addresses(name, w) | {f"{name} form": of_product.index(w.form)}
    if layer.router is not None:
        row["router"] = layer.router.weight.data_ptr()
    return row | {"factors": _inverses(*layer.factors), "window": layer.window or UNLIMITED}


def _end_row(ends: StepEnds, values: dict[str, Tensor]) -> dict[str, int]:
    """The row after the last layer."""
    row = {name: tensor.data_ptr() for name, tensor in values.items()}
    head = {} if ends.head is None else _weight_addresses("head", ends.head)
    return row | head | {"factors": _inverses(ends.head_factor, 1.0)}


def _weight_addresses(name: str, w: Weight) -> dict[str, int]:
    if isinstance(w, DenseWeight):
        return {f"{name} codes": w.values.data_ptr()}
    parts = {"codes": w.codes, "scale": w.scale, "channel_scale": w.channel_scale}
    return {f"{name} {part}": tensor.data_ptr() for part, tensor in parts.items() if tensor is not None}


def _inverses(first: float, second: float) -> int:
    """The bits of 1 / first, and above them those of 1 / second, as float32."""
    low, high = torch.tensor([1 / first, 1 / second]).view(torch.int32).tolist()
    return int(low | high << 32)
