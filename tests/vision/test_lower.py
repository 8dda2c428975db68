"""Every code of a lowered network equals its definition, computed here in float64 from real scales and weights."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowbit.vision.bits import QuantWeight, assign_bits, calibrate, quantize_weight, scheme_bits
from lowbit.vision.graph import ACTIVATIONS, Activation, AveragePool, Conv, Gate, Input, MaxPool, Sum
from lowbit.vision.lower import FLOAT, lower
from lowbit.vision.observe import observe
from lowbit.vision.program import Compute, Dequantize, PoolMax, Quantize
from lowbit.vision.trace import FUSIONS, fuse, trace, unfused
from tests.vision.nets import Mixed, Plain, Shared, Sums, mobilenet, regnet, resnet, seasoned

CASES = {
    "basic": (lambda: resnet(depths=(2, 1)), (3, 32, 32)),
    "bottleneck": (lambda: resnet("bottleneck", sizes=(128, 256), depths=(2, 1)), (3, 24, 24)),
    "plain": (lambda: seasoned(Plain()), (3, 16, 16)),
    "shared": (Shared, (3, 9, 7)),
    "sums": (Sums, (3, 9, 7)),
    "mixed": (lambda: seasoned(Mixed()), (3, 16, 16)),
    "mobilenet": (lambda: mobilenet(3), (3, 32, 32)),
    "regnet": (regnet, (3, 24, 24)),
}


@functools.cache
def traced(case):
    make, shape = CASES[case]
    torch.manual_seed(7)
    images = torch.randn(6, *shape)
    return unfused(make(), images), images


@functools.cache
def observed(case, fold):
    graph, images = traced(case)
    graph = fuse(graph, FUSIONS if fold else FUSIONS[:-1])
    return graph, observe(graph, [images]), images


def lowered(case, scheme, fold=True):
    graph, ranges, images = observed(case, fold)
    quantization = calibrate(graph, ranges, assign_bits(graph, scheme))
    return graph, quantization, lower(graph, quantization), images


def expected_codes(v, storage, relu):
    """(codes of v = value / scale, mask of values so near a tie that float32 may round either way)."""
    if storage == "u4":
        codes = (v + 0.5).floor().clamp(0, 15)
    else:
        codes = v.round().clamp(0 if relu else -128, 127)
    distance = (v - v.floor() - 0.5).abs()
    return codes, distance < 1e-4 + 1e-6 * v.abs()


@pytest.mark.parametrize(("scheme", "fold"), [("w8a8", True), ("w8a4", False), ("w4a8", False), ("w4a4", True)])
@pytest.mark.parametrize("case", CASES)
def test_codes_are_those_of_the_definition(case, scheme, fold):
    graph, quantization, program, images = lowered(case, scheme, fold)
    seen: dict[str, torch.Tensor] = {}
    program.run(images, on_value=lambda name, value: seen.update({name: value.clone()}))

    def value_of(name):
        return seen[name].double() * quantization.scales[name]

    checked = 0
    for node in graph.nodes.values():
        if isinstance(node, MaxPool) and node.name in seen:
            pooled = F.max_pool2d(seen[node.x].double(), node.kernel, node.stride, node.padding)
            assert torch.equal(seen[node.name].double(), pooled)
        elif isinstance(node, AveragePool) and node.x in seen:
            mean = value_of(node.x).mean((2, 3), keepdim=True)
            torch.testing.assert_close(seen[node.name + FLOAT].double(), mean, rtol=1e-6, atol=1e-9)
        elif isinstance(node, Sum):
            y = value_of(node.x) + (0.0 if node.other is None else value_of(node.other))
            checked += codes_are(node, y, seen, program, quantization, scheme, ties=0.1)  # few values, some at a tie
        elif isinstance(node, Activation):
            y = ACTIVATIONS[node.function](value_of(node.x))
            checked += codes_are(node, y, seen, program, quantization, scheme, ties=0.5)
        elif isinstance(node, Gate):
            y = value_of(node.x) * value_of(node.gate)
            checked += codes_are(node, y, seen, program, quantization, scheme, ties=0.1)
        elif isinstance(node, Conv):
            y = product(node, value_of(node.x), quantization.weights[node.name]) + node.bias.double()[:, None, None]
            if node.residual is not None:
                y = y + value_of(node.residual)
            if node.second is not None:
                y = y + product(node.second, value_of(node.second.x), quantization.weights[node.second.name])
            if node.name not in seen:  # its value, for floating-point operations
                wanted = y.relu() if node.relu else y
                torch.testing.assert_close(seen[node.name + FLOAT].double(), wanted, rtol=1e-5, atol=1e-5)
                continue
            checked += codes_are(node, y, seen, program, quantization, scheme)
    assert checked >= {"shared": 2, "mixed": 0, "sums": 7}.get(case, 3)


def codes_are(node, y, seen, program, quantization, scheme, ties=0.01):
    """Checks the codes of `node`, whose value before the ReLU is y, and returns 1, for counting."""
    storage, relu = program.values[node.name].storage, isinstance(node, (Conv, Sum)) and node.relu
    assert storage == ("u4" if relu and scheme in ("w8a4", "w4a4") else "s8")
    codes, near_tie = expected_codes(y / quantization.scales[node.name], storage, relu)
    wrong = seen[node.name].double() != codes
    assert not bool((wrong & ~near_tie).any()), node.name
    assert int(near_tie.sum()) <= max(8, ties * near_tie.numel())  # gates have few values, which repeat
    assert codes.unique().numel() > min(5, codes.numel() // 48)  # a test of zeros would prove nothing
    return 1


def product(conv, x, weight):
    real = weight.codes.double() * weight.scale.double()[:, None, None, None]
    return F.conv2d(x, real, None, conv.stride, conv.padding, groups=conv.groups)


@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 0.03), ("w8a4", 0.1), ("w4a4", 0.25)])
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_near_the_floating_point_result(case, scheme, most):
    graph, _, program, images = lowered(case, scheme)
    wanted = graph.run(images)
    got = program.run(images)
    assert got.shape == wanted.shape and got.dtype == torch.float32
    assert float((got - wanted).norm() / wanted.norm()) < most


def test_images_are_quantized_once_and_symmetrically():
    graph, quantization, program, images = lowered("basic", "w8a4")
    (first,) = [op for op in program.operations if isinstance(op, Quantize) and op.x == program.images]
    name = next(n for n, node in graph.nodes.items() if isinstance(node, Input))
    assert quantization.scales[name] == pytest.approx(float(images.abs().max()) / 127)
    assert first.factor == float(torch.tensor(1 / quantization.scales[name], dtype=torch.float32))
    seen = {}
    program.run(images, on_value=lambda n, v: seen.update({n: v}))
    assert int(seen[name].abs().max()) == 127


def test_bits_of_first_and_last_layer():
    _, _, program, _ = lowered("basic", "w4a4")
    layers = program.layers
    assert [int(layer.weight.abs().max()) > 8 for layer in layers] == [True] + [False] * (len(layers) - 2) + [True]
    assert layers[0].y == "u4" and layers[0].x == "s8"
    assert layers[-1].y == "f32" and layers[-1].x == "s8"
    # A folded shortcut has the bit width of the layer that it is folded into.
    assert all(int(layer.second.weight.abs().max()) <= 8 for layer in layers if layer.second is not None)


def test_layers_can_be_kept_in_int8():
    graph = trace(resnet(), torch.randn(1, 3, 32, 32))
    names = [name for name, node in graph.nodes.items() if isinstance(node, Conv)]
    bits = assign_bits(graph, "w4a4", (names[2],))
    assert (bits[names[2]].weight, bits[names[2]].output) == (8, 8)
    assert (bits[names[1]].weight, bits[names[1]].output) == (4, 4)
    with pytest.raises(ValueError, match="no convolution is called 'layer9'"):
        assign_bits(graph, "w4a4", ("layer9",))


def test_floating_point_between_integers():
    _, _, program, _ = lowered("mixed", "w8a8")
    kinds = [type(op).__name__ for op in program.operations]
    assert kinds[0] == "Quantize" and kinds[1] == "Convolve" and kinds[-2:] == ["Quantize", "Convolve"]
    assert program.operations[1].layer.y == "f32"  # only floating-point operations read it
    assert sum(isinstance(op, Compute) for op in program.operations) == len(kinds) - 4


def test_a_value_with_both_kinds_of_readers_is_dequantized():
    _, quantization, program, _ = lowered("shared", "w8a8")
    (op,) = [op for op in program.operations if isinstance(op, Dequantize)]
    assert op.x == "a" and op.y == "a" + FLOAT and op.scale == quantization.scales["a"]


def test_pools_keep_scale_and_storage():
    _, _, program, _ = lowered("basic", "w8a4")
    (pool,) = [op for op in program.operations if isinstance(op, PoolMax)]
    assert program.values[pool.y].scale == program.values[pool.x].scale
    assert program.values[pool.y].storage == program.values[pool.x].storage == "u4"


def test_last_reads_are_the_last():
    _, _, program, _ = lowered("basic", "w8a4", fold=False)
    after = program.last_reads()
    for i, names in after.items():
        for name in names:
            assert not any(name in op.inputs for op in program.operations[i + 1 :])
    kept = {op.y for op in program.operations} - {name for names in after.values() for name in names}
    assert kept == set(program.results)


def test_schemes():
    assert (scheme_bits("W8A8").weight, scheme_bits("w8a4").output) == (8, 4)
    for scheme in ("w8a16", "w4a4_g64", "w3a8", "fp8"):
        with pytest.raises(ValueError, match="convolutions are quantized to w8a8"):
            scheme_bits(scheme)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_per_output_channel(bits):
    torch.manual_seed(0)
    weight = torch.randn(5, 3, 3, 3) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 0.0])[:, None, None, None]
    q = quantize_weight(weight, bits)
    assert isinstance(q, QuantWeight) and q.codes.dtype == torch.int8 and q.scale.shape == (5,)
    error = (q.codes * q.scale[:, None, None, None] - weight).flatten(1).norm(dim=1)[:4] / weight.flatten(1).norm(dim=1)[:4]
    assert float(error.max()) < {4: 0.15, 8: 0.01}[bits]
    assert int(q.codes.abs().max()) <= 1 << (bits - 1) and not q.codes[4].any()


def test_a_missing_scale_is_an_error():
    graph, quantization, _, _ = lowered("basic", "w8a8")
    del quantization.scales[next(name for name, node in graph.nodes.items() if isinstance(node, Conv))]
    with pytest.raises(ValueError, match="has no scale"):
        lower(graph, quantization)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a4"])
def test_codes_end_where_a_relu6_does(scheme):
    """Calibration images have smaller values, so only other images reach 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU6(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU6(), nn.Conv2d(16, 8, 1))
    images = 9 * torch.randn(4, 3, 9, 9)
    graph = trace(model, images)
    for seen in (images, 0.5 * images, 0 * images - 1):
        quantization = calibrate(graph, observe(graph, [seen]), assign_bits(graph, scheme))
        storage, highest = ("s8", 127) if scheme == "w8a8" else ("u4", 15)
        assert quantization.scales["0"] <= 6 / highest
        program = lower(graph, quantization)
        assert program.values["0"].storage == storage
    quantization = calibrate(graph, observe(graph, [images]), assign_bits(graph, scheme))
    got, wanted = lower(graph, quantization).run(images), model(images)
    assert float((got - wanted).norm() / wanted.norm()) < {"w8a8": 0.02, "w4a4": 0.15}[scheme]


def test_an_untrained_linear_net_without_convolution():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    images = torch.randn(8, 3, 2, 2)
    graph = trace(model, images)
    program = lower(graph, calibrate(graph, observe(graph, [images]), assign_bits(graph, "w8a8")))
    torch.testing.assert_close(program.run(images), model(images), rtol=0.05, atol=0.05)
