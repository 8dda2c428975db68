"""What the commands share: two consoles that escape what they print, mistakes as one line on stderr, results as JSON.

A command checks its arguments first, by modules that need no torch, and then calls `load_layers`, which takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from lowbit.cli import begin
from lowbit.printable import printable


class Terminal(Console):
    """A console that shows text as it is: without markup, emoji codes and highlighting, control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """`text`, escaped, as rich prints it: every string passes here, printed alone or as a cell of a table."""
        return super().render_str(printable(text), **options)


out = Terminal()
err = Terminal(stderr=True)

Command = TypeVar("Command", bound=Callable[..., Any])
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Folder of a Transformers model, quantized or not, or its name on the hub: org/name."),
]
AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a model, quantized by lowbit, by another tool or not, a GGUF file, or a name on the hub: org/name, or "
        "org/name@revision.",
    ),
]
Scheme = Annotated[str | None, typer.Option(help="Quantize a 16-bit model to this scheme while loading it.")]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1; a GPU where there is one.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file; - for standard output.")]


def user_errors(command: Command) -> Command:
    """Turns what a user can act on into one line on stderr and exit code 1; anything else is a bug and shows itself.

    The command's docstring is its help, with each paragraph in one line: typer would keep the line breaks of the source beside
    those of the terminal.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        from lowbit.progress import through_long_steps

        try:
            with through_long_steps():
                return command(*args, **kwargs)
        except _mistakes() as error:  # the layers that the command did not import raise nothing
            err.print(f"error: {_in_words(error)}", style="red", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            err.print("interrupted; nothing was left half-written")
            raise typer.Exit(130) from None
        finally:
            if "transformers.utils.logging" in sys.modules:
                sys.modules["transformers.utils.logging"].set_tqdm_hook(None)

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


def _mistakes() -> tuple[type[Exception], ...]:
    """What a user can act on, among it the errors of the layers that are imported."""
    ours = (("lowbit.ops", "UnsupportedProblem"), ("lowbit.demo", "DemoError"), ("lowbit.engine", "RequestFailed"))
    return (ValueError, OSError, *(getattr(sys.modules[module], name) for module, name in ours if module in sys.modules))


def load_layers() -> None:
    """Imports torch, Transformers and the layers, once the arguments are checked. Meanwhile Ctrl-C ends the process at once,
    afterwards it raises KeyboardInterrupt."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # commands show progress their own way
    logging.set_verbosity_error()
    logging.set_tqdm_hook(_shown)
    importlib.import_module("lowbit.demo")  # it stands on all that commands use, but servers and measurements
    begin()


def check_device(name: str | None) -> None:
    """Raises ValueError for what names no device; whether it is here, torch says later."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device is cuda, one GPU such as cuda:1, or cpu; computing is not done on {name!r}")


def check_scheme(name: str | None) -> None:
    """Raises ValueError for what is no scheme, before torch is imported."""
    from lowbit.formats import parse_scheme

    if name is not None:
        parse_scheme(name)


def check_schemes(names: str | None) -> None:
    """`check_scheme` of a list with commas, in which "none" stands for 16 bits."""
    for name in () if names is None else names.split(","):
        check_scheme(None if name.strip() in ("", "none") else name)


def check_there(file: Path | None, expected: str) -> None:
    """Raises ValueError where no file or folder is, with what was expected."""
    if file is not None and not file.exists():
        raise ValueError(f"{file}: no such file; {expected}")


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
