"""TensorRT-LLM's checkpoints whose bytes are in the order of a GPU. The tests make them element by element and without
`lowbit.pack`, with a preprocessor that follows TensorRT-LLM's description. They are read back as the same model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

from lowbit import convert_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import parse_scheme
from lowbit.models.load import load_causal
from lowbit.quantize import rtn

LAYER = "transformer.layers.0"
KINDS = {
    "LlamaForCausalLM": LlamaConfig, "MistralForCausalLM": MistralConfig, "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}  # fmt: skip

# ---- the preprocessor


def place(k, n, k_size, bits, order):
    """Returns (row of 32-bit words or bytes, element within it) for element (k, n) of w^T: its place after preprocessing, in a
    stream of elements that begins with the lowest bits."""
    if order == "column_major":
        return n * k_size + k
    rows = 8 * 16 // bits  # rows of w^T that are permuted together
    inside = k % rows
    # ldmatrix gives lane t the bytes 4 t to 4 t + 3 of a row; it needs k = 2 t, 2 t + 1 and, 8 further on, two more, of each
    # 16 k whose codes those 4 bytes hold.
    half, lane, pair, low = inside // 16, inside % 8 // 2, inside % 16 // 8, inside % 2
    moved = k - inside + lane * (rows // 4) + half * 4 + pair * 2 + low
    if order == "interleaved":
        columns = 128 * 8 // (64 * bits)  # number of columns that share a line of 128 bytes, each with 64 k
        at = (n // columns) * columns * k_size + (moved // 64) * 64 * columns + (n % columns) * 64 + moved % 64
    else:
        at = n * k_size + moved
    register = 32 // bits
    first, element = at - at % register, at % register
    return first + (element // 2 if element % 2 == 0 else register // 2 + element // 2)


def preprocessed(signed, bits, order):
    """int8 [K, N * bits / 8] as the converter stores it, of signed integers [N, K]."""
    n_size, k_size = signed.shape
    stream = np.zeros(n_size * k_size, dtype=np.uint8)
    for n in range(n_size):
        for k in range(k_size):
            value = int(signed[n, k]) + (0 if order == "column_major" else 1 << (bits - 1))
            stream[place(k, n, k_size, bits, order)] = value & ((1 << bits) - 1)
    data = stream if bits == 8 else stream[0::2] | stream[1::2] << 4
    return torch.from_numpy(data.view(np.int8).reshape(k_size, n_size * bits // 8).copy())


@pytest.mark.parametrize(("bits", "rows"), [(4, [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]), (8, [0, 1, 8, 9, 2, 3, 10, 11])])
def test_the_preprocessor_itself(bits, rows):
    """Rows come in the published order, and the word of elements 0, 1, ... has them from below as 0 2 4 6 1 3 5 7 (0 2 1 3)."""
    register = 32 // bits
    slots = [place(k, 0, 64, bits, "permuted") for k in rows]
    from_below = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    assert [slot // register * register + from_below[slot % register] for slot in slots] == list(range(len(rows)))
    assert place(0, 1, 128, bits, "interleaved") == 64 and place(64, 0, 128, bits, "interleaved") == 64 * (16 // bits)


# ---- a model in this format


def own_checkpoint(folder, scheme, architecture="LlamaForCausalLM", dtype=torch.float16):
    """Writes a tiny lowbit checkpoint whose decoder is quantized; returns its weights and config."""
    torch.manual_seed(3)
    config = KINDS[architecture](
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, max_position_embeddings=256, dtype=dtype,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config) if architecture == "LlamaForCausalLM" else _model(architecture, config)
    held, entries = {}, {}
    with CheckpointWriter(folder) as writer:
        for name, tensor in model.to(dtype).state_dict().items():
            if name.endswith("bias"):
                tensor = torch.randn_like(tensor)
            layer = name.removesuffix(".weight")
            if not layer.endswith("_proj"):
                held[name] = tensor
                writer.add(name, tensor)
                continue
            q = rtn(tensor.float() * 4, scheme)
            held[layer], entries[layer] = q, LayerEntry.of(q)
            for suffix, part in layer_tensors(q).items():
                writer.add(f"{layer}.{suffix}", part)
        stated = {**model.config.to_dict(), "architectures": [architecture]}
        writer.finish(stated, Manifest(parse_scheme(scheme), entries, ("lm_head",)))
    return held, config


def _model(architecture, config):
    import transformers

    return getattr(transformers, architecture)(config)


PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",), "mlp.fc": ("mlp.gate_proj",), "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}  # fmt: skip
OTHERS = {
    "model.embed_tokens.weight": "transformer.vocab_embedding.weight", "model.norm.weight": "transformer.ln_f.weight",
    "lm_head.weight": "lm_head.weight", "model.layers.0.input_layernorm.weight": f"{LAYER}.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight": f"{LAYER}.post_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight": f"{LAYER}.attention.q_layernorm.weight",
    "model.layers.0.self_attn.k_norm.weight": f"{LAYER}.attention.k_layernorm.weight",
}  # fmt: skip


def their_checkpoint(folder, held, config, algorithm, order, architecture="LlamaForCausalLM", **quantization):
    """The same model in TensorRT-LLM's format; for GPTQ with 16-bit scales and the zeros `zero_points`."""
    bits = 8 if algorithm.startswith("W8") else 4
    tensors = {OTHERS[name]: held[name] for name in held if name in OTHERS}
    for fused, parts in PARTS.items():
        qs = [held[f"model.layers.0.{part}"] for part in parts]
        signed = torch.cat([q.codes for q in qs]).numpy().astype(np.int64) - (1 << (bits - 1))
        weight, scale = preprocessed(signed, bits, order), torch.cat([q.scale for q in qs])
        base = f"{LAYER}.{fused}"
        biases = [held[name] for part in parts if (name := f"model.layers.0.{part}.bias") in held]
        if biases:
            tensors[f"{base}.bias"] = torch.cat(biases)
        if algorithm in ("W8A16", "W4A16"):
            tensors |= {f"{base}.weight": weight, f"{base}.per_channel_scale": scale.reshape(-1)}
            continue
        tensors[f"{base}.weight"] = weight.view(config.dtype)
        tensors[f"{base}.weights_scaling_factor"] = scale.t().contiguous()
        if qs[0].zero is not None:
            zero = torch.cat([q.zero for q in qs]).float()
            tensors[f"{base}.zero"] = (((1 << (bits - 1)) - zero) * scale.float()).to(scale.dtype).t().contiguous()
    stated = {
        "architecture": architecture, "dtype": str(config.dtype).removeprefix("torch."), "vocab_size": 160, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 16,
        "max_position_embeddings": 256, "hidden_act": "silu", "norm_epsilon": config.rms_norm_eps, "rotary_base": 5000.0,
        "position_embedding_type": "rope_gpt_neox", "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, **quantization}, "weight_order": order,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stated))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "rank0.safetensors")
    return folder


def same_model(theirs, ours):
    """Asserts that the models in both folders compute the same logits, bit for bit."""
    ids = torch.tensor([[1, 5, 9, 30, 77, 2, 159]])
    with torch.inference_mode():
        logits = [load_causal(folder, device="cpu", dtype=torch.float32)(ids).logits for folder in (theirs, ours)]
    assert torch.equal(*logits) and logits[0].std() > 0.01


@pytest.mark.parametrize("order", ["interleaved", "permuted", "column_major"])
@pytest.mark.parametrize(("algorithm", "scheme"), [("W8A16", "w8a16"), ("W4A16", "w4a16_pc")])
def test_weights_of_channels(tmp_path, algorithm, scheme, order):
    held, config = own_checkpoint(tmp_path / "own", scheme)
    folder = their_checkpoint(tmp_path / "theirs", held, config, algorithm, order)
    report = convert_checkpoint(folder, tmp_path / "read")
    assert report.source == "tensorrt-llm" and set(report.layers.values()) == {scheme} and not report.notes
    with CheckpointReader(tmp_path / "read") as reader:
        for name, entry in reader.manifest.layers.items():
            q = reader.layer(name)
            assert torch.equal(q.codes, held[name].codes) and torch.equal(q.scale, held[name].scale), entry
    same_model(folder, tmp_path / "own")


@pytest.mark.parametrize("named", ["type", "rope_type"])
def test_positions_are_scaled_under_either_name(tmp_path, named):
    held, config = own_checkpoint(tmp_path / "own", "w8a16")
    folder = their_checkpoint(tmp_path / "theirs", held, config, "W8A16", "interleaved")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rotary_scaling": {named: "linear", "factor": 4.0}}))
    assert load_causal(folder, device="cpu").config.rope_parameters["rope_type"] == "linear"


@pytest.mark.parametrize("algorithm", ["W4A16_GPTQ", "W8A16_GPTQ", "W4A16_AWQ"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_symmetric_weights_of_groups(tmp_path, algorithm, dtype):
    """Symmetric GPTQ files have zeros that are all 0; converted AWQ files have no zeros."""
    held, config = own_checkpoint(tmp_path / "own", f"w{algorithm[1]}a16_g64", dtype=dtype)
    zeros = algorithm != "W4A16_AWQ"
    folder = their_checkpoint(tmp_path / "theirs", held, config, algorithm, "interleaved", group_size=64, has_zero_point=zeros)
    if zeros:
        tensors = load_file(folder / "rank0.safetensors")
        of = {n: t for n, t in tensors.items() if n.endswith("weights_scaling_factor")}
        more = {n.replace("weights_scaling_factor", "zero"): -torch.zeros_like(t) for n, t in of.items()}
        save_file(tensors | more, folder / "rank0.safetensors")
    assert set(convert_checkpoint(folder, tmp_path / "read").layers.values()) == {f"w{algorithm[1]}a16_g64"}
    same_model(folder, tmp_path / "own")


def test_zeros_are_what_the_files_say(tmp_path):
    """Weights are exactly (code - 8) * scale + zero, with the zero as the files round it to 16 bits."""
    held, config = own_checkpoint(tmp_path / "own", "w4a16_g64_z")
    folder = their_checkpoint(
        tmp_path / "theirs", held, config, "W4A16_GPTQ", "interleaved", group_size=64, has_zero_point=True
    )
    assert set(convert_checkpoint(folder, tmp_path / "read").layers.values()) == {"w4a16_g64_fz"}
    stored = load_file(folder / "rank0.safetensors")
    scale, zero = (stored[f"{LAYER}.mlp.fc.{suffix}"].double().t() for suffix in ("weights_scaling_factor", "zero"))
    q = held["model.layers.0.mlp.gate_proj"]
    truth = (q.codes.double() - 8) * scale + zero
    with CheckpointReader(tmp_path / "read") as reader:
        read = reader.layer("model.layers.0.mlp.gate_proj")
    assert torch.equal(read.dequantize(torch.float64), truth) and torch.equal(read.codes, q.codes)
    assert not torch.equal(truth, q.dequantize(torch.float64)), "the zeros were rounded, and that is to be seen"
    assert (truth - q.dequantize(torch.float64)).abs().max() < 0.01 * truth.abs().max()


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_other_decoders(tmp_path, architecture):
    """Qwen2 has biases of q, k and v, which are one tensor in these files. Qwen3 has norms of heads."""
    held, config = own_checkpoint(tmp_path / "own", "w8a16", architecture)
    folder = their_checkpoint(tmp_path / "theirs", held, config, "W8A16", "interleaved", architecture)
    assert (f"{LAYER}.attention.qkv.bias" in load_file(folder / "rank0.safetensors")) == (architecture[:5] == "Qwen2")
    same_model(folder, tmp_path / "own")


def factors(tensors):
    tensors[f"{LAYER}.mlp.proj.prequant_scaling_factor"] = torch.full((1, 128), 0.5).half()


def test_factors_of_x_are_read(tmp_path):
    held, config = own_checkpoint(tmp_path / "own", "w4a16_g64")
    folder = their_checkpoint(tmp_path / "theirs", held, config, "W4A16_AWQ", "permuted", group_size=64)
    tensors = load_file(folder / "rank0.safetensors")
    factors(tensors)
    save_file(tensors, folder / "rank0.safetensors")
    convert_checkpoint(folder, tmp_path / "read")
    with CheckpointReader(tmp_path / "read") as reader:
        q = reader.layer("model.layers.0.mlp.down_proj")
    assert q.input_transform.pre_quant_scale.tolist() == [0.5] * 128


QKV = f"{LAYER}.attention.qkv"


def without_layers(tensors):
    for name in [name for name in tensors if "attention" in name or "mlp" in name]:
        del tensors[name]


REFUSED = {
    "no order": ("W8A16", lambda c: c.pop("weight_order"), None, r'files do not name; state it in config.json, "weight_order"'),
    "a wrong order": ("W8A16", lambda c: c.update(weight_order="sm_80"), None, "'sm_80', one of interleaved, permuted, column"),
    "an algorithm": ("W8A16", lambda c: c["quantization"].update(quant_algo="W4A8_AWQ"), None, "W4A16_AWQ, W8A16, W4A16, W4A1"),
    "ranks": ("W8A16", lambda c: c["mapping"].update(world_size=2), None, "split over 2 ranks"),
    "no mapping": ("W8A16", lambda c: c.update(mapping=[1]), None, r"mapping is a JSON object, got \[1\]"),
    "a word": ("W8A16", lambda c: c.update(num_key_value_heads="two"), None, "cannot make a LlamaConfig of it .*two"),
    "a list": ("W8A16", lambda c: c.update(rotary_scaling="yarn"), None, "cannot make a LlamaConfig of it"),
    "a half": ("W8A16", lambda c: c.update(head_size=16.5), None, "cannot make a LlamaConfig of it"),
    "rows": ("W8A16", lambda c: c.update(num_key_value_heads=4), None, "q, k and v have 192 rows together, found 128"),
    "a group": ("W4A16_GPTQ", lambda c: c["quantization"].update(group_size=48), None, "no whole groups of 48"),
    "zeros unsaid": ("W4A16_GPTQ", lambda c: c["quantization"].update(has_zero_point=False), None, "has_zero_point false"),
    "a scale": ("W8A16", None, lambda t: t.pop(f"{QKV}.per_channel_scale"), rf"{QKV}\.per_channel_scale: missing"),
    "zeros": ("W4A16_GPTQ", None, lambda t: t.pop(f"{QKV}.zero"), rf"{QKV}\.zero: missing"),
    "not quantized": ("W8A16", None, lambda t: t.update({f"{QKV}.weight": t[f"{QKV}.weight"].half()}), "a matrix of int8"),
    "a width": ("W8A16", None, lambda t: t.update({f"{QKV}.weight": t[f"{QKV}.weight"][:40].clone()}), "a multiple of 64"),
    "a nan": ("W8A16", None, lambda t: t[f"{QKV}.per_channel_scale"].fill_(float("nan")), "some scales are not finite"),
    "a strange tensor": ("W8A16", None, lambda t: t.update({f"{QKV}.zero": torch.ones(1)}), "has no counterpart"),
    "no layers": ("W8A16", None, without_layers, "holds no layer such as"),
    "a bias": ("W8A16", None, lambda t: t.update({f"{QKV}.bias": torch.ones(96)}), r"\[96\], by config.json q, k and v"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_said(tmp_path, what):
    algorithm, config_change, tensor_change, message = REFUSED[what]
    held, config = own_checkpoint(tmp_path / "own", "w8a16" if algorithm == "W8A16" else "w4a16_g64_z")
    zeros = {} if algorithm == "W8A16" else {"group_size": 64, "has_zero_point": True}
    folder = their_checkpoint(tmp_path / "theirs", held, config, algorithm, "interleaved", **zeros)
    if config_change:
        stated = json.loads((folder / "config.json").read_text())
        config_change(stated)
        (folder / "config.json").write_text(json.dumps(stated))
    if tensor_change:
        tensors = load_file(folder / "rank0.safetensors")
        tensor_change(tensors)
        save_file(tensors, folder / "rank0.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
