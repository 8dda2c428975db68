"""Inputs are quantized once for all layers that read them. Results and files stay the same. Also tests which modules are not
fused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lowbit import LowbitConfig
from lowbit.models.fuse import fuse_quantization
from lowbit.nn import QuantLinear, convert
from lowbit.nn.fused import GatedMLP, QuantizingNorm
from tests.tiny import save_tiny, tiny_llama, with_channels

IDS = torch.arange(3, 43)[None]
SCHEMES = ["w8a8", "w8a8_az", "w8a8_t_az", "fp8", "fp8_dynamic", "fp8_block", "w4a8_g64"]


def converted(scheme, model=None, dtype=torch.float32):
    model = tiny_llama(dtype=dtype) if model is None else model
    convert(model.eval(), scheme)
    if "_t" in scheme or scheme == "fp8":  # gives every layer its own static scale, as calibration does
        for module in model.modules():
            if isinstance(module, QuantLinear):
                zero = torch.tensor([5], dtype=torch.int32) if scheme.endswith("_az") else None
                q = module.quant_tensor().with_input(activation_scale=torch.tensor([0.03]), activation_zero=zero)
                module.set_weight(q)
    return model


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits.float()


class Quantizations(TorchDispatchMode):
    """Counts calls of the operator that quantizes activations, by the operation fused before it."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.lowbit.quantize_activations.default:
            before = args[5] if len(args) > 5 else ""
            self.count[before] = self.count.get(before, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(model):
    with torch.no_grad(), Quantizations() as seen:
        model(IDS)
    return seen.count


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_model_with_fewer_passes(scheme):
    """In float32 norms do not round, so fused and separate results differ only by the order of sums."""
    model = converted(scheme)
    expected, state = logits(model), {name: t.clone() for name, t in model.state_dict().items()}
    assert counted(model) == {"": 14}
    replaced = fuse_quantization(model)
    assert [name.removeprefix("model.layers.0.") for name in replaced[:3]] == [
        "input_layernorm", "mlp", "post_attention_layernorm",
    ]  # fmt: skip
    assert len(replaced) == 6 and counted(model) == {"rms_norm": 4, "silu": 2, "": 2}
    assert (logits(model) - expected).norm() < 3e-3 * expected.norm()
    again = model.state_dict()
    assert list(again) == list(state) and all(torch.equal(again[name], t) for name, t in state.items())
    assert fuse_quantization(model) == [], "nothing is left to do"
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), logits(model))
    assert other.model.layers[0].input_layernorm._reader[0] is other.model.layers[0].self_attn.q_proj


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_roundings_that_are_left_out_are_small(dtype):
    """In 16 bits a separate norm rounds twice before its result is quantized; the fused norm is no farther from the float32
    model.
    """
    model = converted("w8a8", dtype=dtype)
    apart = logits(model)
    assert len(fuse_quantization(model)) == 6
    exact = logits(tiny_llama(dtype=dtype).float())
    assert (logits(model) - apart).norm() < 2e-2 * apart.norm()
    assert (logits(model) - exact).norm() < 1.1 * (apart - exact).norm()


@pytest.mark.parametrize("scheme", ["w8a8_ct", "w8a8_az_ct", "w8a8_t_ct", "w8e4m3a8e4m3_b128x128_ct", "w8e4m3a8e4m3_fb"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_by_another_tools_rule_nothing_changes(scheme, dtype):
    """Other tools quantize the rounded result of a norm or a gate. It can still be quantized once for all readers, with the
    same codes."""
    model = converted(scheme, dtype=dtype)
    expected, state = logits(model), {name: t.clone() for name, t in model.state_dict().items()}
    assert len(fuse_quantization(model)) == 6 and counted(model) == {"": 8}
    assert torch.equal(logits(model), expected)
    again = model.state_dict()
    assert list(again) == list(state) and all(torch.equal(again[name], t) for name, t in state.items())
    assert torch.equal(logits(copy.deepcopy(model)), expected)


def test_in_one_graph_and_with_a_cache():
    model = converted("w8a8")
    fuse_quantization(model)
    expected = logits(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(IDS, use_cache=False).logits
    assert torch.allclose(compiled, expected, rtol=1e-4, atol=1e-4)
    made = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 44)
    assert torch.equal(made[0, 40], expected[0, -1].argmax())


def test_a_family_with_more_inside():
    """Qwen3 has norms between q_proj and the attention, which stay as they are."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=160, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = converted("fp8_dynamic", Qwen3ForCausalLM(config))
    expected = logits(model)
    assert len(fuse_quantization(model)) == 6
    assert type(model.model.layers[0].self_attn.q_norm).__name__ == "Qwen3RMSNorm"
    assert (logits(model) - expected).norm() < 3e-3 * expected.norm()


def replaced_parts(model):
    return {name.rpartition(".")[2] for name in fuse_quantization(model)}


def test_who_is_left_alone():
    config = dict(
        vocab_size=160, hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    assert fuse_quantization(converted("w8a8", Gemma2ForCausalLM(Gemma2Config(**config)))) == [], "another family"
    assert fuse_quantization(converted("w8a16")) == [], "16-bit inputs"
    model = converted("w8a8")
    layer = model.model.layers[0]
    layer.mlp.act_fn = nn.GELU()
    layer.self_attn.k_proj.set_weight(with_channels(layer.self_attn.k_proj.quant_tensor()))
    assert not any(".layers.0." in name for name in fuse_quantization(model)), "another gate, and an input in another order"
    model = converted("fp8")
    attention = model.model.layers[0].self_attn
    attention.v_proj.activation_scale.data.mul_(2)
    assert replaced_parts(model) == {"mlp", "input_layernorm", "post_attention_layernorm"}
    assert not isinstance(model.model.layers[0].input_layernorm, QuantizingNorm), "q, k and v have scales of their own"
    model = converted("w8a8")
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: None)
        layer.post_attention_layernorm.register_forward_hook(lambda module, args, output: None)
        layer.input_layernorm.weight.data.mul_(2)
    assert replaced_parts(model) == {"mlp"}, "others look at what goes in and out"


class Shifted(nn.Module):
    """A norm that multiplies by 1 + weight, as Gemma's norms do."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.variance_epsilon = weight, 1e-6

    def forward(self, x):
        return nn.functional.rms_norm(x, (len(self.weight),), 1 + self.weight, 1e-6)


def test_a_norm_that_computes_something_else_stays():
    model = converted("w8a8")
    layer = model.model.layers[1]
    layer.input_layernorm = Shifted(layer.input_layernorm.weight)
    expected = logits(model)
    replaced = fuse_quantization(model)
    assert "model.layers.1.input_layernorm" not in replaced and len(replaced) == 5
    assert (logits(model) - expected).norm() < 3e-3 * expected.norm()


def fused_parts(model):
    return sum(isinstance(module, (QuantizingNorm, GatedMLP)) for module in model.modules())


def test_a_model_on_a_cpu_is_loaded_as_it_is(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=LowbitConfig("w8a8"))
    assert counted(model) == {"": 14} and fused_parts(model) == 0
    other = copy.deepcopy(model)
    assert len(other._forward_pre_hooks) == 1, "it waits for a GPU"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=LowbitConfig("w8a16"))
    assert not model._forward_pre_hooks, "which would change nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w8a8_ct", "w8a8_az_ct", "w4a8_g128_ct", "w8e4m3a8e4m3_ct", "w8e4m3a8e4m3_b128x128_hf"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_by_another_tools_rule_nothing_changes_on_a_gpu(scheme, dtype):
    model = converted(scheme, dtype=dtype).cuda()
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.prepare(dtype)
    expected = logits(model, IDS.cuda())
    assert len(fuse_quantization(model)) == 6 and counted_on(model) == {"": 8}
    assert torch.equal(logits(model, IDS.cuda()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_az", "fp8_dynamic", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_on_a_gpu_is_fused_when_it_is_loaded_or_first_called(scheme, dtype, tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    config = LowbitConfig(scheme)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config, device_map={"": 0}).eval()
    assert fused_parts(model) == 6
    assert counted_on(model) == {"rms_norm": 4, "silu": 2, "": 2}
    model.save_pretrained(tmp_path / "saved")
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype).cuda().eval()
    apart = copy.deepcopy(moved)
    apart._forward_pre_hooks.clear()
    expected = logits(apart, IDS.cuda())
    assert fused_parts(apart) == fused_parts(moved) == 0
    assert (logits(model, IDS.cuda()) - expected).norm() < 3e-2 * expected.norm()
    assert torch.equal(logits(moved, IDS.cuda()), logits(model, IDS.cuda()))
    assert fused_parts(moved) == 6 and not moved._forward_pre_hooks


def counted_on(model):
    with torch.no_grad(), Quantizations() as seen:
        model(IDS.cuda())
    return seen.count
