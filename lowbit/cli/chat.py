"""`lowbit run` and `lowbit chat`: a conversation on the terminal, with a model in this process or with a server."""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.serve import extra_missing
from lowbit.cli.terminal import Device, Scheme, check_device, check_scheme, load_layers, out, say

if TYPE_CHECKING:
    from lowbit.serve.client import ChatBackend

COMMANDS = {
    "/help": "show this list",
    "/clear": "begin a new conversation (also /new)",
    "/quit": "leave (also /exit, /bye, Ctrl-D)",
}
_ALSO = {"/?": "/help", "/new": "/clear", "/exit": "/quit", "/bye": "/quit"}
HELP = "/help lists the commands, /clear begins again, /quit leaves, Ctrl-C ends an answer"
HISTORY_LINES = 1000


def chat(
    where: Annotated[
        str,
        typer.Argument(
            metavar="MODEL-or-URL",
            help="A model: a folder, a GGUF file, or a name on the hub (org/name, org/name@revision); or a server's address.",
        ),
    ],
    scheme: Scheme = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOWBIT_API_KEY", show_envvar=True, help="The server's key, if it has one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Which of the server's models; its first when absent.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 takes the likeliest tokens.")] = 0.7,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Tokens of an answer at most, its prompt not counted."),
    ] = 1024,
    device: Device = None,
) -> None:
    """Talk to a model on the terminal: it is loaded in this process, or runs behind a server's address.

    Each answer appears as it comes. Arrow keys edit the line and bring back earlier ones; /help lists the commands. Ctrl-C ends
    an answer, and on an empty line, or twice, leaves. Where input is no terminal, each line is answered.

    Example: lowbit run HuggingFaceTB/SmolLM2-135M-Instruct

    Example: lowbit run Llama-3-8B --scheme w4a16_g128

    Example: lowbit run http://127.0.0.1:8000
    """
    remote = where.startswith(("http://", "https://"))
    if remote and (scheme is not None or device is not None):
        option = "--scheme" if scheme is not None else "--device"
        raise ValueError(f"{option} is for a model in this process; a server has loaded its own")
    check_scheme(scheme)
    check_device(device)
    path = None if remote else _local_model(where)
    load_layers()
    try:
        from lowbit.serve.client import LocalChat, RemoteChat
    except ImportError as error:
        raise extra_missing("chat", error) from error
    dialogue: ChatBackend
    if path is None:
        dialogue = RemoteChat(where, api_key, name)
    else:
        from lowbit.pipeline import pipeline

        pipe = pipeline(str(path), scheme=scheme, device=device, progress=True, max_concurrent=1)
        dialogue = LocalChat(pipe, where.rstrip("/").rpartition("/")[2])
    say(f"{dialogue.name}; {HELP}")
    _talk(dialogue, system, temperature, max_new_tokens)


def _local_model(name: str) -> Path:
    from lowbit.sources import local_model

    return local_model(name)


def _talk(dialogue: ChatBackend, system: str | None, temperature: float, max_new_tokens: int) -> None:
    """Questions and answers until the input ends or /quit."""
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    for said in _questions():
        command = said.split()[0].lower() if said.startswith("/") else ""
        command = _ALSO.get(command, command)
        if command == "/quit":
            return
        if command == "/clear":
            messages = list(first)
            say("a new conversation")
        elif command == "/help":
            for name, what in COMMANDS.items():
                say(f"{name:8}{what}")
        elif re.fullmatch(r"/[a-z]+", command):  # a path such as /etc/passwd goes to the model
            say(f"{command} is no command; they are {', '.join(COMMANDS)}")
        else:
            messages.append({"role": "user", "content": said})
            answer = _show(dialogue, messages, temperature, max_new_tokens)
            if answer is None:
                messages.pop()  # the question may be asked again
            else:
                messages.append({"role": "assistant", "content": answer})


def _questions() -> Iterator[str]:
    """The lines of the input that are not empty, without spaces around them. On a terminal they are edited, earlier ones come
    back by the arrow keys, and Ctrl-C discards a line or, where it is empty, ends the input."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin:
            if line.strip():
                yield line.strip()
        return
    with _history() as readline:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if readline is None or not readline.get_line_buffer().strip():
                    return
                continue
            if line:
                yield line


@contextlib.contextmanager
def _history() -> Iterator[Any]:
    """Python's readline with the lines of earlier conversations, which are kept in the user's cache; None where this Python has
    no readline."""
    from lowbit.folders import cache_folder

    try:
        readline = importlib.import_module("readline")
    except ImportError:
        yield None
        return
    file = cache_folder() / "chat-history"
    with contextlib.suppress(OSError):  # none yet, or one that is not readable
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield readline
    finally:
        with contextlib.suppress(OSError):  # a full or read-only disk costs the history alone
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)


class _Interrupts:
    """While an answer is computed in this process, the first Ctrl-C ends it at its next token, since a step must not be broken
    off, and the second raises KeyboardInterrupt. A server's answer is broken off at once."""

    def __init__(self, at_once: bool) -> None:
        self.at_once, self.count = at_once, 0

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._told)
        return self

    def __exit__(self, *rest: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.at_once or self.count > 1:
            raise KeyboardInterrupt


def _show(dialogue: ChatBackend, messages: list[dict[str, str]], temperature: float, max_new_tokens: int) -> str | None:
    """Prints an answer as it comes, until Ctrl-C; returns it, None if there is none. Raises KeyboardInterrupt for a second
    Ctrl-C."""
    from lowbit.serve.client import LocalChat

    pieces: list[str] = []
    with _Interrupts(at_once=not isinstance(dialogue, LocalChat)) as interrupts:
        try:
            with contextlib.closing(dialogue.answer(messages, temperature, max_new_tokens)) as answer:  # type: ignore[type-var]
                for piece in answer:
                    pieces.append(piece)
                    out.print(piece, end="", markup=False, emoji=False, highlight=False, soft_wrap=True)
                    if interrupts.count:
                        break
        except KeyboardInterrupt:
            if interrupts.count > 1:
                raise
        except ValueError as error:
            if interrupts.count > 1:  # the second Ctrl-C broke a step off
                raise KeyboardInterrupt from error
            if not interrupts.count:
                say(f"error: {error}")
                return None
    if interrupts.count:
        say(" (ended)")
    out.print()
    return "".join(pieces)
