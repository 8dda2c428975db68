"""Checkpoints: lossless round trips, atomic writing, and a clear error for every way a file can be wrong."""

from __future__ import annotations

import errno
import json
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import parse_scheme
from lowbit.quantize import rtn
from tests.tiny import with_channels

SCHEMES = [
    "w8a16",
    "w4a16_g64",
    "w3a16_g48_z",
    "w4a16_g32_fz",
    "w6e3m2a16",
    "w5e2m2a16",
    "w7a16_t",
    "w8e4m3a16_b8x8",
    "w2a16_g16_fz",
]


def write(folder, schemes=("w4a16_g32_fz", "w6e3m2a16"), **options):
    """Writes a checkpoint with one layer per scheme and one plain tensor; returns the layers."""
    g = torch.Generator().manual_seed(0)
    layers = {f"model.layer{i}": rtn(torch.randn(12, 75, generator=g), name) for i, name in enumerate(schemes)}
    default = parse_scheme(schemes[0])
    with CheckpointWriter(folder, **options) as writer:
        for name, q in layers.items():
            for suffix, tensor in layer_tensors(q).items():
                writer.add(f"{name}.{suffix}", tensor)
        writer.add("model.norm.weight", torch.ones(75).half())
        entries = {name: LayerEntry.of(q) for name, q in layers.items()}
        writer.finish({"model_type": "llama"}, Manifest(default, entries, ("lm_head",)))
    return layers


def write_with_channels(folder, **options):
    """Writes three layers: one with an order of channels, one with an input scale, one with both."""
    kinds = {"order": (True, None), "scale": (False, torch.bfloat16), "both": (True, torch.float32)}
    g = torch.Generator().manual_seed(0)
    layers = {
        name: with_channels(rtn(torch.randn(12, 75, generator=g), "w4a16_g16_z"), *kind, seed=i)
        for i, (name, kind) in enumerate(kinds.items())
    }
    with CheckpointWriter(folder, **options) as writer:
        for name, q in layers.items():
            for suffix, tensor in layer_tensors(q).items():
                writer.add(f"{name}.{suffix}", tensor)
        writer.finish({}, Manifest(parse_scheme("w4a16_g16_z"), {name: LayerEntry.of(q) for name, q in layers.items()}))
    return layers


@pytest.mark.parametrize("shard_bytes", [1 << 30, 700])
def test_round_trip_single_and_sharded(tmp_path, shard_bytes):
    layers = write(tmp_path / "c", SCHEMES, shard_bytes=shard_bytes)
    with CheckpointReader(tmp_path / "c") as reader:
        reader.check()
        assert reader.manifest.modules_to_not_convert == ("lm_head",)
        for name, q in layers.items():
            back = reader.layer(name)
            assert back.scheme == q.scheme
            assert torch.equal(back.codes, q.codes) and torch.equal(back.dequantize(), q.dequantize())
            assert back.scale.dtype == q.scale.dtype
        assert torch.equal(reader.get("model.norm.weight"), torch.ones(75).half())
    assert (tmp_path / "c" / "model.safetensors").exists() == (shard_bytes == 1 << 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"], "no temporary folder stays"


def test_byte_ranges_are_where_the_tensor_is(tmp_path):
    layers = write(tmp_path / "c")
    with CheckpointReader(tmp_path / "c") as reader:
        info = reader.info("model.layer1.weight_packed")
        raw = info.file.read_bytes()[info.begin : info.end]
        assert raw == layer_tensors(layers["model.layer1"])["weight_packed"].numpy().tobytes()


def test_config_states_the_manifest(tmp_path):
    write(tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["model_type"] == "llama"
    quantization = config["quantization_config"]
    assert quantization["scheme"] == "w4a16_g32_fz"
    assert quantization["layers"] == {
        "model.layer0": {"shape": [12, 75]},
        "model.layer1": {"shape": [12, 75], "scheme": "w6e3m2a16"},
    }
    assert Manifest.from_dict(quantization, "x").to_dict() == quantization


@pytest.mark.parametrize("shard_bytes", [1 << 30, 700])
def test_order_and_pre_quant_scale_round_trip(tmp_path, shard_bytes):
    layers = write_with_channels(tmp_path / "c", shard_bytes=shard_bytes)
    with CheckpointReader(tmp_path / "c") as reader:
        reader.check()
        for name, q in layers.items():
            back = reader.layer(name)
            for kind in ("codes", "scale", "zero", "order", "pre_quant_scale"):
                of_x = kind in ("order", "pre_quant_scale")
                ours, theirs = (getattr(each.input_transform if of_x else each, kind) for each in (q, back))
                assert ours is theirs is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), (name, kind)
            assert torch.equal(back.dequantize(), q.dequantize())
    quantization = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert quantization["format_version"] == 2
    assert quantization["layers"] == {
        "order": {"shape": [12, 75], "order": True},
        "scale": {"shape": [12, 75], "pre_quant_scale": True},
        "both": {"shape": [12, 75], "order": True, "pre_quant_scale": True},
    }
    assert Manifest.from_dict(quantization, "x").to_dict() == quantization


class TestWriting:
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_interruption_leaves_nothing(self, tmp_path, error):
        with pytest.raises(error), CheckpointWriter(tmp_path / "c", shard_bytes=10) as writer:
            writer.add("a", torch.ones(10))
            writer.add("b", torch.ones(10))
            raise error
        assert list(tmp_path.iterdir()) == []

    def test_an_interruption_keeps_what_was_there(self, tmp_path):
        write(tmp_path / "c")
        before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
        with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "c", overwrite=True) as writer:
            writer.add("a", torch.ones(10))
            raise KeyboardInterrupt
        assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before

    def test_an_existing_folder_needs_overwrite(self, tmp_path):
        write(tmp_path / "c")
        with pytest.raises(CheckpointError, match="not empty"):
            write(tmp_path / "c")
        write(tmp_path / "c", ("w8a16",), overwrite=True)
        with CheckpointReader(tmp_path / "c") as reader:
            assert list(reader.manifest.layers) == ["model.layer0"]
        assert [p.name for p in tmp_path.iterdir()] == ["c"]

    def test_what_a_killed_process_left_is_removed(self, tmp_path):
        others = [".cc.tmp-0123abcd", ".c.tmp-x", ".c.unfinished", ".c.tmp-x.tmp-0123abcd"]
        for name in [".c.tmp-0123abcd", ".c.tmp-00000000", *others]:
            (tmp_path / name).mkdir()
            for file in ("shard-1", ".tmpAb0xYz"):
                (tmp_path / name / file).write_bytes(b"half")
        write(tmp_path / "c")
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "c"])

    def test_a_full_disk_is_said_and_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("lowbit.checkpoint.writer.save_file", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            write(tmp_path / "c")
        assert list(tmp_path.iterdir()) == []

    def test_duplicates_and_files_in_the_way(self, tmp_path):
        with pytest.raises(CheckpointError, match="added twice"), CheckpointWriter(tmp_path / "c") as writer:
            writer.add("a", torch.ones(1))
            writer.add("a", torch.ones(1))
        (tmp_path / "f").write_text("")
        with pytest.raises(CheckpointError, match="not a folder"):
            CheckpointWriter(tmp_path / "f")


def edit_config(change):
    def apply(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config["quantization_config"])
        path.write_text(json.dumps(config))

    return apply


def edit_tensors(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def edit_header(change):
    def apply(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return apply


def set_bytes(name, data):
    return lambda folder: (folder / name).write_bytes(data)


PACKED, SCALE, ZERO = (f"model.layer0.weight_{kind}" for kind in ("packed", "scale", "zero"))
TAMPERINGS = {
    "unknown scheme": (edit_config(lambda c: c.update(scheme="w9a16")), r"config.json.*IntFormat|2 to 8 bits"),
    "scheme no text": (edit_config(lambda c: c.update(scheme=7)), r"config.json.*scheme's name"),
    "newer version": (edit_config(lambda c: c.update(format_version=3)), r"config.json.*format_version is 3, .* reads 1 and 2"),
    "unknown key": (edit_config(lambda c: c.update(code="import os")), r"config.json.*unknown keys \['code'\]"),
    "layers a list": (edit_config(lambda c: c.update(layers=[])), r"config.json.*layers is a JSON object"),
    "negative shape": (edit_config(lambda c: c["layers"]["model.layer0"].update(shape=[-1, 75])), r"model.layer0.*shape"),
    "absurd shape": (edit_config(lambda c: c["layers"]["model.layer0"].update(shape=[2**40, 75])), r"model.layer0.*shape"),
    "wrong shape": (
        edit_config(lambda c: c["layers"]["model.layer0"].update(shape=[12, 80])),
        rf"{PACKED}.*\(12, 40\).*\(12, 38\)",
    ),
    "layer without tensors": (edit_config(lambda c: c["layers"].update(ghost={"shape": [1, 1]})), r"ghost.weight_packed"),
    "tied to nothing": (edit_config(lambda c: c.update(tied={"lm_head": "ghost"})), r"lm_head.*tied to 'ghost'"),
    "tensor missing": (edit_tensors(lambda t: t.pop(SCALE)), rf"no file has {SCALE}"),
    "tensor cut": (edit_tensors(lambda t: t.update({PACKED: t[PACKED][:, :-1].contiguous()})), PACKED),
    "tensor of another type": (edit_tensors(lambda t: t.update({PACKED: t[PACKED].to(torch.int8)})), rf"{PACKED}.*torch.int8"),
    "zeros of another type": (edit_tensors(lambda t: t.update({ZERO: t[ZERO].to(torch.uint8)})), ZERO),
    "unknown dtype": (edit_header(lambda h: h[PACKED].update(dtype="U4")), rf"model.safetensors: {PACKED}: dtype"),
    "offsets out of order": (edit_header(lambda h: h[PACKED].update(data_offsets=[9, 3])), rf"model.safetensors: {PACKED}"),
    "offsets beyond the end": (edit_header(lambda h: h[PACKED].update(data_offsets=[10**9, 10**9 + 456])), PACKED),
    "shape not of the bytes": (edit_header(lambda h: h[PACKED].update(shape=[10**9, 10**9])), PACKED),
    "overlap": (
        edit_header(lambda h: h[SCALE].update(data_offsets=h["model.norm.weight"]["data_offsets"])),
        "model.safetensors",
    ),
    "empty file": (set_bytes("model.safetensors", b""), r"model.safetensors: not a safetensors file, or truncated"),
    "shape of no tensor": (
        edit_header(lambda h: h.update(x={"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]})),
        r"model\.safetensors: x: no tensor can have the shape \(0, 9223372036854775808\)",
    ),
    "strides of no tensor": (
        edit_header(lambda h: h.update(x={"dtype": "F32", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]})),
        r"model\.safetensors: x: no tensor can have the shape",
    ),
    "100 dimensions": (
        edit_header(lambda h: h.update(x={"dtype": "F32", "shape": [0] * 100, "data_offsets": [0, 0]})),
        r"model\.safetensors: x: no tensor can have the shape",
    ),
    "huge header": (set_bytes("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"), r"model.safetensors: not a safe"),
    "header no JSON": (set_bytes("model.safetensors", struct.pack("<Q", 4) + b"nope"), r"model.safetensors: its header"),
    "header a list": (set_bytes("model.safetensors", struct.pack("<Q", 2) + b"[]"), r"model.safetensors: its header is a list"),
    "deep JSON": (set_bytes("config.json", b'{"a":' * 100_000), r"config.json: not JSON"),
    "config no object": (set_bytes("config.json", b"3"), r"config.json: holds a int"),
    "config gone": (lambda folder: (folder / "config.json").unlink(), r"config.json: missing"),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), r"holds neither model.safetensors nor"),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampered_files_are_refused_by_name(tmp_path, what):
    write(tmp_path / "c")
    tamper, message = TAMPERINGS[what]
    tamper(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path / "c")


ORDER, PRE_QUANT_SCALE = "both.weight_order", "both.pre_quant_scale"


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (
            edit_tensors(lambda t: t[ORDER].__setitem__(3, t[ORDER][4])),
            rf"model.safetensors: {ORDER}: must contain each of 0 to 74",
        ),
        (edit_tensors(lambda t: t[ORDER].add_(1)), rf"model.safetensors: {ORDER}: must contain each of 0 to 74"),
        (edit_tensors(lambda t: t[ORDER].neg_()), rf"model.safetensors: {ORDER}: must contain each of 0 to 74"),
        (
            edit_tensors(lambda t: t.update({ORDER: t[ORDER].long()})),
            rf"{ORDER}.*int32 \(75,\), the file has torch.int64",
        ),
        (edit_tensors(lambda t: t.update({ORDER: t[ORDER][:-1].clone()})), rf"{ORDER}.*torch.int32 \(75,\).*\(74,\)"),
        (edit_tensors(lambda t: t.pop(ORDER)), rf"lists the layer 'both', but no file has {ORDER}"),
        (edit_tensors(lambda t: t.pop(PRE_QUANT_SCALE)), rf"lists the layer 'both', but no file has {PRE_QUANT_SCALE}"),
        (
            edit_tensors(lambda t: t.update({PRE_QUANT_SCALE: t[PRE_QUANT_SCALE].double()})),
            rf"{PRE_QUANT_SCALE}.*the file has torch.f",
        ),
        (edit_config(lambda c: c["layers"]["both"].pop("order")), rf'{ORDER}: config.json does not say.*\("order": true\)'),
        (
            edit_config(lambda c: c["layers"]["both"].update(pre_quant_scale=False)),
            rf'{PRE_QUANT_SCALE}: config.json does not say.*\("pre_quant_scale": true\)',
        ),
        (
            edit_config(lambda c: c["layers"]["both"].update(order=1)),
            r"config.json: layer 'both': 'order' is true or false",
        ),
    ],
)
def test_orders_and_pre_quant_scales_that_do_not_fit_are_refused(tmp_path, tamper, message):
    write_with_channels(tmp_path / "c")
    tamper(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path / "c")


def test_check_looks_into_pre_quant_scales(tmp_path):
    write_with_channels(tmp_path / "c")
    edit_tensors(lambda t: t[PRE_QUANT_SCALE].__setitem__(0, float("nan")))(tmp_path / "c")
    with (
        CheckpointReader(tmp_path / "c") as reader,
        pytest.raises(CheckpointError, match=rf"{PRE_QUANT_SCALE}: some values are not finite"),
    ):
        reader.check()


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_truncated_files_are_refused(tmp_path, cut):
    write(tmp_path / "c")
    path = tmp_path / "c" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        CheckpointReader(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[SCALE].fill_(float("nan")), rf"{SCALE}: some scales are not finite"),
        (lambda t: t[SCALE].fill_(float("inf")), rf"{SCALE}: some scales are not finite"),
        (lambda t: t[ZERO].fill_(float("inf")), rf"{ZERO}: some zeros are not finite"),
        (lambda t: t[PACKED][:, -1].fill_(255), rf"{PACKED}: unused bits"),
    ],
)
def test_check_looks_into_the_tensors(tmp_path, change, message):
    write(tmp_path / "c")
    edit_tensors(change)(tmp_path / "c")
    with CheckpointReader(tmp_path / "c") as reader, pytest.raises(CheckpointError, match=message):
        reader.check()


@pytest.mark.parametrize("name", ["../c/evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b"])
def test_an_index_cannot_leave_the_folder(tmp_path, name):
    write(tmp_path / "c", shard_bytes=700)
    index = tmp_path / "c" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"index\.json: names the file .* only plain file names"):
        CheckpointReader(tmp_path / "c")


def test_an_index_must_agree_with_its_files(tmp_path):
    write(tmp_path / "c", shard_bytes=700)
    index = tmp_path / "c" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["ghost"] = value["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="ghost: .* lists it, the file does not have it"):
        CheckpointReader(tmp_path / "c")
    del value["weight_map"]["ghost"], value["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .* does not list it"):
        CheckpointReader(tmp_path / "c")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickles_are_never_opened(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save(Bomb(str(tmp_path / "ran")), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        CheckpointReader(folder)
    assert not (tmp_path / "ran").exists()


def test_plain_checkpoints_are_read_without_a_manifest(tmp_path):
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with CheckpointReader(tmp_path) as reader:
        assert reader.manifest is None and reader.names() == ["a.weight"]
        with pytest.raises(CheckpointError, match="no tensor 'b'"):
            reader.get("b")


@pytest.mark.parametrize("seed", range(300))
def test_damaged_bytes_never_crash_the_reader(tmp_path_factory, seed):
    """Random damage ends in a CheckpointError or in tensors of the sizes that config.json promises, nothing else."""
    base = tmp_path_factory.getbasetemp() / "fuzz-base"
    if not base.exists():
        write(base, shard_bytes=700)
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("fuzz") / "c"
    shutil.copytree(base, folder)
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        spot = rng.randrange(min(len(data), 600)) if rng.random() < 0.8 else rng.randrange(len(data))
        data[spot] = rng.randrange(256)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(data)
    try:
        with CheckpointReader(folder) as reader:
            reader.check()
            for name in reader.names():
                assert reader.get(name).nbytes <= len(data) + 10_000
    except CheckpointError as error:
        assert str(folder) in str(error)
