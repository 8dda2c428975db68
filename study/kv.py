"""`python -m study kv MODEL`: what keys and values in few bits cost, by format and context.

Measured on the second half of each text, at each context: perplexity, divergence from the same weights with 16-bit keys and
values, and the share of tokens with the same most likely next token; and whether a key hidden at ten depths of the context is
found. Those read k and v as stored through Transformers' forward (lowbit/eval/kv.py). Greedy continuations run through the
engine and its pages. Formats are measured for keys and values together and apart, with and without rotation, on weights in 16
bits and quantized ones. The result file is complete after every context; the same command resumes an interrupted run.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbit.cli.terminal import say, user_errors
from lowbit.engine import Engine, Request
from lowbit.eval.divergence import compare
from lowbit.eval.figure import mean_of_windows
from lowbit.eval.kv import stored_kv
from lowbit.eval.report import replace_block
from lowbit.eval.results import as_json, machine, read_json, versions, write_json
from lowbit.formats.kv import parse_kv
from lowbit.models.calibrate import Calibration
from lowbit.models.cpu import measuring_dtype
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import tokenizer_of
from lowbit.progress import Progress
from lowbit.sources import model_folder
from study.cases import group_size
from study.data import gather
from study.experts import agreement
from study.run import halves
from study.upcycle import read_texts

RESULT = "lowbit study kv"
UNQUANTIZED = "16 bits"
FORMATS = ("fp8", "int8", "int4", "k8v4")
"""Formats whose divergence `lowbit recommend` states."""
CASES = (*FORMATS, "k4v8", "int4-plain", "int8-rotated", "fp8-rotated")
"""Also keys and values apart, and formats without the rotation they have by default or with one they have not."""
DEPTHS = 10
"""Depths of the hidden key: 0, 1/9, .., 1 of the text before the question."""
CACHE_BYTES = 1 << 30
"""Keys and values of the engine of the continuations."""
TABLE = Path("lowbit/eval/data/kv.json")
RESULTS = Path("benchmarks/results/study/kv")
PAGE = Path("docs/internals/study-kv.md")

Cells = dict[str, list[float | None]]
"""Metric -> value, standard error, count."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Settings:
    """`limit` tokens of each text, in windows of each of `contexts` tokens; `keys` hidden keys at each depth; a prompt of
    `prompt` tokens of each text, continued by `new` tokens (0: none). GPTQ calibrates on `samples` pieces of `length` tokens.
    """

    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    limit: int = 8192
    keys: int = 4
    prompt: int = 64
    new: int = 500
    samples: int = 64
    length: int = 512

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 2 or max(self.contexts) > self.limit:
            raise ValueError(f"contexts are from 2 to the {self.limit:,} tokens of --limit, got {self.contexts}")


@app.command()
@user_errors
def main(
    models: Annotated[
        list[Path] | None, typer.Argument(metavar="[MODEL]...", help="Folders of 16-bit models; none: only the tables.")
    ] = None,
    kv: Annotated[str, typer.Option(help="Formats, separated by commas; 16 bits are measured too.")] = ",".join(CASES),
    weights: Annotated[
        str,
        typer.Option(help='Weights, separated by commas: "16 bits", or a scheme and a method; _g is the model\'s group.'),
    ] = f"{UNQUANTIZED},w4a16_g gptq,w8a8 rtn",
    contexts: Annotated[str, typer.Option(help="Tokens per window.")] = ",".join(map(str, Settings.contexts)),
    limit: Annotated[int, typer.Option(min=2, help="Tokens of each text at each context.")] = Settings.limit,
    keys: Annotated[int, typer.Option(min=0, help="Hidden keys at each depth.")] = Settings.keys,
    new: Annotated[int, typer.Option(min=0, help="Tokens of a greedy continuation.")] = Settings.new,
    samples: Annotated[int, typer.Option(min=1, help="Pieces to calibrate GPTQ on.")] = Settings.samples,
    data: Annotated[Path, typer.Option(help="Texts (*.txt); filled when it does not exist.")] = Path("study-data"),
    results: Annotated[Path, typer.Option(help="Folder of the result files, one per model.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="Page whose tables are rewritten.")] = PAGE,
    table: Annotated[Path, typer.Option(help="What `lowbit recommend` reads.")] = TABLE,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
) -> None:
    """Measures keys and values in few bits on models, and rewrites the tables from all result files.

    Example: python -m study kv SmolLM2-135M-Instruct --device cuda

    Example: python -m study kv SmolLM2-135M-Instruct --contexts 512 --limit 1024 --keys 1 --new 0    (minutes on a CPU)
    """
    cases = tuple(dict.fromkeys(str(parse_kv(part.strip())) for part in kv.split(",")))
    settings = Settings(_numbers("--contexts", contexts), limit, keys, new=new, samples=samples)
    for model in models or ():
        model_folder(model)
    if models and not data.exists():
        gather(data, say)
    for model in models or ():
        path = results / f"{model.resolve().name}.json"
        measure(
            model.resolve(), read_texts(data), path, settings, cases, [part.strip() for part in weights.split(",")],
            device=device, say=say, progress=True,
        )  # fmt: skip
        say(f"wrote {path}")
    documents = [read_json(path, RESULT) for path in sorted(results.glob("*.json"))]
    if not documents:
        raise ValueError(f"{results}: holds no result file; name a model to measure")
    write_json(table, divergences(documents))
    for name, of in BLOCKS.items():
        replace_block(page, name, "\n\n".join(filter(None, map(of, documents))))
    say(f"wrote {table} and the tables of {page}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"{option} {text!r}: must be whole numbers, comma-separated, such as 512,2048") from None


def measure(
    folder: Path,
    texts: Mapping[str, str],
    output: Path,
    settings: Settings,
    cases: Sequence[str] = CASES,
    weights: Sequence[str] = (UNQUANTIZED,),
    *,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> dict[str, Any]:
    """Measures the 16-bit model in `folder` with each of `weights` and each format of `cases`, and writes the result file
    `output` after each context. Returns its document. Contexts beyond the model's positions are left out.

    Models compute in float32 on a CPU, in their own 16 bits on a GPU. GPTQ calibrates on the first half of the text `topics`,
    or of the first text. Raises ValueError for texts that are too short, and for a file measured otherwise.
    """
    source = _Source(folder, texts, settings, device, progress)
    request = {"model": folder.name, "device": device, "settings": asdict(settings), "texts": list(texts), "kv": list(cases)}
    document = _document(output, request)
    document["parameters"] = sum(parameter.numel() for parameter in source.model.parameters())
    for part in weights:
        named = part.replace("_g ", f"_g{source.group} ")
        missing = [context for context in source.contexts if not _has(document, named, context)]
        continues = settings.new > 0 and not _has(document, named, None)
        if not missing and not continues:
            continue
        say(f"{folder.name}, weights in {named}")
        with source.weights(named, output.absolute().parent, say) as model:
            for context in missing:
                say(f"context {context:,}")
                document["rows"] += source.rows(model, named, context, cases)
                write_json(output, document)
            if continues:
                say(f"{settings.new} tokens greedily")
                document["rows"] += source.continued(model, named, cases)
                write_json(output, document)
    document["complete"] = True
    write_json(output, document)
    return document


def _document(output: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the document of an earlier run, or a new one. Raises ValueError for one with another request."""
    if not output.exists():
        return {
            "result": RESULT, "date": datetime.date.today().isoformat(), "machine": machine(),
            "versions": versions(("transformers",)), "request": request, "complete": False, "rows": [],
        }  # fmt: skip
    document = read_json(output, RESULT)
    same = json.loads(as_json(request))
    if document["request"] != same:
        changed = [key for key in same if document["request"].get(key) != same[key]]
        raise ValueError(f"{output}: was measured otherwise ({', '.join(changed)} differ); name another folder (--results)")
    document["complete"] = False
    return document


def _has(document: Mapping[str, Any], weights: str, context: int | None) -> bool:
    return any(row["weights"] == weights and row["context"] == context for row in document["rows"])


class _Source:
    """The 16-bit model and the tokens to measure on."""

    def __init__(self, folder: Path, texts: Mapping[str, str], settings: Settings, device: str, progress: bool) -> None:
        self.folder, self.settings, self.device, self.progress = folder, settings, device, progress
        self.model: PreTrainedModel = load_causal(folder, device=device, dtype=measuring_dtype(device)).eval()
        self.group = group_size(self.model)
        config: Any = self.model.config.get_text_config()
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.contexts = [context for context in settings.contexts if context <= config.max_position_embeddings]
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(folder, self.model)
        parts = {name: halves(text) for name, text in texts.items()}
        self._seen = next((first for name, (first, _) in parts.items() if name == "topics"), next(iter(parts.values()))[0])
        self.ids = {name: self._tokens(name, second) for name, (_, second) in parts.items()}

    def _tokens(self, name: str, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        if len(ids) < self.settings.limit:
            raise ValueError(f"{name}: its second half has {len(ids):,} tokens, --limit asks for {self.settings.limit:,}")
        return ids[: self.settings.limit]

    @contextmanager
    def weights(self, name: str, work: Path, say: Callable[[str], None]) -> Iterator[PreTrainedModel]:
        """Yields the model with weights in `name`: "16 bits", or a scheme and a method."""
        if name == UNQUANTIZED:
            yield self.model
            return
        scheme, _, method = name.partition(" ")
        with tempfile.TemporaryDirectory(dir=work, prefix=".kv-") as scratch:
            target, calibration = Path(scratch) / "q", None
            if method != "rtn":
                seen = Path(scratch) / "seen.txt"
                seen.write_text(self._seen, encoding="utf-8")
                calibration = Calibration(self.settings.samples, self.settings.length, 0, seen)
            quantize_checkpoint(
                self.folder, target, scheme, method=method or "rtn", calibration=calibration, device=self.device,
                progress=self.progress, say=say,
            )  # fmt: skip
            yield load_causal(target, device=self.device, dtype=measuring_dtype(self.device)).eval()

    def rows(self, model: PreTrainedModel, weights: str, context: int, cases: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows of one context: 16-bit keys and values, then each case."""
        reference = None if model is self.model else self.model
        figures = {name: self._quality(model, reference, ids, context, cases) for name, ids in self.ids.items()}
        found = self._keys(model, context, cases)
        return [
            {
                **self._row(weights, case), "context": context, "keys": found[case],
                "figures": {name: own[case] for name, own in figures.items()},
            }
            for case in ("16", *cases)
        ]  # fmt: skip

    def _row(self, weights: str, case: str) -> dict[str, Any]:
        scheme = parse_kv(case)
        scales = 16 / self.head_dim if scheme.quantized else 0
        return {"weights": weights, "kv": case, "bits": (scheme.k.bits + scheme.v.bits) / 2 + scales}

    @torch.inference_mode()
    def _quality(
        self, model: PreTrainedModel, reference: PreTrainedModel | None, ids: Tensor, context: int, cases: Sequence[str]
    ) -> dict[str, Cells]:
        """Returns the figures of each case on one text. Those of 16-bit keys and values are relative to `reference`, the
        unquantized weights, if there is one."""
        sums = {case: _Sums() for case in ("16", *cases)}
        losses, windows = [], ids[: len(ids) // context * context].view(-1, context)
        for window in Progress(windows, desc=f"context {context:,}", unit="windows", shown=self.progress):
            wide, targets = _logits(model, window), window[1:].to(model.device)
            loss = torch.nn.functional.cross_entropy(wide.float(), targets, reduction="sum")
            losses.append(float(loss))
            if reference is not None:
                sums["16"].add(*compare(_logits(reference, window), wide, targets))
            for case in cases:
                with stored_kv(model, parse_kv(case)):
                    narrow = _logits(model, window)
                sums[case].add(*compare(wide, narrow, targets))
        nll = math.fsum(losses) / (len(losses) * (context - 1))
        out = {case: own.cells(nll) for case, own in sums.items() if own.counts}
        error = mean_of_windows(losses, [context - 1] * len(losses))[1]
        plain: Cells = {"perplexity": [math.exp(nll), None if error is None else math.exp(nll) * error, windows.numel()]}
        out["16"] = {**out.get("16", {}), **plain}
        return out

    @torch.inference_mode()
    def _keys(self, model: PreTrainedModel, context: int, cases: Sequence[str]) -> dict[str, dict[str, list[float]]]:
        """Returns for each case and depth the share of keys that greedy decoding would answer, and the mean loss of their
        tokens in nats."""
        every = ("16", *cases)
        out: dict[str, dict[str, list[float]]] = {case: {} for case in every}
        for depth in range(DEPTHS if self.settings.keys else 0):
            found: dict[str, list[tuple[bool, float]]] = {case: [] for case in every}
            for number in range(self.settings.keys):
                ids, count = self.hidden_key(context, depth / (DEPTHS - 1), number)
                for case in every:
                    with stored_kv(model, parse_kv(case)):
                        logits = _logits(model, ids, count).float()
                    answer = ids[-count:].to(model.device)
                    right = bool((logits.argmax(-1) == answer).all())
                    found[case].append((right, float(torch.nn.functional.cross_entropy(logits, answer))))
            for case, own in found.items():
                out[case][f"{depth / (DEPTHS - 1):.2f}"] = [sum(column) / len(own) for column in zip(*own, strict=True)]
        return out

    def hidden_key(self, context: int, depth: float, number: int) -> tuple[Tensor, int]:
        """Returns a prompt with its answer, ids [context], and the number of tokens of the answer.

        A sentence states a key of five digits at `depth` of a text, the question for it follows the text, and the answer is the
        key. `number` chooses the text and the key.
        """
        key = random.Random(f"{number} {depth}").randrange(10_000, 100_000)
        pieces = (
            f"\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n",
            "\n\nWhat is the pass key? The pass key is",
            f" {key}",
        )
        needle, question, answer = (
            self.tokenizer(piece, return_tensors="pt", add_special_tokens=False).input_ids[0] for piece in pieces
        )
        texts = list(self.ids.values())
        room = context - len(needle) - len(question) - len(answer)
        if room < 1:
            raise ValueError(f"a hidden key with its question takes {context - room} tokens, a context of {context} is shorter")
        text = texts[number % len(texts)][:room]
        at = round(depth * len(text))
        return torch.cat([text[:at], needle, text[at:], question, answer]), len(answer)

    def continued(self, model: PreTrainedModel, weights: str, cases: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows of greedy continuations through the engine: the share of tokens before the first that differs from
        16-bit keys and values. The engine takes the weights of the model over."""
        prompts = torch.stack([ids[: self.settings.prompt] for ids in self.ids.values()])
        expected = self._continue(model, prompts, "16")
        return [
            {
                **self._row(weights, case), "context": None, "prompts": len(prompts),
                "greedy": agreement(expected, self._continue(model, prompts, case)),
            }
            for case in cases
        ]  # fmt: skip

    def _continue(self, model: PreTrainedModel, prompts: Tensor, kv: str) -> Tensor:
        engine = Engine(
            model, max_concurrent=len(prompts), max_length=self.settings.prompt + self.settings.new, cache_bytes=CACHE_BYTES,
            kv=kv, stop_token_ids=(),
        )  # fmt: skip
        sequences = engine.generate([Request(prompt, self.settings.new) for prompt in prompts.tolist()])
        return torch.tensor([[sampled.token for sampled in sequence.sampled] for sequence in sequences])


class _Sums:
    """Divergences of one case, window by window."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._kl: list[Tensor] = []
        self._same: list[float] = []
        self._worse: list[float] = []

    def add(self, kl: Tensor, same: Tensor, worse: Tensor) -> None:
        """Adds the results of `compare` for a window."""
        self.counts.append(len(kl))
        self._kl.append(kl)
        self._same.append(float(same.sum()))
        self._worse.append(float(worse.sum()))

    def cells(self, nll: float) -> Cells:
        """Returns the figures; `nll`: the mean loss without the case, in nats."""
        tokens = sum(self.counts)
        mean, error = mean_of_windows([float(kl.sum()) for kl in self._kl], self.counts)
        top1, top1_error = mean_of_windows(self._same, self.counts)
        worse, worse_error = mean_of_windows(self._worse, self.counts)
        every, last = torch.cat(self._kl), torch.cat([kl[-len(kl) // 4 :] for kl in self._kl])
        return {
            "KL mean": [mean, error, tokens],
            "KL 99 %": [float(every.quantile(0.99)), None, tokens],
            "KL of the last quarter": [float(last.mean()), None, len(last)],
            "same top-1": [top1, top1_error, tokens],
            "nll difference": [worse, worse_error, tokens],
            "perplexity": [math.exp(nll + worse), None, tokens],
        }


def _logits(model: PreTrainedModel, ids: Tensor, count: int | None = None) -> Tensor:
    """Returns the logits that predict the last `count` of the tokens ids [T]; all but the first by default."""
    count = len(ids) - 1 if count is None else count
    logits: Tensor = model(ids[None].to(model.device), use_cache=False, logits_to_keep=count + 1).logits
    return logits[0, -count - 1 : -1]


# ---- tables


def mean_over_texts(row: Mapping[str, Any], metric: str) -> float | None:
    """Returns the mean of a metric over the texts of a row; None if it was not measured."""
    cells = [own[metric][0] for own in row["figures"].values() if metric in own]
    return math.fsum(cells) / len(cells) if cells else None


def quality_table(document: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the mean KL by weights, format and context, the top-1 share and the perplexity at the longest
    context, and the agreement of greedy continuations."""
    contexts = sorted({row["context"] for row in document["rows"] if row["context"]})
    new = document["request"]["settings"]["new"]
    head = ["weights", "keys and values", "bits", *(f"KL, {c:,}" for c in contexts), "same top-1 %", "perplexity"]
    head += [f"{new} greedy, %"] if new else []
    lines = [_title(document), "", _line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    greedy = {(row["weights"], row["kv"]): row["greedy"] for row in document["rows"] if row["context"] is None}
    every = dict.fromkeys((row["weights"], row["kv"]) for row in document["rows"] if row["context"])
    for weights, kv in every:
        own = {row["context"]: row for row in document["rows"] if (row["weights"], row["kv"]) == (weights, kv)}
        last = own.get(contexts[-1])
        kls = [mean_over_texts(own[c], "KL mean") if c in own else None for c in contexts]
        top1, perplexity = (None if last is None else mean_over_texts(last, name) for name in ("same top-1", "perplexity"))
        cells = [weights, kv, f"{next(iter(own.values()))['bits']:.2f}", *("" if kl is None else f"{kl:.5f}" for kl in kls)]
        cells += ["" if top1 is None else f"{100 * top1:.1f}", "" if perplexity is None else f"{perplexity:.3f}"]
        agreed = greedy.get((weights, kv))
        cells += ["" if agreed is None else f"{100 * agreed:.0f}"] if new else []
        lines.append(_line(cells))
    return "\n".join(lines)


def keys_table(document: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the share of hidden keys that are found, by weights, format and context, over all depths."""
    rows = [row for row in document["rows"] if row["context"] and row["keys"]]
    if not rows:
        return ""
    contexts = sorted({row["context"] for row in rows})
    count = DEPTHS * document["request"]["settings"]["keys"]
    head = ["weights", "keys and values", *(f"{c:,}" for c in contexts)]
    lines = [f"{_title(document)} Found of {count} keys:", "", _line(head), _line(["---", "---", *["---:"] * len(contexts)])]
    for weights, kv in dict.fromkeys((row["weights"], row["kv"]) for row in rows):
        own = {row["context"]: row["keys"] for row in rows if (row["weights"], row["kv"]) == (weights, kv)}
        shares = [None if c not in own else sum(found for found, _ in own[c].values()) / DEPTHS for c in contexts]
        lines.append(_line([weights, kv, *("" if share is None else f"{share * count:.0f}" for share in shares)]))
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[Mapping[str, Any]], str]] = {"kv:quality": quality_table, "kv:keys": keys_table}
"""Marks of the page -> table."""


def _title(document: Mapping[str, Any]) -> str:
    request = document["request"]
    where = ", ".join(document["machine"]["gpus"]) or f"{document['machine']['threads']} threads of a CPU"
    texts = f"{len(request['texts'])} texts of {request['settings']['limit']:,} tokens"
    unfinished = "" if document["complete"] else " Not complete."
    return f"**{request['model']}**, {texts}, {document['date']}, {where}.{unfinished}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def divergences(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what `lowbit recommend` reads: for each model, the smallest first, at its longest context and on 16-bit weights,
    the mean KL of the formats of an engine."""
    models = []
    for document in documents:
        plain = [row for row in document["rows"] if row["context"] and row["weights"] == UNQUANTIZED]
        longest = max((row["context"] for row in plain), default=0)
        rows = [
            {"kv": row["kv"], "kl": float(f"{mean_over_texts(row, 'KL mean') or 0:.3g}")}
            for row in plain if row["context"] == longest and row["kv"] in FORMATS
        ]  # fmt: skip
        if rows:
            model = {"model": document["request"]["model"], "parameters": document["parameters"], "context": longest}
            models.append({**model, "rows": rows})
    return {"result": RESULT, "models": sorted(models, key=lambda model: model["parameters"])}


if __name__ == "__main__":
    app()
