"""How the process of `lowbit serve` ends after two signals, and that a blocked standard error does not affect it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time

import pytest

from lowbit.cli.stderr import MOST_BYTES, QueuedStream, queued_stderr
from tests.forks import forked
from tests.serve.running import TEMPLATE
from tests.tiny import eager_llama, tiny_tokenizer

IMPORTED = ("lowbit.cli.commands", "lowbit.serve.server", "lowbit.pipeline", "lowbit.demo", "openai")

SERVING = """
import ctypes, fcntl, http.client, json, os, select, signal, socket, sys, time
import torch
from lowbit.cli import main
from lowbit.engine import Engine

folder, what = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
begun, beginning = os.pipe()
unread_end, unread = os.pipe()
fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)  # full after a hundred lines of log
server = os.fork()
if not server:
    signal.alarm(120)
    if what == "unread":
        os.dup2(unread, 2)
    elif what == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
        step, matrix = Engine.step, torch.ones(1000, 1000)

        def endless(self):  # in code of torch nearly all the time, as an engine under load is
            if self.scheduler.running or self.scheduler.waiting:
                os.write(beginning, b"x")
                while True:
                    torch.mm(matrix, matrix)
            return step(self)

        from lowbit.serve.worker import Worker
        warm_up = Worker._warm_up
        def warm(self):
            warmed = warm_up(self)
            Engine.step = endless
            return warmed
        Worker._warm_up = warm
    sys.argv = ["lowbit", "serve", folder, "--port", str(port)]
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code
    if what in ("unread", "full"):
        os._exit(status)
    ctypes.pythonapi.Py_Exit(status)  # the end of an interpreter, which a fork of tests/forks.py does not have

def ask(method, path, body=None):
    asking.request(method, path, body, {"content-type": "application/json"})
    answer = asking.getresponse()
    return answer.status, answer.read()

asking = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
while True:
    try:
        if ask("GET", "/ready")[0] == 200:
            break
    except OSError:
        asking.close()
    assert os.waitpid(server, os.WNOHANG) == (0, 0), "the server has ended"
    time.sleep(0.05)
if what in ("unread", "full"):
    for _ in range(200):
        assert ask("GET", "/v1/models")[0] == 200
    os.kill(server, signal.SIGTERM)
else:
    body = json.dumps({"model": os.path.basename(folder), "prompt": "ab", "max_tokens": 200})
    asking.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    os.read(begun, 1)
    for number in json.loads(what):
        os.kill(server, number)
        time.sleep(0.1)
print(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("endings") / "tiny"
    eager_llama().save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT, signal.SIGINT)])
def test_a_second_signal_ends_the_process_without_an_abort(signals, folder):
    """The process ends with the conventional status, also while the engine's thread computes, and after a third Ctrl-C."""
    status = forked(SERVING, folder, json.dumps([int(number) for number in signals]), imported=IMPORTED)
    assert int(status) == 128 + signals[-1]


@pytest.mark.parametrize("where", ["unread", "full"])
def test_a_blocked_standard_error_does_not_block_the_server(where, folder):
    """Standard error is a pipe that nobody reads, which is full after half of the 200 lines of log, or a disk that is full from
    the start."""
    assert int(forked(SERVING, folder, where, imported=IMPORTED)) == 0


def test_a_queued_stream_drops_unread_lines():
    """Once the stream is read again, it says how many writes were dropped."""
    reading, writing = os.pipe()
    stream = QueuedStream(writing)
    begun = time.monotonic()
    for i in range(40_000):
        stream.write(f"{i:049}\n")
    assert time.monotonic() - begun < 5
    read = bytearray()
    thread = threading.Thread(target=lambda: read.extend(iter_bytes(reading)))
    thread.start()
    while stream._bytes:
        time.sleep(0.01)
    stream.write("last\n")
    stream.end()
    os.close(writing)
    thread.join()
    os.close(reading)
    *lines, last = read.decode().splitlines()
    # On a busy machine the thread may copy the first lines only after some were dropped. Then there is more than one gap.
    gaps = [re.fullmatch(r"\(([\d,]+) writes are missing here: standard error was not read\)", line) for line in lines]
    numbers = [int(line) for line, gap in zip(lines, gaps, strict=True) if gap is None]
    dropped = [int(gap[1].replace(",", "")) for gap in gaps if gap is not None]
    assert dropped and sum(dropped) == 40_000 - len(numbers) and numbers == sorted(numbers) and last == "last"
    assert MOST_BYTES - (1 << 10) <= len(numbers) * 50 < MOST_BYTES + (1 << 18)
    before = next(i for i, gap in enumerate(gaps) if gap is not None)
    assert numbers[:before] == list(range(before)) and [*numbers, 40_000][before] == before + dropped[0]


def iter_bytes(descriptor):
    while data := os.read(descriptor, 1 << 16):
        yield from data


def test_a_queued_stream_on_a_full_disk_and_a_closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor in (writing, os.open("/dev/full", os.O_WRONLY)):
        stream = QueuedStream(descriptor)
        assert stream.write("é\ud800\n") == 3 and not stream.isatty() and stream.fileno() == descriptor
        stream.end()
        assert not stream._thread.is_alive() and stream._bytes == 0
        os.close(descriptor)


def test_a_standard_error_without_a_file_is_kept(monkeypatch):
    """sys.stderr stays as it is without a file: None, if it was closed when Python started, or a stream in memory, as in
    tests."""
    import io
    import sys

    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with queued_stderr():
            assert sys.stderr is stream
