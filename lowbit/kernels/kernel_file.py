"""A kernels file: the compiled kernels of a model in one zip archive, so that a machine with a GPU compiles nothing.

    manifest.json              what the file depends on, and each other member with its size and SHA-256
    kernels/HASH/NAME.cubin    machine code of a kernel; HASH is the key of Triton's cache
    kernels/HASH/NAME.json     Triton's description of its launch
    extensions/DIGEST.so       a C extension of Python that Triton launches kernels with; DIGEST is that of its source

The intermediate code that Triton's cache also holds is left out. `KernelFile.install` copies the kernels into Triton's cache
and makes Triton take the extensions from there, so that no C compiler is needed. Keys of Triton's cache depend on the build of
Triton for one Python version, and so do the extensions: a file is for one Python version.

Using a file means running its machine code and its shared libraries in this process: it must be as trusted as a program.
Digests detect damage, not malice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import struct
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager

from lowbit._version import __version__
from lowbit.folders import cache_folder
from lowbit.hardware.machine import GPU
from lowbit.kernels.parts.compile import compile_all, compile_one
from lowbit.kernels.parts.gluon import (
    CompiledKernel,
    build_extension,
    compiling_for,
    extension_sources,
    serve_extensions,
    source_digest,
    triton_digest,
)
from lowbit.kernels.parts.launch import RecordedKernel

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 24
MOST_MEMBER_BYTES = 1 << 26
"""Largest size of a member in bytes. The largest kernels have 0.3 MB."""
MOST_MEMBERS = 1 << 16
INSTALLING = 8
"""Number of threads that copy kernels into Triton's cache. They mostly wait for the file system."""
_KERNEL = re.compile(r"kernels/[0-9a-f]{64}/[A-Za-z_]\w{0,150}\.(cubin|json)", re.ASCII)
_EXTENSION = re.compile(r"extensions/[0-9a-f]{64}\.so", re.ASCII)


class KernelFileError(ValueError):
    """Raised for a damaged kernels file, and for a file that is not a kernels file."""


@dataclass(frozen=True)
class Requirements:
    """What a kernels file depends on besides the GPU. `here` returns the requirements that this process meets."""

    lowbit: str
    source: str
    triton: str
    triton_digest: str
    python: str
    libc: str

    @classmethod
    @functools.cache
    def here(cls) -> Requirements:
        python = str(sysconfig.get_config_var("EXT_SUFFIX"))
        libc = " ".join(platform.libc_ver())
        return cls(__version__, source_digest(), triton.__version__, triton_digest(), python, libc)

    def refusals(self, here: Requirements) -> tuple[str, ...]:
        """Returns why files with these requirements cannot be used where `here` describes the process."""
        reasons = []
        if self.source != here.source:
            versions = self.lowbit if self.lowbit != here.lowbit else f"another source of {self.lowbit}"
            reasons.append(f"lowbit {versions}, this is {here.lowbit}")
        if self.triton != here.triton:
            reasons.append(f"Triton {self.triton}, this is {here.triton}")
        elif self.triton_digest != here.triton_digest and self.python == here.python:
            reasons.append(f"another build of Triton {self.triton}")
        if self.python != here.python:
            reasons.append(f"Python {self.python}, this is {here.python}")
        if _version(self.libc) > _version(here.libc):
            reasons.append(f"{self.libc}, this is {here.libc}")
        return tuple(reasons)


def _version(libc: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", libc))


@dataclass(frozen=True)
class KernelFile:
    """A checked kernels file.

    gpus: product -> compute capability (90: 9.0). model: the model's name and the options with which its kernels were found.
    members: name in the archive -> (size in bytes, SHA-256). capabilities: cache key of a kernel -> compute capability.
    """

    path: Path
    requirements: Requirements
    gpus: dict[str, int]
    model: dict[str, Any]
    members: dict[str, tuple[int, str]] = field(repr=False)
    capabilities: dict[str, int] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> KernelFile:
        """Returns the file at `path` with a checked manifest. Raises KernelFileError for a damaged file, OSError for one that
        cannot be read."""
        with _archive(path) as archive:
            try:
                stated = json.loads(_read(archive, path, MANIFEST, MOST_MANIFEST_BYTES))
                if stated["format_version"] != FORMAT_VERSION:
                    version = stated["format_version"]
                    raise KernelFileError(f"{path}: format_version is {version!r}, this release reads {FORMAT_VERSION}")
                requirements = Requirements(**{name: str(value) for name, value in stated["requirements"].items()})
                gpus = {str(name): int(sm) for name, sm in stated["gpus"].items()}
                members = {str(name): (int(size), str(digest)) for name, (size, digest) in stated["members"].items()}
                capabilities = {str(key): int(sm) for key, sm in stated["capabilities"].items()}
                model = dict(stated["model"])
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                if isinstance(error, KernelFileError):
                    raise
                raise KernelFileError(f"{path}: {MANIFEST} is damaged ({type(error).__name__}: {error})") from error
            _check_members(path, archive, members, capabilities)
        return cls(path, requirements, gpus, model, members, capabilities)

    def refusals(self, sm: int) -> tuple[str, ...]:
        """Returns why this process cannot use the file on a GPU of compute capability `sm`; empty if it can."""
        reasons = self.requirements.refusals(Requirements.here())
        if sm not in self.gpus.values():
            reasons = (*reasons, f"{' and '.join(self.gpus)}, this GPU is sm_{sm}")
        return tuple(f"is for {reason}" for reason in reasons)

    def install(self, sm: int) -> None:
        """Copies the kernels for compute capability `sm` into Triton's cache, unless it has them, and makes Triton use the
        extensions.

        Raises KernelFileError for a member whose digest is not the manifest's, before that member is used.
        """
        members: dict[str, dict[str, str]] = {key: {} for key, of in self.capabilities.items() if of == sm}
        for member in self.members:
            _, key, *name = member.split("/")
            if name and key in members:
                members[key][name[0]] = member
        with _archive(self.path) as archive, ThreadPoolExecutor(INSTALLING) as pool:
            for _ in pool.map(lambda key: self._install_kernel(archive, key, members[key]), members):
                pass  # the iteration raises the error of a damaged member
            extensions = {}
            for member in self.members:
                if _EXTENSION.fullmatch(member):
                    digest, contents = Path(member).stem, self._member(archive, member)
                    # The cache key is the digest of the contents, so another file cannot replace an extension that is in use.
                    cache = get_cache_manager(hashlib.sha256(contents).hexdigest())
                    extensions[digest] = Path(cache.get_file(f"{digest}.so") or cache.put(contents, f"{digest}.so"))
        serve_extensions(extensions)

    def _install_kernel(self, archive: zipfile.ZipFile, key: str, members: Mapping[str, str]) -> None:
        """Copies a kernel into Triton's cache. `members`: names of its files -> names in the archive."""
        cache = get_cache_manager(key)
        metadata = next(name for name in members if name.endswith(".json"))
        if cache.get_group(metadata):
            return
        group = {name: cache.put(self._member(archive, member), name) for name, member in members.items()}
        cache.put_group(metadata, group)

    def _member(self, archive: zipfile.ZipFile, name: str) -> bytes:
        size, digest = self.members[name]
        contents = _read(archive, self.path, name, size)
        if hashlib.sha256(contents).hexdigest() != digest:
            raise KernelFileError(f"{self.path}: {name} does not have the digest that {MANIFEST} states; the file is damaged")
        return contents


_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError,
)  # fmt: skip
"""Exceptions of zipfile for damaged archives."""


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except _ZIP_ERRORS as error:
        raise KernelFileError(f"{path}: is no kernels file, or was cut off ({error})") from error


def _read(archive: zipfile.ZipFile, path: Path, name: str, most_bytes: int) -> bytes:
    """Returns a member of an archive; raises KernelFileError if it is missing, damaged or has more than `most_bytes`."""
    if name not in archive.NameToInfo:
        raise KernelFileError(f"{path}: has no {name}; is it a kernels file?")
    if archive.getinfo(name).file_size > most_bytes:
        raise KernelFileError(f"{path}: {name} has more than {most_bytes:,} bytes")
    try:
        return archive.read(name)
    except (*_ZIP_ERRORS, OSError) as error:  # OSError: the archive names an offset outside the file
        raise KernelFileError(f"{path}: {name} is damaged ({error})") from error


def _check_members(
    path: Path, archive: zipfile.ZipFile, members: Mapping[str, tuple[int, str]], capabilities: Mapping[str, int]
) -> None:
    """Raises KernelFileError unless the archive has exactly the members of the manifest, with their sizes and allowed names."""
    found = [info.filename for info in archive.infolist() if info.filename != MANIFEST]
    if len(found) > MOST_MEMBERS or len(found) != len(set(found)) or set(found) != set(members):
        raise KernelFileError(f"{path}: its members are not those that {MANIFEST} lists")
    for name, (size, _) in members.items():
        if not (_KERNEL.fullmatch(name) or _EXTENSION.fullmatch(name)):
            raise KernelFileError(f"{path}: a member is named {name!r}, which no kernels file has")
        if not 0 < size <= MOST_MEMBER_BYTES or archive.getinfo(name).file_size != size:
            raise KernelFileError(f"{path}: {name} is not of the size that {MANIFEST} states, or too large")
    kernels: dict[str, list[str]] = {key: [] for key in capabilities}
    for name in filter(_KERNEL.fullmatch, members):
        kernels.setdefault(name.split("/")[1], []).append(name)
    for key, names in kernels.items():
        stems = {Path(name).stem for name in names}
        if key not in capabilities or len(names) != 2 or len(stems) != 1:
            raise KernelFileError(f"{path}: the kernel {key[:16]} is not one .cubin and one .json")


def write_kernel_file(
    path: Path, kernels: Mapping[GPU, Iterable[RecordedKernel]], model: Mapping[str, Any], processes: int | None = None
) -> Iterator[tuple[int, int]]:
    """Compiles kernels for GPUs that need not be present, and writes them to a kernels file. The file appears only when
    complete.

    After each kernel it yields (number of kernels compiled before it, total), and (total, total) before the file is written.

    model: the model's name and options, for the manifest. The file is recorded as trusted (`is_trusted`). Raises ValueError
    without a C compiler, before anything is compiled.
    """
    by_gpu = {gpu: list(of) for gpu, of in kernels.items()}
    total = sum(map(len, by_gpu.values()))
    contents: dict[str, bytes] = {}
    capabilities: dict[str, int] = {}
    contents |= _built(extension_sources([]))
    before = 0
    for gpu, of in by_gpu.items():
        for done in compile_all(of, gpu.sm, processes):
            yield before + done - 1, total
        with compiling_for(gpu.sm):
            compiled = [compile_one(each) for each in of]  # from Triton's cache; raises the error of a kernel that failed
        for kernel in compiled:
            contents |= _members_of(kernel)
            capabilities[kernel.hash] = gpu.sm
        sources = extension_sources(compiled)
        contents |= _built({digest: sources[digest] for digest in sources if f"extensions/{digest}.so" not in contents})
        before += len(of)
    yield total, total
    manifest = {
        "format_version": FORMAT_VERSION,
        "requirements": asdict(Requirements.here()),
        "gpus": {gpu.product: gpu.sm for gpu in by_gpu},
        "model": dict(model),
        "capabilities": capabilities,
        "members": {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(contents.items())},
    }
    _write(path, manifest, contents)


def _built(sources: Mapping[str, tuple[str, str]]) -> dict[str, bytes]:
    """Returns the members of C extensions, given their names and sources by digest."""

    def built(source: tuple[str, str]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return build_extension(*source, Path(folder))

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return {
            f"extensions/{digest}.so": data for digest, data in zip(sources, pool.map(built, sources.values()), strict=True)
        }


def _members_of(kernel: CompiledKernel) -> dict[str, bytes]:
    """Returns the members of a compiled kernel: the files of Triton's cache that a launch needs."""
    files = {name: Path(file) for name, file in kernel.metadata_group.items() if name.endswith((".cubin", ".json"))}
    return {f"kernels/{kernel.hash}/{name}": file.read_bytes() for name, file in files.items()}


def _write(path: Path, manifest: Mapping[str, Any], contents: Mapping[str, bytes]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        unfinished = Path(file.name)
        try:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, data in ((MANIFEST, json.dumps(manifest, indent=1).encode()), *contents.items()):
                    archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
            file.flush()
            unfinished.chmod(0o644)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    record = _record(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()


def is_trusted(path: Path) -> bool:
    """Returns True for a file that this user has compiled: its digest is recorded in the user's cache."""
    try:
        return _record(path).is_file()
    except (OSError, ValueError):  # no home folder, or an unreadable file
        return False


def _record(path: Path) -> Path:
    return cache_folder() / "kernels" / hashlib.sha256(path.read_bytes()).hexdigest()
