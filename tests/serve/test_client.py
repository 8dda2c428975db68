"""The official client over a real socket: whole answers, streams, choices, usage. Texts are those of the engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
import tracemalloc

import openai
import pytest

from benchmarks.serve_host import random_tokenizer
from lowbit.engine import Detokenizer, Request, SampledToken, Sequence
from lowbit.serve.chat import TokenTexts
from lowbit.serve.responses import CompletionResponses
from lowbit.serve.worker import OutputCollector, SequenceOutput, ServedSequence
from tests.serve.running import NAME, greedy

PROMPT = "abc def"
MESSAGES = [{"role": "user", "content": "Say something."}]
AS_TEXT = "user: Say something.\nassistant: "


@pytest.fixture
def client(free):
    with openai.OpenAI(base_url=f"{free.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def by_template(server):
    """Tokens of MESSAGES by the chat template."""
    return server.pipe.tokenizer(AS_TEXT, add_special_tokens=False).input_ids


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == (NAME, "model")
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is only 'tiny' here"):
        client.models.retrieve("other")


def test_completions_match_the_engine(client, free):
    text, tokens, end = greedy(free, PROMPT, 24)
    said = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0)
    (choice,) = said.choices
    assert (choice.text, choice.finish_reason, choice.index) == (text, end, 0)
    prompt = len(free.pipe.tokenizer(PROMPT).input_ids)
    assert said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (prompt, len(tokens))
    assert said.usage.total_tokens == prompt + len(tokens)
    assert said.model == NAME and said.object == "text_completion" and said.id.startswith("cmpl-")


def test_chats_match_the_engine(client, free):
    text, tokens, end = greedy(free, by_template(free), 24)
    said = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=24, temperature=0)
    (choice,) = said.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (text, "assistant", end)
    assert said.usage is not None and said.usage.completion_tokens == len(tokens)
    assert said.object == "chat.completion" and said.id.startswith("chatcmpl-")
    named = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=24, temperature=0)
    assert named.choices[0].message.content == text


def test_streams_match_whole_answers(client, free):
    text, tokens, end = greedy(free, by_template(free), 24)
    asked = dict(model=NAME, messages=MESSAGES, max_tokens=24, temperature=0)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == end
    assert all(chunk.usage is None for chunk in chunks[:-1]) and not chunks[-1].choices
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(tokens)
    assert len({chunk.id for chunk in chunks}) == 1
    text, _, end = greedy(free, PROMPT, 24)
    parts = list(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stream=True))
    assert "".join(part.choices[0].text for part in parts) == text and parts[-1].choices[0].finish_reason == end
    assert all(part.usage is None for part in parts)


def test_many_at_once_asynchronously(free):
    """Streams and whole answers, chats and completions run at once. Each is the same as alone, and a step wakes the event loop
    up once for all of them."""
    prompts = [f"{'abcdefgh'[i % 8]} {i}" for i in range(24)]
    alone = [greedy(free, prompt, 12 + i % 5)[0] for i, prompt in enumerate(prompts)]

    async def streamed(client, i):
        stream = await client.completions.create(
            model=NAME, prompt=prompts[i], max_tokens=12 + i % 5, temperature=0, stream=True
        )
        return "".join([part.choices[0].text async for part in stream])

    async def whole(client, i):
        said = await client.completions.create(model=NAME, prompt=prompts[i], max_tokens=12 + i % 5, temperature=0)
        return said.choices[0].text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{free.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*((streamed if i % 2 else whole)(client, i) for i in range(len(prompts))))

    assert asyncio.run(all_of_them()) == alone


def test_a_step_is_one_wake_up(free, monkeypatch):
    """A step wakes the event loop up once for any number of sequences, not for each token."""
    worker, calls = free.service.worker, []
    call = worker._call
    monkeypatch.setattr(worker, "_call", lambda function: (calls.append(function), call(function)))
    with openai.OpenAI(base_url=f"{free.url}/v1", api_key="any", max_retries=0) as client:
        client.completions.create(model=NAME, prompt="ab", n=4, max_tokens=50, extra_body={"ignore_eos": True})
    assert 50 <= len(calls) < 60


def test_choices_and_prompts(client, free):
    """There are n sequences for each prompt, in order. The first has the request's seed; the seeds of the others are derived
    from it."""
    one = dict(model=NAME, max_tokens=12, temperature=1.0, seed=7)
    alone = {p: greedy(free, p, 12, temperature=1.0, seed=7)[0] for p in ("ab", "cd")}
    said = client.completions.create(prompt=["ab", "cd"], n=3, **one)
    assert [choice.index for choice in said.choices] == list(range(6))
    assert said.choices[0].text == alone["ab"]
    assert len({choice.text for choice in said.choices}) == 6
    assert said.usage is not None and said.usage.prompt_tokens == 2 * 2 and said.usage.completion_tokens <= 6 * 12
    again = client.completions.create(prompt=["ab", "cd"], n=3, **one)
    assert [choice.text for choice in again.choices] == [choice.text for choice in said.choices]
    parts = client.completions.create(prompt=["ab", "cd"], n=3, stream=True, **one)
    texts = [""] * 6
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in said.choices]


def test_sampling_settings_of_each_request(client, free):
    """Each setting changes the tokens as it does in the engine. Defaults are OpenAI's."""
    settings = (
        {"temperature": 0.5}, {"temperature": 1.5, "top_p": 0.5}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5},
        {"top_k": 3}, {"min_p": 0.3}, {"repetition_penalty": 1.3},
    )  # fmt: skip
    ours = {"top_k", "min_p", "repetition_penalty"}
    found = set()
    for each in settings:
        sampling = {"temperature": 1.0, "seed": 5, **each}
        text, _, _ = greedy(free, PROMPT, 16, **sampling)
        extra = {name: value for name, value in each.items() if name in ours}
        known = {name: value for name, value in each.items() if name not in ours}
        said = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, seed=5, extra_body=extra, **known)
        assert said.choices[0].text == text, each
        found.add(text)
    assert len(found) > 4
    text, _, _ = greedy(free, PROMPT, 4, logit_bias={40: 100.0})
    biased = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={"40": 100})
    assert biased.choices[0].text == text == free.pipe.tokenizer.decode([40]) * 4


def test_stop_strings(client, free):
    text, tokens, _ = greedy(free, PROMPT, 24)
    stop = text[5:7]
    cut = text[: text.index(stop)]
    until = next(count for count in range(25) if stop in free.pipe.tokenizer.decode(tokens[:count]))
    said = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop)
    assert (said.choices[0].text, said.choices[0].finish_reason) == (cut, "stop")
    assert said.usage is not None and said.usage.completion_tokens == until < 24
    parts = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=["never", stop], stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == cut


def test_log_probabilities(client, free):
    _, tokens, _ = greedy(free, by_template(free), 6)
    asked = dict(model=NAME, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    said = client.chat.completions.create(**asked)
    assert said.choices[0].logprobs is not None and said.choices[0].logprobs.content is not None
    content = said.choices[0].logprobs.content
    assert [entry.token for entry in content] == [free.pipe.tokenizer.decode([token]) for token in tokens]
    for entry in content:
        assert entry.bytes == list(entry.token.encode()) and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4) and entry.logprob <= 0
    streamed = [
        entry for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None for entry in chunk.choices[0].logprobs.content or ()
    ]  # fmt: skip
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in content]
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    found = plain.choices[0].logprobs
    assert found is not None and "".join(found.tokens or ()) == plain.choices[0].text
    assert found.text_offset == [0, *itertools.accumulate(map(len, found.tokens[:-1]))] and all(
        0 < len(top) <= 2 for top in found.top_logprobs or ()
    )


def test_offsets_of_tokens_within_a_character():
    """A character may have several tokens. They all have its offset, since only the character has a text."""
    tokenizer = random_tokenizer(300)  # the first tokens of its vocabulary are bytes
    ids = tokenizer("a\u00e9\U0001f600b", add_special_tokens=False).input_ids
    assert len(ids) == 1 + 2 + 4 + 1
    text = ServedSequence(Request([ids[0]], 9), Detokenizer(tokenizer, [ids[0]]), OutputCollector(), 0)
    pieces = []
    for token in ids:
        text.request.on_token(SampledToken(token, -1.0))
        pieces.append(text.take())
    text.state = Sequence(text.request)
    whole = functools.reduce(SequenceOutput.followed_by, pieces)
    assert whole.text == "a\u00e9\U0001f600b" and whole.text_offsets == (0, 1, 1, 2, 2, 2, 2, 3)
    answer = CompletionResponses("m", [text], 1, TokenTexts(tokenizer), True)
    streamed = [chunk["choices"][0]["logprobs"] for piece in pieces for chunk in answer.chunks(piece, False, False)]
    assert [each for part in streamed for each in part["text_offset"]] == list(whole.text_offsets)
    assert answer.complete({0: whole})["choices"][0]["logprobs"]["text_offset"] == list(whole.text_offsets)


def test_the_cache_of_token_texts_is_bounded():
    """In time a server sees all tokens of a large vocabulary, so its cache of their texts is bounded."""
    tokenizer = random_tokenizer(20_000)
    names = TokenTexts(tokenizer)
    tracemalloc.start()
    try:
        assert [names[token] for token in range(300, 20_000)] == [f" {token - 256:x}" for token in range(300, 20_000)]
        assert tracemalloc.get_traced_memory()[0] < 2.5e6  # all texts would take 3 MB
    finally:
        tracemalloc.stop()


def test_an_answer_is_accepted_in_the_next_turn(client):
    """The answer goes back as the client's object, and as its dictionary, which has null for absent fields."""
    said = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=3, temperature=0).choices[0].message
    counts = []
    for turn in (said, said.model_dump(), {"role": "assistant", "content": said.content}):
        answer = client.chat.completions.create(model=NAME, messages=[*MESSAGES, turn, *MESSAGES], max_tokens=1)
        counts.append(answer.usage.prompt_tokens)
    assert len(set(counts)) == 1
    with pytest.raises(openai.BadRequestError, match="messages.1.audio"):
        client.chat.completions.create(model=NAME, messages=[*MESSAGES, {**said.model_dump(), "audio": {"id": "1"}}])


def test_echo_and_prompts_of_tokens(client, free):
    text, _, _ = greedy(free, PROMPT, 8)
    said = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0, echo=True)
    assert said.choices[0].text == PROMPT + text
    ids = free.pipe.tokenizer(PROMPT).input_ids
    for prompt in (ids, [ids]):
        said = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
        assert said.choices[0].text == text
    parts = client.completions.create(model=NAME, prompt=[ids, ids], max_tokens=8, temperature=0, echo=True, stream=True)
    texts = ["", ""]
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [PROMPT + text] * 2


def test_tools_and_earlier_calls_reach_the_template(client, free):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    said = client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[tool], max_tokens=1, temperature=0)
    bare = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=1, temperature=0)
    without = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=[tool], tool_choice="none", max_tokens=1, temperature=0
    )
    assert said.usage is not None and bare.usage is not None and without.usage is not None
    assert said.usage.prompt_tokens == bare.usage.prompt_tokens + len("[now]")
    assert without.usage.prompt_tokens == bare.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="chat template does not take them .no tools here"):
        client.chat.completions.create(
            model=NAME, messages=[*MESSAGES, {"role": "tool", "content": "noon", "tool_call_id": "1"}], max_tokens=1
        )
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "something."}]}]
    whole = client.chat.completions.create(model=NAME, messages=parts, max_tokens=1, temperature=0)
    assert whole.usage is not None and whole.usage.prompt_tokens == bare.usage.prompt_tokens


def test_length_limits(client, free):
    """Without a limit, a chat may fill the context and a completion has 16 tokens. Longer requests are refused."""
    most = free.engine.max_length
    said = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert said.usage is not None and said.usage.completion_tokens == 16 and said.choices[0].finish_reason == "length"
    said = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True})
    assert said.usage is not None and said.usage.total_tokens == most and said.choices[0].finish_reason == "length"
    for wrong, message in (
        (dict(prompt="a" * most), f"a prompt of {most:,} tokens, here it has at most {most - 1:,}"),
        (dict(prompt="a" * 10_000), "a text of 10,000 characters|a prompt of 10,000 tokens"),
        (dict(prompt=PROMPT, max_tokens=most), f"a sequence here has at most {most:,} tokens"),
        (dict(prompt=[5, 160]), "tokens are from 0 to 159, got 160"),
        (dict(prompt=""), "it has no token"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model=NAME, **wrong)


@pytest.mark.model
def test_the_demos_model(real):
    """Greedy answers of a real model are the pipeline's, whole and streamed, alone and at once."""
    prompts = ["The capital of France is", "Once upon a time,", "Isaac Newton discovered that", "2 + 2 ="]
    wanted = [real.pipe([prompt], max_new_tokens=10, do_sample=False)[0] for prompt in prompts]

    async def ask(client, prompt, stream):
        asked = dict(model="smollm2", prompt=prompt, max_tokens=10, temperature=0)
        if not stream:
            said = await client.completions.create(**asked)
            return said.choices[0].text, said.choices[0].finish_reason, said.usage.completion_tokens
        chunks = [
            c async for c in await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        ]
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        return text, chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, i % 2 == 1) for i, prompt in enumerate(prompts)))

    found = asyncio.run(all_of_them())
    assert found == [(r.generated_text, r.finish_reason.value, r.generated_length) for r in wanted]
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="any") as client:
        said = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=20,
        )
    assert said.choices[0].message.content == "The capital of France is Paris." and said.choices[0].finish_reason == "stop"
    real.wait_until_free()
