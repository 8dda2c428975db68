"""Makes the checkpoints of this folder with the tools that other people use. Not run by the tests: README.md says how.

    python make.py TOOL MODEL OUT     with TOOL one of model, auto-round, autoawq, gptqmodel, llmcompressor, bitsandbytes,
                                      torchao, transformers, modelopt, tensorrt-llm, gguf
    python make.py TOOL --read FOLDER...     with TOOL one of auto-round, autoawq, gptqmodel, llmcompressor

Each run writes one folder per variant: what the tool wrote, and `expected.json` with the SHA-256 of every layer's
weights [N, K] as the tool itself dequantizes them, in float32. With --read, prints the hashes of folders that lowbit wrote, as
JSON in the last line.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import torch

KEEP = ("config.json", "model.safetensors", "expected.json")


def sha(weight):
    """SHA-256 of a matrix as float32 bytes, row by row; negative zeros count as zeros."""
    return hashlib.sha256((weight.detach().float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def finish(folder, expected):
    """Removes all files but those that the tests read, and writes `expected.json`."""
    config = folder / "config.json"
    if config.exists():  # the file names a temporary path of the run, which would differ each time
        config.write_text(re.sub(r',?\s*"offload_to_disk_path": "[^"]*"', "", config.read_text()))
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    for path in folder.iterdir():
        if path.name not in KEEP and path.suffix != ".gguf":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(folder.name, sum(p.stat().st_size for p in folder.iterdir()), "bytes,", len(expected), "layers")


def model(out, heads=2, intermediate=96):
    """A random one-layer Llama whose matrices are of several shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny import tiny_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=heads, tie_word_embeddings=True, max_position_embeddings=64, dtype=torch.float16,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(out)
    tiny_tokenizer(100).save_pretrained(out)


def linears(folder, marker):
    """Layer name -> its tensors by suffix."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    names = {name.removesuffix(f".{marker}") for name in tensors if name.endswith(f".{marker}")}
    return {n: {k.removeprefix(f"{n}."): v for k, v in tensors.items() if k.startswith(f"{n}.")} for n in sorted(names)}


def auto_round(source, out):
    variants = [("gptq-auto-round-w4", "auto_gptq", 4, True), ("gptq-auto-round-w4-asym", "auto_gptq", 4, False)]
    variants += [(f"gptq-auto-round-w{bits}", "auto_gptq", bits, True) for bits in (2, 3, 8)]
    variants += [("awq-auto-round", "auto_awq", 4, False), ("awq-auto-round-sym", "auto_awq", 4, True)]
    variants += [(f"auto-round-gptq-w{bits}", "auto_round", bits, True) for bits in (2, 3, 4, 8)]
    variants += [(f"auto-round-w{bits}-asym", "auto_round", bits, False) for bits in (2, 3, 5, 6, 7)]
    variants += [("auto-round-gptq-asym", "auto_round:auto_gptq", 4, False)]
    variants += [("auto-round-gptqmodel", "auto_round:gptqmodel", 4, True)]
    variants += [(f"auto-round-awq-{name}", "auto_round:auto_awq", 4, sym) for name, sym in (("asym", False), ("sym", True))]
    for name, layout, bits, sym in variants:
        if not (out / name).exists():
            auto_round_folder(source, out / name, layout, bits, sym)
    mixed = {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 16}, "model.layers.0.self_attn.k_proj": {"bits": 16}}
    auto_round_folder(source, out / "auto-round-mixed", "auto_round:auto_gptq", 4, True, mixed)


def auto_round_folder(source, folder, layout, bits, sym, exceptions=None):
    """Quantizes `source` into one folder; the expected weights are those that auto-round's layers compute."""
    from auto_round import AutoRound

    work = folder.with_suffix(".work")
    scheme = {"bits": bits, "group_size": 32, "sym": sym, "data_type": "int", "act_bits": 16}
    rounder = AutoRound(str(source), scheme=scheme, iters=0, disable_opt_rtn=True, layer_config=exceptions)
    rounder.quantize_and_save(str(work), format=layout)
    shutil.move(next(p.parent for p in work.rglob("model.safetensors")), folder)
    shutil.rmtree(work, ignore_errors=True)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    layout = stated.get("packing_format", layout)
    assert stated["bits"] == bits and stated["sym"] == sym, stated
    expected = {}
    for layer, t in linears(folder, "qweight").items():
        own = (exceptions or {}).get(layer, {})
        expected[layer] = sha(auto_round_weight(t, layout, own.get("bits", bits), own.get("group_size", 32)))
    finish(folder, expected)


def auto_round_weight(t, layout, bits, group):
    """A layer's weights [N, K] as computed by the reader that auto-round chooses on a CPU for a `packing_format`."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    if "awq" in layout:
        return dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), bits, group).T
    reader_of = qlinear_torch_zp if "auto_gptq" in layout else qlinear_torch
    k, n = t["qweight"].shape[0] * 32 // bits, t["qweight"].shape[1]
    reader = reader_of.QuantLinear(bits, group, k, n, bias=False)
    reader.qweight, reader.qzeros, reader.scales = t["qweight"], t["qzeros"], t["scales"].float()
    return reader(torch.eye(k)).T


def auto_round_read(folder):
    """Weights computed by the layers with which auto-round loads GPTQ files (of both versions) and AWQ files."""
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    layout = "auto_round" if stated.get("checkpoint_format") == "gptq_v2" else "auto_gptq"
    layout = "auto_awq" if stated["quant_method"] == "awq" else layout
    expected = {}
    for layer, t in linears(folder, "qweight").items():
        own = stated | next((o for name, o in stated.get("dynamic", {}).items() if re.match(name[2:], layer) and o), {})
        expected[layer] = sha(auto_round_weight(t, layout, own["bits"], own["group_size"]))
    return expected


def autoawq(source, out):
    """Quantizes with AutoAWQ, which needs a multiple of 64 channels in all layers. AutoAWQ 0.2.9 works with Transformers up to
    4.51."""
    from awq import AutoAWQForCausalLM
    from transformers import PreTrainedTokenizerFast

    net = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float32)
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    texts = ["the quick brown fox jumps over the lazy dog " * 4, "pack my box with five dozen liquor jugs " * 4] * 64
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    net.quantize(tokenizer, quant_config=config, calib_data=texts, max_calib_seq_len=256)
    net.save_quantized(str(out / "awq-autoawq"))
    finish(out / "awq-autoawq", autoawq_read(out / "awq-autoawq"))


def autoawq_read(folder):
    from awq.utils.packing_utils import dequantize_gemm

    group = json.loads((folder / "config.json").read_text())["quantization_config"]["group_size"]
    layers = linears(folder, "qweight").items()
    return {n: sha(dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), 4, group).T) for n, t in layers}


def gptqmodel_read(folder):
    """Returns hashes of weights. For GPTQ files they are those of the loaded layers. For AWQ files they are those of the
    function that the AWQ layer calls, since the layer itself multiplies in half precision."""
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    if stated["quant_method"] == "awq":
        layers, group = linears(folder, "qweight").items(), stated["group_size"]
        return {n: sha(dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), 4, group).T) for n, t in layers}
    net = GPTQModel.load(str(folder), device="cpu", dtype=torch.float16, backend=BACKEND.TORCH)
    found = {n: m for n, m in net.model.named_modules() if hasattr(m, "dequantize_weight")}
    for layer in found.values():
        layer.scales = layer.scales.float()
    return {n: sha(m.dequantize_weight().T) for n, m in found.items()}


def gptqmodel(source, out):
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    calibration = ["the quick brown fox jumps over the lazy dog " * 4, "pack my box with five dozen liquor jugs " * 4] * 64
    variants = [("w4-act-order", 4, False, "gptq"), ("w4-act-order-v2", 4, False, "gptq_v2"), ("w3-act-order", 3, True, "gptq")]
    for name, bits, sym, layout in variants:
        folder = out / f"gptq-gptqmodel-{name}"
        config = QuantizeConfig(bits=bits, group_size=32, desc_act=True, sym=sym, format=layout, act_group_aware=False)
        net = GPTQModel.load(str(source), config, device="cpu")
        net.quantize(calibration, batch_size=1)
        net.save(str(folder))
        expected = {}
        for layer, t in linears(folder, "qweight").items():
            k, n = t["g_idx"].shape[0], t["qweight"].shape[1]
            reader = TorchLinear(
                bits=bits, group_size=32, sym=sym, desc_act=True, in_features=k, out_features=n, bias=False,
                pack_dtype=torch.int32, register_buffers=True,
            )  # fmt: skip
            reader.load_state_dict(t, strict=False)
            if layout == "gptq":
                convert_gptq_v1_to_v2_format_module(reader, bits=bits, pack_dtype=torch.int32)
            reader.scales = reader.scales.float()
            expected[layer] = sha(reader.dequantize_weight().T)
        finish(folder, expected)
    for name, sym in (("asym", False), ("sym", True)):  # GPTQModel's AWQ needs a multiple of 64 channels in all layers
        config = QuantizeConfig(bits=4, group_size=32, sym=sym, quant_method="awq", format="gemm")
        net = GPTQModel.load(f"{source}-wide", config, device="cpu")
        net.quantize(calibration, batch_size=1)
        net.save(str(out / f"awq-gptqmodel-{name}"))
        finish(out / f"awq-gptqmodel-{name}", gptqmodel_read(out / f"awq-gptqmodel-{name}"))


def llmcompressor(source, out):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    def scheme(bits, symmetric=True, strategy="group", activations=None, **more):
        weights = QuantizationArgs(
            num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=32 if strategy == "group" else None, **more
        )
        return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)}

    tokens = QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=True)
    floats = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
    variants = {
        "w4": {"config_groups": scheme(4)},
        "w4-asym": {"config_groups": scheme(4, symmetric=False)},
        "w3-asym": {"config_groups": scheme(3, symmetric=False)},
        "w6-channel": {"config_groups": scheme(6, strategy="channel")},
        "w8a8": {"scheme": "W8A8"},
        "w8a8-asym": {"config_groups": scheme(8, symmetric=False, strategy="channel", activations=tokens)},
        "fp8": {"config_groups": scheme(8, strategy="tensor", activations=floats, type="float")},
        "fp8-channel": {"scheme": "FP8_DYNAMIC"},
        "fp8-block": {"config_groups": scheme(8, strategy="block", activations=floats, type="float", block_structure=[32, 32])},
        "mxfp4": {"scheme": "MXFP4A16"},
        "mxfp8": {"scheme": "MXFP8A16"},
        "nvfp4a16": {"scheme": "NVFP4A16"},
        "nvfp4": {"scheme": "NVFP4"},
    }
    for name, options in variants.items():
        folder = out / f"compressed-tensors-{name}"
        net = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
        if "config_groups" not in options:
            options["targets"] = "Linear"
        # Only a static scale of activations needs texts for calibration.
        texts = {"input_ids": torch.randint(0, 100, (8, 32)).tolist(), "attention_mask": torch.ones(8, 32).long().tolist()}
        texts = {"dataset": Dataset.from_dict(texts), "max_seq_length": 32} if name == "nvfp4" else {}
        oneshot(model=net, recipe=QuantizationModifier(ignore=["lm_head"], **options), **texts)
        net.save_pretrained(folder, save_compressed=True)
        finish(folder, llmcompressor_read(folder))


def llmcompressor_read(folder):
    from transformers import AutoModelForCausalLM

    # The model is loaded in float32, where products of half-precision scales and codes are exact.
    back = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {n: sha(decompressed(m)) for n, m in back.named_modules() if hasattr(m, "quantization_scheme")}


def decompressed(module):
    """Weights of a layer as compressed-tensors decompresses them, with scales converted to float32 if they are stored as
    numbers.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    layout = module.quantization_scheme.format
    state = {n: p.detach() for n, p in module.named_parameters() if n.startswith("weight")}
    if "weight_global_scale" in state:  # the compressor's own method computes the same, but rounds the product to bf16
        codes = unpack_fp4_from_uint8(state["weight_packed"], len(state["weight_packed"]), 2 * state["weight_packed"].shape[1])
        scale, whole = state["weight_scale"].float(), state["weight_global_scale"]
        args = module.quantization_scheme.weights
        return dequantize(codes.float(), scale, args=args, global_scale=whole, dtype=torch.float32)
    if state["weight_scale"].dtype != torch.uint8:
        state["weight_scale"] = state["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(getattr(layout, "value", layout))
    return compressor.decompress(state, module.quantization_scheme)["weight"]


def bitsandbytes(source, out):
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_blockwise
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    for name, nested in (("nf4", False), ("nf4-nested", True), ("fp4", False), ("fp4-nested", True)):
        folder = out / f"bitsandbytes-{name}"
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=name[:3],
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=torch.float16,
        )
        net = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16, quantization_config=config, device_map="cpu")
        net.save_pretrained(folder)
        expected = {}
        for layer, module in net.named_modules():
            if type(module).__name__ == "Linear4bit":
                data, state = module.weight.data, module.weight.quant_state
                absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
                # This is the generic kernel. The CPU kernel of 0.50.2 is wrong if a row is no multiple of 64: its error
                # doubles.
                weight = _dequantize_4bit_compute(data.reshape(-1), absmax, state.code, 64, state.shape, torch.float16)
                expected[layer] = sha(weight)
        finish(folder, expected)


def torchao(source, out):
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        FqnToConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
        PerTensor,
    )
    from transformers import AutoModelForCausalLM, TorchAoConfig

    groups, asymmetric = PerGroup(32), MappingType.ASYMMETRIC
    variants = {
        "int8": Int8WeightOnlyConfig(),
        "int8-groups": Int8WeightOnlyConfig(granularity=groups),
        "int8-tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
        "int8-dynamic": Int8DynamicActivationInt8WeightConfig(),
        "int8-some": FqnToConfig({"_default": Int8WeightOnlyConfig(), "model.layers.0.mlp.up_proj": None}),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups),
        "int4-asym": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups, mapping_type=asymmetric),
        "int3-asym": IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=groups, mapping_type=asymmetric),
        "float8": Float8WeightOnlyConfig(),
    }
    for name, config in variants.items():
        folder = out / f"torchao-{name}"
        net = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, quantization_config=TorchAoConfig(quant_type=config), device_map="cpu"
        )
        net.save_pretrained(folder)
        back = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        layers = {n: m.weight for n, m in back.named_modules() if hasattr(getattr(m, "weight", None), "qdata")}
        finish(folder, {n: sha(weight.dequantize()) for n, weight in layers.items()})


def transformers(source, out):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # The quantizer computes in plain torch. Only its check for a GPU prevents it from running on a CPU.
    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **kwargs: None
    for name, block in (("fp8-transformers", (32, 32)), ("fp8-transformers-tensor", None)):
        folder = out / name
        net = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float16, quantization_config=FineGrainedFP8Config(weight_block_size=block), device_map="cpu"
        )
        net.save_pretrained(folder)
        back = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map="cpu",
            quantization_config=FineGrainedFP8Config(weight_block_size=block, dequantize=True),
        )  # fmt: skip
        expected = {n: sha(m.weight) for n, m in back.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
        finish(folder, expected)


def modelopt(source, out):
    """Exports models for Transformers. The expected weights are those that ModelOpt's own tensors dequantize."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from transformers import AutoModelForCausalLM

    texts = torch.randint(0, 100, (8, 32))
    for name in ("NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "FP8_DEFAULT_CFG", "INT4_AWQ_CFG"):
        folder = out / f"modelopt-{name.removesuffix('_CFG').removesuffix('_DEFAULT').lower().replace('_', '-')}"
        net = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        config = copy.deepcopy(getattr(mtq, name))
        for row in config["quant_cfg"]:
            if row.get("cfg", {}).get("block_sizes", {}).get(-1) == 128:
                row["cfg"]["block_sizes"][-1] = 32  # 128 does not divide the tiny model's channels
        net = mtq.quantize(net, config, lambda model: [model(row[None]) for row in texts])
        with torch.inference_mode():
            export_hf_checkpoint(net, dtype=torch.float32, export_dir=str(folder))
        expected = {}
        for layer, t in linears(folder, "weight_scale").items():
            if "weight_scale_2" in t:
                packed = NVFP4QTensor(torch.Size((len(t["weight"]), 2 * t["weight"].shape[1])), torch.float32, t["weight"])
                scales = {"scale": t["weight_scale"], "double_scale": t["weight_scale_2"], "block_sizes": {-1: 16}}
                weight = packed.dequantize(torch.float32, **scales)
            # ModelOpt cannot dequantize these; the weights are right if ModelOpt packs them to the same bytes
            elif t["weight"].dtype == torch.uint8:
                signed = torch.stack((t["weight"] & 15, t["weight"] >> 4), dim=1).flatten(0, 1).to(torch.int8)
                weight = torch.where(signed > 7, signed - 16, signed) * t["weight_scale"].repeat_interleave(32, dim=1)
                assert torch.equal(pack_int4_in_uint8(weight, t["weight_scale"], 32), t["weight"])
                weight = weight * t.get("pre_quant_scale", torch.ones(1))
            else:
                weight = t["weight"].float() * t["weight_scale"]
            expected[layer] = sha(weight)
        finish(folder, expected)


def tensorrt_llm(out):
    """Quantizes a random Llama with ModelOpt's AWQ, exports TensorRT-LLM's checkpoint, and stores the logits of ModelOpt's
    simulation for a text.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64, initializer_range=0.1,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    net = LlamaForCausalLM(config).half().float().eval()
    texts = torch.randint(0, 128, (8, 32))
    net = mtq.quantize(net, mtq.INT4_AWQ_CFG, lambda model: [model(row[None]) for row in texts])
    folder = out / "tensorrt-llm-modelopt"
    with torch.inference_mode():
        export_tensorrt_llm_checkpoint(
            net.half(), "llama", torch.float16, str(folder), inference_tensor_parallel=1, inference_pipeline_parallel=1
        )
        # logits come after the export, which gives q, k and v one factor and rounds them again
        logits = net.float()(texts[:1, :8]).logits
    expected = {"ids": texts[0, :8].tolist(), "logits": [[round(v, 4) for v in row] for row in logits[0].tolist()]}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


def gguf(out):
    """Random blocks of every type that lowbit reads, and their values as the package gguf decodes them."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    rng = np.random.default_rng(0)
    folder = out / "gguf"
    folder.mkdir(parents=True)
    writer = GGUFWriter(folder / "blocks.gguf", "llama")
    expected = {}
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        weights = rng.standard_normal((4, 96)).astype(np.float32)
        blocks = quantize(weights, GGMLQuantizationType[kind])
        writer.add_tensor(f"{kind}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
        expected[kind] = sha(torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind])))
    for kind, size in (("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)):
        blocks = rng.integers(0, 256, (3, 2, size), dtype=np.uint8)
        halves = rng.standard_normal((3, 2, 2)).astype(np.float16).view(np.uint8)
        blocks[..., -2:] = halves[..., :2] if kind == "Q6_K" else blocks[..., -2:]
        blocks[..., :4] = blocks[..., :4] if kind == "Q6_K" else halves
        blocks = blocks.reshape(3, -1)
        writer.add_tensor(f"{kind}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
        expected[kind] = sha(torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind])))
    writer.add_tensor("norm.weight", np.linspace(0, 1, 5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    finish(folder, expected)


MAKERS = {
    "auto-round": auto_round, "autoawq": autoawq, "gptqmodel": gptqmodel, "llmcompressor": llmcompressor,
    "bitsandbytes": bitsandbytes, "torchao": torchao, "transformers": transformers, "modelopt": modelopt,
}  # fmt: skip
READERS = {
    "auto-round": auto_round_read, "autoawq": autoawq_read, "gptqmodel": gptqmodel_read, "llmcompressor": llmcompressor_read,
}  # fmt: skip
BARE = {"tensorrt-llm": tensorrt_llm, "gguf": gguf}
"""Tools that need no model."""


def read_back(tool, folder):
    """The hashes of a folder's layers, or the tool's error."""
    try:
        return READERS[tool](folder)
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    tool, source, targets = sys.argv[1], Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]]
    if tool == "model":
        model(source)
        model(Path(f"{source}-wide"), heads=4, intermediate=128)
    elif sys.argv[2] == "--read":
        print(json.dumps({folder.name: read_back(tool, folder) for folder in targets}))
    elif tool in BARE:
        BARE[tool](targets[0])
    else:
        MAKERS[tool](source, targets[0])
