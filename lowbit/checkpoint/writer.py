"""Writes a checkpoint folder tensor by tensor: it appears complete, or not at all."""

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
    """Collects tensors and writes them in shards of at most `shard_bytes` to a hidden folder beside `folder`; the file has the
    name `single` where it is the only one.

    `finish` renames it into place. Leaving the `with` block without it (an error, Ctrl-C) removes what was written, and the
    next writer for `folder` what a killed process left; what was at `folder` before stays, or is put back. `sources` are the
    files and folders that are read: `folder` must lie apart from them. `say` gets a line on what was replaced.

    Raises CheckpointError if `folder` does not lie apart from `sources`, if it exists and is not empty, unless `overwrite`, and
    with `overwrite` if it is not a checkpoint (`target.check_folder`). Entering the `with` block takes the lock of `folder`; it
    raises CheckpointError if another process is writing there.
    """

    def __init__(
        self, folder: str | Path, *, shard_bytes: int = 2 << 30, overwrite: bool = False, single: str = SINGLE,
        sources: Iterable[Path] = (), say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.folder = Path(os.path.realpath(folder))  # now: the process may change its folder
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
        with contextlib.ExitStack() as held:
            held.enter_context(self._lock)
            _put_back(self.folder)
            self._check()  # once more, for what was put back or written since
            for path in hidden_of(self.folder, "tmp"):
                discard(path, _UNFINISHED)
            try:
                self._temporary.mkdir()
            except OSError as error:
                raise CheckpointError(f"{self._temporary}: cannot be made ({error})") from error
            held.callback(discard, self._temporary, _UNFINISHED)
            self._hashing = ThreadPoolExecutor(1, "checksum")
            held.callback(self._hashing.shutdown, cancel_futures=True)
            self._held = held.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()

    def reserve(self, needed_bytes: int) -> None:
        """Raises CheckpointError unless there is room for so many bytes; it says where, and how many are free."""
        self._needed = needed_bytes
        check_space(self.folder, needed_bytes, "the checkpoint")

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor; writes a shard to disk whenever enough have come together."""
        if name in self._names:
            raise CheckpointError(f"{self.folder}: {name}: added twice")
        self._names.add(name)
        if self._shard and self._pending + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._shard[name] = tensor.detach().cpu().contiguous()
        self._pending += tensor.nbytes
        self._total += tensor.nbytes

    def finish(
        self, config: dict[str, Any], quantization: Manifest | dict[str, Any] | None, copy_from: Path | None = None
    ) -> None:
        """Writes config.json and the index, copies tokenizer files, and puts the folder in place.

        `quantization` goes into config.json: the manifest of a lowbit checkpoint, with the checksum of each file, what another
        tool states, or None. A lowbit checkpoint gets a model card and what keeps Transformers without lowbit from loading it.
        """
        self._flush()
        sums = [found.result() for found in self._sums]  # before the files get other names
        names = self._name_shards()
        if len(names) > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            self._write_json(INDEX, {"metadata": {"total_size": self._total}, "weight_map": weight_map})
        stated = quantization
        if isinstance(quantization, Manifest):
            stated = dataclasses.replace(quantization, files=dict(zip(names, sums, strict=True))).to_dict()
        config = {key: value for key, value in config.items() if key != GUARD_KEY}  # the source's
        if isinstance(quantization, Manifest):
            config[GUARD_KEY] = GUARD
            source = self._sources[0] if self._sources else copy_from
            self._write(CARD, model_card(quantization, source))
        self._write_json("config.json", config if stated is None else {**config, "quantization_config": stated})
        for name in COMPANIONS:
            if copy_from is not None and (copy_from / name).is_file():
                companion = linked_inside(copy_from / name, copy_from)
                self._guard(name, partial(shutil.copyfile, companion, self._temporary / name))
        sync(self._temporary)
        self._put_in_place()

    def _check(self) -> str | None:
        return check_folder(self.folder, overwrite=self.overwrite, sources=self._sources)

    def _put_in_place(self) -> None:
        """Renames the finished folder. Between the two renames there is nothing at `folder`: a process that is killed there
        leaves the old folder and the new one under hidden names, and the next writer puts the old one back."""
        try:
            self._lock.require()
            replaced = self._check()  # once more: the work may have taken hours
        except CheckpointError as error:
            kept = self.folder.with_name(f"{self.folder.name}-{self._token}")
            os.rename(self._temporary, kept)
            raise CheckpointError(f"{error}. It was not so when the work began; the finished checkpoint is {kept}") from error
        if replaced is None:
            os.replace(self._temporary, self.folder)
            return
        old = hidden(self.folder, "old", self._token)
        try:
            os.rename(self.folder, old)
            os.rename(self._temporary, self.folder)
        except BaseException:
            _put_back(self.folder)
            raise
        self._say(f"replaced {self.folder}, {replaced}")
        try:
            discard(old, CHECKPOINT)
        except OSError as error:
            self._say(f"{old}, which it was, cannot be removed ({error}); delete it yourself")

    def _flush(self) -> None:
        if not self._shard:
            return
        path = self._temporary / f"shard-{len(self._files) + 1}"
        self._guard(path.name, lambda: save_file(self._shard, str(path), metadata={"format": "pt"}))
        self._sums.append(self._hashing.submit(file_sha256, path))  # what was just written is in memory still
        self._guard(path.name, lambda: sync(path))
        self._files.append(list(self._shard))
        self._shard, self._pending = {}, 0

    def _name_shards(self) -> list[str]:
        """Gives the shards the names Transformers looks for, now that their number is known."""
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
        """Runs one write; a full disk or an unwritable folder becomes an error that says so."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
            if full:
                written = sum(path.stat().st_size for path in self._temporary.iterdir())
                raise CheckpointError(
                    f"{self.folder / name}: the disk is full: the checkpoint needs at least {max(self._needed, self._total):,} "
                    f"bytes on {mount_of(self.folder)}, {free_bytes(self.folder) + written:,} were free for it; nothing was "
                    "kept, free some space or choose a folder on another disk"
                ) from error
            raise CheckpointError(f"{self.folder / name}: cannot be written ({error})") from error


def _put_back(folder: Path) -> None:
    """Puts back the folder that a process was replacing when it was killed between its two renames, as the finished one under
    its hidden name shows; removes one that it had replaced. Without the finished one a folder that is gone was removed later by
    somebody else, and what is left of the one before it does not come in its place."""
    for old in hidden_of(folder, "old"):
        finished = old.with_name(old.name.replace(f".{folder.name}.old-", f".{folder.name}.tmp-"))
        there = os.path.lexists(folder)
        if finished.exists() and not there:
            os.rename(old, folder)
        elif there and not finished.exists():  # else somebody put another folder in its place since
            with contextlib.suppress(OSError):  # it may not be ours to remove
                discard(old, CHECKPOINT)
