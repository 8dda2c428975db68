"""Accepts a bounded number of connections, in total and per client address.

At a limit, a new connection replaces the one that has been idle for the longest. A connection is idle until it has sent a
complete request, and again after its last answer. If no connection is idle, the new one gets status 503. asyncio's own server
has no limits, and without free file descriptors it logs a traceback for each attempt to accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable

from lowbit.serve.connection import Connection
from lowbit.serve.errors import ApiError, as_http
from lowbit.serve.limits import LEAST_CONNECTIONS, SPARE_FILES, Limits

logger = logging.getLogger("lowbit.serve")

BACKLOG = 2048
"""Length of the kernel's queue of connections that are not accepted yet."""

ACCEPTS_AT_ONCE = 64
"""Maximum number of connections accepted in one iteration of the event loop, so that a flood does not delay other callbacks."""

RETRY_SECONDS = 0.1
"""Pause after a failed accept (for example without a free file descriptor) if no connection is idle."""

REFUSAL_SECONDS = 1.0
"""Time for a refused client to read its answer."""

MOST_REFUSALS = 32
"""Maximum number of open refused connections; others are closed immediately after sending the answer."""

WARNING_SECONDS = 60.0
"""Minimum time between two warnings in the log."""


def raise_file_limit() -> None:
    """Raises the soft limit on open files (`ulimit -n`) of this process to its hard limit, if the system permits that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def network_of(host: str) -> str:
    """Returns the IPv4 address, or the /64 network of an IPv6 address, since one client usually has a whole /64 network."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"


class Listener:
    """Accepts the connections of a listening socket from the construction of this object on, until `close`.

    `connect` makes the protocol object of a connection. The limits are those of `limits`, or lower if the process may open few
    files. All methods must be called on the event loop.
    """

    def __init__(self, sock: socket.socket, limits: Limits, connect: Callable[[Listener], Connection]) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = limits.connections
        if files != resource.RLIM_INFINITY and files - SPARE_FILES < self.most:
            self.most = max(LEAST_CONNECTIONS, files - SPARE_FILES)
            logger.warning("at most %d connections at once, since the limit on open files (ulimit -n) is %d", self.most, files)
        self.most_per_address = min(limits.connections_per_address, self.most)
        self._sock, self._connect = sock, connect
        self._loop = asyncio.get_running_loop()
        self._networks: dict[Connection, str] = {}
        """The network of each open connection."""
        self._open: Counter[str] = Counter()
        """Open connections of each network."""
        self._idle: dict[Connection, None] = {}
        """Idle connections; the first one has been idle for the longest."""
        self._tasks: set[asyncio.Task[object]] = set()
        self._refused = 0
        self._retry: asyncio.TimerHandle | None = None
        self._warned: float | None = None
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accepts no more connections; open ones stay open."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock)
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns at once. uvicorn calls it, as a method of asyncio's server."""

    def set_idle(self, connection: Connection) -> None:
        """Marks a connection as the most recently idle one, unless it has been closed."""
        self._idle.pop(connection, None)
        if connection in self._networks:
            self._idle[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """Marks a connection that has sent a complete request as busy; it is not closed until `set_idle`."""
        self._idle.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Stops counting a closed connection; does nothing if it was removed before."""
        self._idle.pop(connection, None)
        network = self._networks.pop(connection, None)
        if network is not None:
            self._open[network] -= 1
            if not self._open[network]:
                del self._open[network]

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._make_room(error)
                return
            sock.setblocking(False)
            self._admit(sock, network_of(address[0]))

    def _make_room(self, error: OSError) -> None:
        """Closes an idle connection if file descriptors or memory are short; if none is idle, accepts later."""
        self._warn(f"cannot accept a connection while {len(self._networks)} are open: {error.strerror}")
        if not self._close_idle(None):
            self._loop.remove_reader(self._sock)
            self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    def _admit(self, sock: socket.socket, network: str) -> None:
        room = self._open[network] < self.most_per_address or self._close_idle(network)
        room = room and (len(self._networks) < self.most or self._close_idle(None))
        if not room:
            self._refuse(sock, network)
            return
        connection = self._connect(self)
        self._networks[connection] = network
        self._open[network] += 1
        self._idle[connection] = None
        self._start(connection, sock, lambda: self.remove(connection))

    def _close_idle(self, network: str | None) -> bool:
        """Closes the connection of `network` (None: of any network) that has been idle for the longest. Returns False if none
        is idle.
        """
        for connection in self._idle:
            if network is None or self._networks[connection] == network:
                of = "" if network is None else f", {self._open[network]} of them by {network}"
                self._warn(f"closed an idle connection to accept another one: {len(self._networks)} are open{of}")
                self.remove(connection)
                connection.abort()
                return True
        return False

    def _refuse(self, sock: socket.socket, network: str) -> None:
        count, total = self._open[network], len(self._networks)
        self._warn(f"refused a connection of {network}: {count} of its connections and {total} of all are open, none is idle")
        why = f"{count} connections of your address are open and {total} of all, none of them is idle; try again"
        answer = as_http(ApiError(503, why, code="too_many_connections", headers={"retry-after": "1"}))
        if self._refused < MOST_REFUSALS:
            self._refused += 1
            self._start(_Refusal(answer, self._refusal_ended), sock, self._refusal_ended)
        else:
            with sock, contextlib.suppress(OSError):
                sock.send(answer)

    def _refusal_ended(self) -> None:
        self._refused -= 1

    def _start(self, protocol: asyncio.Protocol, sock: socket.socket, failed: Callable[[], None]) -> None:
        """Connects a protocol with a socket; calls `failed` if that fails."""

        async def start() -> None:
            try:
                await self._loop.connect_accepted_socket(lambda: protocol, sock)
            except OSError as error:
                sock.close()
                failed()
                self._warn(f"cannot use a connection: {error.strerror or error}")

        task = self._loop.create_task(start())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _warn(self, message: str) -> None:
        """Logs a warning, unless another one was logged within the last WARNING_SECONDS."""
        now = time.monotonic()
        if self._warned is None or now - self._warned >= WARNING_SECONDS:
            self._warned = now
            logger.warning("%s; more warnings about connections follow after %.0f s at the earliest", message, WARNING_SECONDS)


class _Refusal(asyncio.Protocol):
    """Sends a fixed answer without reading the request. Closes the connection when the client does, or after
    REFUSAL_SECONDS."""

    def __init__(self, answer: bytes, ended: Callable[[], None]) -> None:
        self._answer, self._ended = answer, ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the answer. The connection is closed later, since closing while the request arrives would reset the connection
        before the client reads the answer.
        """
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._answer)
        transport.write_eof()
        self._end = asyncio.get_running_loop().call_later(REFUSAL_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Allows another refused connection."""
        self._end.cancel()
        self._ended()
