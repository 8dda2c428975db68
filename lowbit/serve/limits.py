"""Upper limits of a server: requests at once, sizes of a request, times of a connection."""

from __future__ import annotations

from dataclasses import dataclass

MOST_CHOICES = 16
"""Upper limit of `n`."""

MOST_PROMPTS = 64
"""Prompts in a request to /v1/completions."""

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
"""Characters of a stop string; as many at the end of a text may be held back."""

MOST_BIASES = 1024
"""Entries of logit_bias."""

MOST_MESSAGES = 2048
MOST_TOOLS = 128

MOST_HEAD_BYTES = 32 << 10
"""Bytes of request line and headers; also of chunk sizes and trailers of a chunked body."""

MOST_PIPELINED = 8
"""Pipelined requests of a connection; more close it."""

HEAD_SECONDS = 10.0
"""Time to receive the head of a request, from the connection or its first byte on."""

BODY_SECONDS = 30.0
"""Time to receive a body."""

STALL_SECONDS = 30.0
"""Time that a client may leave data unread before its requests are cancelled."""

KEEP_ALIVE_SECONDS = 30
"""Time that an idle connection stays open."""

SPARE_FILES = 256
"""Open files reserved for everything but connections; a low `ulimit -n` lowers the number of connections."""

LEAST_CONNECTIONS = 16
"""Least number of connections, however low `ulimit -n` is."""

LARGE_BODY_BYTES = 16 << 10
"""Larger bodies are parsed in a thread."""

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
    """Open connections, idle ones included; None: twice `max_sequences`, and 64."""
    max_connections_per_address: int | None = None
    """Open connections of one IPv4 address or one /64 network of IPv6; half of all when None."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {"max_concurrent": 1, "max_queue": 0, "max_prompt": 1, "max_body": 1024, "grace_seconds": 0}
        least |= {"prompt_seconds": 0.1, "max_connections": 1, "max_connections_per_address": 1}
        for name, value in least.items():
            if (number := getattr(self, name)) is not None and number < value:
                raise ValueError(f"{name} is at least {value}, got {number}")

    @property
    def max_sequences(self) -> int:
        """Running and waiting sequences."""
        return self.max_concurrent + self.max_queue

    @property
    def prompt_bytes(self) -> int:
        """Memory that a worker may allocate to render and encode the prompts of a request."""
        return PROMPT_BYTES + PROMPT_BYTES_PER_BODY_BYTE * self.max_body

    @property
    def connections(self) -> int:
        """Upper limit of open connections, idle ones included."""
        return self.max_connections or 2 * self.max_sequences + 64

    @property
    def connections_per_address(self) -> int:
        """Upper limit of open connections of one address."""
        return self.max_connections_per_address or -(-self.connections // 2)
