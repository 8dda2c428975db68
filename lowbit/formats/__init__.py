"""Number formats, their codec, granularities, schemes and the quantized tensor, in plain torch.

Schemes, number formats and granularities need no torch; the other names import it on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lowbit.formats.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, scale_shape, spread
from lowbit.formats.number import FloatFormat, IntFormat, NumberFormat, float_format, int_format, number_format, uint_format
from lowbit.formats.scheme import ALIASES, GRAMMAR, ActivationRule, Scheme, ZeroPoint, parse_scheme

if TYPE_CHECKING:
    from lowbit.formats.codec import code_values, decode, encode
    from lowbit.formats.expert import ExpertTensor
    from lowbit.formats.hadamard import BLOCKS, check_block, rotate_blocks
    from lowbit.formats.input_transform import IDENTITY, NO_PARTS, InputParts, InputTransform, is_permutation
    from lowbit.formats.tensor import LowRank, QuantTensor
    from lowbit.formats.words import pack_words, packed_bytes, unpack_words

__all__ = [
    "ALIASES",
    "BLOCKS",
    "GRAMMAR",
    "IDENTITY",
    "NO_PARTS",
    "ActivationRule",
    "ExpertTensor",
    "FloatFormat",
    "Granularity",
    "InputParts",
    "InputTransform",
    "IntFormat",
    "LowRank",
    "NumberFormat",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "QuantTensor",
    "Scheme",
    "ZeroPoint",
    "check_block",
    "code_values",
    "decode",
    "encode",
    "float_format",
    "int_format",
    "is_permutation",
    "number_format",
    "pack_words",
    "packed_bytes",
    "parse_scheme",
    "rotate_blocks",
    "scale_shape",
    "spread",
    "uint_format",
    "unpack_words",
]

_WITH_TORCH = {
    "codec": ("code_values", "decode", "encode"),
    "expert": ("ExpertTensor",),
    "hadamard": ("BLOCKS", "check_block", "rotate_blocks"),
    "input_transform": ("IDENTITY", "NO_PARTS", "InputParts", "InputTransform", "is_permutation"),
    "tensor": ("LowRank", "QuantTensor"),
    "words": ("pack_words", "packed_bytes", "unpack_words"),
}
_HOMES = {name: module for module, names in _WITH_TORCH.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowbit.formats' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"lowbit.formats.{_HOMES[name]}"), name)
    return value
