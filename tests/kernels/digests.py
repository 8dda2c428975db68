"""A digest of the machine code of everything that tests compile, to hold while code moves. A plugin of pytest:

    python -m pytest -p tests.kernels.digests --digests before.txt tests/kernels   # then, after the move, again with after.txt
    diff before.txt after.txt

A line for each compiled kernel: test, number within it, capability, digest, registers, bytes of stack and of shared memory.
Names of kernels are left out, and so is which lines of source instructions come from: ptxas may order loads
otherwise where lines have moved (a split of K, int3, 32 tokens: the sums of other blocks). One process: no --numprocesses.
"""

from __future__ import annotations

import hashlib
import tempfile

from triton import knobs

from tests.kernels import sass


def digest(code: sass.Compiled) -> str:
    """Of the instructions in order, with their addresses: none is kept unread, so each kernel begins at 0."""
    return hashlib.sha256(code.text.encode()).hexdigest()[:16]


def pytest_addoption(parser):
    parser.addoption("--digests", help="file to write digests of compiled machine code to")


def pytest_configure(config):
    path = config.getoption("--digests")
    if path is None:
        return
    knobs.compilation.disable_line_info, knobs.cache.dir = True, tempfile.mkdtemp()
    config.compiled_digests, config.current_test, compile_one = [], "", sass._compile

    def compile_and_note(source_type, kernel, signature, constants, pointers, warps, capability, **options):
        code = compile_one(source_type, kernel, signature, constants, pointers, warps, capability, **options)
        number = sum(line.startswith(config.current_test + " ") for line in config.compiled_digests)
        size = f"{code.registers} registers, {code.stack_bytes} stack, {code.shared_bytes} shared"
        config.compiled_digests.append(f"{config.current_test} {number} sm_{capability} {digest(code)} {size}")
        return code

    sass._compile = compile_and_note


def pytest_runtest_setup(item):
    item.config.current_test = item.nodeid.split("/")[-2] + "/" + item.nodeid.split("/")[-1].replace(" ", "_")


def pytest_unconfigure(config):
    path = config.getoption("--digests")
    if path is not None:
        with open(path, "w") as file:
            file.writelines(sorted(line + "\n" for line in config.compiled_digests))
