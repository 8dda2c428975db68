"""Tests which kernels file an engine uses, and the one line about a file that is not used."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lowbit.engine import Engine, kernels
from lowbit.engine.kernels import use_kernels
from lowbit.hardware.machine import typical_machine
from lowbit.kernels import kernel_file
from lowbit.kernels.kernel_file import KernelFile, Requirements, write_kernel_file
from tests.tiny import tiny_llama

GPU = torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Pretends that some files are installed. The GPU is an H200, and the files contain no kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(kernels, "machine_of", lambda device: typical_machine(90))
    monkeypatch.setattr(kernels, "_in_use", {})
    monkeypatch.setattr(kernel_file, "build_extension", lambda *source: b"\x7fELF")
    paths: list[Path] = []
    monkeypatch.setattr(KernelFile, "install", lambda self, sm: paths.append(self.path))
    return paths


def write(path, *gpus):
    from lowbit.hardware.machine import GPUS

    assert [*write_kernel_file(path, {GPUS[gpu]: [] for gpu in gpus}, {})] == [(0, 0)]
    return path


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("lowbit")]


def test_the_named_file_is_used(installed, tmp_path, caplog):
    path = write(tmp_path / "mine.lowbit", "h100", "h200")
    used = use_kernels(GPU, str(path))
    assert used is not None and used.path == path and installed == [path] and lines(caplog) == []


def test_a_file_beside_the_checkpoint_is_found(installed, tmp_path, caplog):
    folder = tmp_path / "model"
    folder.mkdir()
    assert use_kernels(GPU, None, folder) is None and use_kernels(GPU, None, tmp_path / "no-folder") is None
    assert use_kernels(GPU, None) is None
    write(folder / "kernels-a100.lowbit", "a100")
    path = write(folder / "kernels-h200.lowbit", "h200")
    (folder / "other.lowbit").write_text("is not tried")
    used = use_kernels(GPU, None, folder)
    assert used is not None and installed == [path]
    (line,) = lines(caplog)
    assert "kernels-a100.lowbit: is for A100-SXM4-80GB, this GPU is sm_90; kernels are compiled anew" in line


def test_a_file_of_somebody_else_beside_the_checkpoint_is_not_used(installed, tmp_path, caplog, monkeypatch):
    path = write(tmp_path / "kernels-h200.lowbit", "h200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-user"))
    assert use_kernels(GPU, None, tmp_path) is None and installed == []
    (line,) = lines(caplog)
    assert "was not compiled by this user; if you trust it, name it (--kernels)" in line
    assert use_kernels(GPU, path) is not None, "it is used by name"


def test_stale_files_are_one_line(installed, tmp_path, caplog, monkeypatch):
    path = write(tmp_path / "old.lowbit", "h200")
    here = Requirements.here()
    monkeypatch.setattr(Requirements, "here", lambda: replace(here, lowbit="9.9", source="newer", triton="3.99"))
    assert use_kernels(GPU, path) is None and installed == []
    (line,) = lines(caplog)
    assert "\n" not in line and f"{path}: is for lowbit {here.lowbit}, this is 9.9; is for Triton {here.triton}" in line
    assert line.endswith("kernels are compiled anew (lowbit compile makes another file)")


def test_damaged_files_are_one_line(installed, tmp_path, caplog):
    path = tmp_path / "damaged.lowbit"
    path.write_bytes(b"PK not really")
    assert use_kernels(GPU, path) is None
    (line,) = lines(caplog)
    assert line.startswith(f"{path}: is no kernels file") and "compiled anew" in line


def test_another_product_of_the_same_architecture(installed, tmp_path, caplog):
    path = write(tmp_path / "h100.lowbit", "h100")
    assert use_kernels(GPU, path) is not None and installed == [path]
    (line,) = lines(caplog)
    assert line.endswith("is for H100 80GB HBM3, this is H200: some kernels are compiled anew")


def test_a_missing_file_is_an_error(installed, tmp_path):
    with pytest.raises(FileNotFoundError):
        use_kernels(GPU, tmp_path / "missing.lowbit")


def test_engines_on_a_cpu_need_none(tmp_path):
    assert Engine(tiny_llama(dtype=torch.float32), kernels=tmp_path / "missing.lowbit", cache_bytes=1 << 20, max_length=32)


@pytest.fixture(autouse=True)
def warnings_only(caplog):
    caplog.set_level(logging.WARNING)


def test_an_installed_package_is_found(installed, tmp_path, caplog, monkeypatch):
    """A package's entry point names the architecture. A file that the caller names, or one beside the checkpoint, takes
    precedence."""
    site, package = tmp_path / "site", tmp_path / "site" / "lowbit_kernels_sm90"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    about = site / "lowbit_kernels_sm90-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbit-kernels-sm90\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[lowbit.kernels]\nsm90 = lowbit_kernels_sm90\nsm80 = lowbit_kernels_sm80\n")
    path = write(package / "kernels.lowbit", "h200")
    monkeypatch.syspath_prepend(str(site))
    named = write(tmp_path / "mine.lowbit", "h200")
    assert use_kernels(GPU, named).path == named
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert use_kernels(GPU, None).path == use_kernels(torch.device("cuda"), None).path == named, "it is in use already"
    assert use_kernels(GPU, None, tmp_path / "model").path == path and installed == [named, path] and lines(caplog) == []
    here = Requirements.here()
    monkeypatch.setattr(Requirements, "here", lambda: replace(here, lowbit="9.9", source="newer"))
    assert use_kernels(GPU, None, tmp_path / "model") is None
    (line,) = lines(caplog)
    assert line.startswith(f"{path}: is for lowbit {here.lowbit}, this is 9.9; kernels are compiled anew")
    monkeypatch.setattr(kernels, "machine_of", lambda device: typical_machine(80))
    assert use_kernels(GPU, None, tmp_path / "model") is None and len(lines(caplog)) == 1, "no package, no line"
