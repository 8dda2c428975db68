"""pass@k against all subsets of the samples, and problems from file to verdict."""

from __future__ import annotations

import gzip
import json
from itertools import combinations

import pytest

from lowbit.eval import pass_at_k, solve
from lowbit.eval.pass_at_k import STOP, Problem, read_problems
from lowbit.eval.sandbox import Limits
from tests.eval.scripted import ScriptedPipeline

ADD = Problem("t/0", "def add(a, b):\n", "add", "def check(f):\n    assert f(1, 2) == 3\n")
ONE = Problem("t/1", "def one():\n", "one", "def check(f):\n    assert f() == 1\n")


@pytest.mark.parametrize("n", range(1, 9))
def test_equals_counting_all_subsets(n):
    for passed in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            hits = sum(any(i < passed for i in subset) for subset in subsets)
            assert pass_at_k(n, passed, k) == pytest.approx(hits / len(subsets), abs=1e-12)


def test_large_numbers_do_not_overflow():
    assert pass_at_k(100_000, 1, 100) == pytest.approx(1e-3)
    assert pass_at_k(2000, 1000, 1000) == 1.0


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_counts(arguments):
    with pytest.raises(ValueError, match="0 <= passed <= samples"):
        pass_at_k(*arguments)


def test_solve_counts_what_passes():
    pipe = ScriptedPipeline(["    return a + b\n", "    return a - b\n", "    return b + a\n", "    while True: pass\n",
                             "    return 2\n", "    return 1\n", "    return (\n", "    exit(0)\n"])  # fmt: skip
    result = solve(pipe, [ADD, ONE], samples=4, ks=(1, 4), limits=Limits(seconds=4), max_new_tokens=9)
    assert [(s.problem, s.passed) for s in result.problems] == [("t/0", 2), ("t/1", 1)]
    assert result.values == {1: pytest.approx((2 / 4 + 1 / 4) / 2), 4: 1.0}
    assert result.standard_errors[1] == pytest.approx(0.125)
    assert "took longer" in result.problems[0].reasons[1] and "SyntaxError" in result.problems[1].reasons[1]
    (prompts, arguments), (_, second) = pipe.asked
    assert prompts == [ADD.prompt] * 4 and arguments["do_sample"] and arguments["stop"] == STOP["python"]
    assert arguments["max_new_tokens"] == 9 and arguments["seed"] != second["seed"]
    assert [f.metric for f in result.figures()] == ["pass@1", "pass@4"]


def test_one_sample_is_greedy_and_many_come_in_pieces():
    pipe = ScriptedPipeline(["    return a + b\n"])
    assert solve(pipe, [ADD]).values == {1: 1.0}
    assert pipe.asked[0][1]["do_sample"] is False and "temperature" not in pipe.asked[0][1]
    many = ScriptedPipeline(["    return a + b\n"] * 20)
    assert solve(many, [ADD], samples=20, ks=(1, 20)).problems[0].passed == 20
    assert [len(prompts) for prompts, _ in many.asked] == [16, 4]
    assert many.asked[0][1]["seed"] != many.asked[1][1]["seed"]


def test_greedy_problems_run_together():
    pipe = ScriptedPipeline(["    return a + b\n", "    return 2\n", "    return a + b\n"])
    result = solve(pipe, [ADD, ONE, ADD], batch_size=2)
    assert [(s.problem, s.passed) for s in result.problems] == [("t/0", 1), ("t/1", 0), ("t/0", 1)]
    assert [prompts for prompts, _ in pipe.asked] == [[ADD.prompt, ONE.prompt], [ADD.prompt]]
    crowded = ScriptedPipeline(["    return a + b\n"] * 2, context=100)
    solve(crowded, [ONE, ADD], batch_size=2)
    longest = max(len(crowded.tokenizer(p.prompt).input_ids) for p in (ADD, ONE))
    assert crowded.asked[0][1]["max_new_tokens"] == 100 - longest


def test_completions_fit_into_the_context():
    pipe = ScriptedPipeline(["    return a + b\n"], context=40)
    solve(pipe, [ADD])
    assert pipe.asked[0][1]["max_new_tokens"] == 40 - len(pipe.tokenizer(ADD.prompt).input_ids)
    with pytest.raises(ValueError, match="t/0: its prompt fills the model's context of 8"):
        solve(ScriptedPipeline([], context=8), [ADD])


def test_bad_calls():
    with pytest.raises(ValueError, match="at least one problem"):
        solve(ScriptedPipeline([]), [])
    with pytest.raises(ValueError, match=r"k from 1 to the 2 samples; got 1 and k \[3\]"):
        solve(ScriptedPipeline([]), [ADD], samples=2, ks=(3,))


def test_files_of_problems(tmp_path):
    record = {"task_id": "t/0", "prompt": ADD.prompt, "entry_point": "add", "test": ADD.test, "canonical_solution": ""}
    path = tmp_path / "problems.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(record) + "\n\n" + json.dumps(record | {"task_id": "t/1"}) + "\n")
    assert [p.name for p in read_problems(path)] == ["t/0", "t/1"]
    assert read_problems(path, 1) == [ADD]
    plain = tmp_path / "bad.jsonl"
    for bad, message in [
        ({"entry_point": "add()"}, "entry_point must be the name of a function"),
        ({"test": ""}, "'test' must be a non-empty string"),
        ({"prompt": 3}, "'prompt' must be a non-empty string, got 3"),
    ]:
        plain.write_text(json.dumps(record | bad))
        with pytest.raises(ValueError, match=message):
            read_problems(plain)
