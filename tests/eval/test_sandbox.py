"""Programs that misbehave are contained within their limits and count as failed; tame ones pass."""

from __future__ import annotations

import os
import sys
import time

import pytest

from lowbit.eval import sandbox
from lowbit.eval.sandbox import Limits, enforcement, run_untrusted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux only")

FAST = Limits(seconds=1.0)
FORGED = """
import os
for channel in range(3, 64):
    try:
        os.write(channel, b'{"token": 0, "passed": true, "reason": "", "landlock": ""}\\n')
    except OSError:
        pass
os._exit(0)
"""
"""Tells the guard's parent that it passed, without knowing the token."""


@pytest.fixture(params=["namespaces", "no namespaces"])
def spaces(request, monkeypatch):
    """Both kinds of machine: with `unshare`, and without or where it is not allowed."""
    if request.param == "no namespaces":
        monkeypatch.setattr(sandbox, "_namespaces", lambda: ())
    elif not sandbox._namespaces():
        pytest.skip("no `unshare` here, or it is not allowed")


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
        ("def f(): f()\nf()", "RecursionError"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
    ],
)  # fmt: skip
def test_others_are_contained_and_fail(program, reason, spaces):
    start = time.monotonic()
    outcome = run_untrusted(program, FAST)
    assert not outcome.passed and reason in outcome.reason
    assert time.monotonic() - start < 8


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
    outcome = run_untrusted(change.format(path=str(file)), FAST)
    assert not outcome.passed and "refused: " in outcome.reason
    assert file.read_text() == "mine" and file.stat().st_mode == mode and os.listdir(tmp_path) == ["file"]


def test_the_kernel_refuses_what_the_hook_does_not_see(tmp_path, spaces):
    """The audit event of an open relative to a folder does not name the folder."""
    if "Landlock" not in enforcement()["files outside its folder"]:
        pytest.skip("this kernel has no Landlock")
    program = (
        f"import os\nhere = os.open({str(tmp_path)!r}, os.O_RDONLY)\nos.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=here)"
    )
    outcome = run_untrusted(program, FAST)
    assert not outcome.passed and "PermissionError" in outcome.reason
    assert not os.listdir(tmp_path)


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_files = len(os.listdir("/proc/self/fd"))
    run_untrusted("open('a', 'w').write('x')")
    run_untrusted("while True: pass", Limits(seconds=0.3))
    assert not os.listdir(tmp_path) and len(os.listdir("/proc/self/fd")) == open_files


def test_enforcement_says_what_holds_without_namespaces(monkeypatch):
    monkeypatch.setattr(sandbox, "_namespaces", lambda: ())
    said = enforcement()
    assert set(said) == {"network", "processes", "files outside its folder", "time, memory, file size"}
    assert said["network"].startswith("audit hook") and said["processes"] == "audit hook"


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ValueError, match="Linux only"):
        run_untrusted("pass")
