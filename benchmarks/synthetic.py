"""Checkpoint files of known shapes with random weights: the cost of loading does not depend on their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.writer import CheckpointWriter
from lowbit.models.conversion_targets import target_of
from lowbit.quantize import rtn

Done = Callable[[int, int], None]
"""Called with (bytes written, total bytes)."""


def write_checkpoint(
    folder: Path, model: PreTrainedModel, kind: str, scheme: str, device: torch.device, done: Done = lambda written, total: None
) -> None:
    """Writes a checkpoint of `model` (on the meta device) with Gaussian weights, generated on `device`, to a new folder.

    kind: "16-bit", or a file format in `conversion_targets.TARGETS`, with all linear layers except the LM head in `scheme`.
    Raises CheckpointError before writing if the disk has too little space. Deletes incomplete output on failure.
    """
    config = model.config.to_dict()
    config |= {"architectures": [type(model).__name__]}
    target = None if kind == "16-bit" else target_of(kind, gptq_v2=False, model=config, dtype=model.dtype)
    head = model.get_output_embeddings()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    total, written = sum(p.nbytes for p in model.parameters()), 0
    with CheckpointWriter(folder) as writer:
        writer.reserve(total)
        for name, tensor in _gaussian(model, device):
            layer = name.removesuffix(".weight")
            if target is None or layer not in linears:
                writer.add(name, tensor)
            else:
                q = rtn(tensor, scheme)
                if reasons := target.refusals(layer, q):
                    raise CheckpointError(f"{kind} files cannot hold {layer}: {'; '.join(reasons)}")
                for part, stored in target.tensors(layer, q).items():
                    writer.add(part, stored)
            written += tensor.nbytes
            done(written, total)
        writer.finish(config, None if target is None else target.config([], {}))


def _gaussian(model: PreTrainedModel, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter by name. Norms are 1; matrices are Gaussian, scaled to preserve the magnitude of activations."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        made = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.dim() == 2:
            made.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        yield name, made
