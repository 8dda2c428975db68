"""`python -m benchmarks experts`: times the expert block of a layer, its parts, candidate tiles, and torch's 16-bit experts.

The block is what a layer does with the router's logits: route, gate and up, down, sum over slots with the residual.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.limits import weight_bytes
from benchmarks.protocol import capture
from lowbit.eval.results import require_keys, versions, write_json
from lowbit.formats import PerBlock, parse_scheme
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.experts import (
    FEW_ROWS,
    MANY_ROWS,
    ExpertShape,
    ExpertTile,
    candidates,
    choose,
    tile_rows_for,
)
from lowbit.kernels.reference.experts import EXPERT_GATES, expert_gemm_reference
from lowbit.ops.expert_gemm import expert_gemm, plan_for, sum_slots
from lowbit.ops.quantize_activations import Activations, quantize_activations
from lowbit.ops.route import Routing
from lowbit.ops.scaled_expert_gemm import scaled_expert_gemm
from lowbit.pack import ExpertOperandWeight, ExpertWeight
from lowbit.quantize import rtn
from lowbit.tune.timing import TOLERANCE, WrongResult, failures, l2_bytes, reason

if TYPE_CHECKING:
    from benchmarks.experts_rivals import Rival, Source

RESULT = "lowbit bench experts"
SCHEMA = 1
REPLAYS = 24
TRIED = 8
"""Number of candidates per product that are timed in addition to the chosen tile, lowest modelled cost first."""

MOST_CALLS = 64
"""Largest number of calls in a graph; each has its own routing."""
READ_BYTES = 4 << 30
"""Bytes of all copies of a layer together; the calls read the copies in turn. In a model, all other layers are read before a
layer is read again. A single copy is too fast, even if it is larger than the L2: with one of 750 MB, a down product of
Mixtral-8x7B with 32 KiB in flight took 66 us at 16 tokens, and 103 us in a model (H200, 2026-11-28)."""

PROTOCOL = (
    "Time per call inside one CUDA graph of many calls, each with logits and x of its own, so that other experts are hit. The "
    "calls read copies of the layer in turn, 4 GiB of ours and of a rival's (of torch16 one copy). The "
    f"median of {REPLAYS} replays. Logits are Gaussian and independent: tokens choose experts uniformly. limit_us = bytes of "
    "codes and scales of the experts that the calls hit, each once, at the read bandwidth measured in the same run; x and y "
    "are not counted. rel_err compares the first call's output, after it was filled with NaN, with a float64 layer of the same "
    "dequantized weights. torch16: torch._grouped_mm over bf16 experts, with topk, sort, gather, gate, index_add. Parts are "
    "timed the same way, each in a graph of its own. Rivals are called as vLLM calls them, on the same codes, routed by vLLM's "
    "kernels; `kernel` names the product. The gate of Marlin, Triton int4, CUDA and Humming is a kernel of this project. "
    "Scales of MXFP4 (w4e2m1a16_g32) are powers of two for all."
)
ROW_KEYS = frozenset({"model", "impl", "scheme", "tokens", "us", "limit_us", "experts_hit", "rel_err", "error"})


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer of a model: gate and up [2 * size, hidden], down [hidden, size]."""

    experts: int
    top_k: int
    hidden: int
    size: int
    gate: str = "silu"
    bias: bool = False
    softmax_over_selected: bool = False
    normalize: bool = True


MODELS = {
    "Qwen3-30B-A3B": ExpertLayer(128, 8, 2048, 768),
    "Mixtral-8x7B": ExpertLayer(8, 2, 4096, 14336),
    "gpt-oss-20b": ExpertLayer(32, 4, 2880, 2880, "clamped_swiglu", True, True, False),
    "OLMoE-1B-7B": ExpertLayer(64, 8, 2048, 1024, normalize=False),
}
"""From the models' configurations on Hugging Face."""

SCHEMES = ("w4a16_g128", "w6e3m2a16", "w8a16")
TOKENS = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class ExpertRequest:
    """What is measured: models and schemes by name, token counts.

    `tiles`: candidate tiles of each product are timed too. `torch16`: torch's 16-bit experts are timed too. `rivals`: names of
    RIVALS, timed too; they need vLLM's wheel. `tile_rows`: rows per tile of the routing; 0 means `tile_rows_for`.
    """

    models: tuple[str, ...]
    schemes: tuple[str, ...]
    tokens: tuple[int, ...]
    tiles: bool
    torch16: bool
    rivals: tuple[str, ...] = ()
    tile_rows: int = 0


def make_request(
    models: str | None, schemes: str | None, tokens: str | None, tiles: bool, torch16: bool, tile_rows: int = 0,
    rivals: str = "none",
) -> ExpertRequest:  # fmt: skip
    """Returns the request for comma-separated options; None means all, "none" no rival. Raises ValueError for unknown names and
    for what cannot be timed together.
    """
    from benchmarks.experts_rivals import RIVALS

    names = tuple(MODELS) if models is None else tuple(dict.fromkeys(models.split(",")))
    for name in names:
        if name not in MODELS:
            raise ValueError(f"--models: known models are {', '.join(MODELS)}, got {name!r}")
    chosen = SCHEMES if schemes is None else tuple(dict.fromkeys(schemes.split(",")))
    eight = [scheme for scheme in chosen if parse_scheme(scheme).activation is not None]
    if eight and tiles:
        raise ValueError(f"--tiles: tiles are timed with 16-bit activations, not {eight[0]}")
    counts = TOKENS if tokens is None else tuple(int(part) for part in tokens.split(","))
    if min(counts) < 1:
        raise ValueError(f"--tokens: at least 1, got {tokens}")
    if tile_rows not in (0, *FEW_ROWS, *MANY_ROWS):
        raise ValueError(f"--tile-rows: products of experts have tiles of {(*FEW_ROWS, *MANY_ROWS)} rows, not {tile_rows}")
    others = () if rivals == "none" else tuple(dict.fromkeys(rivals.split(",")))
    for rival in others:
        if rival not in RIVALS:
            raise ValueError(f"--rivals: known rivals are {', '.join(RIVALS)}, or none, got {rival!r}")
    return ExpertRequest(names, chosen, counts, tiles, torch16, others, tile_rows)


def layer_bytes(layer: ExpertLayer, scheme: str | None) -> float:
    """Returns the bytes of one expert's codes and scales, or of its 16-bit weights if `scheme` is None."""
    parsed = None if scheme is None else parse_scheme(scheme)
    return weight_bytes(parsed, 2 * layer.size, layer.hidden) + weight_bytes(parsed, layer.hidden, layer.size)


@dataclass(frozen=True, eq=False)
class Weights:
    """The packed weights of a layer in one scheme, and its biases, in the order of its rows, or None."""

    gate_up: ExpertWeight | ExpertOperandWeight
    down: ExpertWeight | ExpertOperandWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def is_scaled(self) -> bool:
        """True with 8-bit activations. Rows of gate then precede those of up, and the gate is a step of its own."""
        return isinstance(self.gate_up, ExpertOperandWeight)


class Matrices(Sequence[Any]):
    """The quantized matrices [n, k] of the experts of a layer: random Gaussian, rounded to nearest. A matrix is recreated, with
    equal values, at each access, so that only one is in memory. Scales of MXFP4 are rounded to powers of two."""

    def __init__(self, layer: ExpertLayer, scheme: str, n: int, k: int, seed: int) -> None:
        self.experts, self.scheme, self.size, self.seed = layer.experts, parse_scheme(scheme), (n, k), seed

    def __len__(self) -> int:
        return self.experts

    def __getitem__(self, e: Any) -> Any:
        from benchmarks.experts_rivals import is_mxfp4

        if not 0 <= e < self.experts:
            raise IndexError(e)
        own = torch.Generator("cuda").manual_seed(1000 * self.seed + e)
        q = rtn(torch.randn(*self.size, device="cuda", generator=own) / math.sqrt(self.size[1]), self.scheme)
        return replace(q, scale=q.scale.float().log2().round().exp2().to(q.scale.dtype)) if is_mxfp4(self.scheme) else q


def matrices(layer: ExpertLayer, scheme: str) -> tuple[Matrices, Matrices, Matrices]:
    """Returns the matrices of gate, up and down."""
    gate, up = (Matrices(layer, scheme, layer.size, layer.hidden, seed) for seed in (1, 2))
    return gate, up, Matrices(layer, scheme, layer.hidden, layer.size, 3)


def make_weights(layer: ExpertLayer, scheme: str) -> Weights:
    """Returns the packed weights of a layer and random biases."""
    generator = torch.Generator("cuda").manual_seed(1)
    gate, up, down_matrices = matrices(layer, scheme)
    gate_up: ExpertWeight | ExpertOperandWeight
    down: ExpertWeight | ExpertOperandWeight
    if parse_scheme(scheme).activation is None:
        gate_up, down = ExpertWeight.pack_gated(gate, up), ExpertWeight.pack(down_matrices)
    else:
        gate_up = ExpertOperandWeight.pack(Matrices(layer, scheme, 2 * layer.size, layer.hidden, 1))
        down = ExpertOperandWeight.pack(down_matrices)
    if not layer.bias:
        return Weights(gate_up, down, None, None)
    biases = (
        torch.randn(layer.experts, n, device="cuda", generator=generator).bfloat16() for n in (2 * layer.size, layer.hidden)
    )
    return Weights(gate_up, down, *biases)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of one call: x and residual [T, hidden], logits [T, experts], and their routing."""

    x: Tensor
    residual: Tensor
    logits: Tensor
    routing: Routing


def route_once(layer: ExpertLayer, logits: Tensor, tile_rows: int) -> Routing:
    """Returns the routing of the logits by the layer's rule."""
    from lowbit.ops.route import RouterRule, route  # type: ignore[attr-defined]

    rule = RouterRule(layer.top_k, normalize=layer.normalize, softmax_over_selected=layer.softmax_over_selected)
    made: Routing = route(logits, rule, tile_rows=tile_rows)
    return made


def make_inputs(layer: ExpertLayer, tokens: int, calls: int, tile_rows: int) -> list[Inputs]:
    """Returns inputs for `calls` calls. Each has its own random x and logits, so that each call uses other experts."""
    generator = torch.Generator("cuda").manual_seed(2)
    made = []
    for _ in range(calls):
        x, residual = torch.randn(2, tokens, layer.hidden, device="cuda", generator=generator).bfloat16()
        logits = torch.randn(tokens, layer.experts, device="cuda", generator=generator)
        made.append(Inputs(x, residual, logits, route_once(layer, logits, tile_rows)))
    return made


def code_bits(scheme: str | None) -> int:
    """Returns the bits of a scheme's codes; 16 if `scheme` is None."""
    parsed = None if scheme is None else parse_scheme(scheme).weight
    return 16 if parsed is None else parsed.bits


def calls_needed(layer: ExpertLayer, scheme: str | None, tokens: int, l2: int) -> tuple[int, int]:
    """Returns (number of calls, number of copies of the layer), each at most MOST_CALLS. The copies together have READ_BYTES,
    and every copy is read by a call. A third of the bytes are those of down products; in all calls together, these exceed 3
    times the L2 size."""
    one = layer_bytes(layer, scheme)
    hit = layer.experts * (1 - (1 - layer.top_k / layer.experts) ** tokens)
    copies = min(MOST_CALLS, math.ceil(READ_BYTES / (layer.experts * one)))
    return min(MOST_CALLS, max(2, copies, math.ceil(9 * l2 / (hit * one)))), copies


def quantized(x: Tensor, w: ExpertOperandWeight) -> Activations:
    """Returns x as a layer of the weight's scheme quantizes it, with a scale for each token, or for 128 columns of one."""
    assert w.scheme.activation is not None
    group = w.scheme.granularity.k if isinstance(w.scheme.granularity, PerBlock) else 0
    return quantize_activations(
        x, w.scheme.activation, group=group, symmetric=not w.scheme.activation_zero, rule=w.scheme.rule.value
    )


def first_product(layer: ExpertLayer, w: Weights, x: Tensor | Activations, routing: Routing) -> Tensor:
    """Returns the product with gate and up [slots, size], with the gate; of quantized x [slots, 2 * size], without it."""
    if isinstance(x, Activations):
        assert isinstance(w.gate_up, ExpertOperandWeight)
        return scaled_expert_gemm(x, w.gate_up, routing, w.gate_up_bias)
    assert isinstance(w.gate_up, ExpertWeight)
    return expert_gemm(x, w.gate_up, routing, w.gate_up_bias, gate=layer.gate)


def second_product(w: Weights, h: Tensor | Activations, routing: Routing) -> Tensor:
    """Returns the product with down [slots, hidden], times the router's weights."""
    if isinstance(h, Activations):
        assert isinstance(w.down, ExpertOperandWeight)
        return scaled_expert_gemm(h, w.down, routing, w.down_bias, per_slot=True, weighted=True)
    assert isinstance(w.down, ExpertWeight)
    return expert_gemm(h, w.down, routing, w.down_bias, per_slot=True, weighted=True, routed_before=True)


def input_of(w: Weights, x: Tensor) -> Tensor | Activations:
    """Returns x as the first product takes it."""
    return quantized(x, w.gate_up) if isinstance(w.gate_up, ExpertOperandWeight) else x


def inner_of(layer: ExpertLayer, w: Weights, h: Tensor) -> Tensor | Activations:
    """Returns the first product's output as the second takes it. With 8-bit activations, torch computes the gate as in a model,
    and the result is quantized."""
    if not isinstance(w.down, ExpertOperandWeight):
        return h
    return quantized(EXPERT_GATES[layer.gate](*h.chunk(2, -1)), w.down)


def block(layer: ExpertLayer, w: Weights, inputs: Inputs) -> Tensor:
    """Computes the expert block of a layer: four launches, or a few more to route many tokens. With 8-bit activations there are
    also those of the gate and of quantizing."""
    routing = route_once(layer, inputs.logits, inputs.routing.tile_rows)
    h = first_product(layer, w, input_of(w, inputs.x), routing)
    return sum_slots(second_product(w, inner_of(layer, w, h), routing), layer.top_k, inputs.residual)


def values(x: Tensor | Activations) -> Tensor:
    """Returns the numbers that x represents, in float64."""
    if isinstance(x, Tensor):
        return x.double()
    scale = x.scale.double()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 1)[:, : x.codes.shape[1]]
    return (x.codes.double() - (0 if x.zero is None else x.zero)) * scale


def block_reference(layer: ExpertLayer, w: Weights, inputs: Inputs) -> Tensor:
    """Computes the expert block in float64, except that h is rounded to bf16 between the products. For 8-bit activations x and
    h are quantized too."""
    r = inputs.routing
    x = values(input_of(w, inputs.x))
    gate = "none" if w.is_scaled else layer.gate
    h = expert_gemm_reference(x, w.gate_up, r.experts, None, w.gate_up_bias, gate=gate).bfloat16()
    y = expert_gemm_reference(values(inner_of(layer, w, h)), w.down, r.experts, r.weights, w.down_bias, weighted=True)
    return y.unflatten(0, (-1, layer.top_k)).sum(1) + inputs.residual.double()


def median_us(calls: Sequence[Callable[[], Tensor]]) -> tuple[float, Tensor]:
    """Returns the median microseconds per call, and the output of the first call. This output is from a replay before which all
    outputs were filled with NaN."""
    graph = capture(calls)
    us = statistics.median(graph.times_us(REPLAYS))
    return us, graph.poisoned_outputs()[0].clone()


def relative_error(y: Tensor, reference: Tensor) -> float:
    """Returns |y - reference| / |reference|. Raises WrongResult for non-finite values or an error above TOLERANCE."""
    if not bool(y.isfinite().all()):
        raise WrongResult(f"{int((~y.isfinite()).sum())} of {y.numel()} outputs are not finite or were not written")
    error = float((y.double() - reference).norm() / reference.norm())
    if error > TOLERANCE:
        raise WrongResult(f"relative error {error:.3g}")
    return error


def lowbit_row(layer: ExpertLayer, weights: Sequence[Weights], inputs: Sequence[Inputs]) -> dict[str, Any]:
    """Returns the row of this library: the times of the block and of its parts."""
    pairs = list(zip(itertools.cycle(weights), inputs))
    us, y = median_us([lambda w=w, i=i: block(layer, w, i) for w, i in pairs])  # type: ignore[misc]
    error = relative_error(y, block_reference(layer, weights[0], inputs[0]))
    given = [(w, i, input_of(w, i.x)) for w, i in pairs]
    first = first_product(layer, weights[0], given[0][2], inputs[0].routing)
    inner = inner_of(layer, weights[0], first)
    second = torch.randn(len(first), layer.hidden, device="cuda", dtype=first.dtype)
    rows = inputs[0].routing.tile_rows
    parts: dict[str, list[Callable[[], Tensor]]] = {
        "route": [lambda i=i: route_once(layer, i.logits, rows).order for _, i in pairs],  # type: ignore[misc]
        "gate_up": [lambda w=w, i=i, x=x: first_product(layer, w, x, i.routing) for w, i, x in given],  # type: ignore[misc]
        "down": [lambda w=w, i=i: second_product(w, inner, i.routing) for w, i in pairs],  # type: ignore[misc]
        "sum": [lambda i=i: sum_slots(second, layer.top_k, i.residual) for _, i in pairs],  # type: ignore[misc]
    }
    if weights[0].is_scaled:
        parts["gate"] = [lambda w=w: inner_of(layer, w, first).codes for w, _ in pairs]  # type: ignore[misc, union-attr]
        parts["quantize"] = [lambda w=w, i=i: input_of(w, i.x).codes for w, i in pairs]  # type: ignore[misc, union-attr]
    return {"us": us, "rel_err": error, **{f"{name}_us": median_us(calls)[0] for name, calls in parts.items()}}


def torch16_row(layer: ExpertLayer, inputs: Sequence[Inputs]) -> dict[str, Any]:
    """Returns the row of torch's grouped GEMM with 16-bit experts. Rows are sorted by expert; gate and up are one product, gate
    first.
    """
    generator = torch.Generator("cuda").manual_seed(3)
    e, k, n = layer.experts, layer.hidden, layer.size
    gate_up, down = (
        torch.empty(e, rows, columns, device="cuda", dtype=torch.bfloat16).normal_(generator=generator).div_(math.sqrt(columns))
        for rows, columns in ((2 * n, k), (k, n))
    )
    gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)  # row-major, as in nn.Linear

    def call(i: Inputs) -> Tensor:
        weights, experts = i.logits.topk(layer.top_k)
        weights = weights.softmax(-1)
        slots = experts.flatten().argsort(stable=True)
        ends = (experts.flatten()[:, None] == torch.arange(e, device="cuda")).sum(0).cumsum(0).int()
        token = slots // layer.top_k
        both = torch._grouped_mm(i.x[token], gate_up, offs=ends)
        h = EXPERT_GATES[layer.gate](*both.chunk(2, -1))
        y = torch._grouped_mm(h, down, offs=ends) * weights.flatten()[slots, None].to(h.dtype)
        return i.residual.index_add(0, token, y)

    us, y = median_us([lambda i=i: call(i) for i in inputs])  # type: ignore[misc]
    if not bool(y.isfinite().all()):
        raise WrongResult("outputs of torch's experts are not finite")
    return {"us": us, "rel_err": None}


def source_of(layer: ExpertLayer, scheme: str, weights: Weights) -> Source:
    """Returns the experts of a layer for rivals: the same codes, and biases with those of gate first."""
    from benchmarks.experts_rivals import Source

    if weights.is_scaled:
        raise ValueError(f"rivals are timed with 16-bit activations, not {scheme}")
    bias = weights.gate_up_bias
    if bias is not None:
        bias = bias.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1)
    normalized = layer.normalize or layer.softmax_over_selected
    return Source(*matrices(layer, scheme), bias, weights.down_bias, layer.gate, layer.top_k, normalized)


def rival_row(layer: ExpertLayer, rivals: Sequence[Rival], weights: Weights, inputs: Sequence[Inputs]) -> dict[str, Any]:
    """Returns the row of a rival's experts, compared with the float64 layer of the same weights."""
    pairs = zip(itertools.cycle(rivals), inputs)
    us, y = median_us([lambda r=r, i=i: r(i.x, i.logits, i.residual) for r, i in pairs])  # type: ignore[misc]
    error = relative_error(y, block_reference(layer, weights, inputs[0]))
    return {"us": us, "rel_err": error, "version": rivals[0].version, "kernel": rivals[0].kernel}


@dataclass(frozen=True, eq=False)
class Trial:
    """One tile for one product of a layer: `call` computes the product, or `error` says why no kernel takes it."""

    part: str
    tile: ExpertTile
    chosen: bool
    modelled_us: float
    call: Callable[[Weights, Routing], Tensor] | None
    error: str | None = None

    def row(self, weights: Sequence[Weights], inputs: Sequence[Inputs]) -> dict[str, Any]:
        """Returns the trial's row with its microseconds or its error."""
        made: dict[str, Any] = {"part": self.part, "tile": str(self.tile), "chosen": self.chosen}
        made |= {"modelled_us": self.modelled_us, "us": None}
        if self.call is None:
            return {**made, "error": self.error}
        pairs = list(zip(itertools.cycle(weights), inputs))
        try:
            return {**made, "us": median_us([lambda w=w, i=i: self.call(w, i.routing) for w, i in pairs])[0]}  # type: ignore[misc]
        except failures() as error:
            return {**made, "error": reason(error)}


def trials_of(layer: ExpertLayer, weights: Sequence[Weights], inputs: Sequence[Inputs], scheme: str) -> list[Trial]:
    """Returns the trials of each product: the chosen tile and the next candidates. Their times serve to fit the cost model."""
    machine, tokens, rows = machine_of("cuda"), len(inputs[0].x), inputs[0].routing.tile_rows
    slots, made = tokens * layer.top_k, []
    for part, gate, per_slot, k in (("gate_up", layer.gate, False, layer.hidden), ("down", "none", True, layer.size)):
        w = getattr(weights[0], part)
        shape = ExpertShape(
            tokens, layer.top_k, layer.experts, w.shape[0], k, parse_scheme(scheme).weight.bits, rows, per_slot
        )  # fmt: skip
        x = torch.randn(slots if per_slot else tokens, -(-k // 8) * 8, device="cuda").bfloat16()[:, :k]
        chosen = choose(shape, machine)
        modelled = {row.tile: row.cost_us for row in candidates(shape, machine) if not row.reasons}
        for tile in dict.fromkeys([chosen, *list(modelled)[:TRIED]]):
            call, error = None, None
            try:
                call = _product(tile, shape, part, gate, weights[0], x)
            except failures() as failure:
                error = reason(failure)
            made.append(Trial(part, tile, tile == chosen, modelled[tile], call, error))
    return made


def _product(
    tile: ExpertTile, shape: ExpertShape, part: str, gate: str, first: Weights, x: Tensor
) -> Callable[[Weights, Routing], Tensor]:
    """Returns a function that computes a product with one tile."""
    biased, down = getattr(first, f"{part}_bias") is not None, shape.per_slot
    plan = plan_for(
        tile, shape, getattr(first, part).form, x.dtype, biased, machine_of("cuda"), gate=gate, weighted=down, early=down
    )  # fmt: skip

    def call(w: Weights, r: Routing) -> Tensor:
        packed = getattr(w, part)
        return plan(
            x, packed.codes, packed.scale, packed.channel_scale, getattr(w, f"{part}_bias"), r.tiles, r.tile_count, r.order,
            r.weights if down else None,
        )  # fmt: skip

    return call


def compile_kernels(layer: ExpertLayer, weights: Weights, inputs: Inputs, trials: Sequence[Trial]) -> None:
    """Compiles the kernels of a layer and its trials in several processes. Nothing is timed while this runs."""
    from lowbit.kernels.parts.compile import compile_all
    from lowbit.kernels.parts.launch import recording

    with recording() as kernels:
        block(layer, weights, inputs)
        for trial in trials:
            if trial.call is not None:
                trial.call(weights, inputs.routing)
    for _ in compile_all(kernels, machine_of("cuda").arch.sm):
        pass


class Layer:
    """The measurement of one model's layer in one scheme; None is torch's 16-bit experts. Weights are packed once, for all
    numbers of tokens."""

    def __init__(self, name: str, scheme: str | None, request: ExpertRequest) -> None:
        self.name, self.scheme, self.request, self.layer = name, scheme, request, MODELS[name]
        self.weights: list[Weights] = []
        self.rivals: dict[str, list[Rival]] = {}
        self.refusals: dict[str, str] = {}

    def blank_row(self, impl: str, tokens: int) -> dict[str, Any]:
        """Returns a row without results."""
        return {
            "model": self.name, "impl": impl, "scheme": self.scheme or "bf16", "tokens": tokens, "us": None, "limit_us": None,
            "experts_hit": None, "rel_err": None, "error": None,
        }  # fmt: skip

    def rows(self, tokens: int, read_bytes_per_s: float) -> Iterator[dict[str, Any]]:
        """Yields the row of this library or of torch, then the rivals'; a failed row has its reason in `error`."""
        layer, scheme = self.layer, self.scheme
        calls, copies = calls_needed(layer, scheme, tokens, l2_bytes())
        row = self.blank_row("lowbit" if scheme else "torch16", tokens)
        common: dict[str, Any] = {}
        inputs: list[Inputs] = []
        try:
            rows = self.request.tile_rows or tile_rows_for(tokens, layer.top_k, layer.experts, code_bits(scheme))
            inputs = make_inputs(layer, tokens, calls, rows)
            hit = statistics.mean(len(i.routing.experts.unique()) for i in inputs)
            common = {"experts_hit": hit, "limit_us": hit * layer_bytes(layer, scheme) / read_bytes_per_s * 1e6}
            row |= common
            row |= torch16_row(layer, inputs) if scheme is None else self.own_row(scheme, inputs, copies)
        except failures() as error:
            row["error"] = reason(error)
        yield row
        for rival in self.request.rivals if scheme is not None else ():
            row = self.blank_row(f"vllm-{rival}", tokens) | common
            try:
                row |= rival_row(layer, self.rival(rival, copies), self.weights[0], inputs)
            except failures() as error:
                row["error"] = reason(error)
            yield row

    def own_row(self, scheme: str, inputs: Sequence[Inputs], copies: int) -> dict[str, Any]:
        """Returns the results of this library."""
        if not self.weights:
            first = make_weights(self.layer, scheme)
            others = (replace(first, gate_up=first.gate_up.clone(), down=first.down.clone()) for _ in range(copies - 1))
            self.weights = [first, *others]
        trials = trials_of(self.layer, self.weights, inputs, scheme) if self.request.tiles else []
        compile_kernels(self.layer, self.weights[0], inputs[0], trials)
        row = lowbit_row(self.layer, self.weights, inputs) | {"tile_rows": inputs[0].routing.tile_rows}
        return row | ({"tiles": [trial.row(self.weights, inputs) for trial in trials]} if trials else {})

    def rival(self, name: str, copies: int) -> list[Rival]:
        """Returns the copies of a rival's experts. Raises ValueError with the reason if it refuses the layer."""
        from benchmarks.experts_rivals import RIVALS, copied

        if name in self.refusals:
            raise ValueError(self.refusals[name])
        if name not in self.rivals:
            assert self.scheme is not None
            try:
                first = RIVALS[name](source_of(self.layer, self.scheme, self.weights[0]))
            except failures() as error:
                self.refusals[name] = reason(error)
                raise
            self.rivals[name] = [first, *(copied(first) for _ in range(copies - 1))]
        return self.rivals[name]


def measured(request: ExpertRequest, read_bytes_per_s: float, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, scheme, number of tokens and implementation."""
    for name, scheme in itertools.product(request.models, [*([None] if request.torch16 else []), *request.schemes]):
        layer = Layer(name, scheme, request)
        for tokens in request.tokens:
            say(f"{name} {scheme or '16 bits'} {tokens} tokens")
            yield from layer.rows(tokens, read_bytes_per_s)
            torch.cuda.empty_cache()
        del layer
        torch.cuda.empty_cache()


def run(request: ExpertRequest, out: Path | None, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Measures the request and writes the file after every row. Raises ValueError without an NVIDIA GPU."""
    if not torch.cuda.is_available():
        raise ValueError(f"bench experts measures an NVIDIA GPU and torch {torch.__version__} sees none")
    from benchmarks.ceilings import read_bandwidth  # needs Triton, which comes with CUDA builds of torch
    from benchmarks.results import default_path, machine
    from lowbit.tune.timing import warm_up

    warm_up()
    gpu, (bandwidth, _) = machine(), read_bandwidth()
    today = datetime.date.today()
    path = out or default_path(gpu["gpu"], today).with_name(f"{today.isoformat()}-experts.json")
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": RESULT, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "request": asdict(request),
        "machine": gpu, "versions": versions([]), "read_bytes_per_s": bandwidth, "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip
    for row in measured(request, bandwidth, say):
        rows.append(row)
        write_json(path, document)
    document["complete"] = True
    write_json(path, document)
    require_keys(path, document, {"rows", "machine"}, ROW_KEYS)
    return path, document


COLUMNS = ("model", "of", "scheme", "tokens", "hit", "us", "limit us", "share", "route", "gate+up", "down", "sum", "x torch16")


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns rows of text for COLUMNS. "share" is limit / us; "x torch16" is the speedup over torch's 16-bit experts."""
    dense = {(row["model"], row["tokens"]): row["us"] for row in document["rows"] if row["impl"] == "torch16"}
    made = []
    for row in document["rows"]:
        if row["us"] is None:
            named = row["model"], row["impl"], row["scheme"], str(row["tokens"])
            made.append((*named, row["error"] or "", *("",) * (len(COLUMNS) - 5)))
            continue
        parts = (row.get(f"{part}_us") for part in ("route", "gate_up", "down", "sum"))
        other = dense.get((row["model"], row["tokens"]))
        made.append((
            row["model"], row["impl"], row["scheme"], str(row["tokens"]), f"{row['experts_hit']:.1f}", f"{row['us']:.1f}",
            f"{row['limit_us']:.1f}", f"{row['limit_us'] / row['us']:.0%}",
            *("" if part is None else f"{part:.1f}" for part in parts), "" if other is None else f"{other / row['us']:.2f}",
        ))  # fmt: skip
    return made


def tile_lines(document: dict[str, Any]) -> list[str]:
    """Returns a line for each product with timed candidates: the chosen tile, and the fastest if it is another one."""
    lines = []
    for row in document["rows"]:
        for part in ("gate_up", "down"):
            timed = [tile for tile in row.get("tiles", ()) if tile["part"] == part and tile["us"] is not None]
            if not timed:
                continue
            best = min(timed, key=lambda tile: tile["us"])
            lines.append(f"{row['model']} {row['scheme']} {row['tokens']} tokens, {part}:")
            for tile in timed:
                if tile["chosen"] or tile is best:
                    what = "chosen" if tile["chosen"] else "fastest"
                    lines.append(f"    {what} {tile['tile']}: {tile['us']:.2f} us, modelled {tile['modelled_us']:.2f}")
    return lines
