"""A model on two GPUs generates the tokens that it generates on one. Sums go over peer memory. If a rank ends, all requests
fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    ("scheme", "ends"), [("w4a16_g128", "kill"), ("none", "end"), ("w8a8", "end")], ids=["w4a16_g128", "16 bits", "w8a8"]
)
def test_two_gpus_beside_one(tmp_path, scheme, ends):
    begun = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.ranks_of_gpus", str(tmp_path), scheme, ends]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    took = time.monotonic() - begun
    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{took:.0f} s", found)
    assert any("sums by peer memory" in line for line in found["report"]), found["report"]
    assert found["peers"] <= 1.0 and found["same_twice"]
    if scheme != "w8a8":  # with 8-bit activations, each rank's part of a row of x has its own scale
        assert found["difference"] < 0.02 and found["logprobs"] < 0.1
        assert sum(found["alike"]) >= 0.8 * 24 * len(found["alike"])
    if ends == "kill":
        assert "rank 1: ended with signal SIGKILL" in found["failed"] and found["failed_s"] < 10
    else:
        assert done.returncode == 0, done.stderr[-2000:]
