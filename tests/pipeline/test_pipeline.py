"""The pipeline: DeepSpeed-MII's calls and responses, batches equal to single calls, exact lengths and finish reasons."""

from __future__ import annotations

import inspect

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import lowbit
from lowbit.nn import QuantLinear
from lowbit.pipeline import FinishReason, Pipeline, Response, UnknownArgument
from tests.tiny import save_tiny, tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("pipeline") / "fp16")


@pytest.fixture(scope="module")
def pipe(folder):
    return lowbit.pipeline(str(folder))


PROMPTS = ["DeepSpeed is", "Seattle", "The quick brown fox jumps over"]


def test_a_batch_matches_single_calls(pipe):
    together = pipe(PROMPTS, max_new_tokens=12, do_sample=False, ignore_eos=True)
    for prompt, response in zip(PROMPTS, together, strict=True):
        assert isinstance(response, Response)
        assert pipe(prompt, max_new_tokens=12, do_sample=False, ignore_eos=True) == [response]
        assert response.prompt_length == len(prompt) and response.generated_length == 12
        assert response.finish_reason is FinishReason.LENGTH and response.finish_reason == "length"
        assert str(response) == response.generated_text


def test_greedy_equals_transformers(pipe, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = pipe.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = pipe.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert pipe(PROMPTS[0], max_new_tokens=10, do_sample=False, ignore_eos=True)[0].generated_text == expected


def scripted(text, pad=False):
    """A pipeline whose model generates `text` after any prompt, then the end-of-text token."""
    tokenizer = tiny_tokenizer()
    if pad:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    script = [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    class Scripted(type(tiny_llama())):
        def forward(self, input_ids, past_key_values=None, **kwargs):
            out = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
            out.logits = torch.full_like(out.logits, -100.0)
            out.logits[..., script[min(self.step, len(script) - 1)]] = 0
            self.step += 1
            return out

    model = Scripted(tiny_llama().config)
    model.step = 0
    return Pipeline(model, tokenizer)


def test_end_of_text_stops_and_counts():
    (response,) = scripted("hello")("x", max_new_tokens=20, do_sample=False)
    assert response.generated_text == "hello"
    assert response.finish_reason is FinishReason.STOP
    assert response.generated_length == 6  # five characters and the end-of-text token


def test_stop_strings_cut_the_text():
    (response,) = scripted("one.two.three")("x", max_new_tokens=20, do_sample=False, stop=["two", "three"])
    assert response.generated_text == "one."
    assert response.finish_reason is FinishReason.STOP
    assert response.generated_length == len("one.two")


@pytest.mark.parametrize("prompts", [["x"], ["x", "zz"]])
def test_a_stop_string_that_begins_in_the_prompt_is_ignored(prompts):
    for response in scripted("yabcdef", pad=True)(prompts, max_new_tokens=5, do_sample=False, stop=["xy"]):
        assert (response.generated_text, response.generated_length, response.finish_reason) == ("yabcd", 5, FinishReason.LENGTH)


def test_stop_strings_in_a_batch_with_padding():
    for response in scripted("abSTOPcd", pad=True)(["x", "zz"], max_new_tokens=20, do_sample=False, stop=["STOP"]):
        assert (response.generated_text, response.generated_length, response.finish_reason) == ("ab", 6, FinishReason.STOP)


def test_max_length_applies_to_each_prompt_of_a_batch(pipe):
    together = pipe(["a", "abcde"], max_length=10, do_sample=False, ignore_eos=True)
    assert [r.generated_length for r in together] == [9, 5]
    assert together == [pipe(t, max_length=10, do_sample=False, ignore_eos=True)[0] for t in ("a", "abcde")]


def test_the_space_after_the_prompt_is_kept():
    """SentencePiece-like tokenizers drop the space of the first token that they decode."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "▁is": 3, "▁Sea": 4}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

    class Is(type(tiny_llama())):
        def forward(self, **kwargs):
            out = super().forward(**kwargs)
            out.logits = torch.nn.functional.one_hot(torch.full(out.logits.shape[:2], 3), out.logits.shape[-1]).float()
            return out

    pipe = Pipeline(Is(tiny_llama().config), tokenizer)
    assert str(pipe("Sea", max_new_tokens=2, do_sample=False, return_full_text=True)[0]) == "Sea is is"
    assert str(pipe("Sea", max_new_tokens=2, do_sample=False)[0]) == " is is"


def test_defaults_of_the_pipeline(folder):
    own = lowbit.pipeline(str(folder), tokenizer=tiny_tokenizer(), max_length=8)
    assert own("abc", do_sample=False, ignore_eos=True)[0].generated_length == 5
    assert own("abc", do_sample=False, ignore_eos=True, max_length=9)[0].generated_length == 6
    with pytest.raises(ValueError, match="max_length is at least 1"):
        lowbit.pipeline(str(folder), max_length=0)


def test_full_text_and_length_limits(pipe):
    (response,) = pipe("abc", max_length=10, do_sample=False, return_full_text=True, ignore_eos=True)
    assert response.generated_text.startswith("abc") and response.generated_length == 7
    with pytest.raises(ValueError, match="3 tokens leaves no room within max_length 3"):
        pipe("abc", max_length=3)


def test_sampling_is_repeatable_with_a_seed(pipe):
    options = dict(max_new_tokens=20, ignore_eos=True)
    a, b, c = (pipe("abc", seed=s, **options)[0].generated_text for s in (1, 1, 2))
    assert a == b != c
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    pipe("abc", seed=1, **options)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens is at least 1, got 0"),
        (dict(max_new_tokens=2.5), "max_new_tokens is a whole number"),
        (dict(min_new_tokens=-1), "min_new_tokens is from 0"),
        (dict(max_new_tokens=3, min_new_tokens=4), "to the limit of 3 tokens, got 4"),
        (dict(top_p=0.0), "top_p is above 0"),
        (dict(top_p=1.5), "top_p is above 0"),
        (dict(top_k=0), "top_k"),
        (dict(temperature=0.0), "do_sample=False takes the most likely"),
        (dict(stop="x"), "stop is a list"),
    ],
)
def test_values_out_of_range(pipe, options, message):
    with pytest.raises(ValueError, match=message):
        pipe("abc", **options)


@pytest.mark.parametrize("prompts", [[], "", ["a", ""], [3]])
def test_prompts_must_be_texts(pipe, prompts):
    with pytest.raises(ValueError, match="non-empty strings"):
        pipe(prompts)


def test_unknown_arguments_are_named(pipe, folder):
    with pytest.raises(UnknownArgument, match=r"'max_tokens'; did you mean 'max_new_tokens'\?"):
        pipe("abc", max_tokens=3)
    with pytest.raises(UnknownArgument, match=r"'quantisation_mode'; did you mean 'quantization_mode'\?"):
        lowbit.pipeline(str(folder), quantisation_mode="wf6af16")
    with pytest.raises(UnknownArgument, match=r"unknown argument 'x1'\. Known: adapter, do_sample, "):
        pipe("abc", x1=3)


def test_quantization_mode(folder, tmp_path):
    pipe = lowbit.pipeline(str(folder), quantization_mode="wf6af16")
    assert isinstance(pipe.model.model.layers[0].mlp.up_proj, QuantLinear)
    answer = pipe(PROMPTS, max_new_tokens=8, do_sample=False)
    lowbit.quantize_checkpoint(folder, tmp_path / "fp6", "w6e3m2a16")
    assert lowbit.pipeline(str(tmp_path / "fp6"))(PROMPTS, max_new_tokens=8, do_sample=False) == answer
    assert (
        lowbit.pipeline(str(tmp_path / "fp6"), quantization_mode="wf6af16")(PROMPTS, max_new_tokens=8, do_sample=False)
        == answer
    )
    with pytest.raises(ValueError, match="quantized already, to w6e3m2a16"):
        lowbit.pipeline(str(tmp_path / "fp6"), quantization_mode="w8a16")


def test_scheme_and_its_old_name(folder):
    """quantization_mode still works, with a warning; given both, they must agree."""
    tokens = dict(max_new_tokens=8, do_sample=False)
    pipe = lowbit.pipeline(str(folder), scheme="wf6af16")
    assert (
        "quantization_config" in pipe.model.config.to_dict()
        and pipe.model.hf_quantizer.quantization_config.scheme == "w6e3m2a16"
    )
    with pytest.warns(DeprecationWarning, match="quantization_mode is the old name of scheme"):
        old = lowbit.pipeline(str(folder), quantization_mode="wf6af16")
    assert old(PROMPTS, **tokens) == pipe(PROMPTS, **tokens)
    with pytest.raises(ValueError, match="quantization_mode is the old name of scheme; got 'w8a16' and 'wf6af16'"):
        lowbit.pipeline(str(folder), scheme="wf6af16", quantization_mode="w8a16")


def test_destroyed_pipelines_raise_an_error(folder):
    pipe = lowbit.pipeline(str(folder))
    pipe.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        pipe("abc")


def test_the_signature_is_that_of_the_function():
    assert list(inspect.signature(lowbit.pipeline).parameters)[:2] == ["model_name_or_path", "scheme"]
