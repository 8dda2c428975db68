"""Code that the commands share: two consoles that escape their output, errors as one line on stderr, results as JSON.

A command first checks its arguments with modules that need no torch, then calls `load_layers`, which takes seconds.
"""

from __future__ import annotations

import atexit
import functools
import gc
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

from lowbit.cli import restore_keyboard_interrupt
from lowbit.printable import printable


class Terminal(Console):
    """A console without markup, emoji codes and highlighting that escapes control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the escaped `text` as rich renders it; rich calls this for every string, also for table cells."""
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
        help="Folder of a model (16-bit, or quantized by lowbit or another tool), a GGUF file, or a name on the hub: org/name "
        "or org/name@revision.",
    ),
]
Scheme = Annotated[str | None, typer.Option(help="Quantize a 16-bit model to this scheme while loading.")]
KV = Annotated[
    str, typer.Option("--kv", help="Format of keys and values: 16, fp8, int8, int4, or of each, such as k8v4 (docs/kv.md).")
]
Speculate = Annotated[
    int,
    typer.Option(
        "--speculate",
        min=0,
        max=7,
        help="Tokens per step that are guessed from the text so far and verified (docs/speculate.md).",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Small model of the same tokenizer that guesses these tokens; --speculate is then 4."),
]
Lora = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="NAME=FOLDER", help="LoRA adapter in PEFT's files; repeatable (docs/lora.md)."),
]
TensorParallel = Annotated[
    int,
    typer.Option("--tensor-parallel", min=1, help="GPUs of this machine that share the model (docs/generate.md)."),
]
Device = Annotated[str | None, typer.Option(help="Device: cpu, cuda or cuda:1. Default: a GPU if there is one, else cpu.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file; - for standard output.")]

Kernels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Kernels file of lowbit compile, to compile nothing on a GPU. It contains programs: use only one that you trust.",
    ),
]
KERNELS_FILE = "--kernels takes a file that lowbit compile wrote"


def user_errors(command: Command) -> Command:
    """Wraps a command. Errors that a user can fix are printed as one line on stderr, and the process exits with 1. Other
    exceptions are bugs and propagate.

    The command's docstring becomes its help. Each paragraph is put on one line, since typer would keep the line breaks of the
    source.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        from lowbit.progress import periodic_lines

        try:
            with periodic_lines():
                return command(*args, **kwargs)
        except _user_error_types() as error:
            err.print(f"error: {_message(error)}", style="red", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            err.print("interrupted; no file was left incomplete")
            raise typer.Exit(130) from None
        finally:
            if "transformers.utils.logging" in sys.modules:
                sys.modules["transformers.utils.logging"].set_tqdm_hook(None)

    guarded.__doc__ = _paragraphs(command.__doc__ or "")
    return guarded  # type: ignore[return-value]


def _paragraphs(docstring: str) -> str:
    """Returns a docstring with each paragraph on one line; a line that begins with "Example" starts a paragraph."""
    text = re.sub(r"\n(?=Example)", "\n\n", inspect.cleandoc(docstring))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\n+", text))


def _tqdm_hook(factory: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shows the progress bars of Transformers as `Progress`."""
    from lowbit.progress import Progress

    supported = {name: options[name] for name in ("total", "unit_scale") if name in options}
    return Progress(*arguments[:1], desc=options.get("desc") or "loading", unit="tensors", **supported)


def _user_error_types() -> tuple[type[Exception], ...]:
    """Returns the exceptions that a user can fix, including those of the layers imported so far."""
    of_engine = (("lowbit.engine", "RequestFailed"), ("lowbit.engine", "RankFailed"))
    ours = (("lowbit.ops", "UnsupportedProblem"), ("lowbit.demo", "DemoError"), *of_engine)
    return (ValueError, OSError, *(getattr(sys.modules[module], name) for module, name in ours if module in sys.modules))


def load_layers(module: str = "lowbit.demo") -> None:
    """Imports torch, Transformers and `module` with all that it imports. Call it after the arguments are checked. The default
    module imports what most commands use.

    Until this function returns, Ctrl-C ends the process at once; afterwards Ctrl-C raises KeyboardInterrupt.
    """
    from transformers.utils import logging

    gc.disable()  # objects of imported modules live as long as the process; collecting takes a tenth of the time of imports
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    logging.set_tqdm_hook(_tqdm_hook)
    importlib.import_module(module)
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports frozen objects as leaked when the process ends
    gc.enable()
    restore_keyboard_interrupt()


def check_device(name: str | None) -> None:
    """Raises ValueError unless `name` has the form of a device; torch checks later that it exists."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device {name!r}: not a device; give cpu, cuda, or one GPU such as cuda:1")


def check_scheme(name: str | None) -> None:
    """Raises ValueError unless `name` is a scheme, before torch is imported."""
    from lowbit.formats import parse_scheme

    if name is not None:
        parse_scheme(name)


def check_kv(name: str) -> None:
    """Raises ValueError unless `name` is a format of keys and values, before torch is imported."""
    from lowbit.formats.kv import parse_kv

    parse_kv(name)


def local_draft(name: str | None) -> str | None:
    """Returns the folder or file of a draft model; None without one."""
    from lowbit.sources import local_model

    return None if name is None else str(local_model(name))


def adapters_of(given: list[str] | None) -> dict[str, str]:
    """Returns the folders of --lora by their names. Raises ValueError for a wrong form, a duplicate name, and a folder that
    does not exist."""
    adapters: dict[str, str] = {}
    for each in given or ():
        name, _, folder = each.partition("=")
        if not name or not folder:
            raise ValueError(f"--lora {each!r}: expected NAME=FOLDER, such as --lora style=adapters/style")
        if name in adapters:
            raise ValueError(f"--lora {each!r}: two adapters are named {name!r}")
        if not Path(folder).is_dir():
            raise ValueError(f"--lora {each!r}: {folder} is no folder")
        adapters[name] = folder
    return adapters


def check_schemes(names: str | None) -> None:
    """Raises ValueError unless every part of a comma-separated list is a scheme or "none", which means 16 bits."""
    for name in () if names is None else names.split(","):
        check_scheme(None if name.strip() in ("", "none") else name)


def check_exists(file: Path | None, expected: str) -> None:
    """Raises ValueError if the file or folder does not exist; the message includes `expected`."""
    if file is not None and not file.exists():
        raise ValueError(f"{file}: no such file; {expected}")


def _message(error: Exception) -> str:
    """Returns the error's message on one line; for an OSError "FILE: reason" without the error number."""
    named = isinstance(error, OSError) and error.filename is not None and error.strerror
    text = f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[attr-defined]
    return re.sub(r"\s*\n\s*", " ", text)


def check_json(target: Path | None, result: str, folder: Path | None = None) -> None:
    """Raises ValueError if the command may not write its result to `target`. Call it before any work.

    `target` must not be `folder`, the command's output folder, nor lie inside it.
    """
    from lowbit.checkpoint.target import check_file

    if target is None or str(target) == "-":
        return
    if folder is not None and folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(
            f"--json {target}: is or lies in the output folder {folder}, which is replaced as a whole; "
            "name a file outside the folder"
        )
    check_file(target, result)


def write_result(target: Path | None, result: str, value: dict[str, Any]) -> None:
    """Writes `{"result": result, **value}` as JSON to the file; "-" is standard output, None writes nothing."""
    from lowbit.eval.results import as_json, write_json

    if target is None:
        return
    document = {"result": result, **value}
    if str(target) == "-":
        sys.stdout.write(as_json(document))
    else:
        write_json(target, document)


def say(line: str) -> None:
    """Prints a line to stderr without wrapping it."""
    err.print(line, soft_wrap=True)
