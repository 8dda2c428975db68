"""Misbehaving programs are stopped at their limits and count as failed; well-behaved programs pass."""

from __future__ import annotations

import os
import sys
import time

import pytest

from lowbit.eval.sandbox import UNSAFE, Limits, choose_isolation, run_untrusted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="generated code runs only on Linux")

FAST, PATIENT = Limits(seconds=1.0), Limits(seconds=20.0)  # for programs that never end; for all others, even on a busy machine
WRITES_TO_ALL_FILES = """
import os
for channel in range(3, 64):
    try:
        os.write(channel, {line!r})
    except OSError:
        pass
os._exit(0)
"""
FORGED = WRITES_TO_ALL_FILES.format(line=b"0\tpassed\t\n" + b"passed\n" + b'{"token": 0, "passed": true}\n')
"""Writes "passed" to the guard's parent without the secret token."""
NESTED = WRITES_TO_ALL_FILES.format(line=b"[" * 60_000 + b"\n")
"""Deeply nested JSON, which could exhaust a parser's recursion."""
READS_THE_TOKEN = r"""
import os, sys
main = sys._getframe(1).f_locals
os.write(main["request"]["channel"], (main["token"] + "\tpassed\tforged\n").encode())
os._exit(0)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import math, re, hashlib, collections\nassert math.gcd(4, 6) == 2",
        "import numpy as np\nassert (np.ones((40, 40)) @ np.ones((40, 40))).sum() == 64000",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nassert A(1).x == 1",
        "import os\nos.mkdir('d')\nopen('d/a', 'w').write('x')\nos.remove('d/a')\nopen(os.devnull, 'w').write('x')",
        "import os\nassert set(os.environ) <= {'OPENBLAS_NUM_THREADS', 'LC_CTYPE', 'PWD'} and not os.listdir('.')",
        "import sys\nassert sys.stdin.read() == '' and __name__ != '__main__'\nprint('x' * 10_000_000)",
    ],
)
def test_tame_programs_pass(program, isolation):
    outcome = run_untrusted(program, isolation=isolation)
    assert outcome.passed, outcome.reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "took longer than 1 s"),
        ("import time\ntime.sleep(100)", "took longer than 1 s"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()", "took longer than 1 s"),
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(1 << 26))", "MemoryError"),  # pages are not touched, so this is fast
        ("open('a', 'wb').write(b'x' * (5 << 20))", "OSError EFBIG"),
        ("import os\nos.ftruncate(os.memfd_create('a'), 5 << 20)", "OSError EFBIG"),
        ("import os\nf = []\nwhile True: f.append(os.memfd_create('a'))", "OSError EMFILE"),
        ("import socket\nsocket.socket()", "PermissionError EPERM"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", "OSError"),
        ("import os\nif os.fork() == 0:\n    while True: pass", "PermissionError EPERM"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])", "PermissionError EPERM"),
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "PermissionError EPERM"),
        ("import os\nassert os.system('true') == 0", "AssertionError"),
        ("raise SystemExit(0)", "left with status 0 before its end"),
        ("import os\nos._exit(0)", "left with status 0 before its end"),
        (FORGED, "left with status 0 before its end"),
        (NESTED, "left with status 0 before its end"),
        ("import os, sys\nsys.excepthook = print\nos._exit(0)", "left with status 0 before its end"),
        ("import sys\nsys.excepthook = lambda *found: None\nraise ValueError", "left with status 1 before its end"),
        ("import os\nos.write = lambda *found: 0\nassert 1 == 2", "AssertionError"),
        ("import ctypes\nctypes.string_at(0)", "ended by SIGSEGV"),
        ("def f(): f()\nf()", "RecursionError"),
        ("assert 1 == 2, 'no'", "AssertionError"),
        ("import json\njson.loads('{')", "ValueError"),
        ("def f(:", "SyntaxError"),
    ],
)  # fmt: skip
def test_others_are_contained_and_fail(program, reason, isolation):
    start, limits = time.monotonic(), FAST if "sleep" in program or "while" in program else PATIENT
    outcome = run_untrusted(program, limits, isolation=isolation)
    assert not outcome.passed and outcome.reason == reason
    assert time.monotonic() - start < limits.seconds + 15


FILES = "b, i = b'x' * (1 << 20), 0\nwhile True:\n    open(str(i), 'wb', 0).write(b)\n    i += 1"
FOLDERS = "import os\ni = 0\nwhile True:\n    os.mkdir(str(i))\n    i += 1"
DEEP = "import os\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
LINKS = "import os\nopen('a', 'w').close()\ni = 0\nwhile True:\n    os.link('a', str(i))\n    i += 1"
UNREADABLE = "import os\nos.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)\nos.chmod('.', 0)\nwhile True: pass"


@pytest.mark.parametrize("program", [FILES, FOLDERS, DEEP, LINKS], ids=["files", "folders", "deep", "links"])
def test_all_files_together(program, isolation, monkeypatch, tmp_path):
    """Together the files may not exceed the limit: the OS kernel reports ENOSPC. No file is ever on disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run_untrusted(program, PATIENT, isolation=isolation)
    assert not outcome.passed and outcome.reason == "OSError ENOSPC"
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("program", "most"), [(FILES, 64), (FOLDERS, 1000)], ids=["files", "folders"])
def test_the_limits_are_exact(program, most, isolation):
    caught = program.replace("while True:", "while i < 5000:\n  try:").replace("\n    ", "\n    ") + "\n  except OSError: break"
    outcome = run_untrusted(f"{caught}\nassert i == {most}, i", PATIENT, isolation=isolation)
    assert outcome.passed, outcome.reason


def test_what_fits_into_the_limits_passes(isolation):
    many = "import os\nfor i in range(30):\n    os.makedirs(f'{i}/a/b')\n    open(f'{i}/a/b/c', 'wb').write(b'x' * 1_000_000)"
    assert run_untrusted(many, PATIENT, isolation=isolation).passed
    assert run_untrusted(
        "import os\nfor i in range(20):\n    os.mkdir('d')\n    os.chdir('d')", PATIENT, isolation=isolation
    ).passed


def test_what_is_not_claimed(isolation):
    """Documents a known limit: a program can find the secret token, since the process that runs it also judges it."""
    assert run_untrusted(READS_THE_TOKEN, isolation=isolation).passed


@pytest.mark.parametrize("kind", ["isolated", UNSAFE])
def test_nothing_is_left_behind(kind, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    isolation = UNSAFE if kind == UNSAFE else choose_isolation()
    open_files = len(os.listdir("/proc/self/fd"))
    run_untrusted("open('a', 'w').write('x')", isolation=isolation)
    run_untrusted("while True: pass", Limits(seconds=0.3), isolation=isolation)
    run_untrusted(DEEP.replace("while True", "for i in range(1000)"), isolation=isolation)
    run_untrusted(UNREADABLE, Limits(seconds=0.5), isolation=isolation)
    assert not os.listdir(tmp_path) and len(os.listdir("/proc/self/fd")) == open_files


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ValueError, match="only on Linux on x86_64 or aarch64; this is darwin"):
        run_untrusted("pass")
