"""`lowbit compile` finds and compiles the kernels of a whole model without a GPU. On a GPU, starts and requests use them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from typer.testing import CliRunner

from lowbit.cli.commands import app
from lowbit.hardware.machine import GPUS, present_gpu
from lowbit.kernels.kernel_file import KernelFile, is_trusted
from lowbit.kernels.parts.launch import recording
from lowbit.models.load import load_causal
from lowbit.models.weightless import weightless_model
from lowbit.nn import QuantLinear
from lowbit.ops.simulated_gpu import simulated_gpu
from lowbit.pack import FragmentWeight
from lowbit.pipeline.kernels import engine_kernels
from tests.adapters import write_adapter
from tests.tiny import save_tiny, tiny_llama, tiny_tokenizer
from tests.tiny_experts import tiny_experts

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="Triton's launchers need a C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def run(*arguments):
    return CliRunner().invoke(app, ["compile", *map(str, arguments)], env={"COLUMNS": "200"})


def names(folder, gpu, **options) -> set[str]:
    return {kernel.name for kernel in engine_kernels(folder, GPUS[gpu], **{"max_concurrent": 2, **options})}


ALWAYS = {"embed_rows", "append_heads", "gather_heads", "paged_attention", "norm_rows", "survey", "weigh", "collect", "settle"}
"""Kernels that every Llama needs: embedding, cache, attention of steps and prompts, norms, sampling."""


def test_kernels_of_each_gpu(folder):
    assert names(folder, "h200", scheme="w4a16_g64") == ALWAYS | {"ring_gemm", "wgmma_gemm", "gate_rows"}
    assert names(folder, "a100", scheme="w4a16_g64") == ALWAYS | {"ring_gemm", "gate_rows"}
    assert names(folder, "a100", scheme="w4a16_g64", max_concurrent=8) == ALWAYS | {"ring_gemm", "gate_rows", "mma_gemm"}
    assert names(folder, "h200", scheme="w8a8") >= ALWAYS - {"norm_rows"} | {"quantize_rows", "scaled_gemm"}
    assert names(folder, "l40s", scheme="w8a8") >= ALWAYS - {"norm_rows"} | {"quantize_rows", "plain_scaled_gemm"}
    assert names(folder, "h200") >= ALWAYS
    # The engine compares itself with the model at its start, which needs 16-bit pages. So kernels of int4 pages are additional.
    assert names(folder, "h200", kv="int4") == names(folder, "h200") | {"packed_attention"}
    assert names(folder, "h200", speculate=3) == names(folder, "h200") | {"accept_rows"}


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_kernels_of_adapters(folder, tmp_path, gpu):
    """The sums of adapters and products of steps whose epilogues add them; two kernels of prompts' adapters and products whose
    bias is of tokens; nothing else is new."""
    lora = {"x": write_adapter(tmp_path, tiny_llama(), rank=40)}
    options = {"max_concurrent": 2, "scheme": "w4a16_g64", "speculate": 2}
    plain, adapted = (engine_kernels(folder, GPUS[gpu], **options, **more) for more in ({}, {"lora": lora}))
    new = [kernel for kernel in adapted if kernel not in plain]
    products = [kernel for kernel in new if kernel.name not in ("shrink", "expand", "lora_sums")]
    assert {kernel.name for kernel in new} > {"shrink", "expand", "lora_sums"} and products
    epilogues = [kernel.arguments[-1].epilogue for kernel in products]
    assert all(e.bias_of_tokens == (e.lora is None) for e in epilogues)
    ends = {(e.norm_parts > 0, e.gate, e.residual, e.lora is not None) for e in epilogues}
    assert ends >= {(True, "none", False, True), (True, "silu", False, True), (False, "none", True, True)}
    assert (False, "none", False, False) in ends
    assert {kernel.arguments[-1].rank for kernel in new if kernel.name in ("shrink", "lora_sums")} == {64}


@pytest.mark.parametrize("scheme", ["w4a16_g64", "w4a16_g64_z", "w4a16_g64_fz", "w8a16_g64", "w6e3m2a16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_have_the_type_that_loading_gives_them(tmp_path, dtype, scheme):
    """Kernels are compiled for a type of scales. If loading gave them another type, the compiled kernels would be useless."""
    tiny_llama(dtype=dtype).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_causal(tmp_path, scheme=scheme, device=torch.device("cpu"), dtype=dtype)
    of = {name: layer for name, layer in loaded.named_modules() if isinstance(layer, QuantLinear)}
    with simulated_gpu(GPUS["h200"]), recording():
        built = weightless_model(tmp_path, scheme, None)
        for name, layer in of.items():
            packed = FragmentWeight.pack(layer.quant_tensor())
            other = built.get_submodule(name)
            for kind in ("scale", "channel_scale"):
                ours, theirs = getattr(packed, kind), getattr(other, f"kernel_{kind}")
                assert (ours is None) == (theirs is None) and (ours is None or ours.dtype == theirs.dtype), (name, kind)
    assert len(of) == 14


def test_larger_batches_need_more_kernels(folder):
    one, many = (engine_kernels(folder, GPUS["h200"], scheme="w4a16_g64", max_concurrent=count) for count in (1, 64))
    assert len(many) > len(one) and all(kernel in many for kernel in one)
    assert len({repr(kernel) for kernel in many}) == len(many), "each once"


def test_experts(tmp_path):
    tiny_experts("qwen3_moe").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert names(tmp_path, "h200", scheme="w4a16_g32") >= ALWAYS | {"expert_ring_gemm", "expert_mma_gemm", "route_tokens"}


def test_models_without_kernels_are_refused(tmp_path):
    tiny_experts("deepseek_v2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no kernels to compile, Transformers computes it: DeepseekV2"):
        engine_kernels(tmp_path, GPUS["h200"], scheme="w4a16_g32")


def test_a_gpu_that_is_too_small_is_refused(folder):
    """On the simulated GPU, as on the GPU itself, the cache gets the memory that the weights leave."""
    small = replace(GPUS["h200"], total_memory=10_000)
    with pytest.raises(ValueError, match="a request of 128 tokens takes"):
        engine_kernels(folder, small)


def with_the_file(folder: str, path: str) -> None:
    """Runs in its own process with an empty cache of Triton."""
    from lowbit.kernels.parts.compile import compile_one, misses
    from lowbit.kernels.parts.gluon import compiling_for

    KernelFile.open(Path(path)).install(90)
    kernels = engine_kernels(folder, GPUS["h200"], max_concurrent=1)
    with compiling_for(90), misses() as compiled:
        for kernel in kernels:
            compile_one(kernel)
    assert compiled == [] and len(kernels) > 15, compiled


@needs_compiler
def test_the_command_compiles_all_kernels_of_a_model(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    result = run(folder, "--gpu", "h200", "--max-concurrent", 1)
    assert result.exit_code == 0, result.stderr
    path = folder / "kernels-h200.lowbit"
    assert f"wrote {path}: " in result.stderr and "kernels of" in result.stderr
    file = KernelFile.open(path)
    assert file.model == {"name": folder.name, "max_concurrent": 1, "kv": "16"}
    assert file.gpus == {"H200": 90} and is_trusted(path)
    code = f"from tests.pipeline.test_kernels import with_the_file; with_the_file({str(folder)!r}, {str(path)!r})"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "empty")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    path.unlink()
    assert done.returncode == 0, done.stderr


def test_wrong_arguments_are_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ((folder,), "this machine has no GPU, so name one or several to compile for: --gpu h100,h200,a100,l40s,5090"),
        ((folder, "--gpu", "h100,v100"), "--gpu v100: is not known, the GPUs are h100, h200, a100, l40s, 5090"),
        ((folder, "--gpu", "h100", "-o", tmp_path / "no" / "x.lowbit"), "create it first"),
        ((folder, "--gpu", "h100", "--scheme", "w99"), "w99"),
        ((tmp_path / "missing", "--gpu", "h100"), "missing"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1 and message in result.stderr and len(result.stderr.splitlines()) <= 2, result.stderr


def on_the_gpu(folder: str, path: str) -> None:
    """Runs in its own process with an empty cache of Triton and no C compiler."""
    from lowbit.kernels.parts.compile import misses
    from lowbit.pipeline import pipeline

    with misses() as compiled:
        pipe = pipeline(folder, scheme="w4a16_g64", kernels=path, max_concurrent=4)
        for _ in pipe.engine.warm_up():
            pass
        greedy = pipe(["abc", "The quick brown fox " * 5], max_new_tokens=8, do_sample=False, ignore_eos=True)
        pipe(["abc"] * 4, max_new_tokens=8, do_sample=True, seed=0, ignore_eos=True)
    assert compiled == [], compiled
    assert all(len(response.generated_text) for response in greedy)


@pytest.mark.gpu
@needs_compiler
def test_a_gpu_compiles_nothing(folder, tmp_path, monkeypatch):
    """The kernels that were found without a GPU are all that a start and requests launch, and no C compiler is needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    path, gpu = tmp_path / "here.lowbit", present_gpu()
    named = [name for name, known in GPUS.items() if known.product == gpu.product]
    options = ["--gpu", named[0]] if named else []
    result = run(folder, "-o", path, "--scheme", "w4a16_g64", "--max-concurrent", 4, *options)
    assert result.exit_code == 0, result.stderr
    code = f"from tests.pipeline.test_kernels import on_the_gpu; on_the_gpu({str(folder)!r}, {str(path)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "empty"), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
