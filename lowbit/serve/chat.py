"""Encodes plain text and conversations, which the model's own template renders, and decodes single tokens.

This module must not load torch, since the prompt process imports it (prompt_process.py).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lowbit.serve.errors import refused, too_long

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES_KEPT = 8192
"""Number of cached texts of tokens. Without this limit a server would cache a whole vocabulary within days: 25 MB for 128,000
tokens.
"""


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Returns a conversation as text by the model's chat template. Raises ValueError if the template does not support it."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)  # type: ignore[arg-type]
    except MemoryError:
        raise  # not an error of the conversation
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise ValueError(f"the model's chat template does not take them ({' '.join(str(error).split())[:200]})") from error
    assert isinstance(text, str)
    return text


class Encoder:
    """Encodes prompts of at most `most` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.tokenizer, self.most = tokenizer, most
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    def of_text(self, prompt: str, special: bool = True) -> list[int]:
        """Returns the tokens of a prompt. special: True puts the tokenizer's special tokens (BOS) in front. Raises ApiError for
        a prompt that is too long or empty.
        """
        self._check_characters(prompt, "prompt")
        return checked(self.tokenizer(prompt, add_special_tokens=special).input_ids, self.most, "prompt")

    def of_conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Returns the tokens of a conversation, up to the beginning of the answer. Raises ApiError if the template does not
        support it.
        """
        self._check_characters("".join(message["content"] for message in messages), "messages")
        try:
            text = rendered(self.tokenizer, messages, tools)
        except ValueError as error:
            raise refused("messages", str(error)) from error
        self._check_characters(text, "messages")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise refused("messages", "they have halves of surrogate pairs, which are no characters")
        if tools and not self._uses_tools(messages, text):
            raise refused("tools", "the model's chat template does not use them; leave them out, or say tool_choice none")
        return checked(self.tokenizer(text, add_special_tokens=False).input_ids, self.most, "messages")

    def _uses_tools(self, messages: list[dict[str, Any]], text: str) -> bool:
        """True if the template uses the tools: the text without them differs."""
        try:
            return text != rendered(self.tokenizer, messages, None)
        except ValueError:
            return True

    def _check_characters(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is certainly too long, before it is encoded. Such a text has more characters than
        `most` tokens of the greatest length.
        """
        if len(text) > self.most * self._longest:
            raise too_long(param, f"a text of {len(text):,} characters", f"a prompt here has at most {self.most:,} tokens")


def checked(ids: list[int], most: int, param: str) -> list[int]:
    """Returns the tokens of a prompt. Raises ApiError if there are none, or more than `most`."""
    if not ids:
        raise refused(param, "it has no token, at least one is needed")
    if len(ids) > most:
        raise too_long(param, f"a prompt of {len(ids):,} tokens", f"here it has at most {most:,}")
    return ids


class TokenTexts:
    """Decodes single tokens, for log-probabilities."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # A token is decoded after another one, since some tokenizers drop the space before a text's first word.
        self._front = tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._before = self._decoded(self._front)
        self._named = functools.lru_cache(NAMES_KEPT)(self._name)

    def __getitem__(self, token: int) -> str:
        return self._named(token)

    def _name(self, token: int) -> str:
        return self._decoded([*self._front, token])[len(self._before) :]

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens)  # type: ignore[assignment]
        return text
