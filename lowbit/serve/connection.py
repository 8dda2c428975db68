"""A connection that adds to uvicorn's HTTP/1.1 limits of time and memory, and JSON errors for invalid HTTP.

uvicorn itself never closes connections whose client does not complete a request head or does not read its answer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lowbit.serve.errors import ApiError, as_http
from lowbit.serve.limits import HEAD_SECONDS, MOST_HEAD_BYTES, MOST_PIPELINED, STALL_SECONDS

if TYPE_CHECKING:
    from lowbit.serve.listener import Listener

RESET_SECONDS = 0.05
"""Time between two checks whether a half-closed connection was reset. asyncio does not report that."""


class Connection(HttpToolsProtocol):
    """A connection that limits request heads to HEAD_SECONDS and MOST_HEAD_BYTES, and unread answers to STALL_SECONDS.

    `listener` accepted the connection. It closes an idle connection if there are too many. Other arguments are uvicorn's.
    """

    def __init__(self, *args: Any, listener: Listener, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listener = listener
        self._aborted = False
        self._heading: asyncio.TimerHandle | None = None
        self._stalling: asyncio.TimerHandle | None = None
        self._resetting: asyncio.TimerHandle | None = None
        self._head_bytes: int | None = 0  # bytes of the head so far; None while a body is expected
        self._cycles: list[RequestResponseCycle] = []
        self._framing = 0  # bytes since the last body data: chunk sizes, trailers
        self._fault: str | None = None  # the error in the head, if uvicorn has no message for it

    def abort(self) -> None:
        """Closes the connection without an answer, even before it is set up."""
        self._aborted = True
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the time limit of the request head."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if self._aborted:
            self.transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Parses received bytes of a head or of a body."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        else:
            self._framing += len(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        super().data_received(data)
        if max(self._head_bytes or 0, self._framing) > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._fault = f"the head of a request has at most {MOST_HEAD_BYTES:,} bytes"
            self.send_400_response(self._fault)

    def on_message_begin(self) -> None:
        """Begins a request. Marks the connection as the most recently idle one, unless it is busy."""
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 0
        if not self._complete():
            self._listener.set_idle(self)

    def on_headers_complete(self) -> None:
        """Checks a complete head. httptools turns exceptions raised here into parser errors, which get status 400."""
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MOST_HEAD_BYTES:
            self._fault = f"the head of a request has at most {MOST_HEAD_BYTES:,} bytes"
            raise ValueError(self._fault)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):  # RFC 9112, section 3.2
            self._fault = f"host: a request of HTTP/1.1 has exactly one Host header, this one has {hosts}"
            raise ValueError(self._fault)
        self._head_bytes = None
        self._cancel_heading()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        if len(self.pipeline) > MOST_PIPELINED:
            self.transport.abort()
        elif self.pipeline:  # uvicorn stops reading here and would not notice a disconnect
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Receives a part of the body."""
        self._framing = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Marks the connection as idle if all requests are answered. If it closes after this answer, limits the time that the
        client may take to read the answer."""
        super().on_response_complete()
        if not self._complete():
            self._listener.set_idle(self)
        if self.transport.is_closing():
            self._expect_reading()

    def send_400_response(self, msg: str) -> None:
        """Sends status 400 for invalid HTTP and closes. If complete requests came before, only their answers are sent."""
        if self._answer_last():
            return
        why = self._fault or "this is no request of HTTP/1.1, or its body does not have the length that its head says"
        self.transport.write(as_http(ApiError(400, why, code="invalid_http")))
        self.transport.close()
        self._expect_reading()

    def on_message_complete(self) -> None:
        """Ends a request; the next bytes are another head."""
        super().on_message_complete()
        self._head_bytes = self._framing = 0
        if self._complete():
            self._listener.set_busy(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its side. Returns True, which keeps the connection open, if complete requests still have to be
        answered.

        A client that has disconnected looks the same until something is sent to it. So an interim response is sent, which
        HTTP/1.1 clients ignore. If the client has disconnected, its operating system then resets the connection.
        """
        if not self._answer_last():
            return False
        if self._resetting is None:
            first = self._complete()[0]
            if not first.response_started and first.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._check_reset()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends every request of the connection, including pipelined ones."""
        self._listener.remove(self)
        self._cancel_heading()
        self._cancel_stalling()
        if self._resetting is not None:
            self._resetting.cancel()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def pause_writing(self) -> None:
        """Limits the time that a client may leave its answer unread."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_stalling()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that received nothing for KEEP_ALIVE_SECONDS after the last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _complete(self) -> list[RequestResponseCycle]:
        """Returns the requests that were received completely and are not answered completely."""
        return [cycle for cycle in self._cycles if not (cycle.response_complete or cycle.more_body)]

    def _answer_last(self) -> bool:
        """Lets the connection close after the answers to all complete requests. Returns False if there are none."""
        complete = self._complete()
        if complete:
            complete[-1].keep_alive = False
        return bool(complete)

    def _check_reset(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._resetting = self.loop.call_later(RESET_SECONDS, self._check_reset)

    def _expect_head(self) -> None:
        self._heading = self._heading or self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _expect_reading(self) -> None:
        self._stalling = self._stalling or self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def _cancel_heading(self) -> None:
        if self._heading is not None:
            self._heading.cancel()
            self._heading = None

    def _cancel_stalling(self) -> None:
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None
