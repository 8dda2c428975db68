"""Refusals as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http import HTTPStatus

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Of an error, by status; of others "invalid_request_error" below 500 and "server_error" from there on."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is no text; `param` names the field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON that a client gets."""
        kind = TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_http(error: ApiError) -> bytes:
    """The bytes of a whole HTTP/1.1 response with an error, for a connection that is closed after it."""
    content = encoded(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join((*lines, "", "")).encode() + content


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A request that asks for what cannot be had, in the field `param`."""
    return ApiError(400, f"{param}: {message}", param, code)


def too_long(param: str, has: str, most: str) -> ApiError:
    """A prompt, or a prompt and what is asked after it, that a text here cannot hold."""
    return refused(param, f"{has}, {most}", "context_length_exceeded")


def unavailable(why: str, seconds: int = 1) -> ApiError:
    """A server that takes no requests now."""
    return ApiError(503, why, code="unavailable", headers={"retry-after": str(seconds)})


def failed() -> ApiError:
    """A text that could not be computed; what went wrong is in the server's log."""
    return ApiError(500, "computing this text failed, others go on; the server's log says why", code="failed")


def fault() -> ApiError:
    """A fault of this server; its log has the traceback."""
    return ApiError(500, "the server failed, which its log describes", code="fault", headers={"connection": "close"})


def encoded(value: object) -> bytes:
    """JSON without spaces, in ASCII: some readers of events end lines at more characters than the standard's."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
