"""What the commands share: two consoles, mistakes as one line on stderr, results as JSON."""

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

from lowbit.cli import begin

out = Console()
err = Console(stderr=True)

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
        from lowbit.ops import UnsupportedProblem
        from lowbit.progress import through_long_steps

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        before = logging.set_tqdm_hook(_shown)
        try:
            begin()
            with through_long_steps():
                return command(*args, **kwargs)
        except (ValueError, OSError, UnsupportedProblem, DemoError) as error:
            err.print(f"error: {_in_words(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
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
    """The message; of the system's errors "FILE: what", instead of a number."""
    named = isinstance(error, OSError) and error.filename is not None and error.strerror
    return f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[attr-defined]


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
    """Prints a line on stderr as it is, without markup and unbroken."""
    err.print(line, markup=False, highlight=False, soft_wrap=True)
