"""A server on a GPU. Everything is captured before the first request. With `--batch-invariant`, sequences do not depend on each
other. Disconnects and failures affect one request only."""

from __future__ import annotations

import asyncio

import openai
import pytest
import torch

from benchmarks.serve_host import random_tokenizer
from lowbit.engine import Detokenizer, Engine, FinishReason, Request
from lowbit.nn.linear import make_batch_invariant
from lowbit.pipeline import Pipeline
from tests.engine.test_gpu import VOCAB, model_of, prompt
from tests.serve.running import NAME, running

pytestmark = pytest.mark.gpu

STREAMS = 64
PROMPTS = [prompt(7 + 9 * i, i) for i in range(STREAMS)]
TOKENS = 40


def gather(server, one, prompts):
    """The results of `one(client, i, prompt)` for several prompts at once."""

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, i, each) for i, each in enumerate(prompts)), return_exceptions=True)

    return asyncio.run(all_of_them())


def asked(ids, **more):
    return dict(model=NAME, prompt=ids, **{"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}, **more})


async def text(client, i, ids):
    """A greedy completion, streamed."""
    found = []
    async for part in await client.completions.create(**asked(ids, temperature=0), stream=True):
        found.append(part.choices[0].text)
    return "".join(found)


def logprobs(server, prompts, **more):
    """The log-probabilities of all tokens of several completions, requested at once, half of them streamed."""

    async def one(client, i, ids):
        body = asked(ids, logprobs=0, **more)
        if i % 2:
            return (await client.completions.create(**body)).choices[0].logprobs.token_logprobs
        parts = [part async for part in await client.completions.create(**body, stream=True)]
        return [each for part in parts for each in part.choices[0].logprobs.token_logprobs]

    return gather(server, one, prompts)


def alone(model, prompts):
    """The greedy texts of an engine that computes one sequence at a time."""
    engine = Engine(model, max_concurrent=1, cache_bytes=1 << 26, batch_invariant=True)
    tokenizer, found = random_tokenizer(VOCAB), []
    for ids in prompts:
        (sequence,) = engine.generate([Request(ids, TOKENS)])
        stream = Detokenizer(tokenizer, ids)
        found.append("".join(stream.push(sampled.token) for sampled in sequence.sampled) + stream.finish())
        assert sequence.finish_reason is FinishReason.LENGTH
    return found


@pytest.fixture(scope="module")
def model():
    made = model_of(dtype=torch.bfloat16)
    make_batch_invariant(made, made.dtype)
    return made


@pytest.fixture(scope="module")
def server(model):
    pipe = Pipeline(
        model, random_tokenizer(VOCAB), max_concurrent=STREAMS, cache_bytes=1 << 28, batch_invariant=True, engine=True
    )  # fmt: skip
    with running(pipe, max_concurrent=STREAMS) as made:
        yield made


def test_concurrent_streams_match_an_engine_alone(server, model):
    expected = alone(model, PROMPTS)
    assert len(set(expected)) > STREAMS // 2, "the model says different things"
    assert gather(server, text, PROMPTS) == expected
    server.wait_until_free()


def test_requests_compile_capture_and_allocate_nothing(server):
    steps, prompts, warm_up_run = server.engine.decode_runner, server.engine.prefill_runner, server.engine.runner.warm_up_run
    variants = steps.variants(grammars=not server.service.grammars.refusal)
    assert (steps.captures, prompts.captures) == (len(variants), len(prompts.graph_shapes))
    for _ in range(2):  # two runs, since PyTorch's allocator only settles after some load
        gather(server, text, PROMPTS)
    counts = steps.captures, prompts.captures, warm_up_run.count, torch.cuda.memory_stats()["num_device_alloc"]
    logprobs(server, PROMPTS[::2], temperature=0)
    gather(server, text, PROMPTS)
    assert (steps.captures, prompts.captures, warm_up_run.count, torch.cuda.memory_stats()["num_device_alloc"]) == counts


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}], ids=["greedy", "sampled"]
)
def test_a_seed_gives_the_same_text_alone_and_among_others(options, server):
    prompts = PROMPTS[:24]
    found = [logprobs(server, [ids], **options)[0] for ids in prompts]
    assert logprobs(server, prompts, **options) == found and all(len(each) == TOKENS for each in found)
    server.wait_until_free()


def test_disconnects_free_pages_and_change_no_other_text(server):
    """Every third client disconnects after some tokens of a long completion."""
    pages = server.engine.scheduler.pages
    expected = gather(server, text, PROMPTS)

    async def one(client, i, ids):
        if i % 3:
            return await text(client, i, ids)
        stream = await client.completions.create(**asked(ids, temperature=0, max_tokens=1200), stream=True)
        parts = aiter(stream)
        for _ in range(3 + i % 7):
            await anext(parts)
        await stream.close()
        return expected[i]

    assert gather(server, one, PROMPTS) == expected
    server.wait_until_free(seconds=3.0)
    assert pages.available == pages.count - 1


def test_nan_logits_fail_one_request():
    """The embedding of one token is NaN."""
    model, bad = model_of(scheme=None), 5
    prompts = [[token if token != bad else 6 for token in ids] for ids in PROMPTS[:12]]
    prompts[4] = [*prompts[4], bad]
    pipe = Pipeline(model, random_tokenizer(VOCAB), max_concurrent=16, cache_bytes=1 << 26, engine=True)
    assert not pipe.engine.program.reasons  # reads the reasons now, before the model is damaged
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    with running(pipe, max_concurrent=16) as server:
        found = gather(server, text, prompts)
        server.wait_until_free()
        assert server.service.healthy
        assert isinstance(found[4], openai.InternalServerError), found
        # sequences of other requests may also sample the token
        lost = [each for each in found if isinstance(each, openai.APIError)]
        assert len(lost) < 4 and all(isinstance(each, str) and each for each in found if each not in lost), found
