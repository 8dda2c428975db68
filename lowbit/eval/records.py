"""Reads data files of tasks: one JSON object per line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from lowbit.checkpoint import CheckpointError
from lowbit.sources import regular_file


def read_records(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Returns the first `limit` objects of a .jsonl or .jsonl.gz file; empty lines are skipped.

    Raises ValueError, with file and line, for an invalid line, a damaged gzip file, or a file without records; OSError if the
    file cannot be read.
    """
    records: list[dict[str, Any]] = []
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(regular_file(path), "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if limit is not None and len(records) == limit:
                    break
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a {type(record).__name__}")
                records.append(record)
    except CheckpointError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: a damaged gzip file ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: one JSON object a line is expected ({error})") from error
    if not records:
        raise ValueError(f"{path}: holds no records")
    return records


def text_field(record: dict[str, Any], name: str, where: str) -> str:
    """Returns a field of a record. Raises ValueError unless it is a non-empty string."""
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {name!r} must be a non-empty string, got {value!r}")
    return value
