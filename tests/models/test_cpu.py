"""Models on a CPU. Tests the dtype in which they run and the form in which layers hold weights, which is never saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import lowbit
from lowbit.kernels.cpu.torch_int8 import sums_are_exact
from lowbit.models.cpu import cpu_dtype, measuring_dtype
from lowbit.nn import QuantLinear
from lowbit.nn.row_linear import RowLinear
from lowbit.pack.cpu import VECTOR_CPUS
from tests.tiny import save_tiny

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in VECTOR_CPUS, reason="torch's int4 and int8 products need AVX2 or AVX-512"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("cpu") / "fp16")


def forms(model):
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    return {None if layer.cpu_weight is None else layer.cpu_weight.form for layer in layers}


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("w4a16_g32", "int4"),
        ("w4a16_g64", "decoded"),
        ("w8a16", "int8"),
        ("w6e3m2a16", "decoded"),
        ("w8a8", "int8" if sums_are_exact() else None),
    ],
)
def test_a_quantized_model_runs_in_the_form_of_its_scheme(folder, scheme, form, tmp_path):
    """K is 64 and 176 here. 176 is a multiple neither of 64 nor of 32, so down_proj with such groups is decoded once when
    loaded.
    """
    pipe = lowbit.pipeline(str(folder), quantization_mode=scheme, device="cpu")
    assert pipe.model.dtype == torch.bfloat16
    before = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    (first,) = pipe("abc", max_new_tokens=6, do_sample=False, ignore_eos=True)
    assert form in forms(pipe.model) and (form is None or None not in forms(pipe.model))
    assert type(pipe.model.lm_head) is RowLinear and pipe.model.lm_head.weight is pipe.model.model.embed_tokens.weight
    pipe.model.save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in pipe.model.state_dict().items())
    pipe.tokenizer.save_pretrained(tmp_path)
    again = lowbit.pipeline(str(tmp_path), device="cpu")
    assert again.model.dtype == torch.bfloat16
    assert again("abc", max_new_tokens=6, do_sample=False, ignore_eos=True) == [first]


def test_quantizing_while_loading_sees_the_weights_of_the_file(folder):
    """The file's weights are fp16: if they were rounded to bf16 before quantization, nine in ten scales would differ."""
    exact, fast = (
        lowbit.pipeline(str(folder), quantization_mode="w4a16_g32", device="cpu", dtype=d).model.state_dict()
        for d in (torch.float32, None)
    )
    quantized = [name for name in exact if name.endswith(("weight_packed", "weight_scale"))]
    assert len(quantized) == 28 and all(torch.equal(exact[name], fast[name]) for name in quantized)


def test_logits_stay_near_those_in_float32(folder):
    ids = torch.arange(3, 99)[None]
    for scheme in ("w4a16_g32", "w4a16_g32_fz", "w8a16", "w6e3m2a16"):
        exact = lowbit.pipeline(str(folder), quantization_mode=scheme, device="cpu", dtype=torch.float32).model
        fast = lowbit.pipeline(str(folder), quantization_mode=scheme, device="cpu").model
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, layer in exact.named_modules():
            if isinstance(layer, QuantLinear):
                plain.get_submodule(name).weight.data = layer.quant_tensor().dequantize()
        with torch.no_grad():
            truth = exact(ids).logits
            torch.testing.assert_close(plain(ids).logits, truth, rtol=1e-4, atol=1e-5)
            rounded = plain.bfloat16()(ids).logits.float()
            error, honest = (fast(ids).logits.float() - truth).norm(), (rounded - truth).norm()
        assert error <= 1.5 * honest, f"{scheme}: as far from float32 as the dequantized model in bf16 is, {honest:.4f}"


def test_types(folder, monkeypatch):
    assert cpu_dtype(quantized=True) == torch.bfloat16 and cpu_dtype(quantized=False) == torch.float32
    assert lowbit.pipeline(str(folder), device="cpu").model.dtype == torch.float32
    assert measuring_dtype() == (None if torch.cuda.is_available() else torch.float32)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert cpu_dtype(quantized=True) == torch.float32


def test_only_layers_that_stay_in_16_bits_on_a_cpu_are_touched(folder):
    model = lowbit.pipeline(str(folder), quantization_mode="w8a16", device="cpu", dtype=torch.float32).model
    assert type(model.lm_head) is nn.Linear


def test_slow_layers_are_told(folder, monkeypatch):
    from lowbit.models import cpu
    from lowbit.nn import decoding

    told = []
    monkeypatch.setattr(cpu.logger, "warning", told.append)
    lowbit.pipeline(str(folder), quantization_mode="w6e3m2a16", device="cpu")
    assert not told
    lowbit.pipeline(str(folder), quantization_mode="fp8", device="cpu")
    monkeypatch.setattr(decoding, "_machine_memory", lambda: 100_000)
    lowbit.pipeline(str(folder), quantization_mode="w6e3m2a16", device="cpu")
    slow = "decoded at every call, several times slower than without quantization"
    assert told == [f"layers of w8e4m3a8e4m3_t on this CPU (14): {slow}", f"layers of w6e3m2a16 on this CPU (14): {slow}"]


def test_positions_stay_in_float32(folder, tmp_path):
    """Rotary frequencies stay in float32 in a bf16 model, so the model computes the same logits after saving and loading."""
    pipe = lowbit.pipeline(str(folder), quantization_mode="w4a16_g32", device="cpu", dtype=torch.bfloat16)
    assert pipe.model.dtype == torch.bfloat16 and pipe.model.model.rotary_emb.inv_freq.dtype == torch.float32
    pipe.model.save_pretrained(tmp_path / "q")
    again = lowbit.pipeline(str(tmp_path / "q"), tokenizer=str(folder), device="cpu", dtype=torch.bfloat16)
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        assert torch.equal(pipe.model(tokens).logits, again.model(tokens).logits)


def test_a_classifier_over_a_language_model(folder):
    """Transformers initializes the classifier's head and says so; the decoder's layers are quantized."""
    config = lowbit.LowbitConfig("w8a16")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, quantization_config=config)
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 14
