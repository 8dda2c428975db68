"""Programs that misbehave are contained within their limits and count as failed; tame ones pass."""

from __future__ import annotations

import os
import sys
import time

import pytest

from lowbit.eval import sandbox
from lowbit.eval.sandbox import Limits, enforcement, run_untrusted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux only")

FAST, PATIENT = Limits(seconds=1.0), Limits(seconds=20.0)  # for what does not end, and for the rest on a busy machine
WRITES_TO_ALL_FILES = """
import os
for channel in range(3, 64):
    try:
        os.write(channel, {line!r})
    except OSError:
        pass
os._exit(0)
"""
FORGED = WRITES_TO_ALL_FILES.format(line=b"0\tpassed\t\t\n" + b"passed\n" + b'{"token": 0, "passed": true}\n')
"""Tells the guard's parent that it passed, without knowing the token."""
NESTED = WRITES_TO_ALL_FILES.format(line=b"[" * 60_000 + b"\n")
"""What a parser of JSON would take for a list of lists of lists."""
READS_THE_TOKEN = r"""
import os, sys
main = sys._getframe(1).f_locals
os.write(main["request"]["channel"], (main["token"] + "\tpassed\t\tforged\n").encode())
os._exit(0)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import math, re, hashlib, collections\nassert math.gcd(4, 6) == 2",
        "import numpy as np\nassert (np.ones((40, 40)) @ np.ones((40, 40))).sum() == 64000",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nassert A(1).x == 1",
        "import os\nos.mkdir('d')\nopen('d/a', 'w').write('x')\nos.remove('d/a')\nopen(os.devnull, 'w').write('x')",
        "import os\nassert set(os.environ) <= {'OPENBLAS_NUM_THREADS', 'LC_CTYPE'} and not os.listdir('.')",
        "import sys\nassert sys.stdin.read() == '' and __name__ != '__main__'\nprint('x' * 10_000_000)",
    ],
)
def test_tame_programs_pass(program, spaces):
    outcome = run_untrusted(program)
    assert outcome.passed, outcome.reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "took longer than 1 s"),
        ("import time\ntime.sleep(100)", "took longer than 1 s"),
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("open('a', 'wb').write(b'x' * (5 << 20))", "File too large"),
        ("import socket\nsocket.socket()", "refused: socket"),
        ("import socket\ntry:\n    socket.socket()\nexcept OSError:\n    pass", "refused: socket"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", "refused: socket"),
        ("import os\nif os.fork() == 0:\n    while True: pass", "refused: os.fork"),
        ("import subprocess\nsubprocess.run(['true'])", "refused: subprocess.Popen"),
        ("import os\nos.system('true')", "refused: os.system"),
        ("import os\nos.execv('/bin/true', ['true'])", "refused: os.exec"),
        ("import os\nos.kill(os.getppid(), 9)", "refused: os.kill"),
        ("import ctypes", "ctypes is not available"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))", "refused: resource.setrlimit"),
        ("raise SystemExit(0)", "left with status 0"),
        ("import os\nos._exit(0)", "left with status 0"),
        (FORGED, "left with status 0"),
        (NESTED, "left with status 0"),
        ("import os, sys\nsys.excepthook = print\nos._exit(0)", "left with status 0"),
        ("import sys\nsys.excepthook = lambda *found: None\nraise ValueError", "left with status 1"),
        ("import os\nos.write = lambda *found: 0\nassert 1 == 2", "AssertionError"),
        ("import os, signal\nos.posix_spawn('/bin/true', ['true'], {})", "refused: os.posix_spawn"),
        ("import os\nos.killpg(os.getpgrp(), 9)", "refused: os.killpg"),
        ("import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(os.getpid()), 9)", "refused: signal.pidfd_send_signal"),
        ("import _posixsubprocess\n_posixsubprocess.fork_exec([b'/bin/true'])", "refused: _posixsubprocess.fork_exec"),
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "refused: os.fork"),
        ("import os\nopen(f'/proc/{max(os.getppid(), 1)}/environ')", "which tells of processes"),
        ("import os\nopen(f'/proc/{max(os.getppid(), 1)}/mem', 'rb')", "which tells of processes"),
        ("import os\nos.readlink('/proc/self/exe')\nopen('/proc/self/maps')", "which tells of processes"),
        ("import __main__\n__main__.ctypes.CDLL(None)", "refused: ctypes.dlopen"),
        ("import gc\n[m for m in gc.get_objects() if getattr(m, '__name__', '') == 'ctypes'][0].CDLL(None)", "refused: ctypes"),
        ("import os\nos.mkfifo('a')", "refused: os.mkfifo"),
        ("x = []\nwhile True: x.append(bytes(1 << 26))", "MemoryError"),  # not touched, so that a busy machine needs no time
        ("import os\nf = []\nwhile True: f.append(os.memfd_create('a'))", "Too many open files"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()", ""),
        ("def f(): f()\nf()", "RecursionError"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
    ],
)  # fmt: skip
def test_others_are_contained_and_fail(program, reason, spaces):
    start, limits = time.monotonic(), FAST if "sleep" in program or "while" in program else PATIENT
    outcome = run_untrusted(program, limits)
    assert not outcome.passed and reason in outcome.reason
    assert time.monotonic() - start < limits.seconds + 15


@pytest.mark.parametrize(
    "change",
    [
        "open({path!r}, 'w').write('x')",
        "open({path!r}, 'ab')",
        "import os\nos.open({path!r}, os.O_RDWR)",
        "import os\nos.remove({path!r})",
        "import os\nopen('a', 'w').close()\nos.rename('a', {path!r})",
        "import os\nos.symlink({path!r}, 'link')\nopen('link', 'w')",
        "import pathlib\npathlib.Path({path!r}).write_text('x')",
        "import os\nos.chmod({path!r}, 0o777)",
    ],
)
def test_files_outside_stay_as_they_are(change, tmp_path, spaces):
    file = tmp_path / "file"
    file.write_text("mine")
    mode = file.stat().st_mode
    outcome = run_untrusted(change.format(path=str(file)), PATIENT)
    assert not outcome.passed and "refused: " in outcome.reason
    assert file.read_text() == "mine" and file.stat().st_mode == mode and os.listdir(tmp_path) == ["file"]


def test_the_kernel_refuses_what_the_hook_does_not_see(tmp_path, spaces):
    """The audit event of an open relative to a folder does not name the folder."""
    if "Landlock" not in enforcement()["files outside its folder"]:
        pytest.skip("this kernel has no Landlock")
    program = (
        f"import os\nhere = os.open({str(tmp_path)!r}, os.O_RDONLY)\nos.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=here)"
    )
    outcome = run_untrusted(program, PATIENT)
    assert not outcome.passed and "PermissionError" in outcome.reason
    assert not os.listdir(tmp_path)


FILES = "b, i = b'x' * (1 << 20), 0\nwhile True:\n    open(str(i), 'wb', 0).write(b)\n    i += 1"
FOLDERS = "import os\ni = 0\nwhile True:\n    os.mkdir(str(i))\n    i += 1"
DEEP = "import os\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
LINKS = "import os\nopen('a', 'w').close()\ni = 0\nwhile True:\n    os.link('a', str(i))\n    i += 1"
UNREADABLE = "import os\nos.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)\nos.chmod('.', 0)\nwhile True: pass"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (FILES, "wrote more than 67,108,864 bytes"),
        (FOLDERS, "made more than 1,000 files and folders"),
        (LINKS, "made more than 1,000 files and folders"),
        (DEEP, "made folders more than 32 deep"),
        (UNREADABLE, ""),
    ],
    ids=["files", "folders", "links", "deep", "unreadable"],
)
def test_all_files_together(program, reason, spaces, monkeypatch, tmp_path):
    """Ended within twice the limits, long before its time is up, and nothing is left, however deep or unreadable."""
    found = []

    def measured(outer, remove=sandbox._remove):
        sizes = []
        for folder, inner, files, handle in os.fwalk(outer, onerror=lambda error: None):
            sizes += [os.stat(name, dir_fd=handle, follow_symlinks=False).st_size for name in inner + files]
            if len(sizes) > 10_000 or folder.count(os.sep) > 150:
                break
        found.append((sum(sizes), len(sizes)))
        remove(outer)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "_remove", measured)
    start = time.monotonic()
    limits = Limits(seconds=1.0 if program is UNREADABLE else 20.0)
    outcome = run_untrusted(program, limits)
    assert not outcome.passed and reason in outcome.reason
    assert time.monotonic() - start < 20
    ((size, entries),) = found
    assert size < 2 * limits.disk_bytes and entries < 5 * limits.entries
    assert not os.listdir(tmp_path)


def test_what_fits_into_the_limits_passes(spaces):
    many = "import os\nfor i in range(30):\n    os.makedirs(f'{i}/a/b')\n    open(f'{i}/a/b/c', 'wb').write(b'x' * 1_000_000)"
    assert run_untrusted(many).passed
    assert run_untrusted("import os\nfor i in range(20):\n    os.mkdir('d')\n    os.chdir('d')").passed


def test_what_is_not_claimed(spaces):
    """A program that looks for the token finds it: its process is also the one that judges it."""
    assert run_untrusted(READS_THE_TOKEN).passed


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_files = len(os.listdir("/proc/self/fd"))
    run_untrusted("open('a', 'w').write('x')")
    run_untrusted("while True: pass", Limits(seconds=0.3))
    assert not os.listdir(tmp_path) and len(os.listdir("/proc/self/fd")) == open_files


def test_enforcement_says_what_holds_without_namespaces(monkeypatch):
    monkeypatch.setattr(sandbox, "_namespaces", lambda: ())
    said = enforcement()
    assert set(said) == {"network", "processes", "files outside its folder", "time, memory, file size", "all files together"}
    assert said["network"].startswith("audit hook") and said["processes"].startswith("audit hook")
    assert "namespace" not in str(said)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ValueError, match="Linux only"):
        run_untrusted("pass")
