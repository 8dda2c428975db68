"""Calls that the engine computes, and streams. Answers are those of Transformers' `generate`."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

import lowbit
from lowbit.engine import Engine
from lowbit.engine.warm_up import Stage
from lowbit.pipeline import FinishReason, Pipeline
from lowbit.pipeline.requests import config_refusals
from tests.tiny import eager_llama, save_tiny, tiny_tokenizer

PROMPTS = ["DeepSpeed is", "Seattle", "The quick brown fox jumps over"]


@pytest.fixture(scope="module")
def model():
    return eager_llama()


@pytest.fixture(scope="module")
def pipe(model):
    return Pipeline(model, tiny_tokenizer())


@pytest.fixture(scope="module")
def by_engine(model):
    return Pipeline(model, tiny_tokenizer(), engine=True, max_concurrent=2)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_new_tokens=12, ignore_eos=True),
        dict(max_new_tokens=40),
        dict(max_length=20, ignore_eos=True, return_full_text=True),
        dict(max_new_tokens=30, ignore_eos=True, stop=["a", "Z"]),
        dict(max_new_tokens=30, min_new_tokens=20),
    ],
    ids=lambda options: ",".join(options),
)
def test_greedy_answers_match_generate(pipe, by_engine, options):
    prompts = [p[:12] for p in PROMPTS]
    assert by_engine(prompts, do_sample=False, **options) == pipe(prompts, do_sample=False, **options)


def test_a_penalty_of_the_generation_config_applies(model):
    """Qwen2's generation config has a penalty, which `generate` also applies to greedy calls."""
    pipes = [Pipeline(model, tiny_tokenizer(), engine=engine) for engine in (False, True)]
    before = model.generation_config.repetition_penalty
    model.generation_config.repetition_penalty = 1.5
    try:
        answers = [pipe(PROMPTS[0], max_new_tokens=25, do_sample=False, ignore_eos=True) for pipe in pipes]
    finally:
        model.generation_config.repetition_penalty = before
    assert answers[0] == answers[1]
    assert answers[0] != pipes[0](PROMPTS[0], max_new_tokens=25, do_sample=False, ignore_eos=True)


@pytest.mark.parametrize("ignore", [False, True])
def test_min_new_tokens_suppresses_the_tokenizers_end_of_text(model, ignore):
    """min_new_tokens suppresses the end-of-text token, unless ignore_eos is set."""
    options = dict(max_new_tokens=12, do_sample=False)
    text = Pipeline(model, tiny_tokenizer())(PROMPTS[0], ignore_eos=True, **options)[0].generated_text
    assert text[3] not in text[:3]
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = text[3]
    pipes = [Pipeline(model, tokenizer, engine=engine) for engine in (False, True)]
    answers = [pipe(PROMPTS[0], min_new_tokens=9, ignore_eos=ignore, **options) for pipe in pipes]
    assert answers[0] == answers[1] and answers[0][0].generated_length >= 9


def test_stop_tokens_beyond_the_vocabulary(model):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|" + "x" * 3 + "|>"})
    tokenizer.add_tokens([f"<|{i}|>" for i in range(100)])
    tokenizer.eos_token = "<|99|>"
    assert tokenizer.eos_token_id >= model.config.vocab_size
    pipe = Pipeline(model, tokenizer, engine=True)
    assert pipe(PROMPTS[0], max_new_tokens=4, do_sample=False, ignore_eos=True)[0].generated_length == 4


def test_a_failure_in_another_threads_step_is_raised(model, monkeypatch):
    own = Pipeline(model, tiny_tokenizer(), engine=True)
    stream = own.stream(PROMPTS[0], max_new_tokens=50, ignore_eos=True)
    next(stream)

    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(own.engine.program, "step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            own.engine.step()
    with pytest.raises(RuntimeError, match=r"this request failed after \d tokens: RuntimeError: out of memory"):
        list(stream)
    assert stream.response is None


def test_concurrent_first_calls_create_one_engine(model, monkeypatch):
    made = []

    class Slow(Engine):
        def __init__(self, *args, **options):
            made.append(self)
            time.sleep(0.1)
            super().__init__(*args, **options)

    monkeypatch.setattr(sys.modules[Pipeline.__module__], "Engine", Slow)
    own = Pipeline(model, tiny_tokenizer(), engine=True)
    threads = [threading.Thread(target=own, args=(PROMPTS[0],), kwargs={"max_new_tokens": 2}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1


def test_the_end_of_a_stop_string_is_found_by_bisection(pipe, monkeypatch):
    ids, new = pipe.tokenizer("x").input_ids, pipe.tokenizer("a" * 700 + "stop" + "a" * 296).input_ids
    looks = []
    text = Pipeline._text
    monkeypatch.setattr(Pipeline, "_text", lambda self, *args: looks.append(0) or text(self, *args))
    assert pipe._tokens_until(ids, new, ["stop"]) == 704 and len(looks) < 15
    assert pipe._tokens_until(ids, new, ["b"]) == 1000 and pipe._tokens_until(ids, new, ["a"]) == 1


def test_seeds(by_engine):
    options = dict(max_new_tokens=20, ignore_eos=True)
    a, b, c = (by_engine("Seattle", seed=seed, **options)[0] for seed in (1, 1, 2))
    assert a == b != c
    first, second = by_engine(["Seattle", "Seattle"], seed=1, **options)
    assert first == a != second, "each prompt of a call has random numbers of its own"
    assert by_engine("Seattle", **options) != by_engine("Seattle", **options)


def test_unsupported_sampling_uses_generate(model):
    config = model.generation_config
    assert config_refusals(config) == ()
    config.no_repeat_ngram_size = 2
    try:
        assert config_refusals(config) == ("its generation config sets no_repeat_ngram_size=2",)
        with pytest.raises(ValueError, match="the engine cannot sample tokens as this model asks: its generation config sets"):
            next(Pipeline(model, tiny_tokenizer()).stream("x", do_sample=False))
    finally:
        config.no_repeat_ngram_size = None


@pytest.mark.parametrize("engine", [False, True])
def test_a_stream_yields_the_answer_in_parts(model, engine):
    own = Pipeline(model, tiny_tokenizer(), engine=engine)
    options = dict(max_new_tokens=25, do_sample=False, ignore_eos=True)
    stream = own.stream(PROMPTS[0], **options)
    pieces = list(stream)
    (answer,) = own(PROMPTS[0], **options)
    assert len(pieces) > 5 and "".join(pieces) == answer.generated_text
    assert stream.response == answer and list(stream) == [] and stream.response == answer
    whole = list(own.stream(PROMPTS[0], return_full_text=True, **options))
    assert whole[0].startswith(PROMPTS[0]) and "".join(whole) == PROMPTS[0] + "".join(pieces)
    text = "".join(pieces)
    stopped = own(PROMPTS[0], stop=[text[9:11]], **options)[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert "".join(own.stream(PROMPTS[0], stop=[text[9:11]], **options)) == stopped.generated_text


def test_closing_a_stream(by_engine):
    stream = by_engine.stream(PROMPTS[0], max_new_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    assert not by_engine.engine.scheduler.running


def test_streams_refuse_what_calls_refuse(by_engine):
    with pytest.raises(ValueError, match="a stream is for one non-empty prompt, got ''"):
        by_engine.stream("")
    with pytest.raises(lowbit.pipeline.UnknownArgument, match="max_new_token"):
        by_engine.stream("x", max_new_token=3)
    gone = Pipeline(by_engine.model, by_engine.tokenizer)
    gone.destroy()
    with pytest.raises(RuntimeError, match="this pipeline was destroyed"):
        gone.stream("x")


def test_errors_for_long_prompts_say_what_to_do(model):
    """Calls and streams give the same error."""
    own = Pipeline(model, tiny_tokenizer(), engine=True, cache_bytes=1 << 17)
    said = r"at most 128 tokens here, .* asks for 150 more; it takes .* keys and values, .*\(cache_bytes=[0-9]+\).*engine=False"
    with pytest.raises(ValueError, match=said):
        own(PROMPTS[0], max_new_tokens=150)
    with pytest.raises(ValueError, match=said):
        list(own.stream(PROMPTS[0], max_new_tokens=150))
    assert own(PROMPTS[0], max_new_tokens=5, ignore_eos=True)[0].generated_length == 5


def test_progress_bars(tmp_path, capfd, monkeypatch):
    """A bar is shown while kernels are compiled, and removed at the end; without progress there is none."""
    monkeypatch.setattr("lowbit.progress.on_terminal", lambda: True)
    save_tiny(tmp_path)
    monkeypatch.setattr("lowbit.progress.on_terminal", lambda: True)
    for progress in (False, True):
        pipe = lowbit.pipeline(str(tmp_path), engine=True, device="cpu", progress=progress)
        capfd.readouterr()
        for done in range(3):
            pipe.engine.runner._progress(Stage("kernels", done, 2))
        shown = capfd.readouterr().err.replace("\r", "\n").splitlines()
        assert any("kernels:" in line and "/2" in line for line in shown) == progress
        assert not shown or not shown[-1].strip(), "the bar is removed"


@pytest.mark.parametrize("loaded_within", [False, True])
def test_an_engine_created_in_inference_mode(loaded_within):
    """The joined weights must not be inference tensors, since the model could not be trained then."""
    with torch.inference_mode(loaded_within):
        model = eager_llama()
    with torch.inference_mode():
        made = Pipeline(model, tiny_tokenizer(), engine=True)(PROMPTS[0], max_new_tokens=5, do_sample=False)
    assert {parameter.is_inference() for parameter in model.parameters()} == {loaded_within}
    assert made == Pipeline(model, tiny_tokenizer(), engine=True)(PROMPTS[0], max_new_tokens=5, do_sample=False)


def test_on_a_cpu_the_report_says_why_there_is_no_decode_program():
    pipe = Pipeline(eager_llama(), tiny_tokenizer())
    said = "through Transformers' forward, one text at a time: "
    assert pipe.engine.report() == [f"{said}on a CPU that is faster for one user"]


def test_stop_tokens():
    """Stop tokens come from the tokenizer and the generation config, also with the engine."""
    pipe = Pipeline(eager_llama(), tiny_tokenizer(), engine=True, cache_bytes=1 << 22)
    assert pipe.stop_token_ids == sorted({pipe.tokenizer.eos_token_id, pipe.model.generation_config.eos_token_id})
    assert pipe.stop_token_ids == pipe.engine.stop_token_ids
