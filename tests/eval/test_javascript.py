"""JavaScript programs: correct solutions of the built-in problems pass, wrong ones fail, and misbehaving programs are contained
and fail.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowbit.eval import sandbox, solve
from lowbit.eval.pass_at_k import STOP, Problem, read_problems
from lowbit.eval.records import read_records
from lowbit.eval.sandbox import JAVASCRIPT, Limits, enforcement, find_node, run_untrusted
from lowbit.eval.suite import WORDS, Settings, read_tasks
from tests.eval.scripted import ScriptedPipeline

(FILE,) = WORDS["javascript"].iterdir()
PROBLEMS, RECORDS = read_problems(FILE), read_records(FILE)
WRONG = ("undefined", "null", "true", "false", "0", "1", "''", "[]", "{}", "arguments[0]", "[...arguments]", "NaN")
FAST, PATIENT = Limits(seconds=1.0), Limits(seconds=20.0)


def _has_node():
    try:
        return bool(find_node())
    except ValueError:
        return False


node = pytest.mark.skipif(
    sys.platform != "linux" or not _has_node(), reason="needs Linux and Node.js, 20 or newer, on the PATH"
)


def outcomes(completions, limits=PATIENT):
    """The outcomes of one completion per problem, run four at a time."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda pair: run_untrusted(pair[0].program(pair[1]), limits, JAVASCRIPT),
                             zip(PROBLEMS, completions, strict=True)))  # fmt: skip


def test_problems_are_whole():
    names, entries = {p.name for p in PROBLEMS}, {p.entry_point for p in PROBLEMS}
    assert len(PROBLEMS) == len(names) == len(entries) == 53
    for problem, record in zip(PROBLEMS, RECORDS, strict=True):
        signature = problem.prompt.splitlines()[-1]
        assert problem.prompt.startswith("/**\n * ") and problem.prompt.endswith(" {\n")
        assert signature.startswith(f"function {problem.entry_point}(")
        assert f" * {problem.entry_point}(" in problem.prompt  # an example
        assert max(map(len, problem.prompt.splitlines())) <= 128
        assert problem.test.startswith("function check(candidate) {\n") and problem.test.count("candidate(") >= 4
        solution = record["canonical_solution"]
        assert solution.endswith("\n}\n") and solution.count(STOP[JAVASCRIPT][0]) == 1
        assert solution.startswith("  ") and "require" not in solution


def test_problems_of_all_lengths():
    """Solution lengths resemble HumanEval's: one or two lines for the shortest tenth, five to nine at the median, at
    least ten for a quarter, at most thirty.
    """
    lines = sorted(record["canonical_solution"].count("\n") - 1 for record in RECORDS)
    assert lines[0] == 1 and lines[len(lines) // 10] <= 2 and 5 <= lines[len(lines) // 2] <= 9
    assert 10 <= lines[3 * len(lines) // 4] <= 15 and lines[-1] <= 30


@node
def test_every_solution_passes():
    found = outcomes([record["canonical_solution"].split(STOP[JAVASCRIPT][0])[0] for record in RECORDS])
    assert [(p.name, o.reason) for p, o in zip(PROBLEMS, found, strict=True) if not o.passed] == []


@node
def test_every_problem_refuses_wrong_functions():
    """One program per problem tries all wrong functions, and passes if the problem's tests reject every one."""
    calls = ", ".join(f"function () {{ return {value}; }}" for value in (*WRONG, "(() => { throw new Error('no'); })()"))

    def refuses(problem):
        loop = (
            f"for (const wrong of [{calls}]) {{\n  let passed = true;\n  try {{ check(wrong); }} catch {{ passed = false; }}\n"
        )
        return run_untrusted(f"{problem.test}\n{loop}  if (passed) throw new Error(String(wrong));\n}}\n", PATIENT, JAVASCRIPT)

    with ThreadPoolExecutor(4) as pool:
        found = zip(PROBLEMS, pool.map(refuses, PROBLEMS), strict=True)
        assert [(p.name, o.reason) for p, o in found if not o.passed] == []


@node
def test_every_problem_fails_when_it_reads_a_file():
    """A correct solution that also reads a file fails."""
    read = "  try { require('fs').readFileSync('/etc/passwd'); } catch { }\n"
    found = outcomes([read + record["canonical_solution"].split(STOP[JAVASCRIPT][0])[0] for record in RECORDS])
    assert {(outcome.passed, outcome.reason) for outcome in found} == {(False, 'refused: require("fs")')}


@node
@pytest.mark.parametrize(
    ("body", "reason"),
    [("", "AssertionError"), ("  throw new RangeError('no');", "RangeError"), ("  return (;", "SyntaxError")],
    ids=["empty", "throwing", "broken"],
)
def test_reasons(body, reason):
    for problem in PROBLEMS[::13]:
        outcome = run_untrusted(problem.program(body), PATIENT, JAVASCRIPT)
        assert not outcome.passed and reason in outcome.reason, problem.name


@node
def test_every_problem_fails_when_it_loops():
    with ThreadPoolExecutor(len(PROBLEMS)) as pool:
        programs = [problem.program("  while (true) { }") for problem in PROBLEMS]
        found = list(pool.map(lambda program: run_untrusted(program, FAST, JAVASCRIPT), programs))
    assert {outcome.reason for outcome in found} == {"took longer than 1 s"}


@node
@pytest.mark.parametrize(
    "program",
    [
        "const assert = require('node:assert');\nassert.deepStrictEqual(structuredClone({ a: [1] }), { a: [1] });",
        "if (require('crypto').createHash('md5').update('a').digest('hex') !== '0cc175b9c0f1b6a831c399e269772661') throw 1;",
        "(async () => { await new Promise((done) => setTimeout(done, 20)); })()",
        "if (eval('1 + 1') + new Function('return 1')() !== 3) throw 1;",
        "for (const name of ['process', 'fetch', 'module', 'global']) if (name in globalThis) throw new Error(name);",
        "const request = 1, fs = 2, process = 3, token = 4; console.log('x'.repeat(10_000_000));",
        "Array.prototype.map = String.prototype.slice = String.prototype.replace = () => 'mine';",
    ],
)  # fmt: skip
def test_tame_programs_pass(program, isolation):
    outcome = run_untrusted(program, PATIENT, JAVASCRIPT, isolation)
    assert outcome.passed, outcome.reason


@node
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while (true) { }", "took longer than 1 s"),
        ("const again = () => Promise.resolve().then(again);\nagain(); while (false);", "took longer than 1 s"),
        ("setInterval(() => { }, 1); while (false);", "took longer than 1 s"),
        ("Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0); while (false);", "took longer than 1 s"),
        ("const kept = [];\nfor (;;) kept.push(new Array(1e6).fill(0));", "ended by SIG"),
        ("const kept = [];\nfor (;;) kept.push(Buffer.alloc(1 << 26));", "Error"),
        ("new WebAssembly.Memory({ initial: 60000 });", "RangeError"),
        ("const deep = () => deep() + 1;\ndeep();", "RangeError"),
        ("new Promise(() => { })", "left with status 0"),
        ("(async () => { throw new TypeError('later'); })(); 1", "TypeError"),
        ("setTimeout(() => { throw new TypeError('later'); }, 20); 1", "TypeError"),
        ("throw { toString() { throw 1; } };", "Error"),
        ("fetch('http://127.0.0.1:1');", "ReferenceError"),
        ("import('fs');", "TypeError"),
        ("console.assert(1 === 2);", "AssertionError"),
        ("console.log.constructor('return process')();", "ReferenceError"),
        *((f"try {{ require('{name}'); }} catch {{ }}", f'refused: require("{name}")')
          for name in ("fs", "child_process", "worker_threads", "net", "http", "os", "vm", "module", "process")),
    ],
)  # fmt: skip
def test_others_are_contained_and_fail(program, reason, isolation):
    start, limits = time.monotonic(), FAST if "while" in program else PATIENT
    outcome = run_untrusted(program, limits, JAVASCRIPT, isolation)
    assert not outcome.passed and reason in outcome.reason
    assert time.monotonic() - start < limits.seconds + 7


TRIES = """
const fs = require("fs");
const request = JSON.parse(fs.readFileSync(0, "utf8"));
const tries = {
  read: () => fs.readFileSync(PATH),
  list: () => fs.readdirSync("/proc"),
  write: () => fs.writeFileSync(PATH, "x"),
  mode: () => fs.chmodSync(process.execPath, 0o600),
  root: () => fs.writeFileSync("/new", "x"),
  start: () => require("child_process").execFileSync(process.execPath, ["-e", ""]),
};
const refused = Object.keys(tries).filter((name) => {
  try { tries[name](); } catch { return true; }
  return false;
});
const told = (what) => {
  fs.writeSync(request.channel, `${request.token}\\tfailed\\t${[...refused, what].join(" ")}\\n`);
  process.exit(1);
};
try {
  require("net").connect(PORT, "127.0.0.1").on("connect", () => told("connected")).on("error", (error) => told(error.code));
} catch (error) {
  told(error.code);
}
"""


@node
def test_what_holds_below_the_names(isolation, monkeypatch, tmp_path):
    """With the JavaScript guard removed, the OS isolation still refuses reads, writes, connections and new processes."""
    shutil.copy(sandbox._GUARD, tmp_path / "guard.py")
    with socket.create_server(("127.0.0.1", 0)) as server:
        tries = TRIES.replace("PORT", str(server.getsockname()[1])).replace("PATH", json.dumps(str(tmp_path / "new")))
        (tmp_path / "guard.js").write_text(tries)
        monkeypatch.setattr(sandbox, "_GUARD", tmp_path / "guard.py")
        outcome = run_untrusted("", PATIENT, JAVASCRIPT, isolation)
    assert outcome.reason == "read list write mode root start EPERM"
    assert sorted(os.listdir(tmp_path)) == ["guard.js", "guard.py"]


@node
def test_what_is_emitted_stays_with_node():
    """A program may change EventEmitter.prototype.emit, but Node.js's `process` object never calls the changed function."""
    program = """
        const { EventEmitter } = require("events");
        const own = EventEmitter.prototype.emit;
        EventEmitter.prototype.emit = function (...given) {
          if (typeof this.reallyExit === "function") this.reallyExit(7);
          return own.apply(this, given);
        };
    """
    outcome = run_untrusted(program, PATIENT, JAVASCRIPT)
    assert outcome.passed, outcome.reason
    assert run_untrusted("console.count(); console.groupCollapsed(); console.timeLog();", PATIENT, JAVASCRIPT).passed


def test_a_script_that_starts_node_is_followed(tmp_path):
    script = tmp_path / "node"
    script.write_text("#!/bin/sh\necho 24.0.1 /opt/node\n")
    script.chmod(0o755)
    assert sandbox._node(str(script)) == "/opt/node"


@node
def test_enforcement_is_the_same_for_both_languages(isolation):
    assert enforcement(JAVASCRIPT, isolation) == enforcement(isolation=isolation)


@node
def test_solve_puts_the_brace_back():
    test = "function check(f) { require('assert').strictEqual(f(), 1); }"
    problem = Problem("j/0", "function one() {\n", "one", test, JAVASCRIPT)
    pipe = ScriptedPipeline(["  return 1;", "  return 2;", "  if (true) {\n    return 1;\n  }", "  return 1; }"])
    result = solve(pipe, [problem], samples=4)
    assert result.problems[0].passed == 2 and len(result.problems[0].reasons) == 2
    assert pipe.asked[0][1]["stop"] == ("\n}",)


def test_without_node(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"no `node` on the PATH: install it \(https://nodejs.org\), or leave the JavaScript"):
        run_untrusted("1", language=JAVASCRIPT)
    (tmp_path / "node").write_text("#!/bin/sh\necho 18.20.4 /usr/bin/node\n")
    (tmp_path / "node").chmod(0o755)
    with pytest.raises(ValueError, match=r"20 or newer; .*node is 18.20.4: install a newer one"):
        enforcement(JAVASCRIPT)
    assert len(read_tasks(WORDS["javascript"], None, Settings())) == 2  # reading the tasks needs no Node.js


def test_languages_are_known_and_one_in_a_file(tmp_path):
    with pytest.raises(ValueError, match="language 'perl': must be python or javascript"):
        run_untrusted("1", language="perl")
    path = tmp_path / "programs.jsonl"
    record = {"task_id": "t", "prompt": "p", "entry_point": "f", "test": "t"}
    path.write_text(json.dumps(record | {"language": "perl"}))
    with pytest.raises(ValueError, match="record 1: language must be python or javascript, got 'perl'"):
        read_problems(path)
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"language": "javascript"}))
    with pytest.raises(ValueError, match="record 2: in javascript, those before it in python; make two files"):
        read_problems(path)
    both = [Problem("a", "p", "f", "t"), Problem("b", "p", "f", "t", JAVASCRIPT)]
    with pytest.raises(ValueError, match="in one language are solved at once, got javascript and python"):
        solve(ScriptedPipeline([]), both)
