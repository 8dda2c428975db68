"""Costs and effects of importing the library. Each case runs in a new Python process, or in a fork of one that has not imported
lowbit.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.forks import forked
from tests.tiny import save_tiny


def python(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def beside(code, *arguments):
    """Runs code in a process that has imported Transformers' dependencies and its list of models, but no model and not
    `transformers.modeling_utils`, whose import `lowbit` hooks.
    """
    unmet = "import sys; assert 'lowbit' not in sys.modules and 'transformers.modeling_utils' not in sys.modules\n"
    imported = ("torch", "torch._dynamo", "torch.distributed.tensor", "transformers.models")
    return forked(unmet + code, *arguments, imported=imported).strip()


BROUGHT = """sorted(m for m in sys.modules if m.split('.')[0] in ('lowbit', 'torch', 'transformers', 'numpy', 'triton'))"""


def test_what_it_brings():
    """`import lowbit` imports no other package: torch takes over a second and Transformers twice that, too long for `lowbit
    --help`.
    """
    assert python(f"import sys, lowbit; print({BROUGHT})") == "['lowbit', 'lowbit._version']"


@pytest.mark.parametrize(
    "command", ["", "quantize", "convert", "eval", "inspect", "explain", "demo", "serve", "chat", "bench", "tune"]
)
def test_help_imports_no_layer(command):
    """Help pages and usage errors, run from the entry point, import no layer."""
    code = f"""
import sys
from lowbit.cli import main
for end in ("--help", "--no-such-option"):
    sys.argv = ["lowbit", *{command.split()}, end]
    try:
        main()
    except SystemExit as done:
        assert done.code == (0 if end == "--help" else 2), done.code
print({BROUGHT})
"""
    layers = {name.split(".")[1] for name in ast.literal_eval(python(code).splitlines()[-1]) if "." in name}
    assert layers == {"_version", "cli", "printable"}


def test_all_names_are_there():
    code = """
import lowbit, inspect
assert set(lowbit.__all__) <= set(dir(lowbit))
for name in lowbit.__all__:
    assert getattr(lowbit, name) is not None, name
assert "quantization_mode" in inspect.signature(lowbit.pipeline).parameters
assert lowbit.pipeline.Response is lowbit.Response
assert lowbit.formats.parse_scheme is lowbit.parse_scheme and lowbit.ops.gemm is lowbit.gemm
try:
    lowbit.no_such_name
except AttributeError as error:
    print(error)
"""
    assert beside(code) == "module 'lowbit' has no attribute 'no_such_name'"


def test_imported_again_transformers_still_loads():
    """lowbit may be imported again, as autoreloaders and test suites do."""
    for again in (
        "importlib.reload(lowbit)",
        "[sys.modules.pop(n) for n in list(sys.modules) if n.startswith('lowbit')]; import lowbit",
    ):
        code = f"import importlib, sys, lowbit; {again}; import transformers.modeling_utils as t; print(t.__name__)"
        assert beside(code) == "transformers.modeling_utils"


def test_threads_may_ask_for_names_at_once():
    code = """
import threading, lowbit
wrong = []
def ask(name):
    try:
        getattr(lowbit, name)
    except Exception as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=ask, args=(name,)) for name in lowbit.__all__ * 2]
[t.start() for t in threads], [t.join() for t in threads]
print(wrong)
"""
    assert beside(code) == "[]"


def test_names_are_found_inside_torch_compile():
    code = """
import torch
import lowbit
q = lowbit.QuantTensor(torch.full((4, 4), 128 + 1, dtype=torch.uint8), torch.ones(4, 1), None, lowbit.parse_scheme("w8a16"))
w = lowbit.pack_for(q, torch.float32)
run = torch.compile(lambda x: lowbit.gemm(x, w), backend="eager", fullgraph=True)
print(run(torch.ones(1, 4)).tolist())
"""
    assert beside(code) == "[[4.0, 4.0, 4.0, 4.0]]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from lowbit import quantize_checkpoint

    path = tmp_path_factory.mktemp("import")
    save_tiny(path / "fp16")
    quantize_checkpoint(path / "fp16", path / "int8", "w8a16")
    return path / "int8"


FIRST = [
    "import lowbit; from transformers import AutoModelForCausalLM",
    "from transformers import AutoModelForCausalLM; import lowbit",
    "import transformers.modeling_utils; import lowbit; from transformers import AutoModelForCausalLM",
    "import lowbit, importlib.util; importlib.util.find_spec('transformers.modeling_utils'); "
    "from transformers import AutoModelForCausalLM",
    "import lowbit; lowbit.pipeline; from transformers import AutoModelForCausalLM",
    "import lowbit; from transformers.models.llama import LlamaForCausalLM as AutoModelForCausalLM",
]


@pytest.mark.parametrize(("run", "imports"), [(python, FIRST[0]), *((beside, imports) for imports in FIRST)])
def test_a_checkpoint_loads_whatever_was_imported_first(folder, run, imports):
    code = f"""
import sys
{imports}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sum(type(m).__name__ == "QuantLinear" for m in model.modules()))
"""
    assert int(run(code, folder).splitlines()[-1]) > 0
