"""Requests of every kind at once; `python -m tests.serve.mixed 2000` sends 2,000 of them to its own server.

Greedy answers are those that `lowbit.pipeline` gives by Transformers' own `generate`, whatever is computed beside them. Half of
the clients stream, some disconnect.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

import openai

from lowbit.pipeline import Pipeline
from tests.serve.running import NAME, running, tiny_pipeline

LETTERS = "abcdefghijklmnop"
KINDS = 12


def kind(number):
    """Returns the prompt and the length of the requests of one kind. Some kinds have a common prefix."""
    draw = random.Random(number)
    prompt = (LETTERS * 9)[: draw.choice((1, 5, 130, 140))] + LETTERS[number]
    return prompt, draw.randint(1, 60)


def wanted_of(server):
    """The completion and the chat of each kind by `lowbit.pipeline`, without an engine."""
    alone = Pipeline(server.pipe.model, server.pipe.tokenizer, engine=False)

    def said(prompt, limit):
        (answer,) = alone(prompt, max_new_tokens=limit, do_sample=False)
        return answer.generated_text

    return [(said(p, limit), said(f"user: {p}\nassistant: ", limit)) for p, limit in map(kind, range(KINDS))]


async def ask(client, number, wanted, seen):
    """Sends one request, chosen by its number, and checks the answer."""
    draw = random.Random(number)
    prompt, limit = kind(number % KINDS)
    way = draw.choice(("completion", "stream", "chat", "chat stream", "sampled", "leave", "refused"))
    seen[way] = seen.get(way, 0) + 1
    asked = dict(model=NAME, prompt=prompt, max_tokens=limit, temperature=0)
    chat = dict(model=NAME, messages=[{"role": "user", "content": prompt}], max_tokens=limit, temperature=0)
    if way == "completion":
        said = await client.completions.create(**asked)
        assert said.choices[0].text == wanted[number % KINDS][0]
    elif way == "chat":
        said = await client.chat.completions.create(**chat)
        assert said.choices[0].message.content == wanted[number % KINDS][1]
    elif way == "stream":
        parts = [part async for part in await client.completions.create(**asked, stream=True)]
        assert "".join(part.choices[0].text for part in parts) == wanted[number % KINDS][0]
    elif way == "chat stream":
        parts = [part async for part in await client.chat.completions.create(**chat, stream=True)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted[number % KINDS][1]
    elif way == "sampled":
        said = await client.completions.create(
            **{**asked, "temperature": draw.random() + 0.1, "n": draw.randint(1, 3), "seed": number, "presence_penalty": 0.5}
        )
        assert said.usage is not None and 1 <= said.usage.completion_tokens <= limit * len(said.choices)
    elif way == "leave":
        stream = await client.completions.create(**{**asked, "max_tokens": 100}, stream=True)
        async for _ in stream:
            if draw.random() < 0.3:
                break
        await stream.close()
    else:
        try:
            await client.completions.create(**{**asked, "temperature": 3.0})
        except openai.BadRequestError as error:
            assert error.param == "temperature"
        else:
            raise AssertionError("a temperature of 3 was taken")


def mix(server, count, at_once=48):
    """Sends `count` requests, `at_once` at a time; returns how many there were of each kind."""
    wanted = wanted_of(server)
    seen: dict[str, int] = {}

    async def all_of_them():
        room = asyncio.Semaphore(at_once)

        async def one(client, number):
            async with room:
                await ask(client, number, wanted, seen)

        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
            await asyncio.gather(*(one(client, number) for number in range(count)))

    asyncio.run(all_of_them())
    server.wait_until_free()
    return seen


if __name__ == "__main__":
    begun = time.monotonic()
    with running(tiny_pipeline(max_concurrent=16, cache_bytes=24 << 16), max_concurrent=16) as server:
        found = mix(server, int(sys.argv[1]))
    print(f"{sum(found.values()):,} requests in {time.monotonic() - begun:.1f} s:", found)
