"""Files that other tools wrote are read as those tools read them, and written back byte by byte."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from lowbit.checkpoint import CheckpointError, ForeignReader, GgufReader, detect
from lowbit.checkpoint.compressed_tensors import CompressedTensors, write_layer
from lowbit.checkpoint.foreign import is_e8m0, read_e8m0, write_e8m0
from lowbit.checkpoint.fp8 import Fp8
from tests.checkpoint.foreign import DATA, FOLDERS, same, sha

SCHEMES = {
    "auto-round-awq-asym": "w4a16_g32_z",
    "auto-round-mixed": "w4a16_g32",
    "auto-round-w5-asym": "w5a16_g32_z",
    "awq-auto-round": "w4a16_g32_z",
    "awq-auto-round-sym": "w4a16_g32",
    "bitsandbytes-nf4-nested": None,
    "compressed-tensors-fp8": "w8e4m3a8e4m3_t_ct",
    "compressed-tensors-fp8-block": "w8e4m3a16_b32x32",
    "compressed-tensors-mxfp4": "w4e2m1a16_g32",
    "compressed-tensors-nvfp4": "w4e2m1a16_g16",
    "compressed-tensors-w3-asym": "w3a16_g32_z",
    "compressed-tensors-w4": "w4a16_g32",
    "compressed-tensors-w6-channel": "w6a16",
    "compressed-tensors-w8a8-asym": "w8a8_z_ct",
    "fp8-transformers": "w8e4m3a8e4m3_b32x32_hf",
    "fp8-transformers-tensor": "w8e4m3a8e4m3_t_hf",
    "gptq-auto-round-w4": "w4a16_g32",
    "gptq-auto-round-w4-asym": "w4a16_g32_z",
    "gptq-gptqmodel-w3-act-order": "w3a16_g32",
    "gptq-gptqmodel-w4-act-order-v2": "w4a16_g32_z",
    "modelopt-fp8": "w8e4m3a8e4m3_t",
    "modelopt-int4-awq": "w4a16_g32",
    "modelopt-nvfp4": "w4e2m1a16_g16",
    "torchao-int4-asym": "w4a16_g32_z",
    "torchao-int8-dynamic": "w8a16",
}
MIXED = {"auto-round-mixed": {"model.layers.0.mlp.up_proj": "w8a16_g16", "model.layers.0.self_attn.k_proj": None}}
"""Layers that differ from the scheme of their folder: with another scheme, or None for 16 bits."""
READ_ONLY = ("bitsandbytes-nf4-nested", "compressed-tensors-nvfp4", "modelopt-fp8", "modelopt-int4-awq", "modelopt-nvfp4")


def test_every_folder_is_tested():
    assert {folder.name for folder in FOLDERS} == set(SCHEMES)


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_those_the_tool_itself_computes(name):
    expected = json.loads((DATA / name / "expected.json").read_text())
    with ForeignReader(DATA / name) as reader:
        others = MIXED.get(name, {})
        assert set(reader.entries) == set(expected) and len(expected) == 7 - list(others.values()).count(None)
        for layer, digest in expected.items():
            scheme = reader.entries[layer].scheme
            assert (scheme and scheme.name) == others.get(layer, SCHEMES[name])
            assert sha(reader.dequantize(layer, torch.float32)) == digest, layer


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in READ_ONLY])
def test_layers_are_written_back_byte_by_byte(name):
    with ForeignReader(DATA / name) as reader:
        for layer in reader.entries:
            loaded = reader.loaded(layer)
            q = reader.layer(layer)
            if isinstance(reader.schema, CompressedTensors):
                back = write_layer(q, reader.schema.fit(loaded)[1])
            else:
                schema = reader.schema.fit(loaded) if isinstance(reader.schema, Fp8) else reader.schema
                back = schema.write(q)
            # A g_idx that states no order is optional. All other tensors must be there.
            assert set(loaded.tensors) <= set(back) <= {*loaded.tensors, "g_idx"}
            for suffix, tensor in loaded.tensors.items():
                assert same(back[suffix], tensor), f"{layer}.{suffix}"


def test_group_scales_of_nvfp4_are_the_products_its_tools_compute():
    """compressed-tensors divides by the global scale, ModelOpt multiplies by it. Both compute in float32, in which this test
    compares the scales."""
    for name, whole in (("compressed-tensors-nvfp4", "weight_global_scale"), ("modelopt-nvfp4", "weight_scale_2")):
        with ForeignReader(DATA / name) as reader:
            layer = next(iter(reader.entries))
            q, parts = reader.layer(layer), reader.loaded(layer).tensors
            groups = parts["weight_scale"].float()
            product = groups / parts[whole] if name.startswith("compressed") else groups * parts[whole]
            assert q.scale.dtype == torch.float32 and torch.equal(q.scale, product) and q.scale.half().float().ne(q.scale).any()
            assert any("activations" in note for note in reader.entries[layer].notes)


def test_act_order_files_have_an_order():
    """The files hold permutations other than the identity; otherwise the tests of act-order would prove little."""
    for name in ("gptq-gptqmodel-w3-act-order", "gptq-gptqmodel-w4-act-order-v2"):
        with ForeignReader(DATA / name) as reader:
            orders = [reader.layer(layer).input_transform.order for layer in reader.entries]
        assert all(order is not None and not torch.equal(order, torch.arange(len(order)).int()) for order in orders)


def test_bitsandbytes_layers_are_refused_with_advice():
    message = r"NF4 are on no grid.*--to dequantized"
    with ForeignReader(DATA / "bitsandbytes-nf4-nested") as reader, pytest.raises(CheckpointError, match=message):
        reader.layer("model.layers.0.mlp.up_proj")


def test_gguf_blocks_are_those_the_package_computes():
    reader = GgufReader(DATA / "gguf" / "blocks.gguf")
    expected = json.loads((DATA / "gguf" / "expected.json").read_text())
    assert {name.removesuffix(".weight") for name in reader.tensors} == {*expected, "norm"}
    for name, digest in expected.items():
        q = reader.layer(f"{name}.weight")
        assert sha(q.dequantize()) == digest, name
        assert q.scale.dtype == (torch.float32 if name.endswith("_K") else torch.float16)
    assert reader.get("norm.weight").tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert reader.metadata["general.architecture"] == "llama"


def test_detection(tmp_path):
    assert detect(tmp_path, {"model_type": "llama"}) is None
    assert detect(tmp_path, {"quantization_config": {"quant_method": "lowbit"}}) is None
    with pytest.raises(CheckpointError, match="'hqq' is not supported; supported are gptq, awq, auto-round.*16-bit checkpoint"):
        detect(tmp_path, {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(CheckpointError, match="no quant_method"):
        detect(tmp_path, {"quantization_config": {}})
    with pytest.raises(CheckpointError, match="JSON object"):
        detect(tmp_path, {"quantization_config": "gptq"})
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": false}')
    schema = detect(tmp_path, {})
    assert schema.name == "gptq" and (schema.bits, schema.group) == (4, 128)
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 64, "zero_point": true, "version": "GEMM"}')
    assert detect(tmp_path, {}).group == 64


def test_unquantized_folders_are_refused(tmp_path):
    shutil.copytree(DATA / "awq-auto-round", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is not quantized"):
        ForeignReader(tmp_path / "c")
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                     "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}}}  # fmt: skip
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"says compressed-tensors, but no file has a tensor \*\.weight_packed"):
        ForeignReader(tmp_path / "c")


def test_power_of_two_scales():
    """Compares all 255 exponents, subnormal 2^-127 included, with Python's powers of two."""
    from lowbit.checkpoint.foreign import ForeignLayer

    exponents = torch.arange(255, dtype=torch.uint8).reshape(5, 51)
    scale = read_e8m0(ForeignLayer("a", {"weight_scale": exponents}), "weight_scale")
    assert scale.double().flatten().tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert torch.equal(write_e8m0(scale), exponents) and is_e8m0(scale) and is_e8m0(scale.float())
    for other in (0.0, -1.0, 3.0, float("inf"), float("nan"), 2.0**-130, 1 + 2.0**-20):
        assert not is_e8m0(torch.tensor([1.0, other])), other
    with pytest.raises(CheckpointError, match=r"a\.weight_scale: .*NaN"):
        read_e8m0(ForeignLayer("a", {"weight_scale": exponents + 1}), "weight_scale")
