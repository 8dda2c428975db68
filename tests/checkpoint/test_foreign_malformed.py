"""Damaged files of other tools always give a CheckpointError that names the file or the tensor."""

from __future__ import annotations

import json
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.checkpoint import CheckpointError, ForeignReader, GgufReader
from tests.checkpoint.foreign import DATA, FOLDERS

Q = "model.layers.0.self_attn.q_proj"
GPTQ, AWQ, PACKED = "gptq-gptqmodel-w4-act-order-v2", "awq-auto-round", "compressed-tensors-w3-asym"
INT, FP8, NF4, MX = (
    "compressed-tensors-w8a8-asym",
    "compressed-tensors-fp8-block",
    "bitsandbytes-nf4-nested",
    "compressed-tensors-mxfp4",
)
AR, AR_AWQ, MIXED = "auto-round-w5-asym", "auto-round-awq-asym", "auto-round-mixed"
NVFP4, OPT, AO8, AO4 = "compressed-tensors-nvfp4", "modelopt-nvfp4", "torchao-int8-dynamic", "torchao-int4-asym"
OPT_AWQ, O_PROJ = "modelopt-int4-awq", "model.layers.0.self_attn.o_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


def config(change):
    def apply(folder):
        value = json.loads((folder / "config.json").read_text())
        change(value["quantization_config"])
        (folder / "config.json").write_text(json.dumps(value))

    return apply


def group(change):
    return config(lambda c: change(next(iter(c["config_groups"].values()))))


def weights(**change):
    return group(lambda g: g["weights"].update(change))


def tensor(suffix, change, layer=Q):
    """Replaces one tensor of a layer (by default the q projection) by the result of `change`; None removes the tensor."""

    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        new = change(tensors.pop(f"{layer}.{suffix}"))
        if new is not None:
            tensors[f"{layer}.{suffix}"] = new.contiguous()
        save_file(tensors, folder / "model.safetensors")

    return apply


def renamed(suffix, new):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{Q}.{new}"] = tensors.pop(f"{Q}.{suffix}")
        save_file(tensors, folder / "model.safetensors")

    return apply


def torchao(change):
    return config(lambda c: change(c["quant_type"]["default"]))


def fill(value, where=0):
    def change(t):
        t = t.clone()
        t.view(-1)[where] = value
        return t

    return change


def state(**change):
    def edit(t):
        value = json.loads(bytes(t.tolist()))
        return torch.tensor(list(json.dumps({**value, **change}).encode()), dtype=torch.uint8)

    return edit


def gone(t):
    return None


def cut_rows(t):
    return t[:-1]


def as_float(t):
    return t.float()


NAN = fill(float("nan"))
CASES = {
    "gptq bits 5": (
        GPTQ,
        config(lambda c: c.update(bits=5)),
        r"config\.json: GPTQ weights of 5 bits; supported are 2, 3, 4, 8",
    ),
    "gptq bits no number": (GPTQ, config(lambda c: c.update(bits="4")), "bits must be int, got '4'"),
    "gptq bits missing": (GPTQ, config(lambda c: c.pop("bits")), "no bits or w_bit"),
    "gptq bits not of the tensors": (GPTQ, config(lambda c: c.update(bits=8)), rf"{Q}\.|scales"),
    "gptq group 0": (GPTQ, config(lambda c: c.update(group_size=0)), "group size 0 must be positive"),
    "gptq other group": (GPTQ, config(lambda c: c.update(group_size=16)), r"scales: 3 groups do not divide 96"),
    "gptq unknown version": (GPTQ, config(lambda c: c.update(checkpoint_format="gptq_v3")), "'gptq_v3'.*supported are gptq"),
    "gptq marlin": (GPTQ, config(lambda c: c.update(is_marlin_format=True)), "'marlin'.*supported are gptq"),
    "gptq words of 8 bits": (GPTQ, config(lambda c: c.update(pack_dtype="int8")), "pack_dtype is 'int8'"),
    "gptq symmetric with zeros": (GPTQ, config(lambda c: c.update(sym=True)), "sym is true, but zero points"),
    "gptq no zeros": (GPTQ, tensor("qzeros", gone), rf"{Q}\.qzeros: missing; the layer's tensors are: g_idx, qweight, scales"),
    "gptq no codes": (GPTQ, tensor("qweight", gone), rf"{Q}\.qweight: missing"),
    "gptq no order": (GPTQ, tensor("g_idx", gone), rf"{Q}\.g_idx: missing, and desc_act"),
    "gptq float codes": (GPTQ, tensor("qweight", as_float), rf"{Q}\.qweight: a matrix of int32 .*float32"),
    "gptq codes cut": (GPTQ, tensor("qweight", cut_rows), rf"{Q}\.g_idx: int32 \(56,\)"),
    "gptq channels cut": (GPTQ, tensor("qweight", lambda t: t[:, :-1]), rf"{Q}\.qweight: 4-bit codes of 64 channels"),
    "gptq flat codes": (GPTQ, tensor("qweight", torch.flatten), rf"{Q}\.qweight: a matrix"),
    "gptq empty codes": (GPTQ, tensor("qweight", lambda t: t[:0]), rf"{Q}\.qweight: a matrix"),
    "gptq zeros cut": (GPTQ, tensor("qzeros", cut_rows), rf"{Q}\.qzeros: int32 \(2, 8\)"),
    "gptq scales NaN": (GPTQ, tensor("scales", NAN), rf"{Q}\.scales: some scales are not finite"),
    "gptq scales of 64 bits": (GPTQ, tensor("scales", torch.Tensor.double), rf"{Q}\.scales: a matrix of float16"),
    "gptq group out of range": (GPTQ, tensor("g_idx", fill(7)), rf"{Q}\.g_idx: the groups \(from 0 to 7\)"),
    "gptq negative group": (GPTQ, tensor("g_idx", fill(-1)), rf"{Q}\.g_idx: the groups \(from -1 to 1\)"),
    "gptq unequal groups": (GPTQ, tensor("g_idx", lambda t: torch.zeros_like(t)), rf"{Q}\.g_idx: the groups .* one size"),
    "gptq order of 64 bits": (GPTQ, tensor("g_idx", torch.Tensor.long), rf"{Q}\.g_idx: int32"),
    "awq other version": (AWQ, config(lambda c: c.update(version="gemv_fast")), "AWQ version 'gemv_fast'; supported is gemm"),
    "awq 8 bits": (AWQ, config(lambda c: c.update(bits=8)), "AWQ weights of 8 bits"),
    "awq without zeros": (
        AWQ,
        config(lambda c: c.update(zero_point=False)),
        r"qzeros: config.json states zero_point: false, but the stored zero",
    ),
    "awq codes cut": (AWQ, tensor("qweight", lambda t: t[:, :-1]), rf"{Q}\.qweight: 64 channels"),
    "awq K not divided": (AWQ, tensor("qweight", lambda t: t[:20]), rf"{Q}\.scales: 2 groups do not divide 20"),
    "awq scales infinite": (AWQ, tensor("scales", fill(float("inf"))), rf"{Q}\.scales: some scales are not finite"),
    "auto-round other format": (
        AR,
        config(lambda c: c.update(packing_format="auto_round:fp8_static")),
        "fp8_static.*supported are.*llm_compressor",
    ),
    "auto-round quantized activations": (AR, config(lambda c: c.update(act_bits=8)), "act_bits 8.*llm_compressor"),
    "auto-round floats": (AR, config(lambda c: c.update(data_type="mx_fp4")), "data_type 'mx_fp4'.*llm_compressor"),
    "auto-round GGUF's scales": (AR, config(lambda c: c.update(super_bits=6)), "super_bits is '6'"),
    "auto-round 9 bits": (AR, config(lambda c: c.update(bits=9)), "auto-round's weights of 9 bits"),
    "auto-round exception no object": (AR, config(lambda c: c.update(extra_config={"a": 4})), "extra_config is an object of"),
    "auto-round exception with activations": (
        AR,
        config(lambda c: c.update(extra_config={"lm_head": {"act_bits": 4}})),
        "extra_config: lm_head: act_bits 4",
    ),
    "auto-round exceptions not stated": (
        MIXED,
        config(lambda c: c["extra_config"].clear()),
        r"up_proj\.qzeros: int32 \(4, 12\) is expected",
    ),
    "auto-round group of no size stated": (
        MIXED,
        config(lambda c: c["extra_config"]["model.layers.0.mlp.up_proj"].update(group_size=8)),
        "8 groups do not divide|4 gr",
    ),
    "auto-round two sizes fit": (
        MIXED,
        config(lambda c: c["extra_config"].update(a={"group_size": 40})),
        "fit group sizes 32 and 40: ambiguous",
    ),
    "auto-round codes cut": (AR_AWQ, tensor("qweight", lambda t: t[:, :-1]), rf"{Q}\.qweight: 64 channels"),
    "nvfp4 no global scale": (NVFP4, tensor("weight_global_scale", gone), rf"{Q}\.weight_global_scale: missing"),
    "nvfp4 global scale of 0": (NVFP4, tensor("weight_global_scale", torch.zeros_like), "whole matrix is 0"),
    "nvfp4 global scale tiny": (NVFP4, tensor("weight_global_scale", lambda t: t * 0 + 1e-40), "beyond float32"),
    "nvfp4 scales cut": (NVFP4, tensor("weight_scale", cut_rows), rf"{Q}\.weight_scale: float8_e4m3fn"),
    "nvfp4 scale NaN": (OPT, tensor("weight_scale", lambda t: t.view(torch.uint8).fill_(127).view(t.dtype)), "are NaN"),
    "nvfp4 K not divided": (
        OPT,
        tensor("weight", lambda t: t[:, :12]),
        rf"{Q}\.weight: rows of 12 bytes do not hold whole groups",
    ),
    "modelopt awq factors cut": (
        OPT_AWQ,
        tensor("pre_quant_scale", lambda t: t[:-1], O_PROJ),
        r"o_proj\.pre_quant_scale: .* \(64,\) is expected, found float32 \(63,\)",
    ),
    "modelopt awq factors infinite": (
        OPT_AWQ,
        tensor("pre_quant_scale", lambda t: t * torch.inf, O_PROJ),
        r"o_proj\.pre_quant_scale: some scales are not finite",
    ),
    "modelopt awq rows cut": (OPT_AWQ, tensor("weight", cut_rows), r"weight_scale: .* whole groups of 64 .* found 64 x 2"),
    "modelopt awq groups": (
        OPT_AWQ,
        tensor("weight", lambda t: t[:, :63]),
        r"weight_scale: 64 rows of whole groups of 63 input channels are expected, found 64 x 2",
    ),
    "modelopt other algorithm": (
        OPT,
        config(lambda c: c.update(quant_algo="W4A8_AWQ")),
        "'W4A8_AWQ'; supported ModelOpt exports are FP8",
    ),
    "torchao one kernel's": (
        AO8,
        torchao(lambda c: c.update(_type="Int4WeightOnlyConfig")),
        "Int4WeightOnlyConfig is not supported",
    ),
    "torchao name only": (AO8, config(lambda c: c.update(quant_type="int8_weight_only")), "quant_type is an object.*pickles"),
    "torchao several": (
        AO8,
        torchao(
            lambda c: c.update(_type="FqnToConfig", _data={"fqn_to_config": {"a": dict(c), "b": {"_type": "x", "_data": {}}}})
        ),
        "FqnToConfig with 2 configurations",
    ),
    "torchao bits beyond": (
        AO4,
        tensor("_weight_qdata", fill(9)),
        rf"{Q}\._weight_qdata: values from -8 to 9 are beyond 4-bit integers",
    ),
    "torchao zero points not stated": (
        AO8,
        tensor("_weight_zero_point", fill(1)),
        rf"{Q}\._weight_zero_point: config.json says that the weights are symmetric",
    ),
    "torchao zero points missing": (AO4, tensor("_weight_zero_point", gone), rf"{Q}\._weight_zero_point: missing"),
    "torchao scales cut": (AO4, tensor("_weight_scale", cut_rows), rf"{Q}\._weight_scale: .*do not divide"),
    "torchao other tensors": (
        AO8,
        renamed("_weight_zero_point", "_weight_act_pre_scale"),
        rf"{Q}\._weight_act_pre_scale: static activations",
    ),
    "packed no groups": (PACKED, config(lambda c: c.update(config_groups={})), "config_groups is an object"),
    "packed group no object": (PACKED, config(lambda c: c.update(config_groups={"a": 1})), "a: a config group is an object"),
    "packed format unknown": (
        PACKED,
        group(lambda g: g.update(format="marlin-24")),
        "'marlin-24' is not supported; supported are pack",
    ),
    "packed 9 bits": (PACKED, weights(num_bits=9), "9 bits"),
    "packed true bits": (PACKED, weights(num_bits=True), "num_bits must be int, got True"),
    "packed float": (PACKED, weights(type="float"), "'float' do not go with format pack"),
    "packed channel order": (PACKED, weights(actorder="group"), "actorder 'group'"),
    "packed strategy": (PACKED, weights(strategy="tensor_group"), "strategy 'tensor_group'"),
    "packed group size": (PACKED, weights(group_size=-3), "group_size -3"),
    "packed sparse": (PACKED, config(lambda c: c.update(sparsity_config={"format": "sparse-24"})), "sparse weights"),
    "packed shape gone": (PACKED, tensor("weight_shape", gone), rf"{Q}\.weight_shape: missing"),
    "packed shape absurd": (PACKED, tensor("weight_shape", fill(1 << 40, 1)), rf"{Q}\.weight_packed: 3-bit"),
    "packed shape negative": (PACKED, tensor("weight_shape", fill(-64, 1)), rf"{Q}\.weight_packed: 3-bit"),
    "packed shape of rows": (PACKED, tensor("weight_shape", fill(3)), rf"{Q}\.weight_packed: 3-bit"),
    "packed scales cut": (PACKED, tensor("weight_scale", cut_rows), rf"{Q}\.weight_scale: float16 or .* \(64, 2\)"),
    "packed scales NaN": (PACKED, tensor("weight_scale", NAN), rf"{Q}\.weight_scale: some scales are not finite"),
    "packed no zeros": (PACKED, tensor("weight_zero_point", gone), rf"{Q}\.weight_zero_point: missing"),
    "int beyond its bits": (INT, weights(num_bits=4), r"down_proj\.weight: values from -?\d+ to \d+ are beyond 4-bit"),
    "int other type": (INT, tensor("weight", torch.Tensor.short), rf"{Q}\.weight: a matrix of int8"),
    "fp8 NaN weights": (
        FP8,
        tensor("weight", lambda t: fill(0x7F)(t.view(torch.uint8)).view(t.dtype)),
        r"some weights are NaN",
    ),
    "fp8 blocks": (FP8, weights(block_structure=[0, 32]), "block_structure"),
    "fp8 other blocks": (FP8, weights(block_structure=[16, 32]), r"down_proj\.weight_scale: .* \(4, 3\)"),
    "mx scales NaN": (MX, tensor("weight_scale", fill(255)), rf"{Q}\.weight_scale: .*NaN \(255\)"),
    "mx codes cut": (
        MX,
        tensor("weight_packed", lambda t: t[:, :-1]),
        rf"{Q}\.weight_packed: rows of 31 do not hold whole groups",
    ),
    "nf4 8 bits": (NF4, config(lambda c: c.update(load_in_4bit=False, _load_in_4bit=False)), r"LLM\.int8\(\) is not supported"),
    "nf4 state no JSON": (NF4, tensor(STATE, fill(0)), rf"{Q}\.{STATE}: not JSON"),
    "nf4 state gone": (NF4, tensor(STATE, gone), rf"{Q}\.{STATE}: missing"),
    "nf4 shape": (NF4, tensor(STATE, state(shape=[64, 1 << 40])), "are invalid"),
    "nf4 other shape": (NF4, tensor(STATE, state(shape=[64, 65])), rf"{Q}\.weight: uint8 \(2080, 1\)"),
    "nf4 block": (NF4, tensor(STATE, state(blocksize=0)), "are invalid"),
    "nf4 offset": (NF4, tensor(STATE, state(nested_offset="x")), "nested_offset must be a number"),
    "nf4 map NaN": (NF4, tensor("weight.quant_map", NAN), rf"{Q}\.weight\.quant_map: some scales are not finite"),
    "nf4 map cut": (NF4, tensor("weight.quant_map", cut_rows), rf"{Q}\.weight\.quant_map: float32 \(16,\)"),
}


def read_all(folder):
    """Reads every layer, and asserts that a layer's weights are at most 8 times the file's bytes (codes of 1 bit become
    bytes).
    """
    size = (folder / "model.safetensors").stat().st_size
    with ForeignReader(folder) as reader:
        for name, entry in reader.entries.items():
            assert entry.shape[0] * entry.shape[1] <= 8 * size
            weight = reader.dequantize(name, torch.float16) if entry.scheme is None else reader.layer(name).codes
            assert tuple(weight.shape) == entry.shape


@pytest.mark.parametrize("what", CASES)
def test_files_that_mean_nothing_are_refused_by_name(tmp_path, what):
    name, damage, message = CASES[what]
    shutil.copytree(DATA / name, tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message) as error:
        read_all(tmp_path / "c")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("cut", [1, 1000, 30_000])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_truncated_files_are_refused(tmp_path, folder, cut):
    shutil.copytree(folder, tmp_path / "c")
    path = tmp_path / "c" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ForeignReader(tmp_path / "c")


def damaged(data, rng, header):
    """Changes random bytes of the file, mostly in its header, and sometimes truncates it."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(min(len(data), header)) if rng.random() < 0.8 else rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return data


@pytest.mark.parametrize("seed", range(200))
def test_random_damage_never_crashes(tmp_path, seed):
    rng = random.Random(seed)
    shutil.copytree(rng.choice(FOLDERS), tmp_path / "c")
    path = tmp_path / "c" / rng.choice(["config.json", "model.safetensors"])
    path.write_bytes(damaged(path.read_bytes(), rng, 4000))
    try:
        read_all(tmp_path / "c")
    except CheckpointError as error:
        assert str(tmp_path) in str(error)


def gguf_bytes(tensors=1, pairs=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def gguf_tensor(name=b"a.weight", shape=(32, 1), kind=8, offset=0):
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


GGUF_CASES = {
    "no magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "empty": (b"", "ends inside its header"),
    "version": (gguf_bytes(version=1), "GGUF version 1; supported are 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),
    "absurd count": (gguf_bytes(tensors=1 << 60), "entries, more than the limit of"),
    "absurd text": (gguf_bytes(pairs=1, rest=struct.pack("<Q", 1 << 50)), "a string of"),
    "truncated": (gguf_bytes(rest=gguf_tensor()[:-3]), "ends inside its header"),
    "data missing": (gguf_bytes(rest=gguf_tensor()), r"a\.weight: ends at byte"),
    "absurd shape": (gguf_bytes(rest=gguf_tensor(shape=(1 << 40, 1 << 40))), "invalid shape"),
    "absurd size": (gguf_bytes(rest=gguf_tensor(shape=(1 << 30, 1 << 30))), "ends at byte"),
    "no blocks": (gguf_bytes(rest=gguf_tensor(shape=(31, 1))), "no whole Q8_0 blocks"),
    "five dimensions": (gguf_bytes(rest=gguf_tensor(shape=(32, 1, 1, 1, 1))), "5 dimensions"),
    "one name": (gguf_bytes(tensors=2, rest=gguf_tensor() * 2 + bytes(99)), "several tensors"),
    "endless array": (
        gguf_bytes(tensors=0, pairs=1, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 62)), "ends inside its header",
    ),
    "huge array": (gguf_bytes(tensors=0, pairs=1, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 62)), "inside its header"),
    "a key twice": (gguf_bytes(tensors=0, pairs=2, rest=struct.pack("<Q1sIB", 1, b"k", 0, 1) * 2), "has the key 'k' twice"),
    "a key twice, an array": (
        gguf_bytes(tensors=0, pairs=2, rest=struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 0) + struct.pack("<Q1sIB", 1, b"k", 0, 1)),
        "has the key 'k' twice",
    ),
    "unaligned": (gguf_bytes(rest=gguf_tensor(offset=8) + bytes(200)), r"a\.weight: its offset 8 is no multiple of .* 32"),
    "overlapping": (
        gguf_bytes(tensors=2, rest=gguf_tensor(offset=0) + gguf_tensor(b"b.weight") + bytes(200)),
        r"b\.weight: begins at byte 128, but a\.weight ends at 162; tensors overlap",
    ),
    "overlapping, inside": (
        gguf_bytes(tensors=2, rest=gguf_tensor(shape=(32, 4)) + gguf_tensor(b"b.weight", offset=32) + bytes(400)),
        r"b\.weight: begins at byte 160, but a\.weight ends at 264; tensors overlap",
    ),
    "deep arrays": (
        gguf_bytes(tensors=0, pairs=1, rest=struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 9), "unknown type 9",
    ),
    "value of no type": (gguf_bytes(tensors=0, pairs=1, rest=struct.pack("<Q1sI", 1, b"k", 77)), "unknown type 77"),
}  # fmt: skip


@pytest.mark.parametrize("what", GGUF_CASES)
def test_gguf_headers_that_mean_nothing_are_refused(tmp_path, what):
    data, message = GGUF_CASES[what]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        GgufReader(tmp_path / "m.gguf")
    assert "m.gguf" in str(error.value)


def test_gguf_types_and_values_that_mean_nothing(tmp_path):
    path = tmp_path / "m.gguf"
    start = -(-len(gguf_bytes(rest=gguf_tensor())) // 32) * 32
    for kind, message in (
        (20, r"a\.weight: blocks of the type IQ4_NL are not supported; Q4_0.*Transformers"),
        (99, "number 99"),
    ):
        path.write_bytes(gguf_bytes(rest=gguf_tensor(kind=kind)).ljust(start + 64, b"\0"))
        with pytest.raises(CheckpointError, match=message):
            GgufReader(path).entry("a.weight")
    path.write_bytes(gguf_bytes(rest=gguf_tensor()).ljust(start, b"\0") + b"\x00\x7e" + bytes(32))  # d is NaN
    with pytest.raises(CheckpointError, match=r"a\.weight: some scales are not finite"):
        GgufReader(path).layer("a.weight")
    path.write_bytes(gguf_bytes(rest=gguf_tensor(shape=(32, 1, 1))).ljust(start + 128, b"\0"))
    with pytest.raises(CheckpointError, match="quantized tensors are matrices"):
        GgufReader(path).entry("a.weight")


@pytest.mark.parametrize("seed", range(100))
def test_random_damage_to_gguf_never_crashes(tmp_path, seed):
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged((DATA / "gguf" / "blocks.gguf").read_bytes(), random.Random(seed), 600))
    try:
        reader = GgufReader(path)
        for name in reader.tensors:
            if reader.entry(name) is None:
                reader.get(name)
            else:
                reader.layer(name)
    except CheckpointError as error:
        assert str(path) in str(error)
