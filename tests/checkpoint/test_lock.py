"""Only one process at a time writes a folder. flock decides which. Where flock has no effect, the identity of the owner
decides."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowbit.checkpoint import CheckpointError, lock
from lowbit.checkpoint.lock import Lock, Owner

HOLD = """
import sys
from pathlib import Path
from lowbit.checkpoint.lock import Lock
with Lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.fixture
def owner(request, tmp_path):
    """Starts a process that holds the lock of tmp_path/c."""
    with subprocess.Popen(
        [*getattr(request, "param", ()), sys.executable, "-c", HOLD, str(tmp_path / "c")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent.parent,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def held_by(path, owner, age_seconds=0.0):
    """Writes a lock file without holding it."""
    file = path.with_name(f".{path.name}.lock")
    file.write_text(json.dumps(dataclasses.asdict(owner)))
    os.utime(file, (time.time() - age_seconds,) * 2)
    return file


def other(**changes):
    return dataclasses.replace(Owner.current(), **changes)


@pytest.fixture
def without_flock(monkeypatch):
    def unsupported(handle, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)


def refusal(path):
    with pytest.raises(CheckpointError) as raised, Lock(path):
        pass
    return str(raised.value)


def test_nothing_is_left(tmp_path):
    with Lock(tmp_path / "new" / "deep" / "c") as held:
        assert os.listdir(tmp_path / "new" / "deep") == [".c.lock"]
        held.require()
    assert os.listdir(tmp_path) == []


def test_the_message_names_the_owner_which_the_kernel_forgets_when_it_is_killed(tmp_path, owner):
    said = refusal(tmp_path / "c")
    assert re.fullmatch(
        rf"{tmp_path}/c: process {owner.pid} on host '.+' \(since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d, boot [0-9a-f]{{8}}, PID "
        r"namespace \d+\) is writing it; wait until it ends, or choose another folder",
        said,
    )
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert (tmp_path / ".c.lock").exists()
    with Lock(tmp_path / "c"):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs unshare and user namespaces",
)
@pytest.mark.parametrize("owner", [NAMESPACE], indirect=True)
def test_the_same_host_name_in_another_pid_namespace(tmp_path, owner):
    said = refusal(tmp_path / "c")
    mine = Owner.current()
    assert f"process 1 on host {mine.host!r}" in said and "PID namespace" in said and mine.namespace not in said


def test_a_second_one_can_wait(tmp_path, owner):
    said = []

    def say(line):
        said.append(line)
        owner.stdin.close()

    with Lock(tmp_path / "c", say):
        assert Owner.parse((tmp_path / ".c.lock").read_text()).process == os.getpid()
    assert len(said) == 1 and f"process {owner.pid}" in said[0] and said[0].endswith("is writing it; waiting until it ends")


def test_many_threads_take_turns(tmp_path):
    inside, most = [], []

    def work():
        with Lock(tmp_path / "c", lambda line: None):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5 and os.listdir(tmp_path) == []


class TestOwnersOfOtherMachines:
    """flock may have no effect between machines: for an owner on another machine, the lock file's modification time decides."""

    def test_one_that_renews_its_lock_is_running(self, tmp_path):
        file = held_by(tmp_path / "c", other(host="n1", boot="b" * 32), age_seconds=20)
        said = refusal(tmp_path / "c")
        assert "on host 'n1'" in said and re.search(rf"if it has ended, repeat this in \d+ s or delete {file}; wait", said)
        file.unlink()
        with Lock(tmp_path / "c"):
            pass

    def test_one_that_was_silent_has_ended(self, tmp_path):
        held_by(tmp_path / "c", other(host="n1", boot="b" * 32), age_seconds=lock.SILENT_SECONDS + 1)
        with Lock(tmp_path / "c"):
            pass
        assert os.listdir(tmp_path) == []

    def test_the_owner_renews(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "RENEWAL_SECONDS", 0.01)
        with Lock(tmp_path / "c"):
            os.utime(tmp_path / ".c.lock", (0, 0))
            until = time.monotonic() + 5
            while (tmp_path / ".c.lock").stat().st_mtime == 0 and time.monotonic() < until:
                time.sleep(0.01)
            assert (tmp_path / ".c.lock").stat().st_mtime > 0

    def test_a_lock_that_another_one_took_is_not_removed(self, tmp_path):
        with Lock(tmp_path / "c") as held:
            file = held_by(tmp_path / "c", other(host="n1", boot="b" * 32))
            with pytest.raises(CheckpointError, match=r"stopped for 120 s .* process \d+ on host .n1. .*is writing it"):
                held.require()
        assert file.exists()


class TestWithoutFlock:
    """On file systems that refuse flock, the owner's process number and start time decide, within this PID namespace."""

    def test_a_process_that_runs(self, tmp_path, without_flock):
        held_by(tmp_path / "c", Owner.current(), age_seconds=10_000)
        assert f"process {os.getpid()} on host" in refusal(tmp_path / "c")

    @pytest.mark.parametrize("gone", [{"process": 2**22 + 1}, {"started": "1"}], ids=["number", "number of a later process"])
    def test_a_process_that_has_ended(self, tmp_path, without_flock, gone):
        held_by(tmp_path / "c", other(**gone))
        with Lock(tmp_path / "c"):
            assert "is writing it" in refusal(tmp_path / "c")
        assert os.listdir(tmp_path) == []

    def test_a_process_of_another_pid_namespace(self, tmp_path, without_flock):
        held_by(tmp_path / "c", other(namespace="1", process=2**22 + 1))
        assert "PID namespace 1)" in refusal(tmp_path / "c")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"host": "a"}', '{"host":' * 5000, "\0\xff" * 3000, "null"])
def test_a_damaged_lock_file_that_nobody_holds_is_taken(tmp_path, text):
    (tmp_path / ".c.lock").write_text(text)
    with Lock(tmp_path / "c") as held:
        held.require()


def test_a_link_or_folder_in_the_place_of_the_lock_file(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / ".c.lock").symlink_to("secret")
    (tmp_path / ".d.lock").mkdir()
    assert "c: cannot be written" in refusal(tmp_path / "c") and "d: cannot be written" in refusal(tmp_path / "d")
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_full_disk(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    said = refusal(tmp_path / "new" / "c")
    monkeypatch.undo()
    assert "c: cannot be written" in said and "No space left on device" in said and os.listdir(tmp_path) == []
