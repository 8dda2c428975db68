"""What the commands share: two consoles that escape what they print, mistakes as one line on stderr, results as JSON."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Task, TextColumn
from rich.text import Text

from lowbit.cli import begin

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, bidirectional overrides, and surrogates, which no encoding can write."""


def printable(text: str) -> str:
    """`text` with every character escaped that a terminal would obey rather than show: ESC becomes \\x1b.

    All text that commands print passes through here, since names of layers, folders and models come from files and servers.
    Tabs and newlines stay.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


class Terminal(Console):
    """A console that shows text as it is: without markup, emoji codes and highlighting, control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """`text`, escaped, as rich prints it: every string passes here, printed alone or as a cell of a table."""
        return super().render_str(printable(text), **options)


class Description(TextColumn):
    """The column of a progress bar that shows the description of its task as it is."""

    def __init__(self) -> None:
        super().__init__("{task.description}", markup=False)

    def render(self, task: Task) -> Text:
        """One line of text."""
        return Text(printable(task.description).replace("\n", " "))


out = Terminal()
err = Terminal(stderr=True)

Command = TypeVar("Command", bound=Callable[..., Any])
Model = Annotated[Path, typer.Argument(help="Folder of a Transformers model, quantized or not.")]
AnyModel = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Folder of a model, quantized by lowbit, by another tool or not, or a GGUF file."),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file; - for standard output.")]


def user_errors(command: Command) -> Command:
    """Turns what a user can act on into one line on stderr and exit code 1; anything else is a bug and shows itself.

    The command's docstring is its help, with each paragraph in one line: typer would keep the line breaks of the source beside
    those of the terminal.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # These bring torch, Transformers and the layers: the seconds in which Ctrl-C ends the process at once.
        from transformers.utils import logging

        from lowbit.demo import DemoError
        from lowbit.engine import TextFailed
        from lowbit.ops import UnsupportedProblem
        from lowbit.progress import through_long_steps

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        before = logging.set_tqdm_hook(_shown)
        try:
            begin()
            with through_long_steps():
                return command(*args, **kwargs)
        except (ValueError, OSError, UnsupportedProblem, DemoError, TextFailed) as error:
            err.print(f"error: {_in_words(error)}", style="red", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            err.print("interrupted; nothing was left half-written")
            raise typer.Exit(130) from None
        finally:
            logging.set_tqdm_hook(before)

    guarded.__doc__ = _paragraphs(command.__doc__ or "")
    return guarded  # type: ignore[return-value]


def _paragraphs(docstring: str) -> str:
    """A docstring with each paragraph in one line. A line that begins with "Example" begins a paragraph."""
    text = re.sub(r"\n(?=Example)", "\n\n", inspect.cleandoc(docstring))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\n+", text))


def _shown(factory: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What Transformers counts while it loads weights, shown as commands show progress."""
    from lowbit.progress import Progress

    known = {name: options[name] for name in ("total", "unit_scale") if name in options}
    return Progress(*arguments[:1], desc=options.get("desc") or "loading", unit="tensors", **known)


def _in_words(error: Exception) -> str:
    """The message in one line; of the system's errors "FILE: what", instead of a number."""
    named = isinstance(error, OSError) and error.filename is not None and error.strerror
    text = f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[attr-defined]
    return re.sub(r"\s*\n\s*", " ", text)


def check_json(target: Path | None, result: str, folder: Path | None = None) -> None:
    """Raises ValueError, before any work, when the result of the command may not be written to the file, as where it is or lies
    in the folder that the command writes."""
    from lowbit.checkpoint.target import check_file

    if target is None or str(target) == "-":
        return
    if folder is not None and folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{target}: is or lies in {folder}, which is written as a whole; name a file beside it")
    check_file(target, result)


def write_result(target: Path | None, result: str, value: dict[str, Any]) -> None:
    """Writes `value`, named as a result of the command `result`, as JSON to the file; "-" is standard output, None nowhere."""
    from lowbit.eval.results import as_json, write_json

    if target is None:
        return
    document = {"result": result, **value}
    if str(target) == "-":
        sys.stdout.write(as_json(document))
    else:
        write_json(target, document)


def say(line: str) -> None:
    """Prints a line on stderr, unbroken."""
    err.print(line, soft_wrap=True)
