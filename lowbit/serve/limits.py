"""Upper limits of a server: concurrent requests, request sizes, connection times."""

from __future__ import annotations

from dataclasses import dataclass

MOST_CHOICES = 16
"""Upper limit of `n`."""

MOST_PROMPTS = 64
"""Maximum number of prompts in a request to /v1/completions."""

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
"""Maximum number of characters of a stop string. Up to as many characters at the end of the output may be held back."""

MOST_BIASES = 1024
"""Maximum number of entries of logit_bias."""

MOST_GRAMMAR_CHARACTERS = 1 << 16
"""Maximum size of a schema, regular expression, list of choices or grammar. Compiling a schema of this size took up to 1 s
(llguidance 1.9.1, 1,500 strings of format date-time). It runs in a thread and without Python's global lock.
"""

MOST_MESSAGES = 2048
MOST_TOOLS = 128

MOST_HEAD_BYTES = 32 << 10
"""Maximum number of bytes of request line and headers, and of chunk sizes and trailers of a chunked body."""

MOST_PIPELINED = 8
"""Maximum number of pipelined requests of a connection. A connection with more is closed."""

HEAD_SECONDS = 10.0
"""Time to receive the head of a request. It begins with the connection, or with the first byte of a later head."""

BODY_SECONDS = 30.0
"""Time to receive a body."""

STALL_SECONDS = 30.0
"""Time that a client may leave data unread before its connection is closed and its requests are cancelled."""

KEEP_ALIVE_SECONDS = 30
"""Time that an idle connection stays open."""

SPARE_FILES = 256
"""Open files reserved for everything but connections; a low `ulimit -n` lowers the number of connections."""

LEAST_CONNECTIONS = 16
"""Least number of connections, however low `ulimit -n` is."""

LARGE_BODY_BYTES = 16 << 10
"""Bodies larger than this are parsed in a thread."""

PROMPT_BYTES = 512 << 20
PROMPT_BYTES_PER_BODY_BYTE = 512
"""Memory that rendering and encoding the prompts of a request may allocate: PROMPT_BYTES, plus PROMPT_BYTES_PER_BODY_BYTE for
each byte of the largest body that is allowed. Encoding texts of 1 MiB took less than 512 bytes per byte of text (measured with
byte-level BPE: words, digits, CJK, emoji).
"""


@dataclass(frozen=True)
class Limits:
    """Limits of a server: running sequences, queued sequences, tokens of a prompt, bytes of a body, and seconds that sequences
    have to finish at shutdown. Raises ValueError for numbers that would allow no request.
    """

    max_concurrent: int = 64
    max_queue: int = 256
    max_prompt: int = 1 << 20
    max_body: int = 1 << 20
    grace_seconds: float = 30.0
    prompt_seconds: float = 10.0
    """Seconds that chat template and tokenizer may take for a request."""
    max_connections: int | None = None
    """Maximum number of open connections, idle ones included; None: 2 * `max_sequences` + 64."""
    max_connections_per_address: int | None = None
    """Maximum number of open connections of one IPv4 address or one IPv6 /64 network; None: half of `connections`."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {"max_concurrent": 1, "max_queue": 0, "max_prompt": 1, "max_body": 1024, "grace_seconds": 0}
        least |= {"prompt_seconds": 0.1, "max_connections": 1, "max_connections_per_address": 1}
        for name, value in least.items():
            if (number := getattr(self, name)) is not None and number < value:
                raise ValueError(f"{name} is at least {value}, got {number}")

    @property
    def max_sequences(self) -> int:
        """Maximum number of running and queued sequences."""
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
