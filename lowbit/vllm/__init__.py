"""vLLM's plug-in: its server and its engine take our checkpoints, and our kernels for 16-bit and other tools' ones on request.

vLLM calls `register` in each of its processes, by the entry point "vllm.general_plugins". A matrix of a checkpoint walks down

    quantization    which matrices make up a layer of vLLM, and what is refused    (vLLM's QuantizationConfig)
    matrices        the tensors of one matrix in the files, and what they mean
    loading         collects them as vLLM hands them out, and keeps this rank's part (formats/split.py)
    product         multiplies the parts that a layer is made of
    methods         what vLLM calls: create, load, process, apply                  (vLLM's linear and embedding methods)
    complete        what else of a model no file filled                            (vLLM's loader of files)

Modules that import vLLM are `quantization`, `methods` and `complete`; this one imports nothing else until `register` is called.
"""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 25, 1), (0, 33)
"""Versions of vLLM that are supported: from the first to any of the second."""


def version_refusals(version: str) -> tuple[str, ...]:
    """Why a version of vLLM is not supported; empty if it is."""
    found = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    if found >= OLDEST and found[:2] <= NEWEST:
        return ()
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return (f"lowbit supports vLLM {oldest} to {newest}, installed is {version}: pip install vllm~={newest}.0",)


def register() -> None:
    """Makes the method "lowbit" known to the vLLM of this process; as often as it is called, and whatever that vLLM is.

    A version that is not supported says so when a checkpoint asks for the method (`LowbitQuantization.from_config`), and
    nothing before: whoever serves other checkpoints is not concerned.
    """
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from lowbit.vllm.quantization import METHOD, LowbitQuantization
    except ImportError as error:  # a vLLM without these names: its own error for an unknown method follows, if one is asked for
        import logging

        logging.getLogger(__name__).debug("the method lowbit is not registered with this vLLM: %s", error)
        return
    register_quantization_config(METHOD)(LowbitQuantization)
