"""Checks and writes the targets of commands. Only checkpoints and results of lowbit are replaced, never a command's sources.

A folder is replaced only on request, and only if it contains nothing but a checkpoint: config.json, safetensors files and
tokenizer files. A result file (JSON, a report, a plot) names the command that wrote it, and only that command replaces it. Both
are written under another name and renamed when complete, so the old one survives a full disk or a killed process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from lowbit.checkpoint.lock import Lock
from lowbit.checkpoint.reader import INDEX, SINGLE, read_json
from lowbit.checkpoint.schema import METHOD, CheckpointError
from lowbit.sources import check_name

COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Small files of a Transformers folder that a quantized model shares with its source; never weights or code."""

CARD = "README.md"
CARD_MARK = "<!-- written by lowbit"
"""Name of a model card, and the mark in those that lowbit wrote (card.py)."""

NUMERICS = "lowbit_numerics.json"
"""Name of the file with what the layers compute (numerics.py)."""

_WEIGHTS = (SINGLE, "model-*-of-*.safetensors", "rank0.safetensors")
CHECKPOINT = ("config.json", INDEX, *_WEIGHTS, "quantize_config.json", "quant_config.json", *COMPANIONS, CARD, NUMERICS)
"""Patterns of a checkpoint's file names. A folder with other files, or with a model card not by lowbit, is not replaced."""

PARTIAL = ".tmp??????"
"""Pattern of the temporary files of safetensors."""

_MAX_RESULT_BYTES = 1 << 23
_ABANDONED_SECONDS = 24 * 3600
_RESULT = re.compile(
    rb"""\s*\{\s*"result":\s*"(?P<json>lowbit[a-z0-9\ -]*)"
       | <!--\ result:\ (?P<page>lowbit[a-z0-9\ -]*?)\ -->
       | (?:\x89PNG|<\?xml|%PDF).*?(?:Creator\x00|<dc:title>|/Creator\ \()(?P<plot>lowbit[a-z0-9\ -]*)""",
    re.DOTALL | re.VERBOSE,
)
"""Matches the beginning of a result file, with the command that wrote it."""


def command_of(result: str) -> str:
    """Returns the current command for results named `result`; files keep the names of earlier commands."""
    words = result.split()
    if words[:2] == ["lowbit", "study"]:
        return "python -m study"
    return f"python -m benchmarks {words[2]}" if words[:2] == ["lowbit", "bench"] and len(words) == 3 else result


def check_folder(folder: Path, *, overwrite: bool, sources: Iterable[Path] = ()) -> str | None:
    """Returns a description of the checkpoint that writing `folder` would replace; None for a new or empty folder.

    folder: absolute, links resolved. Raises CheckpointError if it is, contains or lies in one of `sources` (links followed), if
    it is not empty and `overwrite` is false, if it is not a checkpoint, or if its name is not UTF-8.
    """
    check_name(folder)
    for source in sources:
        _check_apart(folder, Path(source))
    if not os.path.lexists(folder):
        if not _existing(folder).is_dir():
            raise CheckpointError(f"{folder}: {_existing(folder)} is not a folder; choose another target")
        return None
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: exists and is not a folder")
    if not any(folder.iterdir()):
        return None
    if not overwrite:
        raise CheckpointError(f"{folder}: exists and is not empty; choose another folder, or overwrite it (--overwrite)")
    return _describe_checkpoint(folder)


def _check_apart(folder: Path, source: Path) -> None:
    real = Path(os.path.realpath(source))
    advice = "choose a target outside the source"
    if _same(folder, real):
        raise CheckpointError(f"{folder}: is the source itself; {advice}")
    if real.is_dir() and _holds(real, folder):
        raise CheckpointError(f"{folder}: lies in the source {source}; {advice}")
    linked = [file for file in real.iterdir() if file.is_symlink()] if real.is_dir() else []
    for read in (real, *linked):
        if _holds(folder, Path(os.path.realpath(read))):
            raise CheckpointError(f"{folder}: holds the source {source if read is real else read}; {advice}")


def _same(a: Path, b: Path) -> bool:
    """Returns whether two absolute paths are the same file or folder; paths may differ in case or mount."""
    return a == b or (a.exists() and b.exists() and os.path.samefile(a, b))


def _holds(outer: Path, inner: Path) -> bool:
    return any(_same(outer, parent) for parent in (inner, *inner.parents))


def _describe_checkpoint(folder: Path) -> str:
    """Returns a description of a checkpoint. Raises CheckpointError if the folder contains anything else."""
    files = sorted(folder.iterdir())
    others = [f"{p.name}/" if p.is_dir() else p.name for p in files if not _is_part(p)]
    if others:
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise CheckpointError(
            f"{folder}: is not replaced, it contains files that are no part of a checkpoint: {named}; choose another folder, "
            "or delete this one yourself"
        )
    if not any(p.suffix == ".safetensors" for p in files) or not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder}: is not replaced, it is not a checkpoint (config.json and *.safetensors); choose another folder, or "
            "delete this one yourself"
        )
    size = f"{sum(p.stat().st_size for p in files) / 1e6:,.1f} MB"
    config = read_json(folder / "config.json")
    stated = config.get("quantization_config")
    read = stated.get if isinstance(stated, dict) else {}.get
    method, layers, scheme = read("quant_method"), read("layers"), read("scheme")
    if method == METHOD and isinstance(layers, dict):
        return f"a lowbit checkpoint of {len(layers)} layers ({scheme}), {size}"
    return f"{'an unquantized' if method is None else f'a {method}'} checkpoint, {size}"


def is_card(path: Path) -> bool:
    """Returns whether lowbit wrote this model card."""
    with path.open("rb") as file:
        return CARD_MARK.encode() in file.read(_MAX_RESULT_BYTES)


def _is_part(path: Path) -> bool:
    """Returns whether a file is part of a checkpoint; a README.md is if lowbit wrote it."""
    return _is_file(path) and _fits(path.name, CHECKPOINT) and (path.name != CARD or is_card(path))


def discard(folder: Path, names: Iterable[str]) -> None:
    """Removes the files of a folder that match a pattern of `names`, then the folder if it is empty.

    Links and sub-folders are neither followed nor removed.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if _is_file(path) and _fits(path.name, names):
            path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def hidden(path: Path, kind: str, token: str) -> Path:
    """Returns a hidden path beside `path` for a process's temporary data; `token` is 8 random hexadecimal digits."""
    return path.with_name(f".{path.name}.{kind}-{token}")


def hidden_of(path: Path, kind: str) -> list[Path]:
    """Returns the existing paths of `hidden(path, kind, ..)`."""
    name = re.compile(re.escape(f".{path.name}.{kind}-") + "[0-9a-f]{8}")
    return [found for found in sorted(path.parent.iterdir()) if name.fullmatch(found.name)]


@contextmanager
def locked_scratch(path: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Acquires the lock of `path` (`say` gets a line while another process holds it) and yields an empty folder beside it.

    The caller renames the folder to `path`. It is removed at the end of the block, or by the next process after a kill.
    """
    with Lock(path, say):
        for left in hidden_of(path, "tmp"):
            shutil.rmtree(left)
        scratch = hidden(path, "tmp", secrets.token_hex(4))
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises CheckpointError unless the file system of `folder` (which may not exist yet) has `needed_bytes` free."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise CheckpointError(
            f"{folder}: {what} needs {needed_bytes:,} bytes there, {free:,} are free on {mount_of(folder)}; free some space or "
            "choose a folder on another disk"
        )


def free_bytes(path: Path) -> int:
    """Returns the free bytes on the file system of `path`, which may not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def mount_of(path: Path) -> Path:
    """Returns the mount point of a path's file system."""
    return next(p for p in (_existing(path), *_existing(path).parents) if os.path.ismount(p))


def _existing(path: Path) -> Path:
    absolute = path.absolute()
    return next(p for p in (absolute, *absolute.parents) if p.exists())


def check_file(path: Path, result: str) -> Path:
    """Returns `path` with links resolved if a result of the command `result`, such as "lowbit eval", can be written there.

    Raises ValueError unless the file is new, empty, or an earlier result of the same command.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise ValueError(f"{path}: is a folder; name a file for the result of {command_of(result)}")
    if not os.path.lexists(real):
        if not _existing(real).is_dir():
            raise ValueError(
                f"{path}: {_existing(real)} is not a folder; name another file for the result of {command_of(result)}"
            )
        _check_writable(path, real, result)
        return real
    if not real.is_file():
        raise ValueError(f"{path}: is not a regular file; name another file")
    with real.open("rb") as file:
        match = _RESULT.match(file.read(_MAX_RESULT_BYTES))
    found = match and next(filter(None, match.groups()))
    if found != result.encode() and real.stat().st_size:
        what = (
            f"a result of {command_of(found.decode())}, not of {command_of(result)}"
            if found
            else f"no result of {command_of(result)}"
        )
        raise ValueError(f"{path}: exists and is {what}; it is not replaced: name another file, or delete this one yourself")
    _check_writable(path, real, result)
    return real


def _check_writable(path: Path, real: Path, result: str) -> None:
    """Raises ValueError unless an empty file can be created beside a result."""
    probe = _existing(real.parent) / hidden(real, "probe", secrets.token_hex(4)).name
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); name another file for the result of {command_of(result)}"
        ) from error


def write_result(path: Path, result: str, write: Callable[[Path], object]) -> None:
    """Writes a result file; `write` must mark it with `result`. Raises ValueError where `check_file` does."""
    replace_file(check_file(path, result), write)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces the file `path` atomically: `write` writes a file beside it, which is synced and renamed.

    The permissions of an existing file are kept; no temporary file is left on Ctrl-C. Raises OSError, naming the path, if the
    disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in hidden_of(path, "part"):
        if _untouched(part):
            part.unlink(missing_ok=True)
    scratch, free = hidden(path, "part", secrets.token_hex(4)), free_bytes(path)
    try:
        write(scratch)
        if path.exists():
            shutil.copymode(path, scratch)
        sync(scratch)
        os.replace(scratch, path)
    except OSError as error:
        where = f"{free:,} bytes were free on {mount_of(path)}"
        raise OSError(f"{path}: cannot be written ({error.strerror}; {where})") from error
    finally:
        scratch.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file or folder to the disk, so that a later rename cannot precede its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _untouched(path: Path) -> bool:
    """Returns whether a file has not changed for a day, so that its writer must have been killed."""
    try:
        return time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS
    except FileNotFoundError:  # its process has just renamed it
        return False
