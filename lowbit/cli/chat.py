"""`lowbit run` and `lowbit chat`: a conversation on the terminal with a model in this process or on a server."""

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
from lowbit.cli.terminal import (
    KV,
    Device,
    Draft,
    Scheme,
    Speculate,
    check_device,
    check_kv,
    check_scheme,
    load_layers,
    local_draft,
    out,
    say,
)

if TYPE_CHECKING:
    from lowbit.serve.client import ChatBackend

COMMANDS = {
    "/help": "show this list",
    "/clear": "start a new conversation (also /new)",
    "/quit": "exit (also /exit, /bye, Ctrl-D)",
}
_ALIASES = {"/?": "/help", "/new": "/clear", "/exit": "/quit", "/bye": "/quit"}
HELP = "/help lists the commands, /clear starts a new conversation, /quit exits, Ctrl-C stops an answer"
HISTORY_LINES = 1000


def chat(
    where: Annotated[
        str,
        typer.Argument(
            metavar="MODEL-or-URL",
            help="Folder of a model, a GGUF file, a name on the hub (org/name, org/name@revision), or the URL of a server.",
        ),
    ],
    scheme: Scheme = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOWBIT_API_KEY", show_envvar=True, help="API key of the server.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model on the server. Default: its first one.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy decoding.")] = 0.7,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Maximum number of generated tokens per answer."),
    ] = 1024,
    kv: KV = "16",
    speculate: Speculate = 0,
    draft: Draft = None,
    device: Device = None,
) -> None:
    """Chat with a model on the terminal; the model is loaded in this process or runs on a server.

    Answers are streamed. Arrow keys edit the line and recall earlier lines; /help lists the commands. Ctrl-C stops an answer;
    twice, or on an empty line, it exits. If standard input is not a terminal, each of its lines is one question.

    Example: lowbit run HuggingFaceTB/SmolLM2-135M-Instruct

    Example: lowbit run Llama-3-8B --scheme w4a16_g128

    Example: lowbit run http://127.0.0.1:8000
    """
    remote = where.startswith(("http://", "https://"))
    given = {
        "--scheme": scheme is not None,
        "--kv": kv != "16",
        "--speculate": speculate > 0,
        "--draft": draft is not None,
        "--device": device is not None,
    }
    if remote and any(given.values()):
        option = next(name for name, is_given in given.items() if is_given)
        raise ValueError(f"{option} does not apply to a server ({where}); give it to `lowbit serve`, or leave it out")
    check_scheme(scheme)
    check_kv(kv)
    check_device(device)
    path, draft_path = (None, None) if remote else (_local_model(where), local_draft(draft))
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

        pipe = pipeline(
            str(path), scheme=scheme, device=device, progress=True, max_concurrent=1, kv=kv, speculate=speculate,
            draft=draft_path,
        )  # fmt: skip
        dialogue = LocalChat(pipe, where.rstrip("/").rpartition("/")[2])
    say(f"{dialogue.name}; {HELP}")
    _talk(dialogue, system, temperature, max_new_tokens)


def _local_model(name: str) -> Path:
    from lowbit.sources import local_model

    return local_model(name)


def _talk(dialogue: ChatBackend, system: str | None, temperature: float, max_new_tokens: int) -> None:
    """Reads questions and prints answers until the input ends or /quit."""
    system_prompt = [{"role": "system", "content": system}] if system else []
    messages = list(system_prompt)
    for line in _input_lines():
        command = line.split()[0].lower() if line.startswith("/") else ""
        command = _ALIASES.get(command, command)
        if command == "/quit":
            return
        if command == "/clear":
            messages = list(system_prompt)
            say("a new conversation")
        elif command == "/help":
            for name, what in COMMANDS.items():
                say(f"{name:8}{what}")
        elif re.fullmatch(r"/[a-z]+", command):  # a path such as /etc/passwd goes to the model
            say(f"{command}: not a command; the commands are {', '.join(COMMANDS)}")
        else:
            messages.append({"role": "user", "content": line})
            answer = _print_answer(dialogue, messages, temperature, max_new_tokens)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _input_lines() -> Iterator[str]:
    """Yields the stripped, non-empty lines of standard input.

    On a terminal, lines can be edited and recalled; Ctrl-C discards a line and, on an empty line, ends the input.
    """
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
    """Yields Python's readline module with the history of earlier conversations, or None if this Python has none.

    The history is a file in the user's cache, written at the end of the block.
    """
    from lowbit.folders import cache_folder

    try:
        readline = importlib.import_module("readline")
    except ImportError:
        yield None
        return
    file = cache_folder() / "chat-history"
    with contextlib.suppress(OSError):  # no file yet, or not readable
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield readline
    finally:
        with contextlib.suppress(OSError):  # on a full or read-only disk only the history is lost
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)


class _Interrupts:
    """Counts Ctrl-C during an answer. The second one raises KeyboardInterrupt; with `immediate`, already the first one.

    For a model in this process `immediate` is False, because a decode step must not be interrupted: the caller stops after the
    current token.
    """

    def __init__(self, immediate: bool) -> None:
        self.immediate, self.count = immediate, 0

    def __enter__(self) -> _Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *rest: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.immediate or self.count > 1:
            raise KeyboardInterrupt


def _print_answer(dialogue: ChatBackend, messages: list[dict[str, str]], temperature: float, max_new_tokens: int) -> str | None:
    """Prints an answer while it is generated, until Ctrl-C, and returns it; None after an error.

    Raises KeyboardInterrupt for a second Ctrl-C.
    """
    from lowbit.serve.client import LocalChat

    deltas: list[str] = []
    with _Interrupts(immediate=not isinstance(dialogue, LocalChat)) as interrupts:
        try:
            with contextlib.closing(dialogue.answer(messages, temperature, max_new_tokens)) as answer:  # type: ignore[type-var]
                for delta in answer:
                    deltas.append(delta)
                    out.print(delta, end="", markup=False, emoji=False, highlight=False, soft_wrap=True)
                    if interrupts.count:
                        break
        except KeyboardInterrupt:
            if interrupts.count > 1:
                raise
        except ValueError as error:
            if interrupts.count > 1:  # the second Ctrl-C interrupted a decode step
                raise KeyboardInterrupt from error
            if not interrupts.count:
                say(f"error: {error}")
                return None
    if interrupts.count:
        say(" (stopped)")
    out.print()
    return "".join(deltas)
