"""SGLang's plug-in, experimental: its server loads lowbit's checkpoints.

SGLang calls `register` in each of its processes, through the entry point "sglang.srt.plugins". The modules of `lowbit.vllm`
load, split and multiply the matrices, since SGLang has the same interface for linear layers.
"""

from __future__ import annotations


def register() -> None:
    """Registers the method "lowbit" with the SGLang of this process; may be called repeatedly, and never raises."""
    from lowbit.checkpoint.schema import METHOD

    try:
        from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from lowbit.sglang.methods import LowbitSGLang
    except ImportError as error:  # an SGLang without these names raises its own error if a checkpoint uses the method
        import logging

        logging.getLogger(__name__).debug("the method lowbit is not registered with this SGLang: %s", error)
        return
    QUANTIZATION_METHODS[METHOD] = LowbitSGLang
    if METHOD not in QUANTIZATION_CHOICES:
        QUANTIZATION_CHOICES.append(METHOD)
