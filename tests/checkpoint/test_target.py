"""Targets of commands. Only a checkpoint or an earlier result may be replaced, and never the files that are being read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.e2e_report import E2E
from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter
from lowbit.checkpoint.target import check_file, command_of, discard, hidden, replace_file, write_result
from lowbit.eval.results import check_plot, write_json

Usage = namedtuple("Usage", "total used free")


def checkpoint(folder, value=1.0):
    with CheckpointWriter(folder) as writer:
        writer.add("a", torch.full((10,), value))
        writer.finish({"model_type": "llama"}, None)
    return folder


def contents(folder):
    return {p.relative_to(folder): p.is_symlink() or (p.is_file() and p.read_bytes()) for p in folder.rglob("*")}


@pytest.fixture
def models(tmp_path):
    """A folder with models/base, models/notes.txt, and `link`, a link to models/base."""
    checkpoint(tmp_path / "models" / "base")
    (tmp_path / "models" / "notes.txt").write_text("dear")
    (tmp_path / "link").symlink_to("models/base")
    (tmp_path / "models" / "base" / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("models/base", "models", "holds the source"),
        ("models/base", ".", "holds the source"),
        ("models/base", "models/base", "is the source itself"),
        ("models/base/", "models/base", "is the source itself"),
        ("models/base", "models/base/", "is the source itself"),
        ("models/base", "models/other/../base", "is the source itself"),
        ("models/base", "link", "is the source itself"),
        ("link", "models/base", "is the source itself"),
        ("link", "models", "holds the source"),
        ("models/base", "models/base/empty", "lies in the source"),
        ("models/base", "models/base/new/deep", "lies in the source"),
        ("link", "models/base/new", "lies in the source"),
        ("models/base", "link/new", "lies in the source"),
        # the target folder holds this file, for example a GGUF file
        ("models/base/model.safetensors", "models/base", "holds the source"),
    ],
)
def test_what_is_read_is_never_written(models, monkeypatch, source, target, why, overwrite):
    before = contents(models)
    for root in (models, Path()):
        monkeypatch.chdir(models)
        with pytest.raises(CheckpointError, match=why):
            CheckpointWriter(f"{root}/{target}", overwrite=overwrite, sources=[Path(f"{root}/{source}")])
    assert contents(models) == before


def test_files_that_links_of_the_source_lead_to_are_read_too(tmp_path):
    checkpoint(tmp_path / "store")
    (tmp_path / "source").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "source" / name).symlink_to(tmp_path / "store" / name)
    with pytest.raises(CheckpointError, match=r"store: holds the source .*source/(config\.json|model\.safetensors)"):
        CheckpointWriter(tmp_path / "store", overwrite=True, sources=[tmp_path / "source"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: (f / "notes.txt").write_text(""), r"no part of a checkpoint: notes\.txt"),
        (lambda f: (f / "models").mkdir(), r"no part of a checkpoint: models/"),
        (lambda f: (f / "model.py").write_text(""), r"no part of a checkpoint: model\.py"),
        (lambda f: [(f / f"{i}.txt").write_text("") for i in range(9)], r"0\.txt, .*4\.txt and 4 more"),
        (lambda f: (f / "b.safetensors").symlink_to(f / "model.safetensors"), r"no part of a checkpoint: b\.safetensors"),
        (lambda f: os.mkfifo(f / "vocab.json"), r"no part of a checkpoint: vocab\.json"),
        (lambda f: (f / "config.json").unlink(), r"not a checkpoint \(config\.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"not a checkpoint \(config\.json"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: holds a list"),
    ],
)
def test_only_checkpoints_are_replaced(tmp_path, change, why):
    checkpoint(tmp_path / "c")
    change(tmp_path / "c")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=why):
        CheckpointWriter(tmp_path / "c", overwrite=True)
    assert contents(tmp_path) == before


def test_what_was_replaced_is_said(tmp_path):
    checkpoint(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    said = []
    with CheckpointWriter(tmp_path / "c", overwrite=True, say=said.append) as writer:
        writer.add("b", torch.ones(3))
        writer.finish({}, None)
    assert said == [f"replaced {tmp_path / 'c'}, an unquantized checkpoint, 0.0 MB"]
    with CheckpointReader(tmp_path / "c") as reader:
        assert reader.names() == ["b"]
    assert os.listdir(tmp_path) == ["c"]


def test_an_empty_folder_is_used_and_a_link_followed(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    with CheckpointWriter("link") as writer:
        monkeypatch.chdir("/")  # the paths that were relative must keep their meaning
        writer.add("a", torch.ones(3))
        writer.finish({}, None)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_in_the_way_during_the_work_stays(tmp_path, overwrite):
    checkpoint(tmp_path / "c") if overwrite else None
    with (
        pytest.raises(CheckpointError, match=r"the finished checkpoint is (\S+)") as raised,
        CheckpointWriter(tmp_path / "c", overwrite=overwrite) as writer,
    ):
        writer.add("b", torch.ones(3))
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "thesis.txt").write_text("hours")
        writer.finish({}, None)
    assert (tmp_path / "c" / "thesis.txt").read_text() == "hours"
    kept = Path(str(raised.value).rpartition(" ")[2])
    with CheckpointReader(kept) as reader:
        assert reader.names() == ["b"]


KILLED = """
import os, signal, sys, torch
from lowbit.checkpoint import CheckpointWriter
from lowbit.checkpoint import writer as module
renames, rename = 0, os.rename
def killing(*paths):
    global renames
    rename(*paths)
    renames += 1
    if renames == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = killing
with CheckpointWriter(sys.argv[1], overwrite=True) as writer:
    writer.add("b", torch.ones(3))
    writer.finish({}, None)
"""


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, renames):
    """A kill after the first rename leaves no target; the next writer restores the old folder. A kill after the second rename
    leaves the new folder; the next writer removes the old one."""
    checkpoint(tmp_path / "c")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "c"), str(renames)], check=False)
    assert done.returncode == -signal.SIGKILL
    if renames == 1:
        with pytest.raises(CheckpointError, match=r"no such folder; .*\.c\.old-[0-9a-f]{8} is what was there"):
            CheckpointReader(tmp_path / "c")
    with pytest.raises(CheckpointError, match="not empty"), CheckpointWriter(tmp_path / "c"):
        pass  # this writer restores the old folder, and does not overwrite it
    with CheckpointReader(tmp_path / "c") as reader:
        assert reader.names() == ["a" if renames == 1 else "b"]
    with CheckpointWriter(tmp_path / "c", overwrite=True) as writer:
        writer.add("d", torch.ones(3))
        writer.finish({}, None)
    assert os.listdir(tmp_path) == ["c"]
    with CheckpointReader(tmp_path / "c") as reader:
        assert reader.names() == ["d"]


@pytest.mark.parametrize("renames", [1, 2])
def test_ctrl_c_between_the_two_renames(tmp_path, monkeypatch, renames):
    checkpoint(tmp_path / "c")
    calls, rename = [], os.rename

    def interrupted(*paths):
        rename(*paths)
        calls.append(paths)
        if len(calls) == renames:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "c", overwrite=True) as writer:
        writer.add("b", torch.ones(3))
        writer.finish({}, None)
    assert os.listdir(tmp_path) == ["c"]
    with CheckpointReader(tmp_path / "c") as reader:
        assert reader.names() == ["a" if renames == 1 else "b"]


def test_left_overs_with_other_files_in_them_stay(tmp_path):
    strange = hidden(tmp_path / "c", "tmp", "0123abcd")
    (strange / "sub").mkdir(parents=True)
    for name in ("shard-1", "photo.jpg"):
        (strange / name).write_bytes(b"x")
    checkpoint(tmp_path / "c")
    assert sorted(os.listdir(strange)) == ["photo.jpg", "sub"]
    discard(tmp_path / "nothing", ["*"])
    (tmp_path / "link").symlink_to("c")
    discard(tmp_path / "link", ["*"])
    assert (tmp_path / "c" / "config.json").exists()


def test_what_a_kill_left_of_a_replaced_folder_is_not_put_back(tmp_path):
    """A writer was killed while it removed the old folder, of which half was gone. Then somebody removed the new folder. The
    next writer must not restore the incomplete old folder."""
    checkpoint(tmp_path / "c")
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "c"), "2"], check=False)
    (old,) = tmp_path.glob(".c.old-*")
    (old / "config.json").unlink()
    shutil.rmtree(tmp_path / "c")
    checkpoint(tmp_path / "c", 2.0)  # the old folder is neither restored, which would refuse this, nor in the way
    with CheckpointReader(tmp_path / "c") as reader:
        assert float(reader.get("a")[0]) == 2.0
    with CheckpointWriter(tmp_path / "c", overwrite=True):
        pass
    assert os.listdir(tmp_path) == ["c"]


class TestSpace:
    def test_too_little_is_said_before_the_work(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 1000))
        writer = CheckpointWriter(tmp_path / "x" / "c")
        writer.reserve(1000)
        with pytest.raises(CheckpointError, match=r"x/c: the checkpoint needs 2,000 bytes there, 1,000 are free on /"):
            writer.reserve(2000)
        assert os.listdir(tmp_path) == []

    def test_a_disk_that_fills_up_says_how_much_and_where(self, tmp_path, monkeypatch):
        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("lowbit.checkpoint.writer.save_file", full)
        with (
            pytest.raises(
                CheckpointError, match=r"c/shard-1: the disk is full: .* needs at least 5,000 bytes on /.*, [\d,]+ were"
            ),
            CheckpointWriter(tmp_path / "c") as writer,
        ):
            writer.reserve(5000)
            writer.add("a", torch.ones(3))
            writer.finish({}, None)
        assert os.listdir(tmp_path) == []


JSON, PAGE = "lowbit eval", "lowbit eval --suite"


def page(path):
    write_result(path, PAGE, lambda scratch: scratch.write_text(f"<!-- result: {PAGE} -->\n# Evaluation\n"))


class TestResultFiles:
    @pytest.mark.parametrize(
        "content",
        [
            b'{"model_type": "llama", "result": "lowbit eval"}',  # not in the form in which this library writes results
            b'{"result": "lowbit convert"}',
            b'{"result": "lowbit eval more"}',
            b"# how I use lowbit eval\n",
            b"\x89PNG\r\n\x1a\n....lowbit eval....",
            b"\0" * 100,
        ],
    )
    def test_other_files_stay(self, tmp_path, content):
        path = tmp_path / "config.json"
        path.write_bytes(content)
        for write in (lambda: check_file(path, JSON), lambda: write_json(path, {"result": JSON}), lambda: page(path)):
            with pytest.raises(ValueError, match=r"config\.json: exists and is .* it is not replaced"):
                write()
        assert path.read_bytes() == content and os.listdir(tmp_path) == ["config.json"]

    @pytest.mark.parametrize("name", [JSON, PAGE, E2E])
    def test_results_replace_their_like(self, tmp_path, name):
        path = tmp_path / "new" / "r.json"
        for value in (1, 2):
            write_json(path, {"value": value, "result": name})
            assert json.loads(path.read_text())["value"] == value
        with pytest.raises(ValueError, match=f"is a result of {command_of(name)}, not of lowbit quantize"):
            check_file(path, "lowbit quantize")

    def test_pages_and_empty_files_are_replaced(self, tmp_path):
        (tmp_path / "empty").touch()
        write_json(tmp_path / "empty", {"result": JSON})
        for _ in range(2):
            page(tmp_path / "p.md")

    @pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
    def test_permissions_stay(self, tmp_path, mode):
        path = tmp_path / "page.md"
        path.write_text("old")
        path.chmod(mode)
        replace_file(path, lambda scratch: scratch.write_text("new"))
        assert path.read_text() == "new" and path.stat().st_mode & 0o777 == mode

    def test_what_another_process_writes_stays_for_a_day(self, tmp_path):
        """A process number does not show whether the process runs on another machine or in another PID namespace, so age
        decides.
        """
        path = tmp_path / "r.json"
        parts = [hidden(path, "part", token) for token in ("00000000", "0123abcd")]
        for part in parts:
            part.touch()
        two_days_ago = os.stat(parts[0]).st_mtime - 2 * 24 * 3600
        os.utime(parts[0], (two_days_ago, two_days_ago))
        write_json(path, {"result": JSON})
        assert sorted(os.listdir(tmp_path)) == [parts[1].name, "r.json"]

    def test_links_are_followed(self, tmp_path):
        write_json(tmp_path / "r.json", {"result": JSON})
        (tmp_path / "link.json").symlink_to("r.json")
        write_json(tmp_path / "link.json", {"result": JSON, "value": 3})
        assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "r.json").read_text())["value"] == 3

    def test_only_regular_files(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "file").write_text("x")
        for path, why in (
            (tmp_path / "pipe", "is not a regular file"),
            (Path("/dev/null"), "is not a regular file"),
            (tmp_path, "is a folder"),
            (tmp_path / "file" / "r.json", "file is not a folder"),
        ):
            with pytest.raises(ValueError, match=why):
                write_json(path, {"result": JSON})
        assert Path("/dev/null").is_char_device()

    def test_a_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        write_json(tmp_path / "r.json", {"result": JSON, "value": 1})

        def full(handle):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"r\.json: cannot be written \(No space left on device; [\d,]+ bytes were free on /"):
            write_json(tmp_path / "r.json", {"result": JSON, "value": 2})
        assert json.loads((tmp_path / "r.json").read_text())["value"] == 1 and os.listdir(tmp_path) == ["r.json"]

    @pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
    def test_plots_replace_plots_of_the_same_command(self, tmp_path, kind):
        figure = pytest.importorskip("matplotlib.figure").Figure()
        figure.subplots().plot([1, 2])
        from lowbit.eval.results import write_plots

        path = tmp_path / f"p.{kind}"
        for _ in range(2):
            write_plots(path, "lowbit study", lambda theme: figure)
        for written in (path, path.with_stem("p-dark")):
            with pytest.raises(ValueError, match="is a result of python -m study, not of python -m benchmarks gemm"):
                check_plot(path, "lowbit bench gemm")
            figure.savefig(written)
            with pytest.raises(ValueError, match=rf"{written.name}: exists and is no result of python -m study"):
                write_plots(path, "lowbit study", lambda theme: figure)
            written.unlink()

    def test_other_endings_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"p\.gif: a plot must be a \.png, \.svg or \.pdf file"):
            check_plot(tmp_path / "p.gif", "lowbit study")


def test_the_committed_results_are_recognised():
    root = Path(__file__).parent.parent.parent / "benchmarks" / "results"
    kinds = {"study": "lowbit study", "sizes": "lowbit study", "kv": "lowbit study kv"} | {
        name: f"lowbit study {name}" for name in ("experts", "upcycle", "learned", "quantizing-speed")
    }
    kinds["vision"] = "lowbit demo --vision imagenet"
    for path in filter(Path.is_file, root.rglob("*")):
        if kind := kinds.get(path.parent.name):
            check_file(path, kind)
        elif "tensor-parallel" in path.stem:
            check_file(path, "lowbit bench tensor-parallel")
        else:
            check_file(path, f"lowbit bench {path.stem.split('-')[3].rstrip('8')}")


class TestRegularFiles:
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
    def test_a_pipe_in_a_checkpoint_is_refused_at_once(self, tmp_path, name):
        checkpoint(tmp_path / "c")
        (tmp_path / "c" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "c" / name)
        with pytest.raises(CheckpointError, match=rf"{name}: is a pipe, and only regular files are read"):
            CheckpointReader(tmp_path / "c")

    def test_a_link_to_a_device(self, tmp_path):
        checkpoint(tmp_path / "c")
        (tmp_path / "c" / "model.safetensors").unlink()
        (tmp_path / "c" / "model.safetensors").symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is a device"):
            CheckpointReader(tmp_path / "c")

    def test_links_to_files_are_read_inside_the_folder(self, tmp_path):
        """tests/models/test_untrusted_files.py tests links that are not followed and links of the hub's cache."""
        checkpoint(tmp_path / "c")
        save_file({"z": torch.ones(1)}, tmp_path / "c" / "w")
        (tmp_path / "c" / "model.safetensors").unlink()
        (tmp_path / "c" / "model.safetensors").symlink_to("w")
        assert CheckpointReader(tmp_path / "c").names() == ["z"]
