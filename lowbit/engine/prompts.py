"""Launches the prompts of a round: on a GPU as one CUDA graph for each number of tokens, filled up with nobody's.

Without graphs 300 launches of Python take 15 to 20 ms for any prompt (Llama-3-8B's shape, H200, 2026-11-23), more than 512
tokens need on the GPU. Tokens are drawn behind the graph, since how is for each request to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.engine.batching import Piece
from lowbit.engine.graphs import Graphs
from lowbit.engine.program import DecodeProgram
from lowbit.engine.ragged import Form, Ragged, sizes
from lowbit.engine.request import Request
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE

if TYPE_CHECKING:
    from lowbit.engine.steps import Program

TEXTS = 31
"""Texts of a graph at most, more come one graph after the other. Blocks of attention without a text cost 0.5 ms in all for
1,024 tokens beside those of one text (of 25; Llama-3-8B's shape, H200, 2026-11-23)."""

KEYS = 8192
"""Tokens up to their own that the texts of a graph may see; there is another for texts that all begin in this round."""


class Prompts:
    """The prompts of an engine whose rounds have up to `most` tokens of them; `graphs`: where they are captured, or None."""

    def __init__(self, program: Program, slots: Slots, most: int, *, graphs: Graphs | None = None) -> None:
        self.program, self.slots, self.sizes, self._graphs = program, slots, sizes(most), graphs
        self.texts = min(TEXTS, slots.count)
        """Texts of a graph."""
        self.forms: tuple[Form, ...] = ()
        """All for which there are graphs, the largest first, whose memory serves all."""
        if graphs is not None and isinstance(program, DecodeProgram) and not program.softcaps:
            most_keys = min(KEYS, slots.count * slots.places * PAGE)  # of all texts there may be
            each = ((size, keys) for size in reversed(self.sizes) for keys in (max(most_keys, size), size))
            self.forms = tuple(Form(size, self.texts, keys) for size, keys in dict.fromkeys(each))
        self.captures = 0
        """Graphs captured so far: it stands still once an engine is warm."""
        self._captured: dict[Form, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._logits: Tensor | None = None

    def size(self, tokens: int) -> int:
        """How many tokens are computed for so many."""
        return next(size for size in self.sizes if size >= tokens)

    def launch(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Logits [B, V] after each last piece of a text, until the next launch; None if there is none."""
        first, *others = self.parts(pieces)
        if not others:
            return self._launch(first)
        made = [logits.clone() for part in (first, *others) if (logits := self._launch(part)) is not None]  # before the next
        return torch.cat(made) if made else None

    def parts(self, pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
        """What of some pieces is computed at once: as many as a graph has texts."""
        most = self.texts if self.forms else len(pieces)
        return [pieces[at : at + most] for at in range(0, len(pieces), most)]

    def _launch(self, pieces: Sequence[Piece]) -> Tensor | None:
        form = self._form(pieces)
        if form is None:
            return self.program.prompt(pieces, self.slots)
        graph, numbers = self.captured(form)
        numbers.copy_(on_device(form.numbers(pieces, self.slots.nobodys), self.slots.device))
        graph.replay()
        assert self._logits is not None
        count = sum(piece.last for piece in pieces)
        return self._logits[:count] if count else None

    def _form(self, pieces: Sequence[Piece]) -> Form | None:
        """The smallest of those with graphs that some pieces fit into; None if they fit into none."""
        tokens, keys = sum(len(piece.tokens) for piece in pieces), sum(piece.end for piece in pieces)
        fit = [form for form in self.forms if len(pieces) <= form.texts and tokens <= form.tokens and keys <= form.keys]
        return min(fit, key=lambda form: (form.tokens, form.keys), default=None)

    def captured(self, form: Form) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a form and the numbers that it reads, captured at the first call."""
        found = self._captured.get(form)
        if found is None:
            found = self._captured[form] = self._capture(form)
            self.captures += 1
        return found

    def _capture(self, form: Form) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        numbers = on_device(form.numbers((), self.slots.nobodys), self.slots.device)

        def into_logits() -> None:
            made = self.run(form, numbers)
            if self._logits is None:  # at the first run, which is not captured: no memory of graphs
                self._logits = torch.empty_like(made)
            self._logits.copy_(made)

        assert self._graphs is not None
        graph, _ = self._graphs.capture(into_logits)
        return graph, numbers

    def run(self, form: Form, numbers: Tensor) -> Tensor:
        """Logits [texts, V] after the last tokens of the texts that some numbers describe, launch by launch."""
        assert isinstance(self.program, DecodeProgram)
        ragged = Ragged(form, numbers, self.slots)
        h, delta = self.program.texts(ragged, self.slots)
        return self.program.logits(h[ragged.last], delta[ragged.last])

    def rehearse(self, size: int, longest: int) -> None:
        """Goes through a prompt of so many tokens in texts of up to `longest`, which are nobody's."""
        if self.forms:
            form = Form(size, self.texts, size)
            self.run(form, on_device(form.numbers((), self.slots.nobodys), self.slots.device))
            return
        request = Request([0], 1)
        request.slot = self.slots.nobodys
        tokens = [(0,) * min(longest, size - begin) for begin in range(0, size, longest)]
        self.program.prompt([Piece(request, 0, each, False) for each in tokens], self.slots)
