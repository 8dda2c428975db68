"""Builds a wheel of compiled kernels, `lowbit-kernels-sm90`, which lowbit finds by itself when it is installed.

The wheel holds a kernels file (kernels/kernel_file.py) for GPUs of one architecture: the kernels of the decode engine and the
plain products of common formats, for the shapes of known models. A kernel is compiled for a tile, not for a shape, so other
models of similar sizes find most of their kernels too. Its entry point in the group "lowbit.kernels" names the architecture.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import triton
from packaging.tags import sys_tags
from transformers import AutoConfig, PreTrainedConfig

from lowbit._version import __version__
from lowbit.engine.kernels import GROUP, INSTALLED
from lowbit.export.library import launches_on
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import GPU
from lowbit.kernels.kernel_file import write_kernel_file
from lowbit.kernels.parts.launch import RecordedKernel
from lowbit.pipeline.kernels import config_kernels

SCHEMES = ("w4a16_g128", "w4a16_g128_z", "w6e3m2a16", "w8a16", "w8a8", "fp8_dynamic")
"""Formats of the wheel: int4 as lowbit and as AWQ and GPTQ store it, FP6, int8, and both kinds of 8-bit activations."""

STOP_TOKENS = (1, 2, 3)
"""How many stop tokens the models and their instruction-tuned variants have. Sampling kernels are compiled for each number."""

_LLAMA: dict[str, object] = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}

_SIZES: dict[str, tuple[str, int, int, int, int, int, int, int, dict[str, object]]] = {
    # model_type, hidden, heads, kv heads, head_dim, intermediate, vocabulary, positions, other options
    "Llama-2-7B": ("llama", 4096, 32, 32, 128, 11008, 32000, 4096, _LLAMA),
    "Llama-2-13B": ("llama", 5120, 40, 40, 128, 13824, 32000, 4096, _LLAMA),
    "Llama-3-8B": ("llama", 4096, 32, 8, 128, 14336, 128256, 131072, _LLAMA),
    "Llama-3-70B": ("llama", 8192, 64, 8, 128, 28672, 128256, 131072, _LLAMA),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 4, 128, 18944, 152064, 32768, {}),
    "Qwen2.5-32B": ("qwen2", 5120, 40, 8, 128, 27648, 152064, 32768, {}),
    "Qwen3-8B": ("qwen3", 4096, 32, 8, 128, 12288, 151936, 40960, {}),
    "Qwen3-30B-A3B": (
        "qwen3_moe", 2048, 32, 4, 128, 6144, 151936, 40960,
        {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "Mistral-Small-24B": ("mistral", 5120, 32, 8, 128, 32768, 131072, 32768, {"sliding_window": None}),
    "Mixtral-8x7B": (
        "mixtral", 4096, 32, 8, 128, 14336, 32000, 32768, {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Gemma-2-9B": ("gemma2", 3584, 16, 8, 256, 14336, 256000, 8192, {}),
    "SmolLM2-135M": ("llama", 576, 9, 3, 64, 1536, 49152, 8192, {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
}  # fmt: skip

MODELS = tuple(_SIZES)
"""Models whose shapes the wheel has, by name."""


def config_of(model: str) -> PreTrainedConfig:
    """Returns the configuration of a model of `MODELS`, with two layers. Raises ValueError with the known names."""
    if model not in _SIZES:
        raise ValueError(f"models are {', '.join(MODELS)}; got {model!r}")
    kind, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, positions, others = _SIZES[model]
    config = AutoConfig.for_model(
        kind, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        intermediate_size=intermediate, vocab_size=vocabulary, max_position_embeddings=positions, num_hidden_layers=2, **others,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    return config


def shapes_of(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Returns (N, K) of the joined projections of a dense model: qkv, o, gate-up, down."""
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return [(heads + 2 * kv_heads, hidden), (hidden, heads), (2 * intermediate, hidden), (hidden, intermediate)]


def wheel_kernels(
    gpu: GPU, configs: Iterable[PreTrainedConfig], schemes: Sequence[str], max_concurrent: int = 64
) -> list[RecordedKernel]:
    """Returns the kernels of a wheel on a GPU, for each configuration and scheme: those of the decode engine, and those of the
    plain products with bf16 x of up to 4,096 tokens, which the vLLM plug-in and `lowbit.convert` launch. Combinations that the
    engine does not compute, such as experts in a format without kernels, are left out."""
    found: dict[str, RecordedKernel] = {}
    for config in configs:
        for number, scheme in enumerate(schemes):
            kernels: list[RecordedKernel] = []
            with contextlib.suppress(ValueError):
                for count in STOP_TOKENS if number == 0 else STOP_TOKENS[:1]:  # sampling does not depend on the scheme
                    kernels += config_kernels(config, gpu, scheme=scheme, max_concurrent=max_concurrent, stop_tokens=count)
            parsed = parse_scheme(scheme)
            if parsed.activation is None:
                launches = launches_on(gpu, parsed, shapes_of(config), torch.bfloat16)
                kernels += [launch.recorded for launch in launches]
            found.update((repr(kernel), kernel) for kernel in kernels)
    return [*found.values()]


def build_wheel(
    folder: Path, gpus: Sequence[GPU], models: Sequence[str] = MODELS, schemes: Sequence[str] = SCHEMES, *,
    max_concurrent: int = 64, progress: Callable[[str, int, int], object] = lambda what, done, total: None,
    processes: int | None = None,
) -> Path:  # fmt: skip
    """Builds `lowbit-kernels-sm<NN>` for GPUs of one architecture into a folder; returns the wheel's path.

    progress: called with (what, done, total). Raises ValueError for GPUs of several architectures, unknown models or schemes,
    and without a C compiler.
    """
    if len({gpu.sm for gpu in gpus}) != 1:
        raise ValueError(f"a wheel is for one architecture, got {', '.join(f'{gpu.product} (sm_{gpu.sm})' for gpu in gpus)}")
    sm, configs = gpus[0].sm, [config_of(model) for model in models]
    kernels = {}
    for number, gpu in enumerate(gpus):
        progress(f"finding kernels of {gpu.product}", number, len(gpus))
        kernels[gpu] = wheel_kernels(gpu, configs, schemes, max_concurrent)
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / INSTALLED
        stated = {"name": f"lowbit-kernels-sm{sm}", "models": list(models), "schemes": list(schemes)}
        for done, total in write_kernel_file(file, kernels, stated, processes):
            progress("compiling kernels", done, total)
        return _write(folder, sm, file.read_bytes())


def _write(folder: Path, sm: int, kernels: bytes) -> Path:
    """Writes a wheel (PyPA's specification of binary distributions) with a kernels file; returns its path."""
    package = f"lowbit_kernels_sm{sm}"
    tag = next(sys_tags())  # this Python and at least this glibc, as the kernels file
    about = f"{package}-{__version__}.dist-info"
    requires = f"Requires-Dist: lowbit=={__version__}\nRequires-Dist: triton=={triton.__version__.partition('+')[0]}\n"
    described = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {__version__}\n"
    summary = f"Summary: Compiled kernels of lowbit for GPUs of compute capability {sm // 10}.{sm % 10}\nLicense: Apache-2.0\n"
    members = {
        f"{package}/__init__.py": f'"""Compiled kernels of lowbit {__version__}, in {INSTALLED}."""\n'.encode(),
        f"{package}/{INSTALLED}": kernels,
        f"{about}/METADATA": (described + summary + requires).encode(),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: lowbit {__version__}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{about}/entry_points.txt": f"[{GROUP}]\nsm{sm} = {package}\n".encode(),
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in members.items())
    members[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n".encode()
    target = folder / f"{package}-{__version__}-{tag}.whl"
    unfinished = target.with_suffix(".unfinished")
    with zipfile.ZipFile(unfinished, "w") as archive:
        for name, data in members.items():  # the kernels file is compressed already
            archive.writestr(zipfile.ZipInfo(name), data)
    return unfinished.replace(target)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
