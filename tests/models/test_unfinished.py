"""Unfinished quantizations. Damaged layers are quantized again, half-written files are removed, and a second run at the same
time is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit import quantize_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointWriter
from lowbit.models import calibrate
from lowbit.models.calibrate import Calibration, unfinished_folder
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.quantize_layer import LayerQuantizer
from lowbit.quantize import Gptq
from tests.models.written import files
from tests.tiny import save_tiny

CALIBRATION = Calibration(samples=4, length=16, text=Path(__file__))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("unfinished") / "fp16"
    save_tiny(path)
    return path


def quantize(source, target, **options):
    return quantize_checkpoint(source, target, "w4a16_g32", method=Gptq(), calibration=CALIBRATION, **options)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The files of an uninterrupted run."""
    target = tmp_path_factory.mktemp("unfinished") / "whole"
    quantize(tiny, target)
    return files(target)


@pytest.fixture
def unfinished(tiny, tmp_path, monkeypatch):
    """The folder of a run that was stopped after all layers were finished."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize(tiny, tmp_path / "q")
    return unfinished_folder(tmp_path / "q")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit of a code": lambda path: flip(path, path.stat().st_size // 2),
    "a bit of the last scale": lambda path: flip(path, -1),
    "a bit of the header": lambda path: flip(path, 40),
    "a bit of the header's length": lambda path: flip(path, 1),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "truncated in the header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_layer_is_quantized_again(damage, tiny, tmp_path, whole, unfinished, monkeypatch):
    (layer,) = unfinished.glob("layer-00000*")
    DAMAGES[damage](layer)
    original, redone, said = LayerQuantizer.quantize, [], []

    def counted(self, i, *rest):
        redone.append(i)
        return original(self, i, *rest)

    monkeypatch.setattr(LayerQuantizer, "quantize", counted)
    quantize(tiny, tmp_path / "q", say=said.append)
    assert files(tmp_path / "q") == whole and not unfinished.exists()
    assert redone == [0], "the layer that is intact is not quantized again"
    (line,) = [line for line in said if "again" in line]
    assert line == (
        f"layer 0 is quantized again: layer-00000 in {unfinished} is damaged (its SHA-256 is not the one in its name)"
    )


def test_a_layer_that_is_damaged_after_it_was_read_is_not_written(tiny, tmp_path, whole, monkeypatch):
    original = calibrate.calibrate_layers

    def then_damaged(*args, **kwargs):
        notes = original(*args, **kwargs)
        flip(next(unfinished_folder(tmp_path / "q").glob("layer-00001*")), -1)
        return notes

    monkeypatch.setattr("lowbit.models.quantize_checkpoint.calibrate_layers", then_damaged)
    with pytest.raises(CheckpointError, match="layer 1 was damaged after it was written; the same command quan"):
        quantize(tiny, tmp_path / "q")
    monkeypatch.undo()
    assert not (tmp_path / "q").exists()
    quantize(tiny, tmp_path / "q")
    assert files(tmp_path / "q") == whole


def test_files_that_safetensors_had_half_written_are_removed(tiny, tmp_path, whole, unfinished):
    scratch = tmp_path / ".q.sensitivity"
    scratch.mkdir()
    for folder in (unfinished, scratch):
        (folder / ".tmpaB3xY9").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="another run"):
        quantize_checkpoint(tiny, tmp_path / "q", "w3a16_g32", method=Gptq(), calibration=CALIBRATION)
    assert not scratch.exists()
    quantize(tiny, tmp_path / "q")
    assert files(tmp_path / "q") == whole and [path.name for path in tmp_path.iterdir()] == ["q"]


def test_a_second_run_of_one_recipe_is_refused_and_the_first_one_finishes(tiny, tmp_path, whole, monkeypatch):
    original, refused = LayerQuantizer.quantize, []

    def while_another_begins(self, i, *rest):
        if not refused:
            refused.append(None)
            for begin in (quantize, convert_checkpoint):
                with pytest.raises(CheckpointError) as raised:
                    begin(tiny, tmp_path / "q", overwrite=True)
                refused.append(str(raised.value))
        return original(self, i, *rest)

    monkeypatch.setattr(LayerQuantizer, "quantize", while_another_begins)
    quantize(tiny, tmp_path / "q")
    assert files(tmp_path / "q") == whole and [path.name for path in tmp_path.iterdir()] == ["q"]
    for line in refused[1:]:
        assert re.fullmatch(rf"{tmp_path}/q: process \d+ on host .* is writing it; wait until it ends, or choose .*", line)
