"""Code run by `forked` behaves as in a new Python process: its output is returned and its failures fail the test."""

from __future__ import annotations

import pytest

from tests.forks import forked


def test_what_it_prints():
    code = "import sys; print(__name__, sys.argv[1:], 'decimal' in sys.modules, 'json' in dir())"
    assert forked(code, "a b", 3) == "__main__ ['a b', '3'] False False\n"
    assert forked(code, imported=("decimal",)) == "__main__ [] True False\n"
    assert forked("import os; print(os.environ['LEVEL'])", LEVEL="3") == "3\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [("assert 1 == 2, 'one'", "AssertionError: one"), ("import sys; sys.exit(3)", "SystemExit: 3"), ("1 +", "SyntaxError"),
     ("import os; os.kill(os.getpid(), 9)", "status -9"), ("import signal; signal.raise_signal(14)", "status -14")],
)  # fmt: skip
def test_what_fails(code, said):
    with pytest.raises(AssertionError, match=said):
        forked(code)
    assert forked("print(1)") == "1\n"


def test_forks_know_nothing_of_each_other():
    forked("import sys, decimal; sys.left = 1; left = 2")
    assert forked("import sys; print(hasattr(sys, 'left'), 'left' in dir(), 'decimal' in sys.modules)") == "False False False\n"
