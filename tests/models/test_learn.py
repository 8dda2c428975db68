"""Learning how a decoder layer's weights are rounded: its error is below that of methods that do not learn, for every kind of
scheme; runs are equal to the bit; inputs are rounded as the layers will round them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowbit import quantize_checkpoint
from lowbit.checkpoint import CheckpointReader
from lowbit.formats import parse_scheme
from lowbit.models import learn as learn_module
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.learn import learn, rounded_activations
from lowbit.ops import quantize_activations
from lowbit.quantize import Gptq, Learned, Mixed, Rtn
from lowbit.quantize.learned import LearnedRounding
from tests.models.test_calibrate import CALIBRATION, decoder_of, files, linears, load, logits, tiny  # noqa: F401  (a fixture)
from tests.tiny import eager_llama, tiny_tokenizer

METHOD = Learned(iterations=60, batch=3)
LONG = Learned(iterations=100, batch=3)
"""Enough iterations for Adam."""
LICENSE = Path(__file__).parents[2] / "LICENSE"
"""A text that does not change with the tests: whether a learning rate is too high depends on the text."""
TEXT = replace(CALIBRATION, samples=12, length=48)


def layer_error(path, weights_of=None):
    """The relative squared error of the first decoder layer's output on the calibration texts if its weights come from another
    checkpoint.
    """
    decoder = decoder_of(path)
    hidden = decoder.embed(TEXT.tokens(path))
    decoder.load(0)
    exact = torch.cat(list(decoder.run(0, hidden)))
    with CheckpointReader(weights_of) as reader:
        decoder.load(0, {f"{n}.weight": reader.layer(f"model.layers.0.{n}").dequantize() for n in linears(decoder)})
    got = torch.cat(list(decoder.run(0, hidden)))
    return float((got - exact).square().sum() / (exact - torch.cat(hidden)).square().sum())


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
    """A model without biases whose random weights are of ordinary size."""
    path = tmp_path_factory.mktemp("learn") / "fp16"
    eager_llama(torch.float16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


# Random weights want ends of ranges that learn slower than offsets, real models do not (models/learn.py): where the ends move
# all of a group, as with these zeros and floats, two and three bits pass GPTQ in 120 iterations; four take up to 720.
@pytest.mark.parametrize("scheme", ["w3a16_g32_z", "w4a16_g32", "w2a16_g16_fz", "w3e1m1a16_g32"])
def test_learned_beats_rounding_and_gptq(scheme, lively, tmp_path):
    errors = []
    for method in (Rtn("mse"), Gptq(), replace(METHOD, iterations=120)):
        name = tmp_path / type(method).__name__
        quantize_checkpoint(lively, name, scheme, method=method, calibration=TEXT)
        errors.append(layer_error(lively, name))
    assert errors[2] < 0.5 * errors[0] and errors[2] < 0.95 * errors[1], errors


# What differs in how inputs are rounded (dynamic or not, by which tool's rule) the next test compares bit by bit.
@pytest.mark.parametrize("scheme", ["w8a8_az", "fp8", "fp8_block", "w4a8_g32"])
def test_activations_are_rounded_while_learning(scheme, lively, tmp_path, monkeypatch):
    said, rounded = [], []
    original = rounded_activations
    monkeypatch.setattr(learn_module, "rounded_activations", lambda x, *a, **k: rounded.append(1) or original(x, *a, **k))
    quantize_checkpoint(lively, tmp_path / "q", scheme, method=METHOD, calibration=CALIBRATION, say=said.append)
    errors = [[float(v) for v in line.split("error ")[1].split(" -> ")] for line in said if "error" in line]
    assert len(errors) == 2 and all(after < 0.8 * before for before, after in errors), said
    assert len(rounded) == 2 * 7 * (60 + 2 * 2), "each linear layer, each step, and both measurements of two batches"
    assert (logits(load(tmp_path / "q")) - logits(load(lively))).norm() < 0.7 * logits(load(lively)).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_az", "w8a8_ct", "fp8_dynamic", "w8e4m3a8e4m3_hf", "fp8_block"])
def test_rounded_activations_are_those_of_the_operator(scheme, dtype):
    x = torch.randn(3, 5, 200, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    parsed = parse_scheme(scheme)
    group = 128 if scheme == "fp8_block" else 0
    made = quantize_activations(
        x.detach().to(torch.bfloat16) if dtype is torch.float32 else x.detach(), parsed.activation, group=group,
        symmetric=not parsed.activation_zero, rule=parsed.rule.value,
    )  # fmt: skip
    got = rounded_activations(x.to(torch.bfloat16), parsed)
    scale = made.scale.repeat_interleave(group or 200, dim=-1)[..., :200]
    zero = 0 if made.zero is None else made.zero.repeat_interleave(group or 200, dim=-1)[..., :200]
    assert torch.equal(got, ((made.codes.float() - zero) * scale).bfloat16())
    got.float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_machine_without_bfloat16_learns_in_float32(lively, tmp_path, monkeypatch):
    said = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(learn_module, "product_dtype", lambda device, dtype=dtype: dtype)
        target = tmp_path / str(dtype)
        quantize_checkpoint(lively, target, "w3a16_g32", method=METHOD, calibration=CALIBRATION, say=said.append)
    errors = [float(line.split(" -> ")[1]) for line in said if "error" in line]
    assert len(errors) == 4 and all(0.7 < a / b < 1.4 for a, b in zip(errors[:2], errors[2:], strict=True))


def test_the_seed_decides(tiny, tmp_path):  # noqa: F811
    for name, seed in (("a", 0), ("b", 1)):
        quantize_checkpoint(tiny, tmp_path / name, "w3a16_g32", method=Learned(9, 2, seed), calibration=CALIBRATION)
    assert files(tmp_path / "a") != files(tmp_path / "b")


def test_each_piece_is_taken_once_before_any_is_taken_again():
    order = learn_module.sequence_order(sequences=7, together=3, iterations=5, seed=0)
    assert [len(batch) for batch in order] == [3] * 5
    assert all(len({*a, *b}) == 6 for a, b in (order[:2], order[2:4])) and order[:2] != order[2:4]
    assert learn_module.sequence_order(2, 2, 3, 0) == learn_module.sequence_order(2, 2, 3, 0)


def test_targets_are_the_float_models_and_inputs_the_quantized_ones(tiny, tmp_path, monkeypatch):  # noqa: F811
    """Layer 1 learns to reproduce its output in the float model, from the output of the quantized layer 0 as input."""
    seen = []

    def watch(decoder, i, hidden, exact, *rest):
        seen.append((torch.cat(hidden), torch.cat(exact)))
        return learn(decoder, i, hidden, exact, *rest)

    monkeypatch.setattr("lowbit.models.layer_methods.learn", watch)
    quantize_checkpoint(tiny, tmp_path / "q", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    tokens = CALIBRATION.tokens(tiny)
    for path, at, index in ((tiny, 2, 1), (tmp_path / "q", 1, 0)):
        with torch.inference_mode():
            model = load(path)
            states, layer = [], model.model.layers[at - 1]
            layer.register_forward_hook(lambda m, a, out, states=states: states.append(out))
            model(tokens)
        torch.testing.assert_close(seen[1][index], states[0], rtol=1e-3, atol=1e-3)


def test_a_rate_that_is_too_high_is_followed_by_a_lower_one(lively, monkeypatch):
    decoder = LayerwiseDecoder(CheckpointReader(lively), "cpu", torch.float32)
    hidden = decoder.embed(replace(CALIBRATION, text=LICENSE).tokens(lively), together=3)
    layer = decoder.load(0)
    exact = list(decoder.run(0, hidden))
    found = {}
    for rates in ((1e5,), (1e5, 1.0), (1.0,)):
        monkeypatch.setattr(learn_module, "RATES", rates)
        r = {n: LearnedRounding(layer.get_submodule(n).weight.data, parse_scheme("w4a16_g32")) for n in linears(decoder)}
        found[rates] = (*learn(decoder, 0, hidden, exact, r, {}, LONG), [x.quantized().codes for x in r.values()])
    before, after, _ = found[1e5,]
    assert before == after
    assert found[1e5, 1.0][1] < 0.8 * before and found[1e5, 1.0][:2] == found[1.0,][:2]
    assert all(map(torch.equal, found[1e5, 1.0][2], found[1.0,][2])), "it starts from the beginning"


def test_what_learning_makes_worse_is_left_rounded(lively, monkeypatch):
    decoder = LayerwiseDecoder(CheckpointReader(lively), "cpu", torch.float32)
    hidden = decoder.embed(replace(CALIBRATION, text=LICENSE).tokens(lively), together=3)
    layer = decoder.load(0)
    exact = list(decoder.run(0, hidden))
    roundings = {n: LearnedRounding(layer.get_submodule(n).weight.data, parse_scheme("w4a16_g32")) for n in linears(decoder)}
    plain = {n: r.quantized().codes for n, r in roundings.items()}

    def uphill(adam):
        for p in adam.param_groups[0]["params"]:
            p.data.add_(p.grad.sign())

    monkeypatch.setattr(torch.optim.Adam, "step", uphill)
    before, after = learn(decoder, 0, hidden, exact, roundings, {}, LONG)
    assert before == after and all(torch.equal(r.quantized().codes, plain[n]) for n, r in roundings.items())


def test_a_mix_and_layers_left_in_16_bits_learn_too(lively, tmp_path):
    mixed, skip = Mixed(("w3a16_g32", "w8a16"), 5.2), ["v_proj", "lm_head"]
    quantize_checkpoint(lively, tmp_path / "mix", "w4a16_g32", method=METHOD, calibration=CALIBRATION, mixed=mixed)
    with CheckpointReader(tmp_path / "mix") as reader:
        assert {reader.layer(name).scheme.name for name in reader.manifest.layers} == {"w3a16_g32", "w8a16"}
    quantize_checkpoint(lively, tmp_path / "skip", "w4a16_g32", method=METHOD, calibration=CALIBRATION, skip=skip)
    assert (logits(load(tmp_path / "skip")) - logits(load(lively))).norm() < 0.7 * logits(load(lively)).norm()


def test_fewer_pieces_than_a_batch_has(tiny, tmp_path):  # noqa: F811
    few = replace(CALIBRATION, samples=2)
    quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", method=Learned(5, 8), calibration=few)
    with pytest.raises(ValueError, match="1 or more iterations of 1 or more sequences, got 0 of 8"):
        Learned(iterations=0)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [METHOD, LONG])
def test_a_gpu_repeats_itself(method, tiny, tmp_path):  # noqa: F811
    for name in ("a", "b"):
        quantize_checkpoint(tiny, tmp_path / name, "w3a16_g32", method=method, calibration=CALIBRATION, device="cuda")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    quantize_checkpoint(tiny, tmp_path / "cpu", "w3a16_g32", method=method, calibration=CALIBRATION)
    assert layer_error(tiny, tmp_path / "a") < 1.1 * layer_error(tiny, tmp_path / "cpu")


def test_a_step_that_cannot_be_captured_runs_without_a_graph(lively, tmp_path, monkeypatch):
    """The codes are those of steps without graphs, also if the capture fails after its first half."""
    step, failing = learn_module._Step, []

    class Graph:
        def __init__(self, *arguments, **options):
            pass

        def __enter__(self):
            failing.append(True)

        def __exit__(self, *error):
            raise RuntimeError("operation not permitted when stream is capturing")

    def changed(self):
        if not (failing and failing.pop()):
            step._backward(self)
            self._descent.step()

    quantize_checkpoint(lively, tmp_path / "eager", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    made = []
    init = step.__init__

    def capturing(self, *arguments):
        init(self, *arguments)
        self._captures, self._synchronizes = True, lambda: False
        made.append(self)

    monkeypatch.setattr(step, "__init__", capturing)
    monkeypatch.setattr(step, "_change", changed)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    quantize_checkpoint(lively, tmp_path / "refused", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    assert made and all(each._graph is None and each._steps > step.EAGER_STEPS for each in made)
    assert files(tmp_path / "eager") == files(tmp_path / "refused")


@pytest.mark.gpu
def test_graphs_change_no_code(lively, tmp_path, monkeypatch):
    quantize_checkpoint(lively, tmp_path / "graphs", "w3a16_g32", method=METHOD, calibration=CALIBRATION, device="cuda")
    monkeypatch.setattr(learn_module._Step, "_captured", lambda self: None)
    quantize_checkpoint(lively, tmp_path / "eager", "w3a16_g32", method=METHOD, calibration=CALIBRATION, device="cuda")
    assert files(tmp_path / "graphs") == files(tmp_path / "eager")
