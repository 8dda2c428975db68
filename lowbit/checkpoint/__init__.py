"""Reads and writes checkpoints: lowbit's own and those of other tools.

The library's own checkpoint is a Transformers folder (config.json, tokenizer files) whose quantized layers have, instead
of `<layer>.weight`,

    <layer>.weight_packed   uint8 [N, ceil(K * bits / 8)]   codes, dense little-endian (formats/words.py)
    <layer>.weight_scale    float [scale_shape]             float32 per channel or tensor; fp16 or bf16 per group or block
    <layer>.weight_zero     uint8 or float [scale_shape]    with zero points only
    <layer>.weight_order    int32 [K]                       only where the layer's entry says "order": true
    <layer>.pre_quant_scale float [K]                       only where the layer's entry says "pre_quant_scale": true
    <layer>.weight_up       fp16 [N, r]                     both only where the layer's entry says "low_rank": r;
    <layer>.weight_down     fp16 [r, K]                     the product up . down is added to the weight

The weights of the experts of a layer are one entry under the name of the model's parameter, such as
`model.layers.0.mlp.experts.gate_up_proj`. Its "shape" is [E, N, K], which older releases refuse; weight_packed,
weight_scale and weight_zero have a leading dimension E, and all experts share the weight_order and the pre_quant_scale. N is
the number of outputs of one expert and K that of its inputs, also for models that store the transposed matrix. Rows keep the
model's order (gpt-oss: gate and up alternate). Experts have no weight_up and weight_down. Biases keep their names.

All are in `model.safetensors`, or in shards with `model.safetensors.index.json`. Biases and all other tensors keep their names.
Files from before the first release call pre_quant_scale `input_scale` (key and tensor); they are still read.
`quantization_config` in config.json lists every quantized layer with its shape, so that all files are checked before use:

    {"quant_method": "lowbit", "format_version": 2, "scheme": "w6e3m2a16", "method": {"name": "rtn", "search": "max"},
     "modules_to_not_convert": ["lm_head"],
     "layers": {"model.layers.0.self_attn.q_proj": {"shape": [576, 576]}, ...},
     "files": {"model.safetensors": {"sha256": "64 hexadecimal digits"}}, "sha256": "64 hexadecimal digits"}

- A layer states its scheme if it is not the default. A layer with a rotated input has "hadamard": B, the block size in
  channels (`formats/hadamard.py`).
- `tied` maps modules to the layer whose tensors they share. `rotation` is the seed of the rotations folded into the weights
  (`models/rotate.py`); readers ignore it.
- `files` has the checksum of every tensor file, `sha256` that of this object without the key (`schema.manifest_sha256`). Both
  are absent if Transformers wrote the files.
- `method` and `calibration` record how the weights were quantized (`schema.Manifest`); readers ignore them. Version 1 has
  neither.
- A reader refuses unknown keys and unknown values of `format_version`. A release that adds a key increases the version and
  still reads the older ones.

config.json also has `transformers_weights`: an error message in place of a file name, so that Transformers without lowbit
refuses the folder (`schema.GUARD`). README.md is the model card (card.py).
"""

from lowbit.checkpoint.detect import ForeignReader, detect
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.gguf import GgufReader
from lowbit.checkpoint.reader import CheckpointReader, TensorInfo
from lowbit.checkpoint.schema import (
    CheckpointError,
    LayerEntry,
    Manifest,
    expected_tensors,
    expert_tensor,
    layer_tensors,
    quant_tensor,
)
from lowbit.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "ForeignEntry",
    "ForeignReader",
    "GgufReader",
    "LayerEntry",
    "Manifest",
    "TensorInfo",
    "detect",
    "expected_tensors",
    "expert_tensor",
    "layer_tensors",
    "quant_tensor",
]
