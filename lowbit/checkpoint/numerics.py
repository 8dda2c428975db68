"""The file of a checkpoint with what its layers compute: sums of their outputs for known inputs.

Whoever loads the checkpoint computes the same sums with the kernels that will serve it (`models.numerics`). A scale in another
place, a wrong group, a transposed expert or a kernel with another layout changes them by more than rounding does.

The inputs are `PROBES` rows of +-amplitude, the signs by a hash of row and channel, so that every code and every scale counts
in every row. Each stored number is a sum of the outputs of up to `CHANNELS` neighbouring channels with different factors, so
that channels cannot change places. Numbers are divided by the layer's root mean square and stored as fp16.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.checkpoint.reader import read_json
from lowbit.checkpoint.schema import CheckpointError
from lowbit.checkpoint.target import NUMERICS as FILE

VERSION = 1
PROBES = 4
"""Inputs of a layer, rows of x."""
CHANNELS = 4
"""Output channels in a stored sum."""
KEPT_LOGITS = 32
"""Largest logits that are stored of each token."""
TOKENS = 16
"""Tokens whose logits are stored."""
_FACTORS = (1.0, 1.25, 1.5, 1.75)
_FACTOR_RMS = math.sqrt(sum(f * f for f in _FACTORS) / len(_FACTORS))


@dataclass(frozen=True)
class LayerSums:
    """What one layer computes.

    sums: float32 [PROBES, ceil(N / CHANNELS)], of experts [E, ceil(H / CHANNELS)], divided by `rms`, the root mean square of
    its outputs. outputs: N. error: relative error of the outputs to those of the 16-bit weights, or None. experts: the rows are
    those of the experts, each for one input.
    """

    sums: Tensor
    rms: float
    outputs: int
    error: float | None = None
    experts: bool = False


@dataclass(frozen=True)
class Numerics:
    """The layers of a checkpoint by name, and the largest logits of `TOKENS` tokens: their numbers and values
    [TOKENS, KEPT_LOGITS], or None where they were not computed."""

    layers: dict[str, LayerSums]
    logits: tuple[Tensor, Tensor] | None = field(default=None)


def _hash(n: int, seed: int) -> Tensor:
    """int64 [n] of 32 random bits each: the finalizer of MurmurHash3 (public domain) of channel and seed."""
    x = torch.arange(n, dtype=torch.int64) + (seed + 1) * 0x9E3779B9
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def probes(k: int, amplitude: float = 1.0) -> Tensor:
    """Returns the inputs float32 [PROBES, k]: +-amplitude."""
    signs = torch.stack([(_hash(k, row) >> 7) & 1 for row in range(PROBES)])
    return (2.0 * signs - 1.0).float() * amplitude


def tokens(vocab: int, count: int = TOKENS) -> Tensor:
    """Returns the tokens int64 [count] of a vocabulary of `vocab`; the logits of the first TOKENS are stored."""
    return _hash(count, 1000) % vocab


def sums_of(y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sums, norms), float32 [rows, ceil(N / CHANNELS)], of outputs y [rows, N]: sum and root of the sum of squares of
    factor * y over the channels of each part."""
    rows, n = y.shape
    code = _hash(n, 2000).to(y.device)
    factor = torch.tensor(_FACTORS, device=y.device)[(code >> 3) & 3] * (2.0 * ((code >> 7) & 1) - 1.0)
    parts = torch.nn.functional.pad(y.float() * factor, (0, -n % CHANNELS)).view(rows, -1, CHANNELS)
    return parts.sum(-1), parts.square().sum(-1).sqrt()


def layer_sums(y: Tensor, error: float | None = None, *, experts: bool = False) -> LayerSums:
    """Returns the record of a layer with outputs y [rows, N]."""
    rms = float(y.float().square().mean().sqrt())
    return LayerSums(sums_of(y)[0].cpu() / max(rms, 1e-30), rms, y.shape[1], error, experts)


def difference(y: Tensor, kept: LayerSums) -> float:
    """Returns the largest difference of the sums of y [rows, N] from those that were kept, relative to the outputs in a sum, or
    to half of the layer's root mean square where they are smaller; infinite if y is not finite or has another shape.

    Row i is the output for input i mod PROBES; the differences of the inputs are combined by their root mean square. Of experts
    row e is that of expert e, each by itself.
    """
    if not bool(y.isfinite().all()):
        return float("inf")
    sums, norms = sums_of(y)
    expected = kept.sums.to(y.device) * kept.rms
    if y.shape[1] != kept.outputs or len(y) < len(expected):
        return float("inf")
    if kept.rms == 0:
        return 0.0 if not y.any() else float("inf")
    row = torch.arange(len(sums), device=y.device) % len(expected)
    off = torch.zeros_like(expected).scatter_reduce_(0, row[:, None].expand_as(sums), (sums - expected[row]).abs(), "amax")
    norms = norms[: len(expected)]
    if not kept.experts:
        off, norms = (t.square().mean(0).sqrt() for t in (off, norms))
    return float((off / norms.clamp(min=0.5 * _FACTOR_RMS * CHANNELS**0.5 * kept.rms)).max())


def to_text(numerics: Numerics) -> str:
    """Returns the text of the file."""
    stated: dict[str, Any] = {"version": VERSION, "layers": {name: _stated(of) for name, of in numerics.layers.items()}}
    if numerics.logits is not None:
        ids, values = numerics.logits
        stated["logits"] = {"ids": ids.tolist(), "values": [[round(v, 4) for v in row] for row in values.tolist()]}
    return json.dumps(stated) + "\n"


def read(folder: Path) -> Numerics | None:
    """Returns what the file of a checkpoint states; None if it has none or one of a later version. Raises CheckpointError,
    naming the file, for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return None
    stated = read_json(path)
    if stated.get("version") != VERSION:
        return None
    try:
        layers = {name: _layer(of) for name, of in stated["layers"].items()}
        logits = stated.get("logits")
        kept = None if logits is None else (torch.tensor(logits["ids"]), torch.tensor(logits["values"]))
        if kept is not None and not (kept[0].shape == kept[1].shape == (TOKENS, KEPT_LOGITS)):
            raise ValueError(f"logits have the shape {tuple(kept[0].shape)}")
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise CheckpointError(
            f"{path}: is damaged ({error}); `lowbit quantize` writes it, and without it nothing is checked"
        ) from error
    return Numerics(layers, kept)


def _stated(layer: LayerSums) -> dict[str, Any]:
    sums = base64.b64encode(layer.sums.clamp(-65504, 65504).half().contiguous().numpy().tobytes()).decode()
    stated = {"rms": layer.rms, "rows": len(layer.sums), "outputs": layer.outputs, "sums": sums}
    return stated | ({} if layer.error is None else {"error": layer.error}) | ({"experts": True} if layer.experts else {})


def _layer(stated: Mapping[str, Any]) -> LayerSums:
    values = np.frombuffer(base64.b64decode(stated["sums"], validate=True), np.float16)
    sums = torch.from_numpy(values.astype(np.float32)).view(int(stated["rows"]), -1)
    return LayerSums(sums, float(stated["rms"]), int(stated["outputs"]), stated.get("error"), bool(stated.get("experts")))
