"""The structure of lowbit/kernels/: kernels import parts but no other kernel, choosing one needs no Triton, and state is passed
in named bundles.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "lowbit" / "kernels"
FILES = sorted(path for path in KERNELS.glob("sm*/*.py") if path.name != "__init__.py")
PARTS = sorted(path for path in (KERNELS / "parts").glob("*.py") if path.name != "__init__.py")

MOST_TOGETHER = 6
"""Largest number of values that device code may pass as a tuple, by position."""


def name_of(path: Path) -> str:
    return str(path.relative_to(KERNELS))


def imported(path: Path) -> set[str]:
    """The modules that a file imports; `from a import b` counts as a.b too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def siblings(path: Path) -> list[str]:
    """The kernel files that a kernel file imports; tensor_map.py does not count as a kernel."""
    kernels = {f"lowbit.kernels.{name_of(file)[:-3].replace('/', '.')}" for file in FILES if file.name != "tensor_map.py"}
    return sorted(imported(path) & kernels)


def long_tuples(path: Path) -> list[str]:
    """The tuples in device functions with more than MOST_TOGETHER elements."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any(ast.unparse(d).split("(")[0].endswith(".jit") for d in function.decorator_list):
            continue
        tuples = [node for node in ast.walk(function) if isinstance(node, ast.Tuple) and len(node.elts) > MOST_TOGETHER]
        found += [f"{function.name}: {len(node.elts)} values in line {node.lineno}" for node in tuples]
    return found


def faults(path: Path) -> list[str]:
    """A file's violations of these rules."""
    found = [f"imports {module}" for module in siblings(path)] + long_tuples(path)
    if path in PARTS and not (ROOT / "tests" / "kernels" / "parts" / f"test_{path.name}").exists():
        found.append("has no file of tests")
    return found


@pytest.mark.parametrize("path", FILES + PARTS, ids=name_of)
def test_kernels_are_siblings_and_state_has_names(path):
    """No kernel imports another one, no tuple has more than MOST_TOGETHER elements, and every part has tests."""
    assert faults(path) == []


@pytest.mark.parametrize("path", PARTS, ids=name_of)
def test_parts_know_no_kernel(path):
    kernels = ("lowbit.kernels.sm80", "lowbit.kernels.sm90", "lowbit.kernels.elementwise", "lowbit.kernels.cpu")
    assert not [module for module in imported(path) if module.startswith(kernels)]


@pytest.mark.parametrize("package", ["choose", "reference", "cpu"])
def test_needs_no_triton(package):
    """These packages import without Triton, since laptops and CPU-only machines use them."""
    modules = [f"lowbit.kernels.{package}.{path.stem}" for path in (KERNELS / package).glob("*.py") if path.stem != "__init__"]
    assert modules
    code = "import sys, importlib; sys.modules['triton'] = None; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_two_kernels_are_half_alike():
    """Kernels of two architectures differ in main loop and data movement; common code belongs to parts."""
    lines = {path: [line.strip() for line in path.read_text().splitlines() if line.strip()] for path in FILES}
    for one, other in itertools.combinations(FILES, 2):
        ratio = difflib.SequenceMatcher(None, lines[one], lines[other], autojunk=False).ratio()
        assert ratio < 0.5, f"{name_of(one)} and {name_of(other)} are alike to {ratio:.2f}"


def test_the_checks_find_what_they_look_for(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import lowbit.kernels.sm90.large_m_gemm\nfrom lowbit.kernels.sm90 import scaled_gemm\n"
        "@gluon.jit(do_not_specialize=['M'])\ndef load(read):\n    a, b, c, d, e, f, g = read\n"
    )
    assert siblings(wrong) == ["lowbit.kernels.sm90.large_m_gemm", "lowbit.kernels.sm90.scaled_gemm"]
    assert long_tuples(wrong) == ["load: 7 values in line 5"]
