"""On a GPU a pipeline uses the engine for models with a decode program."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine.program import DecodeProgram
from lowbit.pipeline import Pipeline
from tests.engine.test_gpu import model_of
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.gpu

PROMPTS = ["DeepSpeed is", "Seattle", "The quick brown fox"]
ASKED = dict(max_new_tokens=20, do_sample=False, ignore_eos=True)


@pytest.fixture(scope="module")
def pipe():
    return Pipeline(model_of(dtype=torch.bfloat16), tiny_tokenizer(), max_concurrent=4, cache_bytes=1 << 26)


def test_calls_and_streams_use_the_engine(pipe):
    answers = pipe(PROMPTS, **ASKED)
    assert isinstance(pipe.engine.program, DecodeProgram)
    assert [answer.generated_length for answer in answers] == [20] * 3
    with pipe.stream(PROMPTS[0], **ASKED) as stream:
        text = "".join(stream)
    assert text == stream.response.generated_text and stream.response.generated_length == 20
    arguments = dict(ASKED, do_sample=True, temperature=0.8, seed=3)
    assert pipe(PROMPTS, **arguments) == pipe(PROMPTS, **arguments)


def test_models_without_a_program_use_generate():
    """Models without a decode program compute all prompts of a call in one batch, by Transformers."""
    pipe = Pipeline(model_of(dtype=torch.float32, scheme=None), tiny_tokenizer(), cache_bytes=1 << 26)
    plain = Pipeline(pipe.model, tiny_tokenizer(), engine=False)
    assert pipe(PROMPTS, **ASKED) == plain(PROMPTS, **ASKED)
    assert pipe.engine.program.reasons
