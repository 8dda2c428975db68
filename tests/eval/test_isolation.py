"""Programs that try to escape their isolation change nothing outside it. When their parent process ends, nothing of them
remains."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.eval import sandbox, solve
from lowbit.eval.pass_at_k import Problem
from lowbit.eval.sandbox import UNSAFE, Limits, choose_isolation, enforcement, run_untrusted
from lowbit.eval.suite import Settings, read_tasks, run_suite
from tests.eval.scripted import ScriptedPipeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code runs only on Linux")

PATIENT = Limits(seconds=30.0)

ESCAPES = {
    "chmod of an open file": "os.chmod(os.open(PATH, os.O_RDONLY), 0o777)",
    "fchmod of an open folder": "os.fchmod(os.open(FOLDER, os.O_RDONLY), 0o777)",
    "utime of an open file": "os.utime(os.open(PATH, os.O_RDONLY), (1, 1))",
    "chmod with dir_fd": "os.chmod('file', 0o777, dir_fd=os.open(FOLDER, os.O_RDONLY))",
    "utime with dir_fd": "os.utime('file', (1, 1), dir_fd=os.open(FOLDER, os.O_RDONLY))",
    "rmtree": "shutil.rmtree(FOLDER)",
    "unlink with dir_fd": "os.unlink('file', dir_fd=os.open(FOLDER, os.O_RDONLY))",
    "open with dir_fd": "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(FOLDER, os.O_RDONLY))",
    "chown": "os.chown(PATH, 1, 1)",
    "setxattr": "os.setxattr(PATH, 'user.a', b'1')",
    "write": "open(PATH, 'w').write('x')",
    "symbolic link": "os.symlink(PATH, 'link'); open('link', 'w').write('x')",
    "hard link": "os.link(PATH, 'link')",
    "rename": "os.rename(PATH, 'mine')",
    "read": "open(PATH).read()",
    "list": "os.listdir(FOLDER)",
    "mode of standard output": "os.fchmod(1, 0o600)",
    "mode of the null device": "os.chmod(os.devnull, 0o600)",
    "mode of the interpreter": "os.chmod(os.path.realpath(sys.executable), 0o700)",
    "mode of the interpreter, open": "os.chmod(os.open(os.path.realpath(sys.executable), os.O_RDONLY), 0o700)",
    "time of the interpreter, open": "os.utime(os.open(os.path.realpath(sys.executable), os.O_RDONLY))",
    "interpreter's file": "os.unlink('os.py', dir_fd=os.open(os.path.dirname(os.__file__), os.O_RDONLY))",
    "interpreter's folder": "shutil.rmtree(os.path.dirname(json.__file__))",
    "file in the root folder": "open('/new', 'w')",
    "file in the system": "open('/usr/new', 'w')",
    "file in the null device's folder": "open('/dev/new', 'w')",
    "fork": "os.fork()",
    "exec": "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "subprocess": "subprocess.run([sys.executable, '-c', ''])",
    "process by clone3": "_c('syscall', 435, bytes(88), 88)",
    "process by clone": "_c('syscall', {'x86_64': 56, 'aarch64': 220}[os.uname().machine], 17, 0, 0, 0, 0)",
    "new namespaces": "_c('unshare', 0x10000000)",
    "mount": "_c('mount', b'tmpfs', os.getcwd().encode(), b'tmpfs', 0, None)",
    "unmount": "_c('umount2', os.getcwd().encode(), 2)",
    "writable again": "_c('mount', None, b'/usr', None, 4096 | 32, None)",
    "old root folder": "_c('chroot', b'/'); os.listdir('/old')",
    "shared memory": "_c('shmget', 0, 1 << 20, 0o1600)",
    "socket": "socket.socket()",
    "Unix socket": "socket.socket(socket.AF_UNIX)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "parent's variables": "open(f'/proc/{os.getppid()}/environ')",
    "other processes": "open('/proc/self/status')",
    "kernel's settings": "open('/proc/sys/kernel/hostname', 'w')",
    "host name": "socket.sethostname('other')",
    "limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))",
}  # fmt: skip
CHANGES = (
    *("chmod of an open file", "fchmod of an open folder", "chmod with dir_fd"),
    *("utime of an open file", "utime with dir_fd"),
)
TRY = """
import ctypes, json, os, resource, shutil, socket, subprocess, sys
PATH, FOLDER = {path!r}, {folder!r}

def _c(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

escaped = 0
for code in {codes!r}:
    try:
        exec(code)
        escaped += 1
    except (OSError, ValueError):
        pass
assert escaped == 0
"""
"""Runs each attempt to escape, and fails if one of them raised no error in the program."""


def attempt(names, file, isolation):
    program = TRY.format(path=str(file), folder=str(file.parent), codes=[ESCAPES[name] for name in names])
    return run_untrusted(program, PATIENT, isolation=isolation)


def state(path):
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_mtime_ns


@pytest.fixture
def file(tmp_path):
    """A file outside the isolated folder."""
    path = tmp_path / "outside" / "file"
    path.parent.mkdir()
    path.write_text("mine")
    return path


def test_every_escape_is_refused(file, isolation):
    paths = (file, file.parent, Path(os.devnull), Path(sys.executable).resolve())
    before = [state(path) for path in paths]
    outcome = attempt(ESCAPES, file, isolation)
    if not outcome.passed:  # the output names the escape that succeeded
        assert [name for name in ESCAPES if not attempt([name], file, isolation).passed] == []
    assert outcome.passed, outcome.reason
    assert [state(path) for path in paths] == before
    assert file.read_text() == "mine" and os.listdir(file.parent) == ["file"]
    assert Path(os.__file__).exists() and Path(json.__file__).exists()


def test_the_escapes_are_real(file):
    """Without isolation, the same attempts do change the file, so the test above can fail."""
    before = state(file), state(file.parent)
    for name in CHANGES:
        outcome = attempt([name], file, UNSAFE)
        assert not outcome.passed, name
    assert (state(file), state(file.parent)) != before and file.stat().st_mtime == 1
    assert not attempt(["unlink with dir_fd"], file, UNSAFE).passed and not file.exists()
    assert not attempt(["rmtree"], file, UNSAFE).passed and not file.parent.exists()
    assert attempt(["fork", "socket", "shared memory", "new namespaces"], file, UNSAFE).passed  # the filter applies here too


SECRET = "swordfish\x1b[31m" * 10_000


@pytest.mark.parametrize(
    "program",
    [
        f"raise ValueError({SECRET!r})",
        f"raise type({SECRET!r}, (ValueError,), {{}})()",
        f"import os\nraise type('E', (OSError,), {{}})({SECRET!r}, {SECRET!r})",
        "import os, sys\nmain = sys._getframe(1).f_locals\n"
        f"os.write(main['channel'], (main['token'] + '\\tfailed\\t' + {SECRET!r}[:30_000] + '\\n').encode())\nos._exit(1)",
    ],
    ids=["text", "name of a type", "errno", "forged"],
)
def test_no_unbounded_text_comes_out(program, isolation):
    outcome = run_untrusted(program, PATIENT, isolation=isolation)
    assert not outcome.passed and len(outcome.reason) <= 80 and outcome.reason.isprintable() and outcome.reason.isascii()
    if "forged" not in program and "_getframe" not in program:
        assert "swordfish" not in outcome.reason


def test_results_hold_the_type_alone(isolation):
    problem = Problem("p", "def f():\n", "f", "def check(f):\n    f()\n")
    pipe = ScriptedPipeline([f"    raise KeyError({SECRET!r})", f"    raise KeyError({SECRET!r})"])
    result = solve(pipe, [problem], samples=2, isolation=isolation)
    assert result.problems[0].reasons == ["KeyError", "KeyError"]


KILLED = """
import importlib.util, os, signal, sys, time

def children():
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = open(f"/proc/{entry}/stat").read()
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                found.setdefault(int(parent), []).append(int(entry))
    return found

def below(pid):
    table, found, todo = children(), [], [pid]
    while todo:
        new = table.get(todo.pop(), [])
        found += new
        todo += new
    return found

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

pid = os.fork()
if pid == 0:
    spec = importlib.util.spec_from_file_location("sandbox", sys.argv[3])  # without the package, which takes seconds to import
    sys.modules["sandbox"] = sandbox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sandbox)
    sandbox._run("while True: pass", sandbox.Limits(seconds=100.0), None, sys.argv[1])
    os._exit(0)
depth, end = int(sys.argv[2]), time.monotonic() + 30
while len(started := below(pid)) < depth and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.3)  # the program itself runs
started = below(pid)
assert len(started) >= depth, started
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
end = time.monotonic() + 10
while any(map(alive, started)) and time.monotonic() < end:
    time.sleep(0.02)
print([p for p in started if alive(p)])
"""


@pytest.mark.parametrize("kind", [*sandbox.ISOLATIONS, UNSAFE])
def test_a_killed_parent_leaves_nothing(kind, tmp_path):
    """If the parent is killed, no process remains, and the next run removes the folder."""
    if kind != UNSAFE and (refusal := sandbox._refusal(kind)):
        pytest.skip(f"{kind}: {refusal}")
    depth = {sandbox.BUBBLEWRAP: 3, sandbox.NAMESPACES: 2, UNSAFE: 1}[kind]
    command = [sys.executable, "-c", KILLED, kind, str(depth), sandbox.__file__]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    left = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert left.stdout.strip() == "[]"
    assert len(os.listdir(tmp_path)) == (kind == UNSAFE)  # an isolated program's folder is in memory and vanishes with it


def test_the_next_run_removes_folders_of_killed_ones(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with sandbox._folder() as used:
        left, other = tmp_path / f"{sandbox._PREFIX}left", tmp_path / "other"
        (left / "0" / "deep").mkdir(parents=True)
        other.mkdir()
        (tmp_path / f"{sandbox._PREFIX}link").symlink_to(other)
        assert run_untrusted("open('a', 'w')", PATIENT, isolation=UNSAFE).passed
        assert not left.exists() and os.path.isdir(used) and other.is_dir()


def refused_everywhere(monkeypatch):
    monkeypatch.setattr(sandbox, "_refusal", lambda name: f"no {name} here")


def test_without_an_isolation_nothing_runs(monkeypatch, tmp_path):
    refused_everywhere(monkeypatch)
    message = (
        r"none works on this machine \(bubblewrap: no bubblewrap here; namespaces: no namespaces here\): install .* --unsafe"
    )
    with pytest.raises(ValueError, match=message) as error:
        choose_isolation()
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        run_untrusted("pass")
    problem = Problem("p", "def f():\n", "f", "def check(f):\n    f()\n")
    pipe = ScriptedPipeline(["    return 1"])
    with pytest.raises(ValueError, match=message):
        solve(pipe, [problem])
    assert not pipe.asked
    record = {"task_id": "t", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    f()\n"}
    (tmp_path / "code.jsonl").write_text(json.dumps(record))
    settings = Settings(run_generated_code=True)
    tasks = read_tasks(tmp_path, None, settings)
    with pytest.raises(ValueError, match=message):  # raised before the missing model is opened
        run_suite([str(tmp_path / "no-model")], None, tasks, settings, tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_unsafe_runs_without_an_isolation_and_says_so(monkeypatch):
    assert choose_isolation(unsafe=True) in sandbox.ISOLATIONS or not shutil.which("unshare")
    refused_everywhere(monkeypatch)
    assert choose_isolation(unsafe=True) == UNSAFE
    said = enforcement(isolation=UNSAFE)
    assert said["isolation"] == UNSAFE and said["files outside its folder"] == "not protected"
    assert "namespace" not in str(said)


def test_results_say_which_isolation(isolation):
    said = enforcement(isolation=isolation)
    assert said["isolation"].split()[0] == {sandbox.BUBBLEWRAP: "bubblewrap"}.get(isolation, isolation)
    assert "namespace" in said["network"] and "namespace" in said["processes"]
    assert "read-only" in said["files outside its folder"]


def test_a_broken_isolation_is_refused_by_its_own_words(monkeypatch, tmp_path):
    """The tool's own error message is the reason of the refusal."""
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox._refusal.cache_clear()
    try:
        assert sandbox._refusal(sandbox.BUBBLEWRAP) == "could not be set up: bwrap: No permissions to create new namespace"
    finally:
        sandbox._refusal.cache_clear()
