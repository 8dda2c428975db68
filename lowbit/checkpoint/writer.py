"""Writes a checkpoint folder tensor by tensor: it appears complete, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lowbit.checkpoint.reader import INDEX, SINGLE
from lowbit.checkpoint.schema import CheckpointError, Manifest

# Small files of a Transformers folder that belong to the model whatever its weights; never weights, never code.
_COMPANIONS = (
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


class CheckpointWriter:
    """Collects tensors and writes them in shards of at most `shard_bytes` to a hidden folder beside `folder`; the file has the
    name `single` where it is the only one.

    `finish` renames it into place. Leaving the `with` block without it (an error, Ctrl-C) removes what was written, and the
    next writer for `folder` what a killed process left; what was at `folder` before stays. Raises CheckpointError when
    `folder` exists and is not empty, unless `overwrite`.
    """

    def __init__(
        self, folder: str | Path, *, shard_bytes: int = 2 << 30, overwrite: bool = False, single: str = SINGLE
    ) -> None:
        self.folder = Path(folder)
        self.overwrite = overwrite
        self._shard_bytes, self._single = shard_bytes, single
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: exists and is not a folder")
        if self.folder.exists() and any(self.folder.iterdir()) and not overwrite:
            raise CheckpointError(
                f"{self.folder}: exists and is not empty; choose another folder, or overwrite it (--overwrite)"
            )
        self._temporary = self.folder.absolute().parent / f".{self.folder.name}.tmp-{os.getpid()}"
        self._shard: dict[str, Tensor] = {}
        self._pending = 0
        self._files: list[list[str]] = []
        self._total = 0
        self._names: set[str] = set()

    def __enter__(self) -> CheckpointWriter:
        _remove_abandoned(self._temporary)
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{self._temporary}: cannot be made ({error})") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)

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

        `quantization` goes into config.json: the manifest of a lowbit checkpoint, what another tool states, or None.
        """
        self._flush()
        weight_map = self._name_shards()
        if len(self._files) > 1:
            self._write_json(INDEX, {"metadata": {"total_size": self._total}, "weight_map": weight_map})
        stated = quantization.to_dict() if isinstance(quantization, Manifest) else quantization
        self._write_json("config.json", config if stated is None else {**config, "quantization_config": stated})
        for name in _COMPANIONS:
            if copy_from is not None and (copy_from / name).is_file():
                self._guard(name, lambda name=name: shutil.copyfile(copy_from / name, self._temporary / name))
        _sync(self._temporary)
        self._put_in_place()

    def _put_in_place(self) -> None:
        old = self._temporary.with_suffix(".old")
        if self.folder.exists():
            os.replace(self.folder, old)
        try:
            os.replace(self._temporary, self.folder)
        except BaseException:
            if old.exists():
                os.replace(old, self.folder)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _flush(self) -> None:
        if not self._shard:
            return
        path = self._temporary / f"shard-{len(self._files) + 1}"
        self._guard(path.name, lambda: save_file(self._shard, str(path), metadata={"format": "pt"}))
        _sync(path)
        self._files.append(list(self._shard))
        self._shard, self._pending = {}, 0

    def _name_shards(self) -> dict[str, str]:
        """Gives the shards the names Transformers looks for, now that their number is known."""
        count = len(self._files)
        weight_map = {}
        for i, tensors in enumerate(self._files, 1):
            name = self._single if count == 1 else f"model-{i:05}-of-{count:05}.safetensors"
            os.replace(self._temporary / f"shard-{i}", self._temporary / name)
            weight_map.update(dict.fromkeys(tensors, name))
        return weight_map

    def _write_json(self, name: str, value: object) -> None:
        path = self._temporary / name
        self._guard(name, lambda: path.write_text(json.dumps(value, indent=2) + "\n"))
        _sync(path)

    def _guard(self, name: str, write: Any) -> None:
        """Runs one write; a full disk or an unwritable folder becomes an error that says so."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if full:
                free = shutil.disk_usage(self._temporary).free
                raise CheckpointError(
                    f"{self.folder / name}: the disk is full ({free:,} bytes free, {self._total:,} bytes of tensors so far); "
                    "nothing was kept, free some space or choose another folder"
                ) from error
            raise CheckpointError(f"{self.folder / name}: cannot be written ({error})") from error


def _remove_abandoned(temporary: Path) -> None:
    """Removes hidden folders for the same target whose processes, by the number in their names, do not run any more."""
    stem = temporary.name.rpartition("-")[0]
    for path in temporary.parent.glob(f"{escape(stem)}-*"):
        number = path.name.removeprefix(f"{stem}-")
        if number.isdecimal() and (int(number) == os.getpid() or not _runs(int(number))):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    """Whether there is a process of that number; as if there were, where asking would end it."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sync(path: Path) -> None:
    """Brings a file or folder to the disk, so that the rename that follows cannot outrun its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
