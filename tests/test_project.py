"""The project's rules: layers import only lower layers, importing is cheap and has no side effects, long files and functions
give warnings.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import lowbit

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("lowbit", "benchmarks", "study") for path in (ROOT / folder).rglob("*.py"))


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "lowbit" and len(parts) > 1 and parts[1] in lowbit.LAYERS else None


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_import_only_earlier_ones(path):
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own is None:
        return
    for line, module in imports(path):
        other = layer_of(module)
        if other is not None:
            assert lowbit.LAYERS.index(other) <= lowbit.LAYERS.index(own), f"{path}:{line}: {own} imports {module}"


def test_the_package_imports_nothing_from_the_repository_around_it():
    """`benchmarks/`, `study/` and `tests/` are not in the wheel."""
    for path in SOURCES:
        if path.is_relative_to(ROOT / "lowbit"):
            outside = {module for _, module in imports(path) if module.split(".")[0] in ("benchmarks", "study", "tests")}
            assert not outside, f"{path} imports {sorted(outside)}"


def test_every_folder_and_file_is_a_layer():
    names = {p.stem for p in (ROOT / "lowbit").iterdir() if (p.is_dir() and any(p.glob("*.py"))) or p.suffix == ".py"}
    assert names - {"__init__", "__main__", "_version"} == set(lowbit.LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_style(path):
    """Checks rules of the house style that no linter has; long files and functions only give warnings."""
    text = path.read_text()
    tree = ast.parse(text)
    if text.count("\n") > 600:
        warnings.warn(f"{path} has more than 600 lines: look for the missing concept", stacklevel=1)
    assert ast.get_docstring(tree) or path.name == "_version.py", "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 80:
            warnings.warn(f"{path}:{node.lineno}: {node.name} has more than 80 lines", stacklevel=1)
    for node in public(tree):
        assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


def public(tree: ast.Module):
    """The public functions and classes of a module, and the methods of classes without a base class."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef) and not node.bases:
                for method in node.body:
                    plain = (
                        isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and not method.decorator_list
                    )
                    if plain and method.name not in ("block", "apply", "undo"):
                        yield method


def test_the_environment_decides_nothing():
    """Behaviour comes from arguments: no module reads environment variables, except folders.py for the user's cache."""
    for path in SOURCES:
        if path.name != "folders.py":
            assert "environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_import_is_clean():
    """Importing initialises no CUDA, prints nothing and gives no warning, with visible or hidden GPUs."""
    code = "import warnings; warnings.simplefilter('error', UserWarning); import lowbit, torch"
    code += "; assert not torch.cuda.is_initialized()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and not done.stdout, done.stderr
