"""The graph computes what the model computes, and its fusions are exactly those that the rules allow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit.vision.graph import AveragePool, Conv, MaxPool, Other, Sum
from lowbit.vision.trace import FUSIONS, UnsupportedNetwork, fuse, trace, unfused
from tests.vision.nets import Mixed, Plain, Shared, Sums, logits, mobilenet, regnet, resnet, seasoned


def kinds(graph):
    return [type(node).__name__ for node in graph.nodes.values()]


@pytest.mark.parametrize(
    ("model", "shape", "fold"),
    [
        (resnet(), (3, 32, 32), True),
        (resnet(), (3, 32, 32), False),
        (resnet("bottleneck", sizes=(128, 256), depths=(2, 2)), (3, 40, 24), True),
        (seasoned(Plain()), (3, 16, 16), True),
        (Shared(), (3, 9, 7), True),
        (Sums(), (3, 9, 7), True),
        (seasoned(Mixed()), (3, 16, 16), True),
    ],
    ids=["basic", "residual", "bottleneck", "plain", "shared", "sums", "mixed"],
)
def test_the_graph_computes_what_the_model_does(model, shape, fold):
    images = torch.randn(5, *shape)
    graph = trace(model, images[:1], FUSIONS if fold else FUSIONS[:-1])
    for batch in (images, images[:1]):  # the batch of tracing is not baked in
        wanted = logits(model, batch)
        got = graph.run(batch)
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_residual_network_is_all_convolutions_and_pools():
    graph = trace(resnet(depths=(2, 1)), torch.randn(1, 3, 32, 32))
    # Stem, pool, three blocks of two convolutions, average, classifier; both shortcuts are folded, everything else is fused.
    assert kinds(graph) == ["Input", "Conv", "MaxPool", *["Conv"] * 6, "AveragePool", "Conv"]
    blocks = [node for node in graph.nodes.values() if isinstance(node, Conv)][1:-1]
    assert [node.relu for node in blocks] == [True] * 6
    assert [node.second is not None for node in blocks] == [False, True, False, False, False, True]
    assert [node.residual is not None for node in blocks] == [False, False, False, True, False, False]
    assert blocks[3].residual == blocks[1].name
    assert blocks[5].second.stride == (2, 2) and blocks[5].stride == (1, 1)
    assert blocks[5].name == "resnet.encoder.stages.1.layers.0.layer.1.convolution"


def test_shortcuts_that_are_not_folded_become_residuals():
    graph = trace(resnet(), torch.randn(1, 3, 32, 32), ("relu", "add"))
    convs = [node for node in graph.nodes.values() if isinstance(node, Conv)]
    assert all(node.second is None for node in convs)
    sums = [node for node in convs if node.residual is not None]
    assert [node.residual.rpartition(".")[0][-8:] for node in sums] == ["shortcut", "shortcut"]
    # The graph has the shortcut before the sum that reads it, independent of the model's order.
    order = list(graph.nodes)
    assert all(order.index(node.residual) < order.index(node.name) for node in sums)


def test_in_a_bottleneck_the_shortcut_is_the_convolution_of_what_the_block_reads():
    graph = trace(resnet("bottleneck", sizes=(128, 256), depths=(1, 1)), torch.randn(1, 3, 32, 32))
    sums = [node for node in graph.nodes.values() if isinstance(node, Conv) and node.second is not None]
    assert [node.second.name.split(".")[-2] for node in sums] == ["shortcut", "shortcut"]


def test_a_value_with_two_readers_is_not_fused_away():
    graph = trace(Shared(), torch.randn(1, 3, 9, 7))
    a, b = graph.nodes["a"], graph.nodes["b"]
    assert not a.relu and a.is_plain  # read by the leaky ReLU and by the sum
    assert b.residual == "a" and b.relu  # the sum is fused into the other convolution
    assert kinds(graph) == ["Input", "Conv", "Other", "Conv", "AveragePool"]


def test_relus_and_sums_between_codes_are_sums_of_codes():
    graph = trace(Sums(), torch.randn(1, 3, 9, 7))
    first, second = ["Conv", "Sum", "MaxPool", "Sum", "Sum"], ["Conv", "MaxPool", "Conv", "Sum"]
    assert kinds(graph) == ["Input", *first, *second, "AveragePool", "Conv"]
    sums = [node for node in graph.nodes.values() if isinstance(node, Sum)]
    assert [node.relu for node in sums] == [True, True, False, True]
    assert [node.other is not None for node in sums] == [False, True, True, True]


@pytest.fixture(scope="module")
def as_exported():
    """(model, images, graph before any fusion)."""
    model, images = resnet(depths=(2, 1)), torch.randn(3, 3, 32, 32)
    return model, images, unfused(model, images)


@pytest.mark.parametrize(
    ("fusions", "sums", "relus"), [((), 2 * 2 + 6, 0), (("relu",), 3, 4), (("relu", "add"), 0, 7), (FUSIONS, 0, 7)]
)
def test_fusions_can_be_left_out(as_exported, fusions, sums, relus):
    """Without fusions, each of three blocks has two ReLUs and a sum, and the stem has one ReLU."""
    model, images, graph = as_exported
    graph = fuse(graph, fusions)
    found = [node for node in graph.nodes.values() if isinstance(node, Sum)]
    assert len(found) == sums and not any(isinstance(node, Other) for node in graph.nodes.values())
    assert sum(node.other is not None for node in found) == (3 if "add" not in fusions else 0)
    assert sum(isinstance(node, Conv) and node.relu for node in graph.nodes.values()) == relus
    torch.testing.assert_close(graph.run(images), logits(model, images), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="fusions are relu, add, shortcut, got 'bias'"):
        fuse(graph, ("bias",))


class Apart(nn.Module):
    """Sums and ReLUs of values that exist, or are read, in floating point only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(torch.relu(a.cos()))
        return (a + b + torch.relu(a)).sigmoid()


def test_sums_in_floating_point_stay_there():
    model, images = Apart(), torch.randn(2, 3, 6, 5)
    graph = trace(model, images)
    assert kinds(graph).count("Sum") == 0 and graph.nodes["b"].residual == "a"
    torch.testing.assert_close(graph.run(images), model(images))


def test_a_linear_layer_after_a_flatten_is_a_convolution_of_the_whole_image():
    graph = trace(seasoned(Plain()), torch.randn(1, 3, 16, 16))
    head = [node for node in graph.nodes.values() if isinstance(node, Conv)][2:]
    assert [tuple(node.weight.shape) for node in head] == [(20, 40, 4, 8), (6, 20, 1, 1)]
    assert head[0].relu and not head[1].relu
    assert not any(isinstance(node, Other) for node in graph.nodes.values())
    assert graph.nodes["features.4"].stride == (2, 1) and graph.nodes["features.4"].padding == (1, 0)


def test_what_cannot_be_lowered_is_named_with_the_reason():
    graph = trace(seasoned(Mixed()), torch.randn(1, 3, 16, 16))
    reasons = {node.name: node.reason for node in graph.nodes.values() if isinstance(node, Other) and node.reason}
    assert reasons["deep"] == "convolution: its dilation is (2, 2), 1 is supported"
    assert "batch norm that does not follow a convolution" in " ".join(reasons.values())
    assert isinstance(graph.nodes["stem"], Conv) and graph.nodes["stem"].padding == (1, 1)
    assert isinstance(graph.nodes["last"], Conv) and graph.nodes["last"].weight.shape == (5, 8, 2, 2)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Conv2d(4, 4, 3, dilation=2), "dilation"),
        (nn.Conv2d(4, 4, 2, padding="same"), "not symmetric"),
        (nn.MaxPool2d(2, ceil_mode=True), "cut off"),
    ],
)
def test_layers_that_are_refused(layer, words):
    model = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1))
    images = torch.randn(2, 4, 9, 9)
    graph = trace(model, images)
    assert any(words in node.reason for node in graph.nodes.values() if isinstance(node, Other))
    torch.testing.assert_close(graph.run(images), model(images))


@pytest.mark.parametrize(
    "layer", [nn.AvgPool2d(6), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1))], ids=["window", "one", "pair"]
)
def test_pools_over_the_whole_image(layer):
    images = torch.randn(2, 4, 6, 6)
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1), layer), images)
    assert kinds(graph) == ["Input", "Conv", "AveragePool"]
    (output,) = graph.outputs
    assert isinstance(graph.nodes[output], AveragePool) and graph.shapes[output] == (4, 1, 1)


def test_a_window_that_is_not_the_whole_image_is_no_average_pool():
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(3)), torch.randn(2, 4, 6, 6))
    assert kinds(graph) == ["Input", "Conv", "Other"]


class Deep(nn.Module):
    """A ResNet-D block: its shortcut is a mean over 2 x 2 pixels, then a 1 x 1 convolution."""

    def __init__(self, ceil=True):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 1)
        self.down = nn.Sequential(
            nn.AvgPool2d(2, 2, ceil_mode=ceil, count_include_pad=False), nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)
        )

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))) + self.down(x))


def test_the_shortcut_of_a_resnet_d_is_folded():
    model, images = seasoned(Deep()), torch.randn(3, 4, 10, 12)
    graph = trace(model, images)
    assert kinds(graph) == ["Input", "Conv", "Conv"]
    (block,) = [node for node in graph.nodes.values() if isinstance(node, Conv) and node.second is not None]
    assert block.name == "b" and block.second.weight.shape == (8, 4, 2, 2) and block.second.stride == (2, 2)
    torch.testing.assert_close(graph.run(images), model(images), rtol=1e-5, atol=1e-5)


def test_batch_norms_go_into_convolutions_that_stay_as_well():
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, dilation=2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    images = torch.randn(3, 4, 6, 7)
    graph = trace(seasoned(model), images)
    assert kinds(graph) == ["Input", "Conv", "Other", "Other"] and "1" in graph.nodes
    torch.testing.assert_close(graph.run(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("borders", [(1, 1, 1, 1), (0, 1, 0, 1), (2, 1, 0, 3), (0, 1)])
def test_zeros_around_an_image_become_padding(borders, groups):
    """Also in the two forms of torch: ZeroPad2d, and F.pad as a function."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, 2, (1, 0), groups=groups)

        def forward(self, x):
            return self.conv(torch.nn.functional.pad(x, borders)).relu()

    images = torch.randn(2, 4, 10, 12)
    for model in (Padded(), nn.Sequential(nn.ZeroPad2d((*borders, 0, 0)[:4]), nn.Conv2d(4, 8, 3, 2, groups=groups), nn.ReLU())):
        graph = trace(model, images)
        assert kinds(graph) == ["Input", "Conv"]
        torch.testing.assert_close(graph.run(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pad", [nn.ConstantPad2d(1, 0.5), nn.ReflectionPad2d(1), nn.ZeroPad2d((-1, 0, 0, 0))])
def test_other_borders_stay(pad):
    model, images = nn.Sequential(pad, nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    graph = trace(model, images)
    assert kinds(graph) == ["Input", "Other", "Conv"]
    torch.testing.assert_close(graph.run(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", [nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Hardsigmoid, nn.Tanh, nn.GELU])
def test_activations_between_codes_are_tables(act):
    images = torch.randn(2, 3, 6, 6)
    between = nn.Sequential(nn.Conv2d(3, 4, 1), act(), nn.Conv2d(4, 4, 1), act())
    graph = trace(between, images)
    assert kinds(graph) == ["Input", "Conv", "Activation", "Conv", "Other"]  # the caller reads the last one
    after_relu = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), act(), nn.Conv2d(4, 4, 1)), images)
    assert kinds(after_relu) == ["Input", "Conv", "Other", "Conv"]
    with_argument = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GELU(approximate="tanh"), nn.Conv2d(4, 4, 1)), images)
    assert kinds(with_argument) == ["Input", "Conv", "Other", "Conv"]


@pytest.mark.parametrize("model", [mobilenet(2), mobilenet(3), mobilenet("efficient"), regnet()])
def test_networks_of_groups_and_gates_are_whole(model):
    images = torch.randn(2, 3, 32, 32)
    graph = trace(model, images)
    assert not any(isinstance(node, Other) for node in graph.nodes.values())
    torch.testing.assert_close(graph.run(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("end", "most"),
    [
        (nn.ReLU(), float("inf")),
        (nn.ReLU6(), 6.0),
        (nn.Hardtanh(0.0, 2.5), 2.5),
        (nn.Hardtanh(), None),
        (nn.Hardtanh(-1, 6), None),
    ],
)
def test_relus_that_end(end, most):
    model, images = nn.Sequential(nn.Conv2d(3, 4, 1), end, nn.Conv2d(4, 4, 1)), 9 * torch.randn(2, 3, 5, 5)
    graph = trace(model, images)
    assert (kinds(graph) == ["Input", "Conv", "Conv"]) == (most is not None)
    assert graph.nodes["0"].relu == (most is not None) and (most is None or graph.nodes["0"].relu_max == most)
    torch.testing.assert_close(graph.run(images), model(images))


def test_means_that_are_cut_off_stay():
    model, images = seasoned(Deep()), torch.randn(3, 4, 9, 12)
    graph = trace(model, images)
    assert "Other" in kinds(graph)
    torch.testing.assert_close(graph.run(images), model(images), rtol=1e-5, atol=1e-5)


def test_pools_that_change_nothing_go_away():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d((5, 6)), nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(4, 2, 1))
    images = torch.randn(2, 3, 5, 6)
    assert kinds(trace(model, images)) == ["Input", "Conv", "Other", "Conv"]  # 5 rows: the last window is cut off
    images = torch.randn(2, 3, 6, 6)
    model[1] = nn.AdaptiveAvgPool2d((6, 6))
    graph = trace(model, images)
    assert kinds(graph) == ["Input", "Conv", "MaxPool", "Conv"]
    torch.testing.assert_close(graph.run(images), model(images))


def test_max_pool_has_its_own_stride():
    graph = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(3, padding=1)), torch.randn(1, 3, 9, 9))
    pool = next(node for node in graph.nodes.values() if isinstance(node, MaxPool))
    assert (pool.kernel, pool.stride, pool.padding) == ((3, 3), (3, 3), (1, 1))


def test_the_model_stays_as_it_was():
    model = resnet().train()
    model.resnet.pooler.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model, torch.randn(1, 3, 32, 32))
    assert model.training and not model.resnet.pooler.training
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())


def test_models_that_cannot_be_traced_say_why():
    class NoTensor(nn.Module):
        def forward(self, x):
            return {"y": [x * 1, torch.ones(3)]}

    class Branches(nn.Module):
        def forward(self, x):
            return x if bool(x.sum() > 0) else -x

    with pytest.raises(UnsupportedNetwork, match="result 1 of NoTensor is no tensor with the batch first: wrap the model"):
        trace(NoTensor(), torch.randn(1, 3, 8, 8))
    with pytest.raises(UnsupportedNetwork, match=r"cannot trace Branches"):
        trace(Branches(), torch.randn(1, 3, 8, 8))
    with pytest.raises(UnsupportedNetwork, match=r"images are \[N, C, H, W\]"):
        trace(NoTensor(), torch.randn(3, 8, 8))
