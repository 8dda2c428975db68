"""Files with experts of every tool. Weights are those of the tool's own formula. Experts that fit no scheme are named in the
error."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lowbit.checkpoint import CheckpointError, ForeignReader, GgufReader
from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.compressed_tensors import args_for, write_layer
from lowbit.checkpoint.experts import GroupedExperts, alternating, gate_first
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.gptq import Gptq
from lowbit.checkpoint.mxfp4 import SCHEME, Mxfp4Experts
from lowbit.formats import PerBlock, PerTensor
from tests.checkpoint.foreign import same
from tests.checkpoint.test_foreign_layouts import random_layer

E, INNER, HIDDEN = 3, 32, 64
LAYER = "model.layers.0.mlp.experts"
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
QWEN = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}


def write(folder, tensors, quantization):
    """A folder of one tool's files; the configuration of the model is not read here."""
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "quantization_config": quantization}))
    return folder


def one_by_one(make, spelling, layer=LAYER):
    """The tensors of all experts; `make` returns the tensors of one matrix by suffix, for its role, shape and number."""
    tensors = {}
    for e in range(E):
        for i, (role, shape) in enumerate(SHAPES.items()):
            parts = make(role, shape, 3 * e + i)
            tensors |= {f"{layer}.{e}.{spelling[role]}.{suffix}": t for suffix, t in parts.items()}
    return tensors


def check(reader, weight, layer=LAYER):
    """Compares the experts of a reader with `weight(expert, role)`, the weights [N, K] by the tool's formula. Returns the
    experts."""
    experts = check_weights(reader, weight, layer)
    entry = reader.experts[layer]
    assert entry.gate_up.scheme == experts.gate_up[0].scheme and entry.down.scheme == experts.down[0].scheme
    return experts


def check_weights(reader, weight, layer=LAYER):
    """Compares only the weights. The entry of files with static scales of activations states another scheme than the experts
    have."""
    experts, entry = reader.expert_layer(layer), reader.experts[layer]
    assert (entry.experts, entry.gate_up.shape, entry.down.shape) == (E, (2 * INNER, HIDDEN), (HIDDEN, INNER))
    gate_up, down = experts.dequantize()
    for e in range(E):
        assert torch.equal(gate_up[e], torch.cat([weight(e, "gate"), weight(e, "up")]).float()), e
        assert torch.equal(down[e], weight(e, "down").float()), e
    return experts


def fields(words, bits):
    """The fields of int32 words along the last dimension, lowest first."""
    return torch.stack([(words >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)], dim=-1).flatten(-2)


def gptq_weight(tensors, name):
    """AutoGPTQ's own dequantization of 4 bits, version 1."""
    codes = fields(tensors[f"{name}.qweight"].T, 4).T  # [K, N]
    zeros = (fields(tensors[f"{name}.qzeros"], 4) + 1) & 15  # [G, N]
    g = tensors[f"{name}.g_idx"].long()
    return (tensors[f"{name}.scales"][g].float() * (codes - zeros[g])).T


@pytest.mark.parametrize("spelling", [MIXTRAL, QWEN], ids=["w1", "gate_proj"])
@pytest.mark.parametrize("zeros", [False, True])
def test_gptq(tmp_path, spelling, zeros):
    schema = Gptq(4, 16, symmetric=not zeros)

    def make(role, shape, seed):
        q = random_layer(f"w4a16_g16{'_z' if zeros else ''}", *shape, seed)
        if zeros:
            q.zero.clamp_(min=1)  # a zero of 0 borrows from its neighbour, which test_foreign_layouts covers
        return schema.write(q)

    tensors = one_by_one(make, spelling)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": not zeros, "desc_act": False}
    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        experts = check(reader, lambda e, role: gptq_weight(tensors, f"{LAYER}.{e}.{spelling[role]}"))
        assert experts.gate_up[0].scheme.name == f"w4a16_g16{'_z' if zeros else ''}"
        assert set(reader.experts[LAYER].layers) == set(reader.entries)


def test_gptq_with_zeros_in_some_experts_only(tmp_path):
    """The file does not state whether weights are symmetric. Symmetric experts then get the middle code as zero point, and keep
    their codes."""
    schemes = {"gate": "w4a16_g16_z", "up": "w4a16_g16", "down": "w4a16_g16"}

    def make(role, shape, seed):
        q = random_layer(schemes[role], *shape, seed)
        if q.zero is not None:
            q.zero.clamp_(min=1)
        return Gptq(4, 16).write(q)

    tensors = one_by_one(make, QWEN)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        experts = reader.expert_layer(LAYER)
        assert experts.gate_up[0].scheme.name == "w4a16_g16_z" and experts.down[0].scheme.name == "w4a16_g16"
        gate_up, down = experts.dequantize()
        for e in range(E):
            weights = {role: gptq_weight(tensors, f"{LAYER}.{e}.{name}") for role, name in QWEN.items()}
            assert torch.equal(gate_up[e], torch.cat([weights["gate"], weights["up"]])) and torch.equal(
                down[e], weights["down"]
            )


def test_act_order_of_down_becomes_an_order_of_rows(tmp_path):
    """The order of down's input channels becomes an order of rows of gate and up, so that the output of every expert is the
    same."""
    schema = Gptq(4, 16, symmetric=True, act_order=True)
    tensors = one_by_one(
        lambda role, shape, seed: schema.write(random_layer("w4a16_g16", *shape, seed, order=role == "down")), QWEN
    )
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": True}
    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        assert reader.layer(f"{LAYER}.0.down_proj").input_transform.order is not None
        experts = reader.expert_layer(LAYER)
        gate_up, down = experts.dequantize(torch.float64)
        x = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for e in range(E):
            gate, up, last = (gptq_weight(tensors, f"{LAYER}.{e}.{QWEN[role]}").double() for role in SHAPES)
            expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ last.T
            a, b = (x @ gate_up[e].T).chunk(2, dim=1)
            assert torch.allclose((torch.nn.functional.silu(a) * b) @ down[e].T, expected, rtol=1e-5, atol=1e-5)
            assert experts.down[e].input_transform.order is None


def test_act_order_of_gate_and_up_is_refused(tmp_path):
    schema = Gptq(4, 16, symmetric=True, act_order=True)
    tensors = one_by_one(lambda role, shape, seed: schema.write(random_layer("w4a16_g16", *shape, seed // 3, order=True)), QWEN)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": True}
    with (
        ForeignReader(write(tmp_path / "c", tensors, config)) as reader,
        pytest.raises(CheckpointError, match=rf"{LAYER}: its experts read x in channel orders of their own.*without act-order"),
    ):
        reader.expert_layer(LAYER)


def test_awq(tmp_path):
    schema = Awq(16)
    tensors = one_by_one(lambda role, shape, seed: schema.write(random_layer("w4a16_g16_z", *shape, seed)), MIXTRAL)
    place = [0, 4, 1, 5, 2, 6, 3, 7]

    def weight(e, role):
        name = f"{LAYER}.{e}.{MIXTRAL[role]}"
        codes, zeros = (fields(tensors[f"{name}.{part}"], 4) for part in ("qweight", "qzeros"))
        codes, zeros = (t.unflatten(1, (-1, 8))[..., place].flatten(1) for t in (codes, zeros))
        spread = [t.repeat_interleave(16, dim=0) for t in (zeros, tensors[f"{name}.scales"].float())]
        return ((codes - spread[0]) * spread[1]).T

    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        check(reader, weight)


CT = {
    "int4": ("w4a16_g16", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}, None),
    "int8": ("w8a8_ct", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, "token"),
    "fp8": ("w8e4m3a8e4m3_ct", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}, "token"),
    "fp8-static": ("w8e4m3a8e4m3_t_ct", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}, "tensor"),
}  # fmt: skip
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized"}


@pytest.mark.parametrize("kind", CT)
def test_compressed_tensors(tmp_path, kind):
    scheme, weights, strategy = CT[kind]

    def make(role, shape, seed):
        q = random_layer(scheme, *shape, seed, torch.bfloat16)
        if strategy == "tensor":
            q = q.with_input(activation_scale=torch.tensor([0.5 + seed]))
        return write_layer(q, args_for(q))

    tensors = one_by_one(make, QWEN)
    inputs = None if strategy is None else {
        "num_bits": 8, "type": weights["type"], "symmetric": True, "dynamic": strategy == "token", "strategy": strategy,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": FORMATS.get(kind, "float-quantized"), "version": "0.20.0",
              "config_groups": {"group_0": group}}  # fmt: skip

    def weight(e, role):
        parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{LAYER}.{e}.{QWEN[role]}.")}
        scale = parts["weight_scale"].float()
        if kind == "int4":
            return (fields(parts["weight_packed"], 4) - 8) * scale.repeat_interleave(16, dim=1)
        return parts["weight"].float() * scale

    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        if kind == "fp8-static":
            experts = check_weights(reader, weight)
            assert (experts.gate_up[0].scheme.name, experts.down[0].scheme.name) == ("w8e4m3a16", "w8e4m3a16_t")
            assert experts.notes == (
                "activations of experts stay in 16 bits: their scale is static, and each expert has its own",
            )
        else:
            assert check(reader, weight).gate_up[0].scheme.name == scheme


@pytest.mark.parametrize("exponents", [False, True])
def test_fp8_blocks_one_by_one(tmp_path, exponents):
    """DeepSeek's and Qwen3's files have blocks of fp8. The reference is Transformers' own dequantization."""
    schema = Fp8(PerBlock(16, 32), "weight_scale_inv", exponents)

    def make(role, shape, seed):
        q = random_layer("w8e4m3a8e4m3_b16x32_hf", *shape, seed, torch.float32)
        if exponents:
            q.scale.copy_(torch.exp2(q.scale.round()))
        return schema.write(q)

    tensors = one_by_one(make, QWEN)
    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"scale_fmt": "ue8m0"} if exponents else {}
    theirs = Fp8Dequantize(None)

    def weight(e, role):
        name = f"{LAYER}.{e}.{QWEN[role]}"
        return theirs._dequantize_one(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"], torch.float32)

    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        check(reader, weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_fp8_blocks_stacked(tmp_path, transposed):
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (n, k) in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
        shape, grid = ((E, k, n), (E, k // 32, n // 16)) if transposed else ((E, n, k), (E, n // 16, k // 32))
        tensors[f"{LAYER}.{name}"] = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
        tensors[f"{LAYER}.{name}_scale_inv"] = torch.rand(grid, generator=g)
    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}
    theirs = Fp8Dequantize(None)

    def weight(e, role):
        name = f"{LAYER}.{'down_proj' if role == 'down' else 'gate_up_proj'}"
        dense = theirs._dequantize_one(tensors[name][e], tensors[f"{name}_scale_inv"][e], torch.float32)
        dense = dense.T if transposed else dense
        return dense if role == "down" else dense.chunk(2)[role == "up"]

    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        experts = check(reader, weight)
        assert experts.gate_up[0].scheme.name == "w8e4m3a8e4m3_b16x32_hf"
        assert not reader.entries and not reader.plain


def mxfp4_tensors(layer=LAYER):
    """Random blocks with every byte and every exponent that is a number."""
    g = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (n, k) in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
        tensors[f"{layer}.{name}_blocks"] = torch.randint(0, 256, (E, n, k // 32, 16), generator=g, dtype=torch.uint8)
        tensors[f"{layer}.{name}_scales"] = torch.randint(0, 255, (E, n, k // 32), generator=g, dtype=torch.uint8)
        tensors[f"{layer}.{name}_bias"] = torch.randn(E, n, generator=g).bfloat16()
    return tensors


def test_mxfp4(tmp_path):
    """gpt-oss's own files give, bit for bit, the weights that Transformers dequantizes, including subnormal and infinite
    bfloat16."""
    tensors = mxfp4_tensors()
    with ForeignReader(write(tmp_path / "c", tensors, {"quant_method": "mxfp4"})) as reader:
        experts, entry = reader.expert_layer(LAYER), reader.experts[LAYER]
        assert entry.gate_up.scheme == entry.down.scheme == SCHEME == experts.gate_up[0].scheme and entry.biased
        assert not reader.entries and not reader.plain
        for own, name in ((experts.alternating().dequantize(torch.bfloat16)[0], "gate_up_proj"),
                          (experts.dequantize(torch.bfloat16)[1], "down_proj")):  # fmt: skip
            blocks, scales = tensors[f"{LAYER}.{name}_blocks"], tensors[f"{LAYER}.{name}_scales"]
            theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)  # [E, K, N] there
            assert same(own, theirs), name
        assert torch.equal(alternating(experts.gate_up_bias), tensors[f"{LAYER}.gate_up_proj_bias"])
        assert torch.equal(experts.down_bias, tensors[f"{LAYER}.down_proj_bias"])
        written = Mxfp4Experts().write(experts)
        assert {f"{LAYER}.{n}" for n in written} == set(tensors)
        assert all(same(t, tensors[f"{LAYER}.{n}"]) for n, t in written.items())


def test_rows_alternate_and_come_back():
    rows = torch.arange(2 * 12).reshape(2, 12)
    assert alternating(rows)[0].tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert torch.equal(gate_first(alternating(rows)), rows)


def test_gguf_stacks(tmp_path):
    """Blocks of every type in three-dimensional tensors have the values that the package gguf gives."""
    gguf = pytest.importorskip("gguf")
    writer, data = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe"), {}
    rng = np.random.default_rng(0)
    kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
    for kind in kinds:
        weights = rng.standard_normal((E, 8, 64), dtype=np.float32) * np.exp2(rng.integers(-9, 9, (E, 8, 1))).astype(np.float32)
        data[kind] = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{kind}.weight", data[kind], raw_dtype=gguf.GGMLQuantizationType[kind])
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    reader = GgufReader(tmp_path / "m.gguf")
    for kind in kinds:
        count, entry = reader.stacked_entry(f"{kind}.weight")
        expected = gguf.quants.dequantize(data[kind], gguf.GGMLQuantizationType[kind])
        assert count == E and entry.shape == (8, 64)
        for e in range(E):
            q = reader.layer(f"{kind}.weight", expert=e)
            assert q.scheme == entry.scheme and np.array_equal(q.dequantize().numpy(), expected[e]), kind
        with pytest.raises(CheckpointError, match=r"shape \(3, 8, 64\)"):
            reader.entry(f"{kind}.weight")


def gptq_folder(tmp_path, change):
    schema = Gptq(4, 16, symmetric=True)
    tensors = one_by_one(lambda role, shape, seed: schema.write(random_layer("w4a16_g16", *shape, seed)), QWEN)
    change(tensors)
    return write(tmp_path / "c", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True})


def test_a_missing_expert_is_named(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if ".1.up_proj." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=rf"{LAYER}: 3 experts, but no file has the up matrix of expert 1;"):
        ForeignReader(gptq_folder(tmp_path, change))


def test_an_expert_in_16_bits_is_named(tmp_path):
    """An expert in 16 bits can be dequantized, so the file can be opened. Quantized as one group with the others it is refused,
    with an error that names expert 2."""

    def change(tensors):
        for name in [name for name in tensors if ".2.down_proj." in name]:
            del tensors[name]
        tensors[f"{LAYER}.2.down_proj.weight"] = torch.zeros(HIDDEN, INNER)

    with ForeignReader(gptq_folder(tmp_path, change)) as reader:
        assert "expert 2 of 3 are not quantized" in reader.experts[LAYER].refusals[0]
        with pytest.raises(CheckpointError, match="expert 2 of 3 are not quantized, and experts of one layer have one scheme"):
            reader.expert_layer(LAYER)


def test_biases_of_single_experts(tmp_path):
    def change(tensors):
        for e in range(E):
            for role, (n, _) in SHAPES.items():
                tensors[f"{LAYER}.{e}.{QWEN[role]}.bias"] = torch.arange(n).float() + 100 * e

    with ForeignReader(gptq_folder(tmp_path, change)) as reader:
        experts = reader.expert_layer(LAYER)
        rows = torch.arange(INNER).float()
        assert torch.equal(experts.gate_up_bias[2], torch.cat([rows, rows]) + 200)
        assert experts.down_bias.shape == (E, HIDDEN) and reader.experts[LAYER].biased
        assert set(reader.experts[LAYER].biases) == set(reader.plain)


def test_a_bias_of_some_experts_is_refused(tmp_path):
    def change(tensors):
        tensors[f"{LAYER}.1.down_proj.bias"] = torch.zeros(HIDDEN)

    message = "some experts have a bias of down, experts 0, 2 have none"
    with ForeignReader(gptq_folder(tmp_path, change)) as reader, pytest.raises(CheckpointError, match=message):
        reader.expert_layer(LAYER)


def test_schemes_that_differ_are_named():
    from lowbit.checkpoint.foreign import ForeignEntry
    from lowbit.formats import parse_scheme

    def entries(scheme_of):
        return {
            f"{LAYER}.{e}.{name}": ForeignEntry(SHAPES[role], parse_scheme(scheme_of(e, role)))
            for e in range(E) for role, name in QWEN.items()
        }  # fmt: skip

    grouped = GroupedExperts(entries(lambda e, role: "w8a16" if e == 1 else "w4a16_g16"), (), "folder")
    assert "its experts have different schemes: w4a16_g16, w8a16" in grouped.experts[LAYER].refusals[0]
    grouped = GroupedExperts(entries(lambda e, role: "w8a16" if role == "up" else "w4a16_g16"), (), "folder")
    assert "schemes of gate and up differ" in grouped.experts[LAYER].gate_up.refusal and grouped.experts[LAYER].down.scheme
    grouped = GroupedExperts(entries(lambda e, role: "w8e4m3a16_b24x32"), (), "folder")
    assert grouped.experts[LAYER].refusals == ("the gate's 32 rows end within a block of 24",)


def test_experts_without_a_gate():
    from lowbit.checkpoint.foreign import ForeignEntry

    q = {f"{LAYER}.{e}.{name}": random_layer("w4a16_g16", *shape, e) for e in range(E)
         for name, shape in (("up_proj", (INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER)))}  # fmt: skip
    grouped = GroupedExperts({name: ForeignEntry(each.shape, each.scheme) for name, each in q.items()}, (), "folder")
    assert not grouped.experts[LAYER].gated and grouped.experts[LAYER].gate_up.shape == (INNER, HIDDEN)
    experts = grouped.read(LAYER, q.__getitem__, lambda name: None)
    assert torch.equal(experts.dequantize()[0][1], q[f"{LAYER}.1.up_proj"].dequantize())


def test_damaged_mxfp4_is_named(tmp_path):
    def damaged(change, message):
        tensors = mxfp4_tensors()
        change(tensors)
        with pytest.raises(CheckpointError, match=message):
            ForeignReader(write(tmp_path / "c", tensors, {"quant_method": "mxfp4"})).expert_layer(LAYER)

    damaged(lambda t: t[f"{LAYER}.down_proj_scales"].fill_(255), r"down_proj_scales: some power-of-two scales are NaN")
    damaged(lambda t: t.pop(f"{LAYER}.down_proj_scales"), r"down_proj_scales: missing")
    damaged(
        lambda t: t.update({f"{LAYER}.down_proj_scales": torch.zeros(E, HIDDEN, 2, dtype=torch.uint8)}), "is expected, found"
    )
    damaged(lambda t: t.update({f"{LAYER}.down_proj_blocks": torch.zeros(E, HIDDEN, 1, 8, dtype=torch.uint8)}), "16 bytes each")
    damaged(
        lambda t: t.update({f"{LAYER}.gate_up_proj_bias": torch.full((E, 2 * INNER), torch.inf)}), "bias: some .*not finite"
    )


def test_a_folder_without_experts_is_named(tmp_path):
    folder = write(tmp_path / "c", {"model.norm.weight": torch.ones(4)}, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"says mxfp4, but no file has a tensor \*\.gate_up_proj_blocks"):
        ForeignReader(folder)


def test_per_tensor_fp8_of_gate_and_up_become_channels(tmp_path):
    schema = Fp8(PerTensor(), "weight_scale", dynamic=False)
    tensors = one_by_one(
        lambda role, shape, seed: schema.write(random_layer("w8e4m3a16_t", *shape, seed, torch.float32)), MIXTRAL
    )
    config = {"quant_method": "fp8", "activation_scheme": "static"}

    def weight(e, role):
        name = f"{LAYER}.{e}.{MIXTRAL[role]}"
        return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]

    with ForeignReader(write(tmp_path / "c", tensors, config)) as reader:
        experts = check_weights(reader, weight)
        assert (experts.gate_up[0].scheme.name, experts.down[0].scheme.name) == ("w8e4m3a16", "w8e4m3a16_t")
