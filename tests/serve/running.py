"""A server in a thread of this process, and the resources that it must have freed when it is idle."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai

from lowbit.pipeline import Pipeline
from lowbit.serve.limits import Limits
from lowbit.serve.server import Server, address_of, bound, service_of
from lowbit.serve.service import State
from tests.tiny import eager_llama, json_tokenizer, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NAME = "tiny"
FREE = 0.05
"""Seconds between checks of a condition."""
PATIENCE = 120.0
"""Seconds until a condition counts as failed. Conditions are met at once, except on a busy machine."""


def tiny_pipeline(engine=True, **options):
    """Returns a pipeline of a tiny model, which computes by its decode program or by its own forward."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Pipeline(eager_llama(), tokenizer, engine=engine, **{"max_concurrent": 4, "cache_bytes": 1 << 22, **options})


def structured_pipeline(**options):
    """Returns a pipeline of a tiny model, with a tokenizer that grammars can read."""
    tokenizer = json_tokenizer()
    # these words make the template one of Qwen 3's formats of calls and reasoning
    tokenizer.chat_template = f"{TEMPLATE}{{# <tool_call> arguments #}}{{# <think></think> #}}"
    return Pipeline(eager_llama(), tokenizer, engine=True, **{"max_concurrent": 4, "cache_bytes": 1 << 22, **options})


class Running:
    """A started server, and how to reach it."""

    def __init__(self, pipe, limits, key=None, name=NAME, local=True):
        self.pipe, self.key = pipe, key
        self.socket = bound("127.0.0.1", 0)
        self.url = address_of(self.socket)
        self.service = service_of(pipe, name, limits, key=key, local=local)
        self.server = Server(self.service)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()

    @property
    def engine(self):
        return self.service.engine

    @property
    def address(self):
        return self.socket.getsockname()

    def wait_until(self, true, seconds=PATIENCE):
        """Waits until a condition is true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "the condition is still false"
            time.sleep(FREE)

    def client(self, **options):
        """Returns an HTTP client without certificates, since reading certificates takes longer than most answers."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, timeout=PATIENCE, headers=headers, verify=False, **options)

    def free(self):
        """True if no sequence, quota or page is held."""
        scheduler = self.engine.scheduler
        pages = scheduler.pages.count - 1 - scheduler.pages.available
        return not (scheduler.running or scheduler.waiting or pages or self.service.quota.taken or self.service.worker._live)

    def wait_until_free(self, seconds=PATIENCE):
        """Waits until nothing is held; fails with what is held if that takes too long."""
        end = time.monotonic() + seconds
        while not self.free():
            held = (self.engine.scheduler.running, self.engine.scheduler.waiting, self.service.quota, self.service.worker._live)
            assert time.monotonic() < end, held
            time.sleep(FREE)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(pipe=None, *, key=None, name=NAME, local=True, **limits):
    """Runs a ready server of a pipeline. At the end the server must hold no resources, and is ended."""
    server = Running(pipe or tiny_pipeline(), Limits(**{"max_concurrent": 4, **limits}), key, name, local)
    try:
        server.wait_until(lambda: server.service.state is State.READY)
        yield server
        server.wait_until_free()
    finally:
        server.stop()


def raw(server, data, *, seconds=10.0, end=False):
    """Sends data; returns the bytes that the server sends until it closes the connection or sends nothing for some time."""
    with socket.create_connection(server.address, timeout=seconds) as connection:
        connection.settimeout(seconds)
        found = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        return found


def greedy(server, prompt, limit, **sampling):
    """Returns the text, tokens and finish reason of a request that the engine computes alone. The server must give the same."""
    from lowbit.engine import Detokenizer, Engine, Request, Sampling

    pipe = server.pipe
    alone = Engine(
        pipe.model,
        forward=bool(server.engine.program.reasons),
        stop_token_ids=pipe.stop_token_ids,
        max_concurrent=1,
        cache_bytes=1 << 26,
    )
    ids = prompt if isinstance(prompt, list) else pipe.tokenizer(prompt).input_ids
    (sequence,) = alone.generate([Request(ids, limit, Sampling(**sampling), frozenset(pipe.stop_token_ids))])
    stream = Detokenizer(pipe.tokenizer, ids)
    text = "".join(stream.push(sampled.token) for sampled in sequence.sampled) + stream.finish()
    return text, [sampled.token for sampled in sequence.sampled], sequence.finish_reason.value


class Command:
    """A process of `lowbit serve`, whose model is called "tiny", and the lines of its standard error."""

    def __init__(self, *arguments):
        code = "from lowbit.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *map(str, arguments)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.reading = threading.Thread(target=self._read)
        self.reading.start()
        self.wait_until(lambda: self.found)
        self.url, self.port = self.found[1], int(self.found[2])

    @property
    def found(self):
        """The URL that the process prints."""
        return re.search(r"^serving tiny at (http://127.0.0.1:(\d+))/v1", "\n".join(self.lines), re.MULTILINE)

    def wait_until(self, true):
        """Waits until a condition is true while the process runs."""
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end and self.process.poll() is None, self.lines
            time.sleep(FREE)

    def _read(self):
        assert self.process.stderr is not None
        self.lines.extend(line.rstrip() for line in self.process.stderr)

    def client(self, key="any"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def ended(self, seconds=PATIENCE):
        """Waits for the process; returns its exit status."""
        status = self.process.wait(seconds)
        self.reading.join(10)
        return status


@contextlib.contextmanager
def command(*arguments):
    made = Command(*arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.ended()
        assert made.process.stdout is not None and made.process.stdout.read() == ""
        made.process.stdout.close()
        assert "Traceback" not in "".join(made.lines), made.lines
