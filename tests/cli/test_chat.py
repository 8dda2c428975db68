"""`lowbit run` on a terminal and without one: line editing, history, commands, Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import sys
import time

import pytest
from typer.testing import CliRunner

from lowbit.cli import chat
from lowbit.cli.commands import app
from lowbit.cli.terminal import err, out
from tests.serve.running import TEMPLATE
from tests.tiny import eager_llama, tiny_tokenizer

SECONDS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "tiny"
    eager_llama().save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


class Echo:
    """A model that repeats its prompt as the answer, with a delay per token."""

    name = "echo"

    def __init__(self, seconds=0.0):
        self.seconds, self.asked = seconds, []

    def answer(self, messages, temperature, max_tokens):
        self.asked.append([message["content"] for message in messages])
        for word in f"you said {messages[-1]['content']}".split(" "):
            time.sleep(self.seconds)
            yield f"{word} "


class Terminal:
    """A conversation in a fork of this process, on its own pseudo-terminal."""

    def __init__(self, talk):
        self.seen, self.read = "", 0
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            status = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                status = talk()
            finally:
                os._exit(status)

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def interrupt(self):
        """Sends Ctrl-C after a pause: Python's readline loses a signal that arrives between the prompt and its wait for
        keys.
        """
        time.sleep(0.3)
        self.type("\x03")

    def read_until(self, text):
        """Returns the output from the end of the previous call to the end of `text`."""
        end, begin = time.monotonic() + SECONDS, self.read
        while text not in self.seen[begin:]:
            assert time.monotonic() < end, f"{text!r} does not come: {self.seen[begin:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    break
        assert text in self.seen[begin:], f"ended before {text!r}: {self.seen[begin:]!r}"
        self.read = self.seen.index(text, begin) + len(text)
        return self.seen[begin : self.read]

    def ended(self):
        end = time.monotonic() + SECONDS
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                with contextlib.suppress(OSError):
                    while select.select([self.fd], [], [], 0.1)[0] and (more := os.read(self.fd, 4096)):
                        self.seen += more.decode(errors="replace")
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, f"does not end: {self.seen!r}"
            time.sleep(0.01)

    def close(self):
        with contextlib.suppress(OSError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    opened = []

    def open_with(dialogue):
        def talk():
            """Runs the chat in the child, after restoring the standard streams that pytest replaced."""
            for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
                stream = os.fdopen(fd, mode, buffering=1, closefd=False)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            out.file, err.file = sys.stdout, sys.stderr
            try:
                chat._talk(dialogue, None, 0.0, 10)
            except KeyboardInterrupt:
                return 130
            return 0

        opened.append(Terminal(talk))
        return opened[-1]

    yield open_with
    for each in opened:
        each.close()


def test_arrows_edit_and_bring_back_lines(terminal, tmp_path):
    shown = terminal(Echo())
    shown.read_until("> ")
    shown.type("hello\r")
    shown.read_until("you said hello \r\n> ")
    shown.type("\x1b[A, again\r")  # arrow up
    assert "^[[A" not in shown.read_until("you said hello, again \r\n> ")
    shown.type("wrld\x1b[D\x1b[D\x1b[Do\r")  # left arrow three times
    shown.read_until("you said world \r\n> ")
    shown.type("/quit\r")
    assert shown.ended() == 0
    assert (tmp_path / "lowbit" / "chat-history").stat().st_mode & 0o777 == 0o600
    again = terminal(Echo())  # history is kept for later conversations
    again.read_until("> ")
    again.type("\x1b[A\x1b[A\r")
    again.read_until("you said world \r\n> ")
    again.type("\x04")
    assert again.ended() == 0


def test_ctrl_c_on_a_line(terminal):
    """Ctrl-C discards a typed line; on an empty line it ends the program."""
    shown = terminal(Echo())
    shown.read_until("> ")
    shown.type("never sent")
    shown.read_until("never sent")
    shown.interrupt()
    shown.read_until("> ")
    shown.type("sent\r")
    assert "you said sent" in shown.read_until("you said sent")
    shown.read_until("> ")
    shown.interrupt()
    assert shown.ended() == 0 and "Traceback" not in shown.seen and "never sent " not in shown.seen


def test_ctrl_c_in_an_answer(terminal):
    shown = terminal(Echo(0.2))
    shown.read_until("> ")
    shown.type("one two three four five six seven eight nine ten\r")
    shown.read_until("you said ")
    shown.interrupt()
    assert "ten" not in shown.read_until("(stopped)").split()
    shown.read_until("> ")
    shown.type("and\r")
    shown.read_until("you said and")
    shown.read_until("> ")
    shown.interrupt()
    assert shown.ended() == 0 and "error" not in shown.seen and "Traceback" not in shown.seen


def run(*arguments, **options):
    out.width = err.width = 200
    result = CliRunner().invoke(app, [str(a) for a in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_commands_are_not_sent(monkeypatch):
    echo = Echo()
    asked = "hello\n/help\n/clear\n\n/nonsense\n/etc/passwd has what?\n/new\nbye\n/bye\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    chat._talk(echo, "be brief", 0.0, 10)
    assert echo.asked == [
        ["be brief", "hello"],
        ["be brief", "/etc/passwd has what?"],
        ["be brief", "bye"],
    ]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_without_a_terminal_each_line_is_answered(command, folder):
    result = run(command, folder, "--temperature", 0, "--max-new-tokens", 5, input="Hello\n\nAnd?\n/help\n/quit\nnever\n")
    assert result.exit_code == 0 and result.stdout.count("\n") == 2 and ">" not in result.stdout[:1]
    assert "/clear" in result.stderr and "tiny; /help" in result.stderr
    assert (
        run(command, folder, "--temperature", 0, "--max-tokens", 5, input="Hello\n").stdout
        == result.stdout.split("\n")[0] + "\n"
    )


def test_the_second_ctrl_c_leaves(folder):
    """The first Ctrl-C ends the answer at its next token, since a model step in this process is not interrupted. The second
    ends the program.
    """
    interrupts = chat._Interrupts(immediate=False)
    before = signal.getsignal(signal.SIGINT)
    with interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with chat._Interrupts(immediate=True), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_this_process_is_no_error(folder, monkeypatch):
    """Ctrl-C during a step ends the answer after that step, and the model can answer the next question."""
    from lowbit.pipeline import pipeline
    from lowbit.serve.client import LocalChat

    local = LocalChat(pipeline(str(folder), device="cpu"), "tiny")
    step, steps = local.pipe.engine.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        step()

    monkeypatch.setattr(local.pipe.engine, "step", interrupted)
    messages = [{"role": "user", "content": "Hello"}]
    first = chat._print_answer(local, messages, 0.0, 40)
    whole = chat._print_answer(local, messages, 0.0, 40)
    assert first is not None and whole is not None and whole.startswith(first) and len(first) < len(whole)


def test_help_says_both_names():
    assert re.search(r"run +Chat with a model on the terminal", run("--help").stdout)
    assert "--max-new-tokens" in run("run", "--help", env={"COLUMNS": "200"}).stdout
