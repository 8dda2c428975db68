"""Writes a checkpoint folder tensor by tensor; the folder appears only when complete."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lowbit.checkpoint.card import model_card
from lowbit.checkpoint.lock import Lock
from lowbit.checkpoint.reader import INDEX, SINGLE, file_sha256
from lowbit.checkpoint.schema import GUARD, GUARD_KEY, CheckpointError, Manifest
from lowbit.checkpoint.target import (
    CARD,
    CHECKPOINT,
    COMPANIONS,
    NUMERICS,
    PARTIAL,
    check_folder,
    check_space,
    discard,
    free_bytes,
    hidden,
    hidden_of,
    mount_of,
    sync,
)
from lowbit.sources import linked_inside

_UNFINISHED = (*CHECKPOINT, "shard-*", PARTIAL)


class CheckpointWriter:
    """Writes tensors in shards of at most `shard_bytes` to a hidden folder beside `folder`; a single file is named `single`.

    `finish` renames the hidden folder to `folder`. Leaving the `with` block without it removes the hidden folder and keeps or
    restores what was at `folder`; the next writer removes the rest of a killed process. `say` is called with a line if a
    checkpoint is replaced.

    Raises CheckpointError where `target.check_folder` does: `folder` overlaps `sources` (the files and folders that are read),
    or it is not empty and `overwrite` is false or it is not a checkpoint. Entering the block acquires the lock of `folder`, and
    raises CheckpointError if another process holds it.
    """

    def __init__(
        self, folder: str | Path, *, shard_bytes: int = 2 << 30, overwrite: bool = False, single: str = SINGLE,
        sources: Iterable[Path] = (), say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.folder = Path(os.path.realpath(folder))  # resolved now, since the process may change its working directory
        self.overwrite = overwrite
        self._shard_bytes, self._single, self._sources, self._say = shard_bytes, single, tuple(sources), say
        self._check()
        self._lock = Lock(self.folder)
        self._token = secrets.token_hex(4)
        self._temporary = hidden(self.folder, "tmp", self._token)
        self._shard: dict[str, Tensor] = {}
        self._pending = 0
        self._files: list[list[str]] = []
        self._sums: list[Future[str]] = []
        self._needed = self._total = 0
        self._names: set[str] = set()

    def __enter__(self) -> CheckpointWriter:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock)
            _restore(self.folder)
            self._check()  # again, since the folder may have been restored or written
            for path in hidden_of(self.folder, "tmp"):
                discard(path, _UNFINISHED)
            try:
                self._temporary.mkdir()
            except OSError as error:
                raise CheckpointError(f"{self._temporary}: cannot be created ({error})") from error
            stack.callback(discard, self._temporary, _UNFINISHED)
            self._hashing = ThreadPoolExecutor(1, "checksum")
            stack.callback(self._hashing.shutdown, cancel_futures=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def reserve(self, needed_bytes: int) -> None:
        """Raises CheckpointError unless the disk has `needed_bytes` free."""
        self._needed = needed_bytes
        check_space(self.folder, needed_bytes, "the checkpoint")

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one tensor; writes a shard when the tensors would exceed `shard_bytes`."""
        if name in self._names:
            raise CheckpointError(f"{self.folder}: {name}: added twice")
        self._names.add(name)
        if self._shard and self._pending + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._shard[name] = tensor.detach().cpu().contiguous()
        self._pending += tensor.nbytes
        self._total += tensor.nbytes

    def finish(
        self, config: dict[str, Any], quantization: Manifest | dict[str, Any] | None, copy_from: Path | None = None,
        beside: Callable[[Path], object] = lambda folder: None,
    ) -> None:  # fmt: skip
        """Writes config.json and the index, copies tokenizer files, and renames the folder to its final name.

        quantization: the manifest of a lowbit checkpoint, to which the files' checksums are added; another tool's
        `quantization_config`; or None. A lowbit checkpoint also gets a model card and `schema.GUARD`. beside: called with the
        complete folder before it gets its name, to add a file.
        """
        self._flush()
        sums = [future.result() for future in self._sums]  # before the files are renamed
        names = self._name_shards()
        if len(names) > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            self._write_json(INDEX, {"metadata": {"total_size": self._total}, "weight_map": weight_map})
        stated = quantization
        if isinstance(quantization, Manifest):
            stated = dataclasses.replace(quantization, files=dict(zip(names, sums, strict=True))).to_dict()
        config = {key: value for key, value in config.items() if key != GUARD_KEY}  # the source may be a lowbit checkpoint
        if isinstance(quantization, Manifest):
            config[GUARD_KEY] = GUARD
            source = self._sources[0] if self._sources else copy_from
            self._write(CARD, model_card(quantization, source))
        self._write_json("config.json", config if stated is None else {**config, "quantization_config": stated})
        for name in COMPANIONS:
            if copy_from is not None and (copy_from / name).is_file():
                companion = linked_inside(copy_from / name, copy_from)
                self._guard(name, partial(shutil.copyfile, companion, self._temporary / name))
        self._guard(NUMERICS, lambda: beside(self._temporary))
        sync(self._temporary)
        self._rename_into_place()

    def _check(self) -> str | None:
        return check_folder(self.folder, overwrite=self.overwrite, sources=self._sources)

    def _rename_into_place(self) -> None:
        """Renames the old folder to a hidden name and the finished one to `folder`.

        A process killed between the two renames leaves both under hidden names; the next writer restores the old one.
        """
        try:
            self._lock.require()
            replaced = self._check()  # again, since writing may have taken hours
        except CheckpointError as error:
            kept = self.folder.with_name(f"{self.folder.name}-{self._token}")
            os.rename(self._temporary, kept)
            raise CheckpointError(f"{error}. This changed during the work; the finished checkpoint is {kept}") from error
        if replaced is None:
            os.replace(self._temporary, self.folder)
            return
        old = hidden(self.folder, "old", self._token)
        try:
            os.rename(self.folder, old)
            os.rename(self._temporary, self.folder)
        except BaseException:
            _restore(self.folder)
            raise
        self._say(f"replaced {self.folder}, {replaced}")
        try:
            discard(old, CHECKPOINT)
        except OSError as error:
            self._say(f"the replaced checkpoint {old} cannot be removed ({error}); delete it yourself")

    def _flush(self) -> None:
        if not self._shard:
            return
        path = self._temporary / f"shard-{len(self._files) + 1}"
        self._guard(path.name, lambda: save_file(self._shard, str(path), metadata={"format": "pt"}))
        self._sums.append(self._hashing.submit(file_sha256, path))  # now, while the file is in the page cache
        self._guard(path.name, lambda: sync(path))
        self._files.append(list(self._shard))
        self._shard, self._pending = {}, 0

    def _name_shards(self) -> list[str]:
        """Renames the shards to Transformers' names, which contain their number, and returns the names."""
        count = len(self._files)
        names = [self._single if count == 1 else f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        for i, name in enumerate(names, 1):
            os.replace(self._temporary / f"shard-{i}", self._temporary / name)
        return names

    def _write_json(self, name: str, value: object) -> None:
        self._write(name, json.dumps(value, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        path = self._temporary / name
        self._guard(name, lambda: path.write_text(text, encoding="utf-8"))
        self._guard(name, lambda: sync(path))

    def _guard(self, name: str, write: Callable[[], object]) -> None:
        """Runs one write; converts a full disk or an unwritable folder to a CheckpointError."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
            if full:
                written = sum(path.stat().st_size for path in self._temporary.iterdir())
                raise CheckpointError(
                    f"{self.folder / name}: the disk is full: the checkpoint needs at least {max(self._needed, self._total):,} "
                    f"bytes on {mount_of(self.folder)}, {free_bytes(self.folder) + written:,} were free for it; nothing was "
                    "kept: free some space or choose a folder on another disk"
                ) from error
            raise CheckpointError(f"{self.folder / name}: cannot be written ({error})") from error


def _restore(folder: Path) -> None:
    """Cleans up after a process that was killed while it replaced `folder`.

    If the finished folder still has its hidden name and `folder` is missing, the process died between its two renames: the old
    folder is restored. If `folder` exists and the finished one does not, the replacement was complete: the old one is removed.
    Otherwise someone else removed or replaced `folder`, and nothing is done.
    """
    for old in hidden_of(folder, "old"):
        finished = old.with_name(old.name.replace(f".{folder.name}.old-", f".{folder.name}.tmp-"))
        exists = os.path.lexists(folder)
        if finished.exists() and not exists:
            os.rename(old, folder)
        elif exists and not finished.exists():
            with contextlib.suppress(OSError):  # no permission
                discard(old, CHECKPOINT)
