"""`lowbit explain`: follows one weight through the library, from its bits on disk to the tensor core's register.

origin.py      the bytes in the file, the code that rounding chose, and its value
registers.py   the register, the packed words and the conversion, for 16-bit activations
kernels.py     the kernels and tiles, the weight's place in them, and the operand of 8-bit kernels
"""

from __future__ import annotations

from pathlib import Path

from lowbit.explain.kernels import cpu_stage, in_kernels, kernels_stage, machine_for, quantized_input_stages
from lowbit.explain.origin import PathStage, expert_stage, from_16_bit, from_quantized, value_stage
from lowbit.explain.registers import register_stages
from lowbit.hardware.machine import typical_machine
from lowbit.hardware.mma import MMA_M16N8K16_F16, wgmma_f16
from lowbit.models.source import resolve

__all__ = ["PathStage", "explain", "render"]


def explain(
    checkpoint: str | Path,
    layer: str | None = None,
    row: int = 0,
    column: int = 0,
    *,
    scheme: str | None = None,
    sm: int = 90,
) -> list[PathStage]:
    """Returns the path of weight [row, column] of a quantized layer, to the tensor cores of SM version `sm`.

    `column` indexes the codes; with an act-order permutation it multiplies another channel of x. `layer` None is the first
    layer. The weights of one expert are named `model.layers.0.mlp.experts.5.gate_up_proj`; without a number they are those of
    expert 0. With a `scheme`, the checkpoint is a 16-bit one and the weight is rounded to nearest first.

    Raises CheckpointError for the wrong kind of checkpoint, ValueError for an unknown layer, index, scheme or SM version.
    """
    atom = wgmma_f16(64) if "wgmma" in typical_machine(sm).arch.features else MMA_M16N8K16_F16
    with resolve(checkpoint).reader() as reader:
        if scheme is None:
            weight, origin = from_quantized(reader, layer, row, column)
        else:
            weight, origin = from_16_bit(reader, layer, row, column, scheme)
    if weight.q.scheme.activation is not None:
        return [*origin, value_stage(weight), *expert_stage(weight), *quantized_input_stages(weight, sm)]
    return [
        *origin,
        value_stage(weight),
        *expert_stage(weight),
        *register_stages(weight, atom, sm),
        kernels_stage(weight, machine_for(sm)),
        *in_kernels(weight, machine_for(sm)),
        cpu_stage(weight.q),
    ]


def render(stages: list[PathStage]) -> str:
    """Returns the stages as text."""
    blocks = []
    for number, stage in enumerate(stages, 1):
        blocks.append("\n".join([f"{number}. {stage.file}  {stage.what}", *(f"     {line}" for line in stage.lines)]))
    return "\n\n".join(blocks)
