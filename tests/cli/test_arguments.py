"""Every command checks its arguments before it imports torch, and a near miss gets a suggestion."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import typer

from benchmarks import cli as benchmarks
from lowbit.cli import commands
from lowbit.formats import GRAMMAR, parse_scheme
from lowbit.formats.scheme import _METHODS, _NEAR_MISSES
from lowbit.methods import METHODS
from tests.forks import forked

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
from lowbit.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["lowbit", *line.split("\\t")]
    try:
        main()
    except SystemExit as done:
        print(done.code, flush=True)
"""
MISTAKES = {
    "quantize nothing out": "nothing: no such folder",
    "quantize . out": "config.json: missing",
    "quantize . out --scheme int4": "did you mean 'w4a16_g128'?",
    "quantize . out --method gptq --iterations 4": "--iterations belongs to --method learned",
    "quantize . out --distill 4": "--distill belongs to --method learned, not to rtn",
    "quantize . out --mix w3a16_g64,nf4 --bits 4": "did you mean 'w4a16_g64' (lowbit has no NF4)?",
    "quantize . out --device gpu": "--device 'gpu': not a device; give cpu",
    "quantize . out --method gptq --calibration nothing.txt": "nothing.txt: no such file",
    "convert nothing out": "nothing: no such folder or file",
    "generate nothing x": "nothing: no such folder",
    "generate . x --scheme Q4_K_M": "did you mean 'w4a16_g32_fz'?",
    "generate . x --kv int3": "such as int4-plain; got 'int3'",
    "generate . x --lora a": "--lora 'a': expected NAME=FOLDER",
    "generate . x --lora a=nothing": "nothing is no folder",
    "generate . x --lora a=. --lora b=.": "say which computes, --adapter a",
    "generate . x --lora a=. --adapter b": "no --lora has this name",
    "serve . --lora a=. --lora a=.": "two adapters are named 'a'",
    "serve nothing": "nothing: no such folder",
    "serve . --kv k4": "got 'k4'",
    "serve . --device tpu": "--device 'tpu': not a device; give cpu",
    "run nothing": "nothing: no such folder",
    "chat . --scheme w4": "did you mean 'w4a16_g128'?",
    "run http://127.0.0.1:1 --device cpu": "--device does not apply to a server",
    "run http://127.0.0.1:1 --kv int4": "--kv does not apply to a server",
    "chat . --kv fp4": "got 'fp4'",
    "run http://127.0.0.1:1 --speculate 3": "--speculate does not apply to a server",
    "run http://127.0.0.1:1 --draft x": "--draft does not apply to a server",
    "eval nothing": "nothing: no such folder",
    "eval . --text nothing.txt": "nothing.txt: no such file",
    "eval . --kv nf4": "got 'nf4'",
    "inspect nothing": "nothing: no such folder",
    "explain nothing": "nothing: no such folder",
    "recommend nothing --budget-gb 4": "nothing: no such folder",
    "recommend nothing --budget-gb 4 --kv 4": "got '4'",
    "recommend nothing --budget-gb nan": "--budget-gb nan: must be a finite number above 0",
    "tune . --scheme w4a16_g64z": "did you mean 'w4a16_g64_z'?",
    "demo --model nothing": "nothing: no such folder",
    "demo --data .": "--data applies only to --vision",
    "demo imagenet": "lowbit demo --vision imagenet",
    "demo --vision cifar": "the networks fashion, imagenet, imagenet-lite1 and imagenet-lite2, got",
    "bench x --schemes w4a16_g128,int4": "did you mean 'w4a16_g128'?",
    "bench x --schemes none,fp6": "did you mean 'w6e3m2a16'?",
    "bench nothing": "nothing: no such folder",
    "bench nothing --kv int5": "got 'int5'",
}


def test_mistakes_need_no_torch(tmp_path):
    """Each mistake gives one line and exit code 1, in a Python that cannot import torch."""
    lines = "\n".join("\t".join(mistake.split()) for mistake in (*MISTAKES, "schemes"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=lines, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^\d+$", done.stdout, re.MULTILINE)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert codes == ["1"] * len(MISTAKES) + ["0"] and len(errors) == len(MISTAKES)
    for (mistake, message), error in zip(MISTAKES.items(), errors, strict=True):
        assert message in error, (mistake, error)
    assert GRAMMAR in done.stdout and "w4a16 means groups of 128; w4a16_pc has one scale per channel" in done.stdout


def every_command():
    for app in (commands.app, benchmarks.app):
        for command in app.registered_commands:
            assert command.callback is not None
            yield inspect.unwrap(command.callback)


def test_every_command_loads_the_layers_before_it_imports_one():
    """Every command except `schemes` and `vllm` calls load_layers. Modules imported before it do not import torch."""
    found = {}
    for command in every_command():
        source = inspect.getsource(command)
        found[command.__name__] = "load_layers(" in source
        imports = re.findall(r"^    from (lowbit\.\S+) import", source[: source.find("    load_layers(")], re.MULTILINE)
        if found[command.__name__]:
            assert set(imports) <= {"lowbit.formats", "lowbit.methods", "lowbit.sources"}, command.__name__
    assert [name for name, loads in found.items() if not loads] == ["schemes", "vllm"] and len(found) > 20


def test_every_command_that_computes_takes_a_device():
    """All of them have the same option --device, whose default is a GPU if there is one."""
    command = typer.main.get_command(commands.app)
    taking = {"quantize", "generate", "serve", "run", "chat", "eval", "inspect", "bench"}
    for name, each in command.commands.items():  # type: ignore[attr-defined]
        devices = [option for option in each.params if option.name == "device"]
        assert bool(devices) == (name in taking), name
        assert all(option.default is None and "a GPU if there is one" in option.help for option in devices)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("int4", "'w4a16_g128'"),
        ("INT-4", "'w4a16_g128'"),
        ("nf4", "'w4a16_g64' (lowbit has no NF4)"),
        ("Q4_K_M", "'w4a16_g32_fz'"),
        ("q4_0", "'w4a16_g32'"),
        ("Q6_K", "'w6a16_g16'"),
        ("q8_0", "'w8a16_g32'"),
        ("w4a16g64", "'w4a16_g64'"),
        ("w4a16_g_64", "'w4a16_g64'"),
        ("w4-g128", "'w4a16_g128'"),
        ("mxfp4", "'w4e2m1a16_g32'"),
        ("w6e3m2", "'w6e3m2a16'"),
    ],
)
def test_did_you_mean(name, meant):
    with pytest.raises(ValueError, match="unknown scheme") as error:
        parse_scheme(name)
    assert f"did you mean {meant}?" in str(error.value)
    parse_scheme(meant.split("'")[1])


def test_what_is_no_scheme_at_all():
    assert tuple(METHODS) == _METHODS
    for method in METHODS:
        with pytest.raises(ValueError, match=f"{method} is a method"):
            parse_scheme(method)
    with pytest.raises(ValueError, match="unknown scheme 'foo'; the grammar is"):
        parse_scheme("foo")
    with pytest.raises(ValueError, match=r"a scheme is a name such as 'w4a16_g128', got 4"):
        parse_scheme(4)  # type: ignore[arg-type]
    for scheme in _NEAR_MISSES.values():
        parse_scheme(scheme)


def test_one_meaning_of_w4a16():
    """w4a16 means groups of 128, in upper or lower case and in every reader. Per-channel scales have their own name,
    w4a16_pc.
    """
    assert parse_scheme("w4a16").name == parse_scheme("W4A16").name == "w4a16_g128"
    assert parse_scheme("w4a16_pc").name == "w4a16_pc" and parse_scheme("w8a16").name == "w8a16"
    with pytest.raises(ValueError, match="w4a16 means groups of 128; w4a16_pc has one scale per channel"):
        parse_scheme("foo")


def test_schemes_need_no_torch():
    code = "import sys, lowbit.methods, lowbit.sources; from lowbit.formats import parse_scheme; "
    assert forked(code + "print(parse_scheme('W4A16'), 'torch' in sys.modules)").strip() == "w4a16_g128 False"
