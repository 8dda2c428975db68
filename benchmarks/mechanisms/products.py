"""The library's kernels with one change: the conversion, the order of codes, where scales are applied, or the tile.

A plan is created as usual, then its configuration gets another decoding, and weights are packed accordingly. All are compared
with the float64 product and timed as in benchmarks/protocol.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.mechanisms.trial import Row, Trial, blank, timed
from benchmarks.mechanisms.ways import OWN, Decoding, ScaledFirst, Stepping, Way, ways
from lowbit.formats import QuantTensor, parse_scheme
from lowbit.hardware.conversions import Conversion
from lowbit.hardware.half import HalfType
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, Tile, WgmmaTile
from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.sm80.small_m_gemm import RingPlan
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight
from lowbit.tune.timing import copies_needed, gaussian, l2_bytes, quantized

N = K = 8192
TORCH: dict[HalfType, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

CONVERTED: tuple[tuple[str, HalfType], ...] = (
    ("w8a16", "fp16"), ("w8a16", "bf16"), ("w4a16_pc", "fp16"), ("w4a16_pc", "bf16"), ("w6e3m2a16", "fp16"),
)  # fmt: skip
"""Schemes with a scale per channel, which need only the conversion before the product."""

TOKENS = (1, 16, 64, 256)
MMA = MmaTile(128, 2, 8, 1, 4, 1)
"""Tile of the kernel for A100 and RTX cards."""


def decode_by(plan: Any, by: Conversion) -> None:
    """Replaces the conversion of a plan."""
    if isinstance(plan, RingPlan):
        step_by(plan, Stepping(**_fields(plan.config.ring.k_block), by=by))
    else:
        plan.config = replace(plan.config, dequantizer=Decoding(**_fields(plan.config.dequantizer), by=by))
        plan.factor = plan.config.dequantizer.epilogue_factor


def step_by(plan: RingPlan, step: KBlock) -> None:
    """Replaces the k block of a plan of the small-M kernel."""
    plan.config = replace(plan.config, ring=replace(plan.config.ring, k_block=step))
    plan.factor = step.factor


def scale_first(plan: RingPlan) -> None:
    """Makes a plan of the small-M kernel scale the weights before the product."""
    step_by(plan, ScaledFirst(**_fields(plan.config.ring.k_block)))


def _fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__dataclass_fields__}


class Product:
    """One product y [m, n] = x w^T by a plan, over copies of a weight that are read from memory."""

    def __init__(self, scheme: str, m: int, tile: Tile | None, dtype: HalfType = "fp16", n: int = N, k: int = K) -> None:
        self.machine = machine_of("cuda")
        self.q = _quantized(scheme, n, k)
        self.weight = _packed(scheme, n, k)
        self.shape = GemmShape(m, n, k, self.q.scheme.weight.bits)
        self.tile = choose(self.shape, self.machine) if tile is None else tile
        self.dtype = TORCH[dtype]
        self.plan: Any = plan_for(self.tile, self.shape, self.weight.form, self.dtype, False, self.machine)

    @functools.cached_property
    def x(self) -> Tensor:
        return gaussian(self.shape.m, self.shape.k, seed=2, dtype=self.dtype)

    def convert_by(self, way: Way) -> None:
        """Repacks the weight for another conversion, and makes the plan use that conversion."""
        if way.name != OWN:
            self.weight = replace(self.weight, codes=_plane(self.q.scheme.name, *self.q.shape, way))
            decode_by(self.plan, way.conversion)

    def __call__(self, w: FragmentWeight | None = None) -> Tensor:
        w = w or self.weight
        room = workspace(self.x.device, *self.plan.workspace)
        return self.plan(self.x, w.codes, w.scale, w.channel_scale, None, *room)  # type: ignore[no-any-return]

    def measure(self, **figures: float) -> Row:
        """Returns the figures of a row. Its first 64 rows of y are compared with the float64 product."""
        weights = [self.weight]
        weights += [self.weight.clone() for _ in range(copies_needed(self.weight.nbytes, l2_bytes()) - 1)]
        rows = self.x[:64].double()
        reference = torch.cat([rows @ part.T for part in self.q.dequantize(torch.float64).split(2048)], dim=-1)
        return timed([functools.partial(self, w) for w in weights], reference, **figures)


@functools.lru_cache(maxsize=4)
def _quantized(scheme: str, n: int, k: int) -> QuantTensor:
    return quantized(parse_scheme(scheme), (n, k))


@functools.lru_cache(maxsize=4)
def _packed(scheme: str, n: int, k: int) -> FragmentWeight:
    return FragmentWeight.pack(_quantized(scheme, n, k))


@functools.lru_cache(maxsize=4)
def _plane(scheme: str, n: int, k: int, way: Way) -> Tensor:
    return way.plane(_quantized(scheme, n, k).codes)


def trial_of(row: Row, make: Callable[[], Product], **figures: float) -> Trial:
    """Returns the trial of the product."""
    return Trial(row, lambda: make()(), lambda: make().measure(**figures))


def conversion_trials() -> Iterator[Trial]:
    """Returns a trial for each conversion, in the chosen kernel and in the mma.sync kernel for many tokens."""
    for scheme, dtype in CONVERTED:
        number = parse_scheme(scheme).weight
        for m, tile in (*((m, None) for m in TOKENS), (TOKENS[-1], MMA)):
            kernel = kernel_of(tile or choose(GemmShape(m, N, K, number.bits), machine_of("cuda")))
            for way in ways(number.name, dtype):
                row = blank("products", f"{number.name}, {kernel}", way.name, dtype=dtype, m=m, n=N, k=K)
                yield trial_of(row, functools.partial(_converted, way, scheme, m, tile, dtype))


def _converted(way: Way, scheme: str, m: int, tile: Tile | None, dtype: HalfType) -> Product:
    product = Product(scheme, m, tile, dtype)
    product.convert_by(way)
    return product


def kernel_of(tile: Tile) -> str:
    """Returns the short kernel name of a tile."""
    return {RingTile: "ring", WgmmaTile: "wgmma", MmaTile: "mma.sync"}[type(tile)]


def scale_trials() -> Iterator[Trial]:
    """Returns trials with group scales applied after and before the product, in the small-M kernel."""
    for group in (32, 128):
        for m in (1, 8, 16):
            for name in ("after", "before"):
                row = blank("scales", f"group {group}, ring kernel", name, m=m, n=N, k=K)
                yield trial_of(row, functools.partial(_scaled, f"w4a16_g{group}", m, name == "before"))


def _scaled(scheme: str, m: int, first: bool) -> Product:
    product = Product(scheme, m, None)
    if first:
        scale_first(product.plan)
    return product


def tile_trials() -> Iterator[Trial]:
    """Returns trials of mma.sync tiles and of variants with one field changed; int4 in groups of 128."""
    for m in (1024, 4096):
        for group in (1, 2, 4, 8):
            yield _tile("swizzle", f"{group}", m, replace(MMA, token_group=group))
        for group in (1, 2, 4, 8):
            yield _tile("swizzle, wgmma", f"{group}", m, WgmmaTile(256, 2, 4, 1, group))
    for stages in (2, 3, 4, 5, 6):
        yield _tile("stages", f"{stages}", 4096, replace(MMA, stages=stages))
        yield _tile("stages", f"{stages}", 64, MmaTile(64, 2, 8, 1, stages, 4), N // 2, K // 2)
    for splits in (1, 2, 4, 8):
        for in_turn in (False, True) if splits > 1 else (False,):
            tile = MmaTile(64, 2, 8, 1, 6, splits, in_turn=in_turn)
            yield _tile("split-K", f"{splits}{' in turn' if in_turn else ', last block'}", 64, tile, N // 2, K // 2)
        if splits > 1:
            yield _reduction(splits, 64, N // 2)
    for warps_n, warps_k in ((8, 1), (4, 2), (2, 4), (1, 8), (1, 16)):
        for m, tokens in ((1, 8), (16, 16)):
            if warps_k < 16 or tokens == 8:
                yield _tile("sliced-K", f"{warps_n} x {warps_k} warps", m, RingTile(tokens, 2, 2, warps_n, warps_k, 1))


def _tile(case: str, way: str, m: int, tile: Tile, n: int = N, k: int = K) -> Trial:
    row = blank("tiles", case, way, m=m, n=n, k=k)
    return trial_of(row, functools.partial(Product, "w4a16_g128", m, tile, n=n, k=k))


def _reduction(splits: int, m: int, n: int) -> Trial:
    """Returns the time of a separate split-K reduction: reading the partial sums and writing y, by torch's sum."""
    row = blank("tiles", "split-K", f"{splits}, the sums alone, by a kernel", m=m, n=n)

    def measure() -> Row:
        sums = gaussian(splits * m, n, seed=1).view(splits, m, n)
        return timed([lambda: sums.sum(0, dtype=torch.float32).half()], sums.double().sum(0))

    return Trial(row, lambda: None, measure)
