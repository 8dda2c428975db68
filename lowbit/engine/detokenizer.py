"""Incremental detokenization: whole characters only, without stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 6
"""Prompt tokens that are decoded with the first new ones: some tokenizers drop the space before a text's first word."""

MOST_OF_A_CHARACTER = 4
"""Upper limit of the tokens of a character, one for each byte."""

MOST_UNFINISHED = 32
"""Tokens after which an incomplete character is treated as invalid bytes."""

UNFINISHED = "�"
"""The replacement character, which tokenizers decode incomplete characters to."""


class Detokenizer:
    """Decodes the text after a prompt, token by token.

    Text that may be the beginning of a stop string is held back. When a stop string is complete, `stopped` is True and `text`
    ends before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text, self.stopped = "", False
        self._window = self._context(prompt)  # tokens decoded together: some shown already, then new ones
        self._new = len(self._window)
        self._shown = self._decode(self._window)
        self._out = 0  # characters of `text` that `push` has returned

    def push(self, token: int) -> str:
        """Adds a token, and returns the new text; "" within a character or a possible stop string."""
        if self.stopped:
            return ""
        self._window.append(token)
        found = self._decode(self._window)
        if found.endswith(UNFINISHED) and len(self._window) - self._new < MOST_UNFINISHED:
            return ""
        return self._add(found)

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        if self.stopped:
            return ""
        shown = self._add(self._decode(self._window))
        rest = self.text[self._out :]
        self._out = len(self.text)
        return shown + rest

    def _add(self, decoded: str) -> str:
        """Takes over what is new of the window's text, and moves the window on."""
        added = decoded[len(self._shown) :] if decoded.startswith(self._shown) else self._decode(self._window[self._new :])
        if added:  # whole characters, so that the next window begins with one: decoders give up bytes that do not
            self._window = self._window[self._new :]
        elif self._new > MOST_UNFINISHED:  # tokens without text, special ones
            self._window = self._window[: self._new]
        self._new = len(self._window)
        self._shown = self._decode(self._window)
        begin = max(0, len(self.text) - max(map(len, self.stop), default=1) + 1)
        self.text += added
        cut = min((at for at in (self.text.find(s, begin) for s in self.stop) if at >= 0), default=-1)
        if cut >= 0:
            self.text, self.stopped = self.text[:cut], True
        end = len(self.text) if self.stopped else len(self.text) - self._held()
        out = self.text[self._out : end]
        self._out = max(self._out, end)
        return out

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, from where a character begins."""
        windows = [list(prompt[-count:]) for count in range(CONTEXT, CONTEXT + MOST_OF_A_CHARACTER)]
        return next((window for window in windows if not self._decode(window).startswith(UNFINISHED)), windows[0])

    def _held(self) -> int:
        """Characters at the end of the text with which a stop string may begin."""
        longest = max((len(s) - 1 for s in self.stop), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self.stop):
                return length
        return 0

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[assignment]
        return text
