"""What tiles whose parts of K blocks share equally (parts/shares.py) ask of a problem, and what they cost.

`iterations` are those of a kernel's main loop that cover K.
"""

from __future__ import annotations

LEAST_SHARE = 2
"""Iterations that a block has at least."""

PART_US = (1.5, 0.045)
"""Of a block whose parts of tiles meet: at once, and for each KiB of 256 sums of a tile."""


def sharing_blocks(tiles: int, iterations: int, sm_count: int) -> int:
    """How many blocks share."""
    return max(1, min(sm_count, tiles * iterations // LEAST_SHARE))


def share_refusals(tiles: int, iterations: int, sm_count: int) -> tuple[str, ...]:
    """Why so many tiles are not shared; empty if they are."""
    blocks = sharing_blocks(tiles, iterations, sm_count)
    return (f"{tiles} tiles are whole turns of {blocks} blocks",) if tiles % blocks == 0 else ()


def longest_share(tiles: int, iterations: int, sm_count: int) -> int:
    """Iterations of the block that has the most."""
    blocks = sharing_blocks(tiles, iterations, sm_count)
    turns = max(tiles // blocks - 1, 0)
    return turns * iterations + -(-(tiles - turns * blocks) * iterations // blocks)
