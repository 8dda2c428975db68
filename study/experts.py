"""`python -m study experts FOLDER`: what each scheme costs a mixture of experts, through Transformers and through the engine.

Each case is quantized on disk, compared with the 16-bit model in FOLDER, and deleted. Measured on the second half of each text
are perplexity, divergence from 16 bits, the share of tokens with the same most likely next token, greedy continuations, and the
share of tokens that keep their experts; for the 16-bit model also how many tokens each expert computes. The result file is
whole after every row.
"""

from __future__ import annotations

import fnmatch
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lowbit.cli.terminal import say, user_errors
from lowbit.engine import Request
from lowbit.engine.block_pool import pages_for
from lowbit.engine.program import DecodeProgram
from lowbit.engine.prompt_attention import PromptAttention
from lowbit.engine.ragged import Ragged, sizes
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.sequence import Sequence as EngineSequence
from lowbit.engine.slots import Slots
from lowbit.eval import divergence, perplexity
from lowbit.eval.figure import Figure
from lowbit.eval.results import machine, versions, write_json
from lowbit.eval.size import size_of
from lowbit.models.calibrate import Calibration
from lowbit.models.cpu import measuring_dtype
from lowbit.models.expert_names import expert_modules
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import tokenizer_of
from lowbit.pipeline import Pipeline
from lowbit.sources import model_folder
from study.data import gather
from study.run import halves
from study.upcycle import read_texts

RESULT = "lowbit study experts"
UNQUANTIZED = "16 bits"
TRANSFORMERS, ENGINE = "Transformers", "engine"
CASES = (
    ("w8a16", "rtn"), ("w6e3m2a16", "rtn"), ("w4a16_g128", "rtn"), ("w4a16_g64", "rtn"), ("w4a16_g128", "gptq"),
    ("w4a16_g64", "gptq"), ("w8a8", "rtn"),
)  # fmt: skip
"""Schemes and methods."""
CACHE_BYTES = 1 << 30
"""Keys and values of the engine: enough for the windows and the continuations, since the reference stays in memory."""

Chosen = dict[str, Tensor]
"""Expert layer -> experts int [T, top_k] of each token, sorted."""
Cells = dict[str, dict[str, list[float | None]]]
"""Text -> metric -> value, standard error, count."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Settings:
    """`windows` of `window` tokens per text; `prompts` of `prompt` tokens of each, continued by `new` tokens; calibration on
    `samples` pieces of `length` tokens."""

    window: int = 1024
    windows: int = 16
    prompts: int = 8
    prompt: int = 64
    new: int = 64
    samples: int = 64
    length: int = 512

    def __post_init__(self) -> None:
        if self.prompts * self.prompt > self.window * self.windows:
            raise ValueError(
                f"{self.prompts} prompts of {self.prompt} tokens are asked for, of {self.windows} windows of {self.window}"
            )


@app.command()
@user_errors
def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a 16-bit mixture of experts.")],
    data: Annotated[Path, typer.Option(help="Texts (*.txt); filled when it does not exist.")] = Path("study-data"),
    output: Annotated[Path, typer.Option(help="Result file.")] = Path("experts.json"),
    only: Annotated[str | None, typer.Option(help="Only cases like this: 'w4a16_g64 *', '* rtn'.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = Settings.window,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each text.")] = Settings.windows,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each text, continued greedily.")] = Settings.prompts,
    new: Annotated[int, typer.Option(min=1, help="Tokens of a continuation.")] = Settings.new,
    samples: Annotated[int, typer.Option(min=1, help="Pieces to calibrate on.")] = Settings.samples,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
) -> None:
    """Quantizes a mixture of experts to each scheme, and measures it through Transformers and through the engine.

    Example: python -m study experts smollm2-8x --device cuda
    """
    if not data.exists():
        gather(data, say)
    settings = Settings(window=window, windows=windows, prompts=prompts, new=new, samples=samples)
    cases = [case for case in CASES if only is None or fnmatch.fnmatch(" ".join(case), only)]
    document = measure(
        model_folder(folder), read_texts(data), output, settings, cases, device=device, say=say, progress=True
    )  # fmt: skip
    for line in (*table(document), "", *routing_table(document)):
        say(line)
    say(f"wrote {output}")


def measure(
    folder: Path,
    texts: Mapping[str, str],
    output: Path,
    settings: Settings,
    cases: Sequence[tuple[str, str]] = CASES,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> dict[str, Any]:
    """Measures the 16-bit mixture in `folder`, then each case, and writes the result file `output` after each. Returns its
    document. Raises ValueError for a model without experts and for texts that are too short.

    Models compute in float32 on a CPU, in their own 16 bits on a GPU, with the LM head as stored. GPTQ calibrates on the first
    half of the text `topics`, or of the first text.
    """
    source = _Source(folder, texts, settings, device, progress)
    document: dict[str, Any] = {
        "result": RESULT, "machine": machine(), "versions": versions(("transformers",)), "model": folder.name, "device": device,
        "settings": asdict(settings), "texts": list(texts), "complete": False,
        "rows": [], "routing": routing_statistics(source.chosen, source.experts),
    }  # fmt: skip
    document["rows"].append({"key": UNQUANTIZED, "bits_per_weight": 16.0, "paths": source.unquantized()})
    write_json(output, document)
    for number, (scheme, method) in enumerate(cases, 1):
        say(f"{number} of {len(cases)}: {scheme} {method}")
        with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".experts-") as work:
            row = _row(source, Path(work), scheme, method, say)
        document["rows"].append(row)
        write_json(output, document)
    document["complete"] = True
    write_json(output, document)
    return document


def _row(source: _Source, work: Path, scheme: str, method: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Quantizes and measures a case in the folder `work`."""
    row: dict[str, Any] = {"key": f"{scheme} {method}", "scheme": scheme, "method": method}
    calibration = source.calibration(work / "seen.txt") if method != "rtn" else None
    start = time.perf_counter()
    quantize_checkpoint(
        source.folder, work / "q", scheme, method=method, calibration=calibration, device=source.device,
        progress=source.progress, say=say,
    )  # fmt: skip
    row["seconds"] = time.perf_counter() - start
    model = load_causal(work / "q", device=source.device, dtype=measuring_dtype(source.device)).eval()
    size = size_of(str(work / "q"), model)
    return {**row, "bits_per_weight": None if size is None else size.bits_per_weight, "paths": source.compare(model)}


class _Source:
    """The 16-bit model, the tokens to measure on, its continuations and the experts that it chooses."""

    def __init__(self, folder: Path, texts: Mapping[str, str], settings: Settings, device: str, progress: bool) -> None:
        self.folder, self.settings, self.device, self.progress = folder, settings, device, progress
        self.model = load_causal(folder, device=device, dtype=measuring_dtype(device)).eval()
        self.modules = expert_modules(self.model)
        if not self.modules:
            raise ValueError(f"{folder}: has no experts that are known here; `python -m study upcycle` makes such a model")
        self.experts = next(iter(self.modules.values())).experts
        self.tokenizer = tokenizer_of(folder, self.model)
        parts = {name: halves(text) for name, text in texts.items()}
        self._seen = next((first for name, (first, _) in parts.items() if name == "topics"), next(iter(parts.values()))[0])
        self.ids = {name: self._tokens(name, second) for name, (_, second) in parts.items()}
        rows = [ids[: settings.prompts * settings.prompt].view(settings.prompts, -1) for ids in self.ids.values()]
        self.prompts = torch.cat(rows)
        with recorded(self.model, list(self.modules)) as batches:
            self._perplexity = {
                name: perplexity(self.model, ids, window=settings.window, progress=progress) for name, ids in self.ids.items()
            }
        self.chosen = _joined(batches)
        self.continued = continue_greedily(self.model, self.prompts, settings.new)

    def _tokens(self, name: str, text: str) -> Tensor:
        needed = self.settings.window * self.settings.windows
        ids: Tensor = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        if len(ids) < needed:
            raise ValueError(
                f"{name}: its second half has {len(ids):,} tokens, {self.settings.windows} windows of "
                f"{self.settings.window} take {needed:,}; take fewer windows or a longer text"
            )
        return ids[:needed]

    def calibration(self, path: Path) -> Calibration:
        """Returns the calibration text, written to `path`."""
        path.write_text(self._seen, encoding="utf-8")
        return Calibration(self.settings.samples, self.settings.length, 0, path)

    def unquantized(self) -> dict[str, Any]:
        """Returns the row of 16 bits: perplexity, and what the engine makes of the same weights."""
        cells = {name: _cells(own.figures()) for name, own in self._perplexity.items()}
        # Another copy, since a decode program takes the weights over.
        copy = load_causal(self.folder, device=self.device, dtype=measuring_dtype(self.device)).eval()
        return {TRANSFORMERS: {"figures": cells}, ENGINE: self._through_engine(copy)}

    def compare(self, model: PreTrainedModel) -> dict[str, Any]:
        """Returns the figures of a quantized model by path. The engine takes its weights over."""
        with recorded(model, list(self.modules)) as batches:
            figures = self._figures(model)
        chosen = _joined(batches)
        same = [float((own == chosen[name]).all(-1).float().mean()) for name, own in self.chosen.items()]
        tokens = continue_greedily(model, self.prompts, self.settings.new)
        through = {"figures": figures, "same_experts": sum(same) / len(same), "greedy": agreement(self.continued, tokens)}
        return {TRANSFORMERS: through, ENGINE: self._through_engine(model)}

    def _through_engine(self, model: PreTrainedModel) -> dict[str, Any]:
        """Returns the figures of a model through the engine: continuations by its steps, the others by its prompts. A model
        without a decode program has the reasons in place of figures."""
        longest = max(self.settings.window, self.settings.prompt + self.settings.new)
        pipe = Pipeline(
            model, self.tokenizer, engine=True, max_concurrent=16, cache_bytes=CACHE_BYTES,
            progress=None,
        )  # fmt: skip
        engine = pipe.engine
        if engine.program.reasons:
            return {"refused": list(engine.program.reasons)}
        requests = [Request(prompt, self.settings.new) for prompt in self.prompts.tolist()]
        sampled = [[token.token for token in sequence.sampled] for sequence in engine.generate(requests)]
        greedy = agreement(self.continued, torch.tensor(sampled))
        assert isinstance(engine.program, DecodeProgram)
        logits = PromptLogits(engine.program, longest, model.config.get_text_config().vocab_size)
        return {"report": engine.report(), "figures": self._figures(logits), "greedy": greedy}  # type: ignore[arg-type]

    def _figures(self, model: PreTrainedModel) -> Cells:
        """Returns divergence from 16 bits by text, and perplexity, which follows from the mean difference of the losses."""
        out = {}
        for name, ids in self.ids.items():
            result = divergence(model, self.model, ids, window=self.settings.window, progress=self.progress)
            value = self._perplexity[name].perplexity * math.exp(result.nll_difference)
            out[name] = _cells([Figure("perplexity", value, None, result.tokens, "tokens", "lower"), *result.figures()])
        return out


def _cells(figures: Sequence[Figure]) -> dict[str, list[float | None]]:
    return {figure.metric: [figure.value, figure.standard_error, figure.count] for figure in figures}


class PromptLogits(nn.Module):
    """The logits that a decode program computes for prompts, behind the interface that `lowbit.eval` calls.

    Takes the program over: its cache is replaced by one for a sequence of `longest` tokens.
    """

    def __init__(self, program: DecodeProgram, longest: int, vocab: int) -> None:
        super().__init__()
        self.program, pages = program, pages_for(longest)
        program.cache = None
        program.allocate_cache(1 + pages)  # page 0 is the dummy page
        self._slots = Slots(1, longest, vocab, (), program.device)
        self._slots.update([(0, i, i + 1) for i in range(pages)], [(0, 0)])

    @property
    def device(self) -> torch.device:
        """The device of the program."""
        return self.program.device

    def forward(self, ids: Tensor, use_cache: bool = False, logits_to_keep: int = 0) -> CausalLMOutput:
        """Returns the logits [1, T, V] of the tokens ids [1, T], or of the last `logits_to_keep` of them."""
        (tokens,) = ids.tolist()
        sequence = EngineSequence(Request(tokens, 1), slot=0)
        chunks = [PrefillChunk(sequence, 0, tuple(tokens), True)]
        on_gpu = self.device.type == "cuda"
        ragged = Ragged.of(chunks, self._slots, sizes(len(tokens))[-1] if on_gpu else len(tokens))
        ragged_kernel = on_gpu and not self.program.softcaps
        attention = None if ragged_kernel else PromptAttention(chunks, self._slots, invariant=self.program.batch_invariant)
        h, delta = self.program.prefill(ragged, self._slots, attention)
        kept = slice(len(tokens) - (logits_to_keep or len(tokens)), len(tokens))
        return CausalLMOutput(logits=self.program.logits(h[kept], delta[kept])[None])


# ---- continuations and routing


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, prompts: Tensor, new: int) -> Tensor:
    """Returns the greedy tokens [P, new] after prompts [P, T], by Transformers' `generate`; end-of-text does not stop them."""
    prompts = prompts.to(model.device)
    out = model.generate(  # type: ignore[operator]
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False, top_p=None, top_k=None,
        temperature=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[:, prompts.shape[1] :].cpu()


def agreement(expected: Tensor, tokens: Tensor) -> float:
    """Returns the share of the tokens [P, T] before the first that differs from the expected ones, over all prompts."""
    return float((expected == tokens).long().cumprod(1).float().mean())


@contextmanager
def recorded(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Records, while the block runs, the experts of each token in the modules `names`, batch by batch."""
    batches: dict[str, list[Tensor]] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            _, experts, *_ = (*args, *kwargs.values())
            batches[name].append(experts.sort(-1).values.cpu())

        return before

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield batches
    finally:
        for handle in handles:
            handle.remove()


def _joined(batches: Mapping[str, list[Tensor]]) -> Chosen:
    return {name: torch.cat(own) for name, own in batches.items()}


def routing_statistics(chosen: Chosen, experts: int) -> dict[str, dict[str, Any]]:
    """Returns for each layer the tokens of each expert; the largest and smallest share, relative to equal ones; and the
    effective number of experts, the exponential of the entropy of the shares."""
    out: dict[str, dict[str, Any]] = {}
    for name, own in chosen.items():
        counts = torch.bincount(own.flatten(), minlength=experts).double()
        shares = counts / counts.sum()
        out[name] = {
            "tokens": counts.long().tolist(),
            "largest": float(shares.max() * experts),
            "smallest": float(shares.min() * experts),
            "effective": float(torch.special.entr(shares).sum().exp()),
        }
    return out


# ---- tables


def table(document: Mapping[str, Any]) -> list[str]:
    """Returns a Markdown table of the rows: a line for each path."""
    texts = document["texts"]
    head = ["case", "bits", "through", *(f"{name} ppl" for name in texts), "KL", "same top-1 %", "greedy %", "same experts %"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for row in document["rows"]:
        bits = row["bits_per_weight"]
        for path, own in row["paths"].items():
            start = [row["key"], "" if bits is None else f"{bits:.2f}", path]
            lines.append("| " + " | ".join([*start, *_line(own, texts)]) + " |")
    return lines


def _line(own: Mapping[str, Any], texts: Sequence[str]) -> list[str]:
    """Returns the cells of a path after its name."""
    if "refused" in own:
        return [f"no decode program: {own['refused'][0]}", *[""] * (len(texts) + 3)]
    figures = own["figures"]

    def mean(metric: str) -> float | None:
        values = [figures[name][metric][0] for name in texts if metric in figures[name]]
        return sum(values) / len(values) if values else None

    kl, top1 = mean("KL mean"), mean("same top-1")
    return [
        *(f"{figures[name]['perplexity'][0]:.2f}" for name in texts),
        "" if kl is None else f"{kl:.4f}",
        *("" if value is None else f"{100 * value:.1f}" for value in (top1, own.get("greedy"), own.get("same_experts"))),
    ]


def routing_table(document: Mapping[str, Any]) -> list[str]:
    """Returns a Markdown table of how unequal the routing is: the mean and the most unequal of the layers."""
    routing = document["routing"]
    layers = list(routing.values())
    worst = min(routing, key=lambda name: routing[name]["effective"])
    lines = [
        "| layers | effective experts | largest share | smallest share |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, own in (("mean", layers), (worst, [routing[worst]])):
        cells = (sum(layer[key] for layer in own) / len(own) for key in ("effective", "largest", "smallest"))
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    app()
