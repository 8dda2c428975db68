"""`python -m benchmarks measure`: the measurements and GPU tests behind the documentation's figures, by name.

Each part is one command with the seconds that it took or is expected to take on an H200 whose cache of kernels is empty, and a
limit after which it is ended. Parts that only check or judge quality run side by side, those that time run one after the other.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import commit
from lowbit.eval.results import write_json

RESULT = "lowbit measurements"
KILL_AFTER_S = 15
"""Seconds between the interrupt at a part's limit, after which programs say what they found, and the end of its processes."""
SHOWN = 12
"""Lines of a part's log that are printed when it ends."""


@dataclass(frozen=True)
class Part:
    """A command. In it {out} is the results' folder, {model} the folder of SmolLM2-135M-Instruct, {data} that of the study's
    texts. `alone`: it times, so nothing runs beside it. `gpus`: how many it needs."""

    name: str
    seconds: int
    command: str
    alone: bool = True
    gpus: int = 1

    def arguments(self, out: Path, model: Path | None, data: Path | None) -> list[str]:
        """Returns the command line. Raises ValueError if it needs a folder that is None."""
        given = {"out": out, "model": model, "data": data}
        for name, folder in given.items():
            if folder is None and f"{{{name}}}" in self.command:
                raise ValueError(f"{self.name} needs --{name} FOLDER")
        words = shlex.split(self.command)
        filled = [word.format(**given) for word in words]
        return [sys.executable, "-m", *filled]


def _tests(name: str, seconds: int, files: str, *options: str, alone: bool = False, gpus: int = 1) -> Part:
    """Returns the part of the GPU tests in `files` below tests/, without test_ and .py. Side by side each part has four
    processes."""
    paths = [
        str(Path("tests", folder, f"test_{name}.py")) for folder, _, name in (file.rpartition("/") for file in files.split())
    ]
    workers = () if alone else ("-n", "4", "--dist", "worksteal")
    words = ("pytest", "-m", "gpu", *workers, "-q", "-p", "no:cacheprovider", "-rfE", *paths, *options)
    return Part(f"tests-{name}", seconds, shlex.join(words), alone, gpus)


def _bench(command: str, name: str, seconds: int, options: str, gpus: int = 1) -> Part:
    """Returns a part of `python -m benchmarks <command>`, which writes <name>.json."""
    return Part(name, seconds, f"benchmarks {command} {options} --out {{out}}/{name}.json", gpus=gpus)


def _e2e(name: str, seconds: int, options: str, contexts: str = "1024") -> Part:
    return _bench("e2e", f"e2e-{name}", seconds, f"{options} --contexts {contexts}")


ALONE = "at_once or equal_bits or preempted"
"""Tests of one launch that need the whole GPU."""
STEP = "kernels/sm90/decode_step engine/one_launch"
QWEN = "--models Qwen3-30B-A3B --one-launch"
MIXTRAL = "--models Mixtral-8x7B"
RIVALS = "--rivals marlin,triton,wna16,humming"
LOWBIT_8_BITS = "lowbit:w6e3m2a16 lowbit:w8a8 lowbit:fp8_dynamic"

ONE_LAUNCH = (
    _tests("one-launch", 180, STEP, "-k", f"not ({ALONE})"),
    _tests("one-launch-alone", 60, STEP, "-k", ALONE, alone=True),
    _tests("real-model", 60, "engine/real_model"),
    _e2e("one-launch", 260, "--schemes w4a16_g128,w6e3m2a16,w8a16 --batches 1,2,4,8 --one-launch"),
    _e2e("one-launch-8192", 70, "--schemes w4a16_g128 --batches 1 --one-launch", "8192"),
    _e2e("one-launch-small", 90, "--models SmolLM2-135M --schemes w8a16,w4a16_g64 --batches 1,4 --one-launch"),
)

EXPERTS = (
    _tests(
        "experts", 300,
        "ops/experts ops/expert_gemm ops/scaled_expert_gemm ops/route nn/experts engine/experts kernels/elementwise/sum_slots "
        "kernels/elementwise/gather_slots kernels/elementwise/sum_norm kernels/elementwise/route",
    ),
    _e2e("qwen3-30b-a3b", 150, f"{QWEN} --schemes w4a16_g128 --batches 1,2,4,16,64"),
    _e2e("qwen3-30b-a3b-w6", 150, f"{QWEN} --schemes w6e3m2a16 --batches 1,4,16,64"),
    _e2e("qwen3-30b-a3b-w8", 150, f"{QWEN} --schemes w8a16 --batches 1,4,16,64"),
    _e2e("mixtral-8x7b", 150, f"{MIXTRAL} --schemes w4a16_g128 --batches 1,2,16 --one-launch"),
    _e2e("mixtral-8x7b-w6-w8", 200, f"{MIXTRAL} --schemes w6e3m2a16,w8a16 --batches 1,16"),
    _e2e("gpt-oss-20b", 100, "--models gpt-oss-20b --schemes none --batches 1,16"),
    _e2e("olmoe-1b-7b", 60, "--models OLMoE-1B-7B --schemes w4a16_g128 --batches 1,16"),
    _bench("experts", "experts-qwen3-30b-a3b", 200, f"--models Qwen3-30B-A3B --formats w4a16_g128 {RIVALS}"),
    _bench("experts", "experts-mixtral-8x7b", 200, f"--models Mixtral-8x7B --formats w4a16_g128 {RIVALS}"),
    _bench("experts", "experts-gpt-oss-20b", 150, f"--models gpt-oss-20b --formats w4e2m1a16_g32 {RIVALS}"),
    _bench("experts", "experts-olmoe-1b-7b", 150, f"--models OLMoE-1B-7B --formats w4a16_g128 {RIVALS}"),
)  # fmt: skip

KEYS_AND_VALUES = (
    _tests(
        "kv", 300,
        "engine/kv_gpu kernels/sm80/packed_attention kernels/elementwise/append kernels/elementwise/gather_kv "
        "benchmarks/tuning/attention",
    ),
    Part(
        "attention", 150,
        "benchmarks.tuning.attention --fa3 --kv int4 fp8 int8 16 --cases 1x1024 16x8192 64x1024 64x8192 16x32768 1x131072 "
        "--tiles 3 --out {out}/attention.json",
    ),
    _e2e("kv", 300, "--schemes w4a16_g128 --batches 64,16,1 --kv 16,int4,fp8,int8", "1024,8192,32768"),
    _e2e("kv-long", 230, "--schemes w4a16_g128 --batches 1 --kv 16,int4 --prompt 32768,131072", "32768,131072"),
    Part("study-kv", 600, "study kv {model} --device cuda --data {data} --contexts 512,2048,8192", alone=False),
    *(
        _bench(
            "serve", f"serve-kv-{kv}", 150,
            f"--parts streams --seconds 90 --streams 64 --prompt 4096 --output 1024 --no-sharegpt --kv {kv}",
        )
        for kv in ("16", "int4")
    ),
)  # fmt: skip

FEATURES = (
    _tests(
        "features", 200,
        "engine/lora_gpu engine/speculation_gpu kernels/sm80/lora_sums ops/lora kernels/elementwise/lora serve/on_a_gpu "
        "benchmarks/features",
    ),
    _tests("engine", 250, "engine/gpu"),
    _bench("features", "features-steps", 130, "--parts lora,verify,mixed"),
    _bench("features {model}", "features-requests", 100, "--parts grammar,guesses"),
)  # fmt: skip

NETWORKS = (
    _tests(
        "vision", 250,
        "vision/device kernels/sm80/depthwise kernels/sm80/depthwise_quads kernels/parts/pixel_words "
        "kernels/sm80/grouped_conv kernels/elementwise/concat kernels/elementwise/resize "
        "kernels/elementwise/code_table kernels/elementwise/pool kernels/sm90/conv_pair kernels/sm90/stem_pool "
        "kernels/sm90/conv_block kernels/sm90/conv_deep",
    ),
    _bench(
        "conv", "conv-efficientnet-lite0", 140,
        "--models efficientnet-lite0 --schemes w8a8 --peers cudnn,compile,reduce-overhead",
    ),
    _bench("conv", "conv-resnet50", 125, "--models resnet50 --batches 128 --fusions blocks,pairs,whole --peers none"),
)  # fmt: skip

TWO_GPUS = (
    _tests("ranks", 120, "engine/ranks_gpu kernels/elementwise/sum_ranks", alone=True, gpus=2),
    _bench(
        "tensor-parallel", "tensor-parallel-int4", 100,
        "--model Llama-2-70B --scheme w4a16_g128 --gpus 2 --batches 1,16", 2,
    ),
    _bench("vllm", "vllm-two-gpus", 270, f"--tensor-parallel 2 --impls {LOWBIT_8_BITS} vllm:fp8 --together 4 --limit 300", 2),
    _bench(
        "vllm", "vllm-two-gpus-70b", 430,
        "--model Llama-2-70B --layers 20 --tensor-parallel 2 --together 6 --limit 380 "
        f"--impls lowbit:w4a16_g128 {LOWBIT_8_BITS} vllm:int4 vllm:bf16", 2,
    ),
    _bench(
        "vllm", "vllm-two-gpus-experts", 240,
        "--model Qwen3-30B-A3B --expert-parallel --tensor-parallel 2 --together 2 --limit 300 "
        "--impls lowbit:w4a16_g128 vllm:bf16", 2,
    ),
)  # fmt: skip

WHOLE = (
    _tests("quantization", 150, "models/numerics models/learn models/distill models/calibrate"),
    Part(
        "study-learned", 500,
        "study learned {model} --device cuda --rival auto-round --data {data} --seeds 0 --ways plain,rotated+distilled "
        "--processes 4 --output {out}/learned.json", alone=False,
    ),
    Part(
        "quantizing-speed", 250,
        "study quantizing-speed --device cuda --rival auto-round --work {out} --output {out}/quantizing-speed.json",
    ),
    Part("tests-products", 500, "pytest -m gpu -n 8 --dist worksteal -q -p no:cacheprovider -rfE tests/ops tests/pack", False),
    _e2e("dense", 240, "--batches 1,4,16,64"),
    _bench("conv", "conv", 200, ""),
    _bench("serve", "serve", 450, "--each 18"),
    _bench("start", "start", 500, "--cores 16,2"),
    *(
        _bench("gemm", f"gemm-{model.lower()}", 550, f"--shapes {model} --m 1,2,4,8,16,32,64,128,256,1024,4096")
        for model in ("Llama-3-8B", "Qwen2.5-7B")
    ),
)  # fmt: skip

PARTS = (*ONE_LAUNCH, *EXPERTS, *KEYS_AND_VALUES, *FEATURES, *NETWORKS, *WHOLE, *TWO_GPUS)
"""All parts. Seconds are of one H200 (two for `gpus` 2), 2026-11-28 and -29; those of parts that have not run are estimates."""


def chosen(names: Sequence[str]) -> list[Part]:
    """Returns the parts by name, those side by side first. Raises ValueError for an unknown name."""
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"parts are {', '.join(known)}; got {', '.join(unknown)}")
    return sorted((known[name] for name in dict.fromkeys(names)), key=lambda part: part.alone)


@dataclass
class _Run:
    part: Part
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    limit: float
    interrupted: float = math.inf

    def status(self) -> str | None:
        """Returns how the part has ended; None while it runs. Interrupts it at its limit, and ends it if it goes on then."""
        now, code = time.monotonic(), self.process.poll()
        if code is None and now >= self.limit and self.interrupted == math.inf:
            self.interrupted = now
            self.process.send_signal(signal.SIGINT)
        if code is None and now < self.interrupted + KILL_AFTER_S:
            return None
        self.end()
        if self.interrupted < math.inf:
            return "interrupted at its limit"
        return "done" if code == 0 else f"ended with {code}"

    def end(self) -> None:
        """Ends what is left of the part, its children too: they would disturb the next timing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(
    parts: Iterable[Part],
    out: Path,
    seconds: float,
    model: Path | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Runs the parts and returns a row for each: its name, command, status, seconds, and log. A part is interrupted after
    twice its expected seconds, and when `seconds` are over for all; one for which fewer than its expected seconds are left
    is not started. Rows are written to measure.json in `out` after each part."""
    parts = list(parts)
    out.mkdir(parents=True, exist_ok=True)
    commands = {part.name: part.arguments(out, model, data) for part in parts}
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    document = {"result": RESULT, "date": datetime.date.today().isoformat(), "commit": commit(), "rows": rows}

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        write_json(out / "measure.json", document)
        say(f"{row['name']}: {row['status']}, {row['seconds']:.0f} s")

    running: list[_Run] = []
    try:
        for group in ([part for part in parts if not part.alone], *([part] for part in parts if part.alone)):
            for part in group:
                if end - time.monotonic() < part.seconds:
                    keep({"name": part.name, "status": "not started: too little time is left", "seconds": 0.0})
                    continue
                say(f"{part.name}: about {part.seconds} s, {out / part.name}.log")
                running.append(_begin(part, commands[part.name], out, end))
            while running:
                for run in list(running):
                    status = run.status()
                    if status is not None:
                        running.remove(run)
                        keep(_row(run, status, say))
                time.sleep(0.05)
    finally:
        for run in running:
            run.end()
    return rows


def _begin(part: Part, command: list[str], out: Path, end: float) -> _Run:
    """Starts a part in a session of its own. It can be interrupted also if this process ignores interrupts."""
    log, now = out / f"{part.name}.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    return _Run(part, command, process, log, now, min(now + 2 * part.seconds, end))


def _row(run: _Run, status: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the row of a part that has ended, and prints the end of its log."""
    for line in run.log.read_text(errors="replace").splitlines()[-SHOWN:]:
        say(f"    {line}")
    took = time.monotonic() - run.started
    return {"name": run.part.name, "status": status, "seconds": took, "command": shlex.join(run.command), "log": run.log.name}
