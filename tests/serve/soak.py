"""A server under mixed requests for any time, and the resources of its process meanwhile:

    python -m tests.serve.soak 3600             # a tiny model with a decode program
    python -m tests.serve.soak 3600 FOLDER      # `lowbit serve FOLDER`

Requests arrive at random, RATE a second: streams, several sequences at once, log-probabilities, long prompts, clients that
disconnect at any moment, refused requests, and connections that end within a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from tests.serve.running import NAME, command, running, tiny_pipeline

RATE = 2.5
EVERY_SECONDS = 60.0
PATIENCE_SECONDS = 300.0
"""Seconds until an answer counts as lost. They are many, since a busy machine may compute nothing for minutes."""

SECRET = "zebrafish"
"""A word of every prompt, which must not occur in a log."""

WORDS = ("sun", "moon", "tree", "river", "stone", "bird", "night", "song", "house", "salt", "wind", "gold")
PROMPT_CHARACTERS = 180


@dataclass(frozen=True)
class Held:
    """The resources of a process."""

    seconds: float
    rss_mib: float
    threads: int
    files: int
    cpu_seconds: float
    requests: int


def held(pid: int, seconds: float, requests: int) -> Held:
    """The resources of a process according to /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Held(
        seconds, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files, sum(map(int, ticks)) / 100, requests
    )


def prompt(draw: random.Random, characters: int) -> str:
    """Random words."""
    words = [SECRET]
    while sum(map(len, words)) + len(words) < characters:
        words.append(draw.choice(WORDS) + draw.choice(("", str(draw.randint(0, 10**6)))))
    return " ".join(words)[: max(characters, len(SECRET))]


def body(draw: random.Random) -> tuple[str, dict[str, object]]:
    """A valid request: path and JSON."""
    long = draw.random() < 0.1
    text = prompt(draw, PROMPT_CHARACTERS if long else draw.randint(9, 60))
    asked: dict[str, object] = {"model": NAME, "max_tokens": draw.randint(1, 24), "temperature": draw.choice((0, 0.7, 1.3))}
    chat = draw.random() < 0.5
    if chat:
        asked["messages"] = [{"role": "user", "content": text}]
    else:
        asked |= {"prompt": text, "echo": True} if draw.random() < 0.2 else {"prompt": text}
    if draw.random() < 0.2:
        asked |= {"n": draw.randint(2, 4), "seed": draw.randint(0, 1 << 40)}
    if draw.random() < 0.2 and "echo" not in asked:
        asked |= {"logprobs": True, "top_logprobs": 5} if chat else {"logprobs": 5}
    if draw.random() < 0.3:
        asked |= {"stop": [draw.choice("aeiou"), " sun"], "presence_penalty": 0.5, "logit_bias": {"5": -1}, "top_k": 40}
    if draw.random() < 0.5:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return ("/v1/chat/completions" if chat else "/v1/completions"), asked


def wrong(draw: random.Random) -> tuple[str, bytes]:
    """A request that must be refused."""
    path, asked = body(draw)
    bad: dict[str, object] = draw.choice((
        {"temperature": 3}, {"prompt": "a" * 100_000, "messages": None}, {"seed": "1"}, {"what": 1}, {"model": "other"},
        {"n": 17}, {"max_tokens": 1 << 30}, {"stop": [""] * 9}, {"response_format": {"type": "json_object"}},
    ))  # fmt: skip
    whole = json.dumps({**asked, **bad}).encode()
    return path, draw.choice((whole, whole[: len(whole) // 2], b"\xff" * 40))


class Clients:
    """Sends requests, and counts their outcomes by kind and status."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self.draw, self.seen, self.unexpected = random.Random(seed), Counter[str](), []
        self.host, _, port = url.rpartition("/")[2].partition(":")
        self.port, self.url = int(port), url

    async def send(self, client: httpx.AsyncClient) -> None:
        """Sends one request of some kind."""
        draw = random.Random(self.draw.random())
        kind = draw.choices(("whole", "leave", "refused", "half", "look"), (60, 18, 12, 5, 5))[0]
        try:
            said = await asyncio.wait_for(getattr(self, f"_{kind}")(client, draw), PATIENCE_SECONDS)
        except (httpx.HTTPError, asyncio.TimeoutError, AssertionError, OSError) as error:
            said = type(error).__name__
            self.unexpected.append(f"{kind}: {error!r}"[:300])
        self.seen[f"{kind} {said}"] += 1

    async def _whole(self, client: httpx.AsyncClient, draw: random.Random) -> str:
        path, asked = body(draw)
        answer = await client.post(path, json=asked)
        assert answer.status_code in (200, 429), (answer.status_code, answer.text)
        if answer.status_code == 200 and asked.get("stream"):
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:]
        elif answer.status_code == 200:
            assert all(choice["finish_reason"] for choice in answer.json()["choices"])
        return str(answer.status_code)

    async def _leave(self, client: httpx.AsyncClient, draw: random.Random) -> str:
        path, asked = body(draw)
        with contextlib.suppress(asyncio.TimeoutError, httpx.ReadTimeout):
            await asyncio.wait_for(client.post(path, json={**asked, "max_tokens": 60}), draw.expovariate(1 / 0.05))
        return ""

    async def _refused(self, client: httpx.AsyncClient, draw: random.Random) -> str:
        path, content = wrong(draw)
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 404), (answer.status_code, answer.text)
        return str(answer.status_code)

    async def _half(self, client: httpx.AsyncClient, draw: random.Random) -> str:
        _, writer = await asyncio.open_connection(self.host, self.port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"
        )
        writer.write(head[: draw.randint(1, len(head))].encode())
        await writer.drain()
        await asyncio.sleep(draw.random())
        writer.close()
        return ""

    async def _look(self, client: httpx.AsyncClient, draw: random.Random) -> str:
        answer = await client.get(draw.choice(("/metrics", "/health", "/ready", "/", "/v1/models", "/nothing")))
        assert answer.status_code in (200, 404), answer.status_code
        return str(answer.status_code)


async def send_requests(url: str, pid: int, seconds: float, rate: float, every: float, look) -> tuple[list[Held], Clients]:
    """Sends requests for some seconds, and samples the resources of the process at intervals; calls `look` with each sample."""
    clients = Clients(url)
    begun, samples = time.monotonic(), []
    tasks: set[asyncio.Task[None]] = set()

    def sample() -> None:
        samples.append(held(pid, time.monotonic() - begun, clients.seen.total()))
        look(samples[-1])

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client:
        sample()
        due = begun
        while time.monotonic() - begun < seconds:
            if time.monotonic() - begun > len(samples) * every:
                sample()
            due += clients.draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.add(asyncio.ensure_future(clients.send(client)))
            tasks = {task for task in tasks if not task.done()}
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
    sample()
    return samples, clients


def growth_mib(samples: list[Held]) -> float:
    """MiB by which the second half of the samples exceeds the second quarter, each by its median. Caches and buffers fill in
    the first quarter."""
    middle = lambda part: sorted(each.rss_mib for each in part)[len(part) // 2]  # noqa: E731
    count = len(samples)
    return middle(samples[count // 2 :]) - middle(samples[count // 4 : count // 2])


def tiny_host(pipe: Connection) -> None:
    """Runs a server of a tiny model with a decode program, until the process is told to end."""
    with running(tiny_pipeline()) as server:
        pipe.send(server.url)
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def served(folder: str | None):
    """URL and process of a server, and the lines of its log."""
    if folder is not None:
        with command(folder, "--port", 0, "--name", NAME, "--max-concurrent", 4) as made:
            yield made.url, made.process.pid, made.lines
        return
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=tiny_host, args=(other,))
    process.start()
    try:
        assert process.pid is not None
        yield pipe.recv(), process.pid, []
    finally:
        pipe.close()
        process.join(60)
        assert process.exitcode == 0, "the server holds something, or failed"


def soak(seconds: float, folder: str | None = None, rate: float = RATE, every: float = EVERY_SECONDS):
    """Samples, clients and log of a run; prints the samples as they arrive."""
    print("    s  requests  RSS MiB  threads  files  CPU s", flush=True)

    def look(each: Held) -> None:
        sizes = f"{each.rss_mib:8.1f} {each.threads:8} {each.files:6} {each.cpu_seconds:6.0f}"
        print(f"{each.seconds:5.0f} {each.requests:9,} {sizes}", flush=True)

    with served(folder) as (url, pid, lines):
        samples, clients = asyncio.run(send_requests(url, pid, seconds, rate, every, look))
    return samples, clients, list(lines)


if __name__ == "__main__":
    samples, clients, lines = soak(float(sys.argv[1]), *sys.argv[2:3])
    print(dict(sorted(clients.seen.items())))
    print(f"unexpected: {clients.unexpected or 'nothing'}; lines of the log: {len(lines):,}")
    print(f"the second half holds {growth_mib(samples):+.2f} MiB more than the second quarter")
    assert not any(SECRET in line for line in lines), "the log has what was asked"
