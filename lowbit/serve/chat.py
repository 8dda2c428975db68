"""Prompts as tokens: plain text, conversations by the model's chat template; and the text of single tokens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lowbit.serve.errors import refused, too_long

T = TypeVar("T")

TEMPLATE_ERRORS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, TemplateError,
)  # fmt: skip
"""Errors that templates raise for conversations that they do not support."""

THREADS = 2
"""That encode prompts: tokenizers compute outside Python's lock."""

NAMES_KEPT = 8192
"""Texts of tokens that are not decoded again: all 128,000 of a vocabulary, which a server comes to see in days, take 25 MB."""


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """A conversation as text, by the model's chat template; raises ValueError if that does not support it."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)  # type: ignore[arg-type]
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the model's chat template does not take them ({' '.join(str(error).split())[:200]})") from error
    assert isinstance(text, str)
    return text


class Prompts:
    """Makes tokens of what is asked, beside the event loop; a prompt has at most `most` tokens, of `vocab` that there are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int, vocab: int) -> None:
        self.tokenizer, self.most, self.vocab = tokenizer, most, vocab
        self.has_template = tokenizer.chat_template is not None
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lowbit-prompts")
        # Once, alone: a tokenizer whose file asks for padding or truncation is changed by its first call.
        tokenizer("a")

    async def beside(self, function: Callable[[], T]) -> T:
        """The result of a function that takes time, while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def of_text(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokens of a prompt, with the tokenizer's own at its beginning; raises ApiError for one that cannot be computed."""
        if not isinstance(prompt, str):
            wrong = [token for token in prompt if not 0 <= token < self.vocab]
            if wrong:
                raise refused("prompt", f"tokens are from 0 to {self.vocab - 1:,}, got {wrong[0]:,}")
            return self._checked(list(prompt), "prompt")
        self._check_characters(prompt, "prompt")
        return self._checked(self.tokenizer(prompt).input_ids, "prompt")

    def of_conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Tokens of a dialogue up to where the answer begins; raises ApiError where the model has no template for it."""
        if not self.has_template:
            raise refused("messages", "this model has no chat template; POST /v1/completions takes a prompt as it is")
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
        return self._checked(self.tokenizer(text, add_special_tokens=False).input_ids, "messages")

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """A prompt as it is repeated in front of its answer."""
        if isinstance(prompt, str):
            return prompt
        text: str = self.tokenizer.decode(prompt)  # type: ignore[assignment]
        return text

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _uses_tools(self, messages: list[dict[str, Any]], text: str) -> bool:
        """True if the template uses the tools: the text without them differs."""
        try:
            return text != rendered(self.tokenizer, messages, None)
        except ValueError:
            return True

    def _check_characters(self, text: str, param: str) -> None:
        """Refuses what is too long before it is encoded: each token is at most the longest one."""
        if len(text) > self.most * self._longest:
            raise too_long(param, f"a text of {len(text):,} characters", f"a prompt here has at most {self.most:,} tokens")

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise refused(param, "it has no token, at least one is needed")
        if len(ids) > self.most:
            raise too_long(param, f"a prompt of {len(ids):,} tokens", f"here it has at most {self.most:,}")
        return ids


class TokenTexts:
    """The text of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # Behind another token, since some tokenizers drop the space in front of a text's first word.
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
