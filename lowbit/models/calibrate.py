"""Calibrated quantization of a checkpoint on disk, one decoder layer after the other.

Layer i is read, its inputs on the calibration texts are observed, it is quantized, and the quantized layer computes the inputs
of layer i + 1; then its memory is freed. The result of a layer is written to disk before the next one starts, so a killed run
can be resumed: the next run reads the finished layers and runs each once on the texts, while quantizing takes several passes.
This gives the same inputs, so the same files. The file name of a finished layer contains its SHA-256; a layer whose file does
not match is quantized again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowbit._version import __version__
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.checkpoint.reader import file_sha256, read_text
from lowbit.checkpoint.target import PARTIAL, discard, sync
from lowbit.formats import InputTransform, LowRank, QuantTensor, Scheme
from lowbit.methods import Learned, Method
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.distill import distill
from lowbit.models.expert_calibration import dense_parameter
from lowbit.models.expert_names import expert_modules
from lowbit.models.hf import give_back_freed_memory
from lowbit.models.layer_methods import LayerResult
from lowbit.models.quantize_layer import LayerQuantizer
from lowbit.models.skeleton import tokenizer_of
from lowbit.progress import Progress
from lowbit.quantize.expert_layer import LEAST_TOKENS

TOKENS_AT_ONCE = 8192
"""Tokens per call of a layer on a GPU, rounded down to whole texts; enough to hide the launch overhead. On a CPU each call has
one text, so that the result does not depend on the batch."""


@dataclass(frozen=True)
class Calibration:
    """The calibration text: `samples` sequences of `length` tokens, sampled without overlap by `seed` from the file `text`.

    text: plain text, or JSON lines with a "text" each; None is the topics of Python's help, 465,000 characters. Evaluate on
    another text.
    """

    samples: int = 128
    length: int = 512
    seed: int = 0
    text: Path | None = None

    def record(self) -> dict[str, Any]:
        """Returns the file name of the text and the sampling options, for config.json."""
        text = "topics of Python's help" if self.text is None else self.text.name
        return {"text": text, "samples": self.samples, "length": self.length, "seed": self.seed}

    def read(self) -> str:
        """Returns the text."""
        if self.text is None:
            from pydoc_data.topics import topics

            return "\n\n".join(topics[name] for name in sorted(topics))
        content = read_text(self.text, 'calibration takes UTF-8 text, or .jsonl with a "text" a line')
        if self.text.suffix not in (".jsonl", ".json"):
            return content
        texts = []
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                texts.append(_text_of(line, f"{self.text}:{number}"))
        return "\n\n".join(texts)

    def tokens(self, folder: Path) -> Tensor:
        """Returns token ids [samples, length] by the tokenizer in `folder`; raises ValueError for a text that is too short."""
        ids = tokenizer_of(folder)(self.read(), return_tensors="pt", verbose=False).input_ids[0]
        available = len(ids) // self.length
        if self.samples < 1 or self.length < 2 or available < self.samples:
            raise ValueError(
                f"calibration takes {self.samples} x {self.length} tokens, {self.text or 'the built-in text'} has "
                f"{len(ids):,}, enough for {available} pieces; take fewer or shorter samples, or give a longer text"
            )
        chosen = torch.randperm(available, generator=torch.Generator().manual_seed(self.seed))[: self.samples].sort().values
        return ids[: available * self.length].reshape(available, self.length)[chosen]


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f'{where}: a line of calibration text is a JSON object with a "text" ({error!r})') from error
    if not isinstance(text, str):
        raise ValueError(f'{where}: "text" is a string, got {type(text).__name__}')
    return text


_PARTS = ("*.tmp", PARTIAL)
LAYERS, DISTILLED = "layer", "distilled"
"""The stages of a run: prefixes of the files of finished layers."""
_LAYERS = (f"{LAYERS}-*.safetensors", f"{DISTILLED}-*.safetensors", *_PARTS)


class FinishedLayers:
    """The finished layers of a run, in a hidden folder beside its target that is removed when the run is done.

    recipe: everything on which the layers depend. say: called with a line for each damaged file. The caller holds the lock of
    `target`. Raises CheckpointError if the folder has the layers of another recipe.
    """

    def __init__(self, target: Path, recipe: dict[str, Any], say: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self._say, self.stage = unfinished_folder(target), say, LAYERS
        text = json.dumps(recipe, indent=2, sort_keys=True) + "\n"
        path = self.folder / "recipe.json"
        known = path.exists()
        if known and path.read_bytes() != text.encode():
            raise CheckpointError(
                f"{self.folder}: holds the finished layers of another run for {target} (another method, scheme, model or "
                "text); repeat that command to finish it, or delete the folder"
            )
        # Layers without a recipe are not known to belong to this run.
        discard(self.folder, _PARTS if known else _LAYERS)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not known:
            _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def write(self, i: int, result: LayerResult) -> None:
        """Writes the result of layer i in the current stage, atomically."""
        tensors: dict[str, Tensor] = {}
        for n, q in result.quantized.items():
            named = {"codes": q.codes, "scale": q.scale, "zero": q.zero, **q.input_transform.tensors()}
            tensors |= {f"quantized {n} {key}": t for key, t in named.items() if t is not None}
        tensors |= {f"changed {n}": t for n, t in result.changed.items()}
        for n, correction in ((n, q.low_rank) for n, q in result.quantized.items() if q.low_rank is not None):
            tensors |= {f"quantized {n} up": correction.up, f"quantized {n} down": correction.down}
        for n, matrices in result.experts.items():
            tensors |= {f"experts {n} {key}": t for key, t in _stacked(matrices).items()}
        plain = {name: t.cpu().contiguous() for name, t in tensors.items()}
        metadata = {"notes": json.dumps(result.notes), "error": json.dumps(result.error)}
        _replace(
            self.folder / f"{self.stage}-{i:05}.safetensors", lambda path: save_file(plain, str(path), metadata), checksum=True
        )

    def read(self, i: int, schemes: Mapping[str, Scheme]) -> LayerResult | None:
        """Returns the result of layer i in the current stage; None if it is not finished. A damaged file is removed, and its
        layer is not finished."""
        path = self._intact(i)
        if path is None:
            return None
        fields: dict[str, dict[str, Tensor]] = {}
        experts: dict[str, dict[str, Tensor]] = {}
        with safe_open(str(path), framework="pt") as file:
            metadata = {key: json.loads(text) for key, text in file.metadata().items()}
            result = LayerResult(notes=metadata["notes"], error=metadata["error"])
            for key in file.keys():  # noqa: SIM118  (not a dict)
                kind, name, *rest = key.split(" ")
                if kind == "changed":
                    result.changed[name] = file.get_tensor(key)
                else:
                    table = experts if kind == "experts" else fields
                    table.setdefault(name, {})[rest[0]] = file.get_tensor(key)
        for name, parts in fields.items():
            correction = LowRank(parts.pop("up"), parts.pop("down")) if "up" in parts else None
            codes, scale, zero = parts.pop("codes"), parts.pop("scale"), parts.pop("zero", None)
            result.quantized[name] = QuantTensor(
                codes, scale, zero, schemes[name], InputTransform(**cast(Any, parts)), correction
            )
        result.experts = {name: _unstacked(parts, schemes[name]) for name, parts in experts.items()}
        return result

    def require(self, i: int, schemes: Mapping[str, Scheme]) -> LayerResult:
        """Returns the result of layer i, which was finished. Raises CheckpointError if its file is damaged."""
        result = self.read(i, schemes)
        if result is None:
            raise CheckpointError(
                f"{self.folder}: the file of layer {i} was damaged after it was written; the same command quantizes that "
                "layer again"
            )
        return result

    def clear(self) -> None:
        """Removes the folder."""
        discard(self.folder, _LAYERS)  # before the recipe, without which they are invalid
        discard(self.folder, ("recipe.json",))

    def _intact(self, i: int) -> Path | None:
        """Returns the file of layer i if its SHA-256 is the one in its name; else removes and reports it."""
        for path in self.folder.glob(f"{self.stage}-{i:05}.*.safetensors"):
            try:
                if path.name.split(".")[1] == file_sha256(path):
                    return path
                why = "its SHA-256 is not the one in its name"
            except CheckpointError as error:  # a read error of the disk
                why = str(error)
            self._say(f"layer {i} is quantized again: {path.name.split('.')[0]} in {self.folder} is damaged ({why})")
            path.unlink()
        return None


def _stacked(matrices: Sequence[QuantTensor]) -> dict[str, Tensor]:
    """Returns the matrices of all experts as tensors with a leading dimension E, and their shared input transform."""
    named = {"codes": [q.codes for q in matrices], "scale": [q.scale for q in matrices]}
    zeros = [q.zero for q in matrices if q.zero is not None]
    named |= {"zero": zeros} if zeros else {}
    shared = matrices[0].input_transform
    return {key: torch.stack(parts) for key, parts in named.items()} | shared.as_tensors()


def _unstacked(parts: dict[str, Tensor], scheme: Scheme) -> list[QuantTensor]:
    """Returns the matrix of each expert; the inverse of `_stacked`."""
    codes, scale, zero = parts.pop("codes"), parts.pop("scale"), parts.pop("zero", None)
    transform = InputTransform.of_tensors(parts)
    zeros = [None] * len(codes) if zero is None else list(zero)
    return [QuantTensor(c, s, z, scheme, transform) for c, s, z in zip(codes, scale, zeros, strict=True)]


class CalibratedWeights:
    """The quantized weights and changed tensors of a calibrated run, by name; one decoder layer is in memory at a time."""

    def __init__(self, decoder: LayerwiseDecoder, finished: FinishedLayers, schemes: Mapping[str, Scheme]) -> None:
        self.finished = finished
        self._decoder, self._schemes = decoder, schemes
        self._index, self._result = -1, LayerResult()

    def quantized(self, module: str) -> QuantTensor | None:
        """Returns the weight of a module; None if it is not in a decoder layer."""
        name = self._read_layer_of(module)
        return None if name is None else self._result.quantized[name]

    def experts(self, parameter: str) -> list[QuantTensor] | None:
        """Returns the matrices of all experts for a parameter, with rows in the parameter's order; None if it is not in a
        decoder layer."""
        name = self._read_layer_of(parameter)
        return None if name is None else self._result.experts[name]

    def changed(self, tensor: str) -> Tensor | None:
        """Returns the new value of a tensor of the files into which a scale was folded; None if it is unchanged."""
        parameter = self._decoder.model_name(tensor)
        name = None if parameter is None else self._read_layer_of(parameter)
        return None if name is None else self._result.changed.get(name)

    def _read_layer_of(self, name: str) -> str | None:
        """Reads the decoder layer of `name` and returns the name relative to it; None outside of decoder layers."""
        number, _, rest = name.removeprefix(f"{self._decoder.name}.").partition(".")
        if not name.startswith(f"{self._decoder.name}.") or not rest:
            return None
        if int(number) != self._index:
            prefix = f"{self._decoder.layer_name(int(number))}."
            own = {n.removeprefix(prefix): scheme for n, scheme in self._schemes.items() if n.startswith(prefix)}
            self._index, self._result = int(number), self.finished.require(int(number), own)
        return rest


def unfinished_folder(target: Path) -> Path:
    """Returns the folder of the finished layers of a calibrated run for `target`."""
    return target.absolute().parent / f".{target.name}.unfinished"


def finished_bytes(target: Path) -> int:
    """Returns the bytes on disk of the finished layers of a run for `target`."""
    return sum(path.stat().st_size for path in unfinished_folder(target).glob("layer-*.safetensors"))


def calibrate_layers(
    decoder: LayerwiseDecoder,
    schemes: Mapping[str, Scheme],
    method: Method,
    tokens: Tensor,
    finished: FinishedLayers,
    *,
    embeddings: Mapping[str, Tensor] | None = None,
    low_rank: int = 0,
    expert_rotations: Mapping[str, int] | None = None,
    progress: bool = False,
) -> list[str]:
    """Quantizes the linear layers and weights of experts named in `schemes` (full names of modules, and of parameters for
    experts) in decoder layers, and writes the results to `finished`.

    low_rank: the rank of corrections, 0 for none. expert_rotations: as for `LayerQuantizer`. tokens [S, T]: the calibration
    texts. embeddings: dequantized parameters by name that replace those of the files. Returns notes on layers and experts that
    were only rounded, and on the errors of learning and of experts.

    Peak memory: the embedding or one decoder layer in the dtype of computing, the activations of all texts twice, the Hessians
    of one decoder layer (4 K^2 bytes per input of K channels; GPTQ has one at a time, and three float64 matrices of that size
    to factorize it), and what Python and torch allocate. An expert layer takes its inputs once more, and the Hessians of one
    expert at a time.
    """
    first = hidden = decoder.embed(tokens, embeddings, _together(decoder, method, tokens))
    expected = hidden if isinstance(method, Learned) else None  # the hidden states of the float model
    distilled = isinstance(method, Learned) and method.distill > 0
    first = first if distilled else []
    quantizer = LayerQuantizer(decoder, method, low_rank, expert_rotations)
    notes = []
    bar = Progress(range(len(decoder)), desc=type(method).__name__.lower(), unit="layers", shown=progress)
    for i in bar:
        prefix, own = f"{decoder.layer_name(i)}.", _schemes_of(decoder, i, schemes)
        result = finished.read(i, own)
        if result is None or expected is not None:
            decoder.load(i)
        if expected is not None:
            expected = list(decoder.run(i, expected))
        if result is None:
            result = quantizer.quantize(i, hidden, own, expected) if own else LayerResult()
            finished.write(i, result)
        else:
            dense = {f"{name}.weight": q.dequantize() for name, q in result.quantized.items()}
            decoder.load(i, {**dense, **_other_parameters(decoder, i, result)})
        notes += result.notes
        if result.error is not None:
            bar.set_postfix_str(f"error {result.error[0]:.2e} -> {result.error[1]:.2e}")
            notes.append(f"{prefix[:-1]}: error {result.error[0]:.3e} -> {result.error[1]:.3e}")
        hidden = list(decoder.run(i, hidden))
        decoder.free(i)
        give_back_freed_memory()
    if distilled:
        assert isinstance(method, Learned) and expected is not None
        del hidden
        notes.append(_distill(decoder, schemes, method, finished, first, expected))
    return notes


def _distill(
    decoder: LayerwiseDecoder, schemes: Mapping[str, Scheme], method: Learned, finished: FinishedLayers, first: list[Tensor],
    expected: list[Tensor],
) -> str:  # fmt: skip
    """Trains scales, norms and biases of the finished layers (`models.distill`), and writes the results as the stage DISTILLED.

    Returns a line about the divergence. Afterwards `finished` is in that stage."""
    own = [_schemes_of(decoder, i, schemes) for i in range(len(decoder))]
    finished.stage = DISTILLED
    if all(finished.read(i, each) is not None for i, each in enumerate(own)):
        return "scales, norms and biases were distilled before"
    finished.stage = LAYERS
    results = [finished.require(i, each) for i, each in enumerate(own)]
    dense = [_other_parameters(decoder, i, result) for i, result in enumerate(results)]
    trained, (before, after) = distill(decoder, first, expected, results, dense, method)
    finished.stage = DISTILLED
    for i, each in enumerate(trained):
        finished.write(i, each)
    return f"distilled scales, norms and biases: {before:.4f} -> {after:.4f} nats per token on the calibration texts"


def _other_parameters(decoder: LayerwiseDecoder, i: int, result: LayerResult) -> dict[str, Tensor]:
    """Returns the parameters of layer i that its result changes, but for the weights of quantized linear layers."""
    transposed = {name: m.transposed for m in expert_modules(decoder.layers[i]).values() for name in (m.first, m.down)}
    experts = {name: dense_parameter(matrices, transposed[name]) for name, matrices in result.experts.items()}
    return experts | result.changed


def _schemes_of(decoder: LayerwiseDecoder, i: int, schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Returns the schemes of layer i by names relative to it."""
    prefix = f"{decoder.layer_name(i)}."
    return {name.removeprefix(prefix): scheme for name, scheme in schemes.items() if name.startswith(prefix)}


def _together(decoder: LayerwiseDecoder, method: Method, tokens: Tensor) -> int:
    """Returns the number of texts per call of a layer."""
    if isinstance(method, Learned):
        return method.batch
    return 1 if decoder.device.type == "cpu" else max(1, TOKENS_AT_ONCE // tokens.shape[1])


def recipe_of(
    reader: CheckpointReader,
    schemes: Mapping[str, Scheme],
    method: Method,
    low_rank: int,
    tokens: Tensor,
    decoder: LayerwiseDecoder,
    expert_rotations: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns everything that the results of a run depend on, for JSON."""
    files = sorted({reader.info(name).file for name in reader.names()})
    return {
        "lowbit": __version__,
        "rotation": [reader.rotation, decoder.rotated_inputs, dict(expert_rotations or {})],
        "experts": LEAST_TOKENS,
        "config": sha256(json.dumps(reader.config, sort_keys=True).encode()).hexdigest(),
        "source": [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files],
        "schemes": {name: scheme.name for name, scheme in schemes.items()},
        "method": [type(method).__name__, asdict(method), low_rank],
        "tokens": [list(tokens.shape), sha256(tokens.numpy().tobytes()).hexdigest()],
        "computing": [decoder.device.type, str(decoder.dtype), torch.__version__],
    }


def _replace(path: Path, write: Callable[[Path], object], *, checksum: bool = False) -> None:
    """Writes a file under a temporary name, syncs it and renames it to `path`; with `checksum`, to STEM.SHA256.SUFFIX."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write(temporary)
        sync(temporary)
        name = f"{path.stem}.{file_sha256(temporary)}{path.suffix}" if checksum else path.name
        os.replace(temporary, path.with_name(name))
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: cannot be written ({error}); what was finished before is kept, the same command goes on from there"
        ) from error
