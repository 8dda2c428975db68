"""Finds the kernels that a model needs on a GPU, without that GPU, and compiles them into a kernels file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lowbit.engine import Engine
from lowbit.engine.cache import SHARE
from lowbit.hardware.machine import GPU
from lowbit.kernels.kernel_file import write_kernel_file
from lowbit.kernels.parts.launch import RecordedKernel, recording
from lowbit.models import numerics
from lowbit.models.head import SCHEME
from lowbit.models.skeleton import tokenizer_of
from lowbit.models.source import resolve
from lowbit.models.weightless import weightless_model, weightless_of_config
from lowbit.nn.linear import make_batch_invariant
from lowbit.ops.simulated_gpu import simulated_gpu
from lowbit.pipeline.pipeline import Pipeline


def compile_kernels(
    model: str | Path,
    target: Path,
    gpus: Sequence[GPU],
    *,
    progress: Callable[[int, int], object] = lambda done, total: None,
    **options: Any,
) -> int:
    """Compiles the kernels that a pipeline over a model needs on each GPU into the file `target`; returns their number.

    options: keyword arguments of `engine_kernels`. progress: called with (done, total) before each kernel. Raises ValueError
    where `engine_kernels` does, and if there is no C compiler.
    """
    kernels = {gpu: engine_kernels(model, gpu, **options) for gpu in gpus}
    stated = {"name": Path(str(model)).name, **{name: value for name, value in options.items() if value}}
    for done, total in write_kernel_file(target, kernels, stated):
        progress(done, total)
    return sum(map(len, kernels.values()))


def engine_kernels(
    model: str | Path, gpu: GPU, *, scheme: str | None = None, batch_invariant: bool = False, max_concurrent: int = 64,
    cache_bytes: int | None = None, kv: str = "16", speculate: int = 0, lora: Mapping[str, str | Path] | None = None,
) -> list[RecordedKernel]:  # fmt: skip
    """Returns every kernel that a pipeline over a model can launch on `gpu`. Some kernels pack its weights; its engine launches
    the others, for any batch size, any prompt and any way of sampling.

    Arguments as for `pipeline`. Raises ValueError for models that the engine does not compute by its own kernels, and for a GPU
    whose memory does not hold the weights and one request.
    """
    with simulated_gpu(gpu), recording() as kernels:
        source = resolve(model)
        built = weightless_model(source, scheme, SCHEME)
        if batch_invariant:
            make_batch_invariant(built, built.dtype)
        numerics.launch_experts(built)
        if cache_bytes is None:
            cache_bytes = _free_bytes(built, gpu)
        pipe = Pipeline(
            built, tokenizer_of(source.path, built), engine=True, batch_invariant=batch_invariant,
            max_concurrent=max_concurrent, cache_bytes=cache_bytes, kv=kv, speculate=speculate, lora=lora,
        )  # fmt: skip
        if reasons := pipe.refusals or pipe.engine.program.reasons:
            raise ValueError(f"{model}: has no kernels to compile, Transformers computes it: {'; '.join(reasons)}")
        of_steps = pipe.engine.runner.all_kernels()
    return [*kernels, *(kernel for kernel in of_steps if kernel not in kernels)]


def config_kernels(
    config: PreTrainedConfig, gpu: GPU, *, scheme: str, max_concurrent: int = 64, stop_tokens: int = 1
) -> list[RecordedKernel]:
    """Returns the same kernels as `engine_kernels`, for a model of which only the configuration is known. Kernels of sampling
    are compiled for `stop_tokens` stop tokens. Two layers in `config` suffice, since further layers launch the same kernels.

    Raises ValueError for models that the engine does not compute by its own kernels.
    """
    with simulated_gpu(gpu), recording() as kernels:
        built = weightless_of_config(config, scheme, SCHEME)
        cache_bytes = _free_bytes(built, gpu)
        engine = Engine(built, max_concurrent=max_concurrent, cache_bytes=cache_bytes, stop_token_ids=range(stop_tokens))
        if reasons := engine.program.reasons:
            raise ValueError(f"{config.model_type}: has no kernels to compile, Transformers computes it: {'; '.join(reasons)}")
        of_steps = engine.runner.all_kernels()
    return [*kernels, *(kernel for kernel in of_steps if kernel not in kernels)]


def _free_bytes(model: PreTrainedModel, gpu: GPU) -> int:
    """Returns the bytes that the engine takes for keys and values on a GPU that holds only the model's weights."""
    weights = [*model.parameters(), *model.buffers()]
    return int(SHARE * max(gpu.total_memory - sum(tensor.nbytes for tensor in weights), 0))
