"""The torch operators `lowbit::expert_gemm`, `lowbit::sum_slots` and `lowbit::sum_norm`: products of a mixture of experts.

    routing = route(logits, rule, tile_rows=tile_rows_for(T, top_k, E, bits))         # ops/route.py
    h = expert_gemm(x, gate_up, routing, gate="silu")                           # a row for each slot
    y = expert_gemm(h, down, routing, per_slot=True, weighted=True)
    out = sum_slots(y, top_k, residual)                                         # or sum_norm: h += sum; norm of h

Slot t * top_k + s is the s-th expert of token t. Only the weights of experts with slots are read. The operators are opaque to
torch.compile. The choice of kernel depends on shapes and on `tile_rows` of the routing. It does not depend on which experts the
router chose, so the host never waits for the router. On a CPU the weights of experts with slots are dequantized, one expert at
a time (kernels/reference/experts.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.experts import ExpertShape, ExpertTile, choose
from lowbit.kernels.choose.tiles import MmaTile, RingTile
from lowbit.kernels.reference.experts import (
    EXPERT_GATES,
    expert_gemm_reference,
    sum_norm_reference,
    sum_slots_reference,
)
from lowbit.ops.elementwise import MOST_COLUMNS
from lowbit.ops.fragment_gemm import aligned_rows, check_product
from lowbit.ops.operands import TensorSpec, check_one_device, device_of, meta_tensors, scheme_of, spec_of
from lowbit.ops.register import register
from lowbit.ops.route import Routing
from lowbit.pack import ExpertWeight, WeightForm, weight_form

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.gather_slots import GatherSlotsPlan
    from lowbit.kernels.elementwise.sum_norm import SumNormPlan
    from lowbit.kernels.elementwise.sum_slots import SumSlotsPlan
    from lowbit.kernels.sm80.expert_large_m_gemm import ExpertMmaPlan
    from lowbit.kernels.sm80.expert_small_m_gemm import ExpertRingPlan
    from lowbit.kernels.sm90.expert_large_m_gemm import ExpertWgmmaPlan

_HALVES = (torch.float16, torch.bfloat16)


def expert_gemm(
    x: Tensor, w: ExpertWeight, routing: Routing, bias: Tensor | None = None, *, gate: str = "none", per_slot: bool = False,
    weighted: bool = False, routed_before: bool = False, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y [T * top_k, N] in x's dtype. The row of a slot is its row of x times its expert's weight [N, K], plus the
    expert's row of bias [E, N].

    Args:
        x: [T, K] in fp16 or bf16 (on a CPU float32 too), or with `per_slot` [T * top_k, K], a row for each slot.
        gate: "none"; "silu": silu(gate) * up; "gelu_tanh"; "clamped_swiglu", the gate of gpt-oss:
            (clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g) with g = min(gate, 7). With a gate, y is [T * top_k, N / 2], and rows
            of w and bias alternate as in `ExpertWeight.pack_gated`.
        weighted: rows of y are multiplied by the router weight of their slot before they are rounded.
        routed_before: True promises that the preceding kernel on the stream did not write the routing, and that it lets this
            kernel start early only after all kernels before it have finished, as `expert_gemm` does. Set it for the second of
            two expert products. The first weights are then copied while the preceding kernel runs (sm_90).
        batch_invariant: a row of y has the same bits in every batch; `tile_rows` of the routing must be 8 or 16.

    The same input gives the same bits. Raises ValueError for tensors that do not fit together.
    """
    y: Tensor = torch.ops.lowbit.expert_gemm(
        x, w.codes, w.scale, w.channel_scale, bias, routing.experts, routing.weights, routing.order, routing.tiles,
        routing.tile_count, routing.tile_rows, w.scheme.name, w.shape[0], gate, per_slot, weighted, routed_before,
        batch_invariant, w.subnormal,
    )  # fmt: skip
    return y


def sum_slots(
    y: Tensor, top_k: int, residual: Tensor | None = None, *, experts: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns [T, N] in y's dtype: the sum of y [T * top_k, N] over the slots of each token, plus residual [T, N].

    `experts` int32 [T, top_k] is contiguous, and needed for a routing that may have absent slots. Slots with a negative expert
    are left out, so their rows of y may be uninitialised. Sums are computed in float32, slot 0 first, the residual last, and
    rounded once. Raises ValueError for tensors that do not fit together.
    """
    out: Tensor = torch.ops.lowbit.sum_slots(y, top_k, residual, experts)
    return out


def sum_norm(
    h: Tensor, y: Tensor, top_k: int, gamma: Tensor, eps: float, *, shared: Tensor | None = None, share: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Adds to h [T, N], in place, the sum of y [T * top_k, N] over the slots of each token. Then returns x [T, N], the RMS norm
    of h with gamma [N] as in `ops.elementwise.add_norm`.

    shared [T, N] is the output of an expert that all tokens use. It is multiplied by sigmoid(share) and added too; share [T, 1]
    has any row stride and any float type. Sums are computed in float32, slot 0 first, then the shared expert, h last, and
    rounded once. h, y and shared are of one type and contiguous. Raises ValueError for tensors that do not fit together.
    """
    x: Tensor = torch.ops.lowbit.sum_norm(h, y, top_k, gamma, eps, shared, share)
    return x


class ExpertArguments(NamedTuple):
    """The arguments of `lowbit::expert_gemm`."""

    x: Tensor
    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    bias: Tensor | None
    experts: Tensor
    weights: Tensor
    order: Tensor
    tiles: Tensor
    tile_count: Tensor
    tile_rows: int
    scheme: str
    n: int
    gate: str = "none"
    per_slot: bool = False
    weighted: bool = False
    routed_before: bool = False
    batch_invariant: bool = False
    subnormal: bool = False


def check_routing(
    operator: str, experts: Tensor, weights: Tensor, order: Tensor, tiles: Tensor, tile_count: Tensor, tile_rows: int
) -> None:
    """Raises ValueError, naming the operator, unless the tensors of a routing fit together."""
    if experts.dim() != 2 or not experts.shape[1]:
        raise ValueError(f"{operator}: experts are int32 [T, top_k], got {experts.dtype} {tuple(experts.shape)}")
    slots = experts.numel()
    expected = {
        "experts": (experts, torch.int32, experts.shape), "weights": (weights, torch.float32, experts.shape),
        "order": (order, torch.int32, (slots,)), "tile_count": (tile_count, torch.int32, (1,)),
        "tiles": (tiles, torch.int32, (tiles.shape[0] if tiles.dim() else 0, 3)),
    }  # fmt: skip
    for name, (t, dtype, shape) in expected.items():
        if t.dtype != dtype or tuple(t.shape) != tuple(shape) or not t.is_contiguous():
            raise ValueError(
                f"{operator}: {name} of a routing of {slots} slots is contiguous {dtype} {list(shape)} (ops/route.py makes "
                f"it), got {t.dtype} {list(t.shape)}"
            )
    if tile_rows < 1 or (slots and not tiles.shape[0]):
        raise ValueError(f"{operator}: a routing has tiles of at least one row, got {tile_rows} rows and {len(tiles)} tiles")


def _check(a: ExpertArguments) -> Scheme:
    """Returns the scheme. Raises ValueError unless the arguments are operands of one product."""
    parsed = scheme_of(a.scheme)
    if parsed.activation is not None:
        raise ValueError(
            f"expert_gemm: multiplies 16-bit activations, {parsed} has {parsed.activation.name} activations; call "
            "scaled_expert_gemm, or quantize the experts with a scheme of 16-bit activations, as w4a16_g128 or w8a16"
        )
    check_routing("expert_gemm", a.experts, a.weights, a.order, a.tiles, a.tile_count, a.tile_rows)
    if a.codes.dim() != 4 or not a.codes.shape[0]:
        raise ValueError(
            f"expert_gemm: codes are int32 [E, row blocks, k_tiles, words] (ExpertWeight.pack makes them), got "
            f"{tuple(a.codes.shape)}"
        )
    count = a.codes.shape[0]
    for name, t in (("scale", a.scale), ("channel_scale", a.channel_scale), ("bias", a.bias)):
        if t is not None and (t.dim() < 2 or t.shape[0] != count):
            raise ValueError(f"expert_gemm: {name} of {count} experts is [{count}, ..], got {tuple(t.shape)}")
    if a.x.dim() != 2:
        raise ValueError(f"expert_gemm: x is [T, K], or [T * top_k, K] with per_slot, got {tuple(a.x.shape)}")
    # `check_product` accepts 16-bit x only, but a CPU also computes float32, so it is given bf16 in that case.
    dtype = torch.bfloat16 if a.x.device.type == "cpu" and a.x.dtype == torch.float32 else a.x.dtype
    of_one = (_spec_of_one(t) for t in (a.codes, a.scale, a.channel_scale, a.bias))
    codes, scale, channel_scale, bias = meta_tensors(of_one)
    check_product(
        "expert_gemm", torch.empty(a.x.shape, dtype=dtype, device="meta"), codes, scale, channel_scale, bias, parsed, a.n,
        a.subnormal, of_experts=True,
    )  # fmt: skip
    rows = a.experts.numel() if a.per_slot else a.experts.shape[0]
    if a.x.shape[0] != rows:
        kind = "slots (per_slot)" if a.per_slot else "tokens"
        raise ValueError(f"expert_gemm: x of {rows} {kind} has as many rows, got {tuple(a.x.shape)}")
    if a.gate not in ("none", *EXPERT_GATES) or (a.gate != "none" and a.n % 16):
        raise ValueError(
            f"expert_gemm: gate is none, {', '.join(EXPERT_GATES)}, and row blocks have 8 gates and 8 ups; got "
            f"{a.gate!r}, N {a.n}"
        )
    return parsed


def _spec_of_one(t: Tensor | None) -> TensorSpec | None:
    """Returns the properties of one expert's part of a tensor."""
    return None if t is None else (t.shape[1:], t.dtype, t.device, True)


def _columns(a: ExpertArguments) -> int:
    return a.n if a.gate == "none" else a.n // 2


def _expert_gemm(a: ExpertArguments) -> Tensor:
    x = aligned_rows(a.x) if a.x.dim() == 2 else a.x
    tensors = a.codes, a.scale, a.channel_scale, a.bias, a.experts, a.weights, a.order, a.tiles, a.tile_count
    plan = _plan(x.shape, x.dtype, x.device, tuple(map(_spec, tensors)), a[10:])
    if plan is None:
        return x.new_empty((a.experts.numel(), _columns(a)))
    return plan(
        x, a.codes, a.scale, a.channel_scale, a.bias, a.tiles, a.tile_count, a.order, a.weights if a.weighted else None
    )  # fmt: skip


def _spec(t: Tensor | None) -> tuple[TensorSpec, bool] | None:
    """Returns the properties of a tensor on which a plan depends: those of `spec_of`, and True if it is contiguous."""
    return None if t is None else (spec_of(t), t.is_contiguous())  # type: ignore[return-value]


@functools.lru_cache(maxsize=4096)
def _plan(
    size: torch.Size, dtype: torch.dtype, on: torch.device, specs: tuple[tuple[TensorSpec, bool] | None, ...],
    options: tuple,
) -> ExpertPlan | None:  # fmt: skip
    """Returns the plan of a product; None if there is nothing to compute. Raises ValueError if the tensors do not fit
    together."""
    tensors = meta_tensors(None if s is None else s[0] for s in specs)
    a = ExpertArguments(torch.empty(size, dtype=dtype, device="meta"), *tensors, *options)
    if dtype not in _HALVES:
        raise ValueError(f"expert_gemm: x is fp16 or bf16 on a GPU, got {dtype}")
    parsed = _check(a)
    device_of("expert_gemm", (None if s is None else s[0] for s in specs), on)
    if not all(s is None or s[1] for s in specs):
        raise ValueError("expert_gemm: all tensors but x must be contiguous (ExpertWeight.pack's and ops.route's are)")
    if not all(s is None or s[0][3] for s in specs[:3]):
        raise ValueError("expert_gemm: weights must start at multiples of 16 bytes (ExpertWeight.pack's do); clone() them")
    tokens, top_k = a.experts.shape
    if tokens == 0 or a.n == 0:
        return None
    shape = ExpertShape(tokens, top_k, a.codes.shape[0], a.n, size[1], parsed.weight.bits, a.tile_rows, a.per_slot)
    machine = machine_of(on)
    form = weight_form(parsed, None if a.scale is None else a.scale.dtype, a.channel_scale is not None, a.subnormal)
    tile = choose(shape, machine, a.batch_invariant)
    return plan_for(
        tile, shape, form, dtype, a.bias is not None, machine, gate=a.gate, weighted=a.weighted, early=a.routed_before
    )


@dataclass(frozen=True)
class SortedPlan:
    """The plan of two launches. The first copies the rows of x in the order of the routing, in which slots are sorted by
    expert. The second is the product, which reads the copy by TMA."""

    gather: GatherSlotsPlan
    product: ExpertWgmmaPlan

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        tiles: Tensor, tile_count: Tensor, order: Tensor, weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns y [slots, N]; arguments as for the other plans."""
        rows = self.gather(x, order)
        return self.product(rows, codes, scale, channel_scale, bias, tiles, tile_count, order, weights)


ExpertPlan: TypeAlias = "ExpertRingPlan | ExpertMmaPlan | SortedPlan"


def plan_for(
    tile: ExpertTile, shape: ExpertShape, form: WeightForm, dtype: torch.dtype, bias: bool, machine: Machine, *,
    gate: str = "none", weighted: bool = False, early: bool = False,
) -> ExpertPlan:  # fmt: skip
    """Returns the plan of a product of experts with a given tile on a machine."""
    from lowbit.kernels.elementwise.gather_slots import GatherSlotsPlan
    from lowbit.kernels.parts.epilogue import Epilogue
    from lowbit.kernels.sm80.expert_large_m_gemm import ExpertMmaPlan
    from lowbit.kernels.sm80.expert_small_m_gemm import ExpertRingPlan
    from lowbit.kernels.sm90.expert_large_m_gemm import ExpertWgmmaPlan

    epilogue = Epilogue(form.channel_scale, bias, gate=gate)  # type: ignore[arg-type]
    if isinstance(tile, RingTile):
        return ExpertRingPlan(shape, tile, form, dtype, epilogue, machine, weighted=weighted, early=early)
    if isinstance(tile, MmaTile):
        return ExpertMmaPlan(shape, tile, form, dtype, epilogue, weighted=weighted)
    gather = GatherSlotsPlan(shape.slots, 1 if shape.per_slot else shape.top_k, shape.k, machine)
    return SortedPlan(gather, ExpertWgmmaPlan(shape, tile, form, dtype, epilogue, machine, weighted=weighted))


def _expert_gemm_on_cpu(a: ExpertArguments) -> Tensor:
    check_one_device(
        "expert_gemm", a.x, a.codes, a.scale, a.channel_scale, a.bias, a.experts, a.weights, a.order, a.tiles, a.tile_count
    )
    w = ExpertWeight(a.codes, a.scale, a.channel_scale, _check(a), (a.n, a.x.shape[1]), a.subnormal)
    y = expert_gemm_reference(
        a.x, w, a.experts, a.weights, a.bias, gate=a.gate, weighted=a.weighted, dtype=torch.float32
    )  # fmt: skip
    return y.to(a.x.dtype)


def _fake(a: ExpertArguments) -> Tensor:
    _check(a)
    return a.x.new_empty((a.experts.numel(), _columns(a)))


register(
    "expert_gemm(Tensor x, Tensor codes, Tensor? scale, Tensor? channel_scale, Tensor? bias, Tensor experts, Tensor weights,"
    " Tensor order, Tensor tiles, Tensor tile_count, int tile_rows, str scheme, SymInt n, str gate='none', bool per_slot=False,"
    " bool weighted=False, bool routed_before=False, bool batch_invariant=False, bool subnormal=False) -> Tensor",
    cuda=_expert_gemm,
    cpu=_expert_gemm_on_cpu,
    fake=_fake,
    arguments=ExpertArguments,
)


def _check_sum(y: Tensor, top_k: int, residual: Tensor | None, experts: Tensor | None) -> None:
    """Raises ValueError unless the tensors of a sum fit together."""
    if y.dim() != 2 or top_k < 1 or y.shape[0] % max(top_k, 1) or not y.is_floating_point():
        raise ValueError(f"sum_slots: y is floats [T * {top_k}, N], got {y.dtype} {tuple(y.shape)}")
    expected = (y.shape[0] // top_k, y.shape[1])
    if residual is not None and (tuple(residual.shape) != expected or residual.dtype != y.dtype):
        raise ValueError(f"sum_slots: residual is {y.dtype} {expected}, got {residual.dtype} {tuple(residual.shape)}")
    slots = (y.shape[0] // top_k, top_k)
    if experts is not None and (tuple(experts.shape) != slots or experts.dtype != torch.int32):
        raise ValueError(f"sum_slots: experts are int32 {slots}, got {experts.dtype} {tuple(experts.shape)}")


def _sum_slots(y: Tensor, top_k: int, residual: Tensor | None = None, experts: Tensor | None = None) -> Tensor:
    if not all(t is None or t.is_contiguous() for t in (y, residual, experts)):
        raise ValueError("sum_slots: y, residual and experts are contiguous; call .contiguous() on them")
    return _sum_plan(top_k, spec_of(y), spec_of(residual), spec_of(experts))(y, residual, experts)


@functools.lru_cache(maxsize=4096)
def _sum_plan(top_k: int, *tensors: TensorSpec | None) -> SumSlotsPlan:
    """Returns the plan of a sum. Raises ValueError if the tensors do not fit together."""
    from lowbit.kernels.elementwise.sum_slots import SumSlotsPlan

    y, residual, experts = meta_tensors(tensors)
    _check_sum(y, top_k, residual, experts)
    on = device_of("sum_slots", tensors)
    vectors = y.shape[1] % 8 == 0 and all(t is None or t[3] for t in tensors[:2])
    return SumSlotsPlan(y.shape[0] // top_k, top_k, y.shape[1], vectors, machine_of(on))


def _sum_slots_on_cpu(y: Tensor, top_k: int, residual: Tensor | None = None, experts: Tensor | None = None) -> Tensor:
    check_one_device("sum_slots", y, residual, experts)
    _check_sum(y, top_k, residual, experts)
    return sum_slots_reference(y, top_k, residual, experts)


def _sum_slots_fake(y: Tensor, top_k: int, residual: Tensor | None = None, experts: Tensor | None = None) -> Tensor:
    _check_sum(y, top_k, residual, experts)
    return y.new_empty((y.shape[0] // top_k, y.shape[1]))


register(
    "sum_slots(Tensor y, int top_k, Tensor? residual=None, Tensor? experts=None) -> Tensor",
    cuda=_sum_slots,
    cpu=_sum_slots_on_cpu,
    fake=_sum_slots_fake,
)


def _check_sum_norm(
    h: Tensor, y: Tensor, top_k: int, gamma: Tensor, eps: float, shared: Tensor | None = None, share: Tensor | None = None
) -> None:  # fmt: skip
    """Raises ValueError unless the tensors fit together."""
    if h.dim() != 2 or y.dim() != 2 or top_k < 1 or y.shape != (h.shape[0] * top_k, h.shape[1]) or y.dtype != h.dtype:
        raise ValueError(
            f"sum_norm: h is floats [T, N] and y [T * {top_k}, N] of its type, got {h.dtype} {tuple(h.shape)} and {y.dtype} "
            f"{tuple(y.shape)}"
        )
    if gamma.shape != h.shape[1:]:
        raise ValueError(f"sum_norm: gamma is [{h.shape[1]}], got {tuple(gamma.shape)}")
    if (shared is None) != (share is None):
        raise ValueError("sum_norm: shared and share come together: an expert's output and its gate")
    if shared is not None and share is not None:
        if shared.shape != h.shape or shared.dtype != h.dtype:
            raise ValueError(f"sum_norm: shared is {h.dtype} {tuple(h.shape)} like h, got {shared.dtype} {tuple(shared.shape)}")
        if share.shape != (h.shape[0], 1) or not share.is_floating_point():
            raise ValueError(f"sum_norm: share is floats [{h.shape[0]}, 1], got {share.dtype} {tuple(share.shape)}")
    if not all(t is None or t.is_contiguous() for t in (h, y, gamma, shared)):
        raise ValueError("sum_norm: h, y, gamma and shared are contiguous; call .contiguous() on them")


def _sum_norm(
    h: Tensor, y: Tensor, top_k: int, gamma: Tensor, eps: float, shared: Tensor | None = None, share: Tensor | None = None
) -> Tensor:  # fmt: skip
    _check_sum_norm(h, y, top_k, gamma, eps, shared, share)
    plan = _sum_norm_plan(top_k, *(spec_of(t) for t in (h, y, gamma, shared, share)))
    return plan(h, y, shared, share, gamma, eps)


@functools.lru_cache(maxsize=4096)
def _sum_norm_plan(top_k: int, *tensors: TensorSpec | None) -> SumNormPlan:
    """Returns the plan of a call. Raises ValueError if no kernel supports the tensors."""
    from lowbit.kernels.elementwise.sum_norm import SumNormPlan

    h, *_ = meta_tensors(tensors)
    on = device_of("sum_norm", tensors)
    if h.dtype not in _HALVES or h.shape[1] > MOST_COLUMNS:
        raise ValueError(f"sum_norm: rows are fp16 or bf16 of up to {MOST_COLUMNS} columns, got {h.dtype} {tuple(h.shape)}")
    return SumNormPlan(h.shape[0], top_k, h.shape[1], machine_of(on))


def _sum_norm_on_cpu(
    h: Tensor, y: Tensor, top_k: int, gamma: Tensor, eps: float, shared: Tensor | None = None, share: Tensor | None = None
) -> Tensor:  # fmt: skip
    check_one_device("sum_norm", h, y, gamma, shared, share)
    _check_sum_norm(h, y, top_k, gamma, eps, shared, share)
    return sum_norm_reference(h, y, top_k, gamma, eps, shared, share)


def _sum_norm_fake(h: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(h)


register(
    "sum_norm(Tensor(a!) h, Tensor y, int top_k, Tensor gamma, float eps, Tensor? shared=None, Tensor? share=None) -> Tensor",
    cuda=_sum_norm,
    cpu=_sum_norm_on_cpu,
    fake=_sum_norm_fake,
)
