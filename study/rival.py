"""Another tool's learned rounding, auto-round (Intel), called as its documentation says: the rival of `study.learned` and
`study.quantizing_speed`.

Source: auto_round/autoround.py of auto-round 0.16.1, `AutoRound` and the options of its SignRoundConfig.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lowbit.formats import IntFormat, PerGroup, ZeroPoint, parse_scheme
from lowbit.hardware.machine import torch_device
from lowbit.models.hf import plan_for
from lowbit.models.skeleton import tokenizer_of

AUTO_ROUND = "auto-round"
RIVALS = (AUTO_ROUND,)

Rival = Annotated[str | None, typer.Option(help=f"Also measure this tool: {AUTO_ROUND} (pip install {AUTO_ROUND}).")]
Iterations = Annotated[int, typer.Option(min=1, help="Iterations of learning a layer, of both tools.")]
Batch = Annotated[int, typer.Option(min=1, help="Pieces of an iteration, of both tools.")]

ROWS_CHECKED = 8
"""Rows of each weight whose groups are checked for the number of values."""


def check_rival(name: str | None) -> None:
    """Raises ValueError for an unknown rival, and for one that is not installed. None is no rival."""
    if name is None:
        return
    if name not in RIVALS:
        raise ValueError(f"--rival {name!r}: not known; the rival is {', '.join(RIVALS)}")
    require()


def require() -> ModuleType:
    """Returns the module of auto-round. Raises ValueError that says what to install if it cannot be imported."""
    try:
        return importlib.import_module("auto_round")
    except ImportError as error:
        missing = f"it needs {error.name}" if error.name not in (None, "auto_round") else "not installed"
        raise ValueError(f"{AUTO_ROUND}: {missing}; pip install {error.name or AUTO_ROUND}".replace("_", "-")) from None


def bits_and_group(scheme: str) -> tuple[int, int]:
    """Returns bits and group size of a scheme. Raises ValueError unless it has symmetric integers in groups and 16-bit inputs,
    which both tools write."""
    parsed = parse_scheme(scheme)
    plain = parsed.zero is ZeroPoint.NONE and parsed.activation is None and isinstance(parsed.weight, IntFormat)
    if not plain or not isinstance(parsed.granularity, PerGroup):
        raise ValueError(f"{scheme}: compared are integers in groups with 16-bit inputs, such as w2a16_g32")
    return parsed.weight.bits, parsed.granularity.size


def bits_per_weight(scheme: str, shapes: Collection[tuple[int, int]]) -> float:
    """Returns the bits per weight of matrices [N, K]: codes, and a 16-bit scale for each group. The last group of a row may be
    short."""
    bits, group = bits_and_group(scheme)
    stored = sum(n * (k * bits + math.ceil(k / group) * 16) for n, k in shapes)
    return stored / sum(n * k for n, k in shapes)


def quantize_by_rival(
    folder: Path, scheme: str, tokens: Tensor, *, iterations: int, batch: int, seed: int, device: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Quantizes the model in `folder` by auto-round on tokens [S, T]. Returns the model with dequantized weights in bf16, the
    dtype in which auto-round trains, and what was set.

    `enable_alg_ext` is on, and torch.compile on a GPU. Raises RuntimeError if a linear layer that lowbit quantizes has more
    values in a group than the scheme has codes: then the two did not quantize the same layers.
    """
    package, (bits, group), where = require(), bits_and_group(scheme), torch_device(device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).eval()
    linears = list(plan_for(model, scheme, None, False).linears)
    compiles = where.type != "cpu"
    quantizer = package.AutoRound(
        model, tokenizer_of(folder), bits=bits, group_size=group, sym=True, data_type="int",
        act_bits=16, iters=iterations, nsamples=len(tokens), seqlen=tokens.shape[1], batch_size=batch,
        dataset=list(tokens.split(batch)), enable_alg_ext=True, enable_torch_compile=compiles, seed=seed,
        device_map=(where.index or 0) if where.type == "cuda" else str(where),
    )  # fmt: skip
    quantized, _ = quantizer.quantize()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    _check_codes(quantized, linears, bits, group)
    return quantized, {"version": package.__version__, "enable_alg_ext": True, "enable_torch_compile": compiles}


def _check_codes(model: PreTrainedModel, linears: list[str], bits: int, group: int) -> None:
    """Raises RuntimeError if the first rows of a linear layer have more values in a group than there are codes."""
    for name in linears:
        weight = model.get_submodule(name).get_parameter("weight").detach()[:ROWS_CHECKED].float()
        width = min(group, weight.shape[1])  # the last group of a row may be short
        groups = weight[:, : weight.shape[1] // width * width].reshape(-1, width).sort(-1).values
        values = 1 + int((groups.diff(dim=-1) != 0).sum(-1).max())
        if values > 1 << bits:
            raise RuntimeError(f"{AUTO_ROUND} left {values} values in a group of {name}, {bits} bits have {1 << bits}")
