"""Damaged model files must give a one-line error that names the file, or a model that computes finite results.

The kinds are a lowbit checkpoint, a 16-bit model, a GGUF file and the file of `lowbit tune`.
"""

from __future__ import annotations

import functools
import json
import shutil
import struct
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import lowbit
from lowbit import quantize_checkpoint
from lowbit._version import __version__
from lowbit.engine import RequestFailed
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.gemm import candidates
from lowbit.kernels.choose.tiles import KINDS, GemmShape
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.pipeline import Pipeline
from tests.fuzz.changes import BYTES, VALUES, changed, changes_of, with_bytes
from tests.models.test_convert_checkpoint import GGUF_CONFIG, write_gguf
from tests.tiny import save_tiny, tiny_tokenizer

WEIGHTS, CONFIG, TUNED, GGUF = "model.safetensors", "config.json", "h200.json", "m.gguf"
SHAPE, MACHINE = GemmShape(64, 5120, 13824, 4), typical_machine(90)


@functools.cache
def originals():
    """A folder with the undamaged files, one subfolder per kind."""
    root = Path(tempfile.mkdtemp(prefix="lowbit-fuzz-"))
    save_tiny(root / "plain", tied=False)
    quantize_checkpoint(root / "plain", root / "quantized", "w4a16_g32")
    (root / "gguf").mkdir()
    torch.manual_seed(0)
    write_gguf(root / "gguf" / GGUF, LlamaForCausalLM(GGUF_CONFIG))
    (root / "tuned").mkdir()
    tile = next(row.tile for row in candidates(SHAPE, MACHINE)[1:] if not row.reasons)
    row = asdict(tuned.TunedRow(64, tuned.written(tile, KINDS), 20.0, 25.0, "2026-11-23"))
    document = {
        "result": tuned.RESULT,
        "schema": tuned.SCHEMA,
        "lowbit": __version__,
        "products": {tuned.problem_of(SHAPE): [row]},
    }
    (root / "tuned" / TUNED).write_text(json.dumps(document))
    return root


def header_of(data):
    """(JSON header, remaining bytes) of a safetensors file."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def with_header(header, body):
    """The bytes of a safetensors file with this header and body."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _header_cases(kind):
    def of(root):
        header, _ = header_of((root / kind / WEIGHTS).read_bytes())
        return changes_of(header, VALUES).map(lambda changes: (kind, "header", changes))

    return st.deferred(lambda: of(originals()))


def _config_cases(kind, name=CONFIG):
    def of(root):
        document = json.loads((root / kind / name).read_text())
        return changes_of(document, VALUES).map(lambda changes: (kind, name, changes))

    return st.deferred(lambda: of(originals()))


def _byte_cases(kind, name, share=1.0):
    """A strategy for byte changes in the first `share` of a file, where its header is."""
    return BYTES.map(lambda changes: (kind, name, tuple((where * share, *rest) for where, *rest in changes)))


CASES = st.one_of(
    _header_cases("plain"), _header_cases("quantized"), _config_cases("plain"), _config_cases("quantized"),
    _config_cases("tuned", TUNED), _byte_cases("tuned", TUNED), _byte_cases("plain", CONFIG),
    _byte_cases("plain", WEIGHTS, 0.02),
    _byte_cases("quantized", WEIGHTS, 0.05), _byte_cases("gguf", GGUF, 0.03), _byte_cases("gguf", GGUF, 0.1),
)  # fmt: skip
"""(kind, changed file, changes of JSON fields or of bytes). The file "header" is the JSON header of the safetensors file."""


def check(case):
    """Loads a model with a damaged file and generates two tokens."""
    kind, name, changes = case
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "c")
        shutil.copytree(originals() / kind, folder)
        file = folder / (WEIGHTS if name == "header" else name)
        data = file.read_bytes()
        if name == "header":
            header, body = header_of(data)
            file.write_bytes(with_header(changed(header, changes), body))
        elif isinstance(changes[0][0], tuple):
            file.write_text(json.dumps(changed(json.loads(data), changes)))
        else:
            file.write_bytes(with_bytes(data, changes))
        if kind == "tuned":
            _choose(file)
        else:
            _generate(folder, file if kind == "gguf" else folder)


def _choose(file):
    """A damaged tile file gives a warning, or has no effect."""
    tuned.forget()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = candidates(SHAPE, _tuned_machine(file))
    assert rows and all("\n" not in str(each.message) for each in said)
    tuned.forget()


def _tuned_machine(file):
    """MACHINE with the tuned tiles of `file`."""
    return replace(MACHINE, tuned=str(file))


def _generate(folder, model):
    try:
        if model == folder:
            check_checkpoint(folder)
            loaded = load_causal(folder, device="cpu", dtype=torch.float32)
        else:
            loaded = lowbit.load(model, device="cpu", dtype=torch.float32)
        said = Pipeline(loaded, tiny_tokenizer(), engine=False)("ab", max_new_tokens=2, do_sample=False)
    except (ValueError, OSError, RequestFailed) as error:
        assert "\n" not in str(error).strip(), error
        return
    assert said[0].generated_length >= 1
