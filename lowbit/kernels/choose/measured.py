"""Measured tiles, which rank before all modelled ones."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.tiles import DENSE_BITS, KINDS, ChainTile, GemmShape, RingTile, Role, Tile, WgmmaTile
from lowbit.kernels.choose.tuned import read


@dataclass(frozen=True)
class Measured:
    """A measured exception to the cost model: for a shape, `tile` took `us` where the modelled choice took `instead_us`."""

    product: str
    date: str
    shape: GemmShape
    tile: Tile
    us: float
    instead_us: float

    def __str__(self) -> str:
        margin = 100 * (1 - self.us / self.instead_us)
        return f"measured on {self.product}, {self.date}, M {self.shape.m}: {self.us:g} us, {margin:.0f} % less than modelled"

    def holds_for(self, shape: GemmShape, machine: Machine) -> bool:
        """True for the measured shape, and for the same shape with fewer tokens, down to half as many."""
        same = (self.product, self.shape.n, self.shape.k, self.shape.bits) == (machine.product, shape.n, shape.k, shape.bits)
        return same and self.shape.m < 2 * shape.m <= 2 * self.shape.m


MEASURED: tuple[Measured, ...] = (
    Measured(
        "H200", "2026-11-21", GemmShape(m=16, n=6144, k=4096, bits=4),
        RingTile(tokens=16, row_blocks=6, rounds=1, warps_n=1, warps_k=8, splits=2), 7.8, 8.4,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=128, n=6144, k=4096, bits=4),
        WgmmaTile(tokens=128, warpgroups=2, stages=8, splits=2, token_group=2), 18.3, 19.0,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=1, n=4096, k=4096, bits=4),
        RingTile(tokens=8, row_blocks=2, rounds=4, warps_n=1, warps_k=8, splits=1), 4.5, 4.9,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=256, n=4096, k=4096, bits=4),
        WgmmaTile(tokens=128, warpgroups=2, stages=8, splits=2, token_group=2), 18.4, 19.1,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=1, n=4096, k=14336, bits=4),
        RingTile(tokens=8, row_blocks=2, rounds=2, warps_n=1, warps_k=8, splits=1), 11.8, 12.8,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=1, n=4096, k=4096, bits=6),
        RingTile(tokens=8, row_blocks=2, rounds=1, warps_n=1, warps_k=16, splits=1), 4.9, 5.7,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=4, n=15360, k=5120, bits=6),
        RingTile(tokens=8, row_blocks=2, rounds=2, warps_n=2, warps_k=4, splits=1), 16.9, 20.7,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=16, n=5120, k=13824, bits=6),
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=3, token_group=2), 18.7, 21.3,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=16, n=5120, k=13824, bits=8),
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=3, token_group=2), 21.2, 22.1,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=16, n=5120, k=1280, bits=8),
        WgmmaTile(tokens=16, warpgroups=4, stages=8, splits=4, token_group=2), 5.6, 5.9,
    ),
)  # fmt: skip
"""Shapes for which the modelled choice was more than 3 % slower than the measured tile. Printed by `python -m benchmarks
tiles`."""


@dataclass(frozen=True)
class MeasuredChain:
    """A tile of the fastest decode step tried: Llama-3-8B's shape, programmatic dependent launch of all kernels, context 1024.

    Batches 1, 4, 16 and 64 were run; `tokens` are the first and last M for which a row is used.
    """

    product: str
    date: str
    role: Role
    tokens: tuple[int, int]
    n: int
    k: int
    bits: int
    tile: ChainTile
    note: str

    def __str__(self) -> str:
        return f"measured in a step on {self.product}, {self.date}, {self.tokens[0]} to {self.tokens[1]} tokens: {self.note}"

    def holds_for(self, role: Role, shape: GemmShape, machine: Machine) -> bool:
        """True if the row applies to this GEMM."""
        same = (self.product, self.role, self.n, self.k, self.bits) == (machine.product, role, shape.n, shape.k, shape.bits)
        return same and self.tokens[0] <= shape.m <= self.tokens[1]


MEASURED_CHAINS: tuple[MeasuredChain, ...] = tuple(
    MeasuredChain("H200", date, role, tokens, n, k, bits, read(tile, KINDS), note)  # type: ignore[arg-type]
    for date, role, tokens, n, k, bits, tile, note in (
        ("2026-11-22", "norm", (1, 8), 6144, 4096, 4, "ring 8 3 2 1 8 1 1",
         "qkv; with o and down alone on an SM too, the step took 1593 us instead of 1937 at batch 1"),
        ("2026-11-22", "residual", (1, 2), 4096, 4096, 4, "ring 8 2 2 1 8 1 1",
         "o; a ring of 4 of 2 row blocks, alone on an SM"),
        ("2026-11-23", "residual", (3, 8), 4096, 4096, 4, "ring 8 3 2 1 8 1 1",
         "o; a step of 4 layers 334.2 us at batch 4, 337.4 with two row blocks"),
        ("2026-11-22", "gated", (1, 8), 28672, 4096, 4, "ring 8 7 1 2 4 1 1",
         "gate-up; a step of 4 layers 309.1 us, with 256 blocks of half as many rows, two on an SM, 311.5"),
        ("2026-11-22", "residual", (1, 2), 4096, 14336, 4, "ring 8 2 2 1 8 1 1", "down; alone on an SM"),
        ("2026-11-22", "residual", (3, 8), 4096, 14336, 4, "ring 8 2 1 1 16 1 1",
         "down; 80 us less in a step of batch 4 than 8 warps with a ring of 4"),
        ("2026-11-22", "norm", (3, 8), 128256, 4096, 8, "ring 8 4 1 1 8 1",
         "head; 2 us less at batch 4 than with 7 row blocks"),
        ("2026-11-22", "gated", (1, 8), 28672, 4096, 6, "ring 8 7 1 1 8 1",
         "gate-up; 20.5 us where the modelled one adds 29.7 to a layer"),
        ("2026-11-22", "residual", (1, 8), 4096, 14336, 6, "ring 8 2 2 1 8 1 1", "down; alone on an SM, 1 us less a layer"),
        ("2026-11-22", "norm", (1, 8), 6144, 4096, 8, "ring 8 3 1 1 8 1 1", "qkv; alone on an SM"),
        ("2026-11-22", "residual", (1, 8), 4096, 4096, 8, "ring 8 2 2 1 8 1 1",
         "o; with qkv and down so too, a step of 4 layers 392.4 us instead of 402.7 at batch 1"),
        ("2026-11-22", "residual", (1, 8), 4096, 14336, 8, "ring 8 2 2 1 8 1 1", "down; alone on an SM"),
        ("2026-11-23", "residual", (9, 16), 4096, 4096, 4, "wgmma 16 2 8 4 2",
         "o; a step of 4 layers 449.3 us, 454.1 with 48 rows of the small-M kernel"),
        ("2026-11-23", "residual", (9, 16), 4096, 14336, 4, "wgmma 16 4 8 8 2",
         "down; 469.5 us, 488.0 with the small-M kernel's 128 rows in 4 splits"),
        ("2026-11-23", "gated", (9, 16), 28672, 4096, 4, "ring 16 7 1 2 4 1",
         "gate-up; 488.0 us, 491.0 with 256 rows of the large-M kernel"),
        ("2026-11-23", "residual", (9, 16), 4096, 14336, 6, "wgmma 16 2 8 4 2",
         "down; a step of 4 layers 489.9 us, 523.2 with the small-M kernel's 128 rows in 4 splits"),
        ("2026-11-22", "norm", (1, 2), 128256, 4096, 8, "ring 8 7 1 1 8 1", "head; the fastest of those tried at batch 1"),
        ("2026-11-23", "norm", (9, 16), 128256, 4096, 8, "wgmma 16 4 8 1 2",
         "head; a step of 4 layers 466.8 us, 472.4 with 256 rows of the small-M kernel"),
        ("2026-11-23", "gated", (9, 16), 28672, 4096, 6, "wgmma 16 4 8 1 2",
         "gate-up; a step of 4 layers 523.2 us, 536.1 with 224 rows of the small-M kernel"),
        ("2026-11-23", "gated", (9, 16), 28672, 4096, 8, "wgmma 16 4 8 1 2",
         "gate-up; a step of 4 layers 512.0 us, 514.8 with 224 rows of the small-M kernel"),
        ("2026-11-23", "residual", (9, 16), 4096, 14336, 8, "wgmma 16 2 8 4 2",
         "down; a step of 4 layers 512.0 us, 529.1 with 64 rows of the small-M kernel in 2 splits"),
        ("2026-11-23", "norm", (33, 64), 128256, 4096, 8, "wgmma 64 2 8 1 2",
         "head; a step of 4 layers 785.4 us, 811.5 with 256 rows in 4 stages"),
        ("2026-11-23", "residual", (9, 16), 4096, 4096, 6, "wgmma 16 2 8 4 2",
         "o; a step of 4 layers 472.1 us, 481.1 with 48 rows of the small-M kernel"),
        ("2026-11-23", "residual", (9, 16), 4096, 4096, 8, "wgmma 16 2 8 4 2",
         "o; a step of 4 layers 509.7 us, 512.0 with the ring kernel"),
        ("2026-11-23", "residual", (1, 8), 4096, 14336, DENSE_BITS, "ring 8 2 2 1 8 1 1",
         "down; a step of 4 layers 727.6 us, 734.8 with a ring of 2"),
        ("2026-11-23", "norm", (1, 8), 128256, 4096, DENSE_BITS, "ring 8 4 1 1 8 1 1",
         "head; a step of 4 layers 720.3 us, 727.6 with 128 rows of 4 warps"),
        ("2026-11-23", "residual", (9, 16), 4096, 14336, DENSE_BITS, "ring 16 4 2 1 4 2 1",
         "down; a step of 4 layers 826.1 us, 837.0 with 128 rows in 4 splits and a ring of 2"),
        ("2026-11-23", "norm", (9, 16), 128256, 4096, DENSE_BITS, "ring 16 7 1 1 4 1",
         "head; a step of 4 layers 821.2 us, 828.3 with 256 rows and a ring of 2"),
    )
)  # fmt: skip
"""Measured tiles of decode steps. A tile is written as in the files of `lowbit tune`: its kernel, then its fields in order."""
