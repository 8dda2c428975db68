"""The process: a socket, the engine's thread, warm-up, and the end on a signal."""

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
"""For the answers that say that a text was given up, and again for the round that runs."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens, though nobody is heard before a server runs, so that a taken port is known before a model is
    loaded, also one that another server has taken and is still loading for; port 0 is any free one.

    Raises OSError, naming host and port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()  # a port that is only bound can be bound again
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return made


def address_of(sock: socket.socket) -> str:
    """Where a bound socket is found."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def service_of(pipe: Pipeline, name: str, limits: Limits, *, key: str | None, local: bool) -> Service:
    """What is served of a pipeline, whose engine is made here; raises ValueError where that cannot draw as the model asks."""
    return Service(name, pipe.engine, pipe.tokenizer, limits, key, local, configured(pipe.model))


class Server(uvicorn.Server):
    """A service on a socket; `run` returns when a signal, or `drain`, has ended it."""

    def __init__(self, service: Service, warm: Callable[[Stage | None], None] = lambda stage: None) -> None:
        grace = int(service.limits.grace_seconds) + AFTER_GRACE_SECONDS
        config = uvicorn.Config(
            make_app(service), http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=grace,
            loop="asyncio",  # whether uvloop, which ends otherwise, is installed or not
        )  # fmt: skip
        super().__init__(config)
        self.service, self._warm = service, warm
        self.told: int | None = None
        """The signal that ended the server."""
        self.forced: int | None = None
        """The second signal, which ended the server before its requests and its thread were done."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens and warms up, until a signal comes or the engine's thread dies; then ends what runs, in time."""
        with self._signals():
            try:
                await super().serve(sockets)
            finally:
                self.service.prompts.close()
                await self._end_thread()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, in place of uvicorn's loop, before the warm-up begins: /health and /ready answer during it."""
        assert sockets is not None
        await self.lifespan.startup()
        self.servers = [Listener(sock, self.service.limits, self._connect) for sock in sockets]  # type: ignore[misc]
        self.started = True
        self.service.worker.start(asyncio.get_running_loop(), self._warmed, self._ended)

    def _connect(self, listener: Listener) -> Connection:
        state, loop = self.lifespan.state, asyncio.get_running_loop()
        return Connection(self.config, self.server_state, state, loop, listener=listener)

    def drain(self) -> None:
        """Takes no more requests and ends when those that run are done, at most after the grace time; on the event loop."""
        if self.should_exit:
            return
        self.service.state, self.should_exit = State.DRAINING, True
        asyncio.get_running_loop().call_later(self.service.limits.grace_seconds, self._end_all)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's way, which ends by the signal and not with 0, and hears none while the engine's thread ends."""
        yield

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain; a second one ends at once."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(RuntimeError, ValueError):  # in a thread, which no signal reaches
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
        """Waits for the engine's thread, but not for a round that does not return: the thread ends with the process then."""
        worker = self.service.worker
        worker.stop()
        end = time.monotonic() + AFTER_GRACE_SECONDS
        while worker.running and not self.force_exit:
            if time.monotonic() > end:
                logger.error("the engine's round does not return; the server ends without it")
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
