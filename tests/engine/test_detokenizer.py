"""Incremental detokenization gives the text of decoding all tokens at the end. It returns whole characters, and no stop
strings."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbit.engine.detokenizer import Detokenizer, StopMatcher
from tests.tiny import tiny_tokenizer


def byte_tokenizer():
    """A tokenizer with one token per byte. Characters beyond ASCII take several tokens."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def words_tokenizer():
    """A tokenizer like SentencePiece, which drops the space of the first token that it decodes."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "▁is": 1, "▁Sea": 2, "side": 3, "▁a": 4}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def fallback_tokenizer():
    """A tokenizer like those of Llama 2, Mistral and Gemma: a few words, and byte tokens that are text only as whole
    characters."""
    names = ["<unk>", "▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


FALLBACK = fallback_tokenizer()
BYTES, WORDS, LETTERS = byte_tokenizer(), words_tokenizer(), tiny_tokenizer()


def pushed(tokenizer, prompt, tokens, stop=()):
    """Returns the text after each token, and then the remaining text at the end."""
    stream = Detokenizer(tokenizer, prompt, stop)
    return [*(stream.push(token) for token in tokens), stream.finish()], stream


@given(st.text(max_size=12), st.text(max_size=20))
def test_whole_characters_and_the_same_text(prompt, text):
    tokens = BYTES(text).input_ids
    shown, stream = pushed(BYTES, BYTES(prompt).input_ids or [0], tokens)
    assert "".join(shown) == stream.text == text
    assert all("�" not in part for part in shown) or "�" in text


def of_characters(characters):
    """Returns the tokens of a text for `FALLBACK`. " a" and "b" are words; other characters are tokens of their bytes."""
    words = {"a": [1], "b": [2], " ": [3]}
    return [token for c in characters for token in words.get(c, [4 + byte for byte in c.encode()])]


TEXTS = st.text("ab é€😀", max_size=12)


@given(TEXTS.filter(len), TEXTS)
def test_consecutive_characters_of_several_bytes(prompt, text):
    tokens = of_characters(text)
    shown, stream = pushed(FALLBACK, of_characters(prompt), tokens)
    whole = FALLBACK.decode([*of_characters(prompt), *tokens])
    assert FALLBACK.decode(of_characters(prompt)) + "".join(shown) == whole and stream.text == "".join(shown)
    assert "�" not in whole


def test_endless_invalid_bytes_are_not_held_back():
    stream = Detokenizer(FALLBACK, [1])
    shown = [stream.push(4 + 0x80) for _ in range(1000)]
    assert len("".join(shown)) > 960 and len(stream._window) < 100
    stream = Detokenizer(FALLBACK, [1])
    shown = [stream.push(0) for _ in range(1000)]  # special tokens are sampled if the end-of-text token is ignored
    assert "".join(shown) == "" and len(stream._window) < 100


@given(st.lists(st.integers(0, 255), max_size=20))
def test_invalid_bytes_are_returned_as_decoded(tokens):
    shown, _ = pushed(BYTES, BYTES("x").input_ids, tokens)
    assert "".join(shown) == BYTES.decode(tokens)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.lists(st.integers(1, 4), max_size=12))
def test_the_space_in_front_of_a_word_is_kept(prompt, tokens):
    shown, _ = pushed(WORDS, prompt, tokens)
    assert WORDS.decode(prompt) + "".join(shown) == WORDS.decode([*prompt, *tokens])


@given(st.text("ab.", max_size=16), st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_are_not_returned(text, stop):
    shown, stream = pushed(LETTERS, LETTERS("ab").input_ids, LETTERS(text).input_ids, stop)
    ends = [len(text[: i + 1]) for i in range(len(text)) if any(s in text[: i + 1] for s in stop)]
    if not ends:
        assert not stream.stopped and "".join(shown) == text
        return
    complete = text[: ends[0]]
    expected = complete[: min(complete.find(s) for s in stop if s in complete)]
    assert stream.stopped and "".join(shown) == stream.text == expected
    assert shown[ends[0] :] == [""] * (len(shown) - ends[0]), "nothing comes after the stop string"


@given(
    st.lists(st.text("ab", max_size=6), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
)
def test_stop_strings_match_as_in_a_plain_search(parts, stops):
    """Tokens may have several characters, and stop strings may overlap themselves and each other."""
    matcher, text = StopMatcher(stops), ""
    for part in parts:
        text += part
        found = matcher.feed(part)
        begins = [text.find(s) for s in stops if s in text]
        assert found == min(begins, default=-1)
        if begins:
            return
        prefixes = [n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stops)]
        assert matcher.held == max(prefixes, default=0)


def test_long_stop_strings_cost_no_more_than_short_ones():
    """The cost of 16 stop strings of 256 characters is that of short ones. Comparing every possible prefix would cost 0.8 ms a
    token."""

    class Four:
        def decode(self, tokens, skip_special_tokens=True):
            return "abcd" * len(tokens)

    stream = Detokenizer(Four(), [0], ["a" * 255 + c for c in "0123456789abcdef"])
    for _ in range(100):  # more text than the longest string
        stream.push(0)
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        for _ in range(20):
            stream.push(0)
        best = min(best, (time.process_time() - begin) / 20)
    assert not stream.stopped and best < 100e-6, f"{best * 1e6:.0f} us a token"


def test_a_possible_stop_string_is_held_back():
    shown, _ = pushed(LETTERS, LETTERS("x").input_ids, LETTERS("a.b..c").input_ids, ["..."])
    assert shown == ["a", "", ".b", "", "", "..c", ""]


@pytest.mark.parametrize("tokens", [[], [0]])
def test_special_tokens_are_not_returned(tokens):
    shown, _ = pushed(LETTERS, LETTERS("x").input_ids, [*tokens, *LETTERS("hi").input_ids, LETTERS.eos_token_id])
    assert "".join(shown) == "hi"
