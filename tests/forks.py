"""Runs code in a separate process without slow imports: it forks a Python process that has imported the modules once."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
SECONDS = 300


def forked(code: str, *arguments: object, imported: tuple[str, ...] = (), **environment: str) -> str:
    """The output of `code`, run as by `python -c` from the repository's root, with the modules `imported` already loaded.

    Raises AssertionError with the code's stderr if it fails.
    """
    server = _server(imported, tuple(environment.items()))
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([code, [str(a) for a in arguments], folder]), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"a Python that imports {', '.join(imported)} has ended"
        status = int(answer)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert status == 0, f"status {status}: {err[-4000:]}"
    return out


@functools.cache
def _server(imported: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process that forks; it ends with the test process."""
    command = [sys.executable, "-c", "from tests.forks import serve; serve()", *imported]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **dict(environment)}, **pipes)


def serve() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    del sys.modules[__name__]  # hides this module from the code
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(code: str, arguments: list[str], folder: str) -> None:
    for stream, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), stream)
    signal.alarm(SECONDS)
    status = 1
    try:
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(code, vars(main))
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
