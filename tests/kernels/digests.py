"""A pytest plugin that writes a digest of the machine code of every kernel that the tests compile, to detect changes:

    python -m pytest -p tests.kernels.digests --digests before.txt tests/kernels   # after the change: after.txt
    diff before.txt after.txt

One line for each compiled kernel: test, number of the kernel within the test, capability, digest, registers, bytes of stack and
shared memory. Kernel names and source lines are left out. ptxas may still reorder loads if source lines have moved (seen in
split-K, int3, 32 tokens). Runs in one process: no --numprocesses.
"""

from __future__ import annotations

import hashlib
import tempfile

from triton import knobs

from tests.kernels import sass


def digest(code: sass.Compiled) -> str:
    """Returns a digest of the instructions in order, with their addresses. Each kernel is disassembled alone, so that addresses
    start at 0."""
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
