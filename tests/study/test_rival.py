"""Calls of another tool: the arguments it gets, the layers it must quantize, and what is said if it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.models.load import load_causal
from lowbit.quantize import rtn
from study.rival import bits_and_group, bits_per_weight, check_rival, quantize_by_rival
from tests.study.auto_round_stand_in import OPTIONS, PARAMETERS, AutoRound, install
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", dtype=torch.bfloat16)


def test_the_arguments(model, monkeypatch):
    calls = install(monkeypatch).calls
    tokens = torch.arange(6 * 24).view(6, 24)
    quantized, options = quantize_by_rival(model, "w3a16_g32", tokens, iterations=7, batch=4, seed=5, device="cpu")
    (given,) = calls
    expected = {
        "bits": 3, "group_size": 32, "sym": True, "data_type": "int", "act_bits": 16, "iters": 7, "nsamples": 6, "seqlen": 24,
        "batch_size": 4, "enable_alg_ext": True, "enable_torch_compile": False, "seed": 5, "device_map": "cpu",
    }  # fmt: skip
    assert {name: given[name] for name in expected} == expected
    assert torch.equal(torch.cat(given["dataset"]), tokens) and [len(part) for part in given["dataset"]] == [4, 2]
    assert given["model"].dtype == torch.bfloat16 and given["tokenizer"].bos_token == "<s>"
    assert options == {"version": "0.16.1", "enable_alg_ext": True, "enable_torch_compile": False}
    name = "model.layers.1.mlp.down_proj.weight"
    weight = load_causal(model, dtype=torch.float32).get_parameter(name).detach()
    rounded = rtn(weight, parse_scheme("w3a16_g32")).dequantize().to(torch.bfloat16)
    assert torch.equal(quantized.get_parameter(name), rounded)


def test_layers_that_it_left_in_16_bits_are_found(model, monkeypatch):
    class Skips(AutoRound):
        def quantize(self):
            down = self.given["model"].get_submodule("model.layers.1.mlp.down_proj")
            before = down.weight.detach().clone()
            quantized, _ = super().quantize()
            down.weight.data = before
            return quantized, {}

    install(monkeypatch, Skips)
    with pytest.raises(
        RuntimeError, match=r"auto-round left \d+ values in a group of model\.layers\.1\.mlp\.down_proj, 2 bits"
    ):
        quantize_by_rival(model, "w2a16_g16", torch.zeros(2, 8, dtype=torch.long), iterations=1, batch=2, seed=0, device="cpu")


def test_groups_may_be_longer_than_rows(model, monkeypatch):
    install(monkeypatch)
    quantize_by_rival(model, "w3a16_g128", torch.zeros(2, 8, dtype=torch.long), iterations=1, batch=2, seed=0, device="cpu")


def test_what_is_missing_is_said(monkeypatch):
    check_rival(None)
    with pytest.raises(ValueError, match="--rival 'other': not known; the rival is auto-round"):
        check_rival("other")
    monkeypatch.setitem(sys.modules, "auto_round", None)
    with pytest.raises(ValueError, match="auto-round: not installed; pip install auto-round"):
        check_rival("auto-round")

    def lacks(name):
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")

    monkeypatch.setattr(importlib, "import_module", lacks)
    with pytest.raises(ValueError, match="auto-round: it needs datasets; pip install datasets"):
        check_rival("auto-round")


def test_schemes():
    assert bits_and_group("w2a16_g32") == (2, 32)
    for scheme in ("w2a16", "w4a16_g64_z", "w4a8_g64", "w6e3m2a16_g64"):
        with pytest.raises(ValueError, match="compared are integers in groups with 16-bit inputs"):
            bits_and_group(scheme)
    assert bits_per_weight("w2a16_g32", [(8, 64), (4, 32)]) == 2.5
    assert bits_per_weight("w3a16_g64", [(8, 96)]) == 3 + 2 * 16 / 96


@pytest.mark.skipif(importlib.util.find_spec("auto_round") is None, reason="auto-round is not installed")
def test_the_stand_in_has_the_parameters_of_the_installed_tool():
    package = importlib.import_module("auto_round")
    parameters = inspect.signature(package.AutoRound.__new__).parameters
    named = {name: p.default for name, p in parameters.items() if name not in ("cls", "kwargs")}
    assert named == PARAMETERS
    from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig
    from auto_round.schemes import QuantizationScheme

    fields = {*vars(SignRoundConfig()), *inspect.signature(QuantizationScheme).parameters}
    assert set(OPTIONS) <= fields
