"""Multiple choice. The model's answer is the choice with the highest log-likelihood; nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbit.eval.figure import Figure, share
from lowbit.eval.records import read_records, text_field
from lowbit.eval.windows import evaluating
from lowbit.progress import Progress


@dataclass(frozen=True)
class Question:
    """A prompt, its possible continuations, and the index of the correct one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Choice:
    """Accuracy by summed log-likelihood and by log-likelihood per byte of the choice, each with its binomial standard error.

    chance: the accuracy of guessing, the mean of 1 / number of choices.
    """

    accuracy: float
    accuracy_per_byte: float
    questions: int
    chance: float
    standard_error: float
    standard_error_per_byte: float

    def figures(self) -> list[Figure]:
        """Returns the figures for tables and plots."""
        return [
            Figure("accuracy", self.accuracy, self.standard_error, self.questions, "questions", "higher"),
            Figure("accuracy per byte", self.accuracy_per_byte, self.standard_error_per_byte, self.questions, "questions",
                   "higher"),
        ]  # fmt: skip


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Returns the records {"prompt" or "question", "choices", "answer"} of a file. Raises ValueError for an invalid record.

    A "prompt" is used unchanged; a "question" becomes "Question: ...\\nAnswer:". `answer` is the index of the correct choice,
    from 0, or its text.
    """
    return [_question(record, f"{path}, record {number}") for number, record in enumerate(read_records(path, limit), 1)]


def _question(record: dict[str, Any], where: str) -> Question:
    if "prompt" in record:
        prompt = text_field(record, "prompt", where)
    else:
        prompt = f"Question: {text_field(record, 'question', where)}\nAnswer:"
    choices, answer = record.get("choices"), record.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise ValueError(f"{where}: choices must be a list of at least two texts, got {choices!r}")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"{where}: answer must be an index from 0 to {len(choices) - 1} or the text of one choice, got {answer!r}"
        )
    return Question(prompt, tuple(choices), answer)


@torch.inference_mode()
def choose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    progress: bool = False,
) -> Choice:
    """Returns the accuracy of the model on `questions`.

    A space separates prompt and choice unless one of them has white space there. The scored tokens are those of prompt plus
    choice from the first one on that differs from the prompt alone. If the tokenizer merges the end of the prompt with the
    choice, the merged token is scored too. The model's answer is the choice with the largest sum of log-probabilities. For
    `accuracy_per_byte` it is the choice with the largest sum per UTF-8 byte. The first of equal choices counts.
    Log-probabilities are float32, their sums float64.

    Raises ValueError without questions, and for a question that exceeds the model's context.
    """
    if not questions:
        raise ValueError("multiple choice needs at least one question")
    context = getattr(model.config, "max_position_embeddings", None)
    encoded = [[_encode(tokenizer, question.prompt, choice) for choice in question.choices] for question in questions]
    for number, candidates in enumerate(encoded, 1):
        longest = max(len(ids) for ids, _ in candidates)
        if context is not None and longest > context:
            raise ValueError(
                f"question {number} has {longest} tokens, the model a context of {context}; leave the question out"
            )
    right = right_per_byte = 0
    with evaluating(model):
        for question, candidates in zip(
            Progress(questions, desc="choices", unit="questions", shown=progress), encoded, strict=True
        ):
            sums = _log_likelihoods(model, candidates)
            per_byte = [s / len(c.encode()) for s, c in zip(sums, question.choices, strict=True)]
            right += sums.index(max(sums)) == question.answer
            right_per_byte += per_byte.index(max(per_byte)) == question.answer
    accuracy, error = share(right, len(questions))
    normalized, normalized_error = share(right_per_byte, len(questions))
    chance = sum(1 / len(q.choices) for q in questions) / len(questions)
    return Choice(accuracy, normalized, len(questions), chance, error, normalized_error)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, choice: str) -> tuple[list[int], int]:
    """Returns the token ids of prompt and choice, and the index of the first scored token, at least 1."""
    between = "" if prompt[-1].isspace() or choice[0].isspace() else " "
    before, whole = tokenizer(prompt).input_ids, tokenizer(prompt + between + choice).input_ids
    common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
    common = min(common, len(whole) - 1)
    if common < 1:
        raise ValueError(f"the prompt {prompt!r} leaves no token before the choice {choice!r}; make it longer")
    return list(whole), common


def _log_likelihoods(model: PreTrainedModel, candidates: Sequence[tuple[list[int], int]]) -> list[float]:
    """Returns the summed log-probability of each candidate's scored tokens, from one batch padded on the right."""
    longest = max(len(ids) for ids, _ in candidates)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in candidates], device=model.device)
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in candidates], device=model.device)
    first = min(start for _, start in candidates)
    logits = model(tokens, attention_mask=mask, use_cache=False, logits_to_keep=longest - first + 1).logits
    logits = logits[:, first - 1 - longest :]
    sums = []
    for row, (ids, start) in enumerate(candidates):
        scored = logits[row, start - first : len(ids) - first].float().log_softmax(-1)
        picked = scored.gather(-1, tokens[row, start : len(ids), None])
        sums.append(float(picked.double().sum()))
    if any(s != s for s in sums):
        raise ValueError("the model's logits are NaN; run it in bfloat16 or float32")
    return sums
