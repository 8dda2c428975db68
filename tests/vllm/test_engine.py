"""vLLM engines on a CPU with lowbit checkpoints: greedy tokens equal those of Transformers with lowbit layers.

`make test-vllm` creates an environment with vLLM and runs these tests; without vLLM they are skipped.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lowbit import demo
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from tests.forks import forked
from tests.tiny import tiny_tokenizer
from tests.vllm.folders import MIXED, SETTINGS, packed, plain

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)")

PROMPTS = [[5, 6, 7, 8], list(range(10, 40)), [3]]
NEW = 16

ENGINE = """
import json, sys
if __name__ == "__main__":
    folder, prompts, new, options = sys.argv[1], *map(json.loads, sys.argv[2:5])
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from torch._dynamo.utils import counters
    adapter, reload = options.pop("adapter", None), options.pop("reload", False)
    adapter = None if adapter is None else LoRARequest("adapter", 1, adapter)
    sizes = dict(max_model_len=128, max_num_seqs=8, dtype="float32", enforce_eager=True, seed=0)
    engine = LLM(folder, **{**sizes, **options})
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    graphs = dict(counters["stats"])
    made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False, lora_request=adapter)
    alone = engine.generate([{"prompt_token_ids": prompts[0]}], greedy, use_tqdm=False, lora_request=adapter)
    assert dict(counters["stats"]) == graphs, "something was compiled for a batch"
    tokens = [list(answer.outputs[0].token_ids) for answer in (*made, *alone)]
    print("TOKENS" + json.dumps(tokens), flush=True)
    if reload:
        engine.collective_rpc("reload_weights")
"""


def served(folder, prompts=PROMPTS, new=NEW, **options):
    """vLLM's tokens for all prompts in one batch. The first prompt alone must give the same tokens."""
    settings = SETTINGS | {"VLLM_CACHE_ROOT": str(folder.parent.parent / "cache")}  # vLLM inspects an architecture once
    out = forked(ENGINE, folder, json.dumps(prompts), json.dumps(new), json.dumps(options), imported=("vllm",), **settings)
    *tokens, alone = json.loads(next(line for line in out.splitlines() if line.startswith("TOKENS"))[6:])
    assert alone == tokens[0]
    return tokens


def ours(folder, prompts=PROMPTS, new=NEW, **options):
    """The tokens of Transformers' `generate` with lowbit layers."""
    return generated(load_causal(folder, device="cpu", dtype=torch.float32, **options), prompts, new)


def generated(model, prompts, new=NEW):
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        tokens.append(made[0, len(prompt) :].tolist())
    return tokens


def test_registered_as_often_as_vllm_likes():
    code = """
from lowbit.vllm import register
register(), register()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
print(QUANTIZATION_METHODS.count("lowbit"), get_quantization_config("lowbit").__name__)
"""
    assert forked(code, imported=("vllm",), **SETTINGS).splitlines()[-1] == "1 LowbitQuantization"


def test_kernels_are_compiled_when_all_layers_are_processed():
    code = """
from unittest.mock import MagicMock
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import base_loader
import lowbit.kernels.parts.compile
from lowbit.vllm.loader_patches import patch_loader
from lowbit.vllm.warm_up import compile_soon
class Method(QuantizeMethodBase):
    def create_weights(self, layer): pass
    def apply(self, layer): pass
    def process_weights_after_loading(self, layer): compile_soon([layer.name], 90), print(layer.name)
def layer(name):
    made = torch.nn.Module()
    made.name, made.quant_method = name, Method()
    return made
lowbit.kernels.parts.compile.compiled = lambda wanted, sm: [print(*wanted, sm)]
patch_loader(), patch_loader()
model = torch.nn.Sequential(layer("a"), layer("b"))
base_loader.process_weights_after_loading(model, MagicMock(), torch.device("cpu"))
"""
    assert forked(code, imported=("vllm",), **SETTINGS).splitlines()[-3:] == ["a", "b", "a b 90"]


def test_mixed_bits_act_order_and_a_tied_embedding(tmp_path):
    folder = packed(
        tmp_path / "model", MIXED, tied=True, embedding="w8a16", order=("o_proj", "down_proj"), factors=("o_proj",),
        low_rank=("up_proj", "down_proj"),
    )  # fmt: skip
    assert served(folder) == ours(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_inputs_that_are_rotated(tmp_path, ranks):
    """Every layer's input is rotated in blocks of 64 channels. With two ranks, each has three such blocks of down_proj (192
    channels).
    """
    quantize_checkpoint(plain(tmp_path / "model"), tmp_path / "own", "w4a16_g32", rotate_inputs=["*_proj"])
    assert served(tmp_path / "own", tensor_parallel_size=ranks) == ours(tmp_path / "own")


@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks(tmp_path, tied):
    folder = packed(tmp_path / "model", MIXED, tied=tied, embedding="w8a16" if tied else None, order=("o_proj", "down_proj"))
    assert served(folder, tensor_parallel_size=2) == ours(folder)


@pytest.mark.parametrize(("scheme", "mode"), [("w4a16_g32", 3), ("w8a8", 2), ("w6e3m2a16", 3)])
def test_compiled_pieces_are_not_compiled_again(tmp_path, scheme, mode):
    """vLLM traces the model once for all batches: as a whole in mode 2, split at attention as on GPUs in mode 3. The engine of
    `served` fails if anything is compiled later."""
    folder = packed(tmp_path / "model", dict.fromkeys(MIXED, scheme), tied=True, embedding="w8a16")
    assert served(folder, enforce_eager=False, compilation_config={"mode": mode}) == ours(folder)


@pytest.mark.parametrize("scheme", ["w8e4m3a8e4m3", "w4a8_g128", "w8a8_az", "w4e2m1a16_g32", "w8a16_pc_z", "w2a16_g32_z"])
def test_schemes(tmp_path, scheme):
    folder = packed(tmp_path / "model", dict.fromkeys(MIXED, scheme))
    assert served(folder) == ours(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_16_bit_weights_are_quantized_while_loading(tmp_path, ranks):
    folder = plain(tmp_path / "model", tied=True)
    stated = {"quant_method": "lowbit", "scheme": "w4a16_g32", "head": "w8a16"}
    expected = ours(folder, scheme="w4a16_g32", head="w8a16")
    assert served(folder, hf_overrides={"quantization_config": stated}, tensor_parallel_size=ranks) == expected


def test_weights_of_a_shape_alone(tmp_path):
    """config.json without weights is enough for random weights, as benchmarks use them."""
    folder = plain(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    stated = {"quant_method": "lowbit", "scheme": "w6e3m2a16"}
    tokens = served(folder, hf_overrides={"quantization_config": stated}, load_format="dummy")
    assert [len(each) for each in tokens] == [NEW] * 3


@pytest.mark.parametrize(("tool", "scheme"), [("awq", "w4a16_g32_z"), ("gptq", "w4a16_g32"), ("compressed-tensors", "w8a8_ct")])
def test_other_tools_checkpoints_run_on_our_kernels(tmp_path, tool, scheme):
    order = {"gptq": ("q_proj", "k_proj", "v_proj", "down_proj")}.get(tool, ())
    own = packed(tmp_path / "own", dict.fromkeys(MIXED, scheme), order=order)
    convert_checkpoint(own, tmp_path / "model", tool)
    assert served(tmp_path / "model", quantization="lowbit") == ours(own)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_of_every_layer(tmp_path, ranks):
    """A LoRA adapter of rank 8 on every quantized layer."""
    folder, adapter = packed(tmp_path / "model", MIXED, tied=True, embedding="w8a16"), tmp_path / "adapter"
    tensors, expected = lora(adapter, folder), ours(folder)
    model = load_causal(folder, device="cpu", dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear) and name != "lm_head":
            a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            layer.register_forward_hook(lambda _, x, y, a=a, b=b: y + x[0] @ a.T @ b.T)
    adapted = generated(model, PROMPTS)
    assert adapted != expected
    assert served(folder, adapter=str(adapter), enable_lora=True, max_lora_rank=8, tensor_parallel_size=ranks) == adapted


def lora(path, folder):
    """Writes a PEFT adapter for every quantized linear layer of a folder; returns its tensors."""
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]["layers"]
    shapes = {name: entry["shape"] for name, entry in stated.items() if name.rpartition(".")[2] in MIXED}
    torch.manual_seed(3)
    tensors = {}
    for name, (n, k) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(8, k) / k**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n, 8) / 8**0.5
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": list(MIXED),
    }
    (path / "adapter_config.json").write_text(json.dumps(stated))
    return tensors


def test_16_bit_weights_whose_rows_vllm_rearranges(tmp_path):
    """Falcon's files have q, k and v interleaved by groups of heads; vLLM's layer has them one after the other."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=160, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, alibi=False, bias=False,
        new_decoder_architecture=True, bos_token_id=None, eos_token_id=None, dtype=torch.float32,
    )  # fmt: skip
    model = FalconForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
    saved(model, tmp_path / "model")
    for layer in model.transformer.h.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rtn(layer.weight.data, "w8a16").dequantize()
    stated = {"quant_method": "lowbit", "scheme": "w8a16"}
    assert served(tmp_path / "model", hf_overrides={"quantization_config": stated}) == generated(model, PROMPTS)


def test_packed_rows_that_vllm_rearranges_are_refused(tmp_path):
    config = BloomConfig(vocab_size=160, hidden_size=128, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=None)
    saved(BloomForCausalLM(config), tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "own", "w8a16")
    with pytest.raises(AssertionError, match="self_attention.query_key_value: vLLM reorders these rows of bloom while"):
        served(tmp_path / "own")


EXPERTS = dict(
    vocab_size=160, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype=torch.float32,
)  # fmt: skip


def of_experts(model):
    """Replaces the model's weights by larger random ones, so that the next token depends on all earlier tokens."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model.eval()


def mixtral():
    return of_experts(MixtralForCausalLM(MixtralConfig(**EXPERTS, intermediate_size=64, num_local_experts=4)))


def qwen2_moe():
    sizes = dict(moe_intermediate_size=64, shared_expert_intermediate_size=96, num_experts=4)
    return of_experts(Qwen2MoeForCausalLM(Qwen2MoeConfig(**EXPERTS, **sizes)))


def qwen3_moe():
    return of_experts(Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=64, num_experts=4)))


def olmoe():
    return of_experts(OlmoeForCausalLM(OlmoeConfig(**EXPERTS, intermediate_size=64, num_experts=4)))


def quantized(made, tmp_path, scheme, **options):
    saved(made(), tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "own", scheme, **options)
    return tmp_path / "own"


ON_TWO_RANKS = dict(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("made", "scheme", "options"),
    [
        (mixtral, "w4a16_g32", {}),
        (mixtral, "w6e3m2a16", ON_TWO_RANKS),
        (qwen3_moe, "w4a16_g64", ON_TWO_RANKS),
        (qwen3_moe, "w4a16_g32", ON_TWO_RANKS | dict(enable_expert_parallel=True)),
        (qwen3_moe, "w8a8", {}),
        (qwen2_moe, "w3a16_g32_z", {}),
        (olmoe, "w8a16", {}),
    ],
)
def test_quantized_experts(made, scheme, options, tmp_path):
    """On two ranks, a group of 64 channels between the two products is split into two groups of 32."""
    folder = quantized(made, tmp_path, scheme)
    assert served(folder, **options) == ours(folder)


def test_quantized_experts_in_a_compiled_model(tmp_path):
    folder = quantized(qwen3_moe, tmp_path, "w4a16_g32")
    assert served(folder, enforce_eager=False, compilation_config={"mode": 3}) == ours(folder)


def test_a_mixtral_that_transformers_saved(tmp_path):
    """In files that Transformers saved, the router too has the name of Transformers' model: mlp.gate, not
    block_sparse_moe.gate."""
    folder = quantized(mixtral, tmp_path, "w4a16_g32")
    saved(load_causal(folder, device="cpu", dtype=torch.float32), tmp_path / "saved")
    assert served(tmp_path / "saved") == ours(folder)


@pytest.mark.parametrize(("made", "ranks"), [(qwen3_moe, 1), (mixtral, 2)])
def test_16_bit_experts_are_quantized_while_loading(made, ranks, tmp_path):
    saved(made(), tmp_path / "model")
    stated = {"quant_method": "lowbit", "scheme": "w4a16_g32"}
    expected = ours(tmp_path / "model", scheme="w4a16_g32")
    assert served(tmp_path / "model", hf_overrides={"quantization_config": stated}, tensor_parallel_size=ranks) == expected


def test_16_bit_experts_stay_where_that_is_said(tmp_path):
    model = qwen3_moe()
    saved(model, tmp_path / "model")
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rtn(layer.weight.data, "w8a16").dequantize()
    stated = {"quant_method": "lowbit", "scheme": "w8a16", "modules_to_not_convert": ["*.experts"]}
    assert served(tmp_path / "model", hf_overrides={"quantization_config": stated}) == generated(model, PROMPTS)


@pytest.mark.parametrize(("made", "tool", "scheme"), [(mixtral, "gptq", "w4a16_g32"), (qwen3_moe, "awq", "w4a16_g32_z")])
def test_experts_of_other_tools_run_on_our_kernels(made, tool, scheme, tmp_path):
    folder = quantized(made, tmp_path, scheme)
    convert_checkpoint(folder, tmp_path / "other", tool)
    assert served(tmp_path / "other", quantization="lowbit") == ours(folder)


def test_lora_beside_quantized_experts_is_refused(tmp_path):
    folder = quantized(qwen3_moe, tmp_path, "w4a16_g32")
    with pytest.raises(AssertionError, match=r"layers.0.mlp.experts: vLLM's LoRA .--enable-lora. needs vLLM's own kernels"):
        served(folder, enable_lora=True)


def test_quantized_experts_that_the_files_lack_are_named(tmp_path):
    folder = quantized(mixtral, tmp_path, "w4a16_g32")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AssertionError, match=r"files lack model.layers.1.mlp.experts.down_proj.weight_scale; copy the folder"):
        served(folder)


@pytest.mark.parametrize("made", [mixtral, qwen2_moe])
def test_experts_of_a_quantized_model_are_in_16_bits(made, tmp_path):
    """Routers and experts stay in 16 bits and keep the source's tensor names, which vLLM's model expects."""
    saved(made(), tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "own", "w8a16", skip=["lm_head", "*.experts"])
    assert served(tmp_path / "own") == ours(tmp_path / "own")


@pytest.mark.parametrize(("lacking", "said"), [("w1", "w13_weight"), ("w2", "w2_weight"), ("w3", "w13_weight")])
def test_an_expert_that_the_files_lack_is_named(lacking, said, tmp_path):
    saved(mixtral(), tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "own", "w8a16", skip=["lm_head", "*.experts"])
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    del tensors[f"model.layers.1.block_sparse_moe.experts.2.{lacking}.weight"]
    save_file(tensors, tmp_path / "own" / "model.safetensors")
    with pytest.raises(AssertionError, match=rf"files lack numbers of model\.layers\.1\.\S*\.{said}\[2\], or hold NaN"):
        served(tmp_path / "own")


def saved(model, folder):
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def test_our_method_for_weights_in_16_bits_needs_a_scheme(tmp_path):
    with pytest.raises(AssertionError, match="--quantization lowbit: config.json states no quantization_config; quantize"):
        served(plain(tmp_path / "model"), quantization="lowbit")


@pytest.mark.model
@pytest.mark.parametrize(("scheme", "embeddings"), [("w4a16_g64", False), ("w6e3m2a16", True)])
def test_the_demos_model(tmp_path, scheme, embeddings):
    folder = tmp_path / "model"
    try:
        source = demo.download_model(print)
    except demo.DemoError as error:
        pytest.skip(str(error))
    quantize_checkpoint(source, folder, scheme, embeddings=embeddings)
    prompts = [[504, 3575, 282, 4649, 314], list(range(2000, 2050))]
    assert served(folder, prompts, 24) == ours(folder, prompts, 24)


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("layers.1.mlp.down_proj.weight_scale", "files lack model.layers.1.mlp.down_proj.weight_scale"),
        ("layers.1.self_attn.k_proj.weight", "files lack numbers of model.layers.1.self_attn.qkv_proj.weight, or hold NaN"),
        ("layers.0.self_attn.v_proj.bias", "files lack numbers of model.layers.0.self_attn.qkv_proj.bias"),
        ("embed_tokens.weight", "embed_tokens.weight"),
        ("layers.0.input_layernorm.weight", 'model.layers.0.input_layernorm.weight.*"enable_weights_track": false}\' loads it'),
    ],
)
def test_a_file_that_lacks_a_tensor_is_named(tmp_path, lacking, said):
    """q, k and v are in 16 bits here, so they form one weight and one bias of vLLM's layer. The error names the missing
    tensor.
    """
    folder = packed(
        tmp_path / "model", {end: scheme for end, scheme in MIXED.items() if end not in ("q_proj", "k_proj", "v_proj")}
    )
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.{lacking}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AssertionError, match=said):
        served(folder)


def test_a_norm_that_the_files_lack_is_left_out_on_request(tmp_path):
    """vLLM initialises a missing norm with ones, which are its values here."""
    folder = packed(tmp_path / "model", MIXED)
    expected, tensors = ours(folder), load_file(folder / "model.safetensors")
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert served(folder, model_loader_extra_config={"enable_weights_track": False}) == expected


def test_a_tensor_that_config_json_does_not_state_is_named(tmp_path):
    """config.json does not mention the layer's act-order, which would be ignored silently otherwise."""
    folder = packed(tmp_path / "model", MIXED, order=("o_proj",))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["layers"]["model.layers.1.self_attn.o_proj"]["order"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        AssertionError, match='o_proj.weight_order: config.json does not state "order": true for model.layers.1'
    ):
        served(folder)


def test_a_draft_model(tmp_path):
    """In a draft model, vLLM's layer names begin with "draft_model."."""
    folder = packed(tmp_path / "model", MIXED)
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    assert served(folder, speculative_config=draft) == ours(folder)


def test_new_weights_for_a_running_engine_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="loaded twice; a running engine cannot load its weights again: start another"):
        served(packed(tmp_path / "model", MIXED), reload=True)


@pytest.mark.parametrize("options", [{"cpu_offload_gb": 1}, {"offload_group_size": 2}])
def test_weights_in_cpu_memory_are_refused(tmp_path, options):
    with pytest.raises(AssertionError, match=r"qkv_proj: quantized layers cannot be offloaded to CPU memory"):
        served(packed(tmp_path / "model", MIXED), **options)
