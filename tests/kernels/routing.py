"""Expert routings for tests, in plain torch. Entries beyond the existing tiles are poisoned."""

from __future__ import annotations

import torch

from lowbit.ops.route import Routing


def routing_of(experts, count, tile_rows, weights=None):
    """The routing for the chosen `experts`, int [T, top_k], of `count` experts. Router weights are random unless given."""
    experts, device = experts.cpu(), experts.device
    flat = experts.flatten().long()
    order = torch.argsort(flat, stable=True)
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = torch.bincount(flat, minlength=count).cumsum(0)
    tiles = [
        (e, first, min(tile_rows, int(offsets[e + 1]) - first))
        for e in range(count)
        for first in range(int(offsets[e]), int(offsets[e + 1]), tile_rows)
    ]
    bound = min(len(flat), count) + len(flat) // tile_rows
    assert len(tiles) <= bound
    table = torch.full((bound, 3), 1 << 30, dtype=torch.int32)
    if tiles:
        table[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
    if weights is None:
        weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(len(flat)))
    tensors = (experts.int(), weights.float(), order.int(), offsets.int())
    tensors = [t.to(device) for t in tensors]
    return Routing(*tensors, tile_rows, table.to(device), torch.tensor([len(tiles)], dtype=torch.int32, device=device))


def choices(tokens, top_k, count, generator, device="cpu"):
    """Random experts, distinct within a token: int32 [tokens, top_k]."""
    scores = torch.rand(tokens, count, generator=generator)
    return scores.argsort(dim=1)[:, :top_k].int().to(device)
