"""The model card of a lowbit checkpoint: README.md, for people and for hubs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit._version import __version__
from lowbit.checkpoint.schema import Manifest
from lowbit.checkpoint.target import CARD, CARD_MARK, is_card, replace_file

_MAX_BYTES = 1 << 20
_DIVERGENCE = "divergence from the source"
_COPIED = ("license", "license_name", "license_link")
"""Fields of the source's card that hold for the quantized weights too."""


@dataclass(frozen=True)
class _Source:
    """The name of the source model, its name on a hub if known, and its card's `_COPIED` fields."""

    name: str
    hub: str | None = None
    copied: dict[str, str] = field(default_factory=dict)


def model_card(manifest: Manifest, source: str | Path | None) -> str:
    """Returns the text of README.md of a lowbit checkpoint; `source` is the source model's folder, file, or hub name."""
    from huggingface_hub import ModelCardData

    model = _Source("not known") if source is None else _source(source)
    schemes = Counter(entry.scheme.name for entry in manifest.layers.values())
    fields: dict[str, Any] = {"library_name": "lowbit", "tags": ["lowbit", "quantized"], **model.copied}
    if model.hub is not None:
        fields |= {"base_model": model.hub, "base_model_relation": "quantized"}
    data = ModelCardData(**fields)
    rows = {
        "source model": model.name,
        "scheme": ", ".join(f"{scheme} ({count} layers)" for scheme, count in schemes.most_common()),
        "method": "not known" if manifest.method is None else _options(manifest.method, "name"),
        "calibration": "none" if manifest.calibration is None else _options(manifest.calibration, "text"),
        "made by": f"lowbit {__version__}",
        _DIVERGENCE: "not measured (lowbit eval --suite, with the source as --reference)",
        "licence": model.copied.get("license", "not known; see the source model"),
    }
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items())
    return f"""---
{data.to_yaml().strip()}
---
{CARD_MARK}, which replaces this file together with the checkpoint -->

# {_cell(model.name)}, quantized to {manifest.scheme}

This checkpoint needs lowbit: its weights are packed in a format that Transformers does not read by itself.

    import lowbit

    model = lowbit.load("PATH")  # of this folder, or its name on a hub

After `import lowbit`, `from_pretrained` of Transformers loads it as well. vLLM and SGLang load it where lowbit is installed.

| | |
|---|---|
{table}
"""


def record_divergence(folder: Path, measured: str) -> bool:
    """Writes a measured divergence into the model card of a checkpoint; returns False if there is no card by lowbit."""
    path = folder / CARD
    if path.is_symlink() or not path.is_file() or not is_card(path):
        return False
    rows = path.read_text(encoding="utf-8").split("\n")
    begin = f"| {_DIVERGENCE} |"
    rows = [f"{begin} {_cell(measured)} |" if row.startswith(begin) else row for row in rows]
    replace_file(path, lambda scratch: scratch.write_text("\n".join(rows), encoding="utf-8"))
    return True


def _options(record: Mapping[str, Any], first: str) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in record.items() if key != first)
    return f"{record[first]} ({rest})" if rest else str(record[first])


def _cell(value: object) -> str:
    """Returns text for a cell of a Markdown table, on one line with markup escaped."""
    text = " ".join(str(value).split())[:300]
    for character in "\\|`<>*[]":
        text = text.replace(character, f"\\{character}" if character in "\\|`*[]" else {"<": "&lt;", ">": "&gt;"}[character])
    return text


def _source(source: str | Path) -> _Source:
    """Returns the source's names and fields, from its path and its model card."""
    path = Path(source)
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        return _Source(str(source), str(source))
    real = Path(os.path.realpath(path))
    stated = _metadata(path / CARD) if (path / CARD).is_file() else {}
    copied = {key: value for key in _COPIED if isinstance(value := stated.get(key), str) and value.isprintable()}
    if stated.get("library_name") == "lowbit":  # the source is a lowbit checkpoint: use its own source
        base = stated.get("base_model")
        return _Source(base, base, copied) if isinstance(base, str) else _Source(real.name, None, copied)
    hub = _hub_name(real)
    return _Source(hub or (real.name if real.is_dir() else real.stem), hub, copied)


def _hub_name(folder: Path) -> str | None:
    """Returns OWNER/NAME of a snapshot folder in huggingface_hub's cache (models--OWNER--NAME/snapshots/COMMIT), else None."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def _metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata fields of a model card; empty if they are missing or invalid."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    if path.stat().st_size > _MAX_BYTES:
        return {}
    try:
        return metadata_load(path) or {}
    except (OSError, ValueError, YAMLError, RecursionError):
        return {}
