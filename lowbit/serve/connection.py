"""How long a connection may take, and how much it may hold, on top of uvicorn's HTTP/1.1.

uvicorn leaves it to a proxy to end connections that never finish a request's head, or never read their answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lowbit.serve.limits import HEAD_SECONDS, MOST_HEAD_BYTES, MOST_PIPELINED, STALL_SECONDS


class Connection(HttpToolsProtocol):
    """A connection whose heads come within HEAD_SECONDS and MOST_HEAD_BYTES, and whose client reads within STALL_SECONDS."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heading: asyncio.TimerHandle | None = None
        self._stalling: asyncio.TimerHandle | None = None
        self._head_bytes: int | None = 0  # so far; None while there is a body to come
        self._cycles: list[RequestResponseCycle] = []
        self._framing = 0  # bytes since the last ones of a body: sizes of chunks, trailers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A head is due."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """More of a head, or of a body."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        else:
            self._framing += len(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        super().data_received(data)
        if max(self._head_bytes or 0, self._framing) > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 0

    def on_headers_complete(self) -> None:
        """The head is whole; what httptools raises from here is answered with 400."""
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MOST_HEAD_BYTES:
            raise ValueError("head too large")
        self._head_bytes = None
        self._cancel_heading()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        if len(self.pipeline) > MOST_PIPELINED:
            self.transport.abort()
        elif self.pipeline:  # uvicorn stops reading here, and would not hear that the client leaves
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._framing = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """What is left of an answer after which the connection ends has to be read in time too."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reading()

    def send_400_response(self, msg: str) -> None:
        """And the end, also for a client that does not read what came before."""
        super().send_400_response(msg)
        self._expect_reading()

    def on_message_complete(self) -> None:
        """The body is whole: what follows is another head."""
        super().on_message_complete()
        self._head_bytes = self._framing = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Every request of the connection hears of it, also one that others were sent behind."""
        self._cancel_heading()
        self._cancel_stalling()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_stalling()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came since the last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

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
