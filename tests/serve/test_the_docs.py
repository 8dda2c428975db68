"""docs/serve.md lists every field, option, number and metric of the server."""

from __future__ import annotations

import re
from pathlib import Path

from lowbit.cli.serve import MOST_ON_A_CPU, MOST_ON_A_GPU
from lowbit.serve import limits
from lowbit.serve.schema import ChatCompletionRequest, CompletionRequest

TEXT = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
NAMES = set(re.findall(r"`([\w./-]+)`", TEXT))


def test_every_field_is_documented():
    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert fields <= NAMES, fields - NAMES


def test_every_metric_is_documented(free):
    with free.client() as client:
        page = client.get("/metrics").text
    kinds = re.findall(r"^# TYPE (\w+) (counter|gauge|histogram)$", page, re.MULTILINE)
    metrics = {name for name, _ in kinds if not name.endswith("_created")}
    assert metrics and metrics == {name for name in NAMES if name.startswith("lowbit_")}


def test_the_numbers():
    def row(start):
        (found,) = re.findall(rf"^\| {start}.*$", TEXT, re.MULTILINE)
        return found

    default = limits.Limits()
    assert f"| {MOST_ON_A_GPU}; {MOST_ON_A_CPU} on a CPU |" in row("texts computed") and default.max_concurrent == MOST_ON_A_GPU
    assert f"| {default.max_queue} |" in row("texts that wait") and default.max_body == 1 << 20
    assert f"| {default.grace_seconds:.0f} |" in row("seconds to finish")
    assert f"| {default.prompt_seconds:.0f} |" in row("seconds of template") and "1 GiB" in row("memory of template")
    assert default.prompt_bytes == 1 << 30 and f"{limits.KEEP_ALIVE_SECONDS} s" in row("idle connections")
    assert f"{limits.MOST_HEAD_BYTES >> 10} KiB, within {limits.HEAD_SECONDS:.0f} s" in row("head of")
    assert f"{limits.BODY_SECONDS:.0f} s" in row("body of") and f"{limits.STALL_SECONDS:.0f} s" in row("answers left")
    assert f"1 to {limits.MOST_CHOICES} texts" in row("`n`") and f"up to {limits.MOST_PROMPTS}," in row("`prompt`")
    assert f"up to {limits.MOST_STOPS}, of up to {limits.MOST_STOP_CHARACTERS}" in row("`stop`")
    assert f"up to {limits.MOST_BIASES:,}" in row("`logit_bias`") and f"up to {limits.MOST_TOOLS} functions" in row("`tools`")
    assert f"up to {limits.MOST_MESSAGES:,} turns" in row("`messages`")
