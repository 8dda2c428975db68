"""A calibrated run keeps one decoder layer in memory, however many there are. Loading keeps at most one layer in two forms."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, core_model_loading

import lowbit
from benchmarks.load import tensor_bytes
from lowbit.models import hf
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.hf import GPU_LOADING_OVERHEAD_BYTES
from lowbit.models.load import load_causal
from lowbit.nn import PackedWeight, QuantEmbedding, QuantLinear
from lowbit.nn.fused import AlternatingMLP
from lowbit.quantize import rtn
from tests.memory import TensorBytes, linux, peak_bytes
from tests.tiny import tiny_tokenizer

HIDDEN, INTERMEDIATE, LAYERS, SAMPLES, LENGTH = 512, 1024, 4, 24, 128

SETUP = """
from pathlib import Path
import lowbit.models.quantize_checkpoint
from lowbit.models.calibrate import Calibration
from lowbit.quantize import Gptq, Learned
import transformers.models.llama.modeling_llama
torch.set_num_threads(1)
torch.linalg.eigh(torch.eye(4) @ torch.eye(4))  # the libraries' own workspaces
"""

RUN = """
calibration = Calibration(int(sys.argv[3]), int(sys.argv[4]), text=Path(sys.argv[5]))
method = Learned(iterations=3, batch=2) if sys.argv[6:] else Gptq(search='max')
lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], 'w4a16_g64', method=method, calibration=calibration)
"""


def peak_of_calibrating(folder, layers, samples, *arguments):
    config = LlamaConfig(
        vocab_size=160, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, dtype=torch.float16,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder / "fp16")
    tiny_tokenizer().save_pretrained(folder / "fp16")
    (folder / "text.txt").write_text("pack my box with five dozen liquor jugs " * (SAMPLES * LENGTH // 40 + 1))
    return peak_bytes(SETUP, RUN, folder / "fp16", folder / "q", samples, LENGTH, folder / "text.txt", *arguments)


@linux
def test_learning_holds_one_layer_whatever_their_number(tmp_path):
    """If memory grew with the number of layers, three more would take 31 MB more in float32, and eight times that with the
    learned state.
    """
    samples = SAMPLES // 2  # a layer's state is eight times what all of these take
    peaks = [peak_of_calibrating(tmp_path / str(layers), layers, samples, "learned") for layers in (2, 5)]
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
    activations = 3 * 4 * samples * LENGTH * HIDDEN
    print(f"peaks {peaks}: layer {layer:,}, activations {activations:,}")
    assert peaks[1] - peaks[0] < layer + 3 * layer // 4 * 4.25 / 8
    of_a_batch = 2 * LENGTH * 4 * (14 * HIDDEN + 6 * INTERMEDIATE)
    assert peaks[0] < 9 * layer + activations + of_a_batch + 15_000_000


@linux
def test_gptq_holds_one_layer_its_statistics_and_the_activations(tmp_path):
    """If memory grew with the number of layers, three more would take 31 MB more in float32."""
    peak = peak_of_calibrating(tmp_path, LAYERS, SAMPLES)
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
    activations = 2 * 4 * SAMPLES * LENGTH * HIDDEN
    statistics = 4 * INTERMEDIATE**2 + 3 * 8 * INTERMEDIATE**2
    packed = LAYERS * layer // 4 * 4.25 / 8  # the writer keeps a shard of up to 2 GiB in memory
    print(f"peak {peak:,}: layer {layer:,}, activations {activations:,}, statistics {statistics:,}, packed {packed:,.0f}")
    constant = 15_000_000
    stated = max(layer + activations + statistics, packed + layer) + constant
    assert peak < stated < peak + (LAYERS - 1) * layer


VOCAB, WIDE = 16384, 2048
AT_ONCE = 1 << 15
CONSTANT = 100 * AT_ONCE


def pack_for_gpu(layer, dtype):
    layer._pack_for_gpu()
    layer._drop_form_on_disk()
    return ()


def prepare_layers(model):
    """Does what `fuse.prepare_on_gpu` does, also for layers on a CPU."""
    for layer in layers_of(model):
        layer.prepare(torch.bfloat16)


def copied(tensor, device=None, dtype=None):
    given = tensor[...]
    return given.clone() if isinstance(given, torch.Tensor) else given


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Layers on a CPU are loaded and prepared as on a GPU. Few weights are processed at once: memory that should be constant is
    then small compared with a layer."""
    monkeypatch.setattr(PackedWeight, "_prepare", pack_for_gpu)
    monkeypatch.setattr(hf, "prepare_on_gpu", prepare_layers)
    monkeypatch.setattr(core_model_loading, "_materialize_copy", copied)
    monkeypatch.setattr(sys.modules["lowbit.quantize.rtn"], "WEIGHTS_AT_ONCE", AT_ONCE)
    for module in ("fragment", "gated", "scaled"):
        monkeypatch.setattr(sys.modules[f"lowbit.pack.{module}"], "CODES_AT_ONCE", AT_ONCE, raising=False)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A 16-bit checkpoint of 96 MB, whose largest layer is the head with 17 MB."""
    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "16-bit", max_shard_size="20MB")
    return folder


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


# w8a16 is not here, since it is the scheme of the head
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a8", "w4a8_g128"])
def test_loading_holds_the_packed_model_one_layer_and_a_constant(scheme, wide, as_on_a_gpu):
    """With embedding and head in 16 bits, loading would take 34 MB more. With a second copy of all layers as rows, it would
    take 10 MB more."""
    with TensorBytes() as held:
        model = load_causal(wide / "16-bit", scheme=scheme, head="w8a16", device="cpu", dtype=torch.bfloat16)
        prepare_layers(model)  # prepares the head too, which may be quantized last
    assert isinstance(model.get_input_embeddings(), QuantEmbedding) and isinstance(model.lm_head, QuantLinear)
    assert all(layer.kernel_codes is not None and not layer.weight_packed.numel() for layer in layers_of(model))
    packed, layer = tensor_bytes(model), 2 * VOCAB * HIDDEN
    print(f"{scheme}: peak {held.peak:,}, packed {packed:,}, layer {layer:,}")
    assert packed < 0.6 * sum(f.stat().st_size for f in (wide / "16-bit").glob("*.safetensors"))
    assert held.peak < packed + layer + CONSTANT


@pytest.mark.parametrize("tool", ["gptq", "awq", "compressed-tensors"])
def test_taking_over_a_tools_files_holds_no_more(tool, wide, tmp_path, as_on_a_gpu):
    lowbit.quantize_checkpoint(wide / "16-bit", tmp_path / "own", "w4a16_g128")
    convert_checkpoint(tmp_path / "own", tmp_path / tool, tool)
    with TensorBytes() as held:
        model = load_causal(tmp_path / tool, device="cpu", dtype=torch.bfloat16)
    assert all(layer.kernel_codes is not None for layer in layers_of(model))
    packed, layer = tensor_bytes(model), 2 * VOCAB * HIDDEN
    print(f"{tool}: peak {held.peak:,}, packed {packed:,}, layer {layer:,}")
    assert held.peak < packed + layer + CONSTANT


def test_gate_and_up_become_one_weight_without_a_copy_in_bytes(as_on_a_gpu):
    n, k = WIDE, HIDDEN
    gate, up, down = (QuantLinear.from_quant_tensor(rtn(torch.randn(n, k), "w4a16_g128")) for _ in range(3))
    for layer in (gate, up):
        layer.prepare(torch.bfloat16)
    with TensorBytes() as held:
        AlternatingMLP([gate, up], down, "silu")
    made = 2 * n * k * (4 + 16 / 128) / 8
    print(f"peak {held.peak:,}, made {made:,.0f}, both as bytes {2 * n * k:,}")
    assert held.peak < made + 2 * n * k + CONSTANT  # was 20 bytes a weight of one


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a8"])
def test_a_pipeline_holds_the_packed_model_one_layer_and_a_constant_on_a_gpu(scheme, tmp_path):
    """A pipeline loads files into the engine's forms of the weights. In 16 bits they take 860 MB, of which the head has 131.
    All layers in two forms, or embedding and head in 16 bits, would take some 260 MB more."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=256, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        made = LlamaForCausalLM(config).bfloat16()
    made.save_pretrained(tmp_path, max_shard_size="200MB")
    tiny_tokenizer().save_pretrained(tmp_path)
    del made
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pipe = lowbit.pipeline(str(tmp_path), quantization_mode=scheme, cache_bytes=64 << 20, max_concurrent=4)
    loaded = torch.cuda.max_memory_allocated() - before
    packed, layer = torch.cuda.memory_allocated() - before, 2 * 32000 * 2048
    assert packed < 0.65 * sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert loaded < packed + layer + GPU_LOADING_OVERHEAD_BYTES
    assert all(linear.is_prepared and not linear.weight_packed.numel() for linear in layers_of(pipe.model))
    torch.cuda.reset_peak_memory_stats()
    assert not pipe.engine.program.reasons, pipe.engine.report()
    cache = pipe.engine.program.cache
    of_cache = sum(layer.nbytes for layer in cache.layers)
    made = torch.cuda.max_memory_allocated() - before
    print(f"{scheme}: loaded {loaded:,}, with the engine {made:,}, packed {packed:,}, layer {layer:,}, cache {of_cache:,}")
    assert made < packed + of_cache + layer + GPU_LOADING_OVERHEAD_BYTES
