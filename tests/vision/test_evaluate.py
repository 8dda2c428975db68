"""Folders of labelled photographs, ResNets from torchvision's checkpoints, and the three commands for image networks."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lowbit import vision
from lowbit.cli.commands import app
from lowbit.cli.terminal import err, out
from lowbit.vision.evaluate import Labelled, Preparation, answers, figure, images_in, labelled, right_answers
from lowbit.vision.resnet import ResNet, load_resnet
from tests.vision.nets import mobilenet, seasoned

Image = pytest.importorskip("PIL.Image", reason="photographs are decoded by Pillow")


def tensors(kind, widths=(8, 16, 24, 32), depths=(1, 2, 1, 1), groups=1, width=1, classes=4):
    """Random tensors with the names and shapes of a torchvision ResNet; batch norms are not trivial."""
    torch.manual_seed(0)
    found = {}

    def conv(name, outputs, inputs, window):
        found[f"{name}.weight"] = torch.randn(outputs, inputs, window, window) / math.sqrt(inputs * window * window)

    def norm(name, size):
        found[f"{name}.weight"], found[f"{name}.bias"] = torch.rand(size) + 0.5, 0.3 * torch.randn(size)
        found[f"{name}.running_mean"], found[f"{name}.running_var"] = 0.3 * torch.randn(size), torch.rand(size) + 0.5
        found[f"{name}.num_batches_tracked"] = torch.tensor(1)

    conv("conv1", 8, 3, 7)
    norm("bn1", 8)
    channels = 8
    for stage, (size, depth) in enumerate(zip(widths, depths, strict=True), 1):
        outputs = size if kind == "basic" else 4 * size
        inner = size if kind == "basic" else size * width
        for i in range(depth):
            at = f"layer{stage}.{i}"
            shapes = [(inner, channels, 3), (outputs, inner, 3)]
            if kind == "bottleneck":
                shapes = [(inner, channels, 1), (inner, inner // groups, 3), (outputs, inner, 1)]
            for k, shape in enumerate(shapes, 1):
                conv(f"{at}.conv{k}", *shape)
                norm(f"{at}.bn{k}", shape[0])
            if i == 0 and (stage > 1 or channels != outputs):
                conv(f"{at}.downsample.0", outputs, channels, 1)
                norm(f"{at}.downsample.1", outputs)
            channels = outputs
    found["fc.weight"], found["fc.bias"] = torch.randn(classes, channels) / 8, torch.randn(classes)
    return found


def by_hand(t, x):
    """The network in functions, as torchvision's documentation describes it."""
    f = nn.functional

    def conv_norm(x, conv, norm, stride=1, groups=1):
        w = t[f"{conv}.weight"]
        y = f.conv2d(x, w, None, stride, w.shape[2] // 2, groups=groups)
        return f.batch_norm(y, *(t[f"{norm}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")))

    x = f.max_pool2d(conv_norm(x, "conv1", "bn1", 2).relu(), 3, 2, 1)
    for stage in (1, 2, 3, 4):
        i = 0
        while (at := f"layer{stage}.{i}") + ".conv1.weight" in t:
            stride, y, deep = 2 if i == 0 and stage > 1 else 1, x, f"{at}.conv3.weight" in t
            for k in (1, 2, 3)[: 3 if deep else 2]:
                w = t[f"{at}.conv{k}.weight"]
                here = stride if k == (2 if deep else 1) else 1
                y = conv_norm(y, f"{at}.conv{k}", f"{at}.bn{k}", here, y.shape[1] // w.shape[1])
                y = y.relu() if k < (3 if deep else 2) else y
            if f"{at}.downsample.0.weight" in t:
                x = conv_norm(x, f"{at}.downsample.0", f"{at}.downsample.1", stride)
            x, i = (x + y).relu(), i + 1
    return f.linear(x.mean((2, 3)), t["fc.weight"], t["fc.bias"])


@pytest.mark.parametrize(
    "options", [{"kind": "basic"}, {"kind": "bottleneck"}, {"kind": "bottleneck", "groups": 4, "width": 2}], ids=str
)
def test_checkpoints_say_what_the_network_is(tmp_path, options):
    checkpoint, x = tensors(**options), torch.randn(2, 3, 64, 64)
    torch.save({"state_dict": {f"module.{name}": value for name, value in checkpoint.items()}}, tmp_path / "net.pth")
    network = load_resnet(tmp_path / "net.pth")
    with torch.no_grad():
        torch.testing.assert_close(network(x), by_hand(checkpoint, x), rtol=1e-4, atol=1e-5)
    quantized = vision.quantize(network, torch.randn(8, 3, 64, 64), "w8a8")
    assert quantized.kept == {}


def test_files_that_are_no_resnets(tmp_path):
    checkpoint = tensors("basic")
    del checkpoint["layer3.0.conv1.weight"]
    torch.save(checkpoint, tmp_path / "net.pth")
    with pytest.raises(
        ValueError, match=r"net.pth: no ResNet of torchvision: 'layer3.0.conv1.weight' is missing; supported are"
    ):
        load_resnet(tmp_path / "net.pth")
    with pytest.raises(ValueError, match="no ResNet of torchvision: .*unexpected"):
        ResNet({**tensors("basic"), "unexpected": torch.zeros(1)})
    (tmp_path / "text.pth").write_text("text")
    with pytest.raises(ValueError, match="neither a checkpoint of torch nor safetensors"):
        load_resnet(tmp_path / "text.pth")
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="a checkpoint is a dictionary of tensors"):
        load_resnet(tmp_path / "list.pth")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_resnet(tmp_path / "none.pth")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder with four classes of three photographs each, and a file with their labels."""
    folder = tmp_path_factory.mktemp("photographs")
    torch.manual_seed(0)
    lines = ["# file class", ""]
    for label, name in enumerate(("ant", "bee", "cat", "dog")):
        (folder / name).mkdir()
        for i in range(3):
            pixels = torch.randint(0, 256, (5 + i, 4, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).resize((90 + 7 * i, 80)).save(folder / name / f"{i}.JPEG")
            lines.append(f"{name}/{i}.JPEG {label}" if i else f"{name}/{i}.JPEG,{label}")
    (folder / "labels.txt").write_text("\n".join(lines))
    return folder


def test_folders_of_classes_and_lists_of_files(photographs, tmp_path):
    images = labelled(photographs)
    assert images.labels == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3) and images.paths[4] == photographs / "bee" / "1.JPEG"
    assert labelled(photographs, photographs / "labels.txt") == images
    assert images_in(photographs) == list(images.paths)
    seen, left = images.split(4)
    assert seen.labels == (0, 1, 2, 3) and len(left.paths) == 8 and not set(seen.paths) & set(left.paths)
    assert images.first(3).labels == (0, 1, 2) and images.first(99) is images
    with pytest.raises(ValueError, match="12 of 12 images cannot calibrate"):
        images.split(12)
    with pytest.raises(ValueError, match="no images in folders of classes, such as .*give --labels FILE"):
        labelled(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        labelled(tmp_path / "none")
    for line, words in (
        ("ant/0.JPEG cat", "a line is FILE CLASS or FILE,CLASS"),
        ("ant/9.JPEG 0", "no file"),
        ("", "no lines"),
    ):
        (tmp_path / "labels.txt").write_text(line)
        with pytest.raises(ValueError, match=words):
            labelled(photographs, tmp_path / "labels.txt")


def test_photographs_are_prepared_as_by_torchvision(photographs, tmp_path):
    preparation = Preparation(40, 32, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    path = photographs / "ant" / "2.JPEG"
    got = preparation.image(path)
    picture = Image.open(path).convert("RGB")
    assert picture.size == (104, 80)
    scaled = (
        torch.tensor(list(picture.resize((52, 40), Image.Resampling.BILINEAR).getdata())).reshape(40, 52, 3).permute(2, 0, 1)
    )
    cut = scaled[:, 4:36, 10:42] / 255  # round(4), round(10)
    mean, deviation = torch.tensor([[0.5, 0.4, 0.3], [0.2, 0.3, 0.4]])[:, :, None, None]
    torch.testing.assert_close(got, (cut - mean) / deviation)
    assert preparation.batch([path, path]).shape == (2, 3, 32, 32)
    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"x.png: no image that Pillow reads"):
        preparation.image(tmp_path / "x.png")
    with pytest.raises(ValueError, match="the centre of 64 pixels is cut out of 32"):
        Preparation(32, 64)


def test_answers_and_standard_errors(photographs):
    images, preparation = labelled(photographs), Preparation(32, 32)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    first, fifth = right_answers(logits.expand(4, 4), torch.arange(4))
    assert first.tolist() == [0, 100, 0, 0] and fifth.tolist() == [100] * 4
    assert figure(first).mean == 25 and figure(first).error == pytest.approx(25)
    batches = list(answers(lambda x: logits.expand(len(x), 4), images, preparation, batch=5))
    assert [len(labels) for _, labels in batches] == [5, 5, 2]
    with pytest.raises(ValueError, match="the images have a class 3, the network has 2 classes"):
        list(answers(lambda x: x.mean((2, 3))[:, :2], images, preparation))
    with pytest.raises(ValueError, match=r"a classifier returns logits \[N, classes\], got \[12, 3, 32, 32\]"):
        list(answers(lambda x: x, images, preparation))
    assert isinstance(images, Labelled)


def run(*arguments):
    out.width = err.width = 200
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_eval_images(photographs, tmp_path):
    torch.save(tensors("basic"), tmp_path / "net.pth")
    options = ["--size", "64", "--resized", "64", "--batch", "5"]
    result = run("eval-images", photographs, "--model", tmp_path / "net.pth", *options, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.stderr
    assert "fp32" in result.stdout and "±" in result.stdout and "12" in result.stdout
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    network, images = load_resnet(tmp_path / "net.pth"), labelled(photographs)
    with torch.no_grad():
        right = network(Preparation(64, 64).batch(images.paths)).argmax(1) == torch.tensor(images.labels)
    assert row["top1"]["mean"] == pytest.approx(100 * float(right.float().mean())) and row["count"] == 12
    assert row["top5"]["mean"] == row["same"]["mean"] == 100
    more = ["--scheme", "w8a8", "--calibration", "4", "--json", "-"]
    result = run("eval-images", photographs, "--model", tmp_path / "net.pth", *options, *more)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["network"] for row in rows] == ["fp32", "w8a8"] and rows[0]["count"] == rows[1]["count"] == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scheme", "w4a16"], "image networks are quantized to w8a8, w8a4, w4a8, w4a4"),
        (["--batch", "0"], "--batch 0: at least 1"),
        (["--compensation"], "add --scheme"),
        (["--mean", "1,2"], "three numbers with commas"),
    ],
)
def test_wrong_options_are_refused(photographs, tmp_path, options, words):
    torch.save(tensors("basic"), tmp_path / "net.pth")
    result = run("eval-images", photographs, "--model", tmp_path / "net.pth", *options)
    assert result.exit_code == 1 and words in result.stderr


def test_onnx_in_and_out_by_commands(photographs, tmp_path):
    pytest.importorskip("onnx", reason="ONNX files are read by the onnx package")
    images = torch.randn(8, 3, 64, 64)
    network = vision.quantize(seasoned(mobilenet(2)), images, "w4a8")
    vision.save(network, tmp_path / "net")
    result = run("export-onnx", tmp_path / "net", "-o", tmp_path / "net.onnx")
    assert result.exit_code == 0, result.stderr
    result = run("import-onnx", tmp_path / "net.onnx", "-o", tmp_path / "again")
    assert result.exit_code == 0, result.stderr
    again, wanted = vision.load(tmp_path / "again")(images), network(images)
    assert float((again - wanted).norm() / wanted.norm()) < 5e-3
    more = ["--images", photographs, "--scheme", "w8a8", "--size", "64", "--resized", "64"]
    result = run("import-onnx", tmp_path / "net.onnx", "-o", tmp_path / "calibrated", *more)
    assert result.exit_code == 0 and "w8a8: 12 convolutions and linear layers" in result.stderr, result.stderr
    result = run("import-onnx", tmp_path / "net.onnx", "-o", tmp_path / "x", "--scheme", "w8a8")
    assert result.exit_code == 1 and "add --images FOLDER" in result.stderr
    result = run("eval-images", photographs, "--model", tmp_path / "net.onnx", "--size", "64", "--resized", "64")
    assert result.exit_code == 0 and "fp32" in result.stdout, result.stderr
