"""`python -m benchmarks.tuning.attention`: times the tiles of decode attention on an NVIDIA GPU.

Prints, for each format of keys and values, batch and context, the fastest tiles with their share of the bandwidth for keys and
values (codes and scales). Also prints the tile that is chosen (*), with its modelled time. The protocol is that of
benchmarks/protocol.py: copies of the cache that exceed the L2, in one CUDA graph, with poisoned outputs, of which CHECKED rows
are compared with the reference, of packed pages in float64. Pages are in random order; all rows have the same context.

    python -m benchmarks.tuning.attention --kv 16 fp8 int8 int4 k8v4 --cases 1x1024 16x8192 64x1024 64x8192 16x32768 1x131072
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.protocol import REPLAYS, capture, relative_error
from lowbit.formats.kv import KV16, KVFormat, KVScheme, parse_kv
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.attention import PAGE, AttentionShape, DecodeTile, candidates_decode, choose_decode, modelled_us
from lowbit.kernels.choose.packed_attention import candidates_packed, choose_packed, packed_us
from lowbit.kernels.reference.attention import decode_reference
from lowbit.pack.kv_pages import KVPages, page_bytes
from lowbit.tune.timing import TOLERANCE, WrongResult, copies_needed, failures, l2_bytes, reason, warm_up

ROWS = (1, 4, 16, 64)
CONTEXTS = (256, 1024, 8192, 32768)
LLAMA = AttentionShape(32, 8, 128, 128**-0.5, 128)
CHECKED = 4
"""Number of rows that are compared with the reference."""


@dataclass(frozen=True)
class Timed:
    """The time of a tile for `rows` rows with `context` tokens before the new one. If `us` is None, `error` has the reason."""

    kv: KVScheme
    rows: int
    context: int
    tile: DecodeTile
    chosen: bool
    us: float | None
    model_us: float
    limit_us: float
    gigabytes: float
    error: str | None = None

    def __str__(self) -> str:
        found = self.error
        if self.us is not None:
            found = f"{self.us:8.2f} us, {1e6 * self.gigabytes / self.us:4.0f} GB/s, {self.limit_us / self.us:.2f} of the limit"
        mark = "*" if self.chosen else " "
        return (
            f"{self.kv!s:5} B {self.rows:3} context {self.context:6} {mark} {found}, model {self.model_us:.2f} us: {self.tile}"
        )


@dataclass(frozen=True)
class Batch:
    """The arguments of decode attention, with several copies of the cache."""

    qkv: Tensor
    caches: tuple[KVPages, ...]
    tables: Tensor
    positions: Tensor
    rows: Tensor
    cos_sin: Tensor


def make_batch(
    rows: int, context: int, shape: AttentionShape, kv: KVScheme, dtype: torch.dtype, copies: int, device: str
) -> Batch:  # fmt: skip
    """Returns a batch of rows at position `context`, with pages in random order. Packed codes are uniform, with scales for
    elements of about 1."""
    generator = torch.Generator(device).manual_seed(rows + context)
    pages = context // PAGE + 1
    order = torch.randperm(rows * pages, generator=generator, device=device).to(torch.int32)

    def random_pages() -> KVPages:
        made = KVPages.make(kv, rows * pages, shape.kv_heads, shape.head_dim, dtype, device)
        for t, scale, fmt in ((made.k, made.k_scale, kv.k), (made.v, made.v_scale, kv.v)):
            if scale is None:
                t.normal_(generator=generator)
                continue
            t.random_(0, 256, generator=generator)
            if fmt.name == "fp8":
                t &= 0xBE  # magnitudes below 2, no NaN
            scale.uniform_(0.5, 1.5, generator=generator).div_(code_size(fmt))
        return made

    def random(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    turns = torch.arange(context + 1, device=device)[:, None] * 1e4 ** -torch.linspace(
        0, 1, shape.rotary_dim // 2, device=device
    )
    return Batch(
        random(rows, shape.features),
        tuple(random_pages() for _ in range(copies)),
        order.view(rows, pages),
        torch.full((rows,), context, dtype=torch.int32, device=device),
        torch.arange(rows, dtype=torch.int32, device=device),
        torch.cat([turns.cos(), turns.sin()], dim=1),
    )


def code_size(fmt: KVFormat) -> float:
    """Returns the root mean square of random codes' values, before scales."""
    return {"fp8": 0.7, "int8": 74.0, "int4": 4.6}[fmt.name]


def packed_tiles(
    rows: int, context: int, shape: AttentionShape, kv: KVScheme, machine: Machine, count: int
) -> list[DecodeTile]:  # fmt: skip
    """Returns the tile chosen for slots of at most `context` tokens, and the best ones by modelled cost that split this context
    differently."""
    longest = (context // PAGE + 1) * PAGE
    chosen = choose_packed(rows, shape, kv, longest, machine)
    able = [row.tile for row in candidates_packed(rows, shape, kv, longest, machine) if not row.reasons]
    able.sort(key=lambda tile: (packed_us(tile, rows, shape, kv, context, context, machine), tile.splits))
    unlike = {chosen.active(context): chosen}
    for tile in able:
        unlike.setdefault(tile.active(context), tile)
    return [*unlike.values()][: count + 1]


def tiles_to_time(rows: int, context: int, shape: AttentionShape, machine: Machine, count: int) -> list[DecodeTile]:
    """Returns the tile chosen for slots of at most `context` tokens, the best ones by modelled cost, the best ones for each
    number of warps, and the best ones with blocks in shared memory.
    """
    longest = (context // PAGE + 1) * PAGE
    chosen = choose_decode(rows, shape, longest, machine)
    able = [row.tile for row in candidates_decode(rows, shape, longest, machine) if not row.reasons]
    able.sort(key=lambda tile: modelled_us(tile, rows, shape, context, context, machine))
    # Tiles that split this context equally differ only in programs without work. Of these, the one with the fewest splits is
    # timed.
    unlike: dict[tuple[int, int, int], DecodeTile] = {}
    for tile in sorted(able, key=lambda tile: tile.splits):
        unlike.setdefault((tile.active(context), tile.block, tile.warps), tile)
    best = [tile for tile in able if tile in unlike.values()]
    by_warps = [tile for warps in (1, 2, 4) for tile in [t for t in best if t.warps == warps][: max(1, count // 3)]]
    staged = [replace(tile, stages=2) for tile in dict.fromkeys([*best[:2], *by_warps])]
    return list(dict.fromkeys([chosen, *by_warps, *best[:count], *staged]))


def time_tiles(
    rows: int, context: int, shape: AttentionShape, kv: KVScheme, dtype: torch.dtype, tiles: Sequence[DecodeTile],
    machine: Machine,
) -> Iterator[Timed]:  # fmt: skip
    """Times and checks every tile; the first one is the chosen tile."""
    from lowbit.kernels.sm80.packed_attention import PackedAttentionPlan
    from lowbit.kernels.sm80.paged_attention import PagedAttentionPlan
    from lowbit.ops.workspace import workspace

    nbytes = rows * context * page_bytes(kv, shape.kv_heads, shape.head_dim, dtype) // PAGE
    batch = make_batch(rows, context, shape, kv, dtype, copies_needed(nbytes, l2_bytes()), "cuda")
    state = batch.tables, batch.positions, batch.rows, batch.cos_sin
    some = slice(0, CHECKED)
    qkv = batch.qkv[some].double() if kv.quantized else batch.qkv[some]
    expected = [
        decode_reference(qkv, pages, batch.tables, batch.positions, batch.rows[some], batch.cos_sin, shape).double()
        for pages in batch.caches[:2]
    ]
    for tile in tiles:
        plan: PagedAttentionPlan | PackedAttentionPlan
        if kv.quantized:
            plan = PackedAttentionPlan(rows, shape, kv, tile, machine)
        else:
            plan = PagedAttentionPlan(rows, shape, tile, machine)

        def call(pages: KVPages, plan: PagedAttentionPlan | PackedAttentionPlan = plan) -> Tensor:
            return plan(batch.qkv, pages, *state, None, None, None, *workspace(batch.qkv.device, *plan.workspace))

        us, error = None, None
        try:
            graph = capture([lambda pages=pages: call(pages) for pages in batch.caches])  # type: ignore[misc]
            us = statistics.median(graph.times_us(REPLAYS))
            outputs = graph.poisoned_outputs()
            if not all(y.isfinite().all() for y in outputs):
                raise WrongResult("outputs are not finite")
            worst = max(relative_error(y[some], reference) for y, reference in zip(outputs, expected, strict=False))
            if not worst <= TOLERANCE:
                raise WrongResult(f"relative error {worst:.3g}")
        except failures() as failure:
            us, error = None, reason(failure)
        model_us = modelled_us(tile, rows, shape, context, context, machine)
        if kv.quantized:
            model_us = packed_us(tile, rows, shape, kv, context, context, machine)
        limit_us = 1e6 * nbytes / machine.read_bytes
        yield Timed(kv, rows, context, tile, tile == tiles[0], us, model_us, limit_us, 1e-9 * nbytes, error)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning.attention", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument(
        "--cases", nargs="+", metavar="BxC", help="batches and contexts, such as 16x8192, in place of all pairs"
    )
    parser.add_argument("--kv", nargs="+", default=["16"], help="formats of keys and values, such as 16 fp8 int8 int4 k8v4")
    parser.add_argument("--heads", type=int, nargs=3, default=(LLAMA.heads, LLAMA.kv_heads, LLAMA.head_dim), metavar="N",
                        help="heads of q, of k and v, elements of a head")  # fmt: skip
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tiles", type=int, default=6, help="how many of the model's best are timed")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"this times an NVIDIA GPU and torch {torch.__version__} sees none")
    heads, kv_heads, head_dim = given.heads
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, head_dim)
    machine, dtype = machine_of("cuda"), torch.bfloat16 if given.bf16 else torch.float16
    warm_up()
    pairs = [(rows, context) for rows in given.rows for context in given.contexts]
    if given.cases:
        pairs = [(int(rows), int(context)) for rows, context in (case.split("x") for case in given.cases)]
    for kv in map(parse_kv, given.kv):
        for rows, context in pairs:
            if kv == KV16:
                tiles = tiles_to_time(rows, context, shape, machine, given.tiles)
            else:
                tiles = packed_tiles(rows, context, shape, kv, machine, given.tiles)
            found = time_tiles(rows, context, shape, kv, dtype, tiles, machine)
            for row in sorted(found, key=lambda row: row.us or float("inf")):
                print(row, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
