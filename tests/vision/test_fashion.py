"""The demo's data: search order of folders, hash checks, and the demo itself on few images."""

from __future__ import annotations

import gzip
import hashlib

import pytest
import torch
from typer.testing import CliRunner

from lowbit.cli.commands import app
from lowbit.vision import demo, fashion
from lowbit.vision.saved import load as load_network


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes small versions of the four files (600 and 200 images with a bright bar for the class) and makes their hashes the
    expected ones.
    """
    generator = torch.Generator().manual_seed(0)
    digests = {}
    for part, count in (("train", 600), ("t10k", 200)):
        labels = torch.randint(0, 10, (count,), generator=generator)
        pixels = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for i, label in enumerate(labels.tolist()):
            pixels[i, 2 + 2 * label : 6 + 2 * label] += 180
        contents = {
            f"{part}-images-idx3-ubyte.gz": b"\0" * 16 + bytes(pixels.to(torch.uint8).numpy()),
            f"{part}-labels-idx1-ubyte.gz": b"\0" * 8 + bytes(labels.to(torch.uint8).numpy()),
        }
        for name, content in contents.items():
            (tmp_path / name).write_bytes(gzip.compress(content))
            digests[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(fashion, "FILES", digests)
    return tmp_path


def test_images_are_read(folder):
    training, test = fashion.load(folder)
    assert training.pixels.shape == (600, 1, 28, 28) and len(test) == 200
    assert training.labels.dtype == torch.int64 and int(training.labels.max()) == 9
    white = fashion.normalize(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8))
    assert float(white) == pytest.approx((1 - 0.2860) / 0.3530)


def test_a_changed_file_is_refused(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0" * 208))
    with pytest.raises(fashion.DataError, match=r"t10k-labels.*not the file of Fashion-MNIST"):
        fashion.load(folder)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(fashion.DataError, match="cannot be read"):
        fashion.load(folder)


def test_where_the_data_is_looked_for(folder, tmp_path, monkeypatch):
    said: list[str] = []
    missing = tmp_path / "nowhere"
    monkeypatch.setattr(fashion, "INSTALLED", missing)
    assert fashion.bring_data(folder, said.append) == folder  # found in the cache
    assert fashion.bring_data(missing, said.append, folder) == folder  # found in the given folder
    monkeypatch.setattr(fashion, "INSTALLED", folder)
    assert fashion.bring_data(missing, said.append) == folder  # Debian's package is installed
    assert said == []
    with pytest.raises(fashion.DataError, match="should hold the four files"):
        fashion.bring_data(folder, said.append, missing)


def test_the_demo_in_small(folder, tmp_path, monkeypatch):
    from transformers import ResNetConfig, ResNetForImageClassification

    def small():
        config = ResNetConfig(
            num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
        )
        return ResNetForImageClassification(config)

    monkeypatch.setattr(fashion, "network", small)
    monkeypatch.setattr(fashion, "_varied", lambda x, generator: x)
    said: list[str] = []
    rows = demo.run(folder, tmp_path / "out", said.append, epochs=8)
    assert [(r.scheme, r.fine_tuned) for r in rows] == [("fp32", False), *demo.SCHEMES]
    assert rows[0].top1 > 60  # chance is 10
    assert all(r.top1 > rows[0].top1 - 15 for r in rows[1:])
    assert rows[1].same > 95 and rows[4].divergence < rows[3].divergence
    assert rows[1].weight_bytes == rows[0].weight_bytes // 4 > 1.8 * rows[3].weight_bytes
    network = load_network(tmp_path / "out" / "fashion-w4a4-tuned")
    _, test = fashion.load(folder)
    assert demo.top1(demo.answers(network, test, "cpu"), test) == rows[4].top1
    again = demo.trained(tmp_path / "out" / "fashion-resnet", test, 8, said.append).eval()
    assert demo.top1(demo.answers(lambda x: again(x).logits, test, "cpu"), test) == rows[0].top1
    assert "taking the trained network" in said[-1]
    assert demo.as_json(rows)["rows"][3]["scheme"] == "w4a4"


@pytest.mark.parametrize("apt", [None, "echo 'E: Unable to locate package dataset-fashion-mnist' >&2; exit 100"])
def test_without_apt_one_line_says_what_to_do(tmp_path, monkeypatch, apt):
    """On a system without apt, and on one whose package lists are empty."""
    monkeypatch.setattr(fashion, "INSTALLED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    if apt is not None:
        (tmp_path / "bin" / "apt-get").write_text(f"#!/bin/sh\n{apt}\n")
        (tmp_path / "bin" / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = CliRunner().invoke(app, ["demo", "--vision", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    line = result.stderr.splitlines()[-1]
    assert line.endswith("and run: lowbit demo --vision --data FOLDER") and all(name in line for name in fashion.FILES)
    assert ("this machine has no apt-get" if apt is None else "Unable to locate package") in line
