"""Methods chosen by name in Python, with the options of the command line, and the warning of a method with too little data."""

from __future__ import annotations

import warnings

import pytest

from lowbit import quantize_checkpoint
from lowbit.cli import commands
from lowbit.methods import METHODS, Awq, Gptq, Hqq, Learned, Rtn, SmoothQuant, method_of
from lowbit.models.calibrate import Calibration
from lowbit.models.learn import ENOUGH_TOKENS
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def fp16(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("methods") / "fp16")


@pytest.fixture
def calibration(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return Calibration(4, 32, 0, tmp_path / "text.txt")


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_name_is_the_method(fp16, tmp_path, calibration):
    quantize_checkpoint(fp16, tmp_path / "a", "w4a16_g32", method="gptq", act_order=True, calibration=calibration)
    quantize_checkpoint(fp16, tmp_path / "b", "w4a16_g32", method=Gptq(act_order=True), calibration=calibration)
    quantize_checkpoint(fp16, tmp_path / "c", "w4a16_g32", method="rtn", search="mse")
    quantize_checkpoint(fp16, tmp_path / "d", "w4a16_g32", search="mse")
    assert weights(tmp_path / "a") == weights(tmp_path / "b") and weights(tmp_path / "c") == weights(tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "options", "method"),
    [
        ("rtn", {}, Rtn()),
        ("rtn", {"search": "mse"}, Rtn("mse")),
        ("hqq", {"search": None, "smooth": False}, Hqq()),
        ("gptq", {"static_groups": True, "damping": 0.1}, Gptq(static_groups=True, damping=0.1)),
        ("gptq", {"smooth": True, "alpha": "auto"}, Gptq(smooth=SmoothQuant(None))),
        ("awq", {"search": "loss"}, Awq("loss")),
        ("smoothquant", {"alpha": 0.7}, SmoothQuant(0.7)),
        ("learned", {"iterations": 9, "seed": 2, "smooth": True}, Learned(9, seed=2, smooth=SmoothQuant())),
    ],
)
def test_options(name, options, method):
    assert method_of(name, options) == method


def test_what_is_refused(fp16, tmp_path):
    out = tmp_path / "o"
    with pytest.raises(ValueError, match=r"unknown method 'gpqt'; did you mean 'gptq'\? it is one of rtn, hqq, gptq"):
        quantize_checkpoint(fp16, out, "w4a16_g64", method="gpqt")
    with pytest.raises(ValueError, match="iterations belongs to method learned, not to gptq"):
        quantize_checkpoint(fp16, out, "w4a16_g64", method="gptq", iterations=3)
    with pytest.raises(TypeError, match=r"unknown option 'actorder' of a method; did you mean act_order\?"):
        quantize_checkpoint(fp16, out, "w4a16_g64", method="gptq", actorder=True)
    with pytest.raises(TypeError, match="act_order: options go with the name of a method, Gptq has its own"):
        quantize_checkpoint(fp16, out, "w4a16_g64", method=Gptq(), act_order=True)
    assert not out.exists()


def test_the_command_line_has_the_same_methods():
    assert [choice.value for choice in commands.MethodChoice] == list(METHODS)


def test_learned_from_too_little_says_so(fp16, tmp_path, calibration):
    """One line states how many samples are enough: it goes to `say` if given, else to Python's warnings."""
    said = []
    quantize_checkpoint(
        fp16, tmp_path / "a", "w4a16_g32", method="learned", iterations=1, calibration=calibration, say=said.append
    )
    (line,) = [line for line in said if line.startswith("warning: ")]
    assert "learned from 128 tokens (4 x 32)" in line and f"--samples {ENOUGH_TOKENS // 32}" in line and "\n" not in line
    with pytest.warns(UserWarning, match="worse than rounded to nearest"):
        quantize_checkpoint(fp16, tmp_path / "b", "w4a16_g32", method="learned", iterations=1, calibration=calibration)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        quantize_checkpoint(fp16, tmp_path / "c", "w4a16_g32", method="awq", calibration=calibration)
