"""Figures of README and docs that name a result file are those of the file.

A claim is a page, a file and the text that the file's figures give: whole rows of tables, or the words around a figure. A link
to a result file on a page without a claim fails, so a new figure needs a claim here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import activations_report, choice_report, report
from lowbit.kernels.choose.decode_step import FASTER
from lowbit.vision.evaluate import Figure
from study import experts

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    "docs/internals/mechanisms.md": ("", "tests/benchmarks/mechanisms/test_page.py"),
    "docs/internals/study.md": ("study/upcycle/", "tests/study/test_page.py"),
    "docs/internals/study-kv.md": ("", "tests/study/test_kv.py"),
}
"""Page -> beginning of the names of files whose figures another test reads, and that test."""
NO_FIGURES = ("docs/internals/checklist.md", "docs/log/")
"""The checklist links to files as a whole; entries of the log are history."""

Document = dict[str, Any]
Claim = Callable[[Document], Iterator[str]]
CLAIMS: dict[tuple[str, str], list[Claim]] = {}


def claims(page: str, file: str) -> Callable[[Claim], Claim]:
    """Registers the text that a page takes from a file."""

    def register(claim: Claim) -> Claim:
        CLAIMS.setdefault((page, file), []).append(claim)
        return claim

    return register


@functools.cache
def document(file: str) -> Document:
    return json.loads((RESULTS / file).read_text())


def cells(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"


def span(values: list[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


# ---- steps of a decode

E2E = "h200/2026-11-23-e2e.json"
SCHEMES = ("w4a16_g128", "w6e3m2a16", "w8a16")


def step(found: Document, scheme: str | None, context: int, batch: int) -> Document:
    (row,) = (r for r in found["rows"] if (r["scheme"], r["context"], r["batch"]) == (scheme, context, batch) and faster(r))
    return row


def faster(row: Document) -> bool:
    """16 bits are the faster of two libraries' products, of which a row states both times."""
    return row["error"] is None and row["ms_per_token"] <= row["bf16_ms_per_token"]


@claims("README.md", E2E)
def many_users(found: Document) -> Iterator[str]:
    wide, int4 = (step(found, scheme, 8192, 64)["ms_per_token"] for scheme in (None, "w4a16_g128"))
    yield f"4 bits are then {wide / int4:.2f} times as fast"


# ---- steps in one launch

ONE_LAUNCH, ONE_LAUNCH_EXPERTS = (f"h200/2026-11-29-e2e-one-launch{name}.json" for name in ("", "-qwen3-30b-a3b"))


def in_one_launch(found: Document, scheme: str | None, batch: int, impl: str = "lowbit one launch") -> Document:
    """Returns the row of a step at a context of 1,024 tokens and 16-bit keys and values; of launches with impl lowbit."""
    rows = (row for row in found["rows"] if row["kv_dtype"] in ("float16", "bfloat16"))
    (row,) = (r for r in rows if (r["scheme"], r["context"], r["batch"], r["impl"]) == (scheme, 1024, batch, impl))
    return row


def sixteen_bits(found: Document, batch: int) -> Document:
    return in_one_launch(found, None, batch, "lowbit")


for file, shape in ((ONE_LAUNCH, "Llama-3-8B"), (ONE_LAUNCH_EXPERTS, "Qwen3-30B-A3B, a [mixture of experts](docs/experts.md)")):

    @claims("README.md", file)
    def why_fewer_bits(found: Document, shape: str = shape) -> Iterator[str]:
        wide, int4 = sixteen_bits(found, 1), in_one_launch(found, "w4a16_g128", 1)
        speeds = (f"{1e3 / row['ms_per_token']:.0f}" for row in (wide, int4))
        ratio, size = wide["ms_per_token"] / int4["ms_per_token"], int4["weight_bytes"] / wide["weight_bytes"]
        yield cells(shape, *speeds, f"{ratio:.1f}", f"{size:.2f}")


@claims("docs/generate.md", ONE_LAUNCH)
def one_user_in_one_launch(found: Document) -> Iterator[str]:
    wide = sixteen_bits(found, 1)["ms_per_token"]
    int4, six = (in_one_launch(found, scheme, 1)["ms_per_token"] for scheme in ("w4a16_g128", "w6e3m2a16"))
    yield f"{int4:.2f} ms in `w4a16_g128`, {wide / int4:.2f} times as fast as 16 bits"
    yield f"{six:.2f} ms in `w6e3m2a16`, {wide / six:.2f} times"


@claims("docs/internals/decode-step.md", ONE_LAUNCH)
@claims("docs/internals/decode-step.md", ONE_LAUNCH_EXPERTS)
def one_launch_and_launches(found: Document) -> Iterator[str]:
    """Bold is what engines choose, by `FASTER`; there is no measurement of 8 tokens of experts."""
    model = found["rows"][0]["model"]
    for scheme in dict.fromkeys(row["scheme"] for row in found["rows"] if row["impl"] == "lowbit one launch"):
        texts = []
        for batch in dict.fromkeys(row["batch"] for row in found["rows"]):
            one, several = (in_one_launch(found, scheme, batch, impl) for impl in ("lowbit one launch", "lowbit"))
            text = f"{one['ms_per_token']:.3f} / {several['ms_per_token']:.3f}"
            bits = {"w4a16_g128": 4, "w6e3m2a16": 6}.get(scheme)
            experts = "experts_hit" in one and one["experts_hit"] is not None
            chosen = any((row.tokens, row.form.bits, row.experts) == (batch, bits, experts) for row in FASTER)
            texts.append(f"**{text}**" if chosen else text)
        yield f"| {model}, {f'`{scheme}`' if scheme else '16 bits'} {cells(*texts)}"


@claims("docs/generate.md", E2E)
def steps_for_users(found: Document) -> Iterator[str]:
    for context, batch in ((1024, 1), (1024, 16), (1024, 64), (8192, 1), (8192, 64)):
        wide = step(found, None, context, batch)["ms_per_token"]
        times = [step(found, scheme, context, batch)["ms_per_token"] for scheme in SCHEMES]
        factors = [text for ms in times for text in (f"{ms:.2f}", f"{wide / ms:.2f}x")]
        yield cells(f"{context:,}", batch, f"{wide:.2f}", *factors)
    yield from prompts(found)


def prompts(found: Document) -> Iterator[str]:
    other = step(found, None, 1024, 1)["other_ms_per_token"]
    yield f"{other:.2f} ms at one user"
    low = [row for row in found["rows"] if row["scheme"] and row["prefill_tok_s"]]
    yield f"{span([1024e3 / row['prefill_tok_s'] for row in low], '.1f')} ms"


@claims("docs/internals/engine.md", E2E)
def steps_with_limits(found: Document) -> Iterator[str]:
    def share(row: Document) -> str:
        return f"{row['ms_per_token']:.2f} ({100 * row['limit_ms'] / row['ms_per_token']:.0f} %)"

    for context in (256, 1024, 8192):
        for batch in (1, 4, 16, 64):
            wide = step(found, None, context, batch)
            rows = [step(found, scheme, context, batch) for scheme in SCHEMES]
            texts = [text for row in rows for text in (share(row), f"{wide['ms_per_token'] / row['ms_per_token']:.2f}x")]
            yield cells(f"{context:,}", batch, share(wide), *texts) if batch == 1 else f"| {cells(batch, share(wide), *texts)}"
    yield f"({found['read_bytes_per_s'] / 1e12:.2f} TB/s)"
    yield from prompts(found)
    one, sixteen = step(found, None, 1024, 1), step(found, None, 1024, 16)
    int4 = step(found, "w4a16_g128", 1024, 1)["ms_per_token"]
    yield f"int4 would be {one['other_ms_per_token'] / int4:.2f} times as fast"
    yield f"and {sixteen['other_ms_per_token']:.2f} at 16 users"
    low = [row["prefill_products"] for row in found["rows"] if row["scheme"] and row["prefill_products"]]
    yield f"{100 * min(low):.0f} to {100 * max(low):.0f} % of it in products (16 bits: {1024e3 / one['prefill_tok_s']:.1f} ms)"


def shape_claim(name: str, model: str, first: str) -> None:
    file = f"h200/2026-11-23-e2e-{name}.json"

    @claims("docs/internals/engine.md", file)
    def steps_of_a_shape(found: Document) -> Iterator[str]:
        link = f"{model} ([results](../../benchmarks/results/{file})){first}"
        for row in (row for row in found["rows"] if row["scheme"] == "w6e3m2a16" and row["context"] == 1024):
            ours = f"{row['ms_per_token']:.2f} ({100 * row['limit_ms'] / row['ms_per_token']:.0f} %)"
            if (wide_ms := row["bf16_ms_per_token"]) is None:
                yield f"| {cells(row['batch'], 'does not fit', ours, '').replace('|  |', '| |')}"
                continue
            (wide,) = (
                r
                for r in found["rows"]
                if r["scheme"] is None and (r["context"], r["batch"]) == (1024, row["batch"]) and faster(r)
            )
            of_wide = f"{wide_ms:.2f} ({100 * wide['limit_ms'] / wide_ms:.0f} %)"
            text = cells(row["batch"], of_wide, ours, f"{wide_ms / row['ms_per_token']:.2f}x")
            yield f"| {link} {text}" if row["batch"] == 1 else f"| {text}"


shape_claim("llama-2-13b", "Llama-2-13B", "")
shape_claim("opt-30b", "OPT-30B", ", 16 bits by cuBLAS")
shape_claim("llama-2-70b", "Llama-2-70B", "")


@claims("docs/experts.md", ONE_LAUNCH_EXPERTS)
def steps_with_experts_in_one_launch(found: Document) -> Iterator[str]:
    for batch in (1, 2, 4):
        ours, wide = in_one_launch(found, "w4a16_g128", batch)["ms_per_token"], sixteen_bits(found, batch)["ms_per_token"]
        speeds = (f"{1e3 * batch / ms:,.0f}" for ms in (ours, wide))
        yield cells("Qwen3-30B-A3B", batch, f"{ours:.2f}", *speeds, f"{wide / ours:.2f}")
    launches = [in_one_launch(found, "w4a16_g128", batch, "lowbit")["ms_per_token"] for batch in (1, 2, 4)]
    yield "by launches {:.2f}, {:.2f} and {:.2f} ms".format(*launches)


EXPERT_STEPS = {
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", "w4a16_g128", (16, 64)),
    "mixtral-8x7b": ("Mixtral-8x7B", "w4a16_g128", (1, 16)),
    "gpt-oss-20b": ("gpt-oss-20b, its own MXFP4", "w4e2m1a16_g32", (1, 16)),
}

for name, shown in EXPERT_STEPS.items():

    @claims("docs/experts.md", f"h200/2026-11-28-e2e-{name}.json")
    def steps_with_experts(found: Document, shown: tuple[str, str, tuple[int, ...]] = shown) -> Iterator[str]:
        model, scheme, batches = shown
        for batch in batches:
            ours, wide = (step(found, of, 1024, batch)["ms_per_token"] for of in (scheme, None))
            speeds = (f"{1e3 * batch / ms:,.0f}" for ms in (ours, wide))
            yield cells(model, batch, f"{ours:.2f}", *speeds, f"{wide / ours:.2f}")


@claims("docs/experts.md", "h200/2026-11-28-e2e-qwen3-30b-a3b.json")
def steps_with_experts_in_six_bits(found: Document) -> Iterator[str]:
    one, many = (step(found, "w6e3m2a16", 1024, batch)["ms_per_token"] for batch in (1, 64))
    yield f"In `w6e3m2a16` Qwen3-30B-A3B takes {one:.2f} ms for one user and {many:.2f} for 64"


@claims("docs/experts.md", "h200/2026-11-28-experts.json")
def blocks_of_experts(found: Document) -> Iterator[str]:
    def us(model: str, impl: str) -> list[float]:
        rows = {row["tokens"]: row["us"] for row in found["rows"] if (row["model"], row["impl"]) == (model, impl)}
        return [rows[tokens] for tokens in (1, 4, 16, 64)]

    ours, marlin, torch16 = (us("Qwen3-30B-A3B", impl) for impl in ("lowbit", "vllm-marlin", "torch16"))
    yield f"take {ours[0]:.0f} to {ours[-1]:.0f} us for 1 to 64 tokens in int4"
    ratios, wide = ([b / a for a, b in zip(ours, other, strict=True)] for other in (marlin, torch16))
    yield f"Marlin experts take {span(ratios, '.1f')} times as long"
    yield f"grouped product in 16 bits {span(wide, '.0f')} times"
    ours, marlin = (us("Mixtral-8x7B", impl) for impl in ("lowbit", "vllm-marlin"))
    ratios = [b / a for a, b in zip(ours, marlin, strict=True)]
    yield f"Mixtral-8x7B's {ours[0]:.0f} to {ours[-1]:.0f} us, Marlin {span(ratios, '.1f')} times as long"


FEATURES = "h200/2026-11-29-features-steps.json"


def features(found: Document, part: str) -> list[Document]:
    rows = [row for row in found["rows"] if row["part"] == part]
    assert rows and all(row["error"] is None for row in rows)
    return rows


@claims("docs/lora.md", FEATURES)
def steps_with_adapters(found: Document) -> Iterator[str]:
    rows = features(found, "lora")
    assert [row["rows"] for row in rows] == [1, 4, 16, 64]
    *first, last = (f"{row['launches_ratio']:.2f}" for row in rows)
    yield f"a step on an H200 takes {', '.join(first)} and {last} times as long at 1, 4, 16 and 64 rows"
    yield f"adapters take {rows[0]['ratio']:.2f} times as long as that"


@claims("docs/internals/engine.md", FEATURES)
def features_of_the_engine(found: Document) -> Iterator[str]:
    ratios = [row["launches_ratio"] for row in features(found, "lora")]
    yield f"A step of 1 to 64 rows takes {span(ratios)} times as long with rank 16 in all layers"
    apart, mixed = features(found, "mixed")
    median, most = (f"{mixed[key]:.1f}" for key in ("median_ms", "p99_ms"))
    yield f"the time between tokens is {median} ms (median) and {most} (99 %) at 95 % of the load"
    yield f"prompts between steps made it {apart['median_ms']:.1f} and {apart['p99_ms']:.1f}"
    yield f"the throughput is {mixed['tokens_per_s']:,.0f} tokens/s for {apart['tokens_per_s']:,.0f}"


@claims("docs/serve.md", FEATURES)
def prompts_within_steps(found: Document) -> Iterator[str]:
    apart, mixed = features(found, "mixed")
    ours, other = (f"{row['p99_ms']:.1f}" for row in (mixed, apart))
    ratio = mixed["tokens_per_s"] / apart["tokens_per_s"]
    yield f"{ours} ms at the 99th percentile between tokens for {other}, throughput times {ratio:.2f}"


@claims("docs/lora.md", "h200/2026-11-28-features-again.json")
def steps_with_two_launches_a_product(found: Document) -> Iterator[str]:
    ratios = [row["ratio"] for row in features(found, "lora")]
    yield f"Two launches a product had made a step {span(ratios)} times as long"


@claims("docs/speculate.md", FEATURES)
def verified_steps(found: Document) -> Iterator[str]:
    rows = features(found, "verify")
    assert [row["rows"] for row in rows] == [2, 4, 8]
    launches, own = ([f"{row[key]:.2f}" for row in rows] for key in ("launches_ratio", "ratio"))
    yield f"verifies 2, 4 or 8 tokens takes {launches[0]}, {launches[1]} or {launches[2]} times a plain step by launches"
    yield f"{own[0]}, {own[1]} or {own[2]} times the engine's own plain step of one token, which is one launch"


@claims("docs/speculate.md", "h200/2026-11-28-features-requests.json")
def guesses_of_a_small_model(found: Document) -> Iterator[str]:
    ratios = {row["what"]: f"{row['ratio']:.2f}" for row in found["rows"] if row["part"] == "guesses"}
    story = f"a story that repeats itself {ratios['prose']}"
    yield f"its summary was {ratios['summary']} times as fast, code {ratios['code']}, and {story}"


@claims("docs/kv.md", "h200/2026-11-28-e2e-kv.json")
def steps_by_format_of_keys_and_values(found: Document) -> Iterator[str]:
    for batch, context in ((64, 8192), (16, 32768), (64, 1024), (1, 8192), (1, 32768)):
        rows = {
            row["kv_dtype"]: row
            for row in found["rows"]
            if row["scheme"] and (row["batch"], row["context"]) == (batch, context)
        }
        times = (rows[name]["ms_per_token"] for name in ("float16", "fp8", "int8", "int4"))
        yield cells(f"{batch} x {context:,}", *(f"{ms:.2f}" for ms in times))


@claims("docs/kv.md", "h200/2026-11-29-e2e-kv-1x1024.json")
def one_user_by_format_of_keys_and_values(found: Document) -> Iterator[str]:
    one, several = (in_one_launch(found, "w4a16_g128", 1, impl)["ms_per_token"] for impl in ("lowbit one launch", "lowbit"))
    packed = {row["kv_dtype"]: row["ms_per_token"] for row in found["rows"] if row["kv_dtype"] in ("fp8", "int8", "int4")}
    yield cells("1 x 1,024", *(f"{ms:.2f}" for ms in (one, packed["fp8"], packed["int8"], packed["int4"])))
    slower = [100 * (ms / one - 1) for ms in packed.values()]
    yield f"fewer bits are {min(slower):.0f} to {max(slower):.0f} % slower than 16: {one:.2f} ms is that one launch"
    yield f"launches 16 bits take {several:.2f}"


@claims("docs/kv.md", "h200/2026-11-29-attention.json")
def attention_alone(found: Document) -> Iterator[str]:
    ratios = []
    for rows, context in ((64, 8192), (16, 32768), (16, 8192), (64, 1024), (1, 131072), (1, 1024)):
        here = [row for row in found["rows"] if (row["rows"], row["context"]) == (rows, context)]
        ours = {row["kv_dtype"]: row for row in here if row["impl"] == "lowbit" and row["chosen"]}
        rival = min((row for row in here if row["impl"] == "FlashAttention-3"), key=lambda row: row["us"])
        shown = [*(ours[kv] for kv in ("float16", "fp8", "int8", "int4")), rival]
        yield cells(f"{rows} x {context:,}", *(f"{row['us']:.1f} ({row['limit_us'] / row['us']:.2f})" for row in shown))
        ratios.append(rival["us"] / ours["fp8"]["us"])
    yield f"takes {span(ratios, '.1f')} times as long as `fp8`"


@claims("docs/kv.md", "h200/2026-11-28-serve-kv-int4.json")
def served_with_int4(found: Document) -> Iterator[str]:
    assert found["rows"][0]["failed"] == 0
    yield f"{found['rows'][0]['tokens_per_s']:,.0f} tokens a second with `int4`"


@claims("docs/kv.md", "h200/2026-11-28-serve-kv-16.json")
def served_with_sixteen_bits(found: Document) -> Iterator[str]:
    assert found["rows"][0]["failed"] == 0
    yield f"{found['rows'][0]['tokens_per_s']:,.0f} with 16 bits"


@claims("docs/internals/study.md", "study/experts/schemes.json")
def schemes_of_a_mixture(found: Document) -> Iterator[str]:
    kl: dict[tuple[str, str], float] = {}
    for line in experts.table(found)[2:]:
        key, _, path, *figures = (text.strip() for text in line.strip("|").split("|"))
        name = key if key == experts.UNQUANTIZED else "`{}` {}".format(*key.split())
        yield f"| {' | '.join([name, path, *figures])} |"
        if key != experts.UNQUANTIZED:
            kl[key, path] = float(figures[len(found["texts"])])
    apart = max(abs(kl[key, experts.TRANSFORMERS] - kl[key, experts.ENGINE]) for key, _ in kl)
    yield f"differ by at most {apart:.4f}"
    (left,) = {
        f"{100 * kl[f'{scheme} gptq', experts.ENGINE] / kl[f'{scheme} rtn', experts.ENGINE]:.0f}"
        for scheme in ("w4a16_g128", "w4a16_g64")
    }
    yield f"GPTQ leaves {left} % of the divergence by rounding to nearest"
    mean, worst = (re.findall(r"[\d.]+", line.split("|", 2)[2]) for line in experts.routing_table(found)[2:])
    shares = f"computes {float(worst[1]):.1f} times its equal share and one {worst[2]} times"
    yield f"{float(mean[0]):.1f} effective experts of 8 on average, {float(worst[0]):.1f} in the most unequal layer"
    yield shares


# ---- loading, serving, vLLM

for page in ("docs/checkpoints.md", "docs/internals/foreign-checkpoints.md"):

    @claims(page, "h200/2026-11-23-load.json")
    def loading(found: Document) -> Iterator[str]:
        (row,) = found["rows"]
        yield f"{row['source_bytes'] / 1e9:.0f} GB of"
        yield f"{min(row['seconds']):.1f} s"
        yield f"{row['peak_bytes'] / 1e9:.2f} GB at the peak"


@claims("docs/internals/foreign-checkpoints.md", "h200/2026-11-23-load.json")
def bound_of_loading(found: Document) -> Iterator[str]:
    (row,) = found["rows"]
    yield f"{row['gb_per_s']:.1f} GB/s of files"
    yield f"where {row['bound_bytes'] / 1e9:.2f} are the bound"


SERVE = "h200/2026-11-23-serve.json"


@claims("docs/serve.md", SERVE)
def serving(found: Document) -> Iterator[str]:
    streams = [row for row in found["rows"] if row["part"] == "streams"]
    assert sum(row["failed"] for row in streams) == 0 and sum(row["seconds"] for row in streams) == 300
    requests = sum(row["requests"] for row in streams)
    yield f"{streams[0]['tokens_per_s']:,.0f} tokens per second, and none of {requests:,} requests"
    (idle,) = (row for row in found["rows"] if row["part"] == "idle")
    yield f"HTTP adds {idle['added_ms']['p50']:.1f} ms to the first token"


@claims("docs/internals/server.md", SERVE)
def serving_in_detail(found: Document) -> Iterator[str]:
    def three(values: Document, form: str) -> str:
        return " / ".join(f"{values[p]:{form}}" for p in ("p50", "p95", "p99"))

    for row in found["rows"]:
        idle, short = row["part"] == "idle", row["mix"] == "512/128"
        rate = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        first = three(row["first_ms"], ".1f" if idle else ",.0f")
        token = three(row["token_ms"], ".2f" if idle else ".1f")
        tail = cells(f"{row['requests']:,}", row["failed"], rate, first, token).replace("|  |", "| |")
        load = {"engine": "at once", "streams": "150 s" if short else "150 s more", "idle": "answers of 8"}.get(row["part"])
        if load is None:
            (closed,) = (r for r in found["rows"] if r["part"] == "streams" and r["mix"] == row["mix"])
            load = f"at {row['load']} %"
            if row["load"] == 50:
                load = f"arrivals at 50 % of {closed['requests_per_s']:.1f} requests a second"
        yield f"{load} {tail}"


VLLM, LATER, SAME, TWO = (
    f"h200/2026-11-{name}.json" for name in ("23-vllm", "23-vllm-int4", "24-vllm-int4", "28-vllm-two-gpus")
)
BATCHES = (1, 16, 64, 256)


def tokens(found: Document, impl: str, scheme: str) -> list[Document]:
    rows = {row["batch"]: row for row in found["rows"] if (row["impl"], row["scheme"]) == (impl, scheme)}
    return [rows[batch] for batch in BATCHES]


def ratios(found: Document, scheme: str, rival: str) -> list[str]:
    pairs = zip(tokens(found, "lowbit", scheme), tokens(found, "vllm", rival), strict=True)
    return [f"{ours['tokens_s'] / theirs['tokens_s']:.2f}" for ours, theirs in pairs]


@claims("docs/vllm.md", VLLM)
def beside_vllm(found: Document) -> Iterator[str]:
    for scheme, rival in (("w6e3m2a16", "bf16"), ("fp8_dynamic", "fp8"), ("w8a8", "fp8")):
        source = "same file" if rival == "fp8" else f"[2026-11-23](../benchmarks/results/{VLLM})"
        yield f"| `{scheme}` by vLLM's {rival} ({source}) {cells(*ratios(found, scheme, rival))}"
    first = {impl: 1e3 * tokens(found, *impl)[0]["first_s"] for impl in (("lowbit", "w4a16_g128"), ("vllm", "int4"))}
    yield "{:.0f} ms in int4 where vLLM's int4 takes {:.0f}".format(*first.values())


@claims("docs/vllm.md", SAME)
def beside_vllm_with_the_same_weights(found: Document) -> Iterator[str]:
    yield f"[2026-11-24](../benchmarks/results/{SAME})) {cells(*ratios(found, 'w4a16_g128', 'int4'))}"
    yield f"takes {tokens(found, 'lowbit', 'w4a16_g128')[0]['step_ms']:.2f} ms a step of one request"


@claims("docs/vllm.md", TWO)
def vllm_on_two_gpus(found: Document) -> Iterator[str]:
    assert found["request"]["gpus"] == 2
    impls = {
        "`w4a16_g128`": ("lowbit", "w4a16_g128"),
        "vLLM's int4 (Machete)": ("vllm", "int4"),
        "vLLM's bf16": ("vllm", "bf16"),
    }
    for name, impl in impls.items():
        rows = tokens(found, *impl)
        values = (f"{row['tokens_s']:,.0f}, {row['tokens_s'] / 2:,.0f}, {row['step_ms']:.2f}" for row in rows)
        yield f"| {name} {cells(*values)}"


def of_ranks(name: str) -> str:
    return f"h200/2026-11-28-tensor-parallel-70b-{name}.json"


def ms_of_ranks(name: str) -> dict[tuple[int, str | None], float]:
    """Users and kind of sums -> the shortest milliseconds a token."""
    found: dict[tuple[int, str | None], float] = {}
    for row in document(of_ranks(name))["rows"]:
        key = (row["batch"], row["sums"])
        found[key] = min(row["ms_per_token"], found.get(key, row["ms_per_token"]))
    return found


RANKS_PAGE = "docs/internals/tensor-parallel.md"


@claims(RANKS_PAGE, of_ranks("w4a16_g128-1"))
@claims(RANKS_PAGE, of_ranks("w4a16_g128-2"))
@claims(RANKS_PAGE, of_ranks("w6e3m2a16-1"))
@claims(RANKS_PAGE, of_ranks("w6e3m2a16-2"))
@claims(RANKS_PAGE, of_ranks("bf16-2"))
def a_step_on_two_gpus(_: Document) -> Iterator[str]:
    for scheme in ("w4a16_g128", "w6e3m2a16"):
        alone, both = ms_of_ranks(f"{scheme}-1")[1, None], ms_of_ranks(f"{scheme}-2")
        two = (f"{both[1, sums]:.2f} ({both[1, sums] / alone:.2f})" for sums in ("peer memory", "NCCL"))
        yield f"| `{scheme}` {cells(1, f'{alone:.2f}', *two)}"
    w6, bf16 = ms_of_ranks("w6e3m2a16-1"), ms_of_ranks("bf16-2")
    for users in (8, 32):
        yield f"| `w6e3m2a16` | {users} | {w6[users, None]:.2f} |"
    for users in (1, 8, 32):
        yield f"| bf16 | {users} | | {bf16[users, 'peer memory']:.2f} | {bf16[users, 'NCCL']:.2f} |"
    more = [2 * bf16[users, "peer memory"] / w6[users, None] for users in (1, 8, 32)]
    yield "makes {:.2f}, {:.2f} and {:.2f} times".format(*more)


@claims("docs/generate.md", of_ranks("w6e3m2a16-2"))
def a_token_on_two_gpus(_: Document) -> Iterator[str]:
    both, alone = ms_of_ranks("w6e3m2a16-2")[1, "peer memory"], ms_of_ranks("w6e3m2a16-1")[1, None]
    yield f"takes {both:.2f} ms in\n`w6e3m2a16`, on one {alone:.2f}"


def speeds(rows: list[Document]) -> str:
    return cells(*(f"{row['tokens_s']:,.0f}, {row['step_ms']:.2f}" for row in rows))


@claims("docs/internals/vllm-plugin.md", VLLM)
def first_run_of_vllm(found: Document) -> Iterator[str]:
    yield f"| w4a16_g128, scales in fp16 {speeds(tokens(found, 'lowbit', 'w4a16_g128'))}"
    for scheme in ("w6e3m2a16", "fp8_dynamic", "w8a8"):
        yield f"| {scheme} {speeds(tokens(found, 'lowbit', scheme))}"
    for rival, star in (("int4", " *"), ("fp8", ""), ("bf16", "")):
        yield f"| vLLM's {rival}{star} {speeds(tokens(found, 'vllm', rival))}"
    yield f"| the same, scales in fp16 {cells(*ratios(found, 'w4a16_g128', 'int4'))}"
    for scheme, whose, rival in (("w6e3m2a16", "", "bf16"), ("fp8_dynamic", "vLLM's ", "fp8"), ("w8a8", "vLLM's ", "fp8")):
        yield f"| {scheme} by {whose}{rival} {cells(*ratios(found, scheme, rival))}"


@claims("docs/internals/vllm-plugin.md", LATER)
def later_run_of_vllm(found: Document) -> Iterator[str]:
    for scheme in ("w4a16_g128", "w4a8_g128"):
        yield f"| {scheme} {speeds(tokens(found, 'lowbit', scheme))}"
    yield f"| vLLM's int4 * {speeds(tokens(found, 'vllm', 'int4'))}"
    yield f"| w4a8_g128 by vLLM's int4 * {cells(*ratios(found, 'w4a8_g128', 'int4'))}"
    yield f"| w4a16_g128, scales in bf16, by vLLM's int4 * {cells(*ratios(found, 'w4a16_g128', 'int4'))}"


@claims("docs/internals/vllm-plugin.md", SAME)
def run_of_vllm_with_the_same_weights(found: Document) -> Iterator[str]:
    yield f"| w4a16_g128 {speeds(tokens(found, 'lowbit', 'w4a16_g128'))}"
    yield f"| vLLM's int4 {speeds(tokens(found, 'vllm', 'int4'))}"
    yield f"by vLLM's int4, the same weights {cells(*ratios(found, 'w4a16_g128', 'int4'))}"


# ---- convolutions


def network(found: Document, storage: str, batch: int, fusion: str = "blocks") -> Document:
    key = ("lowbit", storage, fusion, batch)
    (row,) = (r for r in found["rows"] if (r["impl"], r["storage"], r["fusion"], r["batch"]) == key)
    return row


def batch_row(few: Document, many: Document) -> str:
    return cells(few["batch"], *(text for row in (few, many) for text in (f"{row['ms']:.3f}", f"{row['images_s']:,.0f}")))


@claims("docs/vision.md", "h200/2026-11-23-conv.json")
def convolutions(found: Document) -> Iterator[str]:
    for batch in (1, 32, 2048):
        yield batch_row(network(found, "u4", batch), network(found, "s8", batch))
    (published,) = (row for row in found["rows"] if row["impl"] == "published")
    yield f"MLPerf v4.1 publishes {published['images_s']:,.0f} images/s"


@claims("docs/internals/performance.md", "h200/2026-11-23-conv.json")
def large_batches(found: Document) -> Iterator[str]:
    large = [network(found, storage, 2048)["images_s"] for storage in ("u4", "s8")]
    yield "batch 2048 had {:,.0f} and {:,.0f} images/s".format(*large)


@claims("docs/internals/performance.md", "h200/2026-11-29-conv-resnet50.json")
def whole_blocks(found: Document) -> Iterator[str]:
    few, many = network(found, "u4", 128, "whole"), network(found, "s8", 128, "whole")
    yield f"{few['launches']} launches"
    yield f"at batch 128 {few['ms']:.3f} ms with activations in 4 bits ({few['images_s']:,.0f} images/s), {many['ms']:.3f} ms"
    yield f"in 8 bits, {many['ms'] / few['ms']:.2f} times"
    apart = [network(found, storage, 128) for storage in ("u4", "s8")]
    yield f"{apart[0]['launches']} launches, {apart[0]['ms']:.3f} and {apart[1]['ms']:.3f} ms in the same run"


@claims("docs/vision.md", "h200/2026-11-29-conv-resnet50.json")
def whole_blocks_for_users(found: Document) -> Iterator[str]:
    few, many = network(found, "u4", 128, "whole"), network(found, "s8", 128, "whole")
    yield batch_row(few, many)
    yield f"{100 * many['ms'] / few['ms'] - 100:.0f} % at 128"


@claims("docs/vision.md", "h200/2026-11-23-conv.json")
def when_int4_pays(found: Document) -> Iterator[str]:
    few, many = (network(found, "s8", batch)["ms"] / network(found, "u4", batch)["ms"] for batch in (1, 2048))
    yield f"ResNet-50 gains {100 * few - 100:.0f} % at batch 1"
    yield f"and {100 * many - 100:.0f} % at 2048"


@claims("docs/vision.md", "h200/2026-11-28-conv-efficientnet-lite0.json")
def a_depthwise_network(found: Document) -> Iterator[str]:
    ms = {row["storage"]: row["ms"] for row in found["rows"]}
    yield f"EfficientNet-lite0 gains {100 * ms['w8a8'] / ms['w8a4'] - 100:.0f} %"
    yield f"the day before {ms['w8a8']:.2f} in `w8a8`, {ms['w8a4']:.2f} in `w8a4` and {ms['w4a8']:.2f} in `w4a8`"


@claims("docs/vision.md", "h200/2026-11-29-conv-efficientnet-lite0.json")
def a_depthwise_network_and_its_rivals(found: Document) -> Iterator[str]:
    ms = {row["impl"]: row["ms"] for row in found["rows"]}
    compiled = min(ms["compile"], ms["reduce-overhead"])
    yield f"take {ms['lowbit']:.2f} ms in `w8a8`, and in fp16 {compiled:.2f} by torch.compile"
    yield f"({compiled / ms['lowbit']:.2f} times as long) and {ms['cudnn']:.2f} by cuDNN"


@claims("docs/vision.md", "vision/imagenet-lite0.json")
def a_trained_network(found: Document) -> Iterator[str]:
    def shown(figure: dict[str, float]) -> str:
        return str(Figure(**figure))

    for row in found["rows"]:
        name = f"`{row['scheme']}`" if row["bound"] is None else f"`{row['scheme']}`, bound of {row['bound']:g} nats"
        if row["scheme"] == "fp32":
            yield f"| fp32 | {shown(row['top1'])} | {shown(row['top5'])} |  |  | {row['weight_bytes']:,} |"
        else:
            yield cells(name, *(shown(row[key]) for key in ("top1", "top5", "same", "cosine")), f"{row['weight_bytes']:,}")
    right = {row["scheme"]: round(row["top1"]["mean"] / 5) for row in found["rows"] if row["bound"] is None}
    lost = [right["fp32"] - right[scheme] for scheme in ("w8a4", "w4a8", "w4a4")]
    yield f"4 bits everywhere cost {min(lost)} to {max(lost)} of {right['fp32']} right answers"


OLD_CONV = "h200/2026-11-21-conv.json"


def cudnn(found: Document, batch: int) -> float | None:
    times = [r["ms"] for r in found["rows"] if "cudnn" in r["impl"].lower() and r["batch"] == batch and r["ms"]]
    return min(times) if times else None


@claims("docs/vision.md", OLD_CONV)
def cudnn_at_128(found: Document) -> Iterator[str]:
    yield f"took {cudnn(found, 128):.2f} ms at batch 128"


@claims("docs/internals/performance.md", OLD_CONV)
def older_convolutions(found: Document) -> Iterator[str]:
    for batch in (1, 8, 32, 128, 256, 2048):
        few, many, fp16 = network(found, "u4", batch), network(found, "s8", batch), cudnn(found, batch)
        ours = [text for row in (few, many) for text in (f"{row['ms']:.3f}", f"{row['images_s']:,.0f}")]
        rival = ("-", "-") if fp16 is None else (f"{fp16:.3f}", f"{fp16 / few['ms']:.2f}")
        limits = (f"{few['limit_ms']:.3f}", f"{many['limit_ms']:.3f}")
        yield cells(batch, *ours, *rival, f"{many['ms'] / few['ms']:.2f}", *limits)
    few, many = network(found, "u4", 128), network(found, "s8", 128)
    yield f"{few['ms']:.3f} ms with activations in 4 bits ({few['images_s']:,.0f} images/s), {many['ms']:.3f} ms in 8 bits"
    layers = {(row["storage"], row["layer"]): row for row in found["layers"] if row["fusion"] == "blocks"}
    listed = [layer for _, layer in layers if f"| {layer} |" in text_of("docs/internals/performance.md")]
    assert len(set(listed)) == 24, "each kind of layer once"
    for name in dict.fromkeys(listed):
        rows = [layers[storage, name] for storage in ("u4", "s8")]
        ours = [text for r in rows for text in (f"{r['us']:.1f}", f"{100 * r['limit_us'] / r['us']:.0f} %")]
        yield f"| {name} {cells(*ours, ' / '.join(row['bound'] for row in rows))}"


# ---- products

GEMM, GEMM8, NEW_GEMM = (f"h200/2026-11-{name}.json" for name in ("21-gemm", "21-gemm8", "23-gemm"))


def tables_of(found: Document) -> list[str]:
    return [text for text in report.markdown(found).splitlines() if text.startswith("| ") and not text.startswith("| format")]


@claims("docs/internals/performance.md", GEMM)
@claims("docs/internals/performance.md", GEMM8)
def products(found: Document) -> Iterator[str]:
    yield from tables_of(found)


@claims("docs/speed.md", GEMM)
def where_it_loses(found: Document) -> Iterator[str]:
    rows = report.lines(found)
    for m, text in ((128, "times cuBLAS's speed at 128 tokens"), (256, "at 256")):
        here = [line.times_cublas for line in rows if (line.n, line.k, line.m) == (6144, 4096, m)]
        yield f"{span(here)} {text}"
    shares = [100 * line.share for line in rows if line.m in (16, 32)]
    yield f"{min(shares):.0f} to {max(shares):.0f} % at 16 and 32 tokens"
    yield f"{span([line.times_peer for line in rows if line.times_peer])} times as fast as the best of Humming and torch"


def beside_rivals(found: Document, scheme: str) -> list[float]:
    return [line.times_peer for line in report.lines(found) if line.scheme == scheme and line.times_peer]


@claims("docs/speed.md", GEMM8)
@claims("docs/internals/performance.md", GEMM8)
def ranges_of_integers(found: Document) -> Iterator[str]:
    yield f"int8 {span(beside_rivals(found, 'w8a8'))}"
    yield f"int4 in groups of 128 by int8 {span(beside_rivals(found, 'w4a8_g128'))}"


@claims("docs/speed.md", GEMM8)
def ranges_of_floats(found: Document) -> Iterator[str]:
    yield f"fp8 {span(beside_rivals(found, 'w8e4m3a8e4m3_t'))}"
    yield f"int4 per channel by e4m3 {span(beside_rivals(found, 'w4a8e4m3'))}"
    yield f"Of {sum(line.times_peer is not None for line in report.lines(found))} rows with a rival"


@claims("docs/internals/performance.md", GEMM8)
def worst_products_of_floats(found: Document) -> Iterator[str]:
    def worst(scheme: str) -> str:
        line = min((line for line in report.lines(found) if line.scheme == scheme), key=lambda line: line.times_peer)
        return f"{line.times_peer:.2f} (K {line.k} M {line.m}) to {max(beside_rivals(found, scheme)):.2f}"

    yield f"fp8 {worst('w8e4m3a8e4m3_t')}"
    yield f"int4 per channel by e4m3 {worst('w4a8e4m3')}, in groups of 128 {worst('w4a8e4m3_g128')}"
    yield f"fp6_e3m2 per channel by e4m3 {span(beside_rivals(found, 'w6e3m2a8e4m3'))}"


@claims("docs/speed.md", "h200/2026-11-21-activations.json")
def activations_for_users(found: Document) -> Iterator[str]:
    def shares(operations: tuple[str, ...]) -> str:
        rows = [row for row in found["rows"] if row["m"] >= 4096 and row["operation"] in operations]
        return span([1e8 * row["nbytes"] / found["copy_bytes_per_s"] / row["us"] for row in rows], ".0f")

    yield f"{shares(('int8', 'fp8_e4m3', 'fp8_e4m3, groups of 128'))} % of the speed of a copy from 4,096 tokens on"
    yield f"with LayerNorm it is {shares(('LayerNorm, int8',))} %"


@claims("docs/internals/performance.md", "h200/2026-11-21-activations.json")
def activations(found: Document) -> Iterator[str]:
    yield from (text for text in activations_report.markdown(found).splitlines() if re.match(r"\| [^|]*\| \d", text))
    yield f"{found['copy_bytes_per_s'] / 1e12:.2f} TB/s read and written"


@claims("docs/speed.md", NEW_GEMM)
@claims("docs/internals/performance.md", NEW_GEMM)
def no_rivals(found: Document) -> Iterator[str]:
    """The table itself is compared by tests/test_docs.py."""
    assert not [line for line in report.lines(found) if line.peer]
    yield "2026-11-23-gemm.json"


@claims("docs/speed.md", "h200/2026-11-24-choice.json")
@claims("docs/internals/performance.md", "h200/2026-11-24-choice.json")
def choice(found: Document) -> Iterator[str]:
    rows = [row for row in found["rows"] if row["half"] == "untuned"]
    yield f"{100 * (choice_report.summary(rows).mean - 1):.1f} % longer than the fastest one in the mean"


# ---- the tests


def text_of(page: str) -> str:
    """A page with all white space as single spaces, so that lines may break anywhere."""
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(("page", "file"), CLAIMS, ids=lambda value: value)
def test_figures_are_those_of_the_file(page, file):
    text = text_of(page)
    wanted = [" ".join(claimed.split()) for claim in CLAIMS[page, file] for claimed in claim(document(file))]
    missing = [claimed for claimed in wanted if claimed not in text]
    assert missing == [], f"{page} differs from {file}"


def test_every_named_file_has_a_claim():
    named = set()
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        if not page.startswith(NO_FIGURES):
            files = re.findall(r"benchmarks/results/([\w./-]+\.json)", path.read_text())
            named |= {(page, file) for file in files if page not in ELSEWHERE or not file.startswith(ELSEWHERE[page][0])}
    assert named == set(CLAIMS)
    assert all((ROOT / test).is_file() for _, test in ELSEWHERE.values())


def test_the_claims_fail_where_a_figure_differs():
    changed = json.loads(json.dumps(document("h200/2026-11-23-conv.json")))
    network(changed, "u4", 32)["ms"] *= 1.01
    wanted = [text for claim in CLAIMS["docs/vision.md", "h200/2026-11-23-conv.json"] for text in claim(changed)]
    assert sum(text not in text_of("docs/vision.md") for text in wanted) == 1
