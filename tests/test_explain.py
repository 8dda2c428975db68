"""The explained path ends at the weight that dequantize gives, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.explain import explain, render
from lowbit.formats import code_values
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent
LAYER = "model.layers.1.mlp.down_proj"  # 64 x 176: tiles with tails


@pytest.fixture(scope="module")
def fp16(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("explain") / "fp16")


@pytest.mark.parametrize(
    "scheme",
    [
        "w4a16_g64",
        "w6e3m2a16",
        "w8a16",
        "w4a16_g32_fz",
        "w3a16_g48_z",
        "w5e2m2a16",
        "w7a16",
        "w8e4m3a16_b16x16",
        "w8e6m1a16",
        "w2a16_t",
    ],
)
def test_the_path_ends_at_the_weight(fp16, tmp_path, scheme):
    quantize_checkpoint(fp16, tmp_path / "q", scheme)
    with CheckpointReader(tmp_path / "q") as reader:
        q = reader.layer(LAYER)
    for row, column in ((0, 0), (63, 175), (17, 90)):
        steps = explain(tmp_path / "q", LAYER, row, column)
        text = render(steps)
        code, weight = int(q.codes[row, column]), float(q.dequantize()[row, column])
        assert f"code {code} = 0b" in steps[0].lines[2], "the byte at the offset holds the code"
        assert f"{weight:.8g}" in steps[1].lines[-1]
        value = float(re.search(r"half: (\S+)", text)[1])
        factor = re.search(r"times (\S+), which the scale takes over", text)
        if factor:
            value *= float(factor[1])
        assert value == pytest.approx(float(code_values(q.scheme.weight)[code]), rel=1e-8), (
            "the conversion program gives the code's value"
        )
        for step in steps:
            assert (ROOT / step.file).is_file(), step.file
        assert "blocked: runs (lowbit" in text or "blocked: runs (kernels/" in text


def test_first_layer_and_mistakes(fp16, tmp_path):
    quantize_checkpoint(fp16, tmp_path / "q", "w8a16")
    assert "q_proj" in render(explain(tmp_path / "q")) or "layers.0" in render(explain(tmp_path / "q"))
    with pytest.raises(ValueError, match=r"no quantized layer 'down_proj'; near: model\.layers\.0\.mlp\.down_proj"):
        explain(tmp_path / "q", "down_proj")
    with pytest.raises(ValueError, match=r"64 x 176: row 64, column 0 is outside"):
        explain(tmp_path / "q", LAYER, 64)
    with pytest.raises(CheckpointError, match="holds no weights quantized by lowbit"):
        explain(fp16)
