"""The file of a checkpoint with what its layers compute: sums of their outputs for known inputs.

When the checkpoint is loaded, `models.numerics` computes the same sums with the kernels that will serve it. A misplaced scale,
a wrong group, a transposed expert or a kernel that expects another layout changes the sums by more than rounding does.

The inputs are `PROBES` rows of +-amplitude, with signs from a hash of row and channel, so that every code and every scale
affects every row. Each stored number is a sum of the outputs of up to `CHANNELS` neighbouring channels. Outputs are multiplied
by different factors (`sums_of`), so that exchanged channels change the sum. Sums are divided by the root mean square of the
layer's outputs and stored as fp16.
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
"""Number of inputs (rows of x) of a layer."""
CHANNELS = 4
"""Number of output channels in a stored sum."""
KEPT_LOGITS = 32
"""Number of logits that are stored for each token: the largest ones."""
TOKENS = 16
"""Number of tokens whose logits are stored."""
_FACTORS = (1.0, 1.25, 1.5, 1.75)
_FACTOR_RMS = math.sqrt(sum(f * f for f in _FACTORS) / len(_FACTORS))


@dataclass(frozen=True)
class LayerSums:
    """What one layer computes.

    sums: float32 [PROBES, ceil(N / CHANNELS)], divided by `rms`, the root mean square of the outputs. outputs: N. error: error
    of the outputs relative to those of the 16-bit weights, or None. experts: the layer has E experts, and row e of sums [E, ..]
    is the output of expert e for one input.
    """

    sums: Tensor
    rms: float
    outputs: int
    error: float | None = None
    experts: bool = False


@dataclass(frozen=True)
class Numerics:
    """The layers of a checkpoint by name, and the largest logits of `TOKENS` tokens: their token ids and their values, both
    [TOKENS, KEPT_LOGITS]; None if they were not computed."""

    layers: dict[str, LayerSums]
    logits: tuple[Tensor, Tensor] | None = field(default=None)


def _hash(n: int, seed: int) -> Tensor:
    """Returns int64 [n] with 32 random bits each, by the finalizer of MurmurHash3 (public domain) of index and seed."""
    x = torch.arange(n, dtype=torch.int64) + (seed + 1) * 0x9E3779B9
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def probes(k: int, amplitude: float = 1.0) -> Tensor:
    """Returns the inputs float32 [PROBES, k], whose elements are +-amplitude."""
    signs = torch.stack([(_hash(k, row) >> 7) & 1 for row in range(PROBES)])
    return (2.0 * signs - 1.0).float() * amplitude


def tokens(vocab: int, count: int = TOKENS) -> Tensor:
    """Returns token ids int64 [count] below `vocab`; the logits of the first TOKENS are stored."""
    return _hash(count, 1000) % vocab


def sums_of(y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sums, norms), float32 [rows, ceil(N / CHANNELS)], of outputs y [rows, N]: over the channels of each sum, the sum
    of factor * y, and the root of the sum of its squares."""
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
    """Returns the largest relative difference between the sums of y [rows, N] and the stored sums `kept`.

    A difference is relative to the norm of the outputs in its sum, or to that of outputs of half the layer's root mean square,
    if that is larger. Row i of y is the output for input i mod PROBES; the inputs are combined by their root mean square. For
    experts, row e is the output of expert e, and experts are not combined. The result is infinite if y is not finite or has
    another shape.
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
    """Returns the content of a checkpoint's file of numerics; None if there is no such file, or one of another version. Raises
    CheckpointError, naming the file, if it is damaged."""
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
