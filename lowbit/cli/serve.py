"""`lowbit serve`: texts over HTTP."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.terminal import AnyModel, err, say

if TYPE_CHECKING:
    from rich.progress import Progress

    from lowbit.engine.warm_up import Stage

MOST_ON_A_CPU = 8
"""Texts at once on a CPU unless the user says: it computes them one after the other, so that more make all of them slow."""

MOST_ON_A_GPU = 64

EXTRA = "lowbit serve needs the serve extra: pip install 'lowbit[serve]'"


def serve(
    model: AnyModel,
    scheme: Annotated[str | None, typer.Option(help="Quantize a 16-bit model to this scheme while loading it.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all, and then with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOWBIT_API_KEY", show_envvar=True, help="What clients have to send as their key.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; its folder's when absent.")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help=f"Texts at once; {MOST_ON_A_GPU}, on a CPU {MOST_ON_A_CPU}, when absent.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Texts that wait; to more the server says 429.")] = 256,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt; as many as a text may have.")] = None,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request's body.")] = 1 << 20,
    cache_gib: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Memory for keys and values; most of a GPU's free, half of a CPU's.")
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="On a GPU: a text has the same bits whoever is computed beside it.")
    ] = False,
    grace: Annotated[float, typer.Option(min=0, max=86400, help="Seconds that texts get to finish after SIGTERM.")] = 30.0,
    prompt_seconds: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds that chat template and tokenizer may take over a request.")
    ] = 10.0,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the files with their checksums first.")] = False,
) -> None:
    """Serve a model over HTTP to clients of OpenAI's API, and a page to try it at /.

    Answers POST /v1/chat/completions and /v1/completions, GET /v1/models, /health, /ready and /metrics (docs/serve.md).
    SIGTERM and Ctrl-C let texts finish.

    Example: lowbit serve Llama-3-8B --scheme w4a16_g128
    """
    try:
        from lowbit.serve.limits import Limits
        from lowbit.serve.server import Server, address_of, bound, service_of
        from lowbit.serve.service import is_local
    except ImportError as error:
        raise ValueError(f"{EXTRA} ({error})") from error
    import torch

    from lowbit.checkpoint.gguf import model_path
    from lowbit.pipeline import pipeline

    path = model_path(model)
    if api_key is not None and not (api_key and all("!" <= character <= "~" for character in api_key)):
        raise ValueError("an API key is one or more ASCII characters without spaces; for none at all, unset LOWBIT_API_KEY")
    concurrent = max_concurrent or (MOST_ON_A_GPU if torch.cuda.is_available() else MOST_ON_A_CPU)
    limits = Limits(concurrent, max_queue, max_prompt or 1 << 20, max_body, grace, prompt_seconds)
    local = is_local(host)
    if not local and api_key is None:
        say(f"warning: whoever reaches {host} can use this server; give it a key with --api-key or LOWBIT_API_KEY")
    _log()
    with bound(host, port) as sock:
        say(f"loading {path}")
        pipe = pipeline(
            str(path), quantization_mode=scheme, verify=verify, progress=err.is_terminal, batch_invariant=batch_invariant,
            max_concurrent=concurrent, cache_bytes=None if cache_gib is None else int(cache_gib * 2**30),
        )  # fmt: skip
        called = path.resolve().stem if path.is_file() else path.resolve().name
        service = service_of(pipe, name or called, limits, key=api_key, local=local)
        for line in pipe.engine.report():
            say(line)
        where = address_of(sock)
        with _progress() as progress:
            shown = _Warming(
                progress,
                f"serving {service.name}{f' in {scheme}' if scheme else ''} at {where}/v1, a page to try it at {where}/",
            )
            running = Server(service, shown)
            running.run(sockets=[sock])
    if service.worker.dead:
        raise typer.Exit(1)
    say("stopped")
    if running.told == signal.SIGINT:
        raise typer.Exit(130)


class _Warming:
    """Shows how far a warm-up is: a bar on a terminal, a line for each kind of stage elsewhere; at its end one line."""

    def __init__(self, progress: Progress, ready: str) -> None:
        self.progress, self.ready = progress, ready
        self.task = progress.add_task("warming up", total=None)
        self._said = False

    def __call__(self, stage: Stage | None) -> None:
        if stage is None:
            self.progress.stop()
            say(self.ready)
        elif err.is_terminal:
            self.progress.update(self.task, description=f"warming up: {stage.what}", completed=stage.done, total=stage.total)
        elif not self._said:
            self._said = True
            say("warming up: compiling kernels and capturing graphs, which takes minutes the first time")


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def _log() -> None:
    """The server's own lines go to stderr, as do errors of what it stands on."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("lowbit.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
