"""`lowbit.vision.quantize` as a user calls it, and networks on disk."""

from __future__ import annotations

import json

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import lowbit
from lowbit import vision
from lowbit.checkpoint import CheckpointError
from lowbit.vision.network import image_batches
from lowbit.vision.sensitivity import divergence
from tests.vision.nets import Fcn, Mixed, SsdLite, Sums, Yolo, logits, resnet, seasoned


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return torch.randn(24, 3, 32, 32)


@pytest.fixture(scope="module")
def network(images):
    return lowbit.vision.quantize(resnet(depths=(2, 1)), images, "w4a4")


def test_a_transformers_model_is_quantized(network, images):
    wanted = logits(resnet(depths=(2, 1)), images)
    got = network(images)
    assert got.shape == wanted.shape
    assert float((got - wanted).norm() / wanted.norm()) < 0.25
    assert torch.equal(network(images), got)
    lines = network.lines()
    assert lines[0].startswith("w4a4: 8 convolutions and linear layers") and "6 with 4-bit weights" in lines[0]
    assert network.kept == {} and all(line.startswith("on ") for line in lines[1:]), "kernels"


def test_rows_of_the_report(network):
    rows = network.rows()
    assert [row.kind for row in rows][:4] == ["7x7/2 + relu", "max pool", "3x3 + relu", "3x3 + shortcut + relu"]
    assert rows[0].products == 16 * 16 * 32 * 3 * 49
    assert rows[3].products == 8 * 8 * (64 * 64 * 9 + 32 * 64)
    assert [row.weight_bits for row in rows] == [8, 0, 4, 4, 4, 4, 4, 4, 0, 8]
    assert rows[0].storage == "s8 -> u4" and rows[5].storage == "u4 + u4 -> u4" and rows[-1].storage == "s8 -> f32"


def test_what_stays_in_floating_point_is_reported(images):
    network = vision.quantize(seasoned(Mixed()), images[:, :, :16, :16], "w8a8")
    assert network.kept["deep"] == "convolution: its dilation is (2, 2), 1 is supported"
    assert "kept in floating point: hardtanh: hardtanh.default has no integer form here" in network.lines()
    assert not any("view" in name for name in network.kept)


@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: [x[:12], x[12:]], lambda x: [(x, torch.zeros(24))], lambda x: [{"pixel_values": x}]]
)
def test_forms_of_calibration_data(images, form):
    assert torch.equal(torch.cat(image_batches(form(images), "cpu")), images)


@pytest.mark.parametrize(
    "data",
    [[], torch.zeros(0, 3, 8, 8).split(1)[1:], [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)], [torch.zeros(3, 8, 8)], ["x"]],
)
def test_other_data_is_an_error(data):
    with pytest.raises(ValueError, match="calibration images"):
        image_batches(data, "cpu")


def test_images_of_another_size_are_an_error(network):
    with pytest.raises(ValueError, match=r"traced for images \[N, 3, 32, 32\], got \[1, 3, 64, 64\]"):
        network(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"keep_int8": "stem"}, "a list of names, got the string 'stem'"),
        ({"search": "entropy"}, "mse, percentile, max, got 'entropy'"),
        ({"fine_tuning": True}, r"vision.FineTune\(epochs=..., rate=...\) or None, got True"),
    ],
)
def test_arguments_of_another_kind_say_what_is_wanted(images, wrong, words):
    with pytest.raises(ValueError, match=words):
        vision.quantize(resnet(), images, "w8a8", **wrong)


def test_names_of_models_are_not_models(images):
    with pytest.raises(ValueError, match="a module of torch, got str: load it first"):
        vision.quantize("microsoft/resnet-50", images)
    with pytest.raises(ValueError, match="as tuples, got 0.5 and 0.2"):
        vision.Pixels(0.5, 0.2)


def test_the_report_is_what_torch_prints(network):
    assert all(line in repr(network) for line in network.lines())


def test_two_ways_to_choose_layers_are_one_too_many(images):
    with pytest.raises(ValueError, match="give one of the two"):
        vision.quantize(resnet(), images, "w4a4", keep_int8=["x"], most_divergence=0.1)


def test_pixels_are_normalized_on_the_way_in(tmp_path):
    torch.manual_seed(0)
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    pixels = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    by_hand = (pixels.double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None]
    network = vision.quantize(resnet(), pixels, "w8a4", pixels=vision.Pixels(mean, deviation))
    torch.testing.assert_close(vision.Pixels(mean, deviation).normalized(pixels), by_hand.float(), rtol=1e-6, atol=1e-6)
    got = network(pixels)
    assert torch.equal(network(pixels.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)), got)  # NHWC
    floats = network(by_hand.float())  # codes at ties may differ
    assert float((got - floats).norm() / floats.norm()) < 1e-3
    vision.save(network, tmp_path / "net")
    assert torch.equal(vision.load(tmp_path / "net")(pixels), got)


def test_pixels_that_the_network_does_not_know(network, images):
    with pytest.raises(ValueError, match=r"uint8 for a network made with pixels=Pixels"):
        network((images * 40 + 128).to(torch.uint8))
    with pytest.raises(ValueError, match="2 means, the images have 3 channels"):
        vision.quantize(resnet(), images.to(torch.uint8), "w8a8", pixels=vision.Pixels((0.5, 0.5), (0.2, 0.2)))
    with pytest.raises(ValueError, match="positive deviations"):
        vision.Pixels((0.5,), (0.0,))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a4"])
def test_saved_and_loaded(tmp_path, images, scheme):
    network = vision.quantize(resnet(), images, scheme)
    vision.save(network, tmp_path / "net")
    again = vision.load(tmp_path / "net")
    assert again.scheme == scheme and torch.equal(again(images), network(images))
    weights = sum(
        t.numel() for layer in network.program.layers for t in (layer.weight, getattr(layer.second, "weight", layer.s))
    )
    size = (tmp_path / "net" / "model.safetensors").stat().st_size
    assert size < weights * {"w8a8": 1.0, "w4a4": 0.5}[scheme] + 40_000
    with pytest.raises(CheckpointError, match="not empty"):
        vision.save(network, tmp_path / "net")
    vision.save(network, tmp_path / "net", overwrite=True)


def test_floating_point_parts_are_saved(tmp_path, images):
    network = vision.quantize(seasoned(Mixed()), images[:, :, :16, :16], "w8a8")
    vision.save(network, tmp_path / "net")
    again = vision.load(tmp_path / "net")
    assert torch.equal(again(images[:, :, :16, :16]), network(images[:, :, :16, :16])) and again.kept == network.kept


def test_sums_are_reported_and_saved(tmp_path, images):
    network = vision.quantize(Sums(), images[:, :, :9, :7], "w8a4")
    rows = network.rows()
    assert [row.kind for row in rows if row.kind.startswith(("add", "relu"))] == ["relu", "add + relu", "add", "add + relu"]
    assert network.kept == {}
    vision.save(network, tmp_path / "sums")
    assert torch.equal(vision.load(tmp_path / "sums")(images[:, :, :9, :7]), network(images[:, :, :9, :7]))


@pytest.mark.parametrize("make", [SsdLite, Yolo, Fcn], ids=["ssd-lite", "yolo", "fcn"])
def test_detectors_and_segmenters_run_whole(tmp_path, make, images):
    """Nothing stays in floating point but rearrangements, and results have the structure of the model's."""
    model = seasoned(make())
    network = vision.quantize(model, images, "w8a8")
    assert network.kept == {}
    with torch.no_grad():
        wanted, form = pytree.tree_flatten(model(images))
    got, same = pytree.tree_flatten(network(images))
    assert form == same and len(got) == 2
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.08
    vision.save(network, tmp_path / "net")
    again, same = pytree.tree_flatten(vision.load(tmp_path / "net")(images))
    assert form == same and all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
    kinds = {row.kind for row in network.rows()}
    assert kinds >= {SsdLite: {"3x3 depthwise + relu"}, Yolo: {"concat", "resize, nearest"}, Fcn: {"resize, bilinear"}}[make]


def test_layers_of_a_detector_are_chosen_and_trained(images):
    """The error of several results is relative; fine-tuning and compensation make it smaller."""
    model, some = seasoned(Yolo(nn.ReLU)), images[:8]
    with torch.no_grad():
        wanted = model(some)
    plain = divergence(wanted, vision.quantize(model, some, "w4a8")(some))
    network = vision.quantize(model, some, "w4a8", most_divergence=plain / 3)
    assert network.assignment.keep_int8 and divergence(wanted, network(some)) <= plain / 3
    better = vision.quantize(model, some, "w4a8", compensation=True)
    assert divergence(wanted, better(some)) < 0.8 * plain
    tuned = vision.quantize(model, some, "w4a8", fine_tuning=vision.FineTune(20, 1e-4))
    assert divergence(wanted, tuned(some)) < 0.8 * plain


def test_results_that_are_no_tensors_are_refused(images):
    class Sizes(nn.Module):
        def forward(self, x):
            return x.relu(), 3

    with pytest.raises(vision.UnsupportedNetwork, match="result 1 of Sizes is no tensor with the batch first"):
        vision.quantize(Sizes(), images)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, images):
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x).flatten(1).cumsum(1)

    network = vision.quantize(Sorted(), images, "w8a8")
    with pytest.raises(CheckpointError, match=r"cumsum.*cannot be saved"):
        vision.save(network, tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format="other"), "not a quantized network"),
        (lambda c: c.update(version=99), "update lowbit"),
        (lambda c: c["operations"][1].update(x="nowhere"), "nothing before it makes"),
        (lambda c: c["operations"][1].pop("layer"), "does not describe a network"),
        (lambda c: c["operations"][1]["layer"].update(y="u5"), "does not describe a network"),
        (
            lambda c: c["operations"].append({"kind": "compute", "y": "z", "target": "from_file.default"}),
            "unknown floating-point",
        ),
        (lambda c: c.update(result="nowhere"), "nothing makes the result"),
    ],
)
def test_folders_that_are_not_networks(tmp_path, network, change, words):
    vision.save(network, tmp_path / "net")
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    change(config)
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        vision.load(tmp_path / "net")


def test_moving_keeps_codes(network, images):
    before = network(images)
    network.to("cpu").double().half()
    assert torch.equal(network(images), before)
