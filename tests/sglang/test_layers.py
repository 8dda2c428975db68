"""SGLang's linear layers with lowbit's method, on a CPU: products equal those of the whole matrices. Skipped without SGLang."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest, layer_tensors
from lowbit.formats import parse_scheme
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

K, OUTPUTS = 256, {"q_proj": 256, "k_proj": 64, "v_proj": 64, "o_proj": 256, "gate_proj": 192, "up_proj": 192, "plain": 64}
SCHEMES = {"q_proj": "w4a16_g128", "k_proj": "w4a16_g128", "v_proj": "w6e3m2a16", "o_proj": "w4a16_g128",
           "gate_proj": "w3a16_g64_z", "up_proj": "w5a16_g32_fz"}  # fmt: skip


@pytest.fixture(scope="module")
def matrices():
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(n, K, generator=generator) / K**0.5 for name, n in OUTPUTS.items()}
    return {name: rtn(weight, SCHEMES[name]) if name in SCHEMES else weight for name, weight in weights.items()}


def method(matrices):
    from lowbit.sglang.methods import LowbitSGLang

    layers = {f"m.{name}": LayerEntry.of(q) for name, q in matrices.items() if not isinstance(q, torch.Tensor)}
    manifest = Manifest(parse_scheme("w4a16_g128"), layers, ())
    return LowbitSGLang.from_config(manifest.to_dict() | {"packed_modules_mapping": {}, "hf_config": object()})


def loaded(layer, matrices, ids, model="Qwen2ForCausalLM"):
    """Loads a layer's tensors as SGLang's models do: through each parameter's loader, with the output's name. The SGLang model
    class `model` renames the tensors of the files.
    """
    from sglang.srt.model_loader.auto_loader import WeightsMapper, get_weight_remap

    parameters = dict(layer.named_parameters())
    renamed = get_weight_remap(type(model, (nn.Module,), {})()) or WeightsMapper()
    for name, of in ids.items():
        q = matrices[name]
        tensors = {"weight": q} if isinstance(q, torch.Tensor) else layer_tensors(q)
        for full, tensor in renamed.apply((f"{name}.{suffix}", tensor) for suffix, tensor in tensors.items()):
            suffix = full.removeprefix(f"{name}.")
            parameters[suffix].weight_loader(parameters[suffix], tensor, *(() if of is None else (of,)))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def ranked(rank, ranks):
    from sglang.srt.runtime_context import get_parallel

    stack = ExitStack()
    stack.enter_context(get_parallel().override(tp_size=ranks, tp_rank=rank, attn_tp_size=ranks, attn_tp_rank=rank))
    return stack


def dense(matrix):
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantize().float()


def test_registered_as_often_as_sglang_likes():
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    from lowbit.sglang import register

    register(), register()
    assert QUANTIZATION_CHOICES.count("lowbit") == 1 and QUANTIZATION_METHODS["lowbit"].__name__ == "LowbitSGLang"


@pytest.mark.parametrize("ranks", [1, 2])
def test_q_k_v_and_gate_up_by_rows(matrices, ranks):
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    x, config = torch.randn(5, K, generator=torch.Generator().manual_seed(1)), method(matrices)
    for rank in range(ranks):
        with ranked(rank, ranks):
            qkv = QKVParallelLinear(K, 64, 4, 1, bias=False, params_dtype=torch.float32, quant_config=config,
                                    prefix="m.qkv_proj")  # fmt: skip
            up = MergedColumnParallelLinear(K, [192, 192], bias=False, params_dtype=torch.float32, quant_config=config,
                                            prefix="m.gate_up_proj")  # fmt: skip
        loaded(qkv, matrices, {"q_proj": "q", "k_proj": "k", "v_proj": "v"})
        loaded(up, matrices, {"gate_proj": 0, "up_proj": 1})
        q, k, v = (dense(matrices[f"{name}_proj"]) for name in "qkv")
        rows = torch.cat([q.chunk(ranks)[rank], k, v])  # all ranks have the one KV head
        torch.testing.assert_close(qkv.quant_method.apply(qkv, x), x @ rows.T, rtol=1e-4, atol=1e-4)
        gate = torch.cat([dense(matrices[name]).chunk(ranks)[rank] for name in ("gate_proj", "up_proj")])
        torch.testing.assert_close(up.quant_method.apply(up, x), x @ gate.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_o_by_columns(matrices, ranks):
    """Row-parallel o_proj: 256 channels in groups of 128 over four ranks of 64 channels."""
    from sglang.srt.layers.linear import RowParallelLinear

    x, total = torch.randn(3, K, generator=torch.Generator().manual_seed(2)), torch.zeros(3, 256)
    for rank in range(ranks):
        with ranked(rank, ranks):
            layer = RowParallelLinear(K, 256, bias=False, params_dtype=torch.float32, quant_config=method(matrices),
                                      prefix="m.o_proj")  # fmt: skip
        total += layer.quant_method.apply(loaded(layer, matrices, {"o_proj": None}), x.chunk(ranks, -1)[rank])
    torch.testing.assert_close(total, x @ dense(matrices["o_proj"]).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8e4m3a8e4m3", "w4a8_g128"])
def test_calibrated_scales_of_x(scheme, model, ranks):
    """Static scales of x are loaded, although SGLang's Llama renames them and other models do not."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    generator, scales = torch.Generator().manual_seed(3), {"o_proj": 0.02, "gate_proj": 0.03, "up_proj": 0.04}
    x, held = torch.randn(5, K, generator=generator), {}
    for name, scale in scales.items():
        q = rtn(torch.randn(192, K, generator=generator), scheme)
        held[name] = q.with_input(activation_scale=torch.tensor([scale]))
    o, gate, up = (QuantLinear.from_quant_tensor(q)(x) for q in held.values())
    options = dict(bias=False, params_dtype=torch.float32, quant_config=method(held))
    total = torch.zeros(5, 192)
    for rank in range(ranks):
        with ranked(rank, ranks):
            row = RowParallelLinear(K, 192, prefix="m.o_proj", **options)
            column = MergedColumnParallelLinear(K, [192, 192], prefix="m.gate_up_proj", **options)
        loaded(row, held, {"o_proj": None}, model)
        loaded(column, held, {"gate_proj": 0, "up_proj": 1}, model)
        total += row.quant_method.apply(row, x.chunk(ranks, -1)[rank])
        expected = torch.cat([each.chunk(ranks, -1)[rank] for each in (gate, up)], dim=-1)
        torch.testing.assert_close(column.quant_method.apply(column, x), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(total, o, rtol=1e-4, atol=1e-3)


def test_a_tensor_that_config_json_does_not_state_is_named(matrices):
    """SGLang's models silently skip tensors without a parameter of that name; here the tensor is named in an error."""
    from sglang.srt.layers.linear import RowParallelLinear

    q = matrices["o_proj"]
    with ranked(0, 1):
        layer = RowParallelLinear(K, 256, bias=False, quant_config=method(matrices), prefix="m.o_proj")
    with pytest.raises(CheckpointError, match='m.o_proj.weight_order: config.json does not state "order": true for m.o_proj'):
        loaded(layer, {"o_proj": q.with_input(order=torch.arange(K, dtype=torch.int32))}, {"o_proj": None})


def test_what_is_plain_and_what_is_refused(matrices):
    from sglang.srt.layers.linear import LinearBase, QKVParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from lowbit.sglang.methods import LowbitSGLang

    config = method(matrices)
    assert isinstance(config.get_quant_method(LinearBase(1, 1), "m.plain"), UnquantizedLinearMethod)
    assert config.get_quant_method(nn.Identity(), "m") is None
    experts = type("FusedMoE", (nn.Module,), {})()
    assert config.get_quant_method(experts, "n.experts") is None
    with pytest.raises(CheckpointError, match="single experts of a lowbit checkpoint are not supported"):
        config.get_quant_method(experts, "m")
    config.packed_modules_mapping = {"qkv_proj": ["o_proj"]}
    with pytest.raises(ValueError, match="m.qkv_proj: q, k and v that are one matrix"):
        config.get_quant_method(QKVParallelLinear.__new__(QKVParallelLinear), "m.qkv_proj")
    with pytest.raises(CheckpointError, match="quantized already"):
        LowbitSGLang.from_config({"quant_method": "lowbit", "scheme": "w4a16_g128"})
