"""Runs the study on one model: quantizes each case on disk, measures it, and stores every finished row."""

from __future__ import annotations

import copy
import fnmatch
import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbit.checkpoint import CheckpointReader, expected_tensors
from lowbit.checkpoint.target import CHECKPOINT, discard
from lowbit.eval.choice import choose
from lowbit.eval.divergence import divergence
from lowbit.eval.figure import Figure
from lowbit.eval.pass_at_k import solve
from lowbit.eval.perplexity import perplexity
from lowbit.eval.rouge import summarize
from lowbit.eval.sandbox import choose_isolation
from lowbit.eval.suite import Settings as SuiteSettings
from lowbit.eval.suite import Task, read_tasks
from lowbit.formats import InputTransform, Scheme, rotate_blocks
from lowbit.models.calibrate import Calibration
from lowbit.models.complete import require_complete
from lowbit.models.hf import plan_for
from lowbit.models.learn import rounded_activations
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import tokenizer_of
from lowbit.pipeline import Pipeline
from study.cases import Case, cases, group_size, needs_text
from study.data import text_tasks
from study.results import UNQUANTIZED, Results

SEEN = "seen"
"""Name of the calibration text measured on the samples used for calibration."""
SUMMARIES, PROGRAMS = 128, 16
"""Batch sizes of documents and of programming problems."""
RECORDED_BYTES = 2 << 30
"""Bytes of logits up to which those of the 16-bit model are recorded once, so that a study of few windows needs one model in
memory instead of two."""


@dataclass(frozen=True)
class Settings:
    """Settings of a study: `windows` of `window` tokens per text; `samples` calibration samples of `length` tokens; at most
    `limit` questions, documents and problems. Programs run only with `run_generated_code`. Models compute in `dtype`."""

    window: int = 1024
    windows: int = 16
    samples: int = 32
    length: int = 512
    limit: int | None = None
    dtype: str = "float32"
    run_generated_code: bool = False


def halves(text: str) -> tuple[str, str]:
    """Splits a text at the first empty line after its middle: the first part for calibration, the second for measuring.
    Raises ValueError if there is no empty line there."""
    middle = text.find("\n\n", len(text) // 2)
    if middle < 0:
        raise ValueError("a text of the study has paragraphs with empty lines between them, one after its middle at least")
    return text[:middle], text[middle:].lstrip("\n")


def run(
    source: Path,
    data: Path,
    path: Path,
    settings: Settings,
    *,
    only: str | None = None,
    wanted: Sequence[Case] | None = None,
    texts: Collection[str] | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> Results:
    """Measures the 16-bit model in `source` and every case on the texts and tasks in the folder `data`, into the result file
    `path`. `only` is a pattern for the keys of cases. `wanted` replaces the cases of the study (`study.cases.cases`).
    `texts` names the texts to measure on, without any task; by default all texts and tasks are taken.

    Rows in the file are not measured again. A killed calibration resumes after its last finished layer. Raises ValueError for
    texts that are too short, for a result file with other settings, and if programs should run without isolation.
    """
    if settings.run_generated_code:
        choose_isolation()
    tasks = read_tasks(data, None, SuiteSettings(limit=settings.limit)) if texts is None else text_tasks(data, texts)
    measured_on = [task for task in tasks if task.kind == "text"]
    measure = Measure(source, tasks, settings, device, progress)
    group = group_size(measure.model)
    described = [task_record(task) for task in tasks]
    request = {"model": source.name, "group": group, "settings": asdict(settings), "tasks": described}
    results = Results(path, request)
    results.document.setdefault("weights", _weights(measure.model))
    work = path.with_name(f".{path.stem}.work")
    work.mkdir(parents=True, exist_ok=True)
    for task in measured_on:
        (work / f"{task.name}.txt").write_text(halves(task.content)[0], encoding="utf-8")
    wanted = cases(group, [task.name for task in measured_on]) if wanted is None else wanted
    chosen = [case for case in wanted if only is None or fnmatch.fnmatch(case.key, only)]
    if UNQUANTIZED not in results:
        say(UNQUANTIZED)
        row = {"key": UNQUANTIZED, "scheme": None, "method": None, "calibration": None, "bits_per_weight": 16.0, "seconds": 0.0}
        results.add(row, measure.unquantized())
    for number, case in enumerate(chosen, 1):
        if case.key not in results:
            say(f"{number} of {len(chosen)}: {case.key}")
            _add(case, source, work, measure, settings, device, progress, results)
    if all(case.key in results for case in wanted):
        results.write(complete=True)
        discard(work, [f"{task.name}.txt" for task in measured_on])
    return results


def _weights(model: PreTrainedModel) -> dict[str, int]:
    """Returns the numbers of weights in quantized linear layers and elsewhere."""
    linear = sum(n * k for n, k in plan_for(model, "w8a16", None, False).linears.values())
    return {"linear": linear, "other": sum(p.numel() for p in model.parameters()) - linear}


def _untied(model: PreTrainedModel) -> tuple[str, str]:
    """Gives the LM head separate weights. Returns the names of the weights of embedding and head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    return names[embedding], names[head]


def _rounding(scheme: Scheme, transform: InputTransform) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    """Returns a hook that rounds the input of a layer of dequantized weights as the quantized layer does: after the rotation
    and the scale of its channels, which the dequantized weights undo. Channel orders change no token's rounding."""
    static = {k: t for k, t in transform.tensors().items() if k in ("activation_scale", "activation_zero")}

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = rotate_blocks(args[0], transform.hadamard) if transform.hadamard else args[0]
        channels = None if transform.pre_quant_scale is None else transform.pre_quant_scale.to(x)
        x = x if channels is None else x * channels
        x = rounded_activations(x, scheme, **{k: t.to(x.device) for k, t in static.items()})
        x = x if channels is None else x / channels
        return (rotate_blocks(x, transform.hadamard) if transform.hadamard else x,)

    return hook


def task_record(task: Task) -> dict[str, Any]:
    """Returns the description of a text or task for a result file, without its path."""
    return {key: value for key, value in task.described().items() if key != "path"}


def _add(
    case: Case, source: Path, work: Path, measure: Measure, settings: Settings, device: str, progress: bool, results: Results
) -> None:
    target = work / case.key.replace(" ", "-")
    calibration = None
    if needs_text(case):
        calibration = Calibration(settings.samples, settings.length, case.seed, work / f"{case.text}.txt")
    discard(target, CHECKPOINT)  # left by a run killed while measuring, perhaps of another model
    row, figures = measured(case, source, target, calibration, measure, device, progress)
    figures += measure.tasks() if case.tasks else []
    if calibration is not None:
        figures += measure.seen(calibration.tokens(source), settings.length)
    results.add(row, figures)
    discard(target, CHECKPOINT)


def measured(
    case: Case, source: Path, target: Path, calibration: Calibration | None, measure: Measure, device: str, progress: bool
) -> tuple[dict[str, Any], list[tuple[str, Figure]]]:
    """Quantizes `source` to the folder `target` and loads the result into `measure`. Returns the row of a result file without
    its figures, and the figures on the texts."""
    start = time.perf_counter()
    quantize_checkpoint(
        source, target, case.scheme, method=case.method, calibration=calibration, rotation=case.rotation,
        rotate_inputs=("*",) if case.rotate_inputs else (), device=device, progress=progress,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    row = {
        "key": case.key, "scheme": case.scheme, "method": case.method_name, "bits_per_weight": measure.load(target),
        "seconds": seconds, "calibration": None if calibration is None else {"text": case.text, "seed": case.seed},
    }  # fmt: skip
    return row, measure.texts()


class _Recorded(nn.Module):
    """The outputs of a model on windows of texts, in place of the model."""

    def __init__(self, model: PreTrainedModel, windows: Iterable[Tensor]) -> None:
        super().__init__()
        self.device = model.device
        with torch.inference_mode():
            self._logits = {w.numpy().tobytes(): model(w[None].to(model.device), use_cache=False).logits for w in windows}

    def forward(self, input_ids: Tensor, logits_to_keep: int, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits[input_ids.cpu().numpy().tobytes()][:, -logits_to_keep:])


class Measure:
    """The 16-bit model, another that loads the weights of one case after the other, and the data. Both compute in one dtype
    with dequantized weights, and inputs rounded as the layers round them: this compares codes, not the rounding of kernels.
    They share the tensors that no case changes. Logits of all texts that fit into RECORDED_BYTES replace the 16-bit model."""

    def __init__(self, source: Path, tasks: Sequence[Task], settings: Settings, device: str, progress: bool) -> None:
        self.settings, self.progress = settings, progress
        dtype = getattr(torch, settings.dtype)
        self._load_source = functools.partial(load_causal, source, device=device, dtype=dtype)
        self.model: PreTrainedModel = self._load_source().eval()
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(source, self.model)
        self._others = [task for task in tasks if task.kind != "text"]
        self._ids = {task.name: self._tokens(task) for task in tasks if task.kind == "text"}
        vocabulary: int = self.model.get_output_embeddings().weight.shape[0]
        self._records = sum(map(len, self._ids.values())) * vocabulary * dtype.itemsize <= RECORDED_BYTES
        if self._records:
            windows = (window for ids in self._ids.values() for window in ids.split(settings.window))
            self.reference = cast(PreTrainedModel, _Recorded(self.model, windows))
        else:
            self.reference = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        self._ends = _untied(self.model)
        self._hooks: list[RemovableHandle] = []

    def load(self, folder: Path) -> float:
        """Loads the weights of a quantized checkpoint. Returns the bits per weight of its quantized layers."""
        self._unhook()
        with CheckpointReader(folder) as reader:
            assert reader.manifest is not None
            entries = reader.manifest.layers
            quantized = {tensor for name, entry in entries.items() for tensor in expected_tensors(name, entry)}
            others = [name for name in reader.names() if name not in quantized]
            shapes = {name: tuple(reader.info(name).shape) for name in others}
            shapes |= {f"{name}.weight": entry.shape for name, entry in entries.items()}
            require_complete(folder, self.model, shapes)
            nbytes = weights = 0
            for name in entries:
                q = reader.layer(name)
                nbytes, weights = nbytes + q.nbytes, weights + q.codes.numel()
                self._assign(f"{name}.weight", q.dequantize())
                if q.scheme.activation is not None:
                    linear, round_input = self.model.get_submodule(name), _rounding(q.scheme, q.input_transform)
                    self._hooks.append(linear.register_forward_pre_hook(round_input))
            embedding, head = self._ends
            for name in others:
                self._assign(name, reader.get(name))
                if name == embedding and head not in shapes:
                    self._assign(head, reader.get(name))
        return 8 * nbytes / weights

    def load_model(self, model: nn.Module) -> None:
        """Loads the parameters of another model of the same architecture, fake-quantized for example."""
        self._unhook()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._assign(name, parameter.detach())

    def _unhook(self) -> None:
        """Removes the rounding of inputs of the model loaded before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _assign(self, name: str, value: Tensor) -> None:
        """Replaces a tensor, unless it has these values already."""
        module, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(module)
        current: Tensor = getattr(owner, leaf)
        value = value.to(current)
        if not torch.equal(current, value):
            setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if leaf in owner._parameters else value)

    def unquantized(self) -> list[tuple[str, Figure]]:
        """Returns perplexity of the 16-bit model on every text, and its figures on the tasks."""
        window = self.settings.window
        found = [(t, f) for t, ids in self._ids.items() for f in perplexity(self.reference, ids, window=window).figures()]
        return found + self.tasks()

    def texts(self) -> list[tuple[str, Figure]]:
        """Returns the divergence of the loaded model from the 16-bit one on every text."""
        window = self.settings.window
        return [pair for name, ids in self._ids.items() for pair in self._divergence(name, ids, window, self.reference)]

    def seen(self, tokens: Tensor, length: int) -> list[tuple[str, Figure]]:
        """Returns the divergence on the calibration samples [S, T], for as many tokens as of other texts."""
        count = -(-self.settings.windows * self.settings.window // length)
        reference = self._load_source().eval() if self._records else self.reference
        return self._divergence(SEEN, tokens[:count].flatten(), length, reference)

    def tasks(self) -> list[tuple[str, Figure]]:
        """Returns questions, summaries and programs of the loaded model."""
        found: list[tuple[str, Figure]] = []
        pipe = Pipeline(self.model, self.tokenizer, engine=False)
        for task in self._others:
            if task.kind == "choice":
                figures = choose(self.model, self.tokenizer, task.content, progress=self.progress).figures()
            elif task.kind == "summary":
                figures = summarize(pipe, task.content, batch_size=SUMMARIES, progress=self.progress).figures()
            elif self.settings.run_generated_code:
                figures = solve(pipe, task.content, batch_size=PROGRAMS, progress=self.progress).figures()
            else:
                figures = []
            found += [(task.name, figure) for figure in figures]
        return found

    def _divergence(self, name: str, ids: Tensor, window: int, reference: PreTrainedModel) -> list[tuple[str, Figure]]:
        result = divergence(self.model, reference, ids, window=window, progress=self.progress)
        return [(name, figure) for figure in result.figures()]

    def _tokens(self, task: Task) -> Tensor:
        needed = self.settings.window * self.settings.windows
        ids: Tensor = self.tokenizer(halves(task.content)[1], return_tensors="pt", verbose=False).input_ids[0]
        if len(ids) < needed:
            raise ValueError(
                f"{task.name}: its second part has {len(ids):,} tokens, {self.settings.windows} windows of "
                f"{self.settings.window} take {needed:,}; take fewer windows or a longer text"
            )
        return ids[:needed]
