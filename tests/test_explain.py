"""The steps of `lowbit explain` end at the weight that dequantize gives, and name existing bits and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.cli.commands import app
from lowbit.explain import explain, render
from lowbit.formats import code_values
from lowbit.hardware.half import widen_half
from lowbit.hardware.mma import wgmma_f16
from lowbit.models.calibrate import Calibration
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.pack import FragmentOrder
from lowbit.quantize import rtn
from tests.tiny import save_tiny, with_channels

ROOT = Path(__file__).parent.parent
LAYER = "model.layers.1.mlp.down_proj"  # 64 x 176: its tiles have tails
PLACES = ((0, 0), (63, 175), (17, 90))
SCHEMES = [
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
]


@pytest.fixture(scope="module")
def fp16(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("explain") / "fp16")


@pytest.fixture(scope="module")
def quantized(fp16, tmp_path_factory):
    """A function that makes each quantized checkpoint once and returns (folder, layer)."""
    made = {}

    def make(scheme):
        if scheme not in made:
            folder = tmp_path_factory.mktemp("quantized") / scheme
            quantize_checkpoint(fp16, folder, scheme)
            with CheckpointReader(folder) as reader:
                made[scheme] = folder, reader.layer(LAYER)
        return made[scheme]

    return make


def number(text):
    return int(text.replace(",", ""))


def by_file(steps):
    return {step.file.rpartition("/")[2]: "\n".join(step.lines) for step in steps}


def weight_at_the_end(steps):
    return np.float32(re.search(r"the weight is (\S+)$", by_file(steps)["conversions.py"])[1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("row", "column"), PLACES)
class TestPath:
    def test_the_bytes_at_the_offset_hold_the_code(self, quantized, scheme, row, column):
        folder, q = quantized(scheme)
        text = by_file(explain(folder, LAYER, row, column))["reader.py"]
        file = Path(re.match(r"(.*?\.safetensors): ", text)[1])
        low, high, byte = (number(v) for v in re.search(r"bits (\d+) to (\d+) from byte ([\d,]+),", text).groups())
        assert high - low + 1 == q.scheme.weight.bits
        stream = int.from_bytes(file.read_bytes()[byte : byte + 2], "little")
        assert stream >> low & ((1 << q.scheme.weight.bits) - 1) == int(q.codes[row, column])
        assert f"code {int(q.codes[row, column])} = 0b" in text

    def test_the_packed_words_hold_the_code(self, quantized, scheme, row, column):
        folder, q = quantized(scheme)
        text = by_file(explain(folder, LAYER, row, column))["fragment.py"]
        found = re.findall(r"word \[(.*?)\] = (\w{8}), of the code (.*)", text)
        # This packs the whole layer: the shape and the indices in the text belong to it, not to one tile.
        (plane,) = FragmentOrder(wgmma_f16(64), q.scheme.weight).pack(q.codes, q.scheme.weight.bits)
        assert f"int32 {list(plane.shape)}:" in text
        code = 0
        for index, word, bits in found:
            assert int(plane[tuple(int(v) for v in index.split(","))]) & 0xFFFFFFFF == int(word, 16)
            for bit, at, value in re.findall(r"bit (\d+) at (\d+): (\d)", bits):
                assert int(word, 16) >> int(at) & 1 == int(value)
                code |= int(value) << int(bit)
        assert code == int(q.codes[row, column])

    def test_the_executed_program_ends_at_the_weight(self, quantized, scheme, row, column):
        folder, q = quantized(scheme)
        steps = explain(folder, LAYER, row, column)
        text = by_file(steps)["conversions.py"]
        name, half = re.search(r"^output \d+ = (\w+), (upper|lower) half", text, re.MULTILINE).groups()
        bits = int(re.search(rf"^\S+ {name}, .*// (\w{{8}})$", text, re.MULTILINE)[1], 16)
        factor = re.search(r"times (\S+), a factor of the packed scale", text)
        dtype = "bf16" if "-> bf16" in text else "fp16"
        value = widen_half(np.array([bits], np.uint32), dtype)[0, int(half == "upper")] * float(factor[1] if factor else 1)
        assert value == float(code_values(q.scheme.weight)[int(q.codes[row, column])])
        expected = q.dequantize()[row, column].item()
        assert weight_at_the_end(steps) == np.float32(expected)
        assert by_file(steps)["tensor.py"].endswith(f" = {expected:.9g}")

    def test_named_files_exist(self, quantized, scheme, row, column):
        steps = explain(quantized(scheme)[0], LAYER, row, column)
        text = render(steps)
        named = set(re.findall(r"\b[\w/]+\.py\b", text))
        assert {step.file for step in steps} < named, "and the kernel that runs"
        for name in named:
            assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_16_bit_checkpoint_goes_through_rounding(fp16, quantized, scheme):
    with CheckpointReader(fp16) as reader:
        original = reader.get(f"{LAYER}.weight")
    expected = rtn(original, scheme)
    for row, column in PLACES:
        steps = explain(fp16, LAYER, row, column, scheme=scheme)
        text = by_file(steps)["reader.py"]
        file = Path(re.match(r"(.*?\.safetensors): ", text)[1])
        byte = number(re.search(r"from byte ([\d,]+),", text)[1])
        stored = torch.frombuffer(bytearray(file.read_bytes()[byte : byte + 2]), dtype=torch.float16)[0]
        assert stored == original[row, column]
        assert f"code {int(expected.codes[row, column])}" in by_file(steps)["rtn.py"]
        assert weight_at_the_end(steps) == np.float32(expected.dequantize()[row, column].item())
        # From the code's value on, the steps equal those of the quantized checkpoint. The bytes predicted here are in its file.
        folder, _ = quantized(scheme)
        other = explain(folder, LAYER, row, column)
        assert steps[3:] == other[1:]
        foretold = re.search(r"row \d+: (.*)$", by_file(steps)["words.py"])[1]
        assert f"the file has {foretold} =" in by_file(other)["reader.py"]


@pytest.mark.parametrize(
    ("sm", "instruction"), [(80, "mma.sync"), (86, "mma.sync"), (89, "mma.sync"), (90, "wgmma"), (100, "mma.sync")]
)
def test_other_machines(quantized, sm, instruction):
    folder, q = quantized("w6e3m2a16")
    steps = explain(folder, LAYER, 17, 90, sm=sm)
    assert f"\n{instruction}" in by_file(steps)["mma.py"] and f"sm {sm}," in by_file(steps)["mma.py"]
    assert weight_at_the_end(steps) == np.float32(q.dequantize()[17, 90].item())


def test_register_by_hand(quantized):
    """Row 17 is row 1 of row block 1, which belongs to lane group 1. k = 26 of a tile is k = 10 of k step 1. That is thread 1
    of the group, in the second half of k."""
    text = by_file(explain(quantized("w4a16_g64")[0], LAYER, 17, 64 + 26))["mma.py"]
    assert "lane 5, k step 1, register a2, lower half" in text


def test_kernels_are_named_with_reasons(quantized):
    steps = explain(quantized("w4a16_g64")[0], LAYER, 17, 90)
    text = by_file(steps)["table.py"]
    assert "on H200, M 1: ring_gemm (lowbit/kernels/sm80/small_m_gemm.py)" in text
    assert "on H200, M 64: wgmma_gemm (lowbit/kernels/sm90/large_m_gemm.py)" in text
    assert "modelled" in text and "next best: " in text and "not ring_gemm: is not for M 64" in text
    older = by_file(explain(quantized("w4a16_g64")[0], LAYER, sm=80))["table.py"]
    assert "on A100-SXM4-80GB, M 64: ring_gemm" in older and "not mma_gemm: would take" in older
    assert "not wgmma_gemm: needs the wgmma instruction" in older
    slow = by_file(explain(quantized("w4a8_g64")[0], LAYER))["table.py"]
    assert (
        "scaled_blocked (lowbit/kernels/cpu/scaled_blocked.py), for any device, which dequantizes all weights at every call"
        in slow
    )
    assert "not narrow_scaled_gemm: takes scales per tensor" in slow


def test_the_walk_ends_in_the_kernels(quantized, monkeypatch):
    """Row 17 is in row block 1; column 90 is in the first k block of 128 and in the second k tile of 64."""
    steps = explain(quantized("w4a16_g64")[0], LAYER, 17, 90)
    ring, wgmma = (step for step in steps if step.file.endswith(("small_m_gemm.py", "large_m_gemm.py")))
    assert ring.file == "lowbit/kernels/sm80/small_m_gemm.py" and wgmma.file == "lowbit/kernels/sm90/large_m_gemm.py"
    assert "step 0 of 128 k is number 0 of that warp: slice 0" in "\n".join(ring.lines)
    assert "row tile 0, row 17 of 128: warpgroup 0, warp 1" in "\n".join(wgmma.lines)
    assert "k tile 1 is the odd stage of k block 0" in "\n".join(wgmma.lines) and "wgmma.mma_async m64n" in wgmma.lines[-2]
    # a layer of this size takes this kernel only for so many tokens
    monkeypatch.setattr("lowbit.explain.kernels.TOKENS", (1 << 18,))
    steps = explain(quantized("w4a16_g64")[0], LAYER, 17, 90, sm=80)
    (mma,) = (step for step in steps if step.file == "lowbit/kernels/sm80/large_m_gemm.py")
    assert re.search(r"row tile 0, row block 1 of 4: row block [01] of the warps of row [01]; K split 0", mma.lines[1])
    assert "k tile 1 is stage 1: cp.async" in mma.lines[2]
    for step in (ring, wgmma, mma):
        source = "".join(path.read_text() for path in (ROOT / step.file, *(ROOT / "lowbit/kernels/parts").glob("*.py")))
        for function in re.findall(r"\((\w+)(?:, (\w+))?\)", "\n".join(step.lines[1:])):
            assert all(f"def {name}(" in source for name in function if name), function


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch's products need AVX2")
def test_the_form_on_a_cpu_is_named(quantized, fp16):
    text = by_file(explain(quantized("w8a16")[0], LAYER))["cpu_gemm.py"]
    assert (
        "a layer on this CPU, x bfloat16: torch_int8 (lowbit/kernels/cpu/torch_int8.py), packed once at the first call" in text
    )
    assert "not torch_int8: takes bfloat16 activations, not float32" in text
    text = by_file(explain(quantized("w6e3m2a16")[0], LAYER))["cpu_gemm.py"]
    assert "x bfloat16: dequantized once at the first call if the model fits" in text
    text = by_file(explain(fp16, LAYER, scheme="w8a8"))["cpu_gemm.py"]
    assert text.count("packed once at the first call") == 2 or "saturates sums of int8 x on this CPU" in text
    assert "dequantized at every call" in by_file(explain(fp16, LAYER, scheme="fp8"))["cpu_gemm.py"]


def test_order_and_pre_quant_scale_are_named(fp16, tmp_path):
    """Act-order and pre_quant_scale change which channel of x is multiplied and by what, but not the meaning of the code."""
    q = with_channels(rtn(torch.randn(8, 64), "w4a16_g32_z"), pre_quant_scale=torch.float32)
    with CheckpointWriter(tmp_path / "c") as writer:
        for suffix, tensor in layer_tensors(q).items():
            writer.add(f"layer.{suffix}", tensor)
        writer.finish({}, Manifest(q.scheme, {"layer": LayerEntry.of(q)}))
    steps = explain(tmp_path / "c", "layer", 3, 5)
    channel = int(q.input_transform.order[5])
    assert ": layer.weight_order int32 [64]" in by_file(steps)["reader.py"]
    assert ": layer.pre_quant_scale float32 [64]" in by_file(steps)["reader.py"]
    meaning = by_file(steps)["tensor.py"]
    assert f"order [5] = {channel}: it multiplies channel {channel} of x" in meaning
    assert (
        f"channel {channel} of x is multiplied by its pre_quant_scale "
        f"{float(q.input_transform.pre_quant_scale[channel]):.9g} first" in meaning
    )
    assert weight_at_the_end(steps) == np.float32(q.dequantize_codes()[3, 5].item())
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "c"), "--json", "-"])
    (row,) = json.loads(shown.stdout)["layers"]
    assert (row["order"], row["pre_quant_scale"], row["bytes"]) == (True, True, q.nbytes)
    assert json.loads(shown.stdout)["other_bytes"] == 0


@pytest.mark.parametrize(
    ("scheme", "says", "byte"),
    [
        ("w8a8", "x is quantized to int8 by a scale for each token, the largest |x| / 127 ", "codes of 8 bits are the operand"),
        ("fp8_dynamic", "x is quantized to fp8_e4m3 by a scale for each token, the largest |x| / 448 ", "codes of 8 bits"),
        ("fp8_block", "by a scale for each token and 128 columns", "codes of 8 bits"),
        ("w4a8_g128", "x is quantized to int8 by a scale for each token", "converted to s8 in registers"),
        ("w4a8_g64", "x is quantized to int8", "the kernel for 8-bit activations takes scales"),
    ],
)
def test_quantized_inputs(quantized, scheme, says, byte):
    folder, q = quantized(scheme)
    steps = explain(folder, LAYER, 17, 90)
    named = by_file(steps)
    assert says in named["quantize_rows.py"] and byte in named["scaled.py"]
    assert f" = {q.dequantize()[17, 90].item():.9g}" in named["tensor.py"]
    if byte == "codes of 8 bits are the operand":
        code = int(q.codes[17, 90])
        assert f"code {code} is the byte {(code - 128) & 255:#04x}, {code - 128}" in named["scaled.py"]
    assert "on H200, M 1: " in named["table.py"]
    for name in set(re.findall(r"\b[\w/]+\.py\b", render(steps))):
        assert (ROOT / name).is_file(), name


def test_a_calibrated_scale_is_named(fp16, tmp_path):
    quantize_checkpoint(fp16, tmp_path / "q", "fp8", calibration=Calibration(4, 16, text=Path(__file__)))
    with CheckpointReader(tmp_path / "q") as reader:
        q = reader.layer(LAYER)
    named = by_file(explain(tmp_path / "q", LAYER))
    assert f"by the scale {q.input_transform.activation_scale.item():.9g} of this layer" in named["quantize_rows.py"]
    assert ".activation_scale float32 [1]" in named["reader.py"]
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "q"), "--check"])
    assert shown.exit_code == 0 and "activation" in shown.stdout


def test_first_and_tied_layers(fp16, quantized, tmp_path):
    folder, _ = quantized("w8a16")
    with CheckpointReader(folder) as reader:
        first = next(iter(reader.manifest.layers))
    assert f": {first}.weight_packed" in render(explain(folder))
    assert f": {first}.weight " in render(explain(fp16, scheme="w8a16"))
    quantize_checkpoint(fp16, tmp_path / "q", "w8a16", embeddings=True)
    with CheckpointReader(tmp_path / "q") as reader:
        ((follower, owner),) = reader.manifest.tied.items()
    assert explain(tmp_path / "q", follower, 3, 5) == explain(tmp_path / "q", owner, 3, 5)


def test_mistakes(fp16, quantized):
    folder, _ = quantized("w8a16")
    with pytest.raises(ValueError, match=r"no quantized layer 'down_proj'; similar names: model\.layers\.0\.mlp\.down_proj"):
        explain(folder, "down_proj")
    with pytest.raises(
        ValueError, match=r"no linear layer 'model.layers.1.mlp.down_porj'; similar names: model\.layers\.1\.mlp\.down"
    ):
        explain(fp16, "model.layers.1.mlp.down_porj", scheme="w8a16")
    with pytest.raises(ValueError, match=r"64 x 176: --row 64, --column 0 is outside"):
        explain(folder, LAYER, 64)
    with pytest.raises(ValueError, match=r"64 x 176: --row 0, --column -1 is outside"):
        explain(fp16, LAYER, 0, -1, scheme="w8a16")
    with pytest.raises(CheckpointError, match="holds no weights quantized by lowbit"):
        explain(fp16)
    with pytest.raises(CheckpointError, match="is quantized already; leave out --scheme w8a16"):
        explain(folder, scheme="w8a16")
    with pytest.raises(ValueError, match=r"nothing to quantize to w8a4: .*no kernel: "):
        explain(fp16, scheme="w8a4")
    with pytest.raises(ValueError, match="no row for sm_70; known: 80"):
        explain(folder, sm=70)
