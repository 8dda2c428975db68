"""The wheel of kernels: its format, its kernels, and what is refused."""

from __future__ import annotations

import base64
import configparser
import hashlib
import shutil
import sys
import zipfile

import pytest
import torch
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

pytest.importorskip("triton")

from lowbit._version import __version__
from lowbit.export.library import launches_on
from lowbit.export.wheel import MODELS, SCHEMES, build_wheel, config_of, shapes_of, wheel_kernels
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import GPUS
from lowbit.kernels.kernel_file import KernelFile
from lowbit.pipeline.kernels import config_kernels, engine_kernels

SMALL = "SmolLM2-135M"


@pytest.mark.parametrize("model", MODELS)
def test_the_engine_has_kernels_for_every_model(model):
    assert len(config_kernels(config_of(model), GPUS["h200"], scheme="w4a16_g128", max_concurrent=2)) > 20


def test_kernels_are_those_of_a_folder(tmp_path):
    """A configuration launches what a checkpoint with weights launches."""
    from transformers import AutoModelForCausalLM

    from tests.tiny import tiny_tokenizer

    config, stored = config_of(SMALL), config_of(SMALL)
    config.vocab_size = stored.vocab_size = 512
    AutoModelForCausalLM.from_config(stored).save_pretrained(tmp_path)  # saving changes the configuration, hence two
    tiny_tokenizer().save_pretrained(tmp_path)
    for gpu in ("h200", "a100"):
        options = {"scheme": "w4a16_g64", "max_concurrent": 4}
        ours, theirs = (
            config_kernels(config, GPUS[gpu], stop_tokens=2, **options),
            engine_kernels(tmp_path, GPUS[gpu], **options),
        )
        assert {repr(kernel) for kernel in ours} == {repr(kernel) for kernel in theirs}


def test_has_the_engines_kernels_and_plain_products():
    config, gpu = config_of(SMALL), GPUS["h200"]
    kernels = wheel_kernels(gpu, [config], ["w4a16_g64", "w8a8"], max_concurrent=1)
    held = {repr(kernel) for kernel in kernels}
    assert len(held) == len(kernels)
    for scheme in ("w4a16_g64", "w8a8"):
        assert held >= {repr(kernel) for kernel in config_kernels(config, gpu, scheme=scheme, max_concurrent=1)}
    assert shapes_of(config) == [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    launches = launches_on(gpu, parse_scheme("w4a16_g64"), shapes_of(config), torch.bfloat16)
    assert held >= {repr(launch.recorded) for launch in launches}


@pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="Triton's launchers need a C compiler")
def test_builds_a_wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    found = wheel_kernels(GPUS["h200"], [config_of(SMALL)], ["w8a8"], 1)[:3]
    monkeypatch.setattr("lowbit.export.wheel.wheel_kernels", lambda *arguments: found)
    (tmp_path / "dist").mkdir()
    steps = []
    wheel = build_wheel(
        tmp_path / "dist", [GPUS["h100"], GPUS["h200"]], [SMALL], ["w8a8"], progress=lambda *at: steps.append(at)
    )
    assert [*(tmp_path / "dist").iterdir()] == [wheel] and steps[-1] == ("compiling kernels", 6, 6)
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("lowbit-kernels-sm90", __version__) and tags == {next(sys_tags())}
    with zipfile.ZipFile(wheel) as archive:
        about = f"lowbit_kernels_sm90-{__version__}.dist-info"
        record = archive.read(f"{about}/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == set(archive.namelist())
        for line in record[:-1]:
            member, digest, size = line.split(",")
            data = archive.read(member)
            assert len(data) == int(size)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{about}/entry_points.txt").decode())
        assert dict(points["lowbit.kernels"]) == {"sm90": "lowbit_kernels_sm90"}
        assert f"Requires-Dist: lowbit=={__version__}" in archive.read(f"{about}/METADATA").decode()
        archive.extractall(tmp_path / "site")
    file = KernelFile.open(tmp_path / "site" / "lowbit_kernels_sm90" / "kernels.lowbit")
    assert file.gpus == {"H100 80GB HBM3": 90, "H200": 90} and file.refusals(90) == ()
    assert file.model == {"name": "lowbit-kernels-sm90", "models": [SMALL], "schemes": ["w8a8"]}
    assert len(file.capabilities) == 3, "both GPUs run the same code"
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    from importlib.metadata import entry_points

    assert [point.value for point in entry_points(group="lowbit.kernels", name="sm90")] == ["lowbit_kernels_sm90"]


def test_refuses_what_is_no_wheel(tmp_path):
    with pytest.raises(ValueError, match=r"one architecture, got H200 \(sm_90\), A100-SXM4-80GB \(sm_80\)"):
        build_wheel(tmp_path, [GPUS["h200"], GPUS["a100"]])
    with pytest.raises(ValueError, match="models are Llama-2-7B, .*; got 'GPT-5'"):
        build_wheel(tmp_path, [GPUS["h200"]], ["GPT-5"])
    assert len(MODELS) == 12 and all(parse_scheme(scheme).name for scheme in SCHEMES)
