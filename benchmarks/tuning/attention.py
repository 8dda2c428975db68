"""`python -m benchmarks.tuning.attention`: times the tiles of decode attention on an NVIDIA GPU.

Prints, for each format of keys and values, batch and context, the fastest tiles with their share of the bandwidth for keys and
values (codes and scales). Also prints the tile that is chosen (*), with its modelled time. The protocol is that of
benchmarks/protocol.py: copies of the cache that exceed the L2, in one CUDA graph, with poisoned outputs, of which CHECKED rows
are compared with the reference, of packed pages in float64. Pages are in random order; all rows have the same context.

    python -m benchmarks.tuning.attention --kv 16 fp8 int8 int4 k8v4 --cases 1x1024 16x8192 64x1024 64x8192 16x32768 1x131072

--fa3 times FlashAttention-3 over fp8 pages beside it (flash_attention.py); --out writes a result file after each case.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ceilings import read_bandwidth
from benchmarks.protocol import REPLAYS, capture, relative_error
from benchmarks.results import machine as machine_now
from benchmarks.tuning import flash_attention
from benchmarks.under_load import NOTHING, monitor
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import versions, write_json
from lowbit.formats.kv import KV16, KVFormat, KVScheme, parse_kv
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.attention import PAGE, AttentionShape, DecodeTile, candidates_decode, choose_decode, modelled_us
from lowbit.kernels.choose.packed_attention import PackedTile, candidates_packed, choose_packed, packed_us
from lowbit.kernels.reference.attention import decode_reference
from lowbit.pack.kv_pages import KVPages, page_bytes
from lowbit.tune.timing import TOLERANCE, WrongResult, copies_needed, failures, l2_bytes, reason, warm_up

ROWS = (1, 4, 16, 64)
CONTEXTS = (256, 1024, 8192, 32768)
LLAMA = AttentionShape(32, 8, 128, 128**-0.5, 128)
CHECKED = 4
"""Number of rows that are compared with the reference."""

SCHEMA = 1
RESULT = "lowbit bench attention"
FA3 = "FlashAttention-3"

PROTOCOL = (
    "Decode attention alone, one new token per row. us: median of "
    f"{REPLAYS} replays of a CUDA graph of calls over copies of the cache that exceed 3 times the L2, divided by the calls; "
    f"outputs are filled with NaN and {CHECKED} rows compared with the reference (rel_err). Pages are in random order; all "
    "rows have `context` tokens. limit_us: bytes of codes and scales of the context at limit_bytes_per_s, the rate that the "
    "choice of tiles assumes; read_bytes_per_s is that of a read-only kernel in the same run. impl lowbit: RoPE, rotation, "
    "quantization and append of the new token are in the launch; chosen: the tile that a step takes. impl FlashAttention-3: "
    "vLLM's build, as vLLM calls it, with q, k and v in e4m3; its schedule is computed before the graph; RoPE, quantization "
    "and append are other kernels of vLLM and are not timed. sm_clock_mhz, power_w: nvidia-smi's readings while the graph is "
    "replayed."
)


@dataclass(frozen=True)
class Timed:
    """The time of a tile for `rows` rows with `context` tokens before the new one. If `us` is None, `error` has the reason.
    Of FlashAttention-3, `tile` is the variant in words, and there is no modelled time."""

    kv: KVScheme
    rows: int
    context: int
    tile: DecodeTile | str
    chosen: bool
    us: float | None
    model_us: float | None
    limit_us: float
    gigabytes: float
    error: str | None = None
    rel_err: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    impl: str = "lowbit"

    def __str__(self) -> str:
        found = self.error
        if self.us is not None:
            found = f"{self.us:8.2f} us, {1e6 * self.gigabytes / self.us:4.0f} GB/s, {self.limit_us / self.us:.2f} of the limit"
        mark = "*" if self.chosen else " "
        by = f"model {self.model_us:.2f} us" if self.model_us is not None else self.impl
        return f"{self.kv!s:5} B {self.rows:3} context {self.context:6} {mark} {found}, {by}: {self.tile}"

    def as_json(self) -> dict[str, Any]:
        """Returns the row of a result file."""
        tile = self.tile
        packed = {"registers": tile.registers, "early_keys": tile.early_keys} if isinstance(tile, PackedTile) else {}
        return {
            "impl": self.impl, "kv_dtype": "float16" if self.kv == KV16 else str(self.kv), "rows": self.rows,
            "context": self.context, "tile": str(tile), "splits": None if isinstance(tile, str) else tile.active(self.context),
            "registers": packed.get("registers"), "early_keys": packed.get("early_keys"), "chosen": self.chosen, "us": self.us,
            "model_us": self.model_us, "limit_us": self.limit_us,
            "bytes": round(1e9 * self.gigabytes), "rel_err": self.rel_err, "sm_clock_mhz": self.sm_clock_mhz,
            "power_w": self.power_w, "error": self.error,
        }  # fmt: skip


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
) -> list[PackedTile]:  # fmt: skip
    """Returns the tile chosen for slots of at most `context` tokens, the same with keys loaded late if it loads them early, and
    the best ones by modelled cost that split this context differently or have another limit of registers."""
    longest = (context // PAGE + 1) * PAGE
    chosen = choose_packed(rows, shape, kv, longest, machine)
    able = [row.tile for row in candidates_packed(rows, shape, kv, longest, machine) if not row.reasons]
    able.sort(key=lambda tile: (packed_us(tile, rows, shape, kv, context, context, machine), tile.splits))
    unlike = {(chosen.active(context), chosen.registers): chosen}
    for tile in able:
        unlike.setdefault((tile.active(context), tile.registers), tile)
    late = [replace(chosen, early_keys=False)] if chosen.early_keys else []
    return [chosen, *late, *[*unlike.values()][1 : count + 1]]


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
    watched = monitor(torch.cuda.current_device())
    for tile in tiles:
        plan: PagedAttentionPlan | PackedAttentionPlan
        if isinstance(tile, PackedTile):
            plan = PackedAttentionPlan(rows, shape, kv, tile, machine)
        else:
            plan = PagedAttentionPlan(rows, shape, tile, machine)

        def call(pages: KVPages, plan: PagedAttentionPlan | PackedAttentionPlan = plan) -> Tensor:
            return plan(batch.qkv, pages, *state, None, None, None, *workspace(batch.qkv.device, *plan.workspace))

        us, error, worst, load = None, None, None, NOTHING
        try:
            graph = capture([lambda pages=pages: call(pages) for pages in batch.caches])  # type: ignore[misc]
            us = statistics.median(graph.times_us(REPLAYS))
            load = watched.while_running(lambda graph=graph: graph.times_us(2, warm=0))  # type: ignore[misc]
            outputs = graph.poisoned_outputs()
            if not all(y.isfinite().all() for y in outputs):
                raise WrongResult("outputs are not finite")
            worst = max(relative_error(y[some], reference) for y, reference in zip(outputs, expected, strict=False))
            if not worst <= TOLERANCE:
                raise WrongResult(f"relative error {worst:.3g}")
        except failures() as failure:
            us, error = None, reason(failure)
        model_us = modelled_us(tile, rows, shape, context, context, machine)
        if isinstance(tile, PackedTile):
            model_us = packed_us(tile, rows, shape, kv, context, context, machine)
        limit_us = 1e6 * nbytes / machine.read_bytes
        about = (worst, load.sm_clock_mhz, load.power_w)
        yield Timed(kv, rows, context, tile, tile == tiles[0], us, model_us, limit_us, 1e-9 * nbytes, error, *about)


def time_rival(rows: int, context: int, shape: AttentionShape, machine: Machine) -> Iterator[Timed]:
    """Times the variants of FlashAttention-3 over fp8 pages; its scales are one for each row and head of k and v."""
    nbytes = 2 * rows * context * shape.kv_heads * shape.head_dim
    limit_us = 1e6 * nbytes / machine.read_bytes
    for found in flash_attention.time_fa3(rows, context, shape, CHECKED):
        about = (found.error, found.rel_err, found.sm_clock_mhz, found.power_w, FA3)
        yield Timed(
            parse_kv("fp8"), rows, context, found.variant, False, found.us, None, limit_us, 1e-9 * nbytes, *about
        )  # fmt: skip


class Results:
    """The document of one run and its file, which is replaced after each case."""

    def __init__(self, path: Path, shape: AttentionShape, dtype: torch.dtype, machine: Machine) -> None:
        check_file(path, RESULT)
        bandwidth, kernel = read_bandwidth()
        self.path, self.rows = path, list[dict[str, Any]]()
        self.document: dict[str, Any] = {
            "result": RESULT, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
            "machine": machine_now(), "versions": versions(("vllm",)), "read_bytes_per_s": bandwidth, "read_kernel": kernel,
            "limit_bytes_per_s": machine.read_bytes, "dtype": str(dtype).removeprefix("torch."),
            "shape": {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}, "protocol": PROTOCOL,
            "rows": self.rows,
        }  # fmt: skip

    def add(self, rows: Sequence[Timed]) -> None:
        """Adds rows and writes the file."""
        self.rows += [row.as_json() for row in rows]
        write_json(self.path, self.document)

    def finish(self) -> None:
        """Marks the run as complete."""
        self.document["complete"] = True
        write_json(self.path, self.document)


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
    parser.add_argument("--fa3", action="store_true", help="time vLLM's FlashAttention-3 over fp8 pages too")
    parser.add_argument("--out", type=Path, help="result file (JSON), written after each case")
    given = parser.parse_args()
    if given.fa3 and (reasons := flash_attention.refusals()):
        parser.error("; ".join(reasons))
    if not torch.cuda.is_available():
        parser.error(f"this times an NVIDIA GPU and torch {torch.__version__} sees none")
    heads, kv_heads, head_dim = given.heads
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, head_dim)
    machine, dtype = machine_of("cuda"), torch.bfloat16 if given.bf16 else torch.float16
    warm_up()
    pairs = [(rows, context) for rows in given.rows for context in given.contexts]
    if given.cases:
        pairs = [(int(rows), int(context)) for rows, context in (case.split("x") for case in given.cases)]
    results = Results(given.out, shape, dtype, machine) if given.out else None

    def show(found: Iterator[Timed]) -> None:
        timed = sorted(found, key=lambda row: row.us or float("inf"))
        print(*timed, sep="\n", flush=True)
        if results is not None:
            results.add(timed)
        torch.cuda.empty_cache()

    tiles: Sequence[DecodeTile]
    for rows, context in pairs if given.fa3 else ():
        show(time_rival(rows, context, shape, machine))
    for kv in map(parse_kv, given.kv):
        for rows, context in pairs:
            if kv == KV16:
                tiles = tiles_to_time(rows, context, shape, machine, given.tiles)
            else:
                tiles = packed_tiles(rows, context, shape, kv, machine, given.tiles)
            show(time_tiles(rows, context, shape, kv, dtype, tiles, machine))
    if results is not None:
        results.finish()


if __name__ == "__main__":
    main()
