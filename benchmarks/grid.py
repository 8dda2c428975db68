"""Products for judging the choice of tile: weights of known models, whole and split for tensor parallelism.

A fixed half of the weights is for tuning, the other half for judging. Only the first may be used to fit the cost model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Half = Literal["tuned", "untuned"]
HALVES: tuple[Half, ...] = ("tuned", "untuned")

SCHEMES = ("w4a16_g128", "w6e3m2a16", "w8a16", "w8e4m3a8e4m3")
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
PARTS = (1, 2, 4)
"""Numbers of tensor-parallel GPUs among which a weight is split."""

KNOWN = frozenset(
    {(2048, 2048), (4096, 4096), (4096, 14336), (6144, 4096), (8192, 8192), (8192, 28672), (28672, 4096), (28672, 8192)}
)
"""Weights that had been used to choose tiles before this grid existed. They belong to the half for tuning."""

WHOLE_K = 128
"""The parts into which K is split must be multiples of this; others would split a group of scales."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a language model, from its config.json; `more`: further weights (N, K)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    more: tuple[tuple[int, int], ...] = ()

    def weights(self, parts: int) -> Iterator[tuple[int, int]]:
        """Yields (N, K) of qkv, o, gate-up, down and head on one of `parts` GPUs: qkv, gate-up and head are split by rows, o
        and down along K. For a mixture of experts, gate-up and down are those of one expert.
        """
        of_heads = self.heads * self.head_dim
        if self.kv_heads % parts == 0:
            yield (of_heads + 2 * self.kv_heads * self.head_dim) // parts, self.hidden
        yield self.hidden, of_heads // parts
        yield 2 * self.intermediate // parts, self.hidden
        yield self.hidden, self.intermediate // parts
        yield self.vocab // parts, self.hidden
        if parts == 1:
            yield from self.more


MODELS: dict[str, ModelShape] = {
    "Llama-2-7B": ModelShape(4096, 32, 32, 128, 11008, 32000),
    "Llama-2-13B": ModelShape(5120, 40, 40, 128, 13824, 32000),
    "Llama-3-8B": ModelShape(4096, 32, 8, 128, 14336, 128256),
    "Llama-3-70B": ModelShape(8192, 64, 8, 128, 28672, 128256),
    "Qwen2.5-7B": ModelShape(3584, 28, 4, 128, 18944, 152064),
    "Qwen2.5-32B": ModelShape(5120, 40, 8, 128, 27648, 152064),
    "Qwen3-8B": ModelShape(4096, 32, 8, 128, 12288, 151936),
    "Qwen3-30B-A3B": ModelShape(2048, 32, 4, 128, 768, 151936),
    "Mistral-Small-24B": ModelShape(5120, 32, 8, 128, 32768, 131072),
    "Mixtral-8x7B": ModelShape(4096, 32, 8, 128, 14336, 32000),
    "Gemma-2-9B": ModelShape(3584, 16, 8, 256, 14336, 256000),
    # Latent attention has q and two low-rank factors of k and v instead of qkv. Experts have size 1408, the first layer 10944.
    "DeepSeek-V2-Lite": ModelShape(
        2048, 16, 16, 128, 1408, 102400, ((3072, 2048), (576, 2048), (4096, 512), (21888, 2048), (2048, 10944))
    ),
}


def half_of(shape: tuple[int, int]) -> Half:
    """Returns the half of a weight (N, K): "tuned" for those in `KNOWN`, otherwise decided by a checksum."""
    n, k = shape
    return "tuned" if shape in KNOWN or zlib.crc32(f"{n}x{k}".encode()) % 2 else "untuned"


def weights(
    models: Iterable[str] = MODELS, parts: Iterable[int] = PARTS, half: Half | None = None
) -> list[tuple[int, int]]:  # fmt: skip
    """Returns the weights (N, K) of the models without duplicates; only those of `half` if given. The order is by checksum and
    alternates between the halves, so that an interrupted run is a fair sample. Raises ValueError for an unknown model.
    """
    given = list(parts)
    found: set[tuple[int, int]] = set()
    for name in models:
        if name not in MODELS:
            raise ValueError(f"models are {', '.join(MODELS)}, got {name!r}")
        found |= {shape for count in given for shape in MODELS[name].weights(count) if shape[1] % WHOLE_K == 0}
    mixed = sorted(found, key=lambda shape: zlib.crc32(f"{shape[0]} by {shape[1]}".encode()))
    if half is not None:
        return [shape for shape in mixed if half_of(shape) == half]
    by_half = {each: [shape for shape in mixed if half_of(shape) == each] for each in HALVES}
    turns = max(map(len, by_half.values()))
    return [shapes[turn] for turn in range(turns) for shapes in by_half.values() if turn < len(shapes)]
