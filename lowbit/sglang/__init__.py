"""SGLang's plug-in, experimental: its server takes checkpoints of ours.

SGLang calls `register` in each of its processes, by the entry point "sglang.srt.plugins"; a checkpoint asks for the method by
itself. Matrices are collected, split and multiplied by `lowbit.vllm`, whose interface of linear layers SGLang shares.
"""

from __future__ import annotations


def register() -> None:
    """Makes the method "lowbit" known to the SGLang of this process, as often as it is called, and whatever that SGLang is:
    whoever serves other checkpoints is not concerned."""
    from lowbit.checkpoint.schema import METHOD

    try:
        from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from lowbit.sglang.methods import LowbitSGLang
    except ImportError as error:  # an SGLang without these names, whose own error follows if the method is asked for
        import logging

        logging.getLogger(__name__).debug("the method lowbit is not registered with this SGLang: %s", error)
        return
    QUANTIZATION_METHODS[METHOD] = LowbitSGLang
    if METHOD not in QUANTIZATION_CHOICES:
        QUANTIZATION_CHOICES.append(METHOD)
