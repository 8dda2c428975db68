"""The server process: socket, engine thread, warm-up, shutdown on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from lowbit.engine.warm_up import Stage
from lowbit.pipeline import Pipeline
from lowbit.serve.app import make_app
from lowbit.serve.connection import Connection
from lowbit.serve.errors import unavailable
from lowbit.serve.limits import KEEP_ALIVE_SECONDS, Limits
from lowbit.serve.listener import Listener
from lowbit.serve.service import Service, State, configured

logger = logging.getLogger("lowbit.serve")

AFTER_GRACE_SECONDS = 5
"""Time to send the errors of cancelled requests. The running step then has the same time to end."""


def bound(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 is any free port. Call it before the model is loaded, so that a port in use is
    reported early.

    Raises OSError, naming host and port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()  # without this, another process could bind the port too
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def service_of(pipe: Pipeline, name: str, limits: Limits, *, key: str | None, local: bool) -> Service:
    """Makes the service of a pipeline and its engine. Raises ValueError for sampling settings of the model that the engine does
    not support.
    """
    return Service(name, pipe.engine, pipe.tokenizer, limits, key, local, configured(pipe.model))


class Server(uvicorn.Server):
    """A service on a socket; `run` returns after a signal or `drain`."""

    def __init__(self, service: Service, warm: Callable[[Stage | None], None] = lambda stage: None) -> None:
        grace = int(service.limits.grace_seconds) + AFTER_GRACE_SECONDS
        config = uvicorn.Config(
            make_app(service), http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=grace,
            loop="asyncio",  # not uvloop, whose shutdown differs
        )  # fmt: skip
        super().__init__(config)
        self.service, self._warm = service, warm
        self.told: int | None = None
        """The first signal, which began the shutdown."""
        self.forced: int | None = None
        """The second signal, which ended the server at once."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, warms up and serves until a signal arrives or the engine thread ends; then shuts down."""
        with self._signals():
            try:
                await super().serve(sockets)
            finally:
                self.service.prompts.close()
                await self._end_thread()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections before the warm-up, so that /health and /ready answer during it. Overrides uvicorn's method."""
        assert sockets is not None
        await self.lifespan.startup()
        self.servers = [Listener(sock, self.service.limits, self._connect) for sock in sockets]  # type: ignore[misc]
        self.started = True
        self.service.worker.start(asyncio.get_running_loop(), self._warmed, self._ended)

    def _connect(self, listener: Listener) -> Connection:
        state, loop = self.lifespan.state, asyncio.get_running_loop()
        return Connection(self.config, self.server_state, state, loop, listener=listener)

    def drain(self) -> None:
        """Accepts no more requests, and ends when the running ones are done or the grace time is over. Call on the event
        loop.
        """
        if self.should_exit:
            return
        self.service.state, self.should_exit = State.DRAINING, True
        asyncio.get_running_loop().call_later(self.service.limits.grace_seconds, self._end_all)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing, since `_signals` handles signals. uvicorn's own method would end the process by the signal."""
        yield

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handles SIGTERM and SIGINT: the first signal drains, the second ends the server at once."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(RuntimeError, ValueError):  # raised outside the main thread, which alone handles signals
            for number in handled:
                loop.add_signal_handler(number, self._told, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _told(self, number: int) -> None:
        if self.should_exit:
            self.force_exit, self.forced = True, number
        self.told = self.told or number
        logger.info(
            "%s: %s", signal.Signals(number).name, "ending at once" if self.force_exit else "no more requests are taken"
        )
        self.drain()
        if self.force_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    async def _end_thread(self) -> None:
        """Waits for the engine thread for a limited time. It is a daemon thread, so it ends with the process."""
        worker = self.service.worker
        worker.stop()
        end = time.monotonic() + AFTER_GRACE_SECONDS
        while worker.running and not self.force_exit:
            if time.monotonic() > end:
                logger.error("the engine's step does not return; the server ends without it")
                return
            await asyncio.sleep(0.02)

    def _end_all(self) -> None:
        self.service.prompts.end_processes()
        self.service.worker.end_all(unavailable("the server is shutting down, the time that texts get to finish is over"))

    def _warmed(self, stage: Stage | None) -> None:
        if stage is None and self.service.state is State.WARMING:
            self.service.state = State.READY
        self._warm(stage)

    def _ended(self) -> None:
        if self.service.worker.dead:
            logger.error("the engine's thread has ended; so does the server")
            self.drain()
