"""How much a server takes: of requests at once, of one request, and of a client's patience."""

from __future__ import annotations

from dataclasses import dataclass

MOST_CHOICES = 16
"""`n` of a request."""

MOST_PROMPTS = 64
"""Prompts in a request to /v1/completions."""

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
"""Of a stop string: as many characters at the end of a text may be held back."""

MOST_BIASES = 1024
"""Entries of logit_bias."""

MOST_MESSAGES = 2048
MOST_TOOLS = 128

MOST_HEAD_BYTES = 32 << 10
"""Request line and headers; of a chunked body what is no body, trailers among it."""

MOST_PIPELINED = 8
"""Requests that a connection sends behind one that is being answered; more end it."""

HEAD_SECONDS = 10.0
"""Until the head of a request is there, from the connection or the head's first byte on."""

BODY_SECONDS = 30.0
"""Until the body is there."""

STALL_SECONDS = 30.0
"""That a client may leave what is sent unread before its texts are given up."""

KEEP_ALIVE_SECONDS = 30
"""That an idle connection stays open."""

SPARE_FILES = 256
"""Open files that are left for everything but connections; a low `ulimit -n` lowers the number of connections."""

LEAST_CONNECTIONS = 16
"""Connections that are accepted however low `ulimit -n` is."""

LARGE_BODY_BYTES = 16 << 10
"""Bodies above this are parsed beside the event loop."""

PROMPT_BYTES = 512 << 20
PROMPT_BYTES_PER_BODY_BYTE = 512
"""Memory that rendering and encoding the prompts of a request may allocate: so much, and so much for each byte that a body may
have. Texts of 1 MiB took less than 512 bytes for each of theirs (measured: words, digits, CJK, emoji; byte-level BPE)."""


@dataclass(frozen=True)
class Limits:
    """Of a server: texts computed at once, texts that wait for that, tokens of a prompt, bytes of a body, the seconds that
    texts get to finish once the server is told to stop, and the seconds that template and tokenizer may take over a request.
    Raises ValueError for numbers that leave nothing to do."""

    max_concurrent: int = 64
    max_queue: int = 256
    max_prompt: int = 1 << 20
    max_body: int = 1 << 20
    grace_seconds: float = 30.0
    prompt_seconds: float = 10.0
    """Seconds of computing that the chat template and the tokenizer may take for a request."""
    max_connections: int | None = None
    """Open connections, idle ones included; twice the seats, and 64, when None."""
    max_connections_per_address: int | None = None
    """Open connections of one IPv4 address or one /64 network of IPv6; half of all when None."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {"max_concurrent": 1, "max_queue": 0, "max_prompt": 1, "max_body": 1024, "grace_seconds": 0}
        least |= {"prompt_seconds": 0.1, "max_connections": 1, "max_connections_per_address": 1}
        for name, value in least.items():
            if (found := getattr(self, name)) is not None and found < value:
                raise ValueError(f"{name} is at least {value}, got {getattr(self, name)}")

    @property
    def seats(self) -> int:
        """Texts that the server holds at once."""
        return self.max_concurrent + self.max_queue

    @property
    def prompt_bytes(self) -> int:
        """Memory that a worker may allocate to render and encode the prompts of a request."""
        return PROMPT_BYTES + PROMPT_BYTES_PER_BODY_BYTE * self.max_body

    @property
    def connections(self) -> int:
        """Connections that are open at once, idle ones included."""
        return self.max_connections or 2 * self.seats + 64

    @property
    def connections_per_address(self) -> int:
        """Connections that one address has open at once."""
        return self.max_connections_per_address or -(-self.connections // 2)
