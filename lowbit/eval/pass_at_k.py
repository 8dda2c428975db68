"""pass@k: the probability that at least one of k generated programs passes a problem's tests."""

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
"""Stop strings by language. A completion ends at the next statement without indentation (Chen et al. 2021, section 3.1). In
JavaScript that is the function's closing brace, which `_END` appends again."""
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
        """Returns the program that runs the tests on a completion, which must end before a `STOP` string."""
        return f"{self.prompt}{completion}{_END[self.language]}\n\n{self.test}\n\ncheck({self.entry_point})\n"


@dataclass(frozen=True)
class Solved:
    """The result of one problem: how many of `samples` completions passed, and why the others failed."""

    problem: str
    samples: int
    passed: int
    reasons: list[str]


@dataclass(frozen=True)
class PassAtK:
    """pass@k by k, its standard errors by k, and the result of each problem.

    The standard error is deviation / sqrt(problems), None for one problem. It estimates how much the value would change with
    another sample of problems; it includes the noise of token sampling.
    """

    values: dict[int, float]
    standard_errors: dict[int, float | None]
    problems: list[Solved]

    def figures(self) -> list[Figure]:
        """Returns the figures for tables and plots."""
        return [
            Figure(f"pass@{k}", value, self.standard_errors[k], len(self.problems), "problems", "higher")
            for k, value in self.values.items()
        ]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k from `samples` completions of a problem, of which `passed` are correct.

    The estimate is 1 - C(samples - passed, k) / C(samples, k), the share of all subsets of k samples that have a correct one.
    It is computed without overflow as 1 - prod(1 - k / i for i in samples - passed + 1 .. samples) (Chen et al., Evaluating
    Large Language Models Trained on Code, 2021, equation 1). Raises ValueError unless 0 <= passed <= samples and 1 <= k <=
    samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"0 <= passed <= samples and 1 <= k <= samples, got samples {samples}, passed {passed}, k {k}")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """Returns the problems of a file in HumanEval's format. A record has task_id, prompt, entry_point, test, and optionally
    language (default Python), which must be the same in all records. Raises ValueError for an invalid record."""
    problems: list[Problem] = []
    for number, record in enumerate(read_records(path, limit), 1):
        name, prompt, entry, test = (
            text_field(record, key, f"{path}, record {number}") for key in ("task_id", "prompt", "entry_point", "test")
        )
        if not entry.isidentifier():
            raise ValueError(f"{path}, record {number}: entry_point must be the name of a function, got {entry!r}")
        language = record.get("language", PYTHON)
        if language not in LANGUAGES:
            raise ValueError(f"{path}, record {number}: language must be {' or '.join(LANGUAGES)}, got {language!r}")
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
    """Generates `samples` completions for every problem and RUNS them (`lowbit.eval.sandbox`).

    Prompts get no chat template; a completion ends before a `STOP` string. One sample is decoded greedily, in batches of
    `batch_size` problems; several are sampled with top-p 0.95, `temperature` and `seed`, reproducible on one machine. A
    completion has at most `max_new_tokens` and fits into the model's context. Programs run in `isolation`, by default that of
    `choose_isolation()`.

    Raises ValueError without problems, for problems in two languages, for k > samples, for a prompt that fills the context, and
    on a machine without an isolation.
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
    """Returns the number of tokens that fit into the model's context after the problem's prompt."""
    context = getattr(pipe.model.config, "max_position_embeddings", None)
    left = max_new_tokens if context is None else context - len(pipe.tokenizer(problem.prompt).input_ids)
    if left < 1:
        raise ValueError(f"{problem.name}: its prompt fills the model's context of {context} tokens; leave the problem out")
    return left


def _draw(pipe: Pipeline, prompt: str, samples: int, seed: int, arguments: dict[str, Any]) -> list[str]:
    """Returns `samples` sampled completions of a prompt, in batches of `_AT_ONCE`."""
    completions: list[str] = []
    while len(completions) < samples:
        count = min(_AT_ONCE, samples - len(completions))
        completions += [r.generated_text for r in pipe([prompt] * count, seed=seed + len(completions), **arguments)]
    return completions
