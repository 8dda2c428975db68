"""A calibrated run holds one decoder layer, whatever the number of layers."""

from __future__ import annotations

import torch

from tests.memory import linux, peak_bytes
from tests.tiny import tiny_tokenizer

HIDDEN, INTERMEDIATE, LAYERS, SAMPLES, LENGTH = 512, 1024, 8, 24, 128

SETUP = """
from pathlib import Path
import lowbit.models.quantize_checkpoint
from lowbit.models.calibrate import Calibration
from lowbit.quantize import Gptq
import transformers.models.llama.modeling_llama
torch.set_num_threads(1)
torch.linalg.eigh(torch.eye(4) @ torch.eye(4))  # the libraries' own workspaces
"""

RUN = """
calibration = Calibration(int(sys.argv[3]), int(sys.argv[4]), text=Path(sys.argv[5]))
lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], 'w4a16_g64', method=Gptq(search='max'), calibration=calibration)
"""


@linux
def test_gptq_holds_one_layer_its_statistics_and_the_activations(tmp_path):
    """Seven decoder layers more would take 73 MB more in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=160, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, dtype=torch.float16,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(tmp_path / "fp16")
    tiny_tokenizer().save_pretrained(tmp_path / "fp16")
    (tmp_path / "text.txt").write_text("pack my box with five dozen liquor jugs " * (SAMPLES * LENGTH // 40 + 1))
    peak = peak_bytes(SETUP, RUN, tmp_path / "fp16", tmp_path / "q", SAMPLES, LENGTH, tmp_path / "text.txt")
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
    activations = 2 * 4 * SAMPLES * LENGTH * HIDDEN
    statistics = 4 * INTERMEDIATE**2 + 3 * 8 * INTERMEDIATE**2
    packed = LAYERS * layer // 4 * 4.25 / 8  # the writer holds a shard of up to 2 GiB
    print(f"peak {peak:,}: layer {layer:,}, activations {activations:,}, statistics {statistics:,}, packed {packed:,.0f}")
    constant = 15_000_000
    stated = max(layer + activations + statistics, packed + layer) + constant
    assert peak < stated < peak + (LAYERS - 1) * layer
