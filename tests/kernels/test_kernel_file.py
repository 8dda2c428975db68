"""Kernels files: what they contain, and that nothing is compiled when one is used. Stale, foreign and damaged files are
refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from lowbit.hardware.machine import GPUS, typical_machine
from lowbit.kernels import kernel_file
from lowbit.kernels.kernel_file import KernelFile, KernelFileError, Requirements, is_trusted, write_kernel_file
from lowbit.kernels.parts.launch import RecordedKernel, recording
from tests.kernels.parts.test_compile import gate, ring

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="Triton's launchers need a C compiler")

ROOT = Path(__file__).parents[2]


def recorded() -> list[RecordedKernel]:
    """A Gluon kernel and a plain Triton kernel."""
    with recording() as kernels:
        ring()(), gate()()
    return kernels


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A kernels file, and the folder of Triton's cache in which its kernels were compiled."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))
        path = folder / "kernels-h200.lowbit"
        progress = [*write_kernel_file(path, {GPUS["h200"]: recorded()}, {"name": "two kernels"}, processes=1)]
        assert progress == [(0, 2), (1, 2), (2, 2)] and is_trusted(path)
        assert sorted(entry.name for entry in folder.iterdir()) == [path.name, "triton", "user"]
    return path


@pytest.fixture
def copy(written, tmp_path):
    return Path(shutil.copy(written, tmp_path / "kernels-copy.lowbit"))


def test_holds_machine_code_and_launchers_alone(written):
    file = KernelFile.open(written)
    assert file.gpus == {"H200": 90} and file.model == {"name": "two kernels"} and file.refusals(90) == ()
    with zipfile.ZipFile(written) as archive:
        names = archive.namelist()
        cubins = [archive.read(name) for name in names if name.endswith(".cubin")]
    assert len(cubins) == 2 and all(cubin.startswith(b"\x7fELF") for cubin in cubins)
    assert {Path(name).suffix for name in names} == {".cubin", ".json", ".so"}


def test_each_gpu_gets_code_of_its_own(tmp_path, monkeypatch):
    """Triton caches the target of a function. The second GPU must not get the code of the first because of that."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    path, of = tmp_path / "kernels-both.lowbit", {}
    for gpu, sm in (("h200", 90), ("a100", 80)):
        with recording() as of[GPUS[gpu]]:
            gate(machine=typical_machine(sm))()
    for _ in write_kernel_file(path, of, {"name": "one kernel"}, processes=1):
        pass
    file = KernelFile.open(path)
    assert sorted(file.capabilities.values()) == [80, 90]
    with zipfile.ZipFile(path) as archive:
        for key, sm in file.capabilities.items():
            (described,) = (name for name in archive.namelist() if re.fullmatch(f"kernels/{key}/.*json", name))
            assert json.loads(archive.read(described))["target"]["arch"] == sm


def with_the_file(path: str) -> None:
    """Runs in its own process with an empty cache and no C compiler."""
    from triton.runtime import build

    from lowbit.kernels.parts.compile import compile_one, misses
    from lowbit.kernels.parts.gluon import compiling_for, extension_sources

    kernels = recorded()
    KernelFile.open(Path(path)).install(90)
    with compiling_for(90), misses() as compiled:
        launched = [compile_one(kernel) for kernel in kernels]
    assert compiled == [], compiled
    sources = extension_sources(launched)
    assert len(sources) >= 1
    for name, source in sources.values():
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder, f"{name}.c")
            code.write_text(source)
            built = Path(build._build(name, str(code), folder, [], [], ["libcuda.so.1"], []))
            # The loader links to the machine's driver, although no driver was present when the file was built.
            assert b"libcuda.so.1\0" in built.read_bytes()
    unknown = Path(tempfile.mkdtemp(), "unknown.c")
    unknown.write_text("int unknown;")
    with pytest.raises(RuntimeError, match="C compiler"):  # Triton's own error: it still builds other sources
        build._build("unknown", str(unknown), str(unknown.parent), [], [], [], [])


def test_nothing_is_compiled_with_a_file(written, tmp_path):
    """In another process, with an empty cache of Triton and without a C compiler, all kernels and launchers are there."""
    code = f"from tests.kernels.test_kernel_file import with_the_file; with_the_file({str(written)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PATH": str(tmp_path)}
    # The process has no compiler, which pytestmark looks for when the module is imported. That only skips pytest's tests, not
    # this call.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lowbit": "0.1", "source": "another"}, "is for lowbit 0.1, this is "),
        ({"source": "another"}, "is for lowbit another source of "),
        ({"triton": "3.5.0", "triton_digest": "another"}, "is for Triton 3.5.0, this is "),
        ({"triton_digest": "another"}, "is for another build of Triton "),
        ({"python": ".cpython-39.so", "triton_digest": "another"}, "is for Python .cpython-39.so, this is "),
        ({"libc": "glibc 99.1"}, "is for glibc 99.1, this is "),
    ],
)
def test_stale_and_foreign_files_say_why(written, changed, reason):
    file = KernelFile.open(written)
    file = replace(file, requirements=replace(file.requirements, **changed))
    (refused,) = file.refusals(90)
    assert refused.startswith(reason)
    assert len(file.refusals(80)) == 2 and file.refusals(80)[1] == "is for H200, this GPU is sm_80"


def test_an_older_libc_is_no_reason(written):
    here = Requirements.here()
    assert replace(here, libc="glibc 2.1").refusals(here) == ()


def rewrite(path, change, manifest=None):
    """Rewrites a file with `change` applied to its members, a dict, and `manifest` to its manifest."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    stated = json.loads(members.pop("manifest.json"))
    change(members)
    (manifest or (lambda stated: None))(stated)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(stated))
        for name, data in members.items():
            archive.writestr(name, data)
    return stated


def add(name, data=b"x"):
    """Changes that add a member and list it."""
    return (
        lambda members: members.update({name: data}),
        lambda stated: stated["members"].update({name: [len(data), hashlib.sha256(data).hexdigest()]}),
    )


@pytest.mark.parametrize(
    "name",
    ["../evil.so", "/etc/evil.so", "extensions/../../evil.so", f"kernels/{'a' * 64}/../../x.cubin", "kernels/a/x.cubin",
     f"kernels/{'a' * 64}/x.ptx", f"kernels/{'A' * 64}/x.cubin", "extensions/evil.so", "setup.py"],
)  # fmt: skip
def test_members_with_other_names_are_refused(copy, name):
    rewrite(copy, *add(name))
    with pytest.raises(KernelFileError, match="a member is named"):
        KernelFile.open(copy)


def test_members_that_are_not_listed_are_refused(copy):
    rewrite(copy, add(f"extensions/{'a' * 64}.so")[0])
    with pytest.raises(KernelFileError, match="its members are not those that"):
        KernelFile.open(copy)


def test_a_kernel_without_its_description_is_refused(copy):
    rewrite(copy, *add(f"kernels/{'a' * 64}/x.cubin"))
    with pytest.raises(KernelFileError, match=r"the kernel a+ is not one \.cubin and one \.json"):
        KernelFile.open(copy)


def test_changed_contents_are_refused_before_they_are_used(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def change(members):
        name = next(name for name in members if name.endswith(".cubin"))
        members[name] = members[name][:-1] + bytes([members[name][-1] ^ 1])

    rewrite(copy, change)
    file = KernelFile.open(copy)  # damage is not detected when the file is opened, since sizes are right
    with pytest.raises(KernelFileError, match="does not have the digest"):
        file.install(90)


@pytest.mark.parametrize("part", [0, 0.3, 0.9])
def test_files_that_were_cut_off_are_refused(copy, part):
    data = copy.read_bytes()
    copy.write_bytes(data[: int(part * len(data))])
    with pytest.raises(KernelFileError, match="is no kernels file, or was cut off"):
        KernelFile.open(copy)


def test_damaged_bytes_are_refused_or_change_nothing(written, tmp_path):
    """Damages every byte of the directory, and random bytes elsewhere. A damaged file is refused, or its members are still the
    listed ones."""
    data, path = written.read_bytes(), tmp_path / "damaged.lowbit"
    directory = data.rindex(b"PK\x01\x02", 0, data.index(b"PK\x01\x02") + 200)
    places = [*range(directory, directory + 120), *range(len(data) - 22, len(data)), *random.sample(range(len(data)), 200)]
    refused = 0
    for place in places:
        changed = bytearray(data)
        changed[place] ^= random.randrange(1, 256)
        path.write_bytes(changed)
        try:
            file = KernelFile.open(path)
            with zipfile.ZipFile(path) as archive:
                contents = {name: file._member(archive, name) for name in file.members}
        except KernelFileError:
            refused += 1
        else:
            assert contents and all(hashlib.sha256(contents[name]).hexdigest() == file.members[name][1] for name in contents)
    assert refused > 150


@pytest.mark.parametrize(
    "change",
    [
        lambda stated: stated.update(members=[1, 2]),
        lambda stated: stated.update(members={"a": [float("inf"), "x"]}),
        lambda stated: stated.update(requirements={"lowbit": "1"}),
        lambda stated: stated.pop("gpus"),
        lambda stated: stated.update(gpus={"H200": None}),
        lambda stated: stated.update(capabilities=None),
        lambda stated: stated.update(model=7),
    ],
)
def test_damaged_manifests_are_refused(copy, change):
    rewrite(copy, lambda members: None, change)
    with pytest.raises(KernelFileError, match=r"manifest\.json is damaged"):
        KernelFile.open(copy)


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_manifests_that_are_no_objects_are_refused(copy, manifest):
    with zipfile.ZipFile(copy, "w") as archive:
        archive.writestr("manifest.json", manifest)
    with pytest.raises(KernelFileError, match=r"manifest\.json is damaged"):
        KernelFile.open(copy)


def test_other_versions_and_sizes_are_refused(copy, monkeypatch):
    monkeypatch.setattr(kernel_file, "MOST_MEMBER_BYTES", 1000)
    with pytest.raises(KernelFileError, match="or too large"):
        KernelFile.open(copy)
    rewrite(copy, lambda members: None, lambda stated: stated.update(format_version=2))
    with pytest.raises(KernelFileError, match="format_version is 2, this release reads 1"):
        KernelFile.open(copy)


def test_a_manifest_that_unpacks_to_gigabytes_is_refused(copy, monkeypatch):
    monkeypatch.setattr(kernel_file, "MOST_MANIFEST_BYTES", 1 << 16)
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (1 << 20))
    with pytest.raises(KernelFileError, match="has more than 65,536 bytes"):
        KernelFile.open(copy)


def test_only_files_compiled_here_are_trusted(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not is_trusted(copy) and not is_trusted(tmp_path / "missing")


def test_a_kernel_that_does_not_compile_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    broken = RecordedKernel("lowbit.kernels.parts.launch", "no_such_kernel", (), {})
    with pytest.raises(AttributeError, match="no_such_kernel"):
        list(write_kernel_file(tmp_path / "x.lowbit", {GPUS["h200"]: [broken]}, {}, processes=1))
    assert not list(tmp_path.glob("*.lowbit*"))


def without_a_compiler(path: str) -> None:
    """Runs in its own process, since Triton looks for a compiler once."""
    with pytest.raises(ValueError, match="no C compiler: install gcc"):
        next(write_kernel_file(Path(path), {GPUS["h200"]: recorded()}, {}))


def test_no_compiler_is_said_before_anything_is_compiled(tmp_path):
    code = f"from tests.kernels.test_kernel_file import without_a_compiler as run; run({str(tmp_path / 'x.lowbit')!r})"
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_one_line(tmp_path):
    from lowbit.kernels.parts.gluon import build_extension

    with pytest.raises(ValueError, match="the C compiler fails here: .*gcc|clang"):
        build_extension("broken", "this is no C", tmp_path)


def test_requirements_are_those_of_this_process():
    here = asdict(Requirements.here())
    assert here["python"].startswith(f".cpython-{sys.version_info[0]}{sys.version_info[1]}") and all(here.values())
