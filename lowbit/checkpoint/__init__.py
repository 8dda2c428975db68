"""Where weights come from: checkpoints on disk.

The library's own checkpoint is a Transformers folder (config.json, tokenizer files) whose quantized layers have, instead
of `<layer>.weight`,

    <layer>.weight_packed   uint8 [N, ceil(K * bits / 8)]   codes, dense little-endian (formats/words.py)
    <layer>.weight_scale    float [scale_shape]             float32 per channel or tensor; fp16 or bf16 per group or block
    <layer>.weight_zero     uint8 or float [scale_shape]    with zero points only
    <layer>.weight_order    int32 [K]                       only where the layer's entry says "order": true
    <layer>.pre_quant_scale float [K]                       only where the layer's entry says "pre_quant_scale": true
    <layer>.weight_up       fp16 [N, r]                     only where the layer's entry says "low_rank": r, and
    <layer>.weight_down     fp16 [r, K]                     so this; up . down is added to the weight

in `model.safetensors`, or in shards with `model.safetensors.index.json`. Biases and all other tensors keep their names.
Files from before the first release have `input_scale` for pre_quant_scale, as the key and as the tensor; they are read.
`quantization_config` in config.json lists every quantized layer with its shape, so that each file can be checked before
anything is used:

    {"quant_method": "lowbit", "format_version": 2, "scheme": "w6e3m2a16", "method": {"name": "rtn", "search": "max"},
     "modules_to_not_convert": ["lm_head"],
     "layers": {"model.layers.0.self_attn.q_proj": {"shape": [576, 576]}, ...},
     "files": {"model.safetensors": {"sha256": "64 hexadecimal digits"}}, "sha256": "64 hexadecimal digits"}

A layer with another scheme than the default states it; one whose input is to be rotated has "hadamard": B, the channels of a
block (`formats/hadamard.py`). `tied` maps modules to the layer whose tensors they share, `rotation` is the seed of rotations
that the weights took up before (`models/rotate.py`) and means nothing to a reader. `files` has the checksum of every file of
tensors, and `sha256` that of this object without it (`schema.manifest_sha256`); both are absent where Transformers wrote the
files. A reader refuses keys that it does not know, and a `format_version` other than its own with the advice to update: a
release that adds a key raises the version and reads the older ones too. Version 1 has neither `method` nor `calibration`, which
record how the weights were quantized (`schema.Manifest`) and mean nothing to a reader.

Beside `quantization_config`, config.json states `transformers_weights`: a sentence where Transformers expects the name of a
file, so that it refuses the folder where lowbit is not imported (`schema.GUARD`). README.md is the model card (card.py).
"""

from lowbit.checkpoint.detect import ForeignReader, detect
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.gguf import GgufReader
from lowbit.checkpoint.reader import CheckpointReader, TensorInfo
from lowbit.checkpoint.schema import CheckpointError, LayerEntry, Manifest, expected_tensors, layer_tensors, quant_tensor
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
    "layer_tensors",
    "quant_tensor",
]
