"""Reading bodies and sending responses, with detection of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lowbit.serve.errors import ApiError
from lowbit.serve.limits import BODY_SECONDS

T = TypeVar("T")
Push = Callable[[bytes], Awaitable[None]]


async def read_body(request: Request, most: int) -> bytes:
    """Reads a body of at most `most` bytes. Raises ApiError for a larger body, of which it does not read the rest, and for a
    body that does not arrive in time. Raises ClientDisconnect if the client disconnects.
    """
    larger = ApiError(413, f"a body here has at most {most:,} bytes", code="body_too_large", headers={"connection": "close"})
    stated = request.headers.get("content-length", "0")
    if len(stated) > 15 or (stated.isascii() and stated.isdigit() and int(stated) > most):
        raise larger

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise larger
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        why = f"the body did not come within {BODY_SECONDS:.0f} seconds"
        raise ApiError(408, why, code="timeout", headers={"connection": "close"}) from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events. `write` sends them; `done` is called at the end in any case."""

    media_type = "text/event-stream"

    def __init__(self, write: Callable[[Push], Coroutine[Any, Any, None]], done: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._write, self._done = write, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until `write` returns or the client disconnects."""

        async def push(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def run() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(push)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, run())
        except ClientDisconnect:
            pass
        finally:
            self._done()
