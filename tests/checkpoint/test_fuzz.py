"""Damaged files of a checkpoint give a clean error that names the file, or the same tensors. Only damage of the kinds in
`UNSEEN` may change tensors without an error, and the checksums in config.json detect even that."""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import parse_scheme
from lowbit.quantize import rtn
from tests.tiny import with_channels

CASES = 600
"""Number of cases for each checkpoint; a case takes about 2 ms."""
INDEX = "model.safetensors.index.json"


def lowbit(folder, **options):
    """Layers with zero points, floating-point zeros, an order, an input scale, a mini-float and a tie, and plain tensors."""
    g = torch.Generator().manual_seed(0)
    layers = {
        f"model.layers.{i}.proj": rtn(torch.randn(6, 40, generator=g), scheme)
        for i, scheme in enumerate(("w4a16_g16_z", "w4a16_g16_fz", "w6e3m2a16"))
    }
    layers["model.layers.3.proj"] = with_channels(rtn(torch.randn(6, 40, generator=g), "w4a16_g16_z"))
    with CheckpointWriter(folder, **options) as writer:
        for name, q in layers.items():
            for suffix, tensor in layer_tensors(q).items():
                writer.add(f"{name}.{suffix}", tensor)
        writer.add("model.norm.weight", torch.ones(40).half())
        entries = {name: LayerEntry.of(q) for name, q in layers.items()}
        manifest = Manifest(parse_scheme("w4a16_g16_z"), entries, ("lm_head",), {"lm_head": "model.layers.0.proj"})
        writer.finish({"model_type": "llama", "hidden_size": 40}, manifest)


def plain(folder, **options):
    g = torch.Generator().manual_seed(1)
    with CheckpointWriter(folder, **options) as writer:
        for i, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32, torch.int64)):
            writer.add(f"model.{i}.weight", torch.randn(4, 20, generator=g).to(dtype))
        writer.finish({"model_type": "llama", "hidden_size": 40}, None)


BASES = {
    "lowbit": lambda folder: lowbit(folder),
    "lowbit in shards": lambda folder: lowbit(folder, shard_bytes=500),
    "plain": lambda folder: plain(folder),
    "plain in shards": lambda folder: plain(folder, shard_bytes=300),
}


def state(folder: Path, verify: bool):
    """Everything that a reader gets from the checkpoint, as bytes."""
    with CheckpointReader(folder) as reader:
        if verify:
            reader.verify_files()
        reader.check()
        tensors = {name: reader.get(name) for name in reader.names()}
        layers = {name: reader.layer(name) for name in (reader.manifest.layers if reader.manifest else {})}
        seen = {
            name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()
        }
        dense = {name: q.dequantize().numpy().tobytes() for name, q in layers.items()}
        manifest = reader.manifest
    return seen, dense, manifest and (manifest.scheme, manifest.layers, manifest.tied)


def some_bytes(rng, path, where):
    data = bytearray(path.read_bytes())
    spots = where(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        spot = rng.choice(spots)
        data[spot] = data[spot] ^ (1 << rng.randrange(8)) if rng.random() < 0.6 else rng.randrange(256)
    path.write_bytes(data)


def header_length(data):
    return 8 + struct.unpack("<Q", data[:8])[0]


def header_bytes(rng, folder):
    some_bytes(rng, rng.choice(weights(folder)), lambda data: range(header_length(data)))


def tensor_bytes(rng, folder):
    some_bytes(rng, rng.choice(weights(folder)), lambda data: range(header_length(data), len(data)))


def text_bytes(rng, folder):
    some_bytes(rng, rng.choice(texts(folder)), lambda data: range(len(data)))


def truncated(rng, folder):
    path = rng.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def longer(rng, folder):
    path = rng.choice(weights(folder))
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 40)))


def missing(rng, folder):
    rng.choice(sorted(folder.iterdir())).unlink()


def swapped_files(rng, folder):
    a, b = rng.sample(sorted(folder.iterdir()), 2)
    (a_bytes, b_bytes) = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_bytes), b.write_bytes(a_bytes)


def swapped_tensors(rng, folder):
    """Exchanges two names in a header, as if the tensors had been stored under each other's name."""
    edit_header(rng, folder, lambda header, names: exchange(header, *rng.sample(names, 2)))


def swapped_in_index(rng, folder):
    if not (folder / INDEX).exists():
        return swapped_tensors(rng, folder)
    index = json.loads((folder / INDEX).read_text())
    exchange(index["weight_map"], *rng.sample(sorted(index["weight_map"]), 2))
    (folder / INDEX).write_text(json.dumps(index))


def strange_header(rng, folder):
    """Replaces a field of a tensor's entry by a value of another type or size."""

    def change(header, names):
        header[rng.choice(names)][rng.choice(["dtype", "shape", "data_offsets"])] = strange(rng)

    edit_header(rng, folder, change)


def strange_field(rng, folder):
    """Replaces, removes or adds a value anywhere in quantization_config or the index."""
    path = rng.choice(texts(folder))
    value = json.loads(path.read_text())
    inside = value.get("quantization_config") or value
    while rng.random() < 0.7 and any(isinstance(v, dict) and v for v in inside.values()):
        inside = rng.choice([v for v in inside.values() if isinstance(v, dict) and v])
    key = rng.choice(sorted(inside))
    match rng.randrange(3):
        case 0:
            inside[key] = strange(rng)
        case 1:
            del inside[key]
        case 2:
            inside[f"{key}x"] = inside[key]
    path.write_text(json.dumps(value))


def duplicate_key(rng, folder):
    """Repeats a key in an object, of which readers may take either value."""
    path = rng.choice(texts(folder))
    text = path.read_text()
    spots = [i for i, c in enumerate(text) if c == "{"]
    spot = rng.choice(spots)
    first = text.index('"', spot)
    key = text[first : text.index('"', first + 1) + 1]
    path.write_text(f"{text[: spot + 1]}{key}: {json.dumps(strange(rng))}, {text[spot + 1 :]}")


def deep(rng, folder):
    path, kind = rng.choice(texts(folder)), rng.choice(['{"a":', "["])
    text = path.read_text().rstrip()
    path.write_text(f'{text[:-1]}, "deep": {kind * 200_000}')


def not_finite(rng, folder):
    """Writes NaN or an infinity into a scale, zero or plain tensor, whose size stays right."""
    path = rng.choice(weights(folder))
    tensors = load_file(path)
    floating = [t for t in tensors.values() if t.is_floating_point()]
    if floating:
        rng.choice(floating).view(-1)[0] = rng.choice([math.nan, math.inf, -math.inf])
    save_file(tensors, path, metadata={"format": "pt"})


def other_dtype(rng, folder):
    path = rng.choice(weights(folder))
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensors[name] = tensors[name].to(rng.choice([torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32]))
    save_file(tensors, path, metadata={"format": "pt"})


DAMAGES = (
    header_bytes, tensor_bytes, text_bytes, truncated, longer, missing, swapped_files, swapped_tensors, swapped_in_index,
    strange_header, strange_field, duplicate_key, deep, not_finite, other_dtype,
)  # fmt: skip
UNSEEN = (
    tensor_bytes, header_bytes, text_bytes, swapped_files, swapped_tensors, swapped_in_index, strange_header, strange_field,
    not_finite, other_dtype,
)  # fmt: skip
"""Kinds of damage that may turn a file or manifest into another valid one, which only a checksum can detect."""


def weights(folder):
    return sorted(folder.glob("*.safetensors"))


def texts(folder):
    return sorted(folder.glob("*.json"))


def exchange(mapping, a, b):
    mapping[a], mapping[b] = mapping[b], mapping[a]


def edit_header(rng, folder, change):
    path = rng.choice(weights(folder))
    data = path.read_bytes()
    header = json.loads(data[8 : header_length(data)])
    names = sorted(set(header) - {"__metadata__"})
    if len(names) < 2:
        return
    change(header, names)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[header_length(data) :])


def strange(rng):
    simple = [None, True, -1, 0, 1, 1.5, 2**31, 2**63, 10**400, 1e308, "", "U8", "F4", "w9a16", "w4a16_g16", "../x", "a" * 9999]
    nested = [[], [[]], [1, 2, 3], [-1, 8], [2**40, 2**40], [1.0, 2.0], {}, {"a": {}}, {"sha256": "0" * 64}]
    return rng.choice([*simple, *nested])


@pytest.fixture(scope="module", params=BASES)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "c"
    BASES[request.param](folder)
    return folder, request.param, state(folder, verify=True)


def test_damage_is_seen_or_does_not_matter(base, tmp_path):
    whole, name, expected = base
    rng = random.Random(name)
    folder, passed = tmp_path / "c", 0
    for case in range(CASES):
        damage = DAMAGES[case % len(DAMAGES)]
        shutil.copytree(whole, folder)
        damage(rng, folder)
        for verify in (False, True):
            try:
                found = state(folder, verify)
            except CheckpointError as error:
                assert str(folder) in str(error), (damage.__name__, case)
                continue
            same = found == expected
            if name.startswith("lowbit") and verify:
                assert same or not states_checksums(folder), (damage.__name__, case)
            else:
                assert same or damage in UNSEEN, (damage.__name__, case)
                passed += not same
        shutil.rmtree(folder)
    assert passed, "bytes of weights were changed too"


def states_checksums(folder):
    """Whether config.json still states a lowbit checkpoint with checksums. Otherwise the folder is a plain checkpoint, whose
    tensors fit no model, or a lowbit checkpoint that `inspect --check` reports as without checksums.
    """
    stated = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    return stated.get("quant_method") == "lowbit" and {"files", "sha256"} <= set(stated)
