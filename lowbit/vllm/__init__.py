"""vLLM's plug-in. With it vLLM serves lowbit's checkpoints; on request it also serves 16-bit checkpoints and those of other
tools with lowbit's kernels.

vLLM calls `register` in each of its processes, through the entry point "vllm.general_plugins". Modules in the order of use:

    quantization    which matrices make up a layer of vLLM, and what is refused    (vLLM's QuantizationConfig)
    sources         the matrices that a `quantization_config` describes
    matrices        the tensors of one matrix in the files
    loading         collects these tensors and keeps this rank's shard (formats/split.py)
    product         multiplies x by the matrices of a layer
    methods         create, load, process, apply                                   (vLLM's linear and embedding methods)
    experts         the tensors of the experts of a layer, this rank's part, and the product
    expert_method   create, load, process, apply                                   (vLLM's method of experts)
    loader_patches  checks for missing weights, renames experts, compiles kernels (vLLM's loader of files)
    warm_up         compiles the kernels of a layer

`quantization`, `methods`, `expert_method` and `loader_patches` import vLLM. This module imports nothing until `register` is
called.
"""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 25, 1), (0, 33)
"""Oldest supported version of vLLM, and newest supported minor release."""


def version_refusals(version: str) -> tuple[str, ...]:
    """Returns why a version of vLLM is not supported; empty if it is."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    if numbers >= OLDEST and numbers[:2] <= NEWEST:
        return ()
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return (f"lowbit supports vLLM {oldest} to {newest}, installed is {version}: pip install vllm~={newest}.0",)


def register() -> None:
    """Registers the method "lowbit" with the vLLM of this process; may be called repeatedly.

    With an unsupported version of vLLM, the error is raised only when a checkpoint uses the method
    (`LowbitQuantization.from_config`). Other checkpoints load as without the plug-in.
    """
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from lowbit.vllm.quantization import METHOD, LowbitQuantization
    except ImportError as error:  # a vLLM without these names raises its own error if a checkpoint uses the method
        import logging

        logging.getLogger(__name__).debug("the method lowbit is not registered with this vLLM: %s", error)
        return
    register_quantization_config(METHOD)(LowbitQuantization)
