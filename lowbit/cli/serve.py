"""`lowbit serve`: serves a model over HTTP."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.start_times import StartTimes
from lowbit.cli.stderr import exit_now
from lowbit.cli.terminal import (
    KERNELS_FILE,
    KV,
    AnyModel,
    Device,
    Draft,
    Kernels,
    Lora,
    Scheme,
    Speculate,
    TensorParallel,
    adapters_of,
    check_device,
    check_exists,
    check_kv,
    check_scheme,
    load_layers,
    local_draft,
    say,
)

if TYPE_CHECKING:
    import socket

    from lowbit.engine.warm_up import Stage
    from lowbit.progress import Progress
    from lowbit.serve.server import Server

MOST_ON_A_CPU = 8
"""Default of --max-concurrent on a CPU. A CPU computes sequences one by one, so more of them would slow down all."""

MOST_ON_A_GPU = 64


CacheGiB = Annotated[
    float | None,
    typer.Option(min=0, max=1e6, help="Memory for the KV cache in GiB. Default: most of a GPU's free memory, half of a CPU's."),
]


def bytes_of(gib: float | None) -> int | None:
    """Returns GiB as bytes; None for None."""
    return None if gib is None else int(gib * 2**30)


def extra_missing(command: str, error: ImportError) -> ValueError:
    """Returns the error for a command whose packages of the serve extra are not installed."""
    from lowbit.extras import install

    return ValueError(f"lowbit {command} needs the serve extra ({error}): {install('serve')}")


def serve(
    model: AnyModel,
    scheme: Scheme = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces, best with --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOWBIT_API_KEY", show_envvar=True, help="API key that clients must send.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name for clients. Default: the folder's name.")] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, help=f"Sequences per batch. Default: {MOST_ON_A_GPU}, on a CPU {MOST_ON_A_CPU}."),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences in the queue; further requests get status 429.")] = 256,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Tokens per prompt. Default: the context length.")] = None,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes per request body.")] = 1 << 20,
    cache_gib: CacheGiB = None,
    kv: KV = "16",
    speculate: Speculate = 0,
    draft: Draft = None,
    lora: Lora = None,
    tensor_parallel: TensorParallel = 1,
    step_ms: Annotated[
        float,
        typer.Option(
            min=0,
            max=10_000,
            help="On a GPU: milliseconds of a step that computes prompts while others generate; 0 for no limit.",
        ),
    ] = 15.0,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="On a GPU: results of a sequence do not depend on the rest of its batch."),
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds for running sequences to finish after SIGTERM.")
    ] = 30.0,
    prompt_seconds: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds that chat template and tokenizer may take per request.")
    ] = 10.0,
    kernels: Kernels = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the files with their checksums first.")] = False,
    device: Device = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API, and a chat page at /.

    Endpoints: POST /v1/chat/completions and /v1/completions, GET /v1/models, /health, /ready and /metrics (docs/serve.md).
    After SIGTERM or Ctrl-C, running sequences finish first.

    Example: lowbit serve Llama-3-8B --scheme w4a16_g128
    """
    from lowbit.sources import is_on_hub, local_model

    check_scheme(scheme)
    check_kv(kv)
    check_device(device)
    if api_key is not None and not (api_key and all("!" <= character <= "~" for character in api_key)):
        raise ValueError(
            "--api-key (or LOWBIT_API_KEY): must be one or more printable ASCII characters without spaces; "
            "for a server without a key, leave out the option and unset LOWBIT_API_KEY"
        )
    check_exists(kernels, KERNELS_FILE)
    adapters = adapters_of(lora)
    path, draft_path = local_model(model), local_draft(draft)
    times = StartTimes()
    load_layers("lowbit.pipeline")
    try:
        from lowbit.serve.limits import Limits
        from lowbit.serve.listener import raise_file_limit
        from lowbit.serve.server import Server, address_of, bound, service_of
        from lowbit.serve.service import is_local
    except ImportError as error:
        raise extra_missing("serve", error) from error
    from lowbit.hardware.machine import torch_device
    from lowbit.pipeline import pipeline

    times.end("imports")
    where_to = torch_device(device)
    concurrent = max_concurrent or (MOST_ON_A_CPU if where_to.type == "cpu" else MOST_ON_A_GPU)
    limits = Limits(concurrent, max_queue, max_prompt or 1 << 20, max_body, grace, prompt_seconds)
    local = is_local(host)
    if not local and api_key is None:
        say(f"warning: anyone who can reach {host} can use this server; set a key with --api-key or LOWBIT_API_KEY")
    _log()
    raise_file_limit()
    with bound(host, port) as sock:
        say(f"loading {model}")
        pipe = pipeline(
            str(path), scheme=scheme, device=where_to, verify=verify, progress=True, batch_invariant=batch_invariant,
            max_concurrent=concurrent, cache_bytes=bytes_of(cache_gib), kv=kv, speculate=speculate,
            draft=draft_path, lora=adapters, step_ms=step_ms or None, kernels=kernels, tensor_parallel=tensor_parallel,
        )  # fmt: skip
        times.end("load")
        called = model if is_on_hub(model) else path.resolve().stem if path.is_file() else path.resolve().name
        service = service_of(pipe, name or called, limits, key=api_key, local=local)
        report = [*pipe.engine.report(), *service.report()]
        times.end("engine")
        for line in report:
            say(line)
        where = address_of(sock)
        ready = f"serving {service.name}{f' in {scheme}' if scheme else ''} at {where}/v1, a page to try it at {where}/"
        running = Server(service, _Warming(ready, times))
        status = _run(running, sock)
    if not service.worker.dead:
        say("stopped")
    if running.forced is not None or service.worker.running:
        exit_now(status)  # a normal exit would abort (SIGABRT) while the worker thread runs code of torch
    raise typer.Exit(status)


def _run(running: Server, sock: socket.socket) -> int:
    """Serves until a signal or until the engine fails; returns the exit status."""
    try:
        running.run(sockets=[sock])
    except KeyboardInterrupt:  # raised only before and after the time in which the server handles signals itself
        return 128 + signal.SIGINT
    if running.service.worker.dead:
        return 1
    if running.forced is not None:
        return 128 + running.forced
    return 128 + signal.SIGINT if running.told == signal.SIGINT else 0


class _Warming:
    """Shows the progress of the warm-up, and at its end the times of the start and the line `ready`."""

    def __init__(self, ready: str, times: StartTimes) -> None:
        self.ready, self.times = ready, times
        self._phase = "server"
        self._progress: Progress | None = None

    def __call__(self, stage: Stage | None) -> None:
        self.times.end(self._phase)
        if stage is None:
            if self._progress is not None:
                self._progress.close()
            say(str(self.times))
            say(self.ready)
            return
        if self._progress is None:
            from lowbit.progress import Progress

            say("warming up: compiling kernels and capturing graphs, which takes minutes the first time")
            self._progress = Progress(desc="warming up", unit="done")
        self._phase = "compile" if stage.what == "kernels" else "capture"
        self._progress.at(stage.done, stage.total, f"warming up: {stage.what}")


def _log() -> None:
    """Logs the server's lines and uvicorn's errors to stderr."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("lowbit.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
