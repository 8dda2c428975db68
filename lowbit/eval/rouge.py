"""ROUGE-1, ROUGE-2 and ROUGE-L of a model's summaries, by the `rouge-score` package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.eval.figure import Figure, mean_of_items
from lowbit.eval.records import read_records, text_field
from lowbit.extras import install
from lowbit.pipeline import Pipeline
from lowbit.progress import Progress

KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
PROMPT = "{document}\n\nTL;DR:"
"""What is asked (Radford et al. 2019, section 3.6); plain text, so that models without a chat template can be compared. An
encoder-decoder gets the document, after the prefix that its config.json states for summaries (T5's "summarize: ")."""
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Document:
    """A text and the summary that somebody wrote of it."""

    document: str
    summary: str


@dataclass(frozen=True)
class Rouge:
    """Mean F1, from 0 to 1, by kind; standard errors over documents (None for one); documents cut to fit the model."""

    values: dict[str, float]
    standard_errors: dict[str, float | None]
    documents: int
    cut: int

    def figures(self) -> list[Figure]:
        """What tables and plots show."""
        return [
            Figure(name, self.values[kind], self.standard_errors[kind], self.documents, "documents", "higher")
            for kind, name in KINDS.items()
        ]


def scorer() -> Any:
    """The `rouge-score` package's scorer, with Porter stemming. Raises ValueError when the package is missing."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(f"ROUGE needs the package rouge-score: {install('eval')}") from error
    return RougeScorer(list(KINDS), use_stemmer=True)


def rouge(predictions: Sequence[str], references: Sequence[str], cut: int = 0) -> Rouge:
    """Mean F1 of predictions against references, one each. Raises ValueError when there are none, or not as many."""
    if not predictions or len(predictions) != len(references):
        raise ValueError(f"as many predictions as references, and at least one; got {len(predictions)} and {len(references)}")
    judge = scorer()
    scores = [judge.score(target, text) for target, text in zip(references, predictions, strict=True)]
    means = {kind: mean_of_items([s[kind].fmeasure for s in scores]) for kind in KINDS}
    return Rouge({k: m[0] for k, m in means.items()}, {k: m[1] for k, m in means.items()}, len(scores), cut)


def read_documents(path: Path, limit: int | None = None) -> list[Document]:
    """The records of a file of {"document", "summary"}. Raises ValueError, naming the record."""
    return [
        Document(*(text_field(record, key, f"{path}, record {number}") for key in ("document", "summary")))
        for number, record in enumerate(read_records(path, limit), 1)
    ]


def summarize(
    pipe: Pipeline,
    documents: Sequence[Document],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 1,
    progress: bool = False,
) -> Rouge:
    """Lets the model summarize every document, greedily, `batch_size` of them at once, and scores what it says.

    A summary ends at the end-of-text token or after `max_new_tokens`. A document that does not fit into the model's context
    together with the question and the answer (of an encoder-decoder: with its prefix) is cut at its end, and counted in `cut`.
    """
    question, room = _question(pipe, max_new_tokens)
    said: list[str] = []
    cut = 0
    for start in Progress(range(0, len(documents), batch_size), desc="summaries", unit="batches", shown=progress):
        prompts = []
        for item in documents[start : start + batch_size]:
            prompt, shortened = _fitting(pipe, question, item.document, room)
            prompts.append(prompt)
            cut += shortened
        said += [r.generated_text.strip() for r in pipe(prompts, do_sample=False, max_new_tokens=max_new_tokens)]
    return rouge(said, [item.summary for item in documents], cut)


def _question(pipe: Pipeline, max_new_tokens: int) -> tuple[str, int | None]:
    """The prompt with {document} in it, and how many tokens it may have; None for any number."""
    config = pipe.model.config
    room: int | None = getattr(config, "max_position_embeddings", None)
    if not pipe.is_encoder_decoder:
        return PROMPT, None if room is None else room - max_new_tokens
    stated: dict[str, Any] = getattr(config, "task_specific_params", None) or {}
    return stated.get("summarization", {}).get("prefix", "") + "{document}", room


def _fitting(pipe: Pipeline, question: str, document: str, room: int | None) -> tuple[str, bool]:
    """The prompt, and whether the document had to be cut so that it takes at most `room` tokens."""
    text = document
    while True:
        prompt = question.replace("{document}", text)
        excess = 0 if room is None else len(pipe.tokenizer(prompt).input_ids) - room
        if excess <= 0:
            return prompt, len(text) < len(document)
        if not text:
            raise ValueError(f"the model's context leaves {room} tokens for a document and the question; that is too few")
        ids = pipe.tokenizer(text, add_special_tokens=False).input_ids
        shorter = pipe.tokenizer.decode(ids[: max(0, len(ids) - excess)])
        text = shorter if len(shorter) < len(text) else text[:-1]
