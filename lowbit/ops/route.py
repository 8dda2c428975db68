"""The routing of tokens to experts: which slots each expert has, in order, and the list of tiles that products work through."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """Slots of T tokens with top_k experts each; slot t * top_k + s is choice s of token t.

    experts int32 [T, top_k]; weights float32 [T, top_k]; order int32 [T * top_k]: slots sorted by expert, ascending within an
    expert; offsets int32 [E + 1]: first position in `order` of each expert; tiles int32 [bound, 3]: expert, first position in
    `order`, rows, at most `tile_rows`; tile_count int32 [1]: how many tiles there are.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor
    tile_rows: int
    tiles: Tensor
    tile_count: Tensor
