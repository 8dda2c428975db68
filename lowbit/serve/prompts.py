"""The server's side of encoding prompts. It uses two workers of the prompt process, with a thread for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lowbit.serve.chat import checked
from lowbit.serve.errors import ApiError, refused, unavailable
from lowbit.serve.limits import Limits
from lowbit.serve.prompt_process import ENDS, Job

logger = logging.getLogger("lowbit.serve")

T = TypeVar("T")

WORKERS = 2

LATE_SECONDS = 5.0
"""Seconds after its deadline at which a worker counts as ended even if its socket is still open."""

_COMMAND = (
    "import json, sys; control, path = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from lowbit.serve.prompt_process import main; main(control)"
)


class Prompts:
    """Encodes prompts of at most `most` tokens from a vocabulary of `vocab`. The process is started by `start`, or else by the
    first prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int, vocab: int, limits: Limits) -> None:
        self.tokenizer, self.most, self.vocab, self.limits = tokenizer, most, vocab, limits
        self.has_template = tokenizer.chat_template is not None
        self._workers = Workers(Job(tokenizer, most, limits.prompt_seconds, limits.prompt_bytes))
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="lowbit-beside")
        self._encoding_pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="lowbit-prompts")

    def start(self) -> None:
        """Starts the process without waiting until it has loaded the tokenizer."""
        self._workers.start()

    def check(self) -> None:
        """Waits until the process encodes prompts. Raises RuntimeError if it cannot."""
        if self._workers.ask({"texts": ["a"], "special": True}) is None:
            raise RuntimeError("the process that encodes prompts ended while it started; what it wrote on stderr says why")

    async def beside(self, function: Callable[[], T]) -> T:
        """Runs a slow function in a thread, and returns its result. The function must not encode prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def encoding(self, function: Callable[[], T]) -> T:
        """Runs a function that encodes prompts, in a thread of its own pool, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding_pool, function)

    def of_prompts(self, prompts: Sequence[str | Sequence[int]], special: bool = True) -> list[list[int]]:
        """Returns the tokens of each prompt. special: True puts the tokenizer's special tokens (BOS) in front of text prompts.
        Raises ApiError if a prompt is too long or empty.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._encoded({"texts": texts, "special": special}, "prompt", "tokenizer") if texts else [])
        return [next(encoded) if isinstance(prompt, str) else self._of_tokens(prompt) for prompt in prompts]

    def of_conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Returns the tokens of a conversation, up to the beginning of the answer. Raises ApiError if the template does not
        support it.
        """
        if not self.has_template:
            raise refused("messages", "this model has no chat template; POST /v1/completions takes a prompt as it is")
        (ids,) = self._encoded({"messages": messages, "tools": tools}, "messages", "chat template and tokenizer")
        return ids

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """Returns the text of a prompt for `echo`, which repeats it before the output."""
        if isinstance(prompt, str):
            return prompt
        text: str = self.tokenizer.decode(prompt)  # type: ignore[assignment]
        return text

    def end_processes(self) -> None:
        """Ends running encodings, and refuses prompts from now on."""
        self._workers.close()

    def close(self) -> None:
        """Ends processes and threads."""
        self.end_processes()
        for pool in (self._pool, self._encoding_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _of_tokens(self, prompt: Sequence[int]) -> list[int]:
        wrong = [token for token in prompt if not 0 <= token < self.vocab]
        if wrong:
            raise refused("prompt", f"tokens are from 0 to {self.vocab - 1:,}, got {wrong[0]:,}")
        return checked(list(prompt), self.most, "prompt")

    def _encoded(self, request: dict[str, Any], param: str, parts: str) -> list[list[int]]:
        """Returns the token lists that a worker computes for a request. Errors about time or memory name `parts`, such as the
        chat template."""
        limits, begin = self.limits, time.monotonic()
        reply = self._workers.ask(request)
        less = "send fewer or shorter ones" if param == "messages" else "send a shorter one"
        if reply is None and time.monotonic() - begin >= limits.prompt_seconds:
            why = f"the model's {parts} took more than {limits.prompt_seconds:g} s over this request"
            raise refused(param, f"{why}; {less}, or start the server with a larger --prompt-seconds", "prompt_timeout")
        if reply is None:
            logger.error("the process that ran the model's %s ended; another one takes its place", parts)
            raise ApiError(500, f"{param}: the model's {parts} failed on this request; others go on", param, "failed")
        if reply.get(ENDS):
            why = f"the model's {parts} need more than {limits.prompt_bytes / 2**30:.1f} GiB of memory for this request"
            raise refused(param, f"{why}; {less}", "prompt_memory")
        if "refusal" in reply:
            raise ApiError(*reply["refusal"])
        encoded: list[list[int]] = reply["ids"]
        return encoded


class Workers:
    """The prompt process and its workers, usable from any thread. The next request replaces a worker that has ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()  # guards the next two fields
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        for _ in range(WORKERS):
            self._idle.put(None)

    def start(self) -> None:
        """Starts the process unless it runs."""
        with self._lock:
            if not self._closed and self._process is None:
                self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Sends a request to a worker and returns its reply; None if the worker ended instead. Raises ApiError after `close`,
        and for a request that is not valid JSON.
        """
        try:
            data = json.dumps(request).encode()
        except (ValueError, RecursionError) as error:
            raise refused("messages", f"they cannot be written as JSON ({error})") from error
        connection, reply = self._idle.get(), None
        try:
            connection = self._sent(connection, data)
            if connection.poll(self._job.seconds + LATE_SECONDS):
                reply = json.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the worker has ended
            pass
        finally:
            if connection is not None and (reply is None or reply.get(ENDS)):
                connection.close()
                connection = None
            self._idle.put(connection)
        if reply is None:
            self._check_open()
        return reply

    def close(self) -> None:
        """Ends the process and its workers; running requests raise ApiError."""
        with self._lock:
            self._closed = True
            self._end()

    def _check_open(self) -> None:
        if self._closed:
            raise unavailable("the server is shutting down")

    def _sent(self, connection: Connection | None, data: bytes) -> Connection:
        """Sends `data` to the worker of `connection`, or to a new one if it has ended. Returns the connection that was used."""
        if connection is not None:
            try:
                connection.send_bytes(data)
                return connection
            except OSError:
                connection.close()
        connection = self._connect()
        connection.send_bytes(data)
        return connection

    def _connect(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        with theirs, self._lock:
            self._check_open()
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as job:
            try:
                pickle.dump(self._job, job)
            except Exception as error:  # pickling runs code of the tokenizer's classes, which may raise anything
                raise RuntimeError(f"this tokenizer cannot be copied to the process that encodes prompts: {error}") from error
            job.seek(0)
            command = [sys.executable, "-c", _COMMAND, json.dumps([theirs.fileno(), sys.path])]
            # The process gets a session of its own. So Ctrl-C on the terminal does not reach it, and one signal to its process
            # group ends it together with its workers.
            self._process = subprocess.Popen(command, stdin=job, pass_fds=[theirs.fileno()], start_new_session=True)
        self._control = ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
