"""The routes: OpenAI's for sequences, embeddings and models, vLLM's for tokens; /health, /ready, /metrics; the page at /."""

from __future__ import annotations

import asyncio
import logging
import time

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowbit.serve import texts
from lowbit.serve.errors import ApiError, encoded, fault, refused, unavailable
from lowbit.serve.job import GenerationJob, make_job, sequence_count
from lowbit.serve.limits import LARGE_BODY_BYTES
from lowbit.serve.page import page
from lowbit.serve.response_schema import ResponsesRequest, in_names_of_responses
from lowbit.serve.schema import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationBody,
    TokenizeRequest,
    parse,
)
from lowbit.serve.service import Service, State, is_local
from lowbit.serve.stream import EventStream, read_body, unless_gone

logger = logging.getLogger("lowbit.serve")

GONE = 499
"""Status in log and metrics of a request whose client disconnected, as in nginx."""


def make_app(service: Service) -> ASGIApp:
    """Returns the application that serves a service."""
    app = FastAPI(title="lowbit", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    async def check_key(request: Request) -> None:  # async, since FastAPI runs plain functions in threads
        service.check_key(request.headers.get("authorization"))

    keyed = [Depends(check_key)]

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatCompletionRequest)

    @app.post("/v1/completions", dependencies=keyed)
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest)

    @app.post("/v1/responses", dependencies=keyed)
    async def responses(request: Request) -> Response:
        params = await _parsed(service, request, ResponsesRequest)
        try:
            return await _respond(service, request, params.chat(), params)
        except ApiError as error:
            raise in_names_of_responses(error) from error

    @app.post("/v1/embeddings", dependencies=keyed)
    async def embeddings(request: Request) -> Response:
        params = await _parsed(service, request, EmbeddingRequest)
        return _json(await unless_gone(request.receive, texts.embeddings(service, params)))

    @app.post("/tokenize", dependencies=keyed)
    async def tokenize(request: Request) -> Response:
        return _json(await texts.tokenize(service, await _parsed(service, request, TokenizeRequest)))

    @app.post("/detokenize", dependencies=keyed)
    async def detokenize(request: Request) -> Response:
        return _json(await texts.detokenize(service, await _parsed(service, request, DetokenizeRequest)))

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in (service.name, *service.adapters)]})

    @app.get("/v1/models/{name:path}", dependencies=keyed)
    async def model(name: str) -> Response:
        service.check_model(name)
        return _json(_model(service, name))

    @app.get("/metrics", dependencies=keyed)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok" if service.healthy else "failing"}, 200 if service.healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return _json({"status": service.state.value}, 200 if service.state is State.READY and service.healthy else 503)

    @app.get("/")
    async def root() -> Response:
        content, headers = page()
        return Response(content, media_type="text/html", headers=headers)

    app.add_exception_handler(ApiError, _refusal)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _fault)
    return AccessLog(app, service)


async def _parsed(service: Service, request: Request, kind: type[Body]) -> Body:
    """Reads and parses the body of a request; raises ApiError for one that is refused."""
    service.check_ready()
    if "upgrade" in request.headers.get("connection", "").lower() and "upgrade" in request.headers:
        # The HTTP parser treats the rest of the connection as the other protocol.
        why = f"upgrade: bodies here are of HTTP/1.1, got {request.headers['upgrade'][:60]!r}; send them without this header"
        raise ApiError(400, why, code="upgrade", headers={"connection": "close"})
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json":  # other sites' pages cannot send this type without a CORS preflight
        why = f"content-type: a body here is application/json, got {content[:60]!r}"
        raise ApiError(415, why, code="unsupported_media_type", headers={"connection": "close"})
    body = await read_body(request, service.limits.max_body)
    if len(body) <= LARGE_BODY_BYTES:
        params = parse(kind, body)
    else:
        params = await service.prompts.beside(lambda: parse(kind, body))
    service.check_model(params.model)  # type: ignore[attr-defined]
    return params


async def _answer(service: Service, request: Request, kind: type[GenerationBody]) -> Response:
    """Answers a generation request, with one response or with server-sent events."""
    return await _respond(service, request, await _parsed(service, request, kind))


async def _respond(
    service: Service, request: Request, params: GenerationBody, asked: ResponsesRequest | None = None
) -> Response:
    """Answers a parsed generation request; `asked` as in `make_job`."""
    job = await _job(service, params, asked)
    kept = False
    try:
        job.start()
        if not params.stream:
            return Response(await unless_gone(request.receive, job.whole()), media_type="application/json")
        outputs = await unless_gone(request.receive, job.outputs())  # a failure before the first token becomes an HTTP status
        kept = True
        return EventStream(job.events(outputs), job.close)
    finally:
        if not kept:
            job.close()


async def _job(service: Service, params: GenerationBody, asked: ResponsesRequest | None) -> GenerationJob:
    """Makes a request's sequences. Their quota is taken until the job is closed."""
    sequences = sequence_count(params)
    if sequences > service.quota.count:
        raise refused("n", f"a request here is for at most {service.quota.count:,} sequences, this one is for {sequences:,}")
    service.quota.take(sequences)
    made = False
    try:
        job = await service.prompts.encoding(lambda: make_job(service, params, asked))
        made = True
        return job
    except ApiError:
        raise
    except Exception:  # a fault of this server: counted for /health, and answered by `_fault`
        service.worker.count_failures(sequences)
        raise
    finally:
        if not made:
            service.quota.give_back(sequences)


def _model(service: Service, name: str) -> dict[str, object]:
    """Returns the entry of the model or of an adapter, whose `parent` is the model."""
    entry = {"id": name, "object": "model", "created": service.created, "owned_by": "lowbit"}
    return entry if service.adapter_of(name) is None else {**entry, "parent": service.name}


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, media_type="application/json")


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _failure(error)


async def _http(request: Request, error: Exception) -> Response:
    """Answers errors of FastAPI itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    why = {404: f"no such path: {request.url.path[:100]!r}", 405: f"{request.method[:20]} is not for this path"}
    refusal = ApiError(error.status_code, why.get(error.status_code, str(error.detail)))
    return _json(refusal.body(), error.status_code, dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _fault(request: Request, error: Exception) -> Response:
    """Answers a fault of this server. The log has the traceback, without request bodies."""
    return _failure(fault())


def _failure(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


class AccessLog:
    """Wraps the application: counts and logs each request by path and status, and refuses requests of other sites' pages to a
    local server.
    """

    PATHS = (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/tokenize", "/detokenize",
        "/metrics", "/health", "/ready", "/",
    )  # fmt: skip
    QUIET = ("/metrics", "/health", "/ready")

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        assert scope["type"] == "http", scope["type"]
        begun, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"] if scope["path"] in self.PATHS else "other"
        try:
            if self._stranger(scope):
                why = "this server is for this machine: its Host is localhost, unless it was started with an API key"
                await _json(ApiError(403, why, code="wrong_host").body(), 403)(scope, receive, watched)
            else:
                await self.app(scope, receive, watched)
        except BaseException as error:  # also other BaseExceptions, such as a Rust panic in a tokenizer
            if not status:
                ending = isinstance(error, asyncio.CancelledError)  # cancelled by uvicorn after the grace time
                failure = unavailable("the server is shutting down") if ending else fault()
                await _failure(failure)(scope, receive, watched)
            raise  # uvicorn logs it and closes the connection
        finally:
            self.service.metrics.requests.labels(path, str(status or GONE)).inc()
            if path not in self.QUIET:
                logger.info("%s %s %d %.3f s", scope["method"], path, status or GONE, time.monotonic() - begun)

    def _stranger(self, scope: Scope) -> bool:
        """True if a page of another site may have sent the request, using a host name that resolves to this machine (DNS
        rebinding).
        """
        if not self.service.local or self.service.key is not None:
            return False
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost").decode("latin-1")
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        return name != "" and not is_local(name.lower())
