"""Learned step sizes: gradients are those of LSQ, and fine-tuning with rounding moves the outputs closer to the floating-point
network's.
"""

from __future__ import annotations

import pytest
import torch

from lowbit import vision
from lowbit.vision.bits import assign_bits, calibrate
from lowbit.vision.finetune import fake_quantize, fine_tune
from lowbit.vision.lower import lower
from lowbit.vision.sensitivity import divergence
from tests.vision.nets import resnet


def test_rounding_and_gradients_are_lsqs():
    """LSQ, equations 1 to 3: the step's gradient is round(v) - v inside the range, -Qn or Qp outside; x's is 1 inside, 0
    outside.
    """
    step = torch.tensor(0.5, requires_grad=True)
    x = torch.tensor([-9.0, -0.6, 0.1, 0.9, 9.0], requires_grad=True)  # divided by the step: -18, -1.2, 0.2, 1.8, 18
    y = fake_quantize(x, step, -8, 7, count=4)
    assert y.tolist() == [-4.0, -0.5, 0.0, 1.0, 3.5]
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    by_hand = (-8) + (-1 + 1.2) + (0 - 0.2) + (2 - 1.8) + 7
    assert float(step.grad) == pytest.approx(by_hand / (4 * 7) ** 0.5, rel=1e-5)


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    model = resnet(depths=(1, 1), sizes=(32, 64), embedding=16)
    batches = list(torch.randn(64, 3, 32, 32).split(16))
    graph = vision.trace(model, batches[0])
    return graph, vision.observe(graph, batches), batches


def test_training_brings_the_result_nearer(problem):
    graph, ranges, batches = problem
    quantization = calibrate(graph, ranges, assign_bits(graph, "w4a4"))
    before = lower(graph, quantization)
    said = []
    tuned_graph, tuned = fine_tune(graph, quantization, batches, vision.FineTune(6, 5e-4), said.append)
    after = lower(tuned_graph, tuned)
    torch.manual_seed(5)
    fresh = torch.randn(32, 3, 32, 32)  # images that neither calibration nor training saw
    wanted = graph.run(fresh)
    assert divergence(wanted, after.run(fresh)) < 0.5 * divergence(wanted, before.run(fresh))
    assert len(said) == 6 and "divergence" in said[-1]


def test_what_training_rounded_is_what_the_integers_compute(problem):
    """The student's fake-quantized result equals the integer program's, except for roundings that float32 flips."""
    graph, ranges, batches = problem
    quantization = calibrate(graph, ranges, assign_bits(graph, "w8a8"))
    tuned_graph, tuned = fine_tune(graph, quantization, batches[:1], vision.FineTune(1, 1e-4))
    for name, weight in tuned.weights.items():
        assert weight.codes.dtype == torch.int8 and int(weight.codes.abs().max()) <= 128, name
    got = lower(tuned_graph, tuned).run(batches[0])
    wanted = tuned_graph.run(batches[0])
    assert float((got - wanted).norm() / wanted.norm()) < 0.03


def test_no_epochs_change_nothing(problem):
    graph, ranges, batches = problem
    quantization = calibrate(graph, ranges, assign_bits(graph, "w4a4"))
    _, same = fine_tune(graph, quantization, batches, vision.FineTune(0))
    assert all(torch.equal(same.weights[n].codes, w.codes) for n, w in quantization.weights.items())
    assert same.scales == pytest.approx(quantization.scales)
