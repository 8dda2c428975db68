"""Incremental detokenization. It returns whole characters only, and no stop strings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 6
"""Number of prompt tokens decoded together with the first new ones, since some tokenizers drop the space before a text's first
word.
"""

MOST_OF_A_CHARACTER = 4
"""Maximum number of tokens of a character: one for each of its bytes."""

MOST_UNFINISHED = 32
"""Number of tokens after which an incomplete character is treated as invalid bytes."""

UNFINISHED = "�"
"""The replacement character, to which tokenizers decode incomplete characters."""


@functools.lru_cache(256)
def _borders(pattern: str) -> tuple[int, ...]:
    """Returns the Knuth-Morris-Pratt failure function: entry i is the length of the longest proper prefix of the first i
    characters of `pattern` that is also their suffix. Entry 0 is never used.
    """
    borders = [0, 0]
    for character in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != character:
            length = borders[length]
        borders.append(length + (pattern[length] == character))
    return tuple(borders)


class StopMatcher:
    """Searches a growing text for stop strings (Knuth, Morris and Pratt, 1977). The cost per character of text does not depend
    on the lengths of the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, _borders(string)) for string in strings]
        self._matched = [0] * len(strings)
        self._length = 0

    @property
    def held(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return max(self._matched, default=0)

    def feed(self, added: str) -> int:
        """Appends `added` to the text. Returns the start index of the leftmost stop string that is now complete, or -1 if there
        is none. After a match nothing more may be appended.
        """
        found = -1
        for i, (string, borders) in enumerate(self._strings):
            length = self._matched[i]
            for position, character in enumerate(added, self._length + 1):
                while length and string[length] != character:
                    length = borders[length]
                if string[length] == character:
                    length += 1
                    if length == len(string):
                        begin = position - length
                        found = begin if found < 0 else min(found, begin)
                        break
            self._matched[i] = length
        self._length += len(added)
        return found


class Detokenizer:
    """Decodes the text after a prompt, token by token.

    Text that may be the beginning of a stop string is held back. When a stop string is complete, `stopped` is True and `text`
    ends before it. Special tokens have no text, unless `skip_special_tokens` is False.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self.tokenizer, self.stop, self._skip = tokenizer, tuple(stop), skip_special_tokens
        self._matcher = StopMatcher(self.stop)
        self.text, self.stopped = "", False
        self._window = self._context(prompt)  # tokens decoded together: already shown ones, then new ones
        self._new = len(self._window)
        self._shown = self._decode(self._window)
        self._out = 0  # characters of `text` that `push` has returned

    def push(self, token: int) -> str:
        """Adds a token and returns the new text. It is "" while a character or a possible stop string is incomplete."""
        if self.stopped:
            return ""
        self._window.append(token)
        found = self._decode(self._window)
        if found.endswith(UNFINISHED) and len(self._window) - self._new < MOST_UNFINISHED:
            return ""
        return self._add(found)

    def finish(self) -> str:
        """Returns the text still held back after the last token."""
        if self.stopped:
            return ""
        shown = self._add(self._decode(self._window))
        rest = self.text[self._out :]
        self._out = len(self.text)
        return shown + rest

    def _add(self, decoded: str) -> str:
        """Appends the new part of the window's decoded text, and advances the window."""
        added = decoded[len(self._shown) :] if decoded.startswith(self._shown) else self._decode(self._window[self._new :])
        if added:  # the new tokens begin with a whole character; at the start, decoders would drop bytes of a partial one
            self._window = self._window[self._new :]
        elif self._new > MOST_UNFINISHED:  # tokens without text, such as special tokens
            self._window = self._window[: self._new]
        self._new = len(self._window)
        self._shown = self._decode(self._window)
        self.text += added
        cut = self._matcher.feed(added)
        if cut >= 0:
            self.text, self.stopped = self.text[:cut], True
        end = len(self.text) if self.stopped else len(self.text) - self._matcher.held
        out = self.text[self._out : end]
        self._out = max(self._out, end)
        return out

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of a prompt, starting at the beginning of a character."""
        windows = [list(prompt[-count:]) for count in range(CONTEXT, CONTEXT + MOST_OF_A_CHARACTER)]
        return next((window for window in windows if not self._decode(window).startswith(UNFINISHED)), windows[0])

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=self._skip)  # type: ignore[assignment]
        return text
