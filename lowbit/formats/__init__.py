"""What a code means: number formats, their codec, granularities, schemes and the quantized tensor. Pure torch."""

from lowbit.formats.codec import decode, encode
from lowbit.formats.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    scale_shape,
    spread,
)
from lowbit.formats.hadamard import BLOCKS, check_block, rotate_blocks
from lowbit.formats.input_transform import IDENTITY, NO_PARTS, InputParts, InputTransform, is_permutation
from lowbit.formats.number import (
    FloatFormat,
    IntFormat,
    NumberFormat,
    code_values,
    float_format,
    int_format,
    number_format,
    uint_format,
)
from lowbit.formats.scheme import ALIASES, ActivationRule, Scheme, ZeroPoint, parse_scheme
from lowbit.formats.tensor import LowRank, QuantTensor
from lowbit.formats.words import pack_words, packed_bytes, unpack_words

__all__ = [
    "ALIASES",
    "BLOCKS",
    "IDENTITY",
    "NO_PARTS",
    "ActivationRule",
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
    "PerToken",
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
