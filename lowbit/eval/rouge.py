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
"""Prompt for a summary (Radford et al. 2019, section 3.6), without a chat template. An encoder-decoder gets the document after
the prefix in its config.json (T5's "summarize: ")."""
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Document:
    """A document and its reference summary."""

    document: str
    summary: str


@dataclass(frozen=True)
class Rouge:
    """Mean F1 from 0 to 1 by kind, standard errors over documents (None for one), and the number of truncated documents."""

    values: dict[str, float]
    standard_errors: dict[str, float | None]
    documents: int
    cut: int

    def figures(self) -> list[Figure]:
        """Returns the figures for tables and plots."""
        return [
            Figure(name, self.values[kind], self.standard_errors[kind], self.documents, "documents", "higher")
            for kind, name in KINDS.items()
        ]


def scorer() -> Any:
    """Returns the scorer of the package rouge-score, with Porter stemming. Raises ValueError if it is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(f"ROUGE needs the package rouge-score: {install('eval')}") from error
    return RougeScorer(list(KINDS), use_stemmer=True)


def rouge(predictions: Sequence[str], references: Sequence[str], cut: int = 0) -> Rouge:
    """Returns the mean F1 of predictions, each compared with its reference. Raises ValueError if there are no predictions, or
    not as many references."""
    if not predictions or len(predictions) != len(references):
        raise ValueError(f"as many predictions as references, and at least one; got {len(predictions)} and {len(references)}")
    rouge_scorer = scorer()
    scores = [rouge_scorer.score(target, text) for target, text in zip(references, predictions, strict=True)]
    means = {kind: mean_of_items([s[kind].fmeasure for s in scores]) for kind in KINDS}
    return Rouge({k: m[0] for k, m in means.items()}, {k: m[1] for k, m in means.items()}, len(scores), cut)


def read_documents(path: Path, limit: int | None = None) -> list[Document]:
    """Returns the records {"document", "summary"} of a file. Raises ValueError for an invalid record."""
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
    """Generates a summary of every document greedily, in batches of `batch_size`, and scores the summaries.

    A summary ends at the end-of-text token or after `max_new_tokens`. A document that exceeds the model's context with prompt
    and summary (encoder-decoder: with its prefix) is truncated and counted in `cut`.
    """
    question, limit = _question(pipe, max_new_tokens)
    summaries: list[str] = []
    cut = 0
    for start in Progress(range(0, len(documents), batch_size), desc="summaries", unit="batches", shown=progress):
        prompts = []
        for item in documents[start : start + batch_size]:
            prompt, shortened = _truncated(pipe, question, item.document, limit)
            prompts.append(prompt)
            cut += shortened
        summaries += [r.generated_text.strip() for r in pipe(prompts, do_sample=False, max_new_tokens=max_new_tokens)]
    return rouge(summaries, [item.summary for item in documents], cut)


def _question(pipe: Pipeline, max_new_tokens: int) -> tuple[str, int | None]:
    """Returns the prompt template, which contains {document}, and the maximum number of tokens of a prompt (None:
    unlimited)."""
    config = pipe.model.config
    context: int | None = getattr(config, "max_position_embeddings", None)
    if not pipe.is_encoder_decoder:
        return PROMPT, None if context is None else context - max_new_tokens
    stated: dict[str, Any] = getattr(config, "task_specific_params", None) or {}
    return stated.get("summarization", {}).get("prefix", "") + "{document}", context


def _truncated(pipe: Pipeline, question: str, document: str, limit: int | None) -> tuple[str, bool]:
    """Returns a prompt of at most `limit` tokens, and True if the document was truncated for it."""
    text = document
    while True:
        prompt = question.replace("{document}", text)
        excess = 0 if limit is None else len(pipe.tokenizer(prompt).input_ids) - limit
        if excess <= 0:
            return prompt, len(text) < len(document)
        if not text:
            raise ValueError(f"the model's context leaves {limit} tokens for document and prompt, which is too few")
        ids = pipe.tokenizer(text, add_special_tokens=False).input_ids
        shorter = pipe.tokenizer.decode(ids[: max(0, len(ids) - excess)])
        text = shorter if len(shorter) < len(text) else text[:-1]
