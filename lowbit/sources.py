"""Finds a model by the name that a user gives: a folder, a GGUF file, or `org/name` on the Hugging Face hub.

Needs no torch, so that a wrong name is refused before torch is imported. huggingface_hub downloads, resumes and caches; its
settings (HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN) apply."""

from __future__ import annotations

import os
import re
import stat
from glob import escape
from pathlib import Path

FILES = (
    *("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"),
    *("README.md", "LICENSE*"),  # they name the licence, which the model card of a quantized copy states
)
"""Patterns of the files that are downloaded from the hub: no pickles, no code."""
CONFIG = ("config.json",)
"""The files that describe a model's layers."""
TEMPLATES = "additional_chat_templates"
"""The one subfolder from which Transformers reads files by itself."""
_NOT_NEEDED = ("*/*", "consolidated*.safetensors", "consolidated*.json")
"""Copies of the weights in other layouts that some repositories contain."""
_OR_HUB = ", or a name on the hub such as org/name"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FOLDER = "give the folder of a Transformers model (with config.json and *.safetensors)"
_QUANTIZED = "give the folder of a quantized model (config.json and *.safetensors), or a GGUF file (*.gguf)"


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names file, tensor and remedy in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(part.strip() for part in message.splitlines()))  # names of tensors may have line breaks


def local_model(name: str | Path, files: tuple[str, ...] = FILES, *, quantized: bool = False) -> Path:
    """Returns the folder or GGUF file of the model `name`: a path, or `org/name` or `org/name@revision` on the hub.

    Downloads those `files` of a hub model that are not cached. quantized: messages ask for a quantized model. Raises
    CheckpointError for a path without a model, and for a hub model that does not exist or cannot be downloaded.
    """
    path = Path(name)
    if is_on_hub(name):
        repo, _, revision = str(name).partition("@")
        return _downloaded(str(name), repo, revision or None, files)
    if path.suffix == ".gguf" and not path.is_dir() and regular_file(path).exists():
        return path
    if quantized and not path.is_dir():
        what = "is a file" if path.exists() else "no such folder or file"
        raise CheckpointError(f"{path}: {what}; {_QUANTIZED}{'' if path.exists() else _OR_HUB}")
    if path.suffix == ".gguf" and not path.exists():
        raise CheckpointError(f"{path}: there is no such file; give the path of a GGUF file")
    folder = model_folder(path)
    if not (folder / "config.json").exists() and not any(folder.glob("*.gguf")):
        raise CheckpointError(f"{folder / 'config.json'}: missing; a checkpoint is a folder with config.json and *.safetensors")
    return folder


def is_on_hub(name: str | Path) -> bool:
    """Returns True if `name` is a name on the hub, False if it is a path."""
    path = Path(name)
    return (
        _HUB_NAME.fullmatch(str(name)) is not None and path.suffix != ".gguf" and not path.exists() and not path.parent.exists()
    )


def model_folder(path: Path) -> Path:
    """Returns `path`; raises CheckpointError unless it is a folder without pipes and devices, which could block a reader, and
    without links to files elsewhere (`linked_inside`)."""
    check_name(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: is a file; {_FOLDER}")
    if not path.exists():
        displaced = sorted(path.absolute().parent.glob(f".{escape(path.name)}.old-*"))
        killed = f"{displaced[0]} is what was there when a killed run was replacing it; rename it" if displaced else ""
        raise CheckpointError(f"{path}: no such folder; {killed or _FOLDER + _OR_HUB}")
    templates = path / TEMPLATES
    for file in (*path.iterdir(), *(templates.iterdir() if templates.is_dir() and not templates.is_symlink() else ())):
        if not file.is_dir():
            regular_file(file)  # Transformers opens some of them by itself
        linked_inside(file, path)
    return path


def linked_inside(file: Path, folder: Path) -> Path:
    """Returns `file`, an entry of `folder`; raises CheckpointError for a link to a path outside the folder.

    A link in a snapshot of the hub's cache (snapshots/REVISION/FILE) may also point to the `blobs` folder beside `snapshots`,
    where the cache stores file contents.
    """
    if not file.is_symlink():
        return file
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    # Parents of a real path are no links, so a link cannot pose as the hub's cache.
    caches = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(folder) for folder in (home, *caches)):
        raise CheckpointError(
            f"{file}: a link to {target}, outside {home}; only files of the model's own folder are read: copy the file there"
        )
    return file


def check_name(path: Path) -> None:
    """Raises CheckpointError for a path that is not UTF-8, which safetensors neither reads nor writes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: its name is not UTF-8, which safetensors cannot open; rename it") from None


def regular_file(path: Path) -> Path:
    """Returns `path`; raises CheckpointError if it is a pipe, socket, device or folder, since reading one may never end.

    Follows links. A path that does not exist passes; opening it raises a better message.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return path
    if stat.S_ISREG(mode):
        return path
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: is a folder; name a file")
    kind = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode), "a device")
    raise CheckpointError(f"{path}: is {kind}, and only regular files are read; copy it to one")


def _downloaded(name: str, repo: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Downloads missing files and returns the model's folder in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=list(files), ignore_patterns=list(_NOT_NEEDED))
    except GatedRepoError as error:
        raise CheckpointError(f"{name}: is gated; accept its terms on its page on the hub, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here and no such model on the hub; check the name (if it is private: `hf auth login`), or "
            f"{_FOLDER}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: {repo} has no revision {revision!r} on the hub; leave out @{revision}") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here, not in the hub's cache, and the hub cannot be reached; with a network: "
            f"`hf download {repo}{f' --revision {revision}' if revision else ''}`, or {_FOLDER}"
        ) from error
    except (*HfHubHTTPError.__bases__, ValueError) as error:  # type: ignore[misc]  # of the client's HTTP library
        why = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{name}: downloading it failed ({why}); the same command goes on from what is downloaded"
        ) from error
    path = Path(folder)  # does not exist if the hub has none of the files
    if not (path / "config.json").is_file() or ("*.safetensors" in files and not any(path.glob("*.safetensors"))):
        raise CheckpointError(
            f"{name}: the hub has no config.json and *.safetensors of it, and pickles (pytorch_model.bin) are not opened; of "
            f"GGUF files download one (`hf download {repo} "
            "FILE.gguf --local-dir .`) and give its path"
        )
    return model_folder(path)
