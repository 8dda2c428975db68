"""Reads the layers and files of a quantized checkpoint's folder."""

from __future__ import annotations

from pathlib import Path

from lowbit.checkpoint import CheckpointReader


def layers(folder):
    """The folder's quantized layers by name, after a check that no tensor is missing."""
    with CheckpointReader(folder) as reader:
        reader.check()
        return {name: reader.layer(name) for name in reader.manifest.layers}


def files(folder):
    """The bytes of the folder's files by name."""
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}
