"""Errors in OpenAI's form: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http import HTTPStatus

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Type of an error by status; others are "invalid_request_error" below 500, and "server_error" from 500 on."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error response; `param`: the field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON body."""
        kind = TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_http(error: ApiError) -> bytes:
    """Returns a whole HTTP/1.1 response with an error. The connection must be closed after it."""
    content = encoded(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join((*lines, "", "")).encode() + content


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """Returns an error 400 for the field `param`."""
    return ApiError(400, f"{param}: {message}", param, code)


def too_long(param: str, has: str, most: str) -> ApiError:
    """Returns an error 400 for a prompt, or a prompt with its limit, that exceeds the context length."""
    return refused(param, f"{has}, {most}", "context_length_exceeded")


def unavailable(why: str, seconds: int = 1) -> ApiError:
    """Returns an error 503: the server accepts no requests now."""
    return ApiError(503, why, code="unavailable", headers={"retry-after": str(seconds)})


def failed() -> ApiError:
    """Returns an error 500 for a failed sequence; the server's log has the reason."""
    return ApiError(500, "computing this text failed, others go on; the server's log says why", code="failed")


def fault() -> ApiError:
    """Returns an error 500 of the server itself; its log has the traceback."""
    return ApiError(500, "the server failed, which its log describes", code="fault", headers={"connection": "close"})


def encoded(value: object) -> bytes:
    """Returns compact JSON in ASCII, since some event-stream readers split lines at Unicode separators too."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
