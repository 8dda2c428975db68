"""pass@k: how likely one of k programs that a model writes for a problem passes the problem's tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.eval.figure import Figure, mean_of_items
from lowbit.eval.records import read_records, text_field
from lowbit.eval.sandbox import JAVASCRIPT, LANGUAGES, PYTHON, STANDARD, Limits, choose_isolation, run_untrusted
from lowbit.pipeline import Pipeline
from lowbit.progress import Progress

STOP = {PYTHON: ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint"), JAVASCRIPT: ("\n}",)}
"""Where a completion ends, by language: before the next thing at the margin (Chen et al. 2021, section 3.1); in JavaScript that
is the function's own closing brace, which is put back."""
_END = {PYTHON: "", JAVASCRIPT: "\n}"}
MAX_NEW_TOKENS = 512
_AT_ONCE = 16  # samples of one problem that are generated together


@dataclass(frozen=True)
class Problem:
    """A prompt that ends in a function's signature and docstring (in JavaScript: in a comment, a signature and a brace), and
    tests that define `check(function)`."""

    name: str
    prompt: str
    entry_point: str
    test: str
    language: str = PYTHON

    def program(self, completion: str) -> str:
        """The source that passes if the completion, cut where `STOP` says, is right."""
        return f"{self.prompt}{completion}{_END[self.language]}\n\n{self.test}\n\ncheck({self.entry_point})\n"


@dataclass(frozen=True)
class Solved:
    """Of one problem: how many of `samples` completions passed, and why the others did not."""

    problem: str
    samples: int
    passed: int
    reasons: list[str]


@dataclass(frozen=True)
class PassAtK:
    """pass@k by k, its standard error over problems (deviation / sqrt(problems); None for one problem), and each problem.

    The error says how far another draw of problems would change the figure; the noise of sampling is part of it.
    """

    values: dict[int, float]
    standard_errors: dict[int, float | None]
    problems: list[Solved]

    def figures(self) -> list[Figure]:
        """What tables and plots show."""
        return [
            Figure(f"pass@{k}", value, self.standard_errors[k], len(self.problems), "problems", "higher")
            for k, value in self.values.items()
        ]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of pass@k from `samples` completions of a problem, of which `passed` are right.

    1 - C(samples - passed, k) / C(samples, k), the share of all subsets of k samples that hold a right one, as the product
    1 - prod(1 - k / i for i in samples - passed + 1 .. samples), which does not overflow (Chen et al., Evaluating Large
    Language Models Trained on Code, 2021, equation 1). Raises ValueError unless 0 <= passed <= samples and 1 <= k <= samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"0 <= passed <= samples and 1 <= k <= samples, got samples {samples}, passed {passed}, k {k}")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The problems of a file in HumanEval's format: task_id, prompt, entry_point, test, and, where it is not Python, language,
    the same in all records. Raises ValueError for others."""
    problems: list[Problem] = []
    for number, record in enumerate(read_records(path, limit), 1):
        name, prompt, entry, test = (
            text_field(record, key, f"{path}, record {number}") for key in ("task_id", "prompt", "entry_point", "test")
        )
        if not entry.isidentifier():
            raise ValueError(f"{path}, record {number}: entry_point is the name of a function, got {entry!r}")
        language = record.get("language", PYTHON)
        if language not in LANGUAGES:
            raise ValueError(f"{path}, record {number}: language is {' or '.join(LANGUAGES)}, got {language!r}")
        if problems and problems[0].language != language:
            raise ValueError(
                f"{path}, record {number}: in {language}, those before it in {problems[0].language}; make two files"
            )
        problems.append(Problem(name, prompt, entry, test, language))
    return problems


def solve(
    pipe: Pipeline,
    problems: Sequence[Problem],
    *,
    samples: int = 1,
    ks: Sequence[int] = (1,),
    temperature: float = 0.8,
    seed: int = 0,
    limits: Limits = STANDARD,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 1,
    isolation: str | None = None,
    progress: bool = False,
) -> PassAtK:
    """Lets the model complete every problem `samples` times and RUNS what it writes (`lowbit.eval.sandbox`).

    The prompt is given as it is, without a chat template, and the completion ends before the next thing at the margin
    (`STOP`). One sample is the greedy completion, of `batch_size` problems at once; more are drawn with top-p 0.95 and
    `temperature`, and `seed` makes them repeatable on one machine. A completion has at most `max_new_tokens`, and no more than
    fit into the model's context beside the longest prompt of its batch. Programs run in `isolation`, by default in that of
    `choose_isolation()`. Raises ValueError for no problems, for problems in two languages, for k beyond the samples, for a
    prompt that leaves no room in the context, and on a machine without an isolation.
    """
    languages = {problem.language for problem in problems}
    if len(languages) > 1:
        raise ValueError(f"problems in one language are solved at once, got {' and '.join(sorted(languages))}")
    if not problems or not ks or not all(1 <= k <= samples for k in ks):
        raise ValueError(f"at least one problem, and k from 1 to the {samples} samples; got {len(problems)} and k {list(ks)}")
    isolation = choose_isolation() if isolation is None else isolation
    at_once = batch_size if samples == 1 else 1
    solved = []
    with Progress(total=len(problems), desc="programs", unit="problems", shown=progress) as bar:
        for number in range(0, len(problems), at_once):
            part = problems[number : number + at_once]
            room = min(max_new_tokens, *(_room(pipe, p, max_new_tokens) for p in part))
            arguments = {"stop": STOP[part[0].language], "max_new_tokens": room}
            if samples == 1:
                greedy = pipe([p.prompt for p in part], do_sample=False, **arguments)
                completions = [[response.generated_text] for response in greedy]
            else:
                drawn = {**arguments, "do_sample": True, "temperature": temperature, "top_p": 0.95}
                completions = [_draw(pipe, part[0].prompt, samples, seed + 1_000_003 * number, drawn)]
            for problem, written in zip(part, completions, strict=True):
                outcomes = [run_untrusted(problem.program(c), limits, problem.language, isolation) for c in written]
                reasons = [o.reason for o in outcomes if not o.passed]
                solved.append(Solved(problem.name, samples, sum(o.passed for o in outcomes), reasons))
            bar.update(len(part))
    estimates = {k: mean_of_items([pass_at_k(s.samples, s.passed, k) for s in solved]) for k in ks}
    return PassAtK({k: e[0] for k, e in estimates.items()}, {k: e[1] for k, e in estimates.items()}, solved)


def _room(pipe: Pipeline, problem: Problem, max_new_tokens: int) -> int:
    """Tokens that fit into the model's context after the problem's prompt."""
    room = getattr(pipe.model.config, "max_position_embeddings", None)
    left = max_new_tokens if room is None else room - len(pipe.tokenizer(problem.prompt).input_ids)
    if left < 1:
        raise ValueError(f"{problem.name}: its prompt fills the model's context of {room} tokens; leave it out")
    return left


def _draw(pipe: Pipeline, prompt: str, samples: int, seed: int, arguments: dict[str, Any]) -> list[str]:
    """`samples` completions of a prompt, `_AT_ONCE` at a time."""
    completions: list[str] = []
    while len(completions) < samples:
        count = min(_AT_ONCE, samples - len(completions))
        completions += [r.generated_text for r in pipe([prompt] * count, seed=seed + len(completions), **arguments)]
    return completions
