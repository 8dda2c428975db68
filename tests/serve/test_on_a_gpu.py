"""On a GPU every graph is captured before the first request, and with `--batch-invariant` a text is the same in company."""

from __future__ import annotations

import asyncio

import openai
import pytest
import torch

from lowbit.nn.linear import make_batch_invariant
from lowbit.pipeline import Pipeline
from tests.engine.test_gpu import model_of
from tests.serve.running import NAME, running
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(3 + i, 40 + 9 * i)) for i in range(24)]


def ask(server, prompts, **asked):
    """The log-probabilities of all tokens of several texts, asked at once, half of them as streams."""

    async def one(client, i, prompt):
        body = dict(model=NAME, prompt=prompt, max_tokens=40, logprobs=0, extra_body={"ignore_eos": True}, **asked)
        if i % 2:
            return (await client.completions.create(**body)).choices[0].logprobs.token_logprobs
        parts = [part async for part in await client.completions.create(**body, stream=True)]
        return [each for part in parts for each in part.choices[0].logprobs.token_logprobs]

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i, prompt) for i, prompt in enumerate(prompts)))

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def server():
    model = model_of(dtype=torch.bfloat16)
    make_batch_invariant(model, model.dtype)
    pipe = Pipeline(model, tiny_tokenizer(), max_concurrent=16, cache_bytes=1 << 28, batch_invariant=True)
    with running(pipe, max_concurrent=16) as made:
        yield made


def test_everything_is_captured_before_the_first_request(server):
    captures = server.engine.steps.captures
    assert captures > 0
    ask(server, PROMPTS, temperature=0)
    assert server.engine.steps.captures == captures


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}], ids=["greedy", "drawn"])
def test_a_seed_gives_the_same_text_alone_and_in_company(drawn, server):
    alone = [ask(server, [prompt], **drawn)[0] for prompt in PROMPTS]
    assert ask(server, PROMPTS, **drawn) == alone and all(len(each) == 40 for each in alone)
    server.wait_until_free()
