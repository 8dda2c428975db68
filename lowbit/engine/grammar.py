"""Grammars restrict the text of a sequence. They are a JSON schema, a regular expression, a list of choices or a Lark grammar.

    compiler = GrammarCompiler(tokenizer, engine.vocab, engine.stop_token_ids)
    engine.submit(Request(prompt, 100, grammar=compiler.compile(Grammar.json_schema({"type": "integer"}))))

llguidance, the optional dependency of the extra `structured`, parses grammars and computes which tokens may come next: a mask
with one bit per token, which the sampling kernel reads (ops/sample.py). Its work per token is bounded, also for hostile
grammars: a grammar that exceeds a limit fails its own sequence.
"""

from __future__ import annotations

import functools
import json
from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowbit.extras import install
from lowbit.ops.sample import mask_words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MOST_LEXER_STATES = 20_000
"""Maximum number of lexer states of a sequence. By llguidance's documentation a state takes up to 2 KB. llguidance's own
default is 250,000."""

JSON_SPACES = r"\r?\n[ \t]{0,40}|[ \t]{1,8}"
"""Spaces that are allowed between two tokens of JSON. They suffice for indented JSON. Without a limit, a model may sample
spaces for ever."""

MOST_CHARACTERS = 300
"""Number of characters of llguidance's messages that are included in errors."""


class GrammarsUnavailable(RuntimeError):
    """Grammars cannot be used with this installation or this tokenizer; the message says why."""


@dataclass(frozen=True)
class Grammar:
    """A grammar in llguidance's form, JSON or Lark; the class methods make one. It is checked by `GrammarCompiler.compile`."""

    text: str

    @classmethod
    def json_schema(cls, schema: abc.Mapping[str, Any] | bool) -> Grammar:
        """Returns the grammar of JSON values that a schema allows. Keywords that cannot be enforced are errors of `compile`."""
        return cls(json.dumps({"grammars": [{"json_schema": schema if isinstance(schema, bool) else with_spaces(schema)}]}))

    @classmethod
    def json_object(cls) -> Grammar:
        """Returns the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Returns the grammar of texts that match a regular expression as a whole (Rust's syntax, without look-around)."""
        return cls(json.dumps({"grammars": [{"lark_grammar": f"start: /{_escaped(pattern)}/"}]}))

    @classmethod
    def choice(cls, options: abc.Sequence[str]) -> Grammar:
        """Returns the grammar of a list of texts."""
        return cls.lark("start: " + " | ".join(map(literal, options)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Returns a grammar in Lark's syntax, with llguidance's extensions; its first rule is `start`."""
        return cls(json.dumps({"grammars": [{"lark_grammar": text}]}))

    def after(self, before: str) -> Grammar:
        """Returns the grammar of texts that begin with `before`, in Lark's syntax, and go on as this one."""
        (own,) = json.loads(self.text)["grammars"]
        return Grammar(json.dumps({"grammars": [{"lark_grammar": f"start: {before} @answer"}, {"name": "answer", **own}]}))


def with_spaces(schema: abc.Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with the option of llguidance that limits the spaces between the tokens of JSON."""
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACES}}


def literal(text: str) -> str:
    """Returns a text as a string of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(pattern: str) -> str:
    """Returns a regular expression as it stands between the slashes of Lark's syntax."""
    out, escaped = [], False
    for character in pattern:
        out.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)


class GrammarCompiler:
    """Compiles grammars for a tokenizer and a vocabulary of `vocab` tokens. Usable from any thread.

    `stop_token_ids` may follow a complete text. Raises GrammarsUnavailable without llguidance, and for a tokenizer that it does
    not read. Building takes about 1 s for 128,000 tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, stop_token_ids: abc.Sequence[int]) -> None:
        size = max(vocab, len(tokenizer))
        self.words = mask_words(size)
        self._tokenizer = _tokenizer(tokenizer, size, stop_token_ids)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar. Raises ValueError with llguidance's reason for a grammar that is wrong, too large, or
        has a feature that cannot be enforced.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES)
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some errors appear only here, such as that of a grammar that allows no text
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise ValueError(_reason(matcher) or "it allows no text")
        return CompiledGrammar(matcher, self.words)


def _tokenizer(tokenizer: PreTrainedTokenizerBase, size: int, stop_token_ids: abc.Sequence[int]) -> LLTokenizer:
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise GrammarsUnavailable(f"grammars need llguidance ({error}): {install('structured')}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise GrammarsUnavailable(f"grammars need a tokenizer of the tokenizers library, this is a {type(tokenizer).__name__}")
    try:
        return from_tokenizer(tokenizer, size, list(stop_token_ids) or None)
    except (ValueError, RuntimeError) as error:
        raise GrammarsUnavailable(f"llguidance does not read this model's tokenizer: {' '.join(str(error).split())}") from error


def _reason(matcher: LLMatcher) -> str:
    """Returns a matcher's error in one line, without the state of its parser; "" if there is none."""
    error = " ".join(matcher.get_error().partition("<state>")[0].split())[:MOST_CHARACTERS]
    return "no token of the model continues its text" if error.startswith("NoExtension") else error


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar that is compiled for a tokenizer, in its first state; any number of requests may use it."""

    matcher: LLMatcher
    words: int

    def start(self) -> GrammarState:
        """Returns the state of a new sequence."""
        return GrammarState(self.matcher.deep_copy(), self.words)


@dataclass(eq=False)
class GrammarState:
    """The state of a grammar after the tokens of a sequence. Only one thread may use it at a time."""

    matcher: LLMatcher
    words: int
    _forced: tuple[int, ...] | None = None

    def accept(self, token: int) -> str:
        """Advances by a sampled token. Returns "", or why the grammar does not allow the token."""
        self._forced = None
        return "" if self.matcher.consume_token(token) else _reason(self.matcher)

    @property
    def forced(self) -> tuple[int, ...]:
        """The next tokens, as far as the grammar allows exactly one at each place; empty if it allows several now."""
        if self._forced is None:
            self._forced = () if self.matcher.is_stopped() else tuple(self.matcher.compute_ff_tokens())
        return self._forced

    def masks_ahead(self, tokens: abc.Sequence[int]) -> Tensor:
        """Returns the masks int32 [1 + len(tokens), words] of the next token and of the token after each of `tokens`. `tokens`
        must be the first ones of `forced`. If the text is complete after them, the last mask allows all tokens."""
        masks = torch.zeros(1 + len(tokens), self.words, dtype=torch.int32)
        for row, token in enumerate(tokens):
            masks[row, token // 32] = (1 << token % 32) - ((token % 32 == 31) << 32)
        if tokens and not self.matcher.consume_tokens(list(tokens)):
            return masks
        if self.matcher.is_stopped():
            masks[-1] = -1
        else:
            self.matcher.unsafe_compute_mask_ptr(masks[-1].data_ptr(), 4 * self.words)
        if tokens:
            self.matcher.rollback(len(tokens))
        return masks

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and nothing but a stop token may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further, such as a limit on its cost; "" if it can."""
        return _reason(self.matcher)


@functools.cache
def _executor() -> LLExecutor:
    """Returns the threads that compute the masks of several sequences."""
    from llguidance import LLExecutor

    return LLExecutor()


def masks_of(states: abc.Sequence[GrammarState | None], words: int, *, pinned: bool = False) -> Tensor:
    """Returns the masks int32 [len(states), words] of the next tokens, in host memory. A GPU reads `pinned` memory faster. All
    bits are set for a state that is None.

    Computing a mask may lead to an error of its state. Such a mask allows stop tokens only.
    """
    used = [(state, row) for row, state in enumerate(states) if state is not None]
    widest = max((state.words for state, _ in used), default=words)  # more than `words` if the tokenizer has more tokens
    masks = torch.empty((len(states), widest), dtype=torch.int32, pin_memory=pinned and widest == words)
    masks.numpy().fill(-1)  # NumPy fills in this thread; torch's threads would take cores from the threads that compute masks
    if len(used) == 1:
        ((state, row),) = used
        state.matcher.unsafe_compute_mask_ptr(masks[row].data_ptr(), widest * 4)
    elif used:
        pairs = [(state.matcher, row) for state, row in used]
        _executor().unsafe_compute_mask_ptr(pairs, masks.data_ptr(), widest * 4, len(states))
    return masks[:, :words]
