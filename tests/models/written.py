"""What a quantized checkpoint's folder holds."""

from __future__ import annotations

from pathlib import Path

from lowbit.checkpoint import CheckpointReader


def layers(folder):
    """Its quantized layers by name, after a check that every tensor is there."""
    with CheckpointReader(folder) as reader:
        reader.check()
        return {name: reader.layer(name) for name in reader.manifest.layers}


def files(folder):
    """The bytes of its files by name."""
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}
