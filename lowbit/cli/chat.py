"""`lowbit chat`: a dialogue on the terminal, with a server or with a model in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.serve import extra_missing
from lowbit.cli.terminal import out, say

if TYPE_CHECKING:
    from lowbit.serve.client import Dialogue

HELP = "/new begins again, /exit or Ctrl-D ends, Ctrl-C ends an answer"


def chat(
    where: Annotated[
        str, typer.Argument(metavar="URL-or-MODEL", help="Address of a server, or a model: a folder or a GGUF file.")
    ],
    scheme: Annotated[str | None, typer.Option(help="Quantize a 16-bit model to this scheme while loading it.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOWBIT_API_KEY", show_envvar=True, help="The server's key, if it has one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Which of the server's models; its first when absent.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the dialogue.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 takes the likeliest tokens.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1024,
) -> None:
    """Talk to a model: each answer appears as it comes, and the dialogue goes on until Ctrl-D.

    Example: lowbit chat http://127.0.0.1:8000

    Example: lowbit chat Llama-3-8B --scheme w4a16_g128
    """
    try:
        from lowbit.serve.client import Local, Remote
    except ImportError as error:
        raise extra_missing("chat", error) from error
    dialogue: Dialogue
    if where.startswith(("http://", "https://")):
        if scheme is not None:
            raise ValueError("--scheme is for a model in this process; a server has loaded its own")
        dialogue = Remote(where, api_key, name)
    else:
        from lowbit.checkpoint.gguf import model_path
        from lowbit.pipeline import pipeline

        path = model_path(Path(where))
        dialogue = Local(pipeline(str(path), quantization_mode=scheme, progress=True, max_concurrent=1), path.name)
    say(f"{dialogue.name}; {HELP}")
    _talk(dialogue, system, temperature, max_tokens)


def _talk(dialogue: Dialogue, system: str | None, temperature: float, max_tokens: int) -> None:
    """Question and answer until there are no more questions."""
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while True:
        try:
            said = out.input("> ").strip()
        except EOFError:
            out.print()
            return
        if said == "/exit":
            return
        if said == "/new":
            messages = list(first)
        elif said:
            messages.append({"role": "user", "content": said})
            answer = _show(dialogue, messages, temperature, max_tokens)
            if answer is None:
                messages.pop()  # who was refused may ask again
            else:
                messages.append({"role": "assistant", "content": answer})


def _show(dialogue: Dialogue, messages: list[dict[str, str]], temperature: float, max_tokens: int) -> str | None:
    """Prints an answer as it comes, as far as it is let come; None if there is none."""
    pieces: list[str] = []
    try:
        for piece in dialogue.answer(messages, temperature, max_tokens):
            pieces.append(piece)
            out.print(piece, end="", soft_wrap=True)
    except KeyboardInterrupt:
        say(" (ended)")
    except ValueError as error:
        say(f"error: {error}")
        return None
    out.print()
    return "".join(pieces)
